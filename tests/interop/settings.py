"""The releases of Redisson against which a live test runs; all of them, if it does not say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interop.redisson import NEWEST_3, NEWEST_4, OLD
from tests.support.depth import nightly


def _on(*releases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("redisson", releases, indirect=True, ids=str)


# These read the records that we write; the old one can neither write nor read them.
with_current = _on(NEWEST_4, NEWEST_3)
with_old = _on(OLD)
with_newest = _on(NEWEST_4)
# What takes long, and depends little on the release: the others come at night.
newest_current_first = _on(NEWEST_4, nightly(NEWEST_3))
newest_first = _on(NEWEST_4, nightly(NEWEST_3), nightly(OLD))
