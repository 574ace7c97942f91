"""The measures of ``tests.house``: each finds what is planted for it, and nothing else."""

from __future__ import annotations

import ast

import pytest

from tests import house
from tests.house import Figure, Source


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def python(text: str, path: str = "delayq/queue.py") -> list[Source]:
    return [Source(path, text)]


ORDERS = """
Count messages.
Re-check every queue.
Requeue it.
Return, if closed, None.
Warn of the channels.
"""
TITLES = """
The messages.
What is due.
Returns the messages.
Counting.
Count of messages.
Green up to 2 ms.
"""


def test_an_order_begins_with_a_verb_and_a_title_does_not() -> None:
    assert [text for text in lines(ORDERS) if not house.is_order(text)] == []
    assert [text for text in (*lines(TITLES), "") if house.is_order(text)] == []


def test_titles_are_a_share_of_the_functions_that_have_a_docstring() -> None:
    share, found = house.titles(
        python('def f():\n    "The size."\nasync def g():\n    "Count them."\ndef h():\n    pass\n')
    )
    assert (share, found) == (50, ["delayq/queue.py:1: f: The size."])


@pytest.mark.parametrize("decorator", ["property", "functools.cached_property", "overload"])
def test_some_functions_need_no_order(decorator: str) -> None:
    assert house.titles(python(f'@{decorator}\ndef f(self):\n    "The size."')) == (0, [])
    init = 'def __init__(self):\n    "Args:\\n  size: ..."'
    assert house.titles(python(init)) == (0, [])


HEADLESS = """
What is due.
Nothing changes: what is leased goes on.
It ends. Who waits gets an error.
limit: what one call takes
A scan (what it finds is deleted).
| page | what you find there |
Take so many at most.
A process that lived so long is healthy.
"""
WITH_A_HEAD = """
What is due?
What to do next.
A client who waits learns what is due.
`what is due`
| what | where |
So long as the lease lasts.
It happens so often that you notice.
There are so many messages that it takes a minute.
"""


def test_headless_clauses() -> None:
    assert [text for text in lines(HEADLESS) if not house.is_headless(text)] == []
    assert [text for text in lines(WITH_A_HEAD) if house.is_headless(text)] == []


PERSONS = ("Nobody waits.", "It is somebody's.", "for everybody", "Whoever comes first wins.")
OTHERS = ("Nobodies", "`nobody` is a user", "A client waits for a body.", "[page](nobody.md)")


def test_persons() -> None:
    assert [house.names_person(text) for text in PERSONS] == [True] * 4
    assert [house.names_person(text) for text in OTHERS] == [False] * 4


MODULE = '''"""A module.

Args:
    one: The first
        of two.
    two: The second.
"""

x = 1  # A comment, # in a line.
# Two lines
# of a comment.
y = 2  # noqa: F841 - silent
"""A constant."""


def f(name):
    raise ValueError(f"no queue {name!r} here", "short one", "a message in" " two parts")
'''


def test_the_prose_of_a_module_is_its_docstrings_comments_and_messages() -> None:
    passages = [(line, text) for _, line, text in house.python_prose(Source("m.py", MODULE))]
    assert sorted(passages) == [
        (1, "A module."),
        (3, "Args:"),
        (4, "one: The first of two."),
        (6, "two: The second."),
        (9, "A comment, # in a line."),
        (10, "Two lines of a comment."),
        (13, "A constant."),
        (17, "a message in two parts"),
        (17, "no queue x here"),
    ]


def test_the_prose_of_a_script_is_its_comments() -> None:
    script = "-- claim: take\n-- messages.\nlocal x = 1 -- one\n\n-- Returns.\n"
    passages = [
        (passage.line, passage.text) for passage in house.lua_prose(Source("s.lua", script))
    ]
    assert passages == [(1, "claim: take messages. one"), (5, "Returns.")]


def test_the_prose_of_a_page_leaves_out_code() -> None:
    page = "# Title\nA line\nand another.\n\n````md\n```\nwhat is code\n```\n````\n"
    page += "- item\n  goes on\n- item\n| a | b |\n> quoted\n"
    passages = [
        (passage.line, passage.text) for passage in house.markdown_prose(Source("p.md", page))
    ]
    assert passages == [
        (1, "# Title A line and another."),
        (10, "- item goes on"),
        (12, "- item"),
        (13, "| a | b | quoted"),
    ]


def test_a_rate_is_per_thousand_words() -> None:
    passages = [house.Passage("p.md", 1, "word " * 499), house.Passage("p.md", 9, "nobody")]
    assert house.per_thousand(passages, house.names_person) == (2, ["p.md:9: nobody"])


@pytest.mark.parametrize(
    "code",
    [
        *('server.call("ZCARD", key)', 'server.everywhere("DBSIZE")', 'x = [("HDEL", key)]'),
        'self._tell(link, "SUBSCRIBE", [x])',
    ],
)
def test_commands_outside_a_store(code: str) -> None:
    for path in ("delayq/queue.py", "delayq/_delayed/restore.py"):
        assert len(house.raw_commands(python(code, path))) == 1
    for path in ("delayq/_redis/client.py", "delayq/_delayed/store.py"):
        assert not house.raw_commands(python(code, path))


@pytest.mark.parametrize(
    "code", ['x == "PING"', 'f("SENT", 1, methods=["POST"])', '"ZCARD"', 'd["TIME"]', 'f("zcard")']
)
def test_no_commands(code: str) -> None:
    assert not house.raw_commands(python(code))


def test_positions_in_the_code_of_scripts() -> None:
    script = "-- KEYS[1]  bodies\nlocal x = redis.call('HGET', KEYS[1], ARGV[2]) -- ARGV[3]\n"
    script += "local y = KEYS[at], ARGV[i + 1], #KEYS\n"
    assert [place.split(": ")[0] for place in house.positions([Source("s.lua", script)])] == [
        "s.lua:2",
        "s.lua:2",
    ]


def test_modules_that_contracts_name() -> None:
    contracts = [
        {
            "name": "A",
            "layers": ["delayq.cli", "delayq._delayed | delayq._reliable : (delayq._new)", "other"],
        },
        {
            "name": "B",
            "source_modules": ["delayq.cli"],
            "forbidden_modules": ["redis", "delayq"],
            "ignore_imports": ["delayq -> x"],
        },
    ]
    found = house.contract_modules({"tool": {"importlinter": {"contracts": contracts}}})
    assert len(found) == 6


def test_circles() -> None:
    imports = {"a": {"b", "c", "d"}, "b": {"a", "c", "d"}, "c": {"d"}, "d": set[str]()}
    assert house.circles(imports) == ["a <-> b"]


def test_the_imports_of_this_package() -> None:
    pytest.importorskip("grimp", reason="import-linter, which brings it, is not installed")
    imports = house.imports_of("delayq", for_types=False)
    assert "delayq.errors" in imports["delayq.client"]
    assert "delayq.client" not in imports["delayq.errors"]


def test_the_state_of_a_class() -> None:
    body = "    self.c, self._d = 1, 2\n    self.e: int = 3\n    self.c.f = x.g = self.h()\n"
    init = f"class A:\n  b: int\n  def __init__(self):\n{body}"
    assert house.state_of(class_of(init)) == {"c", "_d", "e"}
    fields = "class A:\n  b: int\n  c: ClassVar[int]\n  d: int = 1\n"
    assert house.state_of(class_of(f"@dataclass(slots=True)\n{fields}")) == {"b", "d"}
    assert house.state_of(class_of(f"@dataclass(frozen=True)\n{fields}")) == set()


def class_of(text: str) -> ast.ClassDef:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    return node


def test_heavy_classes() -> None:
    def holding(count: int) -> str:
        names = "".join(f"self.a{n} = " for n in range(count - 1))
        return f"class A:\n  def __init__(self):\n    self.a = {names}0\n"

    assert not house.heavy_classes(python(holding(12)))
    (found,) = house.heavy_classes(python(holding(13)))
    assert found.startswith("delayq/queue.py:1: A has 13: a, a0, ")


def test_bodies_are_measured_in_statements_without_docstrings_and_comments() -> None:
    text = 'def f():\n    "Docs."\n    # Why.\n    x = [\n        1,\n    ]\n\n    if x:\n'
    text += '        return x\ndef g():\n    "Docs."\n'
    assert house.bodies(python(text)) == [(3, "delayq/queue.py:1: f has 3 lines")]


def test_exports() -> None:
    assert house.exports(python('__all__ = ["a", "b"]', "delayq/__init__.py")) == ["a", "b"]


FIGURES = [
    Figure("good", "a figure", 1, ["a.py:1: x"], 1),
    Figure("plain", "another", 1234.5),
    Figure("bad", "one more", 3, ["b.py:2: y"], 2, 0),
]


def test_a_table_has_aligned_columns() -> None:
    assert house.table(FIGURES).splitlines() == [
        "figure              today  bound  goal  anchors",
        "good    a figure        1      1",
        "plain   another   1,234.5",
        "bad     one more        3      2     0",
    ]


def test_a_figure_over_its_bound_fails_and_shows_its_offenders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "measure", lambda _: iter(FIGURES))
    assert house.main([]) == 1
    assert capsys.readouterr().out.endswith("\nbad is 3, over its bound of 2:\n  b.py:2: y\n")
    monkeypatch.setattr(house, "measure", lambda _: iter(FIGURES[:2]))
    assert house.main([]) == 0


def test_one_figure_lists_what_it_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "measure", lambda _: iter(FIGURES))
    assert house.main(["--list", "good"]) == 0
    assert capsys.readouterr().out == "a.py:1: x\n"
    with pytest.raises(SystemExit):
        house.main(["--list", "none"])
