"""Programs that run in processes of their own until they end."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.terminal import PATIENCE, ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run_python(
    *arguments: str, to: int = subprocess.PIPE, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python, which can import delayq and the tests, with these arguments and additional
    environment variables. ``to`` is the file descriptor of its standard output, or a pipe.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=to,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        check=False,
    )


def output_of(*arguments: str, **variables: str) -> str:
    """Run Python with these arguments, and return what it prints. Fail if it fails."""
    done = run_python(*arguments, **variables)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
