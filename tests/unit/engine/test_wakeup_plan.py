"""When a queue calls the server: events go in, actions come out, and no clock runs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._engine.server_clock import ServerClock
from delayq._engine.stagger import Notice, Stagger
from delayq._engine.wakeup_plan import (
    Actions,
    Arm,
    Call,
    CallOutcome,
    Listen,
    NextCall,
    Wakeup,
    WakeupPlan,
)

if TYPE_CHECKING:
    from delayq._engine.context import Channels

# At this interval of re-checks, this number of clients is a crowd.
RESYNC, CROWD = 5.0, 2000


def us(second: float) -> int:
    """Return the server's time at that second, microseconds: far from 0, which means now."""
    return 1_000_000_000_000 + int(second * 1_000_000)


class Driver:
    """Carries out the actions of a plan, in frozen time. Subclasses make the calls."""

    def __init__(self, client: str = "us", chance: float = 0.5) -> None:
        self.now = 0.0
        clock = ServerClock(lambda: self.now)
        clock.observe(us(0), 0.0)
        self.want_messages = True
        self.retry_in = 0.1
        self.plan = WakeupPlan(
            clock,
            Stagger(client, lambda: chance, resync_interval=RESYNC),
            lambda: self.want_messages,
            lambda _: self.retry_in,
        )
        self.timer: Wakeup | None = None
        self.requested = False
        self.listens_to: Channels = "notices"

    def act(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Call):
                self.requested = True
            elif isinstance(action, Arm):
                assert self.timer is None or action.wakeup.wake_at < self.timer.wake_at, (
                    "a timer gives way only to an earlier one"
                )
                self.timer = action.wakeup
            elif isinstance(action, Listen):
                self.listens_to = action.to
            else:
                assert self.timer is not None, "there is a timer to cancel"
                self.timer = None

    def calls(self) -> None:
        """Make the calls that are requested."""
        raise NotImplementedError

    def advance(self, until: float) -> None:
        """Advance the time, firing timers at their moments."""
        self.calls()
        while self.timer is not None and self.timer.wake_at <= until:
            self.now = max(self.now, self.timer.wake_at)
            fired, self.timer = self.timer, None
            self.act(self.plan.on_timer(fired))
            self.calls()
        self.now = until


class Desk(Driver):
    """A plan with a server that answers each call at once."""

    def __init__(self, client: str = "us") -> None:
        super().__init__(client)
        self.count = 0
        # The replies to the next calls, None for a failure. Without any, a call replies that
        # nothing is left.
        self.replies: deque[NextCall | None] = deque()
        self.finds = False

    def calls(self) -> None:
        while self.requested:
            if not self.plan.begin_call():
                self.requested = False
                return
            self.count += 1
            reply = self.replies.popleft() if self.replies else -1
            if self.finds:
                self.plan.took_messages(2, self.now)
            self.act(
                self.plan.on_failure(self.now)
                if reply is None
                else self.plan.on_reply(reply, self.now)
            )

    def at(self, second: float) -> int:
        """Advance the time to this second. Return the number of calls made so far."""
        self.advance(second)
        return self.count

    def wake(self) -> int:
        self.act(self.plan.wake())
        return self.at(self.now)

    def join(self) -> int:
        self.act(self.plan.on_caller_joined())
        return self.at(self.now)

    def due(self, second: float) -> None:
        self.act(self.plan.on_due(us(second), self.now))

    def handed_out(self, second: float) -> None:
        self.act(self.plan.handed_out(us(second)))

    def notice(self, through: float, following: float | None, *, client: str = "other") -> None:
        next_us = -1 if following is None else us(following)
        self.act(
            self.plan.on_notice(Notice(next_us, us(through), client, wants_messages=True), self.now)
        )

    def re_check(
        self, due_us: int, late: float = 0.0, listeners: int = CROWD, dormant: int = 0
    ) -> int:
        self.act(self.plan.on_recheck(due_us, late, listeners, dormant, self.now))
        return self.at(self.now)

    def step_back(self) -> float:
        """Make this client one that does not go first. Return its stagger in seconds."""
        self.plan.stagger.on_notice(
            Notice(-1, 0, "other", wants_messages=True), 0.0, wants_messages=True
        )
        return self.plan.stagger.delay(wants_messages=True)

    @property
    def goes_first(self) -> bool:
        return self.plan.stagger.delay(wants_messages=True) == 0


@pytest.fixture
def desk() -> Desk:
    return Desk()


class TestActions:
    def test_a_timer_that_was_replaced_leaves_the_newer_one_armed(self, desk: Desk) -> None:
        """The timer's callback may be on its way when another one takes its place."""
        (action,) = desk.plan.on_due(us(10), 0.0)
        desk.due(5)
        assert desk.plan.on_timer(cast("Arm", action).wakeup) == (Call(),)
        assert desk.plan.on_due(us(6), 0.0) == (), "the one for 5 s is still held"


class TestWakeups:
    def test_a_client_wakes_on_time_or_a_little_later_if_it_is_not_first(self, desk: Desk) -> None:
        desk.due(10)
        assert desk.at(9.9) == 0
        assert desk.at(10.1) == 1
        stagger = desk.step_back()
        desk.due(20)
        assert desk.at(20 + stagger * 0.7) == 1
        assert desk.at(20 + stagger * 2) == 2
        # Without callers, it leaves messages longest to others.
        desk.want_messages = False
        desk.due(30)
        assert desk.at(30 + 2 * stagger * 0.9) == 2
        assert desk.at(31) == 3

    def test_a_notice_spares_the_call_for_what_it_covers_and_arms_the_next_one(self) -> None:
        for through, following, calls in (
            (10, None, {1000: 0}),
            (10, 20, {19.9: 0, 20.1: 1}),
            (9.999, None, {10.1: 1}),  # it leaves alone a wake-up for later messages
            (5, 50, {10.1: 1}),  # it does not put off an earlier wake-up
        ):
            desk = Desk()
            desk.due(10)
            desk.at(9.9)
            desk.notice(through, following)
            assert {second: desk.at(second) for second in calls} == calls, (through, following)

    def test_a_notice_of_its_own_changes_nothing(self, desk: Desk) -> None:
        desk.due(10)
        desk.notice(10, None, client=desk.plan.stagger.client)
        assert desk.goes_first
        assert desk.at(10.1) == 1

    def test_a_wake_up_that_finds_nothing_delays_the_next_ones_of_this_client(self) -> None:
        for reply in (-1, None):
            desk = Desk()
            desk.plan.stagger.took_messages(2, 0.0)
            assert desk.wake() == 1
            assert desk.goes_first, "a call for a caller is no reason to step back"
            desk.replies.append(reply)
            desk.due(10)
            assert desk.at(10.01) == 2
            assert not desk.goes_first, reply

    def test_a_call_that_is_not_made_says_nothing_of_others_or_the_server(self, desk: Desk) -> None:
        desk.plan.stagger.took_messages(2, 0.0)
        desk.replies.extend([None, CallOutcome.NO_CALLERS])
        assert desk.wake() == 1
        desk.due(0.05)
        assert desk.at(0.06) == 2
        assert desk.goes_first
        assert desk.plan.failures == 1
        assert desk.wake() == 3
        assert desk.plan.failures == 0

    def test_an_announcement_of_what_is_handed_out_is_too_late_unless_a_clock_was_set_back(
        self, desk: Desk
    ) -> None:
        desk.notice(1, None)
        desk.due(0.9)
        assert desk.at(1000) == 0
        desk.handed_out(1060)
        desk.due(1001)
        assert desk.at(1000) == 1

    def test_a_notice_from_the_future_makes_us_ask_the_server(self, desk: Desk) -> None:
        desk.due(10)
        desk.notice(10**6, None)
        assert desk.at(0) == 1
        assert desk.at(10.1) == 2, "known moments stay known"

    def test_a_request_is_dropped_if_all_of_its_messages_are_handed_out(self, desk: Desk) -> None:
        desk.act(desk.plan.wake(us(9)))
        desk.handed_out(10)
        assert desk.at(0) == 0
        for second in (20, 9):
            desk.act(desk.plan.wake(us(second)))
        desk.handed_out(11)
        assert desk.at(0) == 1

    def test_no_notice_cancels_the_repetition_of_a_failed_call(self, desk: Desk) -> None:
        desk.replies.append(None)
        assert desk.wake() == 1
        desk.notice(1, None)
        assert desk.at(100) == 2
        # Nor does one after an earlier wake-up has taken its place.
        desk.due(100.1)
        desk.replies.append(None)
        desk.retry_in = 500
        assert desk.wake() == 3
        assert desk.at(100.05) == 3
        desk.notice(100.1, None)
        assert desk.at(1000) == 4
        # And the repetition does not cancel an earlier one.
        desk.due(1001)
        desk.replies.append(None)
        assert desk.wake() == 5
        assert desk.at(1001.1) == 6

    def test_after_the_servers_clock_was_set_back_wake_ups_count_again(self, desk: Desk) -> None:
        desk.handed_out(3600)
        # A call reports the new time, by which the next message is due soon.
        desk.handed_out(0)
        desk.replies.append(us(5))
        assert desk.wake() == 1
        assert desk.at(100) == 2

    def test_a_closed_queue_is_woken_by_nothing(self, desk: Desk) -> None:
        desk.due(10)
        desk.step_back()
        desk.act(desk.plan.close())
        desk.notice(5, 20)
        desk.due(30)
        assert desk.plan.on_recheck(-1, 0.0, CROWD, 0, desk.now) == (), "it keeps its channels"
        assert desk.join() == 0
        assert desk.at(1000) == 0


class TestCallers:
    def test_a_queue_that_is_up_to_date_makes_no_call_for_the_next_caller(self, desk: Desk) -> None:
        desk.replies.append(us(10))
        assert desk.join() == 1, "before the first reply"
        for _ in range(3):
            assert desk.join() == 1
        # This is correct because the queue is woken when the message is due.
        assert desk.at(10.1) == 2
        desk.plan.invalidate()
        assert desk.join() == 3

    def test_a_reply_that_is_out_of_date_is_followed_by_a_call(self, desk: Desk) -> None:
        desk.plan.wake()
        assert desk.plan.begin_call()
        # A message is announced while no caller wants one. The call was carried out before that.
        desk.plan.invalidate()
        assert desk.plan.on_reply(-1, 0.0) == (Call(),)
        assert not desk.plan.is_up_to_date

        # The same is true of a probe.
        before = desk.plan.invalidations
        desk.plan.invalidate()
        assert desk.plan.on_probe(-1, before, 0.0) == (Call(),)
        assert desk.plan.on_probe(-1, desk.plan.invalidations, 0.0) == ()

    def test_after_a_call_in_vain_or_in_turn_it_is_out_of_date(self) -> None:
        for reply in (CallOutcome.NO_CALLERS, None, CallOutcome.MORE_DUE):
            desk = Desk()
            desk.wake()
            desk.replies.append(reply)
            desk.wake()
            assert not desk.plan.is_up_to_date
            if reply is CallOutcome.MORE_DUE:
                assert desk.at(1.0) == 2, "the queue's turn makes the call"
            assert desk.plan.failures == (reply is None)
            assert desk.join() == 3, reply


class TestDormancy:
    """In a crowd, most clients neither receive notices nor wake."""

    @staticmethod
    def go_dormant(desk: Desk) -> None:
        desk.step_back()
        desk.re_check(-1)
        assert desk.listens_to == "summons"

    def test_every_caller_that_joins_makes_it_call(self, desk: Desk) -> None:
        assert desk.wake() == 1
        known = [desk.plan.is_up_to_date]
        self.go_dormant(desk)
        assert [*known, desk.plan.is_up_to_date] == [True, False]
        assert (desk.join(), desk.join()) == (2, 3)
        assert desk.listens_to == "summons"

    def test_a_dormant_client_without_callers_listens_as_soon_as_it_has_some(self) -> None:
        for others, listens_to in ((100, "notices"), (CROWD, "summons")):
            desk = Desk()
            desk.want_messages = False
            desk.re_check(-1, listeners=others)
            assert desk.listens_to == "nothing"
            desk.want_messages = True
            assert desk.join() == 1
            assert desk.listens_to == listens_to


class Shop(Driver):
    """A delayed queue on a server, one client's plan, and the messages between them."""

    def __init__(self, chance: float) -> None:
        super().__init__(chance=chance)
        self.dues: list[int] = []
        # Notices in the order of their publication. Replies travel on other connections.
        self.channel: deque[Notice | int] = deque()
        self.own_offers: deque[int] = deque()
        # The call in flight: when the server carried it out, whether it found messages, when the
        # next one is due.
        self.reply: tuple[int, bool, int] | None = None

    def offer(self, wait_ms: int, *, ours: bool) -> None:
        now = us(self.now)
        due = max(now - now % 1000, -(-(now + wait_ms * 1000) // 1000) * 1000)
        if not self.dues or due < min(self.dues):
            self.channel.append(due)
        if ours:
            self.own_offers.append(due)
        self.dues.append(due)

    def move(self, client: str) -> tuple[bool, int]:
        """Move due messages and tell the others. Return if there were any, and the next moment."""
        left = [due for due in self.dues if due > us(self.now)]
        is_due, self.dues = len(left) < len(self.dues), left
        following = min(left, default=-1)
        if is_due:
            self.channel.append(Notice(following, us(self.now), client, wants_messages=True))
        return is_due, following

    def calls(self) -> None:
        if self.requested and self.reply is None:
            if self.plan.begin_call():
                self.reply = (us(self.now), *self.move(self.plan.stagger.client))
            else:
                self.requested = False

    def hear(self) -> None:
        if self.channel:
            heard = self.channel.popleft()
            if self.listens_to != "notices":
                return
            on = self.plan.on_notice if isinstance(heard, Notice) else self.plan.on_due
            self.act(cast("Any", on)(heard, self.now))
            self.calls()

    def remember(self) -> None:
        if self.own_offers:
            self.act(self.plan.on_due(self.own_offers.popleft(), self.now))
            self.calls()

    def answer(self) -> None:
        if self.reply is not None:
            (now, found, following), self.reply = self.reply, None
            self.act(self.plan.handed_out(now - now % 1000))
            if found:
                self.plan.took_messages(2, self.now)
            self.act(self.plan.on_reply(following, self.now))
            self.calls()

    def lose(self) -> None:
        """Lose the reply of the call in flight."""
        if self.reply is not None:
            self.reply = None
            self.act(self.plan.on_failure(self.now))
            self.calls()

    def re_check(self, listeners: int) -> None:
        due = min(self.dues, default=None)
        wait = -1 if due is None else due - us(self.now)
        next_due = 0 if due is not None and wait <= 0 else -1 if due is None else due
        late = max(0, -wait) / 1_000_000
        self.act(self.plan.on_recheck(next_due, late, listeners, 0, self.now))
        self.calls()

    def act(self, actions: Actions) -> None:
        before = self.listens_to
        super().act(actions)
        if self.listens_to == "notices" != before:
            self.channel.clear()
            self.re_check(1)

    def pass_by(self, ms: int) -> None:
        self.advance(self.now + ms / 1000)

    def pass_events(self, events: list[tuple[Any, ...]], *, first: bool) -> None:
        if not first:
            self.plan.stagger.on_notice(
                Notice(-1, 0, "other", wants_messages=True), 0, wants_messages=True
            )
        for event, *facts in events:
            if event == "offer":
                self.offer(facts[0], ours=facts[1])
            elif event == "another moves":
                self.move("other")
            else:
                getattr(self, event)(*facts)

    def empty(self) -> None:
        """Let everything arrive that is on its way. No other client is left."""
        for _ in range(60):
            while self.channel:
                self.hear()
            while self.own_offers:
                self.remember()
            self.answer()
            self.pass_by(5)
        assert self.dues == []


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("pass_by"), st.integers(1, 20)),
        st.sampled_from([("hear",), ("remember",), ("answer",), ("lose",), ("another moves",)]),
    ),
    max_size=40,
)
_IN_A_CROWD = st.lists(
    st.one_of(_EVENTS, st.just([("re_check", CROWD)]), st.just([("re_check", 1)])), max_size=8
).map(lambda parts: [event for part in parts for event in part])


@given(events=_EVENTS, chance=st.floats(0, 1), first=st.booleans())
def test_no_due_message_waits_for_the_re_check_whatever_the_order_of_events(
    events: list[tuple[Any, ...]], chance: float, first: bool
) -> None:
    shop = Shop(chance)
    shop.pass_events(events, first=first)
    shop.empty()


@given(events=_IN_A_CROWD, chance=st.floats(0, 1), first=st.booleans())
def test_a_message_that_a_crowd_overlooks_waits_for_one_re_check(
    events: list[tuple[Any, ...]], chance: float, first: bool
) -> None:
    shop = Shop(chance)
    shop.pass_events(events, first=first)
    shop.pass_by(100)
    shop.re_check(CROWD)
    shop.empty()
