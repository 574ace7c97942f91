"""Fixtures for the whole suite, and a prominent summary of the servers and the Redisson releases
that it ran against.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.faults import report as storms
from tests.interop import report
from tests.support import disturbed
from tests.support.servers import KINDS, Kind, PrivateServer, find_kinds, memory_disk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

# A slow example on a busy machine is not a failure. The option --hypothesis-profile chooses another
# than this one.
QUICK = "quick"
settings.register_profile(QUICK, deadline=None, derandomize=True, max_examples=100)
settings.register_profile("brief", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=1_000)
settings.register_profile("fuzz", deadline=None, derandomize=False, max_examples=2_000)
settings.load_profile(QUICK)


def _eager() -> asyncio.AbstractEventLoop:
    """Make a loop whose tasks run at once until they first wait. Needs Python 3.12 or later."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    return loop


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


EVENT_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "eager": _eager,
    "uvloop": _uvloop,
}
"""The factories, by the name that ``pytest --event-loop`` takes."""

REQUIRED = "DELAYQ_REQUIRE_SERVERS"
LATER = {
    "gate": "programs in processes of their own, and others that take long: bash .ci/run",
    "java": "Redisson itself: bash .ci/run",
    "browser": "a browser: bash .ci/run",
    "nightly": "trials at full length: make nightly",
    "storm": "storms: make nightly",
}
"""The marks of tests that `make test` leaves out, and where they run."""

# Each process runs its own servers, and sometimes Java as well.
MOST_PROCESSES = 8

FOUND, MISSING = find_kinds()
"""The servers of this run, and why others are missing. ``--servers`` narrows what is found."""
_LEFT_OUT: dict[str, Kind] = {}
_DESELECTED: Counter[str] = Counter()
_SHOWN: set[pytest.Item] = set()
"""What a run on the first server shows, if that is left out."""
_USED: set[str] = set()
_NONE = pytest.param("none", marks=pytest.mark.skip(reason="no server found on this machine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--event-loop",
        choices=[*EVENT_LOOPS],
        default="asyncio",
        help="the event loop of all async tests; default: asyncio",
    )
    parser.addoption(
        "--servers",
        default="first",
        help=(
            "the servers to run on: first (the first one found), all, or a list of"
            f" {', '.join(KINDS)}; default: first"
        ),
    )
    parser.addoption(
        "--beyond-first",
        action="store_true",
        help="leave out what a run on the first server alone shows",
    )


def pytest_configure(config: pytest.Config) -> None:
    _choose_servers(config.getoption("servers"))
    required = {name.strip() for name in os.environ.get(REQUIRED, "").split(",")} - {""}
    if unknown := required - set(KINDS):
        raise pytest.UsageError(
            f"{REQUIRED} names {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    if absent := required & set(MISSING):
        reasons = "; ".join(f"{name}: {MISSING[name]}" for name in sorted(absent))
        raise pytest.UsageError(f"{REQUIRED}: a server is missing: {reasons}")
    disturbed.register(config)


def _choose_servers(choice: str) -> None:
    """Leave in FOUND the servers that this run may use."""
    either = {"first": [*FOUND][:1], "all": [*FOUND]}
    names = either[choice] if choice in either else choice.split(",")
    if unknown := set(names) - set(KINDS):
        raise pytest.UsageError(
            f"--servers names {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    if absent := set(names) & set(MISSING):
        reasons = "; ".join(f"{name}: {MISSING[name]}" for name in sorted(absent))
        raise pytest.UsageError(f"--servers: not found: {reasons}")
    for name in [*FOUND]:
        if name not in names:
            _LEFT_OUT[name] = FOUND.pop(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on the first server that can be used, or on each of them if it is marked
    ``every_server``.
    """
    # Redis 6.2 has no ADDSLOTSRANGE and no --cluster-port, and its clusters reply like those of
    # Redis 7.
    kinds = {
        "server_kind": [*FOUND],
        "cluster_kind": [name for name in FOUND if name != "redis-6.2"],
    }
    for fixture, names in kinds.items():
        if fixture in metafunc.fixturenames:
            chosen = names if metafunc.definition.get_closest_marker("every_server") else names[:1]
            metafunc.parametrize(fixture, chosen or [_NONE], indirect=True)


@pytest.hookimpl(trylast=True)  # Hypothesis sets its mark in this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Thousands of examples take a slow machine long.
        if item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.timeout(3600))
    if config.getoption("beyond_first"):
        _SHOWN.update(item for item in items if _runs_on_the_first_server(item))
        config.hook.pytest_deselected(items=[*_SHOWN])
        items[:] = [item for item in items if item not in _SHOWN]


def _runs_on_the_first_server(item: pytest.Item) -> bool:
    """Return whether a run on the first server shows what a test shows."""
    if item.get_closest_marker("java") or item.get_closest_marker("browser"):
        return False
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    first = next(iter(FOUND), None)
    return all(
        parameters[fixture] == first
        for fixture in ("server_kind", "cluster_kind")
        if fixture in parameters
    )


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items and items[0].config.getoption("keyword"):
        # Left out by choice.
        return
    for item in items:
        names = [name for name in LATER if item.get_closest_marker(name)]
        if names and item not in _SHOWN:
            # A test of two rings runs in the last one.
            _DESELECTED[names[-1]] += 1


class _Failures:
    """Names each failed test at once: a run that is ended from outside prints no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
            self._terminal.write_line(f"\n{report.nodeid} ({report.when}): {why}", red=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):
        session.config.pluginmanager.register(_Failures(terminal))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the process count for ``-n auto``: two for each processor, as the tests wait for more
    than half of the time.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(2 * processors, MOST_PROCESSES)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # With several test processes, only the one that started them reports the servers that all of
    # them used.
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output |= {"used": sorted(_USED), "interop": report.told()}
        output |= {"storms": dict(storms.COUNTS), "deselected": dict(_DESELECTED)}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A process that crashed has reported nothing.
    output = getattr(node, "workeroutput", {})
    if "used" in output:
        _USED.update(output["used"])
        report.hear(output["interop"])
        storms.COUNTS.update(output["storms"])
        # Each process collects all tests.
        _DESELECTED.update(Counter(output["deselected"]) - _DESELECTED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    def names(kinds: Iterable[Kind]) -> str:
        return ", ".join(f"{kind.name} {kind.version}" for kind in kinds) or "none"

    used = (kind for name, kind in (FOUND | _LEFT_OUT).items() if name in _USED)
    unused = [kind for name, kind in FOUND.items() if name not in _USED]
    absent = ", ".join(f"{name} ({reason})" for name, reason in MISSING.items())
    line = f"servers: {names(used)}"
    line += f"; not needed: {names(unused)}" if unused else ""
    line += f"; NOT RUN: {absent}" if absent else ""
    terminalreporter.write_line(line, bold=True, yellow=bool(MISSING), green=not MISSING)
    left_out = [f"other servers ({names(_LEFT_OUT.values())}): bash .ci/run"] if _LEFT_OUT else []
    left_out += [f"{count} tests of {LATER[name]}" for name, count in _DESELECTED.items()]
    for line in left_out:
        terminalreporter.write_line(f"LEFT OUT, {line}", bold=True, yellow=True)
    if report.NOT_RUN:
        terminalreporter.write_line(
            "REDISSON NOT RUN: " + "; ".join(sorted(report.NOT_RUN)), bold=True, yellow=True
        )
    for line in (*report.lines(), *storms.lines()):
        terminalreporter.write_line(line, bold=True, green=True)


@pytest.fixture
def _patient() -> Iterator[None]:
    """Let calls, openings and closings wait for a minute or more.

    A pause of the machine then exceeds none of these limits, and whatever waits in vain is noticed.
    They keep their order: an opening reports its reasons before the call gives up, and what is
    given back before the close does. A silent connection is doubted as soon as ever.
    """
    # A patch of its own, so that a test can undo all of its patches and keep these.
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in {
            "_redis.retry.FIRST_WITHIN": 54,
            "_redis.connection.GIVE_UP_AFTER": 60,
            "_redis.client.GIVE_UP_AFTER": 60,
            "_redis.client.RETRY_FOR": 60,
            "_engine.leases.RETRY_FOR": 60,
            "_redis.pool.OPEN_TIMEOUT": 60,
            "_redis.return_calls._LONGEST_EXTENSION": 60,
            "_engine.dispatcher.NOWAIT_TIMEOUT": 60,
            "_engine.scheduler._CLOSE_WITHIN": 90,
        }.items():
            patch.setattr(f"delayq.{name}", limit)
        yield


@pytest.fixture(scope="session")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": EVENT_LOOPS[request.config.getoption("event_loop")]}


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


@pytest.fixture(scope="session")
def server_kind(request: pytest.FixtureRequest) -> Kind:
    """Return the kind of server that the test runs on."""
    _USED.add(request.param)
    return FOUND[request.param]


@pytest.fixture(scope="session")
def cluster_kind(request: pytest.FixtureRequest) -> Kind:
    """Return the kind of server that the test's cluster consists of."""
    _USED.add(request.param)
    return FOUND[request.param]


@pytest.fixture(scope="session")
def tls_kind() -> Kind:
    """Return the kind of server that supports TLS, whatever ``--servers`` says: those from wheels
    do not.
    """
    if "redis-7" in MISSING or shutil.which("openssl") is None:
        pytest.skip(f"TLS NOT TESTED: {MISSING.get('redis-7', 'no openssl program')}")
    _USED.add("redis-7")
    return (FOUND | _LEFT_OUT)["redis-7"]


@pytest.fixture
def server(server_kind: Kind, _session_server: Callable[[str], PrivateServer]) -> PrivateServer:
    """Return a server without data."""
    server = _session_server(server_kind.name)
    if server.is_running():
        server.resume()  # in case the previous test did not
    server.start()
    server.flush()
    return server


@pytest.fixture
def own_server(server_kind: Kind) -> Iterator[PrivateServer]:
    """Return a server for this test alone, to pause and to kill. Data it has confirmed survives."""
    # Not ``everysec``: while such a sync is under way, which takes long on a busy disk, changes
    # that the server has confirmed are in memory only.
    with PrivateServer(server_kind, appendonly="always", within=memory_disk()) as server:
        yield server


def _tasks() -> set[asyncio.Task[object]]:
    # anyio's runner drives each test and each fixture in a task of its own.
    return {
        t
        for t in asyncio.all_tasks()
        if not getattr(t.get_coro(), "__qualname__", "").startswith("TestRunner.")
    }


@pytest.fixture
async def _tasks_end() -> AsyncIterator[None]:
    before = _tasks()
    yield
    left = _tasks() - before
    if left:
        # Give tasks that were cancelled, or that only have to return, time to end.
        _, left = await asyncio.wait(left, timeout=20)
    for task in left:
        task.cancel()
    if left:
        named = ", ".join(f"{task.get_name()} {task.get_coro()}" for task in left)
        pytest.fail(f"tasks left behind: {named}")


@pytest.fixture(autouse=True)
def _no_task_is_left_behind(request: pytest.FixtureRequest) -> None:
    """Fail an async test that leaves tasks behind.

    Set up first, so that it checks after the other fixtures have ended.
    """
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_tasks_end")
