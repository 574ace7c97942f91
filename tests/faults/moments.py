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
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

import delayq
from delayq._redisson.keys import DelayedKeys
from tests.support.links import Links
from tests.support.servers import PrivateServer, first_kind
from tests.support.timing import Control
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROUND_TRIPS = (20, 100, 250)
"""Milliseconds."""
WAYS = ("loop", "take", "poll", "timeout", "drain", "poll_many")
"""The ways to take a message for good. Storms and simulations close clients that have leases."""
ENDINGS = ("block ends", "closed by another", "queues closed", "cancelled", "cancelled twice")
RESYNC = 0.2
"""Seconds between two re-checks by the client that takes the rest."""
COMES_WITHIN = 8.0
"""Seconds within which due times come."""
REST_WITHIN = 60.0
"""Seconds within which the rest arrives after that."""
LEFT_WITHIN = 5.0
"""Seconds within which the server has nothing left of a trial."""
GOES_WITHIN = 60.0
"""Seconds after which the client must have left, whatever its plan."""
CLOSE_WITHIN = 1.0
"""Seconds that a close may take, besides two round trips."""
_SLACK = 0.1


@dataclass(frozen=True)
class Plan:
    """The plan of a trial."""

    seed: int
    round_trip: int
    """Milliseconds."""
    queues: tuple[str, ...]
    """How each queue is consumed."""
    ready: tuple[int, ...]
    """How many messages each queue has when the trial begins."""
    later: tuple[int, ...]
    """How many messages of each queue come due during the trial."""
    ending: str
    after: float
    """Seconds until the client leaves."""
    again: float
    """Seconds between the first cancellation and the second."""
    lasts: bool
    """Whether its event loop keeps running afterwards."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(f"moments {seed}")
        ms, count = chance.choice(ROUND_TRIPS), chance.choice((1, 2, 5, 10, 20, 50))
        queues = tuple(chance.choice((*WAYS, "loop", "loop")) for _ in range(count))
        most = max(6, 800 // count)
        ending = chance.choice(ENDINGS)
        return cls(
            seed,
            ms,
            queues,
            tuple(chance.randint(0, most) if chance.random() < 0.8 else 0 for _ in queues),
            tuple(chance.randint(0, most // 4) if chance.random() < 0.5 else 0 for _ in queues),
            ending,
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
    offered: set[int] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)

    def is_complete(self) -> bool:
        return self.offered <= {*self.taken, *self.rest}


# The client that leaves


class _Client:
    """A client in its own event loop and thread."""

    def __init__(self, url: str, trial: Trial) -> None:
        self._url = url
        self._plan = trial.plan
        self._seen = trial.seen
        self._flaws = trial.flaws
        self._control = trial.control
        self._chance = random.Random(f"client {trial.plan.seed}")

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        plan, loop = self._plan, asyncio.get_running_loop()
        consumers: list[asyncio.Task[None]] = []
        opened: asyncio.Future[delayq.Client] = loop.create_future()
        leaves = asyncio.Event()

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
        lost = self._control.lost
        took = await self._leave(client, owning, leaves)
        # On a busy machine or server, a close may be late by more than the control is.
        late = 3 * (self._control.lost - lost)
        bound = CLOSE_WITHIN + 2 * plan.round_trip / 1000 + late + _SLACK
        if took > bound:
            self._flaws.append(f"the close took {took:.2f} s, not {bound:.2f} s")
        if not owning.cancelled() and (error := owning.exception()) is not None:
            self._flaws.append(f"the client ended with {error!r}")
        cancelling.cancel()
        if plan.lasts:
            for task in consumers:
                task.cancel()
            await asyncio.gather(*consumers, cancelling, return_exceptions=True)
            await asyncio.sleep(0.1 + 3 * plan.round_trip / 1000)
        # Otherwise the event loop ends now, and only what was written to sockets remains of it.

    async def _leave(
        self, client: delayq.Client, owning: asyncio.Task[None], leaves: asyncio.Event
    ) -> float:
        """Leave as the plan says. Return the seconds of the longest close."""
        plan, loop, took = self._plan, asyncio.get_running_loop(), 0.0
        started = loop.time()
        if plan.ending == "closed by another":
            await client.aclose()
        elif plan.ending == "queues closed":
            numbers = range(len(plan.queues))
            left = [plan.name(number) for number in numbers if self._chance.random() < 0.7]
            await asyncio.gather(*(client.delayed_queue(name).aclose() for name in left))
        if plan.ending.startswith("cancelled"):
            owning.cancel()
            if plan.ending == "cancelled twice":
                await asyncio.sleep(plan.again)
                owning.cancel()
        else:
            started, took = loop.time(), loop.time() - started
            leaves.set()
        await asyncio.wait({owning})
        return max(took, loop.time() - started)

    async def _cancel_some(self, consumers: Sequence[asyncio.Task[None]]) -> None:
        """Cancel consumers at random moments, some of them twice."""
        chance, seconds = self._chance, self._plan.round_trip / 1000
        for task in chance.sample(consumers, chance.randint(0, len(consumers))):
            await asyncio.sleep(chance.choice((0, chance.random() * seconds)))
            task.cancel()
            if chance.random() < 0.4:
                await asyncio.sleep(chance.choice((0, chance.random() * seconds)))
                task.cancel()

    async def _consume(self, client: delayq.Client, number: int, place: int) -> None:
        way, seen = self._plan.queues[number], self._seen[number]
        seen.consumers += 1
        chance = random.Random(f"consumer {self._plan.seed} {number} {place}")
        try:
            queue = client.delayed_queue(self._plan.name(number))
            while await _consume(way, queue, seen, _Pace(chance, self._plan.round_trip / 1000)):
                # The loop was left, and at times it comes back.
                await asyncio.sleep(chance.random() * 0.2)
                if chance.random() < 0.3:
                    return
        except delayq.Closed:
            pass
        except delayq.ServerError as error:
            # A call that was not waiting for messages when the client closed may end like this. It
            # must not lose anything.
            with suppress(delayq.Closed):
                client.statistics()
                self._flaws.append(f"{way}: {error!r}")


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


async def _take(way: str, queue: Any, seen: Seen, pace: _Pace) -> None:
    match way:
        case "take":
            seen.taken.append(await queue.take())
        case "poll":
            if (value := await queue.poll(pace.patience)) is not None:
                seen.taken.append(value)
        case "timeout":
            async with asyncio.timeout(pace.patience):
                seen.taken.append(await queue.take())
        case _:
            if way == "poll_many":
                with suppress(delayq.DecodeError):
                    seen.taken += await queue.pending.poll_many(pace.some)
            try:
                seen.taken += await queue.drain(pace.some if way == "drain" else 10)
            finally:
                await asyncio.sleep(0.01)


async def _consume(way: str, queue: Any, seen: Seen, pace: _Pace) -> bool:
    """Consume in one of the ways. Return whether it was left, or False if the queue closed."""
    if way == "loop":
        async for value in queue:
            seen.taken.append(value)
            if await pace.handle():
                return True
        return False
    while True:
        with suppress(TimeoutError, delayq.DecodeError):
            await _take(way, queue, seen, pace)
        if await pace.handle():
            return True


# The trial


class Trial:
    """One trial, and what it shares with others."""

    def __init__(
        self,
        plan: Plan,
        server: PrivateServer,
        raw: Any,
        threads: ThreadPoolExecutor,
        control: Control,
    ) -> None:
        self.plan: Plan = plan
        self.seen: list[Seen] = [Seen() for _ in plan.queues]
        self.control: Control = control
        self.flaws: list[str] = []
        """Everything that must not happen, in words."""
        self._server = server
        self._raw = raw
        self._threads = threads

    async def run(self) -> None:
        plan, seen = self.plan, self.seen
        async with Links(self._server, tcp=True, round_trip=plan.round_trip) as links:
            async with delayq.connect(self._server.unix_url, resync_interval=3600) as producer:
                await self._fill(producer)
            client = _Client(links.url, self)
            running = asyncio.get_running_loop().run_in_executor(self._threads, client.run)
            try:
                await asyncio.wait_for(asyncio.shield(running), GOES_WITHIN)
            except TimeoutError:
                self.flaws.append(f"the client is still there after {GOES_WITHIN:g} s")
                links.cut()
                await running
            # Everything that was sent arrives.
            await until(lambda: not links.count)
        for number, way in enumerate(plan.queues):
            # Two consumers that leave at different times give back one after the other, no matter
            # which has the older messages.
            if plan.later[number] or seen[number].consumers > 1:
                continue
            payloads = await self._raw.lrange(plan.name(number), 0, -1)
            there = [json.loads(payload) for payload in payloads if payload[:1] != b"{"]
            if there != sorted(there):
                self.flaws.append(f"out of order: {way} {plan.name(number)}: {there[:40]}")
        await self._take_the_rest()
        await self._judge()

    async def _fill(self, producer: delayq.Client) -> None:
        plan, chance = self.plan, random.Random(f"producer {self.plan.seed}")
        for number, one in enumerate(self.seen):
            name, ready, later = plan.name(number), plan.ready[number], plan.later[number]
            one.offered = set(range(ready + later))
            payloads = [str(value) for value in range(ready)]
            if payloads and chance.random() < 0.2:
                one.broken = {f"{{unreadable {n}" for n in range(chance.randint(1, 3))}
                for payload in one.broken:
                    payloads.insert(chance.randrange(len(payloads)), payload)
            if payloads:
                # As Java writes them.
                await self._raw.rpush(name, *payloads)
            if later:
                # Some come due before the client leaves, and some after.
                longest = 1.5 * (plan.after + 0.2)
                delays = sorted(chance.random() * longest for _ in range(later))
                offers = [*enumerate(delays, ready)]
                await producer.delayed_queue(name).offer_many(offers)

    async def _take_the_rest(self) -> None:
        numbers = range(len(self.seen))
        async with delayq.connect(self._server.unix_url, resync_interval=RESYNC) as client:
            tasks = [asyncio.create_task(self._take_rest_of(client, n)) for n in numbers]
            try:
                await until(self._is_complete, COMES_WITHIN)
            except TimeoutError:
                # A message that a call handed out and no client confirmed is kept for minutes. Skip
                # that time.
                for number in numbers:
                    key = DelayedKeys.of(self.plan.name(number)).leases
                    for token in await self._raw.zrange(key, 0, -1):
                        await self._raw.zadd(key, {token: 1}, xx=True)
                with suppress(TimeoutError):
                    await until(self._is_complete, REST_WITHIN)
            # A message that is delivered twice arrives now, or has already done so.
            with suppress(TimeoutError):
                await until(self._left, LEFT_WITHIN, equals=[])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_complete(self) -> bool:
        return all(one.is_complete() for one in self.seen)

    async def _take_rest_of(self, client: delayq.Client, number: int) -> None:
        async for value in client.delayed_queue(self.plan.name(number)):
            self.seen[number].rest.append(value)

    async def _left(self) -> list[str]:
        """Return the keys of this trial that hold messages, except the quarantine."""
        names = [
            key
            async for key in self._raw.scan_iter(f"*moments-{self.plan.seed}-*", count=1000)
            if b"quarantine" not in key
        ]
        holding = [n for n in names if await self._raw.type(n) not in (b"string", b"none")]
        return sorted(name.decode() for name in holding)

    async def _judge(self) -> None:
        def note(flaw: str, values: Iterable[object]) -> None:
            if found := sorted(map(str, values)):
                self.flaws.append(f"{flaw}: {len(found)} of {way} {name}: {found[:8]}")

        for number, one in enumerate(self.seen):
            way, name = self.plan.queues[number], self.plan.name(number)
            counts = Counter([*one.taken, *one.rest])
            note("lost", one.offered - {*counts})
            note("doubled", (n for n in counts if counts[n] > 1))
            key = DelayedKeys.of(name).quarantine
            stored = [value.decode() for value in await self._raw.lrange(key, 0, -1)]
            quarantined, broken = Counter(stored), Counter(one.broken)
            note("astray", (broken - quarantined) + (quarantined - broken))
        self.flaws += [f"left: {name}" for name in await self._left()]


# Many trials


async def run_all(server: PrivateServer, plans: Iterable[Plan], at_once: int) -> list[list[str]]:
    """Carry out trials, ``at_once`` of them at the same time. Return and print what is wrong."""
    waiting, flaws = iter(plans), list[list[str]]()
    threads = ThreadPoolExecutor(at_once)

    async def work(raw: Any, control: Control) -> None:
        for plan in waiting:
            trial = Trial(plan, server, raw, threads, control)
            try:
                await trial.run()
            except Exception as error:
                trial.flaws.append(f"the trial ended with {error!r}")
            flaws.append(trial.flaws)
            for words in trial.flaws:
                print(f"seed {plan.seed}, {plan.round_trip} ms, {plan.ending}: {words}")

    with Control(server) as control:
        async with Redis.from_url(server.unix_url, socket_timeout=60) as raw:
            await asyncio.gather(*(work(raw, control) for _ in range(at_once)))
    threads.shutdown(wait=False)
    return flaws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others follow")
    options = parser.parse_args()
    plans = map(Plan.of, range(options.seed, options.seed + options.trials))
    with PrivateServer(first_kind()) as server:
        sys.exit(any(asyncio.run(run_all(server, plans, 8))))


if __name__ == "__main__":
    main()
