"""Runs the demo: starts the two processes, keeps the ledger, and cleans up."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import anyio

import delayq
from delayq.cli.demo.children import child
from delayq.cli.demo.figures import Ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq.cli.demo.children import Child
    from delayq.cli.demo.figures import Result

PATIENCE = 15.0
"""Seconds after the longest delay in which a message may still arrive."""
# For removing the queue after an error or Ctrl-C, seconds.
_CLEAR_WITHIN = 3.0


@dataclass(frozen=True)
class Plan:
    """The demo to run: ``messages`` with delays of 0 to ``max_delay`` seconds, on the server at ``url``, shown as ``server``."""

    messages: int
    max_delay: float
    url: str
    server: str


class View(Protocol):
    """The output that shows the ledger while it fills."""

    interval: float
    """Seconds between two calls of :meth:`show`."""

    def show(self, ledger: Ledger) -> None:
        """Show the progress."""


async def run(plan: Plan, view: View, patience: float = PATIENCE) -> Result:
    """Run the demo once.

    Args:
        plan: The demo to run.
        view: The output.
        patience: Seconds after the longest delay. Messages that have not arrived by then count as lost.

    Raises:
        CommandFailed: One of the processes failed.
        DelayqError: The server cannot be reached.
    """
    ledger = Ledger()
    name = f"delayq-demo-{secrets.token_hex(6)}"
    async with delayq.connect(plan.url):
        pass  # problems with the server show up before any process is started
    async with _removed_at_the_end(plan.url, name):
        async with (
            child("consumer", plan.url, name) as consumer,
            child("producer", plan.url, name, str(plan.messages), str(plan.max_delay)) as producer,
        ):
            # In this order: the consumer is ready when it has what the producer offers to warm up.
            await producer.wait_until_ready(ledger)
            await consumer.wait_until_ready(ledger)
            started = time.monotonic()
            await _deliver(producer, consumer, ledger, view, plan, patience)
            seconds = time.monotonic() - started
            await consumer.finish(ledger)
        await _look_for_duplicates(plan.url, name, ledger)
    view.show(ledger)
    return ledger.result(seconds, plan.server)


async def _deliver(producer: Child, consumer: Child, ledger: Ledger, view: View, plan: Plan, patience: float) -> None:
    """Start the producer, and follow both processes until all messages have arrived or the time is up."""
    # Plain tasks, not a task group, so that an error is raised as it is.
    arriving = asyncio.create_task(consumer.follow(ledger, until=lambda: ledger.delivered >= plan.messages))
    showing = asyncio.create_task(_show(view, ledger))
    try:
        producer.begin()
        await producer.follow(ledger)
        if ledger.offered < plan.messages:
            raise producer.failed()
        await asyncio.wait({arriving}, timeout=plan.max_delay + patience)
        if arriving.done():
            arriving.result()
    finally:
        arriving.cancel()
        showing.cancel()
        await asyncio.gather(arriving, showing, return_exceptions=True)


async def _show(view: View, ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(view.interval)
        view.show(ledger)


async def _look_for_duplicates(url: str, name: str, ledger: Ledger) -> None:
    """Count messages that are still in the queue although they have arrived."""
    async with delayq.connect(url) as client:
        queue = client.delayed_queue(name)
        for message in await queue.pending.read_all() + await queue.ready.read_all():
            ledger.left_over(message["number"])


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
