"""Notifications of PostgreSQL, through the drivers that can wait for them without a thread."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from delayq._redis.retry import retry_delay
from delayq.outbox._rows import CHANNEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    Connect = Callable[[], AbstractAsyncContextManager[Any]]
    Notified = Callable[[str], object]

_log = logging.getLogger("delayq.outbox")

LISTEN = f"LISTEN {CHANNEL}"
"""The statement that a connection has executed before it is handed over."""
# The longest pause before a connection that has failed is opened again, seconds.
_LONGEST_PAUSE = 30.0


@asynccontextmanager
async def listening(connect: Connect, notified: Notified) -> AsyncIterator[None]:
    """Call ``notified`` with the payload of each notification while the block runs.

    A connection that fails is replaced. Whoever depends on this has to look by itself at times.

    Args:
        connect: Opens a connection of the driver, which listens.
        notified: Called in the event loop.
    """
    task = asyncio.create_task(_keep_listening(connect, notified), name="delayq outbox listen")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _keep_listening(connect: Connect, notified: Notified) -> None:
    failures = 0
    while True:
        try:
            async with connect() as driver:
                if (source := _source(driver)) is None:
                    _log.info(
                        "%s tells nothing of notifications: the outbox is looked at every second",
                        type(driver).__module__,
                    )
                    return
                failures = 0
                await source(driver, notified)
        except Exception as error:  # noqa: BLE001 - of any driver
            failures += 1
            _log.warning(
                "the outbox is looked at every second, because its notifications are lost: %s: %s",
                type(error).__name__,
                error,
            )
            await asyncio.sleep(retry_delay(failures, base=1.0, longest=_LONGEST_PAUSE))


def _source(driver: Any) -> Callable[[Any, Notified], Any] | None:
    """Return how to wait for the notifications of a driver's connection."""
    if hasattr(driver, "add_listener"):
        return _listen_asyncpg
    if hasattr(driver, "pgconn"):
        return _listen_psycopg
    return _listen_psycopg2 if hasattr(driver, "notifies") else None


async def _listen_asyncpg(driver: Any, notified: Notified) -> None:
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_end(_connection: Any) -> None:
        if not ended.done():
            ended.set_result(None)

    driver.add_termination_listener(on_end)
    await driver.add_listener(CHANNEL, lambda _connection, _pid, _channel, text: notified(text))
    await ended
    raise ConnectionError("the connection has ended")


async def _listen_psycopg(driver: Any, notified: Notified) -> None:
    def read() -> None:
        driver.pgconn.consume_input()
        while (notification := driver.pgconn.notifies()) is not None:
            notified(notification.extra.decode())

    await _read_for_ever(driver.fileno(), read)


async def _listen_psycopg2(driver: Any, notified: Notified) -> None:
    def read() -> None:
        driver.poll()
        while driver.notifies:
            notified(driver.notifies.pop(0).payload)

    await _read_for_ever(driver.fileno(), read)


async def _read_for_ever(descriptor: int, read: Callable[[], None]) -> None:
    """Read whenever there is something to be read, and raise the error of a read."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        try:
            read()
        except Exception as error:  # noqa: BLE001 - of any driver
            loop.remove_reader(descriptor)
            failed.set_exception(error)

    loop.add_reader(descriptor, on_readable)
    try:
        # What has come before.
        read()
        await failed
    finally:
        loop.remove_reader(descriptor)
