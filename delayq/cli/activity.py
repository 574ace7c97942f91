"""The commands ``history`` and ``workers``: the events of reliable queues, and their processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq.admin.catalog import list_workers
from delayq.cli.options import (
    AsJson,
    ReliableOnly,
    ReliableOrAll,
    Url,
)
from delayq.cli.output import (
    CommandFailed,
    duration_text,
    moment_cell,
    moment_json,
    moment_text,
    print_json,
    say,
    show_fields,
    show_table,
    span,
    sparkline,
)
from delayq.cli.running import at_server_time
from delayq.errors import ServerRefused
from delayq.stats import Activity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from delayq import Attempt, Client, MessageHistory
    from delayq.stats import WorkerInfo


_HAVE_HISTORY = "have a history"
_COUNTS = ("offered", "handled", "failed", "dead", "expired")
_HISTORY_COLUMNS = ("from", *_COUNTS, "late p50", "late p99", "took p50", "took p99")
# The largest number of rows in the table.
_MAX_ROWS = 12


def history(
    queue: ReliableOnly,
    minutes: Annotated[
        int | None,
        typer.Option(min=1, max=1440, help="Show the last minutes. 60 unless --hours is given."),
    ] = None,
    hours: Annotated[
        int | None, typer.Option(min=1, max=720, help="Show the last hours instead.")
    ] = None,
    id: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Show what is known about one message: its attempts, as far as the queue keeps"
            " them.",
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened in a reliable queue, in all processes: by minutes or by hours.

    Clients report every five seconds, so the newest figures may be incomplete. Several minutes or
    hours share a row; with `--json`, each has a line. Latencies are the time from
    when a message was due until it was handed out, and the run time of its handler.

    Exit status: 0, or 1 if nothing happened, or nothing is known about the message.

    Example: `delayq history mails --hours 24`
    """
    queue.check_reliable(_HAVE_HISTORY)
    if minutes is not None and hours is not None:
        raise CommandFailed("use either --minutes or --hours")
    if id is not None:
        _of_message(queue, id, url, as_json=as_json)
        return

    async def read(client: Client) -> list[Activity]:
        return await (await queue.existing(client, _HAVE_HISTORY)).activity(
            minutes=minutes, hours=hours
        )

    activity, now = at_server_time(url, read)
    sums = Activity.total(activity)
    is_empty = not any(getattr(sums, name) for name in _COUNTS)
    if as_json:
        for period in activity:
            print_json(_activity_facts(period))
    elif is_empty:
        say(f"nothing happened in the last {span(sums.seconds)}")
    else:
        show_fields(
            [
                (name, f"{sparkline([getattr(period, name) for period in activity])} {total:,}")
                for name in _COUNTS
                if (total := getattr(sums, name))
            ]
        )
        at_a_time = -(-len(activity) // _MAX_ROWS)
        parts = [activity[at : at + at_a_time] for at in range(0, len(activity), at_a_time)]
        rows = [_activity_row(Activity.total(part), now) for part in parts]
        show_table(_HISTORY_COLUMNS, rows)
    raise typer.Exit(1 if is_empty else 0)


def _of_message(queue: ReliableOnly, id: str, url: str | None, *, as_json: bool) -> None:  # noqa: A002
    async def read(client: Client) -> MessageHistory | None:
        return await (await queue.existing(client, _HAVE_HISTORY)).history(id)

    history, now = at_server_time(url, read)
    if history is None:
        say(f"nothing is known about message {id!r}")
        raise typer.Exit(1)
    if as_json:
        print_json(
            {
                "id": history.id,
                "state": history.state,
                "offered_at": moment_json(history.offered_at),
                "finished_at": moment_json(history.finished_at),
                "error": history.error,
                "attempts": [
                    {
                        **vars(attempt),
                        "started_at": moment_json(attempt.started_at),
                        "finished_at": moment_json(attempt.finished_at),
                    }
                    for attempt in history.attempts
                ],
            }
        )
        return
    facts = [
        ("id", history.id),
        ("state", history.state),
        ("offered", moment_text(history.offered_at, now)),
        ("finished", moment_text(history.finished_at, now)),
        ("error", history.error or "-"),
    ]
    show_fields([(name, text) for name, text in facts if text != "-"])
    if history.attempts:
        rows = [_attempt(attempt, now) for attempt in history.attempts]
        show_table(("attempt", "started", "took", "worker", "error"), rows, wide=["error"])


def _attempt(attempt: Attempt, now: datetime) -> list[str]:
    started_at, finished_at = attempt.started_at, attempt.finished_at
    took = (
        None
        if started_at is None or finished_at is None
        else (finished_at - started_at).total_seconds()
    )
    return [
        str(attempt.number),
        moment_cell(started_at, now),
        duration_text(took),
        attempt.worker or "-",
        attempt.error or "-",
    ]


def _activity_row(activity: Activity, now: datetime) -> list[str]:
    late, handling = activity.lateness, activity.handling
    return [
        moment_cell(activity.start, now),
        *(f"{getattr(activity, name):,}" for name in _COUNTS),
        *(duration_text(latency) for latency in (late.p50, late.p99, handling.p50, handling.p99)),
    ]


def _activity_facts(activity: Activity) -> dict[str, Any]:
    return {
        "start": moment_json(activity.start),
        "seconds": activity.seconds,
        **{name: getattr(activity, name) for name in _COUNTS},
        "lateness_p50": activity.lateness.p50,
        "lateness_p99": activity.lateness.p99,
        "handling_p50": activity.handling.p50,
        "handling_p99": activity.handling.p99,
    }


_WORKER_COLUMNS = ("process", "delayq", "up", "seen", "slots", "queue", "running", "longest")


def workers(
    queue: ReliableOrAll = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the processes that work on reliable queues, and what they handle.

    A process that dies stays in the list for up to a minute. `--json` also prints the messages
    that each of them handles: the 20 that have run longest.

    Exit status: 0, or 1 if there are none.

    Example: `delayq workers mails`
    """
    name = None
    if queue is not None:
        queue.check_reliable("have workers")
        name = queue.name

    async def read(client: Client) -> list[WorkerInfo]:
        if queue is not None:
            await queue.check_existence(client)
        return await list_workers(client, name)

    try:
        entries, now = at_server_time(url, read)
    except ServerRefused as error:
        hint = (
            "; without +scan, name a queue: delayq workers NAME" if "'scan'" in str(error) else ""
        )
        raise CommandFailed(f"{error}{hint}") from error
    if as_json:
        for entry in entries:
            print_json(_worker_facts(entry, now))
    elif entries:
        show_table(_WORKER_COLUMNS, _worker_rows(entries, now), wide=["queue", "longest"])
        for (host, pid), (*_, last) in _by_process(entries).items():
            if (blocked := last.blocked) is not None:
                ago = span(max(0.0, (now - blocked.until).total_seconds()))
                say(
                    f"process {pid} on {host}: its event loop was blocked for"
                    f" {span(blocked.seconds)} by {blocked.code}, {ago} ago"
                )
    else:
        say("no workers")
    raise typer.Exit(0 if entries else 1)


def _worker_facts(worker: WorkerInfo, now: datetime) -> dict[str, Any]:
    return {
        **vars(worker),
        "blocked": None
        if worker.blocked is None
        else {**vars(worker.blocked), "until": moment_json(worker.blocked.until)},
        "messages": [
            {**vars(message), "since": moment_json(message.since)} for message in worker.messages
        ],
        "started_at": moment_json(worker.started_at),
        "seen_at": moment_json(worker.seen_at),
        "silent_for": worker.silence(now),
    }


def _by_process(workers: Sequence[WorkerInfo]) -> dict[tuple[str, int], list[WorkerInfo]]:
    """Return the clients of each process, the one that has reported last at the end."""
    processes: dict[tuple[str, int], list[WorkerInfo]] = {}
    for worker in sorted(workers, key=lambda worker: worker.seen_at):
        processes.setdefault((worker.host, worker.pid), []).append(worker)
    return dict(sorted(processes.items()))


def _worker_rows(workers: Sequence[WorkerInfo], now: datetime) -> Iterator[list[str]]:
    """Yield a row for each client; the facts of a process are in its first one."""

    def ago(at: datetime) -> str:
        return span(max(0.0, (now - at).total_seconds()))

    for (host, pid), clients in _by_process(workers).items():
        last = clients[-1]
        running, slots = sum(client.running for client in clients), last.process_slots
        silence = last.silence(now)
        facts = [
            f"{host}:{pid}",
            last.version,
            ago(min(client.started_at for client in clients)),
            f"{ago(last.seen_at)} ago" if silence is None else f"silent for {span(silence)}",
            f"{running:,} of {slots:,}" if slots else "-",
        ]
        for worker in sorted(clients, key=lambda worker: worker.queue):
            first = worker.messages[0] if worker.messages else None
            longest = "-" if first is None else f"{first.id} {ago(first.since)}"
            yield [*facts, worker.queue, f"{worker.running:,}", longest]
            facts = [""] * len(facts)
