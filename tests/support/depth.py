"""How much a test tries: little in ``make test``, more in ``make test-all``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def thorough(*values: Any) -> Any:
    """Return parameters with which a test runs only in ``make test-all``."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def examples(number: int) -> int:
    """Return the number of examples, if the hypothesis profile ``full`` is to try ``number``."""
    assert settings.default is not None
    return number * settings.default.max_examples // 1_000
