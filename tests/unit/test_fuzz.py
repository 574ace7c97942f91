"""Foreign input is read, whatever it is, or rejected with the error that is meant for it."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delayq import ConfigurationError, DecodeError, EncodeError, codecs
from delayq._engine import stagger
from delayq._redis.url import Address, from_url, redacted
from delayq._redisson.records import payload_of
from delayq._reliable.bodies import parse, parse_letter
from delayq._reliable.ids import is_occurrence
from delayq._reliable.schedules import to_schedule
from delayq._reliable.timing import UnreadableSchedule
from delayq.codecs import codec_for
from tests.support.depth import examples
from tests.support.vectors import kryo

DEEP = 200_000


@dataclass
class Order:
    number: int
    name: str = ""
    inner: Order | None = None


CODECS: dict[str, Any] = {
    **{
        name: getattr(codecs, name)()
        for name in codecs.__all__
        if name.endswith("Codec") and name not in ("Codec", "EncryptedCodec")
    },
    "EncryptedCodec": codecs.EncryptedCodec({"a": bytes(32)}).for_queue("orders"),
    "dict": codec_for(dict),
    "dataclass": codec_for(Order),
    "list[int]": codec_for(list[int]),
}

# Arbitrary bytes, and fragments that look like the output of codecs.
_WORDS = [
    *b'{ } [ ] " : , 1 - e9 null "@class" "java.util.Date" ["java.util.UUID"," \\ud800'.split(),
    *(b"\x08", b"\x01\x00", b"\xff", b"java.math.BigDecimal\xec", b"\xf8\x01a" + bytes(28)),
]
payloads = st.one_of(
    st.binary(max_size=200), st.lists(st.sampled_from(_WORDS), max_size=30).map(b"".join)
)


DEEP_OR_LONG = {
    "open": b"[" * DEEP,
    "nested": b"[" * DEEP + b"]" * DEEP,
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "inner": b'{"inner":' * DEEP + b"1" + b"}" * DEEP,
    "typed": b'["java.util.ArrayList",' * DEEP + b"[]" + b"]" * DEEP,
    "digits": b"9" * 1_000_000,
    "exponent": b"1e" + b"9" * 100_000,
    "fraction": b"1." + b"9" * 1_000_000,
    "decimal": b'["java.math.BigDecimal",1e999999999]',
    "integer": b'["java.math.BigInteger",' + b"9" * 100_000 + b"]",
    "escapes": b'"' + b"\\u0000" * 100_000 + b'"',
    "object": b'{"@class":"a.B","a":' * 100_000,
    "class": b'["' + b"a." * 500_000 + b'",[]]',
    "array class": b'["' + b"[" * 500_000 + b'",[]]',
    "kryo": b"\x01\x00java.math.BigDecima\xec" + b"\xff" * 20,
    "kryo class": b"\1\0" + b"a" * 10**6,
    "kryo text": b"\3" + b"a" * 10**6,
    "kryo integer": kryo("java.math.BigInteger", "c1843d") + b"\x7f" * 10**6,
    "kryo decimal": kryo("java.math.BigDecimal", "c1843d") + b"\x7f" * 10**6 + b"\0",
    # The exponent for a scale of -2**31 needs one bit more.
    "kryo scale": kryo("java.math.BigDecimal", "0201ffffffff0f"),
    "kryo sizes": kryo("[B", "ffffffff0f"),
    "kryo sizes of numbers": kryo("java.math.BigInteger", "ffffffff0f00"),
    "kryo sizes of text": bytes.fromhex("03ffffffff0f"),
    "kryo sizes of 64 bits": bytes.fromhex("03ffffffffffffffff7f"),
}


@given(payload=payloads)
@settings(max_examples=examples(400))
def test_a_codec_reads_any_bytes_or_raises_decode_error(payload: bytes) -> None:
    for name, codec in CODECS.items():
        try:
            codec.decode(payload)
        except DecodeError as error:
            assert error.payload == payload  # noqa: PT017
            assert " cannot decode the payload: " in str(error)  # noqa: PT017
            if name in codecs.__all__:
                assert error.codec == name  # noqa: PT017


# A failure would hang, or end the process.
@pytest.mark.timeout(120)
def test_deep_or_long_input_is_read_or_refused_quickly() -> None:
    for (name, codec), (kind, payload) in product(CODECS.items(), DEEP_OR_LONG.items()):
        # The time of this process: a pause of the machine does not count.
        start = time.process_time()
        with suppress(DecodeError):
            value = codec.decode(payload)
            try:
                again = codec.encode(value)
            except EncodeError as error:
                assert len(str(error)) < 200, (name, kind)  # noqa: PT017
            else:
                assert again == payload or not name.startswith("Kryo"), (name, kind)
        assert time.process_time() - start < 10, (name, kind)


@given(st.binary(max_size=100) | st.binary(max_size=20).map(lambda data: b"1 {" + data + b"}\n1"))
@example(b"9" * 10_000 + b" \n1")
@example(b"1 " + b"[" * DEEP + b"\n1")
@example(b"-1 \n")
def test_a_body_is_read_or_no_body(body: bytes) -> None:
    for read in (parse, parse_letter):
        try:
            read(body)
        except ValueError as error:
            # The error quotes nothing of the input.
            assert re.fullmatch(  # noqa: PT017
                r"the (body|dead letter) has no \w+|expected a JSON object", str(error)
            )


NOTICES = st.lists(st.sampled_from([b"1", b"-1", b"x", b"9" * 5000, b"\xff"]), max_size=5)


@given(st.binary(max_size=60) | NOTICES.map(b" ".join))
def test_any_bytes_are_a_record_a_notice_and_an_id_or_not(data: bytes) -> None:
    payload = payload_of(data)
    assert payload is None or data.endswith(payload)
    notice = stagger.parse_notice(data)
    assert notice is None or isinstance(notice.next_us, int)
    assert is_occurrence(data) in (True, False)


_PARTS = [*":/@?#[]=&%h1é\0", "redis", "rediss", "unix", "://", "db=", "password=", "ssl_"]


@given(st.text(max_size=60) | st.lists(st.sampled_from(_PARTS), max_size=12).map("".join))
def test_any_text_is_an_address_or_a_configuration_error(url: str) -> None:
    with suppress(ConfigurationError):
        assert isinstance(from_url(url), Address)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
)
FACTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("next", "last", "priority", "version"), JSON | st.just("1700000000000000")
        ),
        "timing": JSON
        | st.sampled_from(
            ['{"every_us":5}', '{"cron":"* * * * *","timezone":"UTC"}', '{"cron":1}', "[]", "5"]
        ),
    },
)


@given(
    st.binary(max_size=60)
    | st.builds(lambda facts: json.dumps(facts).encode() + b"\nrest", FACTS | JSON)
)
@example(b"[" * DEEP)
@example(b'{"next":"","last":"","priority":0,"version":0,"timing":"' + b"[" * DEEP + b'"}\n')
def test_a_schedules_record_is_read_or_named_unreadable(record: bytes) -> None:
    with suppress(UnreadableSchedule):
        assert to_schedule("name", record, 0).name == "name"


@given(
    st.sampled_from(["redis", "rediss", "unix", "valkey", "redis+cluster", "http", "x"]),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8),
    st.booleans(),
)
@example("redis", "/", "", False)
@example("redis", "1/", "", False)
@example("redis", "0,", "", False)
def test_a_password_is_never_shown(scheme: str, before: str, after: str, quoted: bool) -> None:
    password = f"{before}hunter2{after}"
    written = quote(password, safe="") if quoted else password
    for url in (
        f"{scheme}://u:{written}@h/0",
        f"{scheme}://:{written}@h:1",
        f"{scheme}://h/0?password={written}",
        # Text after an @ names a server, and so does a list where several servers are allowed.
        *([] if "+" in scheme or "@" in written else [f"{scheme}://u:{written}"]),
    ):
        assert "hunter2" not in redacted(url)
        try:
            assert "hunter2" not in repr(from_url(url))
        except ConfigurationError as error:
            assert "hunter2" not in f"{error}{error!r}{error.__cause__!r}{error.__context__!r}"  # noqa: PT017


UNSAFE = re.compile(
    r"^\s*(from|import)\b[^#\n]*\b(pickle|marshal|shelve|dill|cloudpickle|yaml)\b"
    r"|(?<![.\w])(eval|exec|compile|__import__)\(",
    re.MULTILINE,
)
IMPORTS = {
    *(
        "_lazy_imports.py",
        "codecs/_type_codecs.py",
        "cli/worker/child.py",
        "testing/pytest_plugin.py",
    )
}
"""These import our own modules and libraries by name, and one named on the command line."""


def test_nothing_is_run_or_imported_because_a_payload_says_so() -> None:
    root = Path(str(files("delayq")))
    for file in root.rglob("*.py"):
        text, where = file.read_text("utf-8"), file.relative_to(root).as_posix()
        assert not UNSAFE.search(text), where
        assert "import_module" not in text or where in IMPORTS, where
