"""The claims of one partition: takes due messages for the callers waiting on this client, and ends
and extends their leases.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from delayq._engine.leases import MAX_LEASES, Acknowledger, check_outcome, fresh_until
from delayq._engine.wakeup import WakeupLoop
from delayq._engine.wakeup_plan import DUE_NOW, NONE_DUE, CallOutcome, moment_after
from delayq._logging import about, log
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.return_calls import ReturnCall
from delayq._reliable.outcomes import attempt_of
from delayq._reliable.replies import Claim
from delayq.errors import Closed, DelayqError, OutcomeUnknown, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.dispatcher import ClaimSource, Dispatcher
    from delayq._engine.wakeup_plan import NextCall
    from delayq._redis.scripts import Request
    from delayq._reliable.replies import ClaimReply
    from delayq._reliable.settings import Policy
    from delayq._reliable.settings_cache import SettingsCache
    from delayq._reliable.store import ReliableStore

_log = logging.getLogger("delayq")

MOST_PER_CLAIM = 100
"""Maximum number of messages that one call claims from a partition: a script blocks the whole
server while it runs.
"""
_RETURN_WITHIN = 0.1


@dataclass(slots=True)
class _ClaimCalls:
    """The calls that claim, by which the server finds what the last one has handed out, to give it
    back if its reply is lost.

    Attributes:
        key: The key of all of them.
        number: The number of the last one.
        is_unsure: Whether its reply may be lost.
        keeps_key: Whether a reply was ever lost: then the key stays, and keeps a call that is
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
        wakeups: Makes the claims, when its plan says so.
        expired: Number of messages found so far past their time to live.
        died: Number of messages found so far that had used all their attempts when their lease
            ended.
        last_error: The error of the last call; None if it succeeded.
    """

    def __init__(
        self,
        store: ReliableStore,
        index: int,
        services: EngineContext,
        dispatcher: Dispatcher[Claim],
        settings: SettingsCache,
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
            store.keys.name, self.claim_once, services, lambda: dispatcher.caller_queue.wants_items
        )
        # A client that only offers needs no announcements.
        self.wakeups.plan.stagger.is_dormant = True
        self.source: ClaimSource[Claim] = dispatcher.add_source(
            store.keys.name,
            self.wakeups.wake,
            request_probe=probe,
            return_call=self._releasing,
            on_returned=services.suspects.remove,
            services=services,
        )
        self._calls = _ClaimCalls(store.keys.call(f"{secrets.token_hex(6)}-c"))
        self._suspect: Claim | None = None
        self.expired: int = 0
        self.died: int = 0
        self.last_error: DelayqError | None = None

    @property
    def position(self) -> tuple[object, int] | None:
        """How far the calls that claim have come, which changes from one to the next; None while
        none is under way.
        """
        task = self.wakeups.task
        return None if task is None else (task, self._calls.number)

    def on_cancelled(self, lease: tuple[bytes, bytes]) -> None:
        """Act on the cancellation of a message, by its id and the token of its lease."""
        if self._suspect is not None and self._suspect.lease_id == lease:
            self._services.suspects.remove((self._suspect,))

    async def claim_once(self) -> NextCall:
        """Make one claim, if any caller wants messages, and return when the next one is needed.

        Raises:
            ServerError: As for :meth:`RedisClient.run_once`. Callers that can wait keep waiting;
                the others receive the error.
        """
        failure: DelayqError | None = None
        try:
            if self._calls.is_unsure:
                await self._recover()
            await self.source.return_queue.drain(_RETURN_WITHIN)
            max_count, policy = self.source.begin_claim(MOST_PER_CLAIM)
            if not max_count:
                return CallOutcome.NO_CALLERS
            if self._services.suspects.keeps_others_out:
                self._services.suspects.when_others_may_come(self.wakeups.wake)
                self.source.deliver([], has_more=False)
                return NONE_DUE
            while True:
                try:
                    claims, wait, now = await self._claim(max_count, policy)
                except SettingsChanged:
                    # They have the layout of another release, which this tells.
                    await self._settings.after_refusal(self._index)
                    continue
                if claims or wait or not self.source.is_wanted:
                    break
                # Every message that the call examined is gone, and there are more; or groups still
                # wait for turns by limits that have changed.
                await asyncio.sleep(0)
            # Nothing else is for those who got a suspect.
            has_suspect = bool(claims) and claims[0].is_suspect
            self.source.deliver(claims, has_more=wait == 0 and not has_suspect)
            return self._next_call(now, wait)
        except DelayqError as error:
            failure = error
            self.source.fail_claim(error)
            raise
        except Exception as error:
            # Treat an unforeseen error as a failed call too, so that the call is retried.
            name = self._store.keys.name
            _log.exception("queue %r: a claim failed", name, extra=about(name))
            failure = ServerUnavailable(f"a claim failed: {type(error).__name__}")
            self.source.fail_claim(failure)
            raise failure from error
        finally:
            self.last_error = failure
            self.source.end_claim()

    def _next_call(self, now_us: int, wait_us: int) -> NextCall:
        if wait_us:
            return moment_after(now_us, wait_us)
        # More is due here. The dispatcher decides which of several partitions is asked next.
        return CallOutcome.MORE_DUE if self._settings.stored.partitions > 1 else DUE_NOW

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
        deadline = self._services.clock.local() + grace
        await self.wakeups.aclose(grace)
        with suppress(ServerError, TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - self._services.clock.local())):
                if self._calls.is_unsure:
                    await self._recover()
                if self._calls.number and not self._calls.keeps_key:
                    await self._store.forget_calls([self._calls.key])
        await self.source.return_queue.aclose(max(0.0, deadline - self._services.clock.local()))

    async def _claim(self, max_count: int, policy: Policy) -> tuple[list[Claim], int, int]:
        """Claim up to ``max_count`` messages for callers of that policy, and act on the reply.

        Also returns the time until the next message is due, as :class:`ClaimReply` has it, and the
        server's time.
        """
        reply, claims = await self._claim_among_suspects(max_count, policy)
        # A user who may not publish cannot tell whether there are others.
        are_others = reply.listeners > 1 or reply.listeners < 0
        self.source.note_limits(is_limited=reply.is_limited == 1, are_others=are_others)
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
            self.wakeups.took_messages(reply.listeners)
        if reply.wait_us:
            # No message that was due by then is left.
            self.wakeups.handed_out(reply.now_us)
        else:
            self.wakeups.more_is_due(partial(self._store.summon, max_count))
        if reply.is_limited and len(claims) == max_count:
            # No free slot is announced to us: the next caller asks.
            self.wakeups.plan.invalidate()
        if reply.more_suspects:
            self._services.suspects.when_free(self.wakeups.wake)
        return claims, reply.wait_us, reply.now_us

    async def _claim_among_suspects(
        self, max_count: int, policy: Policy
    ) -> tuple[ClaimReply, list[Claim]]:
        """Call the server. Note which of the messages that it hands out are at work now, and the
        suspect among them.
        """
        clock, suspects = self._services.clock, self._services.suspects
        asked_at = clock.local()
        suspect_at_work = suspects.suspect
        terms = suspects.begin_claim(
            lambda claim: clock.seconds_from_now(claim.ends_us) < 0, self._suspect
        )
        suspect: Claim | None = None
        keeps_others_out = False
        try:
            # Assume that the reply is lost until it has been read.
            self._calls.number += 1
            self._calls.is_unsure = True
            reply = await self._store.claim(
                self._calls.key,
                self._calls.number,
                max_count,
                policy,
                self.wakeups.signature(),
                terms=terms,
                own_suspect=suspect_at_work if terms.may_bring_suspect else None,
            )
            clock.observe(reply.now_us, asked_at, self.wakeups.timer_at)
            fresh = fresh_until(clock, reply.ends_us, policy.lease_us)
            claims = reply.claims(
                fresh,
                policy,
                self._index,
                lambda moment_us: clock.local() + clock.seconds_until(moment_us),
            )
            first = claims[0] if claims else None
            tell = partial(self._tell_not_alone, first) if first and first.began_alone else None
            if suspects.add(claims, tell):
                # Until this returns, messages that join one that was alone do not begin.
                await suspects.tell_not_alone()
            if first is not None and first.is_suspect:
                suspect = self._suspect = first
            keeps_others_out = reply.suspicion > 1
            self._calls.is_unsure = False
        except DelayqError as error:
            self._calls.is_unsure = isinstance(error, OutcomeUnknown)
            raise
        finally:
            suspects.end_claim(
                terms,
                suspect,
                self._services.timer,
                policy.lease_us / 1_000_000,
                keeps_others_out=keeps_others_out,
            )
        return reply, claims

    async def _tell_not_alone(self, claim: Claim) -> None:
        """Tell the server that a message is not alone in this client any more."""
        assert claim.policy is not None
        left_us = int(self._services.clock.seconds_until(claim.ends_us) * 1_000_000)
        # A lease that was made longer stays so.
        lease_us = max(left_us, claim.policy.lease_us)
        now_us, (is_ours,) = await self._store.extend([claim], lease_us, alone=False)
        if is_ours:
            claim.ends_us = now_us + lease_us

    def _releasing(self, claims: Sequence[Claim]) -> ReturnCall:
        return ReturnCall(self._store.release_request(claims, is_begun=False))

    async def _recover(self) -> None:
        """Give back what the last call claimed, whose reply was lost.

        Otherwise it would wait for its lease to end.
        """
        self._calls.keeps_key = True
        await self._store.release_call(self._calls.key, self._calls.number)
        self._calls.is_unsure = False


class ClaimAcknowledger(Acknowledger[Claim]):
    """Ends and extends the leases of one partition's messages.

    Attributes:
        has_followers: Whether messages may have followed from any that were acknowledged here, or
            from their batches. It stays true, because a count that drifts would lose followers.
    """

    def __init__(
        self,
        store: ReliableStore,
        services: EngineContext,
        counters: Counters,
        settings: SettingsCache,
    ) -> None:
        # A caller that is cancelled has handled the message all the same.
        super().__init__(store.keys.name, services, counters, uncancellable=True)
        self._store = store
        self._settings = settings
        self._suspects = services.suspects
        self._background = services.background
        self._closed = False
        self.has_followers: bool = False
        # Cancelled messages whose handlers outlive their blocks, and those whose slots are to be
        # freed.
        self._outlived: Counter[Claim] = Counter()
        self._slots_to_free: list[Claim] = []

    async def nack(self, claim: Claim, delay_us: int, error: str) -> None:
        """Make the message due again after ``delay_us`` microseconds.

        Raises:
            LeaseLost: The lease had ended, and another worker may have the message. Nothing was
                changed.
            OutcomeUnknown: The call may have been carried out.
        """
        attempt = self._attempt_of(claim, error)
        request = self._store.nack_request(claim, delay_us, error, attempt=attempt)
        await self._end_lease(request, claim)
        self._counters.retried += 1

    async def snooze(self, claim: Claim, delay_us: int) -> None:
        """Make the message due again after ``delay_us`` microseconds; the attempt does not count.

        Raises the same errors as :meth:`nack`.
        """
        await self._end_lease(self._store.nack_request(claim, delay_us, "", counts=False), claim)
        self._counters.released += 1

    async def bury(self, claim: Claim, death: str, error: str = "") -> None:
        """Make the message a dead letter.

        ``death`` tells why, as JSON on one line. Raises the same errors as :meth:`nack`.
        """
        request = self._store.bury_request(claim, death, self._attempt_of(claim, error))
        await self._end_lease(request, claim)
        self._counters.buried += 1

    async def release(self, claim: Claim, *, is_begun: bool) -> None:
        """Return the message to the state it was in before it was claimed; not ``is_begun``: no
        handler has begun it.

        Raises the same errors as :meth:`nack`.
        """
        await self._end_lease(self._store.release_request([claim], is_begun=is_begun), claim)
        self._counters.released += 1

    async def extend(self, claims: Sequence[Claim], lease_us: int) -> list[bool]:
        """Extend leases to end ``lease_us`` microseconds from now.

        Returns which of them are still ours.

        Raises:
            ServerError: The outcome is unknown; most likely nothing was changed.
            Closed: The queue is closed.
        """
        self._check_open()
        are_ours: list[bool] = []
        for at in range(0, len(claims), MAX_LEASES):
            page = claims[at : at + MAX_LEASES]
            asked_at = self._clock.local()
            now_us, page_outcomes = await self._store.extend(page, lease_us)
            self._clock.observe(now_us, asked_at)
            for claim, is_ours in zip(page, page_outcomes, strict=True):
                if is_ours:
                    claim.ends_us = now_us + lease_us
                    own_us = lease_us if claim.policy is None else claim.policy.lease_us
                    claim.fresh_until = fresh_until(self._clock, claim.ends_us, own_us)
                else:
                    self._suspects.remove((claim,))
            are_ours += page_outcomes
        return are_ours

    def on_outlived(self, claim: Claim) -> None:
        """Note that a handler, or a thread of it, runs on after the block of its message: until
        :meth:`on_handler_ended`.
        """
        self._outlived[claim] += 1

    def on_handler_ended(self, claim: Claim) -> None:
        """Note that a handler has ended that has outlived the block of its message."""
        self._outlived[claim] -= 1
        if not self._outlived[claim]:
            del self._outlived[claim]
            self.free_slots(claim)

    def free_slots(self, claim: Claim) -> None:
        """Free the slots of a message that was cancelled, if it has kept them and its handler has
        ended: soon, or at the end of its lease if the call fails.
        """
        if claim in self._outlived or claim in self._slots_to_free or self._closed:
            return
        self._slots_to_free.append(claim)
        if len(self._slots_to_free) == 1:
            self._background.spawn(self._free_all_slots(), f"cancelled messages of {self.name}")

    async def _free_all_slots(self) -> None:
        while self._slots_to_free:
            claims = self._slots_to_free[:MAX_LEASES]
            try:
                await self._store.free_slots(claims)
            except (ServerError, Closed):
                # They come back when their leases would have ended.
                pass
            except Exception as error:  # noqa: BLE001 - the next ones are freed all the same
                text = "the slots of %d cancelled messages stay taken until their leases end"
                log(logging.ERROR, self.name, text, len(claims), error=error)
            del self._slots_to_free[: len(claims)]

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        self._closed = True
        await super().aclose(grace)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the queue is closed: the message is redelivered when its lease ends")

    def _ack_request(self, claims: Sequence[Claim], slot: int) -> Request:
        del slot
        self._suspects.remove(claims)
        if self.has_followers and any(hasattr(claim, "followers") for claim in claims):
            return self._store.ack_then_request(claims)
        if self._settings.stored.keep_us:
            return self._store.finish_request(claims)
        return self._store.ack_request(claims)

    def _attempt_of(self, claim: Claim, error: str) -> bytes:
        """Return what to record about an attempt that has failed; nothing if it is not kept."""
        return attempt_of(claim, error) if self._settings.stored.keep_us else b""

    def _on_outcome(
        self,
        claim: Claim,
        outcome: bool | OutcomeUnknown | BaseException,
        message_id: str | None = None,
    ) -> None:
        # It may have failed before it left.
        self._suspects.remove((claim,))
        if outcome is False:
            # It may have been cancelled just when its handler had ended.
            self.free_slots(claim)
        super()._on_outcome(claim, outcome, message_id or claim.id.decode(errors="replace"))

    async def _end_lease(self, request: Request, claim: Claim) -> None:
        self._check_open()
        try:
            (outcome,) = await self._run(request, [claim])
        finally:
            self._suspects.remove((claim,))
        check_outcome(outcome)
