"""The command ``delayq worker``: its options and its exit status."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from delayq.cli.options import AsJson  # noqa: TC001 - typer reads it
from delayq.cli.worker.supervisor import Supervisor


def worker(
    where: Annotated[
        str, typer.Argument(metavar="MODULE:ATTRIBUTE", help="The delayq.Worker, as in app.jobs:worker.", show_default=False)
    ],
    processes: Annotated[int, typer.Option(min=1, help="How many processes run it.")] = 1,
    burst: Annotated[bool, typer.Option("--burst", help="End when nothing is due any more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a worker, in one process or several. Modules are looked for in the working directory, too.

    SIGTERM or Ctrl-C stops it gracefully: what is being handled is finished, the rest handed back. A second one kills at
    once. A process that dies is replaced. Exit status: 0 after a stop or a burst, 1 if processes died in a burst, 2 if the
    worker could not be started, 128 and the signal's number after a second signal.
    """
    raise typer.Exit(anyio.run(Supervisor(where, processes, burst=burst, as_json=as_json).run))
