"""Runs a command against a server, and shuts it down cleanly when it is interrupted."""

from __future__ import annotations

import asyncio
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import typer

import delayq
from delayq._redis.url import redacted
from delayq.cli.output import CommandFailed, tell
from delayq.client import URL_VARIABLE
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

_PRIVATE = "embedded:"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def clock(client: delayq.Client) -> datetime:
    """Return the server's time, or ours if we may not ask for it."""
    try:
        return await client.server_time()
    except ServerRefused:
        return datetime.now(UTC)


def server_of(url: str | None) -> str:
    """Return the address of a command that requires one. Raises CommandFailed."""
    if not url:
        raise CommandFailed(
            f"no server given: pass --url or set ${URL_VARIABLE}; --url embedded: starts a"
            " private one"
        )
    return url


def public_part(url: str) -> str:
    """Return the URL without the parts that may be secret: user, password and options."""
    return "embedded" if url.startswith("embedded:") else redacted(url).replace("***@", "")


def python(module: str) -> list[str]:
    """Return a command that runs a module.

    As in this process, modules come from the working directory only if it was asked for.
    """
    flags = [] if {"", str(Path.cwd())} & set(sys.path) else ["-P"]
    return [sys.executable, *flags, "-m", module]


def with_client(
    server: delayq.Client | str | None,
    act: Callable[[delayq.Client], Awaitable[T]],
    *,
    interrupted: Callable[[delayq.Client], Awaitable[str]] | None = None,
) -> T:
    """Open a client, and let a command act on it.

    Ctrl-C cancels the command, and ends the process with status 130.

    Args:
        server: The client, or the address of its server; a private one by default, announced on
            stderr.
        act: The work of the command.
        interrupted: Returns a line for stderr that says how much has been done.
    """
    if not server:
        tell(
            f"neither --url nor ${URL_VARIABLE} is set: using an empty private server that ends"
            " with this command"
        )

    async def main(caught: list[int]) -> T:
        opened = server if isinstance(server, delayq.Client) else delayq.connect(server or _PRIVATE)
        async with opened as client:
            try:
                return await act(client)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if caught and interrupted is not None and task is not None:
                    task.uncancel()
                    tell(f"stopped: {await interrupted(client)}")
                    raise typer.Exit(128 + caught[0]) from None
                raise

    return until_signalled(main)


def at_server_time(
    url: str | None, act: Callable[[delayq.Client], Awaitable[T]]
) -> tuple[T, datetime]:
    """Open a client, and return the result of a command and the server's time."""

    async def main(client: delayq.Client) -> tuple[T, datetime]:
        return await act(client), await clock(client)

    return with_client(url, main)


def until_signalled(main: Callable[[list[int]], Coroutine[Any, Any, T]]) -> T:
    """Run the work of a command, which gets a list of the signals received so far. A signal cancels
    it, and ends the process with status 128 + the signal's number.
    """
    caught: list[int] = []

    async def interruptible() -> T:
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(main(caught))

        def interrupt(number: int) -> None:
            # Only once: a second signal must not break off the work that follows.
            if not caught:
                work.cancel()
            caught.append(number)

        for number in SIGNALS:
            loop.add_signal_handler(number, interrupt, number)
        return await work

    try:
        return anyio.run(interruptible)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(128 + (caught[0] if caught else signal.SIGINT)) from None
