"""One server, asked: deadlines, what may be repeated, and what an error means."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delayq._redis.retry import retry_delay
from delayq._redis.wire import ANSWER_WITHIN, NotSent, ReplyError
from delayq.errors import ConfigurationError, DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._redis.connections import Connections
    from delayq._redis.scripts import Script
    from delayq._redis.wire import Wire

# Answers that say "not now": nothing was carried out. Redis 6.2 hides the code inside a script's error text.
_NOT_NOW = re.compile(r"(?:^|-)(LOADING|BUSY|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS)\b")
# How long a call that was not carried out is tried again, seconds.
RETRY_FOR = 5.0


class Server:
    """Runs commands and scripts over a pool of connections."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self.round_trips: int = 0
        self.errors: int = 0

    @property
    def is_inherited(self) -> bool:
        """Whether we are a child that was forked after this was made: its sockets are the parent's."""
        return os.getpid() != self._process

    def wrong_loop(self) -> ConfigurationError:
        """What to raise where it is used in an event loop that is not the one in which it was made."""
        if self.is_inherited:
            return ConfigurationError("the client was opened in another process: open one after fork(), in the child")
        return ConfigurationError("the client was opened in another event loop: open one client in each loop, and use it there")

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any:
        """Run a script, again where that is safe, for :data:`RETRY_FOR` seconds.

        Raises:
            ServerUnavailable: It was not carried out.
            OutcomeUnknown: It was sent and its answer lost.
            ServerRefused: The server answered with an error.
        """
        return await self._repeat(("EVALSHA", script.sha, len(keys), *keys, *args), script, script.repeatable)

    async def run_all(self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]) -> list[Any]:
        """Run a script that is safe to repeat several times in one round trip. Returns the answers. Raises as :meth:`run`."""
        if len(calls) > 1:
            # What fails is asked again, one by one.
            with suppress(DelayqError):
                wire, arrived = await self._acquire(), False
                self.round_trips += 1
                try:
                    asked = [wire.ask("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls]
                    answers = await asyncio.gather(*asked, return_exceptions=True)
                    arrived = True
                    if not any(isinstance(answer, BaseException) for answer in answers):
                        return answers
                finally:
                    # Who is cancelled leaves answers to come.
                    (self._connections.release if arrived else self._connections.drop)(wire)
        return [await self.run(script, keys, args) for keys, args in calls]

    def run_soon(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        told: Callable[[Any], object],
        beside: Wire | None = None,
    ) -> Wire | None:
        """Send a script's call before this returns, if a connection is free, without repetition.

        ``told`` is called with the answer, or with what :meth:`run` raises; :class:`ServerUnavailable` also where the server
        does not know the script: :meth:`run` then tells it.

        ``beside`` is what this returned for a call that is still on its way: this one is carried out after that one.

        Returns:
            The connection on which it was sent; None if none was free, and nothing was sent.
        """
        wire = beside or self._connections.acquire_nowait()
        if wire is None or (beside is not None and not self._connections.share(beside)):
            return None

        def landed(answer: Any) -> None:
            if isinstance(answer, OSError):
                self._connections.drop(wire)
                self.errors += 1
                told(_lost(answer))
                return
            self._connections.release(wire)
            if not isinstance(answer, ReplyError):
                told(answer)
            elif _is_unknown_script(answer):
                told(ServerUnavailable(str(answer)))
            else:
                self.errors += 1
                told(_refusal(answer))

        self.round_trips += 1
        wire.call(("EVALSHA", script.sha, len(keys), *keys, *args), landed)
        return wire

    async def command(self, *command: str | bytes | int) -> Any:
        """Run a command that is safe to repeat, for :data:`RETRY_FOR` seconds. Raises as :meth:`run` does."""
        return await self._repeat(command, None, repeatable=True)

    async def run_once(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        confirm: Callable[[Any], tuple[str, ...] | None],
    ) -> Any:
        """Run a script, without repetition. Raises as :meth:`run` does.

        ``confirm`` is given the answer, and says which command to send before anybody acts on it. Nobody waits for what
        the server says to that, and nobody minds if it does not arrive.
        """
        return await self._attempt(("EVALSHA", script.sha, len(keys), *keys, *args), script, confirm)

    async def _repeat(self, command: tuple[Any, ...], script: Script | None, repeatable: bool) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise self.wrong_loop()
        give_up_at = loop.time() + RETRY_FOR
        attempt = 0
        unknown: OutcomeUnknown | None = None
        while True:
            try:
                return await self._attempt(command, script)
            except OutcomeUnknown as error:
                if not repeatable or loop.time() >= give_up_at:
                    raise
                unknown = error
            except ServerUnavailable as error:
                if loop.time() >= give_up_at:
                    # An earlier try may have been carried out.
                    raise unknown or error from error.__cause__
            attempt += 1
            await asyncio.sleep(retry_delay(attempt, most=0.5))

    async def _attempt(
        self,
        command: tuple[Any, ...],
        script: Script | None,
        confirm: Callable[[Any], tuple[str, ...] | None] | None = None,
    ) -> Any:
        wire = await self._acquire()
        keep = False
        try:
            reply = await self._exchange(wire, command, script)
            keep = True
            if confirm is not None and (last := confirm(reply)):
                self.round_trips += 1
                with suppress(OSError):
                    wire.tell(*last)
        except ReplyError as error:
            keep = True
            self.errors += 1
            raise _refusal(error) from error
        except NotSent as error:
            self.errors += 1
            raise ServerUnavailable(f"the connection broke: {error}") from error
        except OSError as error:
            self.errors += 1
            raise _lost(error) from error
        finally:
            if keep:
                self._connections.release(wire)
            else:
                self._connections.drop(wire)
        return reply

    async def _acquire(self) -> Wire:
        try:
            if (wire := self._connections.acquire_nowait()) is not None:
                return wire
            async with asyncio.timeout(ANSWER_WITHIN):
                return await self._connections.acquire()
        except TimeoutError as error:
            self.errors += 1
            raise ServerUnavailable("every connection is busy, or the server accepts none") from error
        except DelayqError:
            self.errors += 1
            raise

    async def _exchange(self, wire: Wire, command: tuple[Any, ...], script: Script | None) -> Any:
        self.round_trips += 1
        try:
            return await wire.ask(*command)
        except ReplyError as error:
            # Not carried out. EVAL needs no SCRIPT permission and cannot be overtaken by another SCRIPT FLUSH.
            if script is None or not _is_unknown_script(error):
                raise
        self.round_trips += 1
        return await wire.ask("EVAL", script.text, *command[2:])


def _is_unknown_script(error: ReplyError) -> bool:
    return str(error).startswith("NOSCRIPT")


def _lost(error: OSError) -> OutcomeUnknown:
    return OutcomeUnknown(f"the connection broke before the answer came: {error or type(error).__name__}")


def _refusal(error: ReplyError) -> DelayqError:
    text = str(error)
    if _NOT_NOW.search(text):
        return ServerUnavailable(f"the server cannot serve now: {text}")
    if "WRONGTYPE" in text:
        return ServerRefused("one of the queue's keys holds a value of another type: it is used by something else")
    return ServerRefused(text)
