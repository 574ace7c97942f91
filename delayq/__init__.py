"""Deliver messages later, exactly when due: delayed queues for asyncio on Redis or Valkey."""

from delayq._offering import Offer
from delayq.backoff import Backoff
from delayq.client import Client, ClientStatistics, connect
from delayq.codecs import JsonCodec, StringCodec
from delayq.dead_letters import DeadLetter, DeadLetters
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
from delayq.message import Message, Reject, RetryAfter
from delayq.partitioned_queue import PartitionedDeadLetters, PartitionedQueue
from delayq.recurring import Schedule
from delayq.reliable_queue import ReliableQueue, Stats
from delayq.timer import HashedWheelTimer
from delayq.wheel import Timeout
from delayq.worker import Worker

__all__ = [
    "Backoff",
    "BadDelay",
    "BadInput",
    "BadName",
    "Client",
    "ClientStatistics",
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
    "PartitionedDeadLetters",
    "PartitionedQueue",
    "PayloadTooLarge",
    "QueueFull",
    "Receipt",
    "Reject",
    "ReliableQueue",
    "RetryAfter",
    "Schedule",
    "ServerError",
    "ServerRefused",
    "ServerUnavailable",
    "Stats",
    "StringCodec",
    "Timeout",
    "TimerError",
    "TimerFull",
    "TimerStopped",
    "Worker",
    "connect",
]
