"""Helpers for the adapters of limits.

Each adapter is a program in the environment of its peer, driven by ``benchmarks.limits``.

Run as ``offer URL TASK``, it offers what the lines on its input ask for, and answers each with a
line. Run as ``handle URL TASK FILE``, it is a worker whose handler records in the file when it
started and ended, and with which message. The task is JSON, see :class:`Task`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

FLUSH_SECONDS = 0.02


@dataclass(frozen=True)
class Task:
    """The limits of a load, and the work of its handlers.

    Attributes:
        concurrency: How many messages may run at once; None means as many as workers can.
        rate: How many messages may start within a second; None means as many as workers can.
        by_tenant: Whether each tenant has these limits for itself, if the peer can do that.
        handler: How long a handler takes, in seconds.
        slots: How many messages a worker handles at once.
        keep: Which of several messages of one tenant is handled, if they are offered within
            ``window`` seconds: "first", "last", or "" for all of them.
    """

    concurrency: int | None
    rate: int | None
    by_tenant: bool
    handler: float
    slots: int
    keep: str = ""
    window: float = 1.0


@dataclass(frozen=True)
class Batch:
    """Messages to offer: ``count`` of them with consecutive numbers, of one tenant."""

    first: int
    count: int
    tenant: str

    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


class Notes:
    """The handlers' records: start, end and number as doubles, appended to a file by a thread, or
    immediately in child processes, which have no such thread.
    """

    def __init__(self, file: str) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._records: list[float] = []
        self._at_once = False

    def by_thread(self) -> Notes:
        threading.Thread(target=self._flush_on, daemon=True).start()
        return self

    def at_once(self) -> Notes:
        self._at_once = True
        return self

    def add(self, started: float, number: int) -> None:
        """Record that this message was handled until now."""
        if self._at_once:
            os.write(self._fd, struct.pack("<3d", started, time.time(), number))
        else:
            # Not +=, which would bring back a list that the thread has just taken away.
            self._records.extend((started, time.time(), number))

    def _flush_on(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            records, self._records = self._records, []
            # A handler that has just looked up the old list has added to it by then.
            time.sleep(0.001)
            os.write(self._fd, struct.pack(f"<{len(records)}d", *records))


async def _offer(opened: AbstractAsyncContextManager[Callable[[Batch], Any]]) -> None:
    async with opened as offer:
        print(json.dumps({"ready": True}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if (done := offer(Batch(**json.loads(line)))) is not None:
                await done
            print(json.dumps({"offered": time.time()}), flush=True)


def _end_with_the_driver() -> None:
    os.read(0, 1)
    # This also ends the processes that the adapter started, because the driver made it the leader
    # of a process group.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(
    offers: Callable[[str, Task], AbstractAsyncContextManager[Callable[[Batch], Any]]],
    handle: Callable[[str, Task, Notes], object],
) -> None:
    """Run the adapter as the command line says.

    Args:
        offers: Opens the peer for offers. Yields a function that offers some messages, and may
            return an awaitable.
        handle: Runs its worker until the process is killed.
    """
    task = Task(**json.loads(sys.argv[3]))
    if sys.argv[1] == "offer":
        asyncio.run(_offer(offers(sys.argv[2], task)))
    else:
        threading.Thread(target=_end_with_the_driver, daemon=True).start()
        handle(sys.argv[2], task, Notes(sys.argv[4]))
