"""A worker survives its handlers, dependencies and codecs, and no listener holds up another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator  # noqa: TC003 - the worker reads annotations
from dataclasses import dataclass
from typing import Any

import pytest

import delayq
from delayq import Backoff, Client, Message, Reject, RetryAfter, Worker
from delayq.codecs import JsonCodec
from delayq.instrumentation import Observer
from tests.support.reliable import Jobs, claim_one, depths, get, listed, offers
from tests.support.waiting import until
from tests.support.workers import Seen, Settling, raising, work_off

NOWHERE = "redis://127.0.0.1:1"
AT_ONCE: dict[str, Any] = {"max_attempts": 2, "backoff": Backoff.fixed(0)}


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **AT_ONCE)


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client, concurrency=3, shutdown_timeout=5)


class Session:
    pass


class Other:
    pass


def on_jobs(worker: Worker, **settings: Any) -> Callable[[Any], Any]:
    return worker.listener("jobs", **AT_ONCE, **settings)


# Dependencies


async def test_an_error_that_a_dependency_swallows_still_fails_the_message(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []

    async def async_session() -> AsyncIterator[Session]:
        with contextlib.suppress(ValueError, LookupError, Reject):
            yield Session()
            return
        events.append("rolled back")

    def sync_session() -> Iterator[Session]:
        try:
            yield Session()
        except (ValueError, LookupError, Reject):
            events.append("rolled back")

    def other(session: Session, message: Message[Any]) -> Other:
        if message.value == 2:
            raise LookupError("no other")
        return Other()

    for dependency in (async_session, sync_session):
        worker, name = Worker(client), dependency.__name__
        jobs = client.reliable_queue(name, **AT_ONCE)
        worker.dependency(dependency)
        worker.dependency(other)

        @worker.listener(name, **AT_ONCE)
        async def handle(value: int, session: Session, other: Other) -> None:
            raise Reject("never") if value == 3 else ValueError("payment failed")

        await work_off(worker, jobs, 1, 2, 3)
        letters = {letter.value: (letter.reason, letter.error) for letter in await jobs.dead.list()}
        assert letters == {
            1: ("attempts", "ValueError: payment failed"),
            2: ("attempts", "LookupError: no other"),
            3: ("never", ""),
        }
    # Two attempts each, but for the rejected one.
    assert events == ["rolled back"] * 10
    assert caplog.text.count("failed in attempt") == 8


# Cancellation


async def test_a_handler_cancels_its_own_task_only(client: Client, jobs: Jobs) -> None:
    worker, seen, tasks = Worker(client, concurrency=1), list[str](), set[asyncio.Task[Any]]()

    @on_jobs(worker, concurrency=1)
    async def handle(value: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        seen.append(value)
        tasks.add(task)
        if value == "from outside":
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.Event().wait()
        elif value != "next":
            task.cancel()
            if value == "waits":
                await asyncio.sleep(0)
        else:
            # Timeouts and task groups count cancellations as in a task of its own.
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))

    await work_off(worker, jobs, "waits", "returns", "from outside", "next")
    assert Counter(seen) == {"waits": 2, "returns": 1, "from outside": 2, "next": 1}
    assert await depths(jobs) == (0, 0, 0, 2)
    letters = await jobs.dead.list()
    assert [(letter.reason, letter.attempt) for letter in letters] == [("attempts", 2)] * 2
    # All messages were handled by the task that had been cancelled.
    assert len(tasks) == 1


async def test_a_stop_is_uncounted_with_a_swallowing_dependency(client: Client, jobs: Jobs) -> None:
    worker, begun = Worker(client, shutdown_timeout=0), asyncio.Event()

    @worker.dependency
    async def session() -> AsyncIterator[Session]:
        with contextlib.suppress(BaseException):
            yield Session()

    @on_jobs(worker)
    async def handle(value: int, session: Session) -> None:
        begun.set()
        await asyncio.Event().wait()

    await jobs.offer(1, id="a")
    async with worker:
        await begun.wait()
    message = await get(jobs, "a")
    assert (message.state, message.attempt) == ("ready", 0)


async def test_a_run_cancelled_repeatedly_gives_all_back(
    client: Client, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.worker._pool._GIVE_BACK_WITHIN", 30)
    worker, begun = Worker(client, shutdown_timeout=3600), asyncio.Event()
    clean_up, cleaned_up = asyncio.Event(), asyncio.Event()

    @on_jobs(worker)
    async def handle(value: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await clean_up.wait()
            cleaned_up.set()

    await jobs.offer(1, id="a")
    task = asyncio.create_task(worker.run())
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
    clean_up.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned_up.is_set()
    message = await get(jobs, "a")
    assert (message.state, message.attempt) == ("ready", 0)


# Errors


@dataclass(frozen=True)
class Declined(Exception):
    card: str


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = [
    Declined("4000"),
    _Unprintable(),
    SystemExit(3),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(1),
    BaseException("base"),
    ExceptionGroup("many", [ValueError()]),
    # Last, because it is an ordinary error only in a thread.
    KeyboardInterrupt(),
]


async def test_whatever_a_handler_raises_fails_its_message_and_nothing_else(
    client: Client, worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[str] = []

    @on_jobs(worker)
    async def handle(value: int) -> None:
        if value >= 0:
            raise ERRORS[value]
        handled.append("async")

    @worker.listener("sync", **AT_ONCE)
    def in_thread(value: int) -> None:
        if value >= 0:
            raise ERRORS[value]
        handled.append("sync")

    sync = client.reliable_queue("sync", **AT_ONCE)
    await sync.offer_many(offers(len(ERRORS)))
    await sync.offer(-1)
    await work_off(worker, jobs, *range(len(ERRORS) - 1), -1)
    assert sorted(handled) == ["async", "sync"]
    for queue, count in ((jobs, len(ERRORS) - 1), (sync, len(ERRORS))):
        letters = {letter.value: letter for letter in await queue.dead.list()}
        assert sorted(letters) == [*range(count)]
        assert all(letter.reason == "attempts" and letter.error for letter in letters.values())
        assert letters[0].error.endswith("Declined: 4000")
    assert "FrozenInstanceError" not in caplog.text
    interrupted = letters[len(ERRORS) - 1]
    assert interrupted.error == "RuntimeError: the handler raised KeyboardInterrupt"


async def test_a_failing_codec_makes_a_dead_letter(worker: Worker, jobs: Jobs) -> None:
    class Failing(JsonCodec):
        def decode(self, payload: bytes) -> Any:
            raise SystemExit(3) if payload == b"1" else _Unprintable

    on_jobs(worker, codec=Failing())(raising(AssertionError()))
    await work_off(worker, jobs, 1, 2)
    letters = await jobs.dead.list()
    assert [letter.reason for letter in letters] == ["undecodable"] * 2


async def test_an_unforeseen_error_does_not_end_the_worker(
    worker: Worker,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Seen()
    on_jobs(worker)(seen)
    get, calls = jobs._open.dispatcher.take, itertools.count()

    async def fails_once(*args: Any) -> Any:
        if not next(calls):
            raise ValueError("a score that is no number")
        return await get(*args)

    monkeypatch.setattr(jobs._open.dispatcher, "take", fails_once)
    async with worker:
        await jobs.offer(1)
        await until(lambda: seen == [1])
    assert "claiming messages failed" in caplog.text


# Servers that are away when a handler has failed


async def test_a_failed_message_is_settled_once_the_server_is_back_or_left_alone(
    worker: Worker, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_jobs(worker)(Seen())
    answers = {"snoozed": delayq.Snooze(3600), "rejected": Reject("never")}

    @worker.middleware
    async def fail(message: Message[Any], call_next: Any) -> None:
        raise answers[message.value]

    with monkeypatch.context() as patch:
        Settling(1, patch)
        await work_off(worker, jobs, "snoozed")
    (message,) = await jobs.list("delayed")
    assert message.attempt == 0
    for failing, expected in ((1, (1, 0, 0, 1)), (9, (1, 0, 1, 1))):
        with monkeypatch.context() as patch:
            settling = Settling(failing, patch)
            await work_off(worker, jobs, "rejected")
        assert settling.asked == ["reliable/bury"] * 2
        assert await depths(jobs) == expected
    assert (await jobs.dead.list())[0].reason == "never"
    assert caplog.text.count("could not be settled and will be redelivered") == 1


# Exception groups


async def _raise_in_a_group(*errors: BaseException) -> None:
    async def child(error: BaseException) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(child(error))


async def test_errors_within_an_exception_group_decide_what_happens(
    worker: Worker, jobs: Jobs
) -> None:
    groups: list[tuple[tuple[Exception, ...], str, int]] = [
        ((Reject("no"),), "no", 1),
        ((ValueError(1), Reject("no")), "no", 1),
        # One that on_error knows.
        ((ValueError(1), KeyError(2)), "unknown", 1),
        ((ValueError(1), IndexError(2)), "attempts", 2),
    ]
    longest = (RetryAfter(0), RetryAfter(3600), RetryAfter(1))

    @on_jobs(worker, on_error={KeyError: Reject("unknown")})
    async def handle(value: int) -> None:
        await _raise_in_a_group(*(longest if value < 0 else groups[value][0]))

    await work_off(worker, jobs, *range(len(groups)), -1)
    letters = {letter.value: letter for letter in await jobs.dead.list()}
    for number, (errors, reason, attempts) in enumerate(groups):
        letter = letters[number]
        assert (letter.reason, letter.attempt) == (reason, attempts), errors
        assert ("ValueError: 1" in letter.error) == (len(errors) > 1), errors
    (message,) = await jobs.list("delayed")
    assert message.value == -1


async def test_a_block_of_its_own_sees_instructions_in_a_group(jobs: Jobs) -> None:
    await jobs.offer_many(offers(2))
    async with await claim_one(jobs):
        await _raise_in_a_group(Reject("no"))
    with pytest.raises(ExceptionGroup):
        async with await claim_one(jobs):
            await _raise_in_a_group(Reject("never"), ValueError(1))
    first, second = await jobs.dead.list()
    assert (first.reason, first.error) == ("no", "")
    assert second.reason == "never"
    assert "ValueError: 1" in second.error


# Threads


async def test_hanging_threads_of_one_listener_leave_others_alone(
    worker: Worker, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    release, handled, begun = threading.Event(), list[int](), list[int]()
    hanging = client.reliable_queue("pdf", **AT_ONCE)
    healthy = client.reliable_queue("mails", **AT_ONCE)

    # Longer than the last runs take until they find themselves released.
    @worker.listener("pdf", timeout=5, **AT_ONCE)
    def pdf(value: int) -> None:
        begun.append(value)
        release.wait(60)

    @worker.listener("mails", timeout=30, **AT_ONCE)
    def mails(value: int) -> None:
        handled.append(value)

    await hanging.offer_many(offers(8))
    try:
        async with worker:
            await until(lambda: "3 of the listener's 3 threads hang" in caplog.text)
            await healthy.offer_many(offers(20))
            await until(lambda: len(handled) == 20)
            assert len(begun) == 3
            # Messages that were begun have failed once. The others wait, and have used no attempt.
            waiting = await listed(hanging, "ready", "delayed", "leased")
            assert len(waiting) == 8
            await asyncio.sleep(0.5)
            assert len(begun) == 3
            release.set()
            await until(lambda: len(begun) == 11)
        # The late ends of the first three have changed nothing.
        assert await hanging.dead.size() == 0
    finally:
        release.set()
    assert await hanging.list("ready") == []


async def test_a_message_without_a_thread_goes_back_uncounted(
    client: Client,
    worker: Worker,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[int, int]] = []
    start, calls = threading.Thread.start, itertools.count()

    def fails_at_first(thread: threading.Thread) -> None:
        if thread.name == "delayq jobs" and not next(calls):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_at_first)
    monkeypatch.setattr("delayq.worker._handling._NO_THREAD_PAUSE", 0.01)

    @worker.middleware
    async def swallow(message: Message[Any], call_next: Any) -> None:
        try:
            await call_next()
        except Exception:
            seen.append((-1, -1))

    @on_jobs(worker)
    def handle(value: int, message: Message[Any]) -> None:
        seen.append((value, message.attempt))

    errors: list[str] = []

    class Observed(Observer):
        def handled(self, queue: str, seconds: float, error: BaseException | None) -> None:
            errors.append(str(error))

    client.observe(Observed())
    await jobs.offer(1)
    async with worker:
        await until(lambda: seen)
    assert seen == [(1, 1)]
    assert "cannot start a thread" in caplog.text
    assert set(errors) == {"can't start new thread", "None"}


async def test_threads_are_used_again_and_end_with_the_run(worker: Worker, jobs: Jobs) -> None:
    idents: set[int] = set()

    @on_jobs(worker, concurrency=1)
    def handle(value: int) -> None:
        idents.add(threading.get_ident())

    await work_off(worker, jobs, *range(20))
    assert len(idents) == 1
    await until(lambda: "delayq jobs" not in {thread.name for thread in threading.enumerate()})


# Settings


BAD_VALUES: dict[str, list[Any]] = {
    "queue": ["", 5],
    "concurrency": [0, True, 2.5],
    "timeout": [0, "5"],
    "lease": [0],
    "max_attempts": [0],
    "keep": ["3"],
    "partitions": ["3"],
    "backoff": [5],
    "codec": [JsonCodec, object()],
    "on_error": [Reject, {"ValueError": Reject}, {ValueError: 5}],
}


def test_an_impossible_setting_is_refused_where_it_is_made() -> None:
    for name, values in BAD_VALUES.items():
        for value in values:
            with pytest.raises(delayq.BadInput, match=name):
                Worker(NOWHERE).listener(**{"queue": "jobs", name: value})

    async def undecorated(worker: Worker) -> AsyncIterator[None]:
        yield

    worker: Any = Worker
    mistakes: list[Callable[[], Any]] = [
        lambda: worker(NOWHERE).listener(len),
        lambda: worker(NOWHERE).middleware(lambda *_: None),
        lambda: worker(NOWHERE, lifespan=5),
        lambda: worker(NOWHERE, lifespan=undecorated),
        lambda: worker(5),
        lambda: worker("ftp://127.0.0.1"),
        lambda: worker(NOWHERE, shutdown_timeout="5"),
    ]
    for number, mistake in enumerate(mistakes):
        with pytest.raises(delayq.DelayqError) as caught:
            mistake()
        assert str(caught.value), number
