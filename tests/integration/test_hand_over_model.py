"""The server's record of messages on their way to a caller, checked against a plain model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis

from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack, payload_of
from delayq._redisson.store import ACK, GIVE_BACK, POLL_PENDING, TRANSFER
from tests.support.depth import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq._redis.scripts import Script
    from tests.support.servers import PrivateServer

KEYS = DelayedKeys.of("orders")
HOUR_US = 3_600_000_000
FAR_MS = 4e12


class Desk:
    """A server, the calls of its clients, and the place where each message must be."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.out: dict[str, list[bytes]] = {}  # by call, neither confirmed nor given back
        self.fenced: set[str] = set()  # calls that were given up, or were hand-backs
        self.done: list[bytes] = []  # what callers have for good
        self.offered = 0
        self.due_ms: dict[bytes, float] = {}  # of those that were offered as pending
        self._loaded: dict[str, Any] = {}

    def run(self, script: Script, keys: dict[str, str], args: dict[str, Any], *rest: bytes) -> Any:
        names = [keys.get(name) or getattr(KEYS, name) for name in script.keys]
        plain = [name for name in script.args if not name.endswith("...")]
        if script.name not in self._loaded:
            self._loaded[script.name] = self.raw.register_script(script.text)
        return self._loaded[script.name](keys=names, args=[*(args[name] for name in plain), *rest])

    def move(self, call: str, *, take: int, most_bytes: int = 1000) -> list[Any]:
        """Transfer what is due, and hand out ``take`` messages under the name of a call."""
        limits: dict[str, Any] = {
            "limit": 100,
            "take": take,
            "most_bytes": most_bytes,
            "lease_us": HOUR_US,
        }
        args = limits | {"each": 0, "call": call, "signature": ""}
        return list(self.run(TRANSFER, {"fence": KEYS.fence(call)}, args))

    def offer(self, count: int, *, due_ms: float | None) -> None:
        """Offer messages that are pending until then; None: they are ready."""
        for _ in range(count):
            payload = b"%d" % self.offered
            self.offered += 1
            if due_ms is None:
                self.raw.rpush(KEYS.ready, payload)
            else:
                record = pack(self.offered.to_bytes(8, "big"), payload, 8)
                self.due_ms[payload] = due_ms
                self.raw.zadd(KEYS.timeout, {record: due_ms})
                self.raw.rpush(KEYS.ordered, record)

    def ready(self) -> list[bytes]:
        return list(self.raw.lrange(KEYS.ready, 0, -1))

    def pending(self) -> list[bytes]:
        return [payload_of(record) or b"" for record in self.raw.lrange(KEYS.ordered, 0, -1)]

    def due(self) -> list[bytes]:
        return [payload_of(record) or b"" for record in self.raw.zrangebyscore(KEYS.timeout, 0, 9)]

    def transfer(self, call: str, take: int) -> None:
        before = [*self.ready(), *self.due()]
        handed = self.move(call, take=take)[-1]
        assert handed == ([] if call in self.fenced else before[:take])
        if handed:
            self.out[call] = handed

    def poll(self, call: str, limit: int) -> None:
        before = self.pending()
        limits = {"limit": limit, "most_bytes": 1000, "listed": 1, "lease_us": HOUR_US}
        args: dict[str, Any] = limits | {"token": f"{call}:pending"}
        taken, handed = self.run(POLL_PENDING, {"fence": KEYS.fence(call)}, args)
        assert handed == ([] if call in self.fenced else before[:limit])
        assert taken == len(handed)
        if handed:
            self.out[f"{call}:pending"] = handed

    def confirm(self, token: str) -> None:
        assert self.run(ACK, {}, {}, token.encode()) == [int(token in self.out)]
        self.done += self.out.pop(token, [])

    def give_back(self, token: str, payloads: list[bytes]) -> None:
        call = token.partition(":")[0]
        args = {"fence_ms": 3_600_000, "call": token, "places": 0}
        count = self.run(GIVE_BACK, {"fence": KEYS.fence(call)}, args, *payloads)
        expected = [] if call in self.fenced else [*self.out.pop(token, []), *payloads]
        self.fenced.add(call)
        assert count == len(expected)

    def end_leases(self) -> None:
        """Let time pass until all leases have ended, then have a client look."""
        for token in self.out:
            self.raw.zadd(KEYS.leases, {token: 1})
        assert self.move("look", take=0)[4] == sum(map(len, self.out.values()))
        self.out.clear()

    def check(self) -> None:
        held = [payload for payloads in self.out.values() for payload in payloads]
        everywhere = Counter([*self.ready(), *self.pending(), *held, *self.done])
        # Each message is in one place.
        assert everywhere == Counter(b"%d" % number for number in range(self.offered))
        assert self.raw.hlen(KEYS.leased) == self.raw.zcard(KEYS.leases) == len(self.out)
        # A message that returns to the pending ones has its due time again.
        scores = dict(self.raw.zrange(KEYS.timeout, 0, -1, withscores=True))
        assert {payload_of(record): score for record, score in scores.items()} == {
            payload: self.due_ms[payload] for payload in self.pending()
        }


CALLS = st.sampled_from(["a", "b"])
COUNTS = st.integers(1, 5)
STEPS = st.one_of(
    st.tuples(st.just("offer"), COUNTS, st.sampled_from([None, 1, 9, FAR_MS])),
    st.tuples(st.just("transfer"), CALLS, COUNTS),
    st.tuples(st.just("poll"), CALLS, COUNTS),
    st.tuples(st.just("confirm"), CALLS, st.booleans()),
    st.tuples(st.just("give back"), CALLS, st.booleans()),
    st.tuples(st.just("hand back"), CALLS, COUNTS),
    st.tuples(st.just("time passes"), st.none(), st.none()),
)


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[Any]:
    with Redis.from_url(server.url, socket_timeout=60) as raw:
        yield raw


@pytest.mark.every_server
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=8, max_size=30))
# What returns is due before what is due meanwhile.
@example(steps=[("offer", 1, 1), ("poll", "a", 1), ("offer", 1, 9), ("time passes", None, None)])
def test_every_message_is_in_one_place_after_any_calls(raw: Any, steps: list[Any]) -> None:
    raw.flushall()
    desk = Desk(raw)
    handed_back: dict[str, list[bytes]] = {}
    for step, first, second in steps:
        match step:
            case "offer":
                desk.offer(first, due_ms=second)
            case "transfer" if first not in desk.out:
                # Each call has a name of its own, but may be carried out after it was given up.
                desk.transfer(first, second)
            case "poll" if f"{first}:pending" not in desk.out:
                desk.poll(first, second)
            case "confirm":
                desk.confirm(f"{first}:pending" if second else first)
            case "give back":
                desk.give_back(f"{first}:pending" if second else first, [])
            case "hand back":
                # By value, under a name of its own; a retry is the very same call.
                name = f"back-{first}"
                if name not in handed_back:
                    handed_back[name], desk.done = desk.done[-second:], desk.done[:-second]
                desk.give_back(name, handed_back[name])
            case "time passes":
                desk.end_leases()
        desk.check()


@pytest.mark.every_server
def test_returned_messages_come_first_and_in_order(raw: Any) -> None:
    desk = Desk(raw)
    desk.offer(10, due_ms=None)
    desk.transfer("a", 3)
    desk.transfer("b", 3)
    desk.give_back("b", [])
    desk.give_back("a", [])
    assert desk.ready() == [b"%d" % number for number in range(10)]
    desk.offer(6, due_ms=FAR_MS)
    desk.poll("c", 2)
    desk.poll("d", 2)
    desk.give_back("d:pending", [])
    desk.give_back("c:pending", [])
    assert desk.pending() == [b"%d" % number for number in range(10, 16)]


@pytest.mark.every_server
def test_an_answer_is_bounded_by_bytes_but_never_empty(raw: Any) -> None:
    desk = Desk(raw)
    payloads = [b"%d" % number * 400 for number in range(5)]
    raw.rpush(KEYS.ready, *payloads)
    handed = [desk.move(f"n{number}", take=100)[-1] for number in range(3)]
    # What did not fit went back in order.
    assert handed == [payloads[:2], payloads[2:4], payloads[4:]]
    raw.rpush(KEYS.ready, b"x" * 5000, b"y")
    assert desk.move("large", take=100)[-1] == [b"x" * 5000]
    assert desk.ready() == [b"y"]
