"""Owns one Valkey server for as long as any process uses it.

:mod:`delayq._embedded.server` runs this file as a script.

::

    user process ─┐  write ends                     child
    user process ─┼──────────▶ server.fifo ──▶ watchdog ──▶ valkey-server
    user process ─┘            (our stdin)

Each user process holds a write end of ``server.fifo``, so our read end sees end-of-file when the
last one has gone, no matter how it ended. Three rules keep this free of races:

* A process that joins, starts or stops a server holds ``server.lock`` meanwhile. We check again for
  users under that lock: one may have joined between the end-of-file and our turn.
* A read end of the FIFO exists exactly as long as a watchdog does. So a user that can open the
  write end has joined.
* The server holds a lock on ``server.pid`` until it is dead. No second server can write the same
  files, even if a watchdog was killed and its server was not.

A server that was killed is restarted, on the same socket and files. If it exits by itself at its
first start, it has written the reason into its log, and the watchdog gives up as well: it removes
the FIFO, which tells the starting process.

SIGTERM stops neither us nor the server while a process uses it: systemd sends it to every process
of a service at once, and the users need the server until they have finished. A cleaner of temporary
files may remove the socket, so we restore it.

This file is run with ``python -I -S`` to start quickly, so it imports only a few standard modules.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

if sys.platform != "win32":
    import fcntl

LOCK, FIFO, SOCKET = "server.lock", "server.fifo", "server.sock"
PID, LOG = "server.pid", "server.log"
LINK = "server.link"
"""A second name of the socket, in the directory or beside a socket on another disk.

The process that starts the server creates it as soon as the server answers, and we do after a
restart.
"""

TEMPORARY = "temporary"
"""The value of the third argument for a directory that is removed with the server."""
CHECK_EVERY = 1.0
"""Seconds between two checks that the socket is still there."""
STEADY = 10.0
"""Seconds that a server must run to count as started successfully."""
STOP_TIMEOUT = 5.0
"""Seconds that a server has to write its files before it is killed."""


def pause_before_restart(code: int, starts: int, lasted: float) -> float | None:
    """Return the seconds until a restart after ``lasted`` seconds of work, or None to give up.

    ``starts`` counts those since it last ran steadily; ``code`` is negative after a signal.
    """
    if lasted >= STEADY:
        return 0.0
    if starts == 1 and code > 0:
        return None
    # Restart at once after the first kill, and ever more slowly after a series of them.
    return min((starts - 1) * 0.1, 2.0)


class ServerSocket:
    """The path of the server's socket, and its second name, from which the path is restored."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Whether it was seen since it was removed, and which file it was.
        self.was_there = False
        self._inode = 0
        self._links = (LINK, os.path.join(os.path.dirname(path), LINK))  # noqa: PTH118, PTH120

    def remove(self) -> None:
        """Remove the socket and its second name."""
        unlink(*self._links, self.path)
        self.was_there = False

    def remove_if_own(self) -> None:
        """Remove the socket and its second name, unless another server has taken the path."""
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:  # noqa: PTH116
                self.remove()

    def look_after(self) -> bool:
        """Restore the path if it was removed, and keep it from looking old. Return if it exists."""
        try:
            status = os.stat(self.path)  # noqa: PTH116 - pathlib would slow down every start
        except OSError:
            return self._restore()
        self.was_there, self._inode = True, status.st_ino
        with contextlib.suppress(OSError):
            # So that no cleaner removes it.
            os.utime(self.path)
        for link in self._links:
            try:
                if os.stat(link).st_ino == status.st_ino:  # noqa: PTH116
                    return True
            except OSError:
                pass
        unlink(*self._links)
        link_one(self.path, self._links)
        return True

    def _restore(self) -> bool:
        with contextlib.suppress(OSError):
            os.mkdir(os.path.dirname(self.path), 0o700)  # noqa: PTH102, PTH120
        for link in self._links:
            with contextlib.suppress(OSError):
                os.link(link, self.path)
                return True
        return False


class Watchdog:
    """One server in the working directory, restarted when killed, stopped when it has no users."""

    def __init__(self, directory: str, socket: str, temporary: bool, command: list[str]) -> None:
        self._directory = directory
        self._socket = ServerSocket(socket)
        self._temporary = temporary
        self._command = command
        self._die_with_us = tie_to_parent()
        self._server: int | None = None
        self._starts = 0
        self._started = 0.0
        self._restart_at: float | None = None
        # Whether the server was told to stop, to be restarted afterwards.
        self._ending = False
        # Signals arrive in a pipe, so that none is lost between checking and waiting.
        self._signals, signalled = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(signalled, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> None:
        self._start()
        while True:
            ready, _, _ = select.select([0, self._signals], [], [], self._timeout())
            if self._signals in ready:
                os.read(self._signals, 4096)
            if not has_users():
                self._end_if_unused()
            self._reap()
            self._end_if_misplaced()
            self._look_after_socket()
            if self._restart_at is not None and time.monotonic() >= self._restart_at:
                self._start()

    def _timeout(self) -> float:
        if self._restart_at is not None:
            return max(0.0, self._restart_at - time.monotonic())
        # Only Linux reliably wakes the reader of a FIFO at end-of-file.
        often = CHECK_EVERY if sys.platform == "linux" else CHECK_EVERY / 2
        return often if self._socket.was_there else CHECK_EVERY / 50

    def _start(self) -> None:
        self._restart_at = None
        self._starts += 1
        self._started = time.monotonic()
        self._ending = False
        # That of the previous server, if any.
        self._socket.remove()
        watchdog = os.getpid()
        self._server = os.fork()
        if self._server == 0:
            self._become_server(watchdog)

    def _become_server(self, watchdog: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            self._die_with_us()
            if os.getppid() != watchdog:  # the watchdog died before we were tied to it
                os._exit(1)
            # SIGTERM may go to every process of a service: the watchdog stops us by SIGINT.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            # Only the watchdog may hold the FIFO's read end.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            claim_directory()
            os.execv(self._command[0], self._command)  # noqa: S606 - a path that the user chose, and no shell
        except BaseException as error:  # noqa: BLE001 - this fork must not live on as a second watchdog
            os.write(2, f"cannot run {self._command[0]}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(127)

    def _reap(self) -> None:
        if self._server is None:
            return
        pid, status = os.waitpid(self._server, os.WNOHANG)
        if pid == 0:
            return
        self._server = None
        lasted = time.monotonic() - self._started
        pause = pause_before_restart(os.waitstatus_to_exitcode(status), self._starts, lasted)
        if pause is None:
            self._give_up()
        if lasted >= STEADY:
            self._starts = 1
        self._restart_at = time.monotonic() + (pause or 0.0)

    def _look_after_socket(self) -> None:
        """Keep the socket's path, because the server does not notice if it is removed."""
        if self._server is None or self._socket.look_after():
            return
        # If there is no second name, the server may not have created the first one yet.
        had_one = self._socket.was_there or time.monotonic() - self._started > STEADY
        if had_one and not self._temporary and not self._ending:
            # The server keeps its data, so it can restart and create a new socket.
            self._ending = True
            os.kill(self._server, signal.SIGINT)

    def _give_up(self) -> NoReturn:
        take_lock()
        unlink(FIFO)
        while self._temporary and has_users():  # the starter is reading the log
            select.select([0], [], [], 0.1)
        self._clean_up()

    def _end_if_unused(self) -> None:
        lock = take_lock()
        if not has_users():
            self._stop_server()
            self._clean_up()
        # A process joined between the end-of-file and the lock.
        if lock is not None:
            os.close(lock)

    def _end_if_misplaced(self) -> None:
        """Stop the server if its directory was deleted or moved: its messages are lost then, or the
        next process that opens the directory does not find them.
        """
        if self._temporary:
            return
        try:
            if os.path.samefile(self._directory, "."):  # noqa: PTH121 - pathlib would slow down every start
                return
        except OSError:
            pass
        # While the server has its socket, no other file gets that inode.
        self._socket.remove_if_own()
        self._stop_server()
        unlink(PID, FIFO, LINK)
        os._exit(0)

    def _stop_server(self) -> None:
        """Stop the server, by force if it takes too long, and wait until it is dead."""
        if self._server is None:
            return
        # A temporary server's data is thrown away, so it need not be written first.
        os.kill(self._server, signal.SIGKILL if self._temporary else signal.SIGINT)
        deadline = time.monotonic() + STOP_TIMEOUT
        while os.waitpid(self._server, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._server, signal.SIGKILL)
            time.sleep(0.002)

    def _clean_up(self) -> NoReturn:
        # Only the exit releases the directory's lock, after the last file is gone.
        unlink(PID)
        self._socket.remove()
        place = os.path.dirname(self._socket.path)  # noqa: PTH120 - pathlib would slow down every start
        if place != self._directory:
            with contextlib.suppress(OSError):
                os.rmdir(place)  # noqa: PTH106
        # The last file: a process waiting for our end checks it, and may then remove the directory.
        unlink(FIFO)
        if self._temporary:
            import shutil  # noqa: PLC0415 - as would this

            shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def has_users() -> bool:
    """Return whether any process holds a write end of the FIFO."""
    try:
        return os.read(0, 4096) != b""
    except BlockingIOError:
        return True


def take_lock() -> int | None:
    """Wait for the directory's lock; None if it was removed, so that no process can join either."""
    try:
        lock = os.open(LOCK, os.O_RDWR)
    except OSError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def claim_directory() -> None:
    """Lock ``server.pid`` for this process, soon a server, and kill one that still holds it.

    A record lock outlives ``exec``, ends with the process, and is not inherited by children. Raises
    OSError if the other server does not exit.
    """
    pid = os.open(PID, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(pid, True)  # closing it would release the lock
    deadline = time.monotonic() + STOP_TIMEOUT
    while True:
        try:
            fcntl.lockf(pid, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
        # An orphan, whose watchdog was killed: either it is about to die of that, or it did not
        # notice and must be killed. As it holds the lock, the number in the file is its own.
        time.sleep(0.01)
        orphan = os.pread(pid, 32, 0).strip()
        if orphan.isdigit():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(orphan), signal.SIGKILL)
    os.ftruncate(pid, 0)
    os.pwrite(pid, b"%d\n" % os.getpid(), 0)


def unlink(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def link_one(path: str, names: Iterable[str]) -> None:
    """Give the file the first of these names on the same disk, which may exist already."""
    for name in names:
        try:
            os.link(path, name)
        except FileExistsError:
            return
        except OSError:
            continue
        return


def tie_to_parent() -> Callable[[], object]:
    """Return a function that makes Linux kill the calling process when its parent dies."""
    if sys.platform != "linux":
        return lambda: None
    try:
        import ctypes  # noqa: PLC0415

        prctl = ctypes.CDLL(None).prctl
        prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    except (ImportError, OSError, AttributeError):
        return lambda: None
    set_parent_death_signal = 1
    # SIGKILL, as the next watchdog may start another server; the data is in a file.
    return lambda: prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)


def main(directory: str, socket: str, temporary: str, *command: str) -> None:
    # Ctrl-C in a terminal is for the user processes, which may need the server to finish.
    os.setsid()
    os.closerange(3, 65536)
    os.umask(0o077)
    os.chdir(directory)
    Watchdog(directory, socket, temporary == TEMPORARY, list(command)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
