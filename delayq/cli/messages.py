"""The commands about single messages."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq._reliable.failures import kept_text
from delayq._reliable.offer import OnDuplicate
from delayq.admin import retries
from delayq.admin.delayed import DelayedInspector
from delayq.admin.retries import BURIED
from delayq.cli.lookup import no_message
from delayq.cli.options import (
    AsJson,
    At,
    CodecName,
    Delay,
    Id,
    Queue,
    QueueCodec,
    ReliableOnly,
    RequiredUrl,
    Target,
    Url,
    codec_of,
    duration,
    headers_of,
    instant,
    value_of,
)
from delayq.cli.output import (
    CommandFailed,
    moment_json,
    moment_text,
    payload_json,
    print_json,
    progress,
    report,
    tell,
    text_of,
    write,
)
from delayq.cli.running import at_server_time, server_of, with_client
from delayq.errors import DuplicateMessage, MessageFailed, NoResult, ResultTimeout

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client, ReliableQueue


def offer(
    queue: Queue,
    value: Annotated[
        str,
        typer.Argument(metavar="VALUE", help="The value, as JSON; - reads it from standard input."),
    ],
    text: Annotated[
        bool,
        typer.Option("--text", help="Offer the value as a string, without parsing it as JSON."),
    ] = False,
    delay: Delay = None,
    at: At = None,
    id: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            "--id", help="Your own id for the message. Only one live message can have it."
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header. Repeatable."),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(min=0, max=9, help="The priority, from 0 (the default) to 9 (first)."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="The group of the message. Groups take turns.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help=(
                "The time to live: the message expires this long from now, in seconds or as"
                " 30m, 2h."
            ),
        ),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(min=1, help="The number of attempts after which it becomes a dead letter."),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="The longest that its handler may run."),
    ] = None,
    unique_for: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Keep the id taken for this long, even after the message is gone.",
        ),
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None, typer.Option(help="What to do if the id is taken: raise, by default.")
    ] = None,
    codec: CodecName = "json",
    encrypt: Annotated[
        bool,
        typer.Option(
            "--encrypt",
            help=(
                "Encrypt it with the first key in $DELAYQ_KEYS. A client with a name_mapper cannot"
                " read it."
            ),
        ),
    ] = False,
    url: RequiredUrl = None,
    as_json: AsJson = False,
) -> None:
    """Offer a message that is due now or later.

    Exit status: 0; 1 if the id is taken; 2 if the message was not stored.

    Example: `delayq offer mails '{"to": "ada@example.org"}' --delay 30m`
    """
    encoder = QueueCodec(codec, queue) if encrypt else codec_of(codec)
    payload = encoder.encode(value_of(value, as_text=text, codec=codec))
    wait, moment = duration(delay), instant(at)
    headers, ttl_s = headers_of(header), duration(ttl, "--ttl")
    timeout_s, window_s = duration(timeout, "--timeout"), duration(unique_for, "--unique-for")
    if not queue.is_reliable and any(
        option is not None
        for option in (
            id,
            headers,
            priority,
            group,
            ttl,
            max_attempts,
            timeout,
            unique_for,
            on_duplicate,
        )
    ):
        raise CommandFailed(
            "--id, --header, --priority, --group, --ttl, --max-attempts, --timeout, --unique-for"
            " and --on-duplicate need a reliable queue"
        )

    async def act(client: Client) -> tuple[str, datetime | None]:
        if not queue.is_reliable:
            receipt = await queue.delayed(client).offer(payload, wait, at=moment)
            return receipt.id, receipt.due_at
        reliable_queue = queue.reliable(client)
        name = await reliable_queue.offer(
            payload,
            wait,
            at=moment,
            id=id,
            headers=headers,
            priority=priority or 0,
            group=group,
            ttl=ttl_s,
            max_attempts=max_attempts,
            timeout=timeout_s,
            unique_for=window_s,
            on_duplicate=on_duplicate or "raise",
        )
        return name, await _due_at(reliable_queue, name)

    try:
        (name, due_at), now = at_server_time(server_of(url), act)
    except DuplicateMessage:
        tell(f"the id {id!r} is taken, and the message was not stored: see --on-duplicate")
        raise typer.Exit(1) from None
    _report_due(queue, name, due_at, now, as_json=as_json)


def result(
    queue: Queue,
    id: Id,  # noqa: A002
    timeout: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="How long to wait for the end of the message, in seconds or as 90s, 2m.",
        ),
    ] = "0",
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the result of a message, in a reliable queue that keeps results.

    Exit status: 0, or 1 if there is none: the message failed, is unknown, or has not ended yet.

    Example: `delayq result reports report-7 --timeout 1m`
    """
    seconds, decoder = duration(timeout, "--timeout") or 0.0, QueueCodec(codec, queue)

    async def read(client: Client) -> bytes | None:
        jobs = await queue.existing(client, "have results")
        payload: bytes | None = await jobs.result(id, seconds)
        return payload

    try:
        payload = with_client(url, read)
    except (MessageFailed, NoResult, ResultTimeout) as error:
        tell(str(error))
        raise typer.Exit(1) from None
    fields = {"value": None} if payload is None else payload_json(decoder, payload)
    report({"queue": queue.name, "id": id, **fields}, text_of(fields), as_json=as_json)


def cancel(
    queue: Queue,
    id: Id,  # noqa: A002
    running: Annotated[
        bool,
        typer.Option("--running", help="Cancel it even if a worker has it, and stop its handler."),
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a message that has not been delivered yet.

    Exit status: 0, or 1 if there is no message with that id, or a worker has it.

    Example: `delayq cancel mails welcome-3`
    """
    if running and not queue.is_reliable:
        raise CommandFailed("--running needs a reliable queue")

    async def act(client: Client) -> bool:
        if queue.is_reliable:
            return await (await queue.existing(client)).cancel(id, running=running)
        return await DelayedInspector.of(client, queue.name).cancel_record(id)

    if not with_client(url, act):
        raise no_message(id)
    report(
        {"queue": queue.name, "id": id, "cancelled": True}, f"{id} is cancelled", as_json=as_json
    )


def bury(
    queue: ReliableOnly,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="The ids of the messages.")
    ] = None,
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="All that have failed and whose last error contains this text."
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Why; it is stored with the dead letters.")
    ] = BURIED,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; count the messages that match.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make messages dead letters, which are not tried again, unless workers have them.

    Ctrl-C stops between two steps and reports how many are left.

    Exit status: 0; 1 if there were none; 130 after Ctrl-C.

    Example: `delayq bury mails --error 'no such address'`
    """
    queue.check_reliable("bury messages")
    if not reason:
        raise CommandFailed("--reason must not be empty")
    # The command that brings them back has to name what is stored.
    reason = kept_text(reason)
    if not ids and not error:
        raise CommandFailed("nothing to bury: pass ids, or --error with a part of the last error")
    if ids and (error is not None or dry_run):
        raise CommandFailed("--error and --dry-run choose failed messages: pass no ids")

    async def act(client: Client) -> tuple[int, int]:
        reliable_queue = await queue.existing(client)
        if ids:
            return len({*ids}), sum(await reliable_queue.bury_many(dict.fromkeys(ids), reason))
        with progress("examined", is_shown=not as_json) as show:
            return await retries.bury(
                await queue.stores(client), error or "", reason, dry_run=dry_run, progress=show
            )

    async def remaining_text(client: Client) -> str:
        failed = await retries.count(await queue.stores(client))
        return f"{failed:,} failed messages are left; run the command again to continue"

    matching, buried = with_client(url, act, interrupted=remaining_text)
    facts = {"queue": queue.name, "matched": matching, "buried": buried}
    text = f"buried: {buried:,}"
    if dry_run:
        text = f"matching: {matching:,}; nothing was changed"
        facts["dry_run"] = True
    elif buried < matching:
        text += f"; not there, or with a worker: {matching - buried:,}"
    if buried:
        back = f"delayq dead redrive {queue.argument} --reason {shlex.quote(reason)}"
        text += f"; bring them back with: {back}"
    report(facts, text, as_json=as_json)
    raise typer.Exit(0 if matching and (buried or dry_run) else 1)


def reschedule(
    queue: Queue,
    id: Id,  # noqa: A002
    delay: Delay = None,
    at: At = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Change the due time of a message that has not been delivered yet.

    Exit status: 0, or 1 if there is no message with that id, or a worker has it.

    Example: `delayq reschedule mails welcome-3 --delay 2h`
    """
    wait, moment = duration(delay), instant(at)
    if (wait is None) == (moment is None):
        raise CommandFailed("no due time given: pass --delay or --at")

    async def act(client: Client) -> tuple[bool, datetime | None]:
        if not queue.is_reliable:
            inspector = DelayedInspector.of(client, queue.name)
            due_at = await inspector.reschedule_record(id, wait, at=moment)
            return due_at is not None, due_at
        reliable_queue = await queue.existing(client)
        was_there = await reliable_queue.reschedule(id, wait, at=moment)
        return was_there, await _due_at(reliable_queue, id) if was_there else None

    (is_moved, due_at), now = at_server_time(url, act)
    if not is_moved:
        raise no_message(id)
    _report_due(queue, id, due_at, now, as_json=as_json)


def take(
    queue: Queue,
    wait: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="How long to wait for a message, in seconds or as 90s, 2m."
        ),
    ] = "0",
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Take one message that is due, and print its value.

    A message from a reliable queue is acknowledged once it has been printed; one from a delayed
    queue is gone at once.

    Exit status: 0, or 1 if no message was due.

    Example: `delayq take mails --wait 1m`
    """
    seconds = duration(wait, "--wait") or 0.0
    decoder = QueueCodec(codec, queue)

    async def act(client: Client) -> bool:
        if not queue.is_reliable:
            payload = await queue.delayed(client).poll(seconds)
            if payload is not None:
                _print_taken(queue, payload_json(decoder, payload), as_json=as_json)
            return payload is not None
        # One who waits may be there before the first message.
        jobs = queue.reliable(client) if seconds else await queue.existing(client)
        for message in await jobs.claim(1, seconds):
            # A message that cannot be read or printed goes back.
            async with message:
                value = payload_json(decoder, message.value)
                facts = {
                    "id": message.id,
                    "state": message.state,
                    "due_at": None,
                    "lease_ends_at": moment_json(message.lease_ends_at),
                    "attempt": message.attempt,
                    "priority": message.priority,
                    "group": message.group,
                    "enqueued_at": moment_json(message.enqueued_at),
                    "headers": message.headers,
                    **value,
                    "last_error": None,
                }
                _print_taken(queue, facts, as_json=as_json)
            return True
        return False

    if not with_client(url, act):
        tell("no message is due")
        raise typer.Exit(1)


async def _due_at(reliable_queue: ReliableQueue[bytes], id: str) -> datetime | None:  # noqa: A002
    """Return when a message is due; None if another client has it already."""
    message = await reliable_queue.get(id)
    return None if message is None or message.state == "leased" else message.due_at


def _report_due(
    queue: Target,
    id: str,  # noqa: A002
    due_at: datetime | None,
    now: datetime,
    *,
    as_json: bool,
) -> None:
    due = moment_text(due_at, now, zone=True) if due_at is not None else "now"
    report(
        {"queue": queue.name, "id": id, "due_at": moment_json(due_at)},
        f"{id}  due {due}",
        as_json=as_json,
    )


def _print_taken(queue: Target, facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"queue": queue.name, **facts})
    else:
        # It is gone from the queue, so that all of it is shown, even if it is encrypted.
        write(text_of({name: fact for name, fact in facts.items() if name != "encrypted"}))
