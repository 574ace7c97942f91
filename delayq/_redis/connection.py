"""One open connection: commands out, replies in."""
# ruff: noqa: SLF001 - redis-py opens the socket, and has no other way to let go of it

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import sys
from collections import OrderedDict, deque
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from hiredis import ProtocolError, Reader, pack_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from redis.asyncio.connection import AbstractConnection

if sys.platform == "linux":
    import fcntl
    import termios

_log = logging.getLogger("delayq")

# How long a connection may be silent while a reply is missing, seconds.
GIVE_UP_AFTER = 5.0
# After how much of that time the connection is doubted, seconds.
DOUBT_AFTER = 1.0
# After this time, the event loop has read what had arrived before, seconds.
_READ_WITHIN = 0.001
# A network carries at least this many bytes per second of a large command.
_SLOWEST = 250_000

# When the system first probes whether an idle connection still exists, the time between probes,
# both in seconds, and their number. By default it probes after two hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# What the parser returns when no whole reply has arrived.
_INCOMPLETE = object()

_Error = TypeVar("_Error", bound=Exception)


class ReplyError(Exception):
    """The server answered with an error."""


class NotSent(ConnectionError):
    """The connection is lost, and nothing was sent."""


class _SentCommand(NamedTuple):
    """A command that has not been answered yet.

    Attributes:
        on_reply: Called with the reply, if it is needed.
        sent_at: When the command was sent, seconds.
        allowance: How many seconds longer than others the reply may take.
        afterwards: Called when the reply has come, or will not come any more.
    """

    on_reply: Callable[[Any], object] | None
    sent_at: float
    allowance: float
    afterwards: list[Callable[[], object]] | None = None

    def resolve(self, reply: Any) -> None:
        if self.on_reply is not None:
            try:
                self.on_reply(reply)
            except Exception:  # noqa: BLE001 - the other calls on this connection must get their replies all the same
                _log.exception("handling a reply failed")
        for callback in self.afterwards or ():
            callback()


class Owner(Protocol):
    """The owner of connections, which decides what to do about those that fail."""

    def connection_doubted(self) -> None:
        """React to a connection that is silent for :data:`DOUBT_AFTER` seconds."""
        ...

    def connection_broken(self) -> None:
        """React to the end of a connection that was not closed on purpose."""
        ...


class Pulse:
    """The signs of life of a connection, which is silent if nothing moves but a reply is missing.

    Attributes:
        moved_at: When bytes were last seen to come in or leave, seconds on the event loop's clock.
        doubted_at: When a reply was last found to be missing for too long.
        round_trip: The time that the fastest reply took, seconds; infinite before the first one.
        due_since: When a command was sent whose reply no call awaits, until anything arrives.
    """

    __slots__ = (
        "_now",
        "_queued",
        "_socket",
        "_writer",
        "doubted_at",
        "due_since",
        "moved_at",
        "round_trip",
    )

    def __init__(self, writer: asyncio.StreamWriter, now: Callable[[], float]) -> None:
        # Kept, because it closes the socket when it is collected.
        self._writer = writer
        self._socket: Any = writer.get_extra_info("socket")
        self._now = now
        # Bytes that had not left at the last check.
        self._queued = 0
        self.moved_at: float = now()
        self.doubted_at: float = -math.inf
        self.round_trip: float = math.inf
        self.due_since: float | None = None

    @property
    def is_doubted(self) -> bool:
        """Whether a reply was missing for too long, and nothing has moved since then."""
        return self.doubted_at > self.moved_at

    def silent_since(self, oldest: _SentCommand | None) -> float | None:
        """Return since when it has been silent while ``oldest`` waits; it may be in the future."""
        if oldest is not None:
            start, allowance = oldest.sent_at, oldest.allowance
        elif self.due_since is not None:
            start, allowance = self.due_since, 0.0
        else:
            return None
        queued, self._queued = self._queued, self._count_queued()
        if self._queued < queued:
            self.moved_at = self._now()
        return max(start, self.moved_at) + allowance

    def _count_queued(self) -> int:
        """Count the bytes that have not reached the other end, as far as the system tells."""
        queued: int = self._writer.transport.get_write_buffer_size()
        if sys.platform == "linux" and self._socket is not None:
            with suppress(OSError, ValueError):
                (in_system,) = struct.unpack(
                    "i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
                )
                queued += in_system
        return queued


def socket_of(opened: AbstractConnection) -> socket.socket:
    """Return the socket of a connection that redis-py has opened."""
    redis_py: Any = opened
    opened_socket: socket.socket = redis_py._writer.get_extra_info("socket")
    return opened_socket


class Connection(asyncio.Protocol):
    """A connection that redis-py has opened; from then on its socket is read and written here.

    redis-py's streams are not used, because they cost more than all else that a call needs. Replies
    come in the order of the commands, and several may be in flight. Data that no call has asked
    for, such as notifications, is kept for :meth:`read`.

    A connection that dies silently looks like one whose reply takes a long time. While bytes come
    in or leave, it is alive. When it has been silent for :data:`DOUBT_AFTER` seconds, the owner is
    notified, and again from time to time. After :data:`GIVE_UP_AFTER` seconds the connection ends
    itself.

    Attributes:
        owner: The pool that is notified of trouble.
        permits: Until when a check of the user's rights counts, by script and key, the oldest
            first. Kept by :class:`~delayq._redis.rights.Rights`.
    """

    def __init__(self, opened: AbstractConnection) -> None:
        """Take over a connection on which no reply is outstanding."""
        self.owner: Owner | None = None
        self.permits: OrderedDict[tuple[str, str], float] = OrderedDict()
        # How many commands in flight allow the server to hold back its replies.
        self._blocking = 0
        # How many callbacks of `when_answered` are outstanding.
        self._abandoned = 0
        redis_py: Any = opened
        writer = redis_py._writer
        # A server that is full or protected says so without being asked.
        early_bytes = bytes(redis_py._reader._buffer)
        redis_py._reader = redis_py._writer = None
        self._transport = writer.transport
        self.pulse: Pulse = Pulse(writer, asyncio.get_running_loop().time)
        self._reader: Any = Reader(
            protocolError=ProtocolError, replyError=_reply_error, notEnoughData=_INCOMPLETE
        )
        self._in_flight: deque[_SentCommand] = deque()
        # Data that no call has asked for, and at last the error with which the connection ended.
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._drained: asyncio.Future[None] | None = None
        self._silence_check: asyncio.TimerHandle | None = None
        # The error with which the connection ended; None while it is open.
        self._failure: Exception | None = None
        _keep_alive(
            self._transport.get_extra_info("socket"),
            getattr(opened, "socket_keepalive_options", None),
        )
        self._transport.set_protocol(self)
        # asyncio reads in a context of its own: in that of the call that opened the connection, it
        # would keep the variables of a web request alive, and show them in the log. (With TLS, and
        # with uvloop, it does.)
        if self._transport.is_reading():
            self._transport.pause_reading()
        Context().run(self._transport.resume_reading)
        if early_bytes:
            self.data_received(early_bytes)

    @property
    def is_open(self) -> bool:
        """Whether it can be used, as far as we know."""
        return self._failure is None

    @property
    def is_clean(self) -> bool:
        """Whether it can be used, and no data waits for :meth:`read`."""
        return self._failure is None and self._inbox.empty()

    @property
    def bytes_to_send(self) -> int:
        """The number of bytes that wait here for the network to take them."""
        return self._transport.get_write_buffer_size() if self.is_open else 0

    @property
    def unanswered(self) -> int:
        """The number of replies that are outstanding."""
        return len(self._in_flight)

    @property
    def waiting_since(self) -> float:
        """When the command was sent whose reply comes next, in loop time; infinity if none."""
        return self._in_flight[0].sent_at if self._in_flight else math.inf

    @property
    def is_blocked(self) -> bool:
        """Whether the server may hold back the replies to commands that are sent now."""
        return self._blocking > 0

    @property
    def is_abandoned(self) -> bool:
        """Whether the reply of a caller that has left is outstanding."""
        return self._abandoned > 0

    def ask(self, *command: Any) -> asyncio.Future[Any]:
        """Send a command, and return a future of its reply, or of the error."""
        future = asyncio.get_running_loop().create_future()
        self.call(command, partial(_resolve, future))
        return future

    def call(
        self, command: Sequence[Any], on_reply: Callable[[Any], object] | None, blocks: float = 0.0
    ) -> None:
        """Send a command; the server may hold back the reply for ``blocks`` seconds."""
        if self._failure is not None:
            raise self._not_sent()
        packed = _packed(command)
        if blocks:
            self._blocking += 1
            on_reply = partial(self._unblocked, on_reply)
        sent_at = asyncio.get_running_loop().time()
        self._in_flight.append(_SentCommand(on_reply, sent_at, blocks + len(packed) / _SLOWEST))
        if self._silence_check is None:
            self._watch()
        self._transport.write(packed)

    def call_all(
        self, calls: Iterable[tuple[Sequence[Any], Callable[[Any], object] | None]]
    ) -> None:
        """Send commands in one piece, each as :meth:`call` does."""
        if self._failure is not None:
            raise self._not_sent()
        sent_at = asyncio.get_running_loop().time()
        packed, commands = list[bytes](), list[_SentCommand]()
        for command, on_reply in calls:
            packed.append(_packed(command))
            commands.append(_SentCommand(on_reply, sent_at, len(packed[-1]) / _SLOWEST))
        self._in_flight += commands
        if self._silence_check is None:
            self._watch()
        self._transport.write(b"".join(packed))

    def when_answered(self, callback: Callable[[], object]) -> None:
        """Call back when all replies outstanding now have come, and be abandoned until then."""
        if not self._in_flight:
            callback()
            return
        self._abandoned += 1
        last = self._in_flight[-1]
        if last.afterwards is None:
            self._in_flight[-1] = last._replace(afterwards=[callback])
        else:
            last.afterwards.append(callback)

    def tell(self, *command: Any) -> None:
        """Send a command whose reply is not needed. Raises as :meth:`ask` does."""
        self.call(command, None)

    def write(self, *command: Any) -> None:
        """Send a command whose reply, if any, goes to :meth:`read`. Raises as :meth:`ask` does."""
        if self._failure is not None:
            raise self._not_sent()
        self._transport.write(_packed(command))

    def ping(self) -> None:
        """Send a PING as :meth:`write` does. Silence after it counts as a missing reply."""
        self.write("PING")
        if self.pulse.due_since is None:
            self.pulse.due_since = asyncio.get_running_loop().time()
        if self._silence_check is None:
            self._watch()

    def silent_since(self) -> float | None:
        """Return the same as :meth:`Pulse.silent_since`."""
        return self.pulse.silent_since(self._in_flight[0] if self._in_flight else None)

    def give_up(self, reason: str) -> None:
        """End the connection. All waiting callers get the reason, as a ``TimeoutError``."""
        self._lose(TimeoutError(reason))

    async def read(self) -> Any:
        """Return data that no call has asked for, or raise ReplyError or OSError."""
        if self._inbox.empty() and not self.is_open:
            raise self._not_sent()
        reply = await self._inbox.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def drain(self) -> None:
        """Wait until the system takes more data. Until then, sent data is kept here."""
        while self._drained is not None:
            # Shielded: a caller that is cancelled must not end the wait of others.
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """End the connection after the sent data has left. All waiting callers get an error."""
        self._lose(ConnectionError("the connection was closed"), abort=False)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        pulse = self.pulse
        now = pulse.moved_at = asyncio.get_running_loop().time()
        pulse.due_since = None
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _INCOMPLETE:
                # Looked up each time: a callback may end the connection.
                if not self._in_flight:
                    self._inbox.put_nowait(reply)
                    continue
                command = self._in_flight.popleft()
                pulse.round_trip = min(pulse.round_trip, now - command.sent_at)
                if command.afterwards:
                    self._abandoned -= len(command.afterwards)
                command.resolve(reply)
        except ProtocolError as error:
            self._lose(ConnectionError(f"the server does not speak the Redis protocol: {error}"))

    def eof_received(self) -> None:
        self._lose(ConnectionError("the server closed the connection"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(
            error
            if isinstance(error, OSError)
            else ConnectionError(f"the connection broke: {error or 'it was closed'}")
        )

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # Internals

    def _not_sent(self) -> NotSent:
        error = NotSent(str(self._failure))
        error.__cause__ = self._failure
        return error

    def _unblocked(self, on_reply: Callable[[Any], object] | None, reply: Any) -> None:
        self._blocking -= 1
        if on_reply is not None:
            on_reply(reply)

    def _watch(self) -> None:
        """Start the timer that serves all commands sent until it fires."""
        self._silence_check = asyncio.get_running_loop().call_later(
            min(DOUBT_AFTER, GIVE_UP_AFTER), self._check_silence
        )

    def _check_silence(self, before: float | None = None) -> None:
        """Check for a missing reply.

        A missing reply counts if it had not come ``before`` a time that is over. The event loop
        may be late for this check, and the reply may wait to be read: then it is read before the
        next check.
        """
        self._silence_check = None
        start = self.silent_since()
        if start is None or not self.is_open:
            return
        now = asyncio.get_running_loop().time()
        silent = (now if before is None else before) - start
        if before is None and silent >= min(DOUBT_AFTER, GIVE_UP_AFTER):
            self._silence_check = asyncio.get_running_loop().call_later(
                _READ_WITHIN, self._check_silence, now
            )
            return
        if silent >= GIVE_UP_AFTER:
            self.give_up(f"no reply within {GIVE_UP_AFTER:g} s")
            return
        doubt_in = DOUBT_AFTER if silent >= DOUBT_AFTER else DOUBT_AFTER - silent
        # A large command has more time than those that are sent behind it.
        wait = min(DOUBT_AFTER, doubt_in, GIVE_UP_AFTER - silent)
        self._silence_check = asyncio.get_running_loop().call_later(wait, self._check_silence)
        if silent >= DOUBT_AFTER:
            self.pulse.doubted_at = now
            if self.owner is not None:
                self.owner.connection_doubted()

    def _lose(self, error: Exception, *, abort: bool = True) -> None:
        if not self.is_open:
            return
        self._failure = error
        if self._silence_check is not None:
            self._silence_check.cancel()
        if abort:
            self._transport.abort()
            if self.owner is not None:
                self.owner.connection_broken()
        else:
            self._transport.close()
        self.resume_writing()
        in_flight, self._in_flight = self._in_flight, deque()
        for command in in_flight:
            command.resolve(own_copy(error))
        self._inbox.put_nowait(NotSent(str(error)))


def _packed(command: Sequence[Any]) -> bytes:
    """Pack a command. Raises TypeError if a part is neither text, nor bytes, nor a number."""
    try:
        packed: bytes = pack_command(tuple(command))
    except TypeError:
        # hiredis refuses subclasses of int, such as the members of an IntEnum.
        packed = pack_command(tuple(map(_plain, command)))
    return packed


def _plain(part: Any) -> Any:
    return int(part) if isinstance(part, int) and not isinstance(part, bool) else part


def _keep_alive(connected: Any, user_options: Any) -> None:
    """Have the system detect that the other end of a socket has vanished, if it can."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if not user_options and hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _resolve(future: asyncio.Future[Any], reply: Any) -> None:
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def own_copy(error: _Error) -> _Error:
    """Copy an error for one caller: raised in many tasks, it would mix up their tracebacks."""
    try:
        copy = type(error)(*error.args)
    except Exception:  # noqa: BLE001 - its constructor takes other arguments
        return error
    copy.__cause__ = error.__cause__
    return copy


def _reply_error(text: str) -> ReplyError:
    # For a command that it does not know, the server quotes the arguments.
    return ReplyError(text.removeprefix("ERR ").partition(", with args beginning with")[0])
