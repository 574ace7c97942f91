"""Estimate what a cluster has to be like: ``python -m benchmarks.capacity [options]``.

The first two tables come from a simulation, in virtual time, of one queue whose clients are the
real plans that decide when to wake, on a network and a server that only cost time (COSTS). In the
first, one message comes due every 100 ms, and 100, 1,000 or 10,000 clients wait for it. Then the
client that goes first dies, then all that listen. In the second, 10,000 clients consume 1,000
partitions on 100 masters, and one master is away for 15 s; one of its partitions is simulated.

"claims" and "heard" are the calls for messages, and the deliveries of publications, for each
message. Lateness is in ms. "server %" is the share of a processor that the queue takes from its
master, mostly for re-checks.

The third table follows from what a message of 100 bytes costs (STEPS): with ``--measure``, from a
measurement on this machine; otherwise, from one that is written down here. Messages that arrive
while a call is under way share the next one. Nothing is planned to be busy for more than half of
the time. "offering" and "taking" are processes without the work of their own; "client s" and
"server s" are processor seconds for a million messages, and "trips" round trips for each message.
"pending" is the memory of those that wait for an hour each.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import delayq
from benchmarks._moves import Meter, add_server_option, address, measured_server
from benchmarks._report import Table
from benchmarks._samples import quantile
from benchmarks._virtual_queue import EPOCH_US, Costs, Server, VirtualClient, Worker, World
from delayq._redis.slots import slot_of
from delayq._reliable.ids import new_id, partition_of
from delayq._reliable.keys import ReliableKeys

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

COSTS = Costs()
ROUND_TRIP_S = 2 * COSTS.one_way
MASTERS, PARTITIONS, CLIENTS = 100, 1000, 10_000
AWAY_S = 15.0
APART_S, MOMENTS, JOIN_S, SETTLE_S = 0.1, 100, 4.0, 12.0
RESYNC_S = 5.0
PAYLOAD = 100
# At most this share of a processor is planned for.
BUSY = 0.5
# The messages of one call are bounded.
MOST_PER_CALL = 100
MEASURED = 2000


class Step(NamedTuple):
    """The cost of offering messages, or of claiming and acknowledging them, in microseconds of
    processor time; and the bytes that a message is on the way.

    Attributes:
        client_call, client_each: The client's time for a call, and for each message in it.
        server_call, server_each: The same of the server.
        bytes_call, bytes_each: Bytes sent both ways for a call, and for each message in it.
        trips: Round trips of a call.
    """

    client_call: float
    client_each: float
    server_call: float
    server_each: float
    bytes_call: float
    bytes_each: float
    trips: int

    def client_us(self, per_call: float) -> float:
        """Return the client's time for one message of a call, given how many it has."""
        return self.client_call / per_call + self.client_each

    def server_us(self, per_call: float) -> float:
        return self.server_call / per_call + self.server_each


class Kind(NamedTuple):
    """The costs of messages in one kind of queue, and the bytes that one takes while it waits."""

    offer: Step
    take: Step
    pending: float


# Measured with --measure on two virtual cores, Linux 6.18, CPython 3.11.7, Valkey 9.1.2.
STEPS = {
    "DelayedQueue": Kind(
        Step(53, 4.2, 36, 2.9, 265, 157, 1), Step(328, 0.4, 159, 5.0, 1122, 109, 2), 310
    ),
    "ReliableQueue": Kind(
        Step(58, 6.5, 55, 3.0, 786, 176, 1), Step(263, 5.0, 133, 6.7, 1370, 238, 2), 264
    ),
}


# One queue, in virtual time


class Crowd:
    """Clients that wait for one queue, and what becomes of it."""

    def __init__(self, clients: int, masters: int = 1) -> None:
        chance = random.Random(1)
        self.world = World()
        self.server = Server(self.world, COSTS, masters)
        self.clients = [
            VirtualClient(self.server, Worker(self.world), number, chance, resync_interval=RESYNC_S)
            for number in range(clients)
        ]
        for number, client in enumerate(self.clients):
            self.world.at(JOIN_S * number / clients, client.start)
        self.world.run(JOIN_S + SETTLE_S)

    def consume(
        self, happens: Callable[[], object] = lambda: None, extra_s: float = 0.0
    ) -> Figures:
        """Let messages come due, with something that happens before the middle one.

        Go on for ``extra_s`` seconds longer than they take.
        """
        server, world = self.server, self.world
        server.counts.clear()
        server.busy, began = 0.0, world.now
        counts_before = [len(client.late) for client in self.clients]
        dues = [began + 0.5 + APART_S * number for number in range(MOMENTS)]
        for due in dues:
            server.offer(EPOCH_US + int(due * 1_000_000))
        world.at(dues[MOMENTS // 2] - APART_S / 2, happens)
        world.run(dues[-1] + 2.0 + extra_s)
        late = sorted(
            lateness
            for client, before in zip(self.clients, counts_before, strict=True)
            for lateness in client.late[before:]
        )
        if len(late) != MOMENTS:
            raise AssertionError(f"{len(late)} of {MOMENTS} messages were handled")
        seconds = world.now - began
        return {
            "claims": server.counts["claims"] / MOMENTS,
            "heard": server.counts["heard"] / MOMENTS,
            "p50": quantile(late, 0.5) * 1000,
            "p99": quantile(late, 0.99) * 1000,
            "max": late[-1] * 1000,
            "rechecks": server.counts["re-checks"] / seconds,
            "busy": server.busy / seconds * 100,
        }

    def kill_first(self) -> None:
        for client in self.server.listeners:
            if client.plan.stagger.delay(wants_messages=True) == 0:
                client.die()

    def kill_listeners(self) -> None:
        for client in self.server.listeners:
            client.die()

    def lose_master(self) -> None:
        """Let the queue's master be away for a while. Its listeners go to other masters."""
        self.server.down = True
        for client in self.server.listeners:
            if client.place == 0:
                client.move()

        def back() -> None:
            self.server.down = False

        self.world.after(AWAY_S, back)


Figures = dict[str, float]
COLUMNS = ("claims", "heard", "p50", "p99", "max", "rechecks", "busy")
HEADS = (" claims", "   heard", "    p50", "    p99", "       max", " re-checks/s", " server %")
ALL = "all listeners die"
EVENTS: dict[str, Callable[[Crowd], None]] = {
    "-": lambda _: None,
    "the first dies": Crowd.kill_first,
    ALL: Crowd.kill_listeners,
}


def one_queue(about: dict[str, Any], *, as_json: bool) -> None:
    table = Table(about, ("clients", " listen", "halfway           ", *HEADS), as_json=as_json)
    for number in (100, 1000, CLIENTS):
        crowd = Crowd(number)
        for name, event in EVENTS.items():
            if name == ALL and not any(client.plan.stagger.is_dormant for client in crowd.clients):
                continue
            add(table, crowd.consume(partial(event, crowd)), crowd, f"{number:,}", name)
    table.end()


def add(table: Table, figures: Figures, crowd: Crowd, first: str, name: str) -> None:
    listen = len(crowd.server.listeners)
    table.add(
        {"clients": len(crowd.clients), "listen": listen, "halfway": name} | figures,
        first,
        f"{listen}",
        name,
        *(f"{figures[column]:,.2f}" for column in COLUMNS),
    )


def many_partitions(about: dict[str, Any], *, as_json: bool) -> None:
    table = Table(about, ("of 1,000", " listen", "halfway           ", *HEADS), as_json=as_json)
    crowd = Crowd(CLIENTS, MASTERS)
    add(table, crowd.consume(), crowd, "1", "-")
    away = crowd.consume(crowd.lose_master, AWAY_S)
    add(table, away, crowd, "1", "its master is lost")
    table.end()
    if as_json:
        return
    places = Counter(partition_of(new_id(), PARTITIONS) for _ in range(100 * PARTITIONS))
    slots = [
        slot_of(ReliableKeys.of("jobs", None, partition).wake) for partition in range(PARTITIONS)
    ]
    masters = Counter(slot * MASTERS // 16384 for slot in slots)
    connections = CLIENTS * (MASTERS + 1) / MASTERS
    checks = CLIENTS * PARTITIONS / MASTERS / RESYNC_S
    print(
        f"\nOf 1,000 partitions, the fullest gets {max(places.values()) / 100:.2f} times its share"
        f" of the messages, and a master\nhas {min(masters.values())} to {max(masters.values())}"
        f" of them. Each master has {connections:,.0f} connections, of"
        f" {CLIENTS * (MASTERS + 1):,} in all, and answers\n{checks:,.0f} re-checks a second:"
        f" {checks * COSTS.recheck * 100:.0f} % of its processor with resync_interval"
        f" {RESYNC_S:g} s, {checks * COSTS.recheck * 100 * RESYNC_S / 30:.0f} % with 30 s.\n"
        f"A lost master takes {100 / MASTERS:g} % of the messages with it for as long as it is"
        f" away; {CLIENTS // MASTERS:,} clients subscribe elsewhere."
    )


# The needs of a load


class Need(NamedTuple):
    """The processes that a step needs, and how many messages share a call in each."""

    processes: int
    per_call: float


def need(step: Step, rate: float) -> Need:
    """Return how many processes it takes, none of which is busier than planned."""
    for processes in range(1, 10_000):
        per_process = rate / processes
        per_call = min(MOST_PER_CALL, 1 + per_process * ROUND_TRIP_S)
        if per_process * step.client_us(per_call) / 1e6 <= BUSY:
            return Need(processes, per_call)
    raise AssertionError("no number of processes suffices")


LOADS = {"minute": 60, "hour": 3600, "day": 86400}


def loads(about: dict[str, Any], kinds: dict[str, Kind], *, as_json: bool) -> None:
    heads = (
        "1,000,000 a",
        "kind         ",
        "   rate/s",
        " offering",
        " taking",
        " masters",
        " partitions",
        " client s",
        " server s",
        "  trips",
        " traffic MB/s",
        " pending MB",
    )
    table = Table(about, heads, as_json=as_json)
    for name, seconds in LOADS.items():
        for kind, costs in kinds.items():
            rate = 1e6 / seconds
            steps = [(step, need(step, rate)) for step in (costs.offer, costs.take)]
            client = sum(step.client_us(need.per_call) for step, need in steps)
            server = sum(step.server_us(need.per_call) for step, need in steps)
            masters = math.ceil(rate * server / 1e6 / BUSY)
            row: dict[str, Any] = {
                "offering": steps[0][1].processes,
                "taking": steps[1][1].processes,
                "masters": masters,
                # Several for each master, so that more masters can take some over.
                "partitions": 1 if masters == 1 else masters * 4,
                "client": client,
                "server": server,
                "trips": sum(step.trips / need.per_call for step, need in steps),
                "traffic": rate
                / 1e6
                * sum(step.bytes_call / need.per_call + step.bytes_each for step, need in steps),
                "pending": rate * 3600 * costs.pending / 1e6,
            }
            numbers = ("offering", "taking", "masters", "partitions")
            table.add(
                {"per": name, "kind": kind, "rate": rate} | row,
                name,
                kind,
                f"{rate:,.1f}",
                *(f"{row[column]}" for column in numbers),
                *(f"{row[column]:,.1f}" for column in ("client", "server")),
                f"{row['trips']:.2f}",
                *(f"{row[column]:,.2f}" for column in ("traffic", "pending")),
            )
    table.end()


# The costs of a message


class Reading(NamedTuple):
    client: float
    server: float
    traffic: float


class Probe:
    """Measures what messages cost, from its creation until it is read."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._meter = Meter(server)
        self._traffic = traffic(server)

    def read(self, count: int) -> Reading:
        spent = self._meter.read(count)
        bytes_each = (traffic(self._server) - self._traffic) / count
        return Reading(spent["client_us"], spent["server_us"], bytes_each)


def traffic(server: Any) -> float:
    stats = server.info("stats")
    return float(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])


def step_of(lone: Reading, shared: Reading, size: int, trips: int) -> Step:
    """Return the step that explains both: one message in a call, and ``size`` of them."""

    def split(lone_cost: float, shared_cost: float) -> tuple[float, float]:
        call = max(0.0, (lone_cost - shared_cost) * size / (size - 1))
        return call, max(0.0, lone_cost - call)

    client, server, sent = map(split, lone, shared)
    return Step(*client, *server, *sent, trips)


async def measure(server: Any, url: str, kind: str) -> Kind:
    """Measure the costs of a kind of queue on a server that does nothing else."""
    payload, size = "x" * (PAYLOAD - 2), MOST_PER_CALL
    async with delayq.connect(url) as client:
        queue: Any = (
            client.delayed_queue("probe")
            if kind == "DelayedQueue"
            else client.reliable_queue("probe")
        )

        async def offer(count: int, delay: float) -> None:
            if kind == "DelayedQueue":
                await queue.offer_many([(payload, delay)] * count)
            else:
                await queue.offer_many([delayq.Offer(payload, delay=delay)] * count)

        async def values() -> AsyncGenerator[None, None]:
            async for value in queue:
                if kind == "DelayedQueue":
                    yield
                else:
                    async with value:
                        yield

        async def take(count: int) -> None:
            iterator = values()
            for _ in range(count):
                await anext(iterator)
            await iterator.aclose()

        await offer(size, 0)
        await take(size)
        probe = Probe(server)
        for _ in range(MEASURED // 10):
            await queue.offer(payload, delay=3600)
        lone = probe.read(MEASURED // 10)
        before, probe = server.info("memory")["used_memory"], Probe(server)
        for _ in range(MEASURED // size):
            await offer(size, 3600)
        shared = probe.read(MEASURED)
        pending = (server.info("memory")["used_memory"] - before) / MEASURED
        offers = step_of(lone, shared, size, 1)

        await offer(MEASURED, 0)
        probe = Probe(server)
        await take(MEASURED)
        shared = probe.read(MEASURED)
        probe = Probe(server)
        for _ in range(MEASURED // 10):
            await queue.offer(payload)
            await take(1)
        round_trip = probe.read(MEASURED // 10)
        alone = Reading(*(max(0.0, a - b) for a, b in zip(round_trip, lone, strict=True)))
    return Kind(offers, step_of(alone, shared, size, 2), pending)


def measured(url: str | None) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    with measured_server(url) as server:
        for kind in ("DelayedQueue", "ReliableQueue"):
            server.execute_command("FLUSHALL", "SYNC")
            kinds[kind] = asyncio.run(measure(server, address(server, url), kind))
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_server_option(parser)
    parser.add_argument(
        "--measure", action="store_true", help="measure the costs of a message on this machine"
    )
    options = parser.parse_args()
    kinds = measured(options.server) if options.measure else STEPS
    if options.measure and not options.json:
        print(*(f'"{kind}": {costs!r},' for kind, costs in kinds.items()), sep="\n")
    about = {"measured": f"in virtual time: {COSTS!r}"}
    one_queue(about, as_json=options.json)
    many_partitions(about, as_json=options.json)
    loads({"measured": "from what a message costs"}, kinds, as_json=options.json)


if __name__ == "__main__":
    main()
