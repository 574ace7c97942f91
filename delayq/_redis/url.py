"""Parses the address that a user passes into one that makes connections. No I/O."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import (
    Connection,
    Redis,
    RedisCluster,
    SentinelConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

# Valkey's names for the same protocol.
_REDIS_SCHEMES = {"valkey": "redis", "valkeys": "rediss", "valkey+unix": "unix"}
_SCHEMES = ("redis", "rediss", "unix", *_REDIS_SCHEMES)

# Addresses of several servers: the part before the plus says how to reach each of them.
_MULTI_SERVER_SCHEMES = tuple(
    f"{name}+{kind}"
    for kind in ("sentinel", "cluster")
    for name in ("redis", "rediss", "valkey", "valkeys")
)
_PORTS = {"sentinel": 26379, "cluster": 6379}

# redis-py's defaults differ between classes and versions.
_OPTIONS: dict[str, Any] = {
    # Replies stay bytes.
    "decode_responses": False,
    # A call that takes messages must get its reply, however late: delayq bounds its calls itself.
    "socket_timeout": None,
    "health_check_interval": 0,
    # delayq retries only the calls that are safe to repeat.
    "retry": None,
    "retry_on_timeout": False,
    # The maintenance notifications of RESP3 make redis-py 8.1 hand out dead connections.
    "protocol": 2,
}
# Options of pools and clients, and of RESP3's maintenance notifications.
_IGNORED_OPTIONS = re.compile(
    r"max_connections|timeout|queue_class|connection_pool(_class)?|retry_on_error|legacy_responses|(oss_cluster_)?maint\w*|orig_\w+"
)


# redis-py's message for an option whose value it cannot parse.
_NAMES_OPTION = re.compile(r"Invalid value for '\w+' in connection URL\.")
# The parts of an address that may be shown. A path may be secret unless it is a number.
_HOST = r"(?:\[[0-9A-Fa-f:.]*\]|[\w. -]*)(?::[0-9]+)?"
_BLANKS_AND_QUOTES = " \t\r\n'\""
_SERVER = re.compile(rf"{_HOST}(?:/[0-9]*)?")
_SOCKET = re.compile(r"(?:/[^?#@:]*)?")
_SERVERS = re.compile(rf"{_HOST}(?:,{_HOST})*(?:/[^?#@:]*)?")


@cache
def _driver() -> Mapping[str, Any]:
    """Return the option that names redis-py to the server, if it takes one.

    Without it, redis-py reads its own version from a file for each connection, which takes longer
    than to connect.
    """
    if "driver_info" not in inspect.signature(AbstractConnection.__init__).parameters:
        return {}
    from redis.driver_info import DriverInfo  # noqa: PLC0415 - older versions lack it

    return {"driver_info": DriverInfo()}


@dataclass(frozen=True, slots=True)
class Address:
    """The way to open connections to one server. ``repr`` shows no secrets.

    ``restart`` restarts a server of ours that has died, and returns the path of its socket. It
    keeps its data in ``directory``, if that is not empty.
    """

    label: str
    connection_class: type[AbstractConnection] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    restart: Callable[[], Awaitable[str]] | None = field(default=None, repr=False)
    directory: str = field(default="", repr=False)

    @property
    def is_tls(self) -> bool:
        """Whether connections to it use TLS."""
        return issubclass(self.connection_class, SSLConnection)

    @property
    def endpoint(self) -> tuple[str, int | None]:
        """Host and port, or the path of a socket and None."""
        path = self.options.get("path")
        if path is not None:
            return str(path), None
        return str(self.options.get("host", "localhost")), int(self.options.get("port", 6379))

    def connection(self) -> AbstractConnection:
        """Return a new connection object that is not connected yet."""
        options = dict(self.options)
        if self.connection_class.__module__ == AbstractConnection.__module__:
            options = {**_driver(), **options}
        options["retry"] = Retry(NoBackoff(), 0)
        return self.connection_class(**options)

    def at(self, host: str, port: int) -> Address:
        """Return the address of another server of the same kind."""
        return replace(
            self, label=f"{host}:{port}", options=self.options | {"host": host, "port": port}
        )


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """One ``server``, wherever Sentinels say that it is. ``repr`` shows no secrets."""

    label: str
    sentinels: tuple[Address, ...] = field(repr=False)
    service: str
    server: Address = field(repr=False)

    @property
    def endpoint(self) -> None:
        """None: the server changes."""
        return


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Servers that divide the keys; the ``seeds`` know the others. ``repr`` shows no secrets."""

    label: str
    seeds: tuple[Address, ...] = field(repr=False)

    @property
    def endpoint(self) -> tuple[str, int | None]:
        """The first of the servers it was given."""
        return self.seeds[0].endpoint


AnyAddress = Address | SentinelAddress | ClusterAddress


def from_url(url: str) -> AnyAddress:
    """Parse ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://``
    and their ``valkey`` names.

    Raises:
        ConfigurationError: The scheme is unknown, or an option cannot be parsed. The message shows
            no secrets.
    """
    scheme, colon, location = url.partition(":")
    if colon and scheme in _MULTI_SERVER_SCHEMES:
        return _parse_many(url, scheme, location)
    if not colon or scheme not in _SCHEMES:
        schemes = ", ".join(f"{name}://" for name in (*_SCHEMES, "redis+sentinel", "redis+cluster"))
        raise ConfigurationError(
            f"{redacted(url)!r} is not a supported address; use one of {schemes} or embedded:"
        )
    return _parse_one(url, scheme, location)


def _parse_one(url: str, scheme: str, location: str) -> Address:
    reason = ""
    options: dict[str, Any] = {}
    connection_class: type[AbstractConnection] = Connection
    try:
        if not scheme.endswith("unix"):
            reason = _ignored_error(location)
        options |= parse_url(f"{_REDIS_SCHEMES.get(scheme, scheme)}:{location}")
        connection_class = options.pop("connection_class", Connection)
        # Find options that no connection accepts now, rather than when a connection is needed.
        _address("", connection_class, options).connection()
    except ValueError as error:
        # Other messages quote the text that they cannot parse.
        reason = str(error) if _NAMES_OPTION.fullmatch(str(error)) else "it is not a valid URL"
    except (TypeError, RedisError):
        reason = "one of its options is unknown or has an invalid value"
    if reason:
        # Raised outside the except block, because an error shows its context too.
        raise _invalid(url, f"is invalid: {reason}")
    if scheme.endswith("unix") and not options.get("path"):
        raise _invalid(url, "does not name a socket: use unix:///path/to/socket")
    return _address(redacted(url), connection_class, options)


def of_socket(
    path: str, restart: Callable[[], Awaitable[str]], directory: Path | None = None
) -> Address:
    """Return the address of a server that delayq runs itself, which ``restart`` starts again.

    ``directory`` is where it keeps its data, if it does.
    """
    return replace(
        _address(f"unix://{path}", UnixDomainSocketConnection, {"path": path}),
        restart=restart,
        directory="" if directory is None else str(directory),
    )


def _ignored_error(location: str) -> str:
    """Describe an error after the scheme that redis-py would ignore; empty if there is none."""
    parts = urlsplit(f"redis:{location}")
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        return "the database must be a number, as in redis://host:6379/0"
    return "the port must be a number from 1 to 65535" if parts.port == 0 else ""


def _parse_many(url: str, schemes: str, location: str) -> SentinelAddress | ClusterAddress:
    """Parse ``//user:password@host:port,host:port/service/database?option=value``."""
    scheme, _, kind = schemes.partition("+")
    authority, _, query = location.removeprefix("//").partition("?")
    user, at, authority = authority.rpartition("@")
    hosts, _, path = authority.partition("/")
    sentinel_login, options = {}, []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in ("sentinel_username", "sentinel_password"):
            sentinel_login[name.removeprefix("sentinel_")] = value
        else:
            options.append((name, value))
    suffix = f"?{urlencode(options)}" if options else ""
    servers = []
    for host_and_port in hosts.split(","):
        host, port = _host_and_port(url, host_and_port, _PORTS[kind])
        servers.append(_parse_one(url, scheme, f"//{user}{at}{host}:{port}{suffix}"))
    label = redacted(url)
    if kind == "cluster":
        if path.strip("/") not in ("", "0"):
            raise _invalid(url, "is invalid: a cluster has only database 0")
        return ClusterAddress(label, tuple(servers))
    service, _, database = path.partition("/")
    if not service or not (database or "0").isdecimal():
        example = "redis+sentinel://host:26379,host:26379/service/0"
        raise _invalid(url, f"does not name a service: use {example}")
    server = servers[0]
    server = replace(server, label=label, options=server.options | {"db": int(database or 0)})
    # Sentinels have their own users, and no databases.
    login = {
        "username": sentinel_login.get("username"),
        "password": sentinel_login.get("password"),
        "db": 0,
    }
    sentinels = tuple(
        _sentinel(replace(address, options=address.options | login)) for address in servers
    )
    return SentinelAddress(label, sentinels, unquote(service), server)


def _host_and_port(url: str, text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    if (
        not host
        or not port.isdecimal()
        or not 0 < int(port) < 65536
        or (":" in host) != host.startswith("[")
    ):
        # The part itself is not shown: it may be the half of a password that contains a "?".
        raise _invalid(url, "is invalid: each of its servers must be host:port")
    return host, int(port)


def from_client(client: object) -> AnyAddress:
    """Extract the address from a client of ``redis.asyncio``, which keeps its connections."""
    label = "the given client"
    if isinstance(client, RedisCluster):
        nodes = client.nodes_manager.startup_nodes.values()
        return ClusterAddress(
            label,
            tuple(
                _address(node.name, node.connection_class, node.connection_kwargs) for node in nodes
            ),
        )
    pool_class = getattr(getattr(client, "connection_pool", None), "connection_class", None)
    if "fakeredis" in (_package(type(client)), _package(pool_class)):
        raise ConfigurationError(
            "fakeredis is not a server that delayq can connect to: use a private server instead,"
            ' delayq.connect("embedded:"), or in tests delayq.testing.running()'
        )
    if not isinstance(client, Redis):
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        raise ConfigurationError(f"expected a URL or a client of redis.asyncio, got {kind}")
    pool = client.connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return _address(label, pool.connection_class, pool.connection_kwargs)
    if not pool.is_master:
        raise ConfigurationError(
            "the given client connects to replicas: pass the client that master_for() returns"
        )
    sentinel_pools = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
    sentinels = tuple(
        _sentinel(_address("", sentinel_pool.connection_class, sentinel_pool.connection_kwargs))
        for sentinel_pool in sentinel_pools
    )
    plain = SSLConnection if issubclass(pool.connection_class, SSLConnection) else Connection
    return SentinelAddress(
        label, sentinels, pool.service_name, _address(label, plain, pool.connection_kwargs)
    )


def _package(kind: object) -> str:
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _sentinel(address: Address) -> Address:
    host, port = address.options["host"], address.options["port"]
    return replace(address, label=f"the Sentinel {host}:{port}")


def _address(
    label: str, connection_class: type[AbstractConnection], options: Mapping[str, Any]
) -> Address:
    ours = {name: value for name, value in options.items() if not _IGNORED_OPTIONS.fullmatch(name)}
    # Unless the address says otherwise, the handshake has a limit that a busy event loop does not
    # use up.
    ours.setdefault("socket_connect_timeout", None)
    return Address(label, connection_class, ours | _OPTIONS)


def redacted(url: str) -> str:
    """Return ``url`` without user, password and options; only its scheme if it names no address."""
    bare = url.strip(_BLANKS_AND_QUOTES)
    before, _, after = url.partition(bare) if bare else ("", "", "")
    scheme, colon, location = bare.partition(":")
    text = _redacted(f"{scheme.lower()}{colon}{location}")
    if not text.startswith(scheme.lower()):
        return text
    # Spaces, quotation marks and capitals are shown: they may be the mistake, and hide nothing.
    return f"{before}{scheme}{text.removeprefix(scheme.lower())}{after}"


def _redacted(url: str) -> str:
    scheme, colon, location = url.partition("://")
    if not colon:
        return url if _SERVER.fullmatch(url) else "***"
    before, _, options = location.partition("?")
    user, at, authority = before.rpartition("@")
    pattern = (
        _SERVERS
        if scheme in _MULTI_SERVER_SCHEMES
        else _SOCKET
        if scheme.endswith("unix")
        else _SERVER
    )
    # If a password contains a question mark, the host is taken for an option.
    if (
        "@" in options
        or not pattern.fullmatch(authority)
        or scheme not in (*_SCHEMES, *_MULTI_SERVER_SCHEMES)
    ):
        return _scheme_of(url)
    return f"{scheme}://{'***@' if user or at else ''}{authority}"


def _invalid(url: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"the address {_scheme_of(url)!r} {reason}")


def _scheme_of(url: str) -> str:
    """Return all of an unreadable address that may be shown: the rest may be a password's."""
    scheme = url.partition("://")[0]
    return f"{scheme}://***" if scheme in (*_SCHEMES, *_MULTI_SERVER_SCHEMES) else "***"
