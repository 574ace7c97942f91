"""Calls that return undelivered messages: written at once, and retried until they are answered.

The server carries each one out only once, however often and over whatever connection it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delayq._logging import about
from delayq._redis.connection import NotSent
from delayq._redis.retry import retry_delay
from delayq.errors import DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._background import Background
    from delayq._redis.client import RedisClient
    from delayq._redis.connection import Connection
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.scripts import Request

_log = logging.getLogger("delayq")

# How long the first try at closing waits, plus a round trip, for a second one; seconds.
_FIRST_DOUBT = 0.35
# How much longer to wait, after the time is up, for bytes that are still leaving this machine, and
# for a server that answers that it cannot serve just now; seconds.
_LONGEST_EXTENSION = 5.0
_CHECK_EVERY = 0.1
# The longest pause between two tries while a client closes, seconds.
_LONGEST_PAUSE = 0.5


class ReturnCall:
    """One call that returns messages to the server.

    Attributes:
        fence: The key that makes a repetition harmless, if an answered only try makes it useless.
        tries: How often it was sent.
        outcome: The server's reply, or the error of the last try; None before that.
        is_postponed: Whether the last reply was that the server may carry out the call later.
    """

    __slots__ = ("_decided", "fence", "is_postponed", "outcome", "request", "tries")

    def __init__(self, request: Request, fence: str | None = None) -> None:
        self.request: Request = request
        self.fence: str | None = fence
        self.tries: int = 0
        self.outcome: Any = None
        self.is_postponed: bool = False
        # How many tries are known to have been carried out, or known not to have been.
        self._decided: int = 0

    @property
    def is_unsure(self) -> bool:
        """Whether the server may have carried it out unnoticed, or may still do so."""
        return not self.is_done and self._decided < self.tries

    @property
    def is_done(self) -> bool:
        """Whether the server has carried it out."""
        return self.outcome is not None and not isinstance(self.outcome, DelayqError)

    def record(self, outcome: Any, *, postponed: bool = False) -> None:
        """Record the outcome of a try, unless another one has been answered."""
        if self.is_done:
            return
        self.outcome = outcome
        self.is_postponed = postponed
        self._decided += not isinstance(outcome, OutcomeUnknown)

    def record_unsent(self, reason: str | DelayqError = "no connection is open") -> None:
        """Record that nothing was sent."""
        if not self.is_done:
            self.outcome = ServerUnavailable(reason) if isinstance(reason, str) else reason
            self.is_postponed = False

    @property
    def cleanup(self) -> tuple[str, str] | None:
        """The command that deletes the fence, if the fence is no longer needed."""
        if self.fence is None or self.tries != 1 or not self.is_done:
            return None
        return "UNLINK", self.fence


def send_now(
    client: RedisClient, calls: Sequence[ReturnCall], beside: Connection | None = None
) -> tuple[Connection, list[asyncio.Future[None]]] | None:
    """Send calls for the keys of one queue, in order, before this returns, even behind others.

    The scripts are sent as text, so that the server knows them. If the connection ``beside`` is
    still open, they are carried out behind the earlier calls on it.

    Returns:
        The connection, and a future for each call, which is done when the outcome is recorded; None
        if no connection is open and nothing was sent.
    """
    try:
        pool = client.topology.pool_of(calls[0].request.keys[0])
    except DelayqError:
        return None
    connection = pool.acquire_any(beside)
    return None if connection is None else (connection, _send_all(client, connection, pool, calls))


async def send(client: RedisClient, calls: Sequence[ReturnCall]) -> None:
    """Send calls for the keys of one queue in order, and wait for their outcomes. Never raises."""
    for call in calls:
        call.outcome = None
    try:
        if (sent := send_now(client, calls)) is not None:
            _, replies = sent
        else:
            pool = await client.topology.find_pool(calls[0].request.keys[0])
            connection = pool.acquire_nowait() or await client.acquire(pool)
            replies = _send_all(client, connection, pool, calls)
    except DelayqError as error:
        for call in calls:
            call.record_unsent(error)
    else:
        await asyncio.wait(replies)


async def send_anew(client: RedisClient, calls: Sequence[ReturnCall]) -> None:
    """Send calls for any queues over new connections, and wait until all have an outcome."""
    by_pool: dict[ConnectionPool, list[ReturnCall]] = {}
    for call in calls:
        with suppress(DelayqError):
            by_pool.setdefault(await client.topology.find_pool(call.request.keys[0]), []).append(
                call
            )

    async def send_to(pool: ConnectionPool, its_calls: Sequence[ReturnCall]) -> None:
        with suppress(DelayqError):
            connection = await pool.open_own(anew=True)
            try:
                # Leave out the calls that were answered meanwhile: their fences are gone.
                if replies := [
                    send_one(client, connection, pool, call)
                    for call in its_calls
                    if not call.is_done
                ]:
                    await asyncio.wait(replies)
            finally:
                pool.close(connection)

    await asyncio.gather(*(send_to(pool, its_calls) for pool, its_calls in by_pool.items()))


def _send_all(
    client: RedisClient, connection: Connection, pool: ConnectionPool, calls: Sequence[ReturnCall]
) -> list[asyncio.Future[None]]:
    """Send calls over an acquired connection, and release it after the last reply."""
    replies = [send_one(client, connection, pool, call) for call in calls]
    # Replies come in the order of the calls.
    replies[-1].add_done_callback(lambda _: pool.release(connection))
    return replies


def send_one(
    client: RedisClient, connection: Connection, pool: ConnectionPool, call: ReturnCall
) -> asyncio.Future[None]:
    """Send a call, and return a future that is done when its outcome is recorded."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    script, keys, args, _ = call.request

    def answered(reply: Any) -> None:
        outcome = client.interpret(reply, pool)
        # A connection that breaks leaves the outcome unknown, so the server has said so.
        call.record(outcome, postponed=isinstance(outcome, ServerUnavailable))
        if not isinstance(outcome, DelayqError):
            client.rights.permitted(connection, script, keys[0], form)
            if (cleanup := call.cleanup) is not None:
                with suppress(OSError):
                    connection.tell(*cleanup)
        if not done.done():
            done.set_result(None)

    form = client.rights.form(connection, script, keys[0])
    try:
        connection.call(("EVAL", form.text, len(keys), *keys, *args), answered)
    except NotSent as error:
        call.record_unsent(f"the connection broke: {error}")
        done.set_result(None)
    else:
        call.tries += 1
        client.round_trips += 1
    return done


def spare_fence(client: RedisClient, call: ReturnCall, fence: str) -> None:
    """Delete the fence of an answered call: the call that it disabled can no longer arrive."""
    call.fence = fence
    if (cleanup := call.cleanup) is None:
        return
    with suppress(DelayqError, OSError):
        pool = client.topology.pool_of(fence)
        if (connection := pool.acquire_any()) is not None:
            connection.tell(*cleanup)
            pool.release(connection)


class ReturnRetrier:
    """Calls that are sent at once, and retried until they are answered."""

    def __init__(self, queue: str, server: RedisClient, background: Background) -> None:
        self._queue = queue
        self._server = server
        self._background = background
        # Each call with its deadline, and the message to log once that has passed.
        self._calls: dict[ReturnCall, tuple[float, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._shutdown: ShutdownCalls | None = None
        # The connection of the last call, behind which the next call is sent.
        self._connection: Connection | None = None

    def send(self, call: ReturnCall, within: float, too_late: str) -> None:
        """Send a call for ``within`` seconds, at once if possible; then log ``too_late``."""
        if self._shutdown is not None:
            self._shutdown.send(self._queue, [call])
            return
        self._calls[call] = asyncio.get_running_loop().time() + within, too_late
        sent = send_now(self._server, [call], self._connection)
        if sent is None:
            call.record_unsent()
        else:
            self._connection, _ = sent
        if self._task is None:
            self._task = self._background.spawn(self._run(), "return calls")

    def close(self, shutdown: ShutdownCalls) -> None:
        """Hand the unanswered calls over to ``shutdown``, which sends them now."""
        self._shutdown = shutdown
        shutdown.send(self._queue, [call for call in self._calls if not call.is_done])
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        try:
            while self._calls:
                for call, (deadline, too_late) in list(self._calls.items()):
                    if call.is_done:
                        del self._calls[call]
                    elif loop.time() > deadline:
                        del self._calls[call]
                        _log.error("queue %r: %s", self._queue, too_late, extra=about(self._queue))
                failed = [call for call in self._calls if call.outcome is not None]
                failures = failures + 1 if failed else 0
                # Calls in flight are checked again soon.
                await asyncio.sleep(retry_delay(failures) if failed else _CHECK_EVERY)
                if failed:
                    await send(self._server, failed)
        finally:
            self._task = None


class ShutdownCalls:
    """The calls that queues send while they close: all are written before any reply is awaited.

    So the round trip, in seconds, decides when they arrive, but never whether they do. Calls
    without a reply are soon sent again over a new connection: the first one may be dead.
    """

    def __init__(self, server: RedisClient, round_trip: float = 0.0) -> None:
        self._server = server
        self._doubt = _FIRST_DOUBT + round_trip
        self._calls: list[ReturnCall] = []
        self._replies: list[asyncio.Future[None]] = []
        # The connection of each queue's last calls, behind which its next calls are sent.
        self._connections: dict[str, Connection] = {}
        self._draining: asyncio.Task[None] | None = None

    def send(self, queue: str, calls: Iterable[ReturnCall]) -> None:
        """Write calls for one queue now, in order, behind those that were written before."""
        calls = [call for call in calls if not call.is_done]
        if not calls:
            return
        self._calls += calls
        sent = send_now(self._server, calls, self._connections.get(queue))
        if sent is not None:
            self._connections[queue], replies = sent
            self._replies += replies
            return
        for call in calls:
            call.record_unsent()

    async def drain(self, within: float) -> None:
        """Wait until all calls are answered, ``within`` seconds at most.

        It is up to five seconds more while bytes leave this machine, or while the server cannot
        serve just now, because a slot moves or another server takes its place.
        """
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain(within))
        await asyncio.shield(self._draining)

    async def _drain(self, within: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        retry_at = loop.time() + min(self._doubt, within)
        retry: asyncio.Task[None] | None = None
        retries = 0
        to_send = math.inf
        try:
            # A call that the server has refused would be refused again.
            while missing := [
                call
                for call in self._calls
                if not call.is_done and not isinstance(call.outcome, ServerRefused)
            ]:
                now = loop.time()
                if now >= retry_at and (retry is None or retry.done()):
                    # The server may start soon, or another one may take its place.
                    retries += 1
                    retry_at = now + retry_delay(retries, base=_CHECK_EVERY, longest=_LONGEST_PAUSE)
                    retry = asyncio.create_task(send_anew(self._server, missing))
                if now >= deadline:
                    remaining = self._server.bytes_to_send
                    moves = 0 < remaining < to_send or any(call.is_postponed for call in missing)
                    if not moves or now >= deadline + _LONGEST_EXTENSION:
                        break
                    to_send = remaining
                pending = [reply for reply in self._replies if not reply.done()]
                if retry is not None and not retry.done():
                    pending.append(retry)
                if pending:
                    await asyncio.wait(
                        pending, timeout=_CHECK_EVERY, return_when=asyncio.FIRST_COMPLETED
                    )
                else:
                    # The time may be up already, and have been extended.
                    next_at = retry_at if now >= deadline else min(retry_at, deadline)
                    await asyncio.sleep(next_at - now)
        finally:
            if retry is not None:
                retry.cancel()
