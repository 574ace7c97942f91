"""Redisson for the live tests, and a loud word at the end on whether they ran."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest

import delayq
from tests.conftest import _USED, FOUND
from tests.interop import report
from tests.interop.redisson import VERSIONS, Redisson, build, missing_tools
from tests.servers import PrivateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

REQUIRED = "DELAYQ_REQUIRE_REDISSON"


def _unavailable(reason: str) -> None:
    report.NOT_RUN.add(reason)
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but: {reason}", pytrace=False)
    pytest.skip(f"not run against Redisson: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if report.NOT_RUN:
        terminalreporter.write_line("REDISSON NOT RUN: " + "; ".join(sorted(report.NOT_RUN)), bold=True, yellow=True)
    for line in report.lines():
        terminalreporter.write_line(line, bold=True, green=True)


@pytest.fixture(scope="session")
def _interop_server() -> Iterator[PrivateServer]:
    # Redisson knows no Unix sockets.
    if not FOUND:
        _unavailable("no server found on this machine")
    name = next(iter(FOUND))
    _USED.add(name)
    with PrivateServer(FOUND[name], tcp=True) as server:
        yield server


@pytest.fixture
def server(_interop_server: PrivateServer) -> PrivateServer:
    """The server that both sides use, without data: of the first kind found."""
    _interop_server.start()
    _interop_server.flush()
    return _interop_server


@pytest.fixture(scope="session")
def _start(_interop_server: PrivateServer) -> Iterator[Callable[[str], Redisson]]:
    """Start one Redisson of each version for the session, when the first test asks for it."""
    running: dict[str, Redisson] = {}
    failed: dict[str, str] = {}

    def get(version: str) -> Redisson:
        if reason := missing_tools() or failed.get(version):
            _unavailable(reason)
        if version not in running:
            try:
                build(version)
            except RuntimeError as error:
                failed[version] = str(error)
                _unavailable(str(error))
            running[version] = Redisson(version, _interop_server.url.removesuffix("/0"))
            report.RAN[version] = f"{_interop_server.kind.name} {_interop_server.version}"
        return running[version]

    yield get
    for redisson in running.values():
        redisson.close()


@pytest.fixture(params=VERSIONS)
def redisson(request: pytest.FixtureRequest, _start: Callable[[str], Redisson]) -> Redisson:
    """Redisson, with records in the current form and in the old one."""
    return _start(request.param)


@pytest.fixture
def current(_start: Callable[[str], Redisson]) -> Redisson:
    """The current Redisson, which reads what we write."""
    return _start(VERSIONS[0])


@pytest.fixture
def old(_start: Callable[[str], Redisson]) -> Redisson:
    """A Redisson that can neither write nor read the current records."""
    return _start(VERSIONS[1])


@pytest.fixture
def name() -> str:
    """A queue of this test alone: a Java take that a failed test left waiting takes nothing of the next."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    # Nothing here may depend on the re-check.
    async with delayq.connect(server.url, resync_interval=60) as client:
        yield client
