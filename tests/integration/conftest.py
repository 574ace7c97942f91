"""Fixtures for tests that need a client or a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

import delayq
from tests.support.clusters import TestCluster
from tests.support.reliable_fixtures import faults, jobs, store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from httpx import AsyncClient

    from tests.support.servers import Kind, PrivateServer

__all__ = ["faults", "jobs", "store"]


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    async with delayq.connect(server.url) as client:
        yield client


@pytest.fixture
async def raw(server: PrivateServer) -> AsyncIterator[Any]:
    """Return a client without delayq, to look at keys and to change them."""
    async with Redis.from_url(server.url, socket_timeout=60) as raw:
        yield raw


@pytest.fixture
def _usual_limits() -> None:
    """Give up when a user's client does, in a test that depends on it."""


@pytest.fixture(autouse=True)
def _no_loop_was_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process report that an event loop was blocked in an earlier test."""
    monkeypatch.setattr("delayq._reliable.process_report.PROCESS._blocking", None)


@pytest.fixture(autouse=True)
def _never_in_haste(request: pytest.FixtureRequest) -> None:
    """Let a pause of the machine fail no test that does not ask for ``_usual_limits``."""
    if "_usual_limits" not in request.fixturenames:
        request.getfixturevalue("_patient")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon on a server that does not answer."""
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.2)


@pytest.fixture
def _last_reports_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a client that closes the time to report what it did, however slow the machine is."""
    monkeypatch.setattr("delayq._engine.scheduler._GRACE", 7)


@pytest.fixture
def _workers_stay_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """List workers until they leave, even if they pause for far more than their intervals."""
    monkeypatch.setattr("delayq._reliable.reports._COUNTS", 12_000)


@pytest.fixture
def _full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let claims wait for every partition, also for one that takes a while to answer."""
    monkeypatch.setattr("delayq._engine.caller_queue.GATHER_WINDOW", 60.0)


@pytest.fixture(scope="module")
def _cluster(cluster_kind: Kind) -> Iterator[TestCluster]:
    with TestCluster(cluster_kind) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: TestCluster) -> TestCluster:
    """Return three masters without data."""
    for node in _cluster.nodes:
        node.flush()
    return _cluster


@pytest.fixture
async def queue(client: delayq.Client) -> delayq.DelayedQueue[int]:
    return client.delayed_queue("orders")


@pytest.fixture
async def reader(client: delayq.Client) -> AsyncIterator[AsyncClient]:
    """Return a browser without scripts, on a dashboard that only reads."""
    from tests.support.board import browse

    async with browse(delayq.dashboard(client)) as browser:
        yield browser


@pytest.fixture
async def admin(client: delayq.Client) -> AsyncIterator[AsyncClient]:
    """Return a browser without scripts that is logged in as an operator."""
    from tests.support.board import TOKEN, browse, log_in

    async with browse(delayq.dashboard(client, token=TOKEN)) as browser:
        await log_in(browser)
        yield browser
