"""The types that type checkers see: mypy and pyright check this file. What happens with wrong
arguments is in the other files.

Each line with ``type: ignore`` is one that both of them must refuse: they report a comment that is
not needed.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from delayq import Offer, ReliableQueue, Task, Tasks, Worker
from delayq.tasks import INJECTED, Call
from delayq.testing import eager, recorded

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from delayq import Message

tasks = Tasks("mails", lease=30, max_attempts=3)


@tasks.task(max_attempts=5, timeout=30)
async def send_mail(to: str, subject: str = "hi") -> int:
    return len(to + subject)


@tasks.task
def add(a: int, *, b: int = 1, message: Message[Any] = INJECTED) -> int:
    return a + b


@tasks.task(name="nothing")
async def do_nothing() -> None: ...


async def test_calls_offers_and_results_have_the_types_of_the_function() -> None:
    running: Coroutine[Any, Any, int] = send_mail("ada", subject="later")
    assert_type(await running, int)
    message: Any = None
    assert_type(add(1, b=2, message=message), int)
    with recorded(tasks) as offers:
        assert_type(await send_mail.offer("ada", subject="later"), str)
        assert_type(await send_mail.options(delay=3, id="a").offer("ada"), str)
        assert_type(await add.options(priority=1).options(ttl=60).offer(1, b=2), str)
        assert_type(add.offer_sync(1), str)
        assert_type(send_mail.to_offer("ada"), Offer[Call])
        many = [send_mail.to_offer("ada"), add.options(delay=1).to_offer(1)]
        assert_type(await tasks.offer_many(many), list[str])
    assert_type(offers, list[Offer[Call]])
    assert_type(offers[0].value.task, str)
    with eager(tasks) as offers:
        assert_type(offers, list[Offer[Call]])
        first, second = await send_mail.offer("ada"), await do_nothing.offer()
        assert_type(await send_mail.result(first, timeout=1), int)
        assert_type(send_mail.result_sync(first), int)
        assert_type(await do_nothing.result(second), None)
        assert await send_mail.result(first) == 5
    task: Task[[str, str], Coroutine[Any, Any, int]] = send_mail
    assert task.name == "send_mail"


async def refused(worker: Worker) -> ReliableQueue[Call]:
    """Show what type checkers refuse: this is not called."""
    message: Any = None
    await send_mail()  # type: ignore[call-arg]
    await send_mail("ada", title="later")  # type: ignore[call-arg]
    add("1", message=message)  # type: ignore[arg-type]
    await send_mail.offer()  # type: ignore[call-arg]
    await send_mail.offer(1)  # type: ignore[arg-type]
    await send_mail.offer("ada", "later", "third")  # type: ignore[call-arg]
    await send_mail.options(delay=3).offer("ada", title="b")  # type: ignore[call-arg]
    await do_nothing.offer(1)  # type: ignore[call-arg]
    add.offer_sync("1")  # type: ignore[arg-type]
    add.to_offer(1, 2)  # type: ignore[call-arg,misc,unused-ignore]
    await send_mail.options(delay="3").offer("ada")  # type: ignore[arg-type]
    send_mail.options(dely=3)  # type: ignore[call-arg]
    Tasks("mails", lease="long")  # type: ignore[arg-type]
    tasks.task(timeout="long")  # type: ignore[call-overload]
    worker.include(Tasks("others"))
    worker.include(send_mail)  # type: ignore[arg-type]
    return tasks.queue
