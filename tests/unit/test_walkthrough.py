"""The checker of pages that are followed literally notices what differs from a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.walkthrough import Command, Differs, File, Terminal, matches, steps

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """
Put this into `greet.py`:

```python
print("hello")
```

```console
$ export WORD=hi
$ echo $WORD; cat greet.py
hi
...
$ false
```
"""


def page(*lines: str) -> str:
    return "\n".join(("```console", *lines, "```", ""))


def test_a_page_is_files_and_commands_with_their_output() -> None:
    assert list(steps(PAGE)) == [
        File("greet.py", 'print("hello")\n'),
        Command("export WORD=hi", ()),
        Command("echo $WORD; cat greet.py", ("hi", "...")),
        Command("false", ()),
    ]


def test_variables_and_files_stay_and_a_command_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(Differs, match=r"\$ false\nended with 1"):
        Terminal(tmp_path).follow(PAGE, lambda _: None)
    done = Terminal(tmp_path).follow(PAGE.replace("$ false\n", ""), lambda _: None)
    assert done == ["export WORD=hi", "echo $WORD; cat greet.py"]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("redriven: 1", "redriven: 1", True),
        ("redriven: 1", "redriven: 2", False),
        ("close-43  due 17:39:20 UTC (in 1.0 s)", "close-43 due 05:00:01 UTC (in 59 min)", True),
        ("close-43  due 17:39:20 UTC (in 1.0 s)", "close-44 due 05:00:01 UTC (in 59 min)", False),
        ("close-43  due 17:39:20 UTC", "close-43 due 2026-11-24 00:11 UTC", True),
        ("close-43  17:39:20 in 60m", "close-43  Nov 24 00:11 in 60m", True),
        ("close-43  17:39:20 in 60m", "close-43  2027-01-01 in 60m", True),
        ("installed ... delayq-0.1.0 ...", "installed a-1 delayq-2.0.1 z-3", True),
        ("installed ... delayq-0.1.0 ...", "installed a-1 z-3", False),
        ("P78XQp7JV5q8 17:52:31 42s ago", "-78f5y_Ks5iK 18:30:25 3s ago", True),
        ("in attempt 1", "in attempt 2", False),
        ("one", "one\ntwo", False),
        ("one\n...", "one\ntwo\nthree", True),
        ("...\nthree", "one\ntwo", False),
    ],
)
def test_output_is_the_same_but_for_times_and_versions(
    shown: str, printed: str, same: bool
) -> None:
    assert matches(tuple(shown.split("\n")), printed) == same


def test_ctrl_c_is_typed_when_the_lines_before_it_are_there(tmp_path: Path) -> None:
    typed: list[str] = []
    program = "trap 'echo stopping; exit 130' INT; echo ready; while :; do sleep 0.1; done"
    Terminal(tmp_path).follow(page(f"$ {program}", "ready", "^C", "stopping"), typed.append)
    assert typed == ["ready\n"]


def test_output_that_is_not_there_is_shown_beside_the_page(tmp_path: Path) -> None:
    with pytest.raises(Differs, match="printed:\na\n\nbut the page shows:\nb"):
        Terminal(tmp_path).follow(page("$ echo a", "b"), lambda _: None)
