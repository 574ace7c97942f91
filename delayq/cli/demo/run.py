"""Runs the demo: starts the two processes, keeps the ledger, and cleans up."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import anyio

import delayq
from delayq.cli.demo.figures import Ledger, latest_offset
from delayq.cli.errors import CommandFailed
from delayq.cli.running import python
from delayq.client import URL_VARIABLE

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable

    from delayq.cli.demo.figures import Result

PATIENCE = 15.0
"""Seconds after the longest delay in which a message may still arrive."""
# How long a process may take to start and warm up, and to end when asked to, seconds.
_READY_WITHIN = 20.0
_END_WITHIN = 5.0
# How long removing the queue may take, seconds.
_CLEAR_WITHIN = 3.0
_EXCHANGES = 10


@dataclass(frozen=True)
class Plan:
    """``messages`` with delays of up to ``max_delay`` seconds, at ``url``, shown as ``server``."""

    messages: int
    max_delay: float
    url: str
    server: str


async def run(
    plan: Plan, show: Callable[[Ledger], None], interval: float, patience: float = PATIENCE
) -> Result:
    """Run the demo once, and call ``show`` every ``interval`` seconds, and at the end.

    Messages that have not arrived ``patience`` seconds after the longest delay count as lost.

    Raises:
        CommandFailed: One of the processes failed.
        DelayqError: The server cannot be reached.
    """
    ledger = Ledger()
    name = f"delayq-demo-{secrets.token_hex(6)}"
    # Problems with the server show up before any process is started.
    async with delayq.connect(plan.url) as client:
        ledger.set_offset(await _offset(client))
    async with _removed_at_the_end(plan.url, name):
        async with (
            _child("consumer", plan.url, name) as consumer,
            _child("producer", plan.url, name, str(plan.messages), str(plan.max_delay)) as producer,
        ):
            started = time.monotonic()
            # Plain tasks, not a task group, so that an error is raised as it is.
            showing = asyncio.create_task(_show(show, ledger, interval))
            arriving = asyncio.create_task(
                consumer.follow(ledger.arrive, lambda: ledger.delivered >= plan.messages)
            )
            try:
                await producer.follow(ledger.offer)
                if ledger.offered < plan.messages:
                    raise producer.failed()
                await asyncio.wait({arriving}, timeout=plan.max_delay + patience)
            finally:
                arriving.cancel()
                showing.cancel()
                await asyncio.gather(arriving, showing, return_exceptions=True)
            seconds = time.monotonic() - started
            await consumer.end(ledger.arrive)
            if consumer.process.returncode == 1:
                raise consumer.failed()
        async with delayq.connect(plan.url) as client:
            ledger.set_offset(await _offset(client))
            queue = client.delayed_queue(name)
            # A message that is still in the queue although it has arrived is a duplicate.
            for message in await queue.pending.read_all() + await queue.ready.read_all():
                ledger.left_over(message["number"])
    show(ledger)
    return ledger.result(seconds, plan.server)


async def _show(show: Callable[[Ledger], None], ledger: Ledger, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        show(ledger)


async def _offset(client: delayq.Client) -> int:
    """Estimate by how much the server's clock is ahead of ours, which is also the consumer's."""
    exchanges = [
        (time.time_ns() // 1000, round((await client.server_time()).timestamp() * 1_000_000))
        for _ in range(_EXCHANGES)
    ]
    return latest_offset(exchanges)


@asynccontextmanager
async def _removed_at_the_end(url: str, name: str) -> AsyncIterator[None]:
    """Remove the queue from the server after the block, even after an error or cancellation."""
    try:
        yield
    finally:
        # If the server is gone, the error already says so.
        with anyio.move_on_after(_CLEAR_WITHIN, shield=True), suppress(delayq.DelayqError):
            async with delayq.connect(url) as client:
                queue = client.delayed_queue(name)
                await queue.pending.clear()
                await queue.ready.clear()


@dataclass(frozen=True)
class _Child:
    """A process and its reports. Created by :func:`_child`."""

    role: str
    process: Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: IO[bytes]

    async def follow(
        self, note: Callable[..., None], until: Callable[[], bool] = lambda: False
    ) -> None:
        """Record the process's reports until ``until`` returns True or the process has ended."""
        while not until() and (line := await self.stdout.readline()):
            note(*json.loads(line))

    def failed(self) -> CommandFailed:
        """Return an error with the last line on stderr of a process that ended too early."""
        self.stderr.seek(0)
        words = self.stderr.read().decode(errors="replace").split("\n")
        last = next(
            (line for line in reversed(words) if line.strip()), "it ended without any output"
        )
        return CommandFailed(f"the {self.role} failed: {last}")

    async def end(self, note: Callable[..., None] = lambda *_: None) -> None:
        """Ask the process to end, record the rest of its reports, and kill it if it does not."""
        self.stdin.close()
        with anyio.move_on_after(_END_WITHIN):
            await self.follow(note)
            await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def _child(role: str, url: str, *arguments: str) -> AsyncIterator[_Child]:
    """Run a process on the server at ``url``, and wait until it is ready.

    It ends with the block, and if this process dies.
    """
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *python("delayq.cli.demo.children"),
            role,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # Not as an argument: other users see those, and it may contain a password.
            env=os.environ | {URL_VARIABLE: url},
            # Ctrl-C must reach only this process, which ends the others in order.
            process_group=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        child = _Child(role, process, process.stdin, process.stdout, stderr)
        try:
            with anyio.move_on_after(_READY_WITHIN) as starting:
                if not await child.stdout.readline():
                    raise child.failed()
            if starting.cancelled_caught:
                raise CommandFailed(f"the {role} was not ready within {_READY_WITHIN:g} s")
            yield child
        finally:
            with anyio.CancelScope(shield=True):
                await child.end()
