"""Calls the server for one queue or partition, when its plan says so."""

from __future__ import annotations

import asyncio
import random
import secrets
from contextlib import suppress
from functools import partial
from logging import WARNING
from typing import TYPE_CHECKING, Any

from delayq._engine.stagger import Stagger
from delayq._engine.wakeup_plan import Arm, Call, Listen, WakeupPlan
from delayq._logging import log
from delayq._redis.retry import retry_delay
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayq._engine.context import EngineContext
    from delayq._engine.stagger import Notice
    from delayq._engine.store import NextDue
    from delayq._engine.wakeup_plan import Actions, NextCall, Wakeup
    from delayq._timer.wheel import Timeout


def warn_of_refusal(queue: str) -> None:
    """Log a warning that a script could not publish on this queue's channel."""
    log(
        WARNING,
        queue,
        "no permission to PUBLISH on its channel, so other clients may notice messages up to their"
        " resync_interval late: grant this user the rights that `delayq acl` prints",
    )


class WakeupLoop:
    """Makes the calls of one queue or partition, one at a time, and sets the timer for the next.

    Attributes:
        plan: Decides when to call.
        timer_at: The moment for which the timer was set that led to the call in flight, in local
            seconds; None if something else led to it.
        errors: Number of calls that have failed so far.
        task: Makes the call in flight; None if there is none.
    """

    def __init__(
        self,
        name: str,
        make_call: Callable[[], Awaitable[NextCall]],
        services: EngineContext,
        want_messages: Callable[[], bool],
    ) -> None:
        """Args:
        name: The queue's name, for the log.
        make_call: Makes one call, and returns when the next one is needed.
        want_messages: Returns whether any caller here wants messages as they come due.
        """
        self._name = name
        self._make_call = make_call
        self._now = services.clock.local
        self._timer = services.timer
        self._background = services.background
        self._listen = services.listen
        self.task: asyncio.Task[Any] | None = None
        self._timeout: Timeout | None = None
        self._warned_of_refusal = False
        self.plan: WakeupPlan = WakeupPlan(
            services.clock,
            Stagger(
                secrets.token_hex(4),
                random.random,
                lambda: max(1, len(services.nodes.masters())),
                services.resync_interval,
            ),
            want_messages,
            partial(retry_delay, longest=services.retry_most),
        )
        self.timer_at: float | None = None
        self.errors: int = 0

    # Events, as :class:`WakeupPlan` takes them

    def on_caller_joined(self) -> None:
        self._act(self.plan.on_caller_joined())

    def listen(self) -> None:
        self._act(self.plan.listen())

    def on_no_callers(self) -> None:
        self._act(self.plan.on_no_callers())

    def wake(self) -> None:
        """Call the server now, or right after the call in flight."""
        self._act(self.plan.wake())

    def on_due(self, due_us: int) -> None:
        self._act(self.plan.on_due(due_us, self._now()))

    def on_notice(self, notice: Notice) -> None:
        self._act(self.plan.on_notice(notice, self._now()))

    def on_recheck(self, due_us: int, reply: NextDue) -> None:
        late = reply.late_us / 1_000_000
        now = self._now()
        self._act(self.plan.on_recheck(due_us, late, reply.listeners, reply.dormant, now))

    def on_summons(self, number: int) -> None:
        self._act(self.plan.on_summons(number))

    def on_probe(self, due_us: int, invalidations: int) -> None:
        self._act(self.plan.on_probe(due_us, invalidations, self._now()))

    def handed_out(self, through_us: int) -> None:
        self._act(self.plan.handed_out(through_us))

    def took_messages(self, listeners: int) -> None:
        self.plan.took_messages(listeners, self._now())
        if listeners < 0 and not self._warned_of_refusal:
            self._warned_of_refusal = True
            warn_of_refusal(self._name)

    def signature(self) -> str:
        """Return what the next call appends to its notice, as :meth:`Stagger.signature`."""
        return self.plan.stagger.signature(
            self._now(), wants_messages=self.plan.callers.want_messages()
        )

    def more_is_due(self, summon: Callable[[int], Awaitable[object]]) -> None:
        """Summon dormant clients, if need be, because more is due than this client takes.

        ``summon`` gets the number of clients at hand, and summons others if more are needed.
        """
        clients = self.plan.stagger.clients_at_hand(self._now())
        if clients is not None:
            self._background.spawn(self._summon(summon, clients), f"summon for {self._name}")

    async def _summon(self, summon: Callable[[int], Awaitable[object]], clients: int) -> None:
        # A hint: dormant clients re-check now and then.
        with suppress(DelayqError):
            await summon(clients)

    # The task

    async def drain(self, timeout: float) -> None:
        """Wait until no call is in flight, for at most ``timeout`` seconds."""
        if self.task is not None:
            await asyncio.wait({self.task}, timeout=timeout)

    async def aclose(self, grace: float) -> None:
        """Stop within ``grace`` seconds."""
        self.close()
        if (task := self.task) is not None:
            await asyncio.wait({task}, timeout=grace)
            task.cancel()

    def close(self) -> None:
        """Make no further call after the one in flight."""
        self._act(self.plan.close())

    def _act(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Call):
                if self.task is None:
                    self.task = self._background.spawn(self._run(), f"wake {self._name}")
            elif isinstance(action, Arm):
                self._set_timer(action.wakeup)
            elif isinstance(action, Listen):
                self._listen(action.to)
            elif self._timeout is not None:
                self._timeout.cancel()
                self._timeout = None

    def _set_timer(self, wakeup: Wakeup) -> None:
        # The new timer comes first, so that there is one at any moment.
        try:
            timeout = self._timer.new_timeout(
                partial(self._on_timer, wakeup), wakeup.wake_at - self._now()
            )
        except BaseException:
            self.plan.on_timer_refused(wakeup)
            raise
        if self._timeout is not None:
            self._timeout.cancel()
        self._timeout = timeout

    def _on_timer(self, wakeup: Wakeup, _: Timeout) -> None:
        if self.task is None:
            self.timer_at = wakeup.wake_at
        self._act(self.plan.on_timer(wakeup))

    async def _run(self) -> None:
        try:
            while self.plan.begin_call():
                try:
                    next_call = await self._make_call()
                except Exception as error:  # noqa: BLE001 - the queue keeps running, whatever fails
                    actions = self._on_failure(error)
                else:
                    actions = self.plan.on_reply(next_call, self._now())
                self.timer_at = None
                self._act(actions)
        finally:
            self.task = self.timer_at = None

    def _on_failure(self, error: Exception) -> Actions:
        self.errors += 1
        actions = self.plan.on_failure(self._now())
        if self.plan.failures == 1:
            text = "checking for due messages failed, retrying: %s"
            cause = None if isinstance(error, DelayqError) else error
            log(WARNING, self._name, text, error, error=cause)
        return actions
