"""Tasks on a queue: how they are offered, and how workers call them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable  # noqa: TC003 - the worker reads annotations
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import (
    Backoff,
    BadArguments,
    BadInput,
    Client,
    Closed,
    ConfigurationError,
    EncodeError,
    Message,
    Reject,
    Tasks,
    Worker,
)
from delayq.tasks import INJECTED, Call
from delayq.testing import advance
from tests.support.reliable import claim_one, depths, get
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import until
from tests.support.workers import Settling

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

HOUR = timedelta(hours=1)
NONE = (0, 0, 0, 0)


@dataclass
class Order:
    id: int
    item: str = "book"


class Db:
    pass


@pytest.fixture
def facts() -> list[Any]:
    """Return the list on which tasks note what they have done, in order."""
    return []


@pytest.fixture
def tasks() -> Tasks:
    return Tasks("mails", lease=LEASE, backoff=Backoff.fixed(60))


@pytest.fixture
async def client(server: PrivateServer, tasks: Tasks) -> AsyncIterator[Client]:
    async with delayq.connect(server.url, tasks=[tasks]) as client:
        yield client


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client, concurrency=10, shutdown_timeout=5)


def call(task: str, **arguments: Any) -> dict[str, Any]:
    """Return a call as other programs write it."""
    return {"task": task, "args": arguments}


async def work_off(worker: Worker, *groups: Tasks) -> None:
    """Run the worker until nothing is due."""
    for tasks in groups:
        worker.include(tasks)
    await worker.run(burst=True)


# Offering


async def test_workers_call_what_was_offered(
    tasks: Tasks, client: Client, worker: Worker, facts: list[Any]
) -> None:
    @worker.middleware
    async def around(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        assert message.value.task in ("send_mail", "close")
        await call_next()
        facts.append("after")

    @tasks.task
    async def send_mail(to: str, subject: str = "hi") -> None:
        facts.append((to, subject))

    @tasks.task(aliases=["end"])
    def close(order: Order) -> None:
        facts.append(order)

    await send_mail.offer("ada@example.org", subject="later")
    await close.offer(Order(1))
    await send_mail.offer("bob@example.org")
    # As it was called before.
    await client.reliable_queue("mails").offer(call("end", order={"id": 2}))
    await work_off(worker, tasks)
    assert facts.count("after") == 4
    assert {*map(str, facts)} == {
        "after",
        *map(str, (("ada@example.org", "later"), Order(1), ("bob@example.org", "hi"), Order(2))),
    }
    assert await depths(tasks.queue) == NONE


async def test_options_apply_to_the_message(tasks: Tasks, client: Client) -> None:
    @tasks.task
    async def send_mail(to: str) -> None: ...

    options: dict[str, Any] = {"headers": {"k": "v"}, "priority": 3, "durability": "memory"}
    offered = send_mail.options(delay=30, id="mail-7", **options)
    assert await offered.offer("ada") == "mail-7"
    with pytest.raises(delayq.DuplicateMessage):
        await offered.offer("ada")
    await send_mail.options(id="mail-7", delay=60, on_duplicate="replace", ttl=90).offer("bob")
    message = await get(tasks.queue, "mail-7")
    assert message.value == Call("send_mail", {"to": "bob"})
    assert (message.priority, message.headers) == (0, {})
    assert await tasks.queue.cancel("mail-7")


async def test_nothing_is_stored_of_calls_that_do_not_fit(tasks: Tasks, client: Client) -> None:
    @tasks.task
    async def add(a: int, b: int) -> None: ...

    wrong: Any = "two"
    with pytest.raises(BadArguments):
        await tasks.offer_many([add.to_offer(1, 2), add.to_offer(1, wrong)])
    with pytest.raises(EncodeError, match=r"add\(\), 'b'"):
        await add.offer(1, object())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="takes calls of tasks, not dict"):
        await tasks.queue.offer({"task": "add"})  # type: ignore[arg-type]
    assert await depths(tasks.queue) == NONE


async def test_a_schedule_calls_a_task(
    tasks: Tasks, client: Client, worker: Worker, facts: list[Any]
) -> None:
    @tasks.task
    async def report(of: str) -> None:
        facts.append(of)

    due = await tasks.schedule("daily", report.options(priority=2).to_offer("sales"), every=86_400)
    assert due - await client.server_time() > 23 * HOUR
    (schedule,) = await tasks.queue.schedules()
    assert (schedule.name, schedule.priority) == ("daily", 2)
    await advance(client, 86_400)
    await work_off(worker, tasks)
    assert facts == ["sales"]
    calling: Any = report.offer("sales")
    for offer, words in (
        (report.options(delay=3).to_offer("sales"), "a schedule decides when"),
        (report.options(group="a").to_offer("sales"), "cannot have a group"),
        (calling, r"task\.to_offer"),
    ):
        with pytest.raises(BadInput, match=words):
            await tasks.schedule("daily", offer, every=86_400)
    calling.close()


# Handling


async def test_a_task_is_given_what_it_asks_for(
    tasks: Tasks, client: Client, facts: list[Any]
) -> None:
    worker, db = Worker(client), Db()

    @tasks.task
    async def store(
        key: str, message: Message[Call] = INJECTED, db: Db = INJECTED, *, by: Client = INJECTED
    ) -> None:
        facts.append((key, message.headers, message.attempt, db, by))

    @tasks.task
    def store_in_thread(db: Db = INJECTED, worker: Worker = INJECTED) -> None:
        facts.append((db, worker))

    @tasks.task
    async def note(task: Message[Call] = INJECTED, call: Client = INJECTED) -> None:
        facts.append((task.attempt, call))

    with pytest.raises(ConfigurationError, match="nothing fills the parameter 'db', which is a Db"):
        worker.include(tasks)

    @worker.dependency(once=True)
    def the_db() -> Db:
        return db

    await store.options(headers={"k": "v"}).offer("a")
    await tasks.offer_many([store_in_thread.to_offer(), note.to_offer()], durability="memory")
    await work_off(worker, tasks)
    assert ("a", {"k": "v"}, 1, db, client) in facts
    assert (db, worker) in facts
    assert (1, client) in facts


async def test_sync_tasks_run_in_threads_and_may_offer_more(
    tasks: Tasks, worker: Worker, facts: list[Any]
) -> None:
    @tasks.task
    def first(n: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        facts.append(second.options(id="next").offer_sync(n + 1))

    @tasks.task
    async def second(n: int) -> None:
        # The thread that has offered this may go on later than this begins.
        await until(lambda: facts)
        facts.append(n)

    await first.offer(1)
    await work_off(worker, tasks)
    assert facts == ["next", 2]
    with pytest.raises(ConfigurationError, match="would block the event loop"):
        second.offer_sync(1)


async def test_a_call_that_does_not_fit_its_task_is_a_dead_letter_at_once(
    tasks: Tasks, client: Client, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    @tasks.task
    async def add(a: int, b: int) -> None: ...

    fates: dict[str, tuple[Any, str, str]] = {
        "type": (call("add", a="x", b=1), "bad arguments", "add(), 'a': it is str, not int"),
        "missing": (call("add", a=1), "bad arguments", "add(): missing a required argument: 'b'"),
        "unknown": (call("gone"), "unknown task", "no task is registered as 'gone'"),
        "no call": ({"a": 1}, "undecodable", "TaskCodec cannot decode"),
    }
    queue = client.reliable_queue("mails")
    for name, (value, _, _) in fates.items():
        await queue.offer(value, id=name)
    await work_off(worker, tasks)
    letters = {letter.id: letter for letter in await queue.dead.list()}
    assert letters.keys() == fates.keys()
    for name, (_, reason, error) in fates.items():
        assert (letters[name].reason, letters[name].attempt) == (reason, 1), name
        assert error in (letters[name].error or ""), name
    assert "no task is registered as 'gone'" in caplog.text


# Retries


async def test_attempts_are_limited_for_every_task_and_every_call(
    tasks: Tasks, client: Client, worker: Worker
) -> None:
    """On one queue, whose other tasks have ten."""

    async def fail() -> None:
        raise KeyError

    attempts: dict[str, dict[str, Any]] = {
        "once": {"max_attempts": 1},
        "twelve": {"max_attempts": 12},
        "for ever": {"max_attempts": None},
        "usual": {},
    }
    for name, settings in attempts.items():
        task = tasks.task(name=name, backoff=Backoff.fixed(1), **settings)(fail)
        await task.options(id=name).offer()

    @tasks.task(max_attempts=2, timeout=60, backoff=Backoff.fixed(1))
    async def hangs() -> None:
        await asyncio.sleep(600)

    @tasks.task(max_attempts=1)
    async def settled(message: Message[Call] = INJECTED) -> None:
        await message.nack(error="not now")

    await hangs.options(id="hangs", max_attempts=3, timeout=0.01).offer()
    await settled.options(id="settled").offer()
    worker.include(tasks)
    for _ in range(15):
        await worker.run(burst=True)
        await advance(client, 2)
    dead = {letter.id: (letter.reason, letter.attempt) for letter in await tasks.queue.dead.list()}
    limits = {"once": 1, "twelve": 12, "usual": 10, "hangs": 3, "settled": 1}
    assert dead == {name: ("attempts", limit) for name, limit in limits.items()}
    assert [message.id for message in await tasks.queue.peek()] == ["for ever"]


async def test_a_task_has_its_own_backoff_or_that_of_its_group(
    tasks: Tasks, client: Client, worker: Worker
) -> None:
    @tasks.task(backoff=Backoff.fixed(3600))
    async def slow() -> None:
        raise KeyError

    @tasks.task
    async def usual() -> None:
        raise KeyError

    hasty, patient = Tasks("hasty", max_attempts=1), Tasks("patient", backoff=Backoff.fixed(3600))
    for group in (hasty, patient):
        group.bind(client)
        await group.task(name="usual")(usual.function).options(id="of its group").offer()
    for task in (slow, usual):
        await task.options(id=task.name).offer()
    await work_off(worker, tasks, hasty, patient)
    now = await client.server_time()
    waiting = {message.id: message.due_at - now for message in await tasks.queue.list("delayed")}
    assert timedelta(minutes=50) < waiting["slow"] <= HOUR
    assert timedelta(seconds=50) < waiting["usual"] <= timedelta(minutes=1)
    # Without retries of its own, a task has those of its group.
    assert [letter.id for letter in await hasty.queue.dead.list()] == ["of its group"]
    (message,) = await patient.queue.list("delayed")
    assert message.due_at - now > timedelta(minutes=50)


@pytest.mark.parametrize("calls_lost", [0, 1])
async def test_a_task_whose_last_attempt_was_lost_is_not_called_again(
    tasks: Tasks,
    client: Client,
    server: PrivateServer,
    monkeypatch: pytest.MonkeyPatch,
    calls_lost: int,
) -> None:
    Settling(calls_lost, monkeypatch)

    @tasks.task(max_attempts=1)
    async def once() -> None:
        pytest.fail("it is called")

    # With it, the queue allows more attempts than that task.
    tasks.task(name="usual")(lambda: None)
    await once.offer()
    # The workers that had it are gone. It is not to blame for the first two.
    for attempt in (1, 2, 3):
        async with delayq.connect(server.url) as theirs:
            queue = theirs.reliable_queue(tasks.queue.name, lease=LEASE)
            assert (await claim_one(queue)).attempt == attempt
        await advance(client, LEASE + 1)
    await work_off(Worker(client), tasks)
    (letter,) = await tasks.queue.dead.list()
    assert (letter.reason, letter.attempt) == ("attempts", 4)
    assert "no attempt left" in (letter.error or "")


async def test_a_task_has_its_own_timeout_and_logs_name_the_task(
    tasks: Tasks, worker: Worker, facts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @tasks.task(timeout=0.01, max_attempts=1)
    async def hangs() -> None:
        await asyncio.sleep(60)

    @tasks.task
    async def takes_its_time() -> None:
        await asyncio.sleep(0.05)
        facts.append("in time")

    await hangs.options(id="a").offer()
    await takes_its_time.offer()
    await work_off(worker, tasks)
    assert facts == ["in time"]
    (letter,) = await tasks.queue.dead.list()
    assert letter.reason == "attempts"
    assert (letter.error or "").startswith("TimeoutError: timed out after 0.01 s")
    (record,) = [record for record in caplog.records if vars(record).get("task") == "hangs"]
    outcome = "failed in attempt 1 of 1, and is a dead letter now"
    assert record.message == f"queue 'mails': message 'a', a call of 'hangs', {outcome}"


async def test_a_task_decides_which_errors_are_retried(tasks: Tasks, worker: Worker) -> None:
    @tasks.task(on_error={KeyError: Reject("no such order")})
    async def close(id: int) -> None:  # noqa: A002
        raise KeyError(id)

    await close.offer(1)
    await work_off(worker, tasks)
    assert [letter.reason for letter in await tasks.queue.dead.list()] == ["no such order"]

    wrong = Tasks("wrong")
    wrong.task(name="close", on_error={KeyError: "later"})(lambda: None)  # type: ignore[dict-item]
    with pytest.raises(BadInput, match="on_error must map KeyError"):
        worker.include(wrong)


# Including


async def test_tasks_of_one_queue_may_come_from_several_modules(
    client: Client, worker: Worker, tasks: Tasks, facts: list[Any]
) -> None:
    others = Tasks("mails", lease=LEASE)
    others.bind(client)
    first = tasks.task(name="first")(lambda: facts.append("first"))
    second = others.task(name="second")(lambda: facts.append("second"))
    await first.offer()
    await second.offer()
    for group in (tasks, others):
        worker.include(group)
    late = tasks.task(name="late")(lambda: facts.append("registered after the inclusion"))
    await late.offer()
    await work_off(worker)
    assert sorted(facts) == ["first", "registered after the inclusion", "second"]


async def test_inclusions_that_contradict_each_other_are_refused(
    worker: Worker, tasks: Tasks
) -> None:
    @worker.listener("others")
    async def handle(value: Any) -> None: ...

    same, differing = Tasks("mails"), Tasks("mails", lease=5)
    for group in (tasks, same):
        group.task(name="send")(lambda: None)
    worker.include(tasks)
    for group, words in (
        (same, "two tasks 'send'"),
        (differing, "different settings for lease"),
        (Tasks("others"), r"'others' has a listener, .*handle"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            worker.include(group)
    with pytest.raises(ConfigurationError, match="'mails' has tasks"):
        worker.listener("mails")(handle)


async def test_a_worker_without_any_task_says_so(worker: Worker, tasks: Tasks) -> None:
    with pytest.raises(ConfigurationError, match="no listener and no tasks"):
        await worker.run(burst=True)
    worker.include(tasks)
    with pytest.raises(ConfigurationError, match="'mails' is included, but has no task"):
        await worker.run(burst=True)


async def test_tasks_of_a_queue_run_as_many_at_a_time_as_the_inclusion_says(
    worker: Worker, tasks: Tasks, facts: list[Any]
) -> None:
    running = 0

    @tasks.task
    async def work() -> None:
        nonlocal running
        running += 1
        facts.append(running)
        await asyncio.sleep(0.01)
        running -= 1

    with pytest.raises(BadInput):
        worker.include(tasks, concurrency=0)
    worker.include(tasks, concurrency=2)
    await tasks.offer_many([work.to_offer() for _ in range(6)])
    await worker.run(burst=True)
    assert max(facts) == 2


# Binding


async def test_a_worker_binds_its_own_client(server: PrivateServer, facts: list[Any]) -> None:
    tasks = Tasks("mails")

    @tasks.task
    async def count(n: int) -> None:
        facts.append(n)
        if n:
            await count.offer(n - 1)

    worker = Worker(server.url)
    worker.include(tasks)
    async with worker:
        await worker.client.reliable_queue("mails").offer(call("count", n=2))
        await until(lambda: len(facts) == 3)
    assert facts == [2, 1, 0]
    advice = r"not bound to a client: open one with delayq.connect\(tasks=\[...\]\)"
    with pytest.raises(ConfigurationError, match=advice):
        await count.offer(1)
    with pytest.raises(ConfigurationError, match=advice):
        await tasks.offer_many([count.to_offer(1)])


async def test_the_client_bound_last_is_used_until_it_closes(
    server: PrivateServer, client: Client, tasks: Tasks
) -> None:
    @tasks.task
    async def send() -> None: ...

    async with delayq.connect(server.url, name_mapper="test:{}".format, tasks=[tasks]) as other:
        await send.offer()
        assert await depths(other.reliable_queue("mails")) == (0, 1, 0, 0)
        assert await depths(client.reliable_queue("mails")) == NONE
    await send.offer()
    assert await depths(client.reliable_queue("mails")) == (0, 1, 0, 0)


async def test_a_client_that_is_not_open_cannot_be_used(server: PrivateServer) -> None:
    tasks = Tasks("mails", max_size=2)
    send = tasks.task(name="send")(lambda: None)
    client = delayq.connect(server.url)
    tasks.bind(client)
    with pytest.raises(Closed, match="open the client first"):
        await send.offer()
    async with client:
        await send.offer()
        await tasks.queue.aclose()
        await send.offer()
        assert (await tasks.queue.stats()).ready == 2
        # The settings of the queue are declared.
        with pytest.raises(delayq.QueueFull):
            await send.offer()
    with pytest.raises(Closed, match="the client is closed"):
        await send.offer()
    tasks.unbind(client)
    tasks.unbind(client)
    with pytest.raises(ConfigurationError, match="not bound"):
        await send.offer()


async def test_arguments_that_no_codec_knows_are_told_before_the_first_offer(
    server: PrivateServer,
) -> None:
    tasks = Tasks("mails")

    @tasks.task
    async def store(db: Db) -> None: ...

    client = delayq.connect(server.url, tasks=[tasks])
    with pytest.raises(
        ConfigurationError,
        match=r"store\(\), 'db': no codec knows the type Db: make it a dataclass.* give it",
    ):
        async with client:
            raise AssertionError("it has opened")
