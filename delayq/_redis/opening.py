"""How a connection comes about: to a server itself, or to the one that Sentinels name."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from delayq._redis.address import Address, SentinelAddress
from delayq.errors import DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

E = TypeVar("E", bound=BaseException)

# What a broken link looks like, on any system and in any version of redis-py.
LINK_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError, EOFError)
# A Sentinel that hangs keeps us from the next one for so long, seconds.
_SENTINEL_WITHIN = 1.0


async def open_connection(address: Address | SentinelAddress) -> AbstractConnection:
    """Connect, and introduce ourselves.

    Raises:
        ServerUnavailable: Nobody answers; or no Sentinel knows who should.
        ServerRefused: We are not let in.
    """
    if isinstance(address, Address):
        return await _open(address)
    connection = await _open(address.server.at(*await _master(address)))
    try:
        role, *_ = await _ask(connection, "ROLE")
    except BaseException as error:
        await _close(connection)
        if (reason := _why_not(error, address.server)) is None:
            raise
        raise reason from error
    # A Sentinel may not have heard yet that another server took over.
    if role != b"master":
        await _close(connection)
        raise ServerUnavailable(f"{address.label}: the server that the Sentinels name is no master now")
    return connection


async def _master(address: SentinelAddress) -> tuple[str, int]:
    """Host and port of the server, by the first Sentinel that knows."""
    reasons = []
    for sentinel in address.sentinels:
        try:
            async with asyncio.timeout(_SENTINEL_WITHIN):
                connection = await _open(sentinel)
                try:
                    answer = await _ask(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)
                finally:
                    await _close(connection)
        except (DelayqError, ResponseError, *LINK_ERRORS) as error:
            reasons.append(str(error) or f"{sentinel.label} does not answer within {_SENTINEL_WITHIN:g} s")
        else:
            if answer:
                return answer[0].decode(), int(answer[1])
            reasons.append(f"{sentinel.label} knows no service {address.service!r}")
    raise ServerUnavailable(f"{address.label}: no Sentinel tells who is the master: {'; '.join(reasons)}")


async def _open(address: Address) -> AbstractConnection:
    opened = address.connection()
    try:
        await opened.connect()  # type: ignore[no-untyped-call,unused-ignore]
        if opened.client_name is None:
            await _introduce(opened)
    except BaseException as error:
        await _close(opened)
        if (reason := _why_not(error, address)) is None:
            raise
        raise reason from error
    return opened


async def _ask(connection: AbstractConnection, *command: str) -> list[bytes]:
    await connection.send_command(*command)
    answer: list[bytes] = await connection.read_response()
    return answer


async def _close(connection: AbstractConnection) -> None:
    with suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


async def _introduce(connection: AbstractConnection) -> None:
    """Give the connection a name in ``CLIENT LIST``. A user who may not do that works as well without."""
    await connection.send_command("CLIENT", "SETNAME", "delayq")
    with suppress(ResponseError):
        await connection.read_response()


def _why_not(error: BaseException, address: Address) -> DelayqError | None:
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
        if address.label.endswith("://***"):
            # What was taken for the host may be half of a password, and the error names it.
            return ServerUnavailable(f"{address.label} does not answer: quote what is special in the password as %40, %3F, %23")
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
