"""Code of users that strict type checkers accept: mypy and pyright check this file, and it runs as
well. ``make packages`` checks it against the wheel.
"""
# pyright: strict

from __future__ import annotations

from typing import Any, assert_type

import delayq


def read_message(message: delayq.Message) -> None:
    assert_type(message, delayq.Message[Any])
    assert_type(message.value, Any)


def bind(
    queue: delayq.ReliableQueue, delayed: delayq.DelayedQueue, task: delayq.Task
) -> tuple[delayq.Offer, delayq.Receipt, delayq.Delivery]:
    assert_type(queue, delayq.ReliableQueue[Any])
    assert_type(delayed, delayq.DelayedQueue[Any])
    assert_type(task, delayq.Task[..., Any])
    raise NotImplementedError


def bind_others(
    codec: delayq.codecs.Codec,
    dead: tuple[delayq.DeadLetter, delayq.DeadLetters],
    waiting: delayq.sync.ReliableQueue,
    delayed: tuple[delayq.sync.DelayedQueue, delayq.sync.Receipt, delayq.sync.Pending],
) -> None:
    assert_type(codec, delayq.codecs.Codec[Any])
    assert_type(dead, tuple[delayq.DeadLetter[Any], delayq.DeadLetters[Any]])
    assert_type(waiting, delayq.sync.ReliableQueue[Any])


def test_a_class_without_its_parameter_is_one_of_anything() -> None:
    read: Any = bind.__annotations__
    assert read["queue"] == "delayq.ReliableQueue"
    offer: delayq.Offer = delayq.Offer("a value")
    assert_type(delayq.Offer(1), delayq.Offer[int])
    assert offer.value == "a value"
    assert delayq.Offer[int](1).value == 1


def test_modules_of_the_package_need_no_import_of_their_own() -> None:
    assert_type(delayq.codecs.codec_for(int), delayq.codecs.Codec[int])
    assert delayq.backoff.Backoff is delayq.Backoff
    assert delayq.client.connect is delayq.connect
    assert issubclass(delayq.errors.Closed, delayq.DelayqError)
    assert delayq.stats.QueueDepth is delayq.QueueDepth
    assert delayq.tasks.Tasks is delayq.Tasks
    assert delayq.worker.Worker is delayq.Worker
    assert callable(delayq.testing.running)
    assert callable(delayq.instrumentation.Observer().delivered)


def test_middleware_is_typed() -> None:
    worker = delayq.Worker("redis://127.0.0.1:1")

    @worker.middleware
    async def around(message: delayq.Message, call_next: delayq.worker.CallNext) -> None:
        assert_type(message.id, str)
        await call_next()


def test_settings_are_typed() -> None:
    delayq.Tasks("mails", lease=30.0, max_attempts=3)
    try:
        delayq.Tasks("mails", leese=30.0)  # type: ignore[call-arg]
    except TypeError:
        return
    raise AssertionError("a setting that does not exist was accepted")
