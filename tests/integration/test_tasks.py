"""Tasks on a queue: how they are offered, and how workers call them."""

from __future__ import annotations

import asyncio
import logging
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
    RetryAfter,
    Tasks,
    Worker,
)
from delayq.tasks import INJECTED, Call
from delayq.testing import advance
from tests.support.reliable import depths
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


class Log(list[Any]):
    """The things that tasks have done, in order."""

    def __call__(self, *facts: Any) -> None:
        self.append(facts if len(facts) > 1 else facts[0])


@pytest.fixture
def done() -> Log:
    return Log()


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


async def work_off(worker: Worker, *groups: Tasks) -> None:
    """Run the worker until nothing is due."""
    for tasks in groups:
        worker.include(tasks)
    await worker.run(burst=True)


async def letters(tasks: Tasks) -> list[tuple[str, str, int]]:
    """Return reason, error and attempt of the dead letters."""
    return [(each.reason, each.error or "", each.attempt) for each in await tasks.queue.dead.list()]


# Offering


async def test_workers_call_what_was_offered(tasks: Tasks, worker: Worker, done: Log) -> None:
    @tasks.task
    async def send_mail(to: str, subject: str = "hi") -> None:
        done(to, subject)

    @tasks.task
    def close(order: Order) -> None:
        done(order)

    await send_mail.offer("ada@example.org", subject="later")
    await close.offer(Order(1))
    await send_mail.offer("bob@example.org")
    await work_off(worker, tasks)
    assert sorted(map(str, done)) == sorted(
        map(str, [("ada@example.org", "later"), Order(1), ("bob@example.org", "hi")])
    )
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
    message = await tasks.queue.get("mail-7")
    assert message is not None
    assert (message.value, message.priority, message.headers) == (
        Call("send_mail", {"to": "bob"}),
        0,
        {},
    )
    assert await tasks.queue.cancel("mail-7")


async def test_nothing_is_stored_of_calls_that_do_not_fit(tasks: Tasks, client: Client) -> None:
    @tasks.task
    async def add(a: int, b: int) -> None: ...

    wrong: Any = "two"
    with pytest.raises(BadArguments, match="missing a required argument: 'b'"):
        await add.offer(1)  # type: ignore[call-arg]
    with pytest.raises(BadArguments):
        await tasks.offer_many([add.to_offer(1, 2), add.to_offer(1, wrong)])
    with pytest.raises(EncodeError, match=r"add\(\), 'b'"):
        await add.offer(1, object())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="takes calls of tasks, not dict"):
        await tasks.queue.offer({"task": "add"})  # type: ignore[arg-type]
    assert await depths(tasks.queue) == NONE


async def test_a_schedule_calls_a_task(
    tasks: Tasks, client: Client, worker: Worker, done: Log
) -> None:
    @tasks.task
    async def report(of: str) -> None:
        done(of)

    due = await tasks.schedule("daily", report.options(priority=2).to_offer("sales"), every=86_400)
    assert due - await client.server_time() > 23 * HOUR
    (schedule,) = await tasks.queue.schedules()
    assert (schedule.name, schedule.priority) == ("daily", 2)
    await advance(client, 86_400)
    await work_off(worker, tasks)
    assert done == ["sales"]
    with pytest.raises(BadInput, match="a schedule decides when"):
        await tasks.schedule("daily", report.options(delay=3).to_offer("sales"), every=86_400)
    with pytest.raises(BadInput, match="cannot have a group"):
        await tasks.schedule("daily", report.options(group="a").to_offer("sales"), every=86_400)
    calling: Any = report.offer("sales")
    with pytest.raises(BadInput, match=r"task\.to_offer"):
        await tasks.schedule("daily", calling, every=86_400)
    calling.close()


# Handling


async def test_a_task_is_given_what_it_asks_for(tasks: Tasks, client: Client, done: Log) -> None:
    worker, db = Worker(client), Db()

    @worker.dependency(once=True)
    def the_db() -> Db:
        return db

    @tasks.task
    async def store(
        key: str, message: Message[Call] = INJECTED, db: Db = INJECTED, *, by: Client = INJECTED
    ) -> None:
        done(key, message.headers, message.attempt, db, by)

    @tasks.task
    def store_in_thread(db: Db = INJECTED, worker: Worker = INJECTED) -> None:
        done(db, worker)

    @tasks.task
    async def note(task: Message[Call] = INJECTED, call: Client = INJECTED) -> None:
        done(task.attempt, call)

    await store.options(headers={"k": "v"}).offer("a")
    await tasks.offer_many([store_in_thread.to_offer(), note.to_offer()], durability="memory")
    await work_off(worker, tasks)
    assert ("a", {"k": "v"}, 1, db, client) in done
    assert (db, worker) in done
    assert (1, client) in done


async def test_what_nothing_fills_is_told_when_tasks_are_included(
    tasks: Tasks, worker: Worker
) -> None:
    @tasks.task
    async def store(key: str, db: Db = INJECTED) -> None: ...

    with pytest.raises(ConfigurationError, match="nothing fills the parameter 'db', which is a Db"):
        worker.include(tasks)
    with pytest.raises(ConfigurationError, match="nothing fills the parameter 'db'"):
        worker.listener("jobs")(store.function)


async def test_middleware_wraps_tasks(tasks: Tasks, worker: Worker, done: Log) -> None:
    @worker.middleware
    async def around(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        done("before", message.value.task, message.value.arguments)
        await call_next()
        done("after")

    @tasks.task
    async def add(a: int) -> None:
        done(a)

    await add.offer(7)
    await work_off(worker, tasks)
    assert done == [("before", "add", {"a": 7}), 7, "after"]


async def test_sync_tasks_run_in_threads_and_may_offer_more(
    tasks: Tasks, worker: Worker, done: Log
) -> None:
    @tasks.task
    def first(n: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        done(second.options(id="next").offer_sync(n + 1))

    @tasks.task
    async def second(n: int) -> None:
        # The thread that has offered this may go on later than this begins.
        await until(lambda: done)
        done(n)

    await first.offer(1)
    await work_off(worker, tasks)
    assert done == ["next", 2]
    with pytest.raises(ConfigurationError, match="would block the event loop"):
        second.offer_sync(1)


async def test_what_does_not_fit_is_a_dead_letter_at_once(
    tasks: Tasks, client: Client, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    @tasks.task
    async def add(a: int, b: int) -> None: ...

    fates: dict[str, tuple[Any, str, str]] = {
        "type": ({"a": "x", "b": 1}, "bad arguments", "add(), 'a': it is str, not int"),
        "missing": ({"a": 1}, "bad arguments", "add(): missing a required argument: 'b'"),
        "more": ({"c": 1}, "bad arguments", "add() has no argument 'c'"),
    }
    queue = client.reliable_queue("mails")
    for id_, (arguments, _, _) in fates.items():
        await queue.offer({"task": "add", "args": arguments}, id=id_)
    fates["unknown"] = {}, "unknown task", "no task is registered as 'gone'"
    await queue.offer({"task": "gone", "args": {}}, id="unknown")
    fates["no call"] = {}, "undecodable", "TaskCodec cannot decode"
    await queue.offer({"a": 1}, id="no call")
    await work_off(worker, tasks)
    letters = {letter.id: letter for letter in await queue.dead.list()}
    assert letters.keys() == fates.keys()
    for id_, (_, reason, error) in fates.items():
        letter = letters[id_]
        assert (letter.reason, letter.attempt) == (reason, 1), id_
        assert error in (letter.error or ""), id_
    assert "no task is registered as 'gone'" in caplog.text


async def test_a_renamed_task_still_does_what_waits(
    tasks: Tasks, client: Client, worker: Worker, done: Log
) -> None:
    @tasks.task(name="send_mail", aliases=["mail"])
    async def send(to: str) -> None:
        done(to)

    await client.reliable_queue("mails").offer({"task": "mail", "args": {"to": "ada"}})
    await work_off(worker, tasks)
    assert done == ["ada"]


# Retries


async def test_each_task_has_its_own_attempts(tasks: Tasks, client: Client, worker: Worker) -> None:
    """On one queue, whose other tasks have ten."""

    @tasks.task(max_attempts=1)
    async def once() -> None:
        raise KeyError("once")

    @tasks.task(max_attempts=12, backoff=Backoff.fixed(1))
    async def twelve() -> None:
        raise KeyError("twelve")

    @tasks.task(max_attempts=None, backoff=Backoff.fixed(1))
    async def for_ever() -> None:
        raise KeyError("for ever")

    @tasks.task(backoff=Backoff.fixed(1))
    async def usual() -> None:
        raise KeyError("usual")

    for task in (once, twelve, for_ever, usual):
        await task.options(id=task.name).offer()
    worker.include(tasks)
    for _ in range(15):
        await worker.run(burst=True)
        await advance(client, 2)
    dead = {each.id: (each.reason, each.attempt) for each in await tasks.queue.dead.list()}
    assert dead == {
        "once": ("attempts", 1),
        "twelve": ("attempts", 12),
        "usual": ("attempts", 10),
    }
    assert [message.id for message in await tasks.queue.peek()] == ["for_ever"]


async def test_each_task_has_its_own_backoff_or_that_of_its_group(
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


async def test_a_call_may_have_limits_of_its_own(
    tasks: Tasks, client: Client, worker: Worker
) -> None:
    @tasks.task(max_attempts=2, timeout=60, backoff=Backoff.fixed(1))
    async def hangs() -> None:
        await asyncio.sleep(600)

    for id_, limit in (("one", 1), ("three", 3)):
        await hangs.options(id=id_, max_attempts=limit, timeout=0.01).offer()
    worker.include(tasks)
    for _ in range(5):
        await worker.run(burst=True)
        await advance(client, 2)
    dead = {each.id: (each.reason, each.attempt) for each in await tasks.queue.dead.list()}
    assert dead == {"one": ("attempts", 1), "three": ("attempts", 3)}


async def test_a_message_that_its_handler_settles_obeys_the_task(
    tasks: Tasks, worker: Worker
) -> None:
    @tasks.task(max_attempts=1)
    async def once(message: Message[Call] = INJECTED) -> None:
        await message.nack(error="not now")

    await once.offer()
    await work_off(worker, tasks)
    assert await letters(tasks) == [("attempts", "not now", 1)]


@pytest.mark.parametrize("calls_lost", [0, 1])
async def test_a_task_whose_last_attempt_was_lost_is_not_called_again(
    tasks: Tasks, client: Client, done: Log, monkeypatch: pytest.MonkeyPatch, calls_lost: int
) -> None:
    Settling(calls_lost, monkeypatch)

    @tasks.task(max_attempts=1)
    async def once() -> None:
        done("called")

    @tasks.task
    async def usual() -> None: ...

    await once.offer()
    (claimed,) = await tasks.queue.claim()
    assert claimed.attempt == 1
    # The worker that had it is gone.
    await advance(client, LEASE + 1)
    await work_off(Worker(client), tasks)
    assert done == []
    ((reason, error, attempt),) = await letters(tasks)
    assert (reason, attempt) == ("attempts", 2)
    assert "no attempt left" in error


async def test_each_task_has_its_own_timeout(tasks: Tasks, worker: Worker, done: Log) -> None:
    @tasks.task(timeout=0.01, max_attempts=1)
    async def hangs() -> None:
        await asyncio.sleep(60)

    @tasks.task
    async def takes_its_time() -> None:
        await asyncio.sleep(0.05)
        done("in time")

    await hangs.offer()
    await takes_its_time.offer()
    await work_off(worker, tasks)
    assert done == ["in time"]
    ((reason, error, _),) = await letters(tasks)
    assert (reason, error.splitlines()[0]) == ("attempts", "TimeoutError: timed out after 0.01 s")


async def test_each_task_answers_errors_in_its_own_way(
    tasks: Tasks, client: Client, worker: Worker
) -> None:
    @tasks.task(on_error={KeyError: Reject("no such order")})
    async def close(id: int) -> None:  # noqa: A002
        raise KeyError(id)

    @tasks.task
    async def later() -> None:
        raise RetryAfter(3000)

    await close.offer(1)
    await later.offer()
    await work_off(worker, tasks)
    assert [reason for reason, *_ in await letters(tasks)] == ["no such order"]
    (message,) = await tasks.queue.list("delayed")
    assert message.due_at - await client.server_time() > timedelta(minutes=49)

    wrong = Tasks("wrong")
    wrong.task(name="close", on_error={KeyError: "later"})(lambda: None)  # type: ignore[dict-item]
    with pytest.raises(BadInput, match="on_error must map KeyError"):
        worker.include(wrong)


async def test_logs_name_the_task(
    tasks: Tasks, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    @tasks.task
    async def fails() -> None:
        raise KeyError

    await fails.options(id="a").offer()
    await work_off(worker, tasks)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.message == "queue 'mails': message 'a', a call of 'fails', failed in attempt 1"
    assert vars(record)["task"] == "fails"


# Including


async def test_tasks_of_one_queue_may_come_from_several_modules(
    server: PrivateServer, client: Client, worker: Worker, tasks: Tasks, done: Log
) -> None:
    others = Tasks("mails", lease=LEASE)

    @tasks.task
    async def first() -> None:
        done("first")

    @others.task
    async def second() -> None:
        done("second")

    others.bind(client)
    await first.offer()
    await second.offer()
    for group in (tasks, others):
        worker.include(group)

    @tasks.task
    async def late() -> None:
        done("registered after the inclusion")

    await late.offer()
    await work_off(worker)
    assert done == ["first", "second", "registered after the inclusion"]


async def test_tasks_that_contradict_each_other_are_refused(worker: Worker, tasks: Tasks) -> None:
    tasks.task(name="send")(lambda: None)
    same, differing = Tasks("mails"), Tasks("mails", lease=5)
    same.task(name="send")(lambda: None)
    worker.include(tasks)
    with pytest.raises(ConfigurationError, match="two tasks 'send'"):
        worker.include(same)
    with pytest.raises(ConfigurationError, match="different settings for lease"):
        worker.include(differing)


async def test_a_queue_has_either_a_listener_or_tasks(worker: Worker, tasks: Tasks) -> None:
    @worker.listener("others")
    async def handle(value: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'others' has a listener, .*handle"):
        worker.include(Tasks("others"))
    worker.include(tasks)
    with pytest.raises(ConfigurationError, match="'mails' has tasks"):
        worker.listener("mails")(handle)


async def test_a_worker_without_any_task_says_so(worker: Worker, tasks: Tasks) -> None:
    with pytest.raises(ConfigurationError, match="no listener and no tasks"):
        await worker.run(burst=True)
    worker.include(tasks)
    assert repr(worker) == "<Worker of 'mails'>"
    with pytest.raises(ConfigurationError, match="'mails' is included, but has no task"):
        await worker.run(burst=True)


async def test_tasks_of_a_queue_run_as_many_at_a_time_as_the_inclusion_says(
    worker: Worker, tasks: Tasks, done: Log
) -> None:
    running = 0

    @tasks.task
    async def work() -> None:
        nonlocal running
        running += 1
        done(running)
        await asyncio.sleep(0.01)
        running -= 1

    with pytest.raises(BadInput):
        worker.include(tasks, concurrency=0)
    worker.include(tasks, concurrency=2)
    await tasks.offer_many([work.to_offer() for _ in range(6)])
    await worker.run(burst=True)
    assert max(done) == 2


# Binding


async def test_a_worker_binds_its_own_client(server: PrivateServer, done: Log) -> None:
    tasks = Tasks("mails")

    @tasks.task
    async def count(n: int) -> None:
        done(n)
        if n:
            await count.offer(n - 1)

    worker = Worker(server.url)
    worker.include(tasks)
    async with worker:
        call = {"task": "count", "args": {"n": 2}}
        await worker.client.reliable_queue("mails").offer(call)
        await until(lambda: len(done) == 3)
    assert done == [2, 1, 0]
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
    with pytest.raises(ConfigurationError, match=r"store\(\), 'db': no codec for Db.* give it"):
        async with client:
            raise AssertionError("it has opened")
