"""Confirmations that a failover may have lost. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A replica that becomes the master may lack what the old one had answered in this time; seconds.
_LAG = 10.0
# And no more than this: the memory of a client that takes very quickly.
_MOST = 10_000


class Confirmed:
    """The calls that were confirmed in the last seconds.

    Replication is asynchronous: a new master may know what a call handed out, and not that the call was confirmed. Its messages
    would come again. So they are confirmed once more when the connections since then may lead to another server.

    That deletes on the server what the call handed out. It must not happen to messages that went back meanwhile, since the new
    master may not know that either, and has no other copy. So all is forgotten when something goes back.
    """

    def __init__(self, path: Callable[[], object], now: Callable[[], float]) -> None:
        """Args:
        path: As :meth:`Server.path`, for the queue.
        now: The time, seconds.
        """
        self._find_path = path
        self._now = now
        self._path: object = None
        self._tokens: deque[tuple[float, str]] = deque(maxlen=_MOST)

    def add(self, token: str) -> None:
        """Note that a call was confirmed."""
        if self._path is None:
            self._path = self._current_path()
        self._tokens.append((self._now(), token))

    def forget(self) -> None:
        """Confirm nothing once more: of what was handed out, something goes back."""
        self._tokens.clear()

    def in_doubt(self) -> Sequence[str]:
        """Return the tokens to confirm once more. Call it at each re-check, while the server answers."""
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
