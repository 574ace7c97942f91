"""The default of settings for which None means "no limit"."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Unset(Enum):
    """The type of :data:`UNSET`."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET: Final = Unset.UNSET
"""The default of settings for which None means "no limit"."""
