"""The protocol between the demo's processes: JSON lines, one object each.

To the parent, on stdout: ``{"ready": true}`` once; ``{"offered": [[number, delay_us, due_us], ...]}`` or ``{"arrived":
[[number, at_us], ...]}``; ``{"offset_us": ...}``; ``{"error": "..."}`` as the last one. From the parent, on stdin: one
line, when to begin. The end of stdin means: end. It comes also when the parent is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

WARM_UP = 0
"""The number of the warm-up message, which goes before the others."""
REPORT_EVERY = 0.1
"""Seconds between two reports. Reporting each message on its own would disturb the measurement."""
# The parent's reader takes lines of 64 KiB.
_PER_LINE = 500


class Parent:
    """The parent process, as seen by a child."""

    def __init__(self) -> None:
        self.begun: anyio.Event = anyio.Event()
        self.ended: anyio.Event = anyio.Event()

    def tell(self, **fields: Any) -> None:
        """Write one line. Blocks only while the parent does not read."""
        print(json.dumps(fields, separators=(",", ":")), flush=True)

    def tell_all(self, name: str, rows: list[Any]) -> None:
        """Write the rows, if there are any, and empty the list."""
        for at in range(0, len(rows), _PER_LINE):
            self.tell(**{name: rows[at : at + _PER_LINE]})
        rows.clear()

    async def listen(self, stdin: asyncio.StreamReader) -> None:
        if await stdin.readline():
            self.begun.set()
            await stdin.read()
        self.ended.set()

    @asynccontextmanager
    async def telling(self, name: str, rows: list[Any]) -> AsyncIterator[None]:
        """Write the rows that arrive during the block at intervals. Leaves the block early if the parent ends."""

        async def write() -> None:
            while True:
                await asyncio.sleep(REPORT_EVERY)
                self.tell_all(name, rows)

        async def watch() -> None:
            await self.ended.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            tasks.start_soon(watch)
            yield
            tasks.cancel_scope.cancel()
        self.tell_all(name, rows)


def run_child(work: Callable[[Parent], Awaitable[None]]) -> None:
    """Run a child process. A :class:`DelayqError` is reported to the parent as one line."""
    try:
        anyio.run(_run, work)
    except* BrokenPipeError:
        # The parent is gone, so there is no process to report it to, not even at exit, when Python flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _run(work: Callable[[Parent], Awaitable[None]]) -> None:
    stdin = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin.buffer
    )
    parent = Parent()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parent.listen, stdin)
            await work(parent)
            tasks.cancel_scope.cancel()
    except* DelayqError as group:
        parent.tell(error=str(_first(group)))
    finally:
        transport.close()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
