"""Every command at a terminal of 80 columns and 24 lines, and for other programs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import typer

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq.cli.app import app, run
from tests.integration.test_cli import bury, evaluate_in_steps, sync_raw
from tests.integration.test_workers_listed import listed
from tests.support.command_line import MAILS, SECRET, Cli, Stream, cli, ctrl_c_at, seed
from tests.support.programs import run_python
from tests.support.terminal import at_terminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from delayq import Client, ReliableQueue
    from tests.support.servers import PrivateServer

__all__ = ["cli", "sync_raw"]


@dataclass(frozen=True)
class Case:
    """A command to run against the queues of :func:`seed`, after the cases before it."""

    line: str
    words: tuple[str, ...]  # that its screen shows, or names that each JSON document has
    status: int = 0
    stop: str = ""  # the output after which Ctrl-C is typed


def commands() -> dict[str, Any]:
    """Return every command of the application by its name."""
    application: Any = typer.main.get_command(app)
    by_name: dict[str, Any] = {}
    for name, command in application.commands.items():
        below = getattr(command, "commands", {})
        by_name |= {f"{name} {each}": below[each] for each in below} or {name: command}
    return by_name


# What each other command prints is read in test_cli.py, test_top.py and test_demo.py.
SCREENS = (
    Case(
        "queues", ("queue                  ready  delayed  leased  dead", "orders (4 partitions)")
    ),
    Case("stats mails", ("ready:        1", "paused:       no", "max size:     none")),
    Case("stats mails --watch --interval 0.1", ("mails",), status=130, stop="Ctrl-C to"),
    Case("peek mails", ("id         state    due", "priority  value", "…")),
    Case("list mails", ("welcome-3", "in 28h", "…")),
    Case("list mails --state leased", ("lease ends", "busy")),
    Case("get mails welcome-2", ("header tenant: acme", "value:         {")),
    Case("get mails nobody", ("delayq: there is no message 'nobody', or it",), status=1),
    Case("dead list mails", ("id   died", "attempts", "rejected")),
    Case("dead list mails --group-by reason", ("count  last died", "rejected")),
    Case("dead redrive mails --reason reject --dry-run", ("matching: 1; nothing was changed",)),
    Case("doctor", ("ok     version:", "note   reliable mails:", "nothing is wrong")),
    Case("dashboard --port 0", ("http://127.0.0.1:", "read-only"), status=130, stop="http://"),
    Case("acl consumer mails", ("resetkeys resetchannels -@all", "~delayq:{mails}:waiting")),
    Case("bench --messages 500 --punctual 10", ("offers:", "per second", "p99")),
    Case("migrate closing", ("sorted set          ━", "100% 2/2", "already current: 2")),
    Case("offer delayed:closing 1 --at 2030-01-31T12:00", ("due 2030-01-31 12:00 ", " (in ")),
    Case("reschedule mails welcome-1 --delay 3m", ("welcome-1  due", "(in 3 min)")),
    Case("cancel mails welcome-1", ("welcome-1 is cancelled",)),
    Case("repartition orders --to 2", ("orders has 2 partitions; messages moved:",)),
    Case("pause mails", ("delayq resume mails",)),
    Case("dead redrive mails", ("redriven: 1",)),
    Case("dead purge mails --yes", ("dropped: 0",), status=1),
)
# The other commands have their JSON read in test_cli.py, test_demo.py and test_migrate.py.
DOCUMENTS = (
    Case("stats mails --watch --interval 0.1", ("kind", "queue", "delayed"), 130, stop="}"),
    Case(
        "top mails --interval 0.1",
        ("at", "kind", "queue", "state", "ready", "oldest_due_age", "change_per_s"),
        status=130,
        stop="}",
    ),
    Case("get mails nobody", (), status=1),
    Case("dashboard --port 0", ("url", "server", "read_only"), 130, stop="}"),
    Case("bench --messages 1000000 --timeout 0.3", (), status=1),
)


def test_every_command_has_json_and_an_example(cli: Cli) -> None:
    known = commands()
    for command in known.values():
        assert any("--json" in option.opts for option in command.params)
    for name in ("", "dead", "groups", *known):
        _, shown = cli.screen(f"{name} --help")
        # Types that tell users nothing are left out.
        assert not {"<bool>", "<Target>"} & {*shown.split()}, name
        if name in known:
            assert f"delayq {name}" in shown.partition("Example")[2], name


# At a terminal


def test_every_command_shows_its_facts_at_a_terminal(cli: Cli) -> None:
    seed(cli.url)
    for case in SCREENS:
        act: Callable[[str], object] = ctrl_c_at(case.stop) if case.stop else len
        # Rules are one line, to be copied.
        show = cli.at_terminal if case.line.startswith("acl") else cli.screen
        status, shown = show(case.line, act=act)
        assert status == case.status, shown
        for word in case.words:
            assert word in shown, shown


@pytest.mark.gate
def test_top_reacts_to_keys_while_the_server_does_not_answer(server: PrivateServer) -> None:
    seed(server.url)
    typed: list[str] = []

    def act(_: BaseProcess, written: str, types: Callable[[str], None]) -> None:
        if "q quit" in written and not typed:
            typed.append("right")
            types("\x1b[C")
        elif len(typed) == 1 and written.count("q quit") > 1:
            # Updates come all the time; if none has begun by the key, the test proves less.
            server.pause()
            typed.append("q")
            types("q")

    limits = ("GIVE_UP_AFTER", "DOUBT_AFTER")
    for_ever: dict[str, object] = {f"delayq._redis.connection.{name}": 3600.0 for name in limits}
    line = ("top", "--interval", "0.1")
    try:
        seen = at_terminal(*line, act=act, columns=140, constants=for_ever, DELAYQ_URL=server.url)
    finally:
        server.resume()
    assert (seen.status, typed) == (0, ["right", "q"])
    # The view is on the alternate screen, which is left.
    assert "\x1b[?1049h" in seen.raw
    assert "\x1b[?1049l" in seen.raw


# It sets the clipboard, clears the screen, turns the line around, and begins a line.
EVIL = "a\x1b]52;c;eA==\x07\x9b2J\u202e\r\nforged: 1"
# Every command that shows what a server holds, with QUEUE for names that contain all that.
SHOWING = (
    *("queues", "stats QUEUE", "top QUEUE --interval 0.1", "peek QUEUE", "workers"),
    *("list QUEUE", "list QUEUE --state ready", "list QUEUE --state leased", "get QUEUE QUEUE"),
    *("history QUEUE", "history QUEUE --id QUEUE", "result QUEUE QUEUE", "schedules QUEUE"),
    *("search QUEUE --payload a", "search delayed:QUEUE --payload a", "list delayed:QUEUE"),
    *("inspect QUEUE", "inspect QUEUE --state quarantined", "migrate QUEUE", "doctor"),
    *("dead list QUEUE", "dead list QUEUE --long", "dead list QUEUE --group-by error"),
    *("dead redrive QUEUE --error QUEUE", "dead purge QUEUE QUEUE --yes", "groups list QUEUE"),
    *("groups list QUEUE --limit 1", "groups limit QUEUE QUEUE 3"),
    *("groups limit QUEUE QUEUE --unset", "groups pause QUEUE QUEUE", "groups resume QUEUE QUEUE"),
    *("batch QUEUE", "batch QUEUE QUEUE", "follow QUEUE QUEUE --timeout 0.1"),
    "offer QUEUE 1 --id QUEUE",
    *("configure QUEUE --max-size 9", "pause QUEUE --schedule QUEUE", "acl admin QUEUE"),
    *("resume QUEUE --schedule QUEUE", "unschedule QUEUE QUEUE", "unschedule QUEUE none"),
    *("bury QUEUE QUEUE --reason QUEUE", "dead redrive QUEUE QUEUE"),
    *("pause QUEUE", "resume QUEUE", "pause none-QUEUE", "reschedule QUEUE QUEUE --delay 9"),
    *("take QUEUE", "cancel QUEUE QUEUE", "get QUEUE QUEUE", "purge QUEUE", "purge QUEUE --yes"),
    # Once nothing is leased.
    "repartition QUEUE --to 2",
)
# They show figures, or rules, of their own.
SHOWING_NOTHING = {"bench", "dashboard", "demo", "relay", "worker"}


async def seed_evil(client: Client) -> None:
    """Put hostile text wherever those who offer, or fail, choose it; keep one message leased."""
    headers = {EVIL: EVIL, "reason": EVIL, "error": EVIL}
    jobs = client.reliable_queue(EVIL, max_attempts=1, lease=3600, keep=3600)
    for name in ("failed", "buried", "leased"):
        await jobs.offer(EVIL, id=f"{name} {EVIL}", group=EVIL, headers=headers)
    await jobs.offer(EVIL, 60, id=EVIL, group=EVIL, headers=headers)
    await jobs.offer(EVIL, 60, group=f"other {EVIL}")
    await jobs.schedule(EVIL, every=3600, value=EVIL)
    failed, buried = await jobs.claim(2)
    await failed.nack(error=ValueError(EVIL))
    await buried.bury(EVIL)
    await jobs.claim(1)
    await client.delayed_queue(EVIL).offer_many([(EVIL, 60), (EVIL, 0)])
    # One who waits stays in the list of workers, unlike one who has claimed something.
    name = f"idle {EVIL}"
    waiting = asyncio.create_task(wait_in_vain(client.reliable_queue(name)))
    await listed(client, name=name)
    assert not waiting.done()


async def wait_in_vain(queue: ReliableQueue[Any]) -> None:
    """Wait for a message until the client closes."""
    with suppress(delayq.Closed):
        await queue.claim(wait=3600)


def _in_a_file(cli: Cli, words: list[str], act: Callable[[str], object]) -> str:
    """Run a command, and return all that it prints where no terminal is."""
    out = Stream()
    out.act = act
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out, "isatty", lambda: False)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", out)
        run([*words, "--url", cli.url] if words[0] != "acl" else words)
    return out.getvalue()


@pytest.mark.usefixtures("_patient", "_workers_stay_listed")
def test_text_from_other_programs_never_controls_the_terminal(
    cli: Cli, server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = {name for name in commands() for line in SHOWING if f"{line} ".startswith(f"{name} ")}
    assert tried == set(commands()) - SHOWING_NOTHING
    about = {"host": EVIL, "pid": 1, "version": EVIL}
    monkeypatch.setattr("delayq._reliable.report_format._process_facts", lambda _: about)
    for how in ("terminal", "file"):
        server.call("FLUSHALL")
        server.call("RPUSH", DelayedKeys.of(EVIL).quarantine, EVIL)
        with delayq.sync.connect(cli.url, resync_interval=0.05) as client:
            client.run(seed_evil)
            for line in SHOWING:
                words = [word.replace("QUEUE", EVIL) for word in line.split()]
                if how == "file":
                    act = ctrl_c_at("change_per_s") if words[0] == "top" else len
                    shown = _in_a_file(cli, words, act)
                    assert all(one.isprintable() for one in shown.replace("\n", "")), line
                    assert "\nforged" not in shown, line
                elif words[0] == "top":
                    shown = ""
                else:
                    _, shown = cli.at_terminal(shlex.join(words))
                    assert not {"\x07", "\x9b", "\u202e"} & {*shown}, line
                    assert "\x1b]" not in shown, line
                assert "no workers" not in shown
                assert "Traceback" not in shown.replace("  Traceback", ""), line


def test_a_taken_value_is_printed_on_one_line(cli: Cli) -> None:
    cli.plain("offer mails", json.dumps("x" * 200))
    assert cli.at_terminal("take mails")[1] == f'"{"x" * 200}"\r\n'


def cookie_behind_a_proxy(cli: Cli, *options: str) -> str:
    """Return the cookie of a login that says to come from a proxy on this machine."""
    cookies: list[str] = []
    begun: list[threading.Thread] = []

    def log_in(address: str) -> None:
        headers = {"Origin": address, "X-Forwarded-Proto": "https"}
        answer = httpx.post(f"{address}/login", data={"token": "x" * 16}, headers=headers)
        cookies.append(answer.headers["set-cookie"])
        os.kill(os.getpid(), signal.SIGINT)

    def act(written: str) -> None:
        if (serving := re.search(r"(http://\S+)/ serves", written)) and not begun:
            begun.append(threading.Thread(target=log_in, args=serving.groups()))
            begun[0].start()

    line = f"dashboard --port 0 --token {'x' * 16}"
    assert cli.at_terminal(line, *options, act=act)[0] == 130
    return cookies[0]


def test_headers_of_a_proxy_count_only_if_its_address_is_given(cli: Cli) -> None:
    assert "Secure" not in cookie_behind_a_proxy(cli)
    assert "Secure" not in cookie_behind_a_proxy(cli, "--proxy", "192.0.2.1")
    assert "Secure" in cookie_behind_a_proxy(cli, "--proxy", "127.0.0.1")


def test_a_purge_asks_for_confirmation(cli: Cli) -> None:
    seed(cli.url)
    for answer, ending in (("n", "delayq: nothing was changed"), ("y", "dropped: 5")):
        status, shown = cli.screen("purge mails", stdin=f"{answer}\n")
        assert (status, shown.endswith(ending)) == (answer == "n", True)
        assert shown.startswith("Drop all messages of mails for good? [y/N]")
    cli.assert_refused("purge mails", words="--yes")
    # Colour is for terminals, and who wants it.
    assert "\x1b[32mok" in cli.at_terminal("doctor")[1]
    assert "\x1b[3" not in cli.at_terminal("doctor", NO_COLOR="1")[1]
    assert "\x1b" not in cli.plain("doctor")[1]


def test_ctrl_c_says_what_is_left(cli: Cli, sync_raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # One message at a time, and bars at once.
    for name in ("_REDRIVEN", "_DROPPED"):
        monkeypatch.setattr(f"delayq._reliable.dead_letters.{name}", 1)
    monkeypatch.setattr("delayq._reliable.store.PAGE", 1)
    monkeypatch.setattr("delayq.admin.retries._AT_A_TIME", 1)
    monkeypatch.setattr("delayq.cli.output._QUICK", 0)
    bury(cli.url, 3000)
    fill = """for n = ARGV[1], ARGV[2] do
      redis.call('ZADD', KEYS[1], '4e15', 'm' .. n)
      redis.call('HSET', KEYS[2], 'm' .. n, '1 \\n1')
    end"""
    waiting = (MAILS.waiting[0], MAILS.named("bodies"))
    dead = (MAILS.dead, MAILS.dead_messages)
    failed = (MAILS.waiting[0], MAILS.named("errors"))
    for keys in (waiting, failed):
        evaluate_in_steps(cli.url, fill, keys, 3000)
    for line, word, keys, words in (
        ("bury mails --error 1", "examined", failed, "LEFT failed messages are left"),
        ("purge mails --yes", "dropped", waiting, "LEFT messages are left"),
        ("dead redrive mails", "redriven", dead, "LEFT are left; run the command again"),
        ("dead purge mails --yes", "purged", dead, "LEFT are left; run the command again"),
    ):
        before = sync_raw.zcard(keys[0])
        status, shown = cli.screen(line, act=ctrl_c_at(word))
        left = sync_raw.zcard(keys[0])
        assert (status, sync_raw.hlen(keys[1])) == (130, left), shown
        assert 0 < left < before
        message = " ".join(shown.split()).replace(f"{left:,}", "LEFT")
        assert "delayq: stopped: " in message
        assert words in message


# For other programs


def test_every_command_prints_a_json_document(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seed(cli.url)
    for case in DOCUMENTS:
        out = Stream()
        out.act = ctrl_c_at(case.stop) if case.stop else len
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            status = run([*case.line.split(), "--json", "--url", cli.url])
        assert status == case.status, case
        documents = [json.loads(line) for line in out.getvalue().splitlines()]
        assert bool(documents) == bool(case.words)
        for document in documents:
            assert set(case.words) <= set(document)


def test_a_traceback_shows_no_values(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("delayq.cli.messages.report", None)
    # typer sets it for good.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(TypeError) as caught:
        cli.plain("offer mails", json.dumps(SECRET))
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert "TypeError: 'NoneType' object is not callable" in shown
    assert "│" not in shown
    assert SECRET not in shown


def test_output_that_cannot_be_written_is_one_error_and_messages_go_back(
    cli: Cli, sync_raw: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: tuple[str, ...]
    for line, closed, error in (
        # Written only at the end.
        ("queues", (), "delayq: No space left on device\n"),
        ("take mails --json", (), "delayq: No space left on device\n"),
        ("take mails --json", ("stdout",), "delayq: Bad file descriptor\n"),
        ("take mails --json", ("stdout", "stderr"), ""),
    ):
        sync_raw.flushall()
        seed(cli.url)
        with monkeypatch.context() as patch, Path("/dev/full").open("w") as full:
            patch.setattr(sys, "stdout", full)
            for stream in closed:
                # As Python finds them after ``>&-``.
                patch.setattr(sys, stream, None)
            status = run([*line.split(), "--url", cli.url])
            opened = [getattr(sys, stream) for stream in closed]
        for stream in opened:
            stream.close()
        assert (status, capsys.readouterr().err) == (2, error), line
        assert sync_raw.zrange(MAILS.leased, 0, -1) == [b"busy"]
        assert sync_raw.zscore(MAILS.waiting[0], "welcome-0") is not None


@pytest.mark.gate
def test_a_reader_that_is_gone_ends_a_program_in_silence(server: PrivateServer) -> None:
    seed(server.url)
    reading, writing = os.pipe()
    os.close(reading)
    result = run_python("-m", "delayq", "list", "orders", to=writing, DELAYQ_URL=server.url)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_bytes_are_offered_as_they_stand(
    cli: Cli, sync_raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def type_in() -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x00\n"), "utf-8"))

    type_in()
    assert cli("offer mails - --codec bytes")[0] == 0
    # An argument that is no text.
    assert cli("offer mails --codec bytes", os.fsdecode(b"\xfe"))[0] == 0
    type_in()
    words = "the value is not text; to offer bytes, add --codec bytes"
    cli.assert_refused("offer mails - --text", words=words)
    bodies = sync_raw.hvals(MAILS.named("bodies"))
    assert {body.partition(b"\n")[2] for body in bodies} == {b"\xff\x00\n", b"\xfe"}
