"""Deliver messages later, exactly when due: delayed queues for asyncio on Redis or Valkey."""

from delayq.client import Client, ClientStatistics, connect
from delayq.codecs import JsonCodec, StringCodec
from delayq.delayed_queue import DelayedQueue, Receipt
from delayq.deliveries import Delivery
from delayq.errors import (
    BadDelay,
    BadInput,
    BadName,
    Closed,
    CodecError,
    ConfigurationError,
    DecodeError,
    DelayqError,
    EmbeddedServerError,
    EncodeError,
    LeaseLost,
    OutcomeUnknown,
    PayloadTooLarge,
    ServerError,
    ServerRefused,
    ServerUnavailable,
    TimerError,
    TimerFull,
    TimerStopped,
)
from delayq.timer import HashedWheelTimer
from delayq.wheel import Timeout

__all__ = [
    "BadDelay",
    "BadInput",
    "BadName",
    "Client",
    "ClientStatistics",
    "Closed",
    "CodecError",
    "ConfigurationError",
    "DecodeError",
    "DelayedQueue",
    "DelayqError",
    "Delivery",
    "EmbeddedServerError",
    "EncodeError",
    "HashedWheelTimer",
    "JsonCodec",
    "LeaseLost",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "Receipt",
    "ServerError",
    "ServerRefused",
    "ServerUnavailable",
    "StringCodec",
    "Timeout",
    "TimerError",
    "TimerFull",
    "TimerStopped",
    "connect",
]
