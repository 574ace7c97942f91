"""Fixtures for pytest.

To use them, put ``pytest_plugins = ["delayq.testing.pytest_plugin"]`` in your ``conftest.py``.

``delayq_client``: a client on a private server, which starts once per session and is empty for each
test. ``delayq_clock``: the :class:`~delayq.testing.Clock` of that client. ``delayq_server``: that
server, for a program that makes its own client: ``delayq_server.url``. It is not emptied for a test
that uses only this fixture.

They work with anyio's plugin and with pytest-asyncio, even side by side, in any mode.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from delayq._embedded.server import EmbeddedServer
from delayq.testing.time_travel import Clock, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from delayq.client import Client


@pytest.fixture(scope="session")
def delayq_server() -> Iterator[EmbeddedServer]:
    """Provide a private server, started once per session."""
    with EmbeddedServer(None) as server:
        yield server


async def _client(delayq_server: EmbeddedServer) -> AsyncIterator[Client]:
    async with running(delayq_server) as client:
        yield client


# The plugin that runs the test must run the fixture, which is certain only for its own kind.
@pytest.fixture
async def _delayq_client_by_anyio(
    delayq_server: EmbeddedServer,
    anyio_backend: Any,  # noqa: ARG001
) -> AsyncIterator[Client]:
    async with running(delayq_server) as client:
        yield client


if importlib.util.find_spec("pytest_asyncio") is not None:
    _delayq_client_by_pytest_asyncio = importlib.import_module("pytest_asyncio").fixture(_client)


@pytest.fixture
def delayq_client(request: pytest.FixtureRequest) -> Client:
    """Provide a client on a private, empty server."""
    if "anyio_backend" in request.fixturenames:
        return request.getfixturevalue("_delayq_client_by_anyio")  # type: ignore[no-any-return]
    if request.config.pluginmanager.hasplugin("asyncio"):
        return request.getfixturevalue("_delayq_client_by_pytest_asyncio")  # type: ignore[no-any-return]
    raise pytest.UsageError(
        "delayq_client works only in async tests: mark the test with pytest.mark.anyio, or install"
        " pytest-asyncio"
    )


@pytest.fixture
def delayq_clock(delayq_client: Client) -> Clock:
    """Provide the clock of ``delayq_client``."""
    return Clock(delayq_client)
