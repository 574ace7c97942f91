"""The commands that wait until earlier writes are on disk, or on replicas too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._redis.client import BLOCKS_FOR
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._redis.client import RedisClient
    from delayq._redis.connection import Connection
    from delayq._redis.scripts import Script

# A later promise counts as broken, ms. Redis set to ``everysec`` syncs once a second.
WITHIN_MS = int(BLOCKS_FOR * 1000)


class Durability(NamedTuple):
    """A promise to wait for: a number of replicas, or the disk."""

    replicas: int

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command behind a script, which answers when, or how far, earlier writes are safe."""
        return ("WAIT", self.replicas, WITHIN_MS) if self.replicas else ("WAITAOF", 1, 0, WITHIN_MS)

    def broken(self, answer: Any) -> str:
        """Return why the promise is broken, according to that answer; empty if it is kept."""
        if isinstance(answer, BaseException):
            return f"the server did not confirm durability: {answer}"
        if not self.replicas:
            return "" if answer[0] >= 1 else f"not on disk within {WITHIN_MS / 1000:g} s"
        if answer >= self.replicas:
            return ""
        return f"only {answer} of {self.replicas} replicas confirmed within {WITHIN_MS / 1000:g} s"


class WaitingServer:
    """Sends the promise's command behind each script, and answers with a pair of both replies."""

    def __init__(self, server: RedisClient, promise: Durability) -> None:
        self._server = server
        self._promise = promise

    @property
    def retry_for(self) -> float:
        """As :attr:`RedisClient.retry_for`."""
        return self._server.retry_for

    @property
    def waits_for(self) -> float:
        """As :attr:`RedisClient.waits_for`."""
        return self._server.waits_for

    def run_soon(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        on_reply: Callable[[Any], object],
        beside: Connection | None = None,
    ) -> Connection | None:
        """Send a call as :meth:`RedisClient.run_soon` does."""
        answer: list[Any] = []

        def answered(reply: Any) -> None:
            if isinstance(reply, DelayqError):
                on_reply(reply)
            else:
                answer.append(reply)

        def waited(reply: Any) -> None:
            # If the first one was not answered, the caller has been told already.
            if answer:
                on_reply((answer[0], reply))

        wire = self._server.run_soon(script, keys, args, answered, beside)
        if wire is not None:
            self._server.follow(wire, keys[0], self._promise.command, waited)
        return wire

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int] = (),
        until: float | None = None,
    ) -> Any:
        """Run a script as :meth:`RedisClient.run` does."""
        return await self._server.run(script, keys, args, until, self._promise.command)

    async def demand(self, key: str) -> None:
        """Raise ServerRefused, before anything is written, if the promise cannot be kept."""
        # WAIT for zero replicas answers at once.
        ask = ("WAIT", 0, 1) if self._promise.replicas else ("WAITAOF", 1, 0, 1)
        await self._server.command(*ask, key=key)
