"""One open connection: commands out, answers in."""
# ruff: noqa: SLF001 - redis-py opens the socket, and has no other way to let go of it

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError, Reader, pack_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio.connection import AbstractConnection

# How long an answer may take, seconds.
ANSWER_WITHIN = 5.0

_NOTHING = object()


class ReplyError(Exception):
    """The server's answer is an error."""


class NotSent(ConnectionError):
    """The connection is lost, and nothing was sent."""


class Wire(asyncio.Protocol):
    """A connection that redis-py has opened and introduced; from then on its socket is read and written here.

    Sockets, TLS, user names and passwords are redis-py's business. Its streams are left out: they cost more than all else
    that a call needs. Answers come in the order of the questions, so many may be on their way. What nobody has asked for, as
    notifications, is kept for :meth:`read`.
    """

    def __init__(self, opened: AbstractConnection) -> None:
        """Take over a connection on which no answer is to come."""
        self._loop = asyncio.get_running_loop()
        held: Any = opened
        # Kept, for it closes the socket when nobody holds it any more.
        self._writer = held._writer
        self._transport = self._writer.transport
        held._reader = held._writer = None
        self._reader: Any = Reader(protocolError=ProtocolError, replyError=_reply_error, notEnoughData=_NOTHING)
        # Who is told the answer, or None where nobody is, and when it was asked for.
        self._asked: deque[tuple[Callable[[Any], object] | None, float]] = deque()
        self._unasked: deque[Any] = deque()
        self._reading: asyncio.Future[Any] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._lost: Exception | None = None
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

    def ask(self, *command: Any) -> asyncio.Future[Any]:
        """Send a command. The future has its answer, or raises :class:`ReplyError` or an ``OSError``.

        An answer that takes longer than :data:`ANSWER_WITHIN` ends the connection. Cancelling the future does no harm.

        Raises:
            NotSent: The connection is lost.
        """
        future = self._loop.create_future()
        self.call(command, partial(_settle, future))
        return future

    def call(self, command: Sequence[Any], told: Callable[[Any], object] | None) -> None:
        """Send a command. ``told`` is called with its answer, or with what :meth:`ask` raises, as soon as that is known."""
        self._check()
        packed = pack_command(tuple(command))
        self._asked.append((told, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_WITHIN, self._look)
        self._transport.write(packed)

    def tell(self, *command: Any) -> None:
        """Send a command whose answer interests nobody. Raises as :meth:`ask`."""
        self.call(command, None)

    def write(self, *command: Any) -> None:
        """Send a command. Its answer, if it has any, comes to :meth:`read`. Raises as :meth:`ask`."""
        self._check()
        self._transport.write(pack_command(command))

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
        told, _ = self._asked.popleft()
        if told is not None:
            told(answer)

    def _look(self) -> None:
        """Whether the oldest question has waited too long. One timer serves all that are asked meanwhile."""
        self._watch = None
        if self._asked:
            left = self._asked[0][1] + ANSWER_WITHIN - self._loop.time()
            if left <= 0:
                self._lose(TimeoutError(f"no answer within {ANSWER_WITHIN:g} s"))
            else:
                self._watch = self._loop.call_later(left, self._look)

    def _lose(self, error: Exception, *, abort: bool = True) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._watch is not None:
            self._watch.cancel()
        if abort:
            self._transport.abort()
        else:
            self._transport.close()
        self.resume_writing()
        asked, self._asked = self._asked, deque()
        for told, _ in asked:
            if told is not None:
                told(_copy(error))
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(_copy(error))


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
