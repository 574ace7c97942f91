"""Notifies observers such as metrics and traces of what a client does; free if there are none."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_log = logging.getLogger("delayq")

Around = AbstractContextManager[object] | None


@dataclass(slots=True)
class OfferEvent:
    """One call that offers messages.

    Attributes:
        queue: The queue it offers to.
        kind: ``"reliable"``, or ``"delayed"`` for Redisson's format, which has no headers.
        count: The number of messages.
        batch: Whether it is an ``offer_many``.
        delay: Seconds until the message is due; None in a batch.
        headers: Headers that you add here go to each message that has no header of that name.
            Ignored for a delayed queue.
        ids: The ids of the messages, once they are stored.
    """

    queue: str
    kind: Literal["reliable", "delayed"]
    count: int
    batch: bool
    delay: float | None
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    ids: Sequence[str] = ()


class Observer:
    """Override the methods you need, and pass an instance to :meth:`delayq.Client.observe`.

    The others cost nothing. Methods are called in the event loop and must not block. Errors that
    they raise are logged, and harm no message.
    """

    def sending(self, sending: OfferEvent) -> Around:
        """Wrap a call that offers messages.

        The context manager you return is entered before the call and left after it, with its error
        if it has one.
        """
        del sending
        return None

    def handling(self, queue: str, message: Any) -> Around:
        """Wrap the handling of a message of a reliable queue, by ``async with message`` or a
        worker.

        The context manager you return is entered before the handling and left after it, with the
        error if it failed; the handler sees the context variables that it sets.
        """
        del queue, message
        return None

    def handled(self, queue: str, seconds: float, error: BaseException | None) -> None:
        """Observe that the handling of a message of a reliable queue has ended, ``seconds`` after
        it began. One that was given back by :meth:`~delayq.Message.release` was not handled.

        This costs less than :meth:`handling`.

        Args:
            queue: The queue's name.
            seconds: The time until the block, or the worker's handler, ended, before the message
                is acknowledged or retried.
            error: The error it ended with, which may be an instruction such as
                :class:`~delayq.RetryAfter`; None if it ended well.
        """
        del queue, seconds, error

    def delivered(self, queue: str, late: float) -> None:
        """Observe a message of a reliable queue being handed out, ``late`` seconds after it was due
        by the server's clock.
        """
        del queue, late


_EVENTS = ("delivered", "handled", "handling", "sending")


class Hooks:
    """The observers of one client, by the events they observe.

    Attributes:
        around_handling: Whether any observer wants to know when messages are handled.
    """

    __slots__ = (*_EVENTS, "around_handling")

    def __init__(self) -> None:
        self.around_handling: bool = False
        self.sending: tuple[Callable[[OfferEvent], Around], ...] = ()
        self.handling: tuple[Callable[[str, Any], Around], ...] = ()
        self.handled: tuple[Callable[[str, float, BaseException | None], object], ...] = ()
        self.delivered: tuple[Callable[[str, float], object], ...] = ()

    def add(self, observer: Observer) -> None:
        """Notify an observer from now on."""
        for name in _EVENTS:
            # A method that is not overridden is not called.
            if getattr(type(observer), name) is not getattr(Observer, name):
                setattr(self, name, (*getattr(self, name), getattr(observer, name)))
        self.around_handling = bool(self.handling or self.handled)

    def remove(self, observer: Observer) -> None:
        """Stop notifying an observer. Does nothing if it is not registered."""
        for name in _EVENTS:
            methods = (method for method in getattr(self, name) if method.__self__ is not observer)
            setattr(self, name, tuple(methods))
        self.around_handling = bool(self.handling or self.handled)

    @contextmanager
    def around_sending(self, sending: OfferEvent) -> Iterator[OfferEvent]:
        """Notify observers of a call that offers, which is made in this block."""
        observation = Observation()
        for observe in self.sending:
            observation.begin(observe, sending)
        try:
            yield sending
        except BaseException as error:
            observation.end(error)
            raise
        observation.end(None)

    def begin_handling(self, queue: str, message: Any) -> Observation:
        """Notify observers that a message is handled, until :meth:`Observation.end`."""
        observation = Observation()
        for observe in self.handling:
            observation.begin(observe, queue, message)
        if self.handled:
            observation.started = time.perf_counter()
        return observation

    def end_handling(
        self, observation: Observation, queue: str, error: BaseException | None
    ) -> None:
        """Notify observers that the handling that :meth:`begin_handling` began has ended."""
        started = observation.started
        seconds = (observation.failed or time.perf_counter()) - started
        error = observation.error if error is None else error
        observation.end(error)
        # Those that began to observe in the meantime do not know when it started.
        if started:
            for observe in self.handled:
                try:
                    observe(queue, seconds, error)
                except Exception:  # noqa: BLE001 - the observer's error must not harm a message
                    _log.exception("an observer raised")

    def notify_delivered(self, queue: str, late: float) -> None:
        """Notify observers that a message is handed out."""
        for observe in self.delivered:
            try:
                observe(queue, late)
            except Exception:  # noqa: BLE001 - the observer's error must not harm a message
                _log.exception("an observer raised")


class Observation:
    """The context managers that observers have put around one event.

    Attributes:
        error: The error with which the handling failed, if that does not reach :meth:`end`.
        started: When the handling began, by ``time.perf_counter()``; 0 if no observer asks.
        failed: When it failed with ``error``, by the same clock; 0 if it did not.
    """

    __slots__ = ("_stack", "error", "failed", "started")

    def __init__(self) -> None:
        # Most observers put nothing around.
        self._stack: ExitStack | None = None
        self.started: float = 0.0
        self.failed: float = 0.0
        self.error: BaseException | None = None

    def begin(self, observe: Callable[..., Around], *facts: Any) -> None:
        """Enter the context manager that an observer returns, if any."""
        try:
            if (around := observe(*facts)) is not None:
                if self._stack is None:
                    self._stack = ExitStack()
                self._stack.enter_context(around)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("an observer raised")

    def fail(self, error: BaseException) -> None:
        """Note that the handling has failed. Reporting that to the server may take a while."""
        self.error, self.failed = error, time.perf_counter()

    def end(self, error: BaseException | None) -> None:
        """Leave all context managers."""
        if self._stack is None:
            return
        error = self.error if error is None else error
        try:
            # An observer cannot suppress the error: its caller decides what becomes of it.
            self._stack.__exit__(
                None if error is None else type(error),
                error,
                None if error is None else error.__traceback__,
            )
        except BaseException as raised:  # noqa: BLE001 - a context manager may raise the very error it was given
            if raised is not error:
                _log.exception("an observer raised")
