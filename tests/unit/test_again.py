"""Tests that have failed are rerun on their own, and have to pass every time."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.again import MOST, TIMES
from tests.support.terminal import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = """
from pathlib import Path
from tests.support.again import note_end

def pytest_sessionfinish(session, exitstatus):
    note_end(session.config, exitstatus)

def runs():
    '''Count the runs so far, with this one.'''
    path = Path("runs")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())
"""


def python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p xdist.plugin",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("test", "runs", "passes"),
    [("assert runs() > 1", 1 + TIMES, True), ("assert runs() not in {1, 3}", 3, False)],
    ids=["stable alone", "unstable"],
)
def test_a_failed_test_has_to_pass_every_time(
    tmp_path: Path, test: str, runs: int, passes: bool
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(f"from conftest import runs\ndef test(): {test}\n")
    assert python(tmp_path, "pytest", "-q").returncode == 1
    again = python(tmp_path, "tests.support.again")
    assert (again.returncode == 0) is passes
    assert ("UNSTABLE: test_it.py::test failed beside others" in again.stdout) is passes
    assert len((tmp_path / "runs").read_text()) == runs


@pytest.mark.parametrize(
    "tests",
    [
        "def test(): pass",
        "def test(): assert False\ndef test_next(): raise KeyboardInterrupt",
        "\n".join(f"def test_{n}(): assert False" for n in range(MOST + 1)),
    ],
    ids=["none failed", "cut short", "too many"],
)
def test_other_runs_are_not_rerun(tmp_path: Path, tests: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(tests)
    python(tmp_path, "pytest", "-q")
    again = python(tmp_path, "tests.support.again")
    assert again.returncode == 1
    assert again.stdout.startswith("not rerun")
