"""Each role's rules cover its scripts and the keys of its own queues, and nothing else. A command
prints them.
"""

from __future__ import annotations

import functools
import re
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings

from delayq import BadInput, BadName
from delayq._redis.rights import commands_tried
from delayq._redisson.keys import RESERVED, DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import ROLES, acl_rules, scripts_of
from delayq.cli.app import run
from tests.support.depth import examples
from tests.support.names import every_key, names

if TYPE_CHECKING:
    from delayq.admin.acl import Kind, Role


KINDS: tuple[Kind, ...] = ("delayed", "reliable")


def rules(kind: str, role: Role, *queues: str, prefix: bool = False) -> list[str]:
    return acl_rules(
        role,
        delayed=queues if kind == "delayed" else (),
        reliable=queues if kind == "reliable" else (),
        prefix=prefix,
    )


def granted(kind: str, role: Role) -> set[str]:
    return {rule[1:].upper() for rule in rules(kind, role, "orders") if rule[0] == "+"}


def test_a_role_has_every_command_that_its_scripts_try_first() -> None:
    for kind, role in product(KINDS, ROLES):
        for script in scripts_of(kind, role):
            assert commands_tried(script) <= granted(kind, role), (role, script.name)


def test_a_viewer_has_no_command_that_writes() -> None:
    writes = re.compile(r"SET|ADD|REM|DEL|PUSH|POP|MOVE|LINK|EXPIRE|PUBLISH|STORE|TRIM|INCR|RENAME")
    for kind in KINDS:
        assert not [command for command in granted(kind, "dashboard") if writes.search(command)]


def test_rules_first_withdraw_all_rights_and_then_grant_named_keys_only() -> None:
    beyond = "KEYS SCAN RANDOMKEY DBSIZE FLUSHALL FLUSHDB CONFIG ACL CLIENT SCRIPT PSUBSCRIBE"
    for kind, role in product(KINDS, ROLES):
        assert rules(kind, role, "orders")[:3] == ["resetkeys", "resetchannels", "-@all"]
        assert not granted(kind, role) & {*beyond.split()}, (kind, role)


@functools.cache
def reading(pattern: str) -> re.Pattern[str]:
    """Compile a pattern as Redis reads it, as far as we write such."""
    parts = re.findall(r"\\(.)|(\*)|(\?)|(\[1-9\])|(.)", pattern, re.DOTALL)
    words = (
        ".*" if star else "." if one else digits or re.escape(escaped or plain)
        for escaped, star, one, digits, plain in parts
    )
    return re.compile("".join(words), re.DOTALL)


def matches(patterns: list[str], key: str) -> bool:
    return any(reading(pattern).fullmatch(key) for pattern in patterns)


KEYS: dict[str, type[DelayedKeys | ReliableKeys]] = {
    "delayed": DelayedKeys,
    "reliable": ReliableKeys,
}


def keys_of(kind: str, name: str) -> list[str]:
    """Return every key of a queue; none if it cannot have this name."""
    try:
        return every_key(KEYS[kind].of(name))
    except BadName:
        return []


def patterns_of(kind: str, name: str, *, prefix: bool = False) -> list[str]:
    """Return the patterns of keys and channels in the rules of all roles, if there are rules."""
    try:
        all_rules = [rule for role in ROLES for rule in rules(kind, role, name, prefix=prefix)]
    except BadName:
        return []
    return list(dict.fromkeys(rule[1:] for rule in all_rules if rule[0] in "~&"))


@given(names, names)
@settings(max_examples=examples(400))
def test_rules_reach_every_key_of_a_queue_and_none_of_another(name: str, other: str) -> None:
    # Redisson gives "a" and "{a}" the same keys.
    assume(other not in (name, f"{{{name}}}") and name != f"{{{other}}}")
    for kind in KEYS:
        patterns = patterns_of(kind, name)
        assert all(matches(patterns, key) for key in keys_of(kind, name) if patterns)
        for theirs in KEYS:
            assert not [key for key in keys_of(theirs, other) if matches(patterns, key)]


@given(names, names)
@settings(max_examples=examples(400))
def test_rules_of_a_prefix_reach_the_keys_of_its_queues(prefix: str, rest: str) -> None:
    for kind in KEYS:
        patterns = patterns_of(kind, prefix, prefix=True)
        if patterns and ("{" not in rest or "{" in prefix or kind == "reliable"):
            assert all(matches(patterns, key) for key in keys_of(kind, prefix + rest))


def test_a_name_that_no_acl_rule_can_hold_is_refused() -> None:
    for kind, name in product(KINDS, ("a b", "a\tb", "a\n", "a\0b", "", "\ufdd0", "a\x0bb")):
        with pytest.raises(BadName):
            rules(kind, "producer", name)
    # A prefix that reaches into other queues' keys.
    for reserved in RESERVED:
        for prefix in (reserved[:1], reserved, f"{reserved}x"):
            with pytest.raises(BadName):
                rules("delayed", "consumer", prefix, prefix=True)
    with pytest.raises(BadInput, match="name at least one queue"):
        acl_rules("producer")
    with pytest.raises(BadInput, match="role must be one of producer, consumer, admin, dashboard"):
        acl_rules("king", reliable=["orders"])  # type: ignore[arg-type]


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
