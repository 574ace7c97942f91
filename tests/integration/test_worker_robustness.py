"""A worker survives whatever its handlers, dependencies and codecs do, and no listener holds up
another.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator  # noqa: TC003 - the worker reads annotations
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Backoff, Client, Message, Reject, RetryAfter, Worker
from delayq.codecs import JsonCodec
from delayq.worker._threads import Threads
from tests.integration.test_worker import left
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import ReliableQueue
    from tests.support.servers import PrivateServer

AT_ONCE: dict[str, Any] = {"max_attempts": 2, "backoff": Backoff.fixed(0)}


@pytest.fixture
async def client(own_server: PrivateServer) -> AsyncIterator[Client]:
    async with delayq.connect(own_server.url) as client:
        yield client


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[Any]:
    queue: ReliableQueue[Any] = client.reliable_queue("jobs", **AT_ONCE)
    return queue


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client, concurrency=3, shutdown_timeout=5)


class Session:
    pass


class Other:
    pass


# Dependencies


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_dependency_that_keeps_the_error_to_itself_does_not_make_it_a_success(
    worker: Worker, jobs: ReliableQueue[Any], caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    events: list[str] = []

    async def async_session() -> AsyncIterator[Session]:
        try:
            yield Session()
        except ValueError:
            events.append("rolled back")

    def sync_session() -> Iterator[Session]:
        try:
            yield Session()
        except ValueError:
            events.append("rolled back")

    worker.dependency(async_session if is_async else sync_session)

    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int, session: Session) -> None:
        raise ValueError("payment failed")

    await jobs.offer(1)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.error) == ("attempts", "ValueError: payment failed")
    assert events == ["rolled back"] * 2
    assert caplog.text.count("failed in attempt") == 2


async def test_a_dependency_that_cannot_be_made_fails_the_message_whatever_the_others_do_about_it(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @worker.dependency
    async def session() -> AsyncIterator[Session]:
        with contextlib.suppress(LookupError):
            yield Session()

    @worker.dependency
    async def other(session: Session) -> Other:
        raise LookupError("no other")

    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int, other: Other) -> None:
        raise AssertionError

    await jobs.offer(1)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert letter.error == "LookupError: no other"


async def test_instructions_pass_dependencies_too(worker: Worker, jobs: ReliableQueue[Any]) -> None:
    @worker.dependency
    async def session() -> AsyncIterator[Session]:
        with contextlib.suppress(Reject):
            yield Session()

    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int, session: Session) -> None:
        raise Reject("never")

    await jobs.offer(1)
    await worker.run(burst=True)
    assert [letter.reason for letter in await jobs.dead.list()] == ["never"]


# Cancellation


@pytest.mark.parametrize("waits", [True, False])
async def test_a_handler_that_cancels_its_own_task_harms_its_own_message_only(
    client: Client, jobs: ReliableQueue[Any], waits: bool
) -> None:
    worker, seen, tasks = Worker(client, concurrency=1), list[str](), set[asyncio.Task[Any]]()

    @worker.listener("jobs", concurrency=1, **AT_ONCE)
    async def handle(value: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        seen.append(value)
        tasks.add(task)
        if value == "cancel":
            task.cancel()
            if waits:
                await asyncio.sleep(0)
            return
        # Everything in asyncio that relies on the number of cancellations works as in a task of its
        # own.
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))

    await jobs.offer("cancel")
    await jobs.offer("next")
    await worker.run(burst=True)
    assert sorted(seen) == (["cancel", "cancel", "next"] if waits else ["cancel", "next"])
    assert await left(jobs) == (0, 0, 0, 1 if waits else 0)
    assert [letter.reason for letter in await jobs.dead.list()] == (["attempts"] if waits else [])
    # The next message was handled by the same task that had been cancelled.
    assert len(tasks) == 1


async def test_a_task_that_cancels_a_handler_fails_its_message(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.Event().wait()

    await jobs.offer(1)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.attempt) == ("attempts", 2)


async def test_a_stop_gives_a_message_back_uncounted_though_a_dependency_swallows_the_cancellation(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker, begun = Worker(client, shutdown_timeout=0), asyncio.Event()

    @worker.dependency
    async def session() -> AsyncIterator[Session]:
        with contextlib.suppress(BaseException):
            yield Session()

    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int, session: Session) -> None:
        begun.set()
        await asyncio.Event().wait()

    await jobs.offer(1, id="a")
    async with worker:
        await begun.wait()
    message = await jobs.get("a")
    assert message is not None
    assert (message.state, message.attempt) == ("ready", 0)


async def test_whoever_cancels_a_run_twice_gets_everything_handed_back(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker, begun, cleaned_up = (
        Worker(client, shutdown_timeout=3600),
        asyncio.Event(),
        asyncio.Event(),
    )

    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            cleaned_up.set()

    await jobs.offer(1, id="a")
    task = asyncio.create_task(worker.run())
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned_up.is_set()
    message = await jobs.get("a")
    assert message is not None
    assert (message.state, message.attempt) == ("ready", 0)


# Errors


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        _Unprintable(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(1),
        BaseException("base"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_whatever_a_handler_raises_fails_its_message_and_nothing_else(
    worker: Worker, jobs: ReliableQueue[Any], error: BaseException, is_async: bool
) -> None:
    seen: list[int] = []

    def work(value: int) -> None:
        if value == 1:
            raise error
        seen.append(value)

    async def handle(value: int) -> None:
        work(value)

    worker.listener("jobs", **AT_ONCE)(handle if is_async else work)
    await jobs.offer(1)
    await jobs.offer(2)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert (letter.value, letter.reason) == (1, "attempts")
    assert letter.error
    assert seen == [2]


async def test_a_keyboard_interrupt_of_a_thread_is_an_error_like_any_other(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @worker.listener("jobs", **AT_ONCE)
    def handle(value: int) -> None:
        raise KeyboardInterrupt

    await jobs.offer(1)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert letter.error == "RuntimeError: the handler raised KeyboardInterrupt"


class _Leaving(JsonCodec):
    def decode(self, payload: bytes) -> Any:
        sys.exit(len(payload))


class _Puzzling(JsonCodec):
    def decode(self, payload: bytes) -> Any:
        raise _Unprintable


@pytest.mark.parametrize("codec", [_Leaving(), _Puzzling()], ids=["SystemExit", "unprintable"])
async def test_whatever_a_codec_raises_makes_a_dead_letter(
    worker: Worker, jobs: ReliableQueue[Any], codec: Any
) -> None:
    @worker.listener("jobs", codec=codec, **AT_ONCE)
    async def handle(value: Any) -> None:
        raise AssertionError

    await jobs.offer(1)
    await worker.run(burst=True)
    assert [letter.reason for letter in await jobs.dead.list()] == ["undecodable"]


async def test_an_error_that_nothing_foresees_ends_neither_the_worker_nor_its_feeders(
    worker: Worker,
    jobs: ReliableQueue[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []

    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int) -> None:
        seen.append(value)

    queue: Any = jobs
    get, calls = queue._open.waiters.get, 0

    async def fails_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("a score that is no number")
        return await get(*args)

    monkeypatch.setattr(queue._open.waiters, "get", fails_once)
    async with worker:
        await jobs.offer(1)
        await until(lambda: seen == [1])
    assert "claiming messages failed" in caplog.text


# Exception groups


async def _raise_in_a_group(*errors: BaseException) -> None:
    async def child(error: BaseException) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(child(error))


GROUPS = {
    "a Reject": ((Reject("no"),), "no", 1),
    "a Reject among others": ((ValueError(1), Reject("no")), "no", 1),
    "an error that on_error knows": ((ValueError(1), KeyError(2)), "unknown", 1),
    "others": ((ValueError(1), IndexError(2)), "attempts", 2),
}


@pytest.mark.parametrize(("errors", "reason", "attempts"), GROUPS.values(), ids=GROUPS)
async def test_errors_in_a_group_count(
    worker: Worker, jobs: ReliableQueue[Any], errors: Any, reason: str, attempts: int
) -> None:
    @worker.listener("jobs", on_error={KeyError: Reject("unknown")}, **AT_ONCE)
    async def handle(value: int) -> None:
        await _raise_in_a_group(*errors)

    await jobs.offer(1)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.attempt) == (reason, attempts)
    assert ("ValueError: 1" in letter.error) == any(
        isinstance(error, ValueError) for error in errors
    )


async def test_of_several_delays_in_a_group_the_longest_counts(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @worker.listener("jobs", **AT_ONCE)
    async def handle(value: int) -> None:
        await _raise_in_a_group(RetryAfter(0), RetryAfter(3600), RetryAfter(1))

    await jobs.offer(1)
    await worker.run(burst=True)
    assert await left(jobs) == (1, 0, 0, 0)


async def test_a_block_of_its_own_sees_instructions_in_a_group(jobs: ReliableQueue[Any]) -> None:
    await jobs.offer(1)
    (message,) = await jobs.claim()
    async with message:
        await _raise_in_a_group(Reject("no"))
    await jobs.offer(2)
    (message,) = await jobs.claim()
    with pytest.raises(ExceptionGroup):
        async with message:
            await _raise_in_a_group(Reject("never"), ValueError(1))
    first, second = await jobs.dead.list()
    assert (first.reason, first.error) == ("no", "")
    assert second.reason == "never"
    assert "ValueError: 1" in second.error


# Threads


async def test_threads_of_one_listener_that_hang_leave_others_alone(
    worker: Worker, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    release, handled, begun = threading.Event(), list[int](), list[int]()
    hanging, healthy = (
        client.reliable_queue("pdf", **AT_ONCE),
        client.reliable_queue("mails", **AT_ONCE),
    )

    @worker.listener("pdf", timeout=0.1, **AT_ONCE)
    def pdf(value: int) -> None:
        begun.append(value)
        release.wait(60)

    @worker.listener("mails", timeout=30, **AT_ONCE)
    def mails(value: int) -> None:
        handled.append(value)

    await hanging.offer_many([delayq.Offer(value) for value in range(8)])
    try:
        async with worker:
            await until(lambda: "3 of the listener's 3 threads hang" in caplog.text)
            await healthy.offer_many([delayq.Offer(value) for value in range(20)])
            await until(lambda: len(handled) == 20)
            assert len(begun) == 3
            # Messages that were begun have failed once. The others wait, and have used no attempt.
            found = (
                await hanging.list("ready")
                + await hanging.list("delayed")
                + await hanging.list("leased")
            )
            assert len(found) == 8
            await asyncio.sleep(0.5)
            assert len(begun) == 3
            release.set()
            await until(lambda: len(begun) == 11)
        assert await hanging.dead.size() == 0
    finally:
        release.set()
    assert [message.attempt for message in await hanging.list("ready")] == []


async def test_a_message_for_which_there_is_no_thread_goes_back_uncounted(
    worker: Worker,
    jobs: ReliableQueue[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []
    attempts: list[int] = []
    start, calls = threading.Thread.start, 0

    def fails_at_first(thread: threading.Thread) -> None:
        nonlocal calls
        if thread.name == "delayq jobs":
            calls += 1
            if calls == 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_at_first)
    monkeypatch.setattr("delayq.worker._handling._NO_THREAD_PAUSE", 0.01)

    @worker.middleware
    async def swallow(message: Message[Any], call_next: Any) -> None:
        try:
            await call_next()
        except Exception:
            seen.append(-1)

    @worker.listener("jobs", **AT_ONCE)
    def handle(value: int, message: Message[Any]) -> None:
        seen.append(value)
        attempts.append(message.attempt)

    await jobs.offer(1)
    async with worker:
        await until(lambda: seen)
    assert (seen, attempts) == ([1], [1])
    assert "cannot start a thread" in caplog.text


async def test_threads_are_used_again_and_end_with_the_run(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    names: set[int] = set()

    @worker.listener("jobs", concurrency=1, **AT_ONCE)
    def handle(value: int) -> None:
        names.add(threading.get_ident())

    await jobs.offer_many([delayq.Offer(value) for value in range(20)])
    await worker.run(burst=True)
    assert len(names) == 1
    await until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "delayq jobs"]
    )


async def test_an_abandoned_thread_hangs_until_it_returns() -> None:
    release, changes = threading.Event(), list[int]()
    threads = Threads("jobs", 2)
    threads.changed = lambda: changes.append(threads.hanging)
    task = asyncio.create_task(threads.run(partial(release.wait, 60)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.hanging == 1
    assert await threads.run(lambda: 5) == 5
    release.set()
    await until(lambda: not threads.hanging)
    assert changes == [1, 0]
    threads.close()


# Settings


def undecorated(worker: Worker) -> Any:
    async def lifespan(worker: Worker) -> AsyncIterator[None]:
        yield

    return Worker("redis://127.0.0.1:1", lifespan=lifespan)  # type: ignore[arg-type]


MISTAKES = {
    "backoff in seconds": lambda worker: worker.listener("q", backoff=5),
    "codec without methods": lambda worker: worker.listener("q", codec=object()),
    "a codec's class": lambda worker: worker.listener("q", codec=JsonCodec),
    "on_error without classes": lambda worker: worker.listener(
        "q", on_error={"ValueError": Reject}
    ),
    "on_error that is no dict": lambda worker: worker.listener("q", on_error=Reject),
    "on_error with seconds": lambda worker: worker.listener("q", on_error={ValueError: 5}),
    "timeout of no type": lambda worker: worker.listener("q", timeout="5"),
    "timeout of nothing": lambda worker: worker.listener("q", timeout=0),
    "concurrency of no type": lambda worker: worker.listener("q", concurrency=2.5),
    "lease of no type": lambda worker: worker.listener("q", lease="30"),
    "max_attempts of no type": lambda worker: worker.listener("q", max_attempts="3"),
    "dedup_window of no type": lambda worker: worker.listener("q", dedup_window="3"),
    "partitions of no type": lambda worker: worker.listener("q", partitions="3"),
    "no name": lambda worker: worker.listener(lambda value: None),
    "a name of no type": lambda worker: worker.listener(5),
    "a middleware that is not async": lambda worker: worker.middleware(
        lambda message, call_next: None
    ),
    "a middleware that cannot be called": lambda worker: worker.middleware(5),
    "a lifespan that cannot be called": lambda _: Worker("redis://127.0.0.1:1", lifespan=5),  # type: ignore[arg-type]
    "a lifespan without its decorator": undecorated,
    "an address of no type": lambda _: Worker(5),  # type: ignore[arg-type]
    "an address of no scheme": lambda _: Worker("ftp://127.0.0.1"),
    "shutdown_timeout of no type": lambda _: Worker("redis://127.0.0.1:1", shutdown_timeout="5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_setting_that_cannot_work_is_refused_where_it_is_given(mistake: Any) -> None:
    with pytest.raises((delayq.DelayqError, TypeError)) as caught:
        mistake(Worker("redis://127.0.0.1:1"))
    assert str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"backoff": 5}, {"codec": object()}, {"codec": JsonCodec}, {"durability": 5}]
)
async def test_a_queue_refuses_settings_that_cannot_work(client: Client, settings: Any) -> None:
    with pytest.raises(delayq.BadInput):
        client.reliable_queue("jobs", **settings)
    if "backoff" not in settings:
        with pytest.raises(delayq.BadInput):
            client.delayed_queue("jobs", **settings)


async def test_a_lifespan_of_one_run_is_checked_too(client: Client) -> None:
    worker = Worker(client)
    worker.listener("jobs")(lambda value: None)
    with pytest.raises(delayq.ConfigurationError, match="lifespan"):
        await worker.run(lifespan=5)  # type: ignore[arg-type]


async def test_a_worker_says_that_it_works_and_on_what(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delayq")
    worker.listener("jobs")(lambda value: None)
    worker.listener("mails")(lambda value: None)
    await worker.run(burst=True)
    assert (
        "the worker handles queue 'jobs', queue 'mails', up to 3 messages at a time" in caplog.text
    )
