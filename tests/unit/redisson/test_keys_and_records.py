"""Redisson's names, bytes and scores, and the confirmations that a failover may lose."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from redis.crc import key_slot

from delayq._redis.slots import hash_tag, slot_of
from delayq._redisson.keys import RESERVED, DelayedKeys
from delayq._redisson.records import PendingRecord, id_of, pack, parse_score, payload_of, score_of
from delayq._redisson.store import DelayedDepth
from delayq._redisson.take_calls import _MAX_CONFIRMATIONS, _REPLICA_LAG, _Confirmations
from delayq._reliable.keys import ReliableKeys
from delayq.errors import BadName, ServerUnavailable
from tests.support.cases import naming
from tests.support.names import every_key, names

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_keys_of_a_plain_name_carry_it_in_braces() -> None:
    keys = DelayedKeys.of("orders")
    assert (keys.ready, keys.ordered, keys.timeout, keys.channel) == (
        "orders",
        "redisson_delay_queue:{orders}",
        "redisson_delay_queue_timeout:{orders}",
        "redisson_delay_queue_channel:{orders}",
    )
    # A name with a brace keeps its own hash tag.
    assert DelayedKeys.of("{t1}:orders").ordered == "redisson_delay_queue:{t1}:orders"
    assert DelayedKeys.of("a{b}c{d}").timeout == "redisson_delay_queue_timeout:a{b}c{d}"


@given(
    st.one_of(st.text(alphabet="ab{}é\udc80"), st.text().filter(lambda text: text.isprintable()))
)
def test_a_key_lies_in_the_slot_in_which_redis_looks_for_it(key: str) -> None:
    assert slot_of(key) == key_slot(key.encode(errors="surrogateescape"))


@given(st.text())
def test_a_reliable_queue_has_any_name_that_does_not_close_its_braces(name: str) -> None:
    try:
        ReliableKeys.of(name)
    except BadName:
        assert not name or name.startswith("}")


KINDS: tuple[Callable[..., DelayedKeys | ReliableKeys], ...] = (
    *(DelayedKeys.of, ReliableKeys.of),
    partial(ReliableKeys.of, partition=7),
)


def keys_of(kind: Callable[..., DelayedKeys | ReliableKeys], name: str) -> list[str]:
    """Return all keys of a queue, or of its partition: none if it cannot have this name."""
    try:
        return every_key(kind(name))
    except BadName:
        return []


@given(names, names)
def test_two_queues_share_no_key(name: str, other: str) -> None:
    # Redisson gives "a" and "{a}" the same keys, except for the ready list: see the next test.
    assume(other not in (name, f"{{{name}}}") and name != f"{{{other}}}")
    theirs = [key for kind in KINDS for key in keys_of(kind, other)]
    ours = [key for kind in KINDS for key in keys_of(kind, name)]
    assert len({*ours}) == len(ours)
    assert not {*ours} & {*theirs}
    for kind in KINDS:
        assert len({hash_tag(key) for key in keys_of(kind, name)}) <= 1


@given(names)
def test_a_queue_that_is_called_as_another_ones_key_shares_none_with_it(name: str) -> None:
    for kind in KINDS:
        ours = {*keys_of(kind, name)}
        theirs = (keys_of(their_kind, key) for their_kind in KINDS for key in ours - {name})
        assert not ours & {*chain(*theirs)}


def test_a_delayed_queue_is_not_called_as_another_queues_key() -> None:
    for reserved in RESERVED:
        with naming(reserved):
            with pytest.raises(BadName, match="a key of another queue"):
                DelayedKeys.of(f"{reserved}{{orders}}")
            with pytest.raises(BadName, match="a key of another queue"):
                DelayedKeys.of("orders", (reserved + "{%s}").__mod__)
            # All keys of a reliable queue have a prefix, so none is taken for another queue's.
            ReliableKeys.of(f"{reserved}{{orders}}")


def test_a_name_has_512_bytes_at_most() -> None:
    for kind in KINDS:
        kind("é" * 256)
        for name in ("é" * 256 + "x", "x" * 513):
            with naming(kind, name), pytest.raises(BadName, match="at most 512 bytes, not 513"):
                kind(name)
        with naming(kind), pytest.raises(BadName, match="at most 512 bytes, not 514"):
            kind("x" * 512, "p:{}".format)


def test_a_record_is_redissons_byte_for_byte_and_older_forms_are_read() -> None:
    record = pack(b"ABCDEFGH", b"hello", 8)
    assert record == bytes.fromhex("08414243444546474805000000000000 0068656c6c6f".replace(" ", ""))
    assert id_of(record) == b"ABCDEFGH"
    assert payload_of(record) == b"hello"
    # Of older versions and other servers.
    cases = [
        ("2eb990cba71cd2430e000000000000002268656c6c6f776f726c64303022", b'"helloworld00"'),
        ("e38add7d942ec14306000000223030303122", b'"0001"'),
        ("08414243444546474805000000" + b"hello".hex(), b"hello"),
    ]
    for written, payload in cases:
        with naming(written, payload):
            assert payload_of(bytes.fromhex(written)) == payload


@given(st.binary(min_size=8, max_size=8), st.binary(max_size=300), st.sampled_from([4, 8]))
def test_a_packed_record_is_read_back(record_id: bytes, payload: bytes, length_bytes: int) -> None:
    assert payload_of(pack(record_id, payload, length_bytes)) == payload


# A record cut after 18 bytes reads as a record of a 32-bit server: nothing in the format tells them
# apart.
def test_a_cut_record_is_no_record() -> None:
    for cut in set(range(22)) - {18}:
        with naming(cut):
            assert payload_of(pack(b"ABCDEFGH", b"hello", 8)[:cut]) is None


def test_a_score_is_a_moment_in_microseconds() -> None:
    cases = [
        (b"0", 0),
        (b"1700000000123", 1_700_000_000_123_000),
        (b"9007199254740992", 2**53 * 1000),
        (b"9007199254740991", (2**53 - 1) * 1000),
        # Other programs may have left these.
        (b"1700000000123.25", 1_700_000_000_124_000),
        (b"-5", 0),
        (b"-inf", 0),
        (b"inf", 2**53 * 1000),
        (b"1e300", 2**53 * 1000),
    ]
    for score, moment_us in cases:
        with naming(score, moment_us):
            assert parse_score(score) == moment_us
            assert PendingRecord(b"", score).due_us == moment_us


def test_a_moment_in_whole_milliseconds_has_a_whole_score() -> None:
    for ms in [0, 1, 1_700_000_000_123, 2**53 - 1, 2**53]:
        with naming(ms):
            assert score_of(ms * 1000) == str(ms)
    # Between two milliseconds, the score is between theirs.
    assert score_of(1_700_000_000_123_456) == "1700000000123.456"


def test_a_queue_without_pending_messages_is_not_overdue() -> None:
    assert DelayedDepth(0, 3, 1, None).overdue_us(5_000) == 0
    assert DelayedDepth(1, 0, 0, 9_000).overdue_us(5_000) == 0
    assert DelayedDepth(1, 0, 0, 2_000).overdue_us(5_000) == 3_000


class Case:
    """Confirmations from a server that can be replaced, on a clock that can be set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.path: object = "the old master"
        self.confirmed = _Confirmations(self._find, lambda: self.now)

    def _find(self) -> object:
        if self.path is None:
            raise ServerUnavailable("no master")
        return self.path

    def in_doubt(self) -> list[str]:
        return [*self.confirmed.in_doubt()]


def test_confirmations_that_the_replicas_have_are_forgotten() -> None:
    case = Case()
    case.confirmed.add("a")
    case.now += _REPLICA_LAG
    case.confirmed.add("b")
    case.now += 0.1
    assert case.in_doubt() == []
    case.path = "another"
    assert case.in_doubt() == ["b"]


def test_while_there_is_no_master_nothing_is_forgotten() -> None:
    case = Case()
    case.confirmed.add("a")
    case.path = None
    case.now += 100 * _REPLICA_LAG
    assert case.in_doubt() == []
    case.path = "another"
    assert case.in_doubt() == ["a"]


def test_memory_is_bounded() -> None:
    case = Case()
    for number in range(_MAX_CONFIRMATIONS + 1):
        case.confirmed.add(str(number))
    case.path = "another"
    assert case.in_doubt() == [str(number) for number in range(1, _MAX_CONFIRMATIONS + 1)]
