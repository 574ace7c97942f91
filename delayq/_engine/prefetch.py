"""Decides how many messages to fetch ahead, and how many of them go back. Pure.

Messages fetched ahead are out of reach for other consumers, so no more are fetched than can be
handled, or at least begun, within a moment. How long handling takes is known only afterwards: so
whatever waits behind a handler that takes longer than a moment goes back.
"""

from __future__ import annotations

MOST = 100
WITHIN = 0.05
"""How soon their handling should begin, in seconds."""
# In smaller batches, handling takes so much time that the time spent fetching does not matter.
_MANY = 25
# How many times larger the next batch may be, and how far the pace may drop until messages go back.
_GROWTH = 4
# The weight of one more message in the mean.
_WEIGHT = 1 / 16


def begun_soon(handlers: int, took: float, most: int = MOST) -> int:
    """Return how many messages ``handlers`` begin within a moment if each takes ``took`` seconds:
    ``most`` at most.
    """
    return most if took * most <= handlers * WITHIN else int(handlers * WITHIN / took)


def next_batch(batch: int, got: int, took: float) -> int:
    """Return how many messages to request after ``got`` of ``batch`` took ``took`` seconds: several
    times as many while batches come back full, and few at once when handling becomes slow.
    """
    wish = batch * _GROWTH if got >= batch else batch
    return max(1, min(wish, begun_soon(got, took)))


def to_keep(held: int, ended: int) -> int:
    """Return how many of the messages ``held`` for handlers to keep, if ``ended`` were handled in
    the last moment: all, unless handling has become much slower than expected.
    """
    return held if held <= ended * _GROWTH else ended


def fetches_more(batch: int, got: int, wanted: int) -> bool:
    """Return whether to fetch the next batch while handling the ``got`` messages of this one, of
    which ``wanted`` were requested.
    """
    return got >= wanted and batch >= _MANY


def moving_mean(before: float | None, took: float) -> float:
    """Return the mean time after one more message. The most recent ones count most."""
    return took if before is None else before + (took - before) * _WEIGHT
