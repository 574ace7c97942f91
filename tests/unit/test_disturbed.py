"""The policy about a test that fails once: see ``tests.support.disturbed``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.terminal import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gate

CONFTEST = """
from tests.support.disturbed import register as pytest_configure
"""
BROKEN = """
import os, pathlib, signal
# A shell lets what it runs in the background ignore this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)

def test_breaks_its_process_once():
    if not pathlib.Path("done").exists():
        pathlib.Path("done").touch()
        {how}

def test_is_still_to_be_run(): pass
"""
TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({tests}))
def test_passes_from_some_attempt_on(number):
    with pathlib.Path(f"attempts-{{number}}").open("a") as file:
        file.write("x")
    assert pathlib.Path(f"attempts-{{number}}").stat().st_size >= {attempts}
"""


def run(folder: Path, text: str, *options: str) -> tuple[int, str]:
    """Run tests. Return the exit status and the output."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_attempts.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("tests", "attempts", "status", "words"),
    [
        (2, 2, 0, "disturbed: 2"),
        (1, 3, 1, "1 failed"),
        (6, 2, 1, "NONE RUN AGAIN: 6 failed"),
    ],
)
def test_a_failed_test_is_run_once_more(
    tmp_path: Path, tests: int, attempts: int, status: int, words: str
) -> None:
    actual, output = run(tmp_path, TESTS.format(tests=tests, attempts=attempts), "-n2")
    assert actual == status, output
    assert words in output


@pytest.mark.parametrize("how", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_a_run_whose_process_was_broken_is_never_green(tmp_path: Path, how: str) -> None:
    status, output = run(tmp_path, BROKEN.format(how=how), "-n1")
    assert status in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED), output
