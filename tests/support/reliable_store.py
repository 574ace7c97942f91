"""The stored state of a reliable queue, seen from outside, and a way to let time pass for it.

The server's clock cannot be set, so everything stored is moved back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from delayq._reliable.keys import MESSAGES, PRIORITIES, ReliableKeys
from delayq.testing.time_travel import ADVANCE_RELIABLE

HOUR = 3600
_HOUR_US = HOUR * 1_000_000
REPORTS = (b":history", b":workers", b":workers:facts")
"""The ends of the keys in which clients report what they did."""

# Suspects have a moment as well, which is below 0.
_MOVE_SUSPECTS = """
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(0')) do
  redis.call('ZINCRBY', KEYS[1], -ARGV[1], id)
end
"""
_DUMP = """
local reply = {redis.call('TIME')}
for _, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  reply[#reply + 1] = kind == 'hash' and redis.call('HGETALL', key)
    or kind == 'zset' and redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    or kind == 'string' and {'value', redis.call('GET', key)} or {}
  reply[#reply + 1] = redis.call('PTTL', key)
end
return reply
"""
_WAITING = [f"waiting_{priority}" for priority in range(PRIORITIES - 1, -1, -1)]
_OTHERS = ("remembered", "dead", "dead_messages", "paused", "schedules", "record_times", "records")
_ALL = (*MESSAGES, *_OTHERS, "kept_slots", "settings", "awaited")


async def expire(raw: Any, keys: ReliableKeys) -> None:
    """Let all messages that have a time to live expire, if no worker has them."""
    if names := await raw.hkeys(keys.expiries):
        await raw.hset(keys.expiries, mapping=dict.fromkeys(names, "1.00"))
        await raw.zadd(keys.named("expiry_index"), dict.fromkeys(names, 1))


@dataclass(frozen=True)
class Stored:
    """Everything under a queue's keys. Moments are in microseconds from the server's now."""

    now: int
    live: dict[str, tuple[int, float]]
    """Priority and moment, by id: when it is due, or when its lease ends."""
    leases: dict[str, float]
    """Ends of leases, also of lost ones, by id."""
    order: list[str]
    """Ids: those that have or had a lease by its end, the others by priority, then due time."""
    tokens: dict[str, str]
    bodies: dict[str, bytes]
    attempts: dict[str, tuple[int, int]]
    """How many attempts were used before the lease, if there is one, and do not count, by id."""
    lost: dict[str, int]
    """How many leases in a row were lost, by id, where there was one."""
    suspects: set[str]
    """Ids of messages without a group that wait as suspects; these are in ``leases``, too."""
    expiries: dict[str, float]
    kept_slots: dict[str, float]
    """When the slots are freed at the latest that cancelled messages keep, by their names."""
    expiry_index: dict[str, float]
    """When each of these counts as absent, unless a worker takes it."""
    errors: dict[str, str]
    priorities: dict[str, int]
    remembered: dict[str, float]
    dead: list[str]
    dead_messages: dict[str, bytes]
    paused: bool
    schedules: dict[str, bytes]
    positions: dict[str, str]
    """The place of each message of a group in its line, by id."""
    group_members: list[str]
    group_waiting: dict[str, float]
    """When each waiting message of a group is due, by id; these are in ``live``, too."""
    group_turns: dict[str, float]
    suspect_turns: dict[str, float]
    record_times: dict[str, float]
    """When each record was changed last, by id, in order."""
    records: set[str]
    """Ids with a record."""
    checkpoints: set[str]
    """Ids of messages whose handlers have saved something."""
    records_end_in: tuple[int, int]
    """Milliseconds after which everything about records disappears; -1 for never, -2 if there is
    nothing."""

    def renamed(self, names: dict[str, str]) -> Stored:
        """Return a copy in which live messages have other ids."""

        def with_names(by_id: dict[str, Any]) -> dict[str, Any]:
            return {names.get(key, key): value for key, value in by_id.items()}

        fields = ("live", "leases", "tokens", "bodies", "attempts", "lost", "expiries", "errors")
        changed: dict[str, Any] = {
            each: with_names(getattr(self, each))
            for each in (*fields, "expiry_index", "priorities")
        }
        return replace(
            self,
            suspects={names[key] for key in self.suspects},
            order=[names[key] for key in self.order],
            **changed,
        )

    def demand_no_orphans(self) -> None:
        """Assert that every message is in one place, and every detail belongs to a message."""
        live = set(self.live)
        assert len(self.order) == len(live), "an id is in two sets"
        assert set(self.bodies) == live
        for details in (self.attempts, self.expiries, self.errors, self.priorities):
            assert set(details) <= live
        assert set(self.expiry_index) == set(self.expiries)
        for key, end in self.expiries.items():
            leased_until = self.leases.get(key, 0)
            if leased_until > 0:
                assert self.expiry_index[key] == max(end, leased_until)
            else:
                assert (self.expiry_index[key] < 0) == (end < 0)
        assert self.checkpoints <= live
        assert set(self.tokens) <= set(self.leases)
        assert {key for key, lost in self.lost.items() if lost > 1} >= self.suspects
        assert set(self.group_waiting) <= set(self.positions) <= {*live, *self.kept_slots}
        # A group that has settings of its own has a member without a place.
        lines = [member for member in self.group_members if not member.endswith("\0\x7f")]
        assert sorted(lines) == sorted(place + key for key, place in self.positions.items())
        assert {
            key: priority for key, (priority, _) in self.live.items() if priority
        } == self.priorities
        letters = {name for name in self.dead_messages if not name.endswith("\0")}
        assert set(self.dead) == letters
        # Further dead letters with the same id are listed under that id.
        stamps_of = {
            name: stamps.decode().split()
            for name, stamps in self.dead_messages.items()
            if name.endswith("\0")
        }
        listed = {f"{name}{stamp}" for name, stamps in stamps_of.items() for stamp in stamps}
        assert listed == {name for name in letters if "\0" in name}
        assert set(self.record_times) == self.records
        assert -1 not in self.records_end_in, "records stay for good"


class Store:
    """Looks at one partition of a queue over a connection that nothing else uses, bypassing the
    library.
    """

    def __init__(self, connection: Any, name: str, partition: int = 0) -> None:
        self.keys = ReliableKeys.of(name, partition=partition)
        self._raw = connection
        self._names = {name: self.keys.named(name) for name in _ALL}

    async def let_pass(self, seconds: float) -> None:
        """Let ``seconds`` pass for everything that is stored, but for batches, which would be
        forgotten.
        """
        batches, by_us = (self.keys.batches, self.keys.batch_members), int(seconds * 1_000_000)
        keys = [
            f"{key}:unmoved" if key in batches else key
            for key in self.keys.of_script(ADVANCE_RELIABLE)
        ]
        await self._raw.eval(_MOVE_SUSPECTS, 1, self.keys.leased, by_us)
        await self._raw.eval(ADVANCE_RELIABLE.text, len(keys), *keys, by_us)

    async def look(self) -> Stored:
        """Read everything at a single moment."""
        (seconds, microseconds), *parts = await self._raw.eval(
            _DUMP, len(self._names), *self._names.values()
        )
        now = int(seconds) * 1_000_000 + int(microseconds)
        found = dict(zip(self._names, map(_pairs, parts[::2]), strict=True))
        ends_in = dict(zip(self._names, parts[1::2], strict=True))

        def moments(name: str) -> dict[str, float]:
            return {key: float(moment) - now for key, moment in found[name].items()}

        def texts(name: str) -> dict[str, str]:
            return {key: text.decode() for key, text in found[name].items()}

        priorities = {key: int(priority) for key, priority in found["priorities"].items()}
        grouped, leases = moments("group_waiting"), moments("leased")
        suspects = {key for key, end in leases.items() if end + now < 0}
        leases = {key: end + 2**53 if key in suspects else end for key, end in leases.items()}
        waiting = [
            (key, (9 - place, due))
            for place, name in enumerate(_WAITING)
            for key, due in moments(name).items()
        ]
        placed = [(key, (priorities.get(key, 0), due)) for key, due in (grouped | leases).items()]
        records = texts("attempts")
        return Stored(
            now=now,
            live=dict([*waiting, *placed]),
            leases=leases,
            order=[*leases, *(key for key, _ in waiting), *grouped],
            tokens=texts("tokens"),
            bodies=found["bodies"],
            attempts={key: _attempts(record) for key, record in records.items()},
            lost={
                key: int(record.rpartition(":")[2])
                for key, record in records.items()
                if record.count(":") > 1
            },
            suspects=suspects,
            expiries=moments("expiries"),
            expiry_index=moments("expiry_index"),
            kept_slots=moments("kept_slots"),
            errors=texts("errors"),
            priorities=priorities,
            remembered=moments("remembered"),
            dead=list(found["dead"]),
            dead_messages=found["dead_messages"],
            paused=bool(found["paused"]),
            # The empty field counts how far their time has moved.
            schedules={name: record for name, record in found["schedules"].items() if name},
            positions=texts("positions"),
            group_members=list(found["group_members"]),
            group_waiting=grouped,
            group_turns=moments("group_turns"),
            suspect_turns=moments("suspect_turns"),
            record_times=moments("record_times"),
            records=set(found["records"]),
            checkpoints=set(found["checkpoints"]),
            records_end_in=(ends_in["record_times"], ends_in["records"]),
        )

    async def others(self) -> set[str]:
        """Return all keys that do not belong to the queue, except for reports of clients."""
        keys = [key for key in await self._raw.keys("*") if not key.endswith(REPORTS)]
        return {key.decode() for key in keys} - {*self._names.values()}

    async def keys_and_dumps(self) -> dict[str, bytes]:
        """Return everything on the server, as it is stored, except for reports of clients."""
        names = [key for key in await self._raw.keys("*") if not key.endswith(REPORTS)]
        keys = sorted(key.decode() for key in names)
        return {key: await self._raw.dump(key) for key in keys}


def _attempts(record: str) -> tuple[int, int]:
    attempt_count, uncounted = record.partition(":")[0].split("-")
    return int(attempt_count), int(uncounted)


def hours(microseconds: float) -> int:
    """Round a moment to whole hours, so that the time the test itself takes does not count."""
    return round(microseconds / _HOUR_US)


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
