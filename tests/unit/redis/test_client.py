"""How long a call takes at most."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import delayq
from delayq._redis.client import RedisClient
from delayq._redis.topology import Topology

if TYPE_CHECKING:
    from typing import Never


class Unknown(Topology):
    """Servers that nobody can find."""

    spread = True

    async def refresh(self) -> Never:
        await asyncio.Event().wait()
        raise AssertionError

    async def find_pool(self, key: str | None) -> Never:
        del key
        await self.refresh()

    async def candidates(self) -> Never:
        await self.refresh()


async def test_a_call_that_is_retried_for_less_time_gives_up_finding_a_server_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq._redis.client._SHORTEST_TRY", 0.01)
    client = RedisClient(Unknown(), retry_for=0)
    for call in (client.open(), client.command("GET", "key"), client.everywhere("INFO")):
        with pytest.raises(delayq.ServerUnavailable, match="find out in time"):
            await asyncio.wait_for(call, 60)
