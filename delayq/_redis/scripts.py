"""The declaration of a Lua script, which is its contract, and calls to it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script. ``keys`` and ``args`` name its KEYS and ARGV in order; names at the end that end in ``...`` repeat.

    Attributes:
        name: The file in ``lua``, with its folder.
        repeatable: Whether running it twice has the same effect as running it once, so that it is retried if its answer is lost.
        followed_by: The script that undoes it, whose rights are checked along with its own.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    repeatable: bool = False
    followed_by: Script | None = None

    @cached_property
    def text(self) -> str:
        """The whole script, parts included. A part is looked up beside the script first, then among those that all share."""
        from importlib.resources import files  # noqa: PLC0415 - it takes a tenth of the time that importing delayq does

        root = files("delayq").joinpath("lua")
        folder = root.joinpath(*self.name.split("/")[:-1])

        def part(name: str) -> str:
            own = folder.joinpath("include", f"{name}.lua")
            return (own if own.is_file() else root.joinpath("include", f"{name}.lua")).read_text("utf-8")

        body = root.joinpath(*f"{self.name}.lua".split("/")).read_text("utf-8")
        return _INCLUDE.sub(lambda match: part(match[1]), body)

    @cached_property
    def sha(self) -> str:
        """The script's name on the server."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Request(NamedTuple):
    """A call to a script.

    Attributes:
        until: When to stop retrying it, on the event loop's clock. None: after the same time as any other call.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[str | bytes | int]
    until: float | None = None

    def __repr__(self) -> str:
        return f"<Request {self.script.name}, {len(self.args)} arguments>"
