"""Decides what becomes of a message whose handler has raised. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from delayq._reliable.message import Reject, RetryAfter, Snooze, errors_in, instruction_of
from delayq.backoff import Backoff
from delayq.errors import BadInput

Answer = Backoff | RetryAfter | Snooze | Reject | type[Reject]
"""How to treat an error: try again by this backoff, try again after this delay, do so without
counting the attempt, or never try again.
"""
OnError = Mapping[type[BaseException], Answer]
"""How to treat errors, by class. The most specific class counts."""


@dataclass(frozen=True)
class Retry:
    """Try the message again, by ``backoff``, after ``delay``, or by the queue's backoff."""

    backoff: Backoff | None = None
    delay: RetryAfter | Snooze | None = None


@dataclass(frozen=True)
class Bury:
    """Make the message a dead letter."""

    reason: str


def decide_retry(error: BaseException, on_error: OnError) -> Retry | Bury:
    """Decide what becomes of a message.

    An instruction that the handler raises takes precedence. In an exception group, each error is
    looked up: one that is never to be tried again decides; failing that, the first one that
    ``on_error`` knows; failing that, the group itself is looked up.
    """
    said = instruction_of(error)
    if said is not None:
        return _decide(said, error, said=True)
    found = [
        _decide(answer, one)
        for one in errors_in(error)
        if (answer := _answer(one, on_error)) is not None
    ]
    bury = next((one for one in found if isinstance(one, Bury)), None)
    return bury or next(iter(found), None) or _decide(_answer(error, on_error), error)


def _answer(error: BaseException, on_error: OnError) -> Answer | None:
    return next((on_error[kind] for kind in type(error).__mro__ if kind in on_error), None)


def _decide(answer: Answer | None, error: BaseException, *, said: bool = False) -> Retry | Bury:
    match answer:
        case None:
            return Retry()
        case Backoff() as backoff:
            return Retry(backoff=backoff)
        case RetryAfter() | Snooze() as later:
            return Retry(delay=later)
        case Reject(reason=reason) if reason:
            return Bury(reason)
        case _:
            return Bury("rejected" if said else type(error).__name__)


def checked(on_error: OnError | None) -> OnError:
    """Return a copy of ``on_error``, after checking it.

    Raises:
        BadInput: It is not a valid mapping.
    """
    if on_error is not None and not isinstance(on_error, Mapping):
        raise BadInput(f"on_error must be a dict of exception classes, not {on_error!r}")
    result = dict(on_error or {})
    for kind, answer in result.items():
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise BadInput(f"the keys of on_error must be exception classes, not {kind!r}")
        if answer is not Reject and not isinstance(answer, Backoff | RetryAfter | Snooze | Reject):
            raise BadInput(
                f"on_error must map {kind.__name__} to a Backoff, RetryAfter, Snooze or Reject, not"
                f" to {answer!r}"
            )
    return result
