"""The durability of an offer beyond "the server has it": on disk, or on replicas too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayq._redis.client import BLOCKS_FOR
from delayq.errors import BadInput, Closed, DelayqError

if TYPE_CHECKING:
    from delayq._engine.batcher import Batcher
    from delayq._redis.client import RedisClient
    from delayq._redis.connection import Connection
    from delayq._redis.scripts import Script

# A promise that is not kept within this time counts as broken, ms. Redis syncs once a second where it is set to ``everysec``.
WITHIN_MS = int(BLOCKS_FOR * 1000)

Item = TypeVar("Item")
Result = TypeVar("Result")
# Turns items and an answer into the results of these items.
Results = Callable[[Sequence[Any], Any], Sequence[Any]]


class Durability(NamedTuple):
    """A promise to wait for: a number of replicas, or the disk."""

    replicas: int

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command sent behind a script. It answers when all earlier writes are safe, or with how far they have got."""
        return ("WAIT", self.replicas, WITHIN_MS) if self.replicas else ("WAITAOF", 1, 0, WITHIN_MS)

    def broken(self, answer: Any) -> str:
        """Return why the promise is broken, according to the answer to that command; empty if it is kept."""
        if isinstance(answer, BaseException):
            return f"the server did not confirm durability: {answer}"
        if not self.replicas:
            return "" if answer[0] >= 1 else f"not on disk within {WITHIN_MS / 1000:g} s"
        return (
            ""
            if answer >= self.replicas
            else f"only {answer} of {self.replicas} replicas confirmed within {WITHIN_MS / 1000:g} s"
        )


class Unconfirmed(NamedTuple, Generic[Result]):
    """The result of an item whose promise is broken, and the reason."""

    result: Result
    reason: str


def parse(durability: str) -> Durability | None:
    """Parse ``memory``, for which it returns None, ``fsync`` or ``replicas:N``.

    Raises:
        BadInput: It is none of these.
    """
    if durability == "memory":
        return None
    if durability == "fsync":
        return Durability(0)
    found = re.fullmatch(r"replicas:([1-9][0-9]{0,3})", durability) if isinstance(durability, str) else None
    if found is None:
        raise BadInput(f'durability must be "memory", "fsync" or "replicas:N", not {durability!r}')
    return Durability(int(found[1]))


class WaitingServer:
    """A server that sends the promise's command behind each script, and answers with a pair of both replies."""

    def __init__(self, server: RedisClient, promise: Durability) -> None:
        self._server = server
        self._promise = promise

    def run_soon(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        told: Callable[[Any], object],
        beside: Connection | None = None,
    ) -> Connection | None:
        """Send a call as :meth:`RedisClient.run_soon` does."""
        answer: list[Any] = []

        def landed(reply: Any) -> None:
            if isinstance(reply, DelayqError):
                told(reply)
            else:
                answer.append(reply)

        def waited(reply: Any) -> None:
            # If the first one was not answered, the caller has been told already.
            if answer:
                told((answer[0], reply))

        wire = self._server.run_soon(script, keys, args, landed, beside)
        if wire is not None:
            self._server.follow(wire, keys[0], self._promise.command, waited)
        return wire

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = (), until: float | None = None
    ) -> Any:
        """Run a script as :meth:`RedisClient.run` does."""
        return await self._server.run(script, keys, args, until, self._promise.command)

    async def demand(self, key: str) -> None:
        """Refuse a promise that cannot be kept, before anything is written.

        Raises:
            ServerRefused: The server is too old to wait for its disk, or does not write to it; or we may not wait.
        """
        # WAIT for zero replicas answers at once.
        ask = ("WAIT", 0, 1) if self._promise.replicas else ("WAITAOF", 1, 0, 1)
        await self._server.command(*ask, key=key)


class DurableBatchers(Generic[Item, Result]):
    """Stores the messages of one queue: without a further promise, and under each promise that was requested.

    Attributes:
        plain: Stores messages without a further promise.
    """

    def __init__(
        self,
        server: RedisClient,
        key: str,
        new: Callable[[RedisClient | WaitingServer, Callable[[Results], Results]], Batcher[Item, Any]],
    ) -> None:
        """Args:
        key: One of the queue's keys. It determines which server is asked whether it can keep a promise.
        new: Creates a group commit from the server that runs the scripts and a function. That function turns the reader of a
            plain server's answers into the reader of this server's answers.
        """
        self._server = server
        self._key = key
        self._new = new
        self._promised: dict[Durability, Batcher[Item, Result | Unconfirmed[Result]]] = {}
        self._closed = False
        self.plain: Batcher[Item, Result] = new(server, lambda results: results)

    async def under(self, promise: Durability) -> Batcher[Item, Result | Unconfirmed[Result]]:
        """Return the group commit that stores messages under a promise.

        Raises:
            ServerError: The server cannot be asked, or cannot keep such a promise.
            Closed: The queue was closed meanwhile.
        """
        if promise not in self._promised:
            server = WaitingServer(self._server, promise)
            await server.demand(self._key)
            if self._closed:
                raise Closed("the queue is closed")
            if promise not in self._promised:
                self._promised[promise] = self._new(server, partial(_confirming, promise))
        return self._promised[promise]

    async def aclose(self, grace: float) -> None:
        """Accept no more items, and give those in flight ``grace`` seconds."""
        self._closed = True
        promised = (commits.aclose(grace) for commits in self._promised.values())
        await asyncio.gather(self.plain.aclose(grace), *promised)


def _confirming(promise: Durability, results: Results) -> Results:
    """Adapt ``results`` to the pairs of a :class:`WaitingRedisClient`: each is :class:`Unconfirmed` if the promise is broken."""

    def confirmed(items: Sequence[Any], answer: tuple[Any, Any]) -> Sequence[Any]:
        known = results(items, answer[0])
        reason = promise.broken(answer[1])
        return [Unconfirmed(result, reason) for result in known] if reason else known

    return confirmed
