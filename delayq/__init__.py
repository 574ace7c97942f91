"""Deliver messages later, exactly when due: delayed queues for asyncio on Redis or Valkey."""

import typing

from delayq import _lazy_imports
from delayq.errors import (
    BadArguments,
    BadDelay,
    BadInput,
    BadName,
    BatchTimeout,
    Closed,
    CodecError,
    ConfigurationError,
    DecodeError,
    DelayqError,
    DuplicateMessage,
    EmbeddedServerError,
    EncodeError,
    LeaseLost,
    MessageCancelled,
    MessageFailed,
    NoBatch,
    NoResult,
    NotDurable,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
    ResultTimeout,
    ServerError,
    ServerRefused,
    ServerUnavailable,
    TimerError,
    TimerFull,
    TimerStopped,
    UnknownTask,
)

if typing.TYPE_CHECKING:
    # Modules: their names are not repeated here.
    from delayq import admin as admin
    from delayq import backoff as backoff
    from delayq import client as client
    from delayq import codecs as codecs
    from delayq import errors as errors
    from delayq import instrumentation as instrumentation
    from delayq import outbox as outbox
    from delayq import stats as stats
    from delayq import sync as sync
    from delayq import tasks as tasks
    from delayq import testing as testing
    from delayq import worker as worker
    from delayq._dashboard import dashboard
    from delayq._redisson.delivery import Delivery
    from delayq._redisson.queue import DelayedQueue, Receipt
    from delayq._reliable.batches import Batch, BatchStatus
    from delayq._reliable.dead_letters import DeadLetter, DeadLetters
    from delayq._reliable.failures import Interrupted, Reject, RetryAfter, Snooze
    from delayq._reliable.following import MessageEvent
    from delayq._reliable.groups import Group, Groups
    from delayq._reliable.limits import Limit
    from delayq._reliable.message import Message
    from delayq._reliable.offer import Offer
    from delayq._reliable.outcomes import Attempt, MessageHistory
    from delayq._reliable.queue import ReliableQueue
    from delayq._reliable.schedules import Schedule
    from delayq._reliable.settings import QueueSettings
    from delayq._timer.timer import HashedWheelTimer
    from delayq._timer.wheel import Timeout
    from delayq._version import __version__ as __version__
    from delayq.backoff import Backoff
    from delayq.client import Client, connect
    from delayq.codecs import JsonCodec, StringCodec
    from delayq.stats import ClientStats, QueueDepth, QueueStats
    from delayq.tasks import Task, Tasks
    from delayq.worker import Worker

__all__ = [
    "Attempt",
    "Backoff",
    "BadArguments",
    "BadDelay",
    "BadInput",
    "BadName",
    "Batch",
    "BatchStatus",
    "BatchTimeout",
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
    "Group",
    "Groups",
    "HashedWheelTimer",
    "Interrupted",
    "JsonCodec",
    "LeaseLost",
    "Limit",
    "Message",
    "MessageCancelled",
    "MessageEvent",
    "MessageFailed",
    "MessageHistory",
    "NoBatch",
    "NoResult",
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
    "ResultTimeout",
    "RetryAfter",
    "Schedule",
    "ServerError",
    "ServerRefused",
    "ServerUnavailable",
    "Snooze",
    "StringCodec",
    "Task",
    "Tasks",
    "Timeout",
    "TimerError",
    "TimerFull",
    "TimerStopped",
    "UnknownTask",
    "Worker",
    "connect",
    "dashboard",
]

# Each is loaded when it is asked for: together they take as long as asyncio does.
_HOMES = {
    "Attempt": "_reliable.outcomes",
    "Backoff": "backoff",
    "Batch": "_reliable.batches",
    "BatchStatus": "_reliable.batches",
    "Client": "client",
    "ClientStats": "stats",
    "DeadLetter": "_reliable.dead_letters",
    "DeadLetters": "_reliable.dead_letters",
    "DelayedQueue": "_redisson.queue",
    "Delivery": "_redisson.delivery",
    "Group": "_reliable.groups",
    "Groups": "_reliable.groups",
    "HashedWheelTimer": "_timer.timer",
    "Interrupted": "_reliable.failures",
    "JsonCodec": "codecs",
    "Limit": "_reliable.limits",
    "Message": "_reliable.message",
    "MessageEvent": "_reliable.following",
    "MessageHistory": "_reliable.outcomes",
    "Offer": "_reliable.offer",
    "QueueDepth": "stats",
    "QueueSettings": "_reliable.settings",
    "QueueStats": "stats",
    "Receipt": "_redisson.queue",
    "Reject": "_reliable.failures",
    "ReliableQueue": "_reliable.queue",
    "RetryAfter": "_reliable.failures",
    "Schedule": "_reliable.schedules",
    "Snooze": "_reliable.failures",
    "StringCodec": "codecs",
    "Task": "tasks",
    "Tasks": "tasks",
    "Timeout": "_timer.wheel",
    "Worker": "worker",
    "__version__": "_version",
    "connect": "client",
    "dashboard": "_dashboard",
    # Modules that are used without an import of their own.
    "admin": ".",
    "backoff": ".",
    "client": ".",
    "codecs": ".",
    "instrumentation": ".",
    "outbox": ".",
    "stats": ".",
    "sync": ".",
    "tasks": ".",
    "testing": ".",
    "worker": ".",
}

if not typing.TYPE_CHECKING:
    __getattr__, __dir__ = _lazy_imports.names(__name__, _HOMES)
