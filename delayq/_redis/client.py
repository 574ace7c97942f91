"""Calls to the server: deadlines, repetition, redirections."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from delayq._redis.connection import ANSWER_WITHIN, ReplyError
from delayq._redis.error_reader import (
    ErrorReader,
    Redirected,
    RepeatNow,
    SettingsChanged,
    is_unknown_script,
)
from delayq._redis.first_of import first_of
from delayq._redis.loop_time import within
from delayq._redis.retry import retry_delay
from delayq._redis.rights import Rights
from delayq._redis.server_info import read_info
from delayq.errors import (
    ConfigurationError,
    DelayqError,
    OutcomeUnknown,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from delayq._redis.connection import Connection
    from delayq._redis.disk import Disk
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.scripts import Script
    from delayq._redis.topology import Topology

T = TypeVar("T")

_log = logging.getLogger("delayq")

_SENT_ON = 5
# The errors that come over a connection.
_ERRORS = (OSError, ReplyError)
# How long a call that was not carried out is retried, seconds.
RETRY_FOR = 5.0
# How long a call waits for a connection and for other calls, however short it is retried, seconds.
_LEAST_TRY = 1.0
# How long a command that follows a script may hold back its answer, seconds.
BLOCKS_FOR = 2.0
# Keys that one step of a scan looks at, which takes the server a fraction of a millisecond.
_SCANNED = 1000


class Confirmation(NamedTuple):
    """Commands that confirm an answer; ``on_reply`` gets the last one's answer, and errors."""

    commands: Sequence[tuple[str, ...]]
    on_reply: Callable[[Any], object]


class _Call(NamedTuple):
    """A command to send.

    Attributes:
        command: The command; for a script, the call of its plain form.
        script: The script that it calls, if it does.
        confirm: Called with the answer; returns commands to send without awaiting their answers.
        then: A command that follows on the same connection.
        until: When to give up, on the event loop's clock.
    """

    command: tuple[Any, ...]
    script: Script | None = None
    confirm: Callable[[Any], Confirmation | None] | None = None
    then: tuple[str | int, ...] | None = None
    until: float | None = None

    def __repr__(self) -> str:
        # The arguments may be private.
        return f"<_Call {self.command[0]}, {self.script.name if self.script else 'no script'}>"


class RedisClient:
    """Runs commands and scripts, each on the server that has its first key."""

    def __init__(
        self, topology: Topology, retry_for: float | None = None, disk: Disk | None = None
    ) -> None:
        """Args:
        topology: The servers.
        retry_for: How long a call that was not carried out is retried, seconds; by default
            :data:`RETRY_FOR`.
        disk: The disk of the server, if it is one on this machine that delayq runs itself.
        """
        self._disk = disk
        self.topology: Topology = topology
        self._retry_for = retry_for
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self.rights: Rights = Rights(self._loop.time)
        self._errors = ErrorReader(topology, self.rights)
        self.round_trips: int = 0
        self.errors: int = 0

    @property
    def retry_for(self) -> float:
        """How long a call that was not carried out is retried, seconds."""
        return RETRY_FOR if self._retry_for is None else self._retry_for

    @property
    def waits_for(self) -> float:
        """How long a call waits until it can be sent, seconds."""
        # A single try gets the time that a connection takes, or the calls that are on their way.
        return max(self.retry_for, _LEAST_TRY)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child process: the sockets are the parent's."""
        return os.getpid() != self._process

    def wrong_loop(self) -> ConfigurationError:
        """Return the error to raise if it is used in another event loop or process."""
        if self.is_inherited:
            return ConfigurationError(
                "the client was opened in another process: open a client in the child, after fork()"
            )
        return ConfigurationError(
            "the client was opened in another event loop: open a separate client in each event loop"
        )

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int] = (),
        until: float | None = None,
        then: tuple[str | int, ...] | None = None,
    ) -> Any:
        """Run a script, and retry it where safe, for :attr:`retry_for` seconds or ``until`` then.

        With a command ``then`` to follow it, return both answers. The second may be an error.

        Raises:
            ServerUnavailable: It was not carried out.
            OutcomeUnknown: It was sent, and its answer was lost.
            ServerRefused: The server answered with an error.
        """
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        call = _Call(command, script, None, then, until)
        attempt = partial(self._attempt, keys[0], call)
        return await self._repeat(attempt, script.repeatable, until, writes=True)

    def interpret(self, answer: Any, pool: ConnectionPool) -> Any:
        """Return an answer that came over ``pool``, or the error that it means."""
        if not isinstance(answer, _ERRORS):
            return answer
        error = self._errors.read(answer, pool)
        if not isinstance(error, (RepeatNow, SettingsChanged)):
            self.errors += 1
        return error

    def run_soon(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        on_reply: Callable[[Any], object],
        beside: Connection | None = None,
    ) -> Connection | None:
        """Send a script's call before this returns, if a connection is free, and do not retry it.

        ``on_reply`` gets the answer, or the error that :meth:`run` would raise:
        :class:`ServerUnavailable` also if the server does not know the script. ``beside`` is the
        connection of a call still in flight, after which this one is carried out.

        Returns:
            The connection on which it was sent, or None if none was free, or the disk has no room,
            and nothing was sent.
        """
        try:
            connections = self.topology.of(keys[0])
        except DelayqError:
            return None
        if self._disk is not None and script.stores and self._disk.lack(args):
            # The attempt that follows says so.
            return None
        wire = beside or connections.acquire_nowait()
        if wire is None or (beside is not None and not connections.share(beside)):
            return None

        def answered(answer: Any) -> None:
            connections.release(wire)
            if isinstance(answer, OSError):
                self.topology.suspect(connections)
            elif not isinstance(answer, ReplyError):
                self.rights.permitted(wire, script, keys[0], form)
            on_reply(self.interpret(answer, connections))

        try:
            form = self.rights.form(wire, script, keys[0])
            wire.call(("EVALSHA", form.sha, len(keys), *keys, *args), answered)
        except BaseException:
            # Nothing was sent: an argument cannot be packed, for example, or the script not read.
            connections.release(wire)
            raise
        self.round_trips += 1
        return wire

    def follow(
        self,
        wire: Connection,
        key: str,
        command: tuple[str | int, ...],
        on_reply: Callable[[Any], object],
    ) -> None:
        """Send a command behind a call of :meth:`run_soon`; ``on_reply`` gets answer or error."""
        connections = self.topology.of(key)
        connections.share(wire)

        def answered(answer: Any) -> None:
            connections.release(wire)
            on_reply(answer)

        self.round_trips += 1
        wire.call(command, answered, BLOCKS_FOR)

    def path(self, key: str) -> object:
        """Return a value that changes when the next connection for ``key`` may lead elsewhere."""
        connections = self.topology.of(key)
        return connections, connections.breaks

    @property
    def bytes_to_send(self) -> int:
        """The number of bytes that wait here for the network to take them."""
        return sum(connections.bytes_to_send for connections in self.topology.all())

    async def open(self) -> None:
        """Find out whether there is a server to ask. Raises as :meth:`run` does."""
        # One server that knows where all keys are is enough: the others may be away.
        spread = self.topology.spread
        if spread:
            await self._repeat(lambda: self._in_time(self.topology.refresh()))
        else:
            await self.anywhere("PING")

    async def command(self, *command: str | bytes | int, key: str | None = None) -> Any:
        """Run a repeatable command on the server of ``key``, by default the first argument."""
        key = str(command[1]) if key is None else key
        return await self._repeat(partial(self._attempt, key, _Call(command)))

    async def anywhere(self, *command: str | bytes | int) -> Any:
        """Run a command that concerns no key as :meth:`command` does, on any server."""
        return await self._repeat(partial(self._attempt, None, _Call(command)))

    async def time_us(self, key: str | None = None) -> int:
        """Return the time of the server that has ``key``, or of any, in microseconds."""
        whole, rest = await self._repeat(partial(self._attempt, key, _Call(("TIME",))))
        return int(whole) * 1_000_000 + int(rest)

    async def flush(self) -> None:
        """Delete everything on the server. Raises as :meth:`run` does."""
        await self.anywhere("FLUSHALL")

    async def everywhere(self, *command: str | bytes | int) -> list[Any]:
        """Return the answers of all servers that are up, or raise if one refuses or none is."""

        async def ask(server: ConnectionPool) -> AsyncIterator[Any]:
            yield await self._attempt_at(server, _Call(command))

        return [answer async for answer in self._of_each(await self._all(), ask)]

    async def scan(self, pattern: str, key: str | None = None) -> AsyncIterator[bytes]:
        """Return all keys of every server that match and are there throughout. Some may come twice.

        The keys of a server that is away are left out, and a warning in the log names it.

        Args:
            pattern: A pattern as SCAN takes it.
            key: Look only at the server that has this key.

        Raises:
            ServerUnavailable, OutcomeUnknown: No server answers.
            ServerRefused: One of them refuses.
        """

        async def pages(server: ConnectionPool) -> AsyncIterator[list[bytes]]:
            cursor = None
            while cursor != b"0":
                command = ("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _SCANNED)
                cursor, keys = await self._attempt_at(server, _Call(command))
                yield keys

        servers = await self._all() if key is None else [await self.topology.find(key)]
        async for page in self._of_each(servers, pages):
            for found in page:
                yield found

    async def _of_each(
        self,
        servers: Sequence[ConnectionPool],
        ask: Callable[[ConnectionPool], AsyncIterator[Any]],
    ) -> AsyncIterator[Any]:
        """Yield the answers of all servers that are up, and warn of others; raise if none is."""
        errors: dict[str, ServerError] = {}
        for each in servers:
            try:
                async for answer in ask(each):
                    yield answer
            except (ServerUnavailable, OutcomeUnknown) as error:
                errors[each.label] = error
        for label, reason in errors.items():
            if len(errors) == len(servers):
                raise reason
            _log.warning("%s is left out of the result: %s", label, reason)

    async def _all(self) -> Sequence[ConnectionPool]:
        if not self.topology.all():
            await self._in_time(self.topology.refresh())
        return self.topology.all()

    async def run_once(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        confirm: Callable[[Any], Confirmation | None],
    ) -> Any:
        """Run a script once; ``confirm`` gets the answer, and returns commands to send at once."""
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        return await self._attempt(keys[0], _Call(command, script, confirm))

    async def _repeat(
        self,
        attempt: Callable[[], Awaitable[Any]],
        repeatable: bool = True,
        until: float | None = None,
        *,
        writes: bool = False,
    ) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise self.wrong_loop()
        give_up_at = loop.time() + self.retry_for if until is None else until
        failures = 0
        # An earlier try that may have been carried out.
        unknown: OutcomeUnknown | None = None
        # The last error from before the time was up.
        known: ServerUnavailable | None = None
        while True:
            try:
                return await attempt()
            except OutcomeUnknown as error:
                if not repeatable or loop.time() >= give_up_at:
                    raise
                unknown = error
            except ServerUnavailable as error:
                known = known if known and isinstance(error.__cause__, TimeoutError) else error
                if loop.time() >= give_up_at:
                    raise unknown or known from known.__cause__
            except ServerRefused as error:
                if writes and unknown is not None:
                    raise unknown from error
                raise
            failures += 1
            left = max(0.0, give_up_at - loop.time())
            await asyncio.sleep(min(retry_delay(failures, most=0.5), left))

    async def _attempt(self, key: str | None, call: _Call) -> Any:
        try:
            if key is None and self.topology.spread:
                # Any server will do, so one that hangs or refuses does not hold up the call.
                return await first_of(
                    "no server answered",
                    [
                        (each.label, partial(self._attempt_at, each, call))
                        for each in await self._in_time(self.topology.any(), call.until)
                    ],
                )
            connections, asking = await self._in_time(self.topology.find(key), call.until), False
        except DelayqError:
            self.errors += 1
            raise
        for _ in range(_SENT_ON):
            try:
                return await self._attempt_at(connections, call, asking)
            except Redirected as elsewhere:
                connections, asking = elsewhere.pool, elsewhere.asking
        raise ServerUnavailable("too many redirections between the servers of the cluster")

    async def _attempt_at(
        self, connections: ConnectionPool, call: _Call, asking: bool = False
    ) -> Any:
        wire = await self.acquire(connections, call.until)
        arrived = False
        try:
            reply = await self._exchange(wire, asking, call)
            arrived = True
            if call.confirm is not None and (confirmation := call.confirm(reply)) is not None:
                self._confirm(wire, asking, confirmation)
        except ReplyError as error:
            # The answer to the command that follows it may be held back for a while.
            arrived = call.then is None
            raise self.interpret(error, connections) from error
        except OSError as error:
            self.topology.suspect(connections)
            raise self.interpret(error, connections) from error
        finally:
            # A caller that is cancelled leaves answers in flight.
            (connections.release if arrived else connections.abandon)(wire)
        return reply

    async def _in_time(self, question: Awaitable[T], until: float | None = None) -> T:
        """Return the answer to a question about the servers, which may have to be asked."""
        until, latest = self._finishes_by(until), self._loop.time() + self.waits_for
        try:
            async with asyncio.timeout_at(latest if until is None else min(until, latest)):
                return await question
        except TimeoutError as error:
            raise ServerUnavailable(
                "could not find out in time which server holds the queue"
            ) from error

    def _finishes_by(self, until: float | None) -> float | None:
        """Return when a try that starts now is given up: a single one has its time, too."""
        return None if until is None else max(until, self._loop.time() + _LEAST_TRY)

    def _confirm(self, wire: Connection, asking: bool, confirmation: Confirmation) -> None:
        *others, last = confirmation.commands
        on_reply = confirmation.on_reply

        def answered(answer: Any) -> None:
            if isinstance(answer, Exception):
                on_reply(answer)

        calls: list[tuple[tuple[str, ...], Callable[[Any], object] | None]]
        calls = [*((other, answered) for other in others), (last, on_reply)]
        self.round_trips += len(calls)
        if asking:
            calls = [each for call in calls for each in ((("ASKING",), None), call)]
        try:
            wire.call_all(calls)
        except OSError as error:
            on_reply(error)

    async def acquire(self, connections: ConnectionPool, until: float | None = None) -> Connection:
        try:
            if (wire := connections.acquire_nowait()) is not None:
                return wire
            until = self._finishes_by(until)
            seconds = min(ANSWER_WITHIN, self.waits_for)
            if until is not None:
                seconds = min(seconds, until - self._loop.time())
            async with within(seconds):
                return await connections.acquire()
        except TimeoutError as error:
            self.errors += 1
            self.topology.suspect(connections)
            raise ServerUnavailable(
                "could not get a connection in time: the server accepts none, or does not answer"
            ) from error
        except DelayqError as error:
            self.errors += 1
            if isinstance(error, ServerUnavailable):
                self.topology.suspect(connections)
            raise

    async def _exchange(self, wire: Connection, asking: bool, call: _Call) -> Any:
        command, script, then = call.command, call.script, call.then
        if script is None:
            return await self._ask(wire, asking, command, then)
        if self._disk is not None and script.stores and (lack := self._disk.lack(command)):
            await self._shorten(wire, self._disk)
            raise ServerUnavailable(lack)
        form = self.rights.form(wire, script, command[3])
        try:
            answer = await self._ask(wire, asking, ("EVALSHA", form.sha, *command[2:]), then)
        except ReplyError as error:
            # Not carried out. With EVAL, another SCRIPT FLUSH cannot come in between.
            if not is_unknown_script(error):
                raise
            answer = await self._ask(wire, asking, ("EVAL", form.text, *command[2:]), then)
        self.rights.permitted(wire, script, command[3], form)
        return answer

    async def _shorten(self, wire: Connection, disk: Disk) -> None:
        """Let the server write its file anew if that makes room."""
        if not disk.may_ask(self._loop.time()):
            return
        try:
            if disk.can_shorten(read_info(await self._ask(wire, False, ("INFO",), None))):
                await self._ask(wire, False, ("BGREWRITEAOF",), None)
        except ReplyError:
            # It does so already.
            pass

    async def _ask(
        self,
        wire: Connection,
        asking: bool,
        command: tuple[Any, ...],
        then: tuple[str | int, ...] | None,
    ) -> Any:
        self.round_trips += 1
        if asking:
            wire.tell("ASKING")
        answer = wire.ask(*command)
        if then is None:
            return await answer
        second: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.round_trips += 1
        wire.call(then, partial(_note, second), BLOCKS_FOR)
        return await answer, await second


def _note(future: asyncio.Future[Any], reply: Any) -> None:
    # Errors are results, too, because the answer before this one is known.
    if not future.done():
        future.set_result(reply)
