"""The pause before the next try. Pure."""

from __future__ import annotations

import random


def retry_delay(
    attempt: int, *, base: float = 0.02, most: float = 5.0, least: float = 0.5
) -> float:
    """Return the seconds before try ``attempt + 1``: doubled from ``base`` up to ``most``, and at
    random from ``least`` of it on.

    The jitter keeps a thousand clients that lost the same server from coming back at the same
    moment.
    """
    ceiling = min(most, base * 2.0 ** min(attempt - 1, 30))
    return ceiling * random.uniform(least, 1.0)
