"""Measure many clients on one queue: ``python -m benchmarks.many_clients [options]``.

1, 4 and 16 processes each wait for messages of the same queue. Another process has offered one
message (``--together``: this many) for each of 100 moments, 50 ms apart, and exited. How many
scripts does such a moment cost, and how late are its messages? Every sample has processes of its
own. Samples are interleaved, and the medians of the runs are shown.

"scripts" are the script calls per moment, from before the first moment until everything is handled,
including the re-check of each client, one in 5 s. "claims" are those without the acknowledgements,
which are one per message of a reliable queue. Lateness runs from the due time to the first line of
the handler, in ms, by the clock of one machine.

``--kill``: halfway, the process that has handled the most is killed while it holds a message. All
messages that come due later must be handled; "after kill" is how late the worst of those was. With
a delayed queue, the message that it held is lost; with a reliable one, under leases of 2 s, it is
redelivered: "again" is how long after the kill. Handlers take 20 ms in this mode.
"""

from __future__ import annotations

import asyncio
import math
import struct
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import delayq
from benchmarks._moves import Counts, address, measured_server
from benchmarks._report import BLUE, GREEN, Table, machine, plotter, save
from benchmarks._samples import (
    await_ready,
    be_sample,
    end_input,
    medians,
    new_parser,
    quantile,
    result,
    say_ready,
    start,
)

if TYPE_CHECKING:
    import subprocess

LOOKS = {"DelayedQueue": (BLUE, "o", "-"), "ReliableQueue": (GREEN, "s", "--")}
NAME = "many clients"
LEAD_S, APART_S, LEASE_S, HOLD_S, RESYNC_S = 3.0, 0.05, 2.0, 0.02, 5.0
# So long that no lease ends while its client waits for its turn, seconds.
LONG_LEASE_S = 60.0
# How long after the last moment the last message may arrive, even one whose lease must end first.
PATIENCE = 20.0
# A message, a moment, and whether its handler began or ended then.
NOTE = struct.Struct("<idi")
BEGAN, ENDED = 0, 1


class Note(NamedTuple):
    number: int
    at: float
    what: int


def read_notes(file: Path) -> list[Note]:
    data = file.read_bytes()
    return [
        Note(*fields) for fields in NOTE.iter_unpack(data[: len(data) // NOTE.size * NOTE.size])
    ]


async def consume(
    url: str,
    kind: str,
    file: str,
    hold: float,
    lease: float,
    clients: int,
    resync_interval: float,
) -> None:
    """Handle messages until the input ends. Notes survive even if this process is killed."""
    with Path(file).open("ab", buffering=0) as notes:  # noqa: ASYNC230 - a few bytes, unbuffered: what is written stays

        async def handle(number: int) -> None:
            notes.write(NOTE.pack(number, time.time(), BEGAN))
            if hold:
                await asyncio.sleep(hold)
            notes.write(NOTE.pack(number, time.time(), ENDED))

        async def work(client: delayq.Client) -> None:
            if kind == "DelayedQueue":
                async for number in client.delayed_queue(NAME):
                    await handle(number)
            else:
                async for message in client.reliable_queue(NAME, lease=lease):
                    async with message:
                        await handle(message.value)

        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(
                    delayq.connect(url, resync_interval=resync_interval)
                )
                for _ in range(clients)
            ]
            working = [asyncio.create_task(work(client)) for client in opened]
            while not all(client.statistics().waiting for client in opened):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
            say_ready()
            await asyncio.to_thread(sys.stdin.read)
    # Closing its client ends a loop.
    await asyncio.gather(*working)


async def produce(url: str, kind: str, moments: int, together: int, apart: float) -> list[float]:
    """Offer and exit. Return when each message is due, seconds since the epoch."""
    due: list[float] = []
    async with delayq.connect(url) as client:
        first = time.time() + LEAD_S
        for moment in range(moments):
            numbers = range(moment * together, (moment + 1) * together)
            delay = first + moment * apart - time.time()
            if kind == "DelayedQueue":
                receipts = await client.delayed_queue(NAME).offer_many(
                    [(number, delay) for number in numbers]
                )
                due += [receipt.due_at.timestamp() for receipt in receipts]
            else:
                queue = client.reliable_queue(NAME)
                ids = await queue.offer_many(
                    [delayq.Offer(number, delay=delay) for number in numbers]
                )
                found = await asyncio.gather(*map(queue.get, ids))
                due += [message.due_at.timestamp() for message in found if message is not None]
        if time.time() > first - 0.5:
            raise AssertionError("offering took too long")
    return due


def kill_busiest(consumers: list[subprocess.Popen[str]], files: list[Path]) -> tuple[int, float]:
    """Kill the process that has handled the most, while it holds the next message.

    Return its place, and when that was.
    """
    sizes = [file.stat().st_size for file in files]
    victim, until = sizes.index(max(sizes)), time.time() + PATIENCE
    # An odd number of notes: a handler has begun and not ended.
    while files[victim].stat().st_size // NOTE.size % 2 == 0:
        if time.time() > until:
            raise AssertionError("a client no longer receives messages")
        time.sleep(0.0005)
    consumers[victim].kill()
    consumers[victim].wait()
    return victim, time.time()


def await_all(files: list[Path], count: int, last_due: float, spare: int) -> None:
    """Wait until everything is handled; messages that may be lost, until no lease can bring them
    back.
    """
    while (now := time.time()) < last_due + PATIENCE:
        handled = {note.number for file in files for note in read_notes(file) if note.what == ENDED}
        if len(handled) >= count - (spare if now > last_due + 2 * LEASE_S else 0):
            return
        time.sleep(0.005)
    raise AssertionError(f"{len(handled)} of {count} messages were handled")


def lateness(
    files: list[Path], due: list[float], killed: tuple[int, float] | None
) -> dict[str, float]:
    """Return how late messages arrived, ms, and what became of the message that the killed process
    held.
    """
    notes = sorted(
        (note.at, place, note) for place, file in enumerate(files) for note in read_notes(file)
    )
    began: dict[int, float] = {}
    for at, _, note in notes:
        if note.what == BEGAN:
            began.setdefault(note.number, at)
    late = {number: (at - due[number]) * 1000 for number, at in began.items()}
    if min(late.values()) < -1:
        raise AssertionError(f"{-min(late.values()):.1f} ms early")
    ordered = sorted(late.values())
    figures = {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "max": ordered[-1]}
    figures["lost"] = len(due) - len({note.number for _, _, note in notes if note.what == ENDED})
    if killed is not None:
        victim, then = killed
        figures["after_kill"] = max(value for number, value in late.items() if due[number] > then)
        # Due before the kill, and begun after it by another process: the message that the killed
        # process held.
        again = [
            at - then
            for at, place, note in notes
            if place != victim and note.what == BEGAN and due[note.number] < then < at
        ]
        figures["again"] = max(again, default=0.0)
    return figures


def measure(
    server: Any,
    url: str,
    kind: str,
    clients: int,
    moments: int,
    together: int,
    *,
    kill: bool,
    each: int = 1,
    apart: float = APART_S,
    resync_interval: float = RESYNC_S,
) -> dict[str, float]:
    """Measure a number of processes with ``each`` clients, and due times ``apart`` seconds."""
    server.execute_command("FLUSHALL", "SYNC")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = [folder / f"{place}" for place in range(clients)]
        consumers = []
        for file in files:
            given = {
                "url": url,
                "kind": kind,
                "file": str(file),
                "hold": HOLD_S if kill else 0.0,
                "lease": LEASE_S if kill else LONG_LEASE_S,
                "clients": each,
                "resync_interval": resync_interval,
            }
            consumers.append(start("many_clients", role="consume", **given))
            stack.callback(consumers[-1].kill)
        for consumer in consumers:
            await_ready(consumer)
        due: list[float] = result(
            start(
                "many_clients",
                role="produce",
                url=url,
                kind=kind,
                moments=moments,
                together=together,
                apart=apart,
            )
        )
        if len(due) != moments * together:
            raise AssertionError(f"{len(due)} messages were offered")
        time.sleep(max(0.0, due[0] - 0.1 - time.time()))
        before, killed = Counts.of(server), None
        if kill:
            time.sleep(max(0.0, due[len(due) // 2] - time.time()))
            killed = kill_busiest(consumers, files)
        time.sleep(max(0.0, due[-1] - time.time()))
        # A killed handler may have held as many messages as arrive together, and nothing brings
        # those back.
        await_all(files, len(due), due[-1], together if kill and kind == "DelayedQueue" else 0)
        # Wait for the last acknowledgement.
        time.sleep(0.02)
        scripts = Counts.of(server).since(before).scripts
        left = [
            consumer
            for place, consumer in enumerate(consumers)
            if killed is None or place != killed[0]
        ]
        for consumer in left:
            end_input(consumer)
        for consumer in left:
            result(consumer)
        figures = lateness(files, due, killed)
    acks = len(due) if kind == "ReliableQueue" else 0
    # Several acknowledgements share a script, so they cannot be told apart.
    return figures | {
        "scripts": scripts / moments,
        "claims": (scripts - acks) / moments if together == 1 else math.nan,
    }


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8))
    for kind, (colour, marker, dashes) in LOOKS.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        clients = [row["clients"] for row in of_kind]
        left.plot(
            clients,
            [row["claims"] for row in of_kind],
            color=colour,
            marker=marker,
            linestyle=dashes,
            label=kind,
        )
        right.plot(
            clients,
            [row["p50"] for row in of_kind],
            color=colour,
            marker=marker,
            label=f"{kind}, median",
        )
        right.plot(
            clients,
            [row["p99"] for row in of_kind],
            color=colour,
            marker=marker,
            linestyle=":",
            label=f"{kind}, 99th percentile",
        )
    for panel, title in (
        (left, "scripts for each due moment, without acknowledgements"),
        (right, "ms from due to handled"),
    ):
        panel.set_xticks(sorted({row["clients"] for row in rows}))
        panel.set_ylim(bottom=0)
        panel.set_xlabel("processes waiting for the same queue")
        panel.set_title(title, loc="left", fontsize=9.5)
        panel.legend(frameon=False, fontsize=8)
    left.axhline(1, color="#888888", linewidth=1)
    figure.suptitle("Many clients, one due time", x=0.012, ha="left", fontweight="bold")
    figure.subplots_adjust(left=0.06, right=0.98, top=0.8, bottom=0.22, wspace=0.16)
    save(figure, file, footer)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 4, 16], help="numbers of waiting processes"
    )
    parser.add_argument("--moments", type=int, default=100, help="number of due times")
    parser.add_argument(
        "--together", type=int, default=1, help="messages per due time, at most 100"
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        help="kill the busiest client halfway; skips the run with a single client",
    )
    options = parser.parse_args()
    if options.sample:
        be_sample(options.sample, {"consume": consume, "produce": produce})
        return
    if options.moments < 4 or not 1 <= options.together <= 100:
        parser.error("--moments must be at least 4, and --together from 1 to 100")
    plt = plotter() if options.plot else None
    samples = [
        (kind, clients)
        for clients in options.clients
        for kind in LOOKS
        if clients > 1 or not options.kill
    ]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {sample: [] for sample in samples}
    with measured_server(options.server) as server:
        url = address(server, options.server)
        about = {
            "machine": machine(server),
            "measured": (
                f"{options.moments} due times, {APART_S * 1000:g} ms apart, {options.together}"
                f" messages due at each; medians of {options.runs} interleaved runs; scripts per"
                " due time, lateness in ms, recovery (again) in s"
            ),
        }
        for _ in range(options.runs):
            for (kind, clients), values in runs.items():
                values.append(
                    measure(
                        server,
                        url,
                        kind,
                        clients,
                        options.moments,
                        options.together,
                        kill=options.kill,
                    )
                )
    columns = (
        "kind         ",
        " clients",
        " scripts",
        " claims",
        "    p50",
        "    p99",
        "      max",
        " lost",
    )
    table = Table(
        about,
        (*columns, " after kill", " again s") if options.kill else columns,
        as_json=options.json,
    )
    for (kind, clients), values in runs.items():
        row = medians(values)
        cells = [f"{row[name]:.2f}" for name in ("scripts", "claims", "p50", "p99", "max")]
        cells.append(f"{row['lost']:.0f}")
        if options.kill:
            cells += [f"{row['after_kill']:.2f}", f"{row['again']:.2f}"]
        table.add(
            {"kind": kind, "clients": clients, "runs": values} | row, kind, f"{clients}", *cells
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
