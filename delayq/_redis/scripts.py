"""The Lua scripts, one file each, and the declarations of a delayed queue's scripts. A declaration is a script's contract."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script. ``keys`` and ``args`` name its KEYS and ARGV in order; names at the end that end in ``...`` repeat.

    Attributes:
        name: The file in ``lua``, with its folder.
        repeatable: Whether running it twice has the same effect as running it once, so that it is retried if its answer is lost.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    repeatable: bool = False

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


OFFER = Script("delayed/offer", ("timeout", "ordered", "channel"), ("listed", "delay_us...", "payload..."))
TRANSFER = Script(
    "delayed/transfer",
    ("ready", "timeout", "ordered", "quarantine", "fence", "leases", "leased", "turns"),
    ("limit", "take", "most_bytes", "lease_us", "each", "call", "signature"),
)
GIVE_BACK = Script(
    "delayed/give_back",
    ("ready", "timeout", "ordered", "leases", "leased", "fence"),
    ("fence_ms", "call", "places", "payload..."),
    repeatable=True,
)
SET_ASIDE = Script(
    "delayed/set_aside", ("quarantine", "leases", "leased", "fence"), ("fence_ms", "token", "payload"), repeatable=True
)
RESYNC = Script("resync", ("due...",), ("kind...",), repeatable=True)
CANCEL = Script("delayed/cancel", ("timeout", "ordered"), ("stale", "record..."))
RESCHEDULE = Script("delayed/reschedule", ("timeout", "channel"), ("record", "delay_us"))
PURGE = Script("delayed/purge", ("timeout", "ordered", "ready"), ("state",), repeatable=True)
POLL_PENDING = Script(
    "delayed/poll_pending",
    ("timeout", "ordered", "quarantine", "leases", "leased", "fence"),
    ("limit", "most_bytes", "listed", "lease_us", "token"),
)
POLL_LAST = Script("delayed/poll_last", ("timeout", "ordered", "quarantine", "destination"), ("listed", "limit"))
EXPIRE = Script("delayed/expire", ("timeout", "ordered"), ("ttl_ms",), repeatable=True)
ACK = Script("delayed/ack", ("leases", "leased"), ("token...",))
NACK = Script("delayed/nack", ("leases", "leased", "timeout", "ordered", "channel"), ("token", "delay_us", "listed"))
EXTEND = Script("delayed/extend", ("leases",), ("lease_us", "token..."), repeatable=True)
RELEASE = Script("delayed/release", ("ready", "timeout", "ordered", "leases", "leased"), ("token...",), repeatable=True)
MIGRATE = Script("delayed/migrate", ("timeout", "ordered"), ("rewrite", "before", "limit", "record..."), repeatable=True)

ALL = (
    OFFER,
    TRANSFER,
    GIVE_BACK,
    SET_ASIDE,
    RESYNC,
    CANCEL,
    RESCHEDULE,
    PURGE,
    POLL_PENDING,
    POLL_LAST,
    EXPIRE,
    ACK,
    NACK,
    EXTEND,
    RELEASE,
    MIGRATE,
)
