"""The types that type checkers see: mypy and pyright check this file, and it runs as well.

Each line with ``type: ignore`` is one that both of them must refuse: they report a comment that is
not needed.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import pytest

from delayq import BadArguments, BadInput, Offer, ReliableQueue, Task, Tasks, Worker
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


async def test_a_call_has_the_types_of_the_function() -> None:
    running: Coroutine[Any, Any, int] = send_mail("ada", subject="later")
    assert_type(await running, int)
    some: Any = None
    assert_type(add(1, b=2, message=some), int)
    with pytest.raises(TypeError):
        await send_mail()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        await send_mail("ada", title="later")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        add("1", message=some)  # type: ignore[arg-type]


async def test_an_offer_takes_the_arguments_of_the_function() -> None:
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


async def test_an_offer_takes_no_other_arguments() -> None:
    with recorded(tasks) as offers:
        with pytest.raises(BadArguments):
            await send_mail.offer()  # type: ignore[call-arg]
        with pytest.raises(BadArguments):
            await send_mail.offer(1)  # type: ignore[arg-type]
        with pytest.raises(BadArguments):
            await send_mail.offer("ada", "later", "third")  # type: ignore[call-arg]
        with pytest.raises(BadArguments):
            await send_mail.options(delay=3).offer("ada", title="b")  # type: ignore[call-arg]
        with pytest.raises(BadArguments):
            await do_nothing.offer(1)  # type: ignore[call-arg]
        with pytest.raises(BadArguments):
            add.offer_sync("1")  # type: ignore[arg-type]
        with pytest.raises(BadArguments):
            add.to_offer(1, 2)  # type: ignore[call-arg,misc,unused-ignore]
    assert offers == []


async def test_options_have_types() -> None:
    with recorded(tasks):
        with pytest.raises(BadInput):
            await send_mail.options(delay="3").offer("ada")  # type: ignore[arg-type]
        with pytest.raises(BadInput):
            send_mail.options(dely=3)  # type: ignore[call-arg]
    with pytest.raises(BadInput):
        Tasks("mails", lease="long")  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        tasks.task(timeout="long")  # type: ignore[call-overload]


async def test_calls_that_run_at_once_have_types_too() -> None:
    with eager(tasks) as offers:
        assert_type(await send_mail.offer("ada"), str)
    assert_type(offers, list[Offer[Call]])


def test_tasks_fit_where_they_go() -> None:
    worker = Worker("redis://127.0.0.1:1")
    worker.include(Tasks("others"))
    with pytest.raises(AttributeError):
        worker.include(send_mail)  # type: ignore[arg-type]
    task: Task[[str, str], Coroutine[Any, Any, int]] = send_mail
    assert task.name == "send_mail"


def the_queue() -> ReliableQueue[Call]:
    return tasks.queue


async def test_a_result_has_the_type_that_the_function_returns() -> None:
    sums = Tasks("sums")

    @sums.task
    def double(value: int) -> int:
        return value * 2

    with eager(tasks, sums):
        first, second = await send_mail.offer("ada"), await double.offer(1)
        third = await do_nothing.offer()
        assert_type(await send_mail.result(first, timeout=1), int)
        assert_type(send_mail.result_sync(first), int)
        assert_type(await double.result(second), int)
        assert_type(await do_nothing.result(third), None)
        assert await send_mail.result(first) == 5
