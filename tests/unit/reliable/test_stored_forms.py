"""The stored forms of messages, checkpoints, errors, limits and reports, without a server."""

from __future__ import annotations

import json
import subprocess
import traceback
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import delayq
from delayq import Limit
from delayq._reliable.bodies import (
    Body,
    content,
    due_us,
    format_delay,
    parse,
    parse_letter,
    plain_payload,
    read_reason,
)
from delayq._reliable.checkpoints import Saved, pack, unpack
from delayq._reliable.failures import describe, pack_error, unpack_error
from delayq._reliable.limits import limit_text, parse_limit
from delayq._reliable.process_report import Blocking
from delayq._reliable.report_format import (
    Sampler,
    Work,
    activity_of,
    checked_span,
    facts_of,
    packed,
    worker_of,
)
from delayq.errors import BadInput
from delayq.stats import Activity, QueueDepth, Spread, WorkerInfo, bucket_of
from tests.support.depth import examples

HEADERS = st.dictionaries(st.text(), st.text(), max_size=4)
LIMITS = st.none() | st.integers(1, 10**16 - 1)


@given(st.integers(0, 10**16 - 1), HEADERS, st.binary(), LIMITS, LIMITS)
@settings(max_examples=examples(500))
def test_a_stored_body_is_read_back(
    enqueued: int,
    headers: dict[str, str],
    payload: bytes,
    max_attempts: int | None,
    timeout_us: int | None,
) -> None:
    for times in (b"%016d", b"%016d3", b"%016d+5", b"%016d1+36000", b"%016d1+36e8", b"%016d4321+5"):
        body = times % enqueued + content(headers, payload, max_attempts, timeout_us)
        assert parse(body) == Body(enqueued, headers, payload, max_attempts, timeout_us)
        is_plain = not headers and max_attempts is None and timeout_us is None
        assert plain_payload(body) == (payload if is_plain else None)
        assert due_us(body) == enqueued + int(float(times.partition(b"+")[2] or 0))


@given(st.integers(0, 10**19) | st.integers(0, 10**6).map(lambda seconds: seconds * 10**6))
def test_a_delay_is_as_brief_as_it_can_be(delay_us: int) -> None:
    text = str(format_delay(delay_us))
    assert due_us(b"12+%b\n" % text.encode()) == 12 + delay_us
    assert plain_payload(b"12+%b\nx" % text.encode()) == b"x"
    assert len(text) <= len(str(delay_us))
    assert (format_delay(3_600_000_000), format_delay(0)) == ("36e8", 0)


DAMAGED = [b"", b"12", b"\nx", b"+1\nx", b"12+\nx", b"12+1+1\nx", b"12+1x\nx", b"12 \nx", b"1e5\nx"]
DAMAGED += [b"-12\nx", b"1" * 26 + b"\nx", b"12+" + b"1" * 21 + b"\nx"]


def test_a_damaged_body_is_not_a_plain_one() -> None:
    for body in DAMAGED:
        assert plain_payload(body) is None, body


DUE = [
    (b"12\nx", 12),
    (b"12 {}\nx", 12),
    (b"12+3\n4+5\n", 15),
    (b"12+3e2\n", 312),
    (b"12+3e\n", None),
    (b"12+3e99\n", None),
    (b"1795346643813468+3600000000\n", 1795350243813468),
    (b"17953466438134683+3600000000\n", 1795350243813468),
    (b"12", None),
    (b"x\n", None),
    (b"12+\n", None),
    (b"9" * 26 + b"\n", None),
    (b"", None),
]


def test_a_letter_is_read_without_lone_surrogates() -> None:
    death = read_reason(b'{"reason":"\\ud800","error":"\\udfff: x \\ud83d\\ude00"}\n1 \nx')
    assert (death.reason, death.error) == ("?", "?: x \N{GRINNING FACE}")


def test_a_body_tells_when_its_message_is_due() -> None:
    for body, due in DUE:
        assert due_us(body) == due, body


@given(st.text(), HEADERS, st.binary(), st.binary())
def test_a_letter_has_a_whole_body(
    reason: str, headers: dict[str, str], payload: bytes, checkpoint: bytes
) -> None:
    body = b"12" + content(headers, payload)
    facts: dict[str, Any] = {"reason": reason}
    assert parse_letter(content(facts, body)) == (facts, body, b"")
    facts["checkpoint"] = len(checkpoint)
    assert parse_letter(content(facts, checkpoint + body)) == (facts, body, checkpoint)


def test_without_headers_there_is_next_to_nothing_around_a_payload() -> None:
    assert content(None, b"x") == content({}, b"x") == b"\nx"
    assert content({"a": "é\n"}, b"x") == b' {"a":"\\u00e9\\n"}\nx'


MOMENTS = st.lists(st.integers(0, 10**16), min_size=1, max_size=3).map(tuple)
MARKS = st.text("0123456789abcdef", max_size=12)


@given(
    st.integers(0, 10**16 - 1),
    st.none() | st.binary(),
    st.dictionaries(st.text(max_size=9), st.binary(), max_size=3),
    st.dictionaries(MARKS, MOMENTS, max_size=3),
)
def test_a_checkpoint_is_read_back(
    number: int,
    state: bytes | None,
    steps: dict[str, bytes],
    sleeps: dict[str, tuple[int, ...]],
) -> None:
    saved = Saved(number, state, steps, sleeps)
    assert unpack(pack(saved)) == saved


@given(st.binary() | st.from_regex(rb"[0-9];[0-9]?;[0-9=, ]*\n[0-9]:[0-9]:.*", fullmatch=True))
def test_a_damaged_one_is_refused(checkpoint: bytes) -> None:
    with suppress(ValueError):
        unpack(checkpoint)


class UniqueViolation(Exception):
    pass


def _noted() -> Exception:
    error = ValueError("bad order")
    error.add_note("while closing order 42")
    return error


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


HINT = "duplicate key\n[SQL: INSERT ...]\n(Background on this error at: https://example.org/e/gkpj)"
DEEP = ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("a")]), KeyError("b")])
DEEP_LINE = (
    "ExceptionGroup: outer (2 sub-exceptions): ExceptionGroup: inner (1 sub-exception):"
    " ValueError: a, KeyError: 'b'"
)
TIMEOUT = subprocess.TimeoutExpired("ls", 5)
CASES = [
    (ValueError("bad"), "ValueError: bad"),
    (ValueError(), "ValueError"),
    (KeyError("order"), "KeyError: 'order'"),
    (_noted(), "ValueError: bad order"),
    (UniqueViolation(HINT), f"{__name__}.UniqueViolation: duplicate key"),
    (TIMEOUT, "subprocess.TimeoutExpired: Command 'ls' timed out after 5 seconds"),
    (ExceptionGroup("x", [ValueError("a")]), "ExceptionGroup: x (1 sub-exception): ValueError: a"),
    (DEEP, DEEP_LINE),
    (_Unprintable(), f"{__name__}._Unprintable: <exception str() failed>"),
]


def test_the_line_names_the_type_and_what_it_says_first() -> None:
    for error, line in CASES:
        assert describe(error) == line
        assert unpack_error(pack_error(error))[0] == line
    many = describe(ExceptionGroup("many", [ValueError(number) for number in range(50)]))
    assert many.endswith("ValueError: 4, ...")


def test_line_and_traceback_are_kept_apart() -> None:
    try:
        raise UniqueViolation(HINT)  # noqa: TRY301
    except UniqueViolation as error:
        line, trace = unpack_error(pack_error(error))
        text = traceback.format_exc()
    assert line == f"{__name__}.UniqueViolation: duplicate key"
    assert trace.startswith("Traceback")
    assert trace.endswith("gkpj)")
    assert unpack_error(pack_error(text)) == (line, text), "a text may be a traceback"


def test_a_text_is_kept_whole() -> None:
    texts = {"": "", "one line": "one line", "two\nlines": "two", "\n\n after\nblanks": "after"}
    for text, line in texts.items():
        assert unpack_error(pack_error(text)) == (line, text)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"concurrency": 0}, "concurrency"),
    ({"concurrency": True}, "concurrency"),
    ({"concurrency": 1.5}, "concurrency"),
    ({"rate": 0}, "rate"),
    ({"rate": "5"}, "rate"),
    ({"rate": 5, "per": 0}, "per"),
    ({"rate": 5, "per": -1}, "per"),
    ({"rate": 5, "per": float("nan")}, "per"),
    ({"ordered": 1}, "ordered"),
    ({"ordered": True, "concurrency": 2}, "one message at a time"),
]


def test_an_invalid_limit_is_refused() -> None:
    for wrong, name in WRONG:
        with pytest.raises(delayq.BadInput, match=name):
            Limit(**wrong)


def test_a_period_is_kept_in_seconds_and_cannot_be_changed() -> None:
    limit = Limit(rate=5, per=timedelta(minutes=1))
    assert limit == Limit(rate=5, per=60.0)
    with pytest.raises(AttributeError):
        limit.rate = 6  # type: ignore[misc]


@given(
    st.none() | st.integers(1, 10**9),
    st.none() | st.integers(1, 10**9),
    st.integers(1, 10**13),
    st.booleans(),
)
def test_a_limit_is_read_as_it_was_stored(
    concurrency: int | None, rate: int | None, per_us: int, ordered: bool
) -> None:
    per = per_us / 1_000_000 if rate else 1.0
    limit = Limit(1 if ordered and concurrency else concurrency, rate, per, ordered)
    text = limit_text(limit, "group_limit", of_groups=True)
    read = parse_limit(text)
    assert (read or Limit()) == limit
    assert limit_text(read, "group_limit", of_groups=True) == text


def test_no_limit_is_read_from_anything_else() -> None:
    for text in (None, "", "0", "c", "c0", "c1o2", "nonsense"):
        assert parse_limit(text) is None, text


DAY = 86_400.0


def test_a_quantile_is_off_by_a_fifth_at_most() -> None:
    for seconds in (0.0002, 0.003, 0.05, 0.7, 4.0, 90.0, 3600.0, DAY / 2):
        median = Spread({bucket_of(seconds): 3}).p50
        assert median is not None
        assert 1 / 1.2 <= median / seconds <= 1.2, seconds
    assert bucket_of(-1.0) == bucket_of(0.0) == bucket_of(0.0001) == 0
    assert Spread({0: 1}).p99 == 0.0001
    assert bucket_of(100 * DAY) == bucket_of(1000 * DAY) == 59
    assert Spread({}).p50 is None


def test_quantiles_count_from_the_shortest_duration() -> None:
    spread = Spread({bucket_of(1.0): 1, bucket_of(0.001): 98, bucket_of(0.01): 1})
    assert spread.count == 100
    assert spread.p50 == spread.quantile(0.98)
    assert spread.p99 == Spread({bucket_of(0.01): 1}).p50
    assert spread.quantile(1.0) == Spread({bucket_of(1.0): 1}).p50


def measure(sampler: Sampler, messages: int, seconds: float) -> int:
    """Let messages end, and return how many of them were measured."""
    measured = 0
    for _ in range(messages):
        sampler.skip -= 1
        if sampler.skip < 0:
            sampler.add(seconds)
            measured += 1
    return measured


def test_the_durations_of_many_messages_are_sampled() -> None:
    sampler = Sampler()
    assert measure(sampler, 256, 0.5) == 256, "few are all measured"
    assert sampler.drain() == {bucket_of(0.5): 256}
    assert measure(sampler, 300_000, 0.5) < 4000
    assert sum(sampler.drain().values()) == pytest.approx(300_000, rel=0.01)
    # The next report begins anew.
    assert measure(sampler, 256, 0.5) == 256


def test_a_written_report_is_read_back() -> None:
    counts = {"o": 7, "h": 5, "f": 0, "d": 2, "e": 1}
    text = packed(counts, {3: 4}, {0: 2, 59: 1})
    assert "f=" not in text
    assert activity_of("m", f"29924245 {text}".encode()) == Activity(
        start=datetime(2026, 11, 23, 17, 25, tzinfo=UTC),
        seconds=60,
        offered=7,
        handled=5,
        failed=0,
        dead=2,
        expired=1,
        lateness=Spread({3: 4}),
        handling=Spread({0: 2, 59: 1}),
    )


def test_a_report_of_a_worker_is_read_within_bounds() -> None:
    blocking = Blocking("f (x.py, line 1)", 2.0, 2.0, 9.0)
    facts = json.loads(facts_of(Work(1, 1, [], {}, 1, blocking), 10.0, 5.0, 60_000_000))

    def read(**forged: Any) -> WorkerInfo | None:
        return worker_of("jobs", b"1700000000000000", json.dumps(facts | forged).encode())

    for seconds, age in ((float("inf"), 0), (float("nan"), 0), (1e300, 0), (-5, 0), (1, -9e8)):
        assert read(blocked=["f", seconds, 0, age]) is None
    info = read(blocked=["\ud800" * 999, 2, 2, 1], messages=[["\ud800", 1, 1.0, 0]])
    assert info is not None
    assert info.blocked is not None
    assert (info.blocked.code, info.messages[0].id) == ("?" * 200, "?")


def test_an_unreadable_report_counts_as_nothing() -> None:
    far = b"498737 l99999=1 l2300=5 l60=1 o=" + b"9" * 5000
    for stored in (b"498737", b"498737 ", b"498737 \xff=1 z=9 o=x =3 q7=1", far):
        activity = activity_of("h", stored)
        assert (activity.seconds, activity.start) == (3600, datetime(2026, 11, 23, 17, tzinfo=UTC))
        assert (activity.offered, activity.lateness.count) == (0, 0), stored


def test_activities_add_up() -> None:
    parts = [activity_of("m", b"10 o=1 h=2 l3=4"), activity_of("m", b"11 o=5 l3=1 t2=2")]
    whole = Activity.total(parts)
    assert (whole.start, whole.seconds) == (parts[0].start, 120)
    assert (whole.offered, whole.handled) == (6, 2)
    assert (whole.lateness, whole.handling) == (Spread({3: 5}), Spread({2: 2}))


def test_an_impossible_span_is_refused() -> None:
    for name, number in (("minutes", 0), ("minutes", 1441), ("hours", 721), ("hours", True)):
        asked: dict[str, Any] = {"minutes": None, "hours": None, name: number}
        with pytest.raises(BadInput, match=rf"{name} must be an int from 1 to"):
            checked_span(**asked)
    with pytest.raises(BadInput, match="not both"):
        checked_span(1, 1)


def test_a_queue_has_what_its_partitions_have_together() -> None:
    first = QueueDepth(1, 2, 3, 4, 5.0, quarantined=6)
    second = QueueDepth(10, 20, 30, 40, 4.0, paused=True, quarantined=60)
    assert QueueDepth.total([first, second]) == QueueDepth(
        11, 22, 33, 44, 5.0, paused=True, quarantined=66
    )
    pauses = [QueueDepth(0, 0, 0, 0, 0.0, paused=True, paused_for=age) for age in (5.0, 7.0)]
    assert QueueDepth.total([*pauses, first]).paused_for == 7.0
    assert QueueDepth.total([*pauses, second]).paused_for is None
    unknown = QueueDepth(0, 0, 0, 0, 0.0, quarantined=None)
    assert QueueDepth.total([first, unknown]).quarantined is None
