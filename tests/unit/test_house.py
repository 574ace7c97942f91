"""The measures of ``tests.house``: each finds what is planted for it, and nothing else."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests import house
from tests.house import Figure, Source

if TYPE_CHECKING:
    import pytest


def python(text: str, path: str = "delayq/queue.py") -> list[Source]:
    return [Source(path, text)]


ORDERS = ("Count messages.", "Re-check every queue.", "Return, if closed, None.")
TITLES = ("The messages.", "Returns the messages.", "Counting.", "Green up to 2 ms.", "")
HEADLESS = ("Nothing changes: what is leased goes on.", "It ends. Who waits gets an error.")
WITH_A_HEAD = ("What is due?", "A client who waits learns what is due.", "So long as it lasts.")
PERSONS = ("Nobody waits.", "It is somebody's.", "Whoever comes first wins.")
OTHERS = ("Nobodies", "`nobody` is a user", "A client waits for a body.")


def test_measures_of_wording() -> None:
    for measure, counted, others in (
        (house.is_order, ORDERS, TITLES),
        (house.is_headless, HEADLESS, WITH_A_HEAD),
        (house.names_person, PERSONS, OTHERS),
    ):
        assert [text for text in counted if not measure(text)] == []
        assert [text for text in others if measure(text)] == []
    named = 'def f():\n    "The size."\nasync def g():\n    "Count them."\ndef h():\n    pass\n'
    assert house.titles(python(named)) == (50, ["delayq/queue.py:1: f: The size."])
    assert house.titles(python('@property\ndef f(self):\n    "The size."')) == (0, [])
    passages = [house.Passage("p.md", 1, "word " * 499), house.Passage("p.md", 9, "nobody")]
    assert house.per_thousand(passages, house.names_person) == (2, ["p.md:9: nobody"])


MODULE = '''"""A module."""
x = 1  # A comment, # in a line.
# Two lines
# of a comment.
y = 2  # noqa: F841 - silent
raise ValueError(f"no queue {name!r} here", "short one", "a message in" " two parts")
'''
PAGE = "# Title\nA line.\n\n````md\n```\nwhat is code\n```\n````\n- item\n  goes on\n| a | b |\n"


def test_prose_is_found_in_modules_scripts_and_pages() -> None:
    prose = house.python_prose(Source("m.py", MODULE))
    assert sorted(passage.text for passage in prose) == [
        *("A comment, # in a line.", "A module.", "Two lines of a comment."),
        *("a message in two parts", "no queue x here"),
    ]
    script = "-- claim: take\n-- messages.\nlocal x = 1 -- one\n\n-- Returns.\n"
    texts = [passage.text for passage in house.lua_prose(Source("s.lua", script))]
    assert texts == ["claim: take messages. one", "Returns."]
    texts = [passage.text for passage in house.markdown_prose(Source("p.md", PAGE))]
    assert "- item goes on" in texts
    assert not any("code" in text for text in texts)


def test_measures_of_structure() -> None:
    for code in ('server.call("ZCARD", key)', 'x = [("HDEL", key)]'):
        assert len(house.raw_commands(python(code))) == 1
        assert not house.raw_commands(python(code, "delayq/_delayed/store.py"))
    for code in ('x == "PING"', 'f("SENT", 1, methods=["POST"])', 'd["TIME"]'):
        assert not house.raw_commands(python(code))
    script = "-- KEYS[1]  bodies\nlocal x = redis.call('HGET', KEYS[1], #KEYS) -- ARGV[3]\n"
    assert len(house.positions([Source("s.lua", script)])) == 1
    layers = ["delayq.cli", "delayq._delayed | delayq._reliable : (delayq._new)", "other"]
    contracts = [{"name": "A", "layers": layers}]
    assert len(house.contract_modules({"tool": {"importlinter": {"contracts": contracts}}})) == 4
    imports = {"a": {"b", "c", "d"}, "b": {"a", "c", "d"}, "c": {"d"}, "d": set[str]()}
    assert house.circles(imports) == ["a <-> b"]
    init = "class A:\n  b: int\n  def __init__(self):\n    self.c, self._d = x.g = self.h()\n"
    (node,) = ast.parse(init).body
    assert isinstance(node, ast.ClassDef)
    assert house.state_of(node) == {"c", "_d"}
    body = 'def f():\n    "Docs."\n    # Why.\n    x = [\n        1,\n    ]\n    return x\n'
    assert house.bodies(python(body)) == [(2, "delayq/queue.py:1: f has 2 lines")]


def test_a_figure_over_its_bound_fails_and_shows_its_offenders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [Figure("good", "a figure", 1, ["a.py:1: x"], 1), Figure("plain", "another", 5)]
    bad = Figure("bad", "one more", 3, ["b.py:2: y"], 2, 0)
    monkeypatch.setattr(house, "measure", lambda _: iter([*figures, bad]))
    assert house.main([]) == 1
    assert capsys.readouterr().out.endswith("\nbad is 3, over its bound of 2:\n  b.py:2: y\n")
    assert house.main(["--list", "good"]) == 0
    assert capsys.readouterr().out == "a.py:1: x\n"
    monkeypatch.setattr(house, "measure", lambda _: iter(figures))
    assert house.main([]) == 0
