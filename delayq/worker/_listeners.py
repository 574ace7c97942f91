"""A listener: a handler, the queue it is for, how it runs, and what becomes of a message whose
handler raises. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._durations import Duration, seconds
from delayq._functions import name_of
from delayq._reliable.failures import (
    Interrupted,
    Reject,
    RetryAfter,
    Snooze,
    errors_in,
    instruction_of,
)
from delayq._reliable.keys import ReliableKeys
from delayq.backoff import Backoff
from delayq.codecs import codec_for
from delayq.codecs.protocol import check_codec
from delayq.errors import BadInput, BadName, ConfigurationError
from delayq.worker._injection import HandlerPlan, plan_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from delayq._reliable.settings import HandleSettings
    from delayq.codecs import Codec

# How long a batch waits for more messages, in seconds, unless the listener says otherwise.
_LINGER = 0.1

Reaction = Backoff | RetryAfter | Snooze | Reject | type[Reject]
"""How to treat an error: try again by this backoff, try again after this delay, do so without
counting the attempt, or never try again.
"""
OnError = Mapping[type[BaseException], Reaction]
"""How to treat errors, by class. The most specific class counts."""


@dataclass(frozen=True)
class ListenerSettings:
    """The arguments of ``worker.listener(...)``, checked.

    Attributes:
        queue: The queue's name.
        codec: The queue's codec, if one was given.
        settings: The queue's settings.
        concurrency: Maximum number of handlers at a time.
        timeout: How long a handler may take, in seconds.
        on_error: How to treat errors.
        batch: The largest number of messages that a handler takes at a time; None if it takes one.
        linger: How long a batch that is not full waits for more messages, in seconds.
    """

    queue: str
    codec: Codec[Any] | None
    settings: HandleSettings
    concurrency: int
    timeout: float | None
    on_error: OnError
    batch: int | None = None
    linger: float = 0.0


@dataclass(frozen=True, eq=False)
class Listener:
    """A handler, the queue it is for, and how it runs.

    Attributes:
        settings: The arguments of ``worker.listener(...)``.
        handler: The function to call.
        plan: How the handler is called.
        codec: The queue's codec, which comes from the type that the handler takes if none was
            given.
        task: The name of the task that it calls, if it calls one.
    """

    settings: ListenerSettings
    handler: Callable[..., Any]
    plan: HandlerPlan
    codec: Codec[Any]
    task: str | None = None


def listen(
    settings: ListenerSettings, handler: Callable[..., Any], injectable: Collection[Any]
) -> Listener:
    """Return the listener with this handler, whose parameters may have ``injectable`` types.

    Raises:
        ConfigurationError: A parameter cannot be filled, an annotation cannot be read, or no codec
            knows the type.
    """
    plan = plan_handler(handler, injectable, in_batches=settings.batch is not None)
    try:
        codec = codec_for(plan.value) if settings.codec is None else settings.codec
    except ConfigurationError as error:
        raise ConfigurationError(f"{name_of(handler)}: {error}") from error
    return Listener(settings, handler, plan, codec)


def check_settings(
    queue: Any,
    *,
    codec: Codec[Any] | None,
    settings: HandleSettings,
    concurrency: int,
    timeout: Duration | None,
    on_error: OnError | None,
    batch: int | None = None,
    linger: Duration | None = None,
) -> ListenerSettings:
    """Check everything that can be checked before the handler is known.

    Raises:
        BadName, BadInput, ConfigurationError: A setting is invalid.
    """
    if not isinstance(queue, str):
        if callable(queue):
            raise ConfigurationError(
                f'the queue name is missing: write @worker.listener("NAME") above {name_of(queue)}'
            )
        raise BadName(f"a queue's name must be a str, not {queue!r}")
    # Not necessarily its name on the server, but this shows whether it can be a name at all.
    ReliableKeys.of(queue)
    check_codec(codec)
    settings.check()
    check_count("concurrency", concurrency)
    timeout_s = None if timeout is None else seconds(timeout, "timeout")
    if timeout_s == 0:
        raise BadInput("timeout must be more than 0")
    if batch is not None:
        check_count("batch", batch)
    elif linger is not None:
        raise BadInput("linger is how long a batch waits for more messages: pass batch as well")
    return ListenerSettings(
        queue,
        codec,
        settings,
        concurrency,
        timeout_s,
        check_on_error(on_error),
        batch,
        seconds(_LINGER if linger is None else linger, "linger"),
    )


def check_count(name: str, count: int) -> None:
    """Raise :class:`~delayq.BadInput` unless ``count`` is an int of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInput(f"{name} must be an int of at least 1, not {count!r}")


# After a handler has raised


@dataclass(frozen=True)
class Retry:
    """Try the message again, by ``backoff``, as ``later`` says, or by the queue's backoff."""

    backoff: Backoff | None = None
    later: RetryAfter | Snooze | Interrupted | None = None


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
    instruction = instruction_of(error)
    if instruction is not None:
        return _decide(instruction, error, is_raised=True)
    decisions = [
        _decide(reaction, member)
        for member in errors_in(error)
        if (reaction := _reaction_to(member, on_error)) is not None
    ]
    burial = next((decision for decision in decisions if isinstance(decision, Bury)), None)
    return burial or next(iter(decisions), None) or _decide(_reaction_to(error, on_error), error)


def _reaction_to(error: BaseException, on_error: OnError) -> Reaction | None:
    return next((on_error[kind] for kind in type(error).__mro__ if kind in on_error), None)


def _decide(
    reaction: Reaction | Interrupted | None, error: BaseException, *, is_raised: bool = False
) -> Retry | Bury:
    match reaction:
        case None:
            return Retry()
        case Backoff() as backoff:
            return Retry(backoff=backoff)
        case RetryAfter() | Snooze() | Interrupted() as later:
            return Retry(later=later)
        case Reject(reason=reason) if reason:
            return Bury(reason)
        case _:
            return Bury("rejected" if is_raised else type(error).__name__)


def check_on_error(on_error: OnError | None) -> OnError:
    """Return a copy of ``on_error``, after checking it.

    Raises:
        BadInput: It is not a valid mapping.
    """
    if on_error is not None and not isinstance(on_error, Mapping):
        raise BadInput(f"on_error must be a dict of exception classes, not {on_error!r}")
    reactions = dict(on_error or {})
    for kind, reaction in reactions.items():
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise BadInput(f"the keys of on_error must be exception classes, not {kind!r}")
        if reaction is not Reject and not isinstance(
            reaction, Backoff | RetryAfter | Snooze | Reject
        ):
            raise BadInput(
                f"on_error must map {kind.__name__} to a Backoff, RetryAfter, Snooze or Reject, not"
                f" to {reaction!r}"
            )
    return reactions
