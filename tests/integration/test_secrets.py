"""No payload, header or password gets into a log line, an error, or a repr."""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from redis.asyncio import Redis

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from tests.conftest import FOUND
from tests.support.reliable import get
from tests.support.servers import Kind, PrivateServer, free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

# Every form in which the secret may appear: as it is, escaped, or as hexadecimal digits.
SECRET = "hunter2-is-secret"
FORMS = (SECRET, SECRET.encode().hex(), SECRET.encode().hex(" "))
VALUE = {SECRET: [SECRET]}
HEADERS = {SECRET: SECRET}
NAME = "orders"
USER = "somebody"
RULES = ("on", f">{SECRET}", "allkeys", "allchannels", "+@all")


def is_told(text: str) -> bool:
    return any(form in text for form in FORMS)


def chain(error: BaseException | None) -> set[BaseException]:
    """Return an error and everything that led to it."""
    errors: set[BaseException] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in errors:
            errors.add(one)
            waiting += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                waiting += one.exceptions
    return errors


def words(error: BaseException) -> str:
    texts = [f"{one!s} {one!r} {getattr(one, '__notes__', '')}" for one in chain(error)]
    # As it appears in a log, except for the lines of this file, which may contain the secret.
    return "\n".join([*texts, *traceback.format_exception_only(error)])


@asynccontextmanager
async def failing(*kinds: type[BaseException]) -> AsyncIterator[None]:
    """Check that the block fails, and that its error does not reveal the secret."""
    with pytest.raises(kinds) as caught:
        yield
    assert not is_told(words(caught.value)), words(caught.value)


async def refused(*calls: Callable[[], Awaitable[Any]]) -> None:
    for call in calls:
        async with failing(delayq.ServerRefused):
            await call()


@asynccontextmanager
async def connected(url: str, server: PrivateServer) -> AsyncIterator[tuple[delayq.Client, Any]]:
    """Yield a client with these rights, and one without delayq that may do everything."""
    async with (
        delayq.connect(url) as client,
        Redis.from_url(server.url, socket_timeout=60) as raw,
    ):
        yield client, raw


@pytest.fixture(autouse=True)
def _no_log_tells(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.DEBUG)
    yield
    for record in caplog.get_records("call"):
        text = record.getMessage()
        if record.exc_info and record.exc_info[1]:
            text += words(record.exc_info[1])
        assert not is_told(text), text


def check_reprs() -> None:
    """Check each object of a delayq class, public or not: any of them may end up in a log."""
    gc.collect()
    class_names = set()
    for item in gc.get_objects():
        # The types of some libraries have a property of that name.
        module = type(item).__module__
        if isinstance(item, type) or not isinstance(module, str) or not module.startswith("delayq"):
            continue
        with suppress(ReferenceError, AttributeError):
            text = repr(item)
            class_names.add(type(item).__name__)
            assert not is_told(text), (type(item), text[:500])
    assert class_names


def address(server: PrivateServer) -> str:
    return server.url.replace("unix://", f"unix://{USER}:{SECRET}@")


@pytest.fixture
async def guarded(server: PrivateServer) -> AsyncIterator[str]:
    """Yield the address of a server, for a user whose password is secret."""
    assert server.call("ACL", "SETUSER", USER, "reset", *RULES) == b"+OK"
    yield address(server)
    server.call("ACL", "DELUSER", USER)


@pytest.mark.every_server
async def test_logs_and_errors_of_a_delayed_queue_reveal_no_payload(
    guarded: str, server: PrivateServer
) -> None:
    keys = DelayedKeys.of(NAME)
    async with connected(guarded, server) as (client, raw):
        queue: delayq.DelayedQueue[Any] = client.delayed_queue(NAME)
        small: delayq.DelayedQueue[Any] = client.delayed_queue(NAME, max_payload=5)
        kept: list[Any] = [
            await queue.offer(VALUE, 60),
            *await queue.offer_many([(VALUE, 60), (VALUE, 0)]),
        ]
        kept.append(asyncio.create_task(queue.take()))
        await kept[-1]
        async with failing(delayq.PayloadTooLarge):
            await small.offer(VALUE)
        for bad in (
            *(object(), SECRET + "\ud800", {SECRET: object()}, {(SECRET,): 1}),
            *({SECRET: float("nan")}, {SECRET: {SECRET.encode()}}),
        ):
            async with failing(delayq.EncodeError):
                await queue.offer(bad)
        for delay in (-1, float("nan"), "5"):
            async with failing(delayq.BadDelay):
                await queue.offer(VALUE, delay)  # type: ignore[arg-type]
        # Payloads that cannot be decoded.
        for payload in (f'{{"{SECRET}', f"{SECRET}", f'"{SECRET}\xff', f'"{SECRET}" {SECRET}'):
            await raw.rpush(keys.ready, *[payload.encode("latin-1")] * 2)
            for read in (queue.poll, queue.ready.read_all, queue.drain):
                async with failing(delayq.DecodeError):
                    await read()
        await raw.rpush(keys.ready, SECRET, f'["{SECRET}"]')
        async for value in queue:
            assert value == [SECRET]
            break
        await raw.rpush(keys.ready, SECRET, f'["{SECRET}"]')
        async for delivery in queue.deliveries():
            kept.append(delivery)
            await delivery.nack(60)
            async with failing(delayq.LeaseLost):
                await delivery.ack()
            break
        await raw.zadd(keys.timeout, {f"xx{SECRET}": 1})
        assert await queue.poll() is None
        await queue.pending.entries()
        check_reprs()
        await raw.delete(keys.timeout)
        await raw.set(keys.timeout, SECRET)
        calls = (queue.poll, queue.pending.entries, kept[0].cancel)
        await refused(lambda: queue.offer(VALUE), lambda: kept[0].reschedule(1), *calls)


@pytest.mark.every_server
async def test_logs_and_errors_of_a_reliable_queue_reveal_no_payload(
    guarded: str, server: PrivateServer
) -> None:
    keys = ReliableKeys.of(NAME)
    async with connected(guarded, server) as (client, raw):
        queue = client.reliable_queue(NAME)
        offers = [delayq.Offer(VALUE, headers=HEADERS, priority=i % 2, ttl=60) for i in range(9)]
        await queue.offer_many(offers)
        await queue.offer(VALUE, id="a", headers=HEADERS)
        async with failing(delayq.DuplicateMessage):
            await queue.offer(VALUE, id="a", headers=HEADERS)
        for wrong in (
            *({"headers": {SECRET: 1}}, {"headers": SECRET}, {"headers": {SECRET: SECRET * 2000}}),
            *({"value": object()}, {"value": SECRET + "\ud800"}, {"ttl": -1}),
        ):
            async with failing(delayq.BadInput, delayq.EncodeError):
                await queue.offer(**({"value": VALUE, "headers": HEADERS} | wrong))  # type: ignore[arg-type]
        await queue.schedule("nightly", every=60, value=VALUE, headers=HEADERS)
        kept: list[Any] = [
            *(await queue.get("a"), await queue.peek(), await queue.schedules()),
            *await queue.claim(9),
        ]
        await kept[3].bury("why")
        kept.append(await queue.dead.list())
        check_reprs()
        # Bodies written by another program.
        for body in (
            *(SECRET, f"{SECRET}\n{SECRET}", f"1 {SECRET}\n1", f'1 ["{SECRET}"]\n1'),
            *(f'1 \n"{SECRET}', f'1 \n"{SECRET}\xff"'),
        ):
            await raw.hset(keys.named("bodies"), "a", body.encode("latin-1"))
            message = await get(queue, "a")
            async with failing(delayq.DecodeError):
                # The first one that fails.
                _ = message.headers, message.value
        await raw.hset(keys.dead_messages, kept[3].id, f"{SECRET}\n{SECRET}")
        (letter,) = await queue.dead.list()
        async with failing(delayq.DecodeError):
            _ = letter.value
        await raw.delete(keys.waiting[0])
        await raw.set(keys.waiting[0], SECRET)
        calls = (queue.claim, queue.stats, lambda: queue.cancel("a"))
        await refused(lambda: queue.offer(VALUE, headers=HEADERS), *calls)


async def test_logs_and_errors_of_a_worker_reveal_no_payload(
    guarded: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = delayq.Worker(guarded)
    seen: list[Any] = []

    @worker.listener(NAME, max_attempts=1)
    async def handle(message: delayq.Message[Any]) -> None:
        seen.append(message)
        raise RuntimeError("of the handler")

    @worker.listener("typed")
    async def typed(order: Strict) -> None: ...

    async with delayq.connect(guarded) as client:
        await client.reliable_queue(NAME).offer(VALUE, headers=HEADERS)
        await client.reliable_queue("typed").offer({"number": SECRET}, headers=HEADERS)
        await worker.run(burst=True)
        assert len(seen) == 1
        check_reprs()
        assert "of the handler" in caplog.text
        assert "cannot be decoded" in caplog.text
        for name in (NAME, "typed"):
            (letter,) = await client.reliable_queue(name).dead.list()
            assert not is_told(f"{letter!r}{letter.traceback}")


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    number: int = 0


@pytest.mark.every_server
async def test_a_refusal_does_not_tell_the_password(server: PrivateServer, guarded: str) -> None:
    wrong = guarded.replace(f":{SECRET}@", f":{SECRET}-wrong@")
    async with failing(delayq.ServerRefused):
        await delayq.connect(wrong).__aenter__()
    server.call("ACL", "SETUSER", USER, "-@all", "+ping")
    async with delayq.connect(guarded) as client:
        queue: delayq.DelayedQueue[Any] = client.delayed_queue(NAME)
        jobs = client.reliable_queue(NAME)
        calls = (queue.poll, jobs.claim, lambda: queue.pending.contains(VALUE))
        await refused(
            lambda: queue.offer(VALUE), lambda: jobs.offer(VALUE, headers=HEADERS), *calls
        )


@pytest.mark.usefixtures("_impatient")
async def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    url = f"redis://{SECRET}:{SECRET}@127.0.0.1:{free_port()}/0?client_name={SECRET}"
    client = delayq.connect(url)
    check_reprs()
    async with failing(delayq.ServerUnavailable):
        await client.__aenter__()
    worker = delayq.Worker(url)
    worker.listener(NAME)(lambda _: None)
    async with failing(delayq.ServerUnavailable):
        await worker.run()


@pytest.mark.usefixtures("_impatient")
async def test_a_server_that_goes_away_reveals_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with PrivateServer(next(iter(FOUND.values()))) as server:
        assert server.call("ACL", "SETUSER", USER, *RULES) == b"+OK"
        async with delayq.connect(address(server), resync_interval=0.05) as client:
            queue: delayq.DelayedQueue[Any] = client.delayed_queue(NAME)
            jobs = client.reliable_queue(NAME)
            await queue.offer(VALUE, 60)
            server.kill()
            async with failing(delayq.ServerError):
                await queue.offer(VALUE)
            async with failing(delayq.ServerError):
                await jobs.offer(VALUE, headers=HEADERS)
            await until(lambda: "interrupted" in caplog.text)
            check_reprs()


@pytest.mark.every_server
async def test_an_unknown_command_is_not_quoted_with_its_arguments(server_kind: Kind) -> None:
    options = ("--rename-command", "RPUSH", "")
    with PrivateServer(server_kind, options=options) as server:
        async with delayq.connect(server.url) as client:
            await refused(
                lambda: client.session.server.command("RPUSH", "k", SECRET),
                lambda: client.delayed_queue(NAME).offer(VALUE),
            )
