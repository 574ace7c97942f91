"""A network between a client and its server, which can be broken in every way that networks break.

It listens on loopback, or on a Unix socket, and hands bytes on to one server. What is held back arrives late, as on a real
network: also after the client has given up and gone. It keeps what it holds in memory, without bound.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import quote

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from tests.servers import PrivateServer

Direction = Literal["requests", "replies"]
"""From the client to the server, or back."""
BOTH: tuple[Direction, Direction] = ("requests", "replies")


class Proxy:
    """Links between clients and one server. Use it with ``async with``; it leaves no task and no socket behind.

    Args:
        server: Where bytes go, by its Unix socket.
        tcp: Listen on 127.0.0.1 instead of on a Unix socket: only there does a cut arrive as a reset.

    Attributes:
        url: What clients connect to.
    """

    def __init__(self, server: PrivateServer, *, tcp: bool = False) -> None:
        self._upstream = server.socket_path
        self._tcp = tcp
        self._directory = Path(tempfile.mkdtemp(prefix="dq-proxy-"))
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._delays: dict[Direction, float] = dict.fromkeys(BOTH, 0.0)
        self._stalled: set[Direction] = set()
        self._half_open = False
        self._refusing = False
        self.url = ""
        self.accepted: int = 0
        """Links that were opened so far."""

    @property
    def links(self) -> int:
        """How many links are open."""
        return len(self._links)

    # What can go wrong

    def delay(self, milliseconds: float, *directions: Direction) -> None:
        """Let bytes take so long, in the directions given, or in both."""
        for direction in directions or BOTH:
            self._delays[direction] = milliseconds / 1000

    def stall(self, *directions: Direction) -> None:
        """Hold back what goes that way. It arrives after :meth:`heal`, also if its sender has gone by then."""
        self._stalled.update(directions or BOTH)

    def half_open(self) -> None:
        """Swallow all bytes of every link that is open now or opened later, and keep the links open.

        A link that has lost bytes stays mute after :meth:`heal`, until somebody gives it up.
        """
        self._half_open = True

    def drop_after(self, count: int, direction: Direction) -> None:
        """Cut each link that is open now after ``count`` more bytes in that direction, in the middle of a message if need be."""
        for link in self._links:
            link.pipes[direction].budget = count

    def cut(self) -> int:
        """Reset all links now, and say how many there were. What they held is lost."""
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def refuse(self) -> None:
        """Reset whoever connects, at once. Links that are open stay."""
        self._refusing = True

    def heal(self) -> None:
        """End all that, but for :meth:`half_open`'s lost bytes. What was held back arrives."""
        self._refusing = self._half_open = False
        self._delays = dict.fromkeys(BOTH, 0.0)
        self._stalled.clear()
        for link in list(self._links):
            for pipe in link.pipes.values():
                pipe.budget = None
                pipe.flush()

    # Inside

    def held_until(self, direction: Direction) -> float | None:
        """Until when of the loop's time bytes that come now are held; None: until :meth:`heal`."""
        if direction in self._stalled:
            return None
        return asyncio.get_running_loop().time() + self._delays[direction] if self._delays[direction] else 0.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._tcp:
            self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
            port = self._server.sockets[0].getsockname()[1]
            self.url = f"redis://127.0.0.1:{port}/0"
        else:
            path = self._directory / "s"
            self._server = await loop.create_unix_server(self._accept, str(path))
            self.url = f"unix://{quote(str(path))}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        opening = [link.opening for link in self._links if link.opening is not None]
        self.cut()
        await asyncio.gather(*opening, return_exceptions=True)
        # The sockets are closed in the loop's next turn.
        await asyncio.sleep(0)
        await self._server.wait_closed()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> _End:
        return _Link(self).pipes["requests"].source

    def _opened(self, link: _Link) -> bool:
        if self._refusing:
            return False
        self.accepted += 1
        self._links.add(link)
        return True

    def _closed(self, link: _Link) -> None:
        self._links.discard(link)


class _Link:
    """One client's connection, and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        client, server = _End(), _End()
        self.pipes: dict[Direction, _Pipe] = {
            "requests": _Pipe(self, "requests", client, server),
            "replies": _Pipe(self, "replies", server, client),
        }
        self.ends = (client, server)
        client.link = server.link = self
        client.pipe, server.pipe = self.pipes["requests"], self.pipes["replies"]
        self.mute = False
        self.is_cut = False
        self.opening: asyncio.Task[None] | None = None

    def connected(self, end: _End) -> None:
        if end is not self.ends[0]:
            return
        if not self.proxy._opened(self):
            self.cut()
            return
        # Nothing comes before there is somewhere to send it.
        end.pause()
        self.opening = asyncio.get_running_loop().create_task(self._open(), name="proxy link")

    async def _open(self) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self.ends[1], str(self.proxy._upstream))
        except OSError:
            self.cut()
        else:
            if self.is_cut:
                self.ends[1].abort()
            self.ends[0].resume()
        finally:
            self.opening = None

    def ended(self, pipe: _Pipe) -> None:
        """No more bytes come into this pipe. What it holds still arrives."""
        if self.mute:
            self.cut()
        else:
            pipe.end()

    def cut(self) -> None:
        self.is_cut = True
        for end in self.ends:
            end.abort()
        for pipe in self.pipes.values():
            pipe.drop()
        self.proxy._closed(self)


class _Pipe:
    """One direction of a link."""

    def __init__(self, link: _Link, direction: Direction, source: _End, target: _End) -> None:
        self._link = link
        self._direction: Direction = direction
        self.source = source
        self._target = target
        # With the time before which it must not arrive.
        self._held: deque[tuple[float | None, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self.budget: int | None = None

    def feed(self, data: bytes) -> None:
        link = self._link
        if link.mute or link.proxy._half_open:
            link.mute = True
            return
        if self.budget is not None:
            if len(data) >= self.budget:
                self._target.write(data[: self.budget])
                link.cut()
                return
            self.budget -= len(data)
        until = link.proxy.held_until(self._direction)
        if until == 0 and not self._held:
            self._target.write(data)
            return
        self._held.append((until, data))
        self._deliver()

    def flush(self) -> None:
        """What is held arrives now."""
        while self._held:
            self._target.write(self._held.popleft()[1])
        self._finish()

    def end(self) -> None:
        self._ending = True
        self._finish()

    def drop(self) -> None:
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while self._held and (until := self._held[0][0]) is not None:
            if until > loop.time():
                if self._timer is None:
                    self._timer = loop.call_at(until, self._rung)
                return
            self._target.write(self._held.popleft()[1])
        self._finish()

    def _rung(self) -> None:
        self._timer = None
        self._deliver()

    def _finish(self) -> None:
        if self._ending and not self._held:
            self._target.close()
            self._link.proxy._closed(self._link)


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
        # What comes from the other side may still be on its way.
        self.link.ended(self.pipe)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.link.ended(self.pipe)

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
                # So that closing resets it.
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
