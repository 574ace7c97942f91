"""The figures of a queue, from those of its partitions."""

from __future__ import annotations

from delayq.stats import QueueDepth


def test_a_queue_has_what_its_partitions_have_together() -> None:
    first = QueueDepth(1, 2, 3, 4, 5.0, quarantined=6)
    second = QueueDepth(10, 20, 30, 40, 4.0, paused=True, quarantined=60)
    assert QueueDepth.total([first, second]) == QueueDepth(
        11, 22, 33, 44, 5.0, paused=True, quarantined=66
    )
    pauses = [QueueDepth(0, 0, 0, 0, 0.0, paused=True, paused_for=age) for age in (5.0, 7.0)]
    assert QueueDepth.total([*pauses, first]).paused_for == 7.0
    assert QueueDepth.total([*pauses, second]).paused_for is None
    unknown = QueueDepth(0, 0, 0, 0, 0.0, quarantined=None)
    assert QueueDepth.total([first, unknown]).quarantined is None
