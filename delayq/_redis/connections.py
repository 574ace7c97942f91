"""Open connections, and their reuse."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from delayq.errors import Closed, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from delayq._redis.address import Address

# Connecting may take so long, greetings included; seconds.
OPEN_TIMEOUT = 5.0
# What a broken link looks like, on any system and in any version of redis-py.
LINK_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError, EOFError)


class Connections:
    """A small pool over redis-py's connections.

    redis-py's own pools raise or wait when they are full, hide whether a command was sent before an error, and count
    nothing. Here acquiring and sending are two steps, so that an error in the first means: nothing was sent.
    """

    def __init__(self, address: Address, limit: int) -> None:
        self._address = address
        self._free: list[AbstractConnection] = []
        self._used: set[AbstractConnection] = set()
        # How many answers are still to come that nobody waits for.
        self._owed: dict[AbstractConnection, int] = {}
        # How many free connections, from the start of the list, were not needed since the last look.
        self._spare: int = 0
        self._slots = asyncio.Semaphore(limit)
        self._closed = False
        self.opened: int = 0

    @property
    def open(self) -> int:
        """How many connections are open now."""
        return len(self._free) + len(self._used)

    async def acquire(self) -> AbstractConnection:
        """A connected connection, to be handed to :meth:`release` or :meth:`drop`. Waits while all are in use.

        Raises:
            ServerUnavailable: Nobody answers at the address.
            ServerRefused: The server does not let us in.
        """
        await self._slots.acquire()
        try:
            return await self._connected()
        except BaseException:
            self._slots.release()
            raise

    def release(self, connection: AbstractConnection, owed: int = 0) -> None:
        """Take back a connection on which every answer was read but ``owed``, which interest nobody."""
        self._slots.release()
        if connection in self._used:
            self._used.discard(connection)
            self._free.append(connection)
            if owed:
                self._owed[connection] = owed

    async def drop(self, connection: AbstractConnection) -> None:
        """Close a connection whose state is unknown."""
        self._slots.release()
        await self.close(connection)

    async def prune(self) -> None:
        """Close the connections that were not used since the last call: a burst leaves more than everyday work needs."""
        idle, self._spare = self._free[: self._spare], len(self._free)
        del self._free[: len(idle)]
        self._spare -= len(idle)
        for connection in idle:
            await self.close(connection)

    async def open_own(self) -> AbstractConnection:
        """A connection that counts against no limit: for calls that block. To be closed by :meth:`close`.

        Raises:
            ServerUnavailable, ServerRefused: As :meth:`acquire`.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                return await self._connected()
        except TimeoutError as error:
            raise ServerUnavailable(f"{self._address.label} does not answer within {OPEN_TIMEOUT:g} s") from error

    async def close(self, connection: AbstractConnection) -> None:
        """Close a connection of :meth:`open_own`."""
        self._used.discard(connection)
        self._owed.pop(connection, None)
        with suppress(RedisError, OSError):
            await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """Close every connection, also those in use."""
        self._closed = True
        for connection in (*self._free, *self._used):
            await self.close(connection)
        self._free.clear()

    async def _connected(self) -> AbstractConnection:
        if self._closed:
            raise Closed("the client is closed")
        while self._free:
            connection = self._free.pop()
            # The last one released is the first one taken: what lies below was not needed.
            self._spare = min(self._spare, len(self._free))
            self._used.add(connection)
            if await self._is_clean(connection):
                return connection
            await self.close(connection)
        connection = self._address.connection()
        self._used.add(connection)
        try:
            await connection.connect()  # type: ignore[no-untyped-call,unused-ignore]
            if connection.client_name is None:
                await _introduce(connection)
        except BaseException as error:
            await self.close(connection)
            reason = _why_not_connected(error, self._address)
            if reason is None:
                raise
            raise reason from error
        self.opened += 1
        return connection

    async def _is_clean(self, connection: AbstractConnection) -> bool:
        """Whether a pooled connection is open and has nothing to read. It costs no system call."""
        # The method was renamed in redis-py 8.
        can_read = getattr(connection, "can_read", None) or connection.can_read_destructive
        try:
            for _ in range(self._owed.pop(connection, 0)):
                with suppress(ResponseError):
                    await connection.read_response()
            return connection.is_connected and not await can_read()
        except LINK_ERRORS:
            return False


async def _introduce(connection: AbstractConnection) -> None:
    """Give the connection a name in ``CLIENT LIST``. A user who may not do that works as well without."""
    await connection.send_command("CLIENT", "SETNAME", "delayq")
    with suppress(ResponseError):
        await connection.read_response()


def _why_not_connected(error: BaseException, address: Address) -> DelayqError | None:
    # redis-py wraps what the handshake raises in a plain connection error.
    reasons = [error, error.__cause__, *error.args]
    if any(isinstance(reason, AuthenticationError | AuthorizationError) for reason in reasons):
        return ServerRefused(f"{address.label} does not let us in: {error}")
    if isinstance(error, ResponseError) and not isinstance(error, BusyLoadingError):
        return ServerRefused(f"{address.label} refuses the connection: {error}")
    if isinstance(error, (*LINK_ERRORS, RedisError)):
        return ServerUnavailable(f"{address.label} does not answer: {error}")
    return None
