"""How much a test tries: little in ``make test``, more in the gate, most at night."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def in_gate(*values: Any) -> Any:
    """Return parameters with which a test runs in ``.ci/run``, and not in ``make test``."""
    return pytest.param(*values, marks=pytest.mark.gate)


def nightly(*values: Any) -> Any:
    """Return parameters with which a test runs only in ``make nightly``."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def examples(number: int) -> int:
    """Return the number of examples, if the hypothesis profile ``full`` is to try ``number``."""
    assert settings.default is not None
    return number * settings.default.max_examples // 1_000
