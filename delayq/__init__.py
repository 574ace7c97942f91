"""Deliver messages later, exactly when due: delayed queues for asyncio on Redis or Valkey."""

import typing

from delayq._dashboard import dashboard
from delayq._delayed.delivery import Delivery
from delayq._delayed.queue import DelayedQueue, Receipt
from delayq._reliable.dead_letters import DeadLetter, DeadLetters
from delayq._reliable.message import Message, Reject, RetryAfter
from delayq._reliable.offering import Offer
from delayq._reliable.queue import ReliableQueue
from delayq._reliable.schedules import Schedule
from delayq._reliable.settings import QueueSettings
from delayq._timer.timer import HashedWheelTimer
from delayq._timer.wheel import Timeout
from delayq.backoff import Backoff
from delayq.client import Client, connect
from delayq.codecs import JsonCodec, StringCodec
from delayq.errors import (
    BadDelay,
    BadInput,
    BadName,
    Closed,
    CodecError,
    ConfigurationError,
    DecodeError,
    DelayqError,
    DuplicateMessage,
    EmbeddedServerError,
    EncodeError,
    LeaseLost,
    NotDurable,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
    ServerError,
    ServerRefused,
    ServerUnavailable,
    TimerError,
    TimerFull,
    TimerStopped,
)
from delayq.stats import ClientStats, QueueDepth, QueueStats

__all__ = [
    "Backoff",
    "BadDelay",
    "BadInput",
    "BadName",
    "Client",
    "ClientStats",
    "Closed",
    "CodecError",
    "ConfigurationError",
    "DeadLetter",
    "DeadLetters",
    "DecodeError",
    "DelayedQueue",
    "DelayqError",
    "Delivery",
    "DuplicateMessage",
    "EmbeddedServerError",
    "EncodeError",
    "HashedWheelTimer",
    "JsonCodec",
    "LeaseLost",
    "Message",
    "NotDurable",
    "Offer",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "QueueDepth",
    "QueueFull",
    "QueueSettings",
    "QueueStats",
    "Receipt",
    "Reject",
    "ReliableQueue",
    "RetryAfter",
    "Schedule",
    "ServerError",
    "ServerRefused",
    "ServerUnavailable",
    "StringCodec",
    "Timeout",
    "TimerError",
    "TimerFull",
    "TimerStopped",
    "Worker",
    "connect",
    "dashboard",
]

if typing.TYPE_CHECKING:
    from delayq.worker import Worker
else:

    def __getattr__(name: str) -> object:
        # Loaded on demand, to spare programs that only offer: it takes an eighth of the time of all
        # the other imports.
        if name == "Worker":
            from delayq.worker import Worker  # noqa: PLC0415

            globals()[name] = Worker
            return Worker
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
