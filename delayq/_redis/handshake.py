"""Opens a connection: to a server itself, or to the one that Sentinels name."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from delayq._redis.connection import Connection, ReplyError, socket_of
from delayq._redis.retry import first_of, is_not_now, retry_delay, within
from delayq._redis.url import Address, SentinelAddress
from delayq.errors import DelayqError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

E = TypeVar("E", bound=BaseException)

# A broken link raises these, on any system and in any version of redis-py.
_LINK_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError, EOFError)
# Python's names for what the other side of a TLS connection has reported.
_ALERT = re.compile(r"\[SSL: \w*?(ALERT_\w+)\]")
_ADD_CERTIFICATE = (
    "if the server requires a client certificate, add ssl_certfile= and ssl_keyfile= to the address"
)
# How long connecting may take before the greeting, seconds.
_CONNECT_WITHIN = 5.0
# The errors of a Unix socket whose backlog is full.
_BACKLOG_IS_FULL = (errno.EAGAIN, errno.ENOTCONN)
# After how long a handshake is doubted, seconds.
_SOON = 1.0
# How long a server that does not answer has to show whether it speaks TLS, seconds.
_SCHEME_SHOWS_WITHIN = 2.0
# The first bytes of the replies to a PING: done, or an error.
_PING_REPLIES = (b"+", b"-")
_OF_THE_ADDRESS = "user and password"
# The beginnings of errors about the user, the password or the user's rights.
_OF_THE_USER = ("NOAUTH", "WRONGPASS", "NOPERM", "AUTH ", "invalid password", "Client sent AUTH")


class Opener:
    """Opens connections to one server, or to the master that Sentinels name.

    A refusal of the first connection means that the address is wrong. Once a connection was open,
    the address is right, and a refusal is the server's state: its certificate is replaced, say, or
    its users are read.
    """

    def __init__(self, address: Address | SentinelAddress, *, was_let_in: bool = False) -> None:
        """Args:
        address: The server, or the Sentinels that name it.
        was_let_in: Whether the address is known to be right.
        """
        self.label: str = address.label
        self._address = address
        self._was_let_in = was_let_in
        # The one that was right is asked first.
        self._sentinels = list(address.sentinels) if isinstance(address, SentinelAddress) else []
        # Whether every connection so far has led to a replica.
        self.found_no_master: bool = False
        self._found_a_master = False

    async def open(self) -> Connection:
        """Connect, send the greeting, and select the database.

        Raises:
            ServerUnavailable: The server does not answer, or refuses a client that was let in.
            ServerRefused: It refuses a client that was never let in.
        """
        try:
            wire = await self._open()
        except ServerRefused as error:
            if not self._was_let_in:
                raise
            raise ServerUnavailable(*error.args) from error.__cause__
        self._was_let_in = True
        return wire

    async def _open(self) -> Connection:
        if isinstance(self._address, SentinelAddress):
            return await self._open_master(self._address)
        try:
            wire, role, _ = await (
                _open(self._address) if self._was_let_in else _open_first(self._address)
            )
        except ServerUnavailable:
            if self._address.restart is None:
                raise
            path = await self._address.restart()
            self._address = replace(self._address, options=self._address.options | {"path": path})
            wire, role, _ = await _open(self._address)
        self._found_a_master |= role == b"master"
        self.found_no_master = not self._found_a_master and role == b"replica"
        return wire

    async def _open_master(self, address: SentinelAddress) -> Connection:
        """Connect by way of the first Sentinel whose server itself claims to be the master."""
        named: set[tuple[str, int]] = set()

        async def open_by(sentinel: Address) -> Connection:
            host, port = await _master(sentinel, address.service)
            if (host, port) in named:
                raise ServerUnavailable(f"{sentinel.label} also names {host}:{port}")
            named.add((host, port))
            wire, role, _ = await _open(address.server.at(host, port))
            # A Sentinel may not know yet that another server has taken over.
            if role not in (b"master", None):
                wire.close()
                raise ServerUnavailable(
                    f"{sentinel.label} names {host}:{port}, which is not a master"
                )
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            return wire

        attempts = [(sentinel.label, partial(open_by, sentinel)) for sentinel in self._sentinels]
        return await first_of(
            f"{address.label}: no Sentinel led to a master", attempts, Connection.close
        )


async def _open_first(address: Address) -> tuple[Connection, bytes | None, Sequence[Any]]:
    """Connect to a server that has not let us in yet: say at once if its port is another kind."""
    opening = asyncio.ensure_future(_open(address))
    try:
        await asyncio.wait({opening}, timeout=_SOON if address.is_tls else None)
        error = opening.exception() if opening.done() else None
        # A server that answers, even if it is not ready, speaks as the address says.
        silent = isinstance(error, ServerUnavailable) and error.__cause__ is not None
        if silent or not opening.done():
            await _require_scheme(address)
        return await opening
    finally:
        if not opening.cancel() and not opening.cancelled():
            opening.exception()


async def _master(sentinel: Address, service: str) -> tuple[str, int]:
    """Return host and port of the server that a Sentinel names."""
    question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    wire, _, (reply,) = await _open(
        sentinel, question, credentials="sentinel_username and sentinel_password"
    )
    wire.close()
    if isinstance(reply, ReplyError):
        raise _refusal(reply, sentinel)
    if not reply:
        raise ServerUnavailable(f"{sentinel.label} does not know the service {service!r}")
    return reply[0].decode(), int(reply[1])


async def _open(
    address: Address, *questions: tuple[str, ...], credentials: str = _OF_THE_ADDRESS
) -> tuple[Connection, bytes | None, Sequence[Any]]:
    """Connect, and send the greeting and further ``questions`` together: a round trip may be long.

    Args:
        address: The server.
        questions: Further commands.
        credentials: What to check in the address if the server does not let us in.

    Returns:
        The connection, the server's role or None, and the replies, which may be errors.
    """
    opened = address.connection()
    try:
        if address.is_tls:
            _load_certificates(opened, address)
        secrets = await _credentials(opened, address)
        name, database = opened.client_name or "delayq", opened.db
        if not _greets_itself(opened):
            _silence(opened)
        try:
            async with within(_CONNECT_WITHIN):
                await _connect(opened, address)
        except TimeoutError as error:
            raise RedisTimeoutError("Timeout connecting to server") from error
    except BaseException as error:
        with suppress(RedisError, OSError):
            await opened.disconnect(nowait=True)
        if (reason := _why_not(error, address)) is None:
            raise
        raise reason from _without_causes(error)
    wire = Connection(opened)
    commands = [*([("SELECT", database)] if database else []), *questions]
    try:
        auth = ("AUTH", *secrets) if secrets else ()
        hello, *replies = await _ask(wire, ("HELLO", 2, *auth, "SETNAME", name), *commands)
        if isinstance(hello, ReplyError) and _lacks_hello(str(hello), signed_in=bool(auth)):
            hello, _, *replies = await _ask(
                wire, auth or ("PING",), ("CLIENT", "SETNAME", name), *commands
            )
        refusals = [
            reply
            for reply in (hello, *replies[: len(commands) - len(questions)])
            if isinstance(reply, ReplyError)
        ]
        if refusals:
            raise _refusal(refusals[0], address, credentials)  # noqa: TRY301 - the connection is closed in one place
    except BaseException as error:
        wire.close()
        if (reason := _why_not(error, address)) is None:
            raise
        raise reason from _without_causes(error)
    facts = dict(zip(hello[::2], hello[1::2], strict=False)) if isinstance(hello, list) else {}
    return wire, facts.get(b"role"), replies[len(commands) - len(questions) :]


async def _connect(opened: AbstractConnection, address: Address) -> None:
    """Connect. While the backlog of a Unix socket is full, wait, and try again.

    With TCP, the system tries again by itself.
    """
    redis_py: Any = opened
    tries, has_backlog = 0, "path" in address.options
    while True:
        try:
            await redis_py.connect()
            if has_backlog:
                # asyncio takes a full backlog for a connection that is there.
                socket_of(opened).getpeername()
        except (*_LINK_ERRORS, RedisError) as error:
            reason = _behind(error, OSError)
            if not has_backlog or reason is None or reason.errno not in _BACKLOG_IS_FULL:
                raise
            await opened.disconnect(nowait=True)
            tries += 1
            await asyncio.sleep(retry_delay(tries, longest=0.5))
        else:
            return


def _lacks_hello(error: str, *, signed_in: bool) -> bool:
    """Return whether the reply to HELLO means that there is no such command, as in some proxies.

    Newer servers ask for a password before they say so, even if the command ``signed_in``.
    """
    return "unknown command" in error or (signed_in and error.startswith("NOAUTH"))


async def _ask(wire: Connection, *commands: tuple[Any, ...]) -> list[Any]:
    """Send commands together. Returns the replies, which may be errors from the server."""
    replies = await asyncio.gather(
        *[wire.ask(*command) for command in commands], return_exceptions=True
    )
    for reply in replies:
        if isinstance(reply, OSError):
            if not wire.is_clean:
                # The reason why the server hung up, which it sent before it was asked.
                try:
                    return [ReplyError(str(await wire.read()))]
                except ReplyError as reason:
                    return [reason]
                except OSError:
                    pass
            raise reply
    return replies


async def _credentials(opened: AbstractConnection, address: Address) -> tuple[str, ...]:
    """Return user and password, or nothing if there is no password or redis-py sends it."""
    if _greets_itself(opened):
        return ()
    if opened.credential_provider is None:
        return (
            (opened.username or "default", opened.password or "")
            if opened.username or opened.password
            else ()
        )
    try:
        *user, password = await opened.credential_provider.get_credentials_async()
    except Exception as error:
        # The provider may have to ask a server, too.
        raise ServerUnavailable(
            f"{address.label}: the credential provider failed with {type(error).__name__}"
        ) from error
    return (*(user or ["default"]), password)


def _greets_itself(opened: AbstractConnection) -> bool:
    """Tell whether the user of redis-py has replaced the greeting."""
    return opened.redis_connect_func is not None or any(
        getattr(type(opened), name, None) is not getattr(AbstractConnection, name, None)
        for name in ("on_connect", "on_connect_check_health")
    )


def _silence(opened: AbstractConnection) -> None:
    """Keep redis-py from sending anything: its greeting takes several round trips."""
    redis_py: Any = opened
    redis_py.credential_provider = redis_py.username = redis_py.password = None
    redis_py.client_name = redis_py.driver_info = redis_py.lib_name = redis_py.lib_version = None
    redis_py.db = 0


def _load_certificates(opened: AbstractConnection, address: Address) -> None:
    # redis-py mistakes a missing file for a server that does not answer.
    redis_py: Any = opened
    try:
        redis_py.ssl_context.get()
    except (OSError, ValueError) as error:
        options = "ssl_certfile, ssl_keyfile and ssl_ca_certs"
        raise ServerRefused(
            f"{address.label}: the certificates cannot be loaded ({error}): check {options}"
        ) from error


def _refusal(
    error: ReplyError, address: Address, credentials: str = _OF_THE_ADDRESS
) -> DelayqError:
    text = str(error)
    if is_not_now(text):
        return ServerUnavailable(f"{address.label} is temporarily unavailable: {text}")
    if text.startswith("NOAUTH"):
        if credentials == _OF_THE_ADDRESS:
            credentials += ", as in redis://user:password@host:port"
        return ServerRefused(
            f"{address.label} requires a password, and none was given: add {credentials}"
        )
    if text.startswith(_OF_THE_USER):
        return ServerRefused(
            f"{address.label} rejected the credentials: {text.rstrip('.')}; check {credentials}"
        )
    return ServerRefused(f"{address.label} refused the connection: {text}")


def _why_not(error: BaseException, address: Address) -> DelayqError | None:
    untrusted = _behind(error, ssl.SSLCertVerificationError)
    if untrusted is not None:
        # The certificate will be the same the next time.
        return ServerRefused(
            f"{address.label} presented a certificate that is not trusted:"
            f" {untrusted.verify_message}"
        )
    if (alert := _ALERT.search(str(_behind(error, ssl.SSLError)))) is not None:
        return ServerRefused(
            f"{address.label} ended the TLS handshake: {_what_to_do(alert[1], address)}"
        )
    if not isinstance(error, (*_LINK_ERRORS, RedisError)):
        return None
    reason = f"{error}{_hint(error, address)}"
    if address.label.endswith("://***"):
        # The error names the host, which may be half of a password.
        reason = "percent-encode special characters in the password, such as %40, %3F and %23"
    return ServerUnavailable(f"{address.label} does not answer: {reason}")


def _without_causes(error: BaseException) -> BaseException:
    """Return an error without what led to it: its text tells enough, and a page is not read."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _what_to_do(alert: str, address: Address) -> str:
    """Put a TLS alert from the server into words, and say what to do about it."""
    words = alert.lower().replace("_", " ")
    if not address.options.get("ssl_certfile") and alert.endswith(
        ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")
    ):
        return f"{words}; {_ADD_CERTIFICATE}"
    return f"{words}; check ssl_certfile, ssl_keyfile, ssl_min_version and ssl_ciphers"


def _behind(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of this kind that led to ``error``, or None."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _hint(error: BaseException, address: Address) -> str:
    """Return a hint if the scheme may be wrong, because neither side can tell the other."""
    if address.is_tls and isinstance(error, RedisTimeoutError):
        return " (ports without TLS do not answer a handshake: did you mean redis://?)"
    if not address.is_tls and _behind(error, ConnectionResetError):
        return " (ports with TLS close plain connections: did you mean rediss://?)"
    if address.is_tls and _behind(error, ConnectionResetError):
        # The reset may have overtaken the alert that says so.
        down = "it may be down behind a proxy"
        hint = "" if address.options.get("ssl_certfile") else f"; {_ADD_CERTIFICATE}"
        return f" ({down}{hint})"
    return ""


async def _require_scheme(address: Address) -> None:
    """Raise ServerRefused if the server is there, but the scheme of the address is wrong.

    Neither side can tell the other: one waits for a handshake, and the other for a command.
    """
    host, port = address.endpoint
    if port is None:
        return
    with suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(_SCHEME_SHOWS_WITHIN):
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
        return await reader.read(1) in _PING_REPLIES
    finally:
        writer.transport.abort()


async def _shakes_hands(host: str, port: int) -> bool:
    # Nothing is sent over it, so it need not be trusted.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    writer.transport.abort()
    return True
