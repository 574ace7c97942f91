"""Every command at a terminal of 80 columns and 24 lines, and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis
import typer

from delayq.cli.app import app, run
from tests.integration.test_cli import MAILS, SECRET, bury, seed
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
    """A command to run against the queues of :func:`seed`.

    Attributes:
        line: The command line, in words without spaces.
        words: Words that its screen shows, or names that each JSON document has.
        stop: The output after which Ctrl-C is typed.
    """

    line: str
    words: tuple[str, ...]
    status: int = 0
    stop: str = ""

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


def commands() -> list[str]:
    """List every command of the application."""

    def below(group: Any, words: tuple[str, ...]) -> Iterator[str]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, (*words, name))
            else:
                yield " ".join((*words, name))

    return [*below(typer.main.get_command(app), ())]


BENCH = "bench --messages 500 --punctual 10"
DEMO = "demo --messages 20 --max-delay 0.1"
REDRIVE = "dead redrive --queue mails"
SCREENS = (
    Case(
        "queues",
        (
            "kind      queue                  ready  delayed  leased  dead  state",
            "orders (4 partitions)",
        ),
    ),
    Case(
        "stats --queue mails",
        ("ready:        1", "delayed:      3", "paused:       no", "max size:     none"),
    ),
    Case("stats --delayed closing", ("delayed:    2", "next due:")),
    Case("peek --queue mails", ("id         state    due", "priority  value", "…")),
    Case("peek --delayed closing", ("state    due", "delayed", "…")),
    Case("list --queue mails", ("welcome-3", "in 28h", "…")),
    Case("list --queue mails --state leased", ("lease ends", "busy")),
    Case("list --delayed closing", ("in 50m", "…")),
    Case("list --queue orders --limit 3", ("in 8m",)),
    Case("get welcome-2 --queue mails", ("header tenant: acme", "value:         {")),
    Case(
        "get nobody --queue mails",
        ("delayq: there is no message 'nobody', or it has already been delivered",),
        status=1,
    ),
    Case('offer {"to":"x"} --queue mails --delay 2h --id new', ("new  due",)),
    Case("offer hello --text --delayed closing", ("due",)),
    Case("cancel welcome-1 --queue mails", ("welcome-1 is cancelled",)),
    Case("reschedule welcome-1 --queue mails --delay 3m", ("welcome-1  due", "(in 3 min)")),
    Case("take --delayed closing", ("delayq: no message is due",), status=1),
    Case("configure mails --max-size 1000", ("max size:     1,000", "dedup window: none")),
    Case("pause --queue mails", ("delayq resume --queue mails",)),
    Case("resume --queue mails", ("mails was not paused",), status=1),
    Case("purge --queue mails --yes", ("dropped: 5",)),
    Case("dead list --queue mails", ("id   died", "attempts", "rejected")),
    Case("dead list --queue mails --long", ("reason:   rejected",)),
    Case(REDRIVE, ("redriven: 1",)),
    Case("dead purge --queue mails --yes", ("dropped: 1",)),
    Case("inspect --delayed closing --limit 1", ("form:  current, 8-byte length", "  0000  08")),
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
    Case("acl consumer --queue mails", ("resetkeys resetchannels -@all", "~delayq:{mails}:live")),
    Case(BENCH, ("offers:", "per second", "p99")),
    Case(DEMO, ("offered 20   delivered 20   waiting  0", "message   delay s", "lost: 0")),
)
DOCUMENTS = (
    Case("queues", ("kind", "queue", "partitions", "delayed", "ready", "leased", "oldest_due_age")),
    Case("stats --queue mails", ("kind", "queue", "delayed", "ready", "leased", "dead", "paused")),
    Case(
        "stats --queue mails --watch --interval 0.1",
        ("kind", "queue", "delayed"),
        status=130,
        stop="}",
    ),
    Case("peek --queue mails", ("id", "state", "due_at", "value", "headers")),
    Case("list --queue mails", ("id", "state", "due_at", "value", "headers")),
    Case("list --queue nobody", (), status=1),
    Case("get welcome-2 --queue mails", ("id", "state", "due_at", "value", "headers")),
    Case("get nobody --queue mails", (), status=1),
    Case("offer 1 --queue mails --delay 2h --id new", ("queue", "id", "due_at")),
    Case("cancel welcome-1 --queue mails", ("queue", "id", "cancelled")),
    Case("reschedule welcome-1 --queue mails --delay 3m", ("queue", "id", "due_at")),
    Case("take --queue mails", ("queue", "id", "value", "attempt")),
    Case("configure mails", ("queue", "partitions", "max_size", "expired", "dedup_window")),
    Case("pause --queue mails", ("queue", "paused")),
    Case("resume --queue mails", ("queue", "resumed"), status=1),
    Case("purge --queue mails --yes", ("queue", "state", "dropped")),
    Case("dead list --queue mails", ("id", "reason", "died_at", "value")),
    Case(REDRIVE, ("queue", "redriven")),
    Case("dead purge --queue mails --yes", ("queue", "purged")),
    Case("inspect --delayed closing", ("id", "form", "due_at", "value", "payload", "raw")),
    Case("doctor", ("level", "check", "text", "advice")),
    Case("migrate closing", ("queue", "server", "looked_at", "current", "complete")),
    Case("worker work:worker --burst", ("process", "pid", "event")),
    Case("dashboard --port 0", ("url", "server", "read_only"), status=130, stop="}"),
    Case("acl consumer --queue mails", ("role", "rules")),
    Case(BENCH, ("kind", "messages", "offers_per_s", "late_p99_ms")),
    Case("bench --messages 1000000 --timeout 0.3", (), status=1),
    Case(DEMO, ("offered", "delivered", "lost")),
)
of_each = pytest.mark.parametrize("cases", [SCREENS, DOCUMENTS], ids=["terminal", "json"])
by_line: Callable[[Case], str] = lambda case: case.line


@of_each
def test_every_command_is_tried(cases: tuple[Case, ...]) -> None:
    assert {case.command for case in cases} == set(commands())


@pytest.fixture
def seeded(own_server: PrivateServer, tmp_path: Path) -> dict[str, Any]:
    """Provide the environment of a command: a server with queues, and a worker that can be
    imported.
    """
    seed(own_server.url)
    (tmp_path / "work.py").write_text(WORKER)
    return {"DELAYQ_URL": own_server.url, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


# At a terminal


# A worker's log is the same at a terminal and in a file: each record is one line, so that search
# tools find it whole.
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \d+ INFO delayq\.worker: ")


def fits(seen: Seen) -> None:
    """Assert that no line exceeds the terminal's width, where it would break anywhere.

    A worker's log records may be longer.
    """
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
    seen = at_terminal(
        *case.arguments, act=interrupt_at(case.stop) if case.stop else None, **seeded
    )
    assert seen.status == case.status, seen.text
    for word in case.words:
        assert word in seen.text, seen.text
    if case.command != "acl":  # one line, to be copied
        fits(seen)


def test_colour_is_for_terminals_and_who_wants_it(seeded: dict[str, Any]) -> None:
    assert "\x1b[32mok" in at_terminal("doctor", **seeded).raw
    assert "\x1b[3" not in at_terminal("doctor", NO_COLOR="1", **seeded).raw
    assert "\x1b" not in as_a_program("doctor", **seeded).stdout


def test_a_server_that_is_away_or_refuses_is_one_line_without_the_password(
    own_server: PrivateServer,
) -> None:
    away = f"redis://user:{SECRET}@127.0.0.1:1/0"
    refused = own_server.url.replace("unix://", f"unix://user:{SECRET}@")
    for url, words in ((away, "does not answer"), (refused, "invalid username-password pair")):
        seen = at_terminal("queues", "--url", url)
        assert seen.status == 2
        assert words in " ".join(seen.lines)
        assert SECRET not in seen.raw
        fits(seen)
        told = as_a_program("doctor", "--json", DELAYQ_URL=url)
        assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
        assert SECRET not in told.stderr


def test_a_value_that_is_taken_is_one_line_however_long(own_server: PrivateServer) -> None:
    seed(own_server.url)
    seen = at_terminal("take", "--queue", "mails", "--url", own_server.url)
    assert seen.status == 0
    assert json.loads(seen.raw)["to"] == "ada@example.org"


def test_what_a_message_holds_cannot_move_the_cursor(own_server: PrivateServer) -> None:
    cli_value = json.dumps("\x1b[2J\x9b2J\u202eevil")
    assert (
        at_terminal(
            "offer", cli_value, "--queue", "mails", "--id", "a\x1b[2J", "--url", own_server.url
        ).status
        == 0
    )
    for command in (["peek"], ["get", "a\x1b[2J"], ["take"]):
        seen = at_terminal(*command, "--queue", "mails", "--url", own_server.url)
        assert "\x1b[2J" not in seen.raw
        assert "\x9b" not in seen.raw
        assert "\u202e" not in seen.raw


def test_a_purge_asks(own_server: PrivateServer) -> None:
    seed(own_server.url)

    def answer(text: str) -> Callable[..., None]:
        said: list[str] = []

        def act(process: BaseProcess, written: str, types: Callable[[str], None]) -> None:
            if "[y/N]" in written and not said:
                # Python notices a Ctrl-C between the prompt and the read only when the read is
                # over.
                until_it_reads(process)
                said.append(text)
                types(text)

        return act

    seen = at_terminal("purge", "--queue", "mails", "--url", own_server.url, act=answer("n\n"))
    assert (seen.status, seen.lines[-1]) == (1, "delayq: nothing was changed")
    # Ctrl-C at the prompt.
    assert (
        at_terminal("purge", "--queue", "mails", "--url", own_server.url, act=answer("\x03")).status
        == 130
    )
    seen = at_terminal("purge", "--queue", "mails", "--url", own_server.url, act=answer("y\n"))
    assert (seen.status, seen.lines[-1]) == (0, "dropped: 5")
    assert seen.lines[0].startswith("Drop all messages of mails for good? [y/N]")


def test_stats_can_be_watched_until_ctrl_c(own_server: PrivateServer) -> None:
    seed(own_server.url)
    seen = at_terminal(
        *("stats", "--queue", "mails", "--watch", "--interval", "0.1"),
        "--url",
        own_server.url,
        act=interrupt_at("Ctrl-C to"),
    )
    assert seen.status == 130
    assert "mails" in seen.text
    assert "Traceback" not in seen.text
    fits(seen)


@pytest.mark.parametrize(
    ("command", "words"), [(["redrive"], "redriven"), (["purge", "--yes"], "purged")]
)
def test_ctrl_c_says_what_is_left(
    own_server: PrivateServer, command: list[str], words: str
) -> None:
    bury(own_server.url, 200_000)
    seen = at_terminal(
        "dead", *command, "--queue", "mails", "--url", own_server.url, act=interrupt_at(words)
    )
    assert seen.status == 130, seen.text
    assert "━" in seen.raw
    assert "delayq: stopped: " in seen.text
    with redis.Redis.from_url(own_server.url) as raw:
        left = raw.zcard(MAILS.dead)
        assert 0 < left < 200_000
        assert raw.hlen(MAILS.dead_messages) == left
    assert f"{left:,} are left; run the command again to continue" in " ".join(seen.lines)


def test_ctrl_c_during_a_purge_says_what_is_left(own_server: PrivateServer) -> None:
    with redis.Redis.from_url(own_server.url) as raw:
        for first in range(0, 200_000, 20_000):
            ids = [f"m{number}" for number in range(first, first + 20_000)]
            raw.zadd(MAILS.live[0], dict.fromkeys(ids, 4e15))
            raw.hset(MAILS.named("bodies"), mapping=dict.fromkeys(ids, b"1 \n1"))
        seen = at_terminal(
            "purge",
            "--queue",
            "mails",
            "--yes",
            "--url",
            own_server.url,
            act=interrupt_at("dropped"),
        )
        assert seen.status == 130, seen.text
        assert "━" in seen.raw
        left = raw.zcard(MAILS.live[0])
        assert 0 < left < 200_000
        assert raw.hlen(MAILS.named("bodies")) == left
    assert f"delayq: stopped: {left:,} messages are left" in seen.text
    fits(seen)


def test_ctrl_c_ends_a_bench_and_its_queue(own_server: PrivateServer) -> None:
    seen = at_terminal(
        "bench", "--messages", "1000000", "--url", own_server.url, act=interrupt_at("offers")
    )
    assert seen.status == 130
    assert "Traceback" not in seen.text
    with redis.Redis.from_url(own_server.url) as raw:
        assert raw.keys("*bench*") == []


# As JSON, and for other programs


def as_a_program(
    *arguments: str, to: int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "delayq", *arguments],
        stdout=to,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        check=False,
    )


@pytest.mark.parametrize("case", DOCUMENTS, ids=by_line)
def test_each_document(
    seeded: dict[str, Any],
    case: Case,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in seeded.items():
        monkeypatch.setenv(name, value)
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
    """Interrupt an endless command once it has written a line.

    Returns its status and everything that it wrote.
    """
    command = [sys.executable, "-m", "delayq", *arguments]
    # As in tests.support.terminal: it must not ignore what stops it.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
        preexec_fn=hears,  # noqa: PLW1509 - no other thread is running
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        more, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, first + more


@pytest.mark.parametrize(
    "line",
    ["list --queue orders", "doctor --json", "acl admin --queue mails", "--help"],
)
def test_who_reads_a_part_only_gets_it_and_nothing_else_is_said(
    seeded: dict[str, Any], line: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = as_a_program(*line.split(), to=writing, **seeded)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_traceback_shows_no_values(seeded: dict[str, Any]) -> None:
    bug = (
        "import sys; from delayq.cli import messages; messages.report = None; from delayq.cli.app"
        " import run; run(sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", bug, "offer", json.dumps(SECRET), "--queue", "mails"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | seeded,
        check=False,
    )
    assert "TypeError: 'NoneType' object is not callable" in result.stderr
    assert "│" not in result.stderr
    assert SECRET not in result.stderr


def test_what_nobody_could_read_goes_back(seeded: dict[str, Any]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    result = as_a_program("take", "--queue", "mails", "--json", to=full, **seeded)
    os.close(full)
    assert (result.returncode, result.stderr) == (2, "delayq: No space left on device\n")
    assert (
        json.loads(as_a_program("get", "welcome-0", "--queue", "mails", "--json", **seeded).stdout)[
            "state"
        ]
        != "leased"
    )


@pytest.mark.parametrize("closed", [">&-", ">&- <&- ", ">&- 2>&-"])
def test_what_was_taken_for_a_closed_stream_goes_back(seeded: dict[str, Any], closed: str) -> None:
    result = subprocess.run(
        f"{sys.executable} -m delayq take --queue mails --json {closed}",
        shell=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | seeded,
        check=False,
    )
    assert (result.returncode, result.stderr) == (
        2,
        "" if "2" in closed else "delayq: Bad file descriptor\n",
    )
    assert (
        json.loads(as_a_program("get", "welcome-0", "--queue", "mails", "--json", **seeded).stdout)[
            "state"
        ]
        != "leased"
    )


def test_bytes_are_offered_as_they_stand(seeded: dict[str, Any]) -> None:
    def offer(*options: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "delayq", "offer", *options, "--queue", "raw", "--json"],
            input=b"\xff\x00\n",
            capture_output=True,
            timeout=PATIENCE,
            env=os.environ | seeded | {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"},
            check=False,
        )

    for options, stored in (
        (("-", "--codec", "bytes"), "ff000a"),
        ((b"\xfe", "--codec", "bytes"), "fe"),
    ):
        assert offer(*options).returncode == 0
        taken = as_a_program("take", "--queue", "raw", "--codec", "bytes", "--json", **seeded)
        assert json.loads(taken.stdout)["value"] == stored
    result = offer("-", "--text")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr == b"delayq: the value is not text; to offer bytes, add --codec bytes\n"
