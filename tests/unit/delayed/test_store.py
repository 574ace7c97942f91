"""The store of a delayed queue without a server: keys, scores, figures."""

from __future__ import annotations

from delayq._delayed.keys import DelayedKeys
from delayq._delayed.store import POLL_LAST, DelayedDepth, PendingRecord, parse_score, score_of
from delayq._redis.scripts import scripts_in
from tests.support.cases import naming

KEYS = DelayedKeys.of("orders")


def test_every_script_gets_its_keys_by_their_declared_names() -> None:
    for script in scripts_in("delayed"):
        with naming(script):
            of_call = {"fence": KEYS.fence("call"), "destination": "other"}
            given = {name: key for name, key in of_call.items() if name in script.keys}
            expected = [of_call.get(name) or getattr(KEYS, name) for name in script.keys]
            for _ in range(2):
                assert [*KEYS.of_script(script, **given)] == expected
    # Those of one call do not stay for the next.
    for destination in ("first", "second"):
        assert KEYS.of_script(POLL_LAST, destination=destination)[-1] == destination


def test_a_score_is_a_moment_in_microseconds() -> None:
    cases = [
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
    ]
    for score, moment_us in cases:
        with naming(score, moment_us):
            assert parse_score(score) == moment_us
            assert PendingRecord(b"", score).due_us == moment_us


def test_a_moment_in_whole_milliseconds_has_a_whole_score() -> None:
    for ms in [0, 1, 1_700_000_000_123, 2**53 - 1, 2**53]:
        with naming(ms):
            assert score_of(ms * 1000) == str(ms)
    # Between two milliseconds, the score is between theirs.
    assert score_of(1_700_000_000_123_456) == "1700000000123.456"


def test_a_queue_without_pending_messages_is_not_overdue() -> None:
    assert DelayedDepth(0, 3, 1, None).overdue_us(5_000) == 0
    assert DelayedDepth(1, 0, 0, 9_000).overdue_us(5_000) == 0
    assert DelayedDepth(1, 0, 0, 2_000).overdue_us(5_000) == 3_000


def test_a_record_is_found_by_its_mark_and_its_id() -> None:
    cases = [
        (b"\x08ABCDEFGHrest", b"\x08ABCDEFGH"),
        (b"ABCDEFGHrest", b"ABCDEFGH"),
        (b"junk", b"junk"),
    ]
    for record, start in cases:
        with naming(record, start):
            assert PendingRecord(record, b"1").start == start
