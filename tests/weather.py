"""Run the tests in bad weather: ``python -m tests.weather [--runs 5] [-- PYTEST OPTIONS]``.

While ``make test`` runs, processes of the test run (servers, programs, the test processes) are
stopped for 0.2 to 3 seconds, one at a time, at random moments, and others keep two processors busy.
Whatever the tests wait for must still come, and no limit may be so tight that a pause breaks it.
The exit status is the number of runs that were red.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORTEST, LONGEST = 0.2, 3.0
"""Seconds that a process is stopped."""
CALM = 4.0
"""The longest time between two pauses, seconds."""
BURN = "while True: pass"
PYTEST = ("-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal")


@dataclass
class Weather:
    """Stops descendants of a process, one at a time, until :meth:`clear_up`."""

    root: int
    random: random.Random
    pauses: int = 0
    paused_for: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._over.wait(self.random.uniform(0, CALM)):
            processes = descendants(self.root)
            if processes:
                self._pause(self.random.choice(processes))

    def clear_up(self) -> None:
        self._over.set()

    def _pause(self, process: int) -> None:
        seconds = self.random.uniform(SHORTEST, LONGEST)
        # A test may stop, resume or end the process meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            try:
                self._over.wait(seconds)
            finally:
                os.kill(process, signal.SIGCONT)
            self.pauses += 1
            self.paused_for += seconds


def descendants(root: int) -> list[int]:
    """Return the processes below this one that are not stopped already, as a test may have done."""
    parents: dict[int, int] = {}
    running: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may contain anything.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            process = int(path.parent.name)
            parents[process] = int(parent)
            if state in "RSD":
                running.add(process)

    def is_below(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == root:
                return True
        return False

    return [process for process in running if is_below(process)]


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """Keep processors busy."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def run_once(seed: int, options: list[str], *, burn: int, pause: bool) -> bool:
    """Run the tests once, print how that went, and return whether they were green."""
    began, before = time.monotonic(), os.times()
    with burners(burn):
        run = subprocess.Popen(
            [sys.executable, *PYTEST, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        weather = Weather(run.pid, random.Random(seed))
        thread = threading.Thread(target=weather.run)
        if pause:
            thread.start()
        try:
            output, _ = run.communicate()
        finally:
            weather.clear_up()
            if pause:
                thread.join()
            run.terminate()
        after = os.times()  # the burners have not been waited for, so they do not count
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    if run.returncode:
        print(output)
    lines = output.strip().splitlines()
    print(
        f"{'RED' if run.returncode else 'green'} after {time.monotonic() - began:.0f} s,"
        f" {used:.0f} processor seconds, {weather.pauses} pauses of {weather.paused_for:.0f} s:"
        f" {lines[-1] if lines else 'no output'}",
        *(line for line in lines if re.match(r"disturbed: [1-9]|  .*: passed by itself", line)),
        sep="\n  ",
        flush=True,
    )
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--burn", type=int, default=2, help="busy processors; default: 2")
    parser.add_argument("--no-pauses", action="store_true", help="stop no processes")
    parser.add_argument("pytest", nargs="*", help="options and paths for pytest, after --")
    options = parser.parse_args()
    # So that nothing burns on and nothing stays stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    red = 0
    for seed in range(options.seed, options.seed + options.runs):
        print(f"seed {seed}", flush=True)
        red += not run_once(seed, options.pytest, burn=options.burn, pause=not options.no_pauses)
    return red


if __name__ == "__main__":
    sys.exit(main())
