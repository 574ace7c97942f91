"""Messages that died: looked at, given another life, or dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from delayq._durations import moment_us
from delayq._error_text import unpack_error
from delayq._redis.bodies import parse, parse_letter
from delayq._redis.reliable_scripts import DROP_DEAD, REDRIVE
from delayq.errors import BadInput, DecodeError, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from delayq._redis.keys import ReliableKeys
    from delayq._redis.server import Server
    from delayq.codecs import Codec

T = TypeVar("T")

_AT_A_TIME = 100
_TAKEN = -1


@dataclass(frozen=True)
class DeadLetter(Generic[T]):
    """A message that will not be tried again.

    Attributes:
        id: Its id.
        reason: Why it died: ``attempts`` (all were used), ``expired`` (past its time to live), or what ``bury`` was told.
        error: The last error in one line: its type, and the first line of its message; empty if there was none.
        traceback: The last error's traceback; empty if there was none.
        attempt: How many attempts it had used.
        died_at: When it died, by the server's clock (UTC).
        enqueued_at: When it was offered, by the server's clock (UTC).
        headers: What was offered with it.
        priority: 0 to 9.
    """

    id: str
    reason: str
    error: str
    traceback: str = field(repr=False)
    attempt: int
    died_at: datetime
    enqueued_at: datetime
    headers: dict[str, str] = field(repr=False)
    priority: int
    _decode: Callable[[], T] = field(repr=False, compare=False)

    @property
    def value(self) -> T:
        """What was offered. Decoded when it is asked for: one that nobody can read hides no other.

        Raises:
            DecodeError: The codec cannot read it.
        """
        return self._decode()


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

        Args:
            limit: So many at most.
            offset: Pass over so many.
        """
        check_page(offset, limit)
        if not limit:
            return []
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

        Raises:
            OutcomeUnknown: Some live again, or may do so. Any other error: none does.
        """
        keys = (*self._keys.messages, self._keys.wake, self._keys.dead, self._keys.dead_messages)
        chosen = None if ids is None else list(ids)
        total = await self.size() if chosen is None else len(chosen)
        done = looked_at = stayed = 0
        while looked_at < total:
            step = _AT_A_TIME if chosen is None else len(chosen[looked_at : looked_at + _AT_A_TIME])
            try:
                some = await self._some(chosen, stayed if chosen is None else looked_at)
                answer = await self._server.run(REDRIVE, keys, some) if some else []
            except ServerError as error:
                raise half_way(error, done) from error.__cause__
            if chosen is None and not some:
                break
            # All were there a moment ago. What is not there any more lives again: the answer of a first try was lost.
            taken = answer.count(_TAKEN)
            done += len(some) - taken
            stayed += taken
            looked_at += step
            if progress is not None:
                progress(min(looked_at, total), total)
        return done

    async def purge(self, ids: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None) -> int:
        """Drop dead letters for good.

        Args:
            ids: Which; all if None.
            progress: As for :meth:`redrive`.

        Returns:
            How many were dropped.

        Raises:
            OutcomeUnknown: Some were dropped, or may have been. Any other error: none was.
        """
        chosen = None if ids is None else list(ids)
        dropped = looked_at = 0
        # Asked for only to be told.
        total = (await self.size() if chosen is None else len(chosen)) if progress is not None else 0
        while True:
            try:
                some = await self._some(chosen, 0 if chosen is None else looked_at)
                if some:
                    await self._server.run(DROP_DEAD, (self._keys.dead, self._keys.dead_messages), some)
            except ServerError as error:
                raise half_way(error, dropped) from error.__cause__
            dropped += len(some)
            looked_at += _AT_A_TIME
            if progress is not None:
                # Others may add some meanwhile.
                progress(min(looked_at, total), total)
            if len(some) < _AT_A_TIME if chosen is None else looked_at >= len(chosen):
                return dropped

    async def _some(self, chosen: Sequence[str] | None, offset: int) -> Sequence[str | bytes]:
        """A page of those that there are, or those of a page of ``chosen`` that there are; each once."""
        if chosen is None:
            page: list[bytes] = await self._server.command("ZRANGE", self._keys.dead, offset, offset + _AT_A_TIME - 1)
            return page
        names = list(dict.fromkeys(chosen[offset : offset + _AT_A_TIME]))
        if not names:
            return names
        scores = await self._server.command("ZMSCORE", self._keys.dead, *names)
        return [name for name, score in zip(names, scores, strict=True) if score is not None]

    def _letter(self, message: bytes, letter: bytes, died_us: float) -> DeadLetter[T]:
        why, body = parse_letter(letter)
        enqueued_us, headers, payload = parse(body)
        line, trace = unpack_error(why.get("error") or "")
        return DeadLetter(
            id=message.decode(errors="replace"),
            reason=why["reason"],
            error=line,
            traceback=trace,
            attempt=int(why["attempt"]),
            died_at=moment_us(died_us),
            enqueued_at=moment_us(enqueued_us),
            headers=headers,
            priority=int(why["priority"]),
            _decode=partial(_decoded, self._codec, payload),
        )


def _decoded(codec: Codec[T], payload: bytes) -> T:
    try:
        return codec.decode(payload)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(type(codec).__name__, payload) from error


def half_way(error: ServerError, done: int) -> ServerError:
    """What to raise when a step of many has failed, after ``done`` messages: nobody shall think that nothing was done."""
    return OutcomeUnknown(f"{done} messages were done, then: {error}") if done else error


def check_page(offset: int, limit: int) -> None:
    """Raise :class:`~delayq.BadInput` unless both are ints of at least 0."""
    for name, count in (("offset", offset), ("limit", limit)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadInput(f"{name} is an int of at least 0, not {count!r}")
