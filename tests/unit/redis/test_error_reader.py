"""The meaning of errors, and the news in them: :class:`~delayq._redis.error_reader.ErrorReader`."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest

from delayq._redis.connection import NotSent, ReplyError
from delayq._redis.error_reader import ErrorReader, Redirected, UnknownScript
from delayq.errors import OutcomeUnknown, ServerRefused, ServerUnavailable


class Desk:
    """A reader, with all that it may pass news to."""

    def __init__(self) -> None:
        self.topology, self.rights = Mock(), Mock()
        self.pool = Mock(label="redis://here", lead_to_replica=False)
        self.reader = ErrorReader(self.topology, self.rights)

    def read(self, error: str | OSError) -> Any:
        answer = error if isinstance(error, OSError) else ReplyError(error)
        return self.reader.read(answer, self.pool)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_slot_that_moved_is_passed_on_and_one_that_is_moving_stays(desk: Desk) -> None:
    error = desk.read("ASK 866 10.0.0.7:6379")
    assert (error.pool, error.asking) == (desk.topology.at.return_value, True)
    desk.topology.moved.assert_not_called()
    error = desk.read("MOVED 866 10.0.0.7:6379")
    assert isinstance(error, Redirected)
    assert (error.pool, error.asking) == (desk.topology.moved.return_value, False)
    assert desk.topology.moved.mock_calls == [call(866, "10.0.0.7:6379", desk.pool)]
    unknown = desk.topology.at.side_effect = ServerUnavailable("redirected to nowhere")
    assert desk.read("ASK 866 nowhere") is unknown


def test_a_master_that_became_a_replica_is_replaced(desk: Desk) -> None:
    error = desk.read("READONLY You can't write against a read only replica.")
    assert type(error) is ServerUnavailable
    assert desk.topology.mock_calls == [call.suspect(desk.pool)]
    desk.pool.renew.assert_called_once()


def test_a_replica_in_the_address_is_named_with_the_cure(desk: Desk) -> None:
    desk.pool.lead_to_replica = True
    error = desk.read("READONLY You can't write against a read only replica.")
    assert type(error) is ServerRefused
    assert "redis+sentinel://" in str(error)
    desk.pool.renew.assert_not_called()


def test_errors_differ(desk: Desk) -> None:
    for text, meaning, forgotten in (
        ("LOADING Redis is loading the dataset in memory", ServerUnavailable, 0),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ServerRefused, 0),
        ("wrong number of arguments", ServerRefused, 0),
        ("NOPERM User app has no permissions to run the 'eval' command", ServerRefused, 1),
    ):
        assert type(desk.read(text)) is meaning, text
        assert desk.rights.forget.call_count == forgotten, text
    assert isinstance(desk.read("NOSCRIPT No matching script."), UnknownScript)
    assert type(desk.read(NotSent("reset"))) is ServerUnavailable, "it was not carried out"
    assert type(desk.read(ConnectionResetError("reset"))) is OutcomeUnknown
