"""Keeps the means to undo an action for a minute."""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from delayq.errors import OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayq.admin.catalog import FoundQueue

LASTS = 60.0
"""How long an action can be undone, in seconds."""
MOST_BYTES = 32 * 1024 * 1024
"""The most that is kept in all, in bytes."""


class PerhapsUndone(OutcomeUnknown):
    """A step of an undo, which must not be repeated, may have been carried out."""


class Undone(NamedTuple):
    """The effect of an undo.

    Attributes:
        restored: The number of messages that are as before.
        unsure: The number of messages that may be as before as well.
        with_all_attempts: Whether they were offered again, so that none of their attempts is used.
    """

    restored: int
    unsure: int = 0
    with_all_attempts: bool = False


@dataclass(frozen=True)
class Undo:
    """A way to undo an action.

    Attributes:
        run: Undoes it. After an error, it is run again: it must not repeat what it has done, or may
            have done.
        count: The number of messages.
        size: The memory that it takes, in bytes.
        queue: Their queue.
    """

    run: Callable[[], Awaitable[Undone]]
    count: int
    size: int
    queue: FoundQueue | None = None


class Undos:
    """The actions of this process in the last minute that can be undone."""

    def __init__(self) -> None:
        # In order of time.
        self._entries: dict[str, tuple[float, Undo]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, undo: Undo) -> str:
        """Keep a way to undo an action. Returns a token for it; empty if it is too large."""
        if undo.size > MOST_BYTES:
            return ""
        # The latest action counts most.
        while sum(stored.size for _, stored in self._entries.values()) + undo.size > MOST_BYTES:
            del self._entries[next(iter(self._entries))]
        token = secrets.token_urlsafe(16)
        self._entries[token] = time.monotonic() + LASTS, undo
        self._forget()
        return token

    def find(self, token: str) -> Undo | None:
        """Return the way to undo an action; None if it is too late."""
        self._forget()
        entry = self._entries.get(token)
        return None if entry is None else entry[1]

    async def run(self, token: str) -> tuple[Undone, int] | None:
        """Undo an action, once. Returns the effect, and the number of messages it was about.

        None if it is too late. After an error, it can be tried again until the minute is over.
        """
        self._forget()
        if (entry := self._entries.pop(token, None)) is None:
            return None
        try:
            return await entry[1].run(), entry[1].count
        except BaseException:
            in_time = sorted([*self._entries.items(), (token, entry)], key=lambda item: item[1][0])
            self._entries = dict(in_time)
            self._forget()
            raise

    def _forget(self) -> None:
        """Forget what is too old, now and later."""
        now = time.monotonic()
        while self._entries:
            token, (deadline, _) = next(iter(self._entries.items()))
            if deadline > now:
                if self._timer is None:
                    # The timer does not keep what belongs to an application that is gone.
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(deadline - now, _time_out, weakref.ref(self))
                return
            del self._entries[token]

    def expire(self) -> None:
        self._timer = None
        self._forget()


def _time_out(undos: weakref.ref[Undos]) -> None:
    if (alive := undos()) is not None:
        alive.expire()
