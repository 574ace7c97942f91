"""Listeners that take many messages at a time."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import delayq
from delayq import Backoff, Client, Message, Offer, Reject, Snooze, Worker
from delayq._reliable.replies import Claim, Start
from delayq.instrumentation import Observer
from delayq.worker._batches import Batches
from tests.support.reliable import Jobs, depths, get
from tests.support.reliable_fixtures import LEASE
from tests.support.tasks import running
from tests.support.waiting import until
from tests.support.workers import SETTINGS, Gate, Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.reliable_store import Store
    from tests.support.servers import PrivateServer

NONE = (0, 0, 0, 0)
# Longer than any test takes.
LONG = 60.0
# Renewals during a lease of LEASE: one every tenth of a second.
OFTEN = 36_000


@dataclass
class Event:
    id: int


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **SETTINGS)


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client, concurrency=2, shutdown_timeout=5)


def batches(worker: Worker, **options: Any) -> Callable[[Any], Any]:
    return worker.listener("jobs", **{"batch": 10, "linger": LONG} | SETTINGS | options)


class Gathered:
    """A handler that records its batches."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    async def __call__(self, values: list[int]) -> None:
        self.seen.append(values)


async def offer(jobs: Jobs, count: int, first: int = 0) -> None:
    await jobs.offer_many([Offer(n, id=str(n)) for n in range(first, first + count)])


async def test_a_full_batch_is_handled_at_once_the_rest_when_the_worker_stops(
    worker: Worker, jobs: Jobs
) -> None:
    gathered = Gathered()
    batches(worker)(gathered)
    await offer(jobs, 33)
    async with worker:
        await until(lambda: len(gathered.seen) == 3)
        await until(lambda: _at_work(worker) == 3)
        assert [len(batch) for batch in gathered.seen] == [10, 10, 10]
    assert sorted(itertools.chain(*gathered.seen)) == [*range(33)]
    assert await depths(jobs) == NONE


async def test_a_batch_that_is_not_full_begins_after_its_linger(worker: Worker, jobs: Jobs) -> None:
    gathered = Gathered()
    batches(worker, linger=0.05)(gathered)
    async with worker:
        await offer(jobs, 3)
        await until(lambda: sum(map(len, gathered.seen)) == 3)
        # The next batch waits anew.
        await offer(jobs, 1, first=3)
        await until(lambda: gathered.seen[-1] == [3])
    # Nor does a burst wait for others.
    await offer(jobs, 13, first=4)
    await worker.run(burst=True)
    assert sorted(itertools.chain(*gathered.seen)) == [*range(17)]
    assert await depths(jobs) == NONE


async def test_concurrency_limits_how_many_batches_run_at_a_time(
    client: Client, jobs: Jobs
) -> None:
    worker, gate = Worker(client, concurrency=5), Gate()

    @batches(worker, batch=2, concurrency=3)
    async def handle(values: list[int]) -> None:
        await gate(values)

    await offer(jobs, 40)
    async with worker:
        await until(lambda: len(gate.inside) == 3)
        gate.open()
        await until(lambda: len(gate.seen) == 20)
    assert gate.most == 3


async def test_nothing_waits_for_a_batch_that_takes_long_nor_takes_slots_of_other_listeners(
    client: Client, jobs: Jobs
) -> None:
    worker, gate, seen = Worker(client, concurrency=1), Gate(), Seen()

    @batches(worker)
    async def handle(values: list[int]) -> None:
        # The first ones are quick, so that others gather in the meantime.
        if values[0] >= 50:
            await gate(values)

    worker.listener("others")(seen)
    await offer(jobs, 80)
    async with worker:
        await until(lambda: depths(jobs), equals=(0, 20, 10, 0))
        assert [len(values) for values in gate.inside] == [10]
        await client.reliable_queue("others").offer("x")
        await until(lambda: seen == ["x"])
        gate.open()
        await until(lambda: len(gate.seen) == 3)
    assert await depths(jobs) == NONE


async def test_a_batch_under_a_rate_does_not_linger_for_messages_of_the_next_window(
    worker: Worker, jobs: Jobs
) -> None:
    seen, began = Gathered(), list[float]()

    @batches(worker, limit=delayq.Limit(rate=3, per=0.5))
    async def handle(values: list[int]) -> None:
        if not began:
            # As if the machine paused here: the next window begins after that.
            time.sleep(0.3)
        began.append(time.monotonic())
        await seen(values)

    await offer(jobs, 7)
    async with worker:
        await until(lambda: len(seen.seen) == 3)
    assert seen.seen == [[0, 1, 2], [3, 4, 5], [6]]
    assert min(later - earlier for earlier, later in itertools.pairwise(began)) > 0.499


async def test_a_batch_under_a_rate_waits_for_the_messages_claimed_with_it(
    worker: Worker, jobs: Jobs
) -> None:
    gathered = Gathered()
    batches(worker, limit=delayq.Limit(rate=3, per=3600))(gathered)

    @worker.middleware
    async def look_up(message: Message[Any], call_next: Any) -> None:
        for _ in range(50 if message.value == 0 else 0):
            await asyncio.sleep(0)
        # One that does not join keeps nobody waiting.
        if message.value != 1:
            await call_next()

    await offer(jobs, 3)
    async with worker:
        await until(lambda: gathered.seen)
    assert gathered.seen == [[2, 0]]


async def test_a_message_too_late_for_its_rated_batch_goes_back_and_does_not_count_as_handled(
    client: Client, worker: Worker, jobs: Jobs
) -> None:
    gate, outcomes = Gate(), list[BaseException | None]()
    batches(worker, linger=0, limit=delayq.Limit(rate=3, per=3600))(gate)

    class Observed(Observer):
        def handled(self, queue: str, seconds: float, error: BaseException | None) -> None:
            outcomes.append(error)

    @worker.middleware
    async def look_up(message: Message[Any], call_next: Any) -> None:
        if message.value == 0:
            await until(lambda: gate.seen)
        await call_next()

    client.observe(Observed())
    await offer(jobs, 2)
    async with worker:
        await until(lambda: depths(jobs), equals=(0, 1, 1, 0))
        assert (gate.inside, outcomes) == ([[1]], [])
        gate.open()
        await until(lambda: gate.seen == [[1], [0]])
    assert outcomes == [None, None]


async def test_windows_of_a_rate_stay_apart_even_if_the_worker_stops() -> None:
    begun: list[Any] = []

    async def handle(messages: list[Any]) -> None:
        begun.append(messages)

    joined = Batches(handle, size=1, linger=0, concurrency=1)
    message: Any = SimpleNamespace(claim=Claim(b"a", b"2", b"", 0, 0.0, None, 0))
    hour_us = 3_600_000_000
    await joined.join(message, start=Start(0, hour_us))
    async with running(joined.join(message, start=Start(hour_us, hour_us))):
        await asyncio.sleep(0)
        joined.hurry()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(begun) == 1


async def test_a_batch_that_fails_is_retried_message_by_message(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @batches(worker, batch=2, max_attempts=2, backoff=Backoff.fixed(0))
    async def handle(values: list[int]) -> None:
        raise ZeroDivisionError("divided")

    attempts = {"0": 2, "1": 1, "2": 2, "3": 1}
    await jobs.offer_many([Offer(0, id=id_, max_attempts=n) for id_, n in attempts.items()])
    await worker.run(burst=True)
    assert {letter.id: letter.attempt for letter in await jobs.dead.list()} == attempts
    failures = [record for record in caplog.records if "batch of 2" in record.message]
    assert [record.levelname for record in failures] == ["ERROR"] * 3
    assert "ZeroDivisionError" in caplog.text


async def test_a_batch_handler_may_settle_single_messages_and_its_instruction_is_for_the_others(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delayq")

    @batches(worker, batch=4)
    async def handle(messages: list[Message[int]]) -> None:
        for message in messages:
            if message.value == 0:
                await message.ack()
            if message.value == 1:
                await message.bury("no good")
        raise Reject("none of them") if messages[0].value > 3 else Snooze(3600)

    await offer(jobs, 4)
    await worker.run(burst=True)
    assert await depths(jobs) == (2, 0, 0, 1)
    assert (await get(jobs, "2")).attempt == 0
    await offer(jobs, 4, first=4)
    await worker.run(burst=True)
    reasons = [letter.reason for letter in await jobs.dead.list()]
    assert sorted(reasons) == ["no good", *["none of them"] * 4]
    assert "batch of 4 messages was answered with Reject" in caplog.text


async def test_a_message_that_cannot_be_decoded_harms_no_other(worker: Worker, jobs: Jobs) -> None:
    seen: list[list[Event]] = []

    @batches(worker, batch=2)
    async def handle(events: list[Event]) -> None:
        seen.append(events)

    await jobs.offer_many([Offer({"id": 1}), Offer("nonsense"), Offer({"id": 2})])
    async with worker:
        await until(lambda: bool(seen))
    assert sorted(event.id for event in seen[0]) == [1, 2]
    (letter,) = await jobs.dead.list()
    assert letter.reason == "undecodable"


async def test_leases_are_kept_while_messages_wait_and_while_they_are_handled(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.lease_keeper._TIMES", OFTEN)
    worker, begun, go_on = Worker(client), asyncio.Event(), asyncio.Event()
    handled: list[list[int]] = []

    @worker.listener("jobs", batch=2, linger=LONG, lease=LEASE)
    async def handle(values: list[int]) -> None:
        begun.set()
        await go_on.wait()
        handled.append(values)

    async def are_renewed() -> bool:
        leases = (await store.look()).leases.values()
        return all(ends_us > 0.9 * LEASE * 1_000_000 for ends_us in leases)

    async def longer_than_a_lease() -> None:
        for _ in range(2):
            await store.let_pass(0.8 * LEASE)
            await until(are_renewed)

    jobs = client.reliable_queue("jobs", lease=LEASE)
    await jobs.offer(1)
    async with worker:
        await until(lambda: _at_work(worker) == 1)
        await longer_than_a_lease()
        await jobs.offer(2)
        await begun.wait()
        await longer_than_a_lease()
        go_on.set()
        await until(lambda: depths(jobs), equals=NONE)
    assert handled == [[1, 2]]


async def test_a_message_that_is_cancelled_leaves_its_batch(
    worker: Worker, jobs: Jobs, server: PrivateServer
) -> None:
    gate = Gate()

    @batches(worker, batch=3)
    async def handle(values: list[int]) -> None:
        await gate(values)

    await offer(jobs, 2)
    async with worker:
        await until(lambda: _at_work(worker) == 2)
        # Before its batch begins,
        assert await jobs.cancel("0", running=True)
        await until(lambda: _at_work(worker) == 1)
        await offer(jobs, 2, first=2)
        await until(lambda: gate.inside)
        assert sorted(gate.seen[0]) == [1, 2, 3]
        # and while it is handled: that goes on for the others,
        assert await jobs.cancel("1", running=True)
        await until(lambda: _at_work(worker) == 2)
        assert gate.inside
        # until there are none.
        assert await jobs.cancel_many(["2", "3"], running=True) == [True, True]
        await until(lambda: not gate.inside)
    assert await depths(jobs) == NONE


async def test_a_batch_that_has_ended_counts_even_if_its_messages_are_cancelled_then() -> None:
    members: list[asyncio.Task[None]] = []

    async def handle(messages: list[Any]) -> None:
        # This arrives before the members have heard of the end.
        asyncio.get_running_loop().call_soon(lambda: [member.cancel() for member in members])

    joined = Batches(handle, size=2, linger=LONG, concurrency=1)
    members += [asyncio.create_task(joined.join(cast("Any", n))) for n in range(2)]
    assert await asyncio.gather(*members, return_exceptions=True) == [None, None]


async def test_no_batch_begins_with_a_message_that_is_being_cancelled() -> None:
    seen: list[list[Any]] = []

    async def handle(messages: list[Any]) -> None:
        seen.append(messages)

    joined = Batches(handle, size=2, linger=LONG, concurrency=1)
    members = [asyncio.create_task(joined.join(cast("Any", 0)))]
    await asyncio.sleep(0)
    # The next one joins before the first one has left.
    members.append(asyncio.create_task(joined.join(cast("Any", 1))))
    members[0].cancel()
    members.append(asyncio.create_task(joined.join(cast("Any", 2))))
    await asyncio.wait(members, timeout=60)
    assert members[0].cancelled()
    assert seen == [[1, 2]]


def test_an_interrupt_in_a_batch_ends_the_worker_and_costs_no_attempt(
    server: PrivateServer,
) -> None:
    async def work() -> None:
        async with delayq.connect(server.url) as client:
            worker = Worker(client)

            @batches(worker, batch=3)
            async def handle(values: list[int]) -> None:
                raise KeyboardInterrupt

            await offer(client.reliable_queue("jobs", **SETTINGS), 3)
            await worker.run()

    async def states() -> list[tuple[int, str]]:
        async with delayq.connect(server.url) as client:
            jobs = client.reliable_queue("jobs", **SETTINGS)
            messages = [await get(jobs, str(n)) for n in range(3)]
            return [(message.attempt, message.state) for message in messages]

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert asyncio.run(states()) == [(0, "ready")] * 3


async def test_a_worker_that_may_wait_no_longer_gives_its_batches_back(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker, began = Worker(client, shutdown_timeout=0.05), asyncio.Event()

    @worker.listener("jobs", batch=2, linger=LONG)
    async def handle(values: list[int]) -> None:
        began.set()
        await asyncio.sleep(LONG)

    jobs = client.reliable_queue("jobs")
    await offer(jobs, 2)
    async with worker:
        await began.wait()
    assert await depths(jobs) == (0, 2, 0, 0)
    assert (await get(jobs, "0")).attempt == 0
    assert "failed" not in caplog.text


async def test_messages_of_a_batch_that_is_slow_or_fails_are_retried_and_say_why(
    worker: Worker, jobs: Jobs
) -> None:
    @batches(worker, batch=2, timeout=0.05)
    async def handle(values: list[int]) -> None:
        if 3 in values:
            raise ZeroDivisionError("divided")
        await asyncio.sleep(LONG)

    for first, error_end in ((0, "TimeoutError: timed out after 0.05 s"), (2, "Error: divided")):
        await offer(jobs, 2, first)
        await worker.run(burst=True)
        for n in (first, first + 1):
            message = await get(jobs, str(n))
            assert (message.attempt, message.state) == (1, "delayed")
            error = message.last_error or ""
            assert error.endswith(error_end)
            # A handler's own error comes without the frames of the worker.
            assert first == 0 or "delayq/worker" not in error


async def test_the_timeout_of_a_message_begins_with_its_batch_and_concerns_no_other(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[int]] = []

    @batches(worker, batch=2, linger=0.2)
    async def handle(values: list[int]) -> None:
        seen.append(values)
        if 3 in values:
            await asyncio.sleep(LONG)
        if 1 in values:
            await asyncio.sleep(0.3)

    # One that waits for others, one whose batch takes longer, and one that is alone then.
    for n in range(4):
        await jobs.offer(n, id=str(n), timeout=LONG if n == 2 else 0.1, delay=0.3 * (n > 2))
        if n == 0:
            async with worker:
                await until(lambda: seen == [[0]])
    async with worker:
        await until(lambda: len(seen) == 3)
        await until(lambda: _at_work(worker) == 0)
    assert seen[1:] == [[1, 2], [3]]
    assert {message.id: message.attempt for message in await jobs.list("delayed")} == {
        "1": 1,
        "3": 1,
    }
    assert "batch of" not in caplog.text


async def test_a_burst_ends_although_threads_hang(worker: Worker, jobs: Jobs) -> None:
    go_on = threading.Event()

    @batches(worker, batch=2, timeout=0.5)
    def handle(values: list[int]) -> None:
        go_on.wait(60)

    await offer(jobs, 6)
    try:
        await worker.run(burst=True)
        assert await depths(jobs) == (2, 4, 0, 0)
    finally:
        go_on.set()


async def test_batches_wait_for_threads_that_hang(worker: Worker, jobs: Jobs) -> None:
    threads: list[threading.Thread] = []
    go_on = threading.Event()

    @batches(worker, batch=2)
    def handle(values: list[int]) -> None:
        threads.append(threading.current_thread())
        go_on.wait(60)

    # No message of the second batch has a limit: its thread does not hang.
    await jobs.offer_many([Offer(n, timeout=0.5) for n in range(2)])
    await offer(jobs, 2)
    try:
        async with worker:
            # The messages of the second batch went back as they were.
            await until(lambda: depths(jobs), equals=(2, 2, 0, 0))
            assert len(threads) == 1
            assert threads[0] is not threading.main_thread()
            assert [message.attempt for message in await jobs.list("ready")] == [0] * 2
            go_on.set()
            await until(lambda: len(threads) == 2)
    finally:
        go_on.set()
    assert await depths(jobs) == (2, 0, 0, 0)


async def test_dependencies_are_made_once_for_a_batch_and_middleware_is_run_for_each_message(
    worker: Worker, jobs: Jobs
) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    made, around, seen = list[Event](), list[str](), list[str]()

    @worker.dependency
    def last_event() -> Event:
        made.append(Event(len(made)))
        return made[-1]

    @worker.middleware
    async def note(message: Message[Any], call_next: Any) -> None:
        around.append(message.id)
        request.set(message.id)
        await call_next()

    @batches(worker, batch=2)
    async def handle(values: list[int], event: Event, client: Client) -> None:
        assert event == made[-1]
        assert isinstance(client, Client)
        # Variables of a message, or of a batch, do not reach the next batch.
        seen.append(request.get())
        request.set("batch")
        await asyncio.sleep(0.01)

    await offer(jobs, 6)
    await worker.run(burst=True)
    assert (len(made), sorted(around)) == (3, [*"012345"])
    assert seen == ["none"] * 3


async def test_a_handler_or_option_that_cannot_work_with_batches_is_refused(worker: Worker) -> None:
    class OfMessage:
        pass

    @worker.dependency
    def of_message(message: Message[Any]) -> OfMessage:
        return OfMessage()

    async def one(value: int) -> None: ...
    async def with_message(values: list[int], message: Message[int]) -> None: ...
    async def with_dependency(values: list[int], made: OfMessage) -> None: ...

    for handler, words in (
        (one, "annotate its first parameter as list"),
        (with_message, "cannot be the message"),
        (with_dependency, "OfMessage"),
    ):
        with pytest.raises(delayq.ConfigurationError, match=words):
            batches(worker)(handler)
    for options in ({"batch": 0}, {"batch": True}, {"linger": -1}, {"batch": None}):
        with pytest.raises(delayq.BadInput):
            batches(worker, **options)


def _at_work(worker: Worker) -> int:
    """Return how many messages of the queue the worker has begun, and not ended."""
    partition = worker.client.reliable_queue("jobs")._open.partitions[0]
    return sum(keeper.count for keeper in partition._keepers.values())
