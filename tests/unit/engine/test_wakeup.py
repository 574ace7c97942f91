"""The task and the timer that carry out a :class:`~delayq._engine.wakeup_plan.WakeupPlan`, and the
estimate of the server's clock, which is never ahead.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delayq._background import Background
from delayq._engine.context import EngineContext
from delayq._engine.leases import fresh_until
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


def test_before_the_first_reply_everything_is_due() -> None:
    clock = ServerClock(lambda: 0.0)
    assert clock.seconds_until(10**15) == 0
    assert clock.seconds_until_call(10**15, 0.0) == 0
    assert clock.seconds_until_timer(10**15, 0.0) == 0


def test_a_lease_is_fresh_for_half_of_its_time() -> None:
    clock = ServerClock(lambda: 100.0)
    clock.observe(5_000_000, 100.0)
    assert fresh_until(clock, 65_000_000, 60_000_000) == pytest.approx(130)


@given(
    offset=st.floats(-1e6, 1e9),
    replies=st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20
    ),
)
# The server's time is truncated to microseconds, which does not contradict this.
@example(offset=0.0, replies=[(0.0, 0.0, 0.0), (0.0078125, 0.0, 0.03125)])
def test_the_estimated_clock_is_never_ahead_and_lags_by_the_quickest_reply(
    offset: float, replies: list[tuple[float, float, float]]
) -> None:
    now = 50.0
    clock = ServerClock(lambda: now)
    quickest = math.inf
    for pause, there, back in replies:
        now += pause
        asked = now
        server_us = int((now + there + offset + 2e6) * 1e6)
        now += there + back
        clock.observe(server_us, asked)
        quickest = min(quickest, back)
        due = server_us + 100_000_000
        left = due / 1e6 - (now + offset + 2e6)
        lag = clock.seconds_until(due) - left
        assert -1e-5 <= lag <= quickest + 1e-5 * (now - 50) + 1e-5


@given(step=st.floats(-5000, 5000), way=st.floats(0, 0.5))
def test_the_next_reply_corrects_a_clock_that_was_set(step: float, way: float) -> None:
    now = 10.0
    clock = ServerClock(lambda: now)
    clock.observe(1_000_000_000_000, now)
    asked, now = 20.0, 20.0 + way
    server_us = 1_000_010_000_000 + int(step * 1e6)
    clock.observe(server_us, asked)
    assert 9 - way - 1e-3 <= clock.seconds_until(server_us + 9_000_000) <= 9 + 1e-3


class Server:
    """A server whose clock is ahead of ours, and the calls to it."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.now = 50.0
        self.ahead = ahead
        self.clock = ServerClock(lambda: self.now)

    def call(self, there: float, back: float, lag: float | None = None) -> float:
        """Make a call, ``lag`` seconds after the moment of its timer if it has one.

        Return the time by the server's clock at which it arrived, seconds.
        """
        timer_at = None if lag is None else self.now
        asked = self.now = self.now + (lag or 0)
        arrived_us = math.floor((self.now + there + self.ahead) * 1e6)
        self.now += there + back
        self.clock.observe(arrived_us, asked, timer_at)
        return arrived_us / 1e6

    def wait_for(self, due: float) -> float:
        return self.clock.seconds_until_call(round(due * 1e6), self.now)


@given(
    ahead=st.floats(0, 1e9),
    trips=st.lists(
        st.tuples(st.floats(0, 0.2), st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=20
    ),
    slower=st.floats(0, 1),
)
def test_a_call_that_is_no_quicker_than_all_before_arrives_when_the_message_is_due(
    ahead: float, trips: list[tuple[float, float, float]], slower: float
) -> None:
    server = Server(ahead)
    for pause, there, back in trips:
        server.now += pause
        server.call(there, back)
    due = server.now + ahead + 5
    server.now += server.wait_for(due)
    quickest = min(there for _, there, _ in trips)
    came = server.call(quickest + slower, 0)
    assert -3e-6 <= came - due <= slower + 3e-6


def test_a_quick_call_is_forgotten_after_a_while() -> None:
    server = Server()
    server.call(0.001, 0.001)
    for _ in range(100):
        server.now += 1
        server.call(0.02, 0.02)
    assert server.wait_for(server.now + 5) == pytest.approx(5 - 0.02)


def test_a_clock_that_is_set_counts_from_the_next_reply() -> None:
    for step in (-100, -1, 1, 100):
        server = Server()
        server.call(0.001, 0.001)
        server.ahead += step
        server.call(0.002, 0.001)
        assert server.wait_for(server.now + step + 5) == pytest.approx(5 - 0.002)


@given(
    lags=st.lists(st.floats(0, 0.1), min_size=1, max_size=20),
    slower=st.floats(0, 1),
)
def test_the_time_from_a_timer_to_its_call_counts_like_the_way_to_the_server(
    lags: list[float], slower: float
) -> None:
    server = Server()
    for lag in lags:
        server.call(0.003, 0.001, lag)
    # A call without a timer has no such time.
    server.call(0.003, 0.001)
    due = server.now + 5
    server.now += server.clock.seconds_until_timer(round(due * 1e6), server.now)
    came = server.call(0.003, 0, min(lags) + slower)
    assert -3e-6 <= came - due <= slower + 3e-6
