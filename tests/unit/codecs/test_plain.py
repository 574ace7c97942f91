"""Plain codecs: JSON, text, a whole number, bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import DecodeError, EncodeError, JsonCodec, StringCodec, codecs
from delayq.codecs import BytesCodec, IntegerCodec, LongCodec
from delayq.codecs import json as json_module
from tests.support.cases import naming

TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(JSON)
def test_json_is_what_the_standard_library_writes_and_comes_back_as_it_went(value: Any) -> None:
    options: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
    assert JsonCodec().encode(value) == json.dumps(value, **options).encode()
    assert JsonCodec().decode(JsonCodec().encode(value)) == value


def test_json_is_the_same_without_an_encoder_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": [1, None, "é", {2.5}]}
    written = JsonCodec().encode(value)
    monkeypatch.setattr("json.encoder.c_make_encoder", None)
    monkeypatch.setattr(json_module, "_write", json_module._new_writer(json_module._plain))
    assert JsonCodec().encode(value) == written == '{"a":[1,null,"é",[2.5]]}'.encode()


def test_a_value_without_a_json_form_is_refused_and_not_quoted() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    values: list[Any] = [object(), {b"x"}, b"x", math.nan, math.inf, "secret \ud800", {(1, 2): 3}]
    cases = [*((value, "cannot encode") for value in values), (loop, "itself"), (deep, "deeply")]
    for value, reason in cases:
        with naming(reason), pytest.raises(EncodeError, match=reason) as caught:
            JsonCodec().encode(value)
        assert "secret" not in str(caught.value)


def test_no_json_is_refused_and_the_reason_is_told() -> None:
    for payload in [b"", b"{", b"\xff", b"abc", b"[" * 100_000]:
        refused = "JsonCodec cannot decode the payload: "
        with naming(payload), pytest.raises(DecodeError, match=refused) as caught:
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


# --- a whole number


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_comes_back_as_it_went(value: int) -> None:
    assert LongCodec().encode(value) == str(value).encode()
    assert LongCodec().decode(str(value).encode()) == value
    assert IntegerCodec().decode(IntegerCodec().encode(value >> 32)) == value >> 32


def test_a_number_too_large_for_java_is_refused() -> None:
    cases: list[Any] = [(LongCodec(), 64), (IntegerCodec(), 32)]
    for codec, bits in cases:
        with naming(codec, bits):
            for value in (1 << bits - 1, -(1 << bits - 1) - 1, 10**1000):
                with pytest.raises(EncodeError, match=f"ints of {bits} bits"):
                    codec.encode(value)
                with pytest.raises(DecodeError):
                    codec.decode(str(value).encode())


NO_NUMBERS = [
    *b'- +-5 1_0 5L 1.0 "5"'.split(),
    b"",
    b" 5",
    b"5 ",
    b"5\n",
    "٣".encode(),
    b"9" * 10**6,
]


def test_text_that_is_no_number_is_refused() -> None:
    wrong: list[Any] = [True, 1.0, "1", None, b"x"]
    for codec in (LongCodec(), IntegerCodec()):
        for value in wrong:
            refused = f"encodes int, not {type(value).__name__}"
            with naming(codec, value), pytest.raises(EncodeError, match=refused):
                codec.encode(value)
        for payload in NO_NUMBERS:
            refused = f"{type(codec).__name__} cannot decode the payload: "
            with naming(payload), pytest.raises(DecodeError, match=refused):
                codec.decode(payload)
    # They are read as Java reads them.
    texts = b"5 +5 -5 007 -0".split()
    assert [LongCodec().decode(text) for text in texts] == [5, 5, -5, 7, 0]


# --- bytes


@given(st.binary())
def test_the_bytes_codec_changes_nothing(value: bytes) -> None:
    for same in (value, bytearray(value), memoryview(value)):
        encoded = BytesCodec().encode(same)
        assert encoded == value
        assert type(encoded) is bytes
    assert BytesCodec().decode(value) == value


def test_a_value_that_is_not_bytes_is_refused() -> None:
    for value in ("text", 5, [1], None):
        with pytest.raises(EncodeError, match="encodes bytes"):
            BytesCodec().encode(value)  # type: ignore[arg-type]
    released = memoryview(b"x")
    released.release()
    with pytest.raises(EncodeError, match="released"):
        BytesCodec().encode(released)


# --- all of them


def test_every_codec_is_exported_and_listed() -> None:
    assert set(codecs.__all__) <= set(dir(codecs))
    assert all(getattr(codecs, name).__name__ == name for name in codecs.__all__)
    assert not hasattr(codecs, "NoCodec")
    assert (delayq.JsonCodec, delayq.StringCodec) == (codecs.JsonCodec, codecs.StringCodec)
