"""The commands ``configure`` and ``repartition``: a queue's settings, and its partitions."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq._reliable.settings import FORMATS, Difference, Expired, option_text
from delayq.admin.reliable import ReliableInspector
from delayq.admin.wording import describe_setting, read_setting
from delayq.cli.options import (
    AsJson,
    GroupLimit,
    QueueLimit,
    ReliableOnly,
    ReliableOrAll,
    Target,
    Url,
    UrlOrWorkers,
)
from delayq.cli.output import (
    CommandFailed,
    NoQueue,
    print_json,
    progress,
    say,
    show_fields,
    span,
    tell,
)
from delayq.cli.running import server_of, with_client
from delayq.cli.worker.child import import_worker, require_no_server
from delayq.client import URL_VARIABLE
from delayq.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client, QueueDepth, QueueSettings

    # The depth of a queue; and, for a delayed queue, when the next message is due.
    _Stats = tuple[QueueDepth, datetime | None]
    from delayq._reliable.mover import Repartition
    from delayq.cli.options import Target


def configure(
    queue: ReliableOrAll = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="N|none", help="Refuse offers beyond this many live messages."),
    ] = None,
    expired: Annotated[
        Expired | None, typer.Option(help="What to do with messages past their time to live.")
    ] = None,
    dedup_window: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION|none",
            help="How long the id of a handled message stays taken: 90 (seconds), 1h.",
        ),
    ] = None,
    partitions: Annotated[int | None, typer.Option(min=1, help="The number of partitions.")] = None,
    keep_dead: Annotated[
        str | None,
        typer.Option(metavar="DURATION|none", help="Drop dead letters older than this: 12h, 30d."),
    ] = None,
    max_dead: Annotated[
        str | None,
        typer.Option(metavar="N|none", help="Drop the oldest dead letters beyond this many."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION|none", help="How long to keep results and attempts of messages: 7d."
        ),
    ] = None,
    max_kept: Annotated[
        int | None, typer.Option(min=1, help="Keep those of at most this many messages.")
    ] = None,
    limit: QueueLimit = None,
    group_limit: GroupLimit = None,
    create: Annotated[
        bool, typer.Option("--create", help="Accept the name of a queue that has never been used.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODULE:ATTRIBUTE",
            help="Take the settings that this delayq.Worker declares, for all its queues.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --from: only show what would change.")
    ] = False,
    url: UrlOrWorkers = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a reliable queue, for all its clients, and show all of them.

    Clients that are running use the new settings at once. Code that declares other settings goes
    on with these, and logs a warning when it starts. The number of partitions can change only while
    nothing is in the queue. Without an option for a setting, nothing is changed. If there is no
    such queue, the command fails unless you add --create.

    With --from, the server gets what an application declares: a step of a deployment.

    Exit status: 0; 1 if a queue cannot get all that --from declares for it.

    Example: `delayq configure mails --max-size 10000`
    """
    given = {
        "partitions": partitions,
        "max_size": max_size,
        "expired": expired,
        "dedup_window": dedup_window,
        "keep_dead": keep_dead,
        "max_dead": max_dead,
        "keep": keep,
        "max_kept": max_kept,
        "limit": limit,
        "group_limit": group_limit,
    }
    changes = {name: _read(name, value) for name, value in given.items() if value is not None}
    if reference is not None:
        if create or changes:
            raise CommandFailed("--from takes the settings from the code: leave the others out")
        return _configure_from(reference, queue, url, dry_run=dry_run, as_json=as_json)
    if queue is None or dry_run:
        raise CommandFailed(
            "name a queue and settings, or an application: delayq configure mails --max-size 1000;"
            " delayq configure --from app.jobs:worker --dry-run"
        )
    return _configure(
        queue, changes, url or os.environ.get(URL_VARIABLE), create=create, as_json=as_json
    )


def _configure(
    queue: Target, changes: dict[str, Any], url: str | None, *, create: bool, as_json: bool
) -> None:
    async def act(client: Client) -> QueueSettings:
        reliable_queue = queue.reliable(client, "be configured")
        if not await ReliableInspector.of(client, queue.name).exists():
            if not create:
                raise NoQueue(
                    f"there is no reliable queue {queue.name!r}: to give a new queue its settings"
                    " before its first message, add --create"
                )
            # So that something is stored.
            changes.setdefault("partitions", 1)
        return await reliable_queue.configure(**changes)

    settings = with_client(url, act)
    if as_json:
        print_json({"queue": queue.name, **asdict(settings)})
    else:
        show_fields(setting_lines(settings))


def _read(name: str, value: object) -> Any:
    try:
        return read_setting(name, str(value), f"--{name.replace('_', '-')}")
    except BadInput as error:
        raise CommandFailed(str(error)) from error


def setting_lines(settings: QueueSettings) -> list[tuple[str, str]]:
    """Return the settings of a queue in words, each behind its name."""
    return [
        (name.replace("_", " "), describe_setting(name, getattr(settings, name), span))
        for name in FORMATS
    ]


def _configure_from(
    reference: str, queue: Target | None, url: str | None, *, dry_run: bool, as_json: bool
) -> None:
    """Give the queues of a worker the settings that it declares, or only show them.

    Args:
        reference: The worker, as ``module:attribute``.
        queue: The only queue to change; None for all.
        url: The server, for a worker that names none; None for that of the environment.
        dry_run: Whether to change nothing.
        as_json: Whether to print JSON.
    """
    # After the import of delayq, so that no module in that directory can shadow its imports.
    sys.path.insert(0, str(Path.cwd()))
    worker = import_worker(reference)
    if url:
        require_no_server(worker, reference)
    server = worker.server or server_of(url or os.environ.get(URL_VARIABLE))
    declared = worker.declared_settings()
    if queue is not None:
        if queue.name not in declared:
            raise CommandFailed(f"{reference} does not handle queue {queue.name!r}")
        declared = {queue.name: declared[queue.name]}

    async def act(client: Client) -> bool:
        tell(f"the server is {client.label}")
        count, complete = 0, True
        for name, settings in declared.items():
            inspector = ReliableInspector.of(client, name)
            for difference in await inspector.undeclared(settings):
                changes = {difference.name: difference.declared}
                error = "" if dry_run else await _change(inspector, changes)
                _show_change(
                    name, difference, error, changed=not (dry_run or error), as_json=as_json
                )
                count, complete = count + 1, complete and not error
        if not (count or as_json):
            say(f"the server has what {reference} declares")
        return complete

    if not with_client(server, act):
        raise typer.Exit(1)


async def _change(inspector: ReliableInspector, changes: dict[str, str]) -> str:
    """Change one setting, and return why that cannot be; empty if it was changed."""
    try:
        await inspector.configure(changes)
    except ConfigurationError as error:
        return str(error)
    return ""


def _show_change(
    queue: str, difference: Difference, error: str, *, changed: bool, as_json: bool
) -> None:
    name, stored, declared = difference
    before = option_text(name, stored) if stored else None
    after = option_text(name, declared)
    if as_json:
        facts: dict[str, Any] = {"queue": queue, "setting": name, "server": before, "code": after}
        print_json({**facts, "changed": changed, "error": error or None})
        return
    text = f"{queue}: {name.replace('_', ' ')} {before or 'not set'} -> {after}"
    say(text if changed else f"{text} (not changed)")
    if error:
        tell(error)


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
        with progress("moved", is_shown=not as_json) as show:

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
