"""How much a test tries: little in ``make test``, more in ``make test-all``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def thorough(*values: Any) -> Any:
    """Return parameters with which a test runs only in ``make test-all``."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def examples(number: int) -> int:
    """Return the number of examples for a test to which the hypothesis profile ``full`` gives
    ``number``.

    Tests that need no server leave the number to the profile: see tests/conftest.py.
    """
    assert settings.default is not None
    return number * settings.default.max_examples // 1_000
