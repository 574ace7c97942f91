"""Synchronous clients: in scripts, in threads, in notebooks, and when they are interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import sync
from delayq.instrumentation import Observer
from tests.support.cases import naming
from tests.support.programs import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.servers import PrivateServer

SOON = 3600.0


@pytest.fixture
def client(server: PrivateServer) -> Iterator[sync.Client]:
    with sync.connect(server.url) as client:
        yield client


def wait_for(condition: Callable[[], bool], within: float = 60.0) -> bool:
    """Wait until the condition is true. Return whether it became so."""
    end = time.monotonic() + within
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def in_threads(count: int, call: Any, *, each: int = 1) -> list[Any]:
    """Call a function from threads that begin together, and return all results."""
    together = threading.Barrier(count)

    def calls(number: int) -> list[Any]:
        together.wait()
        return [call(number) for _ in range(each)]

    with ThreadPoolExecutor(count) as pool:
        return [result for some in pool.map(calls, range(count)) for result in some]


# The queues


def test_a_reliable_queue_is_used_as_an_asynchronous_one(client: sync.Client) -> None:
    mails = client.reliable_queue("mails")
    first = mails.offer({"to": "ada"}, delay=SOON)
    others = mails.offer_many([delayq.Offer(1), delayq.Offer(2, id="two")])
    assert others[1] == "two"
    with pytest.raises(delayq.DuplicateMessage) as caught:
        mails.offer(3, id="two")
    assert caught.value.ids == ("two",)
    assert mails.cancel_many([first, "two"]) == [True, True]
    assert mails.configure(max_size=1).max_size == mails.settings().max_size == 1
    with pytest.raises(delayq.QueueFull):
        mails.offer(4)
    steps: list[tuple[int, int]] = []
    assert mails.purge(progress=lambda *step: steps.append(step)) == 1
    assert steps
    next_at = mails.schedule("report", every=SOON, value="daily")
    assert [(schedule.name, schedule.next_at) for schedule in mails.schedules()] == [
        ("report", next_at)
    ]
    assert mails.unschedule("report")

    async def fail(client: delayq.Client, reason: str) -> None:
        for message in await client.reliable_queue("mails").claim(2):
            await message.bury(reason)

    mails.configure(max_size=None)
    first, second = mails.offer_many([delayq.Offer(1), delayq.Offer(2)])
    client.run(fail, reason="in a test")
    letters = [(letter.value, letter.reason) for letter in mails.dead.list()]
    assert letters == [(1, "in a test"), (2, "in a test")]
    assert mails.dead.redrive(letter for letter in [first]) == 1
    assert mails.dead.purge([second]) == 1
    assert mails.dead.size() == 0


async def test_another_event_loop_awaits_what_the_client_does(server: PrivateServer) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def offer(client: delayq.Client, value: str, *, to: str) -> str:
        return await client.reliable_queue("mails").offer(value, id=to)

    async def hang(_: delayq.Client) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    client = sync.connect(server.url)
    mails = client.reliable_queue("mails")
    ids = await asyncio.gather(*(client.arun(offer, "ada", to=str(n)) for n in range(3)))
    assert ids == ["0", "1", "2"]
    with pytest.raises(delayq.DuplicateMessage):
        await client.arun(offer, "ada", to="0")
    assert (await asyncio.to_thread(mails.stats)).ready == 3
    # What it no longer awaits is cancelled.
    waiting = asyncio.create_task(client.arun(hang))
    assert await asyncio.to_thread(begun.wait, 30)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(cancelled.wait, 30)
    await asyncio.to_thread(client.close)
    with pytest.raises(delayq.Closed):
        await client.arun(offer, "ada", to="4")


def test_a_client_reports_figures_and_errors_to_its_caller(client: sync.Client) -> None:
    threads: list[int] = []

    def offers() -> Iterator[delayq.Offer[int]]:
        threads.append(threading.get_ident())
        yield delayq.Offer(1)

    mails = client.reliable_queue("mails")
    mails.offer_many(offers())
    assert threads == [threading.get_ident()]
    assert abs((client.server_time() - datetime.now(UTC)).total_seconds()) < 60
    assert client.statistics().queues == 1
    assert [queue.name for queue in client.queue_statistics()] == ["mails"]
    assert [*client.queue_depths()] == [("reliable", "mails")]
    assert client.queue_depths(exclude=[("reliable", "mails")]) == {}
    # An error leads to the line that called.
    with pytest.raises(delayq.EncodeError) as caught:
        mails.offer(object())
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[0].line == "mails.offer(object())"
    assert frames[-1].filename.endswith("codecs/json.py")
    with pytest.raises(delayq.ConfigurationError, match="would wait for itself"):
        mails.purge(progress=lambda *_: print(mails.stats()))
    assert mails.stats().ready == 0


# Opening and closing


def test_a_client_connects_with_its_first_call(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.stop()
    # Longer than the test may take.
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 3600)
    client = sync.connect(own_server.url, retry_for=timedelta(seconds=0.2))
    mails = client.reliable_queue("mails")
    with pytest.raises(delayq.ServerUnavailable):
        mails.offer(1)
    own_server.start()
    assert mails.offer(1)
    own_server.stop()
    for call in (lambda: mails.offer(1), mails.stats):
        with pytest.raises((delayq.ServerUnavailable, delayq.OutcomeUnknown)):
            call()
    client.close()


def test_a_closed_client_or_queue_says_so(server: PrivateServer) -> None:
    client = sync.connect(server.url)
    client.close()
    with pytest.raises(delayq.Closed), client:
        pass
    with sync.connect(server.url) as client, sync.connect(server.url) as other:
        with client.reliable_queue("mails") as mails, client.delayed_queue("orders") as orders:
            mails.offer(1)
            orders.offer(1)
        for queue in (mails, orders):
            with pytest.raises(delayq.Closed, match="the queue is closed"):
                queue.offer(1)
        assert client.reliable_queue("mails").stats().ready == 1
        client.close()
        client.close()
        mails.close()
        for call in (
            lambda: mails.offer(1),
            lambda: client.reliable_queue("x"),
            client.server_time,
        ):
            with pytest.raises(delayq.Closed, match="the client is closed"):
                call()
        assert other.reliable_queue("mails").stats().ready == 1


def test_a_client_may_be_closed_while_another_thread_opens_it(own_server: PrivateServer) -> None:
    client = sync.connect(own_server.url)
    with own_server.paused(), ThreadPoolExecutor(1) as pool:
        opening = pool.submit(client.server_time)
        time.sleep(0.2)
        client.close()
        with pytest.raises(delayq.Closed, match="the client is closed"):
            opening.result(60)


def connections(server: PrivateServer) -> int:
    return server.call("CLIENT", "LIST").count(b"name=delayq")


def test_a_client_that_is_dropped_is_closed(server: PrivateServer) -> None:
    queues = [sync.connect(server.url).reliable_queue("mails")]
    gc.collect()
    queues[0].offer(1)
    assert connections(server)
    with pytest.warns(ResourceWarning, match="was not closed"):
        queues.clear()
    assert wait_for(lambda: not connections(server))


# Threads, loops and contexts


def test_threads_share_a_client_and_its_calls(client: sync.Client) -> None:
    mails = client.reliable_queue("mails")
    # The first call opens it.
    in_threads(16, lambda _: mails.offer(1))
    assert client.statistics().connections_opened <= 4
    assert mails.stats().ready == 16
    before = client.statistics().round_trips
    ids = in_threads(32, mails.offer, each=20)
    assert len({*ids}) == 640
    assert client.statistics().round_trips - before < 640 / 3


async def test_a_thread_whose_own_loop_runs_may_call(server: PrivateServer) -> None:
    """As in a notebook."""
    with sync.connect(server.url) as client:
        mails = client.reliable_queue("mails")
        assert mails.offer(1)
        assert asyncio.get_running_loop().is_running()
        async with delayq.connect(server.url) as other:
            (message,) = await other.reliable_queue("mails").claim()
            await message.ack()
        assert mails.stats().leased == 0


class Contexts(Observer):
    """Records the value of a variable in each call that offers."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def sending(self, sending: object) -> None:
        self.seen.append(REQUEST.get())


REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


def test_an_observer_sees_the_context_of_the_caller(client: sync.Client) -> None:
    contexts = Contexts()
    client.observe(contexts)
    mails = client.reliable_queue("mails")

    def offer(number: int) -> None:
        REQUEST.set(f"request {number}")
        mails.offer(number)

    in_threads(8, offer)
    assert sorted(contexts.seen) == [f"request {number}" for number in range(8)]
    client.unobserve(contexts)
    mails.offer(8)
    assert len(contexts.seen) == 8


# Interruptions, and the end of the interpreter

NOTE = (
    "delayq: the call was interrupted. If it had been sent to the server, it is carried out all the"
    " same; otherwise"
)


class Late(Exception):
    """What the handler of a signal raises."""


def test_an_interrupted_call_tells_what_became_of_it(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By then, a call that is cancelled has ended, however slow the machine.
    monkeypatch.setattr("delayq.sync._portal._END_OF_CALL", 30)
    client = sync.connect(own_server.url)
    mails = client.reliable_queue("mails")
    mails.offer(0)
    main = threading.get_ident()

    def raise_late(*_: object) -> None:
        raise Late

    def is_calling() -> bool:
        frames = traceback.extract_stack(sys._current_frames()[main])
        return any(frame.filename.endswith("_portal.py") for frame in frames)

    def interrupt() -> None:
        while not is_calling():
            time.sleep(0.01)
        # Meanwhile the call is sent.
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGUSR2)

    def interrupted(call: Callable[[], object]) -> str:
        with own_server.paused(), ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(Late) as caught:
                call()
        return "".join(caught.value.__notes__)

    async def finishes(client: delayq.Client) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await client.server_time()

    async def fails(client: delayq.Client) -> None:
        try:
            await client.server_time()
        except asyncio.CancelledError:
            raise ValueError("for a reason") from None

    former = signal.signal(signal.SIGUSR2, raise_late)
    try:
        assert interrupted(lambda: mails.offer(1)) == f"{NOTE} it is not"
        assert wait_for(lambda: mails.stats().ready == 2)
        assert interrupted(lambda: client.run(finishes)) == (
            "delayq: the interrupted call had been carried out"
        )
        assert interrupted(lambda: client.run(fails)) == (
            "delayq: the interrupted call had failed: ValueError('for a reason')"
        )
    finally:
        signal.signal(signal.SIGUSR2, former)
        client.close()
    with sync.connect(own_server.url) as other:
        assert other.reliable_queue("mails").stats().ready == 2


# Calls that are not ended, and waiting for a server, outlast the limit of each program.
_PATIENT = """
import atexit, os, signal, sys, threading, time, delayq
import delayq._engine.scheduler, delayq._redis.client, delayq._redis.pool
for module in (delayq._redis.client, delayq._redis.connection):
    module.GIVE_UP_AFTER = 600
delayq._redis.client.RETRY_FOR = delayq._redis.pool.OPEN_TIMEOUT = 600
delayq._engine.scheduler._CLOSE_WITHIN = 600
"""


def exits(program: str, server: PrivateServer) -> str:
    """Run a program that leaves its client open. Return what it prints: nothing to stderr."""
    given = (server.url, str(server.pid) if server.is_running() else "0")
    done = run_python("-W", "error", "-c", f"{_PATIENT}\n{program}", *given)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


OPEN = """
import asyncio
begun = threading.Event()
async def wait(_):
    begun.set()
    await asyncio.sleep(600)
client = delayq.sync.connect(sys.argv[1])
mails, orders = client.reliable_queue("mails"), client.delayed_queue("orders")
assert threading.active_count() == 1
mails.offer(1)
orders.offer(1)
"""
ALL_AT_ONCE = """
atexit.register(lambda: mails.offer(2))
threading.Thread(target=lambda: (time.sleep(0.3), mails.offer(2))).start()
# Blocked when the interpreter exits.
threading.Thread(target=client.run, args=[wait], daemon=True).start()
begun.wait()
def ask():
    while True:
        client.server_time()
threading.Thread(target=ask, daemon=True).start()
"""
FIRST_CALL = """
mails = delayq.sync.connect(sys.argv[1]).reliable_queue("mails")
def offer():
    threading.main_thread().join()
    try:
        mails.offer(1)
    except delayq.Closed as error:
        print(error)
threading.Thread(target=offer).start()
"""
NO_THREAD = """
start = threading.Thread.start
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
mails = delayq.sync.connect(sys.argv[1]).reliable_queue("mails")
try:
    mails.offer(1)
except delayq.DelayqError as error:
    print(error)
threading.Thread.start = start
mails.offer(2)
print(mails.stats().ready)
"""
EXITING = (
    "the interpreter is exiting: synchronous clients are closed, or were not used before the main"
    " thread ended; make the first call earlier"
)


def test_the_interpreter_exits_in_silence_and_a_call_after_its_end_says_so(
    server: PrivateServer,
) -> None:
    program = f"""
def offer():
    try:
        mails.offer(2)
    except delayq.Closed as error:
        print(error)
atexit.register(offer)
{OPEN}
{ALL_AT_ONCE}
"""
    assert exits(program, server) == EXITING
    assert not connections(server)
    with sync.connect(server.url) as client:
        assert client.reliable_queue("mails").stats().ready == 3


def test_a_thread_that_did_not_start_is_tried_again(server: PrivateServer) -> None:
    explanation, ready = exits(NO_THREAD, server).splitlines()
    assert "can't start new thread. Nothing was done; try again" in explanation
    assert ready == "1"


@pytest.mark.gate
def test_a_first_call_after_the_main_thread_works_or_says_why_not(server: PrivateServer) -> None:
    """From Python 3.12 on, no thread can be started any more."""
    assert exits(FIRST_CALL, server) == ("" if sys.version_info < (3, 12) else EXITING)


@pytest.mark.gate
def test_the_interpreter_exits_in_silence_however_it_ends(server: PrivateServer) -> None:
    for end in ("", "sys.exit()", "client.close()", "del client, mails.dead"):
        with naming(end):
            exits(f"{OPEN}\n{end}", server)
            assert not connections(server)


@pytest.mark.gate
def test_the_interpreter_exits_without_its_server(own_server: PrivateServer) -> None:
    silent = "import logging; logging.getLogger('delayq').addHandler(logging.NullHandler())"
    for how in ("SIGKILL", "SIGSTOP"):
        own_server.start()
        with naming(how):
            exits(f"{silent}\n{OPEN}\nos.kill(int(sys.argv[2]), signal.{how})", own_server)
    # While a client connects.
    exits(
        """
client = delayq.sync.connect(sys.argv[1])
threading.Thread(target=client.server_time, daemon=True).start()
while not ((portal := delayq.sync._portal.find()) and portal.to_close):
    time.sleep(0.01)
time.sleep(0.5)
""",
        own_server,
    )


@pytest.mark.gate
def test_a_private_server_ends_with_the_interpreter() -> None:
    program = """
import delayq
async def path(client): return client.private_server
client = delayq.sync.connect("embedded:")
client.reliable_queue("mails").offer(1)
print(client.run(path))
"""
    done = run_python("-W", "error", "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    path = Path(done.stdout.strip().removeprefix("unix://"))
    assert wait_for(lambda: not path.exists())


def test_tasks_are_offered_through_a_client_until_it_is_closed(server: PrivateServer) -> None:
    tasks = delayq.Tasks("mails")

    @tasks.task
    def send(to: str) -> None: ...

    with sync.connect(server.url, tasks=[tasks]) as client:
        assert send.options(id="a", delay=SOON).offer_sync("ada") == "a"
        in_threads(4, lambda number: send.offer_sync(str(number)))
        assert len(tasks.offer_many_sync([send.to_offer("bob")])) == 1
        message = client.reliable_queue("mails").get("a")
        assert message is not None
        assert message.value == {"task": "send", "args": {"to": "ada"}}
        assert client.reliable_queue("mails").stats().ready == 5
    with pytest.raises(delayq.ConfigurationError, match="not bound to a client"):
        send.offer_sync("ada")
