"""The command line: its commands, and the handling of their errors."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from delayq._version import __version__
from delayq.cli import lookup, messages, queues
from delayq.cli._typer import HelpfulCommand, HelpfulGroup, join_words
from delayq.cli.activity import history, workers
from delayq.cli.batch import batch
from delayq.cli.bench import bench
from delayq.cli.dashboard import dashboard
from delayq.cli.dead import dead
from delayq.cli.demo.command import demo
from delayq.cli.follow import follow
from delayq.cli.groups import groups
from delayq.cli.migrate import migrate
from delayq.cli.options import UrlBefore
from delayq.cli.output import CommandFailed, tell
from delayq.cli.relay import relay
from delayq.cli.schedules import schedules, unschedule
from delayq.cli.server import acl, doctor
from delayq.cli.settings import configure, repartition
from delayq.cli.top import top
from delayq.cli.worker.command import worker
from delayq.errors import DelayqError

# Plain tracebacks, because pretty ones show the values of variables, payloads and passwords among
# them. Help texts are Markdown, so that their paragraphs are wrapped to the width of the terminal.
app: typer.Typer = typer.Typer(
    cls=HelpfulGroup,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_INSPECT, _MESSAGES, _MANAGE, _RUN = "Inspect", "Messages", "Manage queues", "Run and set up"
app.command(rich_help_panel=_INSPECT)(queues.queues)
app.command(rich_help_panel=_INSPECT)(queues.stats)
app.command(rich_help_panel=_INSPECT)(top)
app.command(rich_help_panel=_INSPECT)(lookup.peek)
app.command("list", rich_help_panel=_INSPECT)(lookup.list_messages)
app.command(rich_help_panel=_INSPECT)(lookup.get)
app.command(rich_help_panel=_INSPECT)(history)
app.command(rich_help_panel=_INSPECT)(lookup.search)
app.command(rich_help_panel=_INSPECT)(schedules)
app.command(rich_help_panel=_INSPECT)(batch)
app.command(rich_help_panel=_INSPECT)(workers)
app.command(rich_help_panel=_INSPECT)(lookup.inspect)
app.command(rich_help_panel=_INSPECT)(doctor)
app.command(rich_help_panel=_MESSAGES)(messages.offer)
app.command(rich_help_panel=_MESSAGES)(messages.result)
app.command(rich_help_panel=_MESSAGES)(follow)
app.command(rich_help_panel=_MESSAGES)(messages.cancel)
app.command(rich_help_panel=_MESSAGES)(messages.bury)
app.command(rich_help_panel=_MESSAGES)(messages.reschedule)
app.command(rich_help_panel=_MESSAGES)(messages.take)
app.add_typer(dead, name="dead", rich_help_panel=_MANAGE)
app.add_typer(groups, name="groups", rich_help_panel=_MANAGE)
app.command(rich_help_panel=_MANAGE)(configure)
app.command(rich_help_panel=_MANAGE)(repartition)
app.command(rich_help_panel=_MANAGE)(queues.pause)
app.command(rich_help_panel=_MANAGE)(queues.resume)
app.command(rich_help_panel=_MANAGE)(queues.purge)
app.command(rich_help_panel=_MANAGE)(unschedule)
app.command(rich_help_panel=_MANAGE)(migrate)
app.command(rich_help_panel=_RUN)(worker)
app.command(rich_help_panel=_RUN)(relay)
app.command(rich_help_panel=_RUN)(dashboard)
app.command(rich_help_panel=_RUN)(acl)
app.command(rich_help_panel=_RUN)(bench)
app.command(rich_help_panel=_RUN)(demo)
for _part in (app, dead, groups):
    for _command in _part.registered_commands:
        _command.cls = HelpfulCommand


# With a callback, a lone command keeps its name.
@app.callback()
def delayq(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of delayq and exit.")
    ] = False,
    url: UrlBefore = None,  # noqa: ARG001 - read by the commands
) -> None:
    """Inspect and manage delayq's queues on a Redis or Valkey server.

    Examples: `delayq --url redis://127.0.0.1:6379/0 queues`, `delayq doctor`
    """
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; an error becomes one line on stderr."""
    _open_what_is_closed()
    join_words()
    try:
        # None if the command ended without setting a status.
        status: int = app(arguments, prog_name="delayq", standalone_mode=False) or 0
        # Flushed here, where a failure can be reported. At the end of the process it could not.
        sys.stdout.flush()
    except CommandFailed as error:
        tell(str(error))
        return error.status
    except DelayqError as error:
        return _fail(str(error))
    except BrokenPipeError:
        _silence()
        return 1
    except OSError as error:
        _silence()
        return _fail(error.strerror or str(error))
    except Exception as error:
        # Wrong usage. Its class depends on typer's version, but all of them have this method.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        return _fail(f"{words()} ({_hint(error)})")
    return status


def _hint(error: Exception) -> str:
    """Return a hint that may help against wrong usage."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return "see delayq --help"
    return f"see {context.command_path} --help"


def _open_what_is_closed() -> None:
    """Open streams that the caller has closed (``>&-``): the first connection would become one."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        # Not writable: output that fails is an error, and messages taken to print go back.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _silence() -> None:
    """Discard the output that could not be written, so that it is not tried again at the end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    tell(message)
    return 2
