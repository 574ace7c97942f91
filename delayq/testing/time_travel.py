"""A private server, and time on it that tests can move."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from anyio import to_thread

from delayq._durations import Duration, datetime_at, microseconds, seconds
from delayq._embedded.server import EmbeddedServer
from delayq._redis.scripts import Script
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.open_queue import OpenDelayedQueue
from delayq._redisson.queue import DelayedQueue
from delayq._redisson.store import DelayedStore
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.partition import Partition
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.store import ReliableStore
from delayq.admin.catalog import find_queues
from delayq.client import Client, connect
from delayq.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from datetime import datetime

    from delayq._engine.session import Session
    from delayq._redis.client import RedisClient
    from delayq.tasks import Tasks

Target = Client | DelayedQueue[Any] | ReliableQueue[Any]
Keys = DelayedKeys | ReliableKeys

# Moments stay after the epoch.
_MOST_US = 20 * 365 * 86_400_000_000
_LOOK_AGAIN = 0.002

# Clients that have a private server.
_private: WeakSet[Client] = WeakSet()

ADVANCE_RELIABLE = Script("testing/advance_reliable")
ADVANCE_DELAYED = Script("testing/advance_delayed")


@asynccontextmanager
async def running(
    server: EmbeddedServer | None = None,
    *,
    resync_interval: Duration = 5.0,
    name_mapper: Callable[[str], str] | None = None,
    tasks: Iterable[Tasks] = (),
) -> AsyncIterator[Client]:
    """Provide a client on a private, empty server.

    Args:
        server: A running temporary server, which is emptied. By default, a server is started, and
            stopped afterwards, which takes a tenth of a second.
        resync_interval: As for :func:`delayq.connect`.
        name_mapper: As for :func:`delayq.connect`.
        tasks: As for :func:`delayq.connect`.

    Raises:
        EmbeddedServerError: It did not start, or ``delayq[embedded]`` is not installed.
        ConfigurationError: The server is not a temporary one.
    """
    if server is not None and server.directory is not None:
        raise ConfigurationError(
            f"running() empties its server, but {server!r} keeps its data: pass"
            " EmbeddedServer(None)"
        )
    temporary = EmbeddedServer(None) if server is None else server
    if server is None:
        await to_thread.run_sync(temporary.start)
    try:
        async with connect(
            temporary.url, resync_interval=resync_interval, name_mapper=name_mapper, tasks=tasks
        ) as client:
            await client.session.server.flush()
            _private.add(client)
            yield client
    finally:
        if server is None:
            await to_thread.run_sync(temporary.stop)


async def advance(target: Target, by: Duration) -> None:
    """Move time forward, at once.

    Consumers that wait for a message due by then get it. A handler in progress loses its lease if
    the lease would have ended by then, as if its process had hung. Timeouts that run in this
    process, such as ``poll(timeout=...)``, are not affected.

    Args:
        target: A client, for all queues on its server if :func:`running` made it, and otherwise for
            the queues that are open on it; or a single queue.
        by: Seconds or a timedelta; at most 20 years at a time.

    Raises:
        BadInput: ``by`` cannot be read, is negative, or is too large.
        ServerError: The server does not answer, or refuses the call.
    """
    by_us = microseconds(by, "by")
    if by_us > _MOST_US:
        raise BadInput("time can advance by at most 20 years")
    session = target.session
    for keys in await _keys_of(target):
        script = ADVANCE_RELIABLE if isinstance(keys, ReliableKeys) else ADVANCE_DELAYED
        await session.server.run(script, keys.of_script(script), (by_us,))
    await _wake(session)


class Clock:
    """A clock that a test can move.

    Args:
        target: As for :func:`advance`.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._advanced_by = timedelta()

    async def advance(self, by: Duration) -> None:
        """Move time forward, as :func:`advance`."""
        await advance(self._target, by)
        self._advanced_by += timedelta(microseconds=microseconds(by, "by"))

    async def now(self) -> datetime:
        """Return the server's time (UTC) plus the time by which this clock has been advanced."""
        return datetime_at(await self._target.session.server.time_us()) + self._advanced_by


async def settled(target: Target, *, timeout: Duration = 10.0) -> None:
    """Wait, in real time, until nothing is due and no worker holds a message.

    Messages that are due later stay.

    Messages popped from a delayed queue for good cannot be seen, and are not waited for.

    Args:
        target: As for :func:`advance`.
        timeout: Seconds or a timedelta.

    Raises:
        TimeoutError: It takes longer. The message lists the queues that are not settled.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + seconds(timeout, "timeout")
    server = target.session.server
    while busy := [
        figures for keys in await _keys_of(target) if (figures := await _busy(server, keys))
    ]:
        if loop.time() >= give_up_at:
            raise TimeoutError("still busy: " + "; ".join(busy))
        await asyncio.sleep(_LOOK_AGAIN)


async def _keys_of(target: Target) -> list[Keys]:
    if not isinstance(target, Client):
        return [*await target.key_sets()]
    session = target.session
    by_channel: dict[str, Keys] = {}
    for part in session.scheduler.parts:
        if isinstance(part, OpenDelayedQueue | Partition):
            by_channel[part.channels[0]] = part.keys
    if target in _private:
        for (kind, name), partitions in (await find_queues(session.server)).items():
            for partition in partitions:
                keys = (
                    DelayedKeys.of(name)
                    if kind == "delayed"
                    else ReliableKeys.of(name, partition=partition)
                )
                channel = keys.channel if isinstance(keys, DelayedKeys) else keys.wake
                by_channel.setdefault(channel, keys)
    return list(by_channel.values())


async def _wake(session: Session) -> None:
    """Make every queue of the client look for due messages, and wait until it has."""
    tasks: set[asyncio.Task[Any]] = set()
    for part in session.scheduler.parts:
        part.wake()
        if isinstance(part, Partition):
            await part.recurrence.check()
        if isinstance(part, OpenDelayedQueue | Partition) and part.wakeups.task:
            tasks.add(part.wakeups.task)
    if tasks:
        await asyncio.wait(tasks, timeout=5.0)


async def _busy(server: RedisClient, keys: Keys) -> str:
    """Describe the due and leased messages of a queue; empty if there are none."""
    if isinstance(keys, ReliableKeys):
        depth = await ReliableStore(server, keys).depth()
        if not depth.ready and not depth.leased:
            return ""
        return f"{keys.name!r} has {depth.ready} ready and {depth.leased} leased"
    store = DelayedStore(server, keys)
    next_due = await store.recheck()
    leased = await store.count_leased()
    if next_due.wait_us and not next_due.ready_or_schedules and not leased:
        return ""
    newly_due = "" if next_due.wait_us else ", and others just came due"
    return f"{keys.name!r} has {next_due.ready_or_schedules} ready, {leased} leased{newly_due}"
