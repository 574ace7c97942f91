"""The commands about whole queues: their figures and settings, pausing and purging them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live

from delayq.admin.catalog import list_queues
from delayq.admin.delayed import DelayedInspector, PurgeState
from delayq.admin.delays import explain_delay
from delayq.admin.failures import find_wave
from delayq.admin.reliable import ReliableInspector
from delayq.admin.states import FAILING, OVERDUE, PAUSED, states, undeliverable
from delayq.cli.options import (
    AsJson,
    Queue,
    ReliableOnly,
    Url,
    Yes,
)
from delayq.cli.output import (
    CommandFailed,
    console,
    moment_json,
    moment_text,
    print_json,
    progress,
    report,
    say,
    show_fields,
    show_table,
    span,
    table,
    tell,
    write,
)
from delayq.cli.running import clock, with_client
from delayq.cli.schedules import change_schedule
from delayq.cli.settings import setting_lines
from delayq.errors import ServerRefused
from delayq.stats import COUNTED_STATES

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client, QueueDepth, QueueSettings
    from delayq.admin.catalog import FoundQueue

    # The depth of a queue; and, for a delayed queue, when the next message is due.
    _Stats = tuple[QueueDepth, datetime | None]

_COLUMNS = ("kind", "queue", *COUNTED_STATES, "state")
_STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "idle": "dim"}
# A message that is due for less than this, seconds, is not late.
_LATE = 1.0
# The list explains why at most this many queues are late, or fail.
_MOST_EXPLAINED = 20


def queues(url: Url = None, as_json: AsJson = False) -> None:
    """List the queues on the server, with their number of messages by state.

    A delayed queue is listed while it has pending, leased or unreadable messages: a ready list
    alone could belong to any application.

    Exit status: 0, or 1 if there are none.

    Example: `delayq queues`
    """
    try:
        rows = with_client(url, read_all)
    except ServerRefused as error:
        hint = "; without +scan, name a queue: delayq stats NAME" if "'scan'" in str(error) else ""
        raise CommandFailed(f"{error}{hint}") from error
    if as_json:
        for queue, stats, cause in rows:
            print_json(
                {**_identity(queue), "error": stats}
                if isinstance(stats, str)
                else {**_figures(queue, *stats), **({"cause": cause} if cause else {})}
            )
    elif rows:
        lines = [
            _row(queue, stats if isinstance(stats, str) else stats[0], cause)
            for queue, stats, cause in rows
        ]
        show_table(_COLUMNS, lines, wide=["queue", "state"])
    else:
        say("no queues")
    raise typer.Exit(0 if rows else 1)


def stats(
    queue: Queue,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show how many messages a queue has in each state.

    Exit status: 0; 1 if there is no such reliable queue; 130 after Ctrl-C. A delayed queue without
    messages counts as empty, and so does one that --watch waits for.

    Example: `delayq stats mails --watch`
    """

    async def act(client: Client) -> None:
        if watch:
            await _watch(client, queue, interval, as_json=as_json)
        else:
            await queue.check_existence(client)
            await _print_stats(client, queue, as_json=as_json)

    with_client(url, act)


def pause(
    queue: ReliableOnly,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Pause this schedule, and nothing else of the queue."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Pause a reliable queue: no process takes messages until it is resumed.

    Leased messages are not affected. With --schedule, the messages of that schedule stop coming,
    and its waiting one is dropped.

    Exit status: 0, or 1 if there is no such schedule.

    Example: `delayq pause mails`
    """
    if schedule is not None:
        change_schedule(queue, schedule, "paused", url, as_json=as_json)
        return

    async def act(client: Client) -> None:
        await (await queue.existing(client, "be paused")).pause()

    with_client(url, act)
    report(
        {"queue": queue.name, "paused": True},
        f"{queue.name} is paused; resume it with: delayq resume {queue.argument}",
        as_json=as_json,
    )


def resume(
    queue: ReliableOnly,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Resume this schedule instead of the queue."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Resume a paused reliable queue, or one of its schedules.

    Exit status: 0, or 1 if the queue was not paused, or there is no such schedule.

    Example: `delayq resume mails`
    """
    if schedule is not None:
        change_schedule(queue, schedule, "resumed", url, as_json=as_json)
        return

    async def act(client: Client) -> bool:
        return await (await queue.existing(client, "be paused")).resume()

    was_paused = with_client(url, act)
    report(
        {"queue": queue.name, "resumed": was_paused},
        f"{queue.name} is resumed" if was_paused else f"{queue.name} was not paused",
        as_json=as_json,
    )
    raise typer.Exit(0 if was_paused else 1)


def purge(
    queue: Queue,
    state: Annotated[PurgeState, typer.Option(help="The state of the messages.")] = "all",
    yes: Yes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Drop the messages of a queue for good. Dead letters stay: see `delayq dead purge`.

    "all" also drops messages that the workers of a reliable queue hold. Ctrl-C stops between two
    steps and reports how many are left.

    Exit status: 0; 1 if you decline; 130 after Ctrl-C.

    Example: `delayq purge mails --state delayed`
    """
    confirm(
        f"Drop {'all' if state == 'all' else f'the {state}'} messages of {queue.name} for good?",
        yes=yes,
    )

    async def act(client: Client) -> int:
        if not queue.is_reliable:
            return await DelayedInspector.of(client, queue.name).purge(state)
        with progress("dropped", is_shown=not as_json) as show:
            return await (await queue.existing(client)).purge(state, progress=show)

    async def remaining_text(client: Client) -> str:
        now, _ = await _stats(client, queue)
        return (
            f"{now.delayed + now.ready + now.leased:,} messages are left; run the command again to"
            " continue"
        )

    dropped = with_client(url, act, interrupted=remaining_text)
    report(
        {"queue": queue.name, "state": state, "dropped": dropped},
        f"dropped: {dropped:,}",
        as_json=as_json,
    )


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user at a terminal. Exits with status 1 if the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed("cannot ask for confirmation without a terminal: add --yes")
    write(f"{question} [y/N] ", stderr=True, end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        tell("nothing was changed")
        raise typer.Exit(1)


async def read_all(client: Client) -> list[tuple[FoundQueue, _Stats | str, str]]:
    """Return the queues, what is known about each, which of them fail, and why the first ones are
    late or fail.
    """
    rows: list[tuple[FoundQueue, _Stats | str, str]] = []
    unexplained = _MOST_EXPLAINED
    for queue in await list_queues(client):
        stats, cause = await stats_or_error(client, queue), ""
        if not isinstance(stats, str):
            cause = await cause_of(client, queue, stats[0], briefly=not unexplained)
            unexplained -= bool(unexplained and cause)
        rows.append((queue, stats, cause))
    return rows


async def cause_of(
    client: Client, queue: FoundQueue, depth: QueueDepth, *, briefly: bool = False
) -> str:
    """Return why the messages of a queue are late, or which errors they meet; empty if neither.

    If ``briefly``, only return how many fail.
    """
    inspector = queue.inspector(client)
    if not isinstance(inspector, ReliableInspector) or depth.paused:
        return ""
    if is_late(depth):
        return "" if briefly else (await explain_delay(inspector, depth, span)).cause
    wave = await find_wave(inspector, with_error=not briefly)
    return wave.text if wave else ""


async def stats_or_error(client: Client, queue: FoundQueue) -> _Stats | str:
    """Return an error as text: a queue that cannot be read must not hide the others."""
    try:
        return await _stats(client, queue)
    except ServerRefused as error:
        return str(error)


async def _stats(client: Client, queue: FoundQueue) -> _Stats:
    inspector = queue.inspector(client)
    if isinstance(inspector, ReliableInspector):
        return await inspector.stats(), None
    return await inspector.depth(), await inspector.next_due_at()


async def _print_stats(client: Client, queue: FoundQueue, *, as_json: bool) -> None:
    stats, settings = await _stats(client, queue), await _settings(client, queue)
    cause = await cause_of(client, queue, stats[0])
    if as_json:
        more_facts = {"partitions": None} if settings is None else asdict(settings)
        more_facts |= {"cause": cause} if cause else {}
        print_json({**_figures(queue, *stats), **more_facts})
    else:
        show_fields(_lines(queue, *stats, await clock(client), settings, cause))


async def _watch(client: Client, queue: FoundQueue, interval: float, *, as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        while True:
            await _print_stats(client, queue, as_json=as_json)
            await asyncio.sleep(interval)
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            stats, now = await _stats(client, queue), await clock(client)
            rows = _lines(queue, *stats, now, await _settings(client, queue))
            drawing = table((queue.kind, queue.name), rows, wide=[queue.name])
            drawing.caption = f"{now.astimezone():%H:%M:%S}, Ctrl-C to stop"
            drawing.caption_justify = "left"
            live.update(drawing, refresh=True)
            await asyncio.sleep(interval)


async def _settings(client: Client, queue: FoundQueue) -> QueueSettings | None:
    inspector = queue.inspector(client)
    if isinstance(inspector, ReliableInspector):
        return await inspector.visible_settings()
    return None


def _figures(queue: FoundQueue, depth: QueueDepth, next_due_at: datetime | None) -> dict[str, Any]:
    """Return the fields that a queue of this kind has in JSON."""
    figures = _identity(queue) | asdict(depth)
    figures["oldest_due_age"] = round(depth.oldest_due_age, 3)
    if depth.paused_for is not None:
        figures["paused_for"] = round(depth.paused_for, 3)
    if queue.kind == "reliable":
        del figures["quarantined"]
    else:
        del figures["dead"], figures["paused"], figures["paused_for"]
        figures["next_due_at"] = moment_json(next_due_at)
    return figures


def _identity(queue: FoundQueue) -> dict[str, Any]:
    partitions = None if queue.kind == "delayed" else queue.partitions
    return {"kind": queue.kind, "queue": queue.name, "partitions": partitions}


def _row(queue: FoundQueue, depth: QueueDepth | str, cause: str = "") -> list[str]:
    name = f"{queue.name} ({queue.partitions} partitions)" if queue.partitions > 1 else queue.name
    state, _ = state_of(queue, depth, cause)
    if isinstance(depth, str):
        return [queue.kind, name, *"----", f"{state}: {depth}"]
    counts = (depth.ready, depth.delayed, depth.leased, undeliverable(depth))
    return [
        queue.kind,
        name,
        *(f"{count:,}" for count in counts),
        f"{state}: {cause}" if cause else state,
    ]


def is_late(depth: QueueDepth) -> bool:
    """Return whether messages of a queue have been due for a second or longer."""
    return depth.oldest_due_age >= _LATE and not depth.paused


def state_of(queue: FoundQueue, depth: QueueDepth | str, cause: str = "") -> tuple[str, str]:
    """Return the state of a queue in the words of the dashboard, and their style.

    Args:
        queue: The queue.
        depth: The number of its messages by state; a text says why it is unknown.
        cause: Why it is late or fails; empty if it does neither.
    """
    if not isinstance(depth, str):
        if depth.paused:
            return " ".join([PAUSED.label, *_pause(depth)]), _STYLES[PAUSED.tone]
        if is_late(depth):
            # A minute makes it late in the dashboard, but here is room to say for how long.
            return f"{span(depth.oldest_due_age)} {OVERDUE.label}", _STYLES["bad"]
        if cause:
            return FAILING.label, _STYLES["bad"]
    state = states(depth, queue.kind)[0]
    return state.label, _STYLES[state.tone]


def _pause(depth: QueueDepth) -> list[str]:
    """Return for how long a queue has been paused, if that is known."""
    return [] if depth.paused_for is None else [f"for {span(depth.paused_for)}"]


def _lines(
    queue: FoundQueue,
    depth: QueueDepth,
    next_due_at: datetime | None,
    now: datetime,
    settings: QueueSettings | None,
    cause: str = "",
) -> list[tuple[str, str]]:
    lines = [
        ("ready", f"{depth.ready:,}"),
        ("delayed", f"{depth.delayed:,}"),
        ("leased", f"{depth.leased:,}"),
    ]
    if queue.kind == "delayed":
        if depth.quarantined is not None:
            lines.append(("unreadable", f"{depth.quarantined:,}"))
        return [*lines, ("next due", moment_text(next_due_at, now))]
    lines += [
        ("dead", f"{depth.dead:,}"),
        ("oldest due", f"{span(depth.oldest_due_age)} ago" if depth.ready else "-"),
    ]
    if cause:
        lines.append(("why", cause))
    lines.append(("paused", ", ".join(["yes", *_pause(depth)]) if depth.paused else "no"))
    return lines if settings is None else [*lines, *setting_lines(settings)]
