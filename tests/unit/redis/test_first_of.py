"""The first answer of several servers counts; time spent on one does not delay the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from delayq import ServerError, ServerRefused, ServerUnavailable
from delayq._redis import retry as module
from delayq._redis.retry import first_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Attempt = tuple[str, Callable[[], Coroutine[None, None, str]]]


class Servers:
    """Servers that behave as a test demands, and record the order in which they were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    def answers(self, name: str, error: Exception | None = None) -> Attempt:
        async def attempt() -> str:
            self.asked.append(name)
            if error:
                raise error
            return name

        return name, attempt

    def hangs(self, name: str) -> Attempt:
        gate = self.gates[name] = asyncio.Event()

        async def attempt() -> str:
            self.asked.append(name)
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return name

        return name, attempt


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setattr(module, "ASK_NEXT_AFTER", 0.01)
    return Servers()


async def test_a_server_that_was_slow_may_answer_first(
    servers: Servers,
) -> None:
    for names in ("a", "ab"):
        servers.asked.clear()
        unused: list[str] = []
        attempts = [servers.hangs("a"), servers.hangs("b")]
        asking = asyncio.create_task(first_of("all", attempts, unused.append))
        await until(lambda: len(servers.asked) == 2)
        for name in names:
            servers.gates[name].set()
        answer = await asking
        await asyncio.sleep(0)
        assert {answer, *unused} == {*names}


async def test_a_call_is_refused_only_if_every_server_refuses(servers: Servers) -> None:
    for kind in (ServerRefused, ServerUnavailable):
        attempts = [servers.answers("a", ServerRefused("no")), servers.answers("b", kind("never"))]
        with pytest.raises(ServerError, match="all: no; never") as caught:
            await first_of("all", attempts)
        assert type(caught.value) is kind


async def test_a_caller_that_is_cancelled_leaves_nothing_behind(servers: Servers) -> None:
    asking = asyncio.create_task(first_of("all", [servers.hangs("a")]))
    await until(lambda: servers.asked)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert servers.cancelled == ["a"]
