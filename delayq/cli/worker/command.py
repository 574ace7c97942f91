"""The command ``delayq worker``: its options and its exit status."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import anyio
import typer

from delayq.cli.errors import CommandFailed
from delayq.cli.options import AsJson  # noqa: TC001 - typer reads it
from delayq.cli.worker.supervisor import Supervisor

_PORTS = 65_536


def worker(
    where: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:ATTRIBUTE", help="The delayq.Worker to run, such as app.jobs:worker."
        ),
    ],
    processes: Annotated[int, typer.Option(min=1, help="The number of processes.")] = 1,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=(
                "Serve Prometheus metrics on this port; further processes use the next ports. Needs"
                " the extra `prometheus`."
            ),
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="The address to serve metrics on.")
    ] = "127.0.0.1",
    burst: Annotated[
        bool, typer.Option("--burst", help="Exit when no more messages are due.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a worker in one or more processes.

    Modules are also imported from the working directory. SIGTERM or Ctrl-C stops the worker
    gracefully: handlers finish, and the other messages are handed back. A second signal kills it at
    once. A process that dies is replaced.

    Exit status: 0 after a stop or a burst; 1 if processes died in a burst; 2 if the worker could
    not be started; 128 plus the signal's number after a second signal.
    """
    metrics = None
    if metrics_port is not None:
        if find_spec("prometheus_client") is None:
            raise CommandFailed("prometheus_client is missing: pip install 'delayq[prometheus]'")
        if metrics_port + processes > _PORTS:
            raise CommandFailed(
                f"{processes} processes need as many ports, but there are not enough from"
                f" {metrics_port} on"
            )
        metrics = (metrics_host, metrics_port)
    raise typer.Exit(
        anyio.run(Supervisor(where, processes, burst=burst, metrics=metrics, as_json=as_json).run)
    )
