"""Fixtures for the live tests: Redisson and the servers."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import delayq
from tests.conftest import _USED, FOUND
from tests.interop import redis32, report
from tests.interop.live import Live
from tests.interop.redisson import Redisson, Release, build, missing_tools
from tests.interop.settings import CURRENT, OLDER, Setting
from tests.support.clusters import TestCluster
from tests.support.servers import Kind, PrivateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

REQUIRED = "DELAYQ_REQUIRE_REDISSON"


@pytest.fixture(autouse=True)
def _never_in_haste(_patient: None) -> None:
    """Let a pause of the machine fail no test. One that is about giving up sets its own limits."""


def _skip(reason: str) -> NoReturn:
    report.NOT_RUN.add(reason)
    pytest.skip(f"not run against Redisson: {reason}")


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get(REQUIRED) == "1":
        report.NOT_RUN.add(reason)
        pytest.fail(f"{REQUIRED}=1, but: {reason}", pytrace=False)
    _skip(reason)


def _kind(bits: int) -> Kind:
    if bits == 32:
        try:
            return redis32.fetch()
        except RuntimeError as error:
            # Never required, because few machines can have it.
            _skip(f"no server of 32 bits, whose records are shorter: {error}")
    if not FOUND:
        _unavailable("no server found on this machine")
    name = next(iter(FOUND))
    _USED.add(name)
    return FOUND[name]


def built(release: Release) -> list[Path]:
    """Build a release, and return its class path. If that is impossible, skip or fail."""
    if reason := missing_tools():
        _unavailable(reason)
    try:
        return build(release)
    except RuntimeError as error:
        _unavailable(str(error))


def _start(release: Release, server: PrivateServer, **options: Any) -> Redisson:
    built(release)
    try:
        return Redisson(release, server, **options)
    except RuntimeError as error:
        _unavailable(str(error))


@pytest.fixture(scope="session", params=[*CURRENT, *OLDER], ids=str)
def redisson(request: pytest.FixtureRequest) -> Iterator[Redisson]:
    """Return a Redisson with its server. pytest groups the tests that use the same one."""
    setting: Setting = request.param
    with PrivateServer(_kind(setting.bits), tcp=True) as server:
        redisson = _start(setting.release, server)
        report.RAN[str(redisson)] = None
        yield redisson
        redisson.close()


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    """Return a cluster of three masters that share the slots."""
    with TestCluster(_kind(64)) as cluster:
        yield cluster


@pytest.fixture
def redisson_of_cluster(cluster: TestCluster) -> Iterator[Redisson]:
    """Return a Redisson in cluster mode."""
    redisson = _start(CURRENT[0].release, cluster.nodes[0], nodes=cluster.nodes)
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
