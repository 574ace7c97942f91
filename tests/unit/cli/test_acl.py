"""``delayq acl``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq.admin.acl import acl_rules
from delayq.cli.app import run

if TYPE_CHECKING:
    import pytest


def test_the_acl_command_prints_rules_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def rules(line: str) -> list[str]:
        assert run(["acl", *line.split()]) == 0
        (printed,) = capsys.readouterr().out.splitlines()
        return printed.split()

    printed_rules = rules("consumer mails reliable:jobs delayed:orders")
    assert printed_rules == [*acl_rules("consumer", delayed=["orders"], reliable=["mails", "jobs"])]
    printed_rules = rules("dashboard shop: --prefix --database 3")
    assert {"~delayq:{shop:*}:waiting", "&delayq:{shop:*}:settings", "+select"} <= {*printed_rules}
    printed_rules = rules(
        "producer mails --partitions 16 --servers cluster --durability replicas:2"
    )
    # The first partition has the queue's own keys.
    keys = {"~delayq:{mails}:waiting", "~delayq:part:{[0-9]:???:mails}:waiting"}
    keys |= {"~delayq:part:{[0-9][0-9]:???:mails}:waiting"}
    assert {"+cluster|slots", "+asking", "+wait", *keys} <= {*printed_rules}
    assert "+waitaof" in rules("producer mails --servers sentinel --durability fsync")


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        *("producer a --servers two", "producer a --durability much", "producer", "king a"),
        *("producer a --partitions 0", "producer a --partitions 9999"),
    ):
        assert run(["acl", *line.split()]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1), line
    assert run(["acl", "producer", "a b"]) == 2
