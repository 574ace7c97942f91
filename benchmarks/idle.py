"""Measure what an idle client costs: ``python -m benchmarks.idle [options]``.

One client has 1 to 1,000 open queues, each with a message that is due in an hour. A caller waits on
every queue (``claim`` on a reliable one, ``take`` on a delayed one), but on 100 delayed queues at
most, because each of those blocks a connection. Once all is quiet, the benchmark counts everything
for 20 s. "no client" is the same process without a client. Every sample is a process of its own.
Samples are interleaved, and the medians of the runs are shown. A run takes four minutes with the
defaults.

Per second: "trips" are the round trips that the client reports. "sent" are the commands that
clients sent, from the server's ``commandstats``: only those that no script calls (evalsha, ping,
blmove and the like), because it also counts scripts' commands. "timer" is how often the client's
timer woke up, "turns" counts those of the event loop, "switches" the process's voluntary context
switches. CPU is in percent of one processor.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import TYPE_CHECKING, Any

from redis import Redis

import delayq
from benchmarks._moves import Counts, address, measured_server
from benchmarks._report import BLUE, GREEN, Table, machine, plotter, save
from benchmarks._samples import be_sample, medians, new_parser, result, start

if TYPE_CHECKING:
    from collections.abc import Coroutine

NO_CLIENT = "no client"
LOOKS = {"DelayedQueue": (BLUE, "o", "-"), "ReliableQueue": (GREEN, "s", "--")}
FAR = 3600.0
WAITING = 100
SETTLE = 3.0
# Seconds, enough for every caller to begin waiting.
PATIENCE = 60.0


class Turns:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.count = 0
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def counted(timeout: float | None = None) -> Any:
            self.count += 1
            return select(timeout)

        selector.select = counted


async def counted(server: Any, seconds: float, client: delayq.Client | None) -> dict[str, float]:
    """Return what happens per second over this many seconds, and the number of connections."""
    turns = Turns()

    def snapshot() -> list[float]:
        timer = 0 if client is None else client.session.timer.statistics().wakeups
        trips = 0 if client is None else client.statistics().round_trips
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        return [trips, timer, turns.count, switches, time.process_time()]

    counts, at, before = Counts.of(server), time.perf_counter(), snapshot()
    await asyncio.sleep(seconds)
    after, took = snapshot(), time.perf_counter() - at
    spent = Counts.of(server).spent_since(counts)
    trips, timer, loop_turns, switches, cpu = (
        now - earlier for now, earlier in zip(after, before, strict=True)
    )
    figures = {
        "trips": trips,
        "sent": spent.sent,
        "timer": timer,
        "turns": loop_turns,
        "switches": switches,
    }
    figures |= {"cpu": cpu * 100, "server_cpu": spent.cpu_us / 1e4}
    # One connection is this process's own, and one the main process's.
    connections = server.info("clients")["connected_clients"] - 2
    return {name: figure / took for name, figure in figures.items()} | {"connections": connections}


async def idle(url: str, kind: str, queues: int, seconds: float) -> dict[str, float]:
    with Redis.from_url(url) as server:
        if kind == NO_CLIENT:
            await asyncio.sleep(SETTLE)
            return await counted(server, seconds, None) | {"waiting": 0}
        async with delayq.connect(url) as client:
            waits: list[Coroutine[Any, Any, object]] = []
            for number in range(queues):
                if kind == "DelayedQueue":
                    queue = client.delayed_queue(f"idle {number}")
                    await queue.offer(number, delay=FAR)
                    if number < WAITING:
                        waits.append(queue.take())
                else:
                    jobs = client.reliable_queue(f"idle {number}")
                    await jobs.offer(number, delay=FAR)
                    waits.append(jobs.claim(1, wait=FAR))
            waiting = [asyncio.create_task(wait) for wait in waits]
            async with asyncio.timeout(PATIENCE):
                while client.statistics().waiting < len(waiting):  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE)
            errors = client.statistics().errors
            figures = await counted(server, seconds, client)
            about = client.statistics()
            if (about.queues, about.waiting, about.errors) != (queues, len(waiting), errors):
                raise AssertionError(f"the client is not idle: {about}")
            if any(task.done() for task in waiting):
                raise AssertionError("a message was delivered")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    return figures | {"waiting": len(waiting)}


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(10.4, 3.8))
    titles = {
        "sent": "commands sent per second",
        "turns": "event loop iterations per second",
        "cpu": "CPU of the client, percent",
    }
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for kind, (colour, marker, dashes) in LOOKS.items():
            points = [(row["queues"], row[name]) for row in rows if row["kind"] == kind]
            panel.semilogx(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                linestyle=dashes,
                label=kind,
            )
        panel.set_ylim(0, 1.15 * max(row[name] for row in rows) or 1)
        panel.minorticks_off()
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.set_title(title, loc="left", fontsize=9.5)
        panel.set_xlabel("open queues")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle("The cost of an idle client", x=0.012, ha="left", fontweight="bold")
    figure.subplots_adjust(left=0.06, right=0.98, top=0.8, bottom=0.22, wspace=0.22)
    save(figure, file, footer)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--queues", type=int, nargs="+", default=[1, 10, 100, 1000], help="numbers of open queues"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long to observe the client, in seconds"
    )
    options = parser.parse_args()
    if options.sample:
        be_sample(options.sample, {"idle": idle})
        return
    plt = plotter() if options.plot else None
    samples = [(NO_CLIENT, 0), *((kind, queues) for queues in options.queues for kind in LOOKS)]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {sample: [] for sample in samples}
    with measured_server(options.server) as server:
        url = address(server, options.server)
        about = {
            "machine": machine(server),
            "measured": (
                f"one client, idle for {options.seconds:g} s; a message due in an hour in each"
                f" queue; medians of {options.runs} interleaved runs; figures per second"
            ),
        }
        for _ in range(options.runs):
            for (kind, queues), values in runs.items():
                server.execute_command("FLUSHALL", "SYNC")
                sample = start(
                    "idle", role="idle", url=url, kind=kind, queues=queues, seconds=options.seconds
                )
                values.append(result(sample, within=options.seconds + 2 * PATIENCE))
    columns = (
        "kind         ",
        "  queues",
        " waiting",
        "  trips",
        "   sent",
        "  timer",
        "  turns",
        " switches",
    )
    table = Table(
        about, (*columns, "  CPU %", " server CPU %", " connections"), as_json=options.json
    )
    for (kind, queues), values in runs.items():
        row = medians(values)
        cells = [
            f"{row[name]:.2f}"
            for name in ("trips", "sent", "timer", "turns", "switches", "cpu", "server_cpu")
        ]
        facts = (f"{queues:,}", f"{row['waiting']:,.0f}")
        table.add(
            {"kind": kind, "queues": queues} | row,
            kind,
            *facts,
            *cells,
            f"{row['connections']:.0f}",
        )
    table.end()
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            f"{about['machine']}. Medians of {options.runs} interleaved runs.",
        )


if __name__ == "__main__":
    main()
