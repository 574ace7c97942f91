"""Which listener gets the next free slot, and how much each claims."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from delayq.worker._slots import Feed, SlotPlan

UNUSED: Any = None
PORT: Any = SimpleNamespace(is_contested=False)


def plan_of(*capacities: int, slots: int) -> tuple[SlotPlan, list[Feed]]:
    feeds = [Feed(PORT, UNUSED, UNUSED, capacity) for capacity in capacities]
    return SlotPlan(feeds, slots), feeds


def fill(plan: SlotPlan, feed: Feed, count: int) -> int:
    """Claim messages for a feed. Return how many of them go back."""
    claimed: list[Any] = [(number, UNUSED) for number in range(count)]
    return len(plan.add(feed, claimed))


def begin(plan: SlotPlan) -> Feed:
    turn = plan.begin()
    assert turn is not None
    return turn[0]


def test_a_slot_does_not_go_on_if_another_feed_has_a_message_or_a_reservation() -> None:
    for reserved in (False, True):
        plan, (flood, rare) = plan_of(1, 1, slots=1)
        fill(plan, flood, 2)
        begin(plan)
        fill(plan, rare, 1)
        if reserved:
            plan.take_all(rare)
            plan.park(rare)
        assert plan.end(flood, 0.001, goes_on=True) is None
        if not reserved:
            assert [begin(plan), flood.running] == [rare, 0]


def test_the_next_slot_is_reserved_for_a_feed_whose_messages_waited_too_long() -> None:
    for comes in (True, False):
        plan, (flood, rare) = plan_of(1, 1, slots=1)
        fill(plan, flood, 2)
        fill(plan, rare, 1)
        running = begin(plan)
        assert len(plan.take_all(rare)) == 1
        plan.park(rare)
        assert plan.room(rare) == 0
        assert fill(plan, flood, 1) == 1
        plan.end(running, 1.0)
        assert plan.begin() is None, "the flood has a message, but the slot is kept"
        assert plan.room(rare) > 0
        if comes:
            fill(plan, rare, 1)
        else:
            plan.unreserve(rare)
        assert begin(plan) is (rare if comes else flood)
        assert not plan.reserved
