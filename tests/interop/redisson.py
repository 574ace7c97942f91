"""Build the Java program in this folder, which runs the real Redisson, and talk to it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.values import from_java
from tests.support.depth import nightly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.servers import PrivateServer


@dataclass(frozen=True)
class Release:
    """A version of Redisson, and that of Jackson with which it was built."""

    version: str
    jackson: str

    def __str__(self) -> str:
        return self.version

    @property
    def writes_old_records(self) -> bool:
        """Whether it neither writes nor reads the current records, which came with 3.21.1."""
        return self._numbers < (3, 21, 1)

    @property
    def writes_uuids_with_class(self) -> bool:
        """Whether its JsonJacksonCodec writes a UUID's class in every place."""
        return self._numbers >= (4, 2, 0)

    @property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")))


NEWEST_4 = Release("4.7.0", "2.21.3")
NEWEST_3 = Release("3.52.0", "2.20.0")
OLD = Release("3.20.1", "2.14.2")

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "pom.xml", *sorted((_HERE / "src").rglob("*.java")))
# The first build downloads Redisson and its dependencies.
_BUILD_TIMEOUT = 300.0
_START_TIMEOUT = 180.0
_END_TIMEOUT = 5.0


def build(release: Release) -> list[Path]:
    """Build the program with that Redisson, once, and return its class path.

    Raises:
        RuntimeError: Java or Maven is missing, or failed.
    """
    if absent := [tool for tool in ("java", "mvn") if shutil.which(tool) is None]:
        raise RuntimeError(f"no {' and no '.join(absent)} on the PATH")
    folder = _HERE / "build"
    folder.mkdir(exist_ok=True)
    # One of the test processes builds, and the others wait.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(release, folder / release.version)


def _build(release: Release, target: Path) -> list[Path]:
    class_path = [target / "interop.jar", target / "lib" / "*"]
    stamp = target / "stamp"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return class_path
    shutil.rmtree(target, ignore_errors=True)
    versions = [f"-Dredisson.version={release.version}", f"-Djackson.version={release.jackson}"]
    command = ["mvn", "--quiet", "--batch-mode", "-Dstyle.color=never", *versions, "package"]
    # Try offline first: once everything is downloaded, asking the network again would only make the
    # build depend on it.
    for options in (["--offline"], []):
        result = subprocess.run(
            [*command, *options],
            cwd=_HERE,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT,
            check=False,
        )
        if result.returncode == 0:
            stamp.write_text(digest)
            return class_path
    raise RuntimeError(f"Maven cannot build it with {release}: {result.stdout}{result.stderr}")


class Redisson:
    """One Java process with one Redisson client, which outlives the event loops of the tests.

    It connects by TCP, to ``nodes`` if the server belongs to a cluster.

    Raises:
        RuntimeError: It did not start.
    """

    def __init__(
        self,
        release: Release,
        server: PrivateServer,
        nodes: Sequence[PrivateServer] = (),
    ) -> None:
        self.release = release
        self.server = server
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Any]] = {0: Future()}
        self._taken: dict[int, list[tuple[Any, int]]] = {}
        with tempfile.NamedTemporaryFile(
            prefix=f"dq-redisson-{release}-", suffix=".log", delete=False
        ) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                [
                    "java",
                    "-Xmx512m",
                    # Collect garbage with one thread: the servers and the tests need the few
                    # processors, too.
                    "-XX:+UseSerialGC",
                    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                    "-cp",
                    os.pathsep.join(map(str, build(release))),
                    "delayq.interop.Peer",
                    *(node.url.removesuffix("/0") for node in nodes or (server,)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        atexit.register(self.close)
        self._reader = threading.Thread(target=self._read, name=f"redisson-{release}", daemon=True)
        self._reader.start()
        try:
            self._answers[0].result(_START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return f"Redisson {self.release} against {self.server.kind.name} {self.server.version}"

    async def open(
        self,
        name: str,
        codec: str,
        *,
        attached: bool = True,
        to_java: Callable[[Any], Any] = lambda value: value,
    ) -> JavaQueue:
        """Open a queue with a codec of Redisson's, and its delayed queue if it is ``attached``."""
        queue = JavaQueue(self, name, to_java)
        await queue.ask("open", codec=codec, attached=attached)
        return queue

    async def ask(
        self, what: str, queue: str, taken: list[tuple[Any, int]] | None = None, **details: Any
    ) -> Any:
        """Send one request and return its result.

        ``taken`` receives every value that the request takes, as soon as Java has it, and the
        moment (ms).

        Raises:
            RuntimeError: Java answered with an exception, or is gone.
        """
        number, answer = next(self._ids), Future[Any]()
        self._answers[number] = answer
        if taken is not None:
            self._taken[number] = taken
        line = json.dumps({"id": number, "do": what, "queue": queue, **details}).encode() + b"\n"
        try:
            await asyncio.to_thread(self._write, line)
        except (OSError, ValueError) as error:
            raise RuntimeError(self._obituary()) from error
        return await asyncio.wrap_future(answer)

    def kill(self) -> None:
        """Kill the process at once. Everything that it reported before then has arrived."""
        self._process.kill()
        self._process.wait()
        self._reader.join(_END_TIMEOUT)

    def close(self) -> None:
        """End the process. It also ends by itself when its standard input closes."""
        atexit.unregister(self.close)
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_TIMEOUT)
        assert self._process.stdout
        self._process.stdout.close()
        self._log.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin
        with self._lock:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            # The process may have been killed while it wrote this line.
            if line.endswith(b"\n"):
                self._hear(json.loads(line))
        for answer in [self._answers.pop(number) for number in tuple(self._answers)]:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(RuntimeError(self._obituary()))

    def _hear(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "at" in message:
            self._taken[number].append((from_java(message["took"]), message["at"]))
            return
        self._taken.pop(number, None)
        answer = self._answers.pop(number)
        # A test that timed out has cancelled it.
        if answer.set_running_or_notify_cancel():
            if "error" in message:
                answer.set_exception(RuntimeError(f"Redisson {self.release}: {message['error']}"))
            else:
                answer.set_result(from_java(message["result"]))

    def _obituary(self) -> str:
        return (
            f"Redisson {self.release} has ended:\n{self._log.read_text(errors='replace')[-3000:]}"
        )


class JavaQueue:
    """A blocking queue and its delayed queue in Java."""

    def __init__(self, redisson: Redisson, name: str, to_java: Callable[[Any], Any]) -> None:
        self.name = name
        self._redisson = redisson
        self._to_java = to_java

    async def ask(self, what: str, **details: Any) -> Any:
        return await self._redisson.ask(what, self.name, **details)

    async def offer(self, messages: list[tuple[Any, int]]) -> list[int]:
        """Offer values with delays in ms. Return the moment (ms) at which each was sent."""
        made = [(self._to_java(value), delay) for value, delay in messages]
        left: list[int] = await self.ask("offer", messages=made)
        return left

    async def take(self, count: int) -> list[tuple[Any, int]]:
        """Wait for ``count`` values. Return them with the times at which they arrived, ms."""
        taken: list[tuple[Any, int]] = []
        await self.ask("take", taken=taken, count=count)
        return taken

    async def consume(
        self, taken: list[tuple[Any, int]] | None = None, *, pause: int = 0
    ) -> list[tuple[Any, int]]:
        """Take values until :meth:`stop`, spending ``pause`` ms on each, as :meth:`take` does."""
        taken = [] if taken is None else taken
        await self.ask("consume", taken=taken, pause=pause)
        return taken

    async def stop(self) -> None:
        await self.ask("stop")

    async def detach(self) -> None:
        """Call RDelayedQueue.destroy(): from now on this client moves nothing in this queue."""
        await self.ask("detach")


def _on(*releases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("redisson", releases, indirect=True, ids=str)


# These read the records that we write; the old one can neither write nor read them.
with_current = _on(NEWEST_4, NEWEST_3)
with_old = _on(OLD)
with_newest = _on(NEWEST_4)
# What takes long, and depends little on the release: the others come at night.
newest_current_first = _on(NEWEST_4, nightly(NEWEST_3))
newest_first = _on(NEWEST_4, nightly(NEWEST_3), nightly(OLD))
