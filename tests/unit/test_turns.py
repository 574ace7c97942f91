"""Many clients wait for one moment: which of them call, which leave it to the others, and how a notice changes that."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq._background import Background
from delayq._engine.context import EngineContext
from delayq._engine.last_timeout import LastTimeout
from delayq._engine.server_clock import ServerClock
from delayq._engine.stagger import _ASIDE, _ASK_EVERY, LEAST, MOST, Stagger, TransferNotice, parse, signature
from delayq._engine.wakeup import NOT_ASKED, WakeupLoop
from delayq._timer.timer import HashedWheelTimer
from delayq.errors import ServerUnavailable
from delayq.testing import ManualLoop
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FROM_A_CONSUMER = TransferNotice(next_us=-1, through_us=0, client="other", wanted=True)
FROM_A_PRODUCER = TransferNotice(next_us=-1, through_us=0, client="other", wanted=False)


def not_first(place: float = 0.5, *, after: float = 0.0) -> Stagger:
    """Return the turns of a client that was not first: another client's notice came ``after`` seconds after the moment."""
    turns = Stagger(lambda: place)
    turns.heard(FROM_A_CONSUMER, after, wanted=True)
    return turns


def test_few_of_many_clients_wake_before_the_first_ones_notice_has_reached_them() -> None:
    """Try a thousand clients and a notice that takes 4 ms. The earliest wakes no later than it would among ten."""
    chance = random.Random(1)
    notice = TransferNotice(next_us=-1, through_us=0, client="first", wanted=True, listeners=1000)
    staggers = []
    for _ in range(1000):
        turns = Stagger(chance.random)
        turns.heard(notice, 0.0, wanted=True)
        staggers.append(turns.stagger(wanted=True))
    earliest = min(staggers)
    assert earliest < 2 * LEAST
    assert sum(stagger < earliest + 0.004 for stagger in staggers) < 40
    assert max(staggers) <= 0.25


def test_a_notice_says_how_many_have_heard_the_last_one() -> None:
    told = parse(b"1 2 " + signature("abc", wanted=True, listeners=200).encode())
    assert told == TransferNotice(1, 2, "abc", wanted=True, listeners=200)
    assert parse(b"1 2 abc 1") == TransferNotice(1, 2, "abc", wanted=True), "as a client says that knows of nobody"


class TestNotice:
    @given(
        next_us=st.integers(-1, 2**53),
        through_us=st.integers(0, 2**53),
        client=st.text("0123456789abcdef", min_size=1, max_size=16),
        wanted=st.booleans(),
    )
    def test_what_a_script_publishes_is_read_as_it_was_meant(
        self, next_us: int, through_us: int, client: str, wanted: bool
    ) -> None:
        content = f"{next_us} {through_us} {signature(client, wanted=wanted)}".encode()
        assert parse(content) == TransferNotice(next_us, through_us, client, wanted)

    @pytest.mark.parametrize(
        "content",
        [b"", b"nonsense", b"1 2", b"1 2 abc", b"1 2 abc 1 more", b"x 2 abc 1", b"1 y abc 1", b"1.5 2 abc 1", b"1 2 \xff\xfe 1"],
    )
    def test_anything_else_is_no_notice(self, content: bytes) -> None:
        assert parse(content) is None

    @pytest.mark.parametrize("content", [b"0", b"1700000000000", b"-1", b"1700000000000000"])
    def test_the_number_of_a_notification_is_no_notice(self, content: bytes) -> None:
        assert parse(content) is None

    @given(st.binary(max_size=60))
    def test_no_content_harms_its_reader(self, content: bytes) -> None:
        assert parse(content) is None or len(content.split()) == 4


class TestTurns:
    def test_whoever_has_heard_of_nobody_wakes_at_the_due_time(self) -> None:
        turns = Stagger(lambda: 0.5)
        assert turns.stagger(wanted=True) == 0
        turns.found_nothing()
        assert turns.stagger(wanted=True) == 0

    def test_whoever_was_not_first_leaves_the_others_a_head_start(self) -> None:
        assert not_first(0.0).stagger(wanted=True) == pytest.approx(LEAST)
        assert not_first(1.0).stagger(wanted=True) == pytest.approx(2 * LEAST)

    def test_whoever_found_something_wakes_at_the_due_time_from_then_on(self) -> None:
        turns = not_first()
        turns.won()
        assert turns.stagger(wanted=True) == 0

    def test_whoever_came_too_late_steps_back_once_it_knows_of_others(self) -> None:
        turns = Stagger(lambda: 0.5)
        turns.given(2, 0.0)
        turns.found_nothing()
        assert turns.stagger(wanted=True) > 0

    def test_a_place_is_kept_until_it_is_lost_or_won(self) -> None:
        chances = iter((0.25, 0.75))
        turns = Stagger(lambda: next(chances))
        for _ in range(3):
            turns.heard(FROM_A_CONSUMER, 0.0, wanted=True)
            turns.found_nothing()
            assert turns.stagger(wanted=True) == pytest.approx(LEAST * 1.25)
        turns.won()
        turns.heard(FROM_A_CONSUMER, 0.0, wanted=True)
        assert turns.stagger(wanted=True) == pytest.approx(LEAST * 1.75)

    def test_whoever_wants_nothing_comes_after_all_who_do(self) -> None:
        aside, latest = not_first(0.0), not_first(1.0)
        assert aside.stagger(wanted=False) > latest.stagger(wanted=True)

    def test_a_consumer_goes_before_a_producer_that_was_first(self) -> None:
        turns = not_first()
        turns.heard(FROM_A_PRODUCER, 0.0, wanted=True)
        assert turns.stagger(wanted=True) == 0

    def test_a_producer_yields_to_a_producer(self) -> None:
        turns = Stagger(lambda: 0.5)
        turns.heard(FROM_A_PRODUCER, 0.0, wanted=False)
        assert turns.stagger(wanted=False) > 0

    def test_notices_that_are_slow_to_come_widen_the_stagger_up_to_its_bound(self) -> None:
        usual = not_first().stagger(wanted=True)
        assert not_first(after=LEAST / 10).stagger(wanted=True) == usual
        slow = not_first(after=LEAST * 0.75).stagger(wanted=True)
        assert usual < slow
        assert not_first(0.0, after=10.0).stagger(wanted=True) == pytest.approx(MOST)

    def test_one_slow_notice_is_forgotten_by_and_by(self) -> None:
        turns = not_first(0.0, after=LEAST)
        turns.heard(FROM_A_CONSUMER, 0.0, wanted=True)
        assert turns.stagger(wanted=True) > LEAST
        for _ in range(100):
            turns.heard(FROM_A_CONSUMER, 0.0, wanted=True)
        assert turns.stagger(wanted=True) == pytest.approx(LEAST)

    def test_whoever_is_alone_gives_notice_once_in_a_while(self) -> None:
        turns = Stagger(lambda: 0.5)
        assert turns.gives_notice(5.0)
        turns.given(1, 5.0)
        assert not turns.gives_notice(5.0)
        assert not turns.gives_notice(5.0 + _ASK_EVERY * 0.99)
        assert turns.gives_notice(5.0 + _ASK_EVERY)

    def test_whoever_has_listeners_gives_notice_each_time_until_they_have_gone(self) -> None:
        turns = Stagger(lambda: 0.5)
        turns.given(2, 5.0)
        assert turns.gives_notice(5.0)
        turns.given(1, 5.0)
        assert not turns.gives_notice(5.0)

    def test_whoever_hears_another_knows_that_it_is_not_alone(self) -> None:
        turns = Stagger(lambda: 0.5)
        turns.given(1, 5.0)
        turns.heard(FROM_A_CONSUMER, 0.0, wanted=True)
        assert turns.gives_notice(5.0)

    @given(
        chance=st.floats(0, 1),
        events=st.lists(
            st.one_of(
                st.just(("won",)),
                st.just(("nothing",)),
                st.tuples(st.just("given"), st.integers(1, 8), st.floats(0, 1e6)),
                st.tuples(st.just("heard"), st.floats(0, 1e6), st.booleans(), st.booleans()),
            ),
            max_size=30,
        ),
    )
    def test_whatever_happens_a_stagger_is_none_or_within_its_bounds(self, chance: float, events: list[tuple[Any, ...]]) -> None:
        turns = Stagger(lambda: chance)
        for kind, *facts in events:
            if kind == "won":
                turns.won()
            elif kind == "nothing":
                turns.found_nothing()
            elif kind == "given":
                turns.given(*facts)
            else:
                after, theirs, ours = facts
                turns.heard(TransferNotice(-1, 0, "other", theirs), after, wanted=ours)
            for wanted in (True, False):
                stagger = turns.stagger(wanted=wanted)
                assert stagger == 0 or LEAST <= stagger <= 2 * MOST * _ASIDE
            assert turns.stagger(wanted=True) <= turns.stagger(wanted=False)


class Desk:
    """One queue's pushes, in frozen time and with a server that answers on demand."""

    def __init__(self) -> None:
        self.time = ManualLoop()
        self.clock = ServerClock(self.time.time)
        self.clock.observe(self.us(0), 0.0)
        self.background = Background()
        timer = HashedWheelTimer(0.001, clock=self.time.time, loop=self.time)
        nobody: Any = None
        services = EngineContext(nobody, nobody, timer, self.clock, self.background, 60.0, 60.0)
        self.wants = True
        self.calls = 0
        # The answers to the next calls. Without any, a call answers that nothing is left.
        self.answers: deque[int | Exception] = deque()
        self.finds = False
        self.pushes = WakeupLoop("orders", self._once, services, lambda: self.wants)
        self.pushes._last_timeout = LastTimeout(timer, self.time.time, self.pushes.push)
        self.pushes.turns = Stagger(lambda: 0.5)

    @staticmethod
    def us(second: float) -> int:
        """Return the server's time at that second, microseconds: far from 0, which means now."""
        return 1_000_000_000_000 + int(second * 1_000_000)

    async def at(self, second: float) -> int:
        """Advance the time to this second. Return the number of calls made so far."""
        self.time.advance(second - self.time.time())
        # Tasks that are woken do everything that they can do without waiting.
        await self.pushes.idle(20)
        return self.calls

    async def push(self) -> int:
        self.pushes.push()
        return await self.at(self.time.time())

    def notice(self, through: float, following: float | None, *, client: str = "other", wanted: bool = True) -> None:
        next_us = -1 if following is None else self.us(following)
        self.pushes.noticed(TransferNotice(next_us, self.us(through), client, wanted))

    async def _once(self) -> int:
        self.calls += 1
        answer = self.answers.popleft() if self.answers else -1
        if isinstance(answer, Exception):
            raise answer
        if self.finds:
            self.pushes.found(2)
        return answer


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    desk.pushes.close()
    await desk.background.aclose()


class TestPushes:
    async def test_a_client_wakes_when_a_message_is_due(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        assert await desk.at(9.9) == 0
        assert await desk.at(10.1) == 1

    async def test_whoever_was_not_first_wakes_a_little_later(self, desk: Desk) -> None:
        desk.pushes.turns = not_first()
        stagger = desk.pushes.turns.stagger(wanted=True)
        desk.pushes.announced(desk.us(10))
        assert await desk.at(10 + stagger * 0.7) == 0
        assert await desk.at(10 + stagger * 2) == 1

    async def test_what_is_due_when_it_is_announced_is_staggered_too(self, desk: Desk) -> None:
        desk.pushes.turns = not_first()
        await desk.at(10)
        desk.pushes.announced(desk.us(9))
        assert await desk.at(10) == 0
        desk.notice(9, None)
        assert await desk.at(100) == 0

    async def test_whoever_wants_nothing_leaves_it_longest_to_the_others(self, desk: Desk) -> None:
        desk.pushes.turns = not_first()
        latest = 2 * desk.pushes.turns.stagger(wanted=True)
        desk.wants = False
        desk.pushes.announced(desk.us(10))
        assert await desk.at(10 + latest * 0.9) == 0
        assert await desk.at(11) == 1

    async def test_a_notice_spares_the_call_for_what_it_settles(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        await desk.at(9.9)
        desk.notice(10, None)
        assert await desk.at(1000) == 0

    async def test_a_notice_arms_the_next_wake_up(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        await desk.at(9.9)
        desk.notice(10, 20)
        assert await desk.at(19.9) == 0
        assert await desk.at(20.1) == 1

    async def test_a_notice_leaves_alone_a_wake_up_for_something_later(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        desk.notice(9.999, None)
        assert await desk.at(10.1) == 1

    async def test_a_notice_that_is_late_does_not_put_off_an_earlier_wake_up(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        desk.notice(5, 50)
        assert await desk.at(10.1) == 1

    async def test_our_own_notice_changes_nothing(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        desk.notice(10, None, client=desk.pushes.client)
        assert desk.pushes.turns.stagger(wanted=True) == 0
        assert await desk.at(10.1) == 1

    async def test_a_notice_makes_us_step_back_and_finding_something_first_again(self, desk: Desk) -> None:
        desk.notice(5, 10)
        assert desk.pushes.turns.stagger(wanted=True) > 0
        desk.finds = True
        assert await desk.at(10.1) == 1
        assert desk.pushes.turns.stagger(wanted=True) == 0

    async def test_a_wake_up_that_finds_nothing_makes_us_step_back(self, desk: Desk) -> None:
        desk.pushes.turns.given(2, 0.0)
        desk.pushes.announced(desk.us(10))
        assert await desk.at(10.1) == 1
        assert desk.pushes.turns.stagger(wanted=True) > 0

    async def test_asking_in_vain_for_a_caller_is_no_reason_to_step_back(self, desk: Desk) -> None:
        desk.pushes.turns.given(2, 0.0)
        assert await desk.push() == 1
        assert desk.pushes.turns.stagger(wanted=True) == 0

    async def test_an_announcement_of_what_is_settled_comes_too_late(self, desk: Desk) -> None:
        desk.notice(1, None)
        desk.pushes.announced(desk.us(0.9))
        assert await desk.at(1000) == 0

    async def test_an_announcement_of_what_was_settled_long_ago_shows_that_the_servers_clock_was_set_back(
        self, desk: Desk
    ) -> None:
        desk.pushes.settled(desk.us(60))
        desk.pushes.announced(desk.us(1))
        assert await desk.at(0) == 1

    async def test_a_notice_from_the_future_is_not_believed_and_the_server_is_asked(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        desk.notice(10**6, None)
        assert await desk.at(0) == 1
        assert await desk.at(10.1) == 2, "what was known before stays known"

    async def test_what_was_asked_for_and_is_settled_meanwhile_is_not_asked(self, desk: Desk) -> None:
        desk.pushes.push(desk.us(9))
        desk.pushes.settled(desk.us(10))
        assert await desk.at(0) == 0

    async def test_a_wake_up_for_what_a_call_has_settled_meanwhile_gives_way_to_the_next(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        desk.pushes.settled(desk.us(11))
        desk.pushes.next_due(desk.us(20))
        assert await desk.at(19.9) == 0
        assert await desk.at(20.1) == 1

    async def test_whoever_knows_that_nothing_is_due_need_not_ask_for_the_next_caller(self, desk: Desk) -> None:
        desk.answers.append(desk.us(10))
        assert await desk.push() == 1
        for _ in range(3):
            desk.pushes.wanted()
            assert await desk.at(0) == 1
        # This is correct because the queue is woken when the message is due.
        assert await desk.at(10.1) == 2

    async def test_before_the_first_answer_every_caller_is_asked_for(self, desk: Desk) -> None:
        desk.pushes.wanted()
        assert await desk.at(0) == 1

    async def test_what_is_known_may_be_forgotten(self, desk: Desk) -> None:
        await desk.push()
        desk.pushes.forget()
        desk.pushes.wanted()
        assert await desk.at(0) == 2

    @pytest.mark.parametrize("answer", [NOT_ASKED, ServerUnavailable("away")], ids=["not asked", "failed"])
    async def test_after_a_call_that_told_nothing_the_next_caller_is_asked_for(self, desk: Desk, answer: int | Exception) -> None:
        await desk.push()
        desk.answers.append(answer)
        await desk.push()
        assert not desk.pushes.knows
        desk.pushes.wanted()
        assert await desk.at(0) == 3

    async def test_while_more_is_due_calls_follow_one_another(self, desk: Desk) -> None:
        desk.answers.extend((0, 0, -1))
        assert await desk.push() == 3
        assert desk.pushes.knows

    async def test_no_notice_cancels_the_repetition_of_a_call_that_failed(self, desk: Desk) -> None:
        desk.answers.append(ServerUnavailable("away"))
        assert await desk.push() == 1
        desk.notice(1000, None)
        assert await desk.at(100) == 2

    async def test_nor_if_an_earlier_wake_up_had_taken_its_place(self, desk: Desk) -> None:
        desk.answers.append(ServerUnavailable("away"))
        desk.pushes._failures = 20  # keeps the retry far away
        assert await desk.push() == 1
        desk.pushes.announced(desk.us(0.1))
        desk.notice(0.1, None)
        assert await desk.at(1000) == 2

    async def test_after_the_servers_clock_was_set_back_wake_ups_are_heeded(self, desk: Desk) -> None:
        desk.pushes.settled(desk.us(3600))
        # A call reports the new time, by which the next message is due soon.
        desk.pushes.settled(desk.us(0))
        desk.answers.append(desk.us(5))
        assert await desk.push() == 1
        assert await desk.at(100) == 2

    async def test_a_closed_queue_is_woken_by_nothing(self, desk: Desk) -> None:
        desk.pushes.announced(desk.us(10))
        desk.pushes.close()
        desk.notice(5, 20)
        desk.pushes.announced(desk.us(30))
        desk.pushes.wanted()
        assert await desk.at(1000) == 0

    async def test_the_signature_says_who_we_are_and_whether_we_want_something(self, desk: Desk) -> None:
        assert parse(b"1 2 " + desk.pushes.signature().encode()) == TransferNotice(1, 2, desk.pushes.client, wanted=True)
        desk.wants = False
        assert cast("TransferNotice", parse(b"1 2 " + desk.pushes.signature().encode())).wanted is False
        desk.pushes.found(1)
        assert desk.pushes.signature() == ""
        assert desk.pushes.client != Desk().pushes.client

    async def test_two_clients_that_hear_one_another_make_one_call_for_each_moment(self) -> None:
        """Test everything together in frozen time: the first client tells the other, which takes over when the first is gone."""
        one, two = Desk(), Desk()

        async def pass_by(moment: float) -> None:
            found: Desk | None = None
            for desk in (one, two):
                desk.pushes.announced(desk.us(moment))
            for step in range(40):
                for desk in (one, two):
                    before = desk.calls
                    desk.finds = found is None
                    if await desk.at(moment - 0.01 + step * 0.001) > before and found is None:
                        found = desk
                        (two if desk is one else one).notice(moment, None, client=desk.pushes.client)
            assert found is not None

        try:
            for moment in range(10, 60, 10):
                await pass_by(moment)
            assert (one.calls, two.calls) == (5, 0)
            one.pushes.close()
            for moment in range(60, 110, 10):
                await pass_by(moment)
            assert (one.calls, two.calls) == (5, 5)
            assert two.pushes.turns.stagger(wanted=True) == 0
        finally:
            for desk in (one, two):
                desk.pushes.close()
                await desk.background.aclose()


class Shop:
    """A delayed queue on a server, one client's pushes for it, and the messages in flight between them, in frozen time."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.desk._once = self._once  # type: ignore[method-assign]
        self.desk.pushes._once = self._once
        self.dues: list[int] = []
        # Notices in the order of their publication. Answers travel on other connections.
        self.channel: deque[TransferNotice | int] = deque()
        self.own_offers: deque[int] = deque()
        self.answered = asyncio.Event()

    @property
    def now(self) -> int:
        return self.desk.us(self.desk.time.time())

    def offer(self, wait_ms: int, *, ours: bool) -> None:
        due = max(self.now - self.now % 1000, -(-(self.now + wait_ms * 1000) // 1000) * 1000)
        if not self.dues or due < min(self.dues):
            self.channel.append(due)
        if ours:
            self.own_offers.append(due)
        self.dues.append(due)

    def move(self, client: str) -> int:
        """Move what is due, and tell the others if anything was. Return when the next message is due."""
        left = [due for due in self.dues if due > self.now]
        found, self.dues = len(left) < len(self.dues), left
        following = min(left, default=-1)
        if found:
            self.channel.append(TransferNotice(following, self.now, client, wanted=True))
        return following

    async def _once(self) -> int:
        now, before = self.now, len(self.dues)
        following = self.move(self.desk.pushes.client)
        found = before > len(self.dues)
        # The answer may take long.
        await self.answered.wait()
        self.desk.pushes.settled(now - now % 1000)
        if found:
            self.desk.pushes.found(2)
        return following

    async def hear(self) -> None:
        if self.channel:
            said = self.channel.popleft()
            if isinstance(said, TransferNotice):
                self.desk.pushes.noticed(said)
            else:
                self.desk.pushes.announced(said)
        await self.settle()

    async def remember(self) -> None:
        if self.own_offers:
            self.desk.pushes.announced(self.own_offers.popleft())
        await self.settle()

    async def settle(self) -> None:
        """Run everything that can run without waiting."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def answer(self) -> None:
        self.answered.set()
        await self.settle()
        self.answered.clear()

    async def pass_by(self, ms: int) -> None:
        self.desk.time.advance(ms / 1000)
        await self.settle()


_HAPPENS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("pass_by"), st.integers(1, 20)),
        st.sampled_from([("hear",), ("remember",), ("answer",), ("another moves",)]),
    ),
    max_size=40,
)


@given(happens=_HAPPENS, chance=st.floats(0, 1), first=st.booleans())
@settings(max_examples=examples(2_000))
def test_in_whatever_order_things_become_known_nothing_that_is_due_waits_for_the_re_check(
    happens: list[tuple[Any, ...]], chance: float, first: bool
) -> None:
    async def run() -> None:
        shop = Shop()
        shop.desk.pushes.turns = Stagger(lambda: chance)
        if not first:
            shop.desk.pushes.turns.heard(TransferNotice(-1, 0, "other", wanted=True), 0, wanted=True)
        for what, *facts in happens:
            if what == "offer":
                shop.offer(facts[0], ours=facts[1])
            elif what == "another moves":
                shop.move("other")
            else:
                await getattr(shop, what)(*facts)
        # In the end everything arrives, and no other client is left.
        for _ in range(60):
            while shop.channel:
                await shop.hear()
            while shop.own_offers:
                await shop.remember()
            await shop.answer()
            await shop.pass_by(5)
        assert shop.dues == []
        shop.desk.pushes.close()
        await shop.desk.background.aclose()

    asyncio.run(run())
