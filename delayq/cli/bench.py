"""The command ``bench``: measures how fast and punctual this server is, with a temporary queue."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from delayq import Offer
from delayq.admin.catalog import FoundQueue, QueueKind
from delayq.admin.doctor import clock_ahead
from delayq.cli.demo.figures import percentile
from delayq.cli.options import AsJson, Url, duration
from delayq.cli.output import CommandFailed, print_json, progress, show_fields, tell
from delayq.cli.running import with_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import datetime

    from delayq import Client

    Show = Callable[[int, int], None]

# How many offers are in flight at once.
_CALLERS = 100
# When messages come due while lateness is measured, seconds from their offer: first and last.
_SPREAD = (0.3, 2.3)


@dataclass
class _Bench:
    """One run and its results, to be done by ``deadline`` on the monotonic clock."""

    client: Client
    kind: QueueKind
    name: str
    partitions: int | None
    messages: int
    punctual: int
    payload: dict[str, str]
    deadline: float
    offered_per_s: float = 0.0
    delivered_per_s: float = 0.0
    late_ms: list[float] = field(default_factory=list)

    def open(self) -> Any:
        if self.kind == "delayed":
            return self.client.delayed_queue(self.name)
        return self.client.reliable_queue(self.name, partitions=self.partitions)

    async def offers(self, show: Show) -> None:
        """Measure the offers of many callers, each offering one message after the other."""
        queue = self.open()
        numbers = iter(range(self.messages))
        done = 0

        async def caller() -> None:
            nonlocal done
            for _ in numbers:
                # Due far from now, so that nothing is delivered meanwhile.
                await queue.offer(self.payload, 3600)
                done += 1
                show(done, self.messages)

        began = time.perf_counter()
        async with asyncio.timeout_at(self.deadline):
            await asyncio.gather(*(caller() for _ in range(min(_CALLERS, self.messages))))
        self.offered_per_s = self.messages / (time.perf_counter() - began)
        await (queue.purge() if self.kind == "reliable" else queue.pending.clear())

    async def deliveries(self, show: Show) -> None:
        """Measure the deliveries of due messages to one consumer."""
        queue = self.open()
        for first in range(0, self.messages, 1000):
            await queue.offer_many(
                self._offer(0.0) for _ in range(min(1000, self.messages - first))
            )
        began = time.perf_counter()
        async with asyncio.timeout_at(self.deadline):
            done = 0
            async for _ in self._messages_of(queue):
                done += 1
                show(done, self.messages)
                if done == self.messages:
                    break
        self.delivered_per_s = self.messages / (time.perf_counter() - began)

    async def lateness(self, show: Show) -> None:
        """Measure how long after their due times, by the server's clock, messages arrive."""
        queue = self.open()
        ahead, _ = await clock_ahead(self.client)
        first, last = _SPREAD
        delays = [
            first + (last - first) * number / self.punctual for number in range(self.punctual)
        ]
        due: dict[str, datetime] = {}
        if self.kind == "delayed":
            receipts = await queue.offer_many(
                ((str(number), delay) for number, delay in enumerate(delays))
            )
            due = {str(number): receipt.due_at for number, receipt in enumerate(receipts)}
        else:
            await queue.offer_many(self._offer(delay) for delay in delays)
        async with asyncio.timeout_at(self.deadline):
            async for message in self._messages_of(queue):
                due_at = due[message] if self.kind == "delayed" else message.due_at
                self.late_ms.append((time.time() + ahead - due_at.timestamp()) * 1000)
                show(len(self.late_ms), self.punctual)
                if len(self.late_ms) == self.punctual:
                    break

    def _offer(self, delay: float) -> Any:
        return (self.payload, delay) if self.kind == "delayed" else Offer(self.payload, delay=delay)

    async def _messages_of(self, queue: Any) -> AsyncIterator[Any]:
        async for message in queue:
            if self.kind == "delayed":
                yield message
            else:
                async with message:
                    yield message


def bench(
    kind: Annotated[QueueKind, typer.Option(help="The kind of queue.")] = "reliable",
    messages: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="The number of messages to offer and deliver.")
    ] = 5_000,
    punctual: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="The number of messages whose lateness is measured."),
    ] = 200,
    size: Annotated[
        int, typer.Option(min=1, max=100_000, help="The size of each value, in bytes.")
    ] = 100,
    partitions: Annotated[int | None, typer.Option(min=1, help="The number of partitions.")] = None,
    timeout: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Give up after this long, in seconds or as 90s, 2m."),
    ] = "60",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast and how punctually this server delivers, on a temporary queue.

    The benchmark puts load on the server, so do not run it against a busy one. Exit status: 0; 1 if
    it took too long; 130 after Ctrl-C.

    Example: `delayq bench --partitions 4`
    """
    if kind == "delayed" and partitions is not None:
        raise CommandFailed("a delayed queue has no partitions")
    name = f"delayq-bench-{secrets.token_hex(6)}"
    seconds = duration(timeout, "--timeout") or 0.0

    async def act(client: Client) -> _Bench:
        deadline = asyncio.get_running_loop().time() + seconds
        payload = {"text": "x" * size}
        run = _Bench(client, kind, name, partitions, messages, punctual, payload, deadline)
        try:
            for title, part in (
                ("offers", run.offers),
                ("deliveries", run.deliveries),
                ("lateness", run.lateness),
            ):
                with progress(f"{title:<10}", is_shown=not as_json) as show:
                    await part(show)
        except TimeoutError:
            tell(f"not finished within {timeout}; removing the temporary queue")
            raise typer.Exit(1) from None
        finally:
            await _shielded_removal(client, run)
        return run

    run = with_client(url, act)
    late = sorted(run.late_ms)
    p50, p99 = percentile(late, 0.5), percentile(late, 0.99)
    if as_json:
        print_json(
            {
                "kind": kind,
                "partitions": None if kind == "delayed" else partitions or 1,
                "messages": messages,
                "size": size,
                "offers_per_s": round(run.offered_per_s),
                "deliveries_per_s": round(run.delivered_per_s),
                "late_p50_ms": round(p50, 3),
                "late_p99_ms": round(p99, 3),
                "late_max_ms": round(late[-1], 3),
            }
        )
        return
    show_fields(
        [
            ("offers", f"{run.offered_per_s:,.0f} per second, {_CALLERS} callers"),
            ("deliveries", f"{run.delivered_per_s:,.0f} per second, 1 consumer"),
            (
                "lateness",
                f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {late[-1]:.2f} ms, n={len(late):,}",
            ),
        ]
    )


async def _shielded_removal(client: Client, run: _Bench) -> None:
    """Remove the queue even after Ctrl-C, so that nothing of it is left."""
    # A task of its own: a caller that is cancelled meanwhile waits for it all the same.
    task = asyncio.create_task(_remove(client, run))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _remove(client: Client, run: _Bench) -> None:
    await run.open().aclose()
    await FoundQueue(run.kind, run.name).inspector(client).remove()
