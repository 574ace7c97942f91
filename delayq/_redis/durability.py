"""Where writes are safe: on replicas, and on the disk, which must have room for them."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# How long a command that follows a script may hold back its reply, seconds.
BLOCKS_FOR = 2.0
# After this time writes count as not safe, ms. Redis set to ``everysec`` syncs once a second.
WITHIN_MS = int(BLOCKS_FOR * 1000)

# The space that new messages leave free, bytes: for acknowledgements, and calls in flight.
_RESERVE = 16 * 2**20
# On a smaller disk, they leave this part of it free.
_PARTS = 8
# Calls of this size that other clients may make at the same moment.
_AT_ONCE = 4
# With more bytes free than this, one check holds for a tenth of a second: it costs a tenth of a
# lone offer, and no single call is as large.
_PLENTY = 4 * 2**30
_CHECK_EVERY = 0.1
# About how many bytes a server counts as data although they are none.
_BUFFERS = 2**19
# How often the server is asked to shorten its file at most, seconds.
_SHORTEN_EVERY = 5.0


class Durability(NamedTuple):
    """What a write has to reach before it counts: a number of replicas, or else the disk."""

    replicas: int

    @property
    def command(self) -> tuple[str | int, ...]:
        """The command behind a script, which answers when, or how far, earlier writes are safe."""
        return ("WAIT", self.replicas, WITHIN_MS) if self.replicas else ("WAITAOF", 1, 0, WITHIN_MS)

    @property
    def probe(self) -> tuple[str | int, ...]:
        """A command that the server refuses if it cannot do that, and that waits for nothing."""
        # WAIT for zero replicas answers at once.
        return ("WAIT", 0, 1) if self.replicas else ("WAITAOF", 1, 0, 1)

    def failure(self, reply: Any) -> str:
        """Return why earlier writes are not safe, according to that reply; empty if they are."""
        if isinstance(reply, BaseException):
            return f"the server did not confirm durability: {reply}"
        if not self.replicas:
            return "" if reply[0] >= 1 else f"not on disk within {WITHIN_MS / 1000:g} s"
        if reply >= self.replicas:
            return ""
        return f"only {reply} of {self.replicas} replicas confirmed within {WITHIN_MS / 1000:g} s"


class Disk:
    """Tells whether there is room for new messages.

    A server that syncs its file once a second confirms a write even if the file could not take it,
    and knows that the disk is full only for the next one. So new messages are refused before.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._shortened_at = -math.inf
        self._free = 0
        self._plenty_until = -math.inf

    def lack(self, args: Sequence[str | bytes | int]) -> str:
        """Return why a call that stores these cannot be made now; empty if it can."""
        now = time.monotonic()
        if now < self._plenty_until:
            return ""
        try:
            disk = os.statvfs(self._directory)
        except OSError:
            # The server will say what is wrong.
            return ""
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        self._free = free
        if free > _PLENTY or not total:
            self._plenty_until = now + _CHECK_EVERY
            return ""
        size = sum(len(arg) for arg in args if not isinstance(arg, int))
        required = min(_RESERVE, total // _PARTS) + _AT_ONCE * size
        if free >= required:
            return ""
        return (
            f"the disk of {self._directory} is almost full: {free / 1e3:,.0f} kB are free, and a"
            f" new message needs {required / 1e3:,.0f} kB free; delete other files, or let workers"
            " handle messages"
        )

    def may_shorten(self, now: float) -> bool:
        """Tell whether the server may be asked now to shorten its file, and note that it is."""
        is_due = now >= self._shortened_at + _SHORTEN_EVERY
        if is_due:
            self._shortened_at = now
        return is_due

    def can_shorten(self, facts: Mapping[str, str]) -> bool:
        """Tell whether the server's file would become much shorter, and has room, if rewritten."""
        try:
            data, file = int(facts["used_memory_dataset"]), int(facts["aof_current_size"])
        except (KeyError, ValueError):
            return False
        data = max(0, data - _BUFFERS)
        return data < self._free and file > 2 * data
