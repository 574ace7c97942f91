"""A worker's life: start, stop, signals, servers that do not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator  # noqa: TC003 - the worker reads it
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import pytest

import delayq
from delayq import Client, Worker
from delayq._redis import hand_back
from delayq._reliable.keys import ReliableKeys
from delayq.worker._handling import Handling
from delayq.worker._threads import Threads
from tests.integration.test_worker import Gate, left, on_jobs
from tests.support.depth import thorough
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from delayq import ReliableQueue
    from tests.support.servers import PrivateServer

# On a busy machine, stopping may take this much longer than its limit, in seconds.
MARGIN = 8.0


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[Any]:
    return client.reliable_queue(
        "jobs", lease=LEASE, backoff=delayq.Backoff.fixed(3600), max_attempts=3
    )


async def attempts(queue: ReliableQueue[Any], *ids: str) -> dict[str, tuple[str, int]]:
    """Return the state of each message, and how many attempts it has used."""
    found = {name: await queue.get(name) for name in ids}
    return {
        name: (message.state, message.attempt)
        for name, message in found.items()
        if message is not None
    }


async def running(worker: Worker) -> asyncio.Task[None]:
    """Start a worker, as a program's main task would."""
    started = asyncio.Event()
    task = asyncio.create_task(worker.run(started=started.set))
    await asyncio.wait(
        (task, asyncio.create_task(started.wait())), return_when=asyncio.FIRST_COMPLETED
    )
    return task


# Stopping


async def test_a_stop_lets_running_handlers_finish_and_claims_nothing_more(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker, gate = Worker(client, concurrency=2), Gate()
    on_jobs(worker)(gate)
    for name in "abcd":
        await jobs.offer(name, id=name)
    task = await running(worker)
    await until(lambda: len(gate.inside) == 2)
    worker.stop()
    worker.stop()
    await asyncio.sleep(0.05)
    assert (task.done(), len(gate.inside)) == (False, 2)
    gate.open()
    await task
    assert gate.seen == ["a", "b"]
    assert await attempts(jobs, *"abcd") == {"c": ("ready", 0), "d": ("ready", 0)}
    worker.stop()  # does nothing


async def test_what_does_not_finish_in_time_is_cancelled_and_handed_back_uncounted(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker, gate = Worker(client, concurrency=2, shutdown_timeout=0.05), Gate()
    on_jobs(worker)(gate)
    for name in "abc":
        await jobs.offer(name, id=name)
    task = await running(worker)
    await until(lambda: len(gate.inside) == 2)
    worker.stop()
    await task
    assert gate.inside == []
    assert await attempts(jobs, *"abc") == dict.fromkeys("abc", ("ready", 0))
    assert await left(jobs) == (0, 3, 0, 0)
    (message,) = await jobs.claim()
    assert message.attempt == 1


async def test_what_was_claimed_ahead_is_handed_back_uncounted(
    client: Client, jobs: ReliableQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(server: Any, calls: Any) -> None:
        # The run waits for the hand-back, too.
        await asyncio.sleep(0.1)
        await hand_back.send(server, calls)

    monkeypatch.setattr("delayq._engine.returns.send", slowly)
    worker = Worker(client, concurrency=1, shutdown_timeout=5)
    stopped_at: list[int] = []
    handled: list[int] = []

    @on_jobs(worker)
    async def handle(value: int) -> None:
        handled.append(value)
        await asyncio.sleep(0)
        if not stopped_at and (await jobs.stats()).leased > 20:
            # Much is claimed ahead, because the handler is quick.
            stopped_at.append(value)
            worker.stop()

    await jobs.offer_many([delayq.Offer(value=value, id=str(value)) for value in range(3000)])
    await (await running(worker))
    assert stopped_at
    assert handled == list(range(len(handled)))
    assert await left(jobs) == (0, 3000 - len(handled), 0, 0)
    after = str(len(handled))
    assert await attempts(jobs, after) == {after: ("ready", 0)}


async def test_a_handler_that_swallows_its_cancellation_has_handled_its_message(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker = Worker(client, shutdown_timeout=0)
    begun = asyncio.Event()

    @on_jobs(worker)
    async def handle(value: int) -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    await jobs.offer(1)
    task = await running(worker)
    await begun.wait()
    worker.stop()
    await task
    assert await left(jobs) == (0, 0, 0, 0)


async def test_a_handler_that_does_not_end_at_all_is_left_behind(
    client: Client, jobs: ReliableQueue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, shutdown_timeout=0)
    begun, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @on_jobs(worker)
    async def handle(value: int) -> None:
        begun.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        ended.set()

    await jobs.offer(1)
    task = await running(worker)
    await begun.wait()
    worker.stop()
    async with asyncio.timeout(MARGIN):
        await task
    assert "1 handlers did not end after they were cancelled" in caplog.text
    release.set()
    await ended.wait()
    # The message was handled after all.
    await until(lambda: _is(left(jobs), (0, 0, 0, 0)))


async def _is(found: Coroutine[Any, Any, Any], expected: Any) -> bool:
    return bool(await found == expected)


async def test_a_sync_handler_that_does_not_end_is_left_behind_and_its_message_handed_back(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker = Worker(client, shutdown_timeout=0.05)
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    @on_jobs(worker)
    def handle(value: int) -> None:
        begun.set()
        release.wait(20)
        ended.set()

    await jobs.offer(1, id="a")
    task = await running(worker)
    await until(begun.is_set)
    worker.stop()
    await task
    assert await attempts(jobs, "a") == {"a": ("ready", 0)}
    release.set()
    await until(ended.is_set)
    assert await attempts(jobs, "a") == {"a": ("ready", 0)}


async def test_who_cancels_the_run_cancels_its_handlers_at_once(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    worker, gate = Worker(client, shutdown_timeout=3600), Gate()
    on_jobs(worker)(gate)
    await jobs.offer("a", id="a")
    task = await running(worker)
    await until(lambda: gate.inside)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await attempts(jobs, "a") == {"a": ("ready", 0)}


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_gracefully_and_the_old_handlers_are_back(
    client: Client, jobs: ReliableQueue[Any], number: signal.Signals
) -> None:
    worker, gate = Worker(client), Gate()
    on_jobs(worker)(gate)
    await jobs.offer("a")
    own = {signal.SIGTERM: lambda *_: None, signal.SIGINT: lambda *_: None}
    before = {one: signal.signal(one, handler) for one, handler in own.items()}
    task = await running(worker)
    await until(lambda: gate.inside)
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.05)
    assert gate.inside == ["a"]
    gate.open()
    await task
    assert {one: signal.signal(one, handler) for one, handler in before.items()} == own
    assert await left(jobs) == (0, 0, 0, 0)


async def test_a_second_signal_cancels_at_once(client: Client, jobs: ReliableQueue[Any]) -> None:
    worker, gate = Worker(client, shutdown_timeout=3600), Gate()
    on_jobs(worker)(gate)
    await jobs.offer("a", id="a")
    task = await running(worker)
    await until(lambda: gate.inside)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert not task.done()
    os.kill(os.getpid(), signal.SIGINT)
    await task
    assert await attempts(jobs, "a") == {"a": ("ready", 0)}


async def test_a_worker_in_the_background_leaves_signals_alone(client: Client) -> None:
    worker = Worker(client)
    on_jobs(worker)(Gate())
    before = signal.getsignal(signal.SIGTERM)
    async with worker:
        assert signal.getsignal(signal.SIGTERM) is before


# Signals, in a process of its own

PROGRAM = """
import asyncio, contextlib, sys, time, delayq

@contextlib.asynccontextmanager
async def lifespan(worker):
    await {start}
    yield
    await {end}

worker = delayq.Worker(sys.argv[1], shutdown_timeout=3600, lifespan=lifespan)

@worker.listener("jobs")
async def handle(value: int) -> None:
    print("begun", flush=True)
    {handle}

asyncio.run(worker.run(started=lambda: print("started", flush=True)))
print("over", flush=True)
"""
HANGS = 'asyncio.sleep(print("begun", flush=True) or 3600)'


class Program:
    """A program that runs a worker, any part of which may hang."""

    def __init__(
        self,
        server: PrivateServer,
        start: str = "asyncio.sleep(0)",
        end: str = "asyncio.sleep(0)",
        handle: str = "pass",
    ):
        text = PROGRAM.format(start=start, end=end, handle=handle)
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, server.url], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for(self, line: str) -> None:
        assert self._process.stdout is not None
        assert line in (found.strip() for found in self._process.stdout)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def lives_on(self) -> bool:
        """Return whether it still runs after a moment."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        return self._process.poll() is None

    def status(self) -> int:
        return self._process.wait(30)


NUMBERS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@NUMBERS
def test_a_signal_ends_a_start_that_hangs(
    own_server: PrivateServer, number: signal.Signals
) -> None:
    with Program(own_server, start=HANGS) as program:
        program.wait_for("begun")
        program.send(number)
        assert program.status() == 0


@NUMBERS
def test_a_second_signal_ends_a_lifespan_whose_end_hangs(
    own_server: PrivateServer, number: signal.Signals
) -> None:
    with Program(own_server, end=HANGS) as program:
        program.wait_for("started")
        program.send(number)
        program.wait_for("begun")
        assert program.lives_on()
        program.send(number)
        assert program.status() == 0


@NUMBERS
def test_a_third_signal_ends_the_process_whatever_hangs(
    own_server: PrivateServer, number: signal.Signals
) -> None:
    # Each part that is cancelled hangs again while it cleans up.
    start = (
        'asyncio.sleep(0)\n    try: await asyncio.sleep(print("begun", flush=True) or 3600)\n   '
        " finally: await " + HANGS
    )
    with Program(own_server, start=start) as program:
        program.wait_for("begun")
        program.send(number)
        program.wait_for("begun")
        program.send(number)
        assert program.lives_on()
        program.send(number)
        assert program.status() == -number


@NUMBERS
@pytest.mark.parametrize(
    "how",
    [
        "time.sleep(3600)",
        thorough("while True: time.sleep(0.01)"),
        thorough("while True: pass"),
    ],
)
async def test_a_third_signal_ends_a_process_whose_handler_blocks_the_loop(
    own_server: PrivateServer, number: signal.Signals, how: str
) -> None:
    async with delayq.connect(own_server.url) as client:
        await client.reliable_queue("jobs").offer(1)
    with Program(own_server, handle=how) as program:
        program.wait_for("begun")
        for _ in range(2):
            program.send(number)
            assert program.lives_on()
        program.send(number)
        assert program.status() == -number


def test_a_process_ends_though_a_sync_handler_hangs_in_its_thread(
    own_server: PrivateServer,
) -> None:
    text = PROGRAM.format(
        start='worker.client.reliable_queue("jobs").offer(1)',
        end="asyncio.sleep(0)",
        handle="time.sleep(3600)",
    )
    text = text.replace("async def handle", "def handle").replace(
        "shutdown_timeout=3600", "shutdown_timeout=0.1"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text, own_server.url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "begun" in (line.strip() for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().strip() == "over"
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


async def test_a_stop_during_a_start_that_hangs_ends_it_within_the_shutdown_timeout(
    client: Client,
) -> None:
    begun, events = asyncio.Event(), list[str]()

    @asynccontextmanager
    async def lifespan(worker: Worker) -> AsyncIterator[None]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")
        yield

    worker = Worker(client, shutdown_timeout=0.05, lifespan=lifespan)
    on_jobs(worker)(Gate())
    task = asyncio.create_task(worker.run())
    await begun.wait()
    worker.stop()
    await task
    assert events == ["cleaned up"]
    # No trace of the cancellation is left.
    task = asyncio.current_task()  # type: ignore[assignment]
    assert task.cancelling() == 0


async def test_a_stop_during_a_start_lets_it_finish(client: Client) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(worker: Worker) -> AsyncIterator[None]:
        worker.stop()
        await asyncio.sleep(0.05)
        events.append("up")
        yield
        await asyncio.sleep(0.05)
        events.append("down")

    worker = Worker(client, shutdown_timeout=3600, lifespan=lifespan)
    on_jobs(worker)(Gate())
    await worker.run()
    assert events == ["up", "down"]


# Background runs and lifespans


async def test_in_the_background_it_stops_when_the_block_ends(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    seen: list[Any] = []
    worker = Worker(client)

    @on_jobs(worker)
    async def handle(value: int) -> None:
        seen.append(value)

    for turn in (1, 2):
        async with worker as entered:
            assert entered is worker
            await jobs.offer(turn)
            await until(lambda turn=turn: turn in seen)  # type: ignore[misc]
    assert seen == [1, 2]
    assert await left(jobs) == (0, 0, 0, 0)


async def test_an_error_of_the_block_stops_it_too(client: Client) -> None:
    worker = Worker(client)
    on_jobs(worker)(Gate())
    with pytest.raises(LookupError):
        async with worker:
            raise LookupError
    with pytest.raises(delayq.Closed):
        _ = worker.client


async def test_a_lifespan_is_around_everything_but_the_client(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    events: list[Any] = []

    @asynccontextmanager
    async def lifespan(worker: Worker) -> AsyncIterator[None]:
        events.append(("up", worker.client is client))
        yield
        events.append(("down", worker.client is client))

    worker = Worker(client, lifespan=lifespan)

    @worker.dependency(once=True)
    async def number() -> AsyncIterator[int]:
        events.append("made")
        yield 5
        events.append("taken down")

    @on_jobs(worker)
    async def handle(value: str, number: int) -> None:
        events.append((value, number))

    await jobs.offer("a")
    await worker.run(burst=True)
    assert events == [("up", True), "made", ("a", 5), "taken down", ("down", True)]


async def test_a_lifespan_that_fails_lets_the_run_fail(client: Client) -> None:
    @asynccontextmanager
    async def lifespan(worker: Worker) -> AsyncIterator[None]:
        if worker:
            raise LookupError("no licence")
        yield

    worker = Worker(client, lifespan=lifespan)
    on_jobs(worker)(Gate())
    with pytest.raises(LookupError):
        await worker.run()
    with pytest.raises(LookupError):
        async with worker:
            pass


@pytest.mark.parametrize("how", ["url", "client not open yet"])
async def test_a_worker_opens_and_closes_what_is_its_own(server: PrivateServer, how: str) -> None:
    given = server.url if how == "url" else delayq.connect(server.url)
    worker = Worker(given)
    seen: list[Any] = []

    @worker.listener("jobs")
    async def handle(value: int, client: Client) -> None:
        seen.append((value, client))

    async with delayq.connect(server.url) as client:
        await client.reliable_queue("jobs").offer(1)
    await worker.run(burst=True)
    ((value, used),) = seen
    assert value == 1
    with pytest.raises(delayq.Closed):
        used.statistics()


async def test_it_runs_once_at_a_time_and_takes_no_listener_meanwhile(client: Client) -> None:
    worker = Worker(client)
    with pytest.raises(delayq.ConfigurationError, match="no listener"):
        await worker.run()
    on_jobs(worker)(Gate())
    async with worker:
        for call in (worker.run, worker.__aenter__):
            with pytest.raises(delayq.ConfigurationError, match="already running"):
                await call()
        with pytest.raises(delayq.ConfigurationError, match="already running"):
            worker.listener("others")(Gate())


async def test_a_client_that_closes_under_it_ends_the_run(server: PrivateServer) -> None:
    async with delayq.connect(server.url) as client:
        worker = Worker(client)
        on_jobs(worker)(Gate())
        task = await running(worker)
        await client.aclose()
        with pytest.raises(delayq.Closed):
            await task


# Servers that do not answer


async def test_a_server_that_is_not_there_at_the_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.1)
    worker = Worker("redis://127.0.0.1:1/0")
    on_jobs(worker)(Gate())
    with pytest.raises(delayq.ServerUnavailable):
        await worker.run()
    with pytest.raises(delayq.ServerUnavailable):
        async with worker:
            pass


async def test_while_the_server_is_down_it_waits_and_goes_on(own_server: PrivateServer) -> None:
    seen: list[Any] = []
    worker = Worker(own_server.url)

    @worker.listener("jobs")
    async def handle(value: int) -> None:
        seen.append(value)

    async with worker, delayq.connect(own_server.url) as client:
        queue = client.reliable_queue("jobs")
        await queue.offer(1)
        await until(lambda: seen == [1])
        await until(lambda: _is(left(queue), (0, 0, 0, 0)))
        own_server.restart()
        await queue.offer(2)
        await until(lambda: seen == [1, 2])


@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_a_stop_while_the_server_is_down_ends_in_time(
    own_server: PrivateServer, outage: str
) -> None:
    worker, gate = Worker(own_server.url, concurrency=2, shutdown_timeout=0.5), Gate()
    worker.listener("jobs")(gate)
    worker.listener("others")(Gate())
    async with delayq.connect(own_server.url) as client:
        await client.reliable_queue("jobs").offer_many(
            [delayq.Offer(value=value) for value in range(4)]
        )
    task = await running(worker)
    await until(lambda: len(gate.inside) == 2)
    (own_server.kill if outage == "killed" else own_server.pause)()
    started = time.monotonic()
    worker.stop()
    async with asyncio.timeout(0.5 + MARGIN):
        await task
    assert time.monotonic() - started < 0.5 + MARGIN
    if outage == "frozen":
        own_server.resume()


async def test_messages_handled_while_the_server_is_down_are_acknowledged_when_it_is_back(
    own_server: PrivateServer,
) -> None:
    worker, gate = Worker(own_server.url), Gate()
    worker.listener("jobs")(gate)
    async with delayq.connect(own_server.url) as client:
        queue = client.reliable_queue("jobs")
        await queue.offer(1)
        async with worker:
            await until(lambda: gate.inside)
            with own_server.paused():
                gate.open()
                await until(lambda: not gate.inside)
        assert await left(queue) == (0, 0, 0, 0)


async def test_handling_is_never_far_ahead_of_what_the_server_knows(
    own_server: PrivateServer,
) -> None:
    worker = Worker(own_server.url, concurrency=2)
    seen: list[int] = []

    @worker.listener("jobs")
    async def handle(value: int) -> None:
        seen.append(value)
        if len(seen) == 150:
            # Many messages are claimed ahead by then.
            own_server.pause()

    async with delayq.connect(own_server.url) as client:
        queue = client.reliable_queue("jobs")
        await queue.offer_many([delayq.Offer(value=value) for value in range(1000)])
        async with worker:
            await until(lambda: len(seen) >= 150)
            await asyncio.sleep(0.2)
            # Two messages are at work, and for each of them two more are not acknowledged yet.
            assert len(seen) <= 150 + 2 + 4
            own_server.resume()
            await until(lambda: len(seen) == 1000)
        assert await left(queue) == (0, 0, 0, 0)


async def test_a_server_that_refuses_is_asked_again(
    client: Client, server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    worker = Worker(client)

    @worker.listener("jobs")
    async def handle(value: int) -> None:
        seen.append(value)

    leases = ReliableKeys.of("jobs").leases
    server.call("SET", leases, "of another type")
    await client.reliable_queue("jobs").offer(1)
    async with worker:
        await until(lambda: "claiming messages failed" in caplog.text)
        server.call("DEL", leases)
        await until(lambda: seen == [1])
    assert caplog.text.count("claiming messages failed") == 1


async def test_keyboard_interrupt_goes_through(client: Client, jobs: ReliableQueue[Any]) -> None:
    # Raised in a task, it would end the event loop, so the deciding part is tested alone.
    async def handle(value: int) -> None:
        raise KeyboardInterrupt

    worker = Worker(client)
    on_jobs(worker)(handle)
    handling = Handling(worker._listeners["jobs"], (), {}, {}, Threads("jobs", 1), lambda: False)
    await jobs.offer(1, id="a")
    (message,) = await jobs.claim()
    with pytest.raises(KeyboardInterrupt):
        await handling.handle(message)
    assert await attempts(jobs, "a") == {"a": ("ready", 0)}


def test_outside_the_main_thread_it_runs_without_signals(server: PrivateServer) -> None:
    seen: list[Any] = []
    worker = Worker(server.url)

    @worker.listener("jobs")
    async def handle(value: int) -> None:
        seen.append(value)

    async def main() -> None:
        async with delayq.connect(server.url) as client:
            await client.reliable_queue("jobs").offer(1)
        await worker.run(burst=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(30)
    assert seen == [1]
