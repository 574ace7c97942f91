"""Handlers for the tests of workers, and shorthand for running them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import delayq
from delayq import Backoff, Offer, Worker
from delayq._reliable.claims import ClaimAcknowledger
from tests.support.reliable import get
from tests.support.reliable_fixtures import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from delayq import DeadLetter, Message
    from delayq._redis.scripts import Request
    from delayq._reliable.replies import Claim
    from tests.support.reliable import Jobs

SETTINGS: dict[str, Any] = {"lease": LEASE, "backoff": Backoff.fixed(3600), "max_attempts": 3}
"""Of the queue ``jobs`` and of its listener: nothing comes again within a test."""


def on_jobs(worker: Worker, **settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a listener on the queue ``jobs``."""
    return worker.listener("jobs", **SETTINGS | settings)


class Gate:
    """A handler that waits until it is let through, and records which values are inside."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.seen: list[Any] = []
        self.most = 0
        self._open = asyncio.Event()

    async def __call__(self, value: Any) -> None:
        self.seen.append(value)
        self.inside.append(value)
        self.most = max(self.most, len(self.inside))
        try:
            await self._open.wait()
        finally:
            self.inside.remove(value)

    def open(self) -> None:
        self._open.set()


class Seen(list[Any]):
    """A handler that records its values."""

    async def __call__(self, value: Any) -> None:
        self.append(value)

    def of(self, kind: Any) -> Callable[[Any], Any]:
        """Return a handler that records values and is annotated with their type."""

        async def handle(value: Any) -> None:
            self.append(value)

        handle.__annotations__["value"] = kind
        return handle


class Settling:
    """The calls that settle failed messages; the first ones find no server."""

    def __init__(self, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        settle_one = ClaimAcknowledger._end_lease

        async def settle(acks: ClaimAcknowledger, request: Request, claim: Claim) -> None:
            self.asked.append(request.script.name)
            if len(self.asked) <= failing:
                raise delayq.ServerUnavailable("it is away")
            await settle_one(acks, request, claim)

        monkeypatch.setattr(ClaimAcknowledger, "_end_lease", settle)


def raising(error: BaseException) -> Callable[[Any], Any]:
    """Return a handler that raises ``error``."""

    async def handle(value: Any) -> None:
        raise error

    return handle


async def work_off(worker: Worker, jobs: Jobs, *values: Any) -> None:
    """Offer the values, and run the worker until nothing is due."""
    await jobs.offer_many([Offer(value=value) for value in values])
    await worker.run(burst=True)


async def failed(worker: Worker, jobs: Jobs, value: Any = 1) -> Message[Any]:
    """Let the worker handle a message that it does not complete, and return the message."""
    id_ = await jobs.offer(value)
    await worker.run(burst=True)
    return await get(jobs, id_)


async def buried(worker: Worker, jobs: Jobs, *values: Any) -> DeadLetter[Any]:
    """Let the worker handle messages, 1 by default, and return the only one that died."""
    await work_off(worker, jobs, *(values or (1,)))
    (letter,) = await jobs.dead.list()
    return letter


async def running(worker: Worker) -> asyncio.Task[None]:
    """Start a worker, as a program's main task would."""
    started = asyncio.Event()
    task = asyncio.create_task(worker.run(started=started.set))
    await asyncio.wait(
        (task, asyncio.create_task(started.wait())), return_when=asyncio.FIRST_COMPLETED
    )
    return task
