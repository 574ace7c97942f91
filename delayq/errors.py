"""The errors that delayq raises on purpose.

::

    DelayqError
    ├── BadInput (ValueError)            an argument is invalid; nothing was written
    │   ├── BadArguments (TypeError)     a task's function does not take these arguments
    │   ├── BadDelay                     negative, NaN, infinite, too far away, or a naive datetime
    │   ├── BadName                      empty, or its keys would not share one cluster slot
    │   └── PayloadTooLarge              encoded value over the queue's max_payload
    ├── CodecError
    │   ├── EncodeError (ValueError)     the codec cannot encode this value; nothing was written
    │   └── DecodeError                  bytes from the server that are not in this codec's format
    │       └── UnknownTask              a call of a task that is not registered here
    ├── ConfigurationError               no address, an unknown scheme, a missing extra
    │   └── EmbeddedServerError          the private server did not start
    ├── Closed                           the client or queue is closed, or not open yet
    ├── DuplicateMessage                 a live message has that id; nothing was written
    ├── LeaseLost                        the lease has ended: another worker may have the message
    │   └── MessageCancelled             the message was cancelled while you had it
    ├── MessageFailed                    the message whose result you want is a dead letter
    ├── NoResult                         the message whose result you want is unknown
    ├── ResultTimeout (TimeoutError)     the message whose result you want has not ended yet
    ├── NoBatch                          there is no batch of that id
    ├── BatchTimeout (TimeoutError)      the messages of the batch have not all ended yet
    ├── QueueFull                        the queue holds max_size messages; nothing was written
    ├── NotDurable                       stored, but not as safely as was asked for
    ├── ServerError
    │   ├── ServerUnavailable            no server answers; nothing was written
    │   ├── OutcomeUnknown               sent, but the reply was lost: it may have been carried out
    │   └── ServerRefused                an error reply (memory, permission, a key of another type)
    └── TimerError (RuntimeError)
        ├── TimerFull                    max_pending_timeouts are pending already
        └── TimerStopped                 the timer was stopped

If redis-py raised first, ``__cause__`` holds its error.
"""

from __future__ import annotations

from typing import Any


class DelayqError(Exception):
    """The base class of all errors that delayq raises.

    They can be pickled and copied.

    Attributes:
        batch_id: The id of the batch, if raised by :meth:`~delayq.ReliableQueue.offer_batch` when
            the server had it already, or may have had it: its status tells how much was stored, and
            it can be cancelled. None for all other errors.
    """

    batch_id: str | None = None

    def __copy__(self) -> DelayqError:
        return _remake(type(self), self.args, vars(self))

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = dict(vars(self))
        if "stored" in attributes:
            # A receipt belongs to its queue, in this process.
            attributes["stored"] = tuple(
                getattr(receipt, "id", receipt) for receipt in attributes["stored"]
            )
        return _remake, (type(self), self.args, attributes)


def _remake(
    kind: type[DelayqError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> DelayqError:
    """Return an error without calling its ``__init__``, which may take other arguments."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _summary_of(cause: BaseException) -> str:
    """Return the class of an error, and what it says if it is one of delayq's: others quote values,
    as that of ``int("secret")`` does.
    """
    kind = type(cause)
    if isinstance(cause, DelayqError):
        return f"{kind.__name__}: {cause}"
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


class BadInput(DelayqError, ValueError):
    """An argument is invalid. Nothing was written."""


class BadArguments(BadInput, TypeError):
    """The function of a task does not take these arguments. Nothing was written."""


class BadDelay(BadInput):
    """A delay is negative, NaN, infinite or past 2**53 ms, or a datetime has no timezone."""


class BadName(BadInput):
    """A queue name is empty, or its keys would not share one cluster slot."""


class PayloadTooLarge(BadInput):
    """An encoded value is larger than the queue's ``max_payload``.

    Attributes:
        size: The encoded size in bytes.
        limit: The queue's ``max_payload`` in bytes.
        subject: The name of the part that is too large.
    """

    def __init__(self, size: int, limit: int, subject: str = "the encoded value") -> None:
        super().__init__(size, limit, subject)
        self.size = size
        self.limit = limit
        self.subject = subject

    def __str__(self) -> str:
        return (
            f"{self.subject} has {self.size} bytes, more than max_payload={self.limit}: "
            "store it elsewhere and offer a reference"
        )


class CodecError(DelayqError):
    """A codec failed to encode or decode a value."""


class EncodeError(CodecError, ValueError):
    """A value cannot be encoded by the queue's codec. Nothing was written."""


class DecodeError(CodecError):
    """Bytes from the server are not in the format that the queue's codec writes.

    Attributes:
        codec: The codec's class name.
        payload: The complete bytes. They may be private, so the error message leaves them out.
        fault: The reason, which quotes none of them. If it is empty, the error message names the
            class of ``__cause__``, whose text may be private too.
        queue: The queue's name; empty if unknown.
        id: The message's id; empty if unknown.
    """

    def __init__(self, codec: str, payload: bytes, fault: str = "") -> None:
        super().__init__(codec, payload)
        self.codec = codec
        self.payload = payload
        self.fault = fault
        self.queue = ""
        self.id = ""

    @property
    def reason(self) -> str:
        """The fault: the same text for all messages that fail alike, as dead letters are counted
        by it.
        """
        cause = self.__cause__
        fault = self.fault or ("" if cause is None else _summary_of(cause))
        return f"{self.codec} cannot decode the payload{': ' if fault else ''}{fault}"

    def __str__(self) -> str:
        source = [f"queue {self.queue!r}"] * bool(self.queue) + [f"message {self.id!r}"] * bool(
            self.id
        )
        if not source:
            return self.reason
        return f"{', '.join(source)}: {self.reason}; was it offered with another codec or type?"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codec!r}, {len(self.payload)} bytes)"


class UnknownTask(DecodeError):
    """A message calls a task that is not registered here.

    Attributes:
        task: The name of the task.
    """

    def __init__(self, task: str, payload: bytes) -> None:
        super().__init__("TaskCodec", payload)
        self.task = task

    @property
    def reason(self) -> str:
        """The fault, and what to do."""
        return (
            f"no task is registered as {self.task!r}: register one, or add the name to the aliases"
            " of the task that has replaced it"
        )

    def __str__(self) -> str:
        return self.reason


class ConfigurationError(DelayqError):
    """A setting is missing or wrong: no address, an unknown scheme, a missing extra."""


class EmbeddedServerError(ConfigurationError):
    """The private server did not start. The message gives the reason."""


class Closed(DelayqError):
    """The client or the queue is closed, or has not been opened with ``async with``."""


class DuplicateMessage(DelayqError):
    """A live message, or one that was handled within ``dedup_window``, already has that id.

    Nothing was written.

    Attributes:
        ids: The ids that were refused.
        stored: The ids of the messages that were stored, if raised by
            :meth:`~delayq.ReliableQueue.offer_many`.
    """

    def __init__(self, ids: tuple[str, ...], stored: tuple[str, ...] = ()) -> None:
        super().__init__(ids, stored)
        self.ids = ids
        self.stored = stored

    def __str__(self) -> str:
        if len(self.ids) == 1:
            return f"the id {self.ids[0]!r} is already taken"
        return f"{len(self.ids)} ids are already taken; the first is {self.ids[0]!r}"


class QueueFull(DelayqError):
    """The queue holds as many live messages as ``max_size`` allows.

    Nothing was written for the ids named.

    Attributes:
        ids: The ids that were refused.
        stored: As for :class:`DuplicateMessage`.
        queue: The queue's name.
    """

    def __init__(self, ids: tuple[str, ...], stored: tuple[str, ...] = (), queue: str = "") -> None:
        super().__init__(ids, stored, queue)
        self.ids = ids
        self.stored = stored
        self.queue = queue

    def __str__(self) -> str:
        name = f"queue {self.queue!r}" if self.queue else "the queue"
        count = len(self.ids)
        messages = "1 message was" if count == 1 else f"{count} messages were"
        return (
            f"{name} is full: {messages} not stored; add workers, offer later, open the queue with"
            ' when_full="wait", or raise max_size'
        )


class NotDurable(DelayqError):
    """Messages are stored and will be delivered, but within 2 s too few replicas confirmed them, or
    the disk did not.

    If the server dies now, they may be lost with it. Offering them again under the same ids is
    safe.

    Attributes:
        stored: The ids of these messages, or their receipts if raised by a
            :class:`~delayq.DelayedQueue`; in an error that was pickled, the ids of the receipts.
    """

    def __init__(self, message: str, stored: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.stored = stored


class LeaseLost(DelayqError):
    """You no longer hold the message: its lease has ended, or it was already acknowledged.

    Nothing was changed.
    """


class MessageCancelled(LeaseLost):
    """The message was cancelled while you had it, by ``cancel(id, running=True)``: it is gone."""


class MessageFailed(DelayqError):
    """The message became a dead letter, so it has no result.

    Attributes:
        id: The message's id.
        reason: Why it died, as :attr:`delayq.DeadLetter.reason` tells it.
        error: The last error of its handler: one line, a newline, and the traceback; empty if
            there was none.
    """

    def __init__(self, id: str, reason: str, error: str = "") -> None:  # noqa: A002
        super().__init__(id, reason, error)
        self.id = id
        self.reason = reason
        self.error = error

    def __str__(self) -> str:
        line = self.error.partition("\n")[0]
        return f"message {self.id!r} failed ({self.reason})" + (f": {line}" if line else "")


class NoResult(DelayqError):
    """There is no result of the message, and none will come.

    Attributes:
        id: The message's id.
        keeps: Whether the queue keeps results.
    """

    def __init__(self, id: str, *, keeps: bool) -> None:  # noqa: A002
        super().__init__(id)
        self.id = id
        self.keeps = keeps

    def __str__(self) -> str:
        if not self.keeps:
            return (
                f"there is no result of message {self.id!r}: the queue keeps none; give it"
                " keep=timedelta(days=1), for example"
            )
        return (
            f"there is no result of message {self.id!r}: it is kept no longer, or the message was"
            " cancelled, purged, dropped, or never offered"
        )


class ResultTimeout(DelayqError, TimeoutError):
    """The message has not been handled in time. It may be handled later.

    Attributes:
        id: The message's id.
        timeout: How long the call has waited, in seconds.
    """

    def __init__(self, id: str, timeout: float) -> None:  # noqa: A002
        super().__init__(id, timeout)
        self.id = id
        self.timeout = timeout

    def __str__(self) -> str:
        return f"message {self.id!r} was not finished within {self.timeout:g} s"


class NoBatch(DelayqError):
    """There is no batch of that id, or it is remembered no longer.

    Attributes:
        id: The batch's id.
    """

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id)
        self.id = id

    def __str__(self) -> str:
        return f"there is no batch {self.id!r}, or it has ended, and is remembered no longer"


class BatchTimeout(DelayqError, TimeoutError):
    """The messages of the batch have not all ended in time. They may end later.

    Attributes:
        id: The batch's id.
        timeout: How long the call has waited, in seconds.
    """

    def __init__(self, id: str, timeout: float) -> None:  # noqa: A002
        super().__init__(id, timeout)
        self.id = id
        self.timeout = timeout

    def __str__(self) -> str:
        return f"batch {self.id!r} was not finished within {self.timeout:g} s"


class ServerError(DelayqError):
    """The server could not be reached, or replied with an error."""


class ServerUnavailable(ServerError):
    """No server answers at the address. The call was not carried out, so it is safe to repeat
    it.
    """


class OutcomeUnknown(ServerError):
    """The call was sent but its reply was lost: it may or may not have been carried out.

    Attributes:
        stored: The receipts of the messages known to be stored, if raised by
            :meth:`~delayq.DelayedQueue.offer_many`; in an error that was pickled, their ids.
    """

    def __init__(self, message: str, stored: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.stored = stored


class ServerRefused(ServerError):
    """The server replied with an error: out of memory, no permission, a key of another type.

    Or it is not the expected server.
    """


class TimerError(DelayqError, RuntimeError):
    """The timer does not accept a new timeout."""


class TimerFull(TimerError):
    """``max_pending_timeouts`` timeouts are already pending. Cancel some, or try again later."""


class TimerStopped(TimerError):
    """The timer has been stopped and accepts no new timeouts."""
