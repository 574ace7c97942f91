"""Open connections, and their reuse."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING, TypeVar

import anyio
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from delayq._redis.wire import Wire
from delayq.errors import Closed, DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from delayq._redis.address import Address

E = TypeVar("E", bound=BaseException)

# Connecting may take so long, greetings included; seconds.
OPEN_TIMEOUT = 5.0
# What a broken link looks like, on any system and in any version of redis-py.
LINK_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError, EOFError)


class Connections:
    """A small pool of connections that redis-py opens.

    redis-py's own pools raise or wait when they are full, hide whether a command was sent before an error, and count
    nothing. Here acquiring and sending are two steps, so that an error in the first means: nothing was sent.
    """

    def __init__(self, address: Address, limit: int) -> None:
        self._address = address
        self._free: list[Wire] = []
        # By how many calls each is held.
        self._used: dict[Wire, int] = {}
        # How many free connections, from the start of the list, were not needed since the last look.
        self._spare: int = 0
        self._slots = anyio.Semaphore(limit, fast_acquire=True)
        self._closed = False
        self.opened: int = 0

    @property
    def open(self) -> int:
        """How many connections are open now."""
        return len(self._free) + len(self._used)

    def acquire_nowait(self) -> Wire | None:
        """As :meth:`acquire`, if an open connection is free; otherwise None."""
        if self._closed or not self._free:
            return None
        try:
            self._slots.acquire_nowait()
        except anyio.WouldBlock:
            return None
        wire = self._take_free()
        if wire is None:
            self._slots.release()
        return wire

    async def acquire(self) -> Wire:
        """An open connection, to be handed to :meth:`release` or :meth:`drop`. Waits while all are in use.

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

    def share(self, wire: Wire) -> bool:
        """Hold an acquired connection once more, for another call behind the first; both release it. Says if that works."""
        if wire not in self._used or not wire.is_open:
            return False
        self._used[wire] += 1
        return True

    def release(self, wire: Wire) -> None:
        """Take back a connection on which no answer is to come that interests whoever held it."""
        held = self._used.get(wire, 1)
        if held > 1:
            # Nobody else may have it yet: the next one would perhaps subscribe on it.
            self._used[wire] = held - 1
            return
        self._slots.release()
        if self._used.pop(wire, 0) and wire.is_open:
            self._free.append(wire)

    def drop(self, wire: Wire) -> None:
        """Close a connection whose state is unknown, and release it."""
        wire.close()
        self.release(wire)

    def prune(self) -> None:
        """Close the connections that were not used since the last call: a burst leaves more than everyday work needs."""
        idle, self._spare = self._free[: self._spare], len(self._free)
        del self._free[: len(idle)]
        self._spare -= len(idle)
        for wire in idle:
            self.close(wire)

    async def open_own(self) -> Wire:
        """A connection that counts against no limit: for calls that block. To be closed by :meth:`close`.

        Raises:
            ServerUnavailable, ServerRefused: As :meth:`acquire`.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                return await self._connected()
        except TimeoutError as error:
            raise ServerUnavailable(f"{self._address.label} does not answer within {OPEN_TIMEOUT:g} s") from error

    def close(self, wire: Wire) -> None:
        """Close a connection of :meth:`open_own`."""
        self._used.pop(wire, None)
        wire.close()

    async def aclose(self) -> None:
        """Close every connection, also those in use."""
        self._closed = True
        for wire in (*self._free, *self._used):
            self.close(wire)
        self._free.clear()
        # The sockets are closed in the loop's next turn.
        await asyncio.sleep(0)

    def _take_free(self) -> Wire | None:
        while self._free:
            wire = self._free.pop()
            # The last one released is the first one taken: what lies below was not needed.
            self._spare = min(self._spare, len(self._free))
            if wire.is_clean:
                self._used[wire] = 1
                return wire
            wire.close()
        return None

    def _demand_open(self) -> None:
        if self._closed:
            raise Closed("the client is closed")

    async def _connected(self) -> Wire:
        self._demand_open()
        if (free := self._take_free()) is not None:
            return free
        opened = self._address.connection()
        try:
            await opened.connect()  # type: ignore[no-untyped-call,unused-ignore]
            if opened.client_name is None:
                await _introduce(opened)
        except BaseException as error:
            with suppress(RedisError, OSError):
                await opened.disconnect(nowait=True)
            reason = _why_not_connected(error, self._address)
            if reason is None:
                raise
            raise reason from error
        wire = Wire(opened)
        try:
            self._demand_open()
        except Closed:
            wire.close()
            raise
        self._used[wire] = 1
        self.opened += 1
        return wire


async def _introduce(connection: AbstractConnection) -> None:
    """Give the connection a name in ``CLIENT LIST``. A user who may not do that works as well without."""
    await connection.send_command("CLIENT", "SETNAME", "delayq")
    with suppress(ResponseError):
        await connection.read_response()


def _why_not_connected(error: BaseException, address: Address) -> DelayqError | None:
    # redis-py wraps what the handshake raises in a plain connection error.
    reasons = [error, error.__cause__, *error.args]
    untrusted = _behind(error, SSLCertVerificationError)
    if untrusted is not None:
        # It will not be another one the next time.
        return ServerRefused(f"{address.label} has a certificate that is not trusted: {untrusted.verify_message}")
    if any(isinstance(reason, AuthenticationError | AuthorizationError | NoPermissionError) for reason in reasons):
        return ServerRefused(f"{address.label} does not let us in: {error}")
    if isinstance(error, ResponseError) and not isinstance(error, BusyLoadingError):
        return ServerRefused(f"{address.label} refuses the connection: {error}")
    if isinstance(error, (*LINK_ERRORS, RedisError)):
        return ServerUnavailable(f"{address.label} does not answer: {error}{_hint(error, address)}")
    return None


def _behind(error: BaseException | None, kind: type[E]) -> E | None:
    """The error of this kind that led to one."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _hint(error: BaseException, address: Address) -> str:
    """What may be wrong with the scheme: neither side can tell the other."""
    if address.is_tls and isinstance(error, RedisTimeoutError):
        return " (a port without TLS is silent like this: is it redis://?)"
    if not address.is_tls and _behind(error, ConnectionResetError):
        return " (a port with TLS hangs up like this: is it rediss://?)"
    return ""
