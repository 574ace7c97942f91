"""The checker of pages that are followed literally notices what differs from a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.walkthrough import Differs, Terminal, matches

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


@pytest.mark.gate
def test_pages_are_followed_and_what_differs_is_named(tmp_path: Path) -> None:
    here = Terminal(tmp_path)
    with pytest.raises(Differs, match=r"\$ false\nended with 1"):
        here.follow(PAGE, lambda _: None)
    with pytest.raises(Differs, match="printed:\na\n\nbut the page shows:\nb"):
        here.follow("```console\n$ echo a\nb\n```\n", lambda _: None)
    # Ctrl-C is typed when the lines before it are there.
    typed: list[str] = []
    program = "trap 'echo stopping; exit 130' INT; echo ready; while :; do sleep 0.1; done"
    page = PAGE.replace("$ false\n", f"$ {program}\nready\n^C\nstopping\n")
    done = Terminal(tmp_path).follow(page, typed.append)
    assert done == ["export WORD=hi", "echo $WORD; cat greet.py", program]
    assert typed == ["ready\n"]


OUTPUTS = (
    ("redriven: 1", "redriven: 2", False),
    ("close-43  due 17:39:20 UTC (in 1.0 s)", "close-43 due 05:00:01 UTC (in 59 min)", True),
    ("close-43  due 17:39:20 UTC (in 1.0 s)", "close-44 due 05:00:01 UTC (in 59 min)", False),
    ("installed ... delayq-0.1.0 ...", "installed a-1 delayq-2.0.1 z-3", True),
    ("P78XQp7JV5q8 17:52:31 42s ago", "-78f5y_Ks5iK 18:30:25 3s ago", True),
    ("one", "one\ntwo", False),
    ("one\n...", "one\ntwo\nthree", True),
)


def test_output_is_the_same_but_for_times_and_versions() -> None:
    for shown, printed, same in OUTPUTS:
        assert matches(tuple(shown.split("\n")), printed) == same, shown
