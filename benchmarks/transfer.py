"""Measure what one transfer costs the server: ``python -m benchmarks.transfer [--json] [--plot
FILE] [--most 1000000]``.

Our script and Redisson's steps, rewritten from their description, run interleaved on a private
server. The figures show how long one script that moves 100 due messages blocks the server, by how
many are pending, for four orders in which they come due. The time is the server's own (``INFO
commandstats``). Payloads have 100 bytes. Before each call everything is restored.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks._moves import (
    BATCH,
    add_server_option,
    delayq_transfer,
    fill,
    measured_server,
    redisson_transfer,
)
from benchmarks._report import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    VERMILION,
    Table,
    add_options,
    machine,
    plotter,
    save,
)
from delayq._redisson.keys import DelayedKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNS = 5
SLOW_MS = 1000
ORDERS = {
    "in offer order": "one delay for all",
    "all at once": "one due time for all",
    "newest first": "short delays behind long ones",
    "scattered": "any delays",
}


@dataclass(frozen=True)
class Series:
    """A line of the plot: a script, and the data that it works on."""

    name: str
    java_ids: bool
    redisson: bool
    listed: bool = True
    look: tuple[str, str, str] = ("", "", "")

    def call(self, server: Any, keys: DelayedKeys) -> float:
        return (
            redisson_transfer(server, keys)
            if self.redisson
            else delayq_transfer(server, keys, listed=self.listed)
        )[0]


SERIES = (
    Series("Redisson", java_ids=True, redisson=True, look=(VERMILION, "o", "-")),
    Series("Redisson's steps, our ids", java_ids=False, redisson=True, look=(ORANGE, "v", "--")),
    Series("delayq, offered by Java", java_ids=True, redisson=False, look=(SKY, "^", "--")),
    Series("delayq", java_ids=False, redisson=False, look=(BLUE, "s", "-")),
    Series(
        "delayq, no ordered list",
        java_ids=False,
        redisson=False,
        listed=False,
        look=(GREEN, "D", ":"),
    ),
)
KEYS = {
    java_ids: DelayedKeys.of(f"benchmark:{'java' if java_ids else 'ours'}")
    for java_ids in (True, False)
}


def due_times(pending: int, order: str) -> Callable[[int], int]:
    """Return a function that tells when the message at each place is due: all of them in the
    past.
    """
    chance = random.Random(1)
    ago = int(time.time() * 1000) - 2 * pending
    orders: dict[str, Callable[[int], int]] = {
        "in offer order": lambda place: ago + place,
        "all at once": lambda _place: ago,
        "newest first": lambda place: ago + pending - place,
        "scattered": lambda _place: ago + chance.randrange(pending),
    }
    return orders[order]


def run_once(server: Any, series: Series) -> float:
    """Make one call, put back everything it moved, and return how long it blocked the server,
    ms.
    """
    keys = KEYS[series.java_ids]
    due = server.zrange(keys.timeout, 0, BATCH - 1, withscores=True)
    milliseconds = series.call(server, keys)
    server.zadd(keys.timeout, dict(due))
    server.copy(keys.ordered + ":kept", keys.ordered, replace=True)
    server.delete(keys.ready)
    while server.info("memory")["lazyfree_pending_objects"]:
        time.sleep(0.001)
    return milliseconds


def measure(server: Any, pending: int, order: str) -> Iterator[dict[str, Any]]:
    for java_ids, keys in KEYS.items():
        fill(
            server,
            keys,
            pending,
            java_ids=java_ids,
            due=due_times(pending, order),
            payload=lambda _place: b"x" * 100,
        )
        server.copy(keys.ordered, keys.ordered + ":kept", replace=True)
    blocks: dict[Series, list[float]] = {series: [] for series in SERIES}
    for _ in range(RUNS):
        for series, times in blocks.items():
            if max(times, default=0) < SLOW_MS:
                times.append(run_once(server, series))
    medians = {series: statistics.median(times) for series, times in blocks.items()}
    for series, times in blocks.items():
        yield {
            "pending": pending,
            "order": order,
            "script": series.name,
            "runs": len(times),
            "block_ms": medians[series],
            "longest_ms": max(times),
            "message_us": medians[series] * 1000 / BATCH,
            "ratio": medians[SERIES[0]] / medians[series],
        }


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    max_pending = max(row["pending"] for row in rows)
    worst = [
        max(
            r["block_ms"] for r in rows if (r["pending"], r["script"]) == (max_pending, series.name)
        )
        for series in SERIES
    ]
    figure, panels = plt.subplots(2, 2, figsize=(8.6, 6.4), sharex=True, sharey=True)
    for panel, (order, meaning) in zip(panels.flat, ORDERS.items(), strict=True):
        for series in SERIES:
            points = [
                (row["pending"], row["block_ms"])
                for row in rows
                if (row["order"], row["script"]) == (order, series.name)
            ]
            colour, marker, dashes = series.look
            panel.loglog(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                linestyle=dashes,
                label=series.name,
            )
        panel.minorticks_off()
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.set_title(f"{order} ({meaning})", loc="left", fontsize=9.5)
    figure.supylabel("server blocked by one call, ms", fontsize=9, x=0.012)
    for panel in panels[-1]:
        panel.set_xlabel("messages pending")
    title = f"Moving {BATCH} due messages out of {max_pending:,} pending blocks the server\n"
    title += (
        f"for up to {worst[0]:,.0f} ms with Redisson, {worst[3]:,.0f} ms with delayq,"
        f" {worst[2]:,.0f} ms where Java offered them"
    )
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=11, fontweight="bold")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.925),
        ncols=len(SERIES),
        frameon=False,
        fontsize=8,
    )
    figure.subplots_adjust(left=0.085, right=0.965, top=0.83, bottom=0.11, hspace=0.2, wspace=0.1)
    save(figure, file, footer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add_server_option(parser)
    parser.add_argument(
        "--most", type=int, default=1_000_000, help="largest number of pending messages"
    )
    options = parser.parse_args()
    plt = plotter() if options.plot else None
    with measured_server(options.server) as server:
        about = {
            "machine": machine(server),
            "measured": (
                f"{BATCH} messages of 100 bytes per call; medians of {RUNS} interleaved runs, a"
                f" single run (marked *) if a call takes over {SLOW_MS // 1000} s; ratio:"
                " Redisson's time to this one"
            ),
        }
        columns = (
            "  pending",
            "come due      ",
            "script                   ",
            "us a message",
            "longest block ms",
            "   ratio",
        )
        table = Table(about, columns, as_json=options.json)
        pending = 1000
        while pending <= options.most:
            for order in ORDERS:
                for row in measure(server, pending, order):
                    star = "*" if row["runs"] < RUNS else " "
                    figures = (
                        f"{row['message_us']:.2f}",
                        f"{row['longest_ms']:.2f}{star}",
                        f"{row['ratio']:.1f}x",
                    )
                    table.add(row, str(pending), order, row["script"], *figures)
            pending *= 10
    table.end()
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            f"{about['machine']}. Medians of {RUNS} calls, or a single call if it takes seconds.",
        )


if __name__ == "__main__":
    main()
