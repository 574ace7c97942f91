"""The transfer task: moves the due messages of one delayed queue, and hands them to the callers that wait here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._delayed.confirmed import Confirmed
from delayq._delayed.leases import Lease, Leases
from delayq._delayed.ready_watch import ReadyWatch
from delayq._delayed.scripts import ACK, EXTEND, GIVE_BACK, POLL_PENDING, SET_ASIDE, TRANSFER
from delayq._engine.counters import Counts
from delayq._engine.lease_keeper import LeaseKeeper
from delayq._engine.waiters import Waiters
from delayq._engine.wakeup import NOT_ASKED, WakeupLoop, due_us
from delayq._logging import about
from delayq._redis.client import Confirmation
from delayq._redis.hand_back import HandBack, PendingHandBacks, spare_fence
from delayq._redis.retry import retry_delay
from delayq._redis.scripts import Request
from delayq.errors import Closed, DelayqError, OutcomeUnknown, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from delayq._delayed.keys import DelayedKeys
    from delayq._engine.context import EngineContext
    from delayq._redis.hand_back import LastCalls

_log = logging.getLogger("delayq")

# Maximum number of messages moved or taken per script call: a script blocks the whole server while it runs.
BATCH = 100
# Maximum number of bytes, not counting the first message: an answer has to cross a slow network in reasonable time.
MOST_BYTES = 512 * 1024
# Messages that a call hands out go back after this time, in microseconds, unless the client confirms that the answer arrived.
CONFIRM_US = 300_000_000
# If an answer took longer than this, in seconds, it is confirmed before its messages are handed out: they may have gone back.
_LATE = 240.0
# How long a hand-back may hold up the next transfer, which would otherwise overtake it, in seconds.
RETURN_WITHIN = 1.0
# How long after we gave it up a call may still reach the server, through a slow network, in ms.
FENCE_MS = 60_000
# How long a hand-back is repeated at most until it is answered, in ms. After that, a repetition is not recognised any more.
REPEAT_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class HandOut:
    """A call that may have handed out messages.

    Attributes:
        call: The call's name.
        places: How many leases the call may have made, one for each payload; 0 if it made one for all.
    """

    call: str
    places: int = 0


def newest_first(calls: Iterable[HandOut]) -> list[HandOut]:
    """Return calls in the order in which they are given back. Each one becomes the head, so the oldest comes last."""
    return sorted(calls, key=lambda handed: handed.call, reverse=True)


@dataclass(frozen=True, slots=True)
class Lessee:
    """The callers that take under leases of the same length.

    Attributes:
        taker: Hands out the messages they take.
        keeper: Renews the leases of messages that are being handled.
    """

    taker: Waiters[Lease]
    keeper: LeaseKeeper[Lease]

    @property
    def is_idle(self) -> bool:
        """Whether no caller is taking, and nothing is held or on its way back."""
        return self.taker.is_idle and not self.keeper.held


class TransferTask:
    """Asks the server to move the due messages of one queue, and to hand over those that are wanted here.

    Attributes:
        pushes: Decides when to ask.
        taker: Hands messages to callers that take for good.
        counts: Message counters.
        leases: Messages that are out under a lease.
        quarantined: Number of unreadable records found so far.
        returned: Number of messages found so far whose lease had ended.
    """

    def __init__(self, keys: DelayedKeys, services: EngineContext, *, listed: bool) -> None:
        self.keys: DelayedKeys = keys
        self.counts: Counts = Counts()
        self._services = services
        self._server = services.server
        self._clock = services.clock
        self._background = services.background
        self.pushes: WakeupLoop = WakeupLoop(keys.name, self.run_once, services, lambda: self.waiting)
        self._watch = ReadyWatch(keys, services, self.pushes.push)
        self.leases: Leases = Leases(keys, services, self.announced, self.counts, listed=listed)
        self.taker: Waiters[bytes] = self._new_taker(self._back_by_value, len)
        self._lessees: dict[int, Lessee] = {}
        # Calls whose messages have not reached a caller: those in flight, with the call that gives their messages back once the
        # queue is closed, and those whose answer was lost.
        self._under_way: dict[HandOut, HandBack | None] = {}
        self._lost: dict[HandOut, None] = {}
        # And those that have arrived while their caller waits for more.
        self._at_hand: dict[HandOut, None] = {}
        self._recovering: asyncio.Task[Any] | None = None
        # Tokens of answers that have arrived, until the server has acknowledged their confirmation.
        self._unconfirmed: dict[str, None] = {}
        self._confirmed = Confirmed(lambda: services.server.path(keys.ready), services.clock.local)
        self._owed = PendingHandBacks(keys.name, services.server, services.background)
        # Identifies this task's calls on the server.
        self._token = secrets.token_hex(6)
        self._calls = itertools.count()
        self._turns = itertools.count()
        # For each lease length (0 for callers that take for good), the last call that had messages for them.
        self._served: dict[int, int] = {0: -1}
        # Whether the ready list was empty when we last looked.
        self._emptied = False
        # Whether the server has said that we may not move anything.
        self._barred = False
        self._last: LastCalls | None = None
        self.quarantined: int = 0
        self.returned: int = 0

    @property
    def waiting(self) -> bool:
        """Whether a caller waits for messages that are still to come."""
        return any(taker.waiting for _, taker in self._takers())

    def lessee(self, lease_us: int) -> Lessee:
        """Return the callers that take under a lease of ``lease_us`` microseconds."""
        if lease_us not in self._lessees:
            for unused in [each for each, lessee in self._lessees.items() if lessee.is_idle]:
                self._lessees.pop(unused).keeper.close()
                del self._served[unused]
            taker = self._new_taker(self._release, lambda _: 0)
            self._lessees[lease_us] = Lessee(taker, LeaseKeeper(self.keys.name, lease_us, self.leases, self._services))
            self._served[lease_us] = -1
        return self._lessees[lease_us]

    def announced(self, due_ms: int) -> None:
        """Act on the announcement of a message that is due at ``due_ms`` by the server's clock."""
        self.pushes.announced(due_ms * 1000)

    def resynced(self, due_us: int, ready: int) -> None:
        """Act on what the safety re-check found.

        The next message is due at ``due_us``, as :meth:`WakeupLoop.next_due` takes it, and ``ready`` payloads are waiting.
        """
        self._confirm(self._confirmed.in_doubt())
        if ready:
            self._watch.overlooked()
        self.pushes.next_due(0 if ready and self.waiting else due_us)

    @property
    def watches(self) -> bool:
        """Whether this task needs the findings of the safety re-check. It does not where moving is left to other processes."""
        return not self._barred or self.waiting

    async def run_once(self) -> int:
        """Make one push. Returns when the next message is due, as :meth:`WakeupLoop.next_due` takes it.

        For a user who may only offer, or only look, this moves nothing, and says so once.

        Raises:
            ServerError: As for :meth:`Server.run_once`. Callers that can wait keep waiting; the others receive the error.
        """
        wanted = self.waiting or any(taker.wanted for _, taker in self._takers())
        if self._barred and not wanted:
            return NOT_ASKED
        try:
            due = await self._run_once()
        except ServerRefused as error:
            # NOPERM means that nothing was carried out. A caller that waits must learn of the error all the same.
            if not str(error).startswith("NOPERM") or wanted:
                raise
            self._barred = True
            _log.warning(
                "queue %r: no permission to move due messages, so other processes have to: %s",
                self.keys.name,
                error,
                extra=about(self.keys.name),
            )
            return NOT_ASKED
        self._barred = False
        return due

    def _takers(self) -> list[tuple[int, Waiters[Any]]]:
        return [(0, self.taker), *((lease_us, lessee.taker) for lease_us, lessee in self._lessees.items())]

    async def _run_once(self) -> int:
        takers = self._takers()
        try:
            await self._recover()
            # Messages on their way back come first.
            for _, taker in takers:
                await taker.returned(RETURN_WITHIN)
            wanted = [taker for taker in takers if taker[1].wanted] or takers[:1]
            # The callers that have had nothing for longest come first.
            wanted.sort(key=lambda taker: self._served[taker[0]])
            dues = [await self._call(*taker) for taker in wanted]
        except DelayqError as error:
            for _, taker in takers:
                taker.fail(error)
            raise
        finally:
            for _, taker in takers:
                taker.over()
        due = 0 if 0 in dues else dues[-1]
        if due and self.waiting:
            self._watch.start()
        return due

    def new_call(self) -> str:
        """Return a name for a call that this client makes to the queue, or for one that gives messages back."""
        # All names have one length, for ACL patterns. When a number comes again, the traces of its first call are long gone.
        return f"{self._token}-{next(self._calls) % 10**8:08}"

    async def _call(self, lease_us: int, taker: Waiters[Any]) -> int:
        keys, call = self.keys, self.new_call()
        take = min(taker.begin(), BATCH)
        handed = HandOut(call, take if lease_us else 0)
        asked_at = self._clock.local()
        confirmation: Confirmation | None = None

        def confirm(answer: Any) -> Confirmation | None:
            nonlocal confirmation
            if answer[-1] and not lease_us:
                confirmation = self.confirmation(call, asked_at)
            return confirmation

        with self.handing_out(handed):
            now, wait, moved, poison, returned, left, listeners, payloads = await self._server.run_once(
                TRANSFER,
                (keys.ready, keys.timeout, keys.ordered, keys.quarantine, keys.fence(call), keys.leases, keys.leased, keys.turns),
                (BATCH, take, MOST_BYTES, lease_us or CONFIRM_US, int(lease_us > 0), call, self.pushes.signature()),
                confirm,
            )
            if self._last is not None and confirmation is None:
                # Closing the queue has given them back.
                payloads = []
            elif payloads and not lease_us and confirmation is None:
                payloads = payloads if await self._confirm_late(call) else []
        self._clock.observe(now, asked_at)
        if moved < BATCH:
            # A message that is due in this very millisecond may still be offered.
            self.pushes.settled(now - now % 1000)
        self._count(poison, returned)
        if payloads:
            self._served[lease_us] = next(self._turns)
        if lease_us:
            taker.end(self.leases.made(call, payloads, now, lease_us))
        else:
            taker.end(payloads)
        self._emptied = not left
        if moved:
            self.pushes.found(listeners)
        return 0 if left and taker.waiting else due_us(now, wait)

    def _count(self, poison: int, returned: int) -> None:
        """Count and log the unreadable records and the ended leases that a call found."""
        keys = self.keys
        if poison:
            self.quarantined += poison
            _log.warning(
                "queue %r: moved %d unreadable records to %r", keys.name, poison, keys.quarantine, extra=about(keys.name)
            )
        if returned:
            self.returned += returned
            _log.warning(
                "queue %r: the leases of %d messages ended, and they are ready again", keys.name, returned, extra=about(keys.name)
            )

    async def poll_pending(self, limit: int, *, listed: int) -> tuple[HandOut, int, list[bytes]]:
        """Take up to ``limit`` of the pending records. They go back unless :meth:`confirm_all` follows within minutes.

        Returns the call, the number of records that left the pending ones, including those that cannot be read, and the
        payloads.

        Raises:
            ServerError: As for :meth:`Server.run_once`. Nothing is taken, or it goes back.
            Closed: The queue is closed.
        """
        self._demand_open()
        keys, call = self.keys, self.new_call()
        handed = HandOut(f"{call}:pending")
        names = (keys.timeout, keys.ordered, keys.quarantine, keys.leases, keys.leased, keys.fence(call))
        with self.handing_out(handed):
            left, payloads = await self._server.run_once(
                POLL_PENDING, names, (limit, MOST_BYTES, listed, CONFIRM_US, handed.call), lambda _: None
            )
        self._at_hand[handed] = None
        return handed, left, payloads

    async def confirm_all(self, taken: Sequence[HandOut], asked_at: float) -> None:
        """Confirm to the server that the answers to these calls have arrived. The first of the calls was made at ``asked_at``.

        Raises:
            Closed: The queue was closed in the meantime: all the messages go back.
            ServerUnavailable: It took so long that some of the messages have gone back, and the rest follow.
        """
        try:
            self._demand_open()
            if not self.is_ours(asked_at):
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
        """Extend the leases of these calls: none may be confirmed once the messages of another one are back.

        Raises:
            ServerUnavailable: Messages of one of them are back.
        """
        for at in range(0, len(taken), BATCH):
            tokens = [handed.call for handed in taken[at : at + BATCH]]
            _, *ours = await self._server.run(EXTEND, (self.keys.leases,), (CONFIRM_US, *tokens))
            if not all(ours):
                raise ServerUnavailable("the messages took too long to arrive and went back to the queue: poll fewer at a time")

    @contextmanager
    def handing_out(self, handed: HandOut) -> Iterator[None]:
        """Guard a call that may hand out messages. Unless the call ends well, its messages go back to where they were."""
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
                spare_fence(self._server, back, self._fence(handed.call))

    def lose(self, handed: Iterable[HandOut]) -> None:
        """Have the server take back what these calls handed out, because the callers that wanted it have gone."""
        for each in handed:
            self._at_hand.pop(each, None)
            self._lost[each] = None
        if self._lost and self._last is not None:
            self._last.send(self.keys.name, map(self.back_by_name, newest_first(self._lost)))
        elif self._lost and self._recovering is None:
            self._recovering = self._background.spawn(self._recover_soon(), "recover")

    def is_ours(self, asked_at: float) -> bool:
        """Return whether messages that were handed out by a call made at ``asked_at`` cannot have gone back yet."""
        return self._clock.local() - asked_at < _LATE

    def confirmation(self, token: str, asked_at: float) -> Confirmation | None:
        """Return the commands that confirm a call that handed out messages under this token; None if the messages go back."""
        keys = self.keys

        def told(answer: Any) -> None:
            if self._unconfirmed.pop(token, token) is None and isinstance(answer, Exception):
                self._confirm([token])

        if self._last is not None or not self.is_ours(asked_at):
            return None
        self._unconfirmed[token] = None
        # Record it before any of the messages can go back.
        self._confirmed.add(token)
        # In this order: a field without an entry in the sorted set would never be found.
        return Confirmation((("HDEL", keys.leased, token), ("ZREM", keys.leases, token)), told)

    def _confirm(self, tokens: Sequence[str]) -> None:
        """Confirm calls: once before this returns, if a connection is open, and then repeatedly until the server has answered."""
        for call in self._confirming(tokens):
            self._owed.send(
                call, CONFIRM_US / 1_000_000, "the server did not answer, and may redeliver messages that were already taken"
            )

    def _confirming(self, tokens: Sequence[str]) -> list[HandBack]:
        keys = (self.keys.leases, self.keys.leased)
        return [HandBack(Request(ACK, keys, tokens[at : at + BATCH])) for at in range(0, len(tokens), BATCH)]

    async def _confirm_late(self, token: str) -> bool:
        """Confirm an answer that may have arrived too late. Returns whether the messages are still ours."""
        try:
            (ours,) = await self._server.run(ACK, (self.keys.leases, self.keys.leased), (token,))
        except OutcomeUnknown:
            self._confirm([token])
            ours = 1
        if ours:
            self._confirmed.add(token)
        return bool(ours)

    async def _recover(self) -> None:
        """Have the server take back what was handed out by calls whose answers were lost."""
        for handed in newest_first(self._lost):
            await self._server.run(*self.back_by_name(handed).request)
            self._lost.pop(handed, None)

    async def _recover_soon(self) -> None:
        failures = 0
        try:
            while self._lost:
                try:
                    await self._recover()
                except ServerError:
                    failures += 1
                    await asyncio.sleep(retry_delay(failures))
        finally:
            self._recovering = None

    def back_by_name(self, handed: HandOut) -> HandBack:
        """Return the call that takes back everything another call has handed out, or keeps that one from handing out anything."""
        return self._give_back(handed.call, FENCE_MS, handed.places, ())

    def _back_by_value(self, payloads: Sequence[bytes]) -> HandBack:
        self._confirmed.forget()
        call = self.new_call()
        back = self._give_back(call, REPEAT_MS, 0, payloads)
        return HandBack(back.request, self.keys.fence(call))

    def _give_back(self, call: str, fence_ms: int, places: int, payloads: Sequence[bytes]) -> HandBack:
        keys = self.keys
        names = (keys.ready, keys.timeout, keys.ordered, keys.leases, keys.leased, self._fence(call))
        return HandBack(Request(GIVE_BACK, names, (fence_ms, call, places, *payloads)))

    def _fence(self, call: str) -> str:
        return self.keys.fence(call.partition(":")[0])

    def set_aside(self, payload: bytes, lease: Lease | None = None) -> None:
        """Quarantine a payload that the codec cannot read, and end its lease, if it has one."""
        self._confirmed.forget()
        keys, fence = self.keys, self.keys.fence(self.new_call())
        names = (keys.quarantine, keys.leases, keys.leased, fence)
        token = "" if lease is None else lease.token
        aside = HandBack(Request(SET_ASIDE, names, (REPEAT_MS, token, payload)), fence)
        self._owed.send(aside, REPEAT_MS / 1000, "the server did not answer: an unreadable message was not quarantined")

    def _release(self, leases: Sequence[Lease]) -> HandBack:
        return HandBack(self.leases.releasing([lease.token for lease in leases]))

    def close(self, last: LastCalls) -> None:
        """Make no more calls. Before this returns, write the calls that give back all undelivered messages."""
        self._last = last
        self.pushes.close()
        self._watch.close()
        # The messages in hand here were handed out before these, so they go back after them.
        calls = {handed: self.back_by_name(handed) for handed in newest_first([*self._lost, *self._at_hand, *self._under_way])}
        self._under_way = {handed: calls[handed] for handed in self._under_way}
        last.send(self.keys.name, calls.values())
        # Answers that have arrived are confirmed once more, since the first confirmation may be lost.
        unconfirmed, self._unconfirmed = [*self._unconfirmed], {}
        last.send(self.keys.name, self._confirming(unconfirmed))
        self._owed.close(last)
        for lessee in self._lessees.values():
            lessee.keeper.close()
        for _, taker in self._takers():
            taker.close(last)

    async def aclose(self, grace: float) -> None:
        """Wait until the calls written by :meth:`close` have arrived, for at most ``grace`` seconds."""
        await asyncio.gather(self.leases.aclose(grace), *(taker.aclose(grace) for _, taker in self._takers()))
        await self.pushes.aclose(0)

    def _idle(self) -> None:
        if not self.waiting:
            self._watch.idle()

    def _new_taker(self, hand_back: Callable[[Sequence[Any]], HandBack], size: Callable[[Any], int]) -> Waiters[Any]:
        return Waiters(
            self.keys.name,
            self._services,
            push=self.pushes.push,
            wanted=self._wanted,
            idle=self._idle,
            hand_back=hand_back,
            size=size,
        )

    def _wanted(self) -> None:
        """Ask on behalf of a waiting caller. There is nothing to ask if the ready list was empty and has been watched since."""
        if self._emptied and self._watch.is_watching and self.pushes.knows:
            self._watch.start()
        else:
            self.pushes.push()
