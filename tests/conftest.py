"""Fixtures for the whole suite, and a prominent summary of the servers and the Redisson releases that it ran against."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import loops
from tests.faults import report as storms
from tests.interop import report
from tests.servers import KINDS, PrivateServer, find_kinds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

# A slow example on a busy machine is not a failure.
settings.register_profile("delayq", deadline=None)
settings.load_profile("delayq")

REQUIRED = "DELAYQ_REQUIRE_SERVERS"
# Each process runs its own servers, and sometimes Java as well.
MOST_PROCESSES = 8

FOUND, MISSING = find_kinds()
_USED: set[str] = set()
_NONE = pytest.param("none", marks=pytest.mark.skip(reason="no server found on this machine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--event-loop", choices=[*loops.FACTORIES], default="asyncio", help="the event loop of all async tests; default: asyncio"
    )


def pytest_configure() -> None:
    required = {name.strip() for name in os.environ.get(REQUIRED, "").split(",")} - {""}
    if unknown := required - set(KINDS):
        raise pytest.UsageError(f"{REQUIRED} names {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if absent := required & set(MISSING):
        reasons = "; ".join(f"{name}: {MISSING[name]}" for name in sorted(absent))
        raise pytest.UsageError(f"{REQUIRED}: a server is missing: {reasons}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the process count for ``-n auto``: one more than there are processors, as the tests wait half of the time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(processors + 1, MOST_PROCESSES)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # With several test processes, only the one that started them reports the servers that all of them used.
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["used"], output["interop"], output["storms"] = sorted(_USED), report.told(), dict(storms.COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A process that crashed has reported nothing.
    output = getattr(node, "workeroutput", {})
    if "used" in output:
        _USED.update(output["used"])
        report.hear(output["interop"])
        storms.COUNTS.update(output["storms"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    def names(kinds: list[str]) -> str:
        return ", ".join(f"{name} {FOUND[name].version}" for name in kinds) or "none"

    parts = [f"servers: {names([name for name in FOUND if name in _USED])}"]
    if unused := [name for name in FOUND if name not in _USED]:
        parts.append(f"not needed: {names(unused)}")
    if MISSING:
        parts.append("NOT RUN: " + ", ".join(f"{name} ({reason})" for name, reason in MISSING.items()))
    terminalreporter.write_line("; ".join(parts), bold=True, yellow=bool(MISSING), green=not MISSING)
    if report.NOT_RUN:
        terminalreporter.write_line("REDISSON NOT RUN: " + "; ".join(sorted(report.NOT_RUN)), bold=True, yellow=True)
    for line in (*report.lines(), *storms.lines()):
        terminalreporter.write_line(line, bold=True, green=True)


@pytest.fixture(scope="session")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": loops.FACTORIES[request.config.getoption("event_loop")]}


@pytest.fixture(scope="session")
def _session_server() -> Iterator[Callable[[str], PrivateServer]]:
    """Start one server of each kind for the session, when the first test asks for it."""
    servers: dict[str, PrivateServer] = {}

    def get(name: str) -> PrivateServer:
        _USED.add(name)
        if name not in servers:
            servers[name] = PrivateServer(FOUND[name])
        return servers[name]

    yield get
    for server in servers.values():
        server.close()


@pytest.fixture(params=[*FOUND] if FOUND else [_NONE])
def server(request: pytest.FixtureRequest, _session_server: Callable[[str], PrivateServer]) -> PrivateServer:
    """Return a server without data. The test runs once on each kind found."""
    server = _session_server(request.param)
    if server.is_running():
        server.resume()  # in case the previous test did not
    server.start()
    server.flush()
    return server


@pytest.fixture
def own_server() -> Iterator[PrivateServer]:
    """Return a server of the first kind found for this test alone, to pause and to kill. Data it has confirmed survives."""
    if not FOUND:
        pytest.skip("no server found on this machine")
    name = next(iter(FOUND))
    _USED.add(name)
    # Not ``everysec``: while such a sync is under way, which takes long on a busy disk, changes that the server has confirmed
    # are in memory only.
    with PrivateServer(FOUND[name], appendonly="always") as server:
        yield server


def _tasks() -> set[asyncio.Task[object]]:
    # anyio's runner drives each test and each fixture in a task of its own.
    return {t for t in asyncio.all_tasks() if not getattr(t.get_coro(), "__qualname__", "").startswith("TestRunner.")}


@pytest.fixture
async def _tasks_end() -> AsyncIterator[None]:
    before = _tasks()
    yield
    left = _tasks() - before
    if left:
        # Give tasks that were cancelled, or that only have to return, time to end.
        _, left = await asyncio.wait(left, timeout=1.0)
    for task in left:
        task.cancel()
    if left:
        pytest.fail("tasks left behind: " + ", ".join(f"{task.get_name()} {task.get_coro()}" for task in left))


@pytest.fixture(autouse=True)
def _no_task_is_left_behind(request: pytest.FixtureRequest) -> None:
    """Fail an async test that leaves tasks behind. Set up first, so that it checks after the other fixtures have ended."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_tasks_end")
