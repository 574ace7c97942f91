"""Log records about a queue or a message also name it in fields."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from pathlib import Path

import pytest

import delayq
from delayq._logging import about, log
from delayq.instrumentation import Hooks, Observer, OfferEvent

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
