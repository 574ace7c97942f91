"""Values to bytes and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq import DecodeError, EncodeError, JsonCodec, StringCodec

TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(JSON)
def test_json_comes_back_as_it_went(value: Any) -> None:
    assert JsonCodec().decode(JsonCodec().encode(value)) == value


def test_json_is_compact_and_utf8() -> None:
    assert JsonCodec().encode({"a": [1, None, "é"]}) == '{"a":[1,null,"é"]}'.encode()


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", math.nan, math.inf, "\ud800", {(1, 2): 3}])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(EncodeError):
        JsonCodec().encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError):
        JsonCodec().encode(loop)


def test_an_error_does_not_quote_the_value() -> None:
    with pytest.raises(EncodeError) as caught:
        JsonCodec().encode("secret \ud800")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"abc", b"[" * 100_000])
def test_what_is_no_json_is_refused_with_its_first_bytes(payload: bytes) -> None:
    with pytest.raises(DecodeError, match=f"JsonCodec cannot decode {len(payload)} bytes") as caught:
        JsonCodec().decode(payload)
    assert caught.value.payload == payload
    assert len(str(caught.value)) < 150


@given(TEXT)
def test_text_comes_back_as_it_went(value: str) -> None:
    assert StringCodec().encode(value) == value.encode()
    assert StringCodec().decode(value.encode()) == value


def test_the_string_codec_refuses_what_is_no_text() -> None:
    with pytest.raises(EncodeError, match="encodes str, not int"):
        StringCodec().encode(5)  # type: ignore[arg-type]
    with pytest.raises(EncodeError, match="surrogate"):
        StringCodec().encode("\ud800")
    with pytest.raises(DecodeError):
        StringCodec().decode(b"\xff")
