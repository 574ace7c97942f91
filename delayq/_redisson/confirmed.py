"""Tracks confirmations that a failover may have lost. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A promoted replica may lack anything the old master answered within this time, in seconds.
_LAG = 10.0
# Maximum number of tokens kept, which bounds the memory of a client that takes very quickly.
_MOST = 10_000


class Confirmed:
    """Remembers the calls that were confirmed in the last few seconds.

    A new master may know what a call handed out, but not that it was confirmed, and would deliver
    the messages again. So these calls are confirmed once more when new connections may lead to
    another server.

    A confirmation deletes what the call handed out, but a message that has gone back meanwhile may
    have no other copy on the new master. So all is forgotten as soon as any message goes back.
    """

    def __init__(self, path: Callable[[], object], now: Callable[[], float]) -> None:
        """Take :meth:`DelayedStore.path`, and a clock that counts seconds."""
        self._find_path = path
        self._now = now
        self._path: object = None
        self._tokens: deque[tuple[float, str]] = deque(maxlen=_MOST)

    def add(self, token: str) -> None:
        """Record that a call was confirmed."""
        if self._path is None:
            self._path = self._current_path()
        self._tokens.append((self._now(), token))

    def forget(self) -> None:
        """Forget all confirmations, because messages that were handed out are going back."""
        self._tokens.clear()

    def in_doubt(self) -> Sequence[str]:
        """Return the tokens to confirm again. Call at each re-check, while the server answers."""
        if (path := self._current_path()) is None:
            return []
        if path != self._path:
            self._path = path
            return [token for _, token in self._tokens]
        too_old = self._now() - _LAG
        while self._tokens and self._tokens[0][0] < too_old:
            self._tokens.popleft()
        return []

    def _current_path(self) -> object:
        try:
            return self._find_path()
        except DelayqError:
            return None
