"""The command line: the commands, and what becomes of their errors."""

from __future__ import annotations

import sys

import typer

from delayq.cli.acl import acl
from delayq.cli.demo.command import demo
from delayq.cli.errors import CommandFailed
from delayq.cli.migrate import migrate
from delayq.cli.worker.command import worker
from delayq.errors import DelayqError

app: typer.Typer = typer.Typer(add_completion=False, invoke_without_command=True)
app.command()(acl)
app.command()(demo)
app.command()(migrate)
app.command()(worker)


# With a callback, a lone command keeps its name.
@app.callback()
def delayq(context: typer.Context) -> None:
    """Deliver messages later, exactly when due."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; an error becomes one line on stderr.

    Args:
        arguments: Instead of those of this process.
    """
    try:
        # None where the command ended without a word about its status.
        return app(arguments, prog_name="delayq", standalone_mode=False) or 0
    except (CommandFailed, DelayqError) as error:
        return _fail(str(error))
    except Exception as error:
        # Wrong usage. Which class it has depends on typer's version; all of them have this method.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        return _fail(f"{words()} (more: delayq --help)")


def _fail(message: str) -> int:
    print(f"delayq: {' '.join(message.split())}", file=sys.stderr)
    return 2
