"""The open connections of a pool that no call uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq._redis.connection import Connection


class FreeConnections:
    """A stack of connections: those at the bottom are not needed if calls are few."""

    __slots__ = ("_stack", "_unneeded")

    def __init__(self) -> None:
        self._stack: list[Connection] = []
        # How many, from the bottom, have not been needed since the last look.
        self._unneeded = 0

    def __len__(self) -> int:
        return len(self._stack)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._stack)

    def add(self, connection: Connection) -> None:
        self._stack.append(connection)

    def take(self) -> Connection | None:
        """Take the connection that was added last, and close those that can no longer be used."""
        while self._stack:
            connection = self._stack.pop()
            self._unneeded = min(self._unneeded, len(self._stack))
            if connection.is_clean:
                return connection
            connection.close()
        return None

    def remove(self, connection: Connection) -> bool:
        """Take this connection. Return whether it was there."""
        if connection not in self._stack:
            return False
        self._stack.remove(connection)
        self._unneeded = min(self._unneeded, len(self._stack))
        return True

    def take_unneeded(self) -> list[Connection]:
        """Take the connections that have not been needed since this was last called."""
        unneeded = self._stack[: self._unneeded]
        del self._stack[: self._unneeded]
        self._unneeded = len(self._stack)
        return unneeded

    def take_all(self) -> list[Connection]:
        everything, self._stack = self._stack, []
        self._unneeded = 0
        return everything
