"""The stored form of a message, without a server."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from delayq._reliable.bodies import (
    Body,
    brief,
    content,
    due_us,
    parse,
    parse_letter,
    plain_payload,
    read_reason,
)
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
    text = str(brief(delay_us))
    assert due_us(b"12+%b\n" % text.encode()) == 12 + delay_us
    assert plain_payload(b"12+%b\nx" % text.encode()) == b"x"
    assert len(text) <= len(str(delay_us))
    assert (brief(3_600_000_000), brief(0)) == ("36e8", 0)


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
