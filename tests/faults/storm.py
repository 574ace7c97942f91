"""A storm: producers and consumers at work through a network, while everything under them is broken and healed.

Which fault comes when is chosen by a seed; what it hits is chance. The proof is :mod:`tests.faults.checker`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import random
import re
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

import delayq
from delayq import Offer
from tests.faults import consumers
from tests.faults.checker import Rules
from tests.faults.consumers import IDS, LEASE, QUEUE, RESYNC, Consumer, Habits, Kind, open_delayed, open_reliable
from tests.faults.history import Delivered, End, Fault, History, Offered, Told, demand_one_clock, now_us, read_notes
from tests.links import BOTH, Links
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from delayq._offering import OnDuplicate
    from tests.servers import PrivateServer

WITHIN = 30.0
"""A message that is due, and that nothing keeps back any more, may take so long: leases, deadlines and a busy machine."""
REUSES = 0.1
"""So often, for each call that offers, messages of a reliable queue expire, and their ids are used again."""
BACKLOG = 4_000
"""With so much still to be delivered the next fault waits: it shall hit them all at work, not a heap."""


@dataclass(frozen=True)
class Plan:
    """What a storm consists of.

    Attributes:
        kind: The queue, and how it is consumed.
        messages: So many are offered.
        faults: So many are injected.
        seed: Of everything that is chosen.
        clients: Clients of each side in this process.
        loops: Loops of each consuming client.
        processes: Consumers that are processes of their own, to be killed.
        pause: Seconds between two faults: from, to.
        calm: Seconds that a fault lasts: a factor.
        tcp: Whether the network is TCP.
    """

    kind: Kind
    messages: int
    faults: int
    seed: int
    clients: int = 2
    loops: int = 2
    processes: int = 1
    pause: tuple[float, float] = (0.05, 0.4)
    tcp: bool = True
    round_trip: float = 0.0
    """Milliseconds, when nothing is broken."""
    mbit: float | None = None
    """Megabits a second, when nothing is broken; None: no limit."""
    habits: Habits = field(default_factory=Habits)
    drain_within: float = 45.0
    """Seconds until everything must be delivered, once all is healed."""
    only: tuple[str, ...] = ()
    """The names of the faults to choose from; all if empty."""

    @property
    def rules(self) -> Rules:
        return Rules(0 if self.kind == "plain" else int(LEASE * 1_000_000), int(WITHIN * 1_000_000))


class Storm:
    """A server, the network before it, and clients. Use it with ``async with``, then :meth:`blow`, several times if you like."""

    def __init__(self, server: PrivateServer, plan: Plan, folder: Path) -> None:
        self._server = server
        self._plan = plan
        self._folder = folder
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
        self.crowd: Crowd = Crowd(folder, plan)
        self.history: History = History()
        self.injected: Counter[str] = Counter()
        """Faults so far, by name."""

    async def __aenter__(self) -> Self:
        plan, stack = self._plan, self._stack
        demand_one_clock(self._server)
        try:
            self.links: Links = await stack.enter_async_context(
                Links(self._server, tcp=plan.tcp, round_trip=plan.round_trip, mbit=plan.mbit)
            )
            self.raw: Any = await stack.enter_async_context(
                Redis.from_url(self._server.unix_url, retry_on_error=[ConnectionError])
            )
            self.crowd.url = self.links.url
            stack.push_async_callback(asyncio.to_thread, self.crowd.close)
            logging.getLogger("delayq").addHandler(self._doubts)
            stack.callback(logging.getLogger("delayq").removeHandler, self._doubts)
            for _ in range(plan.clients):
                self._producers.append(await self._client())
            stack.push_async_callback(self._stop_consuming)
            for _ in range(plan.clients):
                await self.start_consuming()
            for _ in range(plan.processes):
                await asyncio.to_thread(self.crowd.start)
        except BaseException:
            await stack.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()

    # What consumers here tell

    def began(self, delivered: Delivered) -> None:
        self.history.delivered.append(delivered)

    def ended(self, delivered: Delivered) -> None:
        pass

    # The storm itself

    async def blow(self) -> History:
        """Offer everything, break everything, heal it, and wait until all is drained. Returns what was seen."""
        plan = self._plan
        self.history = History()
        self._doubts.clear()
        shares = asyncio.Queue[int | None]()
        producing = [asyncio.create_task(self._produce(client, shares)) for client in self._producers]
        try:
            order = self._faults.order(plan.faults, self._chance)
            for number, name in enumerate(order):
                share = plan.messages * (number + 1) // plan.faults - plan.messages * number // plan.faults
                shares.put_nowait(share // 2)
                await asyncio.sleep(self._chance.uniform(*plan.pause))
                await self._caught_up()
                # What is offered while it happens, or is about to.
                shares.put_nowait(share - share // 2)
                await asyncio.sleep(self._chance.uniform(0, 0.01))
                fault = Fault(name, now_us(), 0)
                self.history.faults.append(fault)
                async with asyncio.timeout(60):
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
        """The copies that the log doubts, and how many more without a name, since the last call or :meth:`blow`."""
        found = self._doubts.copies, self._doubts.nameless
        self._doubts.clear()
        return found

    async def _caught_up(self) -> None:
        # What processes have, they tell only later.
        with suppress(TimeoutError, OSError):
            await until(self._is_small, 30)

    async def _is_small(self) -> bool:
        await asyncio.sleep(0.02)
        key = open_reliable(self._producers[0])._keys.messages[10] if self._plan.kind == "reliable" else QUEUE
        return int(await (self.raw.hlen if self._plan.kind == "reliable" else self.raw.llen)(key)) < BACKLOG

    async def end(self) -> History:
        """Close everything, look at what is left, and return all that was seen since :meth:`blow`."""
        history = self.history
        await self._stop_consuming()
        await asyncio.to_thread(self.crowd.close)
        history.delivered += self.crowd.take_notes()
        history.doubts, history.nameless_doubts = self._doubts.copies, self._doubts.nameless
        for client in self._clients:
            # Closing one twice does nothing.
            await client.aclose()
        if self._plan.kind == "plain":
            # What was fetched ahead when it ended has gone back.
            for value in await self.raw.lrange(QUEUE, 0, -1):
                history.delivered.append(Delivered(int(value), now_us(), "the end", claimed_us=now_us()))
            await self.raw.delete(QUEUE)
        history.left += [f"stays on the server for ever: {name}" for name in await self._lasting_keys()]
        return history

    async def start_consuming(self) -> None:
        """Start a client that consumes, in several loops."""
        plan, number, client = self._plan, next(self._numbers), await self._client()
        consumers = [
            Consumer(client, plan.kind, f"consumer {number}.{loop}", self, (plan.seed, number, loop), plan.habits)
            for loop in range(plan.loops)
        ]
        self._consuming.append((client, [asyncio.create_task(consumer.run()) for consumer in consumers]))

    async def close_one(self) -> None:
        """Close the client that has consumed longest, as a process does that ends. Its loops end by themselves."""
        client, tasks = self._consuming.popleft()
        await client.aclose()
        await asyncio.gather(*tasks)

    async def _client(self) -> delayq.Client:
        client = await self._stack.enter_async_context(delayq.connect(self.links.url, resync_interval=RESYNC))
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
                    self._reusing.add(asyncio.create_task(self._reuse(client, self._chance.choice((1, 2, 50)))))

    async def _offer(self, client: delayq.Client, count: int) -> None:
        chance = self._chance
        delays = [chance.choice((0.0, chance.random() * 0.3, chance.random() * 2.0)) for _ in range(count)]
        keys = [next(self._keys) for _ in range(count)]
        began = now_us()
        for key, delay in zip(keys, delays, strict=True):
            self.history.offered[key] = Offered(began + int(delay * 1_000_000))
        if count <= 50:
            await asyncio.gather(*(self._offer_one(client, key, delay) for key, delay in zip(keys, delays, strict=True)))
            return
        stored: Sequence[int] = ()
        told = Told.OK
        named = chance.random() < 0.5
        try:
            if self._plan.kind == "reliable":
                await open_reliable(client).offer_many(
                    [
                        Offer(value=key, delay=delay, id=f"m{key}" if named else None)
                        for key, delay in zip(keys, delays, strict=True)
                    ]
                )
            else:
                await open_delayed(client).offer_many(list(zip(keys, delays, strict=True)))
        except delayq.OutcomeUnknown as error:
            told = Told.UNKNOWN
            if self._plan.kind == "reliable":
                stored = [int(name[1:]) for name in error.stored] if named else ()
            else:
                stored = [int(receipt._payload) for receipt in error.stored]
        except (delayq.ServerUnavailable, delayq.ServerRefused):
            told = Told.FAILED
        for key in keys:
            self.history.offered[key].told = told
        for key in stored:
            self.history.offered[key].told = Told.OK

    async def _offer_one(self, client: delayq.Client, key: int, delay: float) -> None:
        offered = self.history.offered[key]
        try:
            if self._plan.kind == "reliable":
                await open_reliable(client).offer(key, delay)
            else:
                await open_delayed(client).offer(key, delay)
            offered.told = Told.OK
        except (delayq.ServerUnavailable, delayq.ServerRefused):
            offered.told = Told.FAILED
        except delayq.OutcomeUnknown:
            pass

    async def _reuse(self, client: delayq.Client, count: int) -> None:
        """Offer messages that expire while nobody takes them, and then others under the same ids: these are free by then."""
        chance, queue, offered = self._chance, open_reliable(client, IDS), self.history.offered
        on_duplicate: OnDuplicate = chance.choice(("raise", "ignore", "replace"))
        ttl = chance.uniform(0.01, 0.2)
        delay = ttl * chance.random()
        first, second = ([next(self._keys) for _ in range(count)] for _ in range(2))
        names = [f"reused {key}" for key in second]
        for key in first:
            offered[key] = Offered(now_us() + int(delay * 1_000_000), expires=True)
        with suppress(delayq.ServerError):
            await queue.offer_many(
                [Offer(value=key, id=name, delay=delay, ttl=ttl) for key, name in zip(first, names, strict=True)]
            )
            for key in first:
                offered[key].told = Told.OK
        if any(offered[key].told is not Told.OK for key in first):
            # One that is still on its way would expire later.
            return
        await asyncio.sleep(ttl + 0.002)
        for key in second:
            offered[key] = Offered(now_us())
        told = dict.fromkeys(names, Told.OK)
        try:
            await queue.offer_many(
                [Offer(value=key, id=name, on_duplicate=on_duplicate) for key, name in zip(second, names, strict=True)]
            )
        except delayq.DuplicateMessage as error:
            told |= dict.fromkeys(error.ids, Told.HELD)
        except delayq.OutcomeUnknown as error:
            told = dict.fromkeys(names, Told.UNKNOWN) | dict.fromkeys(error.stored, Told.OK)
        except delayq.ServerError:
            told = dict.fromkeys(names, Told.FAILED)
        for key, name in zip(second, names, strict=True):
            offered[key].told = told[name]

    # The end

    async def _drain(self) -> None:
        """Wait until everything that is stored was delivered, and nothing is left that does not vanish by itself."""
        stored = {key for key, offered in self.history.offered.items() if offered.told is Told.OK and not offered.expires}
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
        consumer = Consumer(self._producers[0], "reliable", "consumer of ids", self, plan.seed, plan.habits, IDS)
        consuming = asyncio.create_task(consumer.run())
        try:
            await until(drained, plan.drain_within)
        except TimeoutError:
            self.history.left.append(f"not drained within {plan.drain_within:g} s: {await self._lasting_keys()}")
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    async def _lasting_keys(self) -> list[str]:
        return [name.decode() for name in await self.raw.keys("*") if await self.raw.pttl(name) == -1]


class Crowd:
    """Consumers that are processes, and die without warning."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        # Forked from a process that has imported everything: there is no time to start an interpreter for each.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([consumers.__name__])
        self._numbers = itertools.count(1)
        self._processes: list[Any] = []
        self.url = ""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> None:
        number = next(self._numbers)
        who, plan = f"process {number}", self._plan
        process = self._context.Process(
            target=consumers.main,
            args=(self.url, self._folder / f"notes-{number}", who, plan.kind, plan.loops, (plan.seed, who), plan.habits),
            daemon=True,
        )
        process.start()
        self._processes.append(process)

    def kill_one(self) -> None:
        """Kill the one that has lived longest."""
        if self._processes:
            process = self._processes.pop(0)
            process.kill()
            process.join()
            process.close()

    def close(self) -> None:
        while self._processes:
            self.kill_one()

    def take_notes(self) -> list[Delivered]:
        """What they saw. They were killed, so nobody knows whether their last acknowledgements had left."""
        paths = sorted(self._folder.glob("notes-*"))
        read = read_notes(paths)
        for one in read:
            if one.end is End.UNATTENDED:
                one.end = End.UNKNOWN
        for path in paths:
            path.unlink()
        return read

    async def settled_notes(self) -> list[Delivered]:
        """What those who live have seen so far, when nothing is under way. It is then forgotten."""
        paths = sorted(self._folder.glob("notes-*"))
        noted: list[Delivered] = []

        def all_ended() -> bool:
            # The last words follow the last acknowledgement.
            noted[:] = read_notes(paths)
            return all(one.end is not End.NONE for one in noted)

        with suppress(TimeoutError):
            await until(all_ended, 2)
        for path in paths:
            os.truncate(path, 0)
        for one in noted:
            if one.end is End.UNATTENDED:
                one.end = End.UNKNOWN
        return noted


class _Doubts(logging.Handler):
    """Hears what the log says of acknowledgements for which nobody waited."""

    _NAME = re.compile(r"message '([^']*)'")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.clear()

    def clear(self) -> None:
        self.copies: set[str] = set()
        self.nameless: int = 0

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        if "may come again" not in words and "may be done again" not in words:
            return
        if named := self._NAME.search(words):
            self.copies.add(named[1])
        else:
            self.nameless += 1


class _Faults:
    """Everything that can be done to a storm, by name. Each ends healed."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self._all: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "cut": self._cut,
            "half open": self._half_open,
            "requests stalled": lambda chance: self._stall(chance, "requests"),
            "replies stalled": lambda chance: self._stall(chance, "replies"),
            "slow": self._slow,
            "cut in a request": lambda chance: self._drop(chance, "requests"),
            "cut in a reply": lambda chance: self._drop(chance, "replies"),
            "refused": self._refuse,
            "server stopped": self._sigstop,
            "server killed": self._sigkill,
            "CLIENT KILL normal": lambda _: self._ask("CLIENT", "KILL", "TYPE", "normal"),
            "CLIENT KILL pubsub": lambda _: self._ask("CLIENT", "KILL", "TYPE", "pubsub"),
            "CLIENT PAUSE": self._pause,
            "SCRIPT FLUSH": lambda _: self._ask("SCRIPT", "FLUSH"),
            "consumer killed": self._kill_consumer,
            "client closed": self._close_client,
            "right lost": self._lose_right,
        }

    def order(self, count: int, chance: random.Random) -> list[str]:
        """So many names: all of them about equally often, in an order of chance."""
        plan = self._storm._plan
        names = [name for name in self._all if name in plan.only or not plan.only]
        if not plan.processes:
            names = [name for name in names if name != "consumer killed"]
        order: list[str] = []
        while len(order) < count:
            order += chance.sample(names, len(names))
        return order[:count]

    async def inject(self, name: str, chance: random.Random) -> None:
        try:
            await self._all[name](chance)
        finally:
            self._storm.links.heal()

    async def _cut(self, _: random.Random) -> None:
        self._storm.links.cut()

    async def _half_open(self, chance: random.Random) -> None:
        self._storm.links.half_open()
        await asyncio.sleep(chance.uniform(0.1, 0.8))

    async def _stall(self, chance: random.Random, direction: Any) -> None:
        self._storm.links.stall(direction)
        # At times for longer than a call waits.
        await asyncio.sleep(chance.uniform(0.1, 1.3))

    async def _slow(self, chance: random.Random) -> None:
        self._storm.links.delay(chance.uniform(1, 150))
        await asyncio.sleep(chance.uniform(0.2, 0.6))

    async def _drop(self, chance: random.Random, direction: Any) -> None:
        assert direction in BOTH
        self._storm.links.cut_after(int(chance.random() * 20_000), direction)
        await asyncio.sleep(chance.uniform(0.05, 0.3))

    async def _refuse(self, chance: random.Random) -> None:
        self._storm.links.refuse()
        self._storm.links.cut()
        await asyncio.sleep(chance.uniform(0.05, 0.5))

    async def _sigstop(self, chance: random.Random) -> None:
        with self._storm._server.paused():
            await asyncio.sleep(chance.uniform(0.1, 1.3))

    async def _sigkill(self, chance: random.Random) -> None:
        server = self._storm._server
        server.kill()
        await asyncio.sleep(chance.choice((0.0, 0.2)))
        await asyncio.to_thread(server.start)

    async def _pause(self, chance: random.Random) -> None:
        milliseconds = int(chance.uniform(50, 400))
        await self._ask("CLIENT", "PAUSE", str(milliseconds))
        await asyncio.sleep(milliseconds / 1000)

    async def _ask(self, *words: str) -> None:
        reply = await asyncio.to_thread(self._storm._server.call, *words)
        assert not reply.startswith(b"-"), reply

    async def _close_client(self, _: random.Random) -> None:
        await self._storm.close_one()
        await self._storm.start_consuming()

    async def _lose_right(self, chance: random.Random) -> None:
        """Together with all connections, for what was seen of a user's rights on a connection counts for a while."""
        command = chance.choice(("publish", "lpush", "rpush", "lpop", "set", "hset", "hdel", "zadd", "zrem", "zremrangebyrank"))
        async with self._storm.raw.pipeline(transaction=True) as pipeline:
            pipeline.execute_command("ACL", "SETUSER", "default", f"-{command}")
            pipeline.execute_command("CLIENT", "KILL", "TYPE", "normal")
            await pipeline.execute()
        await asyncio.sleep(chance.uniform(0.05, 0.5))
        await self._ask("ACL", "SETUSER", "default", "+@all")

    async def _kill_consumer(self, _: random.Random) -> None:
        await asyncio.to_thread(self._storm.crowd.kill_one)
        await asyncio.to_thread(self._storm.crowd.start)
