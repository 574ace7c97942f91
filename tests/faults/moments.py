"""Clients that leave at random moments, over links with a long round trip: nothing is lost, nothing
is delivered twice.

::

    python -m tests.faults.moments --trials 1000
    python -m tests.faults.moments --seed 17 --trials 1      # repeat one of them, with its keys

In each trial a client consumes several queues in several ways, with loops that are left and with
tasks that are cancelled, once or twice. It leaves at a random moment: its block ends, another task
closes it, or its task is cancelled, sometimes again while it closes. At times its event loop ends
with it, as a program's does. No link breaks. Afterwards another client takes the rest.

Each trial is determined by its seed alone. Which message meets which moment is still left to
chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

import delayq
from delayq import Offer
from delayq._delayed.keys import DelayedKeys
from tests.support.links import Links
from tests.support.servers import PrivateServer, find_kinds
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

ROUND_TRIPS = (20, 100, 250)
"""Milliseconds."""
TAKING = ("loop", "take", "poll", "timeout", "drain", "poll_many")
"""Ways to take a message for good: at most once."""
LEASING = ("deliveries", "messages")
"""Ways to take a message under a lease: at least once."""
ENDINGS = ("block ends", "closed by another", "queues closed", "cancelled", "cancelled twice")
LEASE = 3.0
RESYNC = 0.2
"""Seconds between two re-checks by the client that takes the rest."""
LEASES_WITHIN = 8.0
"""Seconds within which due times come and the leases of consumers end."""
REST_WITHIN = 8.0
"""Seconds within which the rest arrives after that."""
GOES_WITHIN = 60.0
"""Seconds after which the client must have left, whatever its plan."""
CLOSE_WITHIN = 1.0
"""Seconds that a close may take, besides two round trips."""
_SLACK = 0.1


@dataclass(frozen=True)
class Plan:
    """The plan of a trial.

    Attributes:
        seed: The seed of every random choice.
        round_trip: Milliseconds.
        queues: How each queue is consumed.
        ready: How many messages each queue has when the trial begins.
        later: How many messages of each queue come due during the trial.
        ending: How the client leaves.
        after: Seconds until it leaves.
        again: Seconds between the first cancellation and the second.
        lasts: Whether its event loop keeps running afterwards.
    """

    seed: int
    round_trip: int
    queues: tuple[str, ...]
    ready: tuple[int, ...]
    later: tuple[int, ...]
    ending: str
    after: float
    again: float
    lasts: bool

    @classmethod
    def of(
        cls,
        seed: int,
        *,
        round_trip: int | None = None,
        ending: str | None = None,
        ways: Sequence[str] = (),
    ) -> Plan:
        chance = random.Random(f"moments {seed}")
        ms = chance.choice(ROUND_TRIPS)
        ms = ms if round_trip is None else round_trip
        count = chance.choice((1, 2, 5, 10, 20, 50))
        queues = tuple(
            chance.choice(ways or (*TAKING, "loop", "loop", *LEASING)) for _ in range(count)
        )
        most = max(6, 800 // count)
        chosen = chance.choice(ENDINGS)
        return cls(
            seed,
            ms,
            queues,
            tuple(chance.randint(0, most) if chance.random() < 0.8 else 0 for _ in queues),
            tuple(chance.randint(0, most // 4) if chance.random() < 0.5 else 0 for _ in queues),
            chosen if ending is None else ending,
            (3 + chance.expovariate(0.15)) * ms / 1000 + chance.choice((0, 0.3)) * chance.random(),
            chance.choice(
                (0.0, 0.001, chance.random() * ms / 1000, chance.random() * 3 * ms / 1000)
            ),
            chance.random() < 0.5,
        )

    def name(self, number: int) -> str:
        """Return the name of a queue, which no other trial uses."""
        return f"moments-{self.seed}-{number}"


@dataclass
class Seen:
    """The messages of one queue, by value, and where each was seen."""

    consumers: int = 0
    begun: set[int] = field(default_factory=set)
    offered: set[int] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    unsure: set[int] = field(default_factory=set)
    rest: list[int] = field(default_factory=list)

    def is_complete(self) -> bool:
        return self.offered <= {*self.taken, *self.acked, *self.unsure, *self.rest}


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        plan: The plan of the trial.
        offered: How many messages were offered.
        delivered: How many messages the first client received.
        lost: Messages that never arrived.
        doubled: Messages that arrived twice from a queue that delivers at most once, or again after
            they were acknowledged.
        strayed: Unreadable payloads that are missing from the quarantine or are in it twice.
        kept: Hand-outs that came back only when the lease of an unconfirmed call ended.
        disordered: Queues whose ready list was out of order after the close.
        closed_in: Seconds that the close took.
        bound: Seconds that it may take.
        left: Keys of its queues that are still on the server when everything is done.
        errors: Unexpected errors.
    """

    plan: Plan
    offered: int = 0
    delivered: int = 0
    lost: dict[str, list[int]] = field(default_factory=dict)
    doubled: dict[str, list[int]] = field(default_factory=dict)
    strayed: dict[str, list[str]] = field(default_factory=dict)
    kept: int = 0
    disordered: list[str] = field(default_factory=list)
    closed_in: float = 0.0
    bound: float = 0.0
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def flaws(self) -> list[str]:
        """Everything that must not happen, in words."""
        places: dict[str, Mapping[str, Sequence[Any]]] = {
            "lost": self.lost,
            "doubled": self.doubled,
            "unreadable astray": self.strayed,
        }
        found = [
            f"{len(values)} {flaw} of {where}: {sorted(values)[:8]}"
            for flaw, by_queue in places.items()
            for where, values in by_queue.items()
        ]
        found += [f"out of order: {words}" for words in self.disordered]
        if self.closed_in > self.bound:
            found.append(f"the close took {self.closed_in:.2f} s, more than {self.bound:.2f} s")
        return found + [f"left: {name}" for name in self.left] + self.errors


# The client that leaves


class _Client:
    """A client in its own event loop and thread. The loop may end as soon as the client has
    left.
    """

    def __init__(self, url: str, plan: Plan, seen: list[Seen], outcome: Outcome) -> None:
        self._url = url
        self._plan = plan
        self._seen = seen
        self._outcome = outcome
        self._chance = random.Random(f"client {plan.seed}")
        self._lag = 0.0

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        consumers: list[asyncio.Task[None]] = []
        opened: asyncio.Future[delayq.Client] = loop.create_future()
        leaves = asyncio.Event()
        beating = asyncio.create_task(self._beat())

        async def owner() -> None:
            async with delayq.connect(self._url) as client:
                opened.set_result(client)
                await leaves.wait()

        owning = asyncio.create_task(owner())
        async with asyncio.timeout(30):
            client = await opened
        consumers += [
            asyncio.create_task(self._consume(client, number, place))
            for number in range(len(plan.queues))
            for place in range(self._chance.choice((1, 1, 2)))
        ]
        cancelling = asyncio.create_task(self._cancel_some(consumers))
        await asyncio.sleep(plan.after)
        self._lag, started = 0.0, loop.time()
        if plan.ending == "block ends":
            leaves.set()
        elif plan.ending == "closed by another":
            await client.aclose()
            started, took = loop.time(), loop.time() - started
            self._outcome.closed_in = took
            leaves.set()
        elif plan.ending == "queues closed":
            queues = [
                self._open(client, number)
                for number in range(len(plan.queues))
                if self._chance.random() < 0.7
            ]
            await asyncio.gather(*(queue.aclose() for queue in queues))
            self._outcome.closed_in = loop.time() - started
            started = loop.time()
            leaves.set()
        else:
            owning.cancel()
            if plan.ending == "cancelled twice":
                await asyncio.sleep(plan.again)
                owning.cancel()
        await asyncio.wait({owning})
        self._outcome.closed_in = max(self._outcome.closed_in, loop.time() - started)
        self._outcome.bound = CLOSE_WITHIN + 2 * plan.round_trip / 1000 + 3 * self._lag + _SLACK
        if not owning.cancelled() and (error := owning.exception()) is not None:
            self._outcome.errors.append(f"the client ended with {error!r}")
        beating.cancel()
        cancelling.cancel()
        if plan.lasts:
            for task in consumers:
                task.cancel()
            await asyncio.gather(*consumers, beating, cancelling, return_exceptions=True)
            await asyncio.sleep(0.1 + 3 * plan.round_trip / 1000)
        # Otherwise the event loop ends now, and only what was written to sockets remains of it.

    async def _beat(self) -> None:
        """Measure how busy the machine is: a close may be late by that much."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            self._lag = max(self._lag, loop.time() - before - 0.01)

    async def _cancel_some(self, consumers: Sequence[asyncio.Task[None]]) -> None:
        """Cancel consumers at random moments, some of them twice."""
        chance, seconds = self._chance, self._plan.round_trip / 1000
        for task in chance.sample(consumers, chance.randint(0, len(consumers))):
            await asyncio.sleep(chance.choice((0, chance.random() * seconds)))
            task.cancel()
            if chance.random() < 0.4:
                await asyncio.sleep(chance.choice((0, chance.random() * seconds)))
                task.cancel()

    def _open(self, client: delayq.Client, number: int) -> Any:
        return open_queue(client, self._plan, number)

    async def _consume(self, client: delayq.Client, number: int, place: int) -> None:
        way, seen = self._plan.queues[number], self._seen[number]
        seen.consumers += 1
        chance = random.Random(f"consumer {self._plan.seed} {number} {place}")
        try:
            queue = self._open(client, number)
            while await _WAYS[way](queue, seen, _Pace(chance, self._plan.round_trip / 1000)):
                # The loop was left, and at times it comes back.
                await asyncio.sleep(chance.random() * 0.2)
                if chance.random() < 0.3:
                    return
        except delayq.Closed:
            pass
        except delayq.ServerError as error:
            # A call that was not waiting for messages when the client closed may end like this. It
            # must not lose anything.
            if not self._closing(client):
                self._outcome.errors.append(f"{way}: {error!r}")

    @staticmethod
    def _closing(client: delayq.Client) -> bool:
        try:
            client.statistics()
        except delayq.Closed:
            return True
        return False


class _Pace:
    """How fast a consumer handles messages, and when it leaves."""

    def __init__(self, chance: random.Random, seconds: float) -> None:
        self._chance = chance
        self._seconds = chance.choice((0.0, 0.0, 0.002, seconds / 4))
        self.leaves_after = chance.choice((1, 9, 40, 150, 10_000))
        self._sticks_after = chance.choice((9, 33, 10_000))
        self._handled = 0

    @property
    def patience(self) -> float:
        return self._chance.random() * 0.3

    @property
    def some(self) -> int:
        return self._chance.choice((1, 10, 150))

    async def handle(self) -> bool:
        """Handle one message; return whether it was the last."""
        self._handled += 1
        if self._handled == self._sticks_after:
            await asyncio.sleep(3600)
        if self._seconds:
            await asyncio.sleep(self._chance.random() * self._seconds)
        return self._handled >= self.leaves_after


async def _loop(queue: Any, seen: Seen, pace: _Pace) -> bool:
    async for value in queue:
        seen.taken.append(value)
        if await pace.handle():
            return True
    return False


async def _take(queue: Any, seen: Seen, pace: _Pace) -> bool:
    while True:
        with suppress(delayq.DecodeError):
            seen.taken.append(await queue.take())
        if await pace.handle():
            return True


async def _poll(queue: Any, seen: Seen, pace: _Pace) -> bool:
    while True:
        with suppress(delayq.DecodeError):
            if (value := await queue.poll(pace.patience)) is not None:
                seen.taken.append(value)
        if await pace.handle():
            return True


async def _timeout(queue: Any, seen: Seen, pace: _Pace) -> bool:
    while True:
        with suppress(TimeoutError, delayq.DecodeError):
            async with asyncio.timeout(pace.patience):
                seen.taken.append(await queue.take())
        if await pace.handle():
            return True


async def _drain(queue: Any, seen: Seen, pace: _Pace) -> bool:
    while True:
        with suppress(delayq.DecodeError):
            seen.taken += await queue.drain(pace.some)
        await asyncio.sleep(0.01)
        if await pace.handle():
            return True


async def _poll_many(queue: Any, seen: Seen, pace: _Pace) -> bool:
    while True:
        with suppress(delayq.DecodeError):
            seen.taken += await queue.pending.poll_many(pace.some)
        with suppress(delayq.DecodeError):
            seen.taken += await queue.drain(10)
        await asyncio.sleep(0.01)
        if await pace.handle():
            return True


async def _leased(messages: Any, seen: Seen, pace: _Pace) -> bool:
    async with aclosing(messages):
        async for message in messages:
            last = False
            seen.begun.add(message.value)
            try:
                async with message:
                    last = await pace.handle()
                    # Handled. Until the block has ended, the acknowledgement may or may not have
                    # been carried out.
                    seen.unsure.add(message.value)
                seen.unsure.discard(message.value)
                seen.acked.append(message.value)
            except (delayq.LeaseLost, delayq.OutcomeUnknown):
                pass
            if last:
                return True
    return False


async def _deliveries(queue: Any, seen: Seen, pace: _Pace) -> bool:
    return await _leased(queue.deliveries(LEASE), seen, pace)


async def _messages(queue: Any, seen: Seen, pace: _Pace) -> bool:
    return await _leased(queue.__aiter__(), seen, pace)


_WAYS: dict[str, Callable[[Any, Seen, _Pace], Awaitable[bool]]] = {
    "loop": _loop,
    "take": _take,
    "poll": _poll,
    "timeout": _timeout,
    "drain": _drain,
    "poll_many": _poll_many,
    "deliveries": _deliveries,
    "messages": _messages,
}


def open_queue(client: delayq.Client, plan: Plan, number: int) -> Any:
    """Open the queue with this number."""
    if plan.queues[number] == "messages":
        return client.reliable_queue(plan.name(number), lease=LEASE, max_attempts=None)
    return client.delayed_queue(plan.name(number))


# The trial


class Trials:
    """A server, and the resources that concurrent trials share. Use it with ``async with``."""

    def __init__(self, server: PrivateServer, threads: int) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(threads)
        self._raw: Any = None

    async def __aenter__(self) -> Self:
        self._raw = Redis.from_url(self._server.unix_url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False)
        await self._raw.aclose()

    async def run(self, plan: Plan) -> Outcome:
        """Carry out one trial."""
        outcome = Outcome(plan)
        seen = [Seen() for _ in plan.queues]
        async with Links(self._server, tcp=True, round_trip=plan.round_trip) as links:
            async with delayq.connect(self._server.unix_url, resync_interval=3600) as producer:
                await self._fill(producer, plan, seen)
            outcome.offered = sum(len(one.offered) for one in seen)
            client = _Client(links.url, plan, seen, outcome)
            running = asyncio.get_running_loop().run_in_executor(self._threads, client.run)
            try:
                await asyncio.wait_for(asyncio.shield(running), GOES_WITHIN)
            except TimeoutError:
                outcome.errors.append(f"the client is still there after {GOES_WITHIN:g} s")
                links.cut()
                await running
            # Everything that was sent arrives.
            await until(lambda: not links.count)
        outcome.delivered = sum(len(one.taken) + len(one.acked) for one in seen)
        for number, way in enumerate(plan.queues):
            # Two consumers that leave at different times give back one after the other, no matter
            # which has the older messages.
            if plan.later[number] or seen[number].consumers > 1 or way == "messages":
                continue
            there = [
                json.loads(value)
                for value in await self._raw.lrange(plan.name(number), 0, -1)
                if value[:1] != b"{"
            ]
            # Messages whose handling was cancelled went back by themselves.
            there = [value for value in there if value not in seen[number].begun]
            if there != sorted(there):
                outcome.disordered.append(f"{_where(plan, number)}: {there[:40]}")
        await self._take_the_rest(plan, seen, outcome)
        await self._judge(plan, seen, outcome)
        return outcome

    async def _fill(self, producer: delayq.Client, plan: Plan, seen: list[Seen]) -> None:
        chance = random.Random(f"producer {plan.seed}")
        for number, way in enumerate(plan.queues):
            name, one = plan.name(number), seen[number]
            ready, later = plan.ready[number], plan.later[number]
            one.offered = set(range(ready + later))
            # Some come due before the client leaves, and some after.
            delays = [0.0] * ready + sorted(
                chance.random() * 1.5 * (plan.after + 0.2) for _ in range(later)
            )
            if way == "messages":
                queue = producer.reliable_queue(name, lease=LEASE, max_attempts=None)
                await queue.offer_many(
                    [Offer(value, delay=delay) for value, delay in enumerate(delays)]
                )
                continue
            payloads = [str(value) for value in range(ready)]
            if payloads and chance.random() < 0.2:
                one.broken = {f"{{unreadable {n}" for n in range(chance.randint(1, 3))}
                for payload in one.broken:
                    payloads.insert(chance.randrange(len(payloads)), payload)
            if payloads:
                # As Java writes them.
                await self._raw.rpush(name, *payloads)
            if later:
                await producer.delayed_queue(name).offer_many(list(enumerate(delays))[ready:])

    async def _take_the_rest(self, plan: Plan, seen: list[Seen], outcome: Outcome) -> None:
        async with delayq.connect(self._server.unix_url, resync_interval=RESYNC) as client:
            tasks = [
                asyncio.create_task(self._take_rest_of(client, plan, n, one))
                for n, one in enumerate(seen)
            ]
            try:
                await until(lambda: all(one.is_complete() for one in seen), LEASES_WITHIN)
            except TimeoutError:
                # A message that a call handed out and no client confirmed is kept for minutes. Skip
                # that time.
                outcome.kept = await self._end_leases(plan)
                with suppress(TimeoutError):
                    await until(lambda: all(one.is_complete() for one in seen), REST_WITHIN)
            # A message that is delivered twice arrives now, or has already done so.
            with suppress(TimeoutError):
                await until(lambda: self._left(plan), LEASE + 2, equals=[])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_leases(self, plan: Plan) -> int:
        """End all leases of delayed queues, and return how many there were."""
        count = 0
        for number, way in enumerate(plan.queues):
            if way != "messages":
                key = DelayedKeys.of(plan.name(number)).leases
                for token in await self._raw.zrange(key, 0, -1):
                    count += 1
                    await self._raw.zadd(key, {token: 1}, xx=True)
        return count

    async def _take_rest_of(
        self, client: delayq.Client, plan: Plan, number: int, seen: Seen
    ) -> None:
        queue = open_queue(client, plan, number)
        if plan.queues[number] != "messages":
            async for value in queue:
                seen.rest.append(value)
            return
        async for message in queue:
            seen.rest.append(message.value)
            await message.ack()

    async def _left(self, plan: Plan) -> list[str]:
        """Return the keys of this trial that hold messages, except the quarantine."""
        names = [
            key
            async for key in self._raw.scan_iter(f"*moments-{plan.seed}-*", count=1000)
            if b"quarantine" not in key and not key.endswith(b":settings")
        ]
        holding = [n for n in names if await self._raw.type(n) not in (b"string", b"none")]
        return sorted(name.decode() for name in holding)

    async def _judge(self, plan: Plan, seen: list[Seen], outcome: Outcome) -> None:
        for number, (way, one) in enumerate(zip(plan.queues, seen, strict=True)):
            where = _where(plan, number)
            if lost := one.offered - {*one.taken, *one.acked, *one.unsure, *one.rest}:
                outcome.lost[where] = sorted(lost)
            counts = Counter([*one.taken, *one.acked, *one.rest])
            if doubled := [
                value for value, count in counts.items() if count > 1 and value not in one.unsure
            ]:
                outcome.doubled[where] = doubled
            if way != "messages":
                quarantined = Counter(
                    value.decode()
                    for value in await self._raw.lrange(_quarantine(plan, number), 0, -1)
                )
                if quarantined != Counter(one.broken):
                    astray = (Counter(one.broken) - quarantined) + (
                        quarantined - Counter(one.broken)
                    )
                    outcome.strayed[where] = list(astray)
        outcome.left = await self._left(plan)


def _where(plan: Plan, number: int) -> str:
    return f"{plan.name(number)} ({plan.queues[number]})"


def _quarantine(plan: Plan, number: int) -> str:
    return DelayedKeys.of(plan.name(number)).quarantine


# Many trials


async def run_all(
    server: PrivateServer, plans: Iterable[Plan], at_once: int, told: Callable[[Outcome], None]
) -> None:
    """Carry out trials, ``at_once`` of them at the same time."""
    waiting: Iterator[Plan] = iter(plans)
    async with Trials(server, at_once) as trials:

        async def work() -> None:
            for plan in waiting:
                try:
                    told(await trials.run(plan))
                except Exception as error:
                    told(Outcome(plan, errors=[f"the trial ended with {error!r}"]))

        await asyncio.gather(*(work() for _ in range(at_once)))


def _batch(plans: Sequence[Plan], at_once: int) -> list[Outcome]:
    """Run a batch of trials in a process of its own."""
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    found, _ = find_kinds()
    outcomes: list[Outcome] = []
    with PrivateServer(next(iter(found.values()))) as server:
        asyncio.run(run_all(server, plans, at_once, outcomes.append))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table with a line for each ending and round trip."""
    columns: dict[str, Callable[[Outcome], int]] = {
        "trials": lambda _: 1,
        "offered": lambda one: one.offered,
        "delivered": lambda one: one.delivered,
        "lost": lambda one: sum(map(len, one.lost.values())),
        "doubled": lambda one: sum(map(len, one.doubled.values())),
        "astray": lambda one: sum(map(len, one.strayed.values())),
        "kept": lambda one: one.kept,
        "order": lambda one: len(one.disordered),
        "slow": lambda one: one.closed_in > one.bound,
        "left": lambda one: len(one.left),
        "errors": lambda one: len(one.errors),
    }
    lines = [f"{'ending':<18} {'ms':>4} {' '.join(map('{:>9}'.format, columns))} longest close"]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: (one.plan.ending, one.plan.round_trip)):
        groups.setdefault((one.plan.ending, str(one.plan.round_trip)), []).append(one)
    groups["all", ""] = list(outcomes)
    for (ending, ms), some in groups.items():
        sums = " ".join(f"{sum(map(count, some)):>9}" for count in columns.values())
        longest = max((one.closed_in for one in some), default=0)
        lines.append(f"{ending:<18} {ms:>4} {sums} {longest:>13.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others follow")
    parser.add_argument("--round-trip", type=int, help="milliseconds, instead of chance")
    parser.add_argument("--ending", choices=ENDINGS, help="instead of chance")
    parser.add_argument(
        "--way",
        action="append",
        default=[],
        choices=[*TAKING, *LEASING],
        help="instead of chance; several",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--at-once", type=int, default=8, help="trials in each process")
    options = parser.parse_args()
    if not find_kinds()[0]:
        sys.exit("no server found on this machine")
    plans = [
        Plan.of(seed, round_trip=options.round_trip, ending=options.ending, ways=options.way)
        for seed in range(options.seed, options.seed + options.trials)
    ]
    started, outcomes = time.monotonic(), list[Outcome]()
    size = max(1, min(2 * options.at_once, -(-len(plans) // options.processes)))
    batches = [plans[at : at + size] for at in range(0, len(plans), size)]
    with ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for batch in pool.map(_batch, batches, [options.at_once] * len(batches)):
            outcomes += batch
            for one in batch:
                for words in one.flaws:
                    print(
                        f"seed {one.plan.seed}, {one.plan.round_trip} ms, {one.plan.ending}:"
                        f" {words}",
                        flush=True,
                    )
    print(*table(outcomes), sep="\n")
    failed = sum(bool(one.flaws) for one in outcomes)
    print(f"{len(outcomes)} trials in {time.monotonic() - started:.0f} s, {failed} with flaws")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
