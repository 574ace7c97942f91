"""Processes that start at once, forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
# All of them come from one server, which imports this when the first one starts: also what a client
# or a worker imports only when it needs it, which takes longer than all the rest of its start.
FORKS.set_forkserver_preload(
    [
        "delayq._engine.session",
        "delayq._redis.topology",
        "delayq._timer",
        "delayq.cli.app",
        "delayq.codecs.typed",
        "delayq.worker._worker",
        "tests.faults.checker",
        "tests.faults.consumers",
        "tests.faults.limits",
        "tests.faults.victims",
        "tests.support.servers",
    ]
)


def run_program(path: Path, output: Path, within: float = 60.0) -> int | None:
    """Run a file as ``python -W error`` does, in the directory of its output, for ``within``
    seconds. Return its exit status, if any.
    """
    process = FORKS.Process(target=_program, args=(str(path), output))
    process.start()
    process.join(within)
    if process.exitcode is None:
        process.kill()
        return None
    return process.exitcode


def _program(path: str, output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.pop("DELAYQ_URL", None)
    os.chdir(output.parent)
    warnings.simplefilter("error")
    runpy.run_path(path, run_name="__main__")
