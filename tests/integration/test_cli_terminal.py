"""Every command at a terminal of 80 columns and 24 lines, and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis
import typer

from delayq.cli.app import app, run
from tests.integration.test_cli import MAILS, SECRET, bury, evaluate_in_steps, seed
from tests.support.programs import run_delayq, run_python
from tests.support.terminal import PATIENCE, ROOT, Seen, at_terminal, screen, until_it_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from tests.support.servers import PrivateServer

WORKER = """
import os
import delayq

worker = delayq.Worker(os.environ["DELAYQ_URL"])


@worker.listener("mails")
async def handle(value: object) -> None:
    print("handled")
"""


@dataclass(frozen=True)
class Case:
    """A command to run against the queues of :func:`seed`."""

    line: str  # in words without spaces
    words: tuple[str, ...]  # that its screen shows, or names that each JSON document has
    status: int = 0
    stop: str = ""  # the output after which Ctrl-C is typed

    @property
    def arguments(self) -> list[str]:
        return self.line.split()

    @property
    def command(self) -> str:
        """The name of the command, which is the first words of its line."""
        return next(
            name
            for name in sorted(commands(), reverse=True)
            if f"{self.line} ".startswith(f"{name} ")
        )


def commands() -> dict[str, Any]:
    """Return every command of the application by its name."""

    def below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, (*words, name))
            else:
                yield " ".join((*words, name)), command

    return dict(below(typer.main.get_command(app), ()))


QUICK: dict[str, object] = {"delayq.cli.bench._SPREAD": (0.1, 0.2)}
"""Shorter waits."""
IMPATIENT: dict[str, object] = {"delayq._redis.client.RETRY_FOR": 0.2}
"""Only without a server that answers: another one may pause for longer."""
SCREENS = (
    Case(
        "queues",
        (
            "kind      queue                  ready  delayed  leased  dead  state",
            "orders (4 partitions)",
        ),
    ),
    Case(
        "stats mails",
        ("ready:        1", "delayed:      3", "paused:       no", "max size:     none"),
    ),
    Case("stats delayed:closing", ("delayed:    2", "next due:")),
    Case("stats mails --watch --interval 0.1", ("mails",), status=130, stop="Ctrl-C to"),
    Case(
        "top --interval 0.1",
        ("delayq top", "delayed 45", "delayed:closing", "of 3 queues"),
        status=130,
        stop="q quit",
    ),
    Case("peek mails", ("id         state    due", "priority  value", "…")),
    Case("peek delayed:closing", ("state    due", "delayed", "…")),
    Case("list mails", ("welcome-3", "in 28h", "…")),
    Case("list mails --state leased", ("lease ends", "busy")),
    Case("list delayed:closing", ("in 50m", "…")),
    Case("list orders --limit 3", ("in 8m",)),
    Case("get mails welcome-2", ("header tenant: acme", "value:         {")),
    Case(
        "get mails nobody",
        ("delayq: there is no message 'nobody', or it has already been delivered",),
        status=1,
    ),
    Case('offer mails {"to":"x"} --delay 2h --id new', ("new  due",)),
    Case("offer delayed:closing hello --text", ("due",)),
    Case("offer delayed:closing 1 --at 2030-01-31T12:00", ("due 2030-01-31 12:00 ", " (in ")),
    Case("result mails welcome-2 --timeout 0", ("welcome-2",), status=1),
    Case("history mails", ("offered", "dead")),
    Case("workers", ("no workers",), status=1),
    Case("cancel mails welcome-1", ("welcome-1 is cancelled",)),
    Case("reschedule mails welcome-1 --delay 3m", ("welcome-1  due", "(in 3 min)")),
    Case("take delayed:closing", ("delayq: no message is due",), status=1),
    Case("configure mails --max-size 1000", ("max size:     1,000", "dedup window: none")),
    Case("groups limit mails ada 2,10/m", ("limit:   2 at a time, 10 in 1 min",)),
    Case("groups pause mails ada", ("delayq groups resume mails ada",)),
    Case("groups resume mails ada", ("ada was not paused",), status=1),
    Case("groups list mails", ("no groups",), status=1),
    Case("pause mails", ("delayq resume mails",)),
    Case("resume mails", ("mails was not paused",), status=1),
    Case("purge mails --yes", ("dropped: 5",)),
    Case("dead list mails", ("id   died", "attempts", "rejected")),
    Case("dead list mails --long", ("reason:   rejected",)),
    Case("dead list mails --group-by reason", ("count  last died", "rejected")),
    Case("dead redrive mails --reason reject --dry-run", ("matching: 1; nothing was changed",)),
    Case("dead redrive mails", ("redriven: 1",)),
    Case("dead purge mails --yes", ("dropped: 1",)),
    Case("inspect closing --limit 1", ("form:  current, 8-byte length", "  0000  08")),
    Case("search mails --payload ada --limit 1", ("welcome-0", "1 found; ", "…")),
    Case("search mails --id nobody", ("0 found; 6 of 6 messages were searched",), status=1),
    Case("schedules mails", ("no schedules",), status=1),
    Case("unschedule mails x", ("delayq: there is no schedule 'x'",), status=1),
    Case("doctor", ("ok     version:", "note   reliable mails:", "nothing is wrong")),
    Case(
        "migrate closing",
        (
            "sorted set          ━",
            "100% 2/2",
            "already current: 2",
            "every readable record is current",
        ),
    ),
    Case("worker work:worker --burst", ("handled",)),
    Case("worker work:nobody", ("delayq: module 'work' has no attribute 'nobody'",), status=2),
    Case("dashboard --port 0", ("http://127.0.0.1:", "read-only"), status=130, stop="http://"),
    Case("acl consumer mails", ("resetkeys resetchannels -@all", "~delayq:{mails}:waiting")),
    Case("bench --messages 500 --punctual 10", ("offers:", "per second", "p99")),
    Case(
        "demo --messages 20 --max-delay 0.1",
        ("offered 20   delivered 20   waiting  0", "message   delay s", "lost: 0"),
    ),
)
# The other commands have their JSON read in test_cli.py, test_demo.py and test_migrate.py.
DOCUMENTS = (
    Case(
        "stats mails --watch --interval 0.1",
        ("kind", "queue", "delayed"),
        status=130,
        stop="}",
    ),
    Case(
        "top mails --interval 0.1",
        ("at", "kind", "queue", "state", "ready", "oldest_due_age", "change_per_s"),
        status=130,
        stop="}",
    ),
    Case("list nobody", (), status=1),
    Case("get mails nobody", (), status=1),
    Case("pause mails", ("queue", "paused")),
    Case("resume mails", ("queue", "resumed"), status=1),
    Case("worker work:worker --burst", ("process", "pid", "event")),
    Case("dashboard --port 0", ("url", "server", "read_only"), status=130, stop="}"),
    Case("acl consumer mails", ("role", "rules")),
    Case("bench --messages 1000000 --timeout 0.3", (), status=1),
)
by_line: Callable[[Case], str] = lambda case: case.line


def test_every_command_is_tried_and_has_json() -> None:
    known = commands()
    assert {case.command for case in SCREENS} == set(known)
    for command in known.values():
        assert any("--json" in option.opts for option in command.params)


@pytest.fixture
def address(server: PrivateServer) -> dict[str, Any]:
    """Provide the environment of a command: a server without queues."""
    return {"DELAYQ_URL": server.url}


@pytest.fixture
def seeded(address: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Provide the environment of a command: a server with queues, and an importable worker."""
    seed(address["DELAYQ_URL"])
    (tmp_path / "work.py").write_text(WORKER)
    return address | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


# At a terminal


# A worker's log is the same at a terminal and in a file: each record is one line, so that search
# tools find it whole.
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \d+ INFO delayq\.worker: ")


def assert_fits(seen: Seen) -> None:
    """Assert that no line exceeds the terminal's width, but for a worker's log records."""
    assert "Traceback" not in seen.text
    for line in seen.raw.replace("\r\n", "\n").split("\n"):
        if _RECORD.match(line):
            continue
        for plain in screen(line, 10_000):
            assert len(plain) <= seen.columns, plain


def interrupt_at(word: str) -> Callable[..., None]:
    sent: list[str] = []

    def act(_: BaseProcess, written: str, types: Callable[[str], None]) -> None:
        if word in written and not sent:
            sent.append(word)
            types("\x03")

    return act


@pytest.mark.parametrize("case", SCREENS, ids=by_line)
def test_each_screen(seeded: dict[str, Any], case: Case) -> None:
    stop = interrupt_at(case.stop) if case.stop else None
    seen = at_terminal(*case.arguments, act=stop, constants=QUICK, **seeded)
    assert seen.status == case.status, seen.text
    for word in case.words:
        assert word in seen.text, seen.text
    if case.command != "acl":  # one line, to be copied
        assert_fits(seen)


def test_colour_is_for_terminals_and_who_wants_it(address: dict[str, Any]) -> None:
    assert "\x1b[32mok" in at_terminal("doctor", **address).raw
    assert "\x1b[3" not in at_terminal("doctor", NO_COLOR="1", **address).raw
    assert "\x1b" not in run_delayq("doctor", **address).stdout


def test_top_hears_keys(seeded: dict[str, Any]) -> None:
    typed: list[str] = []

    def act(_: BaseProcess, written: str, types: Callable[[str], None]) -> None:
        if "q quit" in written and not typed:
            typed.append("right")
            types("\x1b[C")
        elif len(typed) == 1 and written.count("q quit") > 1:
            typed.append("q")
            types("q")

    # Updates never come, so a second screen is the answer to a key.
    seen = at_terminal("top", "--interval", "3600", act=act, columns=140, **seeded)
    assert (seen.status, typed) == (0, ["right", "q"])
    # The view is on the alternate screen, which is left.
    assert "\x1b[?1049h" in seen.raw
    assert "\x1b[?1049l" in seen.raw


def test_top_hears_keys_while_the_server_does_not_answer(
    seeded: dict[str, Any], server: PrivateServer
) -> None:
    typed: list[str] = []

    def act(_: BaseProcess, written: str, types: Callable[[str], None]) -> None:
        if "q quit" in written and not typed:
            server.pause()
            # Long enough for the next update to begin; if it has not, the test proves less.
            time.sleep(0.5)
            typed.append("q")
            types("q")

    forever = dict.fromkeys(("ANSWER_WITHIN", "DOUBT_AFTER"), 3600.0)
    try:
        seen = at_terminal(
            *("top", "--interval", "0.1"),
            act=act,
            constants={f"delayq._redis.connection.{name}": each for name, each in forever.items()},
            **seeded,
        )
    finally:
        server.resume()
    assert (seen.status, typed) == (0, ["q"])


@pytest.mark.parametrize("words", ["does not answer", "invalid username-password pair"])
def test_a_server_that_is_away_or_refuses_is_one_line_without_the_password(
    server: PrivateServer,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = server.url.replace("unix://", f"unix://user:{SECRET}@")
    if words == "does not answer":
        url = f"redis://user:{SECRET}@127.0.0.1:1/0"
    constants = IMPATIENT if words == "does not answer" else {}
    for name, value in constants.items():
        monkeypatch.setattr(name, value)
    seen = at_terminal("queues", "--url", url, constants=constants)
    assert seen.status == 2
    assert words in " ".join(seen.lines)
    assert SECRET not in seen.raw
    assert_fits(seen)
    assert run(["doctor", "--json", "--url", url]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert SECRET not in error


def test_a_value_that_is_taken_is_one_line_however_long(seeded: dict[str, Any]) -> None:
    seen = at_terminal("take", "mails", **seeded)
    assert seen.status == 0
    assert json.loads(seen.raw)["to"] == "ada@example.org"


def test_what_a_message_holds_cannot_move_the_cursor(address: dict[str, Any]) -> None:
    value, name = json.dumps("\x1b[2J\x9b2J\u202eevil"), "a\x1b[2J"
    offer = ("offer", "mails", value, "--id", name)
    assert at_terminal(*offer, **address).status == 0
    for command in (["peek", "mails"], ["get", "mails", name], ["take", "mails"]):
        seen = at_terminal(*command, **address)
        assert not {"\x9b", "\u202e"} & {*seen.raw}
        assert "\x1b[2J" not in seen.raw


def test_a_purge_asks(seeded: dict[str, Any]) -> None:
    def answer(text: str) -> Seen:
        said: list[str] = []

        def act(process: BaseProcess, written: str, types: Callable[[str], None]) -> None:
            if "[y/N]" in written and not said:
                # Python notices a Ctrl-C between the prompt and the read only when the read is
                # over.
                until_it_reads(process)
                said.append(text)
                types(text)

        return at_terminal("purge", "mails", act=act, **seeded)

    seen = answer("n\n")
    assert (seen.status, seen.lines[-1]) == (1, "delayq: nothing was changed")
    # Ctrl-C at the prompt.
    assert answer("\x03").status == 130
    seen = answer("y\n")
    assert (seen.status, seen.lines[-1]) == (0, "dropped: 5")
    assert seen.lines[0].startswith("Drop all messages of mails for good? [y/N]")


SLOW: dict[str, object] = {
    "delayq._reliable.dead_letters._AT_A_TIME": 1,
    "delayq._reliable.store.PAGE": 1,
}
"""One message at a time, so that commands are far from done when Ctrl-C is typed."""


def assert_stopped(line: str, address: dict[str, Any], at: str, places: str, bodies: str) -> str:
    """Run a command on 200,000 messages until Ctrl-C, and return the screen."""
    seen = at_terminal(*line.split(), act=interrupt_at(at), constants=SLOW, **address)
    assert seen.status == 130, seen.text
    assert "━" in seen.raw
    with redis.Redis.from_url(address["DELAYQ_URL"], socket_timeout=60) as raw:
        left = raw.zcard(places)
        assert 0 < left < 200_000
        assert raw.hlen(bodies) == left
    assert_fits(seen)
    return " ".join(seen.lines).replace(f"{left:,}", "LEFT")


@pytest.mark.parametrize(("command", "words"), [("redrive", "redriven"), ("purge", "purged")])
def test_ctrl_c_says_what_is_left(address: dict[str, Any], command: str, words: str) -> None:
    bury(address["DELAYQ_URL"], 200_000)
    line = f"dead {command} mails{' --yes' * (command == 'purge')}"
    shown = assert_stopped(line, address, words, MAILS.dead, MAILS.dead_messages)
    assert "delayq: stopped: " in shown
    assert "LEFT are left; run the command again to continue" in shown


def test_ctrl_c_during_a_purge_says_what_is_left(address: dict[str, Any]) -> None:
    fill = """for n = ARGV[1], ARGV[2] do
      redis.call('ZADD', KEYS[1], '4e15', 'm' .. n)
      redis.call('HSET', KEYS[2], 'm' .. n, '1 \\n1')
    end"""
    keys = MAILS.waiting[0], MAILS.named("bodies")
    evaluate_in_steps(address["DELAYQ_URL"], fill, keys, 200_000)
    shown = assert_stopped("purge mails --yes", address, "dropped", *keys)
    assert "delayq: stopped: LEFT messages are left" in shown


def test_ctrl_c_ends_a_bench_and_its_queue(address: dict[str, Any]) -> None:
    bench = "bench --messages 1000000"
    seen = at_terminal(*bench.split(), act=interrupt_at("offers"), **address)
    assert seen.status == 130
    assert "Traceback" not in seen.text
    with redis.Redis.from_url(address["DELAYQ_URL"], socket_timeout=60) as raw:
        assert raw.keys("*bench*") == []


# As JSON, and for other programs


@pytest.mark.parametrize("case", DOCUMENTS, ids=by_line)
def test_each_document(
    seeded: dict[str, Any],
    case: Case,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in seeded.items():
        monkeypatch.setenv(name, value)
    for name, constant in QUICK.items():
        monkeypatch.setattr(name, constant)
    if case.stop:
        status, out = interrupted(*case.arguments, "--json")
    else:
        status = run([*case.arguments, "--json"])
        out = capfd.readouterr().out
    assert status == case.status
    documents = [json.loads(line) for line in out.splitlines()]
    assert bool(documents) == bool(case.words)
    for document in documents:
        assert set(case.words) <= set(document)


def interrupted(*arguments: str) -> tuple[int, str]:
    """Interrupt an endless command after its first line. Returns its status and output."""
    # As in tests.support.terminal: it must not ignore what stops it.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [sys.executable, "-m", "delayq", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hears,  # noqa: PLW1509 - no other thread is running
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        more, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, first + more


@pytest.mark.parametrize("line", ["list orders", "doctor --json", "acl admin mails", "--help"])
def test_a_reader_that_goes_away_is_no_error(seeded: dict[str, Any], line: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = run_delayq(*line.split(), to=writing, **seeded)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_traceback_shows_no_values(address: dict[str, Any]) -> None:
    bug = (
        "import sys; from delayq.cli import messages; messages.report = None; from delayq.cli.app"
        " import run; run(sys.argv[1:])"
    )
    result = run_python("-c", bug, "offer", "mails", json.dumps(SECRET), **address)
    assert "TypeError: 'NoneType' object is not callable" in result.stderr
    assert "│" not in result.stderr
    assert SECRET not in result.stderr


@pytest.mark.parametrize(
    ("streams", "error"),
    [
        (">/dev/full", "delayq: No space left on device\n"),
        (">&-", "delayq: Bad file descriptor\n"),
        (">&- <&- ", "delayq: Bad file descriptor\n"),
        (">&- 2>&-", ""),
    ],
)
def test_what_cannot_be_written_goes_back(seeded: dict[str, Any], streams: str, error: str) -> None:
    result = subprocess.run(
        f"{sys.executable} -m delayq take mails --json {streams}",
        shell=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | seeded,
        check=False,
    )
    assert (result.returncode, result.stderr) == (2, error)
    with redis.Redis.from_url(seeded["DELAYQ_URL"], socket_timeout=60) as raw:
        assert raw.zrange(MAILS.leased, 0, -1) == [b"busy"]
        assert raw.zscore(MAILS.waiting[0], "welcome-0") is not None


@pytest.mark.parametrize(
    ("options", "error", "stored"),
    [
        (("-", "--codec", "bytes"), b"", b"\xff\x00\n"),
        ((b"\xfe", "--codec", "bytes"), b"", b"\xfe"),
        (("-", "--text"), b"the value is not text; to offer bytes, add --codec bytes", None),
    ],
)
def test_bytes_are_offered_as_they_stand(
    address: dict[str, Any], options: Any, error: bytes, stored: bytes | None
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "delayq", "offer", "mails", *options],
        input=b"\xff\x00\n",
        capture_output=True,
        timeout=PATIENCE,
        env=os.environ | address | {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert result.stderr == (b"delayq: %s\n" % error if error else b"")
    assert result.returncode == (2 if error else 0)
    with redis.Redis.from_url(address["DELAYQ_URL"], socket_timeout=60) as raw:
        bodies = raw.hvals(MAILS.named("bodies"))
    assert [body.partition(b"\n")[2] for body in bodies] == ([] if stored is None else [stored])
