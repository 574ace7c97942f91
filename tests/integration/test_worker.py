"""A worker: the arguments its handlers receive, the outcome of their messages, and the number that
run at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator  # noqa: TC003 - the worker reads annotations
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import msgspec
import pydantic
import pytest

import delayq
from delayq import Backoff, Client, Message, Reject, RetryAfter, Worker
from delayq.codecs import BytesCodec, codec_for
from delayq.testing import advance
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import ReliableQueue
    from tests.support.servers import PrivateServer

HOUR = timedelta(hours=1)
LATER = Backoff.fixed(3600)


@dataclass
class Order:
    id: int
    item: str = "book"


class Model(pydantic.BaseModel):
    made_by: str = pydantic.Field(alias="madeBy")


class Struct(msgspec.Struct):
    id: int


class Colour(Enum):
    RED = "red"


@dataclass
class Shelf:
    orders: dict[Colour, list[Order | None]]
    model: Model
    every: timedelta


class Db:
    def __init__(self, name: str = "db") -> None:
        self.name = name


class Cache:
    def __init__(self, db: Db) -> None:
        self.db = db


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[Any]:
    return client.reliable_queue("jobs", lease=LEASE, backoff=LATER, max_attempts=3)


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client, concurrency=10, shutdown_timeout=5)


def on_jobs(worker: Worker, **settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a listener on the queue of the fixture."""
    return worker.listener(
        "jobs", **{"lease": LEASE, "backoff": LATER, "max_attempts": 3, **settings}
    )


async def left(queue: ReliableQueue[Any]) -> tuple[int, int, int, int]:
    """Return the number of delayed, ready, leased and dead messages."""
    stats = await queue.stats()
    return stats.delayed, stats.ready, stats.leased, stats.dead


class Gate:
    """A handler that waits until it is let through, and records which values are inside."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.seen: list[Any] = []
        self.most = 0
        self._open = asyncio.Event()

    async def __call__(self, value: Any) -> None:
        self.seen.append(value)
        self.inside.append(value)
        self.most = max(self.most, len(self.inside))
        try:
            await self._open.wait()
        finally:
            self.inside.remove(value)

    def open(self) -> None:
        self._open.set()


# Values


async def test_a_handler_gets_values_of_its_annotated_type(client: Client, worker: Worker) -> None:
    seen: list[Any] = []

    @on_jobs(worker)
    async def close_order(order: Order) -> None:
        seen.append(order)

    queue = client.reliable_queue(
        "jobs", codec=codec_for(Order), lease=LEASE, backoff=LATER, max_attempts=3
    )
    await queue.offer(Order(1))
    plain = client.reliable_queue("jobs", codec=delayq.JsonCodec())
    await plain.offer({"id": 2, "item": "pen"})
    await worker.run(burst=True)
    assert seen == [Order(1), Order(2, "pen")]
    assert await left(queue) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "value",
    [
        Order(1),
        Model(madeBy="ada"),
        Struct(2),
        UUID(int=3),
        datetime(2030, 1, 1, tzinfo=UTC),
        Decimal("1.50"),
        Colour.RED,
        Shelf({Colour.RED: [Order(1), None]}, Model(madeBy="bob"), timedelta(1)),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_producer_offers_a_value_of_the_handlers_type_without_a_codec(
    worker: Worker, jobs: ReliableQueue[Any], value: Any
) -> None:
    seen: list[Any] = []

    async def handle(value: Any) -> None:
        seen.append(value)

    handle.__annotations__["value"] = type(value)
    on_jobs(worker)(handle)
    await jobs.offer(value)
    await worker.run(burst=True)
    assert seen == [value]
    assert type(seen[0]) is type(value)


async def test_the_decorator_returns_the_function_itself(worker: Worker) -> None:
    async def handle(order: Order) -> None:
        raise LookupError(order.id)

    assert on_jobs(worker)(handle) is handle
    with pytest.raises(LookupError):
        await handle(Order(1))


@pytest.mark.parametrize("wire", [b"no json", b'{"id":"x"}', b"[]"])
async def test_what_is_not_of_the_type_is_buried_at_once_with_the_reason(
    client: Client, worker: Worker, caplog: pytest.LogCaptureFixture, wire: bytes
) -> None:
    seen: list[Any] = []

    @on_jobs(worker)
    async def close_order(order: Order) -> None:
        seen.append(order)

    raw = client.reliable_queue(
        "jobs", codec=BytesCodec(), lease=LEASE, backoff=LATER, max_attempts=3
    )
    bad = await raw.offer(wire)
    await raw.offer(b'{"id":1}')
    await worker.run(burst=True)
    assert seen == [Order(1)]
    (letter,) = await raw.dead.list()
    assert (letter.id, letter.reason, letter.value) == (bad, "undecodable", wire)
    assert letter.error.startswith("codec_for(Order) cannot decode")
    assert await left(raw) == (0, 0, 0, 1)
    (line,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert "'jobs'" in line
    assert bad in line


async def test_a_codec_may_be_given_instead(worker: Worker, jobs: ReliableQueue[Any]) -> None:
    seen: list[Any] = []

    @on_jobs(worker, codec=BytesCodec())
    async def handle(payload: Any) -> None:
        seen.append(payload)

    await jobs.offer([1])
    await worker.run(burst=True)
    assert seen == [b"[1]"]


async def test_a_recurring_message_comes_like_any_other_and_the_next_is_in_place(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    seen: list[Any] = []

    @on_jobs(worker)
    async def tick(value: str, message: Message[str]) -> None:
        seen.append((value, message.id.partition("@")[0], len(await jobs.list("delayed"))))

    await jobs.schedule("tick", every=60, value="tock")
    for _ in range(3):
        await advance(jobs, 60)
        await worker.run(burst=True)
    assert seen == [("tock", "tick", 1)] * 3


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

    handlers: list[Any] = [
        Shop().method,
        Shop(),
        functools.partial(with_more, "partial"),
        sync,
        wrapped(Shop().method),
    ]
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


def nothing() -> None: ...
async def only_by_name(*, order: Order) -> None: ...
async def unknown(order: Order, db: Db) -> None: ...
async def bare(order: Order, more) -> None: ...  # type: ignore[no-untyped-def]
async def mixed(order: Order, message: Message[int]) -> None: ...
async def client_first(client: Client) -> None: ...
async def generator(order: Order) -> AsyncIterator[int]:
    yield 1


async def unreadable(order: NoSuchThing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def no_codec(order: Db) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (nothing, "has no parameter for the value"),
        (only_by_name, "has no parameter for the value"),
        (unknown, "'db', which is a Db"),
        (bare, "'more', which has no annotation"),
        (mixed, "takes a Order, but a message of int"),
        (client_first, "first parameter must be the value"),
        (generator, "is not a handler"),
        (unreadable, "'order' cannot be read"),
        (no_codec, "no codec for Db"),
        (42, "is not a handler"),
    ],
    # Not str(), which contains a function's memory address: all test processes must use the same
    # names.
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_cannot_work_is_refused_when_it_is_decorated(handler: Any, words: str) -> None:
    worker = Worker("redis://127.0.0.1:1")
    with pytest.raises(delayq.ConfigurationError, match=words):
        worker.listener("jobs")(handler)
    # Nothing is left of the refused listener.
    worker.listener("jobs")(unannotated)


async def unannotated(value): ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    "settings",
    [
        {"queue": ""},
        {"concurrency": 0},
        {"concurrency": True},
        {"timeout": 0},
        {"timeout": -1},
        {"lease": 0},
        {"max_attempts": 0},
        {"on_error": {"ValueError": Reject}},
        {"on_error": {ValueError: 5}},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(delayq.BadInput):
        Worker("redis://127.0.0.1:1").listener(**{"queue": "jobs", **settings})(unannotated)


def test_a_queue_has_one_listener() -> None:
    worker = Worker("redis://127.0.0.1:1")
    worker.listener("jobs")(unannotated)
    with pytest.raises(
        delayq.ConfigurationError, match="'jobs' already has a listener: unannotated"
    ):
        worker.listener("jobs")(unannotated)


# Dependencies


async def test_parameters_are_filled_by_their_type(
    client: Client, worker: Worker, jobs: ReliableQueue[Any]
) -> None:
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

    await jobs.offer({"id": 1}, id="a")
    await worker.run(burst=True)
    assert seen == [(Order(1), "a", Order(1), client, "db of a", worker, 5)]


async def test_the_message_may_come_first_and_alone(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    seen: list[Any] = []

    @on_jobs(worker)
    async def handle(message: Message[Order]) -> None:
        seen.append((message.value, message.attempt))

    await jobs.offer({"id": 1})
    await worker.run(burst=True)
    assert seen == [(Order(1), 1)]


async def test_a_dependency_is_made_once_for_a_message_and_taken_down_after_it(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    events: list[str] = []

    @worker.dependency
    async def db() -> AsyncIterator[Db]:
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

    await jobs.offer_many([delayq.Offer(value=1), delayq.Offer(value=2)])
    await worker.run(burst=True)
    expected = ["db up", "cache up", "handle {}", "cache down", "db down"]
    assert events == [event.format(value) for value in (1, 2) for event in expected]


async def test_one_that_is_made_once_lives_as_long_as_the_run(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    events: list[Any] = []

    @worker.dependency(once=True)
    async def db() -> AsyncIterator[Db]:
        events.append("up")
        yield Db()
        events.append("down")

    @worker.dependency(once=True)
    def cache(db: Db, client: Client) -> Cache:
        return Cache(db)

    @on_jobs(worker, concurrency=1)
    async def handle(value: int, cache: Cache) -> None:
        events.append(value)

    for turn in (1, 3):
        await jobs.offer(turn)
        await jobs.offer(turn + 1)
        await worker.run(burst=True)
    assert events == ["up", 1, 2, "down", "up", 3, 4, "down"]


@pytest.mark.parametrize("where", ["set-up", "tear-down"])
async def test_a_dependency_that_fails_fails_the_message(
    worker: Worker, jobs: ReliableQueue[Any], where: str
) -> None:
    @worker.dependency
    async def db() -> AsyncIterator[Db]:
        if where == "set-up":
            raise ConnectionError("no database")
        yield Db()
        raise ConnectionError("no database")

    @on_jobs(worker)
    async def handle(value: int, db: Db) -> None: ...

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    message = await jobs.get("a")
    assert message is not None
    assert (message.attempt, message.state) == (1, "delayed")
    assert "ConnectionError: no database" in (message.last_error or "")


async def test_a_dependency_sees_how_its_handler_failed(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    seen: list[str] = []

    @worker.dependency
    async def db() -> AsyncIterator[Db]:
        try:
            yield Db()
        except LookupError as error:
            seen.append(str(error))
            raise

    @on_jobs(worker)
    async def handle(value: int, db: Db) -> None:
        raise LookupError("not there")

    await jobs.offer(1)
    await worker.run(burst=True)
    assert seen == ["not there"]
    assert await left(jobs) == (1, 0, 0, 0)


async def test_one_that_is_made_once_and_fails_lets_the_run_fail(worker: Worker) -> None:
    @worker.dependency(once=True)
    async def db() -> Db:
        raise ConnectionError("no database")

    on_jobs(worker)(unannotated)
    with pytest.raises(ConnectionError):
        await worker.run()
    with pytest.raises(ConnectionError):
        async with worker:
            pass


def no_return(): ...  # type: ignore[no-untyped-def]
def for_nothing() -> None: ...
def needs_unknown(cache: Cache) -> Db: ...  # type: ignore[empty-body]
def another_client() -> Client: ...  # type: ignore[empty-body]
def of_a_message(message: Message[Any]) -> Db: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "once", "words"),
    [
        (no_return, False, "return annotation"),
        (for_nothing, False, "return annotation"),
        (needs_unknown, False, "'cache', which is a Cache"),
        (another_client, False, "there already is a dependency of type Client"),
        (of_a_message, True, "called only once, so it cannot take a message"),
        (Db, False, "is not a dependency"),
    ],
)
def test_a_dependency_that_cannot_work_is_refused(function: Any, once: bool, words: str) -> None:
    worker = Worker("redis://127.0.0.1:1")
    with pytest.raises(delayq.ConfigurationError, match=words):
        worker.dependency(once=once)(function)


def test_one_made_once_cannot_ask_for_one_made_for_each_message() -> None:
    worker = Worker("redis://127.0.0.1:1")

    @worker.dependency
    def db() -> Db:
        return Db()

    with pytest.raises(delayq.ConfigurationError, match="'db', which is a Db"):

        @worker.dependency(once=True)
        def cache(db: Db) -> Cache:
            return Cache(db)


# Middleware and context


async def test_middleware_is_an_onion_and_the_first_is_outermost(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    events: list[Any] = []

    @worker.middleware
    async def outer(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        events.append(("outer", message.id))
        await call_next()
        events.append("/outer")

    @worker.middleware
    async def inner(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        events.append("inner")
        await call_next()
        events.append("/inner")

    @on_jobs(worker)
    async def handle(value: int) -> None:
        events.append(value)

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    assert events == [("outer", "a"), "inner", 1, "/inner", "/outer"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_middleware_raises_is_the_handlers_error(
    worker: Worker, jobs: ReliableQueue[Any], when: str
) -> None:
    seen: list[int] = []

    @worker.middleware
    async def around(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        if when == "after":
            await call_next()
        raise ValueError("around")

    @on_jobs(worker)
    async def handle(value: int) -> None:
        seen.append(value)

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    message = await jobs.get("a")
    assert message is not None
    assert "ValueError: around" in (message.last_error or "")
    assert (seen, message.attempt) == ([1] if when == "after" else [], 1)


async def test_what_middleware_does_not_let_pass_is_success(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @worker.middleware
    async def around(message: Message[Any], call_next: Callable[[], Awaitable[None]]) -> None:
        with suppress(LookupError):
            await call_next()

    @on_jobs(worker)
    async def handle(value: int) -> None:
        raise LookupError

    await jobs.offer(1)
    await worker.run(burst=True)
    assert await left(jobs) == (0, 0, 0, 0)


async def test_context_variables_of_one_message_are_not_found_by_the_next(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
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

    await jobs.offer_many([delayq.Offer(value=value) for value in (1, 2, 3)])
    await worker.run(burst=True)
    # A value set by a handler is visible to the middleware around it, as within one function.
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert await left(jobs) == (0, 0, 0, 0)


# Errors


async def test_a_message_whose_handler_raises_is_tried_again_later_and_logged_once(
    worker: Worker, jobs: ReliableQueue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @on_jobs(worker)
    async def handle(value: int) -> None:
        raise LookupError("no such order")

    await jobs.offer(1, id="a")
    for attempt in (1, 2, 3):
        caplog.clear()
        await worker.run(burst=True)
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.getMessage() == f"queue 'jobs': message 'a' failed in attempt {attempt}"
        assert record.exc_info is not None
        if attempt < 3:
            message = await jobs.get("a")
            assert message is not None
            assert (message.attempt, message.state) == (attempt, "delayed")
            # The traceback begins in the handler.
            assert (message.last_error or "").splitlines()[1].endswith("in handle")
        await advance(jobs, HOUR)
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.attempt, letter.error) == (
        "attempts",
        3,
        "LookupError: no such order",
    )


class Odd(BaseException):
    pass


async def cancelled_inside() -> None:
    task = asyncio.ensure_future(asyncio.sleep(3600))
    task.cancel()
    await task


@pytest.mark.parametrize(
    "error",
    [Odd("odd"), SystemExit(3), asyncio.CancelledError(), ExceptionGroup("many", [ValueError()])],
)
async def test_whatever_a_handler_raises_only_its_message_has_failed(
    worker: Worker, jobs: ReliableQueue[Any], error: BaseException
) -> None:
    seen: list[int] = []

    @on_jobs(worker)
    async def handle(value: int) -> None:
        if value == 1 and isinstance(error, asyncio.CancelledError):
            await cancelled_inside()
        if value == 1:
            raise error
        seen.append(value)

    await jobs.offer(1, id="a")
    await jobs.offer(2)
    await worker.run(burst=True)
    message = await jobs.get("a")
    assert message is not None
    assert (seen, message.attempt, message.state) == ([2], 1, "delayed")
    assert type(error).__name__ in (message.last_error or "")


class Special(ConnectionError):
    pass


ANSWERS: dict[type[BaseException], Any] = {
    ConnectionError: Backoff.explicit([60]),
    Special: RetryAfter(7200),
    ValueError: Reject,
    LookupError: Reject("unknown order"),
    TimeoutError: Reject("too slow"),
}


@pytest.mark.parametrize(
    ("error", "after", "reason"),
    [
        (ConnectionResetError("x"), 60, None),
        (Special("x"), 7200, None),
        (ZeroDivisionError("x"), 3600, None),
        (RetryAfter(10, "busy"), 10, None),
        (UnicodeError("x"), None, "UnicodeError"),
        (KeyError("x"), None, "unknown order"),
        (Reject("said so"), None, "said so"),
        (Reject(), None, "rejected"),
    ],
    ids=repr,
)
async def test_errors_have_answers_and_the_most_specific_one_counts(
    worker: Worker,
    jobs: ReliableQueue[Any],
    error: Exception,
    after: float | None,
    reason: str | None,
) -> None:
    @on_jobs(worker, on_error=ANSWERS)
    async def handle(value: int) -> None:
        raise error

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    if after is None:
        (letter,) = await jobs.dead.list()
        assert (letter.id, letter.reason, letter.attempt) == ("a", reason, 1)
        return
    message = await jobs.get("a")
    assert message is not None
    assert message.attempt == 1
    await advance(jobs, after - 5)
    assert await left(jobs) == (1, 0, 0, 0)
    await advance(jobs, 5)
    assert await left(jobs) == (0, 1, 0, 0)


async def test_a_handler_may_settle_its_message_itself(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @on_jobs(worker)
    async def handle(value: int, message: Message[int]) -> None:
        if value == 1:
            await message.ack()
            raise ValueError("after that")
        await message.bury("enough")

    await jobs.offer_many([delayq.Offer(value=1), delayq.Offer(value=2)])
    await worker.run(burst=True)
    assert await left(jobs) == (0, 0, 0, 1)


# Timeouts and leases


async def test_a_handler_that_takes_too_long_is_cancelled_and_tried_again(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    ended: list[str] = []

    @on_jobs(worker, timeout=timedelta(milliseconds=50))
    async def handle(value: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    message = await jobs.get("a")
    assert message is not None
    assert (ended, message.attempt, message.state) == (["cleaned up"], 1, "delayed")
    assert (message.last_error or "").endswith("TimeoutError: timed out after 0.05 s")


async def test_a_timeout_of_the_handlers_own_is_an_error_like_any_other(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    @on_jobs(worker, timeout=60, on_error=ANSWERS)
    async def handle(value: int) -> None:
        raise TimeoutError("of the bank")

    await jobs.offer(1)
    await worker.run(burst=True)
    (letter,) = await jobs.dead.list()
    assert (letter.reason, letter.error) == ("too slow", "TimeoutError: of the bank")


async def test_a_sync_handler_that_takes_too_long_goes_on_for_nobody(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    release, ended = threading.Event(), threading.Event()

    @on_jobs(worker, timeout=0.5)
    def handle(value: int) -> None:
        release.wait(20)
        ended.set()

    try:
        await jobs.offer(1, id="a")
        await worker.run(burst=True)
        message = await jobs.get("a")
        assert message is not None
        assert (message.attempt, message.state, ended.is_set()) == (1, "delayed", False)
        assert "timed out after 0.5 s" in (message.last_error or "")
    finally:
        release.set()
    await until(ended.is_set)
    # Its late end changes nothing.
    assert await left(jobs) == (1, 0, 0, 0)


async def test_threads_that_hang_keep_their_places_and_other_messages_are_not_begun(
    client: Client, jobs: ReliableQueue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    release, begun = threading.Event(), list[int]()
    worker = Worker(client, concurrency=2)

    @on_jobs(worker, timeout=0.5)
    def handle(value: int) -> None:
        begun.append(value)
        release.wait(20)

    await jobs.offer_many([delayq.Offer(value=value) for value in range(6)])
    try:
        await worker.run(burst=True)
        # Two messages have failed and are retried later. The others wait, and have used no attempt.
        assert (len(begun), await left(jobs)) == (2, (2, 4, 0, 0))
        assert [message.attempt for message in await jobs.list("ready")] == [0] * 4
        assert "2 of the listener's 2 threads hang" in caplog.text
    finally:
        release.set()


async def test_a_handler_whose_lease_is_lost_is_cancelled_and_the_worker_goes_on(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    queue = client.reliable_queue("jobs", lease=0.3)
    worker = Worker(client)
    events: list[Any] = []
    begun = asyncio.Event()

    @worker.listener("jobs", lease=0.3)
    async def handle(value: int) -> None:
        if value == 1:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                events.append("cancelled")
                raise
        events.append(value)

    await queue.offer(1, id="a")
    async with worker:
        await begun.wait()
        await queue.purge("all")
        await until(lambda: events)
        await queue.offer(2)
        await until(lambda: 2 in events)
    assert events == ["cancelled", 2]
    assert "the lease of message 'a' was lost" in caplog.text
    assert await left(queue) == (0, 0, 0, 0)


async def test_an_ack_that_comes_too_late_is_logged_and_changes_nothing(
    worker: Worker, jobs: ReliableQueue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @on_jobs(worker)
    async def handle(value: int) -> None:
        # The purge happens behind the handler's back; the lease is far from being renewed.
        await jobs.purge("all")
        await jobs.offer(2, id="a", delay=HOUR)

    await jobs.offer(1, id="a")
    await worker.run(burst=True)
    assert "the lease of message 'a' was lost" in caplog.text
    assert await left(jobs) == (1, 0, 0, 0)


async def test_the_lease_is_renewed_while_a_handler_runs(client: Client) -> None:
    queue = client.reliable_queue("jobs", lease=1)
    gate = Gate()
    worker = Worker(client)
    worker.listener("jobs", lease=1)(gate)
    await queue.offer(1)
    other = Worker(client)
    other.listener("jobs", lease=1)(gate)
    async with worker, other:
        await until(lambda: gate.inside)
        await asyncio.sleep(2.2)  # longer than two leases
        assert gate.inside == [1]
        gate.open()
    assert await left(queue) == (0, 0, 0, 0)


# Concurrency


async def test_as_many_run_at_a_time_as_the_worker_allows_and_no_more(
    worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    gate = Gate()
    on_jobs(worker)(gate)
    await jobs.offer_many([delayq.Offer(value=value) for value in range(35)])
    async with worker:
        await until(lambda: len(gate.inside) == 10)
        await asyncio.sleep(0.05)
        # Nothing is claimed ahead for slow handlers.
        assert await left(jobs) == (0, 25, 10, 0)
        gate.open()
        await until(lambda: len(gate.seen) == 35)
    assert gate.most == 10
    assert sorted(gate.seen) == list(range(35))


async def test_a_listener_may_have_a_limit_of_its_own(
    client: Client, worker: Worker, jobs: ReliableQueue[Any]
) -> None:
    narrow, wide = Gate(), Gate()
    on_jobs(worker, concurrency=2)(narrow)
    worker.listener("others")(wide)
    others = client.reliable_queue("others")
    for queue in (jobs, others):
        await queue.offer_many([delayq.Offer(value=value) for value in range(20)])
    async with worker:
        await until(lambda: len(narrow.inside) == 2 and len(wide.inside) == 8)
        narrow.open()
        wide.open()
        await until(lambda: len(narrow.seen) == len(wide.seen) == 20)
    assert (narrow.most, wide.most <= 10) == (2, True)


async def test_sync_handlers_run_side_by_side(worker: Worker, jobs: ReliableQueue[Any]) -> None:
    meet = threading.Barrier(10, timeout=20)

    @on_jobs(worker)
    def handle(value: int) -> None:
        meet.wait()

    await jobs.offer_many([delayq.Offer(value=value) for value in range(20)])
    await worker.run(burst=True)
    assert await left(jobs) == (0, 0, 0, 0)


async def test_what_waits_for_a_busy_worker_is_free_for_an_idle_one(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    stuck, free = Gate(), Gate()
    free.open()
    busy, idle = Worker(client, concurrency=1), Worker(client, concurrency=1)
    quick = asyncio.Event()

    @on_jobs(busy)
    async def handle(value: int) -> None:
        # Be quick at first, so that messages are claimed ahead, then hang.
        if value >= 50:
            quick.set()
            await stuck(value)

    on_jobs(idle)(free)
    await jobs.offer_many([delayq.Offer(value=value) for value in range(90)])
    async with busy:
        await quick.wait()
        async with idle:
            await until(lambda: sorted([*free.seen, *stuck.seen]) == list(range(50, 90)))
        assert stuck.seen == [50]
        stuck.open()
    assert await left(jobs) == (0, 0, 0, 0)


@pytest.mark.parametrize("quick", [True, False])
async def test_a_flood_on_one_queue_does_not_hold_up_the_other(client: Client, quick: bool) -> None:
    worker = Worker(client, concurrency=2)
    order: list[str] = []
    turn = asyncio.Semaphore(10_000 if quick else 0)

    @worker.listener("flood", lease=LEASE)
    async def flood(value: int) -> None:
        order.append("flood")
        await turn.acquire()

    @worker.listener("rare", lease=LEASE)
    async def rare(value: int) -> None:
        order.append("rare")
        await turn.acquire()

    queue = client.reliable_queue("flood", lease=LEASE)
    await queue.offer_many([delayq.Offer(value=value) for value in range(2000)])
    async with worker:
        await until(lambda: len(order) >= 2)
        await client.reliable_queue("rare", lease=LEASE).offer(1)
        if not quick:
            # Both slots are taken by the flood; the rare message that was claimed ahead goes back
            # after a second.
            await asyncio.sleep(1.3)
            for _ in range(4):
                turn.release()
                have = len(order)
                await until(lambda have=have: len(order) > have)  # type: ignore[misc]
        await until(lambda: "rare" in order)
        assert order.count("flood") < 2000
        if not quick:
            assert order.index("rare") <= 4
        worker.stop()
        for _ in range(2000):
            turn.release()


async def test_what_comes_for_hands_that_are_busy_by_then_goes_back_at_once(client: Client) -> None:
    first, second = Gate(), Gate()
    worker = Worker(client, concurrency=10)
    queues = {name: client.reliable_queue(name, lease=LEASE) for name in ("first", "second")}
    worker.listener("first", lease=LEASE)(first)
    worker.listener("second", lease=LEASE)(second)
    async with worker:
        # Both listeners have asked for as many messages as there are slots.
        await until(lambda: client.statistics().waiting == 2)
        await queues["first"].offer_many([delayq.Offer(value=value) for value in range(10)])
        await until(lambda: len(first.inside) == 10)
        await queues["second"].offer_many([delayq.Offer(value=value) for value in range(10)])
        # One message is kept for the next free slot, and goes back as well when that takes too
        # long.
        for kept in (1, 0):

            async def is_left(kept: int = kept) -> bool:
                return await left(queues["second"]) == (0, 10 - kept, kept, 0)

            await until(is_left)
        first.open()
        second.open()
        await until(lambda: len(second.seen) == 10)


async def test_listeners_take_turns_also_where_each_message_takes_long(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = 0.1
    monkeypatch.setattr("delayq.worker._pool._PATIENCE", patience)
    worker = Worker(client, concurrency=1)
    order: list[str] = []
    turn = asyncio.Semaphore(0)
    for name in ("flood", "rare"):
        await client.reliable_queue(name, lease=LEASE).offer_many(
            [delayq.Offer(value=name) for _ in range(50)]
        )

        @worker.listener(name, lease=LEASE)
        async def handle(value: str) -> None:
            order.append(value)
            await turn.acquire()

    async with worker:
        for count in range(1, 9):
            await until(lambda count=count: len(order) == count)  # type: ignore[misc]
            # By then, the other listener has given back what it had claimed.
            await asyncio.sleep(3 * patience)
            turn.release()
        worker.stop()
        for _ in range(100):
            turn.release()
    assert all(one != other for one, other in itertools.pairwise(order[:8])), order


async def test_a_hand_that_is_kept_for_what_is_gone_is_free_for_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.worker._pool._PATIENCE", 0.4)
    worker = Worker(client, concurrency=1)
    gate, rarely = Gate(), Gate()
    worker.listener("flood", lease=LEASE)(gate)
    worker.listener("rare", lease=LEASE)(rarely)
    rare = client.reliable_queue("rare", lease=LEASE)
    await client.reliable_queue("flood", lease=LEASE).offer_many(
        [delayq.Offer(value=value) for value in range(20)]
    )
    async with worker:
        await until(lambda: gate.inside)
        await rare.offer(1, id="a")
        # Claimed ahead and given back, the message is promised the next slot. But another client is
        # quicker.
        await asyncio.sleep(0.8)
        assert await rare.cancel("a")
        gate.open()
        # If the slot were kept for ever, the others would get one only now and then.
        await until(lambda: len(gate.seen) == 20, within=5)
    assert rarely.seen == []


async def test_a_thread_that_never_began_leaves_its_place(client: Client) -> None:
    worker = Worker(client, concurrency=1)
    seen: list[int] = []

    @worker.listener("hasty", timeout=0.000001, max_attempts=1)
    def hasty(value: int) -> None: ...

    @worker.listener("patient")
    def patient(value: int) -> None:
        seen.append(value)

    for _ in range(3):
        await client.reliable_queue("hasty", max_attempts=1).offer(1)
    await client.reliable_queue("patient").offer(2)
    async with asyncio.timeout(20):
        await worker.run(burst=True)
    assert seen == [2]


async def test_two_workers_share_the_work_and_nothing_is_handled_twice(
    client: Client, server: PrivateServer
) -> None:
    seen: list[tuple[str, int]] = []
    queue = client.reliable_queue("jobs")
    async with delayq.connect(server.url) as other_client:
        workers = {"one": Worker(client), "two": Worker(other_client)}
        for name, worker in workers.items():

            @worker.listener("jobs")
            async def handle(value: int, name: str = name) -> None:
                seen.append((name, value))
                await asyncio.sleep(0.001)

        await queue.offer_many([delayq.Offer(value=value) for value in range(2000)])
        async with workers["one"], workers["two"]:
            await until(lambda: len(seen) >= 2000)
    assert sorted(value for _, value in seen) == list(range(2000))
    assert {name for name, _ in seen} == {"one", "two"}
    assert await left(queue) == (0, 0, 0, 0)


# Burst mode


async def test_a_burst_ends_when_nothing_is_due(
    client: Client, worker: Worker, jobs: ReliableQueue[Any]
) -> None:
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

    await jobs.offer(1)
    await jobs.offer(100, delay=HOUR)
    await worker.run(burst=True)
    assert seen == [2, 4, 6]
    assert await left(jobs) == (1, 0, 0, 0)
    # A burst with nothing due ends as well.
    await worker.run(burst=True)


async def test_anyio_works_inside_handlers(worker: Worker, jobs: ReliableQueue[Any]) -> None:
    seen: list[Any] = []

    @on_jobs(worker, timeout=30)
    async def handle(value: int) -> None:
        with anyio.move_on_after(0.01) as scope:
            await anyio.sleep_forever()
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0)
        seen.append(scope.cancelled_caught)

    await jobs.offer_many([delayq.Offer(value=value) for value in range(20)])
    await worker.run(burst=True)
    assert seen == [True] * 20
