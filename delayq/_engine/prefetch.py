"""Decides how many messages to fetch ahead. Pure."""

from __future__ import annotations

MOST = 100
# Messages fetched ahead are out of reach for other consumers, so they should be handled within this
# time, in seconds.
_WITHIN = 0.05
# In smaller batches, handling takes so much time that the time spent fetching does not matter.
_MANY = 25


def next_batch(batch: int, got: int, took: float) -> int:
    """Return how many messages to request after ``got`` of ``batch`` messages were handled in
    ``took`` seconds.

    The number doubles while batches come back full, and shrinks at once when handling becomes slow.
    """
    affordable = MOST if took * MOST <= _WITHIN * got else int(_WITHIN * got / took)
    wish = batch * 2 if got >= batch else batch
    return max(1, min(wish, affordable, MOST))


def fetches_more(batch: int, got: int) -> bool:
    """Return whether to fetch the next batch while handling the ``got`` messages received for a
    request of ``batch``.
    """
    return got >= batch >= _MANY
