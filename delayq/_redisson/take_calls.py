"""The calls that take messages: each message is confirmed, or goes back to where it was."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._logging import about
from delayq._redis.retry import retry_delay
from delayq._redis.return_calls import ReturnCall, ReturnRetrier, spare_fence
from delayq._redisson.store import BATCH
from delayq.errors import (
    Closed,
    DecodeError,
    DelayqError,
    OutcomeUnknown,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from delayq._engine.context import EngineContext
    from delayq._redis.client import Confirmation
    from delayq._redis.return_calls import ShutdownCalls
    from delayq._redisson.delivery import Lease
    from delayq._redisson.store import DelayedStore, Transferred

_log = logging.getLogger("delayq")

# Messages that a call hands out go back after this time, microseconds, unless it is confirmed.
CONFIRM_US = 300_000_000
# A reply within this time, in seconds, comes before its messages can have gone back.
_SAFE_WITHIN = 240.0
# A promoted replica may lack anything the old master answered within this time, in seconds.
_REPLICA_LAG = 10.0
# Maximum number of tokens kept, which bounds the memory of a client that takes very quickly.
_MAX_CONFIRMATIONS = 10_000
# How long a given-up call may still reach a server through a slow network, in microseconds.
_FENCE_US = 60_000_000
# How long the return of messages is repeated, microseconds. Later, a repetition would not be
# recognised.
_REPEAT_US = 86_400_000_000


class TakeCall(NamedTuple):
    """A call that may have handed out messages.

    Attributes:
        name: Its name on the server.
        lease_count: The number of leases for its messages; 0 for one lease that covers all.
    """

    name: str
    lease_count: int = 0


def newest_first(calls: Iterable[TakeCall]) -> list[TakeCall]:
    """Return calls in the order to give them back: each becomes the head, so the oldest last."""
    return sorted(calls, key=lambda call: call.name, reverse=True)


class TakeCalls:
    """Makes one queue's calls that hand out messages, so that none is lost or delivered twice."""

    def __init__(self, store: DelayedStore, services: EngineContext) -> None:
        self._store = store
        self._services = services
        # Calls whose messages have not reached a caller: those in flight, with the call that gives
        # their messages back once the queue is closed, and those whose reply was lost.
        self._in_flight: dict[TakeCall, ReturnCall | None] = {}
        self._lost_calls: dict[TakeCall, None] = {}
        # And those that have arrived while their caller waits for more.
        self._arrived: dict[TakeCall, None] = {}
        self._recovering: asyncio.Task[Any] | None = None
        # Tokens of replies that have arrived, until the server has acknowledged their confirmation.
        self._unconfirmed: dict[str, None] = {}
        self._confirmations = _Confirmations(store.path, services.clock.local)
        self._retrier = ReturnRetrier(store.keys.name, services.server, services.background)
        # All have one length, for ACL patterns. When a number recurs, its traces are long gone.
        token = secrets.token_hex(6)
        self._names = (f"{token}-{number % 10**8:08}" for number in itertools.count())
        self._shutdown: ShutdownCalls | None = None

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

        with self.handing_out(TakeCall(call, take if lease_us else 0)):
            reply = await self._store.transfer(
                call,
                take=take,
                lease_us=lease_us or CONFIRM_US,
                lease_each=lease_us > 0,
                signature=signature,
                confirm=confirm,
            )
            if reply.payloads and not confirmed:
                # Closing the queue has given them back. Late replies have to be confirmed first.
                ours = self._shutdown is None and (lease_us > 0 or await self._confirm_late(call))
                reply = reply if ours else reply._replace(payloads=[])
        self._services.clock.observe(reply.now_us, asked_at, timer_at)
        return call, reply

    async def poll_pending(self, limit: int) -> tuple[TakeCall, int, list[bytes]]:
        """Take up to ``limit`` pending records, which go back unless :meth:`confirm_all` follows.

        Returns the call, how many records left, with those that cannot be read, and the payloads.
        """
        self._check_open()
        name = self.new_call()
        call = TakeCall(f"{name}:pending")
        with self.handing_out(call):
            removed, payloads = await self._store.poll_pending(name, call.name, limit, CONFIRM_US)
        self._arrived[call] = None
        return call, removed, payloads

    async def confirm_all(self, calls: Sequence[TakeCall], asked_at: float) -> None:
        """Confirm these calls, or raise Closed or ServerUnavailable: their messages go back."""
        try:
            self._check_open()
            if not self._is_ours(asked_at):
                await self._keep(calls)
                self._check_open()
        except BaseException:
            self.lose(calls)
            raise
        for call in calls:
            del self._arrived[call]
            self._confirmations.add(call.name)
        self._confirm([call.name for call in calls])

    def _check_open(self) -> None:
        if self._shutdown is not None:
            raise Closed("the queue is closed")

    async def _keep(self, calls: Sequence[TakeCall]) -> None:
        """Extend the leases of these calls, or raise if messages of one of them are back."""
        for at in range(0, len(calls), BATCH):
            _, ours = await self._store.extend(
                [call.name for call in calls[at : at + BATCH]], CONFIRM_US
            )
            if not all(ours):
                raise ServerUnavailable(
                    "the messages took too long to arrive and went back to the queue: poll fewer at"
                    " a time"
                )

    @contextmanager
    def handing_out(self, call: TakeCall) -> Iterator[None]:
        """Guard a call that may hand out messages: unless it ends well, they go back."""
        self._in_flight[call] = None
        is_lost = False
        try:
            yield
        except (ServerUnavailable, ServerRefused):
            # The call was not carried out.
            raise
        except BaseException:
            is_lost = True
            self._lost_calls[call] = None
            raise
        finally:
            return_call = self._in_flight.pop(call)
            if return_call is not None and not is_lost:
                # The call cannot be carried out any more.
                spare_fence(self._services.server, return_call, self._fence(call.name))

    def lose(self, calls: Iterable[TakeCall]) -> None:
        """Have the server take back what these calls handed out, because its callers have gone."""
        for call in calls:
            self._arrived.pop(call, None)
            self._lost_calls[call] = None
        if self._lost_calls and self._shutdown is not None:
            returns = map(self.return_by_name, newest_first(self._lost_calls))
            self._shutdown.send(self._store.keys.name, returns)
        elif self._lost_calls and self._recovering is None:
            self._recovering = self._services.background.spawn(self._recover_soon(), "recover")

    def _is_ours(self, asked_at: float) -> bool:
        """Return whether the messages of a call made at ``asked_at`` cannot have gone back yet."""
        return self._services.clock.local() - asked_at < _SAFE_WITHIN

    def _confirmation(self, token: str, asked_at: float) -> Confirmation | None:
        """Return the commands that confirm the call of this token; None if its messages go back."""

        def on_reply(reply: Any) -> None:
            if self._unconfirmed.pop(token, token) is None and isinstance(reply, Exception):
                self._confirm([token])

        if self._shutdown is not None or not self._is_ours(asked_at):
            return None
        self._unconfirmed[token] = None
        # Record it before any of the messages can go back.
        self._confirmations.add(token)
        return self._store.confirmation(token, on_reply)

    def confirm_in_doubt(self) -> None:
        """Confirm again what a failover may have lost. Call at each re-check that succeeds."""
        self._confirm(self._confirmations.in_doubt())

    def _confirm(self, tokens: Sequence[str]) -> None:
        """Confirm calls: at once if a connection is open, then until the server has answered."""
        for call in self._confirming(tokens):
            self._retrier.send(
                call,
                CONFIRM_US / 1_000_000,
                "the server did not answer, and may redeliver messages that were already taken",
            )

    def _confirming(self, tokens: Sequence[str]) -> list[ReturnCall]:
        return [
            ReturnCall(self._store.ack_request(tokens[at : at + BATCH]))
            for at in range(0, len(tokens), BATCH)
        ]

    async def _confirm_late(self, token: str) -> bool:
        """Confirm a reply that may be too late. Return whether the messages are still ours."""
        try:
            ours = await self._store.ack(token)
        except OutcomeUnknown:
            self._confirm([token])
            ours = True
        if ours:
            self._confirmations.add(token)
        return ours

    async def recover(self) -> None:
        """Have the server take back what was handed out by calls whose replies were lost."""
        for call in newest_first(self._lost_calls):
            await self._store.send(self.return_by_name(call).request)
            self._lost_calls.pop(call, None)

    async def _recover_soon(self) -> None:
        failures = 0
        try:
            while self._lost_calls:
                try:
                    await self.recover()
                except ServerError:
                    failures += 1
                    await asyncio.sleep(retry_delay(failures))
        finally:
            self._recovering = None

    def return_by_name(self, call: TakeCall) -> ReturnCall:
        """Return the call that takes back all that another call has handed out, or still would."""
        fence = self._fence(call.name)
        return ReturnCall(
            self._store.give_back_request(fence, _FENCE_US, call.name, call.lease_count, ())
        )

    def return_payloads(self, payloads: Sequence[bytes]) -> ReturnCall:
        """Return the call that puts payloads of ours back at the head of the ready list."""
        self._confirmations.forget()
        call = self.new_call()
        fence = self._fence(call)
        return ReturnCall(
            self._store.give_back_request(fence, _REPEAT_US, call, 0, payloads), fence
        )

    def _fence(self, call: str) -> str:
        return self._store.keys.fence(call.partition(":")[0])

    def set_aside(self, payload: bytes, lease: Lease | None = None) -> None:
        """Quarantine a payload that the codec cannot read, and end its lease, if it has one."""
        self._confirmations.forget()
        fence = self._fence(self.new_call())
        token = "" if lease is None else lease.token
        aside = ReturnCall(self._store.set_aside_request(fence, _REPEAT_US, token, payload), fence)
        self._retrier.send(
            aside,
            _REPEAT_US / 1_000_000,
            "the server did not answer: an unreadable message was not quarantined",
        )

    def report(self, error: Exception) -> None:
        """Log why a message was quarantined."""
        name = self._store.keys.name
        text = "queue %r: quarantined an unreadable message: %s"
        reason = error.reason if isinstance(error, DecodeError) else error
        _log.warning(text, name, reason, extra=about(name))

    def close(self, shutdown: ShutdownCalls) -> None:
        """Make no more calls, and write those that give back messages that have not arrived."""
        self._shutdown = shutdown
        # The messages in hand here were handed out before these, so they go back after them.
        calls = {
            call: self.return_by_name(call)
            for call in newest_first([*self._lost_calls, *self._arrived, *self._in_flight])
        }
        self._in_flight = {call: calls[call] for call in self._in_flight}
        shutdown.send(self._store.keys.name, calls.values())
        # Confirm arrived replies once more, since the first confirmation may be lost.
        unconfirmed, self._unconfirmed = [*self._unconfirmed], {}
        shutdown.send(self._store.keys.name, self._confirming(unconfirmed))
        self._retrier.close(shutdown)


class _Confirmations:
    """Remembers the calls that were confirmed in the last few seconds.

    A new master may know what a call handed out, but not that it was confirmed, and would deliver
    the messages again. So these calls are confirmed once more when new connections may lead to
    another server.

    A confirmation deletes what the call handed out, but a message that has gone back meanwhile may
    have no other copy on the new master. So all is forgotten as soon as any message goes back.
    """

    def __init__(self, path: Callable[[], object], now: Callable[[], float]) -> None:
        """Take :meth:`DelayedStore.path`, and a clock that counts seconds."""
        self._find_path = path
        self._now = now
        self._path: object = None
        self._tokens: deque[tuple[float, str]] = deque(maxlen=_MAX_CONFIRMATIONS)

    def add(self, token: str) -> None:
        """Record that a call was confirmed."""
        if self._path is None:
            self._path = self._current_path()
        self._tokens.append((self._now(), token))

    def forget(self) -> None:
        """Forget all confirmations, because messages that were handed out are going back."""
        self._tokens.clear()

    def in_doubt(self) -> Sequence[str]:
        """Return the tokens to confirm again. Call at each re-check, while the server answers."""
        if (path := self._current_path()) is None:
            return []
        if path != self._path:
            self._path = path
            return [token for _, token in self._tokens]
        too_old = self._now() - _REPLICA_LAG
        while self._tokens and self._tokens[0][0] < too_old:
            self._tokens.popleft()
        return []

    def _current_path(self) -> object:
        try:
            return self._find_path()
        except DelayqError:
            return None
