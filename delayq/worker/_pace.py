"""How many messages a listener may claim ahead of free hands. Pure."""

from __future__ import annotations

MOST = 200
# What is claimed ahead is out of reach for other workers, so it should be begun within this time, seconds.
WITHIN = 0.05
# How much one more message counts in the mean.
_WEIGHT = 1 / 16


def ahead(slots: int, took: float | None) -> int:
    """How many messages ``slots`` handlers begin within :data:`WITHIN`, each taking ``took`` seconds; None: nobody knows."""
    if took is None:
        return 0
    return MOST if took * MOST <= slots * WITHIN else int(slots * WITHIN / took)


def mean(before: float | None, took: float) -> float:
    """The mean time, after one more message took so long: the last ones count most."""
    return took if before is None else before + (took - before) * _WEIGHT
