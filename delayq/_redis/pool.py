"""A pool of open connections."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from delayq._redis.connection import DOUBT_AFTER, GIVE_UP_AFTER, ReplyError
from delayq._redis.handshake import Opener
from delayq._redis.retry import within
from delayq.errors import Closed, DelayqError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delayq._redis.connection import Connection
    from delayq._redis.url import Address, SentinelAddress

# How long connecting may take, greetings included; seconds.
OPEN_TIMEOUT = 5.0
# The minimum time that older connections have left after a fresh one was answered, seconds.
_MOMENT = 0.5
# A script that needs no rights but those of all calls.
_NO_WORK = ("EVAL", "return 1", 0)


class _WaitingCallers:
    """The callers that wait for a connection.

    Attributes:
        queue: A heap, by order of arrival.
        awake: How many were woken and have yet to run.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[int, asyncio.Future[None]]] = []
        self.awake: int = 0
        self._tickets = count()

    def new_ticket(self) -> int:
        """Return the position of a caller that joins now."""
        return next(self._tickets)

    async def wait(self, ticket: int) -> None:
        """Wait for a connection, behind the callers with older tickets."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self.queue, (ticket, turn))
        try:
            await turn
        finally:
            # Not if the caller was cancelled before it was woken.
            self.awake -= turn.done() and not turn.cancelled()

    def wake(self, limit: int) -> None:
        """Wake the first callers, ``limit`` of them at most."""
        while limit > 0 and self.queue:
            _, turn = heappop(self.queue)
            if not turn.done():
                turn.set_result(None)
                self.awake += 1
                limit -= 1


class _Use:
    """How a connection is used. Its attributes are those of the class until they change: this is
    faster, and there is one for each call.

    Attributes:
        calls: How many calls use it.
        is_dedicated: Whether it blocks or listens, so that no call may share it.
        is_outdated: Whether it leads to a server that was replaced.
    """

    calls: int = 1
    is_dedicated: bool = False
    is_outdated: bool = False


class ConnectionPool:
    """A small pool of connections that redis-py opens.

    redis-py's own pools hide whether a command was sent before an error. Here acquiring and sending
    are two steps, so an error in the first one means that nothing was sent. When the limit is
    reached, calls share the connections in use, because waiting would cost a round trip.

    If one connection has died silently, others may have died too. So when one is doubted, the free
    ones are put aside until they have answered a PING, and a fresh connection is tried as well: by
    a script, because a server that pauses writes, as before a failover, still answers a PING.
    Silence alone proves nothing, because the server may be busy. But if a fresh connection is
    answered while an older one that has waited longer is not, the older one is dead.
    """

    def __init__(
        self, address: Address | SentinelAddress, limit: int, *, was_let_in: bool = False
    ) -> None:
        self._opener = Opener(address, was_let_in=was_let_in)
        # A stack: the connections at the bottom are not needed if calls are few.
        self._free: list[Connection] = []
        # How many, from the bottom, have not been needed since the last call of prune().
        self._unneeded = 0
        self._in_use: dict[Connection, _Use] = {}
        # How many may be in use at the same time, and how many are being opened within that limit.
        self._limit = limit
        self._opening = 0
        self._callers = _WaitingCallers()
        self._probe = _Probe(self)
        # The error for later callers once it has been closed.
        self._closed_by: DelayqError | None = None
        self._round_trip = 0.0
        self.opened: int = 0
        # How often connections broke: the next ones may lead to another server.
        self.breaks: int = 0
        _of_this_process.add(self)

    @property
    def label(self) -> str:
        """The server as messages name it."""
        return self._opener.label

    @property
    def leads_to_replica(self) -> bool:
        """Whether no connection has led to a master yet, but to a replica."""
        return self._opener.found_no_master

    @property
    def open(self) -> int:
        """The number of connections that are open now."""
        return len(self._free) + len(self._probe.aside) + len(self._in_use)

    @property
    def last_part_at(self) -> float:
        """The moment when the last part of a slow reply came, on the event loop's clock; 0 if no
        reply takes longer than :data:`GIVE_UP_AFTER`.
        """
        late = asyncio.get_running_loop().time() - GIVE_UP_AFTER
        parts = (wire.pulse.moved_at for wire in self._in_use if wire.waiting_since < late)
        return max(parts, default=0.0)

    @property
    def round_trip(self) -> float:
        """The shortest time that a reply took, seconds; 0 before the first."""
        self._round_trip = min(
            (wire.pulse.round_trip for wire in (*self._free, *self._in_use)),
            default=self._round_trip,
        )
        return self._round_trip

    def acquire_nowait(self, *, has_turn: bool = False) -> Connection | None:
        """Return a connection as :meth:`acquire` does if one is free, otherwise None.

        The caller goes behind those that wait, unless it ``has_turn``.
        """
        callers = self._callers
        if not has_turn and (self._closed_by is not None or callers.queue or callers.awake):
            return None
        while self._free:
            wire = self._free.pop()
            self._unneeded = min(self._unneeded, len(self._free))
            if wire.is_clean:
                self._in_use[wire] = _Use()
                return wire
            wire.close()
        return None

    def acquire_any(self, preferred: Connection | None = None) -> Connection | None:
        """Return an open connection to be released, ``preferred`` if possible, or None."""
        if (
            preferred is not None
            and preferred.is_open
            and not preferred.pulse.is_doubted
            and not self._is_outdated(preferred)
        ):
            if self.share(preferred):
                return preferred
            if preferred in self._free:
                self._free.remove(preferred)
                self._unneeded = min(self._unneeded, len(self._free))
                self._in_use[preferred] = _Use()
                return preferred
        if (wire := self.acquire_nowait()) is not None:
            return wire
        return next(
            (wire for wire in (*self._shareable(), *self._in_use) if self.share(wire)), None
        )

    @property
    def bytes_to_send(self) -> int:
        """The number of bytes that wait here for the network to take them."""
        return sum(wire.bytes_to_send for wire in (*self._in_use, *self._free))

    async def acquire(self) -> Connection:
        """Return an open connection, to be handed to :meth:`release` or :meth:`abandon`.

        Open one if none is free, and share one if the limit is reached.

        Raises:
            ServerUnavailable: No server answers at the address.
            ServerRefused: The server does not let us in.
        """
        ticket: int | None = None
        try:
            while True:
                self._require_open()
                # A connection that only one caller can have goes to the caller that came first.
                if (
                    ticket is not None
                    or len(self._callers.queue) + self._callers.awake
                    < len(self._free) + self._unused_limit
                ):
                    if (wire := self.acquire_nowait(has_turn=True)) is not None:
                        return wire
                    if self._unused_limit:
                        self._opening += 1
                        try:
                            return await self._open_new()
                        finally:
                            self._opening -= 1
                if (shareable := self._shareable()) and self.share(shareable[0]):
                    return shareable[0]
                if ticket is None:
                    ticket = self._callers.new_ticket()
                await self._callers.wait(ticket)
        finally:
            # Even if this caller has left or has failed: the next one may fare better.
            self._wake()

    @property
    def _unused_limit(self) -> int:
        """How many more connections may be opened for calls."""
        return max(
            0,
            self._limit
            - sum(not use.is_dedicated for use in self._in_use.values())
            - self._opening,
        )

    def _shareable(self) -> list[Connection]:
        """Return the connections that another call may share, the least busy one first."""
        usable = [
            wire
            for wire, use in self._in_use.items()
            if wire.is_open
            and not (wire.is_blocked or wire.is_abandoned or wire.pulse.is_doubted)
            and not (use.is_dedicated or use.is_outdated)
        ]
        # A call behind a large one waits a long time.
        return sorted(usable, key=lambda wire: (wire.bytes_to_send, wire.unanswered))

    def _wake(self) -> None:
        """Wake as many callers as may find a connection now: all of them if one can be shared."""
        callers = self._callers
        if not callers.queue:
            return
        everybody = self._closed_by is not None or bool(self._shareable())
        callers.wake(
            len(callers.queue)
            if everybody
            else len(self._free) + self._unused_limit - callers.awake
        )

    def _is_outdated(self, wire: Connection) -> bool:
        use = self._in_use.get(wire)
        return use is not None and use.is_outdated

    def share(self, wire: Connection) -> bool:
        """Hold a connection once more, for a call behind the first; return whether that can be."""
        use = self._in_use.get(wire)
        if use is None or use.is_dedicated or not wire.is_open:
            return False
        use.calls += 1
        return True

    def release(self, wire: Connection) -> None:
        """Take back a connection, open or not, whose holder awaits no reply on it."""
        use = self._in_use.get(wire)
        if use is None:
            pass
        elif use.calls > 1:
            # No other caller may have it to itself yet: the next one might subscribe on it.
            use.calls -= 1
        elif use.is_outdated:
            self.close(wire)
        else:
            del self._in_use[wire]
            if wire.is_open:
                self._free.append(wire)
        # A connection that was doubted or blocked may be usable again.
        if self._callers.queue:
            self._wake()

    def abandon(self, wire: Connection) -> None:
        """Take back a connection whose holder has left, once the replies in flight have arrived.

        Until then no further call shares it: the holder may have left for want of a reply.
        """
        wire.when_answered(partial(self.release, wire))

    def disown(self) -> None:
        """Stop using the connections without closing any: they belong to the parent process."""
        self._closed_by = Closed("the client belongs to another process")
        _inherited.extend((*self._take_all_free(), *self._probe.aside, *self._in_use))
        self._probe.aside.clear()
        self._in_use.clear()

    def prune(self) -> None:
        """Close the connections that have not been needed since the last call."""
        unneeded = self._free[: self._unneeded]
        del self._free[: self._unneeded]
        self._unneeded = len(self._free)
        for wire in unneeded:
            self.close(wire)

    def renew(self) -> None:
        """Use new connections, to the server that has taken over; calls in flight go on."""
        self.breaks += 1
        for wire in self._take_all_free():
            wire.close()
        self._probe.discard()
        for use in self._in_use.values():
            use.is_outdated = True

    def retire(self, reason: DelayqError) -> None:
        """Close every connection, even in use, and open no more: later callers get the reason."""
        self._closed_by = reason
        self._probe.cancel()
        for wire in (*self._take_all_free(), *self._in_use):
            self.close(wire)
        self._probe.discard()
        self._wake()

    async def open_own(self, *, anew: bool = False) -> Connection:
        """Return a free or new connection beyond the limit; ``anew``: not a free one."""
        self._require_open()
        try:
            async with within(OPEN_TIMEOUT):
                wire = None if anew else self.acquire_nowait(has_turn=True)
                wire = wire or await self._open_new()
        except TimeoutError as error:
            raise ServerUnavailable(
                f"{self.label} did not answer within {OPEN_TIMEOUT:g} s"
            ) from error
        self._in_use[wire].is_dedicated = True
        return wire

    def keep_own(self, wire: Connection) -> None:
        """Offer a connection from :meth:`open_own` to the callers."""
        if self._closed_by is not None or self._is_outdated(wire):
            self.close(wire)
        else:
            self._in_use.pop(wire, None)
            self.add_free(wire)

    def close(self, wire: Connection) -> None:
        """Close a connection from :meth:`open_own`."""
        self._in_use.pop(wire, None)
        wire.close()
        self._wake()

    async def aclose(self) -> None:
        """Close every connection, including those in use."""
        self.retire(Closed("the client is closed"))
        await self._probe.wait()
        # The sockets are closed in the next iteration of the loop.
        await asyncio.sleep(0)

    def _take_all_free(self) -> list[Connection]:
        free, self._free, self._unneeded = self._free, [], 0
        return free

    def _require_open(self) -> None:
        if self._closed_by is not None:
            raise type(self._closed_by)(*self._closed_by.args)

    async def _open_new(self) -> Connection:
        """Open a fresh connection and mark it as in use."""
        self._require_open()
        try:
            wire = await self._opener.open()
            wire.owner = self
        except DelayqError:
            raise
        except Exception as error:
            # An error of the user's code, such as a provider: its message may be secret.
            raise ServerUnavailable(
                f"{self.label}: cannot connect: {type(error).__name__}"
            ) from error
        try:
            self._require_open()
        except DelayqError:
            wire.close()
            raise
        self._in_use[wire] = _Use()
        self.opened += 1
        return wire

    def connection_doubted(self) -> None:
        if self._closed_by is None:
            self._probe.begin(self._take_all_free())

    def connection_broken(self) -> None:
        self.breaks += 1

    def add_free(self, wire: Connection) -> None:
        """Offer a connection that no call uses to the callers."""
        self._free.append(wire)
        self._wake()

    def connections_in_use(self) -> dict[Connection, bool]:
        """Return the connections in use, and whether each is one from :meth:`open_own`."""
        return {wire: use.is_dedicated for wire, use in self._in_use.items()}


class _Probe:
    """Finds out whether the silent connections of a pool are dead."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._task: asyncio.Task[None] | None = None
        # Those that were free when one was doubted, and have not answered since.
        self.aside: set[Connection] = set()

    def begin(self, free: Iterable[Connection]) -> None:
        """Test all connections. Those of the ``free`` ones that answer go back to the pool."""
        for wire in free:
            if wire.is_clean:
                self.aside.add(wire)
                wire.call(("PING",), partial(self._answered, wire))
            else:
                wire.close()
        if self._task is None:
            # Never started eagerly: it must not end before it is recorded here.
            self._task = asyncio.Task(self._run(), name="delayq probe")
            self._task.add_done_callback(self._on_end)

    def discard(self) -> None:
        """Close the connections that were put aside."""
        aside, self.aside = self.aside, set()
        for wire in aside:
            wire.close()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until a probe that was cancelled has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _answered(self, wire: Connection, reply: Any) -> None:
        if wire in self.aside:
            self.aside.discard(wire)
            if not isinstance(reply, OSError) and wire.is_open:
                self._pool.add_free(wire)

    async def _run(self) -> None:
        """Give up the silent connections if a fresh one is answered.

        After a long script, a server answers all connections in any order. So the fresh one is
        asked once more, a moment after its first reply; a slow network makes that longer.
        """
        now = asyncio.get_running_loop().time
        # Slightly in the future, so that the connections put aside count as asked by then.
        began = now() + _MOMENT / 10
        # A dedicated connection, so that no call shares it.
        fresh = await self._pool.open_own(anew=True)
        proven = False
        try:
            # An error shows as well that the server is alive.
            with suppress(ReplyError):
                await fresh.ask(*_NO_WORK)
            await asyncio.sleep(max(_MOMENT, now() - began))
            with suppress(ReplyError):
                await fresh.ask(*_NO_WORK)
            proven = True
        finally:
            (self._pool.keep_own if proven else self._pool.close)(fresh)
        in_use = self._pool.connections_in_use()
        dead = [wire for wire in (*in_use, *self.aside) if self._is_dead(wire, began, now())]
        if not dead:
            return
        for wire in dead:
            wire.give_up(
                f"no reply within {DOUBT_AFTER:g} s, although a new connection was answered at once"
            )
        for wire, is_dedicated in in_use.items():
            # Its silence means nothing, but it is cheap to replace.
            if is_dedicated and wire.pulse.moved_at < began:
                wire.give_up("other connections to this server were dead")

    def _is_dead(self, wire: Connection, began: float, now: float) -> bool:
        if (start := wire.silent_since()) is None or start > began:
            return False
        return wire in self.aside or now - start >= DOUBT_AFTER

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            # Nothing is proven. A connection that is still in doubt reports again.
            task.exception()


_of_this_process: WeakSet[ConnectionPool] = WeakSet()
# Kept: collected, their sockets would leave the parent's event loop, which is shared.
_inherited: list[Connection] = []


def _after_fork() -> None:
    for connections in _of_this_process:
        connections.disown()
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
