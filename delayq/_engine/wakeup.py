"""Calls the server for one queue, when its plan says so."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from delayq._engine.stagger import Stagger
from delayq._engine.wakeup_plan import Arm, Call, WakeupPlan
from delayq._logging import about
from delayq._redis.retry import retry_delay
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayq._engine.context import EngineContext
    from delayq._engine.stagger import TransferNotice
    from delayq._engine.wakeup_plan import Actions, Armed
    from delayq._timer.wheel import Timeout

_log = logging.getLogger("delayq")


def warn_of_refusal(queue: str) -> None:
    """Log a warning that a script could not publish on this queue's channel, and its
    consequence.
    """
    _log.warning(
        "queue %r: no permission to PUBLISH on its channel, so other clients may notice messages up"
        " to their resync_interval late: grant this user the rights that `delayq acl` prints",
        queue,
        extra=about(queue),
    )


class WakeupLoop:
    """Makes one queue's calls, one at a time, and sets the timer for the next, as a
    :class:`WakeupPlan` decides.

    Attributes:
        plan: Decides when to call.
        errors: Number of calls that have failed so far.
    """

    def __init__(
        self,
        name: str,
        once: Callable[[], Awaitable[int]],
        services: EngineContext,
        has_demand: Callable[[], bool],
    ) -> None:
        """Args:
        name: The queue's name, for the log.
        once: Makes one call. Returns when the next message is due, as :meth:`on_next_due` takes it,
            or :data:`NOT_ASKED`.
        has_demand: Returns whether any caller here wants messages as they come due.
        """
        self._name = name
        self._once = once
        self._now = services.clock.local
        self._timer = services.timer
        self._background = services.background
        self._task: asyncio.Task[Any] | None = None
        self._timeout: Timeout | None = None
        self._warned_of_refusal = False
        self.plan: WakeupPlan = WakeupPlan(
            services.clock,
            Stagger(secrets.token_hex(4), random.random),
            has_demand,
            partial(retry_delay, most=services.retry_most),
        )
        self.errors: int = 0

    def demand(self) -> None:
        """Call the server for a caller that wants messages, unless we know that none is due yet."""
        self._act(self.plan.demand())

    def wake(self) -> None:
        """Call the server now, or right after the call in flight."""
        self._act(self.plan.wake())

    def on_due(self, due_us: int) -> None:
        """Act on the announcement of a message that is due at ``due_us`` by the server's clock."""
        self._act(self.plan.on_due(due_us, self._now()))

    def on_notice(self, notice: TransferNotice) -> None:
        """Act on a notice: another client was first."""
        self._act(self.plan.on_notice(notice, self._now()))

    def on_next_due(self, due_us: int) -> None:
        """Arrange the next call, for a message due at ``due_us`` microseconds by the server's clock
        (0: now, -1: no message).
        """
        self._act(self.plan.on_next_due(due_us, self._now()))

    def looked(self, due_us: int, knowledge: int) -> None:
        """Act on a look that began when we knew ``knowledge``: nothing is due before ``due_us``, as
        :meth:`on_next_due` takes it.
        """
        self._act(self.plan.on_look(due_us, knowledge, self._now()))

    def signature(self) -> str:
        """Return what the next call tells its script about us, to be published if it finds
        messages; empty for no notice.
        """
        return self.plan.signature(self._now())

    def handed_out(self, through_us: int) -> None:
        """Record that no message due before ``through_us`` is left, so any later announcement of
        one is out of date.
        """
        self._act(self.plan.handed_out(through_us))

    def transferred(self, listeners: int) -> None:
        """Record that our call found messages.

        Its notice was heard by ``listeners`` clients; 0 if it gave none, -1 if the user may not
        publish it.
        """
        self.plan.transferred(listeners, self._now())
        if listeners < 0 and not self._warned_of_refusal:
            self._warned_of_refusal = True
            warn_of_refusal(self._name)

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
        self._act(self.plan.close())

    def _act(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Call):
                if self._task is None:
                    self._task = self._background.spawn(self._run(), f"wake {self._name}")
            elif isinstance(action, Arm):
                self._set_timer(action.wakeup)
            else:
                self._cancel_timer()

    def _set_timer(self, wakeup: Armed) -> None:
        # The new timer comes first, so that there is one at any moment.
        try:
            timeout = self._timer.new_timeout(
                lambda _: self._act(self.plan.on_timer(wakeup)), wakeup.wake_at - self._now()
            )
        except BaseException:
            self.plan.on_timer_refused(wakeup)
            raise
        self._cancel_timer()
        self._timeout = timeout

    def _cancel_timer(self) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()

    async def _run(self) -> None:
        try:
            while self.plan.begin_call():
                self._act(await self._call())
        finally:
            self._task = None

    async def _call(self) -> Actions:
        try:
            due_us = await self._once()
        except Exception as error:  # noqa: BLE001 - the queue keeps running, whatever fails
            self.errors += 1
            actions = self.plan.on_failure(self._now())
            if self.plan.failures == 1:
                _log.warning(
                    "queue %r: checking for due messages failed, retrying: %s",
                    self._name,
                    error,
                    extra=about(self._name),
                    exc_info=None if isinstance(error, DelayqError) else error,
                )
            return actions
        return self.plan.on_reply(due_us, self._now())
