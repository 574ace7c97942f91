"""Which server of a cluster a call goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from delayq._redis import server_info
from delayq._redis.client import RedisClient
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Topology:
    """A cluster that notes which server it is asked for, and has none."""

    spread = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def find(self, key: str) -> Any:
        self.asked.append(key)
        raise ServerRefused("no server")

    async def any(self) -> Any:
        self.asked.append("any server")
        raise ServerRefused("no server")


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (lambda client: client.command("ZCARD", "orders"), "orders"),
        (lambda client: client.command("COMMAND", "INFO", "ping", key="orders"), "orders"),
        (lambda client: client.command("COMMAND", "INFO", "ping", key=""), ""),
        (lambda client: client.time_us("orders"), "orders"),
        (lambda client: client.time_us(), "any server"),
        (lambda client: client.anywhere("PING"), "any server"),
        (server_info.user, "any server"),
    ],
    ids=["first argument", "key", "empty key", "time of", "time", "anywhere", "user"],
)
async def test_a_call_goes_to_the_server_of_its_key_or_to_any_if_it_has_none(
    call: Callable[[RedisClient], Awaitable[Any]], asked: str
) -> None:
    topology = Topology()
    with pytest.raises(ServerRefused):
        await call(RedisClient(cast("Any", topology)))
    assert topology.asked == [asked]
