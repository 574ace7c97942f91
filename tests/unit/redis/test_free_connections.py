"""The connections that no call uses: :class:`~delayq._redis.free_connections.FreeConnections`."""

from __future__ import annotations

from typing import Any, cast

import pytest

from delayq._redis.free_connections import FreeConnections


class Connection:
    """A connection that may have been lost meanwhile."""

    def __init__(self) -> None:
        self.is_clean = True
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def free() -> FreeConnections:
    return FreeConnections()


def added(free: FreeConnections, count: int) -> list[Any]:
    connections = [cast("Any", Connection()) for _ in range(count)]
    for connection in connections:
        free.add(connection)
    return connections


def test_the_one_added_last_is_taken_first_unless_it_was_lost(free: FreeConnections) -> None:
    first, second, lost = added(free, 3)
    lost.is_clean = False
    assert [free.take(), free.take(), free.take()] == [second, first, None]
    assert lost.closed
    assert not second.closed
    again = added(free, 2)
    assert free.take_all() == again
    assert len(free) == 0


def test_what_was_not_taken_since_the_last_look_was_not_needed(free: FreeConnections) -> None:
    connections = added(free, 5)
    assert free.take_unneeded() == []
    needed = [free.take(), free.take()]
    for connection in needed:
        assert connection is not None
        free.add(connection)
    assert free.take_unneeded() == connections[:3]
    assert free.take_unneeded() == connections[:2:-1]
    assert len(free) == 0
