"""Whether and when to make a call again. Pure."""

from __future__ import annotations

import random
import re

# Redis 6.2 puts words of its own before the error of a command in a script:
# "Error running script (call to f_…): @user_script:7: -READONLY …".
_IN_SCRIPT = r"(?:Error running script \(call to f_[0-9a-f]{40}\): (?:@user_script: ?\d+: )*-?)?"
_CODES = (
    "BUSY",  # another script runs
    "LOADING",  # it reads its data
    # A replica: after a failover another server is the master, or this one soon will be again.
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",  # a slot is moving, and half of the call's keys with it
    "NOREPLICAS",
    "MISCONF",  # the disk is full
    "UNBLOCKED",  # a call that waited, on a server that became a replica
)
# At the start of the text: the names quoted further back may look like a code.
_NOT_NOW = re.compile(rf"{_IN_SCRIPT}(?:(?:{'|'.join(_CODES)})\b|max number of clients)")


def is_not_now(text: str) -> bool:
    """Tell whether this error, without ``-`` and ``ERR``, says that the call may succeed later."""
    return _NOT_NOW.match(text) is not None


def retry_delay(
    attempt: int, *, base: float = 0.02, most: float = 5.0, least: float = 0.5
) -> float:
    """Return the seconds before the next try: doubled, and at random so that clients spread."""
    ceiling = min(most, base * 2.0 ** min(attempt - 1, 30))
    return ceiling * random.uniform(least, 1.0)
