"""The meaning of errors, and the news in them: :class:`~delayq._redis.error_reader.ErrorReader`."""

from __future__ import annotations

from typing import Any, cast

import pytest

from delayq._redis.connection import NotSent, ReplyError
from delayq._redis.error_reader import ErrorReader, Redirected, UnknownScript
from delayq.errors import OutcomeUnknown, ServerRefused, ServerUnavailable


class Pool:
    """The connections to one server."""

    def __init__(self, label: str = "redis://here") -> None:
        self.label = label
        self.lead_to_replica = False
        self.renewed = 0

    def renew(self) -> None:
        self.renewed += 1


class Topology:
    """Records the news, and knows one other server."""

    def __init__(self) -> None:
        self.there: Any = Pool("redis://there")
        self.news: list[tuple[object, ...]] = []

    def suspect(self, pool: Pool) -> None:
        self.news.append(("suspect", pool.label))

    def moved(self, slot: int, place: str, told_by: Pool) -> Any:
        self.news.append(("moved", slot, place, told_by.label))
        return self.there

    def at(self, place: str, told_by: Pool) -> Any:
        if place == "nowhere":
            raise ServerUnavailable(f"{told_by.label} redirected to {place}")
        return self.there


class Desk:
    """A reader, with all that it may pass news to."""

    def __init__(self) -> None:
        self.topology = Topology()
        self.pool = Pool()
        self.rights_forgotten = 0
        self.reader = ErrorReader(cast("Any", self.topology), cast("Any", self))

    def forget(self) -> None:
        self.rights_forgotten += 1

    def read(self, error: str | OSError) -> Any:
        answer = error if isinstance(error, OSError) else ReplyError(error)
        return self.reader.read(answer, cast("Any", self.pool))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_slot_that_moved_is_passed_on_and_one_that_is_moving_stays(desk: Desk) -> None:
    error = desk.read("ASK 866 10.0.0.7:6379")
    assert (error.pool, error.asking) == (desk.topology.there, True)
    assert desk.topology.news == []
    error = desk.read("MOVED 866 10.0.0.7:6379")
    assert isinstance(error, Redirected)
    assert (error.pool, error.asking) == (desk.topology.there, False)
    assert desk.topology.news == [("moved", 866, "10.0.0.7:6379", "redis://here")]
    error = desk.read("ASK 866 nowhere")
    assert type(error) is ServerUnavailable
    assert "redirected to nowhere" in str(error)


def test_a_master_that_became_a_replica_is_replaced(desk: Desk) -> None:
    error = desk.read("READONLY You can't write against a read only replica.")
    assert type(error) is ServerUnavailable
    assert desk.topology.news == [("suspect", "redis://here")]
    assert desk.pool.renewed == 1


def test_a_replica_in_the_address_is_named_with_the_cure(desk: Desk) -> None:
    desk.pool.lead_to_replica = True
    error = desk.read("READONLY You can't write against a read only replica.")
    assert type(error) is ServerRefused
    assert "redis+sentinel://" in str(error)
    assert desk.pool.renewed == 0


def test_errors_differ(desk: Desk) -> None:
    for text, meaning, forgotten in (
        ("LOADING Redis is loading the dataset in memory", ServerUnavailable, 0),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ServerRefused, 0),
        ("wrong number of arguments", ServerRefused, 0),
        ("NOPERM User app has no permissions to run the 'eval' command", ServerRefused, 1),
    ):
        assert type(desk.read(text)) is meaning, text
        assert desk.rights_forgotten == forgotten, text
    assert isinstance(desk.read("NOSCRIPT No matching script."), UnknownScript)
    assert type(desk.read(NotSent("reset"))) is ServerUnavailable, "it was not carried out"
    assert type(desk.read(ConnectionResetError("reset"))) is OutcomeUnknown
