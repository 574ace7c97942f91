"""Decides how many messages a listener may claim ahead of free hands. Pure."""

from __future__ import annotations

MOST = 200
# Messages claimed ahead are out of reach for other workers, so they should be begun within this
# time, in seconds.
WITHIN = 0.05
# The weight of one more message in the mean.
_WEIGHT = 1 / 16


def ahead(slots: int, took: float | None) -> int:
    """Return how many messages ``slots`` handlers begin within :data:`WITHIN` if each takes
    ``took`` seconds (None: unknown).
    """
    if took is None:
        return 0
    return MOST if took * MOST <= slots * WITHIN else int(slots * WITHIN / took)


def mean(before: float | None, took: float) -> float:
    """Return the mean time after one more message that took ``took`` seconds.

    The most recent messages count most.
    """
    return took if before is None else before + (took - before) * _WEIGHT
