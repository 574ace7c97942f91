"""Errors and log records: how they travel, what they say, and the fields that name a queue."""

from __future__ import annotations

import ast
import asyncio
import copy
import logging
import pickle
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

import delayq
from delayq import errors
from delayq._checks import describe_value
from delayq._logging import about, log
from delayq.codecs.protocol import decode
from delayq.instrumentation import Hooks, Observer, OfferEvent

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


PACKAGE = Path(delayq.__file__).parent


def test_every_record_about_a_queue_names_it_in_a_field() -> None:
    calls = [
        ast.unparse(node)
        for text in (path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
        for node in (ast.walk(ast.parse(text)) if "queue %r" in text else ())
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_log.")
    ]
    about_queues = [call for call in calls if "queue %r" in call]
    assert len(about_queues) > 10
    assert [call for call in about_queues if "extra=" not in call] == []


def test_a_record_about_a_queue_begins_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    log(logging.WARNING, "jobs", "%s failed", "it", message="a", attempt=2, error=ValueError("no"))
    (record,) = caplog.records
    assert record.getMessage() == "queue 'jobs': it failed"
    assert about("jobs", "a", 2).items() <= vars(record).items()
    assert record.exc_info is not None
    assert record.funcName.startswith("test_")


def test_every_logger_is_below_delayq() -> None:
    texts = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r"logging\.getLogger\((.+?)\)", text)}
    assert names == {f'"delayq{child}"' for child in ("", ".outbox", ".timer", ".worker")}


class Broken(Observer):
    def sending(self, sending: OfferEvent) -> None:
        raise ValueError("sending")

    def handling(self, queue: str, message: object) -> None:
        raise ValueError("handling")

    def delivered(self, queue: str, late: float) -> None:
        raise ValueError("delivered")


class Leaving(Observer):
    def sending(self, sending: OfferEvent) -> Leaving:
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise ValueError("leaving")


def test_an_observer_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    for observer in (Broken(), Leaving()):
        hooks.add(observer)
    with hooks.around_sending(OfferEvent("jobs", "reliable", 1, batch=False, delay=0.0)):
        pass
    hooks.begin_handling("jobs", None).end(None)
    hooks.notify_delivered("jobs", 0.0)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "sending",
        "leaving",
        "handling",
        "delivered",
    ]
    with (
        pytest.raises(asyncio.CancelledError),
        hooks.around_sending(OfferEvent("jobs", "reliable", 1, batch=False, delay=0.0)),
    ):
        raise asyncio.CancelledError
