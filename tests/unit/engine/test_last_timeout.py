"""A later wake-up never replaces an earlier one, as it does in Redisson after a stale reply."""

from __future__ import annotations

import math

from delayq._engine.wakeup_plan import Armed, LastTimeout, gives_way


def test_a_wake_up_gives_way_only_to_an_earlier_one() -> None:
    assert [gives_way(held, 5) for held in (None, Armed(6))] == [True, True]
    assert [gives_way(held, 5) for held in (Armed(5), Armed(1))] == [False, False]


def test_a_later_wake_up_is_covered_by_the_one_that_is_held() -> None:
    last = LastTimeout()
    held = last.arm(3, 3_000_000)
    assert held is not None
    assert last.arm(50, 50_000_000) is None
    assert last.held is held
    assert held.last_us == 50_000_000


def test_an_earlier_wake_up_takes_over_and_covers_the_later_one() -> None:
    last = LastTimeout()
    last.arm(50, 50_000_000)
    earlier = last.arm(3, 3_000_000)
    assert earlier is not None
    assert earlier is last.held
    assert (earlier.due_us, earlier.last_us) == (3_000_000, 50_000_000)


def test_a_wake_up_for_whatever_is_due_passes_that_on() -> None:
    last = LastTimeout()
    last.arm(50)
    earlier = last.arm(3, 3_000_000)
    assert earlier is not None
    assert earlier.due_us == earlier.last_us == math.inf


def test_a_fired_wake_up_is_released_only_if_it_is_still_held() -> None:
    last = LastTimeout()
    old, newer = last.arm(5), last.arm(1)
    assert old is not None
    assert newer is not None
    last.release(old)
    assert last.held is newer
    last.release(newer)
    assert not last.disarm()


def test_disarming_forgets() -> None:
    last = LastTimeout()
    last.arm(5)
    assert last.disarm()
    assert not last.disarm()
