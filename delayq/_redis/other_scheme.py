"""Finds out whether a server that does not answer would do so with TLS, or without it."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from delayq._redis.url import Address

# How long the server has to show itself, seconds.
_WITHIN = 2.0
# The first bytes of the answers to a PING: done, or an error.
_ANSWERS = (b"+", b"-")


async def demand_scheme(address: Address) -> None:
    """Raise ServerRefused if the server is there, but the scheme of the address is wrong.

    Neither side can tell the other: one waits for a handshake, and the other for a command.
    """
    host, port = address.endpoint
    if port is None:
        return
    with suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(_WITHIN):
            if address.is_tls and await _answers_plainly(host, port):
                raise ServerRefused(
                    f"{address.label} does not use TLS on this port: did you mean redis://?"
                )
            if not address.is_tls and await _shakes_hands(host, port):
                raise ServerRefused(
                    f"{address.label} uses TLS on this port: did you mean rediss://?"
                )


async def _answers_plainly(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"PING\r\n")
        return await reader.read(1) in _ANSWERS
    finally:
        writer.transport.abort()


async def _shakes_hands(host: str, port: int) -> bool:
    # Nothing is sent over it, so it need not be trusted.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    writer.transport.abort()
    return True
