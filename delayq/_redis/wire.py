"""One open connection: commands out, answers in."""
# ruff: noqa: SLF001 - redis-py opens the socket, and has no other way to let go of it

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hiredis import ProtocolError, Reader, pack_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio.connection import AbstractConnection

if sys.platform == "linux":
    import fcntl
    import termios

_log = logging.getLogger("delayq")

# How long a connection may be silent while an answer is missing, seconds.
ANSWER_WITHIN = 5.0
# After how much of that it is doubted that anybody is at the other end.
DOUBT_AFTER = 1.0
# A question is not missing its answer before it has arrived: a network carries at least so much, bytes per second.
_SLOWEST = 250_000
# When the system asks whether the other end of an idle connection still exists, how far apart, and how often; seconds. By
# default it asks after two hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_NOTHING = object()


class ReplyError(Exception):
    """The server's answer is an error."""


class NotSent(ConnectionError):
    """The connection is lost, and nothing was sent."""


class _Question(NamedTuple):
    """A command whose answer is to come.

    Attributes:
        told: Called with the answer; None where it interests nobody.
        sent_at: When the command was sent, seconds.
        patience: How many seconds more than others the answer may take.
        afterwards: Called when the answer has come, or will not come any more.
    """

    told: Callable[[Any], object] | None
    sent_at: float
    patience: float
    afterwards: list[Callable[[], object]] | None = None

    def tell(self, answer: Any) -> None:
        _tell(self.told, answer)
        for each in self.afterwards or ():
            each()


class Wire(asyncio.Protocol):
    """A connection that redis-py has opened and introduced; from then on its socket is read and written here.

    Sockets, TLS, user names and passwords are redis-py's business. Its streams are left out: they cost more than all else
    that a call needs. Answers come in the order of the questions, so many may be on their way. What nobody has asked for, as
    notifications, is kept for :meth:`read`.

    A connection that dies without a word looks like one whose answer takes long. While bytes come in or leave, it is alive. When
    nothing has moved for :data:`DOUBT_AFTER` seconds and an answer is missing, ``doubted`` is called, and again from time to
    time: its owner can find out more. After :data:`ANSWER_WITHIN` seconds the connection ends by itself.

    Attributes:
        doubted: Called as said above.
        broken: Called when the connection ends otherwise than by :meth:`close`.
        round_trip: How long the fastest answer took, seconds; infinite before the first one.
        moved_at: When bytes came in or left last, as far as that was noticed; seconds of the event loop's clock.
    """

    def __init__(self, opened: AbstractConnection) -> None:
        """Take over a connection on which no answer is to come."""
        self._loop = asyncio.get_running_loop()
        self.doubted: Callable[[], object] = lambda: None
        self.broken: Callable[[], object] = lambda: None
        self.moved_at: float = self._loop.time()
        self.round_trip: float = math.inf
        # When an answer was last found to be missing for too long.
        self._doubted_at = -math.inf
        # How many commands are on their way for which the server may hold its answers back.
        self._blocking = 0
        # How many calls of `when_answered` are to come.
        self._abandoned = 0
        # Bytes that had not left when we last looked.
        self._queued = 0
        # When something was sent whose answer comes to `read`.
        self._answer_due_since: float | None = None
        held: Any = opened
        # Kept, for it closes the socket when nobody holds it any more.
        self._writer = held._writer
        self._transport = self._writer.transport
        held._reader = held._writer = None
        self._reader: Any = Reader(protocolError=ProtocolError, replyError=_reply_error, notEnoughData=_NOTHING)
        self._asked: deque[_Question] = deque()
        self._unasked: deque[Any] = deque()
        self._reading: asyncio.Future[Any] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._lost: Exception | None = None
        self._socket: Any = self._transport.get_extra_info("socket")
        self._keep_alive(getattr(opened, "socket_keepalive_options", None))
        self._transport.set_protocol(self)
        self._transport.resume_reading()

    @property
    def is_open(self) -> bool:
        """Whether it can be used, as far as we know."""
        return self._lost is None

    @property
    def is_clean(self) -> bool:
        """Whether it can be used, and nothing has come that nobody has asked for."""
        return self._lost is None and not self._unasked

    @property
    def bytes_to_send(self) -> int:
        """How many bytes wait here for the network to take them."""
        return 0 if self._lost is not None else self._transport.get_write_buffer_size()

    @property
    def unanswered(self) -> int:
        """How many answers are on their way."""
        return len(self._asked)

    @property
    def is_blocked(self) -> bool:
        """Whether the server may hold back the answers to what is sent now."""
        return self._blocking > 0

    @property
    def is_abandoned(self) -> bool:
        """Whether a caller has gone before an answer came that has not come yet."""
        return self._abandoned > 0

    @property
    def is_doubted(self) -> bool:
        """Whether an answer has been missing for too long, and nothing has moved since that was found."""
        return self._doubted_at > self.moved_at

    def ask(self, *command: Any) -> asyncio.Future[Any]:
        """Send a command. The future has its answer, or raises :class:`ReplyError` or an ``OSError``.

        Cancelling the future does no harm.

        Raises:
            NotSent: The connection is lost.
        """
        future = self._loop.create_future()
        self.call(command, partial(_settle, future))
        return future

    def call(self, command: Sequence[Any], told: Callable[[Any], object] | None, blocks: float = 0.0) -> None:
        """Send a command. ``told`` is called with its answer, or with what :meth:`ask` raises, as soon as that is known.

        ``blocks``: For how many seconds the server may hold the answer back because the command says so.
        """
        self._check()
        if blocks:
            self._blocking += 1
            told = partial(self._unblocked, told)
        packed = pack_command(tuple(command))
        self._asked.append(_Question(told, self._loop.time(), blocks + len(packed) / _SLOWEST))
        self._keep_watch()
        self._transport.write(packed)

    def when_answered(self, told: Callable[[], object]) -> None:
        """Call ``told`` when the last answer that is on its way now has come, or will not come any more; now if none is.

        The connection counts as abandoned until then.
        """
        if not self._asked:
            told()
            return
        self._abandoned += 1
        last = self._asked[-1]
        if last.afterwards is None:
            self._asked[-1] = last._replace(afterwards=[told])
        else:
            last.afterwards.append(told)

    def tell(self, *command: Any) -> None:
        """Send a command whose answer interests nobody. Raises as :meth:`ask`."""
        self.call(command, None)

    def write(self, *command: Any) -> None:
        """Send a command. Its answer, if it has any, comes to :meth:`read`. Raises as :meth:`ask`."""
        self._check()
        self._transport.write(pack_command(command))

    def ping(self) -> None:
        """As :meth:`write`, with a command that is always answered: silence after it counts as a missing answer."""
        self.write("PING")
        if self._answer_due_since is None:
            self._answer_due_since = self._loop.time()
        self._keep_watch()

    def silent_since(self) -> float | None:
        """Since when nothing moves although an answer is missing; None if none is missing. It may lie ahead."""
        if self._asked:
            question = self._asked[0]
            since, patience = question.sent_at, question.patience
        elif self._answer_due_since is not None:
            since, patience = self._answer_due_since, 0.0
        else:
            return None
        queued, self._queued = self._queued, self._count_queued()
        if self._queued < queued:
            self.moved_at = self._loop.time()
        return max(since, self.moved_at) + patience

    def give_up(self, reason: str) -> None:
        """End it: whoever waits for an answer is told the reason, as a ``TimeoutError``."""
        self._lose(TimeoutError(reason))

    async def read(self) -> Any:
        """What comes next that nobody has asked for, however long it takes.

        Raises:
            ReplyError: It is an error.
            OSError: The connection is lost.
        """
        if not self._unasked:
            self._check()
            self._reading = self._loop.create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        answer = self._unasked.popleft()
        if isinstance(answer, ReplyError):
            raise answer
        return answer

    async def drain(self) -> None:
        """Wait until the system takes more: what is sent is kept here meanwhile."""
        while self._drained is not None:
            await self._drained

    def close(self) -> None:
        """End it, when what was sent has left. Whoever waits is told."""
        self._lose(ConnectionError("the connection was closed"), abort=False)

    # What the transport calls

    def data_received(self, data: bytes) -> None:
        self.moved_at = self._loop.time()
        self._answer_due_since = None
        reader = self._reader
        reader.feed(data)
        try:
            while (answer := reader.gets()) is not _NOTHING:
                self._answered(answer)
        except ProtocolError as error:
            self._lose(ConnectionError(f"the server speaks another protocol: {error}"))

    def eof_received(self) -> None:
        self._lose(ConnectionError("the server closed the connection"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(error if isinstance(error, OSError) else ConnectionError(f"the connection broke: {error or 'it was closed'}"))

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # Inside

    def _check(self) -> None:
        if self._lost is not None:
            raise NotSent(str(self._lost)) from self._lost

    def _answered(self, answer: Any) -> None:
        if not self._asked:
            self._unasked.append(answer)
            if self._reading is not None and not self._reading.done():
                self._reading.set_result(None)
            return
        question = self._asked.popleft()
        self.round_trip = min(self.round_trip, self.moved_at - question.sent_at)
        if question.afterwards:
            self._abandoned -= len(question.afterwards)
        question.tell(answer)

    def _unblocked(self, told: Callable[[Any], object] | None, answer: Any) -> None:
        self._blocking -= 1
        if told is not None:
            told(answer)

    def _keep_watch(self) -> None:
        if self._watch is None:
            self._watch = self._loop.call_later(min(DOUBT_AFTER, ANSWER_WITHIN), self._look)

    def _look(self) -> None:
        """Whether an answer has been missing for too long. One timer serves all that are asked meanwhile."""
        self._watch = None
        since = self.silent_since()
        if since is None or self._lost is not None:
            return
        silent = self._loop.time() - since
        if silent >= ANSWER_WITHIN:
            self.give_up(f"no answer within {ANSWER_WITHIN:g} s")
            return
        wait = min(DOUBT_AFTER if silent >= DOUBT_AFTER else DOUBT_AFTER - silent, ANSWER_WITHIN - silent)
        self._watch = self._loop.call_later(wait, self._look)
        if silent >= DOUBT_AFTER:
            self._doubted_at = self._loop.time()
            self.doubted()

    def _count_queued(self) -> int:
        """Bytes that were sent here and have not reached the other end, as far as the system tells."""
        queued: int = self._transport.get_write_buffer_size()
        if sys.platform == "linux" and self._socket is not None:
            with suppress(OSError, ValueError):
                (in_system,) = struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
                queued += in_system
        return queued

    def _keep_alive(self, chosen: Any) -> None:
        """Let the system find out that the other end has vanished; ``chosen``: how, if the user has said so."""
        if self._socket is None or self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if not chosen and hasattr(socket, name):
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _lose(self, error: Exception, *, abort: bool = True) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._watch is not None:
            self._watch.cancel()
        if abort:
            self._transport.abort()
            self.broken()
        else:
            self._transport.close()
        self.resume_writing()
        asked, self._asked = self._asked, deque()
        for question in asked:
            question.tell(_copy(error))
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(_copy(error))


def _tell(told: Callable[[Any], object] | None, answer: Any) -> None:
    if told is None:
        return
    try:
        told(answer)
    except Exception:  # noqa: BLE001 - the others on this connection shall have their answers all the same
        _log.exception("an answer could not be handled")


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _copy(error: Exception) -> Exception:
    # Each has its own: a traceback grows wherever it is raised.
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _reply_error(text: str) -> ReplyError:
    # Of a command that it does not know, the server quotes the arguments.
    return ReplyError(text.removeprefix("ERR ").partition(", with args beginning with")[0])
