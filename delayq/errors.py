"""Everything that delayq raises on purpose.

::

    DelayqError
    ├── BadInput (ValueError)            what you passed cannot work; nothing was written
    │   ├── BadDelay                     negative, NaN, infinite, too far away, or a naive datetime
    │   ├── BadName                      empty, or its keys would not share one cluster slot
    │   └── PayloadTooLarge              encoded value over the queue's max_payload
    ├── CodecError
    │   ├── EncodeError (ValueError)     the codec cannot encode this value; nothing was written
    │   └── DecodeError                  what came from the server is not what this codec writes
    ├── ConfigurationError               no address, an unknown scheme, a missing extra
    │   └── EmbeddedServerError          the private server did not start
    ├── Closed                           the client or queue is closed, or not open yet
    ├── DuplicateMessage                 a live message has that id; nothing was written
    ├── LeaseLost                        the lease has ended: another worker may have the message now
    ├── QueueFull                        the queue has max_size messages; nothing was written
    ├── NotDurable                       stored, but not as safely as was asked for
    ├── ServerError
    │   ├── ServerUnavailable            nobody answers; nothing was written
    │   ├── OutcomeUnknown               the call was sent and its answer lost: it may have been carried out
    │   └── ServerRefused                the server answered no (memory, permission, a key of a foreign type)
    └── TimerError (RuntimeError)
        ├── TimerFull                    max_pending_timeouts are pending already
        └── TimerStopped                 the timer was stopped

Where redis-py raised first, its error is the ``__cause__``.
"""

from __future__ import annotations

from typing import Any


class DelayqError(Exception):
    """The root of this tree."""


class BadInput(DelayqError, ValueError):
    """An argument cannot work. Nothing was written."""


class BadDelay(BadInput):
    """A delay is negative, NaN, infinite or past 2**53 ms, or a datetime has no timezone."""


class BadName(BadInput):
    """A queue name is empty, or its keys would not share one cluster slot."""


class PayloadTooLarge(BadInput):
    """An encoded value is larger than the queue's ``max_payload``.

    Attributes:
        size: The encoded size in bytes.
        limit: The queue's ``max_payload`` in bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"the encoded value has {self.size} bytes, over max_payload={self.limit}; store it elsewhere and offer a reference"


class CodecError(DelayqError):
    """A codec could not do its work."""


class EncodeError(CodecError, ValueError):
    """A value cannot be encoded by the queue's codec. Nothing was written."""


class DecodeError(CodecError):
    """Bytes from the server are not what the queue's codec writes.

    Attributes:
        codec: The codec's class name.
        payload: The bytes, whole. They are kept out of the message, for they may be private: it shows the first four, which
            tell formats apart.
    """

    def __init__(self, codec: str, payload: bytes) -> None:
        super().__init__(codec, payload)
        self.codec = codec
        self.payload = payload

    def __str__(self) -> str:
        return f"{self.codec} cannot decode {len(self.payload)} bytes that begin with {self.payload[:4].hex(' ') or 'nothing'}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codec!r}, {len(self.payload)} bytes)"


class ConfigurationError(DelayqError):
    """delayq was not told enough, or not right: no address, an unknown scheme, a missing extra."""


class EmbeddedServerError(ConfigurationError):
    """The private server did not start. The message says why."""


class Closed(DelayqError):
    """The client or the queue is closed, or was not opened with ``async with``."""


class DuplicateMessage(DelayqError):
    """A live message has that id already, or one that was handled within ``dedup_window``. Nothing was written.

    Attributes:
        ids: The ids that were refused.
        stored: For :meth:`~delayq.ReliableQueue.offer_many`: the ids of the messages that were stored.
    """

    def __init__(self, ids: tuple[str, ...], stored: tuple[str, ...] = ()) -> None:
        super().__init__(ids, stored)
        self.ids = ids
        self.stored = stored

    def __str__(self) -> str:
        return f"{len(self.ids)} messages have an id that is taken, the first {self.ids[0]!r}"


class QueueFull(DelayqError):
    """The queue has as many live messages as its ``max_size`` allows. Nothing was written for the ids named.

    Attributes:
        ids: The ids that were refused.
        stored: For :meth:`~delayq.ReliableQueue.offer_many`: the ids of the messages that were stored.
    """

    def __init__(self, ids: tuple[str, ...], stored: tuple[str, ...] = ()) -> None:
        super().__init__(ids, stored)
        self.ids = ids
        self.stored = stored

    def __str__(self) -> str:
        return f"the queue is full: {len(self.ids)} messages were not stored"


class NotDurable(DelayqError):
    """Messages are stored, and will be delivered, but within 2 s too few replicas have them, or the disk has not.

    A server that dies now may take them with it. Offering them again under the same ids is safe.

    Attributes:
        stored: The ids of these messages, or the receipts that a :class:`~delayq.DelayedQueue` gives for them.
    """

    def __init__(self, message: str, stored: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.stored = stored


class LeaseLost(DelayqError):
    """The message is not ours any more: its lease ended, or it was acknowledged already. Nothing was changed."""


class ServerError(DelayqError):
    """The server could not be asked, or answered with an error."""


class ServerUnavailable(ServerError):
    """Nobody answers at the address. The call was not carried out: repeating it is safe."""


class OutcomeUnknown(ServerError):
    """The call was sent and its answer lost: it may have been carried out, or not.

    Attributes:
        stored: For :meth:`~delayq.DelayedQueue.offer_many`: the receipts of the messages known to be stored.
    """

    def __init__(self, message: str, stored: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.stored = stored


class ServerRefused(ServerError):
    """The server answered with an error: out of memory, no permission, a key of a foreign type. Or it is not who it should be."""


class TimerError(DelayqError, RuntimeError):
    """A timer refuses a new timeout."""


class TimerFull(TimerError):
    """As many timeouts are pending as ``max_pending_timeouts`` allows. Cancel some, or come back later."""


class TimerStopped(TimerError):
    """The timer was stopped and takes no new timeouts."""
