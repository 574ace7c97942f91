"""Claims the due messages of one reliable queue and hands them to the callers waiting on this
client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from delayq._engine.leases import fresh_until
from delayq._engine.waiters import Waiters
from delayq._engine.wakeup import WakeupLoop
from delayq._engine.wakeup_plan import NOT_ASKED, due_us
from delayq._logging import about
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.hand_back import HandBack
from delayq.errors import DelayqError, OutcomeUnknown, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.stagger import TransferNotice
    from delayq._engine.suspects import Suspects
    from delayq._redis.hand_back import LastCalls
    from delayq._reliable.known_settings import KnownSettings
    from delayq._reliable.replies import Claim
    from delayq._reliable.settings import Policy
    from delayq._reliable.store import ReliableStore

_log = logging.getLogger("delayq")

# Maximum number of messages claimed per script call: a script blocks the whole server while it
# runs.
BATCH = 100
_RETURN_WITHIN = 0.1


class Claims:
    """Claims due messages from the server while callers on this client want them.

    Attributes:
        wakeups: Decides when to call the server.
        taker: Hands messages to the waiting callers.
        suspects: Tracks the suspect that the client has at work.
        expired: Number of messages found so far past their time to live.
        died: Number of messages found so far that had used all their attempts when their lease
            ended.
    """

    def __init__(
        self,
        store: ReliableStore,
        policy: Policy,
        settings: KnownSettings,
        services: EngineContext,
        settled: Callable[[], int],
        recurring: Callable[[list[bytes]], None],
    ) -> None:
        """Args:
        store: The queue's data on the server.
        policy: The settings with which this client claims messages.
        settings: The queue's settings on the server, as far as this client knows them.
        services: The services the queue is built from.
        settled: Returns how many claims have been settled or lost so far.
        recurring: Called with the ids of occurrences that the server has dropped.
        """
        self._name = store.keys.name
        self._store = store
        self._policy = policy
        self._settings = settings
        self._clock = services.clock
        self._timer = services.timer
        self.suspects: Suspects[Claim] = services.suspects
        self._settled = settled
        self._recurring = recurring
        self._claimed = 0
        self.wakeups: WakeupLoop = WakeupLoop(
            self._name, self.run_once, services, lambda: self.taker.wanted > 0
        )
        self.taker: Waiters[Claim] = Waiters(
            self._name,
            services,
            push=self.wakeups.wake,
            wanted=self.wakeups.demand,
            idle=lambda: None,
            hand_back=self._releasing,
            given_back=self._given_back,
        )
        # Token of the last call, while its answer may be lost.
        self._unsure: str | None = None
        self._session = secrets.token_hex(6)
        self._calls = itertools.count()
        self.expired: int = 0
        self.died: int = 0

    @property
    def has_some_out(self) -> bool:
        """Whether messages claimed here may still be in hand."""
        return self._claimed > self._settled()

    def announced(self, due_us: int) -> None:
        """Act on the announcement of a message that is due at ``due_us`` by the server's clock."""
        if self.taker.wanted:
            self.wakeups.on_due(due_us)
        else:
            self.wakeups.forget()

    def noticed(self, notice: TransferNotice) -> None:
        """Act on a notice that another client has handed out the due messages."""
        if self.taker.wanted:
            self.wakeups.on_notice(notice)
        elif notice.client != self.wakeups.client:
            self.wakeups.forget()

    async def run_once(self) -> int:
        """Make one call, if any caller wants messages.

        Returns the value that :class:`WakeupLoop` expects.

        Raises:
            ServerError: As for :meth:`RedisClient.run_once`. Callers that can wait keep waiting;
                the others receive the error.
        """
        try:
            await self._recover()
            await self.taker.returned(_RETURN_WITHIN)
            if not self.taker.wanted:
                return NOT_ASKED
            take = min(self.taker.begin(), BATCH)
            while True:
                epoch = self._settings.epoch
                try:
                    claims, wait, now = await self._call(take)
                except SettingsChanged:
                    await self._settings.after_refusal(0, epoch)
                    continue
                if claims or wait:
                    break
                # Every message that the call examined is gone, and there are more.
                await asyncio.sleep(0)
            self.taker.end(claims, more=wait == 0)
            return 0 if len(claims) == take and self.taker.waiting else due_us(now, wait)
        except DelayqError as error:
            self.taker.fail(error)
            raise
        except Exception as error:
            # Treat an unforeseen error as a failed call too, so that the call is retried.
            _log.exception("queue %r: a claim failed", self._name, extra=about(self._name))
            failure = ServerUnavailable(f"a claim failed: {type(error).__name__}")
            self.taker.fail(failure)
            raise failure from error
        finally:
            self.taker.over()

    async def quiet(self, within: float) -> None:
        """Wait until no call is in flight and everything given back has arrived, for at most
        ``within`` seconds each.
        """
        await self.wakeups.idle(within)
        await self.taker.returned(within)

    def close(self, last: LastCalls) -> None:
        """Stop calling the server.

        Before this returns, write the calls that give back every claim that reached no caller.
        """
        self.suspects.forget(self.wakeups.wake)
        self.wakeups.close()
        self.taker.close(last)

    async def aclose(self, grace: float) -> None:
        """Wait for a call in flight to end and for its messages to be given back, for at most
        ``grace`` seconds.
        """
        until = self._clock.local() + grace
        await self.wakeups.aclose(grace)
        with suppress(ServerError, TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock.local())):
                await self._recover()
        await self.taker.aclose(max(0.0, until - self._clock.local()))

    async def _call(self, take: int) -> tuple[list[Claim], int, int]:
        """Claim up to ``take`` messages.

        Also returns the time until the next message is due, as :class:`ClaimReply` has it, and the
        server's time.
        """
        policy, token = self._policy, f"{self._session}-{next(self._calls)}"
        asked_at = self._clock.local()
        held = self.suspects.held
        ours = held is not None and held.token.startswith(self._session)
        # A suspect at work in another queue cannot be looked up here.
        asks = (held is None or ours) and self.suspects.ask()
        suspect: Claim | None = None
        try:
            # Assume that the answer is lost until it has been read.
            self._unsure = token
            reply = await self._store.claim(
                self._settings.epoch,
                take,
                policy,
                token,
                self.wakeups.signature(),
                may_be_suspect=asks,
                held=held if asks else None,
                has_company=self.has_some_out,
            )
            now = reply.now_us
            self._clock.observe(now, asked_at)
            ends_us = now + policy.lease_us
            claims = reply.claims(
                token, ends_us, fresh_until(self._clock, ends_us, policy.lease_us)
            )
            self._unsure = None
            if reply.is_suspect:
                suspect = claims[0]
        except DelayqError as error:
            if not isinstance(error, OutcomeUnknown):
                self._unsure = None
            raise
        finally:
            if asks:
                self.suspects.answered(suspect, self._timer, policy.lease_us / 1_000_000)
        self._claimed += len(claims)
        self.expired += reply.expired
        self.died += reply.died
        if reply.died:
            _log.warning(
                "queue %r: %d messages became dead letters because their last lease ended",
                self._name,
                reply.died,
                extra=about(self._name),
            )
        if reply.dropped:
            self._recurring(reply.dropped)
        if claims:
            self.wakeups.transferred(reply.listeners)
        if reply.wait_us:
            # No message that was due by then is left.
            self.wakeups.handed_out(now)
        if reply.more_suspects:
            self.suspects.when_free(self.wakeups.wake)
        return claims, reply.wait_us, now

    def _given_back(self, claims: Sequence[Claim]) -> None:
        self._claimed -= len(claims)
        for claim in claims:
            if claim.is_suspect:
                self.suspects.over(claim)

    def _releasing(self, claims: Sequence[Claim]) -> HandBack:
        return HandBack(self._store.release_request(claims))

    async def _recover(self) -> None:
        """Give back what the last call claimed, if its answer was lost.

        Otherwise it would wait for its lease to end.
        """
        if self._unsure is not None:
            await self._store.release_all(self._unsure)
            self._unsure = None
