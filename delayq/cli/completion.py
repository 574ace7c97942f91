"""Completes the names of queues in a shell, from the server if it answers at once."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import typer  # noqa: TC002 - typer itself reads it

import delayq
from delayq.admin.catalog import collect_queues
from delayq.client import URL_VARIABLE
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from delayq.admin.catalog import FoundQueue, QueueKind

# How long a shell waits for names, seconds.
_PATIENCE = 1.0
_BEFORE = "_DELAYQ_COMPLETE_AFTER"
# Zsh evaluates the names that it is given, and anyone who may offer can choose one: only characters
# that mean nothing to any shell.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def queue_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the arguments for queues on the server that begin with ``incomplete``.

    None if there is no address, or the server does not answer. Of a server with many keys, those
    found in a second. Names with other characters than ASCII letters, digits and ``_@%+=:,./-``
    are left out, because a shell might carry them out.
    """
    return _names(context, incomplete, ("delayed", "reliable"))


def reliable_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the arguments for reliable queues, as :func:`queue_names` does."""
    return _names(context, incomplete, ("reliable",))


def delayed_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the arguments for delayed queues, as :func:`queue_names` does."""
    return _names(context, incomplete, ("delayed",))


def _names(context: typer.Context, incomplete: str, kinds: tuple[QueueKind, ...]) -> list[str]:
    option = context.params.get("url") or context.find_root().params.get("url")
    url = option or os.environ.get(URL_VARIABLE)
    if not url or url.startswith("embedded:"):
        return []
    # A line on stderr would be in the middle of the command that is being typed.
    logging.disable()
    queues: set[FoundQueue] = set()
    with suppress(DelayqError, TimeoutError, OSError):
        asyncio.run(_collect(url, queues))
    before = os.environ.get(_BEFORE, "")
    arguments = sorted(
        queue.argument
        for queue in queues
        if queue.kind in kinds and _PLAIN.fullmatch(queue.argument)
    )
    return [
        argument[len(before) :]
        for argument in arguments
        if argument.startswith(before + incomplete)
    ]


def join_words() -> None:
    """Join words that bash has split at colons, before they are read from the environment.

    Bash replaces only what comes after the last colon, so of the word to be completed only that
    remains, and what is before it is kept apart.
    """
    words = os.environ.get("COMP_WORDS", "").split("\n")
    if os.environ.get("_DELAYQ_COMPLETE") != "complete_bash" or ":" not in words:
        return
    rejoined: list[str] = []
    current = int(os.environ["COMP_CWORD"])
    for number, word in enumerate(words[: current + 1]):
        if rejoined and (word == ":" or words[number - 1] == ":"):
            rejoined[-1] += word
        else:
            rejoined.append(word)
    before, colon, rejoined[-1] = rejoined[-1].rpartition(":")
    place = str(len(rejoined) - 1)
    os.environ |= {"COMP_WORDS": "\n".join(rejoined), "COMP_CWORD": place, _BEFORE: before + colon}


async def _collect(url: str, queues: set[FoundQueue]) -> None:
    async with asyncio.timeout(_PATIENCE), delayq.connect(url) as client:
        await collect_queues(client, queues)
