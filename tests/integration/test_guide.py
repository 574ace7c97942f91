"""The programs of the guide to work that continues run, and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import run_python

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

PAGE = (Path(__file__).parents[2] / "docs" / "continuing.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.gate
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_guide_prints_what_the_guide_shows(
    server: PrivateServer, number: int
) -> None:
    program, output = PROGRAMS[number]
    result = run_python("-c", program, DELAYQ_URL=server.url)
    assert (result.stdout, result.stderr) == (output, "")


def test_each_program_of_the_guide_shows_its_output() -> None:
    assert len(PROGRAMS) == PAGE.count("```python\n")
