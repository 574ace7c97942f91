"""Keeps the means to undo an action for a minute."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LASTS = 60.0
"""How long an action can be undone, in seconds."""
# The most that is kept in all, in bytes.
_MOST_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Undo:
    """A way to undo an action.

    Attributes:
        run: Undoes it. Returns how many messages are as before.
        count: The number of messages.
        size: The memory that it takes, in bytes.
    """

    run: Callable[[], Awaitable[int]]
    count: int
    size: int


class Undos:
    """The actions of this process in the last minute that can be undone."""

    def __init__(self) -> None:
        # In order of time.
        self._kept: dict[str, tuple[float, Undo]] = {}

    def keep(self, undo: Undo) -> str:
        """Keep a way to undo an action. Returns a token for it; empty if it is too large."""
        self._forget()
        if undo.size > _MOST_BYTES:
            return ""
        # The latest action counts most.
        while sum(each.size for _, each in self._kept.values()) + undo.size > _MOST_BYTES:
            del self._kept[next(iter(self._kept))]
        token = secrets.token_urlsafe(16)
        self._kept[token] = time.monotonic() + LASTS, undo
        return token

    def has(self, token: str) -> bool:
        """Return whether an action can still be undone."""
        self._forget()
        return token in self._kept

    def take(self, token: str) -> Undo | None:
        """Return the way to undo an action, once; None if it is too late."""
        self._forget()
        _, undo = self._kept.pop(token, (0.0, None))
        return undo

    def _forget(self) -> None:
        now = time.monotonic()
        while self._kept:
            token, (until, _) = next(iter(self._kept.items()))
            if until > now:
                return
            del self._kept[token]
