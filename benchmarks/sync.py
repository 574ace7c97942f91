"""Measure offers of synchronous clients: ``python -m benchmarks.sync [options]``.

A reliable queue gets messages of 100 bytes that are due in an hour: from one task of the
asynchronous client, and from 1, 8, 32 and 128 threads of the synchronous one, each of which offers
one message after another. Both clients do their work in the same event loop. All ways are
interleaved in one process, and the medians of the runs are shown.

"client" is the processor time of this process, "kernel" the kernel's part of it, and "server" the
server's time, in µs per offer; "scripts" counts the script calls per offer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from redis import Redis

import delayq
from benchmarks._moves import Meter, address, measured_server
from benchmarks._report import Table, machine
from benchmarks._samples import medians, new_parser

THREADS = (1, 8, 32, 128)
DELAY = 3600.0
VALUE = "x" * 98  # 100 bytes as JSON
Way = Callable[[int], object]


async def offer_all(client: delayq.Client, count: int) -> None:
    """Offer from one task of the asynchronous client."""
    queue = client.reliable_queue("offers")
    for _ in range(count):
        await queue.offer(VALUE, delay=DELAY)


def offer_from(queue: delayq.sync.ReliableQueue[str], threads: int, count: int) -> None:
    """Offer from threads."""

    def offer() -> None:
        for _ in range(count // threads):
            queue.offer(VALUE, delay=DELAY)

    running = [threading.Thread(target=offer) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def ways(client: delayq.sync.Client) -> dict[str, Way]:
    """Return the ways to offer a number of messages, by name."""
    queue = client.reliable_queue("offers")

    def from_threads(threads: int) -> Way:
        return lambda count: offer_from(queue, threads, count)

    from_several = {f"{threads} threads": from_threads(threads) for threads in THREADS[1:]}
    return {
        "asynchronous, one by one": lambda count: client.run(offer_all, count),
        "one thread": from_threads(1),
    } | from_several


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--offers", type=int, default=2560, help="number of offers in each sample")
    options = parser.parse_args()
    if options.offers % max(THREADS):
        parser.error(f"--offers must be a multiple of {max(THREADS)}")
    rows: dict[str, list[dict[str, float]]] = {}
    with measured_server(options.server) as server:
        url = address(server, options.server)
        with Redis.from_url(url) as counted, delayq.sync.connect(url) as client:
            every = ways(client)
            for run in range(options.runs + 1):
                for name, offer in every.items():
                    meter = Meter(counted)
                    offer(options.offers)
                    # The first run only warms up.
                    if run:
                        rows.setdefault(name, []).append(meter.read(options.offers))
                    client.reliable_queue("offers").purge()
        about = {
            "machine": machine(server),
            "measured": f"{options.offers:,} offers; medians of {options.runs} interleaved runs",
        }
    columns = (
        "way                     ",
        "   offers/s",
        "  client us",
        "  kernel us",
        "  server us",
        " scripts",
    )
    table = Table(about, columns, as_json=options.json)
    for name, runs in rows.items():
        row = medians(runs)
        cells = [f"{row[column]:.1f}" for column in ("client_us", "kernel_us", "server_us")]
        table.add({"way": name} | row, name, f"{row['rate']:,.0f}", *cells, f"{row['scripts']:.2f}")
    table.end()


if __name__ == "__main__":
    main()
