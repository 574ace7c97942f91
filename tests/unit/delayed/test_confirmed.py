"""The confirmations that are repeated because a failover may have lost them."""

from __future__ import annotations

from delayq._delayed.confirmed import _LAG, _MOST, Confirmed
from delayq.errors import ServerUnavailable


class Case:
    """Confirmations from a server that can be replaced, on a clock that can be set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.path: object = "the old master"
        self.confirmed = Confirmed(self._find, lambda: self.now)

    def _find(self) -> object:
        if self.path is None:
            raise ServerUnavailable("no master")
        return self.path

    def in_doubt(self) -> list[str]:
        return [*self.confirmed.in_doubt()]


def test_what_was_confirmed_lately_is_repeated_once_for_each_change() -> None:
    case = Case()
    case.confirmed.add("a")
    case.confirmed.add("b")
    assert case.in_doubt() == []
    for master in ("another", "a third"):
        case.path = master
        assert case.in_doubt() == ["a", "b"]
        assert case.in_doubt() == []


def test_nothing_is_repeated_after_something_went_back() -> None:
    """The new master may know of neither: to confirm again would delete the only copy."""
    case = Case()
    case.confirmed.add("a")
    case.confirmed.forget()
    case.confirmed.add("b")
    case.path = "another"
    assert case.in_doubt() == ["b"]


def test_what_the_replicas_have_by_now_is_forgotten() -> None:
    case = Case()
    case.confirmed.add("a")
    case.now += _LAG
    case.confirmed.add("b")
    case.now += 0.1
    assert case.in_doubt() == []
    case.path = "another"
    assert case.in_doubt() == ["b"]


def test_while_there_is_no_master_nothing_is_forgotten() -> None:
    case = Case()
    case.confirmed.add("a")
    case.path = None
    case.now += 100 * _LAG
    assert case.in_doubt() == []
    case.path = "another"
    assert case.in_doubt() == ["a"]


def test_memory_is_bounded() -> None:
    case = Case()
    for number in range(_MOST + 1):
        case.confirmed.add(str(number))
    case.path = "another"
    assert case.in_doubt() == [str(number) for number in range(1, _MOST + 1)]
