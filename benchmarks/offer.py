"""Measure offers, by how many callers wait at once: ``python -m benchmarks.offer [options]``.

Messages of 100 bytes are due in an hour. 1, 10, 100 and 1,000 tasks each offer one message after
another, awaiting each; and ``offer_many`` offers 1,000. The floor is a script that reads the clock
and adds one member: called by redis-py in a bare loop; from 1,000 tasks; by hand, where waiting
offers share a script and nothing else is done; and by the server's own benchmark program in C.
Single offers are interleaved in one process with that bare loop, and with a loop over the very
script that they call, in slices of 2,000 calls: the ratio to the bare loop is the median over the
slices. Every other sample is a process of its own. Samples are interleaved, and the medians of the
runs are shown.

"client" is the processor time of the process that offers, "script" the server's time in scripts,
"server" all of its processor time, in µs per offer. ``--flat`` adds how offers by 100 tasks depend
on how many messages are pending.
"""

from __future__ import annotations

import asyncio
import csv
import resource
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from redis import Redis
from redis.asyncio import BlockingConnectionPool
from redis.asyncio import Redis as AsyncRedis

import delayq
from benchmarks._by_hand import ADD, bare_offers, connect, numbered
from benchmarks._moves import Meter, address, measured_server
from benchmarks._report import BLUE, GREEN, ORANGE, SKY, VERMILION, Table, machine, plotter, save
from benchmarks._samples import LOOPS, be_sample, medians, new_parser, result, start
from delayq._redisson import store as delayed_store
from delayq._redisson.keys import DelayedKeys
from delayq._reliable import scripts as reliable_scripts
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.settings import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

KINDS = ("DelayedQueue", "ReliableQueue")
TASKS = (10, 100, 1000)
PER_CALL, SLICE, SLICES = 1000, 2000, 4
FLAT_OFFERS, FLAT_TASKS, FLAT_ROUNDS = 1000, 100, 3
DELAY = 3600.0
VALUE = "x" * 98  # 100 bytes as JSON
CONNECTIONS = 50
BARE, POOLED, IN_C = "bare EVALSHA loop", "redis-py, 1,000 tasks", "C client, 50 connections"
BY_HAND = "shared script by hand, 1,000"
Step = Callable[[], Awaitable[Any]]


class Queue:
    """A queue of either kind, to offer to."""

    def __init__(self, client: delayq.Client, kind: str, name: str = "offers") -> None:
        self.delayed: delayq.DelayedQueue[str] | None = None
        self.reliable: delayq.ReliableQueue[str] | None = None
        if kind == "DelayedQueue":
            self.delayed = client.delayed_queue(name)
        else:
            self.reliable = client.reliable_queue(name)

    def offer(self) -> Awaitable[Any]:
        if self.delayed is not None:
            return self.delayed.offer(VALUE, delay=DELAY)
        assert self.reliable is not None
        return self.reliable.offer(VALUE, delay=DELAY)

    async def offer_many(self, count: int) -> None:
        for first in range(0, count, PER_CALL):
            count_of_call = min(PER_CALL, count - first)
            if self.delayed is not None:
                await self.delayed.offer_many([(VALUE, DELAY)] * count_of_call)
            elif self.reliable is not None:
                await self.reliable.offer_many([delayq.Offer(VALUE, delay=DELAY)] * count_of_call)

    async def cancel(self, offered: Any) -> bool:
        """Cancel the message that :meth:`offer` returned."""
        if self.reliable is not None:
            return await self.reliable.cancel(offered)
        cancelled: bool = await offered.cancel()
        return cancelled

    async def size(self) -> int:
        if self.delayed is not None:
            return await self.delayed.pending.size()
        assert self.reliable is not None
        return (await self.reliable.stats()).delayed


def check(stored: int, offered: int) -> None:
    if stored != offered:
        raise AssertionError(f"{stored} of {offered} messages are stored")


async def from_tasks(step: Step, tasks: int, count: int) -> list[Any]:
    """Take ``count`` steps, spread over tasks that each take one after another. Return the
    results.
    """

    async def caller() -> list[Any]:
        return [await step() for _ in range(count // tasks)]

    times_by_task = await asyncio.gather(*(caller() for _ in range(tasks)))
    return [duration for of_task in times_by_task for duration in of_task]


async def bare_script(redis: AsyncRedis) -> Step:
    """Return a function that calls the floor's script."""
    return bare_offers(redis, await redis.script_load(ADD), VALUE, int(DELAY * 1e6))


async def own_script(redis: AsyncRedis, kind: str) -> Step:
    """Return a function that calls the script of a queue's single offer exactly as the queue does,
    on a queue of another name.
    """
    serial = 0
    if kind == "DelayedQueue":
        delayed = DelayedKeys.of("bare delayed")
        sha = await redis.script_load(delayed_store.OFFER.text)
        keys: tuple[str, ...] = (delayed.timeout, delayed.ordered, delayed.channel)
    else:
        reliable = ReliableKeys.of("bare reliable")
        sha = await redis.script_load(reliable_scripts.OFFER_NEW.text)
        keys = (*reliable.of_script(reliable_scripts.OFFER_NEW), reliable.call("bare"))
        # The script refuses a queue whose number of partitions was never stored.
        await redis.hset(reliable.settings, mapping={"layout": LAYOUT, "partitions": "1"})  # type: ignore[misc,unused-ignore]

    def call() -> Awaitable[Any]:
        nonlocal serial
        serial += 1
        delay_us, payload = int(DELAY * 1e6), f'"{VALUE}"'
        if kind == "DelayedQueue":
            args: tuple[str | int, ...] = (1, delay_us, payload)
        else:
            args = (serial, "1", f"{serial:012}", delay_us, "\n" + payload)
        return redis.evalsha(sha, len(keys), *keys, *args)  # type: ignore[return-value,unused-ignore]

    return call


# The samples


async def one_by_one(
    url: str, size: int = SLICE, *, own_scripts: bool = True
) -> dict[str, dict[str, float]]:
    """Interleave single offers with the bare loop, in slices of this size.

    Each figure, and the ratio, is the median of the slices.
    """
    with Redis.from_url(url) as server:
        async with (
            delayq.connect(url) as client,
            AsyncRedis.from_url(url, single_connection_client=True) as redis,
        ):
            queues = {kind: Queue(client, kind, kind) for kind in KINDS}
            steps = {BARE: await bare_script(redis)} | {
                kind: queue.offer for kind, queue in queues.items()
            }
            if own_scripts:
                steps |= {
                    f"{kind}, its script in a bare loop": await own_script(redis, kind)
                    for kind in KINDS
                }
            slices: dict[str, list[dict[str, float]]] = {way: [] for way in steps}
            for step in steps.values():
                await from_tasks(step, 1, size // 10)
            for _ in range(SLICES):
                for way, step in steps.items():
                    meter = Meter(server)
                    await from_tasks(step, 1, size)
                    slices[way].append(meter.read(size))
            for queue in queues.values():
                check(await queue.size(), size * SLICES + size // 10)
            check(server.zcard("floor"), size * SLICES + size // 10)
    for of_way in slices.values():
        for duration, bare in zip(of_way, slices[BARE], strict=True):
            duration["ratio"] = duration["rate"] / bare["rate"]
    return {
        f"{way}, one by one" if way in KINDS else way: medians(of_way)
        for way, of_way in slices.items()
    }


async def at_once(url: str, kind: str, tasks: int, offers: int) -> dict[str, float]:
    """Offer from this many tasks; 0 means with offer_many."""
    with Redis.from_url(url) as server:
        async with delayq.connect(url) as client:
            queue = Queue(client, kind)
            warm = max(tasks, PER_CALL)
            await (from_tasks(queue.offer, tasks, warm) if tasks else queue.offer_many(warm))
            meter = Meter(server)
            await (from_tasks(queue.offer, tasks, offers) if tasks else queue.offer_many(offers))
            figures = meter.read(offers)
            check(await queue.size(), offers + warm)
    return figures


async def pooled(url: str, offers: int) -> dict[str, float]:
    """Call the floor's script from many tasks, over redis-py's pool."""
    pool = BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, timeout=None)
    with Redis.from_url(url) as server:
        async with AsyncRedis(connection_pool=pool) as redis:
            step = await bare_script(redis)
            await from_tasks(step, 1000, 1000)
            meter = Meter(server)
            await from_tasks(step, 1000, offers)
            figures = meter.read(offers)
        await pool.aclose()
        check(server.zcard("floor"), offers + 1000)
    return figures


async def by_hand(url: str, offers: int) -> dict[str, float]:
    """Measure the floor for offers from many tasks."""
    with Redis.from_url(url) as server:
        connection = await connect(server)
        step = numbered(connection.offer, VALUE, int(DELAY * 1e6))
        await from_tasks(step, 1000, 1000)
        meter = Meter(server)
        await from_tasks(step, 1000, offers)
        figures = meter.read(offers)
        connection.close()
        check(server.zcard("floor"), offers + 1000)
    return figures


async def flat(url: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Offer to queues with different numbers of pending messages, interleaved.

    Each round cancels its own offers.
    """
    rows: list[dict[str, Any]] = []
    with Redis.from_url(url) as server:
        async with delayq.connect(url) as client:
            for kind in KINDS:
                queues = {size: Queue(client, kind, f"{kind} {size}") for size in sizes}
                for size, queue in queues.items():
                    await queue.offer_many(size)
                figures: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
                for turn in range(rounds + 1):
                    for size, queue in queues.items():
                        meter = Meter(server)
                        offered = await from_tasks(queue.offer, FLAT_TASKS, FLAT_OFFERS)
                        # The first round only warms up.
                        if turn:
                            figures[size].append(meter.read(FLAT_OFFERS))
                        check(sum(await asyncio.gather(*map(queue.cancel, offered))), FLAT_OFFERS)
                for size, queue in queues.items():
                    check(await queue.size(), size)
                rows += [
                    {"kind": kind, "pending": size} | medians(of_size)
                    for size, of_size in figures.items()
                ]
                server.execute_command("FLUSHALL", "SYNC")
    return rows


def in_c(server: Any, program: str, offers: int) -> dict[str, float]:
    """Call the floor's script with the benchmark program that comes with the server."""
    options = server.connection_pool.connection_kwargs
    to = (
        ["-s", options["path"]]
        if "path" in options
        else ["-h", options["host"], "-p", str(options["port"])]
    )
    arguments = [
        "EVALSHA",
        server.script_load(ADD),
        "1",
        "floor",
        str(int(DELAY * 1e6)),
        "__rand_int__" + VALUE[:88],
    ]
    settings = ["-c", str(CONNECTIONS), "-P", "1", "-n", str(offers), "-r", "1000000000", "--csv"]
    before, meter = resource.getrusage(resource.RUSAGE_CHILDREN), Meter(server)
    done = subprocess.run(
        [program, *to, *settings, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    figures, after = meter.read(offers), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Some numbers occur twice.
    if not offers * 0.99 < server.zcard("floor") <= offers:
        raise AssertionError("not all messages are stored")
    return figures | {
        "rate": float(list(csv.reader(done.stdout.splitlines()))[-1][1]),
        "client_us": cpu * 1e6 / offers,
    }


ROLES: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "one_by_one": one_by_one,
    "at_once": at_once,
    "pooled": pooled,
    "by_hand": by_hand,
    "flat": flat,
}


def one_run(
    server: Any, url: str, loop: str, offers: int, program: str | None
) -> dict[str, dict[str, float]]:
    """Measure every way once."""

    def sample(role: str, **arguments: Any) -> Any:
        server.execute_command("FLUSHALL", "SYNC")
        return result(start("offer", role=role, url=url, loop=loop, **arguments))

    rows: dict[str, dict[str, float]] = sample("one_by_one")
    for kind in KINDS:
        for tasks in TASKS:
            rows[f"{kind}, {tasks:,} at once"] = sample(
                "at_once", kind=kind, tasks=tasks, offers=offers
            )
        rows[f"{kind}, offer_many({PER_CALL:,})"] = sample(
            "at_once", kind=kind, tasks=0, offers=offers
        )
    rows[POOLED] = sample("pooled", offers=offers)
    rows[BY_HAND] = sample("by_hand", offers=offers)
    if program:
        server.execute_command("FLUSHALL", "SYNC")
        rows[IN_C] = in_c(server, program, offers)
    for row in rows.values():
        row.setdefault("ratio", row["rate"] / rows[BARE]["rate"])
    return rows


def draw(
    plt: Any, file: str, rows: list[dict[str, Any]], by_size: list[dict[str, Any]], footer: str
) -> None:
    figure, panels = plt.subplots(
        1, 2 if by_size else 1, figsize=(10.4 if by_size else 6.6, 4.2), squeeze=False
    )
    first_panel = panels[0][0]
    loop = next(row["loop"] for row in rows if row["way"] == BARE)
    rates = {row["way"]: row["rate"] for row in rows if row["loop"] in (loop, "-")}
    ends = ["one by one", *(f"{tasks:,} at once" for tasks in TASKS), f"offer_many({PER_CALL:,})"]
    looks = {"DelayedQueue": (BLUE, "o"), "ReliableQueue": (GREEN, "s")}
    for kind, (colour, marker) in looks.items():
        first_panel.plot(
            range(len(ends)),
            [rates[f"{kind}, {end}"] for end in ends],
            color=colour,
            marker=marker,
            label=kind,
        )
    floors = (
        (BARE, "--", VERMILION),
        (POOLED, ":", ORANGE),
        (IN_C, "-.", SKY),
        (BY_HAND, (0, (5, 1, 1, 1, 1, 1)), "#888888"),
    )
    for name, dashes, colour in floors:
        if name in rates:
            first_panel.axhline(
                rates[name], color=colour, linestyle=dashes, linewidth=1.4, label=name
            )
    first_panel.set_xticks(
        range(len(ends)),
        [end.replace(" at", "\nat").replace("(", "\n(").replace(" by", "\nby") for end in ends],
    )
    first_panel.set_title(f"offers per second, {loop}", loc="left", fontsize=9.5)
    first_panel.legend(loc="upper left", frameon=False, fontsize=8)
    if by_size:
        for kind, (colour, marker) in looks.items():
            points = [(row["pending"], row["rate"]) for row in by_size if row["kind"] == kind]
            panels[0][1].semilogx(
                *zip(*points, strict=True), color=colour, marker=marker, label=kind
            )
        panels[0][1].set_title(
            f"offers per second from {FLAT_TASKS} tasks, by number of pending messages",
            loc="left",
            fontsize=9.5,
        )
        panels[0][1].xaxis.set_major_formatter("{x:,.0f}")
        panels[0][1].legend(loc="upper left", frameon=False, fontsize=8)
    for panel in panels[0]:
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle("Concurrent offers share a call", x=0.012, ha="left", fontweight="bold")
    figure.subplots_adjust(
        left=0.08 if by_size else 0.12, right=0.98, top=0.85, bottom=0.19, wspace=0.2
    )
    save(figure, file, footer)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--offers",
        type=int,
        default=20_000,
        help="number of offers in each sample with 10 tasks or more",
    )
    parser.add_argument("--loop", choices=LOOPS, help="measure only this event loop")
    pending = [1000, 10_000, 100_000, 1_000_000]
    parser.add_argument(
        "--flat",
        type=int,
        nargs="*",
        metavar="PENDING",
        help="also measure with this many messages pending; default: 1,000 to 1,000,000",
    )
    options = parser.parse_args()
    if options.sample:
        be_sample(options.sample, ROLES)
        return
    if options.offers % max(TASKS):
        parser.error(f"--offers must be a multiple of {max(TASKS)}")
    plt = plotter() if options.plot else None
    program = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
    loops = [options.loop] if options.loop else LOOPS
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    by_size: list[dict[str, Any]] = []
    with measured_server(options.server) as server:
        url = address(server, options.server)
        about = {
            "machine": machine(server),
            "measured": (
                f"messages of 100 bytes; {options.offers:,} offers, one by one in slices of"
                f" {SLICE:,}; medians of {options.runs} interleaved runs; µs per offer"
            ),
            "c client": (
                f"{program} -c {CONNECTIONS} -P 1"
                if program
                else "C client: NOT RUN, redis-benchmark is not on the PATH"
            ),
        }
        for _ in range(options.runs):
            for loop in loops:
                for way, row in one_run(
                    server, url, loop, options.offers, program if loop == loops[0] else None
                ).items():
                    runs.setdefault((way, "-" if way == IN_C else loop), []).append(row)
        if options.flat is not None:
            server.execute_command("FLUSHALL", "SYNC")
            arguments = {
                "sizes": options.flat or pending,
                "rounds": FLAT_ROUNDS * options.runs,
                "loop": loops[0],
            }
            by_size = result(start("offer", role="flat", url=url, **arguments), within=900)
    columns = (
        "way                                      ",
        "loop   ",
        "   offers/s",
        " to bare",
        " client us",
        " script us",
        " server us",
    )
    table = Table(about, columns, as_json=options.json)
    # The floors first, then the rows of each kind.
    order = {way: place for place, way in enumerate((IN_C, BARE, POOLED, BY_HAND))}
    for way, loop in sorted(
        runs,
        key=lambda at: (["-", *loops].index(at[1]), order.get(at[0], 9), at[0].partition(",")[0]),
    ):
        row = medians(runs[way, loop])
        cells = [f"{row[name]:.1f}" for name in ("client_us", "script_us", "server_us")]
        table.add(
            {"way": way, "loop": loop} | row,
            way,
            loop,
            f"{row['rate']:,.0f}",
            f"{row['ratio']:.2f}",
            *cells,
        )
    if by_size:
        about_size = {
            "flat": ""
            if options.json
            else f"\n{FLAT_TASKS} tasks offer, by number of pending messages ({loops[0]}):"
        }
        columns = (
            "kind          ",
            "   pending",
            "   offers/s",
            " to the least",
            " client us",
            " script us",
            " server us",
        )
        by_pending = Table(about_size, columns, as_json=options.json)
        smallest = {figures["kind"]: figures["rate"] for figures in reversed(by_size)}
        for figures in by_size:
            figures["ratio"] = figures["rate"] / smallest[figures["kind"]]
            cells = [f"{figures[name]:.1f}" for name in ("client_us", "script_us", "server_us")]
            facts = (
                figures["kind"],
                f"{figures['pending']:,}",
                f"{figures['rate']:,.0f}",
                f"{figures['ratio']:.2f}",
            )
            by_pending.add(figures, *facts, *cells)
    table.end(**({"flat": by_size} if by_size else {}))
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            by_size,
            f"{about['machine']}. Medians of {options.runs} interleaved runs.",
        )


if __name__ == "__main__":
    main()
