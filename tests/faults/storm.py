"""A storm: producers and consumers work through a network while everything beneath them is broken
and healed.

::

    make storms                                                       # a few minutes of each kind
    python -m tests.faults.storm --minutes 10 --kind plain            # one kind for longer
    python -m tests.faults.storm --kind reliable --round-trip 60 --mbit 40
    python -m tests.faults.storm --kind reliable --servers sentinel   # or cluster

:mod:`tests.faults.replicated` describes the servers.

A seed chooses which fault comes when; chance decides what it hits. :mod:`tests.faults.checker`
judges the outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

import delayq
from delayq import Limit, Offer
from delayq._redis.client import RETRY_FOR
from delayq.admin.reliable import ReliableInspector
from tests.faults import consumers
from tests.faults.checker import Rules, Violation, summary
from tests.faults.consumers import (
    IDS,
    KINDS,
    LEASE,
    QUEUE,
    RESYNC,
    Consumer,
    Habits,
    Kind,
    offer_each,
    offer_together,
    open_reliable,
    shorten_deadlines,
)
from tests.faults.history import (
    REUSED,
    Delivered,
    End,
    Fault,
    History,
    Offered,
    Told,
    demand_one_clock,
    now_us,
    read_notes,
)
from tests.faults.limits import judge_storm
from tests.faults.replicated import BehindSentinels, InCluster
from tests.faults.victims import start
from tests.support.links import Direction, Links, detour
from tests.support.servers import PrivateServer, find_kinds, first_kind, memory_disk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Self

    from delayq._reliable.offer import OnDuplicate
    from tests.faults.replicated import Replicated

WITHIN = 30.0
"""Seconds that a message may take once it is due and nothing holds it back."""
REUSES = 0.1
"""The share of offering calls after which ids of expired messages are used again."""
RESULTS = 2_000
"""The number of messages whose results are looked at."""
BACKLOG = 4_000
"""Undelivered messages at the next fault, at most: it should hit clients at work."""


@dataclass(frozen=True)
class Plan:
    kind: Kind
    messages: int
    faults: int
    seed: int
    clients: int = 2
    """How many clients offer, and how many consume, in this process."""
    loops: int = 2
    """Of each consuming client."""
    processes: int = 1
    """How many consumers are processes of their own, to be killed."""
    pause: tuple[float, float] = (0.05, 0.4)
    """Seconds between two faults: minimum and maximum."""
    tcp: bool = True
    round_trip: float = 0.0
    """Milliseconds, while nothing is broken."""
    mbit: float | None = None
    """Megabits per second, while nothing is broken; None means no limit."""
    habits: Habits = field(default_factory=lambda: Habits(resumes=0.02))
    within: float = WITHIN
    """Seconds that a message may take once it is due and nothing holds it back, on short links."""
    drain_within: float = 45.0
    """Seconds within which everything must be delivered once all is healed."""
    keeps: bool = False
    """Whether results are kept. Only for a reliable queue."""
    workers: bool = False
    """Whether workers consume, in the processes alone. Only for a reliable queue."""
    only: tuple[str, ...] = ()
    """The names of the faults to choose from; empty means each that is short."""
    partitions: int = 1
    """How many the queue has at first, if there are several. Only for a reliable queue."""
    groups: int = 0
    """How many groups the messages belong to, if any. Only for a reliable queue."""
    most: tuple[int | None, int | None] = (None, None)
    """How many messages run at once, of the queue and of each group. Only for a reliable queue."""

    @property
    def rules(self) -> Rules:
        lease_us = 0 if self.kind == "plain" else int(LEASE * 1_000_000)
        return Rules(lease_us, int(self.within * self.slower * 1_000_000))

    @property
    def slower(self) -> float:
        """How many times longer everything takes over distant links."""
        return 1 + self.round_trip / 50

    def judge(self, history: History) -> list[Violation]:
        """Return all violations."""
        return judge_storm(history, self.rules, self.most)


class Storm:
    """Clients, and one or more servers behind a network.

    Use it with ``async with``, and call :meth:`blow` once or repeatedly.
    """

    def __init__(self, servers: PrivateServer | Replicated, plan: Plan, folder: Path) -> None:
        self._servers = servers
        self._plan = plan
        self._chance = random.Random(f"storm {plan.seed}")
        self._stack = AsyncExitStack()
        self._faults = _Faults(self)
        self._keys = itertools.count()
        self._clients: list[delayq.Client] = []
        self._producers: list[delayq.Client] = []
        self._consuming: deque[tuple[delayq.Client, list[asyncio.Task[None]]]] = deque()
        self._numbers = itertools.count()
        self._reusing: set[asyncio.Task[None]] = set()
        self._doubts = _Doubts()
        self._raw: dict[PrivateServer, Any] = {}
        self.links: list[Links] = []
        """The links through which clients reach each server."""
        self.crowd: Crowd = Crowd(folder, plan)
        self.history: History = History()
        self.injected: Counter[str] = Counter()
        """Faults so far, by name."""

    async def __aenter__(self) -> Self:
        plan, stack = self._plan, self._stack
        for server in await self.masters():
            demand_one_clock(server)
        try:
            await self._lay_links()
            stack.push_async_callback(asyncio.to_thread, self.crowd.close)
            logging.getLogger("delayq").addHandler(self._doubts)
            stack.callback(logging.getLogger("delayq").removeHandler, self._doubts)
            for _ in range(plan.clients):
                self._producers.append(await self._client())
            if plan.partitions > 1 or any(plan.most):
                whole, group = (Limit(concurrency=most) if most else None for most in plan.most)
                await open_reliable(self._producers[0]).configure(
                    partitions=plan.partitions, limit=whole, group_limit=group
                )
            if plan.keeps:
                await open_reliable(self._producers[0]).configure(keep=3600, max_kept=1_000_000)
            stack.push_async_callback(self._stop_consuming)
            # Workers have processes of their own.
            for _ in range(0 if plan.workers else plan.clients):
                await self.start_consuming()
            for _ in range(plan.processes):
                await asyncio.to_thread(self.crowd.start)
        except BaseException:
            await stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _lay_links(self) -> None:
        plan, servers = self._plan, self._servers
        alone = isinstance(servers, PrivateServer)
        for server in [servers] if isinstance(servers, PrivateServer) else servers.list_all():
            links = Links(
                server, tcp=plan.tcp or not alone, round_trip=plan.round_trip, mbit=plan.mbit
            )
            self.links.append(await self._stack.enter_async_context(links))
            if not alone:
                assert server.port is not None
                self.crowd.detours[server.port] = links.port
        self._stack.enter_context(detour(self.crowd.detours))
        # Several servers announce their own addresses; connections to these take detours.
        self.crowd.url = servers.url if not isinstance(servers, PrivateServer) else links.url

    async def masters(self) -> Sequence[PrivateServer]:
        """Return every server that holds messages."""
        if isinstance(self._servers, PrivateServer):
            return [self._servers]
        return await asyncio.to_thread(self._servers.list_masters)

    async def master_of(self, key: str) -> PrivateServer:
        """Return the server that holds a key."""
        if isinstance(self._servers, PrivateServer):
            return self._servers
        return await asyncio.to_thread(self._servers.master_of, key)

    async def raw(self, server: PrivateServer) -> Any:
        """Return a separate client of a server, which bypasses all links."""
        if server not in self._raw:
            redis = Redis.from_url(server.unix_url, retry_on_error=[ConnectionError])
            self._raw[server] = await self._stack.enter_async_context(redis)
        return self._raw[server]

    # Reports from consumers in this process

    def began(self, delivered: Delivered) -> None:
        self.history.delivered.append(delivered)

    def ended(self, _: Delivered) -> None: ...

    # The storm itself

    async def blow(self) -> History:
        """Offer everything, break everything, heal it, drain it, and return what was seen."""
        plan = self._plan
        self.history = History(groups=plan.groups)
        self._doubts.clear()
        shares = asyncio.Queue[int | None]()
        producing = [
            asyncio.create_task(self._produce(client, shares)) for client in self._producers
        ]
        try:
            order = self._faults.order(plan.faults, self._chance)
            for number, name in enumerate(order):
                share = (
                    plan.messages * (number + 1) // plan.faults
                    - plan.messages * number // plan.faults
                )
                shares.put_nowait(share // 2)
                await asyncio.sleep(self._chance.uniform(*plan.pause))
                # Processes report only later what they have received.
                with suppress(TimeoutError, OSError):
                    await until(self._is_small, 30)
                # These are offered while the fault happens, or just before.
                shares.put_nowait(share - share // 2)
                await asyncio.sleep(self._chance.uniform(0, 0.01))
                fault = Fault(name, now_us(), 0)
                self.history.faults.append(fault)
                async with asyncio.timeout(120):
                    await self._faults.inject(name, self._chance)
                fault.to_us = now_us()
                self.injected[name] += 1
            for _ in producing:
                shares.put_nowait(None)
            async with asyncio.timeout(120):
                await asyncio.gather(*producing)
                await asyncio.gather(*self._reusing)
        finally:
            for task in (*producing, *self._reusing):
                task.cancel()
            await asyncio.gather(*producing, *self._reusing, return_exceptions=True)
            self._reusing.clear()
        await self._drain()
        return self.history

    def take_doubts(self) -> tuple[set[str], int]:
        """Return the copies that the log doubts, and how many more it does not name, and forget
        them.
        """
        found = self._doubts.copies, self._doubts.nameless
        self._doubts.clear()
        return found

    async def _is_small(self) -> bool:
        await asyncio.sleep(0.02)
        size, is_reliable = 0, self._plan.kind == "reliable"
        partitions = open_reliable(self._producers[0])._open.partitions if is_reliable else ()
        for key in [partition.keys.named("bodies") for partition in partitions] or [QUEUE]:
            raw = await self.raw(await self.master_of(key))
            size += await (raw.hlen if is_reliable else raw.llen)(key)
        return size < BACKLOG

    async def end(self) -> History:
        """Close everything, look at what is left, and return everything seen since :meth:`blow`."""
        history = self.history
        await self._stop_consuming()
        await asyncio.to_thread(self.crowd.close)
        history.delivered += self.crowd.take_notes()
        history.kills = self.crowd.kills
        history.doubts, history.nameless_doubts = self._doubts.copies, self._doubts.nameless
        if self._plan.keeps:
            await self._look_at_results(history)
        for client in self._clients:
            # Closing a client twice does nothing.
            await client.aclose()
        if self._plan.kind == "plain":
            # Messages that were fetched ahead went back when the consumers ended.
            raw = await self.raw(await self.master_of(QUEUE))
            for value in await raw.lrange(QUEUE, 0, -1):
                history.delivered.append(
                    Delivered(int(value), now_us(), "the end", claimed_us=now_us())
                )
            await raw.delete(QUEUE)
        history.left += [
            f"stays on the server for ever: {name}" for name in await self._lasting_keys()
        ]
        return history

    async def _look_at_results(self, history: History) -> None:
        queue = open_reliable(self._producers[0])
        ids = sorted({one.copy for one in history.delivered if not one.copy.startswith(REUSED)})

        async def look(id: str) -> None:  # noqa: A002
            try:
                history.results[id] = await queue.result(id, 0)
            except (delayq.NoResult, delayq.ResultTimeout, delayq.MessageFailed) as error:
                history.results[id] = type(error)

        looked_at = self._chance.sample(ids, min(RESULTS, len(ids)))
        for first in range(0, len(looked_at), 100):
            await asyncio.gather(*map(look, looked_at[first : first + 100]))

    async def start_consuming(self) -> None:
        """Start a client that consumes in several loops."""
        plan, who, client = self._plan, f"consumer {next(self._numbers)}", await self._client()
        loops = [
            Consumer(client, plan.kind, f"{who}.{n}", self, (plan.seed, who, n), plan.habits)
            for n in range(plan.loops)
        ]
        self._consuming.append((client, [asyncio.create_task(loop.run()) for loop in loops]))

    async def repartition(self, chance: random.Random) -> None:
        """Move the queue to another number of partitions. Another client may have died at it."""
        client, partitions = await self._client(), chance.choice((2, 3, 4, 8))
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, 4)):
                await ReliableInspector.of(client, QUEUE).repartition(partitions)
        await ReliableInspector.of(client, QUEUE).repartition(partitions)

    async def close_one(self, _: random.Random) -> None:
        """Close the client that has consumed longest, and start another."""
        client, tasks = self._consuming.popleft()
        # Its loops end by themselves.
        await client.aclose()
        await asyncio.gather(*tasks)
        await self.start_consuming()

    async def _client(self) -> delayq.Client:
        client = await self._stack.enter_async_context(
            delayq.connect(self.crowd.url, resync_interval=RESYNC)
        )
        self._clients.append(client)
        return client

    async def _stop_consuming(self) -> None:
        tasks = [task for _, some in self._consuming for task in some]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._consuming.clear()
        for result in results:
            if isinstance(result, Exception):
                raise result

    # Producers

    async def _produce(self, client: delayq.Client, shares: asyncio.Queue[int | None]) -> None:
        while (share := await shares.get()) is not None:
            while share > 0:
                count = min(share, self._chance.choice((1, 20, 50, 150, 300, 500)))
                share -= count
                await self._offer(client, count)
                if self._plan.kind == "reliable" and self._chance.random() < REUSES:
                    self._reusing.add(
                        asyncio.create_task(self._reuse(client, self._chance.choice((1, 2, 50))))
                    )

    async def _offer(self, client: delayq.Client, count: int) -> None:
        chance = self._chance
        delays = [
            chance.choice((0.0, chance.random() * 0.3, chance.random() * 2.0)) for _ in range(count)
        ]
        messages = {next(self._keys): delay for delay in delays}
        if count <= 50:
            await offer_each(client, self._plan.kind, self.history, messages)
        else:
            named = chance.random() < 0.5
            await offer_together(client, self._plan.kind, self.history, messages, named=named)

    async def _reuse(self, client: delayq.Client, count: int) -> None:
        """Offer messages that expire at once, then others under the same ids."""
        chance, queue, offered = self._chance, open_reliable(client, IDS), self.history.offered
        on_duplicate: OnDuplicate = chance.choice(("raise", "ignore", "replace"))
        ttl = chance.uniform(0.01, 0.2)
        delay = ttl * chance.random()
        first, second = ([next(self._keys) for _ in range(count)] for _ in range(2))
        names = [f"{REUSED} {key}" for key in second]
        for key in first:
            offered[key] = Offered(now_us() + int(delay * 1_000_000), expires=True)
        with suppress(delayq.ServerError):
            named = zip(first, names, strict=True)
            offers = [Offer(key, id=name, delay=delay, ttl=ttl) for key, name in named]
            await queue.offer_many(offers)
            for key in first:
                offered[key].told = Told.OK
        if any(offered[key].told is not Told.OK for key in first):
            # A message that is still on its way would expire later.
            return
        await asyncio.sleep(ttl + 0.002)
        for key in second:
            offered[key] = Offered(now_us())
        outcome_of = dict.fromkeys(names, Told.OK)
        try:
            named = zip(second, names, strict=True)
            offers = [Offer(key, id=name, on_duplicate=on_duplicate) for key, name in named]
            await queue.offer_many(offers)
        except delayq.DuplicateMessage as error:
            outcome_of |= dict.fromkeys(error.ids, Told.HELD)
        except delayq.OutcomeUnknown as error:
            outcome_of = dict.fromkeys(names, Told.UNKNOWN) | dict.fromkeys(error.stored, Told.OK)
        except delayq.ServerError:
            outcome_of = dict.fromkeys(names, Told.FAILED)
        for key, name in zip(second, names, strict=True):
            offered[key].told = outcome_of[name]

    # The end

    async def _drain(self) -> None:
        """Wait until every stored message is delivered, and every key gone that does not expire."""
        stored = {
            key
            for key, offered in self.history.offered.items()
            if offered.told is Told.OK and not offered.expires
        }
        seen: set[int] = set()
        read = 0

        async def drained() -> bool:
            nonlocal read
            await asyncio.sleep(0.05)
            seen.update(one.key for one in itertools.islice(self.history.delivered, read, None))
            read = len(self.history.delivered)
            if self._plan.kind == "plain" and not stored <= seen:
                return False
            return not await self._lasting_keys()

        plan = self._plan
        consumer = Consumer(
            self._producers[0], "reliable", "consumer of ids", self, plan.seed, plan.habits, IDS
        )
        consuming = asyncio.create_task(consumer.run())
        try:
            await until(drained, plan.drain_within * plan.slower)
        except TimeoutError:
            self.history.left.append(
                f"not drained within {plan.drain_within:g} s: {await self._lasting_keys()}"
            )
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    async def _lasting_keys(self) -> list[str]:
        clients = [await self.raw(server) for server in await self.masters()]
        return [
            name.decode()
            for raw in clients
            for name in await raw.keys("*")
            if not name.endswith(b":settings") and await raw.pttl(name) == -1
        ]


async def ride_out(
    servers: PrivateServer | Replicated, plan: Plan, folder: Path
) -> tuple[Storm, History]:
    """Carry out a storm. Return it, and everything that was seen."""
    async with Storm(servers, plan, folder) as storm:
        await storm.blow()
        return storm, await storm.end()


class Crowd:
    """Consumers that are processes of their own, and die without warning."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._numbers = itertools.count(1)
        self._processes: dict[str, Any] = {}
        self.kills: dict[str, int] = {}
        """When each of them was certainly dead."""
        self.url = ""
        self.detours: dict[int, int] = {}
        """From the ports that servers announce to the ports of the links that lead there."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def start(self) -> None:
        number = next(self._numbers)
        who, plan = f"process {number}", self._plan
        notes = self._folder / f"notes-{number}"
        loops = 0 if plan.workers else plan.loops
        seed = (plan.seed, who)
        consuming = (self.url, self.detours, notes, who, plan.kind, loops, seed, plan.habits)
        self._processes[who] = start(consumers.main, *consuming)

    def kill_one(self) -> None:
        """Kill the process that has lived longest."""
        if self._processes:
            who = next(iter(self._processes))
            process = self._processes.pop(who)
            process.kill()
            process.join()
            process.close()
            self.kills[who] = now_us()

    def close(self) -> None:
        while self._processes:
            self.kill_one()

    def take_notes(self) -> list[Delivered]:
        """Return what they saw."""
        paths = sorted(self._folder.glob("notes-*"))
        read = _without_certainty(read_notes(paths))
        for path in paths:
            path.unlink()
        return read

    async def settled_notes(self) -> list[Delivered]:
        """Return what the living processes have seen once nothing is in progress, and forget it."""
        paths = sorted(self._folder.glob("notes-*"))
        noted: list[Delivered] = []

        def all_ended() -> bool:
            # The last note follows the last acknowledgement.
            noted[:] = read_notes(paths)
            return all(one.end is not End.NONE for one in noted)

        with suppress(TimeoutError):
            await until(all_ended, 2)
        for path in paths:
            os.truncate(path, 0)
        return _without_certainty(noted)


def _without_certainty(delivered: list[Delivered]) -> list[Delivered]:
    """Return what a process saw that was killed: its last acknowledgements may not have left."""
    for one in delivered:
        if one.end is End.UNATTENDED:
            one.end = End.UNKNOWN
    return delivered


class _Doubts(logging.Handler):
    """Collects doubts about acknowledgements whose reply was not waited for."""

    _NAME = re.compile(r"message '([^']*)'")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.clear()

    def clear(self) -> None:
        self.copies: set[str] = set()
        self.nameless: int = 0

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        if "may be redelivered" not in words and "may be handled again" not in words:
            return
        if named := self._NAME.search(words):
            self.copies.add(named[1])
        else:
            self.nameless += 1


AWAY_FOR_LONG = "server away for long"
# Of these, a storm revokes one at a time.
_RIGHTS = "publish lpush rpush lpop set hset hdel zadd zrem zremrangebyrank"


class _Faults:
    """All faults that a storm can inject, by name. Each heals at its end."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._all: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "cut": lambda _: self._disturb(Links.cut, 0),
            "half open": lambda chance: self._disturb(Links.half_open, chance.uniform(0.1, 0.8)),
            "requests stalled": lambda chance: self._stall(chance, "requests"),
            "replies stalled": lambda chance: self._stall(chance, "replies"),
            "slow": self._slow,
            "cut in a request": lambda chance: self._drop(chance, "requests"),
            "cut in a reply": lambda chance: self._drop(chance, "replies"),
            "refused": self._refuse,
            "server stopped": self._sigstop,
            "server killed": lambda chance: self._sigkill(chance, chance.choice((0.0, 0.2))),
            # Until calls have been given up, and leases have ended.
            AWAY_FOR_LONG: lambda chance: self._sigkill(chance, RETRY_FOR + 1),
            "CLIENT KILL normal": lambda _: self._ask("CLIENT", "KILL", "TYPE", "normal"),
            "CLIENT KILL pubsub": lambda _: self._ask("CLIENT", "KILL", "TYPE", "pubsub"),
            "CLIENT PAUSE": self._pause,
            "SCRIPT FLUSH": lambda _: self._ask("SCRIPT", "FLUSH"),
            "consumer killed": self._kill_consumer,
            "client closed": storm.close_one,
            "right lost": self._lose_right,
            "repartition": storm.repartition,
            "planned failover": self._hand_over,
            "Sentinel killed": self._kill_sentinel,
        }

    def order(self, count: int, chance: random.Random) -> list[str]:
        """Return this many names, all about equally often, in random order."""
        plan = self._storm._plan
        chosen = plan.only or [name for name in self._all if name != AWAY_FOR_LONG]
        names = [name for name in chosen if self._fits(name)]
        order: list[str] = []
        while len(order) < count:
            order += chance.sample(names, len(names))
        return order[:count]

    def _fits(self, name: str) -> bool:
        match name:
            case "repartition":
                return self._storm._plan.partitions > 1
            case "consumer killed":
                return self._storm._plan.processes > 0
            case "planned failover":
                return not isinstance(self._storm._servers, PrivateServer)
            case "Sentinel killed":
                return isinstance(self._storm._servers, BehindSentinels)
        return True

    async def inject(self, name: str, chance: random.Random) -> None:
        try:
            await self._all[name](chance)
        finally:
            for links in self._storm.links:
                links.heal()
            if not isinstance(self._storm._servers, PrivateServer):
                await asyncio.to_thread(self._storm._servers.wait_until_sound)

    async def _one(self, chance: random.Random) -> PrivateServer:
        """Return the server, or one of the masters: most often a busy one."""
        return await self._storm.master_of(chance.choice((QUEUE, QUEUE, IDS)))

    async def _disturb(self, how: Callable[[Links], object], seconds: float) -> None:
        for links in self._storm.links:
            how(links)
        await asyncio.sleep(seconds)

    async def _stall(self, chance: random.Random, direction: Direction) -> None:
        # At times longer than a call waits.
        await self._disturb(lambda links: links.stall(direction), chance.uniform(0.1, 1.3))

    async def _slow(self, chance: random.Random) -> None:
        milliseconds = chance.uniform(1, 150)
        await self._disturb(lambda links: links.delay(milliseconds), chance.uniform(0.2, 0.6))

    async def _drop(self, chance: random.Random, direction: Direction) -> None:
        count = int(chance.random() * 20_000)
        seconds = chance.uniform(0.05, 0.3)
        await self._disturb(lambda links: links.cut_after(count, direction), seconds)

    async def _refuse(self, chance: random.Random) -> None:
        def refuse(links: Links) -> None:
            links.refuse()
            links.cut()

        await self._disturb(refuse, chance.uniform(0.05, 0.5))

    async def _sigstop(self, chance: random.Random) -> None:
        longest = 1.3 if isinstance(self._storm._servers, PrivateServer) else 2.0
        with (await self._one(chance)).paused():
            await asyncio.sleep(chance.uniform(0.1, longest))

    async def _sigkill(self, chance: random.Random, seconds: float) -> None:
        server = await self._one(chance)
        server.kill()
        await asyncio.sleep(seconds)
        await asyncio.to_thread(server.start)

    async def _pause(self, chance: random.Random) -> None:
        milliseconds = int(chance.uniform(50, 400))
        await self._ask("CLIENT", "PAUSE", str(milliseconds))
        await asyncio.sleep(milliseconds / 1000)

    async def _ask(self, *words: str) -> None:
        for server in await self._storm.masters():
            reply = await asyncio.to_thread(server.call, *words)
            assert not reply.startswith(b"-"), reply

    async def _lose_right(self, chance: random.Random) -> None:
        """Revoke a right and cut all connections, which remember their rights for a while."""
        command = chance.choice(_RIGHTS.split())
        raw = await self._storm.raw(await self._one(chance))
        async with raw.pipeline(transaction=True) as pipeline:
            pipeline.execute_command("ACL", "SETUSER", "default", f"-{command}")
            pipeline.execute_command("CLIENT", "KILL", "TYPE", "normal")
            await pipeline.execute()
        await asyncio.sleep(chance.uniform(0.05, 0.5))
        await self._ask("ACL", "SETUSER", "default", "+@all")

    async def _kill_consumer(self, _: random.Random) -> None:
        await asyncio.to_thread(self._storm.crowd.kill_one)
        await asyncio.to_thread(self._storm.crowd.start)

    async def _hand_over(self, chance: random.Random) -> None:
        servers: Any = self._storm._servers
        await asyncio.to_thread(servers.hand_over, chance.choice((QUEUE, QUEUE, IDS)), chance)

    async def _kill_sentinel(self, _: random.Random) -> None:
        servers: Any = self._storm._servers
        await asyncio.to_thread(servers.kill_a_sentinel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--round-trip", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--mbit", type=float, help="megabits a second; without it, no limit")

    parser.add_argument("--servers", choices=["one", "sentinel", "cluster"], default="one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument(
        "--most", type=int, nargs=2, default=(None, None), help="of queue and group"
    )
    parser.add_argument("--on", default=first_kind().name, choices=find_kinds()[0], help="server")
    parser.add_argument("--messages", type=int, default=6_000)
    parser.add_argument("--faults", type=int, default=30)
    options = parser.parse_args()
    kind = find_kinds()[0][options.on]
    shorten_deadlines()
    logging.getLogger("delayq").setLevel(logging.WARNING)
    logging.lastResort = None
    # A message that a killed process has taken for good is gone by contract, so plain queues have
    # no such processes.
    processes = 0 if options.kind == "plain" else 1
    distance = {"round_trip": options.round_trip, "mbit": options.mbit}
    shape = {"partitions": options.partitions, "groups": options.groups}
    plan = Plan(
        *(options.kind, options.messages, options.faults, options.seed),
        **(distance | shape),
        processes=processes,
        most=tuple(options.most),
    )
    several: dict[str, type[Replicated]] = {"sentinel": BehindSentinels, "cluster": InCluster}
    servers: PrivateServer | Replicated
    if options.servers in several:
        servers = several[options.servers](kind)
    else:
        servers = PrivateServer(kind, appendonly="always", within=memory_disk())
    with tempfile.TemporaryDirectory() as folder, servers:
        asyncio.run(_for_minutes(servers, plan, Path(folder), options.minutes))


async def _for_minutes(
    servers: PrivateServer | Replicated, plan: Plan, folder: Path, minutes: float
) -> None:
    """Run storms, each with its own seed, until the time is over or one finds a violation."""
    started = time.monotonic()
    while time.monotonic() - started < minutes * 60:
        storm, history = await ride_out(servers, plan, folder)
        for server in await storm.masters():
            await asyncio.to_thread(server.flush)
        if violations := plan.judge(history):
            violations.sort(key=lambda violation: violation.kind == "left")
            sys.exit(f"FAILED with seed {plan.seed}: {summary(violations, 30)}")
        faults = f"{storm.injected.total()} faults: {dict(storm.injected)}"
        print(f"seed {plan.seed}: {len(history.offered):,} messages, {faults}", flush=True)
        plan = replace(plan, seed=plan.seed + 1)


if __name__ == "__main__":
    main()
