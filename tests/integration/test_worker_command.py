"""``delayq worker``: processes that run a worker, seen from outside."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from redis.asyncio import Redis

import delayq
from delayq.cli.app import run
from delayq.cli.output import CommandFailed
from delayq.cli.worker.child import find
from delayq.cli.worker.command import send
from delayq.integrations._exposure import exposure
from delayq.worker import HealthServer
from tests.integration.test_demo import alive, descendants, linux_only
from tests.support.reliable import depths
from tests.support.servers import free_port
from tests.support.terminal import ROOT
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.servers import PrivateServer

PATIENCE = 60.0
WORKER = "shop.jobs:worker"

# Each process notes on a list what it has begun and ended.
APP = """
import asyncio, gc, os, time
import delayq
import redis

timeout = float(os.environ.get("SHUTDOWN_TIMEOUT", "30"))
worker = delayq.Worker(os.environ["SERVER"], shutdown_timeout=timeout)
log = redis.Redis.from_url(os.environ["SERVER"], socket_timeout=60)

@worker.listener("jobs")
async def handle(value: str) -> None:
    log.rpush("log", f"{os.getpid()} begin {value}")
    if value.startswith("fail"):
        raise ValueError(value)
    if value == "crash":
        os._exit(9)
    if value == "modules" and not any(member is asyncio.__dict__ for member in gc.get_objects()):
        log.rpush("log", f"{os.getpid()} frozen {value}")
    if value.startswith("block"):
        time.sleep(3600)
    while value.startswith("wait") and not log.exists("go"):
        await asyncio.sleep(0.01)
    log.rpush("log", f"{os.getpid()} end {value}")
"""


class Command:
    """A running ``delayq worker``."""

    def __init__(self, process: asyncio.subprocess.Process, server: PrivateServer) -> None:
        self.process = process
        self._server = server
        self.children: set[int] = set()

    async def log(self) -> list[list[str]]:
        """Return what its processes have noted: process, event, value."""
        async with Redis.from_url(
            self._server.url, decode_responses=True, socket_timeout=60
        ) as raw:
            return [line.split() for line in await raw.lrange("log", 0, -1)]  # type: ignore[misc]

    async def has_said(self, *words: str) -> None:
        async def said() -> bool:
            return any(line[1:] == [*words] for line in await self.log())

        await until(said, PATIENCE)

    async def reads(self, words: str) -> str:
        """Return the next line of its output that has the words."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            async for line in self.process.stderr:
                if words in line.decode():
                    return line.decode()
        raise AssertionError(f"it ended without {words!r}")

    async def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal if one is given. Return the status and the output at the end."""
        if number is not None:
            self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()

    async def has_children(self, count: int) -> None:
        def have_started() -> bool:
            below = descendants(self.process.pid)
            self.children = {pid for pid, line in below.items() if "worker.child" in line}
            return len(self.children) == count

        await until(have_started, PATIENCE)

    async def nobody_is_left(self) -> None:
        await until(lambda: not any(map(alive, self.children)), PATIENCE)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "jobs.py").write_text(APP)
    return tmp_path


@asynccontextmanager
async def command(
    server: PrivateServer, app: Path, *arguments: str, **variables: str
) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "delayq",
        "worker",
        *arguments,
        cwd=app,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SERVER": server.url} | variables,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    it = Command(process, server)
    try:
        yield it
    finally:
        # Clean up after a failed test.
        left = [*descendants(process.pid), *it.children]
        if process.returncode is None:
            process.kill()
        for pid in left:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        await process.communicate()


async def offer(server: PrivateServer, *values: Any) -> None:
    async with delayq.connect(server.url) as client:
        await client.reliable_queue("jobs").offer_many(delayq.Offer(value) for value in values)


async def stats(server: PrivateServer) -> tuple[int, int, int, int]:
    async with delayq.connect(server.url) as client:
        return await depths(client.reliable_queue("jobs"))


@linux_only
async def test_a_signal_stops_every_process_gracefully(
    own_server: PrivateServer, app: Path
) -> None:
    await offer(own_server, "wait-1", "wait-2", *map(str, range(100)))
    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            break
    url = own_server.url.replace("unix://", "unix://default:geheim@")
    options = ("--processes", "2", "--metrics-port", str(port))
    async with command(own_server, app, WORKER, *options, SERVER=url) as it:
        assert await it.reads(f"{WORKER} handles") == (
            f"{WORKER} handles queue jobs of {own_server.url}, up to 100 messages at a time in each"
            " of 2 processes\n"
        )
        await it.has_children(2)
        pages: list[str] = []

        async def tell_of_all() -> bool:
            with suppress(httpx.TransportError):
                async with httpx.AsyncClient() as browser:
                    addresses = [f"http://127.0.0.1:{port + place}/metrics" for place in range(2)]
                    pages[:] = [(await browser.get(address)).text for address in addresses]
            counts = re.findall(r"^delayq_acked_total\{.*\} (\S+)$", "".join(pages), re.MULTILINE)
            return sum(map(float, counts)) == 100

        await until(tell_of_all, PATIENCE)
        # The interpreter's own metrics, as in every program that uses prometheus_client.
        assert all("\npython_info{" in page for page in pages)
        it.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert it.process.returncode is None
        own_server.call("SET", "go", "1")
        status, errors = await it.end()
        assert status == 0, errors
        assert f"{WORKER} handles" not in errors
        assert len([line for line in await it.log() if line[1] == "end"]) == 102
        await it.nobody_is_left()
    assert await stats(own_server) == (0, 0, 0, 0)


@pytest.mark.gate
@linux_only
async def test_ctrl_c_lets_a_message_be_completed_and_the_log_says_what_it_waits_for(
    own_server: PrivateServer, app: Path
) -> None:
    await offer(own_server, "wait-1")
    async with command(own_server, app, WORKER, SHUTDOWN_TIMEOUT="3600") as it:
        await it.has_said("begin", "wait-1")
        # On Ctrl-C, a terminal sends the signal to all processes in the foreground.
        os.killpg(it.process.pid, signal.SIGINT)
        assert await it.reads("waits for running handlers, up to 3600 s: 1")
        own_server.call("SET", "go", "1")
        status, errors = await it.end()
        assert status == 0, errors
        assert (await it.log())[-1][1:] == ["end", "wait-1"]
    assert await stats(own_server) == (0, 0, 0, 0)


@pytest.mark.gate
@linux_only
async def test_ctrl_c_is_graceful_and_a_second_signal_kills_at_once(
    own_server: PrivateServer, app: Path
) -> None:
    await offer(own_server, "block-1")
    async with command(own_server, app, WORKER, "--processes", "2") as it:
        await it.has_said("begin", "block-1")
        await it.has_children(2)
        # On Ctrl-C, a terminal sends the signal to all processes in the foreground.
        os.killpg(it.process.pid, signal.SIGINT)
        # The one that is idle ends at the first signal.
        await until(lambda: sum(map(alive, it.children)) == 1, PATIENCE)
        it.process.send_signal(signal.SIGINT)
        status, _ = await it.end()
        assert status == 128 + signal.SIGINT
        await it.nobody_is_left()


@pytest.mark.gate
@linux_only
async def test_a_process_that_dies_is_replaced(own_server: PrivateServer, app: Path) -> None:
    await offer(own_server, "crash")
    async with command(own_server, app, WORKER) as it:
        await it.has_said("begin", "crash")
        await offer(own_server, "after")
        await it.has_said("end", "after")
        log = await it.log()
        assert log[0][0] != log[-1][0]
        status, errors = await it.end(signal.SIGTERM)
        assert status == 0
        restart_line = r"^delayq: process 1 exited with status 9; restarting it in 0\.\d s$"
        assert re.search(restart_line, errors, re.MULTILINE)


@pytest.mark.gate
async def test_a_burst_handles_what_is_due_and_ends(own_server: PrivateServer, app: Path) -> None:
    source = APP.replace('os.environ["SERVER"], shutdown', "shutdown")
    (app / "shop" / "jobs.py").write_text(source)
    values = ["modules", *(f"value-{number}" for number in range(49))]
    await offer(own_server, *values)
    options = ("--processes", "2", "--burst", "--log-level", "debug", "--url", own_server.url)
    async with command(own_server, app, WORKER, *options) as it:
        status, errors = await it.end()
        assert status == 0, errors
        assert errors.count("was handled in attempt 1") == 50
        assert not re.search("^delayq: ", errors, re.MULTILINE)
        log = await it.log()
        assert sorted(line[2] for line in log if line[1] == "end") == sorted(values)
        # No full garbage collection scans what was imported.
        assert any(line[1:] == ["frozen", "modules"] for line in log)
    assert await stats(own_server) == (0, 0, 0, 0)
    # It does not replace a process that dies.
    await offer(own_server, "crash")
    quiet = ("--burst", "--log-level", "warning", "--url", own_server.url)
    async with command(own_server, app, WORKER, *quiet) as it:
        status, errors = await it.end()
    assert status == 1
    assert " INFO " not in errors
    assert "delayq: process 1 exited with status 9\n" in errors
    # What a message holds begins no line of the log, and controls no terminal.
    await offer(own_server, "fail\x1b]52;c;eA==\x07\nforged")
    async with command(own_server, app, WORKER, "--burst", "--url", own_server.url) as it:
        _, errors = await it.end()
    assert "ValueError: fail\\x1b]52;c;eA==\\x07\n  forged\n" in errors


@pytest.mark.gate
@linux_only
async def test_no_process_survives_a_killed_parent(own_server: PrivateServer, app: Path) -> None:
    await offer(own_server, "wait-1")
    options = ("--processes", "2")
    async with command(own_server, app, WORKER, *options, SHUTDOWN_TIMEOUT="0.1") as it:
        await it.has_said("begin", "wait-1")
        await it.has_children(2)
        it.process.kill()
        await it.nobody_is_left()
    # Its message was given back, so other workers can have it at once.
    assert await stats(own_server) == (0, 1, 0, 0)


@pytest.mark.nightly
async def test_a_mistake_is_one_line_of_all_processes(server: PrivateServer, app: Path) -> None:
    async with command(server, app, "shop.jobs:nobody", "--processes", "2") as it:
        status, errors = await it.end()
    assert (status, errors) == (2, "delayq: module 'shop.jobs' has no attribute 'nobody'\n")


@pytest.mark.gate
@linux_only
async def test_changed_code_restarts_the_worker(own_server: PrivateServer, app: Path) -> None:
    source = app / "shop" / "jobs.py"

    def write(version: str) -> None:
        noted = f'log.rpush("log", f"{{os.getpid()}} import {version}")\n'
        source.write_text(APP.replace(" end {value}", f" {version} {{value}}") + noted)

    await offer(own_server, "one")
    async with command(own_server, app, WORKER, "--reload") as it:
        await it.has_said("end", "one")
        write("second")
        await it.has_said("import", "second")
        await offer(own_server, "two")
        await it.has_said("second", "two")
        # A mistake ends the worker until it is corrected, and not the command.
        source.write_text("1 / 0")
        await it.reads("ZeroDivisionError: division by zero")
        await it.reads("exited with status 2; it is started again when the code changes")
        write("third")
        await it.has_said("import", "third")
        await offer(own_server, "three")
        await it.has_said("third", "three")
        status, errors = await it.end(signal.SIGTERM)
    assert status == 0
    assert "delayq: jobs.py changed: restarting the worker\n" in errors
    assert await stats(own_server) == (0, 0, 0, 0)


# In this process


def test_a_worker_that_is_not_found_says_why(
    app: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A name of its own, because modules stay.
    (app / "shop").rename(app / "market")
    (app / "market" / "jobs.py").write_text(
        "import delayq\ntext = 'text'\nworker = delayq.Worker('redis://127.0.0.1:1')\n"
    )
    (app / "broken.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(app)
    for where, words in {
        "nonsense": "'nonsense' is not of the form module:attribute",
        "no_such_module:worker": "there is no module 'no_such_module'",
        "market.nothing:worker": "there is no module 'market.nothing'",
        "market.jobs:nobody": "module 'market.jobs' has no attribute 'nobody'",
        "market.jobs:text": "market.jobs:text is a str, not a delayq.Worker",
        "broken:worker": "importing 'broken' failed: No module named 'no_such_library'",
    }.items():
        with pytest.raises(CommandFailed, match=words):
            find(where)
    # With its trace.
    assert 'broken.py", line 1' in capsys.readouterr().err
    assert find("market.jobs:worker").queues == []
    with pytest.raises(CommandFailed, match=r"--url has no effect on market\.jobs:worker, which"):
        find("market.jobs:worker", url=True)


async def test_a_taken_port_is_named(server: PrivateServer) -> None:
    worker = delayq.Worker(server.url)
    worker.listener("jobs")(lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        health = HealthServer(f"127.0.0.1:{port}")
        for options, name in (
            (exposure(metrics=("127.0.0.1", port), health=None), "metrics"),
            ({"health": health}, "health checks"),
        ):
            words = f"cannot serve {name} at 127.0.0.1:{port}: Address already in use"
            with pytest.raises(delayq.ConfigurationError, match=words):
                await worker.run(**options)


async def test_a_signal_leaves_the_exit_status_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise, processes that fail together may add a second line on the terminal.
    process = await asyncio.create_subprocess_exec("sleep", "60")
    monkeypatch.setattr(subprocess.Popen, "poll", lambda self: pytest.fail("collects it"))
    send(process, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
    send(process, signal.SIGTERM)


def test_options_have_conditions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, words in (
        ("--processes 0", "--processes"),
        ("--processes 2 --metrics-port 65535", "2 processes need as many ports, but there are not"),
        ("--processes 2 --health 127.0.0.1:65535", "2 processes need as many ports"),
        ("--health 8080", "must be HOST:PORT, such as 0.0.0.0:8080 or [::]:8080, not '8080'"),
        ("--reload --burst", "--reload and --burst cannot be combined"),
        ("--reload", "watchfiles is missing: pip install 'delayq[reload]'"),
        ("--metrics-port 1", "prometheus_client is missing: pip install 'delayq[prometheus]'"),
        ("--reload-dir nowhere", "'nowhere' does not exist"),
    ):
        if "missing" in words:
            monkeypatch.setattr("delayq.cli.worker.command.find_spec", lambda _: None)
        assert run(["worker", WORKER, *line.split()]) == 2
        error = capsys.readouterr().err
        assert (error.startswith("delayq: "), error.count("\n")) == (True, 1)
        assert words in error
