"""Calls that are made at about the same time, in one round trip."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._redis.connection import own_copy
from delayq._redis.pipeline import run_all
from delayq.errors import ServerError

if TYPE_CHECKING:
    from asyncio import Future

    from delayq._background import Background
    from delayq._redis.client import RedisClient
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.scripts import Request, Script

    # The calls of a script that wait to be sent.
    Waiting = list[tuple[Request, Future[Any]]]


class Together:
    """Sends what is called in one iteration of the event loop in one round trip to each server, so
    that many queues cost no more round trips than one.
    """

    def __init__(self, client: RedisClient, background: Background) -> None:
        self._client = client
        self._background = background
        self._waiting: dict[Script, Waiting] = {}

    async def run(self, request: Request) -> Any:
        """Run a repeatable script, and return its reply. Raises as :meth:`RedisClient.run`."""
        future: Future[Any] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(request.script, [])
        waiting.append((request, future))
        if len(waiting) == 1:
            self._background.spawn(self._send(request.script), "calls of many queues")
        return await future

    async def _send(self, script: Script) -> None:
        servers: dict[ConnectionPool | None, Waiting] = {}
        for call in self._waiting.pop(script):
            servers.setdefault(self._server_of(call[0].keys[0]), []).append(call)
        await asyncio.gather(*(self._run(script, calls) for calls in servers.values()))

    async def _run(self, script: Script, calls: Waiting) -> None:
        try:
            answers = await run_all(
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
        for (_, future), answer in zip(calls, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _server_of(self, key: str) -> ConnectionPool | None:
        try:
            return self._client.topology.of(key)
        except ServerError:
            # It is asked for when the calls are sent.
            return None
