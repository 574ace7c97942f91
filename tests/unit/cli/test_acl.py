"""``delayq acl``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq.admin.acl import acl_rules
from delayq.cli.app import run

if TYPE_CHECKING:
    import pytest


def test_it_prints_the_rules_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acl", "consumer", "mails", "reliable:jobs", "delayed:orders"]) == 0
    assert (
        capsys.readouterr().out
        == " ".join(acl_rules("consumer", delayed=["orders"], reliable=["mails", "jobs"])) + "\n"
    )


def test_names_can_be_prefixes_and_the_database_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acl", "dashboard", "shop:", "--prefix", "--database", "3"]) == 0
    printed = capsys.readouterr().out.split()
    assert {"~delayq:{shop:*}:waiting", "&delayq:{shop:*}:settings", "+select"} <= set(printed)


def test_servers_partitions_and_promises_need_more(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--partitions", "16", "--servers", "cluster", "--durability", "replicas:2"]
    assert run(["acl", "producer", "mails", *more]) == 0
    printed = capsys.readouterr().out.split()
    pattern = "~delayq:part:{[0-9][0-9]:???:mails}:waiting"
    assert {
        "+cluster|slots",
        "+asking",
        "+wait",
        # The first partition has the queue's own keys.
        "~delayq:{mails}:waiting",
        "~delayq:part:{[0-9]:???:mails}:waiting",
        pattern,
    } <= set(printed)
    more = ["--servers", "sentinel", "--durability", "fsync"]
    assert run(["acl", "producer", "mails", *more]) == 0
    assert {"+waitaof"} <= set(capsys.readouterr().out.split())


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        *("producer a --servers two", "producer a --durability much", "producer", "king a"),
        *("producer a --partitions 0", "producer a --partitions 9999"),
    ):
        assert run(["acl", *line.split()]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1), line
    assert run(["acl", "producer", "a b"]) == 2
