"""The errors themselves: how they travel, and what they say."""

from __future__ import annotations

import copy
import pickle
import zlib
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

import delayq
from delayq import errors
from delayq._checks import describe_value
from delayq.codecs.protocol import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

ARGUMENTS: dict[type[errors.DelayqError], tuple[tuple[Any, ...], dict[str, Any]]] = {
    errors.PayloadTooLarge: ((9, 5), {}),
    errors.DecodeError: (("JsonCodec", b"x"), {}),
    errors.UnknownTask: (("send", b"x"), {}),
    errors.DuplicateMessage: ((("a",), ("b",)), {}),
    errors.QueueFull: ((("a", "b"), ("c",), "mails"), {}),
    errors.NotDurable: (("why", ("a",)), {}),
    errors.OutcomeUnknown: (("why", ("a",)), {}),
    errors.MessageFailed: (("a", "attempts", "E: x"), {}),
    errors.NoResult: (("a",), {"keeps": True}),
    errors.ResultTimeout: (("a", 1.5), {}),
    errors.BatchTimeout: (("a", 1.5), {}),
}


def all_of(kind: type[errors.DelayqError]) -> Iterator[type[errors.DelayqError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from all_of(derived)


def test_every_error_can_be_pickled_and_copied() -> None:
    for kind in dict.fromkeys(all_of(errors.DelayqError)):
        if kind.__module__ != "delayq.errors":
            continue
        args, kwargs = ARGUMENTS.get(kind, (("why",), {}))
        error = kind(*args, **kwargs)
        error.add_note("a note")
        for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(same) is kind
            assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))
    # A receipt stays here.
    receipt = type("Receipt", (), {"id": "r1"})()
    unknown = errors.OutcomeUnknown("why", (receipt,))
    assert copy.copy(unknown).stored == (receipt,)
    assert pickle.loads(pickle.dumps(unknown)).stored == ("r1",)


def test_an_error_says_what_is_wrong_where_and_what_to_do() -> None:
    full = errors.QueueFull(("a",), (), "mails")
    assert str(full).startswith("queue 'mails' is full: 1 message was not stored; add workers")
    with pytest.raises(delayq.DecodeError) as caught:
        decode(delayq.JsonCodec(), b"{'a': 1}", "mails", "m1")
    assert caught.value.reason == (
        "JsonCodec cannot decode the payload: it is not JSON:"
        " Expecting property name enclosed in double quotes"
    )
    assert str(caught.value) == (
        f"queue 'mails', message 'm1': {caught.value.reason}; was it offered with another codec or"
        " type?"
    )
    # The text of others' errors may quote the payload; a codec says itself what does not.
    own = errors.DecodeError("Numbers", b"secret", "it is too short")
    raised: list[tuple[BaseException, str]] = [
        (ValueError("invalid literal: 'secret'"), "ValueError"),
        (zlib.error("secret"), "zlib.error"),
        (errors.BadArguments("send() has no argument 'x'"), "BadArguments: send() has no argument"),
        (own, "it is too short"),
    ]
    for error, fault in raised:
        codec: Any = Mock(spec=["decode"], decode=Mock(side_effect=error))
        with pytest.raises(delayq.DecodeError) as caught:
            decode(codec, b"secret", "mails")
        assert f" cannot decode the payload: {fault}" in caught.value.reason
        assert "secret" not in str(caught.value)
    assert pickle.loads(pickle.dumps(own)).reason == own.reason
    assert [describe_value(value) for value in (5, "5s", None, 10**5000)] == [
        *("5 (int)", "'5s' (str)", "None", "a value of type int")
    ]
    assert describe_value("x" * 99) == f"'{'x' * 59}... (str)"
