"""The work of queues, done by hand: the floors of ``offer``, ``deliver`` and ``lateness``.

Each moves the same messages as delayq, by as little code as possible. None of them encodes,
decodes or checks values, tells errors apart, repeats calls, has time limits, can be cancelled, or
announces anything to other clients. Their docstrings tell what else they leave out.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis
from redis.asyncio import Redis

from benchmarks._moves import BATCH
from delayq._timer.alarm import LoopAlarm, new_alarm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

# As long as the leases of a queue.
LEASE_US = 30_000_000

# Offers

ADD = """
local time = redis.call('TIME')
return redis.call('ZADD', KEYS[1], time[1] * 1000000 + time[2] + ARGV[1], ARGV[2])
"""
# One member for each pair of delay and payload.
ADD_ALL = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 1, #ARGV, 2 do ARGV[i] = now + ARGV[i] end
return redis.call('ZADD', KEYS[1], unpack(ARGV))
"""
_AT_A_TIME, _FULL_BATCH, _ON_THE_WAY = 200, 50, 2


def bare_offers(redis: Redis, sha: str, value: str, delay_us: int) -> Callable[[], Awaitable[Any]]:
    """Return a function that adds a new member of 100 bytes with one call of redis-py.

    ``sha`` is that of :data:`ADD`. Messages have no ids, so duplicates are not found, and equal due
    times do not keep the order of the offers.
    """
    serial = 0

    def call() -> Awaitable[Any]:
        nonlocal serial
        serial += 1
        return redis.evalsha(sha, 1, "floor", delay_us, f"{serial:012}{value[:88]}")  # type: ignore[return-value,unused-ignore]

    return call


class SharedOffers(asyncio.Protocol):
    """A minimal client: a future for each offer, and two scripts in flight.

    It leaves out the same as :func:`bare_offers`.
    """

    def __init__(self, sha: str) -> None:
        self._sha = sha
        self._reader: Any = hiredis.Reader()
        self._waiting: list[tuple[int, str, asyncio.Future[int]]] = []
        self._sent: deque[list[tuple[int, str, asyncio.Future[int]]]] = deque()
        self._new_future = asyncio.get_running_loop().create_future
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if isinstance(reply, Exception):
                raise reply
            batch = self._sent.popleft()
            while self._waiting and len(self._sent) < _ON_THE_WAY:
                self._send()
            for _, _, future in batch:
                future.set_result(1)

    def offer(self, payload: str, delay_us: int) -> Awaitable[int]:
        future = self._new_future()
        self._waiting.append((delay_us, payload, future))
        if not self._sent or (len(self._waiting) >= _FULL_BATCH and len(self._sent) < _ON_THE_WAY):
            self._send()
        return future

    def close(self) -> None:
        self._transport.close()

    def _send(self) -> None:
        batch, self._waiting = self._waiting[:_AT_A_TIME], self._waiting[_AT_A_TIME:]
        self._sent.append(batch)
        parts: list[Any] = [part for delay_us, payload, _ in batch for part in (delay_us, payload)]
        self._transport.write(hiredis.pack_command(("EVALSHA", self._sha, 1, "floor", *parts)))


async def connect(server: Any) -> SharedOffers:
    """Connect to the server that ``server`` is connected to."""
    sha, options, loop = (
        server.script_load(ADD_ALL),
        server.connection_pool.connection_kwargs,
        asyncio.get_running_loop(),
    )

    def make() -> SharedOffers:
        return SharedOffers(sha)

    if "path" in options:
        return (await loop.create_unix_connection(make, options["path"]))[1]
    return (await loop.create_connection(make, options["host"], options["port"]))[1]


def numbered(
    offer: Callable[[str, int], Awaitable[int]], value: str, delay_us: int
) -> Callable[[], Awaitable[int]]:
    """Return a function that offers a new member on each call."""
    serial = 0

    def step() -> Awaitable[int]:
        nonlocal serial
        serial += 1
        return offer(f"{serial:012}{value[:88]}", delay_us)

    return step


# Delivery

CLAIM = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
if #ids == 0 then return {} end
local leased = {}
for _, id in ipairs(ids) do
  leased[#leased + 1] = now + ARGV[2]
  leased[#leased + 1] = id
end
redis.call('ZADD', KEYS[1], unpack(leased))
return {ids, redis.call('HMGET', KEYS[2], unpack(ids))}
"""
ACK = """
redis.call('HDEL', KEYS[2], unpack(ARGV))
return redis.call('ZREM', KEYS[1], unpack(ARGV))
"""
TAKE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
if #ids == 0 then return {} end
local bodies = redis.call('HMGET', KEYS[2], unpack(ids))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #ids - 1)
redis.call('HDEL', KEYS[2], unpack(ids))
return {ids, bodies}
"""
DELIVERY_KEYS = ["floor", "floor:bodies"]


async def store_due(url: str, due: float, value: str, messages: int, at_a_time: int) -> None:
    """Store messages that are due at ``due``, for :func:`deliver`."""
    async with Redis.from_url(url) as redis:
        for first in range(0, messages, at_a_time):
            ids = [f"{place:016}" for place in range(first, min(first + at_a_time, messages))]
            await redis.zadd("floor", dict.fromkeys(ids, due * 1e6))
            bodies: Any = dict.fromkeys(ids, value)
            await redis.hset("floor:bodies", mapping=bodies)


async def deliver(url: str, handle: Callable[[], bool], *, leased: bool) -> None:
    """Hand out due messages, 100 by a script, until ``handle`` returns that it was the last.

    If they are leased, they stay until another script acknowledges them, whichever client has them
    by then; otherwise they are deleted at once, so a crash loses them. There are no attempts,
    priorities or other settings, no lease is extended, and each call waits for the one before it.
    """
    async with Redis.from_url(url, single_connection_client=True) as redis:
        claim, ack = redis.register_script(CLAIM if leased else TAKE), redis.register_script(ACK)
        last = False
        while not last:
            ids, bodies = await claim(DELIVERY_KEYS, [BATCH, LEASE_US])
            for _body in bodies:
                last = handle()
            if leased and await ack(DELIVERY_KEYS, ids) != len(ids):
                raise AssertionError("some messages were lost")


async def nothing_left(url: str) -> None:
    """Raise an error if there are messages that :func:`deliver` has not deleted."""
    async with Redis.from_url(url) as redis:
        if await redis.exists(*DELIVERY_KEYS):
            raise AssertionError("some messages are left")


# Lateness

# Remove due messages and return them with their due times, and the time until the next one,
# microseconds.
TAKE_DUE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, 100)
if #due > 0 then redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #due / 2 - 1) end
local head = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {due, head and math.max(0, math.ceil(head - now)) or -1}
"""


async def on_time(url: str, delays: Sequence[float], *, timerfd: bool) -> list[float]:
    """Run one timer and one script that deletes what it returns. Return the latenesses in ms.

    Messages are numbers, all stored before the first is due, so that nothing has to be noticed.
    """
    loop: Any = asyncio.get_running_loop()
    late, rang = list[float](), asyncio.Event()
    context = contextvars.copy_context()
    waker = new_alarm(loop, context, rang) if timerfd else LoopAlarm(loop, context)
    async with Redis.from_url(url) as redis:
        script = redis.register_script(TAKE_DUE)
        base = time.time()
        await redis.zadd("floor", {str(n): (base + delay) * 1e6 for n, delay in enumerate(delays)})
        while len(late) < len(delays):
            due_messages, wait_us = await script(keys=["floor"])
            arrived = time.time()
            late += [(arrived - float(due) / 1e6) * 1000 for due in due_messages[1::2]]
            if wait_us > 0:
                rang.clear()
                waker.set(loop.time() + wait_us / 1e6, rang.set)
                await rang.wait()
    waker.close()
    return late
