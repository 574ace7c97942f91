"""Links between clients and a server that are as slow as real networks and break in every way that
real networks do.

They listen on 127.0.0.1, or on a Unix socket, and run in the test's own event loop. A chunk of
bytes is scheduled when it arrives and written when it is due, so a long round trip costs no
throughput. Chunks are held in memory, without a limit.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import quote

from redis.asyncio.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

    from tests.support.servers import PrivateServer

Direction = Literal["requests", "replies"]
"""From the client to the server, or back."""
BOTH: tuple[Direction, Direction] = ("requests", "replies")

_PACKET = 1500
# Links share a limited bandwidth in turns of one packet, or of the bytes that pass in a millisecond
# if that is more.
_TURN = 0.001
_PIECE = 1 << 20


class Links:
    """Links between clients and one server.

    Use it with ``async with``; it leaves no task and no socket behind.

    Args:
        server: The server, reached by its Unix socket.
        tcp: Whether to listen on 127.0.0.1 instead of on a Unix socket, or the port to listen on.
            Only TCP links can be reset.
        round_trip: The minimum time for a reply, milliseconds. Opening a link takes another round
            trip, as with TCP.
        mbit: The bandwidth in each direction, megabits per second, which all links share fairly.
            None: no limit.

    Attributes:
        url: The address for clients.
        port: The port of 127.0.0.1 on which they listen; 0 on a Unix socket.
        accepted: The number of links opened so far.
    """

    def __init__(
        self,
        server: PrivateServer,
        *,
        tcp: bool | int = False,
        round_trip: float = 0.0,
        mbit: float | None = None,
    ) -> None:
        self._upstream = server.socket_path
        self._tcp = tcp
        self._usual_delay = round_trip / 2000
        self._usual_rate = _bytes_a_second(mbit)
        self._directory = Path(tempfile.mkdtemp(prefix="dq-links-"))
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._delays: dict[Direction, float] = dict.fromkeys(BOTH, self._usual_delay)
        self._lines: dict[Direction, _Line] = {
            direction: _Line(self._usual_rate) for direction in BOTH
        }
        self._stalled: set[Direction] = set()
        self._half_open = self._refusing = False
        self._losing = _Losing()
        self.url = ""
        self.port: int = 0
        self.accepted: int = 0

    @property
    def count(self) -> int:
        """The number of open links."""
        return len(self._links)

    # Slow the links down, break them, heal them

    def delay(self, milliseconds: float, *directions: Direction) -> None:
        """Delay bytes by this time, in the given directions or in both, until :meth:`heal`."""
        for direction in directions or BOTH:
            self._delays[direction] = milliseconds / 1000

    def stall(self, *directions: Direction, new: bool = True) -> None:
        """Hold back bytes, on ``new`` links too, until :meth:`heal`."""
        if new:
            self._stalled.update(directions or BOTH)
        for link in self._links:
            link.stalled.update(directions or BOTH)

    def half_open(self, *, new: bool = True) -> None:
        """Let all open links die silently, and ``new`` ones as well: bytes are lost for good."""
        self._half_open = new
        for link in self._links:
            link.mute = True

    def cut_after(self, count: int, direction: Direction) -> None:
        """Cut each open link after ``count`` more bytes in a direction, maybe within a message."""
        for link in self._links:
            link.pipes[direction].cut_after(count)

    def lose_replies(
        self,
        matching: bytes = b"",
        *,
        then: Literal["cut", "silence"] = "cut",
        times: int | None = 1,
    ) -> None:
        """Pass on matching requests but lose the replies: ``times``, or all until :meth:`heal`."""
        self._losing = _Losing(matching, then, times)

    def cut(self) -> int:
        """Reset all links now and return their number. Bytes in flight are lost."""
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def refuse(self) -> None:
        """Reset each new link at once. Open links stay."""
        self._refusing = True

    def heal(self) -> None:
        """Restore the usual round trip and bandwidth. Held bytes arrive; mute links stay mute."""
        self._refusing = self._half_open = False
        self._losing = _Losing()
        self._delays = dict.fromkeys(BOTH, self._usual_delay)
        self._stalled.clear()
        for link in list(self._links):
            link.stalled.clear()
            for pipe in link.pipes.values():
                pipe.heal()

    @property
    def lost_replies(self) -> int:
        """The number of replies that :meth:`lose_replies` has lost since it was called."""
        return self._losing.lost

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._tcp is False:
            path = self._directory / "s"
            self._server = await loop.create_unix_server(self._accept, str(path))
            self.url = f"unix://{quote(str(path))}"
        else:
            self._server = await loop.create_server(
                self._accept, "127.0.0.1", 0 if self._tcp is True else self._tcp
            )
            self.port = self._server.sockets[0].getsockname()[1]
            self.url = f"redis://127.0.0.1:{self.port}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        opening = [link.opening for link in self._links if link.opening is not None]
        self.cut()
        for line in self._lines.values():
            line.close()
        await asyncio.gather(*opening, return_exceptions=True)
        # The sockets close in the loop's next turn.
        await asyncio.sleep(0)
        await self._server.wait_closed()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> _End:
        return _Link(self).pipes["requests"].source


@contextmanager
def detour(ports: Mapping[int, int]) -> Iterator[None]:
    """Redirect connections from these ports of 127.0.0.1: servers tell their own addresses."""
    connection: Any = Connection
    direct = connection._connection_arguments

    def detoured(self: Connection) -> Any:
        arguments = direct(self)
        return {**arguments, "port": ports.get(arguments["port"], arguments["port"])}

    connection._connection_arguments = detoured
    try:
        yield
    finally:
        connection._connection_arguments = direct


def _bytes_a_second(mbit: float | None) -> float | None:
    return None if mbit is None else mbit * 1_000_000 / 8


class _Losing:
    """The rule for replies to lose, and their number so far."""

    def __init__(
        self, matching: bytes = b"", then: Literal["cut", "silence"] = "cut", times: int | None = 0
    ) -> None:
        self.matching = matching
        self._left = times
        self.then = then
        self.lost = 0

    @property
    def is_on(self) -> bool:
        return self._left != 0

    def wants(self, request: bytes) -> bool:
        if self.matching not in request:
            return False
        if self._left is not None:
            self._left -= 1
        return True


class _Link:
    """A client's connection and the connection to the server that belongs to it."""

    def __init__(self, links: Links) -> None:
        self.links = links
        client, server = _End(), _End()
        self.pipes: dict[Direction, _Pipe] = {
            "requests": _Pipe(self, "requests", client, server),
            "replies": _Pipe(self, "replies", server, client),
        }
        self.ends = (client, server)
        client.link = server.link = self
        client.pipe, server.pipe = self.pipes["requests"], self.pipes["replies"]
        self.mute = False
        self.stalled: set[Direction] = set()
        self.losing: _Losing | None = None
        self.is_cut = False
        self.opening: asyncio.Task[None] | None = None

    def connected(self, end: _End) -> None:
        if end is not self.ends[0]:
            return
        links = self.links
        if links._refusing:
            self.cut()
            return
        links.accepted += 1
        links._links.add(self)
        self.mute = links._half_open
        self.stalled = set(links._stalled)
        # The kernel completed TCP's handshake at once, so the first bytes wait for as long as it
        # should have taken.
        shaken_hands = asyncio.get_running_loop().time() + sum(links._delays.values())
        self.pipes["requests"].not_before(shaken_hands + links._delays["requests"])
        # Read no bytes before there is a connection that they can be written to.
        end.pause()
        self.opening = asyncio.get_running_loop().create_task(self._open(), name="link")

    async def _open(self) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(
                lambda: self.ends[1], str(self.links._upstream)
            )
        except OSError:
            self.cut()
        else:
            if self.is_cut:
                self.ends[1].abort()
            self.ends[0].resume()
        finally:
            self.opening = None

    def cut(self) -> None:
        self.is_cut = True
        for end in self.ends:
            end.abort()
        for pipe in self.pipes.values():
            pipe.drop()
        self.links._links.discard(self)


class _Pipe:
    """One direction of a link: bytes wait for their turn on the line, then travel."""

    def __init__(self, link: _Link, direction: Direction, source: _End, target: _End) -> None:
        self._link = link
        self._direction: Direction = direction
        self.source = source
        self._target = target
        # Empty bytes mean that the sender has closed.
        self._held: deque[bytes] = deque()
        self._queued: deque[memoryview] = deque()
        self._travelling: deque[tuple[float, bytes]] = deque()
        self._last_arrival = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._budget: int | None = None
        self._written = b""

    @property
    def _line(self) -> _Line:
        return self._link.links._lines[self._direction]

    def not_before(self, moment: float) -> None:
        """Let no byte arrive before a moment of the loop's time."""
        self._last_arrival = moment

    def cut_after(self, count: int) -> None:
        self._budget = count
        if count == 0:
            self._link.cut()

    def feed(self, data: bytes) -> None:
        link = self._link
        if link.is_cut or link.mute:
            return
        if self._direction == "replies" and link.losing is not None:
            link.losing.lost += 1
            if link.losing.then == "cut":
                link.cut()
            else:
                link.mute = True
            return
        self._put(data)

    def end(self) -> None:
        """Accept no more bytes. The bytes that are already in the pipe still arrive."""
        if self._link.mute:
            self._link.cut()
        elif not self._ending and not self._link.is_cut:
            self._ending = True
            self._put(b"")

    def drop(self) -> None:
        self._held.clear()
        self._queued.clear()
        self._travelling.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heal(self) -> None:
        self._budget = None
        # Delayed bytes arrive as if they had been sent now.
        latest = asyncio.get_running_loop().time() + self._delay
        self._last_arrival = min(self._last_arrival, latest)
        self._travelling = deque((min(arrival, latest), data) for arrival, data in self._travelling)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._held:
            self._start(self._held.popleft())
        self._deliver()

    def _put(self, data: bytes) -> None:
        if self._direction in self._link.stalled:
            self._held.append(data)
        else:
            self._start(data)

    @property
    def _delay(self) -> float:
        return self._link.links._delays[self._direction]

    def _start(self, data: bytes) -> None:
        line = self._line
        if not line.is_limited and not self._queued:
            self.travel(data, asyncio.get_running_loop().time())
        else:
            self._queued.append(memoryview(data))
            line.join(self)

    def take(self, count: int) -> tuple[bytes, bool]:
        """Return the next bytes for the line, and whether more are left."""
        data = self._queued.popleft() if self._queued else memoryview(b"")
        if len(data) > count:
            self._queued.appendleft(data[count:])
        return bytes(data[:count]), bool(self._queued)

    def travel(self, data: bytes, left_at: float) -> None:
        """Deliver bytes when they are due, but after all bytes that went before them."""
        if self._link.is_cut:
            return
        arrival = self._last_arrival = max(left_at + self._delay, self._last_arrival)
        self._travelling.append((arrival, data))
        self._deliver()

    def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        due: list[bytes] = []
        while self._travelling and self._travelling[0][0] <= loop.time():
            data = self._travelling.popleft()[1]
            if not data:
                self._write(b"".join(due))
                self._target.close()
                self._link.links._links.discard(self._link)
                return
            due.append(data)
        if due:
            self._write(b"".join(due))
        if self._travelling and self._timer is None:
            self._timer = loop.call_at(self._travelling[0][0], self._rung)

    def _rung(self) -> None:
        self._timer = None
        self._deliver()

    def _write(self, data: bytes) -> None:
        link = self._link
        if self._budget is not None and len(data) >= self._budget:
            self._target.write(data[: self._budget])
            link.cut()
            return
        if self._budget is not None:
            self._budget -= len(data)
        self._target.write(data)
        losing = link.links._losing
        if self._direction == "requests" and data and link.losing is None and losing.is_on:
            # From here on the server executes it. The matching bytes may have come in two parts.
            if losing.wants(self._written + data):
                link.losing = losing
            self._written = data[-len(losing.matching) :] if losing.matching else b""


class _Line:
    """One direction of the network, whose bandwidth all links share in turns."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._waiting: deque[_Pipe] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_limited(self) -> bool:
        return self._rate is not None

    def join(self, pipe: _Pipe) -> None:
        if pipe in self._waiting:
            return
        if not self._waiting:
            self._free_at = max(self._free_at, asyncio.get_running_loop().time())
        self._waiting.append(pipe)
        self._go()

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _go(self) -> None:
        # A late timer loses nothing: the turns that were missed since are taken now.
        loop = asyncio.get_running_loop()
        while self._waiting and self._free_at <= loop.time():
            pipe = self._waiting.popleft()
            data, more = pipe.take(max(_PACKET, int(self._rate * _TURN)) if self._rate else _PIECE)
            if self._rate:
                self._free_at += len(data) / self._rate
            if more:
                self._waiting.append(pipe)
            pipe.travel(data, self._free_at)
        if self._waiting and self._timer is None:
            self._timer = loop.call_at(self._free_at, self._rung)

    def _rung(self) -> None:
        self._timer = None
        self._go()


class _End(asyncio.Protocol):
    """One socket of a link."""

    link: _Link
    pipe: _Pipe

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.link.connected(self)

    def data_received(self, data: bytes) -> None:
        self.pipe.feed(data)

    def eof_received(self) -> bool:
        # Bytes from the other side may still be on their way.
        self.pipe.end()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.pipe.end()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is None:
            return
        opened = self._transport.get_extra_info("socket")
        with suppress(OSError):
            if opened.family != socket.AF_UNIX:
                # Make closing the socket reset the connection.
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
