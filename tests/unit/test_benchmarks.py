"""Benchmarks can be started, and are listed. Their results are for the people who run them, but the
sums in them are right.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import floor
from benchmarks._profile import KERNEL, REST, Share, client_us, server_us, shares
from tests.support.programs import output_of

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")
)


def test_the_readme_lists_each_of_them_and_no_other() -> None:
    table = (
        (ROOT / "benchmarks" / "README.md")
        .read_text()
        .partition("| name |")[2]
        .partition("\n\n")[0]
    )
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == NAMES


@pytest.mark.nightly
def test_each_says_how_it_is_called() -> None:
    for name in NAMES:
        printed = output_of("-W", "error", "-m", "benchmarks", name, "--help")
        assert printed.startswith("usage: "), name


def test_every_row_and_column_of_the_floor_has_its_samples() -> None:
    for row in floor.all_rows(200):
        assert row.samples() <= floor.SAMPLES.keys(), row.what
    assert {plain for _, plain, _ in floor.PROFILES.values()} <= floor.SAMPLES.keys()


def test_a_ratio_is_that_of_the_runs_and_not_that_of_the_medians() -> None:
    runs = [{"ours": {"rate": ours}, "theirs": {"rate": 10.0}} for ours in (5.0, 8.0, 9.0)]
    runs[1]["theirs"]["rate"] = 20.0
    found = floor.Row("it", ("ours", "rate"), ("theirs", "rate"), at_least=0.5).judge(runs)
    assert (found["delayq"], found["by_hand"]) == (8, 10)
    assert (found["ratio"], found["least"], found["most"]) == (0.5, 0.4, 0.9)
    assert (found["goal"], found["met"]) == (">= 0.5", True)
    # It can be how many times as fast.
    row = floor.Row("it", ("ours", "ns"), ("theirs", "ns"), at_least=6, inverse=True)
    found = row.judge([{"ours": {"ns": 2.0}, "theirs": {"ns": 9.0}}])
    assert (found["ratio"], found["met"]) == (4.5, False)
    # Without a counterpart, the goal is for the figure.
    found = floor.Row("it", ("ours", "p99"), at_most=4).judge([{"ours": {"p99": 4.5}}])
    assert (found["delayq"], found["least"], found["met"]) == (4.5, 4.5, False)


def entry(code: str, seconds: float, calls: int = 1, callees: tuple[Any, ...] = ()) -> Any:
    """Make an entry of a profile: of a function in C, or of one in a Python file."""
    file = SimpleNamespace(co_filename=code) if code.endswith(".py") else code
    return SimpleNamespace(code=file, inlinetime=seconds, callcount=calls, calls=callees)


MODULES = {"a.py": "delayq.client", "b.py": "asyncio.tasks", "c.py": "random"}
APPEND = entry("<method 'append' of 'list' objects>", 3e-6, 2)
SEND = entry("<method 'send' of '_socket.socket' objects>", 7e-6)
POLL = entry("<method 'poll' of 'select.epoll' objects>", 900e-6)
RUN = entry("<method 'run' of '_contextvars.Context' objects>", 2e-6, 1, (APPEND,))


def test_functions_in_c_belong_to_their_callers_unless_they_are_known() -> None:
    found = shares(
        [
            entry("a.py", 10e-6, 1, (APPEND, SEND)),
            entry("b.py", 5e-6, 1, (POLL, RUN)),
            entry("c.py", 1e-6),
            RUN,
            APPEND,
            SEND,
            POLL,
        ],
        MODULES,
    )
    assert {cause: (round(us, 3), calls) for cause, (us, calls) in found.items()} == {
        "delayq.client": (13, 3),
        "asyncio": (5 + 2 + 3, 2 + 2),
        REST: (1, 0),
    }


def test_the_time_of_the_profiler_is_subtracted_by_the_number_of_calls() -> None:
    profile = {"delayq.client": Share(12.0, 4), "asyncio": Share(6.0, 0)}
    profiled = {"client_us": 20.0, "kernel_us": 2.0}
    found = client_us(profile, profiled, plain_us=11, kernel_us=1)
    assert found == {"delayq.client": 4, "asyncio": 6, KERNEL: 1}


def test_the_rest_of_a_script_is_lua() -> None:
    found = server_us({"zadd": 2.0, "get": 0.0, "hset": 1.5}, script_us=5.0, whole_us=7.0)
    assert list(found.values()) == [2.0, 1.5, 2.0, 1.5]
    assert sum(found.values()) == 7
