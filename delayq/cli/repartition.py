"""The command ``delayq repartition``: it moves a queue to another number of partitions."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from delayq.admin.reliable import ReliableInspector
from delayq.cli.options import AsJson, ReliableOnly, Url  # noqa: TC001 - typer reads them
from delayq.cli.output import print_json, progress, say, tell
from delayq.cli.running import with_client

if TYPE_CHECKING:
    from delayq import Client
    from delayq._reliable.mover import Repartition

# How often a run reports that it still waits for workers, seconds.
_SAY_EVERY = 5.0


def repartition(
    queue: ReliableOnly,
    to: Annotated[int, typer.Option("--to", min=1, help="The new number of partitions.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move a reliable queue to another number of partitions, with everything in it.

    The queue is paused, and its workers finish what they have; Ctrl-C while the command waits for
    them leaves the queue as it was. Then offers fail until everything is moved. If the command is
    interrupted after that, run it again: it continues. Nothing is lost, and due times, order, ids,
    groups, schedules, dead letters, remembered ids and results stay as they are.

    Example: `delayq repartition mails --to 8`
    """
    said_at = 0.0

    async def act(client: Client) -> Repartition:
        queue.check_reliable("be moved to other partitions")
        await queue.check_existence(client)
        with progress("moved", shown=not as_json) as show:

            def report(state: Repartition) -> None:
                nonlocal said_at
                show(state.moved, max(state.messages, state.moved))
                if state.running and time.monotonic() - said_at >= _SAY_EVERY:
                    said_at = time.monotonic()
                    tell(f"waiting for workers to finish {state.running:,} messages")
                    sys.stderr.flush()

            inspector = ReliableInspector.of(client, queue.name)
            return await inspector.repartition(to, progress=report)

    result = with_client(url, act)
    if as_json:
        print_json(asdict(result))
    else:
        plural = "partition" if to == 1 else "partitions"
        say(f"{queue.name} has {to:,} {plural}; messages moved: {result.moved:,}")
