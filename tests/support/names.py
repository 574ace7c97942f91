"""Queue names that try to be mistaken for something else, and their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from delayq._redisson.keys import RESERVED, DelayedKeys

if TYPE_CHECKING:
    from delayq._reliable.keys import ReliableKeys

_PARTS = (
    *("a", "b", "{a}", "{", "}", ":", "*", "?", "[", "]", "\\", " ", "\0", "é"),
    *("x}:remembered", "x}:call:", ":{a}", "live", ":1", "-0"),
    *RESERVED,
    *(reserved.rstrip(":{") for reserved in RESERVED),
)

names = st.one_of(
    st.lists(st.sampled_from(_PARTS), min_size=1, max_size=5).map("".join),
    st.text(min_size=1, max_size=10),
)
"""Any text, mostly made of the parts from which keys are built."""


def every_key(keys: DelayedKeys | ReliableKeys) -> list[str]:
    """Return all keys and channels of a queue, including those of some calls."""
    if isinstance(keys, DelayedKeys):
        shared = [keys.ready, keys.timeout, keys.ordered, keys.channel, keys.quarantine]
        return [*shared, keys.leases, keys.leased, keys.turns, keys.fence("0123456789ab-00000001")]
    shared = [
        *keys.messages,
        keys.wake,
        keys.remembered,
        keys.dead,
        keys.dead_messages,
        keys.paused,
    ]
    return [*shared, keys.schedules, keys.call("0123456789ab-0"), keys.call("0123456789ab-1")]
