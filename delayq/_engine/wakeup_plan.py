"""Plans when to call the server for one queue: now, at a given moment, or not until asked. Pure.

:class:`delayq._engine.wakeup.WakeupLoop` carries out the actions, with a task and a timer. Events
that depend on the time carry ``now``, in local seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._engine.context import Channels
    from delayq._engine.server_clock import ServerClock
    from delayq._engine.stagger import Stagger, TransferNotice

# A reply may overtake a notification of messages that it has handed out, by this much, in us.
_LATE_US = 250_000
# A notice cannot be further ahead of our estimate of the server's clock, in seconds.
_AHEAD = 5.0

# For how long a message may be due before a client that rests concludes that no other takes it, in
# seconds.
_PATIENCE = 0.02

# The reply of a call that was not made, because no caller wants messages.
NOT_ASKED = -2
# The reply of a call that left messages which are due, and which a call takes that is requested in
# this queue's turn.
IN_TURN = -3


def due_us(now_us: int, wait_us: int) -> int:
    """Return the moment ``wait_us`` after ``now_us``; 0 (now) and -1 (never) stay as they are."""
    return now_us + wait_us if wait_us > 0 else wait_us


@dataclass(eq=False, slots=True)
class Armed:
    """A wake-up at ``wake_at``, in local seconds, for messages due at ``due_us``.

    Requests for later ones rely on it while it is armed: ``last_us`` is the last moment it covers.
    """

    wake_at: float
    due_us: float = math.inf
    last_us: float = math.inf


def gives_way(held: Armed | None, wake_at: float) -> bool:
    """Return whether the held wake-up gives way to one at ``wake_at``: only to an earlier one.

    Replies and notifications travel on different connections, so an old one may arrive after a
    newer one. Waking too early costs a call, waking too late breaks the promise.
    """
    return held is None or wake_at < held.wake_at


class LastTimeout:
    """Holds the one wake-up that counts."""

    def __init__(self) -> None:
        self.held: Armed | None = None

    def arm(self, wake_at: float, due_us: float = math.inf) -> Armed | None:
        """Hold a wake-up for messages due at ``due_us``, or, if that is infinite, for whatever is
        due, which a wake-up that replaces this one inherits.

        Returns the new wake-up, or None if one that wakes earlier is held already.
        """
        held = self.held
        last_us = due_us
        if held is not None:
            if math.inf in (held.due_us, due_us):
                held.due_us = due_us = math.inf
            held.last_us = last_us = max(held.last_us, due_us)
        if not gives_way(held, wake_at):
            return None
        self.held = armed = Armed(wake_at, due_us, last_us)
        return armed

    def release(self, armed: Armed) -> None:
        """Stop holding this wake-up, unless another one has replaced it."""
        if self.held is armed:
            self.held = None

    def disarm(self) -> bool:
        """Stop holding any wake-up. Return whether one was held."""
        held, self.held = self.held, None
        return held is not None


@dataclass(frozen=True, slots=True)
class Call:
    """Call the server now, or right after the call in flight."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Set a timer, in place of any that is set. Report it with :meth:`WakeupPlan.on_timer`."""

    wakeup: Armed


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the timer that is set."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Subscribe to these channels of the queue, and look at it then; unsubscribe from the others.

    Clients that listen hear the notices. Those that rest hear summons, if they want messages.
    """

    to: Channels


Action = Call | Arm | Cancel | Listen
Actions = tuple[Action, ...]

_CALL: Actions = (Call(),)
_CANCEL: Actions = (Cancel(),)


@dataclass(slots=True)
class _InFlight:
    """The call in flight.

    Attributes:
        knowledge: The plan's knowledge when it began.
        due_us: It was made for messages due by this moment, and has found none so far; infinite if
            it was made for whatever is due, or has found some.
        found: Whether it has found messages.
    """

    knowledge: int = 0
    due_us: float = math.inf
    found: bool = False

    def came_too_late(self, next_us: float) -> bool:
        """Return whether its messages were gone, and not still to come: the next one is due at
        ``next_us``, or never (-1).
        """
        return self.due_us != math.inf and not 0 < next_us <= self.due_us


@dataclass(slots=True)
class _Callers:
    """The callers that want messages.

    Attributes:
        want_some: Returns whether any of them wants messages as they come due.
        have_come: Whether any has come since the client was last asked to rest.
    """

    want_some: Callable[[], bool]
    have_come: bool = False


class WakeupPlan:
    """Decides when one queue's calls are made.

    A call is requested by the queue's own timer, by a notification, by every (re)subscription, by
    the safety re-check, and by callers that want messages. Its reply says when the next message is
    due, which arms the timer again. Until then, new callers need not ask the server. Clients that
    wait for the same moment share the work: see :mod:`delayq._engine.stagger`.

    Attributes:
        stagger: This client's stagger.
        failures: Number of calls that have failed since the last one that succeeded.
        knowledge: Grows whenever what we know may be out of date.
    """

    def __init__(
        self,
        clock: ServerClock,
        stagger: Stagger,
        has_demand: Callable[[], bool],
        retry_delay: Callable[[int], float],
    ) -> None:
        """Args:
        clock: Estimates the server's clock.
        stagger: This client's stagger.
        has_demand: Returns whether any caller here wants messages as they come due.
        retry_delay: Returns the pause after a number of failures in a row, in seconds.
        """
        self.stagger: Stagger = stagger
        self.failures: int = 0
        self.knowledge: int = 0
        # The knowledge that the last reply has confirmed; -1 if it told of more messages.
        self._confirmed = -1
        self._in_flight = _InFlight()
        self._clock = clock
        self._callers = _Callers(has_demand)
        self._retry_delay = retry_delay
        self._last_timeout = LastTimeout()
        # The call requested: for messages due by this moment, in us, or inf; None if there is none.
        self._requested: float | None = None
        self._handed_out_us = 0
        self._closed = False

    @property
    def up_to_date(self) -> bool:
        """Whether everything due has been handed out, and we will be woken for the next message."""
        return not self.resting and self._confirmed == self.knowledge

    @property
    def resting(self) -> bool:
        """Whether we hear nothing, and leave messages to the clients that listen."""
        return self.stagger.resting

    # Requests

    def demand(self) -> Actions:
        """Call for a caller that wants messages, unless we know that none is due yet."""
        self._callers.have_come = True
        return () if self.up_to_date else self.wake() + self.listen()

    def listen(self) -> Actions:
        """Listen for a caller that wants messages; in a crowd, only to summons."""
        self._callers.have_come = True
        if not self.resting:
            return ()
        return self._stop_resting() if self.stagger.has_room(demand=True) else self._changed()

    def rest(self) -> Actions:
        """Rest if no caller has wanted messages since this was called last, as none does now: one
        that handles a message comes again. The next one has to ask the server.
        """
        self.forget()
        have_come, self._callers.have_come = self._callers.have_come, False
        if have_come:
            return ()
        self.stagger.resting = True
        return self._changed()

    def wake(self, due_us: float = math.inf) -> Actions:
        """Call now, for messages due by ``due_us``. By default: for whatever is due."""
        if self._closed:
            return ()
        self._requested = due_us if self._requested is None else max(self._requested, due_us)
        return _CALL

    def on_timer(self, fired: Armed) -> Actions:
        """Call for the messages of a wake-up whose timer has fired."""
        self._last_timeout.release(fired)
        return self.wake(fired.last_us)

    def on_timer_refused(self, wakeup: Armed) -> None:
        """Stop relying on a wake-up whose timer could not be set."""
        self._last_timeout.release(wakeup)
        self.forget()

    def on_due(self, due_us: int, now: float) -> Actions:
        """Act on the announcement of a message that is due at ``due_us`` by the server's clock."""
        if self.resting:
            return ()
        if due_us < self._handed_out_us:
            # The announcement is late, or the server's clock was set back.
            return self.wake() if self._handed_out_us - due_us > _LATE_US else ()
        return self._call_at(due_us, now)

    def on_notice(self, notice: TransferNotice, now: float) -> Actions:
        """Act on a notice: another client was first."""
        if notice.client == self.stagger.client or self.resting:
            return ()
        if self._clock.seconds_from(now, notice.through_us) > _AHEAD:
            # Either the server's clock was set, or this is not a real notice. The server knows.
            return self.wake()
        held, after = self._last_timeout.held, 0.0
        actions = self.handed_out(notice.through_us)
        if held is not None and held.due_us <= notice.through_us:
            # The notice, or an announcement that follows it, knows of anything else that it covers.
            after = max(0.0, -self._clock.seconds_from(now, held.due_us))
            actions += self._disarm()
        self.stagger.on_notice(notice, after, demand=self._callers.want_some())
        return actions + self.on_next_due(notice.next_us, now)

    def on_recheck(
        self, due_us: int, late: float, listeners: int, resters: int, now: float
    ) -> Actions:
        """Act on the re-check, which found what :meth:`on_next_due` takes.

        If a message is due now, it has been for ``late`` seconds. The numbers of clients are those
        that :meth:`Stagger.on_recheck` takes.
        """
        rested = self.resting
        self.stagger.on_recheck(listeners, resters, demand=self._callers.want_some())
        # A caller may have come or gone since we began to rest.
        actions = self._changed() if rested or self.resting else ()
        if (rested or self.resting) and due_us == 0 and late < _PATIENCE:
            return actions
        return actions + self.on_next_due(due_us, now)

    def on_summons(self, number: int) -> Actions:
        """Act on a summons for this number of the clients that rest."""
        if not self._callers.want_some() or not self.stagger.answers(number):
            return ()
        return self._stop_resting() + self.wake()

    def on_next_due(self, due_us: int, now: float) -> Actions:
        """Arrange the next call, for a message due at ``due_us`` (0: now, -1: no message)."""
        if due_us > 0:
            return self._call_at(due_us, now)
        return self.wake() if due_us == 0 else ()

    def forget(self) -> None:
        """Treat what we know as possibly out of date, and what a call in flight will find."""
        self.knowledge += 1

    def on_look(self, due_us: int, knowledge: int, now: float) -> Actions:
        """Act on a look that began when we knew ``knowledge``: nothing is due before ``due_us``."""
        self._confirmed = max(self._confirmed, knowledge)
        return self.on_next_due(due_us, now) + self._again(knowledge)

    def close(self) -> Actions:
        """Make no further call after the one in flight."""
        self._closed = True
        self._requested = None
        return self._disarm()

    # The call in flight

    def begin_call(self) -> bool:
        """Begin a call, if one is requested and needed. Report how it ends."""
        requested, self._requested = self._requested, None
        if requested is None or requested < self._handed_out_us:
            return False
        self._in_flight = _InFlight(self.knowledge, requested)
        return True

    def signature(self, now: float) -> str:
        """Return what the call tells its script about us, as :meth:`Stagger.signature` does."""
        return self.stagger.signature(now, demand=self._callers.want_some())

    def handed_out(self, through_us: int) -> Actions:
        """Record that no message due before ``through_us`` is left."""
        # This replaces any earlier value: the server's clock may have been set back.
        self._handed_out_us = through_us
        held = self._last_timeout.held
        # It would be skipped, and keep a later one from being armed.
        return self._disarm() if held is not None and held.last_us < through_us else ()

    def transferred(self, listeners: int, now: float) -> None:
        """Record that the call found messages, and how many clients heard its notice: 0 if it gave
        none, -1 if the user may not publish it.
        """
        self._in_flight.found, self._in_flight.due_us = True, math.inf
        self.stagger.transferred()
        if listeners:
            self.stagger.published(listeners, now)

    def on_reply(self, due_us: int, now: float) -> Actions:
        """End the call, with what :meth:`on_next_due` takes, or :data:`NOT_ASKED` or
        :data:`IN_TURN`.
        """
        known = self._in_flight.knowledge
        if due_us == NOT_ASKED:
            self._confirmed = -1
            return self._again(known)
        self.failures = 0
        self._confirmed = -1 if due_us in (0, IN_TURN) else known
        actions = self._stop_resting() if self._in_flight.found else ()
        actions += self.on_next_due(due_us, now) + self._again(known)
        if self._in_flight.came_too_late(due_us):
            self.stagger.found_nothing()
        return actions

    def on_failure(self, now: float) -> Actions:
        """End the call, which has failed, and try again later."""
        self.failures += 1
        self._confirmed = -1
        if self._in_flight.came_too_late(-1):
            self.stagger.found_nothing()
        return self._wake_in(self._retry_delay(self.failures), now)

    def _stop_resting(self) -> Actions:
        if not self.resting:
            return ()
        self.stagger.resting = False
        return self._changed()

    def _changed(self) -> Actions:
        """Subscribe to what we listen to from now on."""
        if self._closed:
            return ()
        if not self.resting:
            return (Listen("notices"),)
        held = self._last_timeout.held
        # The repetition of a failed call stays.
        cancel = self._disarm() if held is not None and held.last_us < math.inf else ()
        return (*cancel, Listen("summons" if self._callers.want_some() else "nothing"))

    def _again(self, known: int) -> Actions:
        """Call again if a reply may be out of date while callers rely on it."""
        return self.wake() if known != self.knowledge and self._callers.want_some() else ()

    def _call_at(self, due_us: int, now: float) -> Actions:
        """Arrange a call that arrives when it is ``due_us``, after our stagger."""
        stagger, clock = self.stagger.delay(demand=self._callers.want_some()), self._clock
        if not (stagger or self.resting) and clock.seconds_until_call(now, due_us) <= 0:
            # A timer would only take time.
            return self.wake(due_us)
        wait = max(0.0, clock.seconds_until_timer(now, due_us))
        return self._wake_in(wait + stagger, now, due_us)

    def _wake_in(self, seconds: float, now: float, due_us: float = math.inf) -> Actions:
        # Has no effect if an earlier wake-up is armed already. Those who rest only repeat calls.
        idle = self._closed or (self.resting and due_us < math.inf)
        armed = None if idle else self._last_timeout.arm(now + seconds, due_us)
        return () if armed is None else (Arm(armed),)

    def _disarm(self) -> Actions:
        return _CANCEL if self._last_timeout.disarm() else ()
