"""The commands about dead letters: ``dead list``, ``dead redrive``, ``dead purge``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq.cli.errors import CommandFailed
from delayq.cli.options import (
    AsJson,
    CodecName,
    Limit,
    Offset,
    ReliableOnly,
    Target,
    Url,
    Yes,
    codec_of,
)
from delayq.cli.output import (
    moment_cell,
    moment_json,
    moment_text,
    payload_json,
    payload_text,
    print_json,
    progress,
    report,
    say,
    show_fields,
    show_table,
)
from delayq.cli.queues import confirm
from delayq.cli.running import at_server_time, with_client
from delayq.errors import DecodeError

if TYPE_CHECKING:
    from datetime import datetime

    from delayq import Client, DeadLetter
    from delayq.codecs import Codec

dead: typer.Typer = typer.Typer(help="List, redrive or purge the dead letters of a reliable queue.")

_DOING = "have dead letters"
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="The ids of the dead letters. Defaults to all of them."),
]


@dead.command("list")
def list_dead(
    queue: ReliableOnly,
    limit: Limit = 20,
    offset: Offset = 0,
    long: Annotated[
        bool,
        typer.Option("--long", "-l", help="Show all fields of each, with headers and tracebacks."),
    ] = False,
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first.

    Exit status: 0, or 1 if there are none.
    """
    how = codec_of(codec)

    async def look(client: Client) -> tuple[list[DeadLetter[bytes]], int]:
        letters = queue.reliable(client, _DOING).dead
        return await letters.list(offset=offset, limit=limit), await letters.size()

    (letters, size), now = at_server_time(url, look)
    if as_json:
        for letter in letters:
            print_json(_facts(letter, how))
    elif not letters:
        say("no dead letters")
    elif long:
        for place, letter in enumerate(letters):
            if place:
                say("")
            _show_long(letter, how, now)
    else:
        columns = ("id", "died", "attempts", "reason", "value")
        show_table(
            columns, [_row(letter, how, now) for letter in letters], wide=["reason", "value"]
        )
        if size > len(letters):
            say(
                f"{offset + 1:,} to {offset + len(letters):,} of {size:,}; use --offset and --limit"
                " for more"
            )
    raise typer.Exit(0 if letters else 1)


@dead.command()
def redrive(queue: ReliableOnly, ids: Ids = None, url: Url = None, as_json: AsJson = False) -> None:
    """Move dead letters back to the queue, due now and with all their attempts.

    A dead letter stays if a live message has its id. Ctrl-C stops between two steps and reports how
    many are left.

    Exit status: 0; 1 if none was redriven; 130 after Ctrl-C.
    """
    _each("redriven", "redriven", ids, queue, url, as_json=as_json)


@dead.command()
def purge(
    queue: ReliableOnly,
    ids: Ids = None,
    yes: Yes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Drop dead letters for good. Ctrl-C stops between two steps and reports how many are left.

    Exit status: 0; 1 if there were none or you decline; 130 after Ctrl-C.
    """
    confirm(
        f"Drop {f'{len(ids):,}' if ids else 'all'} dead letters of {queue.name} for good?", yes=yes
    )
    _each("purged", "dropped", ids, queue, url, as_json=as_json)


def _each(
    name: str, words: str, ids: list[str] | None, queue: Target, url: str | None, *, as_json: bool
) -> None:
    """Redrive or purge dead letters, with a progress bar."""
    looked_at = 0

    async def act(client: Client) -> int:
        letters = queue.reliable(client, _DOING).dead
        if ids and not any(ids):
            raise CommandFailed("an id must not be empty")
        with progress(name, shown=not as_json) as show:

            def tell(done: int, total: int) -> None:
                nonlocal looked_at
                looked_at = done
                show(done, total)

            return await (letters.redrive if name == "redriven" else letters.purge)(
                ids or None, progress=tell
            )

    async def left(client: Client) -> str:
        size = await queue.reliable(client, _DOING).dead.size()
        return (
            f"{looked_at:,} dead letters were checked, {size:,} are left; run the command again to"
            " continue"
        )

    done = with_client(url, act, interrupted=left)
    report({"queue": queue.name, name: done}, f"{words}: {done:,}", as_json=as_json)
    raise typer.Exit(0 if done else 1)


def _payload(letter: DeadLetter[bytes]) -> bytes:
    """Return the payload that was offered, or whatever is left of it in a damaged letter."""
    try:
        return letter.value
    except DecodeError as error:
        return error.payload


def _facts(letter: DeadLetter[bytes], codec: Codec[Any]) -> dict[str, Any]:
    return {
        "id": letter.id,
        "reason": letter.reason,
        "error": letter.error,
        "traceback": letter.traceback,
        "attempt": letter.attempt,
        "died_at": moment_json(letter.died_at),
        "enqueued_at": moment_json(letter.enqueued_at),
        "headers": letter.headers,
        "priority": letter.priority,
        # The codec's error is renamed, because the letter's own error is above.
        **{
            "undecodable" if field == "error" else field: value
            for field, value in payload_json(codec, _payload(letter)).items()
        },
    }


def _row(letter: DeadLetter[bytes], codec: Codec[Any], now: datetime) -> list[str]:
    # How the last attempt ended says more than that all attempts were used.
    why = letter.error if letter.error and letter.reason == "attempts" else letter.reason
    return [
        letter.id,
        moment_cell(letter.died_at, now),
        str(letter.attempt),
        why,
        payload_text(codec, _payload(letter)),
    ]


def _show_long(letter: DeadLetter[bytes], codec: Codec[Any], now: datetime) -> None:
    show_fields(
        [
            ("id", letter.id),
            ("died", moment_text(letter.died_at, now)),
            ("reason", letter.reason),
            ("attempts", str(letter.attempt)),
            ("priority", str(letter.priority)),
            ("offered", moment_text(letter.enqueued_at, now)),
            *((f"header {name}", text) for name, text in letter.headers.items()),
            ("value", payload_text(codec, _payload(letter))),
        ]
    )
    for line in letter.traceback.splitlines():
        say(f"  {line}")
