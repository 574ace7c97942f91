"""Processes that a test kills or stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.forks import FORKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


bug = ""
"""The name of the bug in the package of processes that are started from now on, if any."""


def start(main: Callable[..., None], *args: Any) -> Any:
    """Start a process that runs this function. It ends with its parent."""
    process = FORKS.Process(target=_run, args=(bug, main, args), daemon=True)
    process.start()
    return process


def _run(bug: str, main: Callable[..., None], args: Sequence[Any]) -> None:
    if bug:
        from tests.faults.test_planted import PLANTS

        PLANTS[bug][2](pytest.MonkeyPatch())
    main(*args)
