"""The calls that hand out messages: each message is confirmed, or goes back to where it was."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._logging import about
from delayq._redis.hand_back import HandBack, PendingHandBacks, spare_fence
from delayq._redis.retry import retry_delay
from delayq._redisson.confirmed import Confirmed
from delayq._redisson.store import BATCH
from delayq.errors import (
    Closed,
    DecodeError,
    OutcomeUnknown,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from delayq._engine.context import EngineContext
    from delayq._redis.client import Confirmation
    from delayq._redis.hand_back import LastCalls
    from delayq._redisson.leases import Lease
    from delayq._redisson.store import DelayedStore, Transferred

_log = logging.getLogger("delayq")

# Messages that a call hands out go back after this time, microseconds, unless it is confirmed.
CONFIRM_US = 300_000_000
# An answer that took longer, in seconds, is confirmed first: its messages may have gone back.
_LATE = 240.0
# How long a given-up call may still reach a server through a slow network, in microseconds.
_FENCE_US = 60_000_000
# How long a hand-back is repeated at most, microseconds. Later, a repetition is not recognised.
_REPEAT_US = 86_400_000_000


class HandOut(NamedTuple):
    """A call that may have handed out messages, under ``places`` leases; 0: one lease for all."""

    call: str
    places: int = 0


def newest_first(calls: Iterable[HandOut]) -> list[HandOut]:
    """Return calls in the order to give them back: each becomes the head, so the oldest last."""
    return sorted(calls, key=lambda handed: handed.call, reverse=True)


class HandOuts:
    """Makes one queue's calls that hand out messages, so that none is lost or delivered twice."""

    def __init__(self, store: DelayedStore, services: EngineContext) -> None:
        self._store = store
        self._services = services
        # Calls whose messages have not reached a caller: those in flight, with the call that gives
        # their messages back once the queue is closed, and those whose answer was lost.
        self._under_way: dict[HandOut, HandBack | None] = {}
        self._lost: dict[HandOut, None] = {}
        # And those that have arrived while their caller waits for more.
        self._at_hand: dict[HandOut, None] = {}
        self._recovering: asyncio.Task[Any] | None = None
        # Tokens of answers that have arrived, until the server has acknowledged their confirmation.
        self._unconfirmed: dict[str, None] = {}
        self._confirmed = Confirmed(store.path, services.clock.local)
        self._owed = PendingHandBacks(store.keys.name, services.server, services.background)
        # All have one length, for ACL patterns. When a number recurs, its traces are long gone.
        token = secrets.token_hex(6)
        self._names = (f"{token}-{number % 10**8:08}" for number in itertools.count())
        self._last: LastCalls | None = None

    def new_call(self) -> str:
        """Return a name for the next call to the queue, or for one that gives messages back."""
        return next(self._names)

    async def transfer(
        self, take: int, lease_us: int, signature: str, timer_at: float | None
    ) -> tuple[str, Transferred]:
        """Have the server move due messages, and hand out up to ``take`` payloads.

        Each is leased for ``lease_us`` microseconds; 0 takes it for good. A ``signature`` is
        published for the other clients. ``timer_at`` is :attr:`WakeupLoop.timer_at`. Returns the
        call's name, and the reply, with the payloads that are ours. If it raises as
        :meth:`RedisClient.run_once`, everything goes back.
        """
        call = self.new_call()
        asked_at = self._services.clock.local()
        confirmed = False

        def confirm() -> Confirmation | None:
            nonlocal confirmed
            confirmation = None if lease_us else self._confirmation(call, asked_at)
            confirmed = confirmation is not None
            return confirmation

        with self.handing_out(HandOut(call, take if lease_us else 0)):
            reply = await self._store.transfer(
                call,
                take=take,
                lease_us=lease_us or CONFIRM_US,
                each=lease_us > 0,
                signature=signature,
                confirm=confirm,
            )
            if reply.payloads and not confirmed:
                # Closing the queue has given them back. Late answers have to be confirmed first.
                ours = self._last is None and (lease_us > 0 or await self._confirm_late(call))
                reply = reply if ours else reply._replace(payloads=[])
        self._services.clock.observe(reply.now_us, asked_at, timer_at)
        return call, reply

    async def poll_pending(self, limit: int) -> tuple[HandOut, int, list[bytes]]:
        """Take up to ``limit`` pending records, which go back unless :meth:`confirm_all` follows.

        Returns the call, how many records left, with those that cannot be read, and the payloads.
        """
        self._demand_open()
        call = self.new_call()
        handed = HandOut(f"{call}:pending")
        with self.handing_out(handed):
            left, payloads = await self._store.poll_pending(call, handed.call, limit, CONFIRM_US)
        self._at_hand[handed] = None
        return handed, left, payloads

    async def confirm_all(self, taken: Sequence[HandOut], asked_at: float) -> None:
        """Confirm these calls, or raise Closed or ServerUnavailable: their messages go back."""
        try:
            self._demand_open()
            if not self._is_ours(asked_at):
                await self._keep(taken)
                self._demand_open()
        except BaseException:
            self.lose(taken)
            raise
        for handed in taken:
            del self._at_hand[handed]
            self._confirmed.add(handed.call)
        self._confirm([handed.call for handed in taken])

    def _demand_open(self) -> None:
        if self._last is not None:
            raise Closed("the queue is closed")

    async def _keep(self, taken: Sequence[HandOut]) -> None:
        """Extend the leases of these calls, or raise if messages of one of them are back."""
        for at in range(0, len(taken), BATCH):
            _, ours = await self._store.extend(
                [handed.call for handed in taken[at : at + BATCH]], CONFIRM_US
            )
            if not all(ours):
                raise ServerUnavailable(
                    "the messages took too long to arrive and went back to the queue: poll fewer at"
                    " a time"
                )

    @contextmanager
    def handing_out(self, handed: HandOut) -> Iterator[None]:
        """Guard a call that may hand out messages: unless it ends well, they go back."""
        self._under_way[handed] = None
        lost = False
        try:
            yield
        except (ServerUnavailable, ServerRefused):
            # The call was not carried out.
            raise
        except BaseException:
            lost = True
            self._lost[handed] = None
            raise
        finally:
            back = self._under_way.pop(handed)
            if back is not None and not lost:
                # The call cannot be carried out any more.
                spare_fence(self._services.server, back, self._fence(handed.call))

    def lose(self, handed: Iterable[HandOut]) -> None:
        """Have the server take back what these calls handed out, because its callers have gone."""
        for each in handed:
            self._at_hand.pop(each, None)
            self._lost[each] = None
        if self._lost and self._last is not None:
            self._last.send(self._store.keys.name, map(self.back_by_name, newest_first(self._lost)))
        elif self._lost and self._recovering is None:
            self._recovering = self._services.background.spawn(self._recover_soon(), "recover")

    def _is_ours(self, asked_at: float) -> bool:
        """Return whether the messages of a call made at ``asked_at`` cannot have gone back yet."""
        return self._services.clock.local() - asked_at < _LATE

    def _confirmation(self, token: str, asked_at: float) -> Confirmation | None:
        """Return the commands that confirm the call of this token; None if its messages go back."""

        def on_reply(reply: Any) -> None:
            if self._unconfirmed.pop(token, token) is None and isinstance(reply, Exception):
                self._confirm([token])

        if self._last is not None or not self._is_ours(asked_at):
            return None
        self._unconfirmed[token] = None
        # Record it before any of the messages can go back.
        self._confirmed.add(token)
        return self._store.confirmation(token, on_reply)

    def confirm_in_doubt(self) -> None:
        """Confirm again what a failover may have lost. Call at each re-check that succeeds."""
        self._confirm(self._confirmed.in_doubt())

    def _confirm(self, tokens: Sequence[str]) -> None:
        """Confirm calls: at once if a connection is open, then until the server has answered."""
        for call in self._confirming(tokens):
            self._owed.send(
                call,
                CONFIRM_US / 1_000_000,
                "the server did not answer, and may redeliver messages that were already taken",
            )

    def _confirming(self, tokens: Sequence[str]) -> list[HandBack]:
        return [
            HandBack(self._store.ack_request(tokens[at : at + BATCH]))
            for at in range(0, len(tokens), BATCH)
        ]

    async def _confirm_late(self, token: str) -> bool:
        """Confirm an answer that may be too late. Return whether the messages are still ours."""
        try:
            ours = await self._store.ack(token)
        except OutcomeUnknown:
            self._confirm([token])
            ours = True
        if ours:
            self._confirmed.add(token)
        return ours

    async def recover(self) -> None:
        """Have the server take back what was handed out by calls whose answers were lost."""
        for handed in newest_first(self._lost):
            await self._store.send(self.back_by_name(handed).request)
            self._lost.pop(handed, None)

    async def _recover_soon(self) -> None:
        failures = 0
        try:
            while self._lost:
                try:
                    await self.recover()
                except ServerError:
                    failures += 1
                    await asyncio.sleep(retry_delay(failures))
        finally:
            self._recovering = None

    def back_by_name(self, handed: HandOut) -> HandBack:
        """Return the call that takes back all that another call has handed out, or still would."""
        fence = self._fence(handed.call)
        return HandBack(
            self._store.give_back_request(fence, _FENCE_US, handed.call, handed.places, ())
        )

    def back_by_value(self, payloads: Sequence[bytes]) -> HandBack:
        """Return the call that puts payloads of ours back at the head of the ready list."""
        self._confirmed.forget()
        call = self.new_call()
        fence = self._fence(call)
        return HandBack(self._store.give_back_request(fence, _REPEAT_US, call, 0, payloads), fence)

    def _fence(self, call: str) -> str:
        return self._store.keys.fence(call.partition(":")[0])

    def set_aside(self, payload: bytes, lease: Lease | None = None) -> None:
        """Quarantine a payload that the codec cannot read, and end its lease, if it has one."""
        self._confirmed.forget()
        fence = self._fence(self.new_call())
        token = "" if lease is None else lease.token
        aside = HandBack(self._store.set_aside_request(fence, _REPEAT_US, token, payload), fence)
        self._owed.send(
            aside,
            _REPEAT_US / 1_000_000,
            "the server did not answer: an unreadable message was not quarantined",
        )

    def report(self, error: Exception) -> None:
        """Log why a message was quarantined."""
        name = self._store.keys.name
        text = "queue %r: quarantined an unreadable message: %s"
        why = error.reason if isinstance(error, DecodeError) else error
        _log.warning(text, name, why, extra=about(name))

    def close(self, last: LastCalls) -> None:
        """Make no more calls, and write those that give back messages that have not arrived."""
        self._last = last
        # The messages in hand here were handed out before these, so they go back after them.
        calls = {
            handed: self.back_by_name(handed)
            for handed in newest_first([*self._lost, *self._at_hand, *self._under_way])
        }
        self._under_way = {handed: calls[handed] for handed in self._under_way}
        last.send(self._store.keys.name, calls.values())
        # Confirm arrived answers once more, since the first confirmation may be lost.
        unconfirmed, self._unconfirmed = [*self._unconfirmed], {}
        last.send(self._store.keys.name, self._confirming(unconfirmed))
        self._owed.close(last)
