"""What a client tells those who watch it: metrics, traces, whatever else. Costs next to nothing while nobody does."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_log = logging.getLogger("delayq")

Around = AbstractContextManager[object] | None


@dataclass(slots=True)
class Sending:
    """One call that offers.

    Attributes:
        queue: Where to.
        kind: ``"reliable"``, or ``"delayed"``: in Redisson's format, which has no headers.
        count: How many messages.
        batch: Whether it is an ``offer_many``.
        delay: Seconds until the message is due; None in a batch.
        headers: Put something in, and each message that has no header of that name gets it. Of a delayed queue: ignored.
        ids: Those of the messages, once they are stored.
    """

    queue: str
    kind: Literal["reliable", "delayed"]
    count: int
    batch: bool
    delay: float | None
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    ids: Sequence[str] = ()


class Observer:
    """Override what you want to know, and give it to :meth:`delayq.Client.observe`. What is not overridden costs nothing.

    Methods are called in the event loop and must not block. What they raise is logged, and harms no message.
    """

    def sending(self, sending: Sending) -> Around:
        """Somebody offers. What is returned is entered before the call and left after it, with its error if it has one."""
        del sending
        return None

    def handling(self, queue: str, message: Any) -> Around:
        """A message of a reliable queue is about to be handled, by ``async with message`` or a worker.

        What is returned is entered before and left after it, with the error if it failed; context variables that it sets
        are seen by the handler.
        """
        del queue, message
        return None

    def delivered(self, queue: str, late: float) -> None:
        """A message of a reliable queue is handed out, ``late`` seconds after it was due, by the server's clock."""
        del queue, late


class Hooks:
    """The observers of one client, by what they want to know."""

    __slots__ = ("delivered", "handling", "sending")

    def __init__(self) -> None:
        self.sending: tuple[Callable[[Sending], Around], ...] = ()
        self.handling: tuple[Callable[[str, Any], Around], ...] = ()
        self.delivered: tuple[Callable[[str, float], object], ...] = ()

    def add(self, observer: Observer) -> None:
        """Let it know, from now on."""
        for name in self.__slots__:
            # Who does not override it is not called.
            if getattr(type(observer), name) is not getattr(Observer, name):
                setattr(self, name, (*getattr(self, name), getattr(observer, name)))

    def remove(self, observer: Observer) -> None:
        """Let it know no more."""
        for name in self.__slots__:
            setattr(self, name, tuple(each for each in getattr(self, name) if each.__self__ is not observer))

    @contextmanager
    def around_sending(self, sending: Sending) -> Iterator[Sending]:
        """Somebody offers, in this block."""
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
        """A message is handled until :meth:`Observation.end`."""
        observation = Observation()
        for observe in self.handling:
            observation.begin(observe, queue, message)
        return observation

    def tell_delivered(self, queue: str, late: float) -> None:
        """A message is handed out."""
        for observe in self.delivered:
            try:
                observe(queue, late)
            except Exception:  # noqa: BLE001 - it is not ours, and no message's
                _log.exception("an observer raised")


class Observation:
    """What observers have put around one thing.

    Attributes:
        error: With what it has failed, where that does not reach :meth:`end`.
    """

    __slots__ = ("_stack", "error")

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.error: BaseException | None = None

    def begin(self, observe: Callable[..., Around], *facts: Any) -> None:
        """Enter what an observer gives."""
        try:
            if (around := observe(*facts)) is not None:
                self._stack.enter_context(around)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("an observer raised")

    def end(self, error: BaseException | None) -> None:
        """Leave it all."""
        error = self.error if error is None else error
        try:
            # It cannot hold the error back: what becomes of that is not an observer's business.
            self._stack.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)
        except BaseException as raised:  # noqa: BLE001 - a context manager may raise the very error it was given
            if raised is not error:
                _log.exception("an observer raised")
