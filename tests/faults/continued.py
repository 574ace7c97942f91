"""Chains, batches and messages that are resumed, while workers and the server are killed.

A worker process dies every 0.4 s, and the server every 3 s; it keeps an append-only file. In every
tenth batch, two messages become dead letters, and are redriven in the end. A resumable message has
stages: the first ones are steps, and after each of the others it saves where it is. :func:`judge`
names what must not happen:

- *missing*: a step of a chain, a message of a batch, what follows from one, or a stage was never
  handled.
- *stored twice*: two messages are the same step, or follow from the same batch.
- *after ack*: a message came again although its acknowledgement was confirmed, or a stage although
  its end was.
- *too soon*: a step came before the one that it follows, or what follows from a batch before all of
  its messages; or something followed from a loss that there was not.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import delayq
from delayq import Offer
from delayq.errors import DelayqError
from tests.faults.checker import Violation
from tests.faults.consumers import die_with_parent
from tests.faults.history import now_us
from tests.faults.victims import start
from tests.support.links import Links

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from tests.support.servers import PrivateServer

QUEUE = "continued"
LEASE = 3.0
STEPS = 10
# Seconds between two kills.
_WORKER_LIVES, _SERVER_LIVES = 0.4, 3.0
# A worker is not killed before it has worked for so long, seconds.
_WORKS_FOR = 1.0
_CONCURRENCY = 100
# In one of so many batches, messages die: the first ones, so many.
_FAILING, _DEATHS = 10, 2
# Of a message that is resumed, and how many of these are steps; each takes so long, seconds.
_STAGES, _STEPS, _STAGE_LASTS = 6, 3, 0.5
# Exists as soon as dead letters are redriven.
REDRIVEN = "redriven"
# What a message stands for: its kind, the number of its chain or batch, and that of its step or
# member; or a stage of a message, with the number of both.
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Plan:
    """How much is offered, and how.

    Attributes:
        chains: The number of chains, of ten steps each.
        batches: The number of batches.
        members: The number of messages of each batch.
        resumable: The number of messages that are resumed.
        processes: The number of worker processes.
        round_trip: Of the network, milliseconds.
        within: For how many seconds everything may take, and once more for the dead letters.
    """

    chains: int
    batches: int
    members: int
    resumable: int = 0
    processes: int = 4
    round_trip: float = 0.0
    within: float = 600.0

    def fails(self, batch: int) -> bool:
        """Return whether messages of a batch die."""
        return batch % _FAILING == 0


@dataclass
class Notes:
    """What workers noted of a message: when its handler began, and when its acknowledgement was
    confirmed; or the same of a stage.
    """

    began_us: list[int]
    acked_us: list[int]


Seen = dict[Key, dict[str, Notes]]


def work(url: str, path: Path) -> None:
    """Handle messages until this process is killed, and note that in a file."""
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    asyncio.run(_work(url, path))


async def _work(url: str, path: Path) -> None:
    die_with_parent()
    notes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(key: Key, message: delayq.Message[Any], event: str) -> None:
        kind, number, part = key
        os.write(notes, f"{kind} {number} {part} {message.id} {event} {now_us()}\n".encode())

    async def resume(message: delayq.Message[Any], number: int) -> None:
        async def run(stage: int) -> None:
            note(("stage", number, stage), message, "began")
            await asyncio.sleep(_STAGE_LASTS)

        done = await message.load(default=_STEPS)
        for stage in range(_STEPS):
            await message.step(f"step {stage}", run, stage)
            note(("stage", number, stage), message, "acked")
        for stage in range(done, _STAGES):
            await run(stage)
            await message.save(stage + 1)
            note(("stage", number, stage), message, "acked")

    async def handle(message: delayq.Message[Any]) -> None:
        kind, number, part = key = tuple(message.value)
        note(key, message, "began")
        is_failing = kind == "member" and part < _DEATHS and number % _FAILING == 0
        if is_failing and not path.with_name(REDRIVEN).exists():
            # What follows from the first loss has been handled when the next one comes.
            await asyncio.sleep(0.5 * part)
            await message.bury("planned")
            return
        if kind == "resumable":
            await resume(message, number)
        await message.ack()
        note(key, message, "acked")

    async with delayq.connect(url) as client:
        worker = delayq.Worker(client, concurrency=_CONCURRENCY)
        worker.listener(QUEUE, lease=LEASE, max_attempts=None)(handle)
        await worker.run()


class Storm:
    """Offers everything, and kills workers and the server meanwhile."""

    def __init__(self, server: PrivateServer, plan: Plan, folder: Path) -> None:
        self._server = server
        self._plan = plan
        self._folder = folder
        self._names = itertools.count()
        # By the paths of their notes.
        self._processes: dict[Path, Any] = {}
        self.kills = 0
        # Batches of which it is not known whether they were offered whole.
        self.doubtful: set[int] = set()

    async def blow(self) -> None:
        """Carry the storm out.

        Raises:
            TimeoutError: Not everything has ended in time.
        """
        async with Links(self._server, round_trip=self._plan.round_trip) as links:
            for _ in range(self._plan.processes):
                self._begin(links.url)
            killing = asyncio.create_task(self._kill(links.url))
            try:
                async with delayq.connect(links.url) as client:
                    queue: delayq.ReliableQueue[Any] = client.reliable_queue(QUEUE)
                    await self._offer(queue)
                    await self._wait_until_idle(queue)
                    (self._folder / REDRIVEN).touch()
                    while (await _patiently(queue.stats)).dead:
                        await _patiently(queue.dead.redrive)
                    await self._wait_until_idle(queue)
            finally:
                killing.cancel()
                await asyncio.wait([killing])
                for process in self._processes.values():
                    process.kill()

    def _begin(self, url: str) -> None:
        path = self._folder / f"process {next(self._names)}"
        self._processes[path] = start(work, url, path)

    async def _kill(self, url: str) -> None:
        up_since: dict[Path, float] = {}
        for count in itertools.count(1):
            await asyncio.sleep(_WORKER_LIVES)
            now = time.monotonic()
            up_since = {path: now for path in self._processes if path.exists()} | up_since
            # Others would never get to do anything if the machine is slow.
            path = next((path for path, up in up_since.items() if now - up >= _WORKS_FOR), None)
            if path is not None:
                del up_since[path]
                self._processes.pop(path).kill()
                self._begin(url)
                self.kills += 1
            if count % round(_SERVER_LIVES / _WORKER_LIVES) == 0:
                # Another thread waits until it is up again.
                await asyncio.to_thread(self._server.kill)
                await asyncio.to_thread(self._server.start)

    async def _offer(self, queue: delayq.ReliableQueue[Any]) -> None:
        resumable = [
            Offer(("resumable", number, 0), id=f"resumable {number}", on_duplicate="ignore")
            for number in range(self._plan.resumable)
        ]
        await asyncio.gather(
            self._offer_chains(queue),
            self._offer_batches(queue),
            _patiently(lambda: queue.offer_many(resumable)),
        )

    async def _offer_chains(self, queue: delayq.ReliableQueue[Any]) -> None:
        for first in range(0, self._plan.chains, 100):
            chains = []
            for number in range(first, min(first + 100, self._plan.chains)):
                chain = Offer(("step", number, 0), id=f"chain {number}", on_duplicate="ignore")
                for step in range(1, STEPS):
                    chain = chain.then(Offer(("step", number, step)))
                chains.append(chain)
            await _patiently(lambda chains=chains: queue.offer_many(chains))

    async def _offer_batches(self, queue: delayq.ReliableQueue[Any]) -> None:
        for number in range(self._plan.batches):
            members = [Offer(("member", number, part)) for part in range(self._plan.members)]
            try:
                await queue.offer_batch(
                    members,
                    then=Offer(("then", number, 0)),
                    on_failure=Offer(("failure", number, 0)),
                )
            except DelayqError:
                self.doubtful.add(number)

    async def _wait_until_idle(self, queue: delayq.ReliableQueue[Any]) -> None:
        async with asyncio.timeout(self._plan.within):
            while True:
                stats = await _patiently(queue.stats)
                if not stats.delayed + stats.ready + stats.leased:
                    return
                await asyncio.sleep(0.1)

    def seen(self) -> Seen:
        """Return what the workers have noted. The last line of a killed process may be cut off."""
        seen: Seen = defaultdict(lambda: defaultdict(lambda: Notes([], [])))
        for path in self._folder.glob("process *"):
            for line in path.read_text("utf-8").split("\n")[:-1]:
                # An id may contain spaces.
                kind, number, part, *words, event, moment = line.split(" ")
                notes = seen[kind, int(number), int(part)][" ".join(words)]
                (notes.began_us if event == "began" else notes.acked_us).append(int(moment))
        return seen


async def _patiently(call: Any) -> Any:
    """Make a call until the server answers it."""
    while True:
        try:
            return await call()
        except DelayqError:
            await asyncio.sleep(0.1)


def judge(plan: Plan, seen: Seen, doubtful: Collection[int] = ()) -> list[Violation]:
    """Return all violations. Of ``doubtful`` batches, some messages may be missing."""
    return [
        *_missing(plan, seen, doubtful),
        *_repeated(seen),
        *_too_soon(plan, seen, doubtful),
    ]


def _expected(plan: Plan, doubtful: Collection[int]) -> Iterator[Key]:
    yield from (("step", chain, step) for chain in range(plan.chains) for step in range(STEPS))
    for number in range(plan.resumable):
        yield ("resumable", number, 0)
        yield from (("stage", number, stage) for stage in range(_STAGES))
    for batch in range(plan.batches):
        if batch not in doubtful:
            yield from (("member", batch, part) for part in range(plan.members))
            yield ("then", batch, 0)
            if plan.fails(batch):
                yield ("failure", batch, 0)


def _missing(plan: Plan, seen: Seen, doubtful: Collection[int]) -> Iterator[Violation]:
    for key in _expected(plan, doubtful):
        if key not in seen:
            yield Violation("missing", key[1], f"{key} was never handled")


def _repeated(seen: Seen) -> Iterator[Violation]:
    for key, by_id in seen.items():
        if len(by_id) > 1:
            yield Violation("stored twice", key[1], f"{key} was stored as {[*by_id]}")
        for name, notes in by_id.items():
            if notes.acked_us and max(notes.began_us) > min(notes.acked_us):
                yield Violation("after ack", key[1], f"{key} came again as {name!r}")


def _began(seen: Seen, key: Key) -> int:
    """Return when the first handler of a message began."""
    return min(moment for notes in seen[key].values() for moment in notes.began_us)


def _too_soon(plan: Plan, seen: Seen, doubtful: Collection[int]) -> Iterator[Violation]:
    for key in seen:
        kind, number, part = key
        before = (kind, number, part - 1)
        if kind in {"step", "stage"} and part and _began(seen, before) > _began(seen, key):
            yield Violation("too soon", number, f"{key} came before the step that it follows")
        if kind == "failure" and not plan.fails(number):
            yield Violation("too soon", number, f"{key} came, and nothing was lost")
        if kind == "then" and number not in doubtful:
            members = [("member", number, part) for part in range(plan.members)]
            late = [
                member
                for member in members
                if member in seen and _began(seen, member) > _began(seen, key)
            ]
            if late:
                yield Violation(
                    "too soon", number, f"{key} came before {late[0]} and {len(late) - 1} others"
                )
