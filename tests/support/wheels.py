"""The invariants of the timer wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delayq._timer.wheel import Wheel


def check(wheel: Wheel) -> None:
    """Assert every invariant of a wheel, visiting every timer."""
    near, far, very_far = wheel.near, wheel.far, wheel.very_far
    assert wheel.near_end <= wheel.far_end
    assert wheel.near_end % (1 << far.shift) == 0
    assert wheel.far_end % (1 << very_far.shift) == 0
    assert not far.keys or min(far.keys) << far.shift >= wheel.near_end
    assert not very_far.keys or min(very_far.keys) << very_far.shift >= wheel.far_end
    counted = 0
    for level in (near, far, very_far):
        assert sorted(level.keys) == sorted(level.buckets)
        assert not level.keys or level.keys[0] == min(level.keys)
        for key, bucket in level.buckets.items():
            node = bucket
            while (after := node._next) is not bucket:
                assert after._prev is node
                assert after._wheel is wheel
                assert wheel.tick_of(after._deadline) >> level.shift == key
                node = after
                counted += 1
            assert bucket._prev is node
    assert counted == wheel.pending
