"""The commands about dead letters: ``dead list``, ``dead redrive``, ``dead purge``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq.admin import letters as admin
from delayq.admin.letters import GroupBy, LetterQuery
from delayq.cli._typer import HelpfulGroup
from delayq.cli.lookup import payload_of
from delayq.cli.options import (
    AsJson,
    CodecName,
    MaxRows,
    Offset,
    QueueCodec,
    ReliableOnly,
    Target,
    Url,
    UrlBefore,
    Yes,
    duration,
)
from delayq.cli.output import (
    CommandFailed,
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
    span,
)
from delayq.cli.queues import confirm
from delayq.cli.running import at_server_time, clock, with_client

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from delayq import Client, DeadLetter
    from delayq.admin.letters import LetterGroup
    from delayq.codecs import Codec

dead: typer.Typer = typer.Typer(cls=HelpfulGroup)

_HAVE_LETTERS = "have dead letters"
# Seconds. More than the age of any letter, but still within the range of dates.
_LONGEST = 100 * 365 * 86_400
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="The ids of the dead letters. Defaults to all of them."),
]
Error = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only those whose last error contains this text."),
]
Reason = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Only those whose reason contains this text.")
]
OlderThan = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Only those that died this long ago or longer: 1h, 7d."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; count the letters that match.")
]


@dataclass(frozen=True)
class _Choice:
    """The letters that the options of a command choose."""

    error: str
    reason: str
    older_than: float | None

    @classmethod
    def of(cls, error: str | None, reason: str | None, older_than: str | None) -> _Choice:
        for option, text in (("--error", error), ("--reason", reason)):
            # It would choose every letter, as when a script's variable is unset.
            if text == "":
                raise CommandFailed(f"{option} must not be empty: leave it out to choose all")
        seconds = duration(older_than, "--older-than")
        if seconds is not None and not 0 <= seconds < _LONGEST:
            raise CommandFailed(f"--older-than must be from 0 to 100 years, not {older_than}")
        return cls(error or "", reason or "", seconds)

    @property
    def is_all(self) -> bool:
        return not self.error and not self.reason and self.older_than is None

    def __str__(self) -> str:
        parts = [
            f"{name} contains {text!r}"
            for name, text in (("error", self.error), ("reason", self.reason))
            if text
        ]
        if self.older_than is not None:
            parts.append(f"age is at least {span(self.older_than)}")
        return " and ".join(parts)

    async def query(self, client: Client) -> LetterQuery:
        if self.older_than is None:
            return LetterQuery(self.error, self.reason)
        latest = await clock(client) - timedelta(seconds=self.older_than)
        return LetterQuery(self.error, self.reason, latest)


@dead.callback()
def of_dead_letters(url: UrlBefore = None) -> None:
    """List, redrive or purge the dead letters of a reliable queue.

    Example: `delayq dead list mails`
    """


@dead.command("list")
def list_dead(
    queue: ReliableOnly,
    limit: MaxRows = 20,
    offset: Offset = 0,
    error: Error = None,
    reason: Reason = None,
    older_than: OlderThan = None,
    group_by: Annotated[
        GroupBy | None,
        typer.Option(
            "--group-by", help="Count the letters by error, by its type, or by reason instead."
        ),
    ] = None,
    long: Annotated[
        bool,
        typer.Option("--long", "-l", help="Show all fields of each, with headers and tracebacks."),
    ] = False,
    codec: CodecName = "json",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first, or count them by their cause.

    Exit status: 0, or 1 if there are none.

    Example: `delayq dead list mails --group-by error`
    """
    decoder = QueueCodec(codec, queue)
    choice = _Choice.of(error, reason, older_than)
    if group_by is not None:
        _show_groups(queue, group_by, choice, url, limit, offset, as_json=as_json)
        return

    async def read(client: Client) -> tuple[list[DeadLetter[bytes]], int | None]:
        letters = (await queue.existing(client, _HAVE_LETTERS)).dead
        if choice.is_all:
            return await letters.list(offset=offset, limit=limit), await letters.size()
        query = await choice.query(client)
        # One more, to know whether there are more.
        stores = await queue.stores(client)
        return await admin.find(stores, query, offset=offset, limit=limit + 1), None

    (letters, size), now = at_server_time(url, read)
    page = letters[:limit]
    if as_json:
        for letter in page:
            print_json(_facts(letter, decoder))
    elif not page:
        say("no dead letters")
    else:
        _show(page, decoder, now, long=long)
        total = "more" if size is None else f"{size:,}"
        if not long and (size or len(letters)) > len(page):
            say(
                f"{offset + 1:,} to {offset + len(page):,} of {total}; use --offset and --limit"
                " for more"
            )
    raise typer.Exit(0 if page else 1)


def _show(
    letters: list[DeadLetter[bytes]], decoder: Codec[Any], now: datetime, *, long: bool
) -> None:
    if not long:
        columns = ["id", "died", "attempts", "reason", "error", "value"]
        rows = [_row(letter, decoder, now) for letter in letters]
        if not any(letter.error for letter in letters):
            index = columns.index("error")
            for line in (columns, *rows):
                line.pop(index)
        show_table(columns, rows, wide=["reason", "error", "value"])
        return
    for number, letter in enumerate(letters):
        if number:
            say("")
        _show_long(letter, decoder, now)


def _show_groups(
    queue: Target,
    by: GroupBy,
    choice: _Choice,
    url: str | None,
    limit: int,
    offset: int,
    *,
    as_json: bool,
) -> None:
    async def read(client: Client) -> list[LetterGroup]:
        queue.check_reliable(_HAVE_LETTERS)
        await queue.check_existence(client)
        stores = await queue.stores(client)
        with progress("counted", is_shown=not as_json) as show:
            return await admin.groups(stores, by, await choice.query(client), progress=show)

    groups, now = at_server_time(url, read)
    page = groups[offset : offset + limit]
    if as_json:
        for group in page:
            moments = {"first_at": moment_json(group.first), "last_at": moment_json(group.last)}
            print_json({by: group.cause, "count": group.count, **moments})
    elif not page:
        say("no dead letters")
    else:
        rows = [[f"{group.count:,}", moment_cell(group.last, now), group.cause] for group in page]
        show_table(("count", "last died", by), rows, wide=[by])
        uncounted = sum(group.count for group in groups) - sum(group.count for group in page)
        if uncounted:
            say(f"{uncounted:,} letters are in other groups; use --offset and --limit for more")
    raise typer.Exit(0 if page else 1)


@dead.command()
def redrive(
    queue: ReliableOnly,
    ids: Ids = None,
    error: Error = None,
    reason: Reason = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Move dead letters back to the queue, due now and with all their attempts.

    A dead letter stays if a live message has its id. Ctrl-C stops between two steps and reports how
    many are left.

    Exit status: 0; 1 if none was redriven; 130 after Ctrl-C.

    Example: `delayq dead redrive mails --error Timeout`
    """
    work = _Work("redriven", "redriven", queue, ids, _Choice.of(error, reason, older_than))
    work.check(dry_run=dry_run)
    work.run(url, dry_run=dry_run, as_json=as_json)


@dead.command()
def purge(
    queue: ReliableOnly,
    ids: Ids = None,
    error: Error = None,
    reason: Reason = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Drop dead letters for good. Ctrl-C stops between two steps and reports how many are left.

    Exit status: 0; 1 if there were none or you decline; 130 after Ctrl-C.

    Example: `delayq dead purge mails --older-than 30d`
    """
    work = _Work("purged", "dropped", queue, ids, _Choice.of(error, reason, older_than))
    work.check(dry_run=dry_run)
    condition = f" whose {work.choice}" if not work.choice.is_all else ""
    number = f"{len(ids):,}" if ids else "the" if condition else "all"
    confirm(f"Drop {number} dead letters of {queue.name}{condition} for good?", yes=yes or dry_run)
    work.run(url, dry_run=dry_run, as_json=as_json)


@dataclass(frozen=True)
class _Work:
    """Dead letters to redrive or purge, with a progress bar."""

    name: str
    words: str
    queue: Target
    ids: list[str] | None
    choice: _Choice

    def check(self, *, dry_run: bool) -> None:
        """Raise CommandFailed unless the options fit together."""
        self.queue.check_reliable(_HAVE_LETTERS)
        if self.ids and not all(self.ids):
            raise CommandFailed("an id must not be empty")
        if self.ids and not self.choice.is_all:
            raise CommandFailed("pass ids, or --error, --reason and --older-than, but not both")
        if self.ids and dry_run:
            raise CommandFailed("--dry-run counts letters by their cause and age: pass no ids")

    def run(self, url: str | None, *, dry_run: bool, as_json: bool) -> None:
        examined = 0

        async def act(client: Client) -> int:
            await self.queue.check_existence(client)
            with progress("checked" if dry_run else self.name, is_shown=not as_json) as show:

                def tell(done: int, total: int) -> None:
                    nonlocal examined
                    examined = done
                    show(done, total)

                return await (self._count if dry_run else self._act)(client, tell)

        async def remaining_text(client: Client) -> str:
            size = await self.queue.reliable(client).dead.size()
            return (
                f"{examined:,} dead letters were checked, {size:,} are left; run the command again"
                " to continue"
            )

        done = with_client(url, act, interrupted=remaining_text)
        if dry_run:
            facts = {"queue": self.queue.name, "matched": done, "dry_run": True}
            report(facts, f"matching: {done:,}; nothing was changed", as_json=as_json)
        else:
            report(
                {"queue": self.queue.name, self.name: done},
                f"{self.words}: {done:,}",
                as_json=as_json,
            )
        raise typer.Exit(0 if done else 1)

    async def _act(self, client: Client, tell: Callable[[int, int], None]) -> int:
        if not self.choice.is_all:
            act = admin.redrive if self.name == "redriven" else admin.purge
            stores = await self.queue.stores(client)
            return await act(stores, await self.choice.query(client), progress=tell)
        dead = self.queue.reliable(client).dead
        return await (dead.redrive if self.name == "redriven" else dead.purge)(
            self.ids, progress=tell
        )

    async def _count(self, client: Client, tell: Callable[[int, int], None]) -> int:
        stores = await self.queue.stores(client)
        return await admin.count(stores, await self.choice.query(client), progress=tell)


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
            for field, value in payload_json(codec, payload_of(letter)).items()
        },
    }


def _row(letter: DeadLetter[bytes], codec: Codec[Any], now: datetime) -> list[str]:
    return [
        letter.id,
        moment_cell(letter.died_at, now),
        str(letter.attempt),
        letter.reason,
        letter.error or "-",
        payload_text(codec, payload_of(letter)),
    ]


def _show_long(letter: DeadLetter[bytes], codec: Codec[Any], now: datetime) -> None:
    show_fields(
        [
            ("id", letter.id),
            ("died", moment_text(letter.died_at, now)),
            ("reason", letter.reason),
            ("error", letter.error or "-"),
            ("attempts", str(letter.attempt)),
            ("priority", str(letter.priority)),
            ("offered", moment_text(letter.enqueued_at, now)),
            *((f"header {name}", text) for name, text in letter.headers.items()),
            ("value", payload_text(codec, payload_of(letter))),
        ]
    )
    for line in letter.traceback.splitlines():
        say(f"  {line}")
