"""What the live tests run with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.interop.pairs import KRYO, PAIRS
from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD, Release


@dataclass(frozen=True)
class Setting:
    """A Redisson and a kind of server. Each of the four record forms has one in which Redisson itself writes it.

    Attributes:
        release: Redisson.
        bits: Of the server. It decides how long a record's length is, as it does the packing.
    """

    release: Release
    bits: int = 64

    def __str__(self) -> str:
        return f"{self.release}" if self.bits == 64 else f"{self.release}-{self.bits}bit"


CURRENT = [Setting(NEWEST_4), Setting(NEWEST_3), Setting(NEWEST_4, bits=32)]
"""These read what we write."""
OLDER = [Setting(OLD), Setting(OLD, bits=32)]
"""These can neither write nor read the current records."""

MOVERS = [(CURRENT[0], pair) for pair in PAIRS] + [(setting, KRYO) for setting in CURRENT[1:]]
"""Who moves a message does not look into it: so every codec with one of them, and every one of them with one codec."""

with_current = pytest.mark.parametrize("redisson", CURRENT, indirect=True, ids=str)
with_old = pytest.mark.parametrize("redisson", OLDER, indirect=True, ids=str)
with_each_release = pytest.mark.parametrize("redisson", [*CURRENT[:2], OLDER[0]], indirect=True, ids=str)
# What only takes from the ready list sees no record, whatever the server's size.
with_all_readers = pytest.mark.parametrize("redisson", [*CURRENT, OLDER[0]], indirect=True, ids=str)
with_movers = pytest.mark.parametrize(
    ("redisson", "pair"), MOVERS, indirect=["redisson"], ids=[f"{setting}-{pair}" for setting, pair in MOVERS]
)
with_newest = pytest.mark.parametrize("redisson", CURRENT[:1], indirect=True, ids=str)
