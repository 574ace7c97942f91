"""Fixtures and helpers for the tests of reliable queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from tests.integration.test_faults import Faults
from tests.support.reliable_store import HOUR, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, ReliableQueue
    from tests.support.servers import PrivateServer

__all__ = ["LEASE", "faults", "jobs", "raw", "store"]

# Longer than any test takes.
LEASE = HOUR


@pytest.fixture
async def raw(server: PrivateServer) -> AsyncIterator[Any]:
    async with Redis.from_url(server.url, socket_timeout=60) as connection:
        yield connection


@pytest.fixture
def store(raw: Any) -> Store:
    return Store(raw, "jobs")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[int]:
    return client.reliable_queue("jobs", lease=LEASE)
