"""Calls to the server: deadlines, repetition, redirections."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from delayq._redis.connection import GIVE_UP_AFTER, ReplyError
from delayq._redis.durability import BLOCKS_FOR
from delayq._redis.error_reader import (
    ErrorReader,
    Redirected,
    RepeatNow,
    SettingsChanged,
    is_unknown_script,
)
from delayq._redis.retry import first_of, retry_delay, within
from delayq._redis.rights import Rights
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
    from delayq._redis.durability import Disk
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.rights import Form
    from delayq._redis.scripts import Script
    from delayq._redis.topology import Topology

T = TypeVar("T")

_log = logging.getLogger("delayq")

_REDIRECTIONS = 5
# The errors that come over a connection.
_ERRORS = (OSError, ReplyError)
# How long a call that was not carried out is retried, seconds.
RETRY_FOR = 5.0
# How long a call waits for a connection and for other calls, however short it is retried, seconds.
_SHORTEST_TRY = 1.0
# Keys that one step of a scan reads, which takes the server a fraction of a millisecond.
_KEYS_PER_STEP = 1000
# The reply to CONFIG SET for a setting that there is not, in Redis 6.2 and in newer servers.
_UNKNOWN_SETTING = re.compile("unsupported config|unknown option", re.IGNORECASE)


class Confirmation(NamedTuple):
    """Commands that confirm a reply; ``on_reply`` gets the last one's reply, and errors."""

    commands: Sequence[tuple[str, ...]]
    on_reply: Callable[[Any], object]


class _Call(NamedTuple):
    """A command to send.

    Attributes:
        command: The command; for a script, the call of its plain form.
        script: The script that it calls, if it does.
        confirm: Called with the reply; returns commands to send without awaiting their replies.
        follow_up: A command that follows on the same connection.
        deadline: When to give up, on the event loop's clock.
    """

    command: tuple[Any, ...]
    script: Script | None = None
    confirm: Callable[[Any], Confirmation | None] | None = None
    follow_up: tuple[str | int, ...] | None = None
    deadline: float | None = None

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
        self._failed_tries = 0

    @property
    def moves(self) -> tuple[int, float]:
        """The number of failed tries, and the last :attr:`ConnectionPool.last_part_at`: one of them
        changes whenever a call that takes long has moved.
        """
        parts = [pool.last_part_at for pool in self.topology.pools]
        return self._failed_tries, max(parts, default=0.0)

    @property
    def retry_for(self) -> float:
        """How long a call that was not carried out is retried, seconds."""
        return RETRY_FOR if self._retry_for is None else self._retry_for

    @property
    def waits_for(self) -> float:
        """How long a call waits until it can be sent, seconds."""
        # A single try gets the time that a connection takes, or the calls that are on their way.
        return max(self.retry_for, _SHORTEST_TRY)

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
        deadline: float | None = None,
        follow_up: tuple[str | int, ...] | None = None,
    ) -> Any:
        """Run a script, and retry it where safe, for :attr:`retry_for` seconds or up to a deadline.

        With a command to follow it, return both replies. The second may be an error.

        Raises:
            ServerUnavailable: It was not carried out.
            OutcomeUnknown: It was sent, and its reply was lost.
            ServerRefused: The server answered with an error.
        """
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        call = _Call(command, script, None, follow_up, deadline)
        attempt = partial(self._attempt, keys[0], call)
        return await self._repeat(attempt, script.repeatable, deadline, writes=True)

    def interpret(self, reply: Any, pool: ConnectionPool) -> Any:
        """Return a reply that came over ``pool``, or the error that it means."""
        if not isinstance(reply, _ERRORS):
            return reply
        error = self._errors.read(reply, pool)
        if not isinstance(error, (RepeatNow, SettingsChanged)):
            self.errors += 1
        return error

    def send_now(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        on_reply: Callable[[Any], object],
        beside: Connection | None = None,
    ) -> Connection | None:
        """Send a script's call before this returns, if a connection is free, and do not retry it.

        ``on_reply`` gets the reply, or the error that :meth:`run` would raise:
        :class:`ServerUnavailable` also if the server does not know the script. ``beside`` is the
        connection of a call still in flight, after which this one is carried out.

        Returns:
            The connection on which it was sent, or None if none was free, or the disk has no room,
            and nothing was sent.
        """
        key = keys[0]
        try:
            pool = self.topology.only_pool or self.topology.pool_of(key)
        except DelayqError:
            return None
        if self._disk is not None and script.stores and self._disk.lack(args):
            # The attempt that follows says so.
            return None
        wire = beside or pool.acquire_nowait()
        if wire is None or (beside is not None and not pool.share(beside)):
            return None

        def answered(reply: Any) -> None:
            pool.release(wire)
            if isinstance(reply, _ERRORS):
                if isinstance(reply, OSError):
                    self.topology.suspect(pool)
                reply = self.interpret(reply, pool)
            elif form is not script:
                self.rights.permitted(wire, script, key, form)
            on_reply(reply)

        try:
            form: Form | Script = script
            # Mostly they were checked a moment ago.
            if wire.permits.get((script.name, key), 0.0) <= self._loop.time():
                form = self.rights.form(wire, script, key)
            wire.call(("EVALSHA", form.sha, len(keys), *keys, *args), answered)
        except BaseException:
            # Nothing was sent: an argument cannot be packed, for example, or the script not read.
            pool.release(wire)
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
        """Send a command behind a call of :meth:`send_now`; ``on_reply`` gets reply or error."""
        pool = self.topology.pool_of(key)
        pool.share(wire)

        def answered(reply: Any) -> None:
            pool.release(wire)
            on_reply(reply)

        self.round_trips += 1
        wire.call(command, answered, BLOCKS_FOR)

    def path(self, key: str) -> object:
        """Return a value that changes when the next connection for ``key`` may lead elsewhere."""
        pool = self.topology.pool_of(key)
        return pool, pool.breaks

    @property
    def bytes_to_send(self) -> int:
        """The number of bytes that wait here for the network to take them."""
        return sum(pool.bytes_to_send for pool in self.topology.masters())

    async def open(self) -> None:
        """Find out whether there is a server to ask. Raises as :meth:`run` does."""
        # One server that knows where all keys are is enough: the others may be away.
        if self.topology.spread:
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
        seconds, us = await self._repeat(partial(self._attempt, key, _Call(("TIME",))))
        return int(seconds) * 1_000_000 + int(us)

    async def flush(self) -> None:
        """Delete everything on the server. Raises as :meth:`run` does."""
        await self.anywhere("FLUSHALL")

    async def everywhere(self, *command: str | bytes | int) -> list[Any]:
        """Return the replies of all servers that are up, or raise if one refuses or none is."""

        async def ask(pool: ConnectionPool) -> AsyncIterator[Any]:
            yield await self._attempt_at(pool, _Call(command))

        return [reply async for reply in self._replies_of(await self._masters(), ask)]

    async def info(self) -> list[dict[str, str]]:
        """Return the figures of every server, by name. Raises as :meth:`everywhere` does."""
        return [read_info(reply) for reply in await self.everywhere("INFO")]

    async def cluster_info(self) -> dict[str, str]:
        """Return the figures of the cluster, by name. Raises as :meth:`everywhere` does."""
        return read_info((await self.everywhere("CLUSTER", "INFO"))[0])

    async def can_configure(self) -> bool:
        """Tell whether the user may run CONFIG SET, which few services and rights include. This
        changes nothing: it names a setting that no server has.
        """
        try:
            await self.anywhere("CONFIG", "SET", "delayq-has-no-such-setting", "")
        except ServerRefused as error:
            return _UNKNOWN_SETTING.search(str(error)) is not None
        return True

    async def user(self) -> str:
        """Return the name of the user. Raises as :meth:`anywhere` does."""
        name: bytes = await self.anywhere("ACL", "WHOAMI")
        return name.decode(errors="replace")

    async def scan(self, pattern: str, key: str | None = None) -> AsyncIterator[bytes]:
        """Return all keys of every server that match and are there throughout. Some may come twice.

        The keys of a server that is away are left out, and a warning in the log names it.

        Args:
            pattern: A pattern as SCAN takes it.
            key: Ask only the server that has this key.

        Raises:
            ServerUnavailable, OutcomeUnknown: No server answers.
            ServerRefused: One of them refuses.
        """

        async def pages(pool: ConnectionPool) -> AsyncIterator[list[bytes]]:
            cursor = None
            while cursor != b"0":
                command = ("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", _KEYS_PER_STEP)
                cursor, keys = await self._attempt_at(pool, _Call(command))
                yield keys

        pools = await self._masters() if key is None else [await self.topology.find_pool(key)]
        async for page in self._replies_of(pools, pages):
            for stored_key in page:
                yield stored_key

    async def _replies_of(
        self,
        pools: Sequence[ConnectionPool],
        ask: Callable[[ConnectionPool], AsyncIterator[Any]],
    ) -> AsyncIterator[Any]:
        """Yield the replies of all servers that are up, and warn of others; raise if none is."""
        errors: dict[str, ServerError] = {}
        for pool in pools:
            try:
                async for reply in ask(pool):
                    yield reply
            except (ServerUnavailable, OutcomeUnknown) as error:
                errors[pool.label] = error
        for label, reason in errors.items():
            if len(errors) == len(pools):
                raise reason
            _log.warning("%s is left out of the result: %s", label, reason)

    async def _masters(self) -> Sequence[ConnectionPool]:
        if not self.topology.masters():
            await self._in_time(self.topology.refresh())
        return self.topology.masters()

    async def run_once(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        confirm: Callable[[Any], Confirmation | None] | None = None,
    ) -> Any:
        """Run a script once.

        ``confirm``, if given, gets the reply, and returns commands to send at once.
        """
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        return await self._attempt(keys[0], _Call(command, script, confirm))

    async def _repeat(
        self,
        attempt: Callable[[], Awaitable[Any]],
        repeatable: bool = True,
        deadline: float | None = None,
        *,
        writes: bool = False,
    ) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise self.wrong_loop()
        give_up_at = loop.time() + self.retry_for if deadline is None else deadline
        failures = 0
        # An earlier try that may have been carried out.
        unknown: OutcomeUnknown | None = None
        # The last error from before the time was up.
        unavailable: ServerUnavailable | None = None
        while True:
            try:
                return await attempt()
            except OutcomeUnknown as error:
                self._failed_tries += 1
                if not repeatable or loop.time() >= give_up_at:
                    raise
                unknown = error
            except ServerUnavailable as error:
                self._failed_tries += 1
                if unavailable is None or not isinstance(error.__cause__, TimeoutError):
                    unavailable = error
                if loop.time() >= give_up_at:
                    raise unknown or unavailable from unavailable.__cause__
            except ServerRefused as error:
                if writes and unknown is not None:
                    raise unknown from error
                raise
            failures += 1
            remaining = max(0.0, give_up_at - loop.time())
            await asyncio.sleep(min(retry_delay(failures, longest=0.5), remaining))

    async def _attempt(self, key: str | None, call: _Call) -> Any:
        pool, asking = self.topology.only_pool, False
        if pool is None:
            try:
                if key is None and self.topology.spread:
                    # Any server will do, so one that hangs or refuses does not hold up the call.
                    pools = await self._in_time(self.topology.candidates(), call.deadline)
                    attempts = [
                        (pool.label, partial(self._attempt_at, pool, call)) for pool in pools
                    ]
                    return await first_of("no server answered", attempts)
                pool = await self._in_time(self.topology.find_pool(key), call.deadline)
            except DelayqError:
                self.errors += 1
                raise
        for _ in range(_REDIRECTIONS):
            try:
                return await self._attempt_at(pool, call, asking)
            except Redirected as redirection:
                pool, asking = redirection.pool, redirection.asking
        raise ServerUnavailable("too many redirections between the servers of the cluster")

    async def _attempt_at(self, pool: ConnectionPool, call: _Call, asking: bool = False) -> Any:
        wire = pool.acquire_nowait() or await self.acquire(pool, call.deadline)
        command, script, follow_up = call.command, call.script, call.follow_up
        form: Form | Script | None = script
        is_answered = False
        try:
            if script is not None:
                if self._disk is not None and script.stores and (lack := self._disk.lack(command)):
                    await self._shorten(wire, self._disk)
                    raise ServerUnavailable(lack)
                # Mostly they were checked a moment ago.
                if wire.permits.get((script.name, command[3]), 0.0) <= self._loop.time():
                    form = self.rights.form(wire, script, command[3])
                    command = ("EVALSHA", form.sha, *command[2:])
            try:
                reply = await self._ask(wire, asking, command, follow_up)
            except ReplyError as error:
                # Not carried out. With EVAL, another SCRIPT FLUSH cannot come in between.
                if form is None or not is_unknown_script(error):
                    raise
                command = ("EVAL", form.text, *command[2:])
                reply = await self._ask(wire, asking, command, follow_up)
            if script is not None and form is not None and form is not script:
                self.rights.permitted(wire, script, command[3], form)
            is_answered = True
            if call.confirm is not None and (confirmation := call.confirm(reply)) is not None:
                self._confirm(wire, asking, confirmation)
        except ReplyError as error:
            # The reply to the command that follows it may be held back for a while.
            is_answered = follow_up is None
            raise self.interpret(error, pool) from error
        except OSError as error:
            self.topology.suspect(pool)
            raise self.interpret(error, pool) from error
        finally:
            # A caller that is cancelled leaves replies in flight.
            (pool.release if is_answered else pool.abandon)(wire)
        return reply

    async def _in_time(self, question: Awaitable[T], deadline: float | None = None) -> T:
        """Return the answer to a question about the servers, which may have to be asked."""
        limit, latest = self._limit_of_try(deadline), self._loop.time() + self.waits_for
        try:
            async with asyncio.timeout_at(latest if limit is None else min(limit, latest)):
                return await question
        except TimeoutError as error:
            raise ServerUnavailable(
                "could not find out in time which server holds the queue"
            ) from error

    def _limit_of_try(self, deadline: float | None) -> float | None:
        """Return when a try that starts now is given up: a single one has its time, too."""
        return None if deadline is None else max(deadline, self._loop.time() + _SHORTEST_TRY)

    def _confirm(self, wire: Connection, asking: bool, confirmation: Confirmation) -> None:
        *commands, last = confirmation.commands
        on_reply = confirmation.on_reply

        def answered(reply: Any) -> None:
            if isinstance(reply, Exception):
                on_reply(reply)

        calls: list[tuple[tuple[str, ...], Callable[[Any], object] | None]]
        calls = [*((command, answered) for command in commands), (last, on_reply)]
        self.round_trips += len(calls)
        if asking:
            calls = [part for call in calls for part in ((("ASKING",), None), call)]
        try:
            wire.call_all(calls)
        except OSError as error:
            on_reply(error)

    async def acquire(self, pool: ConnectionPool, deadline: float | None = None) -> Connection:
        """Return a connection as :meth:`ConnectionPool.acquire` does, but not later than a call may
        wait for one.
        """
        try:
            limit = self._limit_of_try(deadline)
            seconds = min(GIVE_UP_AFTER, self.waits_for)
            if limit is not None:
                seconds = min(seconds, limit - self._loop.time())
            async with within(seconds):
                return await pool.acquire()
        except TimeoutError as error:
            self.errors += 1
            self.topology.suspect(pool)
            raise ServerUnavailable(
                "could not get a connection in time: the server accepts none, or does not answer"
            ) from error
        except DelayqError as error:
            self.errors += 1
            if isinstance(error, ServerUnavailable):
                self.topology.suspect(pool)
            raise

    async def _shorten(self, wire: Connection, disk: Disk) -> None:
        """Let the server write its file anew if that makes room."""
        if not disk.may_shorten(self._loop.time()):
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
        follow_up: tuple[str | int, ...] | None,
    ) -> Any:
        self.round_trips += 1
        if asking:
            wire.tell("ASKING")
        reply = wire.ask(*command)
        if follow_up is None:
            return await reply
        second: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.round_trips += 1
        wire.call(follow_up, partial(_resolve, second), BLOCKS_FOR)
        return await reply, await second


def read_info(reply: bytes) -> dict[str, str]:
    """Return the figures in a reply to INFO, by name."""
    lines = (
        line.partition(":")
        for line in reply.decode(errors="replace").splitlines()
        if line and not line.startswith("#")
    )
    return {name: value for name, _, value in lines}


def _resolve(future: asyncio.Future[Any], reply: Any) -> None:
    # Errors are results, too, because the reply before this one is known.
    if not future.done():
        future.set_result(reply)
