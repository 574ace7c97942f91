"""A listener: a handler, the queue it is for, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._durations import Duration, seconds
from delayq._functions import name_of
from delayq._reliable.keys import ReliableKeys
from delayq.codecs import codec_for
from delayq.codecs.protocol import check_codec
from delayq.errors import BadInput, BadName, ConfigurationError
from delayq.worker._retries import OnError, checked
from delayq.worker._signatures import HandlerPlan, plan_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from delayq._reliable.settings import Settings
    from delayq.codecs import Codec

# How long a batch waits for more messages, in seconds, unless the listener says otherwise.
_LINGER = 0.1


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
    settings: Settings
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
    settings: ListenerSettings, handler: Callable[..., Any], known: Collection[Any]
) -> Listener:
    """Return the listener with this handler, for whose parameters there are ``known`` types.

    Raises:
        ConfigurationError: A parameter cannot be filled, an annotation cannot be read, or no codec
            knows the type.
    """
    plan = plan_handler(handler, known, in_batches=settings.batch is not None)
    try:
        codec = codec_for(plan.value) if settings.codec is None else settings.codec
    except ConfigurationError as error:
        raise ConfigurationError(f"{name_of(handler)}: {error}") from error
    return Listener(settings, handler, plan, codec)


def check_settings(
    queue: Any,
    *,
    codec: Codec[Any] | None,
    settings: Settings,
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
    limit = None if timeout is None else seconds(timeout, "timeout")
    if limit == 0:
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
        limit,
        checked(on_error),
        batch,
        seconds(_LINGER if linger is None else linger, "linger"),
    )


def check_count(name: str, count: int) -> None:
    """Raise :class:`~delayq.BadInput` unless ``count`` is an int of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInput(f"{name} must be an int of at least 1, not {count!r}")
