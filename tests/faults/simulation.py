"""Simulated storms: network, server, clocks and randomness follow from a seed.

::
    python -m tests.faults.simulation --seeds 5000 [--first 200] [--kind plain]
    python -m tests.faults.simulation --kind plain --seed 17     # one simulation, in full
They take no real time, because nothing ever waits. Producers and consumers are processes in the
sense of :mod:`tests.faults.virtual`: they die without warning.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import math
import random
import sys
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import delayq
from delayq import Limit
from delayq.admin.reliable import ReliableInspector
from tests.faults import consumers
from tests.faults.checker import Rules, Violation, summary
from tests.faults.consumers import (
    KINDS,
    QUEUE,
    Consumer,
    Habits,
    Kind,
    offer_together,
    open_reliable,
)
from tests.faults.history import Delivered, End, Fault, History, Told, now_us
from tests.faults.limits import judge_storm
from tests.faults.network import REPLIES, REQUESTS, Connection, Network
from tests.faults.storm import _Doubts
from tests.faults.virtual import EPOCH, Process, VirtualLoop, governed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

URL = "redis://simulated:6379?protocol=2"
WITHIN = 30.0
"""Seconds that a message may take when it has to wait for leases and deadlines."""
DRAIN_WITHIN = 150.0
"""Seconds in which everything is delivered once all is healed."""
_LONGEST_DELAY = 20.0
_UNTIL = 1000.0
# How long the end of a simulation takes: every call has been abandoned by then.
_END_WITHIN = 30.0


@dataclass(frozen=True)
class Plan:
    """The plan of a simulation. Each producer and each consumer is a process."""

    kind: Kind
    seed: int
    messages: int = 60
    faults: int = 8
    only: tuple[str, ...] = ()
    """The names of the faults to choose from; all if empty."""
    pause: float = 2.0
    """Seconds between two faults at most."""
    producers: int = 2
    consumers: int = 2
    loops: int = 2
    """Of each consumer."""
    resync: float = 1.0
    """Seconds between two re-checks."""
    within: float = WITHIN
    """Seconds that a message may take once it is due and nothing holds it back."""
    partitions: int = 1
    """How many the queue has at first, if there are several. Only for a reliable queue."""
    groups: int = 0
    most: tuple[int | None, int | None] = (None, None)
    """How many messages run at once, of the queue and of each group. Only for a reliable queue."""
    habits: Habits = field(
        default_factory=lambda: Habits(
            fails=0.04, releases=0.02, waits_for_its_ack=0.3, dawdles=0.02, leaves=0.02
        )
    )

    @property
    def rules(self) -> Rules:
        return Rules(
            0 if self.kind == "plain" else int(consumers.LEASE * 1_000_000),
            int(self.within * 1_000_000),
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation."""

    history: History
    violations: Sequence[Violation]
    trace: str
    """A hash of everything that passed over the network, and when."""
    lasted: float
    """Simulated seconds."""

    def lines(self) -> list[str]:
        """Return everything that happened, one line each, ordered by time."""
        history = self.history
        told = [
            *((one.due_us, f"message {key} is due: {one}") for key, one in history.offered.items()),
            *((one.seen_us, f"message {one.key} came: {one}") for one in history.delivered),
            *((fault.from_us, f"FAULT {fault}") for fault in history.faults),
        ]
        return [
            *(f"{at / 1_000_000 - EPOCH:.6f} {words}" for at, words in sorted(told)),
            *(f"DOUBTED {copy}" for copy in sorted(self.history.doubts)),
            *(f"VIOLATION {violation}" for violation in self.violations),
            f"trace {self.trace} of {self.lasted:.6f} s",
        ]


def simulate(plan: Plan) -> Outcome:
    """Run one simulation and judge it. No time passes outside it."""
    seed = f"{plan.kind} {plan.seed}"
    network = Network(seed)
    loop = network.loop = VirtualLoop(network.connect, _UNTIL)
    doubts, log = _Doubts(), logging.getLogger("delayq")
    log.addHandler(doubts)
    try:
        with governed(loop, seed):
            simulation = Simulation(plan, network, doubts)
            stuck = ""
            try:
                loop.run_until_complete(simulation.run())
            except AssertionError as error:
                stuck = str(error)
            history, trace, lasted = simulation.history, network.trace.hexdigest()[:16], loop.time()
            history.left += [*loop.complaints, *([stuck] if stuck else [])]
            violations = judge_storm(history, plan.rules, plan.most)
            network.heal()
            loop.end_all(_END_WITHIN)
    finally:
        log.removeHandler(doubts)
        loop.close()
    return Outcome(history, violations, trace, lasted)


class Simulation:
    """Producers and consumers, and the faults that disturb them."""

    def __init__(self, plan: Plan, network: Network, doubts: _Doubts) -> None:
        self._plan = plan
        self._network = network
        self._loop = network.loop
        self._chance = random.Random(f"storm {plan.kind} {plan.seed}")
        self._doubts = doubts
        self._keys = itertools.count()
        self._names = itertools.count(1)
        self._shares: deque[int] = deque()
        self._producers: list[_Producer] = []
        self._consumers: list[_Consumers] = []

        self.history: History = History(groups=plan.groups)
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "cut": self._cut,
            "half open": self._half_open,
            "request lost": lambda: self._lose(REQUESTS),
            "reply lost": lambda: self._lose(REPLIES),
            "requests stalled": lambda: self._stall(REQUESTS),
            "replies stalled": lambda: self._stall(REPLIES),
            "stalled": lambda: self._stall(REQUESTS, REPLIES),
            "slow": self._slow,
            "refused": self._refuse,
            "notifications lost": self._mute,
            "SCRIPT FLUSH": self._flush,
            "loop cancelled": self._cancel_loop,
            "process stopped": self._stop_process,
            "producer killed": self._kill_producer,
            "consumer killed": self._kill_consumer,
            "client closed": self._close_client,
        }
        if plan.partitions > 1:
            self._faults["repartition"] = self._repartition
        if plan.kind == "plain":
            # Messages that these have taken are gone for good, by contract or when the server is
            # unreachable at that moment.
            del self._faults["consumer killed"], self._faults["client closed"]

    async def run(self) -> None:
        plan, chance = self._plan, self._chance
        left = plan.messages
        while left > 0:
            self._shares.append(min(left, chance.choice((1, 1, 1, 2, 5, 12))))
            left -= self._shares[-1]
        if plan.partitions > 1 or any(plan.most):
            await self._operate(self._configure)
        for _ in range(plan.producers):
            self._start_producer()
        for _ in range(plan.consumers):
            self._start_consumers()
        names = [name for name in self._faults if name in plan.only or not plan.only]
        for _ in range(plan.faults):
            await asyncio.sleep(chance.random() * plan.pause)
            fault = Fault(chance.choice(names), now_us(), 0)
            self.history.faults.append(fault)
            await self._faults[fault.name]()
            self._network.heal()
            fault.to_us = now_us()
        await self._drain()
        for consumer in self._consumers:
            consumer.close()
        for consumer in self._consumers:
            await self._gone(consumer)
        history = self.history
        history.doubts, history.nameless_doubts = self._doubts.copies, self._doubts.nameless
        if plan.kind == "plain":
            # Messages that were fetched ahead went back when the consumers ended.
            for value in self._network.list_of(QUEUE):
                history.delivered.append(
                    Delivered(int(value), now_us(), "the end", claimed_us=now_us())
                )
        else:
            history.left += [
                f"stays on the server for ever: {name}" for name in self._network.lasting_keys()
            ]

    async def _drain(self) -> None:
        """Wait until every stored message is delivered, and every key gone that does not expire."""
        give_up_at = self._loop.time() + DRAIN_WITHIN
        while not self._is_drained():
            if self._loop.time() > give_up_at:
                self.history.left.append(
                    f"not drained within {DRAIN_WITHIN:g} s: {self._network.lasting_keys()}"
                )
                return
            await asyncio.sleep(0.1)

    def _is_drained(self) -> bool:
        producing = self._shares or not all(producer.done.done() for producer in self._producers)
        if producing or self._network.lasting_keys():
            return False
        seen = {one.key for one in self.history.delivered}
        stored = {key for key, offered in self.history.offered.items() if offered.told is Told.OK}
        return self._plan.kind != "plain" or stored <= seen

    # Participants

    def _start_producer(self) -> None:
        self._producers.append(_Producer(self, f"producer {next(self._names)}"))

    def _start_consumers(self) -> None:
        self._consumers.append(_Consumers(self, f"consumer {next(self._names)}"))

    def _kill(self, process: Process) -> None:
        self._loop.halt(process)
        for connection in self._network.connections:
            if connection.process is process:
                connection.orphan()

    async def _gone(self, consumer: _Consumers) -> None:
        # Poll instead of awaiting: a task that a process wakes up becomes a part of that process.
        while not consumer.done.done():
            await asyncio.sleep(0.01)
        consumer.done.result()

    async def _operate(
        self, work: Callable[[delayq.Client], Awaitable[object]], for_seconds: float = math.inf
    ) -> None:
        """Let a process do something. It dies after that time."""

        async def run() -> None:
            async with _client(self._plan) as client:
                await work(client)

        process, dies_at = Process(f"operator {next(self._names)}"), self._loop.time() + for_seconds
        with self._loop.within(process):
            running = self._loop.create_task(run())
        while not running.done():
            await asyncio.sleep(0.01)
            if self._loop.time() >= dies_at:
                self._kill(process)
                return
        running.result()

    async def _configure(self, client: delayq.Client) -> None:
        whole, group = (Limit(concurrency=most) if most else None for most in self._plan.most)
        await open_reliable(client).configure(
            partitions=self._plan.partitions, limit=whole, group_limit=group
        )

    # Faults: each heals at its end, except for effects that persist by themselves

    def _some(self) -> list[Connection]:
        """Return all connections, or about half of them."""
        share = self._chance.choice((0.5, 1.0))
        return [
            connection for connection in self._network.connections if self._chance.random() < share
        ]

    async def _cut(self) -> None:
        for connection in self._some():
            connection.cut()

    async def _half_open(self) -> None:
        for connection in self._some():
            connection.half_open()

    async def _lose(self, direction: int) -> None:
        self._network.loses = direction
        if self._chance.random() < 0.5:
            # The call that gives its messages back may be the one that is lost.
            await self._cancel_loop()
        await asyncio.sleep(self._chance.random() * 2)

    async def _stall(self, *directions: int) -> None:
        # At times longer than a call waits.
        seconds = self._chance.choice((0.3, 3, 8)) * self._chance.random()
        # Connections that are opened in the meantime are not stalled, so they may overtake late
        # data.
        for connection in self._some():
            for direction in directions:
                connection.stalled_until[direction] = self._loop.time() + seconds
        await asyncio.sleep(seconds)

    async def _slow(self) -> None:
        self._network.slower = self._chance.uniform(0.001, 0.15)
        await asyncio.sleep(self._chance.random() * 2)

    async def _refuse(self) -> None:
        self._network.refuses = True
        await self._cut()
        await asyncio.sleep(self._chance.choice((0.3, 7)) * self._chance.random())

    async def _mute(self) -> None:
        self._network.mute = 1.0
        await asyncio.sleep(self._chance.random() * 5)

    async def _flush(self) -> None:
        self._network.flush_scripts()

    async def _cancel_loop(self) -> None:
        self._chance.choice(self._consumers).cancel_one(self._chance)

    async def _stop_process(self) -> None:
        there: list[_Consumers | _Producer] = [*self._consumers, *self._producers]
        process = self._chance.choice(there).process
        self._loop.halt(process)
        # At times longer than a lease.
        await asyncio.sleep(self._chance.choice((0.3, 8)) * self._chance.random())
        self._loop.resume(process)

    async def _repartition(self) -> None:
        partitions = self._chance.choice((2, 3, 4))
        for seconds in (self._chance.choice((0.1, 8)) * self._chance.random(), math.inf):
            await self._operate(
                lambda client: ReliableInspector.of(client, QUEUE).repartition(partitions), seconds
            )

    async def _kill_producer(self) -> None:
        if alive := [producer for producer in self._producers if not producer.done.done()]:
            killed = self._chance.choice(alive)
            self._kill(killed.process)
            self._producers.remove(killed)
            await asyncio.sleep(self._chance.random())
            self._start_producer()

    async def _kill_consumer(self) -> None:
        killed = self._consumers.pop(0)
        self._kill(killed.process)
        for one in killed.delivered:
            self.history.kills[one.who] = now_us()
            # It is not known whether the acknowledgement had left.
            if one.end is End.UNATTENDED:
                one.end = End.UNKNOWN
        await asyncio.sleep(self._chance.random())
        self._start_consumers()

    async def _close_client(self) -> None:
        closed = self._consumers.pop(0)
        closed.close()
        await self._gone(closed)
        self._start_consumers()


class _Producer:
    """A process that offers the messages, share by share."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.process = Process(name)
        self._plan = plan = simulation._plan
        self._chance = random.Random(f"{name} {plan.kind} {plan.seed}")
        self._history = simulation.history
        self._keys = simulation._keys
        self._shares = simulation._shares
        loop = simulation._loop
        with loop.within(self.process):
            self.done: asyncio.Task[None] = loop.create_task(self._run())

    async def _run(self) -> None:
        chance, offering = self._chance, []
        async with _client(self._plan) as client:
            while self._shares:
                share = self._shares.popleft()
                offering.append(asyncio.create_task(self._offer(client, share)))
                # Some offers come close together and share calls.
                await asyncio.sleep(chance.choice((0.001, 2.0, 5.0)) * chance.random())
                if chance.random() < 0.1:
                    offering[-1].cancel()
            await asyncio.gather(*offering, return_exceptions=True)

    async def _offer(self, client: delayq.Client, count: int) -> None:
        chance, history, kind = self._chance, self._history, self._plan.kind
        delays = [
            chance.choice((0.0, 0.0, 0.3, 2.0, 2.0, _LONGEST_DELAY)) * chance.random()
            for _ in range(count)
        ]
        messages = {next(self._keys): delay for delay in delays}
        try:
            await offer_together(client, kind, history, messages, named=chance.random() < 0.5)
        except delayq.DuplicateMessage:
            # All ids differ. A producer that is told of a duplicate relies on neither message being
            # stored.
            for key in messages:
                history.offered[key].told = Told.FAILED


class _Consumers:
    """A process that consumes in several loops, and records what they see."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.process = Process(name)
        self._plan = simulation._plan
        self._loop = loop = simulation._loop
        self._history = simulation.history
        self._running: list[asyncio.Task[None]] = []
        self._closing = False
        self._close = asyncio.Event()
        self.delivered: list[Delivered] = []
        with loop.within(self.process):
            self.done: asyncio.Task[None] = loop.create_task(self._run())

    def began(self, delivered: Delivered) -> None:
        self.delivered.append(delivered)
        self._history.delivered.append(delivered)

    def ended(self, _: Delivered) -> None: ...

    def cancel_one(self, chance: random.Random) -> None:
        """Cancel a loop; another takes its place."""
        if self._running:
            with self._loop.within(self.process):
                chance.choice(self._running).cancel()

    def close(self) -> None:
        """End the process properly: everything that it holds goes back."""
        with self._loop.within(self.process):
            self._close.set()

    async def _run(self) -> None:
        async with _client(self._plan) as client:
            keepers = [
                asyncio.create_task(self._keep(client, number))
                for number in range(self._plan.loops)
            ]
            await self._close.wait()
            self._closing = True
            for task in self._running:
                task.cancel()
            await asyncio.gather(*keepers)

    async def _keep(self, client: delayq.Client, number: int) -> None:
        plan, who = self._plan, f"{self.process.name}.{number}"
        for again in itertools.count():
            if self._closing:
                return
            seed = (plan.kind, plan.seed, who, again)
            task = asyncio.create_task(
                Consumer(client, plan.kind, who, self, seed, plan.habits).run()
            )
            self._running.append(task)
            await asyncio.wait({task})
            self._running.remove(task)
            if not task.cancelled():
                await task


@asynccontextmanager
async def _client(plan: Plan) -> AsyncIterator[delayq.Client]:
    """Open a client, trying again until the server answers."""
    while True:
        client = delayq.connect(URL, resync_interval=plan.resync)
        try:
            await client.__aenter__()
        except delayq.ServerError:
            await asyncio.sleep(0.05)
        else:
            break
    try:
        yield client
    finally:
        await client.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="so many of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, help="this one alone, and all that happened")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--most", type=int, nargs=2, default=(None, None), help="queue and group")
    options = parser.parse_args()
    alone = options.seed is not None
    first, count = (options.seed, 1) if alone else (options.first, options.seeds)
    failed = 0
    kinds = [options.kind] if options.kind else KINDS
    for kind, seed in itertools.product(kinds, range(first, first + count)):
        shape = {"partitions": options.partitions, "groups": options.groups}
        outcome = simulate(Plan(kind, seed, **shape, most=tuple(options.most)))
        # For a single seed, print only what the seed determines.
        if alone or outcome.violations:
            lines = outcome.lines() if alone else [summary(outcome.violations)]
            print(f"--kind {kind} --seed {seed}:", *lines, sep="\n", flush=True)
        failed += bool(outcome.violations)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
