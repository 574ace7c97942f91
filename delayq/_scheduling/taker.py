"""Hands payloads that left the server to the local callers who wait for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delayq._redis.group_commit import own_copy
from delayq._redis.retry import retry_delay
from delayq._redis.scripts import GIVE_BACK
from delayq.errors import Closed, DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delayq._background import Background
    from delayq._redis.keys import DelayedKeys
    from delayq._redis.server import Server
    from delayq.timer import HashedWheelTimer

_log = logging.getLogger("delayq")

Taken = tuple[int, bytes]
"""A payload with its place in the order of taking, so that what is given back keeps that order."""

# How long a caller who does not want to wait for messages waits for the server, seconds.
ANSWER_WITHIN = 5.0


def shares(count: int, wants: Sequence[int]) -> list[int]:
    """How many of ``count`` payloads each waiting caller gets: all alike, the first ones more where it does not divide."""
    result = []
    for place, want in enumerate(wants):
        others = len(wants) - place
        share = min(want, -(-count // others))
        result.append(share)
        count -= share
    return result


class _Waiter:
    __slots__ = ("future", "joined", "once", "want")

    def __init__(self, future: asyncio.Future[list[Taken]], want: int, *, once: bool, joined: int) -> None:
        self.future = future
        self.want = want
        self.once = once
        self.joined = joined


class Taker:
    """The callers of one queue, in the order in which they came.

    They never touch the connection themselves: a task of the client's takes payloads on their behalf. A caller who is
    cancelled thus leaves no half-read answer behind, and what arrives for one who has gone goes to the next, or back.
    """

    def __init__(
        self,
        keys: DelayedKeys,
        server: Server,
        timer: HashedWheelTimer,
        background: Background,
        *,
        push: Callable[[], None],
        idle: Callable[[], None],
    ) -> None:
        """Args:
        push: Asks for an attempt to take; it ends in :meth:`begin` and then :meth:`end` or :meth:`fail`.
        idle: Called when the last one who waited for messages to come has left.
        """
        self._keys = keys
        self._server = server
        self._timer = timer
        self._background = background
        self._push = push
        self._idle = idle
        self._patient = 0
        self._waiters: deque[_Waiter] = deque()
        self._buffers: dict[int, deque[Taken]] = {}
        self._returned: list[Taken] = []
        self._returning: asyncio.Task[Any] | None = None
        self._attempts = 0
        self._taken = 0
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for messages that are still to come."""
        return self._patient > 0

    async def get(self, want: int, timeout: float | None) -> list[Taken]:
        """Take one to ``want`` payloads, waiting ``timeout`` seconds at most (None: as long as it takes); [] if none came.

        Raises:
            Closed: The queue is closed, or closes meanwhile.
            ServerUnavailable, OutcomeUnknown: Only with a timeout of 0: the server could not be asked.
            ServerRefused: The server does not let us take.
        """
        if self._closed:
            raise Closed("the queue is closed")
        once = timeout is not None and timeout <= 0
        waiter = _Waiter(asyncio.get_running_loop().create_future(), want, once=once, joined=self._attempts)
        self._waiters.append(waiter)
        self._patient += not once
        self._push()
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

    def begin(self) -> int:
        """An attempt starts: how many payloads to take."""
        self._attempts += 1
        return sum(waiter.want for waiter in self._waiters if not waiter.future.done())

    def end(self, payloads: Iterable[bytes]) -> None:
        """The attempt has ended with these."""
        self.receive(payloads)
        for waiter in list(self._waiters):
            if waiter.once and waiter.joined < self._attempts:
                self._resolve(waiter, [])

    def receive(self, payloads: Iterable[bytes]) -> None:
        """These payloads came from the server, in this order."""
        taken = []
        for payload in payloads:
            self._taken += 1
            taken.append((self._taken, payload))
        self.give_back(taken)

    def fail(self, error: DelayqError) -> None:
        """The attempt has failed. Who can wait waits for the next one, unless that is bound to fail too."""
        for waiter in list(self._waiters):
            if waiter.once or isinstance(error, ServerRefused):
                self._leave(waiter)
                if not waiter.future.done():
                    waiter.future.set_exception(own_copy(error))

    def give_back(self, taken: Iterable[Taken]) -> None:
        """Hand payloads to whoever waits, and what nobody wants back to the server, in order."""
        rest = self._hand_out(sorted(taken))
        if rest:
            self._returned.extend(rest)
            if self._returning is None:
                self._returning = self._background.spawn(self._return(), "give back")

    def buffer(self) -> deque[Taken]:
        """A place for payloads that were fetched ahead. What is still in it when the queue closes goes back."""
        ahead: deque[Taken] = deque()
        self._buffers[id(ahead)] = ahead
        return ahead

    def drop_buffer(self, ahead: deque[Taken]) -> None:
        """The buffer's owner is done with it. What is left in it goes back."""
        if self._buffers.pop(id(ahead), None) is not None:
            self.give_back(ahead)

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
        await self.returned(grace)
        if self._returned:
            _log.error(
                "%d messages of queue %r were taken and could not be given back: the server does not answer",
                len(self._returned),
                self._keys.name,
            )

    def _hand_out(self, taken: list[Taken]) -> list[Taken]:
        waiters = [waiter for waiter in self._waiters if not waiter.future.done()]
        at = 0
        for waiter, share in zip(waiters, shares(len(taken), [waiter.want for waiter in waiters]), strict=True):
            if share:
                self._resolve(waiter, taken[at : at + share])
                at += share
        return taken[at:]

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._patient -= not waiter.once
            if not waiter.once and not self._patient:
                self._idle()

    def _resolve(self, waiter: _Waiter, taken: list[Taken]) -> None:
        self._leave(waiter)
        if not waiter.future.done():
            waiter.future.set_result(taken)

    def _expired(self, waiter: _Waiter) -> None:
        if waiter.future.done():
            return
        if waiter.once:
            waiter.future.set_exception(ServerUnavailable(f"the server did not answer within {ANSWER_WITHIN:g} s"))
        else:
            waiter.future.set_result([])

    async def _return(self) -> None:
        failures = 0
        batch: list[Taken] = []
        marker = ""
        try:
            while self._returned:
                if not batch:
                    batch, marker = sorted(self._returned), self._keys.marker(secrets.token_hex(8))
                try:
                    await self._server.run(GIVE_BACK, (self._keys.ready, marker), [payload for _, payload in batch])
                except DelayqError as error:
                    failures += 1
                    if failures == 1:
                        _log.warning("giving %d messages of queue %r back: %s", len(batch), self._keys.name, error)
                    if not isinstance(error, OutcomeUnknown):
                        # Nothing is back, so whoever has come meanwhile may have it. Otherwise the very same call must be
                        # repeated, which the marker keeps from being carried out twice.
                        self._returned = self._hand_out(sorted(self._returned))
                        batch = []
                    await asyncio.sleep(retry_delay(failures))
                else:
                    del self._returned[: len(batch)]
                    batch, failures = [], 0
                    with suppress(DelayqError):
                        await self._server.command("UNLINK", marker)
        finally:
            self._returning = None
