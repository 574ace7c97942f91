"""The task and the timer that carry out a :class:`~delayq._engine.wakeup_plan.WakeupPlan`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from delayq._background import Background
from delayq._engine.context import EngineContext
from delayq._engine.server_clock import ServerClock
from delayq._engine.wakeup import WakeupLoop
from delayq._redis.topology import Topology
from delayq._timer.timer import HashedWheelTimer
from delayq.errors import ServerUnavailable, TimerFull
from delayq.testing import ManualLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq._engine.context import Channels


class Desk:
    """One queue's loop, in frozen time, with a server that replies when told."""

    def __init__(self) -> None:
        self.time = ManualLoop()
        self.timer = HashedWheelTimer(0.001, clock=self.time.time, loop=self.time)
        self.background = Background()
        clock = ServerClock(self.time.time)
        clock.observe(self.us(0), 0.0)
        unused: Any = None
        nodes: Any = Topology(unused)
        self.listens: list[Channels] = []
        context = EngineContext(
            unused,
            nodes,
            self.timer,
            clock,
            self.background,
            unused,
            5.0,
            60.0,
            listen=self.listens.append,
        )
        self.calls = self.in_flight = 0
        self.replies: asyncio.Queue[int | Exception] = asyncio.Queue()
        self.loop = WakeupLoop("orders", self._once, context, lambda: True)

    @staticmethod
    def us(second: float) -> int:
        """Return the server's time at that second, microseconds."""
        return 1_000_000_000_000 + int(second * 1_000_000)

    async def reply(self, *replies: int | Exception) -> None:
        for reply in replies:
            self.replies.put_nowait(reply)
        for _ in range(20):
            await asyncio.sleep(0)

    async def _once(self) -> int:
        self.calls += 1
        self.in_flight += 1
        assert self.in_flight == 1, "calls are made one at a time"
        try:
            reply = await self.replies.get()
        finally:
            self.in_flight -= 1
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    desk.loop.close()
    await desk.background.aclose()


async def test_a_call_knows_for_which_moment_its_timer_was_set(desk: Desk) -> None:
    desk.loop.on_due(desk.us(10))
    desk.time.advance(10.01)
    await desk.reply()
    assert desk.in_flight == 1
    assert desk.loop.timer_at == pytest.approx(10)
    desk.loop.wake()
    await desk.reply(-1)
    assert (desk.in_flight, desk.loop.timer_at) == (1, None), "no timer led to the second call"
    desk.loop.on_due(desk.us(20))
    desk.time.advance(10)
    await desk.reply(-1)
    assert (desk.in_flight, desk.loop.timer_at) == (1, None), "the third one had to wait"
    await desk.reply(-1)
    assert desk.in_flight == 0


async def test_closing_cancels_the_timer_and_keeps_the_call_in_flight(desk: Desk) -> None:
    desk.loop.on_due(desk.us(10))
    desk.loop.wake()
    await desk.reply()
    closing = asyncio.create_task(desk.loop.aclose(5))
    await desk.reply(0)
    await asyncio.wait_for(closing, 10)
    desk.loop.wake()
    assert (desk.calls, desk.timer.pending_timeouts) == (1, 0)


async def test_failures_in_a_row_are_one_line(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.loop.wake()
    await desk.reply(ServerUnavailable("away"))
    for _ in range(3):
        desk.time.advance(1)
        await desk.reply(ServerUnavailable("away"))
    assert desk.loop.errors == desk.calls == 4
    assert caplog.text.count("away") == 1
    desk.time.advance(1)
    await desk.reply(-1)
    desk.loop.wake()
    await desk.reply(RuntimeError("broken"))
    assert "broken" in caplog.text


async def test_a_timer_that_could_not_be_set_does_not_stand_in_for_a_later_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise TimerFull("no more timers")

    with monkeypatch.context() as without_room:
        without_room.setattr(desk.timer, "new_timeout", refuse)
        with pytest.raises(TimerFull):
            desk.loop.on_due(desk.us(10))
        desk.loop.on_caller_joined()
        await desk.reply(desk.us(10))
    assert "no more timers" in caplog.text
    desk.loop.on_due(desk.us(20))
    assert desk.timer.pending_timeouts == 1
    desk.loop.on_caller_joined()
    await desk.reply(desk.us(10))
    assert (desk.calls, desk.timer.pending_timeouts) == (2, 1), "callers ask again"
