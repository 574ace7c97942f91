"""Which listener gets the next free slot, and how much each claims."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from delayq.worker._slots import Feed, SlotPlan

UNUSED: Any = None
SOURCE: Any = SimpleNamespace(is_contested=False)
HANDLING: Any = SimpleNamespace(keeps_none=False)


def plan_of(*places: int, slots: int) -> tuple[SlotPlan, list[Feed]]:
    feeds = [Feed(SOURCE, HANDLING, each) for each in places]
    return SlotPlan(feeds, slots), feeds


def fill(plan: SlotPlan, feed: Feed, count: int) -> int:
    """Claim messages for a feed. Return how many of them go back."""
    claimed: list[Any] = [(number, UNUSED) for number in range(count)]
    return len(plan.add(feed, claimed))


def begin(plan: SlotPlan) -> Feed:
    feed = plan.next()
    assert feed is not None
    plan.begin(feed)
    return feed


def test_a_feed_claims_as_many_messages_as_there_are_free_slots() -> None:
    plan, (feed,) = plan_of(10, slots=3)
    assert plan.room(feed) == 3
    assert fill(plan, feed, 5) == 2
    assert not plan.has_room(feed)


def test_feeds_take_turns() -> None:
    plan, (flood, rare) = plan_of(2, 2, slots=2)
    fill(plan, flood, 3)
    fill(plan, rare, 1)
    assert [begin(plan), begin(plan)] == [flood, rare]


def test_a_feed_gets_no_more_slots_than_it_has_places() -> None:
    plan, (feed, _) = plan_of(1, 1, slots=2)
    assert fill(plan, feed, 2) == 0
    begin(plan)
    assert plan.next() is None
    plan.set_places(feed, 2)
    assert begin(plan) is feed


def test_a_slot_goes_on_to_the_next_message_of_its_feed() -> None:
    plan, (feed,) = plan_of(1, slots=1)
    fill(plan, feed, 1)
    plan.end(begin(plan), 0.001)
    fill(plan, feed, 2)
    begin(plan)
    assert plan.go_on(feed, 0.001) == (1, UNUSED)
    assert (feed.running, plan.running, feed.begun, plan.finished) == (1, 1, 3, 2)
    assert plan.next() is None, "the only slot is in use"
    assert plan.go_on(feed, 0.001) is None, "there is no other message"
    plan.end(feed, 0.001)
    assert (feed.running, plan.running, plan.finished) == (0, 0, 3)


def test_a_slot_does_not_go_on_if_another_feed_has_a_message_or_a_reservation() -> None:
    for reserved in (False, True):
        plan, (flood, rare) = plan_of(1, 1, slots=1)
        fill(plan, flood, 2)
        begin(plan)
        fill(plan, rare, 1)
        if reserved:
            plan.take_back(rare)
            plan.park(rare)
        assert plan.go_on(flood, 0.001) is None
        if not reserved:
            plan.end(flood, 0.001)
            assert [begin(plan), flood.running] == [rare, 0]


def test_the_next_slot_is_reserved_for_a_feed_whose_messages_waited_too_long() -> None:
    for comes in (True, False):
        plan, (flood, rare) = plan_of(1, 1, slots=1)
        fill(plan, flood, 2)
        fill(plan, rare, 1)
        running = begin(plan)
        assert len(plan.take_back(rare)) == 1
        plan.park(rare)
        assert plan.room(rare) == 0
        assert fill(plan, flood, 1) == 1
        plan.end(running, 1.0)
        assert plan.next() is None, "the flood has a message, but the slot is kept"
        assert plan.room(rare) > 0
        if comes:
            fill(plan, rare, 1)
        else:
            plan.unreserve(rare)
            plan.line_up(flood)
        assert begin(plan) is (rare if comes else flood)
        assert not plan.reserved


def test_a_feed_with_slots_of_its_own_takes_none_of_the_others() -> None:
    shared = Feed(SOURCE, HANDLING, 1)
    own = Feed(SOURCE, HANDLING, 3, has_own_slots=True)
    plan = SlotPlan([shared, own], 1)
    assert plan.most == 4
    fill(plan, own, 3)
    assert [begin(plan) for _ in range(3)] == [own] * 3
    assert plan.next() is None
    assert fill(plan, shared, 1) == 0
    assert begin(plan) is shared
    assert fill(plan, own, 1) == 1
    plan.end(own, 1.0)
    assert fill(plan, own, 1) == 0
    assert begin(plan) is own


def test_quick_handling_claims_ahead_which_is_too_much_for_slow_handling() -> None:
    plan, (feed,) = plan_of(1, slots=1)
    fill(plan, feed, 1)
    plan.end(begin(plan), 0.001)
    assert plan.has_room(feed)
    assert fill(plan, feed, 40) == 0
    begin(plan)
    # In a moment, it has begun with ten of them, or with three.
    assert plan.take_excess(feed, 10) == []
    assert plan.take_excess(feed, 3) == [(number, UNUSED) for number in range(4, 40)]
    assert len(feed.buffer) == 3
    assert plan.room(feed) == 0


def test_nothing_is_claimed_ahead_while_others_wait_for_slots_of_a_limit() -> None:
    plan, (feed,) = plan_of(1, slots=1)
    fill(plan, feed, 1)
    plan.end(begin(plan), 0.001)
    for is_contested in (True, False):
        feed.source = SimpleNamespace(is_contested=is_contested)  # type: ignore[assignment]
        assert (plan.room(feed) == 1) is is_contested
