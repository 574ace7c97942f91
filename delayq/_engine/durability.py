"""Offers that wait for more than "the server has it": for its disk, or for replicas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayq._redis.durability import Durability
from delayq._redis.pipeline import WaitingServer
from delayq.errors import BadInput, Closed

if TYPE_CHECKING:
    from delayq._engine.batcher import Batcher
    from delayq._redis.client import RedisClient

Item = TypeVar("Item")
Result = TypeVar("Result")
# Turns items and a reply into the results of these items.
Results = Callable[[Sequence[Any], Any], Sequence[Any]]


class Unconfirmed(NamedTuple, Generic[Result]):
    """The result of an item that has not become as durable as requested, and the reason."""

    result: Result
    reason: str


def parse(durability: str) -> Durability | None:
    """Parse ``memory``, for which it returns None, ``fsync`` or ``replicas:N``.

    Raises:
        BadInput: It is none of these.
    """
    text = durability if isinstance(durability, str) else ""
    match = re.fullmatch(r"memory|fsync|replicas:([1-9][0-9]{0,3})", text)
    if match is None:
        raise BadInput(f'durability must be "memory", "fsync" or "replicas:N", not {durability!r}')
    return None if text == "memory" else Durability(int(match[1] or 0))


class DurableBatchers(Generic[Item, Result]):
    """Stores the messages of one queue, with each durability that was requested.

    Attributes:
        plain: Stores messages that are safe enough once the server has them.
    """

    def __init__(
        self,
        server: RedisClient,
        key: str,
        new: Callable[
            [RedisClient | WaitingServer, Callable[[Results], Results]], Batcher[Item, Any]
        ],
    ) -> None:
        """Args:
        key: One of the queue's keys, whose server is asked whether it supports a durability.
        new: Creates a batcher from the server that runs the scripts, and from a function that turns
            the reader of a plain server's replies into the reader of this server's replies.
        """
        self._server = server
        self._key = key
        self._new = new
        self._by_durability: dict[Durability, Batcher[Item, Result | Unconfirmed[Result]]] = {}
        self._closed = False
        self.plain: Batcher[Item, Result] = new(server, lambda results: results)

    @property
    def all(self) -> Sequence[Batcher[Item, Any]]:
        """Every batcher, whatever its durability."""
        return (self.plain, *self._by_durability.values())

    async def batcher_for(
        self, durability: Durability
    ) -> Batcher[Item, Result | Unconfirmed[Result]]:
        """Return the batcher that stores messages with a durability.

        Raises ServerError if the server does not support it, and Closed.
        """
        if durability not in self._by_durability:
            server = WaitingServer(self._server, durability)
            await server.check_supported(self._key)
            if self._closed:
                raise Closed("the queue is closed")
            if durability not in self._by_durability:
                self._by_durability[durability] = self._new(
                    server, partial(_confirming, durability)
                )
        return self._by_durability[durability]

    async def aclose(self, grace: float) -> None:
        """Accept no more items, and give those in flight ``grace`` seconds."""
        self._closed = True
        await asyncio.gather(*(batcher.aclose(grace) for batcher in self.all))


def _confirming(durability: Durability, results: Results) -> Results:
    """Adapt ``results`` to the pairs of a :class:`WaitingServer`."""

    def confirmed(items: Sequence[Any], reply: tuple[Any, Any]) -> Sequence[Any]:
        unchecked = results(items, reply[0])
        reason = durability.failure(reply[1])
        return [Unconfirmed(result, reason) for result in unchecked] if reason else unchecked

    return confirmed
