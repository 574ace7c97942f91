"""The best that Python can do: waiting offers share a script, and nothing else is done.

A floor for ``offer``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# One member for each pair of delay and payload.
ADD_ALL = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 1, #ARGV, 2 do ARGV[i] = now + ARGV[i] end
return redis.call('ZADD', KEYS[1], unpack(ARGV))
"""
_AT_A_TIME, _ENOUGH, _ON_THE_WAY = 200, 50, 2


class ByHand(asyncio.Protocol):
    """A minimal client: a future for each offer and two scripts in flight, without errors,
    cancellation, deadlines or order.
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
        while (answer := self._reader.gets()) is not False:
            if isinstance(answer, Exception):
                raise answer
            batch = self._sent.popleft()
            while self._waiting and len(self._sent) < _ON_THE_WAY:
                self._send()
            for _, _, future in batch:
                future.set_result(1)

    def offer(self, payload: str, delay_us: int) -> Awaitable[int]:
        future = self._new_future()
        self._waiting.append((delay_us, payload, future))
        if not self._sent or (len(self._waiting) >= _ENOUGH and len(self._sent) < _ON_THE_WAY):
            self._send()
        return future

    def close(self) -> None:
        self._transport.close()

    def _send(self) -> None:
        batch, self._waiting = self._waiting[:_AT_A_TIME], self._waiting[_AT_A_TIME:]
        self._sent.append(batch)
        parts: list[Any] = [part for delay_us, payload, _ in batch for part in (delay_us, payload)]
        self._transport.write(hiredis.pack_command(("EVALSHA", self._sha, 1, "floor", *parts)))


async def connect(server: Any) -> ByHand:
    """Connect to the server that ``server`` is connected to."""
    sha, where, loop = (
        server.script_load(ADD_ALL),
        server.connection_pool.connection_kwargs,
        asyncio.get_running_loop(),
    )

    def make() -> ByHand:
        return ByHand(sha)

    if "path" in where:
        return (await loop.create_unix_connection(make, where["path"]))[1]
    return (await loop.create_connection(make, where["host"], where["port"]))[1]


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
