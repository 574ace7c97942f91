"""Removing records from the ordered list leaves exactly the others, in order."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack
from delayq._redisson.store import CANCEL, TRANSFER
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.servers import PrivateServer

KEYS = DelayedKeys.of("orders")


@st.composite
def lists(draw: st.DrawFn) -> tuple[list[bytes], list[int]]:
    """Draw records of delayq and Java in offer order, and the positions of those that leave."""
    size = draw(st.integers(1, 400))
    # Hypothesis would draw each number by itself, and take most of the time.
    seed = random.Random(draw(st.integers(0, 2**32)))
    java = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]))
    # Spaced evenly, in bursts, or with a gap of a year.
    steps = draw(
        st.sampled_from([[1000], [1, 1, 1, 10**9], [1, 10**6], [1] * 50 + [365 * 86_400 * 10**6]])
    )
    moment = int(time.time() * 1_000_000) - 40_000_000_000_000
    records = []
    for place in range(size):
        moment += seed.choice(steps)
        record_id = (
            (moment * 4096 + seed.randrange(3)).to_bytes(8, "big")
            if seed.random() >= java
            else seed.randbytes(8)
        )
        if seed.random() < 0.02:
            # Before Redisson 3.21.1.
            records.append(seed.randbytes(8) + (4).to_bytes(8, "little") + b"%4d" % place)
        else:
            records.append(pack(record_id, b"%d" % place, 8))
    share = draw(st.sampled_from([0.01, 0.1, 0.5, 1.0]))
    leaving = [place for place in range(size) if seed.random() < share] or [0]
    where = draw(st.sampled_from(["anywhere", "head", "tail"]))
    if where != "anywhere":
        leaving = (
            list(range(len(leaving))) if where == "head" else list(range(size - len(leaving), size))
        )
    seed.shuffle(leaving)
    return records, leaving[:100]


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[Any]:
    with Redis.from_url(server.url, socket_timeout=60) as raw:
        yield raw


def run(raw: Any, script: Any, *args: Any) -> Any:
    return raw.eval(script.text, len(script.keys), *args)


SHORT = "FEW_COMPARISONS = 8192"


@pytest.mark.every_server
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lists(), st.sampled_from([SHORT, "FEW_COMPARISONS = 0"]))
def test_cancelling_keeps_others(raw: Any, case: tuple[list[bytes], list[int]], short: str) -> None:
    records, leaving = case
    # Short lists are searched as long ones are, too.
    assert SHORT in CANCEL.text
    text = CANCEL.text.replace(SHORT, short)
    raw.flushall()
    raw.zadd(KEYS.timeout, dict.fromkeys(records, 4e12))
    raw.rpush(KEYS.ordered, *records)
    going = [records[place] for place in leaving]
    assert raw.eval(text, 2, KEYS.timeout, KEYS.ordered, 0, *going) == len(leaving)
    gone = set(leaving)
    left = [record for place, record in enumerate(records) if place not in gone]
    assert raw.lrange(KEYS.ordered, 0, -1) == left
    assert raw.zcard(KEYS.timeout) == len(left)


SIZE = 2000
DUE: dict[str, Callable[[int], int]] = {
    "in offer order": lambda place: 1000 + place,
    "newest first": lambda place: 1000 + SIZE - place,
    "scattered": lambda place: 1000 + place * 7919 % SIZE,
    "all at once": lambda _place: 1000,
}


@pytest.mark.every_server
@pytest.mark.parametrize("order", DUE)
def test_due_records_leave_both_structures_in_order(raw: Any, order: str) -> None:
    due = DUE[order]
    start = int(time.time() * 1_000_000) - SIZE * 1000
    records = [
        pack(((start + place * 1000) * 4096).to_bytes(8, "big"), b"%d" % place, 8)
        for place in range(SIZE)
    ]
    raw.zadd(KEYS.timeout, {record: due(place) for place, record in enumerate(records)})
    raw.rpush(KEYS.ordered, *records)
    keys = [KEYS.ready, KEYS.timeout, KEYS.ordered, KEYS.quarantine, "fence"]
    keys += [KEYS.leases, KEYS.leased, KEYS.turns]
    for step in range(1, 6):
        assert run(raw, TRANSFER, *keys, 100, 0, 0, 1000, 0, "call", "")[2:4] == [100, 0]
        assert raw.llen(KEYS.ordered) == raw.zcard(KEYS.timeout) == SIZE - step * 100
    expected = sorted(range(SIZE), key=lambda place: (due(place), place))
    assert [int(payload) for payload in raw.lrange(KEYS.ready, 0, -1)] == expected[:500]
    assert raw.lrange(KEYS.ordered, 0, -1) == [records[place] for place in sorted(expected[500:])]


# The time between two offers in microseconds, by the place of the second one.
MANY = 50_000
PACES: dict[str, Callable[[int], int]] = {
    "evenly": lambda _: 1000,
    "in bursts": lambda place: 1 if place % 5000 else 40_000,
    "faster and faster": lambda place: 1 + int(1.0002 ** (MANY - place)),
}


@pytest.mark.parametrize("pace", PACES)
def test_no_walk_for_single_records(raw: Any, pace: str) -> None:
    moment, records = 1_700_000_000_000_000, []
    for place in range(MANY):
        moment += PACES[pace](place)
        records.append(pack((moment * 4096).to_bytes(8, "big"), b"%d" % place, 8))
    raw.rpush(KEYS.ordered, *records)
    # As in a list of many more records: less of it is seen at a time.
    around = "LOOK_AROUND = 24"
    assert around in CANCEL.text
    text = CANCEL.text.replace(around, "LOOK_AROUND = 1")
    everywhere = range(70, MANY, MANY // 40)
    for going in (everywhere, range(30, 70), range(MANY - 197, MANY - 8)):
        some = [records[place] for place in going]
        raw.zadd(KEYS.timeout, dict.fromkeys(some, 4e12))
        raw.config_resetstat()
        assert raw.eval(text, 2, KEYS.timeout, KEYS.ordered, 0, *some) == len(some)
        # One pass removes all of them.
        assert raw.info("commandstats")["cmdstat_lrem"]["calls"] == 1
        assert raw.lpos(KEYS.ordered, some[0]) is None


@pytest.mark.every_server
def test_a_record_in_one_structure_alone_is_cancelled(raw: Any) -> None:
    a, b, c = (pack(record_id, b"1", 8) for record_id in (b"ABCDEFGH", b"ABCDEFGI", b"ABCDEFGJ"))
    raw.zadd(KEYS.timeout, dict.fromkeys((a, b), 4e12))
    raw.rpush(KEYS.ordered, b, c)
    counts = [
        run(raw, CANCEL, KEYS.timeout, KEYS.ordered, stale, record)
        # What is only in the list goes on request.
        for stale, record in ((0, a), (0, c), (1, c), (1, c))
    ]
    assert counts == [1, 0, 1, 0]
    assert raw.lrange(KEYS.ordered, 0, -1) == raw.zrange(KEYS.timeout, 0, -1) == [b]
