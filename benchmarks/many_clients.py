"""Measure many clients on one queue: ``python -m benchmarks.many_clients [options]``.

1, 4 and 16 processes each wait for messages of the same queue. Another process has offered one
message (``--together``: this many) for each of 100 moments, 50 ms apart, and exited. How many
scripts does such a moment cost, and how late are its messages? Every sample has processes of its
own. Samples are interleaved, and the medians of the runs are shown.

"scripts" are the script calls per moment, from before the first moment until everything is handled,
including the re-check of each client, one in 5 s. "claims" are the calls for due messages among
them. Lateness runs from the due time to the first line of the handler, in ms, by the clock of one
machine. "busy" is the processor time that the server and the clients use per moment, in ms: on a
machine that all of them share, it is part of the lateness.

``--processes``: spread the clients over this many processes, for more clients than a machine has
room for processes: ``--clients 2000 --processes 4 --apart 0.1``.

``--kill``: halfway, the process that has handled the most is killed while it holds a message. All
messages that come due later must be handled; "after kill" is how late the worst of those was. With
a delayed queue, the message that it held is lost; with a reliable one, under leases of 2 s, it is
redelivered: "again" is how long after the kill. Handlers take 20 ms in this mode.
"""

from __future__ import annotations

import asyncio
import math
import os
import struct
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

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
from delayq._redis.client import RedisClient
from delayq._redisson.store import TRANSFER
from delayq._reliable.scripts import CLAIM

if TYPE_CHECKING:
    import subprocess

    from delayq._redis.scripts import Script

LOOKS = {"DelayedQueue": (BLUE, "o", "-"), "ReliableQueue": (GREEN, "s", "--")}
NAME = "many clients"
LEAD_S, APART_S, LEASE_S, HOLD_S = 3.0, 0.05, 2.0, 0.02
# So long that no lease ends while its client waits for its turn, seconds.
LONG_LEASE_S = 60.0
# How long after the last moment the last message may arrive, even one whose lease must end first.
PATIENCE = 20.0
# Clients of one process that are opened at a time.
OPENED_AT_ONCE = 20
# A message, a moment, and whether its handler began or ended then.
NOTE = struct.Struct("<idi")
BEGIN, END = 0, 1
# The moment of a call for due messages, in a file of its own beside the notes.
CALL = struct.Struct("<d")


class Note(NamedTuple):
    number: int
    at: float
    event: int


def read_notes(file: Path) -> list[Note]:
    data = file.read_bytes()
    return [
        Note(*fields) for fields in NOTE.iter_unpack(data[: len(data) // NOTE.size * NOTE.size])
    ]


def calls_of(file: Path) -> Path:
    return file.with_suffix(".calls")


def note_calls(notes: BinaryIO) -> None:
    """Note each call for due messages that this process makes from now on."""
    run_once = RedisClient.run_once

    async def noted(server: RedisClient, script: Script, *arguments: Any) -> Any:
        if script.name in (CLAIM.name, TRANSFER.name):
            notes.write(CALL.pack(time.time()))
        return await run_once(server, script, *arguments)

    RedisClient.run_once = noted  # type: ignore[assignment, method-assign]


async def consume(url: str, kind: str, file: str, hold: float, lease: float, clients: int) -> None:
    """Handle messages in some clients until the input ends.

    Notes survive even if this process is killed.
    """
    async with AsyncExitStack() as stack:
        # Unbuffered, so that the few bytes survive a kill.
        notes = stack.enter_context(Path(file).open("ab", buffering=0))  # noqa: ASYNC230, SIM115
        note_calls(stack.enter_context(calls_of(Path(file)).open("ab", buffering=0)))

        async def handle(number: int) -> None:
            notes.write(NOTE.pack(number, time.time(), BEGIN))
            if hold:
                await asyncio.sleep(hold)
            notes.write(NOTE.pack(number, time.time(), END))

        async def work(client: delayq.Client) -> None:
            if kind == "DelayedQueue":
                async for number in client.delayed_queue(NAME):
                    await handle(number)
            else:
                async for message in client.reliable_queue(NAME, lease=lease):
                    async with message:
                        await handle(message.value)

        working: list[asyncio.Task[None]] = []
        async with AsyncExitStack() as opened:
            while len(working) < clients:
                joining = [
                    delayq.connect(url) for _ in range(min(OPENED_AT_ONCE, clients - len(working)))
                ]
                await asyncio.gather(*map(opened.enter_async_context, joining))
                working += [asyncio.create_task(work(client)) for client in joining]
                while not all(client.statistics().waiting for client in joining):  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            say_ready()
            await asyncio.to_thread(sys.stdin.read)
        # Closing the clients ends the loops.
        await asyncio.gather(*working)


async def produce(url: str, kind: str, moments: int, per_moment: int, apart: float) -> list[float]:
    """Offer and exit. Return when each message is due, seconds since the epoch."""
    due: list[float] = []
    async with delayq.connect(url) as client:
        first = time.time() + LEAD_S
        for moment in range(moments):
            numbers = range(moment * per_moment, (moment + 1) * per_moment)
            delay = first + moment * apart - time.time()
            if kind == "DelayedQueue":
                receipts = await client.delayed_queue(NAME).offer_many(
                    [(number, delay) for number in numbers]
                )
                due += [receipt.due_at.timestamp() for receipt in receipts]
            else:
                queue = client.reliable_queue(NAME, lease=LEASE_S)
                ids = await queue.offer_many(
                    [delayq.Offer(number, delay=delay) for number in numbers]
                )
                messages = await asyncio.gather(*map(queue.get, ids))
                due += [message.due_at.timestamp() for message in messages if message is not None]
        if time.time() > first - 0.5:
            raise AssertionError("offering took too long")
    return due


def kill_busiest(consumers: list[subprocess.Popen[str]], files: list[Path]) -> tuple[int, float]:
    """Kill the process that has handled the most, while it holds the next message.

    Return its place, and when that was.
    """
    sizes = [file.stat().st_size for file in files]
    victim, deadline = sizes.index(max(sizes)), time.time() + PATIENCE
    # An odd number of notes: a handler has begun and not ended.
    while files[victim].stat().st_size // NOTE.size % 2 == 0:
        if time.time() > deadline:
            raise AssertionError("a client no longer receives messages")
        time.sleep(0.0005)
    consumers[victim].kill()
    consumers[victim].wait()
    return victim, time.time()


def busy_s(consumers: list[subprocess.Popen[str]]) -> float:
    """Return the processor time that the consumers have used, in seconds; not a number where the
    system does not tell.
    """
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for consumer in consumers:
        try:
            fields = Path(f"/proc/{consumer.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return math.nan
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def await_all(files: list[Path], count: int, last_due: float, spare: int) -> None:
    """Wait until everything is handled; messages that may be lost, until no lease can bring them
    back.
    """
    while (now := time.time()) < last_due + PATIENCE:
        handled = {note.number for file in files for note in read_notes(file) if note.event == END}
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
        if note.event == BEGIN:
            began.setdefault(note.number, at)
    late = {number: (at - due[number]) * 1000 for number, at in began.items()}
    if min(late.values()) < -1:
        raise AssertionError(f"{-min(late.values()):.1f} ms early")
    ordered = sorted(late.values())
    figures = {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "max": ordered[-1]}
    figures["lost"] = len(due) - len({note.number for _, _, note in notes if note.event == END})
    if killed is not None:
        victim, killed_at = killed
        figures["after_kill"] = max(
            value for number, value in late.items() if due[number] > killed_at
        )
        # Due before the kill, and begun after it by another process: the message that the killed
        # process held.
        again = [
            at - killed_at
            for at, place, note in notes
            if place != victim and note.event == BEGIN and due[note.number] < killed_at < at
        ]
        figures["again"] = max(again, default=0.0)
    return figures


def measure(
    server: Any,
    url: str,
    kind: str,
    clients: int,
    *,
    processes: int,
    moments: int,
    per_moment: int = 1,
    apart: float = APART_S,
    kill: bool = False,
) -> dict[str, float]:
    """Measure clients in some processes, with due times ``apart`` seconds."""
    server.execute_command("FLUSHALL", "SYNC")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = [folder / f"{place}" for place in range(processes)]
        consumers = []
        for place, file in enumerate(files):
            arguments = {
                "url": url,
                "kind": kind,
                "file": str(file),
                "hold": HOLD_S if kill else 0.0,
                "lease": LEASE_S if kill else LONG_LEASE_S,
                "clients": clients // processes + (place < clients % processes),
            }
            consumers.append(start("many_clients", role="consume", **arguments))
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
                per_moment=per_moment,
                apart=apart,
            )
        )
        if len(due) != moments * per_moment:
            raise AssertionError(f"{len(due)} messages were offered")
        time.sleep(max(0.0, due[0] - 0.1 - time.time()))
        before, killed, busy, started = Counts.of(server), None, busy_s(consumers), time.time()
        if kill:
            time.sleep(max(0.0, due[len(due) // 2] - time.time()))
            killed = kill_busiest(consumers, files)
        time.sleep(max(0.0, due[-1] - time.time()))
        # A killed handler may have held as many messages as arrive together, and nothing brings
        # those back.
        await_all(files, len(due), due[-1], per_moment if kill and kind == "DelayedQueue" else 0)
        # Wait for the last acknowledgement.
        time.sleep(0.02)
        spent = Counts.of(server).spent_since(before)
        busy = busy_s(consumers) - busy + spent.cpu_us / 1e6
        running = [
            consumer
            for place, consumer in enumerate(consumers)
            if killed is None or place != killed[0]
        ]
        for consumer in running:
            end_input(consumer)
        for consumer in running:
            result(consumer)
        calls = [
            at
            for file in files
            for (at,) in CALL.iter_unpack(calls_of(file).read_bytes())
            if at > started
        ]
        figures = lateness(files, due, killed)
    return figures | {
        "scripts": spent.scripts / moments,
        "claims": len(calls) / moments,
        "busy": busy * 1000 / moments,
    }


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    figure, (left_plot, right_plot) = plt.subplots(1, 2, figsize=(9.6, 3.8))
    for kind, (colour, marker, dashes) in LOOKS.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        clients = [row["clients"] for row in of_kind]
        left_plot.plot(
            clients,
            [row["claims"] for row in of_kind],
            color=colour,
            marker=marker,
            linestyle=dashes,
            label=kind,
        )
        right_plot.plot(
            clients,
            [row["p50"] for row in of_kind],
            color=colour,
            marker=marker,
            label=f"{kind}, median",
        )
        right_plot.plot(
            clients,
            [row["p99"] for row in of_kind],
            color=colour,
            marker=marker,
            linestyle=":",
            label=f"{kind}, 99th percentile",
        )
    for panel, title in (
        (left_plot, "calls for due messages, for each due moment"),
        (right_plot, "ms from due to handled"),
    ):
        panel.set_xticks(sorted({row["clients"] for row in rows}))
        panel.set_ylim(bottom=0)
        panel.set_xlabel("processes waiting for the same queue")
        panel.set_title(title, loc="left", fontsize=9.5)
        panel.legend(frameon=False, fontsize=8)
    left_plot.axhline(1, color="#888888", linewidth=1)
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
        "--processes", type=int, default=0, help="number of processes; by default, one per client"
    )
    parser.add_argument("--apart", type=float, default=APART_S, help="seconds between due times")
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
    if options.kill and options.processes:
        parser.error("--kill needs a process per client")
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
                f"{options.moments} due times, {options.apart * 1000:g} ms apart,"
                f" {options.together} messages due at each; medians of {options.runs} interleaved"
                " runs; scripts per due time, lateness and processor time (busy) in ms, recovery"
                " (again) in s"
            ),
        }
        for _ in range(options.runs):
            for (kind, clients), values in runs.items():
                figures = measure(
                    server,
                    url,
                    kind,
                    clients,
                    processes=min(options.processes or clients, clients),
                    moments=options.moments,
                    per_moment=options.together,
                    apart=options.apart,
                    kill=options.kill,
                )
                values.append(figures)
    columns = (
        "kind         ",
        " clients",
        " scripts",
        " claims",
        "    p50",
        "    p99",
        "      max",
        " lost",
        "   busy",
    )
    table = Table(
        about,
        (*columns, " after kill", " again s") if options.kill else columns,
        as_json=options.json,
    )
    for (kind, clients), values in runs.items():
        row = medians(values)
        cells = [f"{row[name]:.2f}" for name in ("scripts", "claims", "p50", "p99", "max")]
        cells += [f"{row['lost']:.0f}", f"{row['busy']:.2f}"]
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
