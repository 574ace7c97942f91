"""The disk of a server that delayq runs itself, which keeps its data beside its clients."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What new messages leave free, bytes: for acknowledgements, and for what is already on its way.
_RESERVE = 16 * 2**20
# On a smaller disk, they leave this part of it free.
_PARTS = 8
# Calls of this size that other clients may make at the same moment.
_AT_ONCE = 4
# With more bytes free than this, one look holds for a tenth of a second: it costs a tenth of a lone
# offer, and no single call is as large.
_PLENTY = 4 * 2**30
_LOOK_EVERY = 0.1
# About how many bytes a server counts as data although they are none.
_BUFFERS = 2**19
# How often the server is asked to shorten its file at most, seconds.
_ASK_EVERY = 5.0


class Disk:
    """Tells whether there is room for new messages.

    A server that syncs its file once a second confirms a write even if the file could not take it,
    and knows that the disk is full only for the next one. So new messages are refused before.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._asked_at = -math.inf
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
            self._plenty_until = now + _LOOK_EVERY
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

    def may_ask(self, now: float) -> bool:
        """Tell whether it is time to ask the server to shorten its file, and note that."""
        is_time = now >= self._asked_at + _ASK_EVERY
        if is_time:
            self._asked_at = now
        return is_time

    def can_shorten(self, facts: Mapping[str, str]) -> bool:
        """Tell whether the server's file would become much shorter, and has room, if rewritten."""
        try:
            data, file = int(facts["used_memory_dataset"]), int(facts["aof_current_size"])
        except (KeyError, ValueError):
            return False
        data = max(0, data - _BUFFERS)
        return data < self._free and file > 2 * data
