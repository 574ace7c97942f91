"""The confirmations that are repeated because a failover may have lost them."""

from __future__ import annotations

from delayq._redisson.take_calls import _MAX_CONFIRMATIONS, _REPLICA_LAG, _Confirmations
from delayq.errors import ServerUnavailable


class Case:
    """Confirmations from a server that can be replaced, on a clock that can be set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.path: object = "the old master"
        self.confirmed = _Confirmations(self._find, lambda: self.now)

    def _find(self) -> object:
        if self.path is None:
            raise ServerUnavailable("no master")
        return self.path

    def in_doubt(self) -> list[str]:
        return [*self.confirmed.in_doubt()]


def test_confirmations_that_the_replicas_have_are_forgotten() -> None:
    case = Case()
    case.confirmed.add("a")
    case.now += _REPLICA_LAG
    case.confirmed.add("b")
    case.now += 0.1
    assert case.in_doubt() == []
    case.path = "another"
    assert case.in_doubt() == ["b"]


def test_while_there_is_no_master_nothing_is_forgotten() -> None:
    case = Case()
    case.confirmed.add("a")
    case.path = None
    case.now += 100 * _REPLICA_LAG
    assert case.in_doubt() == []
    case.path = "another"
    assert case.in_doubt() == ["a"]


def test_memory_is_bounded() -> None:
    case = Case()
    for number in range(_MAX_CONFIRMATIONS + 1):
        case.confirmed.add(str(number))
    case.path = "another"
    assert case.in_doubt() == [str(number) for number in range(1, _MAX_CONFIRMATIONS + 1)]
