"""Several commands in one round trip: of one script, of many queues, behind one script."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._redis.connection import own_copy
from delayq._redis.error_reader import Redirected
from delayq.errors import DelayqError, OutcomeUnknown, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    from delayq._background import Background
    from delayq._redis.client import RedisClient
    from delayq._redis.connection import Connection
    from delayq._redis.durability import Durability
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.scripts import Request, Script

    # The keys and the arguments of a call.
    Call = tuple[Sequence[str], Sequence[str | bytes | int]]
    _WaitingCall = tuple[Request, Future[Any]]

_NOT_ANSWERED = (ServerUnavailable, OutcomeUnknown)


async def run_all(client: RedisClient, script: Script, calls: Sequence[Call]) -> list[Any]:
    """Run a repeatable script several times, on the server that has the first call's keys.

    Calls whose keys another server has are then made one by one.

    Returns:
        Each call's reply, or the error that :meth:`RedisClient.run` would raise for it.
    """
    replies: list[Any] = [None] * len(calls)
    remaining = [*range(len(calls))]
    # Again for a connection that was dead, and a server that does not know the script.
    for spelled_out in (False, True):
        if len(remaining) > 1:
            retried = [calls[index] for index in remaining]
            results = await _run_at_once(client, script, retried, spelled_out)
            for index, reply in zip(remaining, results, strict=True):
                replies[index] = reply
            remaining = [
                index
                for index in remaining
                if isinstance(replies[index], _NOT_ANSWERED)
                and not isinstance(replies[index], Redirected)
            ]
    alone = remaining
    if len(calls) > 1:
        alone = [index for index, reply in enumerate(replies) if isinstance(reply, Redirected)]
    runs = (client.run(script, *calls[index]) for index in alone)
    results = await asyncio.gather(*runs, return_exceptions=True)
    for index, reply in zip(alone, results, strict=True):
        replies[index] = reply
    return replies


async def _run_at_once(
    client: RedisClient, script: Script, calls: Sequence[Call], spelled_out: bool
) -> list[Any]:
    """Return the reply to each call, or an error."""
    try:
        pool = await client.topology.find_pool(calls[0][0][0])
        connection = pool.acquire_nowait() or await client.acquire(pool)
    except ServerError as error:
        return [error] * len(calls)
    arrived = False
    client.round_trips += 1
    try:
        # EVAL needs no further right, and makes the script known for the calls that follow.
        command = ("EVAL", script.text) if spelled_out else ("EVALSHA", script.sha)
        futures = []
        for keys, args in calls:
            futures.append(connection.ask(*command, len(keys), *keys, *args))
            command = ("EVALSHA", script.sha)
        replies = await asyncio.gather(*futures, return_exceptions=True)
        arrived = connection.is_open
    except OSError as error:
        return [client.interpret(error, pool)] * len(calls)
    finally:
        # A caller that is cancelled leaves replies in flight.
        (pool.release if arrived else pool.abandon)(connection)
    if not arrived:
        client.topology.suspect(pool)
    return [client.interpret(reply, pool) for reply in replies]


class CallCoalescer:
    """Sends what is called in one iteration of the event loop in one round trip to each server, so
    that many queues cost no more round trips than one.
    """

    def __init__(self, client: RedisClient, background: Background) -> None:
        self._client = client
        self._background = background
        # The calls of each script that wait to be sent.
        self._calls: dict[Script, list[_WaitingCall]] = {}

    async def run(self, request: Request) -> Any:
        """Run a repeatable script, and return its reply. Raises as :meth:`RedisClient.run`."""
        future: Future[Any] = asyncio.get_running_loop().create_future()
        calls = self._calls.setdefault(request.script, [])
        calls.append((request, future))
        if len(calls) == 1:
            self._background.spawn(self._send(request.script), "calls of many queues")
        return await future

    async def _send(self, script: Script) -> None:
        servers: dict[ConnectionPool | None, list[_WaitingCall]] = {}
        for request, future in self._calls.pop(script):
            server = self._server_of(request.keys[0])
            servers.setdefault(server, []).append((request, future))
        await asyncio.gather(*(self._run(script, calls) for calls in servers.values()))

    async def _run(self, script: Script, calls: list[_WaitingCall]) -> None:
        try:
            replies = await run_all(
                self._client, script, [(request.keys, request.args) for request, _ in calls]
            )
        except BaseException as error:
            # It reaches every caller. A client that closes cancels this.
            for _, future in calls:
                if not isinstance(error, Exception):
                    future.cancel()
                elif not future.done():
                    future.set_exception(own_copy(error))
            raise
        for (_, future), reply in zip(calls, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, BaseException):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _server_of(self, key: str) -> ConnectionPool | None:
        try:
            return self._client.topology.pool_of(key)
        except ServerError:
            # It is looked for when the calls are sent.
            return None


class WaitingServer:
    """Sends the command of a durability behind each script, and answers with both replies."""

    def __init__(self, server: RedisClient, durability: Durability) -> None:
        self._server = server
        self._durability = durability

    @property
    def retry_for(self) -> float:
        """As :attr:`RedisClient.retry_for`."""
        return self._server.retry_for

    @property
    def waits_for(self) -> float:
        """As :attr:`RedisClient.waits_for`."""
        return self._server.waits_for

    def send_now(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        on_reply: Callable[[Any], object],
        beside: Connection | None = None,
    ) -> Connection | None:
        """Send a call as :meth:`RedisClient.send_now` does."""
        first_reply: list[Any] = []

        def answered(reply: Any) -> None:
            if isinstance(reply, DelayqError):
                on_reply(reply)
            else:
                first_reply.append(reply)

        def waited(reply: Any) -> None:
            # If the first one was not answered, the caller has got the error already.
            if first_reply:
                on_reply((first_reply[0], reply))

        wire = self._server.send_now(script, keys, args, answered, beside)
        if wire is not None:
            self._server.follow(wire, keys[0], self._durability.command, waited)
        return wire

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int] = (),
        deadline: float | None = None,
    ) -> Any:
        """Run a script as :meth:`RedisClient.run` does."""
        return await self._server.run(script, keys, args, deadline, self._durability.command)

    async def check_supported(self, key: str) -> None:
        """Raise ServerRefused, before anything is written, if the server cannot do that."""
        await self._server.command(*self._durability.probe, key=key)
