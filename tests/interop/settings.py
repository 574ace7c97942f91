"""The settings for the live tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD, Release
from tests.support.depth import nightly


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

with_current = pytest.mark.parametrize("redisson", CURRENT, indirect=True, ids=str)
with_old = pytest.mark.parametrize("redisson", OLDER, indirect=True, ids=str)
with_each_release = pytest.mark.parametrize(
    "redisson", [*CURRENT[:2], OLDER[0]], indirect=True, ids=str
)
# A client that only takes from the ready list never sees a record, so the server's word size does
# not matter.
with_all_readers = pytest.mark.parametrize("redisson", [*CURRENT, OLDER[0]], indirect=True, ids=str)
with_newest = pytest.mark.parametrize("redisson", CURRENT[:1], indirect=True, ids=str)
# What takes long, and depends little on the release: the others come at night.
newest_current_first = pytest.mark.parametrize(
    "redisson", [CURRENT[0], *map(nightly, CURRENT[1:])], indirect=True, ids=str
)
newest_first = pytest.mark.parametrize(
    "redisson", [CURRENT[0], *map(nightly, [*CURRENT[1:], *OLDER])], indirect=True, ids=str
)
