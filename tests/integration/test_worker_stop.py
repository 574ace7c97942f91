"""A worker's life: start, stop, signals, servers that do not answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator  # noqa: TC003 - the worker reads it
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pytest

import delayq
from delayq import Client, Offer, Worker
from delayq._redis import return_calls
from delayq._reliable.keys import ReliableKeys
from delayq.worker._stopping import signals_handled
from tests.support.depth import in_gate, nightly
from tests.support.reliable import Jobs, claim_one, depths, offers
from tests.support.timing import Control
from tests.support.waiting import be_impatient, until
from tests.support.workers import SETTINGS, Gate, Seen, on_jobs, running, work_off

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

# On a busy machine, stopping may take this much longer than its limit, in seconds.
MARGIN = 8.0
NONE = (0, 0, 0, 0)


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **SETTINGS)


READY = ("ready", 0)
"""The state and the attempts of a message that was given back uncounted."""


async def attempts(queue: Jobs, *ids: str) -> dict[str, tuple[str, int]]:
    """Return the state of each message, and how many attempts it has used."""
    stored_messages = [await queue.get(id_) for id_ in ids]
    return {message.id: (message.state, message.attempt) for message in stored_messages if message}


async def begin(
    worker: Worker, jobs: Jobs, gate: Gate, *ids: str, inside: int = 1
) -> asyncio.Task[None]:
    """Run the worker on messages named like their values, until some of them are at work."""
    on_jobs(worker)(gate)
    await jobs.offer_many([Offer(id_, id=id_) for id_ in ids])
    task = await running(worker)
    await until(lambda: len(gate.inside) == inside)
    return task


# Stopping


@pytest.mark.parametrize("slow", [False, True])
async def test_a_stop_claims_no_more_and_lets_handlers_finish_or_cancels_them_uncounted(
    client: Client, jobs: Jobs, caplog: pytest.LogCaptureFixture, *, slow: bool
) -> None:
    caplog.set_level("INFO", "delayq")
    worker, gate = Worker(client, concurrency=2, shutdown_timeout=0.05 if slow else 3600), Gate()
    task = await begin(worker, jobs, gate, *"abcd", inside=2)
    worker.stop()
    worker.stop()
    if not slow:
        await until(lambda: "waits for running handlers, up to 3600 s: 2" in caplog.text)
        assert (task.done(), len(gate.inside)) == (False, 2)
        gate.open()
    await task
    assert (gate.seen, gate.inside) == (["a", "b"], [])
    assert await attempts(jobs, *"abcd") == dict.fromkeys("abcd" if slow else "cd", READY)
    assert (await claim_one(jobs)).attempt == 1
    worker.stop()  # does nothing


async def test_messages_claimed_ahead_are_returned_uncounted(
    client: Client, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(server: Any, calls: Any) -> None:
        # The run waits for the return, too.
        await asyncio.sleep(0.1)
        await return_calls.send(server, calls)

    monkeypatch.setattr("delayq._engine.return_queue.send", slowly)
    worker = Worker(client, concurrency=1, shutdown_timeout=60)
    handled: list[int] = []
    partition = jobs._open.partitions[0]

    @on_jobs(worker)
    async def handle(value: int) -> None:
        handled.append(value)
        await asyncio.sleep(0)
        # Much is claimed ahead, because the handler is quick: so it asks no server how much. On a
        # machine that pauses, it never seems to be quick.
        if partition.counters.delivered - len(handled) > 20 or value == 2_000:
            worker.stop()

    await jobs.offer_many(offers(3000, ids=True))
    await (await running(worker))
    # What went back during a pause of the machine comes after what was claimed meanwhile.
    assert len({*handled}) == len(handled)
    assert await depths(jobs) == (0, 3000 - len(handled), 0, 0)
    after = str(min({*range(3000)} - {*handled}))
    assert await attempts(jobs, after) == {after: READY}


async def test_a_handler_that_swallows_a_cancellation_succeeds_or_is_left_behind(
    client: Client, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(client, shutdown_timeout=0)
    begun, release, ended = set[str](), asyncio.Event(), asyncio.Event()

    @on_jobs(worker)
    async def handle(value: str) -> None:
        begun.add(value)
        with suppress(asyncio.CancelledError):
            await release.wait()
        while value == "stays" and not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        if value == "stays":
            ended.set()

    await jobs.offer_many([Offer("ends"), Offer("stays")])
    task = await running(worker)
    await until(lambda: len(begun) == 2)
    worker.stop()
    await task
    assert "1 handlers did not end after they were cancelled" in caplog.text
    await until(lambda: depths(jobs), equals=(0, 0, 1, 0))
    release.set()
    await ended.wait()
    # The message was handled after all.
    await until(lambda: depths(jobs), equals=NONE)


async def test_a_sync_handler_that_does_not_end_is_left_behind(client: Client, jobs: Jobs) -> None:
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
    assert await attempts(jobs, "a") == {"a": READY}
    release.set()
    await until(ended.is_set)
    assert await attempts(jobs, "a") == {"a": READY}


@pytest.mark.parametrize("ending", ["main() returns", "a handler is interrupted"])
def test_the_end_of_the_event_loop_costs_no_attempt(server: PrivateServer, ending: str) -> None:
    # asyncio.run() cancels all tasks then: the run, and the handlers themselves.
    at_work, last = [*"abcdefgh"], "z"
    interrupts = ending == "a handler is interrupted"

    class Interrupting(Gate):
        async def __call__(self, value: Any) -> None:
            if value == last:
                raise KeyboardInterrupt
            await super().__call__(value)

    async def main() -> None:
        worker, inside = Worker(server.url, concurrency=20), len(at_work)
        async with delayq.connect(server.url) as client:
            jobs = client.reliable_queue("jobs", **SETTINGS)
            await begin(worker, jobs, Interrupting(), *at_work, inside=inside)
            if interrupts:
                await jobs.offer(last, id=last)
                await asyncio.Event().wait()

    async def left() -> dict[str, tuple[str, int]]:
        async with delayq.connect(server.url) as client:
            return await attempts(client.reliable_queue("jobs", **SETTINGS), *at_work, last)

    with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
        asyncio.run(main())
    assert asyncio.run(left()) == dict.fromkeys([*at_work, *[last] * interrupts], READY)


# Signals


async def test_a_signal_stops_all_workers_of_the_process(client: Client) -> None:
    first, second = Gate(), Gate()
    own = signal.getsignal(signal.SIGTERM)
    tasks = []
    for name, gate in (("first", first), ("second", second)):
        worker = Worker(client)
        worker.listener(name)(gate)
        await client.reliable_queue(name).offer(name)
        tasks.append(await running(worker))
    await until(lambda: bool(first.inside and second.inside))
    os.kill(os.getpid(), signal.SIGTERM)
    first.open()
    await tasks[0]
    # The other one still handles the next signal.
    assert signal.getsignal(signal.SIGTERM) is not own
    second.open()
    await tasks[1]
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_worker_whose_loop_was_closed_takes_no_signals() -> None:
    own, callers = signal.getsignal(signal.SIGTERM), list[str]()
    dead, loop = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def enter() -> AbstractContextManager[None]:
        handled = signals_handled(partial(callers.append, "dead"))
        handled.__enter__()
        return handled

    async def handle_one() -> None:
        with signals_handled(partial(callers.append, "alive")):
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: bool(callers))

    left = dead.run_until_complete(enter())
    dead.close()
    loop.run_until_complete(handle_one())
    loop.close()
    assert callers == ["alive"]
    assert signal.getsignal(signal.SIGTERM) is own
    left.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is own


async def test_a_second_signal_cancels_at_once(client: Client, jobs: Jobs) -> None:
    task = await begin(Worker(client, shutdown_timeout=3600), jobs, Gate(), "a")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert not task.done()
    os.kill(os.getpid(), signal.SIGINT)
    await task
    assert await attempts(jobs, "a") == {"a": READY}


# Signals, in a process of its own

PROGRAM = """
import asyncio, contextlib, os, signal, sys, time, delayq

set_handler = signal.signal

def set_handler_that_tells(number, handler):
    def tell(*details):
        handler(*details)
        os.write(1, b"caught\\n")
    ours = getattr(handler, "__module__", None) == "delayq.worker._stopping"
    return set_handler(number, tell if ours else handler)

signal.signal = set_handler_that_tells

@contextlib.asynccontextmanager
async def lifespan(worker):
    await {start}
    yield
    await {end}

worker = delayq.Worker(sys.argv[1], shutdown_timeout={patience}, lifespan=lifespan)

@worker.listener("jobs")
{kind} handle(value: int) -> None:
    print("begun", flush=True)
    {handle}

asyncio.run(worker.run(started=lambda: print("started", flush=True)))
print("over", flush=True)
"""
HANGS = 'asyncio.sleep(print("begun", flush=True) or 3600)'


class Program:
    """A program that runs a worker, any part of which may hang."""

    def __init__(self, server: PrivateServer, **parts: str) -> None:
        usual = {"start": "asyncio.sleep(0)", "end": "asyncio.sleep(0)", "handle": "pass"}
        text = PROGRAM.format(**{"kind": "async def", "patience": "3600"} | usual | parts)
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


@pytest.mark.parametrize("part", ["end", in_gate("start")])
def test_signals_end_a_lifespan_that_hangs(own_server: PrivateServer, part: str) -> None:
    with Program(own_server, **{part: HANGS}) as program:
        if part == "end":
            program.wait_for("started")
            program.send(signal.SIGTERM)
        program.wait_for("begun")
        assert program.lives_on()
        program.send(signal.SIGTERM)
        assert program.status() == 0


@pytest.mark.gate
def test_a_third_signal_ends_the_process(own_server: PrivateServer) -> None:
    number = signal.SIGTERM
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
        # Two signals that are pending at the same time would count as one.
        program.wait_for("caught")
        assert program.lives_on()
        program.send(number)
        assert program.status() == -number


@pytest.mark.gate
@pytest.mark.parametrize("how", ["time.sleep(3600)", nightly("while True: pass")])
async def test_a_third_signal_ends_a_process_whose_handler_blocks_the_loop(
    own_server: PrivateServer, how: str
) -> None:
    number = signal.SIGINT
    async with delayq.connect(own_server.url) as client:
        await client.reliable_queue("jobs").offer(1)
    with Program(own_server, handle=how) as program:
        program.wait_for("begun")
        for _ in range(2):
            program.send(number)
            program.wait_for("caught")
            assert program.lives_on()
        program.send(number)
        assert program.status() == -number


@pytest.mark.gate
def test_a_process_ends_although_a_sync_handler_hangs(own_server: PrivateServer) -> None:
    with Program(
        own_server,
        start='worker.client.reliable_queue("jobs").offer(1)',
        handle="time.sleep(3600)",
        kind="def",
        patience="0.1",
    ) as program:
        program.wait_for("begun")
        program.send(signal.SIGTERM)
        program.wait_for("over")
        assert program.status() == 0


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_stop_lets_a_start_finish_but_not_for_longer_than_the_shutdown_timeout(
    client: Client, *, hangs: bool
) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(worker: Worker) -> AsyncIterator[None]:
        worker.stop()
        try:
            await asyncio.sleep(3600 if hangs else 0.05)
            events.append("up")
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")
        yield
        await asyncio.sleep(0.05)
        events.append("down")

    worker = Worker(client, shutdown_timeout=0.05 if hangs else 3600, lifespan=lifespan)
    on_jobs(worker)(Gate())
    await worker.run()
    assert events == (["cleaned up"] if hangs else ["up", "cleaned up", "down"])


# Background runs and lifespans


async def test_a_worker_in_the_background_stops_with_its_block_and_leaves_signals_alone(
    client: Client, jobs: Jobs
) -> None:
    worker, seen = Worker(client), Seen()
    on_jobs(worker)(seen)
    before = signal.getsignal(signal.SIGTERM)
    for turn in (1, 2):
        async with worker as entered:
            assert entered is worker
            assert signal.getsignal(signal.SIGTERM) is before
            await jobs.offer(turn)
            await until(lambda turn=turn: turn in seen)  # type: ignore[misc]
    assert seen == [1, 2]
    assert await depths(jobs) == NONE
    with pytest.raises(LookupError):
        async with worker:
            raise LookupError
    with pytest.raises(delayq.Closed):
        _ = worker.client


async def test_a_lifespan_is_around_everything_but_the_client(client: Client, jobs: Jobs) -> None:
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

    await work_off(worker, jobs, "a")
    assert events == [("up", True), "made", ("a", 5), "taken down", ("down", True)]


async def test_a_start_that_fails_lets_the_run_fail(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def broken(worker: Worker) -> AsyncIterator[None]:
        if worker:
            raise LookupError("no licence")
        yield

    be_impatient(monkeypatch, 0.1)
    for worker, error in (
        (Worker(client, lifespan=broken), LookupError),
        (Worker("redis://127.0.0.1:1/0"), delayq.ServerUnavailable),
    ):
        on_jobs(worker)(Gate())
        with pytest.raises(error):
            await worker.run()
        with pytest.raises(error):
            async with worker:
                pass


async def test_a_worker_opens_and_closes_what_is_its_own(server: PrivateServer) -> None:
    addresses: list[Client | str] = [server.url, delayq.connect(server.url)]
    for number, given in enumerate(addresses):
        worker = Worker(given)
        seen: list[Any] = []

        @worker.listener("jobs")
        async def handle(value: int, client: Client, seen: Any = seen) -> None:
            seen.append((value, client))

        async with delayq.connect(server.url) as client:
            await client.reliable_queue("jobs").offer(number)
        await worker.run(burst=True)
        ((value, used),) = seen
        assert value == number
        with pytest.raises(delayq.Closed):
            used.statistics()


async def test_a_worker_runs_once_at_a_time_and_takes_no_listener_meanwhile(client: Client) -> None:
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


async def test_a_run_in_the_background_that_ends_by_itself_says_why(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await client.reliable_queue("jobs").configure(partitions=5)
    worker = Worker(client)
    on_jobs(worker, partitions=6)(Gate())
    with pytest.raises(delayq.ConfigurationError):
        async with worker:
            await until(lambda: "the worker stops: " in caplog.text)
    assert "partitions" in caplog.text


async def test_a_client_that_closes_under_it_ends_the_run(server: PrivateServer) -> None:
    async with delayq.connect(server.url) as client:
        worker = Worker(client)
        on_jobs(worker)(Gate())
        task = await running(worker)
        await client.aclose()
        with pytest.raises(delayq.Closed):
            await task


async def test_an_error_that_leaves_its_block_is_the_only_one(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A record that pytest keeps would keep the task, which complains only when it is collected.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    client = await delayq.connect(server.url).__aenter__()
    worker = Worker(client)
    on_jobs(worker)(Gate())
    with suppress(ZeroDivisionError):
        async with worker:
            await client.aclose()
            assert worker._background is not None
            await asyncio.wait({worker._background})
            raise ZeroDivisionError
    del worker, client
    gc.collect()
    assert unheard == []


# Servers that do not answer


@pytest.mark.timing
@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_a_stop_without_a_server_ends_in_time(own_server: PrivateServer, outage: str) -> None:
    worker, gate = Worker(own_server.url, concurrency=2, shutdown_timeout=0.5), Gate()
    worker.listener("jobs")(gate)
    worker.listener("others")(Gate())
    async with delayq.connect(own_server.url) as client:
        await client.reliable_queue("jobs").offer_many(offers(4))
    task = await running(worker)
    await until(lambda: len(gate.inside) == 2)
    (own_server.kill if outage == "killed" else own_server.pause)()
    started = time.monotonic()
    with Control() as control:
        worker.stop()
        await task
        took = time.monotonic() - started
    assert took - control.lost < 0.5 + MARGIN
    if outage == "frozen":
        own_server.resume()


async def test_a_worker_goes_on_when_its_server_is_back(own_server: PrivateServer) -> None:
    worker, gate = Worker(own_server.url), Gate()
    worker.listener("jobs")(gate)
    async with worker, delayq.connect(own_server.url) as client:
        queue = client.reliable_queue("jobs")
        await queue.offer(1)
        await until(lambda: gate.inside)
        with own_server.paused():
            # The acknowledgement waits.
            gate.open()
            await until(lambda: not gate.inside)
        await until(lambda: depths(queue), equals=NONE)
        own_server.restart()
        await queue.offer(2)
        await until(lambda: gate.seen == [1, 2])


async def test_handling_stays_close_to_what_the_server_knows(own_server: PrivateServer) -> None:
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
        await queue.offer_many(offers(1000))
        async with worker:
            await until(lambda: len(seen) >= 150)
            await asyncio.sleep(0.2)
            # Two messages are at work, and for each of them two more are not acknowledged yet.
            assert len(seen) <= 150 + 2 + 4
            own_server.resume()
            await until(lambda: len(seen) == 1000)
        assert await depths(queue) == NONE


async def test_a_server_that_refuses_is_asked_again(
    client: Client, server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    worker, seen = Worker(client), Seen()
    worker.listener("jobs")(seen)
    leased = ReliableKeys.of("jobs").leased
    server.call("SET", leased, "of another type")
    await client.reliable_queue("jobs").offer(1)
    async with worker:
        await until(lambda: "claiming messages failed" in caplog.text)
        server.call("DEL", leased)
        await until(lambda: seen == [1])
    assert caplog.text.count("claiming messages failed") == 1
    # A burst has no time to wait for the end of that.
    server.call("SET", leased, "of another type")
    with pytest.raises(delayq.errors.ServerRefused):
        await asyncio.wait_for(worker.run(burst=True), 60)


async def test_a_worker_outside_the_main_thread_runs_without_signal_handlers(
    server: PrivateServer, jobs: Jobs
) -> None:
    worker, seen = Worker(server.url), Seen()
    on_jobs(worker)(seen)
    await jobs.offer(1)
    await asyncio.to_thread(lambda: asyncio.run(worker.run(burst=True)))
    assert seen == [1]
