"""The queue to which a key belongs."""

from __future__ import annotations

import re

from hypothesis import assume, example, given
from hypothesis import strategies as st

from delayq import BadName
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq.admin.catalog import QUEUE_KEYS, known_queue, queue_of
from tests.support.names import names


def matches(key: str) -> bool:
    """Return whether a key matches the pattern, as the server reads it."""
    return re.match(QUEUE_KEYS.replace("*", ".*"), key, re.DOTALL) is not None


@given(names, st.integers(0, 1023))
def test_every_key_of_a_reliable_queue_names_the_queue(name: str, partition: int) -> None:
    try:
        keys = ReliableKeys.of(name, None, partition)
    except BadName:
        assume(False)
    # A name that ends like the continuation of a key cannot be told from a longer name.
    assume("}:" not in name and not name.startswith(("part:", "}")))
    others = (keys.remembered, keys.dead, keys.dead_messages, keys.paused, keys.schedules)
    for key in (*keys.messages, *others):
        assert queue_of(key) == known_queue(key) == ("reliable", name, partition)
        assert matches(key)


@given(names)
@example("{a}}")
def test_every_key_of_a_delayed_queue_names_the_queue(name: str) -> None:
    try:
        keys = DelayedKeys.of(name)
    except BadName:
        assume(False)
    for key in (keys.timeout, keys.ordered, keys.quarantine, keys.leases):
        queue = queue_of(key)
        assert queue is not None
        assert queue == known_queue(key)
        kind, queue_name, partition = queue
        assert (kind, partition) == ("delayed", 0)
        # "a" and "{a}" have the same keys.
        assert DelayedKeys.of(queue_name).timeout == keys.timeout
        assert matches(key)


@given(st.text(max_size=40))
def test_any_other_key_belongs_to_no_queue_or_is_one_whole_name(key: str) -> None:
    queue = queue_of(key)
    assert queue is None or queue[1]


def test_a_key_that_no_queue_has_belongs_to_none() -> None:
    others = ("", "orders", "delayq:{x}", "delayq:{}:waiting", "redis", "delayq:part:{x}:waiting")
    for key in (*others, "delayq:part:{1:000:x}:waiting", DelayedKeys.of("orders").ready):
        assert known_queue(key) is None, key
