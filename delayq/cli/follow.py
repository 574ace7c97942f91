"""The command ``follow``: shows how far a message is, until it has ended."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq.cli.options import AsJson, Id, ReliableOnly, Url, duration
from delayq.cli.output import following_bar, moment_json, print_json, say, tell
from delayq.cli.running import with_client
from delayq.errors import ResultTimeout

if TYPE_CHECKING:
    from delayq import Client, MessageEvent

_DOING = "be followed"
_UNKNOWN = "there is no such message, or it has ended, and the queue keeps nothing of it"


def follow(
    queue: ReliableOnly,
    id: Id,  # noqa: A002
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long to follow it, in seconds or as 90s, 2m."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Follow a message of a reliable queue until it has ended, with what its handler reports.

    How a message ended that is gone, is only known if the queue has `keep`.

    Exit status: 0 if it was handled; 1 if it became a dead letter, was dropped, or nothing is known
    of it, or if it has not ended in time.

    Examples: `delayq follow videos render-7`, `delayq follow videos render-7 --json`
    """
    queue.check_reliable(_DOING)
    seconds = None if timeout is None else duration(timeout, "--timeout")

    async def act(client: Client) -> MessageEvent | None:
        jobs = await queue.existing(client, _DOING)
        last = None
        with nullcontext(_print) if as_json else following_bar(id) as show:
            async for event in jobs.follow(id, seconds):
                last = event
                show(event)
        return last

    try:
        last = with_client(url, act)
    except ResultTimeout as error:
        tell(str(error))
        raise typer.Exit(1) from None
    assert last is not None
    if not as_json:
        why = last.error or (_UNKNOWN if last.state == "unknown" else "")
        say(f"{id} is {last.state}" + (f": {why}" if why else ""))
    raise typer.Exit(0 if last.state == "done" else 1)


def _print(event: MessageEvent) -> None:
    print_json(facts_of(event))


def facts_of(event: MessageEvent) -> dict[str, Any]:
    """Return an event for programs."""
    return {
        "id": event.id,
        "state": event.state,
        "attempt": event.attempt,
        "done": event.done,
        "total": event.total,
        "text": event.text,
        "at": moment_json(event.at),
        "error": event.error or None,
    }
