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
        str, typer.Argument(metavar="MODULE:ATTRIBUTE", help="The delayq.Worker, as in app.jobs:worker.", show_default=False)
    ],
    processes: Annotated[int, typer.Option(min=1, help="How many processes run it.")] = 1,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Serve metrics for Prometheus here; a second process at the next port, and so on. Needs the extra `prometheus`.",
            show_default=False,
        ),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="The address on which to listen for that.")] = "127.0.0.1",
    burst: Annotated[bool, typer.Option("--burst", help="End when nothing is due any more.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a worker, in one process or several. Modules are looked for in the working directory, too.

    SIGTERM or Ctrl-C stops it gracefully: what is being handled is finished, the rest handed back. A second one kills at
    once. A process that dies is replaced. Exit status: 0 after a stop or a burst, 1 if processes died in a burst, 2 if the
    worker could not be started, 128 and the signal's number after a second signal.
    """
    metrics = None
    if metrics_port is not None:
        if find_spec("prometheus_client") is None:
            raise CommandFailed("prometheus_client is missing: pip install 'delayq[prometheus]'")
        if metrics_port + processes > _PORTS:
            raise CommandFailed(f"{processes} processes need as many ports: from {metrics_port} on there are not that many")
        metrics = (metrics_host, metrics_port)
    raise typer.Exit(anyio.run(Supervisor(where, processes, burst=burst, metrics=metrics, as_json=as_json).run))
