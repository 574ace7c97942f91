"""The errors that handlers raise: instructions to retry, snooze or reject a message or to start it
again, and failures, whose text is stored beside it. Pure.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, NamedTuple

from delayq._durations import Duration, microseconds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from delayq.backoff import Backoff

# Most characters stored of each. The end of a traceback says the most.
_MAX_LINE = 500
_MAX_TEXT = 8000
# The number of errors in a group that its line names.
_MAX_NAMED = 5


class RetryAfter(Exception):
    """Raise this in a handler to retry the message after ``delay``, regardless of the queue's
    backoff.

    The attempt counts like any other failure: after ``max_attempts`` the message becomes a dead
    letter with the reason ``attempts``. To retry any number of times, give the queue
    ``max_attempts=None``.

    Args:
        delay: Seconds or a timedelta.
        reason: Stored with the message.

    Raises:
        BadDelay: As for :meth:`ReliableQueue.offer`.
    """

    def __init__(self, delay: Duration, reason: str = "") -> None:
        super().__init__(delay, reason)
        microseconds(delay)
        self.delay: Duration = delay
        self.reason: str = reason

    def __str__(self) -> str:
        return self.reason or f"retry after {self.delay}"


class Snooze(Exception):
    """Raise this in a handler to handle the message later. The attempt does not count.

    A handler may snooze a message any number of times. If a failure is the reason, raise
    :class:`RetryAfter`, whose attempts count.

    Args:
        delay: Seconds or a timedelta.

    Raises:
        BadDelay: As for :meth:`ReliableQueue.offer`.
    """

    def __init__(self, delay: Duration) -> None:
        super().__init__(delay)
        microseconds(delay)
        self.delay: Duration = delay

    def __str__(self) -> str:
        return f"snooze for {self.delay}"


class Reject(Exception):
    """Raise this in a handler to make the message a dead letter at once.

    Args:
        reason: Stored with the dead letter.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason: str = reason


class Interrupted(BaseException):
    """Raised in a handler that is to end now, and to start again later: let it pass.

    :meth:`Message.save`, :meth:`Message.step` and :meth:`Message.sleep` raise it when their worker
    is stopping, and :meth:`Message.sleep` when it sends the message to wait. Then the message goes
    back to the queue, and the attempt does not count. It is no ``Exception``, so that ``except
    Exception`` lets it pass. A handler that catches it goes on, and its message is settled as its
    end says.

    Attributes:
        delay: For how long the message waits; None if it is due at once.
    """

    def __init__(self, delay: timedelta | None = None) -> None:
        super().__init__(delay)
        self.delay: timedelta | None = delay

    def __str__(self) -> str:
        return "the worker is stopping" if self.delay is None else f"sleep for {self.delay}"


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group, at any depth; for any other error, the error
    itself.
    """
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from errors_in(member)
    else:
        yield error


Instruction = RetryAfter | Snooze | Reject | Interrupted


def instruction_of(error: BaseException) -> Instruction | None:
    """Return the instruction in an error, if any.

    In a group, :class:`Reject` takes precedence, then the longest delay. :class:`Interrupted` is
    one only if there is nothing else.
    """
    delays: list[RetryAfter | Snooze] = []
    interruptions: list[Interrupted] = []
    others = 0
    for member in errors_in(error):
        if isinstance(member, Reject):
            return member
        if isinstance(member, RetryAfter | Snooze):
            delays.append(member)
        elif isinstance(member, Interrupted):
            interruptions.append(member)
        else:
            others += 1
    if interruptions and not delays and not others:
        return interruptions[0]
    return max(delays, key=lambda instruction: microseconds(instruction.delay), default=None)


def is_instruction(error: BaseException | None) -> bool:
    """Return whether an error consists of instructions only."""
    return error is not None and all(isinstance(member, Instruction) for member in errors_in(error))


class RetryRules(NamedTuple):
    """The rules for a message whose attempt has failed.

    Attributes:
        max_attempts: The number of attempts after which it dies, unless it has a limit of its own;
            0 for no limit.
        backoff: Decides when it is retried.
    """

    max_attempts: int
    backoff: Backoff


# The text that is stored


def describe(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; for a group, also the errors
    in it.
    """
    return _describe(error)[:_MAX_LINE]


def pack_error(error: BaseException | str | None) -> str:
    """Return the text to store of an error: its line, a newline, and its traceback or whole text; a
    single line by itself.
    """
    if error is None:
        return ""
    if isinstance(error, str):
        if "\n" not in error:
            return kept_text(error)
        line, text = _line_of(error)[:_MAX_LINE], error
    else:
        line, text = describe(error), "".join(traceback.format_exception(error)).rstrip("\n")
    return f"{_clean(line)}\n{kept_text(text)}"


def kept_text(text: str) -> str:
    """Return the part of a text that is stored: its end."""
    return _clean(text[-_MAX_TEXT:])


def unpack_error(stored: str) -> tuple[str, str]:
    """Return the line and the traceback from the result of :func:`pack_error`."""
    line, newline, text = stored.partition("\n")
    if line.startswith("Traceback"):
        # Stored by another program.
        return _line_of(stored), stored
    return line, text if newline else stored


def _describe(error: BaseException) -> str:
    kind = type(error).__qualname__
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # A SyntaxError begins with the place.
    line = (
        next((line for line in lines if line.partition(":")[0].endswith(kind)), None)
        or _first_line("\n".join(lines))
        or kind
    )
    if isinstance(error, BaseExceptionGroup):
        members = [_describe(member) for member in error.exceptions[:_MAX_NAMED]]
        ellipsis = ", ..." if len(error.exceptions) > _MAX_NAMED else ""
        line = f"{line}: {', '.join(members)}{ellipsis}"
    return line


def _line_of(text: str) -> str:
    """Return the most telling line: the first one, or the error's own in the result of
    ``traceback.format_exc()``.
    """
    lines = text.splitlines()
    headers = [index for index, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[headers[-1] + 1 :] if headers else []
    # Indented lines are the calls.
    return next((line for line in after if line[:1].strip()), None) or _first_line(text)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _clean(text: str) -> str:
    # Characters that UTF-8 cannot encode would fail the call that retries or buries the message.
    return text.encode(errors="replace").decode()
