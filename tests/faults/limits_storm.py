"""A storm of limits: worker processes die and stop while many groups have many limits.

::

    python -m tests.faults.limits_storm [seed]

Each group has a limit of its own and a backlog that becomes due at some moment, and is large enough
to reach that limit. Processes note what they handle, :mod:`tests.faults.limits` judges it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import delayq
from delayq import Limit, Offer
from tests.faults.checker import Rules, summary
from tests.faults.consumers import Failed, die_with_parent, micros
from tests.faults.history import (
    Delivered,
    End,
    History,
    Notes,
    Offered,
    Told,
    demand_one_clock,
    now_us,
    read_notes,
)
from tests.faults.limits import Bound, Log, judge
from tests.faults.victims import start
from tests.support.servers import PrivateServer, first_kind, memory_disk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq._reliable.consumer import WorkerMessage

Queue = delayq.ReliableQueue[dict[str, Any]]
QUEUE = "limits"
LEASE = 2.0
LEASE_US = int(LEASE * 1_000_000)
STOPPED_FOR = LEASE * 1.3
UNWINDS = 0.4
"""Seconds for which a cancelled handler runs on, at most."""
_BACKOFF = delayq.Backoff.fixed(0.05)
_FAILS = 0.01
_BATCH = 1_000
_MOST_LEASED = 1_000
_NO_BOUND = Bound()


@dataclass(frozen=True)
class Plan:
    """The size of a storm. The defaults are the full size."""

    processes: int = 16
    groups: int = 200
    messages: int = 60
    """Of each group, at most."""
    seconds: float = 30.0
    kill_every: float = 0.3
    """Seconds between the kills of two processes, each of which is replaced at once."""
    stops: int = 4
    """How often a process is stopped for longer than its leases last."""
    cancels: int = 3
    """How many running messages are cancelled after each kill."""
    slots: int = 100
    """Messages that a process handles at once."""
    whole: Bound = _NO_BOUND
    """The limit of the whole queue."""
    drain_within: float = 30.0
    seed: int = 1

    @property
    def rules(self) -> Rules:
        within = self.seconds + self.drain_within
        return Rules(lease_us=LEASE_US, within_us=int(within * 1_000_000))


@dataclass
class Group:
    """A group, its limit, and what it has to do."""

    name: str
    bound: Bound
    handler: float
    """How long its handlers run, at the median, in seconds."""
    messages: int
    starts_after: float
    """When its messages become due, in seconds."""


def make_groups(plan: Plan, chance: random.Random) -> list[Group]:
    """Choose limits, and as many messages as they allow in the time that there is."""
    groups = []
    for number in range(plan.groups):
        bound = Bound(chance.randint(1, 5), round(_log_uniform(chance, 5, 500)))
        assert bound.concurrency is not None
        assert bound.rate is not None
        handler = _log_uniform(chance, 0.01, 0.5)
        per_second = min(bound.rate, bound.concurrency / handler)
        messages = math.ceil(min(plan.messages, per_second * plan.seconds * 0.7))
        starts_after = chance.uniform(0, plan.seconds - messages / per_second)
        groups.append(Group(f"group {number}", bound, handler, messages, starts_after))
    return groups


def _log_uniform(chance: random.Random, low: float, high: float) -> float:
    return math.exp(chance.uniform(math.log(low), math.log(high)))


# The processes


def work(url: str, notes: Path, who: str, slots: int, seed: object) -> None:
    """Handle messages and note each of them, until killed."""
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    asyncio.run(_work(url, Notes(notes), who, slots, random.Random(repr(seed))))


async def _work(url: str, notes: Notes, who: str, slots: int, chance: random.Random) -> None:
    die_with_parent()

    async def handle(message: delayq.Message[dict[str, Any]]) -> None:
        # The token is the first end of the lease, which may have been renewed before this began.
        ends_us = int(cast("WorkerMessage[Any]", message).claim.token)
        one = Delivered(message.value["key"], now_us(), who, message.id)
        one.due_us, one.attempt = micros(message.due_at), message.attempt
        one.claimed_us, one.ends_us = ends_us - LEASE_US, ends_us
        notes.began(one)
        try:
            await asyncio.sleep(message.value["for"])
            one.end = End.NACKED if chance.random() < _FAILS else End.UNKNOWN
        except asyncio.CancelledError:
            # It takes a while to end.
            await asyncio.sleep(chance.random() * UNWINDS)
            raise
        finally:
            # The lease may have been renewed.
            one.ends_us, one.ended_us = micros(message.lease_ends_at), now_us()
            notes.ended(one)
        if one.end is End.NACKED:
            raise Failed

    async with delayq.connect(url) as client:
        worker = delayq.Worker(client, concurrency=slots)
        worker.listener(QUEUE, lease=LEASE, max_attempts=None, backoff=_BACKOFF)(handle)
        await worker.run()


@dataclass
class Crowd:
    """Worker processes that are killed and stopped."""

    url: str
    folder: Path
    plan: Plan
    kills: dict[str, int] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _processes: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        who = f"process {next(self._numbers)}"
        args = (self.url, self.folder / who, who, self.plan.slots, (self.plan.seed, who))
        self._processes[who] = start(work, *args)

    def kill(self, who: str) -> None:
        process = self._processes.pop(who)
        process.kill()
        process.join()
        process.close()
        self.kills[who] = now_us()

    def replace_one(self, chance: random.Random) -> None:
        """Kill a process, and start another."""
        self.kill(chance.choice(sorted(self._processes)))
        self.start()

    async def stop_one(self, chance: random.Random) -> None:
        """Stop a process until its leases have ended, unless it is killed first."""
        who = chance.choice(sorted(self._processes))
        pid = self._processes[who].pid
        self.stopped.add(who)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_FOR)
        if who in self._processes:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        for who in list(self._processes):
            self.kill(who)


# The storm


async def blow(server: PrivateServer, plan: Plan, folder: Path) -> Log:
    """Offer everything, kill and stop processes until it is handled, and return the log."""
    demand_one_clock(server)
    chance = random.Random(f"limits {plan.seed}")
    groups = make_groups(plan, chance)
    crowd = Crowd(server.url, folder, plan)
    log = Log(History(), {}, {group.name: group.bound for group in groups}, plan.whole)
    offset = _clock_offset()
    async with delayq.connect(server.url) as client:
        queue: Queue = client.reliable_queue(QUEUE)
        await queue.configure(limit=_limit(plan.whole))
        for group in groups:
            await queue.groups.set_limit(group.name, _limit(group.bound))
        try:
            for _ in range(plan.processes):
                crowd.start()
            await _offer_all(queue, groups, log, chance)
            await _disturb(crowd, queue, plan, chance, log)
            try:
                await until(lambda: _remaining(queue), plan.drain_within, equals=0)
            except TimeoutError:
                log.history.left.append(f"{await _remaining(queue)} messages")
        finally:
            crowd.close()
    assert abs(_clock_offset() - offset) < 0.05, "the clock of this machine was set meanwhile"
    log.history.delivered += read_notes(sorted(folder.glob("process *")))
    log.kills, log.paused = crowd.kills, crowd.stopped
    return log


def _limit(bound: Bound) -> Limit | None:
    if bound == Bound():
        return None
    return Limit(concurrency=bound.concurrency, rate=bound.rate, per=bound.per_us / 1_000_000)


async def _offer_all(queue: Queue, groups: list[Group], log: Log, chance: random.Random) -> None:
    keys, offers = itertools.count(), list[Offer[dict[str, Any]]]()
    # The first ones are due when all have been offered.
    ahead = 1.0
    for group in groups:
        for _ in range(group.messages):
            key = next(keys)
            log.groups[key] = group.name
            value = {"key": key, "for": group.handler * chance.uniform(0.2, 1.8)}
            delay = ahead + group.starts_after
            offers.append(Offer(value, delay=delay, id=f"m{key}", group=group.name))
    chance.shuffle(offers)
    for first in range(0, len(offers), _BATCH):
        some = offers[first : first + _BATCH]
        at = now_us()
        for offer in some:
            assert isinstance(offer.delay, float)
            due_us = at + int(offer.delay * 1_000_000)
            log.history.offered[offer.value["key"]] = Offered(due_us, Told.OK)
        await queue.offer_many(some)


async def _disturb(crowd: Crowd, queue: Queue, plan: Plan, chance: random.Random, log: Log) -> None:
    """Kill and stop processes for as long as there is something to do."""
    end = time.monotonic() + plan.seconds + 1
    stops = sorted(end - chance.uniform(0, plan.seconds) for _ in range(plan.stops))
    async with asyncio.TaskGroup() as stopping:
        while time.monotonic() < end and await _remaining(queue):
            await asyncio.sleep(plan.kill_every)
            await asyncio.to_thread(crowd.replace_one, chance)
            # Messages that were on their way to that process are leased.
            running = await queue.list("leased", limit=_MOST_LEASED)
            for message in running:
                log.leases.add((message.value["key"], micros(message.lease_ends_at)))
            some = chance.sample(running, min(plan.cancels, len(running)))
            cancelled = await queue.cancel_many([message.id for message in some], running=True)
            for message in itertools.compress(some, cancelled):
                log.cancelled[message.value["key"]] = now_us()
                log.history.offered[message.value["key"]].told = Told.UNKNOWN
            if stops and stops[0] < time.monotonic():
                stops.pop(0)
                stopping.create_task(crowd.stop_one(chance))


async def _remaining(queue: Queue) -> int:
    stats = await queue.stats()
    return stats.delayed + stats.ready + stats.leased


def _clock_offset() -> float:
    """Return by how much the clock of the server is ahead of one that is never set, in seconds."""
    # A pause between the two makes the difference smaller.
    return max(time.time() - time.monotonic() for _ in range(5))


def main() -> None:
    plan = Plan(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateServer(first_kind(), within=memory_disk()) as server,
    ):
        log = asyncio.run(blow(server, plan, Path(folder)))
    counts = f"{len(log.kills)} kills, {len(log.cancelled)} cancelled"
    print(f"{len(log.history.delivered):,} deliveries, {counts}")
    violations = judge(log, plan.rules)
    sys.exit(f"FAILED: {summary(violations, 20)}" if violations else None)


if __name__ == "__main__":
    main()
