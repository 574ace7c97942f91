"""Fuzz every reader of foreign bytes, guided by coverage: ``python -m tests.fuzz --seconds 60``, or
``make fuzz``.

Needs atheris, which is available for Linux and CPython 3.11 to 3.13. The targets are the properties
of `tests/unit/test_fuzz.py`, to which hypothesis makes the input from the bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING

import atheris

with atheris.instrument_imports(include=["delayq"]):
    from tests.unit import test_fuzz

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS: dict[str, Callable[[bytes], object]] = {
    name.removeprefix("test_"): test.hypothesis.fuzz_one_input
    for name, test in vars(test_fuzz).items()
    if hasattr(test, "hypothesis")
}


def all_targets(data: bytes) -> None:
    """Feed the data to the target that its first byte selects."""
    if data:
        [*TARGETS.values()][data[0] % len(TARGETS)](data[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--target", choices=[*TARGETS], help="all by turns if not given")
    parser.add_argument("--replay", help="a file that made it fail")
    options = parser.parse_args()
    target = TARGETS[options.target] if options.target else all_targets
    with tempfile.TemporaryDirectory() as corpus:
        limits = [corpus, f"-max_total_time={options.seconds}", "-max_len=4096"]
        atheris.Setup([sys.argv[0], *([options.replay] if options.replay else limits)], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
