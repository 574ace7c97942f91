"""Rerun the tests that have failed in the last run, several times, one after another.

::

    python -m tests.support.again [options of pytest]

``.ci/run`` does so, because a shared machine may pause for seconds, which breaks the timing of some
tests. A test that depends on chance fails here sooner or later.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMES = 5
MOST = 5
"""If more tests than this have failed, the machine is no excuse."""

_CACHE = Path(".pytest_cache/v")
_FAILED, _END = "cache/lastfailed", "delayq/end"


def note_end(config: pytest.Config, status: int | None) -> None:
    """Note how a run has ended; None while it goes on."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is not None and not hasattr(config, "workerinput"):
        cache.set(_END, None if status is None else int(status))


def main(options: Sequence[str]) -> int:
    """Return the exit status: 0 only if every test passes each time."""
    failed = sorted(_cached(_FAILED) or ())
    if _cached(_END) != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MOST:
        print(f"not rerun: the last run was cut short, or not 1 to {MOST} tests failed in it")
        return 1
    for time in range(1, TIMES + 1):
        command = [sys.executable, "-m", "pytest", "-n0", "-q", *options, *failed]
        if status := subprocess.run(command, check=False).returncode:
            print("UNSTABLE OR BROKEN: some of these tests fail on their own, too")
            return status
        print(f"passed on their own, {time} of {TIMES} times", flush=True)
    for name in failed:
        print(f"UNSTABLE: {name} failed beside others, and passed {TIMES} times on its own")
    return 0


def _cached(name: str) -> Any:
    path = _CACHE / name
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
