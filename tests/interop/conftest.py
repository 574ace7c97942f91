"""Redisson and the servers for the live tests."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, NoReturn

import pytest

import delayq
from tests.conftest import _USED, FOUND
from tests.interop import redis32, report
from tests.interop.redisson import Redisson, build, missing_tools
from tests.interop.settings import CURRENT, OLDER, Setting
from tests.servers import Kind, PrivateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

REQUIRED = "DELAYQ_REQUIRE_REDISSON"


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
            # Never required: few machines can have it.
            _skip(f"no server of 32 bits, whose records are shorter: {error}")
    if not FOUND:
        _unavailable("no server found on this machine")
    name = next(iter(FOUND))
    _USED.add(name)
    return FOUND[name]


@pytest.fixture(scope="session", params=[*CURRENT, *OLDER], ids=str)
def redisson(request: pytest.FixtureRequest) -> Iterator[Redisson]:
    """A Redisson with its server. There is one at a time: pytest runs together what uses the same."""
    setting: Setting = request.param
    if reason := missing_tools():
        _unavailable(reason)
    with PrivateServer(_kind(setting.bits), tcp=True) as server:
        try:
            build(setting.release)
            redisson = Redisson(setting.release, server)
        except RuntimeError as error:
            _unavailable(str(error))
        report.RAN[str(redisson)] = None
        yield redisson
        redisson.close()


@pytest.fixture
def server(redisson: Redisson) -> PrivateServer:
    """The server that both sides use, without data."""
    redisson.server.start()
    redisson.server.flush()
    return redisson.server


@pytest.fixture
def name() -> str:
    """A queue of this test alone: a Java take that a failed test left waiting takes nothing of the next."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    # Nothing here may depend on the re-check.
    async with delayq.connect(server.url, resync_interval=60) as client:
        yield client
