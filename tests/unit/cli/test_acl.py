"""``delayq acl``."""

from __future__ import annotations

import pytest

from delayq.admin.acl import acl_rules
from delayq.cli.app import run


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


NEEDED = ("producer", "a")


@pytest.mark.parametrize(
    "arguments",
    [
        [*NEEDED, "--servers", "two"],
        [*NEEDED, "--durability", "much"],
        *([*NEEDED, "--partitions", number] for number in ("0", "9999")),
        *(["producer"], ["king", "a"], ["producer", "a b"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["acl", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
