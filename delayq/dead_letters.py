"""Messages that died: looked at, given another life, or dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._durations import moment_us
from delayq._redis.bodies import parse, parse_letter
from delayq._redis.reliable_scripts import REDRIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from delayq._redis.keys import ReliableKeys
    from delayq._redis.server import Server
    from delayq.codecs import Codec

T = TypeVar("T")

_AT_A_TIME = 100


@dataclass(frozen=True)
class DeadLetter(Generic[T]):
    """A message that will not be tried again.

    Attributes:
        id: Its id.
        value: What was offered.
        reason: Why it died: ``attempts`` (all were used), ``expired`` (past its time to live), or what ``bury`` was told.
        error: The last error in one line; empty if there was none.
        traceback: The last error's traceback; empty if there was none.
        attempt: How many attempts it had used.
        died_at: When it died, by the server's clock (UTC).
        enqueued_at: When it was offered, by the server's clock (UTC).
        headers: What was offered with it.
        priority: 0 to 9.
    """

    id: str
    value: T
    reason: str
    error: str
    traceback: str
    attempt: int
    died_at: datetime
    enqueued_at: datetime
    headers: dict[str, str]
    priority: int


class DeadLetters(Generic[T]):
    """The dead letters of one queue. Every method may raise the errors of :class:`~delayq.errors.ServerError`."""

    def __init__(self, keys: ReliableKeys, server: Server, codec: Codec[T]) -> None:
        self._keys = keys
        self._server = server
        self._codec = codec

    async def size(self) -> int:
        """How many there are."""
        return int(await self._server.command("ZCARD", self._keys.dead))

    async def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter[T]]:
        """Some of them, the one that died first first.

        Raises:
            DecodeError: The codec cannot read one of them.
        """
        found = await self._server.command("ZRANGE", self._keys.dead, offset, offset + limit - 1, "WITHSCORES")
        if not found:
            return []
        ids, died = found[::2], found[1::2]
        letters = await self._server.command("HMGET", self._keys.dead_messages, *ids)
        return [
            self._letter(message, letter, float(at))
            for message, letter, at in zip(ids, letters, died, strict=True)
            if letter is not None  # redriven or purged meanwhile
        ]

    async def redrive(self, ids: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None) -> int:
        """Give dead letters another life: they are due now, and have all their attempts again.

        Args:
            ids: Which; all that there are now if None. One whose id a live message has stays.
            progress: Called after each step with how many were looked at, and of how many.

        Returns:
            How many live again.
        """
        keys = (*self._keys.messages, self._keys.wake, self._keys.dead, self._keys.dead_messages)
        chosen = None if ids is None else list(ids)
        total = await self.size() if chosen is None else len(chosen)
        done = looked_at = stayed = 0
        while looked_at < total:
            if chosen is None:
                some = await self._server.command("ZRANGE", self._keys.dead, stayed, stayed + _AT_A_TIME - 1)
            else:
                some = chosen[looked_at : looked_at + _AT_A_TIME]
            if not some:
                break
            lives = sum(await self._server.run(REDRIVE, keys, some))
            done += lives
            stayed += len(some) - lives
            looked_at += len(some)
            if progress is not None:
                progress(min(looked_at, total), total)
        return done

    async def purge(self, ids: Iterable[str] | None = None) -> int:
        """Drop dead letters for good.

        Args:
            ids: Which; all if None.

        Returns:
            How many were dropped.
        """
        chosen = None if ids is None else list(ids)
        dropped = 0
        while True:
            if chosen is None:
                some = await self._server.command("ZRANGE", self._keys.dead, 0, _AT_A_TIME - 1)
            else:
                some, chosen = chosen[:_AT_A_TIME], chosen[_AT_A_TIME:]
            if not some:
                return dropped
            # In this order: a letter without a place would stay for ever.
            await self._server.command("HDEL", self._keys.dead_messages, *some)
            dropped += int(await self._server.command("ZREM", self._keys.dead, *some))

    def _letter(self, message: bytes, letter: bytes, died_us: float) -> DeadLetter[T]:
        why, body = parse_letter(letter)
        enqueued_us, headers, payload = parse(body)
        trace: str = why.get("error") or ""
        return DeadLetter(
            id=message.decode(errors="replace"),
            value=self._codec.decode(payload),
            reason=why["reason"],
            error=trace.rsplit("\n", 1)[-1],
            traceback=trace,
            attempt=int(why["attempt"]),
            died_at=moment_us(died_us),
            enqueued_at=moment_us(enqueued_us),
            headers=headers,
            priority=int(why["priority"]),
        )
