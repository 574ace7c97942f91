"""The settings for the live tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.interop.pairs import KRYO, PAIRS
from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD, Release


@dataclass(frozen=True)
class Setting:
    """A Redisson, and a server with a word size, which decides the width of records' lengths."""

    release: Release
    bits: int = 64

    def __str__(self) -> str:
        return f"{self.release}" if self.bits == 64 else f"{self.release}-{self.bits}bit"


CURRENT = [Setting(NEWEST_4), Setting(NEWEST_3), Setting(NEWEST_4, bits=32)]
"""These read the records that we write."""
OLDER = [Setting(OLD), Setting(OLD, bits=32)]
"""These can neither write nor read the current records."""

MOVERS = [(CURRENT[0], pair) for pair in PAIRS] + [(setting, KRYO) for setting in CURRENT[1:]]
"""Every codec with one setting, and each setting with one codec: moving ignores the content."""

with_current = pytest.mark.parametrize("redisson", CURRENT, indirect=True, ids=str)
with_old = pytest.mark.parametrize("redisson", OLDER, indirect=True, ids=str)
with_each_release = pytest.mark.parametrize(
    "redisson", [*CURRENT[:2], OLDER[0]], indirect=True, ids=str
)
# A client that only takes from the ready list never sees a record, so the server's word size does
# not matter.
with_all_readers = pytest.mark.parametrize("redisson", [*CURRENT, OLDER[0]], indirect=True, ids=str)
with_movers = pytest.mark.parametrize(
    ("redisson", "pair"),
    MOVERS,
    indirect=["redisson"],
    ids=[f"{setting}-{pair}" for setting, pair in MOVERS],
)
with_newest = pytest.mark.parametrize("redisson", CURRENT[:1], indirect=True, ids=str)
