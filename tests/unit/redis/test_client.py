"""Which server of a cluster a call goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from delayq._redis import server_info
from delayq._redis.client import RedisClient
from delayq._redis.scripts import Script
from delayq.errors import OutcomeUnknown, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Topology:
    """A cluster that notes which server it is asked for, and fails each try of a call."""

    spread = True

    def __init__(self, *errors: Exception) -> None:
        self.asked: list[str] = []
        self._errors = iter(errors)

    async def find(self, key: str) -> Any:
        self.asked.append(key)
        raise next(self._errors, ServerRefused("no server"))

    async def any(self) -> Any:
        await self.find("any server")


CALLS: list[tuple[Callable[[RedisClient], Awaitable[Any]], str]] = [
    (lambda client: client.command("ZCARD", "orders"), "orders"),
    (lambda client: client.command("COMMAND", "INFO", "ping", key="orders"), "orders"),
    (lambda client: client.command("COMMAND", "INFO", "ping", key=""), ""),
    (lambda client: client.time_us("orders"), "orders"),
    (lambda client: client.time_us(), "any server"),
    (lambda client: client.anywhere("PING"), "any server"),
    (server_info.user, "any server"),
]


async def test_a_call_goes_to_the_server_of_its_key_or_to_any_if_it_has_none() -> None:
    topology = Topology()
    for call, _ in CALLS:
        with pytest.raises(ServerRefused):
            await call(RedisClient(cast("Any", topology)))
    assert topology.asked == [asked for _, asked in CALLS]


async def test_a_refused_repetition_does_not_hide_that_an_earlier_try_may_have_worked() -> None:
    for script in ("reliable/offer", "reliable/cancel"):
        lost, refused = OutcomeUnknown("the reply was lost"), ServerRefused("no permission")
        client = RedisClient(cast("Any", Topology(lost, refused)))
        with pytest.raises(OutcomeUnknown):
            await client.run(Script(script), ["jobs"])
