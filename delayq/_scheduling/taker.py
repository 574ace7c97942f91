"""Hands what left the server to the local callers who wait for it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from delayq._logging import about
from delayq._redis.group_commit import own_copy
from delayq._redis.retry import retry_delay
from delayq._scheduling.prefetch import fetches_more, next_batch
from delayq.errors import Closed, DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

    from delayq._scheduling.services import Services

_log = logging.getLogger("delayq")

Item = TypeVar("Item")

Taken = tuple[int, Item]
"""An item with its place in the order of taking, so that what is given back keeps that order."""

# The fetching task, and the one that makes the call, take so many turns of the event loop to start.
_TURNS_TO_LEAVE = 2
# And so many pass until a loop that was handed something has noticed that the queue is closed.
_TURNS_TO_RESUME = 3
# How long a caller who does not want to wait for messages waits for the server, seconds.
ANSWER_WITHIN = 5.0


def shares(count: int, wants: Sequence[int]) -> list[int]:
    """How many of ``count`` items each waiting caller gets: all alike, the first ones more where it does not divide."""
    result = []
    for place, want in enumerate(wants):
        others = len(wants) - place
        share = min(want, -(-count // others))
        result.append(share)
        count -= share
    return result


class _Waiter(Generic[Item]):
    __slots__ = ("future", "joined", "once", "want")

    def __init__(self, future: asyncio.Future[list[Taken[Item]]], want: int, *, once: bool, joined: int) -> None:
        self.future = future
        self.want = want
        self.once = once
        self.joined = joined


class Taker(Generic[Item]):
    """The callers of one queue, in the order in which they came, and what they take: payloads, or leases.

    They never touch the connection themselves: a task of the client's takes on their behalf. A caller who is cancelled
    thus leaves no half-read answer behind, and what arrives for one who has gone goes to the next, or back.
    """

    def __init__(
        self,
        queue: str,
        services: Services,
        *,
        push: Callable[[], None],
        wanted: Callable[[], None],
        idle: Callable[[], None],
        put_back: Callable[[Sequence[Item], str], Awaitable[None]],
    ) -> None:
        """Args:
        queue: Its name, for the log.
        push: Asks for an attempt to take; it begins with :meth:`begin` and ends with :meth:`end` or :meth:`fail`.
        wanted: The same for who can wait: not needed where it is known that there is nothing yet.
        idle: Called when the last one who waited for messages to come has left.
        put_back: Brings items back to the server. A repetition has the same token as the first try.
        """
        self._queue = queue
        self._timer = services.timer
        self._background = services.background
        self._push = push
        self._wanted = wanted
        self._idle = idle
        self._put_back = put_back
        self._patient = 0
        # In the order in which they came.
        self._waiters: dict[_Waiter[Item], None] = {}
        self._buffers: dict[int, deque[Taken[Item]]] = {}
        self._returned: list[Taken[Item]] = []
        self._returning: asyncio.Task[Any] | None = None
        self._attempts = 0
        self._attempt: asyncio.Future[None] | None = None
        self._taken = 0
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for messages that are still to come."""
        return self._patient > 0

    async def get(self, want: int, timeout: float | None) -> list[Taken[Item]]:
        """Take one to ``want`` items, waiting ``timeout`` seconds at most (None: as long as it takes); [] if none came.

        Raises:
            Closed: The queue is closed, or closes meanwhile.
            ServerUnavailable, OutcomeUnknown: Only with a timeout of 0: the server could not be asked.
            ServerRefused: The server does not let us take.
        """
        if self._closed:
            raise Closed("the queue is closed")
        once = timeout is not None and timeout <= 0
        # Not _Waiter[Item](...): calling an alias costs more than all the rest.
        waiter: _Waiter[Item] = _Waiter(asyncio.get_running_loop().create_future(), want, once=once, joined=self._attempts)
        self._waiters[waiter] = None
        self._patient += not once
        if once:
            self._push()
        else:
            self._wanted()
        limit = None
        if timeout is not None:
            limit = self._timer.new_timeout(lambda _: self._expired(waiter), ANSWER_WITHIN if once else timeout)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and not waiter.future.exception():
                self.give_back(waiter.future.result())
            raise
        finally:
            if limit is not None:
                limit.cancel()
            self._leave(waiter)

    @property
    def wanted(self) -> int:
        """How many items the callers would take now."""
        return sum(waiter.want for waiter in self._waiters if not waiter.future.done())

    def begin(self) -> int:
        """An attempt starts: how many items to take. It is followed by :meth:`over`."""
        self._attempts += 1
        if self._attempt is None:
            self._attempt = asyncio.get_running_loop().create_future()
        return self.wanted

    def over(self) -> None:
        """The attempt is over, however it went."""
        if self._attempt is not None:
            self._attempt.set_result(None)
            self._attempt = None

    def end(self, items: Iterable[Item], *, more: bool = False) -> None:
        """The attempt has ended with these. If there is ``more`` to come at once, callers need not share."""
        self.receive(items, more=more)
        for waiter in list(self._waiters):
            # While there is more, nobody is told that there is nothing: the next attempt follows at once.
            if not more and waiter.once and waiter.joined < self._attempts:
                self._resolve(waiter, [])

    def receive(self, items: Iterable[Item], *, more: bool = False) -> None:
        """These came from the server, in this order."""
        taken = []
        for item in items:
            self._taken += 1
            taken.append((self._taken, item))
        self.give_back(taken, more=more)

    def fail(self, error: DelayqError) -> None:
        """The attempt has failed. Who can wait waits for the next one, unless that is bound to fail too."""
        for waiter in list(self._waiters):
            if waiter.once or isinstance(error, ServerRefused):
                self._leave(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(own_copy(error))

    def give_back(self, taken: Iterable[Taken[Item]], *, more: bool = False) -> None:
        """Hand items to whoever waits, and what nobody wants back to the server, in order."""
        rest = self._hand_out(sorted(taken), more=more)
        if rest:
            self._returned.extend(rest)
            if self._returning is None:
                self._returning = self._background.spawn(self._return(), "give back")

    async def batches(self) -> AsyncGenerator[deque[Taken[Item]], None]:
        """Take without end: batches of one to 100, as many as the reader handles in a moment. Ends when the queue closes.

        Where batches are large and come back full, the next one is fetched while one is handled.

        The reader empties each batch. What it leaves in it when it goes, or when the queue closes, goes back.
        """
        loop = asyncio.get_running_loop()
        ahead: deque[Taken[Item]] = deque()
        following: deque[Taken[Item]] = deque()
        for buffer in (ahead, following):
            self._buffers[id(buffer)] = buffer
        fetching: asyncio.Task[None] | None = None
        batch = 1
        try:
            while await self._fill(ahead, following, fetching, batch):
                fetching = None
                count, started = len(ahead), loop.time()
                if fetches_more(batch, count):
                    # While these are handled: neither we nor the server need wait for the other.
                    fetching = await self._start_fetching(following, batch)
                yield ahead
                batch = next_batch(batch, count, loop.time() - started)
        finally:
            if fetching is not None:
                fetching.cancel()
            for buffer in (ahead, following):
                self._buffers.pop(id(buffer), None)
                if buffer:
                    self.give_back(buffer)
                    # Who still has a message of this batch shall not think that more are at hand.
                    buffer.clear()

    async def _fill(
        self, ahead: deque[Taken[Item]], following: deque[Taken[Item]], fetching: asyncio.Task[None] | None, want: int
    ) -> bool:
        """Put what comes next into ``ahead``. False if the queue has closed, though something may have come in that very turn."""
        if fetching is not None:
            await fetching
            ahead.extend(following)
            following.clear()
        if not ahead:
            with suppress(Closed):
                ahead.extend(await self.get(want, None))
        return not self._closed

    async def _start_fetching(self, into: deque[Taken[Item]], want: int) -> asyncio.Task[None]:
        task = self._background.spawn(self._fetch(into, want), "fetch")
        try:
            # A reader who never waits would keep the call from leaving.
            for _ in range(_TURNS_TO_LEAVE):
                await asyncio.sleep(0)
        except BaseException:
            task.cancel()
            raise
        return task

    async def _fetch(self, into: deque[Taken[Item]], want: int) -> None:
        # What cannot be had now, the reader asks for again.
        with suppress(DelayqError):
            taken = await self.get(want, 0)
            if self._closed:
                self.give_back(taken)
            else:
                into.extend(taken)

    def close(self) -> None:
        """End every waiting call. What was taken and not handed to anybody goes back."""
        self._closed = True
        for waiter in list(self._waiters):
            self._leave(waiter)
            if not waiter.future.done():
                waiter.future.set_exception(Closed("the queue is closed"))
        for ahead in list(self._buffers.values()):
            self.give_back(ahead)
            ahead.clear()
        self._buffers.clear()

    async def returned(self, within: float) -> None:
        """Wait until what was given back is on the server, ``within`` seconds at most."""
        if self._returning is not None:
            await asyncio.wait({self._returning}, timeout=within)

    async def aclose(self, grace: float) -> None:
        """Wait until everything is back, for ``grace`` seconds at most."""
        # Whoever was handed something in the turn in which we closed gives it back when it resumes.
        for _ in range(_TURNS_TO_RESUME):
            await asyncio.sleep(0)
        await self.returned(grace)
        if self._returned:
            _log.error(
                "%d messages of queue %r were taken and could not be given back: the server does not answer",
                len(self._returned),
                self._queue,
                extra=about(self._queue),
            )

    def _hand_out(self, taken: list[Taken[Item]], *, more: bool = False) -> list[Taken[Item]]:
        waiters = [waiter for waiter in self._waiters if not waiter.future.done()]
        wants = [waiter.want for waiter in waiters]
        at = 0
        # Where more is on its way, the first ones get all they want, and handle it while the others' comes.
        for waiter, share in zip(waiters, wants if more else shares(len(taken), wants), strict=True):
            if share and at < len(taken):
                self._resolve(waiter, taken[at : at + share])
                at += share
        return taken[at:]

    def _leave(self, waiter: _Waiter[Item]) -> None:
        if waiter in self._waiters:
            del self._waiters[waiter]
            self._patient -= not waiter.once
            if not waiter.once and not self._patient:
                self._idle()

    def _resolve(self, waiter: _Waiter[Item], taken: list[Taken[Item]]) -> None:
        self._leave(waiter)
        if not waiter.future.done():
            waiter.future.set_result(taken)

    def _expired(self, waiter: _Waiter[Item]) -> None:
        if waiter.future.done():
            return
        if waiter.once:
            waiter.future.set_exception(ServerUnavailable(f"the server did not answer within {ANSWER_WITHIN:g} s"))
        else:
            waiter.future.set_result([])

    async def _return(self) -> None:
        failures = 0
        batch: list[Taken[Item]] = []
        token = ""
        try:
            while self._returned:
                if not batch:
                    if self._attempt is not None:
                        # What it brings comes behind these, so it has to go back with them.
                        await asyncio.wait({self._attempt})
                    batch, token = sorted(self._returned), secrets.token_hex(8)
                try:
                    await self._put_back([item for _, item in batch], token)
                except DelayqError as error:
                    failures += 1
                    if failures == 1:
                        _log.warning(
                            "giving %d messages of queue %r back: %s", len(batch), self._queue, error, extra=about(self._queue)
                        )
                    if not isinstance(error, OutcomeUnknown):
                        # Nothing is back, so whoever has come meanwhile may have it. Otherwise the very same call must be
                        # repeated, which its token keeps from being carried out twice.
                        self._returned = self._hand_out(sorted(self._returned))
                        batch = []
                    await asyncio.sleep(retry_delay(failures))
                else:
                    del self._returned[: len(batch)]
                    batch, failures = [], 0
        finally:
            self._returning = None
