"""A server and the network in front of it, without sockets: bytes take time, or get lost.

The server is fakeredis, which runs delayq's own scripts. All randomness comes from a seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import TYPE_CHECKING, Any

from fakeredis import FakeServer
from fakeredis._helpers import SimpleError
from fakeredis._socket._fakesocket import FakeSocket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.faults.virtual import Process, VirtualLoop

REQUESTS, REPLIES = 0, 1
# Seconds: the minimum, and the average of what is added to it.
_LATENCY = (0.00005, 0.0002)
# The share that is lost while losses occur.
_LOSS = 0.3
# Data arrives at least this much later than the data sent before it, seconds.
_BEHIND = 1e-6


class Network:
    """A network that leads from everywhere to one server."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._chance = random.Random(f"network {seed}")
        self._server = FakeServer(version=(7,))
        self._blocked: list[_Session] = []
        # Kept alive here: the garbage collector would close an unreferenced connection.
        self._made: list[Connection] = []
        self.loop: VirtualLoop
        self.refuses: bool = False
        self.mute: float = 0.0  # the share of all notifications that are lost
        self.slower: float = 0.0  # seconds at most
        self.loses: int | None = None  # the direction in which losses break connections
        self.trace: Any = hashlib.sha256()

    @property
    def connections(self) -> list[Connection]:
        return [each for each in self._made if each.is_usable]

    async def connect(
        self, make: Callable[[], asyncio.BaseProtocol]
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to the server, as :meth:`asyncio.loop.create_connection` would."""
        await asyncio.sleep(self.latency(self._chance))
        if self.refuses:
            raise ConnectionRefusedError("refused")
        protocol = make()
        connection = Connection(
            self, protocol, random.Random(f"connection {self._seed} {len(self._made)}")
        )
        self._made.append(connection)
        protocol.connection_made(connection)
        return connection, protocol

    def latency(self, chance: random.Random) -> float:
        least, more = _LATENCY
        return least + chance.expovariate(1 / more) + self.slower * chance.random()

    def heal(self) -> None:
        """Restore the network. Data that is already lost or late stays so."""
        self.refuses, self.mute, self.slower, self.loses = False, 0.0, 0.0, None

    def flush_scripts(self) -> None:
        self._server.script_cache.clear()

    def lasting_keys(self) -> list[str]:
        """Return the keys on the server that do not expire by themselves, apart from settings."""
        return sorted(
            key.decode()
            for key, item in self._server.dbs[0]._dict.items()
            if item.expireat is None and not key.endswith(b":settings")
        )

    def list_of(self, key: str) -> list[bytes]:
        item = self._server.dbs[0].get(key.encode())
        return list(item.value) if item else []

    def new_session(self, connection: Connection) -> _Session:
        return _Session(self._server, connection, self._blocked, len(self._made))

    def serve_blocked(self) -> None:
        """Serve the sessions that wait for something the last command has brought."""
        for session in list(self._blocked):
            session.look()


class Connection(asyncio.Transport):
    """The client's end of a connection, and the way to the other end."""

    def __init__(self, network: Network, protocol: Any, chance: random.Random) -> None:
        super().__init__()
        self._network = network
        self._loop = network.loop
        self._protocol = protocol
        self._chance = chance
        self._last = [0.0, 0.0]
        # Whether the client and the server still listen, and whether anything passes.
        self._client_there = self._server_there = self._passes = True
        self._session = network.new_session(self)
        self.process: Process | None = network.loop.process
        self.stalled_until: list[float] = [0.0, 0.0]

    @property
    def is_usable(self) -> bool:
        """Whether the connection is usable, as far as the client knows."""
        return self._client_there

    # Faults

    def cut(self) -> None:
        """Break it and tell both ends. Half of the time, only replies in transit are lost."""
        if self._passes and self._client_there:
            self._server_ends(at_once=self._chance.random() < 0.5)
            self._passes = False
            self._later(self._network.latency(self._chance), self._break)

    def half_open(self) -> None:
        """Let nothing pass any more, without telling either end."""
        self._passes = self._server_there = False

    def orphan(self) -> None:
        """End it for a client whose process is dead. Data that it has sent still arrives."""
        self._client_there = False
        self._server_ends(at_once=False)

    # The client's side

    def write(self, data: Any) -> None:
        if self._client_there:
            self._send(REQUESTS, bytes(data))

    def close(self) -> None:
        self._end(at_once=False)

    def abort(self) -> None:
        self._end(at_once=self._client_there and self._chance.random() < 0.5)

    def _end(self, *, at_once: bool) -> None:
        if self._client_there:
            self._client_there = False
            self._loop.call_soon(self._protocol.connection_lost, None)
            self._server_ends(at_once=at_once)

    def is_closing(self) -> bool:
        return not self._client_there

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_reading(self) -> bool:
        return self._client_there

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    # The server's side

    def reply(self, data: bytes) -> None:
        self._send(REPLIES, data)

    def notify(self, data: bytes) -> None:
        if self._chance.random() >= self._network.mute:
            self._send(REPLIES, data)

    # In transit

    def _send(self, direction: int, data: bytes) -> None:
        if not self._passes:
            return
        network = self._network
        if network.loses == direction and self._chance.random() < _LOSS:
            self.cut()
            return
        arrives = self._loop.time() + network.latency(self._chance)
        when = max(arrives, self.stalled_until[direction], self._last[direction] + _BEHIND)
        self._last[direction] = when
        with self._loop.within(None):
            self._loop.call_at(when, self._arrive, direction, data)

    def _arrive(self, direction: int, data: bytes) -> None:
        self._network.trace.update(b"%.9f %d %b" % (self._loop.time(), direction, data))
        if direction == REQUESTS:
            if self._server_there:
                self._session.sendall(data)
                self._network.serve_blocked()
        elif self._passes:
            with self._loop.within(self.process):
                self._loop.call_soon(self._received, data)

    def _received(self, data: bytes) -> None:
        if self._client_there:
            self._protocol.data_received(data)

    def _break(self) -> None:
        with self._loop.within(self.process):
            self._loop.call_soon(self._broken)

    def _broken(self) -> None:
        if self._client_there:
            self._client_there = False
            self._protocol.connection_lost(ConnectionResetError("reset"))

    def _server_ends(self, *, at_once: bool) -> None:
        # Later, so that it never happens within a command that the server is running.
        if self._passes:
            sent = 0.0 if at_once else self._last[REQUESTS]
            self._later(max(sent - self._loop.time(), 0) + _BEHIND, self._end_session)

    def _end_session(self) -> None:
        if self._server_there:
            self._server_there = False
            self._session.end()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        with self._loop.within(None):
            self._loop.call_later(seconds, what)


class _Session(FakeSocket):
    """The server's end of a connection, which replies in RESP2."""

    def __init__(
        self, server: FakeServer, connection: Connection, blocked: list[_Session], number: int
    ) -> None:
        self._number = number
        super().__init__(server, 0, client_class=object)
        self._connection = connection
        self._blocked_ones = blocked
        self._awaited = b""

    def __hash__(self) -> int:
        # The server keeps subscribers in sets, and notifies them in the order of their hashes.
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def put_response(self, msg: Any) -> None:
        data = encoded(msg)
        if isinstance(msg, list) and msg[:1] == [b"message"]:
            self._connection.notify(data)
        else:
            self._connection.reply(data)

    def end(self) -> None:
        if self in self._blocked_ones:
            self._blocked_ones.remove(self)
        self.close()

    def look(self) -> None:
        """Reply if the element that it waits for has arrived."""
        if (head := self._head()) is not None:
            self._blocked_ones.remove(self)
            self.put_response(head)
            self.resume()

    def _process_command(self, fields: list[bytes]) -> None:
        if fields[0] != b"BLMOVE":
            super()._process_command(fields)
            return
        # delayq only moves from a list onto itself, without a timeout. fakeredis 2.40 replies at
        # once that the list is empty.
        assert fields[1] == fields[2], fields
        assert fields[3:] == [b"LEFT", b"LEFT", b"0"], fields
        self._awaited = fields[1]
        self._blocked_ones.append(self)
        self.pause()

    def _head(self) -> bytes | None:
        item = self._db.get(self._awaited)
        return item.value[0] if item is not None and item.value else None

    def _get_server_runtime(self, server: Any) -> Any:
        if not hasattr(server, "_quick_runtime"):
            server._quick_runtime = _QuickRuntime(super()._get_server_runtime(server))
        return server._quick_runtime

    def _decode_error(self, error: SimpleError) -> Any:
        # Not the matching exception of redis-py, which has lost the code.
        return error


class _QuickRuntime:
    """A faster Lua runtime, which compiles a script once and collects no garbage."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._compiled: dict[bytes, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def execute(self, script: bytes | str) -> Any:
        if not isinstance(script, bytes):
            assert script == "collectgarbage()", script
            return None
        if script not in self._compiled:
            self._compiled[script] = self._runtime.compile(script)
        return self._compiled[script]()


def encoded(value: Any) -> bytes:
    """Encode a reply in RESP2."""
    match value:
        case None:
            return b"$-1\r\n"
        case SimpleError():
            return b"-%b\r\n" % value.value.encode()
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
        case list():
            return _array(value)
    raise TypeError(f"no reply is a {type(value).__name__}")


def _array(values: Sequence[Any]) -> bytes:
    return b"*%d\r\n%b" % (len(values), b"".join(encoded(value) for value in values))
