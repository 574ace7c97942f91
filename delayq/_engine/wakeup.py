"""Decides when to call the server for one queue: now, at a given moment, or not until asked."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from typing import TYPE_CHECKING, Any

from delayq._engine.last_timeout import LastTimeout
from delayq._engine.stagger import Stagger, signature
from delayq._logging import about
from delayq._redis.retry import retry_delay
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayq._engine.context import EngineContext
    from delayq._engine.stagger import TransferNotice

_log = logging.getLogger("delayq")

# An answer may overtake a notification of messages that it has settled already, by this much, in microseconds.
_LATE_US = 250_000
# Our estimate of the server's clock lags by an answer's travel time. A notice cannot be further ahead of it, in seconds.
_AHEAD = 5.0

# Returned for a call that was not made, because no caller wants messages.
NOT_ASKED = -2


def due_us(now_us: int, wait_us: int) -> int:
    """Return the moment ``wait_us`` after ``now_us``. The special values 0 (now) and -1 (never) are returned unchanged."""
    return now_us + wait_us if wait_us > 0 else wait_us


def tell_of_refusal(queue: str) -> None:
    """Log a warning that a script could not publish on this queue's channel, and what that means."""
    _log.warning(
        "queue %r: no permission to PUBLISH on its channel, so other clients may notice messages up to their resync_interval "
        "late: grant this user the rights that `delayq acl` prints",
        queue,
        extra=about(queue),
    )


class WakeupLoop:
    """Makes one queue's calls, one at a time, and arms the timer for the next.

    A push is requested by the queue's own timer, by a notification, by every (re)subscription, by the safety re-check, and by
    callers that want messages. Its answer says when the next message is due, which arms the timer again. Until then, new
    callers need not ask the server. Clients that wait for the same moment take turns: see :mod:`delayq._engine.stagger`.

    Attributes:
        turns: This client's part in taking turns.
        client: Identifies this client in notices.
        knows: Whether everything due has been handed out, and we will be woken for the next message.
        errors: Number of calls that have failed so far.
    """

    def __init__(
        self, name: str, once: Callable[[], Awaitable[int]], services: EngineContext, wanted: Callable[[], bool]
    ) -> None:
        """Args:
        name: The queue's name, for the log.
        once: Makes one call. Returns when the next message is due, as :meth:`next_due` takes it, or :data:`NOT_ASKED` if it
            made no call.
        wanted: Returns whether any caller here wants messages as they come due.
        """
        self._name = name
        self._once = once
        self._wanted = wanted
        self._clock = services.clock
        self._background = services.background
        self._retry_most = services.retry_most
        self._last_timeout = LastTimeout(services.timer, asyncio.get_running_loop().time, self.push)
        self._task: asyncio.Task[Any] | None = None
        # The push requested: for messages due by this moment, in us; inf for whatever is due; None if none is requested.
        self._asked: float | None = None
        self._settled_through = 0
        self._found = False
        self._told_of_refusal = False
        self._failures = 0
        self._closed = False
        self.turns: Stagger = Stagger(random.random)
        self.client: str = secrets.token_hex(4)
        self.knows: bool = False
        self.errors: int = 0

    def wanted(self) -> None:
        """Call the server for a caller that wants messages, unless we know that none is due yet."""
        if not self.knows:
            self.push()

    def push(self, due_us: float = math.inf) -> None:
        """Call the server now, or right after the call in flight."""
        if self._closed:
            return
        self._asked = due_us if self._asked is None else max(self._asked, due_us)
        if self._task is None:
            self._task = self._background.spawn(self._run(), f"push {self._name}")

    def announced(self, due_us: int) -> None:
        """Act on the announcement of a message that is due at ``due_us`` by the server's clock."""
        if due_us < self._settled_through:
            if self._settled_through - due_us > _LATE_US:
                # The announcement is not late: the server's clock was set back.
                self.push()
            return
        wait = self._clock.seconds_until(due_us) + self.turns.stagger(wanted=self._wanted())
        if wait > 0:
            self._wake_in(wait, due_us)
        else:
            self.push(due_us)

    def next_due(self, due_us: int) -> None:
        """Arrange the next push, for a message due at ``due_us`` microseconds by the server's clock (0: now, -1: no message)."""
        if due_us == 0:
            self.push()
        elif due_us > 0:
            self._wake_in(self._clock.seconds_until(due_us) + self.turns.stagger(wanted=self._wanted()), due_us)

    def settled(self, through_us: int) -> None:
        """Record that no message due before ``through_us`` is left, so any later announcement of one is out of date."""
        # This replaces any earlier value: the server's clock may have been set back.
        self._settled_through = through_us
        held = self._last_timeout.held
        if held is not None and held.last_us < through_us:
            # It would be skipped when it fires, and until then keep a later one from being armed.
            self._last_timeout.disarm()

    def found(self, listeners: int) -> None:
        """Record that our call found messages.

        Its notice was heard by ``listeners`` clients; 0 if it gave none, -1 if the user may not publish it.
        """
        self._found = True
        self.turns.won()
        if listeners < 0 and not self._told_of_refusal:
            self._told_of_refusal = True
            tell_of_refusal(self._name)
        if listeners:
            self.turns.given(listeners, self._clock.local())

    def signature(self) -> str:
        """Return what the next call tells its script about us, to be published if it finds messages; empty for no notice."""
        return (
            signature(self.client, wanted=self._wanted(), listeners=self.turns.listeners)
            if self.turns.gives_notice(self._clock.local())
            else ""
        )

    def noticed(self, notice: TransferNotice) -> None:
        """Act on a notice: another client was first."""
        if notice.client == self.client:
            return
        if self._clock.seconds_from_now(notice.through_us) > _AHEAD:
            # Either the server's clock was set, or this is not a real notice. The server knows.
            self.push()
            return
        held, after = self._last_timeout.held, 0.0
        self.settled(notice.through_us)
        if held is not None and held.due_us <= notice.through_us:
            # Anything else it covers is known to the notice, or to an announcement that follows the notice.
            after = max(0.0, -self._clock.seconds_from_now(held.due_us))
            self._last_timeout.disarm()
        self.turns.heard(notice, after, wanted=self._wanted())
        self.next_due(notice.next_us)

    def forget(self) -> None:
        """Treat what we know as possibly out of date."""
        self.knows = False

    async def idle(self, within: float) -> None:
        """Wait until no call is in flight, for at most ``within`` seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within)

    async def aclose(self, grace: float) -> None:
        """Stop within ``grace`` seconds."""
        self.close()
        if (task := self._task) is not None:
            await asyncio.wait({task}, timeout=grace)
            task.cancel()

    def close(self) -> None:
        """Make no further call after the one in flight."""
        self._closed = True
        self._asked = None
        self._last_timeout.disarm()

    async def _run(self) -> None:
        try:
            while self._asked is not None:
                asked, self._asked = self._asked, None
                if asked < self._settled_through:
                    continue
                self._found = False
                self._act_on(await self._try_once())
                if not self._found and asked != math.inf:
                    self.turns.found_nothing()
        finally:
            self._task = None

    async def _try_once(self) -> int | None:
        try:
            return await self._once()
        except Exception as error:  # noqa: BLE001 - the queue keeps running, whatever fails
            self._failures += 1
            self.errors += 1
            if self._failures == 1:
                _log.warning(
                    "queue %r: checking for due messages failed, retrying: %s",
                    self._name,
                    error,
                    extra=about(self._name),
                    exc_info=None if isinstance(error, DelayqError) else error,
                )
            return None

    def _act_on(self, due_us: int | None) -> None:
        self.knows = due_us is not None and (due_us > 0 or due_us == -1)
        if due_us is None:
            self._wake_in(retry_delay(self._failures, most=self._retry_most))
        else:
            self._failures = 0
            self.next_due(due_us)

    def _wake_in(self, seconds: float, due_us: float = math.inf) -> None:
        # Has no effect if an earlier push is armed already.
        if not self._closed:
            self._last_timeout.arm(seconds, due_us)
