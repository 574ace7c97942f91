"""The Lua scripts: their declarations, which are the contract, and their texts, one file each."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script. ``keys`` and ``args`` name its KEYS and ARGV in order; a last name that ends in ``...`` repeats.

    Attributes:
        name: The file in ``lua/delayed``.
        repeatable: Running it twice does the same as running it once, so a lost answer is no reason to give up.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    repeatable: bool = False

    @cached_property
    def text(self) -> str:
        """The whole script, parts included."""
        folder = files("delayq").joinpath("lua", "delayed")
        body = folder.joinpath(f"{self.name}.lua").read_text("utf-8")
        return _INCLUDE.sub(lambda part: folder.joinpath("include", f"{part[1]}.lua").read_text("utf-8"), body)

    @cached_property
    def sha(self) -> str:
        """What the server calls it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


OFFER = Script("offer", ("timeout", "ordered", "channel"), ("listed", "delay_us...", "payload..."))
TRANSFER = Script(
    "transfer",
    ("ready", "timeout", "ordered", "quarantine", "taken", "leases", "leased"),
    ("limit", "take", "keep_ms", "lease_us", "call"),
)
RECOVER = Script("recover", ("taken",), ("fence_ms",), repeatable=True)
GIVE_BACK = Script("give_back", ("ready", "marker"), ("payload...",), repeatable=True)
RESYNC = Script("resync", ("timeout...", "leases...", "ready..."), (), repeatable=True)
CANCEL = Script("cancel", ("timeout", "ordered"), ("stale", "record..."))
RESCHEDULE = Script("reschedule", ("timeout", "channel"), ("record", "delay_us"))
POLL_PENDING = Script("poll_pending", ("timeout", "ordered", "quarantine"), ("limit", "listed"))
POLL_LAST = Script("poll_last", ("timeout", "ordered", "destination"), ("listed",))
EXPIRE = Script("expire", ("timeout", "ordered"), ("ttl_ms",), repeatable=True)
ACK = Script("ack", ("leases", "leased"), ("token...",))
NACK = Script("nack", ("leases", "leased", "timeout", "ordered", "channel"), ("token", "delay_us", "listed"))
EXTEND = Script("extend", ("leases",), ("token", "lease_us"), repeatable=True)
RELEASE = Script("release", ("ready", "leases", "leased"), ("token...",), repeatable=True)

ALL = (
    OFFER,
    TRANSFER,
    RECOVER,
    GIVE_BACK,
    RESYNC,
    CANCEL,
    RESCHEDULE,
    POLL_PENDING,
    POLL_LAST,
    EXPIRE,
    ACK,
    NACK,
    EXTEND,
    RELEASE,
)
