"""Fixtures for the live tests: Redisson and the servers."""

from __future__ import annotations

import os
import subprocess
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import delayq
from tests.conftest import _USED, FOUND
from tests.interop import report
from tests.interop.live import Live
from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD, Redisson, Release, build
from tests.support.clusters import TestCluster
from tests.support.servers import Kind, PrivateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

REQUIRED = "DELAYQ_REQUIRE_REDISSON"


@pytest.fixture(autouse=True)
def _never_in_haste(_patient: None) -> None:
    """Let a pause of the machine fail no test. One that is about giving up sets its own limits."""


def _unavailable(reason: str) -> NoReturn:
    report.NOT_RUN.add(reason)
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but: {reason}", pytrace=False)
    pytest.skip(f"not run against Redisson: {reason}")


def _kind() -> Kind:
    if not FOUND:
        _unavailable("no server found on this machine")
    name = next(iter(FOUND))
    _USED.add(name)
    return FOUND[name]


def built(release: Release) -> list[Path]:
    """Build a release, and return its class path. If that is impossible, skip or fail."""
    try:
        return build(release)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        _unavailable(str(error))


def _start(release: Release, server: PrivateServer, **options: Any) -> Redisson:
    built(release)
    try:
        return Redisson(release, server, **options)
    except RuntimeError as error:
        _unavailable(str(error))


@pytest.fixture(scope="session", params=[NEWEST_4, NEWEST_3, OLD], ids=str)
def redisson(request: pytest.FixtureRequest) -> Iterator[Redisson]:
    """Return a Redisson with its server. pytest groups the tests that use the same one."""
    with PrivateServer(_kind(), tcp=True) as server:
        redisson = _start(request.param, server)
        report.LINES[str(redisson)] = None
        yield redisson
        redisson.close()


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    """Return a cluster of three masters that share the slots."""
    with TestCluster(_kind()) as cluster:
        yield cluster


@pytest.fixture
def redisson_of_cluster(cluster: TestCluster) -> Iterator[Redisson]:
    """Return a Redisson in cluster mode."""
    redisson = _start(NEWEST_4, cluster.nodes[0], nodes=cluster.nodes)
    yield redisson
    redisson.close()


@pytest.fixture
def server(redisson: Redisson) -> PrivateServer:
    """Return the server that both sides use, without data."""
    redisson.server.start()
    redisson.server.flush()
    return redisson.server


@pytest.fixture
def name() -> str:
    """Return a queue name of this test alone: a take that is left waiting harms no other test."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    # Nothing here may depend on the re-check.
    async with delayq.connect(server.url, resync_interval=3600) as client:
        yield client


@pytest.fixture
def live(server: PrivateServer, client: delayq.Client, redisson: Redisson, name: str) -> Live:
    return Live(server, client, redisson, name)
