"""Calls that are made at about the same time share a round trip."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from delayq._background import Background
from delayq._redis import together
from delayq._redis.scripts import Request, Script
from delayq._redis.together import Together
from delayq.errors import ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayq._redis.client import RedisClient

SCRIPT = Script("reliable/register")


class Servers:
    """Servers that answer with the keys of each call: that of a key is its first letter."""

    def __init__(self) -> None:
        self.trips: list[list[str]] = []
        self.error: BaseException | None = None

        self.topology = self

    def of(self, key: str) -> str:
        if key.startswith("?"):
            raise ServerUnavailable("unknown")
        return key[0]

    async def run_all(self, _client: object, _script: Script, calls: Sequence[Any]) -> list[Any]:
        self.trips.append([keys[0] for keys, _ in calls])
        if self.error is not None:
            raise self.error
        return [ServerRefused("no") if keys[0] == "a!" else keys[0].upper() for keys, _ in calls]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(together, "run_all", servers.run_all)
    return servers


@pytest.fixture
async def calls(servers: Servers) -> AsyncIterator[Together]:
    background = Background()
    yield Together(cast("RedisClient", servers), background)
    await background.aclose()


async def run(calls: Together, *keys: str) -> list[Any]:
    requests = (Request(SCRIPT, [key], []) for key in keys)
    return await asyncio.gather(*map(calls.run, requests), return_exceptions=True)


async def test_calls_share_a_round_trip_to_each_server(servers: Servers, calls: Together) -> None:
    assert await run(calls, "a1", "b1", "a2", "?") == ["A1", "B1", "A2", "?"]
    assert servers.trips == [["a1", "a2"], ["b1"], ["?"]]
    refused, done = await run(calls, "a!", "a1")
    assert isinstance(refused, ServerRefused)
    assert done == "A1"
    # An error that nobody expects reaches each of them.
    servers.error = RuntimeError("a bug")
    assert [str(error) for error in await run(calls, "a1", "a2")] == ["a bug", "a bug"]
    servers.error = None
    assert await run(calls, "a1") == ["A1"]


async def test_a_caller_that_is_cancelled_leaves_the_others_alone(calls: Together) -> None:
    one, other = (asyncio.create_task(run(calls, key)) for key in ("a1", "a2"))
    await asyncio.sleep(0)
    one.cancel()
    assert await other == ["A2"]
