"""A queue that delayq and Redisson share, and a record of what came to whom, and when."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from redis.asyncio import Redis

from delayq._redis.rights import checked
from delayq._redis.scripts import scripts_in
from tests.interop.pairs import PAIRS, TEXT, Pair
from tests.support.cases import naming
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import delayq
    from tests.interop.redisson import JavaQueue, Redisson
    from tests.support.servers import PrivateServer


MESSAGES = 1_000
"""How many messages a scenario has in each codec. Moving ignores their content."""
AT_NIGHT = 5_000
AT_ONCE = 3
"""How many scenarios play at once. With all of them, Java's client waits for connections."""
MAX_DELAY_MS = 600
DEADLINE = 120.0
"""The time limit for a step, seconds. A step takes two."""
SPREAD = 9_973
"""A prime below the number of a pair's values: few messages have values from all of them."""

Messages = list[tuple[Any, int]]
"""Values, with their delays or the times of their arrival, ms."""


@dataclass
class Live:
    """A queue, and what both sides need to use it."""

    server: PrivateServer
    client: delayq.Client
    redisson: Redisson
    name: str

    async def open(self, pair: Pair = TEXT, *, attached: bool = True) -> JavaQueue:
        return await self.redisson.open(
            self.name, pair.java, attached=attached, to_java=pair.to_java
        )

    def queue(self, pair: Pair = TEXT, **options: Any) -> delayq.DelayedQueue[Any]:
        return self.client.delayed_queue(self.name, codec=pair.codec, **options)

    def raw(self) -> Any:
        return Redis.from_url(self.server.url, socket_timeout=60, socket_connect_timeout=60)

    async def drained(self) -> None:
        """Wait until every key with messages of this queue is gone."""
        async with self.raw() as redis:

            async def empty() -> bool:
                # A fence is an empty mark of a call that was given up. It disappears in a minute.
                keys = await redis.keys(f"*{self.name}*")
                return all(key.startswith(b"delayq_fence:") for key in keys)

            await until(empty, DEADLINE)


@dataclass
class Log:
    """When values were due and when they arrived, ms, by the bytes to which we encode them."""

    pair: Pair = TEXT
    due: dict[bytes, float] = field(default_factory=dict)
    arrived: dict[bytes, list[float]] = field(default_factory=dict)

    async def offer_by_java(self, java: JavaQueue, messages: Messages) -> None:
        for (value, delay), left in zip(messages, await java.offer(messages), strict=True):
            self.due[self.pair.codec.encode(value)] = left + delay

    async def offer_by_python(
        self, queue: delayq.DelayedQueue[Any], messages: Messages, *, at_once: int = AT_NIGHT
    ) -> None:
        for at in range(0, len(messages), at_once):
            part = messages[at : at + at_once]
            receipts = await queue.offer_many(for_python(part))
            for (value, _), receipt in zip(part, receipts, strict=True):
                self.offered_by_python(value, receipt)

    def offered_by_python(self, value: Any, receipt: delayq.Receipt[Any]) -> None:
        self.due[self.pair.codec.encode(value)] = receipt.due_at.timestamp() * 1000

    def came(self, value: Any, at: float) -> None:
        self.arrived.setdefault(self.pair.codec.encode(value), []).append(at)

    def came_to_java(self, *arrivals: Messages) -> None:
        for arrival in arrivals:
            for value, at in arrival:
                self.came(value, at)

    @asynccontextmanager
    async def consuming(self, *queues: delayq.DelayedQueue[Any]) -> AsyncIterator[None]:
        async def consume(queue: delayq.DelayedQueue[Any]) -> None:
            async for value in queue:
                self.came(value, time.time() * 1000)

        tasks = [asyncio.create_task(consume(queue)) for queue in queues]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results

    def check(self, *, lost: int = 0) -> None:
        """Assert that all but ``lost`` values arrived, once, none early, and no other value."""
        assert len(self.due) > 0
        assert self.arrived.keys() <= self.due.keys()
        assert len(self.missing()) <= lost
        assert [payload for payload, times in self.arrived.items() if len(times) != 1] == []
        assert self.early() == []

    def missing(self) -> list[bytes]:
        return [payload for payload in self.due if payload not in self.arrived]

    def early(self) -> list[bytes]:
        return [
            payload for payload, times in self.arrived.items() if min(times) < self.due[payload]
        ]

    def lateness(self) -> list[float]:
        return [self.arrived[payload][0] - due for payload, due in self.due.items()]


def random_messages(
    pair: Pair, count: int = MESSAGES, first: int = 0, most: int = MAX_DELAY_MS
) -> Messages:
    chance = random.Random(first)
    numbers = (n * 7_919 % SPREAD for n in range(first, first + count))
    return [(pair.value(number), chance.randint(0, most)) for number in numbers]


async def in_each_codec(live: Live, play: Callable[[Live, Pair], Awaitable[None]]) -> None:
    """Play a scenario with each codec on a queue of its own, a few of them at once."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def play_one(pair: Pair, number: int) -> None:
        async with turn:
            with naming(str(pair)):
                await play(replace(live, name=f"{live.name}-{number}"), pair)

    async with asyncio.TaskGroup() as group:
        for number, pair in enumerate(PAIRS):
            group.create_task(play_one(pair, number))


def for_python(messages: Messages) -> list[tuple[Any, float]]:
    return [(value, delay / 1000) for value, delay in messages]


def encoded(pair: Pair, values: Sequence[Any]) -> list[bytes]:
    """Encode values to compare them: NaN equals NaN, and Java's long 5 is not its int 5."""
    return [pair.codec.encode(value) for value in values]


_SCRIPTS = (*scripts_in(""), *scripts_in("redisson"))
_FORMS = [form for script in _SCRIPTS for form in (script, checked(script)) if form]
_OURS = {form.sha.encode() for form in _FORMS}
# Redisson's scripts start with different lines, so this tells EVAL calls apart as well.
_FIRST_LINES = {form.text.partition("\n")[0].encode() for form in _FORMS}
# The client that ran it, the command, and the first argument up to its first escaped character.
_LINE = re.compile(rb'\+[0-9.]+ \[\d+ ([^]]+)\] "(\w+)"(?: "([^"\\]*))?')


class MovedByJava:
    """A count of the messages that a queue's Java clients move during the block.

    Redisson's script pushes each message with a command of its own.
    """

    def __init__(self, server: PrivateServer, queue: str) -> None:
        self.count = 0
        self._server = server
        self._ready = queue.encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._read, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._connection.connect(str(self._server.socket_path))
        self._connection.sendall(b"MONITOR\r\n")
        assert self._connection.recv(5) == b"+OK\r\n"
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The server reports commands in order: all that ran earlier come before this one.
        self._server.call("ECHO", "the end")
        self._thread.join(10)
        self._connection.close()
        assert not self._thread.is_alive()

    def _read(self) -> None:
        ours = False
        with self._connection.makefile("rb") as lines:
            for line in lines:
                found = _LINE.match(line)
                if found is None:
                    continue
                who, command, first = found[1], found[2].upper(), found[3]
                if who == b"lua":
                    self.count += command == b"RPUSH" and first == self._ready and not ours
                elif command in {b"EVAL", b"EVALSHA"}:
                    ours = first in _OURS or first in _FIRST_LINES
                elif command == b"ECHO":
                    return
