"""One server, asked: deadlines, what may be repeated, and what an error means."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from delayq._redis.connections import LINK_ERRORS
from delayq._redis.retry import retry_delay
from delayq.errors import DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio.connection import AbstractConnection

    from delayq._redis.connections import Connections
    from delayq._redis.scripts import Script

# Answers that say "not now": nothing was carried out. Redis 6.2 hides the code inside a script's error text.
_NOT_NOW = re.compile(r"(?:^|-)(LOADING|BUSY|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS)\b")
# redis-py cuts the code off where it has a class for the error.
_NOT_NOW_CLASSES = (BusyLoadingError, ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)

# How long one call may take, and how long a call that was not carried out is tried again, seconds.
CALL_TIMEOUT = 5.0
RETRY_FOR = 5.0


class Server:
    """Runs commands and scripts over a pool of connections."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.round_trips: int = 0
        self.errors: int = 0

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Run a script, again where that is safe, for :data:`RETRY_FOR` seconds.

        Raises:
            ServerUnavailable: It was not carried out.
            OutcomeUnknown: It was sent and its answer lost.
            ServerRefused: The server answered with an error.
        """
        return await self._repeat(("EVALSHA", script.sha, len(keys), *keys, *args), script, script.repeatable)

    async def command(self, *command: str | bytes | int) -> Any:
        """Run a command that is safe to repeat, for :data:`RETRY_FOR` seconds. Raises as :meth:`run` does."""
        return await self._repeat(command, None, repeatable=True)

    async def run_once(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        confirm: Callable[[Any], tuple[str, ...] | None],
    ) -> Any:
        """Run a script, without repetition. Raises as :meth:`run` does.

        ``confirm`` is given the answer, and says which command to send before anybody acts on it. Nobody waits for what
        the server says to that, and nobody minds if it does not arrive.
        """
        return await self._attempt(("EVALSHA", script.sha, len(keys), *keys, *args), script, confirm)

    async def _repeat(self, command: tuple[Any, ...], script: Script | None, repeatable: bool) -> Any:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + RETRY_FOR
        attempt = 0
        unknown: OutcomeUnknown | None = None
        while True:
            try:
                return await self._attempt(command, script)
            except OutcomeUnknown as error:
                if not repeatable or loop.time() >= give_up_at:
                    raise
                unknown = error
            except ServerUnavailable as error:
                if loop.time() >= give_up_at:
                    # An earlier try may have been carried out.
                    raise unknown or error from error.__cause__
            attempt += 1
            await asyncio.sleep(retry_delay(attempt, most=0.5))

    async def _attempt(
        self,
        command: tuple[Any, ...],
        script: Script | None,
        confirm: Callable[[Any], tuple[str, ...] | None] | None = None,
    ) -> Any:
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                connection = await self._connections.acquire()
        except TimeoutError as error:
            self.errors += 1
            raise ServerUnavailable("every connection is busy, or the server accepts none") from error
        except DelayqError:
            self.errors += 1
            raise
        keep = False
        owed = 0
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                reply = await self._exchange(connection, command, script)
            keep = True
            if confirm is not None and (last := confirm(reply)):
                keep = await self._tell(connection, last)
                owed = 1
        except (ResponseError, BusyLoadingError, AuthenticationError) as error:
            keep = isinstance(error, ResponseError)
            self.errors += 1
            raise _refusal(error) from error
        except (*LINK_ERRORS, TimeoutError) as error:
            self.errors += 1
            raise OutcomeUnknown(f"the connection broke before the answer came: {error or type(error).__name__}") from error
        finally:
            if keep:
                self._connections.release(connection, owed)
            else:
                # Left in the middle of an exchange, it would give its answer to the next caller.
                await self._connections.drop(connection)
        return reply

    async def _tell(self, connection: AbstractConnection, command: tuple[str, ...]) -> bool:
        """Send a command without reading its answer, and say whether the connection survived it."""
        self.round_trips += 1
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await connection.send_command(*command)
        except (*LINK_ERRORS, TimeoutError):
            return False
        return True

    async def _exchange(self, connection: AbstractConnection, command: tuple[Any, ...], script: Script | None) -> Any:
        self.round_trips += 1
        await connection.send_command(*command)
        try:
            return await connection.read_response()
        except NoScriptError:
            # Not carried out. EVAL needs no SCRIPT permission and cannot be overtaken by another SCRIPT FLUSH.
            if script is None:
                raise
        self.round_trips += 1
        await connection.send_command("EVAL", script.text, *command[2:])
        return await connection.read_response()


def _refusal(error: RedisError) -> DelayqError:
    text = str(error)
    if isinstance(error, _NOT_NOW_CLASSES) or _NOT_NOW.search(text):
        return ServerUnavailable(f"the server cannot serve now: {text}")
    if "WRONGTYPE" in text:
        return ServerRefused("one of the queue's keys holds a value of another type: it is used by something else")
    return ServerRefused(text)
