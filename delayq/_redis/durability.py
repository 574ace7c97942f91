"""What an offer may be promised beyond "the server has it": on disk, or on replicas too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayq._redis.server import BLOCKS_FOR
from delayq.errors import BadInput, Closed, DelayqError

if TYPE_CHECKING:
    from delayq._redis.group_commit import GroupCommit
    from delayq._redis.scripts import Script
    from delayq._redis.server import Server
    from delayq._redis.wire import Wire

# A promise that is not kept within that is broken, ms. Redis syncs once a second where it is told ``everysec``.
WITHIN_MS = int(BLOCKS_FOR * 1000)

Item = TypeVar("Item")
Result = TypeVar("Result")
# Results of items, by an answer.
Results = Callable[[Sequence[Any], Any], Sequence[Any]]


class Promise(NamedTuple):
    """What is waited for: so many replicas, or the disk."""

    replicas: int

    @property
    def command(self) -> tuple[str | int, ...]:
        """What follows a script on its connection: it answers when all that was written before is safe, or with how far it is."""
        return ("WAIT", self.replicas, WITHIN_MS) if self.replicas else ("WAITAOF", 1, 0, WITHIN_MS)

    def broken(self, answer: Any) -> str:
        """Why the promise is broken, by what that command answered; empty if it is kept."""
        if isinstance(answer, BaseException):
            return f"the server does not tell: {answer}"
        if not self.replicas:
            return "" if answer[0] >= 1 else f"it is not on disk after {WITHIN_MS / 1000:g} s"
        return "" if answer >= self.replicas else f"{answer} of {self.replicas} replicas have it after {WITHIN_MS / 1000:g} s"


class Unconfirmed(NamedTuple, Generic[Result]):
    """What became of an item whose promise is broken, and why."""

    result: Result
    reason: str


def parse(durability: str) -> Promise | None:
    """``memory`` is no promise; ``fsync``; ``replicas:N``.

    Raises:
        BadInput: It is none of these.
    """
    if durability == "memory":
        return None
    if durability == "fsync":
        return Promise(0)
    found = re.fullmatch(r"replicas:([1-9][0-9]{0,3})", durability) if isinstance(durability, str) else None
    if found is None:
        raise BadInput(f'durability is "memory", "fsync" or "replicas:N", not {durability!r}')
    return Promise(int(found[1]))


class WaitingServer:
    """A server whose scripts come with what their promise's command answered: pairs of both."""

    def __init__(self, server: Server, promise: Promise) -> None:
        self._server = server
        self._promise = promise

    def run_soon(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        told: Callable[[Any], object],
        beside: Wire | None = None,
    ) -> Wire | None:
        """As :meth:`Server.run_soon`."""
        answer: list[Any] = []

        def landed(reply: Any) -> None:
            if isinstance(reply, DelayqError):
                told(reply)
            else:
                answer.append(reply)

        def waited(reply: Any) -> None:
            # Without an answer to the first one, that was told already.
            if answer:
                told((answer[0], reply))

        wire = self._server.run_soon(script, keys, args, landed, beside)
        if wire is not None:
            self._server.follow(wire, keys[0], self._promise.command, waited)
        return wire

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = (), until: float | None = None
    ) -> Any:
        """As :meth:`Server.run`."""
        return await self._server.run(script, keys, args, until, self._promise.command)

    async def demand(self, key: str) -> None:
        """Refuse what cannot be kept before anything is written.

        Raises:
            ServerRefused: The server is too old to wait for its disk, or does not write to it; or we may not wait.
        """
        # Without a replica to wait for, it answers at once.
        ask = ("WAIT", 0, 1) if self._promise.replicas else ("WAITAOF", 1, 0, 1)
        await self._server.command(*ask, key=key)


class PromisedCommits(Generic[Item, Result]):
    """What stores the messages of one queue: without more of a promise, and under each that was asked for.

    Attributes:
        plain: Without.
    """

    def __init__(
        self,
        server: Server,
        key: str,
        new: Callable[[Server | WaitingServer, Callable[[Results], Results]], GroupCommit[Item, Any]],
    ) -> None:
        """Args:
        key: One of the queue's: it tells which server is asked whether it can keep a promise.
        new: Makes what stores messages, of the server that runs the scripts, and of what reads its answers: that is made of
            what reads a plain server's.
        """
        self._server = server
        self._key = key
        self._new = new
        self._promised: dict[Promise, GroupCommit[Item, Result | Unconfirmed[Result]]] = {}
        self._closed = False
        self.plain: GroupCommit[Item, Result] = new(server, lambda results: results)

    async def under(self, promise: Promise) -> GroupCommit[Item, Result | Unconfirmed[Result]]:
        """What stores messages under a promise.

        Raises:
            ServerError: The server cannot be asked, or can keep no such promise.
            Closed: The queue closed meanwhile.
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
        """Take nothing more. What is on its way has ``grace`` seconds."""
        self._closed = True
        promised = (commits.aclose(grace) for commits in self._promised.values())
        await asyncio.gather(self.plain.aclose(grace), *promised)


def _confirming(promise: Promise, results: Results) -> Results:
    """``results`` for the pairs of a :class:`WaitingServer`: each in :class:`Unconfirmed` where the promise is broken."""

    def confirmed(items: Sequence[Any], answer: tuple[Any, Any]) -> Sequence[Any]:
        known = results(items, answer[0])
        reason = promise.broken(answer[1])
        return [Unconfirmed(result, reason) for result in known] if reason else known

    return confirmed
