"""The stored form of an error: one line that says what happened, and the traceback."""

from __future__ import annotations

import subprocess
import traceback

from delayq._reliable.failures import describe, pack_error, unpack_error


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
