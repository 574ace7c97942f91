"""The stored form of a message, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._reliable.bodies import content, parse, parse_letter

HEADERS = st.dictionaries(st.text(), st.text(), max_size=4)


@given(st.integers(0, 2**53), HEADERS, st.binary())
def test_what_goes_in_comes_out(enqueued: int, headers: dict[str, str], payload: bytes) -> None:
    assert parse(b"%d " % enqueued + content(headers, payload)) == (enqueued, headers, payload)


@given(st.text(), HEADERS, st.binary())
def test_a_letter_has_a_whole_body(reason: str, headers: dict[str, str], payload: bytes) -> None:
    body = b"12 " + content(headers, payload)
    why, inside = parse_letter(content({"reason": reason}, body))
    assert (why, inside) == ({"reason": reason}, body)


def test_without_headers_there_is_next_to_nothing_around_a_payload() -> None:
    assert content(None, b"x") == content({}, b"x") == b"\nx"
    assert content({"a": "é\n"}, b"x") == b'{"a":"\\u00e9\\n"}\nx'


@pytest.mark.parametrize("body", [b"", b"12 ", b"x \n", b"12 {\n", b"12 {}"])
def test_what_is_no_body_is_told(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse(body)


@pytest.mark.parametrize("letter", [b"", b"{}", b"{\n"])
def test_what_is_no_letter_is_told(letter: bytes) -> None:
    with pytest.raises(ValueError):
        parse_letter(letter)
