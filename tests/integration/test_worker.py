"""The handlers of a worker: their arguments, the fate of their messages, and their number."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator  # noqa: TC003 - the worker reads annotations
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import delayq
from delayq import Backoff, Client, Limit, Message, Offer, Reject, RetryAfter, Snooze, Worker
from delayq.codecs import BytesCodec, JsonCodec, codec_for
from delayq.testing import advance
from tests.support.reliable import Jobs, depths, get, offers
from tests.support.reliable_fixtures import LEASE, raw, store
from tests.support.tasks import running
from tests.support.waiting import until
from tests.support.workers import SETTINGS, Gate, Seen, failed, on_jobs, raising, work_off

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

__all__ = ["raw", "store"]

HOUR = timedelta(hours=1)
NOWHERE = "redis://127.0.0.1:1"
NONE = (0, 0, 0, 0)
# Renewals during a lease of LEASE: one every tenth of a second.
OFTEN = 36_000


@dataclass
class Order:
    id: int
    item: str = "book"


class Licence:
    pass


class Db:
    def __init__(self, name: str = "db") -> None:
        self.name = name


class Cache:
    def __init__(self, db: Db) -> None:
        self.db = db


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", **SETTINGS)


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client, concurrency=10, shutdown_timeout=5)


# Values


async def test_a_handler_gets_values_of_its_annotated_type(client: Client, worker: Worker) -> None:
    seen = Seen()
    on_jobs(worker)(seen.of(Order))
    worker.listener("bytes", codec=BytesCodec())(seen)
    queue = client.reliable_queue("jobs", codec=codec_for(Order), **SETTINGS)
    await queue.offer(Order(1))
    await worker.run(burst=True)
    await client.reliable_queue("jobs", codec=JsonCodec()).offer({"id": 2, "item": "pen"})
    await worker.run(burst=True)
    await work_off(worker, client.reliable_queue("bytes", codec=BytesCodec()), b"[1]")
    assert seen == [Order(1), Order(2, "pen"), b"[1]"]
    assert await depths(queue) == NONE


async def test_a_value_of_another_type_is_buried_at_once_with_the_reason(
    client: Client, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Seen()
    on_jobs(worker)(seen.of(Order))
    raw = client.reliable_queue("jobs", codec=BytesCodec(), **SETTINGS)
    bad = {await raw.offer(wire): wire for wire in (b"no json", b'{"id":"x"}', b"[]")}
    await work_off(worker, raw, b'{"id":1}')
    assert seen == [Order(1)]
    letters = await raw.dead.list()
    assert {letter.id: letter.value for letter in letters} == bad
    for letter in letters:
        assert letter.reason == "undecodable"
        assert letter.error.startswith("codec_for(Order) cannot decode")
    assert await depths(raw) == (0, 0, 0, 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert all(any("'jobs'" in line and id_ in line for line in warnings) for id_ in bad)
    assert len(warnings) == 3


# Kinds of handlers


async def test_methods_partials_objects_and_sync_functions_can_listen(client: Client) -> None:
    seen: list[tuple[str, Any, bool]] = []
    home = threading.get_ident()

    def note(name: str, order: Order) -> None:
        seen.append((name, order, threading.get_ident() == home))

    class Shop:
        async def method(self, order: Order) -> None:
            note("method", order)

        async def __call__(self, order: Order) -> None:
            note("object", order)

    async def with_more(name: str, order: Order) -> None:
        note(name, order)

    def sync(order: Order) -> None:
        note("sync", order)

    def wrapped(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return function(*arguments)

        return wrapper

    partial = functools.partial(with_more, "partial")
    handlers: list[Any] = [Shop().method, Shop(), partial, sync, wrapped(Shop().method)]
    worker = Worker(client)
    for number, handler in enumerate(handlers):
        assert worker.listener(f"queue-{number}")(handler) is handler
        await client.reliable_queue(f"queue-{number}").offer({"id": number})
    await worker.run(burst=True)
    assert sorted(seen, key=lambda one: one[1].id) == [
        ("method", Order(0), True),
        ("object", Order(1), True),
        ("partial", Order(2), True),
        ("sync", Order(3), False),
        ("method", Order(4), True),
    ]


def test_an_impossible_handler_is_refused_where_it_is_decorated() -> None:
    def nothing() -> None: ...
    async def only_by_name(*, order: Order) -> None: ...
    async def unknown(order: Order, db: Db) -> None: ...
    async def bare(order: Order, more) -> None: ...  # type: ignore[no-untyped-def]
    async def mixed(order: Order, message: Message[int]) -> None: ...
    async def client_first(client: Client) -> None: ...
    async def unreadable(order: NoSuchThing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
    async def no_codec(order: Db) -> None: ...

    worker = Worker(NOWHERE)
    for handler, words in (
        (nothing, "has no parameter for the value"),
        (only_by_name, "has no parameter for the value"),
        (unknown, "'db', which is a Db"),
        (bare, "'more', which has no annotation"),
        (mixed, "takes a Order, but a message of int"),
        (client_first, "first parameter must be the value"),
        (unreadable, "'order' cannot be read"),
        (no_codec, "no codec knows the type Db"),
        (42, "is not a handler"),
    ):
        with pytest.raises(delayq.ConfigurationError, match=words):
            worker.listener("jobs")(handler)  # type: ignore[type-var]
    # Nothing is left of the refused listeners.
    worker.listener("jobs")(unannotated)
    with pytest.raises(delayq.ConfigurationError, match="already has a listener: unannotated"):
        worker.listener("jobs")(unannotated)


async def unannotated(value): ...  # type: ignore[no-untyped-def]


# Dependencies


async def test_parameters_are_filled_by_type(client: Client, worker: Worker, jobs: Jobs) -> None:
    seen: list[Any] = []

    @worker.dependency
    def db() -> Db:
        return Db()

    @worker.dependency
    async def cache(db: Db, message: Message[Any]) -> Cache:
        return Cache(Db(f"{db.name} of {message.id}"))

    @on_jobs(worker)
    async def handle(
        order: Order,
        message: Message[Order],
        client: Client,
        cache: Cache,
        *,
        worker: Worker,
        more: int = 5,
        **_: Any,
    ) -> None:
        seen.append((order, message.id, message.value, client, cache.db.name, worker, more))

    @worker.listener("others")
    async def of_a_message_alone(message: Message[Order]) -> None:
        seen.append((message.value, message.attempt))

    await jobs.offer({"id": 1}, id="a")
    await worker.run(burst=True)
    await work_off(worker, client.reliable_queue("others"), {"id": 2})
    assert seen == [(Order(1), "a", Order(1), client, "db of a", worker, 5), (Order(2), 1)]


async def test_a_dependency_is_made_once_for_each_message_or_once_for_the_run(
    worker: Worker, jobs: Jobs
) -> None:
    events: list[str] = []

    @worker.dependency(once=True)
    async def licence(client: Client) -> AsyncIterator[Licence]:
        events.append("licence up")
        yield Licence()
        events.append("licence down")

    @worker.dependency
    async def db(licence: Licence) -> AsyncIterator[Db]:
        events.append("db up")
        yield Db()
        events.append("db down")

    @worker.dependency
    def cache(db: Db) -> Iterator[Cache]:
        events.append("cache up")
        yield Cache(db)
        events.append("cache down")

    @on_jobs(worker, concurrency=1)
    async def handle(value: int, cache: Cache, db: Db) -> None:
        assert cache.db is db
        events.append(f"handle {value}")

    around = ["db up", "cache up", "handle {}", "cache down", "db down"]
    for turn in (1, 3):
        await work_off(worker, jobs, turn, turn + 1)
        expected = [event.format(value) for value in (turn, turn + 1) for event in around]
        assert events == ["licence up", *expected, "licence down"]
        events.clear()


async def test_a_dependency_sees_how_its_handler_failed_and_may_fail_itself(
    worker: Worker, jobs: Jobs
) -> None:
    seen: list[str] = []

    @worker.dependency
    async def db(message: Message[str]) -> AsyncIterator[Db]:
        if message.value == "set-up":
            raise ConnectionError("no database")
        try:
            yield Db()
        except LookupError as error:
            seen.append(str(error))
            raise
        raise ConnectionError("no database")

    @on_jobs(worker)
    async def handle(value: str, db: Db) -> None:
        if value == "handler":
            raise LookupError("not there")

    for where in ("set-up", "tear-down", "handler"):
        message = await failed(worker, jobs, where)
        assert (message.attempt, message.state) == (1, "delayed")
        expected = "LookupError: not" if where == "handler" else "ConnectionError: no database"
        assert expected in (message.last_error or ""), where
    assert seen == ["not there"]


async def test_a_dependency_that_cannot_work_is_refused(client: Client) -> None:
    def for_nothing() -> None: ...
    def needs_unknown(cache: Cache) -> Db: ...  # type: ignore[empty-body]
    def another_client() -> Client: ...  # type: ignore[empty-body]
    def of_a_message(message: Message[Any]) -> Db: ...  # type: ignore[empty-body]
    def for_each_message() -> Cache:
        raise AssertionError

    def of_one_for_each_message(cache: Cache) -> Db: ...  # type: ignore[empty-body]

    worker = Worker(client)
    cases: list[tuple[Any, bool, str]] = [
        (for_nothing, False, "return annotation"),
        (needs_unknown, False, "'cache', which is a Cache"),
        (another_client, False, "there already is a dependency of type Client"),
        (of_a_message, True, "called only once, so it cannot take a message"),
        (Db, False, "is not a dependency"),
        (of_one_for_each_message, True, "'cache', which is a Cache"),
    ]
    for function, once, words in cases:
        if function is of_one_for_each_message:
            worker.dependency(for_each_message)
        with pytest.raises(delayq.ConfigurationError, match=words):
            worker.dependency(once=once)(function)

    @worker.dependency(once=True)
    async def db() -> Db:
        raise ConnectionError("no database")

    # Known only when the run begins.
    on_jobs(worker)(unannotated)
    with pytest.raises(ConnectionError):
        await worker.run()
    with pytest.raises(ConnectionError):
        async with worker:
            pass


# Middleware and context


async def test_errors_of_middleware_are_the_handlers_and_those_it_handles_are_none(
    worker: Worker, jobs: Jobs
) -> None:
    seen: list[str] = []

    @worker.middleware
    async def around(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        if message.value != "before":
            with suppress(LookupError):
                await call_next()
        if message.value != "handled":
            raise ValueError("around")

    @worker.middleware
    async def inner(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        # The first middleware is outermost, so this one sees what it has suppressed.
        seen.append("inner")
        await call_next()

    @on_jobs(worker)
    async def handle(value: str) -> None:
        seen.append(value)
        raise LookupError

    await work_off(worker, jobs, "handled")
    assert await depths(jobs) == NONE
    for when in ("before", "after"):
        message = await failed(worker, jobs, when)
        assert message.attempt == 1
        assert "ValueError: around" in (message.last_error or "")
    assert seen == ["inner", "handled", "inner", "after"]


async def test_messages_do_not_share_context_variables(worker: Worker, jobs: Jobs) -> None:
    request: contextvars.ContextVar[int] = contextvars.ContextVar("request", default=0)
    seen: list[tuple[int, int]] = []

    @worker.middleware
    async def around(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        await call_next()
        seen.append((message.value, request.get()))

    @on_jobs(worker, concurrency=1)
    async def handle(value: int) -> None:
        assert request.get() == 0
        request.set(value)
        await asyncio.sleep(0)
        assert request.get() == value

    await work_off(worker, jobs, 1, 2, 3)
    # A value set by a handler is visible to the middleware around it, as within one function.
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert await depths(jobs) == NONE


# Errors


async def test_a_handler_that_raises_is_tried_again_later_and_logged_once(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    on_jobs(worker)(raising(LookupError("no such order")))
    await jobs.offer(1, id="a")
    for attempt in (1, 2, 3):
        caplog.clear()
        await worker.run(burst=True)
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        outcome = "is retried in 1:00:00" if attempt < 3 else "is a dead letter now"
        text = f"queue 'jobs': message 'a' failed in attempt {attempt} of 3, and {outcome}"
        assert record.getMessage() == text
        assert record.exc_info is not None
        if attempt < 3:
            message = await get(jobs, "a")
            assert (message.attempt, message.state) == (attempt, "delayed")
            # The traceback begins in the handler.
            assert (message.last_error or "").splitlines()[1].endswith("in handle")
        await advance(jobs, HOUR)
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.attempt) == ("attempts", 3)
    assert letter.error == "LookupError: no such order"


async def test_the_log_tells_what_becomes_of_a_message(
    client: Client, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: dict[Any, str] = {
        Reject("no such order"): "is a dead letter now: no such order",
        Snooze(5): "waits for 5 s",
        RetryAfter(50): "is retried in 50 s",
        RetryAfter(5400): "expires before it would be retried",
        Backoff.fixed(0.25): "is retried in 0.25 s",
    }
    for number, reaction in enumerate(outcomes):
        on_error = {"on_error": {LookupError: reaction}}
        worker.listener(f"queue-{number}", **SETTINGS | on_error)(raising(LookupError()))
        await client.reliable_queue(f"queue-{number}").offer(1, id=str(number), ttl=60)
    await worker.run(burst=True)
    for number, outcome in enumerate(outcomes.values()):
        assert f"'{number}' failed in attempt 1 of 3, and {outcome}" in caplog.text


class Special(ConnectionError):
    pass


ANSWERS: dict[type[BaseException], Any] = {
    ConnectionError: Backoff.explicit([60]),
    Special: RetryAfter(7200),
    ValueError: Reject,
    LookupError: Reject("unknown order"),
    TimeoutError: Reject("too slow"),
}


AFTER: list[tuple[Exception, float]] = [
    (RetryAfter(10, "busy"), 10),
    (ConnectionResetError("x"), 60),
    (ZeroDivisionError("x"), 3600),
    (Special("x"), 7200),
]
BURIED: list[tuple[Exception, str]] = [
    (UnicodeError("x"), "UnicodeError"),
    (KeyError("x"), "unknown order"),
    (Reject("said so"), "said so"),
    (Reject(), "rejected"),
    # A handler's own timeout is an ordinary error.
    (TimeoutError("of the bank"), "too slow"),
]


async def test_errors_have_answers_and_the_most_specific_one_counts(
    worker: Worker, jobs: Jobs
) -> None:
    errors: list[Exception] = [error for error, _ in (*AFTER, *BURIED)]

    @on_jobs(worker, timeout=60, on_error=ANSWERS)
    async def handle(value: int) -> None:
        raise errors[value]

    await jobs.offer_many(offers(len(errors), ids=True))
    await worker.run(burst=True)
    letters = {letter.id: letter for letter in await jobs.dead.list()}
    for number, (error, reason) in enumerate(BURIED, len(AFTER)):
        letter = letters[str(number)]
        assert (letter.reason, letter.attempt) == (reason, 1), error
    assert letters[str(len(errors) - 1)].error == "TimeoutError: of the bank"
    passed = 0.0
    for number, (error, after) in enumerate(AFTER):
        await advance(jobs, after - 5 - passed)
        assert (await get(jobs, str(number))).state == "delayed", after
        await advance(jobs, 5)
        message = await get(jobs, str(number))
        assert (message.state, message.attempt) == ("ready", 1), after
        assert str(error) in (message.last_error or ""), after
        passed = after


async def test_a_handler_may_snooze_its_message_which_costs_no_attempt(client: Client) -> None:
    cases: list[tuple[Exception, Any]] = [
        (Snooze(10), None),
        (ConnectionError("x"), {ConnectionError: Snooze(10)}),
        (ExceptionGroup("x", [RetryAfter(5), Snooze(10)]), None),
    ]
    for error, on_error in cases:
        worker, jobs = Worker(client), client.reliable_queue("jobs", max_attempts=1, lease=LEASE)
        settings = {"max_attempts": 1, "lease": LEASE, "on_error": on_error}
        worker.listener("jobs", **settings)(raising(error))
        message = await failed(worker, jobs)
        assert (message.attempt, message.last_error) == (0, None), error
        await advance(jobs, 5)
        assert await depths(jobs) == (1, 0, 0, 0), error
        await advance(jobs, 5)
        assert await depths(jobs) == (0, 1, 0, 0), error
        await jobs.purge("all")


async def test_a_handler_may_settle_its_message_itself(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @on_jobs(worker, max_attempts=None)
    async def handle(value: int, message: Message[int]) -> None:
        if value == 1:
            await message.ack()
            raise ValueError("after that")
        await message.bury("enough")

    await work_off(worker, jobs, 1, 2)
    assert await depths(jobs) == (0, 0, 0, 1)
    assert "failed in attempt 1, and had been settled before" in caplog.text


# Timeouts and leases


async def test_a_slow_handler_is_cancelled_and_its_message_may_have_its_own_timeout(
    client: Client,
) -> None:
    own, none = {"timeout": timedelta(milliseconds=50)}, dict[str, Any]()
    worker, gate = Worker(client), Gate()
    cases = {"a": (own, none), "b": (none, own), "c": ({"timeout": 60}, own)}
    cases["d"] = ({"timeout": 0.02}, own)
    for name, (of_listener, of_message) in cases.items():
        worker.listener(name, **SETTINGS | of_listener)(gate)
        queue = client.reliable_queue(name, **SETTINGS)
        await queue.offer(1, id=name, headers={"h": "x"}, **of_message)
    async with asyncio.timeout(60):
        await worker.run(burst=True)
    assert (gate.seen, gate.inside) == ([1] * 4, [])
    for name, (_, of_message) in cases.items():
        message = await get(client.reliable_queue(name, **SETTINGS), name)
        assert (message.attempt, message.state) == (1, "delayed"), name
        assert message.timeout == (0.05 if of_message else None), name
        assert (message.last_error or "").endswith("TimeoutError: timed out after 0.05 s"), name


async def test_a_handler_that_ignores_the_cancellation_of_its_timeout_has_failed(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @on_jobs(worker, timeout=0.05)
    async def handle(value: int) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    message = await get(jobs, "a")
    assert (message.attempt, message.state) == (1, "delayed")
    assert "timed out after 0.05 s, and ignored its cancellation" in (message.last_error or "")
    assert "'a' failed in attempt 1 of 3, and is retried in" in caplog.text


async def test_cancelling_what_runs_ends_its_handler_at_once(
    worker: Worker, jobs: Jobs, server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delayq")
    gate = Gate()
    on_jobs(worker)(gate)
    await jobs.offer_many([Offer(n, id=str(n)) for n in range(3)])
    async with worker, delayq.connect(server.url) as other:
        await until(lambda: len(gate.inside) == 3)
        theirs = other.reliable_queue("jobs")
        assert not await theirs.cancel("1")
        assert await theirs.cancel("1", running=True)
        await until(lambda: sorted(gate.inside) == [0, 2])
        assert not await theirs.cancel("1", running=True)
        # The id is free again.
        await jobs.offer(3, id="1")
        await until(lambda: sorted(gate.inside) == [0, 2, 3])
        gate.open()
    assert await depths(jobs) == NONE
    assert [record.levelname for record in caplog.records if "cancelled" in record.message] == [
        "INFO"
    ]


async def test_losing_a_lease_cancels_the_handler_and_not_the_worker(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.lease_keeper._TIMES", OFTEN)
    queue = client.reliable_queue("jobs", lease=LEASE)
    worker, gate = Worker(client), Gate()
    worker.listener("jobs", lease=LEASE)(gate)
    await queue.offer(1, id="a")
    async with worker:
        await until(lambda: gate.inside)
        await queue.purge("all")
        await until(lambda: not gate.inside)
        gate.open()
        await queue.offer(2)
        await until(lambda: gate.seen == [1, 2])
    assert "the lease of message 'a' was lost" in caplog.text
    assert await depths(queue) == NONE


async def test_an_ack_that_comes_too_late_is_logged_and_changes_nothing(
    worker: Worker, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @on_jobs(worker)
    async def handle(value: int) -> None:
        # The purge happens behind the handler's back; the lease is far from being renewed.
        await jobs.purge("all")
        await jobs.offer(2, id="a", delay=HOUR)

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    assert "the lease of message 'a' was lost" in caplog.text
    assert await depths(jobs) == (1, 0, 0, 0)


# Concurrency


async def test_the_worker_limits_how_many_run_at_a_time(worker: Worker, jobs: Jobs) -> None:
    gate = Gate()
    on_jobs(worker)(gate)
    await jobs.offer_many(offers(35))
    async with worker:
        await until(lambda: len(gate.inside) == 10)
        await asyncio.sleep(0.05)
        # Nothing is claimed ahead for slow handlers.
        assert await depths(jobs) == (0, 25, 10, 0)
        gate.open()
        await until(lambda: len(gate.seen) == 35)
    assert gate.most == 10
    assert sorted(gate.seen) == list(range(35))


async def test_a_listener_may_have_its_limit(client: Client, worker: Worker, jobs: Jobs) -> None:
    narrow, wide = Gate(), Gate()
    on_jobs(worker, concurrency=2)(narrow)
    worker.listener("others")(wide)
    await jobs.offer_many(offers(20))
    async with worker:
        await until(lambda: len(narrow.inside) == 2)
        await client.reliable_queue("others").offer_many(offers(20))
        await until(lambda: len(wide.inside) == 8)
        narrow.open()
        wide.open()
        await until(lambda: len(narrow.seen) == len(wide.seen) == 20)
    assert (narrow.most, wide.most <= 10) == (2, True)


async def test_messages_of_a_busy_worker_are_free_for_others(client: Client, jobs: Jobs) -> None:
    stuck, free = Gate(), Seen()
    busy, idle = Worker(client, concurrency=1), Worker(client, concurrency=1)

    @on_jobs(busy)
    async def handle(value: int) -> None:
        # Be quick at first, so that messages are claimed ahead, then hang.
        if value >= 50:
            await stuck(value)

    on_jobs(idle)(free)
    await jobs.offer_many(offers(90))
    async with busy:
        await until(lambda: stuck.seen)
        async with idle:
            await until(lambda: sorted([*free, *stuck.seen]) == list(range(50, 90)))
        assert stuck.seen == [50]
        stuck.open()
    assert await depths(jobs) == NONE


async def test_a_flood_of_quick_messages_does_not_hold_up_another_queue(client: Client) -> None:
    worker, order = Worker(client, concurrency=2), Seen()
    for name in ("flood", "rare"):
        worker.listener(name, lease=LEASE)(order)
    await client.reliable_queue("flood", lease=LEASE).offer_many([Offer("flood")] * 2000)
    async with worker:
        await until(lambda: len(order) >= 2)
        await client.reliable_queue("rare", lease=LEASE).offer("rare")
        await until(lambda: "rare" in order)
        assert order.count("flood") < 2000


async def test_messages_that_come_for_slots_taken_meanwhile_go_back_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long the message that is kept below can be seen.
    monkeypatch.setattr("delayq._engine.prefetch.WITHIN", 6)
    worker, gates = Worker(client, concurrency=10), {"first": Gate(), "second": Gate()}
    queues = {name: client.reliable_queue(name, lease=LEASE) for name in gates}
    for name, gate in gates.items():
        worker.listener(name, lease=LEASE)(gate)
    async with worker:
        # Both listeners have asked for as many messages as there are slots.
        await until(lambda: client.statistics().waiting == 2)
        await queues["first"].offer_many(offers(10))
        await until(lambda: len(gates["first"].inside) == 10)
        await queues["second"].offer_many(offers(10))
        # One message is kept for the next free slot, and goes back later.
        for kept in (1, 0):
            await until(lambda: depths(queues["second"]), equals=(0, 10 - kept, kept, 0))
        for gate in gates.values():
            gate.open()
        await until(lambda: len(gates["second"].seen) == 10)


async def test_a_thread_that_never_began_leaves_its_place(client: Client) -> None:
    worker, seen = Worker(client, concurrency=1), list[int]()
    worker.listener("hasty", timeout=0.000001, max_attempts=1)(lambda value: None)
    worker.listener("patient")(seen.append)
    await client.reliable_queue("hasty", max_attempts=1).offer_many(offers(3))
    async with asyncio.timeout(20):
        await work_off(worker, client.reliable_queue("patient"), 2)
    assert seen == [2]


async def test_a_burst_ends_when_nothing_is_due(client: Client, worker: Worker, jobs: Jobs) -> None:
    seen: list[Any] = []
    others = client.reliable_queue("others")

    @on_jobs(worker)
    async def first(value: int) -> None:
        await asyncio.sleep(0.1)
        # Messages that handlers offer count, in either direction.
        await others.offer(value + 1)

    @worker.listener("others")
    async def second(value: int) -> None:
        seen.append(value)
        if value < 6:
            await jobs.offer(value + 1)

    await jobs.offer(100, delay=HOUR)
    await work_off(worker, jobs, 1)
    assert seen == [2, 4, 6]
    assert await depths(jobs) == (1, 0, 0, 0)
    # A burst with nothing due ends as well.
    await worker.run(burst=True)


async def test_a_burst_waits_for_what_a_limit_holds_back_but_not_for_what_is_paused(
    client: Client, worker: Worker, server: PrivateServer
) -> None:
    limits: dict[str, dict[str, Any]] = {
        "rate": {"limit": Limit(rate=2, per=0.5)},
        "slot": {"limit": Limit(concurrency=1)},
        "group": {"group_limit": Limit(concurrency=1)},
        # Whoever looks at these partitions learns when they have a slot, and not what waits there.
        "parts": {"limit": Limit(concurrency=2), "partitions": 2},
    }
    queues, seen = {}, Seen()
    for name, limit in limits.items():
        queues[name] = client.reliable_queue(name, **limit)
        worker.listener(name, **limit)(seen)
        await queues[name].offer_many([Offer(name, group="g" * (name == "group") or None)] * 3)
    async with delayq.connect(server.url) as other:
        taken = [*await queues["slot"].claim(), *await queues["group"].claim()]
        parts = other.reliable_queue("parts")
        while held := await parts.claim(3, wait=0):
            taken += held
        async with running(worker.run(burst=True)) as (burst,):
            await until(lambda: seen.count("rate") == 3)
            assert not burst.done()
            for message in taken:
                await message.ack()
            await asyncio.wait_for(burst, 60)
    expected = {"group": 2, "rate": 3, "slot": 2, "parts": 5 - len(taken)}
    assert {name: seen.count(name) for name in limits} == expected
    await queues["group"].groups.pause("g")
    await queues["group"].offer("paused", group="g")
    await asyncio.wait_for(worker.run(burst=True), 60)
    assert "paused" not in seen


@pytest.mark.every_server
@pytest.mark.parametrize("is_ordered", [False, True])
async def test_a_burst_waits_for_a_group_at_its_limit_whatever_else_waits(
    client: Client, worker: Worker, is_ordered: bool
) -> None:
    limit = Limit(concurrency=1, ordered=is_ordered)
    jobs, seen = client.reliable_queue("jobs", lease=2 * HOUR, group_limit=limit), Seen()
    worker.listener("jobs")(seen)
    await jobs.groups.pause("paused")
    for name in ("paused", "paused", *map(str, range(30))):
        await jobs.offer_many([Offer(-1, group=name, delay=HOUR * (name != "paused"))] * 15)
    await jobs.offer_many([Offer(n, group="g") for n in range(3)])
    (first,) = await jobs.claim(5)
    async with running(worker.run(burst=True)) as (burst,):
        await until(lambda: jobs._open.dispatcher.caller_queue.has_patient_callers or burst.done())
        assert not burst.done()
        await first.ack()
        await asyncio.wait_for(burst, 60)
    assert seen == [1, 2]


async def test_workers_leave_slots_of_a_limit_to_each_other_and_tell_only_those_who_wait(
    server: PrivateServer, raw: Any
) -> None:
    settings: dict[str, Any] = {"limit": Limit(concurrency=2), "lease": LEASE}
    handled = {"one": 0, "other": 0}
    one, other = (delayq.connect(server.url, resync_interval=0.2) for _ in range(2))
    async with one, other:
        workers = []
        for name, client in (("one", one), ("other", other)):
            workers.append(Worker(client, concurrency=1))

            @workers[-1].listener("jobs", **settings)
            async def handle(_value: int, name: str = name) -> None:
                handled[name] += 1
                # So quick that more would be claimed ahead than the limit has slots.
                await asyncio.sleep(0.01)

        await one.reliable_queue("jobs", **settings).offer_many(offers(400))
        await raw.config_resetstat()
        async with workers[0], workers[1]:
            await until(lambda: sum(handled.values()) == 400, 60)
    assert min(handled.values()) > 100
    # Each of them goes on with the slot that it has freed, and nobody else waits for one. A worker
    # that is busy still listens.
    commands = await raw.info("commandstats")
    for command, most in (("publish", 200), ("subscribe", 20)):
        assert commands.get(f"cmdstat_{command}", {"calls": 0})["calls"] < most, command


async def test_a_handler_stays_in_one_task_and_its_time_limit_ends_only_its_own_block(
    worker: Worker, jobs: Jobs
) -> None:
    # Those with an even number never wait, so they are handled between those that do.
    own: list[tuple[int, bool, bool]] = []

    @on_jobs(worker, timeout=60)
    async def handle(value: int) -> None:
        task, timed_out = asyncio.current_task(), False
        assert task is not None
        if value % 2:
            # It counts cancellations, as asyncio.timeout() does, and knows which task it is in.
            with anyio.move_on_after(0.01) as scope:
                async with anyio.create_task_group():
                    await anyio.sleep_forever()
            timed_out = scope.cancelled_caught
        own.append((value, asyncio.current_task() is task and not task.cancelling(), timed_out))

    await work_off(worker, jobs, *range(20))
    assert sorted(own) == [(value, True, bool(value % 2)) for value in range(20)]
    assert await depths(jobs) == NONE


async def test_handlers_that_never_wait_let_others_run(client: Client) -> None:
    worker, loop = Worker(client, concurrency=100), asyncio.get_running_loop()
    # How many messages were handled in each iteration of the event loop.
    handled = [0]

    def next_iteration() -> None:
        handled.append(0)
        if sum(handled) < 200:
            loop.call_soon(next_iteration)

    @worker.listener("jobs", lease=LEASE)
    async def handle(value: int) -> None:
        handled[-1] += 1
        ends_at = loop.time() + 0.001
        while loop.time() < ends_at:
            pass

    await client.reliable_queue("jobs", lease=LEASE).offer_many(offers(200))
    loop.call_soon(next_iteration)
    await worker.run(burst=True)
    assert sum(handled) == 200
    assert max(handled) <= 10
