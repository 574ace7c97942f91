"""Dead letters: list them, redrive them, or drop them for good."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic

from delayq._durations import datetime_at
from delayq._generics import T
from delayq._reliable.bodies import read_letter
from delayq._reliable.failures import unpack_error
from delayq._reliable.ids import checked_id
from delayq._reliable.listing import letters_page
from delayq.codecs.protocol import decode
from delayq.errors import BadInput, DecodeError, OutcomeUnknown, ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from delayq._reliable.letter_store import StoredLetter
    from delayq._reliable.store import ReliableStore
    from delayq.codecs import Codec


# How many letters a call changes: to redrive one takes ten times as long as to drop it.
_REDRIVEN = 10
_DROPPED = 25
# A second letter with the same id gets a name of its own: see lua/reliable/include/letters.lua.
_STAMPED = re.compile(rb"(.*)\0[0-9]{16}", re.DOTALL)


@dataclass(frozen=True)
class DeadLetter(Generic[T]):
    """A message that will not be retried.

    Attributes:
        id: The message's id.
        reason: Why it died: ``attempts`` (all were used), ``expired`` (past its time to live), or
            the reason passed to ``bury``; ``unreadable`` if the letter is damaged: its value
            raises, and it can only be purged.
        error: The last error in one line: its type, and the first line of its message; empty if
            there was none.
        traceback: The last error's traceback; empty if there was none.
        attempt: The number of attempts it used.
        died_at: The time it died, by the server's clock (UTC).
        enqueued_at: The time it was offered, by the server's clock (UTC); if that cannot be read,
            the time it died.
        headers: The headers that were offered with it.
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
        """The value that was offered, decoded on access, so that an unreadable letter does not hide
        the others.

        Raises:
            DecodeError: The codec cannot decode it.
        """
        return self._decode()


class DeadLetters(Generic[T]):
    """The dead letters of one queue.

    Every method may raise the errors of :class:`~delayq.errors.ServerError`.
    """

    def __init__(
        self,
        places: Callable[
            [Sequence[str] | None], Awaitable[Mapping[ReliableStore, Sequence[str] | None]]
        ],
        codec: Codec[T],
    ) -> None:
        """Args:
        places: Returns the partitions to ask for these ids, each with its ids; all for None.
        codec: Decodes the values.
        """
        self._places = places
        self._codec = codec

    async def size(self) -> int:
        """Return the number of dead letters."""
        return sum([await store.count_dead() for store in await self._places(None)])

    async def list(self, *, offset: int = 0, limit: int = 100) -> list[DeadLetter[T]]:
        """List dead letters, oldest first.

        Args:
            offset: The number of letters to skip. If the queue has partitions, skipping takes time
                in proportion to it.
            limit: The largest number of letters to return.
        """
        check_page(offset, limit)
        letters = await letters_page([*await self._places(None)], offset, limit)
        return [read_dead_letter(letter, self._codec) for _, letter in letters]

    async def redrive(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Requeue dead letters: they are due now, and have all their attempts again.

        Args:
            ids: The ids to requeue; all dead letters that exist now if None. A letter stays if a
                live message has its id: of several letters with one id, the oldest is requeued.
                Unreadable letters stay as well.
            progress: Called after each step with the number of letters examined so far, and the
                total.

        Returns:
            The number of messages that were requeued.

        Raises:
            OutcomeUnknown: Some were requeued, or may have been. With any other error, none was.
        """
        return await self._of_each(redrive_letters, checked_ids(ids), progress)

    async def purge(
        self,
        ids: Iterable[str] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop dead letters for good.

        Args:
            ids: The ids to drop; all dead letters if None.
            progress: As for :meth:`redrive`.

        Returns:
            The number of letters that were dropped.

        Raises:
            OutcomeUnknown: Some were dropped, or may have been. With any other error, none was.
        """
        return await self._of_each(purge_letters, checked_ids(ids), progress)

    async def _of_each(
        self,
        act: Callable[..., Awaitable[int]],
        ids: Sequence[str] | None,
        progress: Callable[[int, int], None] | None,
    ) -> int:
        """Apply ``act`` to the partitions, one after the other, and return the sum of its
        results.
        """
        parts = await self._places(ids)
        if len(parts) == 1:
            ((store, ids_here),) = parts.items()
            return await act(store, ids_here, progress)
        sizes: dict[ReliableStore, int] = {}
        if progress is not None:
            sizes = {
                store: await store.count_dead() if ids_here is None else len(ids_here)
                for store, ids_here in parts.items()
            }
        # An id may be looked up in several partitions.
        total = sum(sizes.values()) if ids is None else len(ids)
        done = looked_at = 0
        reported = -1
        for store, ids_here in parts.items():

            def tell(examined: int, _: int, before: int = looked_at) -> None:
                nonlocal reported
                if progress is not None and (now := min(before + examined, total)) > reported:
                    progress(now, total)
                    reported = now

            try:
                done += await act(store, ids_here, None if progress is None else tell)
            except ServerError as error:
                raise half_way(error, done) from error.__cause__
            looked_at += sizes.get(store, 0)
        return done


def read_dead_letter(stored: StoredLetter, codec: Codec[T]) -> DeadLetter[T]:
    """Return a stored letter as applications see it; ``codec`` decodes its value."""
    name, letter, died_us = stored
    stamped = _STAMPED.fullmatch(name)
    death, enqueued_us, headers, payload = read_letter(letter)
    died_at = datetime_at(died_us)
    line, trace = unpack_error(death.error)
    id = (stamped[1] if stamped else name).decode(errors="replace")  # noqa: A001
    return DeadLetter(
        id=id,
        reason=death.reason,
        error=line,
        traceback=trace,
        attempt=death.attempt,
        died_at=died_at,
        enqueued_at=died_at if enqueued_us is None else datetime_at(enqueued_us),
        headers=headers,
        priority=death.priority,
        _decode=partial(
            _decoded, codec, letter, readable=enqueued_us is not None, payload=payload, id=id
        ),
    )


async def redrive_letters(
    store: ReliableStore,
    selection: Sequence[str] | Sequence[bytes] | None,
    progress: Callable[[int, int], None] | None = None,
    *,
    keep_due: bool = False,
) -> int:
    """Redrive letters of one partition as :meth:`DeadLetters.redrive` does, by ids or by the names
    of letters as stored on the server.

    If ``keep_due``, messages that were buried before they were due keep their due times.
    """
    total = await store.count_dead() if selection is None else len(selection)
    done = looked_at = stayed = 0
    while looked_at < total:
        step = _REDRIVEN if selection is None else len(selection[looked_at : looked_at + _REDRIVEN])
        try:
            letters = await _letters_to_change(
                store, selection, stayed if selection is None else looked_at, _REDRIVEN
            )
            requeued, skipped = (
                await store.redrive(letters, keep_due=keep_due) if letters else (0, 0)
            )
        except ServerError as error:
            raise half_way(error, done) from error.__cause__
        if selection is None and not letters:
            break
        done += requeued
        stayed += skipped
        looked_at += step
        if progress is not None:
            progress(min(looked_at, total), total)
    return done


async def purge_letters(
    store: ReliableStore,
    selection: Sequence[str] | Sequence[bytes] | None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Purge letters of one partition as :meth:`DeadLetters.purge` does, by ids or by the names of
    letters as stored on the server.
    """
    dropped = looked_at = 0
    # Needed only to report progress.
    total = (
        (await store.count_dead() if selection is None else len(selection))
        if progress is not None
        else 0
    )
    while True:
        try:
            letters = await _letters_to_change(
                store, selection, 0 if selection is None else looked_at, _DROPPED
            )
            if letters:
                await store.drop_dead(letters)
        except ServerError as error:
            raise half_way(error, dropped) from error.__cause__
        dropped += len(letters)
        looked_at += _DROPPED
        if progress is not None:
            # Other clients may add letters meanwhile.
            progress(min(looked_at, total), total)
        if len(letters) < _DROPPED if selection is None else looked_at >= len(selection):
            return dropped


async def _letters_to_change(
    store: ReliableStore, selection: Sequence[str] | Sequence[bytes] | None, offset: int, count: int
) -> Sequence[str | bytes]:
    """Return a page of the existing letters, or the existing ones of a page of ``selection``; each
    once.
    """
    if selection is None:
        return await store.dead_names(offset, count)
    return await store.find_dead(selection[offset : offset + count])


def _decoded(
    codec: Codec[T],
    letter: bytes,
    *,
    readable: bool,
    payload: bytes,
    id: str,  # noqa: A002
) -> T:
    if not readable:
        raise DecodeError("ReliableQueue", letter)
    return decode(codec, payload, "", id)


def checked_ids(ids: Iterable[str] | None) -> Sequence[str] | None:
    """Return the ids as a list. Raises BadInput unless they are a list of ids."""
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise BadInput(f"ids must be a list of ids, not {ids!r}: pass [id]")
    return [checked_id(id_) for id_ in ids]


def half_way(error: ServerError, done: int) -> ServerError:
    """Return the error to raise when one of many steps failed after ``done`` messages, lest the
    caller think none was done.
    """
    return OutcomeUnknown(f"{done} messages were processed, then: {error}") if done else error


def check_page(offset: int, limit: int) -> None:
    """Raise :class:`~delayq.BadInput` unless both are ints of at least 0."""
    for name, count in (("offset", offset), ("limit", limit)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadInput(f"{name} must be an int of at least 0, not {count!r}")
