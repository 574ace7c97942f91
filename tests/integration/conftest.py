"""Fixtures for tests that need a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import delayq

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import PrivateServer


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    async with delayq.connect(server.url) as client:
        yield client


@pytest.fixture
async def queue(client: delayq.Client) -> delayq.DelayedQueue[int]:
    return client.delayed_queue("orders")
