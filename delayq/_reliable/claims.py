"""Claims the due messages of one reliable queue and hands them to the callers waiting on this client."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delayq._engine.leases import fresh_until
from delayq._engine.waiters import Waiters
from delayq._engine.wakeup import NOT_ASKED, WakeupLoop, due_us
from delayq._logging import about
from delayq._redis.hand_back import HandBack
from delayq._redis.scripts import Request
from delayq._reliable.scripts import CLAIM, RELEASE
from delayq.errors import DelayqError, OutcomeUnknown, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._engine.context import EngineContext
    from delayq._engine.stagger import TransferNotice
    from delayq._engine.suspects import Suspects
    from delayq._redis.hand_back import LastCalls
    from delayq._reliable.keys import ReliableKeys

_log = logging.getLogger("delayq")

# Maximum number of messages claimed per script call: a script blocks the whole server while it runs.
BATCH = 100
_RETURN_WITHIN = 0.1
_SCAN = 500


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings with which one client uses a queue.

    Attributes:
        lease_us: Length of a worker's lease on a message, in microseconds.
        max_attempts: Number of attempts after which a message becomes a dead letter; 0 for no limit.
        expired: How to treat a message past its time to live: ``drop`` or ``dead``.
        remember_us: How long the id of a handled message still counts as a duplicate, in microseconds.
        max_size: Number of live messages beyond which offers are refused; 0 for no limit.
    """

    lease_us: int
    max_attempts: int
    expired: str
    remember_us: int
    max_size: int


@dataclass(slots=True, eq=False)
class Claim:
    """A message that belongs to this client until its lease ends.

    Attributes:
        id: The message's id, as stored on the server.
        token: Identifies the lease.
        priority: 0 to 9.
        attempt: The number of this attempt, from 1.
        due_us: When the message was due, in microseconds.
        body: The body stored under the message's id.
        ends_us: When the lease ends, in microseconds.
        fresh_until: Local time until which at least half of the lease is left, in seconds.
        forgiven: Number of attempts that do not count towards the message's death, because its worker died, perhaps of another
            message.
        is_suspect: Whether the message may have killed its last worker.
    """

    id: bytes
    token: str
    priority: int
    attempt: int
    due_us: int
    body: bytes = field(repr=False)
    ends_us: int
    fresh_until: float
    forgiven: int = 0
    is_suspect: bool = False

    @property
    def name(self) -> tuple[bytes, str, int]:
        """The id, token and priority that every script needs to settle the claim."""
        return (self.id, self.token, self.priority)


class Claims:
    """Claims due messages from the server while callers on this client want them.

    Attributes:
        pushes: Decides when to call the server.
        taker: Hands messages to the waiting callers.
        suspects: Tracks the suspect that the client has at work.
        expired: Number of messages found so far past their time to live.
        died: Number of messages found so far that had used all their attempts when their lease ended.
    """

    def __init__(
        self,
        keys: ReliableKeys,
        policy: Policy,
        services: EngineContext,
        settled: Callable[[], int],
        recurring: Callable[[list[bytes]], None],
    ) -> None:
        """Args:
        keys: The queue's keys.
        policy: This client's settings for the queue.
        services: The services the queue is built from.
        settled: Returns how many claims have been settled or lost so far.
        recurring: Called with the ids of occurrences that the server has dropped.
        """
        self.keys: ReliableKeys = keys
        self._policy = policy
        self._server = services.server
        self._clock = services.clock
        self._timer = services.timer
        self.suspects: Suspects[Claim] = services.suspects
        self._settled = settled
        self._recurring = recurring
        self._claimed = 0
        self.pushes: WakeupLoop = WakeupLoop(keys.name, self.run_once, services, lambda: self.taker.wanted > 0)
        self.taker: Waiters[Claim] = Waiters(
            keys.name,
            services,
            push=self.pushes.push,
            wanted=self.pushes.wanted,
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
            self.pushes.announced(due_us)
        else:
            self.pushes.forget()

    def noticed(self, notice: TransferNotice) -> None:
        """Act on a notice that another client has handed out the due messages."""
        if self.taker.wanted:
            self.pushes.noticed(notice)
        elif notice.client != self.pushes.client:
            self.pushes.forget()

    async def run_once(self) -> int:
        """Make one call, if any caller wants messages. Returns the value that :class:`WakeupLoop` expects.

        Raises:
            ServerError: As for :meth:`Server.run_once`. Callers that can wait keep waiting; the others receive the error.
        """
        try:
            await self._recover()
            await self.taker.returned(_RETURN_WITHIN)
            if not self.taker.wanted:
                return NOT_ASKED
            take = min(self.taker.begin(), BATCH)
            while True:
                claims, wait, now = await self._call(take)
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
            _log.exception("queue %r: a claim failed", self.keys.name, extra=about(self.keys.name))
            failure = ServerUnavailable(f"a claim failed: {type(error).__name__}")
            self.taker.fail(failure)
            raise failure from error
        finally:
            self.taker.over()

    async def quiet(self, within: float) -> None:
        """Wait until no call is in flight and everything given back has arrived, for at most ``within`` seconds each."""
        await self.pushes.idle(within)
        await self.taker.returned(within)

    def close(self, last: LastCalls) -> None:
        """Stop calling the server. Before this returns, write the calls that give back every claim that reached no caller."""
        self.suspects.forget(self.pushes.push)
        self.pushes.close()
        self.taker.close(last)

    async def aclose(self, grace: float) -> None:
        """Wait for a call in flight to end and for its messages to be given back, for at most ``grace`` seconds."""
        until = self._clock.local() + grace
        await self.pushes.aclose(grace)
        with suppress(ServerError, TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock.local())):
                await self._recover()
        await self.taker.aclose(max(0.0, until - self._clock.local()))

    async def _call(self, take: int) -> tuple[list[Claim], int, int]:
        """Claim up to ``take`` messages.

        Also returns the time until the next message is due, as ``claim.lua`` reports it, and the server's time.
        """
        keys, policy, token = self.keys, self._policy, f"{self._session}-{next(self._calls)}"
        asked_at = self._clock.local()
        held = self.suspects.held
        ours = held is not None and held.token.startswith(self._session)
        # A suspect at work in another queue cannot be looked up here.
        asks = (held is None or ours) and self.suspects.ask()
        suspect: Claim | None = None
        try:
            # Assume that the answer is lost until it has been read.
            self._unsure = token
            now, wait, expired, died, listeners, found, is_suspect, more_suspects, dropped = await self._server.run_once(
                CLAIM,
                (*keys.messages, keys.paused, keys.dead, keys.dead_messages, keys.wake),
                (
                    take,
                    policy.lease_us,
                    token,
                    policy.max_attempts,
                    policy.expired,
                    self.pushes.signature(),
                    int(asks),
                    held.id if asks and held is not None else "",
                    held.token if asks and held is not None else "",
                    int(self.has_some_out),
                ),
                lambda _: None,
            )
            self._clock.observe(now, asked_at)
            ends_us = now + policy.lease_us
            fresh = fresh_until(self._clock, ends_us, policy.lease_us)
            parts = iter(found)
            claims = [
                Claim(
                    message,
                    token,
                    priority,
                    attempt if type(attempt) is int else int(attempt.partition(b"-")[0]),
                    int(float(due)),
                    body,
                    ends_us,
                    fresh,
                    0 if type(attempt) is int else int(attempt.partition(b"-")[2]),
                    is_suspect == 1,
                )
                for message, priority, attempt, due, body in zip(parts, parts, parts, parts, parts, strict=True)
            ]
            self._unsure = None
            if is_suspect:
                suspect = claims[0]
        except DelayqError as error:
            if not isinstance(error, OutcomeUnknown):
                self._unsure = None
            raise
        finally:
            if asks:
                self.suspects.answered(suspect, self._timer, policy.lease_us / 1_000_000)
        self._claimed += len(claims)
        self.expired += expired
        self.died += died
        if died:
            _log.warning(
                "queue %r: %d messages became dead letters because their last lease ended",
                keys.name,
                died,
                extra=about(keys.name),
            )
        if dropped:
            self._recurring(dropped)
        if claims:
            self.pushes.found(listeners)
        if wait:
            # No message that was due by then is left.
            self.pushes.settled(now)
        if more_suspects:
            self.suspects.when_free(self.pushes.push)
        return claims, wait, now

    def _given_back(self, claims: Sequence[Claim]) -> None:
        self._claimed -= len(claims)
        for claim in claims:
            if claim.is_suspect:
                self.suspects.over(claim)

    def _releasing(self, claims: Sequence[Claim]) -> HandBack:
        names = [part for claim in claims for part in claim.name]
        return HandBack(Request(RELEASE, (*self.keys.messages, self.keys.wake), names))

    async def _recover(self) -> None:
        """Give back what the last call claimed, if its answer was lost. Otherwise it would wait for its lease to end."""
        if self._unsure is None:
            return
        keys, ours, cursor = self.keys, f":{self._unsure}".encode(), b"0"
        while True:
            cursor, found = await self._server.command("HSCAN", keys.leases, cursor, "COUNT", _SCAN)
            ids = [message for message, lease in zip(found[::2], found[1::2], strict=True) if lease.endswith(ours)]
            if ids:
                priorities = await self._server.command("HMGET", keys.priorities, *ids)
                names = [
                    part
                    for message, priority in zip(ids, priorities, strict=True)
                    for part in (message, self._unsure, int(priority or 0))
                ]
                await self._server.run(RELEASE, (*keys.messages, keys.wake), names)
            if cursor in (b"0", "0", 0):
                break
        self._unsure = None
