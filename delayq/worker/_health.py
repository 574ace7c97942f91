"""Tells probes and autoscalers over HTTP whether a worker is alive and ready, and what waits."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread

from delayq._checks import describe_value
from delayq.errors import BadInput, ConfigurationError, DelayqError, ServerRefused
from delayq.worker._answers import Answer, Question
from delayq.worker._scale import window_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from delayq.worker._run import Run
    from delayq.worker._stopping import Stop

T = TypeVar("T")

# The event loop and the claim loops are stuck if they have not moved for this long, seconds.
_MOVES_WITHIN = 15.0
# How often the event loop notes that it moves, and which claim loops do, seconds.
_BEAT_INTERVAL = 1.0
# How long the event loop, and the server behind it, have to answer, seconds.
_ANSWERS_WITHIN = 2.0
_PORTS = 65_535


class HealthServer:
    """Answers the probes of Kubernetes, and autoscalers, over HTTP, while a worker runs.

    ::

        await worker.run(health=HealthServer("0.0.0.0:8080"))

    ``/livez`` is 200 while the event loop and the loops that claim messages have moved within 15 s;
    a server that is away does not change it. ``/readyz`` is 200 while messages can be claimed.
    ``/scale/{queue}`` counts the messages that want workers. A thread answers, even while the event
    loop is blocked. There is no authentication.
    """

    def __init__(
        self, address: str, *, metrics: Callable[[str], tuple[bytes, str]] | None = None
    ) -> None:
        """Create a server, which listens while a worker runs.

        Args:
            address: Where to listen: ``"0.0.0.0:8080"``, ``"127.0.0.1:8080"``, ``"[::]:8080"``.
            metrics: Returns the body and the content type of ``/metrics``, for the ``Accept``
                header of a request. A thread calls it. None if there is no such page.

        Raises:
            BadInput: The address is not of that form.
        """
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        is_bracketed = host.startswith("[") and host.endswith("]")
        is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) <= _PORTS
        is_host = host.isprintable() and (":" not in host or is_bracketed)
        if not (host and colon and is_port and is_host):
            raise BadInput(
                "the address of health checks must be HOST:PORT, such as 0.0.0.0:8080 or"
                f" [::]:8080, not {describe_value(address)}"
            )
        self.port: int = int(port)
        self._host = host
        self._metrics = metrics

    def address_of(self, number: int) -> str:
        """Return the address with the port that is ``number`` higher."""
        return f"{self._host}:{self.port + number}"

    @asynccontextmanager
    async def serving(self, health: RunHealth) -> AsyncIterator[None]:
        """Answer while the block runs. Raises ConfigurationError if that is not possible."""
        # It takes a while to import, and few workers need it.
        from delayq.worker._http import HttpServer  # noqa: PLC0415

        try:
            host = self._host.strip("[]")
            server = HttpServer(host, self.port, partial(self._answer, health))
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve health checks at {self.address_of(0)}: {error.strerror or error}"
            ) from None
        health.runs_for = server.runs_for
        server.start()
        try:
            with health.beating():
                yield
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(server.stop)

    # In threads of the server

    def _answer(self, health: RunHealth, question: Question) -> Answer:
        if question.path == "/livez":
            return _verdict(health.stall())
        if question.path == "/readyz":
            return _verdict(health.unreadiness())
        if question.path == "/metrics" and self._metrics is not None:
            return Answer(200, *self._metrics(question.accept))
        if question.path.startswith("/scale/"):
            status, figures = health.scale(question.path.removeprefix("/scale/"), question.query)
            return Answer(status, json.dumps(figures).encode() + b"\n", "application/json")
        pages = ["/livez", "/readyz", "/scale/{queue}"] + ["/metrics"] * bool(self._metrics)
        return Answer(404, f"there are only {', '.join(pages)}\n".encode())


def _verdict(trouble: str) -> Answer:
    return Answer(503, f"{trouble}\n".encode()) if trouble else Answer(200, b"ok\n")


class RunHealth:
    """The health of one run of a worker. Other threads than that of its event loop ask for it.

    Attributes:
        run: The run, once it has a client.
        runs_for: Returns for how long the process has run without a pause, in seconds.
    """

    def __init__(self, queues: Sequence[str], stop: Stop) -> None:
        """Args:
        queues: The queues that the worker handles.
        stop: Says whether the run is to stop.
        """
        self._queues = queues
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()
        # By claim loop: its position, and for how many beats it has not changed.
        self._beats: dict[tuple[str, int], tuple[object, int]] = {}
        self.run: Run | None = None
        self.runs_for: Callable[[], float] = lambda: math.inf

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Note while the block runs that the event loop moves, and which claim loops do."""

        async def beat() -> None:
            while True:
                self._beat_at = time.monotonic()
                self._note_positions({} if self.run is None else self.run.positions())
                await asyncio.sleep(_BEAT_INTERVAL)

        beating = self._loop.create_task(beat(), name="delayq health")
        try:
            yield
        finally:
            beating.cancel()

    def stall(self) -> str:
        """Return what has not moved for 15 s; "" if everything has. This asks no server."""
        if self.runs_for() <= _MOVES_WITHIN:
            # After a pause, everything needs a moment to move again.
            return ""
        if (age := time.monotonic() - self._beat_at) > _MOVES_WITHIN:
            return f"the event loop has not moved for {age:.0f} s"
        for (queue, _), (_, beats) in self._beats.items():
            if (age := beats * _BEAT_INTERVAL) > _MOVES_WITHIN:
                return f"a claim of messages of queue {queue!r} has not moved for {age:.0f} s"
        return "" if self.run is None else self.run.stall(_MOVES_WITHIN)

    def _note_positions(self, positions: dict[tuple[str, int], object]) -> None:
        # Beats count, because the event loop may be late: then claims need a moment, too. The
        # threads that answer read the dict meanwhile, so it is never changed.
        before = self._beats
        self._beats = {
            loop: (position, before[loop][1] + 1)
            if loop in before and before[loop][0] == position
            else (position, 0)
            for loop, position in positions.items()
        }

    def unreadiness(self) -> str:
        """Return why the worker takes no messages now; "" if it does."""
        if reason := self._pause():
            return reason
        assert self.run is not None
        try:
            self._ask(self.run.check_server())
        except DelayqError:
            return "the server does not answer"
        except TimeoutError:
            return "the event loop does not answer"
        # The server may answer, and still refuse that.
        return self.run.claim_failure()

    def scale(self, queue: str, query: str) -> tuple[int, dict[str, Any]]:
        """Return a status, and the figures of a queue or an error."""
        try:
            window = window_of(query)
            if queue not in self._queues:
                names = ", ".join(map(repr, self._queues)) or "none"
                return 404, _error(f"this worker does not handle queue {queue!r}, only {names}")
            if reason := self._pause():
                return 503, _error(reason)
            assert self.run is not None
            return 200, self._ask(self.run.scale(queue, window))
        except (DelayqError, TimeoutError) as error:
            return _failure(error)

    def _pause(self) -> str:
        """Return why no messages are claimed; "" if they are."""
        if self._stop.requested.is_set():
            return "the worker is stopping"
        is_claiming = self.run is not None and self.run.is_claiming
        return "" if is_claiming else "the worker is starting"

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Return the answer of the event loop. Raises TimeoutError if there is none."""
        try:
            future = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:
            # The loop was closed.
            question.close()
            raise TimeoutError from error
        try:
            return future.result(_ANSWERS_WITHIN)
        except CancelledError as error:
            raise TimeoutError from error
        finally:
            with suppress(RuntimeError):
                future.cancel()


def _failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the content with which a question about figures fails."""
    match error:
        case BadInput():
            return 400, _error(str(error))
        case ServerRefused():
            hint = "the worker's user needs the rights of `delayq acl dashboard` as well"
            return 502, _error(f"the server refuses to count the messages: {error}; {hint}")
        case DelayqError():
            return 503, _error(f"the server does not answer: {error}")
        case _:
            return 503, _error("the event loop does not answer")


def _error(text: str) -> dict[str, Any]:
    return {"error": text}
