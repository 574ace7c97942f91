"""Measure how many due messages one process takes and acknowledges: ``python -m benchmarks.deliver
[options]``.

100,000 messages of 100 bytes, offered by another process, are all due. Then one process handles
them with a handler that does nothing. Every sample finds the same bytes on the server (saved with
DUMP, put back with RESTORE) and is a process of its own. Samples are interleaved, and the medians
of the runs are shown. Time runs from the first message handled until the last is acknowledged and
the queue is empty. The floor is redis-py by hand: one script that leases 100, and one that
acknowledges 100.

"client" is the consumer's processor time, "script" the server's time in scripts, "server" all of
its processor time, in µs per message. "scripts" are calls per message. ``--flat`` adds how taking
and acknowledging depends on how many messages are pending behind. For a steady 10,000 a second, see
``lateness``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from redis import Redis

import delayq
from benchmarks import _by_hand
from benchmarks._moves import Meter, address, images, measured_server, put_back
from benchmarks._report import BLUE, GREEN, ORANGE, SKY, VERMILION, Table, machine, plotter, save
from benchmarks._samples import LOOPS, be_sample, medians, new_parser, result, start

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

NAME = "deliver"
VALUE = "x" * 98  # 100 bytes as JSON
AT_A_TIME = 5000
# Offered messages become due once all are stored: at least this many are stored per second.
OFFERS_A_SECOND = 10_000
# Due in the order of the offers, as with any fixed delay: a few ms between scripts keep it that
# way. One script stores 200.
ONE_SCRIPT, APART = 200, 0.005 / 200
TASKS = 100
FLAT_MESSAGES, FLAT_DELAY, FLAT_ROUNDS, FAR = 1000, 0.5, 3, 36_000.0
FLOOR = "redis-py, 100 by a script"
# Not in the table: see benchmarks.floor.
AT_MOST_ONCE = f"{FLOOR}, at most once"
BY_HAND = (FLOOR, AT_MOST_ONCE)


class Run:
    """One process's run over a queue: how many messages to handle, and how many are pending behind
    them, far from due.
    """

    def __init__(self, server: Any, messages: int, name: str = NAME, behind: int = 0) -> None:
        self.messages, self.name, self.behind, self.handled = messages, name, behind, 0
        self.done = asyncio.Event()
        self._server = server
        self._meter: Meter | None = None

    def begin(self) -> None:
        """Start measuring now instead of at the first message."""
        self._meter = Meter(self._server)

    def handle(self) -> bool:
        """Handle a message, and return whether it was the last."""
        if self._meter is None:
            self.begin()
        self.handled += 1
        if self.handled == self.messages:
            self.done.set()
        return self.handled >= self.messages

    def figures(self) -> dict[str, float]:
        """Return the cost so far, once everything is acknowledged."""
        if self.handled != self.messages or self._meter is None:
            raise AssertionError(f"{self.handled} of {self.messages} messages were handled")
        return self._meter.read(self.messages)


async def delayed_left(queue: delayq.DelayedQueue[Any], run: Run) -> dict[str, float]:
    figures = run.figures()
    sizes = await queue.pending.size(), await queue.ready.size()
    if sizes != (run.behind, 0):
        raise AssertionError(f"{sizes} messages are left")
    return figures


async def reliable_left(client: delayq.Client, run: Run) -> dict[str, float]:
    """Wait until everything is acknowledged, which a worker does in the background."""
    queue = client.reliable_queue(run.name)
    async with asyncio.timeout(10):
        while True:
            stats = await queue.stats()
            if (stats.delayed, stats.ready, stats.leased, stats.dead) == (run.behind, 0, 0, 0):
                return run.figures()
            await asyncio.sleep(0.001)


# Ways of consuming


async def plain_delayed(client: delayq.Client, run: Run) -> dict[str, float]:
    queue = client.delayed_queue(run.name)
    async for _value in queue:
        if run.handle():
            break
    return await delayed_left(queue, run)


async def deliveries(client: delayq.Client, run: Run) -> dict[str, float]:
    queue = client.delayed_queue(run.name)
    async for message in queue.deliveries():
        async with message:
            last = run.handle()
        if last:
            break
    return await delayed_left(queue, run)


async def plain_reliable(client: delayq.Client, run: Run) -> dict[str, float]:
    async for message in client.reliable_queue(run.name):
        async with message:
            last = run.handle()
        if last:
            break
    return await reliable_left(client, run)


async def from_tasks(client: delayq.Client, run: Run) -> dict[str, float]:
    """Handle each message in a task, at most ``TASKS`` at a time."""
    free, started = asyncio.Semaphore(TASKS), 0

    async def handle_one(message: delayq.Message[Any]) -> None:
        try:
            async with message:
                run.handle()
        finally:
            free.release()

    async with asyncio.TaskGroup() as tasks:
        async for message in client.reliable_queue(run.name):
            await free.acquire()
            tasks.create_task(handle_one(message))
            started += 1
            if started == run.messages:
                break
    return await reliable_left(client, run)


def by_worker(concurrency: int) -> Way:
    async def work(client: delayq.Client, run: Run) -> dict[str, float]:
        worker = delayq.Worker(client, concurrency=concurrency)

        @worker.listener(run.name)
        async def handle(_value: str) -> None:
            run.handle()

        async with worker:
            await run.done.wait()
            return await reliable_left(client, run)

    return work


Way = Callable[[delayq.Client, Run], Awaitable[dict[str, float]]]
# The kind of queue, how to handle its messages, and the colour.
WAYS: dict[str, tuple[str, Way, str]] = {
    "DelayedQueue, async for": ("DelayedQueue", plain_delayed, BLUE),
    "DelayedQueue, deliveries()": ("DelayedQueue", deliveries, SKY),
    "ReliableQueue, async for": ("ReliableQueue", plain_reliable, GREEN),
    f"ReliableQueue, {TASKS} tasks": ("ReliableQueue", from_tasks, GREEN),
    "Worker, concurrency 100": ("ReliableQueue", by_worker(100), ORANGE),
    "Worker, concurrency 1,000": ("ReliableQueue", by_worker(1000), ORANGE),
}
FLAT = {
    "DelayedQueue, async for": "o",
    "DelayedQueue, deliveries()": "^",
    f"ReliableQueue, {TASKS} tasks": "s",
}


# The samples


async def store(
    client: delayq.Client,
    kind: str,
    name: str,
    delay: Callable[[int], float],
    messages: int,
    at_a_time: int = AT_A_TIME,
) -> None:
    """Offer messages. ``delay`` returns the delay of a call, given the place of its first
    message.
    """
    for first in range(0, messages, at_a_time):
        count = min(at_a_time, messages - first)
        if kind == "DelayedQueue":
            await client.delayed_queue(name).offer_many([(VALUE, delay(first))] * count)
        else:
            await client.reliable_queue(name).offer_many(
                [delayq.Offer(VALUE, delay=delay(first))] * count
            )


async def offer(url: str, kind: str, messages: int, due: float) -> None:
    """Store messages that come due once all are stored, and exit."""
    if kind == FLOOR:
        await _by_hand.store_due(url, due, f'"{VALUE}"', messages, AT_A_TIME)
    else:
        async with delayq.connect(url) as client:
            await store(
                client,
                kind,
                NAME,
                lambda first: due + first * APART - time.time(),
                messages,
                ONE_SCRIPT,
            )
    if time.time() > due:
        raise AssertionError("messages came due before all were stored")


def store_all(server: Any, url: str, messages: int) -> dict[str, dict[bytes, bytes]]:
    """Store due messages of each kind, and return what the server then holds, by kind."""
    stored, due = {}, 0.0
    for kind in (FLOOR, "DelayedQueue", "ReliableQueue"):
        server.execute_command("FLUSHALL", "SYNC")
        due = time.time() + 2 + messages / OFFERS_A_SECOND
        result(start("deliver", role="offer", url=url, kind=kind, messages=messages, due=due))
        stored[kind] = images(server)
    time.sleep(max(0.0, due + messages * APART + 0.1 - time.time()))
    return stored


def run_sample(
    server: Any,
    url: str,
    stored: dict[str, dict[bytes, bytes]],
    way: str,
    loop: str,
    messages: int,
    *,
    profile: bool = False,
) -> Any:
    """Handle all messages that :func:`store_all` stored, and return the sample's result."""
    put_back(server, stored[FLOOR if way in BY_HAND else WAYS[way][0]])
    arguments = {"url": url, "way": way, "messages": messages, "loop": loop, "profile": profile}
    return result(start("deliver", role="handle", **arguments), within=600)


async def handle_all(url: str, way: str, messages: int) -> dict[str, float]:
    with Redis.from_url(url) as server:
        run = Run(server, messages)
        if way in BY_HAND:
            await _by_hand.deliver(url, run.handle, leased=way == FLOOR)
            figures = run.figures()
            await _by_hand.nothing_left(url)
            return figures
        async with delayq.connect(url) as client:
            return await WAYS[way][1](client, run)


async def flat(url: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Handle messages that come due while others are pending behind, interleaving the numbers of
    pending messages.
    """
    figures: dict[tuple[str, int], list[dict[str, float]]] = {
        (way, size): [] for way in FLAT for size in sizes
    }
    with Redis.from_url(url) as server:
        async with delayq.connect(url) as client:
            for kind in ("DelayedQueue", "ReliableQueue"):
                for size in sizes:
                    await store(client, kind, f"{kind} {size}", lambda _: FAR, size)
            for turn in range(rounds + 1):
                for (way, size), of_way in figures.items():
                    kind, handle, _ = WAYS[way]
                    run = Run(server, FLAT_MESSAGES, f"{kind} {size}", size)
                    # Store them before they come due, or this process would move some before the
                    # measurement.
                    async with asyncio.timeout(FLAT_DELAY):
                        await store(client, kind, run.name, lambda _: FLAT_DELAY, FLAT_MESSAGES)
                    run.begin()
                    figures_of_run = await handle(client, run)
                    # The first round only warms up.
                    if turn:
                        of_way.append(figures_of_run)
    return [
        {"way": way, "pending": size} | medians(figures_of_run)
        for (way, size), figures_of_run in figures.items()
    ]


ROLES: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "offer": offer,
    "handle": handle_all,
    "flat": flat,
}


def draw(
    plt: Any, file: str, rows: list[dict[str, Any]], by_size: list[dict[str, Any]], footer: str
) -> None:
    figure, panels = plt.subplots(
        1, 2 if by_size else 1, figsize=(11.5 if by_size else 7, 3.6), squeeze=False
    )
    first_panel = panels[0][0]
    loop = rows[0]["loop"]
    rows_of_loop = [row for row in rows if row["loop"] == loop]
    colours = [VERMILION if row["way"] == FLOOR else WAYS[row["way"]][2] for row in rows_of_loop]
    bars = first_panel.barh(
        [row["way"] for row in rows_of_loop],
        [row["rate"] for row in rows_of_loop],
        color=colours,
        height=0.6,
    )
    first_panel.bar_label(
        bars, [f"{row['rate']:,.0f}" for row in rows_of_loop], padding=3, fontsize=8
    )
    first_panel.invert_yaxis()
    first_panel.margins(x=0.15)
    first_panel.set_axisbelow(True)
    first_panel.grid(axis="y", visible=False)
    first_panel.xaxis.set_major_formatter("{x:,.0f}")
    first_panel.tick_params(axis="x", labelsize=8)
    first_panel.set_title(f"messages per second, {loop}", loc="left", fontsize=9.5)
    if by_size:
        for way, marker in FLAT.items():
            points = [(row["pending"], row["script_us"]) for row in by_size if row["way"] == way]
            panels[0][1].semilogx(
                *zip(*points, strict=True), color=WAYS[way][2], marker=marker, label=way
            )
        panels[0][1].set_ylim(bottom=0)
        panels[0][1].xaxis.set_major_formatter("{x:,.0f}")
        panels[0][1].set_title(
            "server µs in scripts per message, by number of pending messages",
            loc="left",
            fontsize=9.5,
        )
        panels[0][1].legend(frameon=False, fontsize=8)
    figure.suptitle(
        "Messages taken and acknowledged by one process", x=0.012, ha="left", fontweight="bold"
    )
    figure.subplots_adjust(
        left=0.17 if by_size else 0.26, right=0.97, top=0.82, bottom=0.16, wspace=0.15
    )
    save(figure, file, footer)


def figure_cells(row: dict[str, Any], *names: str) -> list[str]:
    return [f"{row[name]:.1f}" for name in names]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="number of due messages")
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
    plt = plotter() if options.plot else None
    loops = [options.loop] if options.loop else LOOPS
    runs: dict[tuple[str, str], list[dict[str, float]]] = {
        (way, loop): [] for loop in loops for way in (FLOOR, *WAYS)
    }
    by_size: list[dict[str, Any]] = []
    with measured_server(options.server) as server:
        url = address(server, options.server)
        about = {
            "machine": machine(server),
            "measured": (
                f"{options.messages:,} messages of 100 bytes, all due; one process; medians of"
                f" {options.runs} interleaved runs; µs and scripts per message"
            ),
        }
        stored = store_all(server, url, options.messages)
        for _ in range(options.runs):
            for (way, loop), values in runs.items():
                values.append(run_sample(server, url, stored, way, loop, options.messages))
        if options.flat is not None:
            server.execute_command("FLUSHALL", "SYNC")
            arguments = {
                "sizes": options.flat or pending,
                "rounds": FLAT_ROUNDS * options.runs,
                "loop": loops[0],
            }
            by_size = result(start("deliver", role="flat", url=url, **arguments), within=900)
    costs = (" client us", " script us", " server us")
    columns = (
        "way                       ",
        "loop   ",
        " messages/s",
        " to floor",
        *costs,
        " scripts",
    )
    table = Table(about, columns, as_json=options.json)
    for (way, loop), values in runs.items():
        ratios = [
            {"ratio": value["rate"] / floor["rate"]}
            for value, floor in zip(values, runs[FLOOR, loop], strict=True)
        ]
        row = medians(values) | medians(ratios)
        cells = [
            f"{row['rate']:,.0f}",
            f"{row['ratio']:.2f}",
            *figure_cells(row, "client_us", "script_us", "server_us"),
        ]
        table.add({"way": way, "loop": loop} | row, way, loop, *cells, f"{row['scripts']:.3f}")
    if by_size:
        about_size = {
            "flat": (
                f"\n{FLAT_MESSAGES:,} messages come due and are handled, by number of pending"
                f" messages ({loops[0]}):"
            )
        }
        heads = ("way                       ", "   pending", *costs, " to the least", " scripts")
        by_pending = Table(about_size, heads, as_json=options.json)
        smallest = {figures["way"]: figures["script_us"] for figures in reversed(by_size)}
        for figures in by_size:
            figures["ratio"] = figures["script_us"] / smallest[figures["way"]]
            cells = [
                *figure_cells(figures, "client_us", "script_us", "server_us"),
                f"{figures['ratio']:.2f}",
                f"{figures['scripts']:.3f}",
            ]
            by_pending.add(figures, figures["way"], f"{figures['pending']:,}", *cells)
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
