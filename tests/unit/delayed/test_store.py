"""The store of a delayed queue without a server: keys, scores, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayq._delayed.keys import DelayedKeys
from delayq._delayed.store import POLL_LAST, DelayedDepth, PendingRecord, parse_score, score_of
from delayq._redis.scripts import scripts_in

if TYPE_CHECKING:
    from delayq._redis.scripts import Script

KEYS = DelayedKeys.of("orders")


@pytest.mark.parametrize("script", scripts_in("delayed"), ids=lambda script: script.name)
def test_every_script_gets_its_keys_by_their_declared_names(script: Script) -> None:
    of_call = {"fence": KEYS.fence("call"), "destination": "other"}
    given = {name: key for name, key in of_call.items() if name in script.keys}
    expected = [of_call.get(name) or getattr(KEYS, name) for name in script.keys]
    for _ in range(2):
        assert [*KEYS.of_script(script, **given)] == expected


def test_keys_of_one_call_do_not_stay_for_the_next() -> None:
    first = KEYS.of_script(POLL_LAST, destination="first")
    assert (first[-1], KEYS.of_script(POLL_LAST, destination="second")[-1]) == (
        "first",
        "second",
    )


@pytest.mark.parametrize(
    ("score", "moment_us"),
    [
        (b"0", 0),
        (b"1700000000123", 1_700_000_000_123_000),
        (b"9007199254740992", 2**53 * 1000),
        (b"9007199254740991", (2**53 - 1) * 1000),
        # Other programs may have left these.
        (b"1700000000123.25", 1_700_000_000_124_000),
        (b"-5", 0),
        (b"-inf", 0),
        (b"inf", 2**53 * 1000),
        (b"1e300", 2**53 * 1000),
    ],
)
def test_a_score_is_a_moment_in_microseconds(score: bytes, moment_us: int) -> None:
    assert parse_score(score) == moment_us
    assert PendingRecord(b"", score).due_us == moment_us


@pytest.mark.parametrize("ms", [0, 1, 1_700_000_000_123, 2**53 - 1, 2**53])
def test_a_moment_in_whole_milliseconds_has_a_whole_score(ms: int) -> None:
    assert score_of(ms * 1000) == str(ms)


def test_a_moment_between_two_milliseconds_has_a_score_between_theirs() -> None:
    assert score_of(1_700_000_000_123_456) == "1700000000123.456"


def test_a_queue_without_pending_messages_is_not_overdue() -> None:
    assert DelayedDepth(0, 3, 1, None).overdue_us(5_000) == 0
    assert DelayedDepth(1, 0, 0, 9_000).overdue_us(5_000) == 0
    assert DelayedDepth(1, 0, 0, 2_000).overdue_us(5_000) == 3_000


@pytest.mark.parametrize(
    ("record", "start"),
    [(b"\x08ABCDEFGHrest", b"\x08ABCDEFGH"), (b"ABCDEFGHrest", b"ABCDEFGH"), (b"junk", b"junk")],
)
def test_a_record_is_found_by_its_mark_and_its_id(record: bytes, start: bytes) -> None:
    assert PendingRecord(record, b"1").start == start
