"""How many messages to fetch ahead. Pure."""

from __future__ import annotations

MOST = 100
# What is fetched ahead is out of reach for other consumers, so it should be handled within this time, seconds.
_WITHIN = 0.05
# Below this, handling takes so long that fetching does not count.
_MANY = 25


def next_batch(batch: int, got: int, took: float) -> int:
    """How many to ask for after ``got`` of ``batch`` messages were handled in ``took`` seconds.

    Grows by doubling while batches come back full; shrinks at once when handling turns slow.
    """
    affordable = MOST if took * MOST <= _WITHIN * got else int(_WITHIN * got / took)
    wish = batch * 2 if got >= batch else batch
    return max(1, min(wish, affordable, MOST))


def fetches_more(batch: int, got: int) -> bool:
    """Whether the next batch is fetched while ``got`` messages are handled that came when ``batch`` were asked for."""
    return got >= batch >= _MANY
