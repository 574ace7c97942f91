"""Extends typer: shells complete the names of queues, from the server if it answers at once, and
help leaves out types that tell users nothing: ``<bool>`` of flags, ``<Target>`` of queues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer  # noqa: TC002 - typer itself reads it
from typer.core import TyperCommand, TyperGroup

import delayq
from delayq.admin.catalog import collect_queues
from delayq.client import URL_VARIABLE
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from delayq.admin.catalog import FoundQueue, QueueKind

# How long a shell waits for names, in seconds.
_TIMEOUT = 1.0
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


def url_before(context: typer.Context) -> str | None:
    """Return the address that was given before the command, the nearest to it if there are several:
    ``delayq --url URL queues``, ``delayq dead --url URL list mails``.
    """
    outer = context.parent
    while outer is not None:
        url: str | None = outer.params.get("url")
        if url:
            return url
        outer = outer.parent
    return None


def _names(context: typer.Context, incomplete: str, kinds: tuple[QueueKind, ...]) -> list[str]:
    option = context.params.get("url") or url_before(context)
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
    position = str(len(rejoined) - 1)
    os.environ |= {
        "COMP_WORDS": "\n".join(rejoined),
        "COMP_CWORD": position,
        _BEFORE: before + colon,
    }


async def _collect(url: str, queues: set[FoundQueue]) -> None:
    async with asyncio.timeout(_TIMEOUT), delayq.connect(url) as client:
        await collect_queues(client, queues)


# Help


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        elif param.name in ("queue", "queues"):
            # The name of the argument says what it is.
            param.display_type_rich = _no_type
    return params


def _no_type(ctx: Any) -> None:
    """Return no type. typer passes the context by its name."""


class HelpfulCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` among them."""
        return _without_types(super().get_params(ctx))


class HelpfulGroup(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` among them."""
        return _without_types(super().get_params(ctx))
