"""Plans when to call the server for one queue or partition: now, at a given moment, or not until
asked. Pure.

:class:`delayq._engine.wakeup.WakeupLoop` carries out the actions, with a task and a timer. Events
that depend on the time carry ``now``, in local seconds.

In an event, ``due_us`` says when the next message is due: a moment by the server's clock, in
microseconds, :data:`DUE_NOW` or :data:`NONE_DUE`. A call and a wake-up are for the messages that
are due by a moment, or for :data:`WHATEVER_IS_DUE`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._engine.context import Channels
    from delayq._engine.server_clock import ServerClock
    from delayq._engine.stagger import Notice, Stagger

# A reply may overtake an announcement of messages that it has handed out, by this much, in us.
_LATE_US = 250_000
# A notice cannot be further ahead of our estimate of the server's clock, in seconds.
_AHEAD = 5.0
# For how long a message may be due before a dormant client concludes that no other takes it, in
# seconds.
_LEFT_LYING = 0.02


DUE_NOW = 0
"""In place of a moment: a message is due."""
NONE_DUE = -1
"""In place of a moment: there is no message."""
WHATEVER_IS_DUE = math.inf
"""In place of a moment: the end of time, by which every message is due."""


class CallOutcome(Enum):
    """Why a call has not found out when the next message is due."""

    NO_CALLERS = auto()
    """It was not made, because no caller wants messages."""
    MORE_DUE = auto()
    """It left due messages in one of several partitions. The dispatcher requests the next call when
    it is this partition's turn.
    """


NextCall = int | CallOutcome
"""When the next call is needed, as a call has found out: at a moment in microseconds, at once
(:data:`DUE_NOW`), not before a message is announced (:data:`NONE_DUE`); or why that is unknown.
"""


def moment_after(now_us: int, wait_us: int) -> int:
    """Return the moment ``wait_us`` after ``now_us``. A script that finds no wait returns
    :data:`DUE_NOW` or :data:`NONE_DUE` instead, which stay as they are.
    """
    return now_us + wait_us if wait_us > 0 else wait_us


@dataclass(eq=False, slots=True)
class Wakeup:
    """A wake-up at ``wake_at``, in local seconds, for messages due at ``due_us``.

    Requests for later ones rely on it while it is armed: ``last_us`` is the last moment it covers.
    """

    wake_at: float
    due_us: float = WHATEVER_IS_DUE
    last_us: float = WHATEVER_IS_DUE


class NextWakeup:
    """Keeps the earliest of the wake-ups that are asked for.

    Attributes:
        armed: The wake-up; None if there is none.
    """

    def __init__(self) -> None:
        self.armed: Wakeup | None = None

    def arm(self, wake_at: float, due_us: float = WHATEVER_IS_DUE) -> Wakeup | None:
        """Keep a wake-up for messages due at ``due_us``, unless an earlier one is armed.

        If either of the two is for whatever is due, so is the one that stays.

        A wake-up gives way only to an earlier one. Replies and announcements travel on different
        connections, so an old one may arrive after a newer one. Waking too early costs a call,
        waking too late breaks the promise.

        Returns the new wake-up, or None if an earlier one stays.
        """
        armed = self.armed
        last_us = due_us
        if armed is not None:
            if WHATEVER_IS_DUE in (armed.due_us, due_us):
                armed.due_us = due_us = WHATEVER_IS_DUE
            armed.last_us = last_us = max(armed.last_us, due_us)
            if wake_at >= armed.wake_at:
                return None
        self.armed = armed = Wakeup(wake_at, due_us, last_us)
        return armed

    def discard(self, wakeup: Wakeup) -> None:
        """Drop this wake-up, unless another one has replaced it."""
        if self.armed is wakeup:
            self.armed = None

    def disarm(self) -> bool:
        """Drop the wake-up. Return whether there was one."""
        armed, self.armed = self.armed, None
        return armed is not None


@dataclass(frozen=True, slots=True)
class Call:
    """Call the server now, or right after the call in flight."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Set a timer, in place of any that is set. Report it with :meth:`WakeupPlan.on_timer`."""

    wakeup: Wakeup


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the timer that is set."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Subscribe to these channels of the queue, and check it then; unsubscribe from the others.

    Clients that listen receive the notices. Dormant ones receive summons, if they want messages.
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
        invalidations: The plan's invalidations when it began.
        due_us: The call was made for messages due by this moment, and has taken none so far. If it
            has taken some, :data:`WHATEVER_IS_DUE`.
        has_messages: Whether it has taken messages.
    """

    invalidations: int = 0
    due_us: float = WHATEVER_IS_DUE
    has_messages: bool = False


@dataclass(slots=True)
class Callers:
    """The callers of the queue on this client.

    Attributes:
        want_messages: Returns whether any of them wants messages as they come due.
        have_come: Whether any has come since the last call of :meth:`WakeupPlan.on_no_callers`.
    """

    want_messages: Callable[[], bool]
    have_come: bool = False


class WakeupPlan:
    """Decides when one queue's calls are made.

    A call is requested by the queue's own timer, by an announcement, by every (re)subscription, by
    the safety re-check, and by callers that want messages. Its reply says when the next message is
    due, which arms the timer again. Until then, new callers need not ask the server. Clients that
    wait for the same moment share the work: see :mod:`delayq._engine.stagger`.

    Attributes:
        stagger: This client's stagger.
        callers: The callers on this client.
        failures: Number of calls that have failed since the last one that succeeded.
        invalidations: Number of calls of :meth:`invalidate` so far. A reply counts only if there
            was none since its call began.
    """

    def __init__(
        self,
        clock: ServerClock,
        stagger: Stagger,
        want_messages: Callable[[], bool],
        retry_delay: Callable[[int], float],
    ) -> None:
        """Args:
        clock: Estimates the server's clock.
        stagger: This client's stagger.
        want_messages: Returns whether any caller here wants messages as they come due.
        retry_delay: Returns the pause after a number of failures in a row, in seconds.
        """
        self.stagger: Stagger = stagger
        self.callers: Callers = Callers(want_messages)
        self.failures: int = 0
        self.invalidations: int = 0
        # The invalidations before the call whose reply was the last one to tell what is due; -1 if
        # it told of more messages, or the last call failed or was not made.
        self._confirmed = -1
        self._in_flight = _InFlight()
        self._clock = clock
        self._retry_delay = retry_delay
        self._next_wakeup = NextWakeup()
        # The call requested: for messages due by this moment; None if there is none.
        self._requested: float | None = None
        self._handed_out_us = 0
        self._is_closed = False

    @property
    def is_up_to_date(self) -> bool:
        """Whether everything due has been handed out, and we will be woken for the next message."""
        return not self.stagger.is_dormant and self._confirmed == self.invalidations

    # Requests

    def on_caller_joined(self) -> Actions:
        """Call for a caller that wants messages, unless we know that none is due yet."""
        if self.is_up_to_date:
            self.callers.have_come = True
            return ()
        return self.wake() + self.listen()

    def listen(self) -> Actions:
        """Listen for a caller that wants messages; in a crowd, only to summons."""
        self.callers.have_come = True
        if not self.stagger.is_dormant:
            return ()
        has_room = self.stagger.has_room(wants_messages=True)
        return self._leave_dormancy() if has_room else self._subscribe()

    def on_no_callers(self) -> Actions:
        """Go dormant if no caller has come since this was called last, and none waits now: one that
        handles a message comes again. The next one has to ask the server.
        """
        self.invalidate()
        have_come, self.callers.have_come = self.callers.have_come, False
        if have_come:
            return ()
        self.stagger.is_dormant = True
        return self._subscribe()

    def wake(self, due_us: float = WHATEVER_IS_DUE) -> Actions:
        """Call now, for messages due by ``due_us``."""
        if self._is_closed:
            return ()
        self._requested = due_us if self._requested is None else max(self._requested, due_us)
        return _CALL

    def on_timer(self, wakeup: Wakeup) -> Actions:
        """Call for the messages of a wake-up whose timer has fired."""
        self._next_wakeup.discard(wakeup)
        return self.wake(wakeup.last_us)

    def on_timer_refused(self, wakeup: Wakeup) -> None:
        """Stop relying on a wake-up whose timer could not be set."""
        self._next_wakeup.discard(wakeup)
        self.invalidate()

    def on_due(self, due_us: int, now: float) -> Actions:
        """Act on the announcement of a message that is due at ``due_us`` by the server's clock."""
        if self.stagger.is_dormant:
            return ()
        if due_us < self._handed_out_us:
            # The announcement is late, or the server's clock was set back.
            return self.wake() if self._handed_out_us - due_us > _LATE_US else ()
        return self._call_at(due_us, now)

    def on_notice(self, notice: Notice, now: float) -> Actions:
        """Act on a notice: another client was first."""
        if notice.client == self.stagger.client or self.stagger.is_dormant:
            return ()
        if self._clock.seconds_from_now(notice.through_us, now) > _AHEAD:
            # Either the server's clock was set, or this is not a real notice. The server knows.
            return self.wake()
        armed, delay = self._next_wakeup.armed, 0.0
        actions = self.handed_out(notice.through_us)
        if armed is not None and armed.due_us <= notice.through_us:
            # The notice, or an announcement that follows it, knows of anything else that it covers.
            delay = max(0.0, -self._clock.seconds_from_now(armed.due_us, now))
            actions += self._disarm()
        self.stagger.on_notice(notice, delay, wants_messages=self.callers.want_messages())
        return actions + self.on_next_due(notice.next_us, now)

    def on_recheck(
        self, due_us: int, late: float, listeners: int, dormant: int, now: float
    ) -> Actions:
        """Act on the re-check, by which the next message is due at ``due_us``.

        If a message is due now, it has been for ``late`` seconds. The numbers of clients are those
        that :meth:`Stagger.on_recheck` takes.
        """
        was_dormant = self.stagger.is_dormant
        self.stagger.on_recheck(listeners, dormant, wants_messages=self.callers.want_messages())
        if not (was_dormant or self.stagger.is_dormant):
            return self.on_next_due(due_us, now)
        # A caller may have come or gone since we went dormant.
        actions = self._subscribe()
        if due_us == DUE_NOW and late < _LEFT_LYING:
            return actions
        return actions + self.on_next_due(due_us, now)

    def on_summons(self, number: int) -> Actions:
        """Act on a summons for this number of the dormant clients."""
        if not self.callers.want_messages() or not self.stagger.answers(number):
            return ()
        return self._leave_dormancy() + self.wake()

    def on_next_due(self, due_us: int, now: float) -> Actions:
        """Arrange the next call, for a message due at ``due_us``."""
        if due_us > 0:
            return self._call_at(due_us, now)
        return self.wake() if due_us == DUE_NOW else ()

    def invalidate(self) -> None:
        """Treat what we know as possibly out of date, and the reply of a call in flight as well."""
        self.invalidations += 1

    def on_probe(self, due_us: int, invalidations: int, now: float) -> Actions:
        """Act on a probe that began with this number of ``invalidations``, and found that nothing
        is due before ``due_us``.
        """
        self._confirmed = max(self._confirmed, invalidations)
        return self.on_next_due(due_us, now) + self._repeat_if_outdated(invalidations)

    def close(self) -> Actions:
        """Make no further call after the one in flight."""
        self._is_closed = True
        self._requested = None
        return self._disarm()

    # The call in flight

    def begin_call(self) -> bool:
        """Begin a call, if one is requested and needed. Report how it ends."""
        requested, self._requested = self._requested, None
        if requested is None or requested < self._handed_out_us:
            return False
        self._in_flight = _InFlight(self.invalidations, requested)
        return True

    def handed_out(self, through_us: int) -> Actions:
        """Record that no message due before ``through_us`` remains."""
        # This replaces any earlier value: the server's clock may have been set back.
        self._handed_out_us = through_us
        armed = self._next_wakeup.armed
        # It would be skipped, and keep a later one from being armed.
        return self._disarm() if armed is not None and armed.last_us < through_us else ()

    def took_messages(self, listeners: int, now: float) -> None:
        """Record that the call took messages, and how many clients received its notice: 0 if it
        gave none, -1 if the user may not publish it.
        """
        self._in_flight.has_messages, self._in_flight.due_us = True, WHATEVER_IS_DUE
        self.stagger.took_messages(listeners, now)

    def on_reply(self, next_call: NextCall, now: float) -> Actions:
        """End the call, which tells when the next one is needed."""
        call = self._in_flight
        if next_call is CallOutcome.NO_CALLERS:
            self._confirmed = -1
            return self._repeat_if_outdated(call.invalidations)
        self.failures = 0
        due_us = NONE_DUE if next_call is CallOutcome.MORE_DUE else next_call
        has_more = next_call in (DUE_NOW, CallOutcome.MORE_DUE)
        self._confirmed = -1 if has_more else call.invalidations
        is_dormant = self.stagger.is_dormant
        actions = self._leave_dormancy() if call.has_messages and is_dormant else ()
        actions += self.on_next_due(due_us, now)
        if call.invalidations != self.invalidations:
            actions += self._repeat_if_outdated(call.invalidations)
        if call.due_us != WHATEVER_IS_DUE and not 0 < due_us <= call.due_us:
            # Its messages were gone, and not still to come.
            self.stagger.came_too_late()
        return actions

    def on_failure(self, now: float) -> Actions:
        """End the call, which has failed, and try again later."""
        self.failures += 1
        self._confirmed = -1
        if self._in_flight.due_us != WHATEVER_IS_DUE:
            self.stagger.came_too_late()
        return () if self._is_closed else self._arm(now + self._retry_delay(self.failures))

    def _leave_dormancy(self) -> Actions:
        if not self.stagger.is_dormant:
            return ()
        self.stagger.is_dormant = False
        return self._subscribe()

    def _subscribe(self) -> Actions:
        """Subscribe to what we listen to from now on."""
        if self._is_closed:
            return ()
        if not self.stagger.is_dormant:
            return (Listen("notices"),)
        armed = self._next_wakeup.armed
        # The repetition of a failed call stays.
        cancel = self._disarm() if armed is not None and armed.last_us < WHATEVER_IS_DUE else ()
        return (*cancel, Listen("summons" if self.callers.want_messages() else "nothing"))

    def _repeat_if_outdated(self, invalidations: int) -> Actions:
        """Call again if a reply may be out of date while callers rely on it."""
        return (
            self.wake()
            if invalidations != self.invalidations and self.callers.want_messages()
            else ()
        )

    def _call_at(self, due_us: int, now: float) -> Actions:
        """Arrange a call that arrives when it is ``due_us``, after our stagger."""
        if self._is_closed or self.stagger.is_dormant:
            return ()
        stagger = self.stagger.delay(wants_messages=self.callers.want_messages())
        if not stagger and self._clock.seconds_until_call(due_us, now) <= 0:
            # A timer would only take time.
            return self.wake(due_us)
        wait = max(0.0, self._clock.seconds_until_timer(due_us, now))
        return self._arm(now + wait + stagger, due_us)

    def _arm(self, wake_at: float, due_us: float = WHATEVER_IS_DUE) -> Actions:
        armed = self._next_wakeup.arm(wake_at, due_us)
        return () if armed is None else (Arm(armed),)

    def _disarm(self) -> Actions:
        return _CANCEL if self._next_wakeup.disarm() else ()
