"""Claims the due messages of one partition and hands them to the callers waiting on this client."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from delayq._engine.leases import fresh_until
from delayq._engine.wakeup import WakeupLoop
from delayq._engine.wakeup_plan import CallOutcome, due_us
from delayq._logging import about
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.return_calls import ReturnCall
from delayq.errors import DelayqError, OutcomeUnknown, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.dispatcher import ClaimSource, Dispatcher
    from delayq._engine.stagger import TransferNotice
    from delayq._reliable.known_settings import KnownSettings
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import Policy
    from delayq._reliable.store import ReliableStore

_log = logging.getLogger("delayq")

# Maximum number of messages claimed per script call: a script blocks the whole server while it
# runs.
BATCH = 100
_RETURN_WITHIN = 0.1


@dataclass(slots=True)
class _Calls:
    """The calls that claim, by which the server finds what the last one has handed out, to give it
    back if its answer is lost.

    Attributes:
        key: The key of all of them.
        number: The number of the last one.
        is_unsure: Whether its answer may be lost.
        keeps_key: Whether an answer was ever lost: then the key stays, and keeps a call that is
            late from having any effect.
    """

    key: str
    number: int = 0
    is_unsure: bool = False
    keeps_key: bool = False


class Claims:
    """Claims due messages of one partition while callers on this client want them.

    Attributes:
        source: Hands the messages to the queue's waiting callers.
        wakeups: Decides when to call the server.
        expired: Number of messages found so far past their time to live.
        died: Number of messages found so far that had used all their attempts when their lease
            ended.
    """

    def __init__(
        self,
        store: ReliableStore,
        index: int,
        services: EngineContext,
        dispatcher: Dispatcher[Claim],
        settings: KnownSettings,
        *,
        probe: Callable[[], None],
        on_dropped: Callable[[Sequence[bytes]], None],
    ) -> None:
        """Args:
        store: The partition's data on the server.
        index: The partition's number.
        services: The services the queue is built from.
        dispatcher: The callers of the queue.
        settings: The queue's settings.
        probe: Finds out whether the partition has something due.
        on_dropped: Called with the ids of occurrences that the server has dropped.
        """
        self._store = store
        self._index = index
        self._services = services
        self._settings = settings
        self._on_dropped = on_dropped
        self.wakeups: WakeupLoop = WakeupLoop(
            store.keys.name, self.run_once, services, lambda: dispatcher.callers.capacity > 0
        )
        # A client that only offers needs no notifications.
        self.wakeups.plan.stagger.is_dormant = True
        self.source: ClaimSource[Claim] = dispatcher.add_source(
            store.keys.name,
            self.wakeups.wake,
            request_probe=probe,
            return_call=self._releasing,
            on_returned=self._given_back,
            services=services,
        )
        self._calls = _Calls(store.keys.call(f"{secrets.token_hex(6)}-c"))
        self._suspect: Claim | None = None
        self.expired: int = 0
        self.died: int = 0

    @property
    def _is_wanted(self) -> bool:
        return self.source.dispatcher.callers.capacity > 0

    def announced(self, due_us: int) -> None:
        """Act on the announcement of a message that is due at ``due_us`` by the server's clock."""
        if self._is_wanted:
            self.wakeups.on_due(due_us)
        else:
            self.wakeups.plan.forget()

    def noticed(self, notice: TransferNotice) -> None:
        """Act on a notice that another client has handed out the due messages."""
        if self._is_wanted:
            self.wakeups.on_notice(notice)
        elif notice.client != self.wakeups.plan.stagger.client:
            self.wakeups.plan.forget()

    def cancelled(self, lease: tuple[bytes, bytes]) -> None:
        """Act on the news that a message was cancelled, by its id and the token of its lease."""
        if self._suspect is not None and self._suspect.lease_id == lease:
            self._services.suspects.over(self._suspect)

    async def run_once(self) -> int | CallOutcome:
        """Make one call, if any caller wants messages.

        Returns the value that :class:`WakeupLoop` expects.

        Raises:
            ServerError: As for :meth:`RedisClient.run_once`. Callers that can wait keep waiting;
                the others receive the error.
        """
        try:
            await self._recover()
            await self.source.return_queue.drain(_RETURN_WITHIN)
            take, policy = self.source.begin(BATCH)
            if not take:
                return CallOutcome.NO_CALLERS
            if self._services.suspects.works_alone:
                self._services.suspects.when_not_alone(self.wakeups.wake)
                self.source.end([], has_more=False)
                return -1
            while True:
                try:
                    claims, wait, now = await self._call(take, policy)
                except SettingsChanged:
                    # They have the layout of another release, which this tells.
                    await self._settings.after_refusal(self._index)
                    continue
                if claims or wait or not self._is_wanted:
                    break
                # Every message that the call examined is gone, and there are more; or groups still
                # wait for turns by limits that have changed.
                await asyncio.sleep(0)
            # Nothing else is for those who got a suspect.
            has_suspect = bool(claims) and claims[0].is_suspect
            self.source.end(claims, has_more=wait == 0 and not has_suspect)
            # Partitions take turns.
            turn = CallOutcome.MORE_DUE if self._settings.stored.partitions > 1 else 0
            return due_us(now, wait) or turn
        except DelayqError as error:
            self.source.fail(error)
            raise
        except Exception as error:
            # Treat an unforeseen error as a failed call too, so that the call is retried.
            name = self._store.keys.name
            _log.exception("queue %r: a claim failed", name, extra=about(name))
            failure = ServerUnavailable(f"a claim failed: {type(error).__name__}")
            self.source.fail(failure)
            raise failure from error
        finally:
            self.source.finish()

    async def quiet(self, within: float) -> None:
        """Wait until no call is in flight and everything given back has arrived, for at most
        ``within`` seconds each.
        """
        await self.wakeups.drain(within)
        await self.source.return_queue.drain(within)

    def close(self) -> None:
        """Make no more calls."""
        self._services.suspects.forget(self.wakeups.wake)
        self.wakeups.close()

    async def aclose(self, grace: float) -> None:
        """Wait for a call in flight to end and for its messages to be given back, for at most
        ``grace`` seconds.
        """
        until = self._services.clock.local() + grace
        await self.wakeups.aclose(grace)
        with suppress(ServerError, TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._services.clock.local())):
                await self._recover()
                if self._calls.number and not self._calls.keeps_key:
                    await self._store.forget_calls([self._calls.key])
        await self.source.return_queue.aclose(max(0.0, until - self._services.clock.local()))

    async def _call(self, take: int, policy: Policy) -> tuple[list[Claim], int, int]:
        """Claim up to ``take`` messages for callers of that policy.

        Also returns the time until the next message is due, as :class:`ClaimReply` has it, and the
        server's time.
        """
        clock, suspects = self._services.clock, self._services.suspects
        asked_at = clock.local()
        held = suspects.held
        # A suspect at work in another queue cannot be looked up here.
        asks = (held is None or held is self._suspect) and suspects.ask()
        alone = suspects.begin_claim(lambda claim: clock.seconds_from_now(claim.ends_us) < 0)
        suspect: Claim | None = None
        stays_alone, proven_in = False, policy.lease_us / 1_000_000
        try:
            # Assume that the answer is lost until it has been read.
            self._calls.number += 1
            self._calls.is_unsure = True
            reply = await self._store.claim(
                self._calls.key,
                self._calls.number,
                take,
                policy,
                self.wakeups.signature(),
                may_be_suspect=asks,
                held=held if asks else None,
                alone=alone,
            )
            now = reply.now_us
            clock.observe(now, asked_at, self.wakeups.timer_at)
            fresh = fresh_until(clock, reply.ends_us, policy.lease_us)
            claims = reply.claims(
                fresh,
                policy,
                self._index,
                lambda moment_us: clock.local() + clock.seconds_until(moment_us),
            )
            # Until this returns, messages that join one that was alone do not begin.
            suspect = await self._add(claims)
            stays_alone = reply.suspect > 1
            self._calls.is_unsure = False
        except DelayqError as error:
            self._calls.is_unsure = isinstance(error, OutcomeUnknown)
            raise
        finally:
            suspects.end_claim()
            if asks:
                suspects.answered(suspect, self._services.timer, proven_in, stays_alone=stays_alone)
        # A user who may not publish cannot tell whether there are others.
        are_others = reply.listeners > 1 or reply.listeners < 0
        self.source.note_limits(is_limited=reply.is_held == 1, are_others=are_others)
        self.expired += reply.expired
        self.died += reply.died
        if reply.died:
            _log.warning(
                "queue %r: %d messages became dead letters because their last lease ended",
                self._store.keys.name,
                reply.died,
                extra=about(self._store.keys.name),
            )
        if reply.dropped:
            self._on_dropped(reply.dropped)
        if claims:
            self.wakeups.transferred(reply.listeners)
        if reply.wait_us:
            # No message that was due by then is left.
            self.wakeups.handed_out(now)
        else:
            self.wakeups.more_is_due(partial(self._store.summon, take))
        if reply.is_held and len(claims) == take:
            # No free slot is announced to us: the next caller asks.
            self.wakeups.plan.forget()
        if reply.more_suspects:
            suspects.when_free(self.wakeups.wake)
        return claims, reply.wait_us, now

    def _given_back(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._services.suspects.over(claim)

    async def _add(self, claims: Sequence[Claim]) -> Claim | None:
        """Note what has come here. Return it if it is a suspect."""
        first = claims[0] if claims else None
        share = partial(self._share, first) if first and first.began_alone else None
        await self._services.suspects.add(claims, share)
        if first is None or not first.is_suspect:
            return None
        self._suspect = first
        return first

    async def _share(self, claim: Claim) -> None:
        """Tell the server that a message is not alone in this client any more."""
        assert claim.policy is not None
        left_us = int(self._services.clock.seconds_until(claim.ends_us) * 1_000_000)
        # A lease that its holder has made longer stays so.
        lease_us = max(left_us, claim.policy.lease_us)
        now_us, (is_ours,) = await self._store.extend([claim], lease_us, alone=False)
        if is_ours:
            claim.ends_us = now_us + lease_us

    def _releasing(self, claims: Sequence[Claim]) -> ReturnCall:
        return ReturnCall(self._store.release_request(claims))

    async def _recover(self) -> None:
        """Give back what the last call claimed, if its answer was lost.

        Otherwise it would wait for its lease to end.
        """
        if self._calls.is_unsure:
            self._calls.keeps_key = True
            await self._store.release_call(self._calls.key, self._calls.number)
            self._calls.is_unsure = False
