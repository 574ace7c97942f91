"""What the README shows runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_readme_has_a_program() -> None:
    assert BLOCKS


@pytest.mark.parametrize("program", BLOCKS, ids=range(len(BLOCKS)))
def test_a_program_of_the_readme_runs_without_any_server(program: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DELAYQ_URL"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "{'order': 42}" in result.stdout
    assert "still pending: {'order': 43}" in result.stdout
