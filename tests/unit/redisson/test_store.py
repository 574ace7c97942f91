"""The store of a delayed queue without a server: keys, scores, figures."""

from __future__ import annotations

from delayq._redisson.records import PendingRecord, parse_score, score_of
from delayq._redisson.store import DelayedDepth
from tests.support.cases import naming


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
