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
