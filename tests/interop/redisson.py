"""Real Redisson: build the Java program in this folder, and speak with it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

VERSIONS = ("4.7.0", "3.20.1")
"""The current Redisson, and one that writes the old records (before 3.21.1)."""

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "pom.xml", _HERE / "src/main/java/delayq/interop/Peer.java")
# The first build downloads Redisson and what it needs.
_BUILD_TIMEOUT = 300.0
_START_TIMEOUT = 60.0
_END_TIMEOUT = 5.0


def missing_tools() -> str:
    """What this machine lacks for building and running Java, or nothing."""
    absent = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    return f"no {' and no '.join(absent)} on the PATH" if absent else ""


def build(version: str) -> list[Path]:
    """Build the program with Redisson ``version``, unless it is built already. Only the first time needs a network.

    Returns:
        The class path.

    Raises:
        RuntimeError: Maven failed.
    """
    target = _HERE / "build" / version
    class_path = [target / "interop.jar", target / "lib" / "*"]
    stamp = target / "stamp"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return class_path
    shutil.rmtree(target, ignore_errors=True)
    command = ["mvn", "--quiet", "--batch-mode", "-Dstyle.color=never", f"-Dredisson.version={version}", "package"]
    # What was downloaded once is enough; asking the network again would only make the build depend on it.
    for options in (["--offline"], []):
        try:
            result = subprocess.run(
                [*command, *options], cwd=_HERE, capture_output=True, text=True, timeout=_BUILD_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"Maven did not build it with Redisson {version} within {_BUILD_TIMEOUT:.0f} s") from error
        if result.returncode == 0:
            stamp.write_text(digest)
            return class_path
    reason = next((line for line in result.stdout.splitlines() if "[ERROR]" in line), result.stderr)
    raise RuntimeError(f"Maven cannot build it with Redisson {version}: {reason}")


class Redisson:
    """One Java process with one Redisson client.

    Its answers are read by a thread, so it outlives the event loops of the tests.
    """

    def __init__(self, version: str, url: str) -> None:
        self.version = version
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Any]] = {0: Future()}
        with tempfile.NamedTemporaryFile(prefix=f"dq-redisson-{version}-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                [
                    "java",
                    "-Xmx512m",
                    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                    "-cp",
                    os.pathsep.join(map(str, build(version))),
                    "delayq.interop.Peer",
                    url,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        atexit.register(self.close)
        self._reader = threading.Thread(target=self._read, name=f"redisson-{version}", daemon=True)
        self._reader.start()
        self._answers[0].result(_START_TIMEOUT)

    @property
    def writes_old_records(self) -> bool:
        return tuple(map(int, self.version.split("."))) < (3, 21, 1)

    async def open(self, name: str, codec: str, *, attached: bool = True) -> JavaQueue:
        """Open a queue.

        Args:
            name: The queue.
            codec: The simple name of Redisson's codec.
            attached: With a delayed queue, as getDelayedQueue makes it: without, it can only take what is ready.
        """
        queue = JavaQueue(self, name)
        await queue.ask("open", codec=codec, attached=attached)
        return queue

    async def ask(self, what: str, queue: str, **details: Any) -> Any:
        """Send one request and return its result.

        Raises:
            RuntimeError: Java answered with an exception, or is gone.
        """
        number, answer = next(self._ids), Future[Any]()
        self._answers[number] = answer
        line = json.dumps({"id": number, "do": what, "queue": queue, **details}).encode() + b"\n"
        try:
            await asyncio.to_thread(self._write, line)
        except OSError as error:
            raise RuntimeError(self._obituary()) from error
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End it. It ends by itself when its standard input does, also when this process is killed."""
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
            message = json.loads(line)
            answer = self._answers.pop(message["id"])
            # A test that timed out has cancelled it.
            if answer.set_running_or_notify_cancel():
                if "error" in message:
                    answer.set_exception(RuntimeError(f"Redisson {self.version}: {message['error']}"))
                else:
                    answer.set_result(message["result"])
        for answer in [self._answers.pop(number) for number in tuple(self._answers)]:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(RuntimeError(self._obituary()))

    def _obituary(self) -> str:
        return f"Redisson {self.version} has ended:\n{self._log.read_text(errors='replace')[-3000:]}"


class JavaQueue:
    """A blocking queue and its delayed queue in Java. Values and times travel as JSON."""

    def __init__(self, redisson: Redisson, name: str) -> None:
        self.name = name
        self._redisson = redisson

    async def ask(self, what: str, **details: Any) -> Any:
        return await self._redisson.ask(what, self.name, **details)

    async def offer(self, messages: list[tuple[Any, int]]) -> list[int]:
        """Offer values with delays in ms; return when each left, ms: none is due before that and its delay."""
        left: list[int] = await self.ask("offer", messages=messages)
        return left

    async def take(self, count: int) -> list[tuple[Any, int]]:
        """Wait for ``count`` values; return them with the times at which they came, ms."""
        return _arrivals(await self.ask("take", count=count))

    async def consume(self) -> list[tuple[Any, int]]:
        """Take values until :meth:`stop`; return them as :meth:`take` does."""
        return _arrivals(await self.ask("consume"))

    async def stop(self) -> None:
        await self.ask("stop")

    async def detach(self) -> None:
        """RDelayedQueue.destroy(): from now on this client moves nothing of this queue."""
        await self.ask("detach")


def _arrivals(answer: list[dict[str, Any]]) -> list[tuple[Any, int]]:
    return [(arrival["value"], arrival["at"]) for arrival in answer]
