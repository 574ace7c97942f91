"""The codec that encrypts: its format, its keys, and what it refuses."""

from __future__ import annotations

import base64
import pickle
import sys
import traceback
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import delayq
from delayq.codecs import BytesCodec, EncryptedCodec
from tests.support.cases import naming

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
VALUE = {"card": "4111-1111"}


def codec(*args: Any, queue: str = "orders", **options: Any) -> EncryptedCodec[Any]:
    return EncryptedCodec(*args, **options).for_queue(queue)


def test_a_payload_has_the_documented_bytes() -> None:
    payload = codec({"2026": OLD}).encode(VALUE)
    head, nonce, sealed = payload[:6], payload[6:18], payload[18:]
    assert head == b"\xf8\x042026"
    content = AESGCM(OLD).decrypt(nonce, sealed, head + b"orders")
    assert content == b'{"card":"4111-1111"}'
    assert codec({"2026": OLD}).encode(VALUE)[6:] != payload[6:]


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    earlier, later = codec({"2026": OLD}), codec({"2027": NEW, "2026": OLD})
    assert later.decode(earlier.encode(VALUE)) == VALUE
    with pytest.raises(delayq.DecodeError, match="key '2027', which is not among the keys"):
        earlier.decode(later.encode(VALUE))


def test_what_was_moved_or_changed_is_refused_for_one_cause() -> None:
    payload = codec({"2026": OLD}).encode(VALUE)
    changed = [
        bytes([*payload[:at], byte ^ 1, *payload[at + 1 :]])
        for at, byte in enumerate(payload)
        # With another length, the id may be anything that the nonce begins with.
        if at != 1
    ]
    reasons = set()
    for reader, stored in [
        (codec({"2026": OLD}, queue="mails"), payload),
        (codec({"2026": NEW}), payload),
        *((codec({"2026": OLD}), other) for other in [*changed, payload[:-1], payload[:20], b""]),
    ]:
        with naming(stored), pytest.raises(delayq.DecodeError) as caught:
            reader.decode(stored)
        reasons.add(caught.value.fault)
        assert caught.value.payload == stored
    assert (
        "it does not decrypt with key '2026': it was changed, or is from another queue" in reasons
    )
    assert "it is not encrypted" in reasons
    # And one for each id that a changed bit makes.
    assert len(reasons) == 2 + 4


def test_plain_payloads_are_read_on_demand() -> None:
    plain = delayq.JsonCodec().encode(VALUE)
    with pytest.raises(delayq.DecodeError, match="it is not encrypted"):
        codec({"2026": OLD}).decode(plain)
    transition = codec({"2026": OLD}, accept_plain=True)
    assert transition.decode(plain) == VALUE
    # As without encryption, so that a message that sleeps is known again.
    assert transition.fingerprint(plain) == plain
    assert transition.encode(VALUE)[0] == 0xF8


def test_an_error_of_the_inner_codec_holds_the_encrypted_payload() -> None:
    payload = codec({"2026": OLD}, BytesCodec()).encode(b"\xff 4111")
    with pytest.raises(delayq.DecodeError, match="it is not UTF-8") as caught:
        codec({"2026": OLD}, delayq.StringCodec()).decode(payload)
    assert caught.value.payload == payload
    assert b"4111" not in pickle.dumps(caught.value)
    with pytest.raises(delayq.EncodeError, match="JsonCodec"):
        codec({"2026": OLD}).encode(object())
    with pytest.raises(delayq.EncodeError, match="returned str, not bytes"):
        codec({"2026": OLD}, _Text()).encode("4111")


class _Text:
    encode = decode = staticmethod(str)


def test_keys_are_bytes_or_base64_or_one_text() -> None:
    text, url_safe = (base64.b64encode(OLD).decode(), base64.urlsafe_b64encode(OLD).decode())
    payload = codec({"a": OLD}).encode(VALUE)
    for keys in (
        {"a": text},
        {"a": url_safe.rstrip("=")},
        f"a={text}",
        f"  b={base64.b64encode(NEW).decode()},\n a={text}\n",
    ):
        assert codec(keys).decode(payload) == VALUE
    assert (
        repr(EncryptedCodec({"a": OLD, "b": NEW})) == "<EncryptedCodec around JsonCodec, keys a, b>"
    )


def test_bad_keys_are_refused_and_not_quoted() -> None:
    secret = base64.b64encode(b"geheim" * 6).decode()
    cases: list[tuple[Any, str]] = [
        ({}, "at least one key"),
        ("", "entry 1 of the keys must be ID=BASE64"),
        (f"a={secret} {secret}", "entry 2"),
        (f"{secret}=", "entry 1"),
        (f"a={secret},a={secret}", "entry 2 of the keys has the id of an earlier one"),
        # The key and its id in each other's place.
        ({"a": OLD, secret: "2027"}, "entry 2 of the keys must have 32 bytes"),
        (f"{secret}=2027", "entry 1 of the keys must have 32 bytes"),
        (f"{secret}=2027 {secret}=2027", "entry 2 of the keys has the id of an earlier one"),
        ({secret + "+": OLD}, "the id of a key must be"),
        ({"": OLD}, "the id of a key must be"),
        ({"a" * 65: OLD}, "the id of a key must be"),
        ({"a": b"geheim"}, "must have 32 bytes, as AES-256 does, not 6"),
        ({"a": secret}, "not 36"),
        ({"a": "geheim!"}, "is not base64"),
        ({"a": 5}, "must be bytes or base64, not a int"),
        ([OLD], "must be a mapping"),
    ]
    for keys, reason in cases:
        with naming(reason), pytest.raises(delayq.BadInput, match=reason) as caught:
            EncryptedCodec(keys)
        assert secret not in str(caught.value)
        assert "geheim" not in str(caught.value)


def test_what_is_recorded_of_an_error_has_no_key() -> None:
    secret = b"geheim--" * 4
    payload = codec({"a": secret}).encode(VALUE)
    for fail in (
        lambda: codec({"a": secret}).encode(object()),
        lambda: codec({"a": secret}, queue="mails").decode(payload),
    ):
        with pytest.raises(delayq.CodecError) as caught:
            fail()
        recorded = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        texts = [str(at.locals) for at in recorded.stack if "delayq/codecs" in at.filename]
        assert texts
        assert "geheim" not in "".join(texts)


def test_a_codec_of_no_queue_says_so() -> None:
    with pytest.raises(delayq.ConfigurationError, match=r"for_queue\(name\)"):
        EncryptedCodec({"a": OLD}).encode(VALUE)
    with pytest.raises(delayq.BadName):
        EncryptedCodec({"a": OLD}).for_queue("")


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(delayq.ConfigurationError, match=r"pip install 'delayq\[encryption\]'"):
        EncryptedCodec({"a": OLD})
