"""``delayq acl``."""

from __future__ import annotations

import pytest

from delayq.acl import acl_rules
from delayq.cli.app import run


def test_it_prints_the_rules_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acl", "consumer", "--queue", "mails", "--queue", "jobs", "--delayed", "orders"]) == 0
    assert capsys.readouterr().out == " ".join(acl_rules("consumer", delayed=["orders"], reliable=["mails", "jobs"])) + "\n"


def test_names_can_be_prefixes_and_the_database_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acl", "dashboard", "--queue", "shop:", "--prefix", "--database", "3"]) == 0
    printed = capsys.readouterr().out.split()
    assert {"~delayq:{shop:*}:live", "&delayq:{shop:*}:wake", "+select"} <= set(printed)


@pytest.mark.parametrize("arguments", [["producer"], ["king", "--queue", "a"], ["producer", "--queue", "a b"]])
def test_what_cannot_work_is_said_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acl", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("delayq: ")
    assert captured.err.count("\n") == 1
