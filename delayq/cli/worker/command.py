"""The command ``delayq worker``: its options and its exit status."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import anyio
import typer

from delayq.cli.errors import CommandFailed
from delayq.cli.options import AsJson, WorkerUrl  # noqa: TC001 - typer reads them
from delayq.cli.worker.supervisor import Plan, Supervisor

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
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help=(
                "Restart the worker when a Python file below the working directory changes. Needs"
                " the extra `reload`."
            ),
        ),
    ] = False,
    reload_dir: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Watch this directory instead of the working directory. Repeatable.",
        ),
    ] = None,
    url: WorkerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Run a worker in one or more processes.

    Modules are also imported from the working directory. SIGTERM or Ctrl-C stops the worker
    gracefully: handlers finish, and the other messages are handed back. A second signal kills it at
    once. A process that dies is replaced.

    Exit status: 0 after a stop or a burst; 1 if processes died in a burst; 2 if the worker could
    not be started; 128 plus the signal's number after a second signal.

    Example: `delayq worker app.jobs:worker --processes 4`
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
    watched = tuple(reload_dir or (Path(),)) if reload or reload_dir else ()
    if watched and burst:
        raise CommandFailed("--reload and --burst cannot be combined")
    if watched and find_spec("watchfiles") is None:
        raise CommandFailed("watchfiles is missing: pip install 'delayq[reload]'")
    plan = Plan(
        where=where,
        processes=processes,
        url=url or None,
        burst=burst,
        reload=watched,
        metrics=metrics,
        as_json=as_json,
    )
    raise typer.Exit(anyio.run(Supervisor(plan).run))
