"""The stored state of a reliable queue, seen from outside, and a way to let time pass for it.

The server's clock cannot be set, so everything stored is moved back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from delayq._reliable.keys import ReliableKeys

HOUR = 3600
_HOUR_US = HOUR * 1_000_000
REPORTS = (b":history", b":workers", b":workers:facts")
"""The ends of the keys in which clients report what they did."""

_PASS = """
local function back(moment) return string.format('%.2f', moment - ARGV[1]) end
local leased = redis.call('ZRANGE', KEYS[11], 0, -1, 'WITHSCORES')
for i = 1, #leased, 2 do redis.call('HSETNX', KEYS[12], leased[i], leased[i + 1]) end
for at = 1, 34 do
  if at < 12 or at == 18 or at == 19 or at > 24 and at < 28 or at == 30 or at > 32 then
    for _, id in ipairs(redis.call('ZRANGE', KEYS[at], 0, -1)) do
      redis.call('ZINCRBY', KEYS[at], -ARGV[1], id)
    end
  end
end
-- Move the time of the offer, which stands behind this.
local function move_offers(hash, behind)
  local all = redis.call('HGETALL', hash)
  for i = 1, #all, 2 do
    local whole = all[i + 1]
    local from = string.match(whole, '^' .. behind .. '()') or #whole + 1
    local enqueued = tonumber(string.sub(whole, from, from + 15))
    if enqueued then
      local head, rest = string.sub(whole, 1, from - 1), string.sub(whole, from + 16)
      redis.call('HSET', hash, all[i], head .. string.format('%016.0f', enqueued - ARGV[1]) .. rest)
    end
  end
end
move_offers(KEYS[13], '')
move_offers(KEYS[20], '[^\\n]*\\n')
move_offers(KEYS[31], '%a+ ')
local records = redis.call('HGETALL', KEYS[14])
for i = 1, #records, 2 do
  local used, due, mark = string.match(records[i + 1], '^(%d+%-%d+:)([%d.]+)(.*)$')
  if used then redis.call('HSET', KEYS[14], records[i], used .. back(due) .. mark) end
end
local expiries = redis.call('HGETALL', KEYS[15])
for i = 1, #expiries, 2 do redis.call('HSET', KEYS[15], expiries[i], back(expiries[i + 1])) end
local function moved(text, level)
  local from = string.find(text, '\\0', 1, true) + level
  if #text < from + 19 then return text end
  local moment = string.format('%019.2f', string.sub(text, from + 1, from + 19) - ARGV[1])
  return string.sub(text, 1, from) .. moment .. string.sub(text, from + 20)
end
local places = redis.call('HGETALL', KEYS[23])
for i = 1, #places, 2 do redis.call('HSET', KEYS[23], places[i], moved(places[i + 1], 1)) end
local turn = redis.call('HGET', KEYS[29], 'ungrouped_turn')
if turn then redis.call('HSET', KEYS[29], 'ungrouped_turn', back(turn)) end
for _, at in ipairs({28, 30, 31}) do
  local left = redis.call('PTTL', KEYS[at])
  if left > 0 then redis.call('PEXPIRE', KEYS[at], math.ceil(left - ARGV[1] / 1000)) end
end
for at, level in pairs({[24] = 1, [28] = 0}) do
  for _, member in ipairs(redis.call('ZRANGE', KEYS[at], 0, -1)) do
    -- In this order, the set is never empty, so that it keeps its time to live.
    redis.call('ZADD', KEYS[at], 0, moved(member, level))
    if moved(member, level) ~= member then redis.call('ZREM', KEYS[at], member) end
  end
end
"""

_DUMP = """
local reply = {redis.call('TIME')}
for at = 1, 11 do reply[#reply + 1] = redis.call('ZRANGE', KEYS[at], 0, -1, 'WITHSCORES') end
for at = 12, 17 do reply[#reply + 1] = redis.call('HGETALL', KEYS[at]) end
for at = 18, 19 do reply[#reply + 1] = redis.call('ZRANGE', KEYS[at], 0, -1, 'WITHSCORES') end
reply[#reply + 1] = redis.call('HGETALL', KEYS[20])
reply[#reply + 1] = redis.call('EXISTS', KEYS[21])
reply[#reply + 1] = redis.call('HGETALL', KEYS[22])
reply[#reply + 1] = redis.call('HGETALL', KEYS[23])
for at = 24, 28 do reply[#reply + 1] = redis.call('ZRANGE', KEYS[at], 0, -1, 'WITHSCORES') end
reply[#reply + 1] = redis.call('ZRANGE', KEYS[30], 0, -1, 'WITHSCORES')
reply[#reply + 1] = redis.call('HGETALL', KEYS[31])
for at = 30, 31 do reply[#reply + 1] = redis.call('PTTL', KEYS[at]) end
for at = 33, 34 do reply[#reply + 1] = redis.call('ZRANGE', KEYS[at], 0, -1, 'WITHSCORES') end
reply[#reply + 1] = redis.call('HKEYS', KEYS[35])
return reply
"""


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
    rate_log: list[str]
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
        first_keys = ("remembered", "dead", "dead_messages", "paused", "schedules")
        later_keys = ("settings", "record_times", "records", "awaited")
        self._names = (
            *self.keys.messages[:17],
            *(getattr(self.keys, name) for name in first_keys),
            *self.keys.messages[17:-2],
            *(getattr(self.keys, name) for name in later_keys),
            self.keys.named("expiry_index"),
            self.keys.kept_slots,
            self.keys.named("checkpoints"),
        )

    async def let_pass(self, seconds: float) -> None:
        """Let ``seconds`` pass for everything that is stored."""
        await self._raw.eval(_PASS, len(self._names), *self._names, int(seconds * 1_000_000))

    async def look(self) -> Stored:
        """Read everything at a single moment."""
        (seconds, microseconds), *parts = await self._raw.eval(
            _DUMP, len(self._names), *self._names
        )
        now = int(seconds) * 1_000_000 + int(microseconds)
        *sets, leases = [
            {key: float(moment) - now for key, moment in _pairs(part).items()}
            for part in parts[:11]
        ]
        suspects = {key for key, end in leases.items() if end + now < 0}
        leases = {key: end + 2**53 if key in suspects else end for key, end in leases.items()}
        hashes = [_pairs(part) for part in parts[11:17]]
        tokens, bodies, attempts, expiries, errors, priorities = hashes
        done, dead = (_pairs(part) for part in parts[17:19])
        waiting = [(key, (at, sets[at][key])) for at in range(9, -1, -1) for key in sets[at]]
        grouped, turns, trials = (
            {key: float(moment) - now for key, moment in _pairs(part).items()}
            for part in parts[24:27]
        )
        waiting += [(key, (int(priorities.get(key, 0)), due)) for key, due in grouped.items()]
        leased = {key: (int(priorities.get(key, 0)), end) for key, end in leases.items()}
        return Stored(
            now=now,
            live={**dict(waiting), **leased},
            leases=leases,
            order=[*leases, *(key for key, _ in waiting)],
            tokens={key: token.decode() for key, token in tokens.items()},
            bodies=bodies,
            attempts={key: _attempts(record) for key, record in attempts.items()},
            lost={
                key: int(record.rpartition(b":")[2])
                for key, record in attempts.items()
                if record.count(b":") > 1
            },
            suspects=suspects,
            expiries={key: float(end) - now for key, end in expiries.items()},
            expiry_index={key: float(end) - now for key, end in _pairs(parts[32]).items()},
            kept_slots={key: float(end) - now for key, end in _pairs(parts[33]).items()},
            errors={key: error.decode() for key, error in errors.items()},
            priorities={key: int(priority) for key, priority in priorities.items()},
            remembered={key: float(end) - now for key, end in done.items()},
            dead=list(dead),
            dead_messages=_pairs(parts[19]),
            paused=bool(parts[20]),
            schedules=_pairs(parts[21]),
            positions={key: place.decode() for key, place in _pairs(parts[22]).items()},
            group_members=list(_pairs(parts[23])),
            group_waiting=grouped,
            group_turns=turns,
            suspect_turns=trials,
            rate_log=list(_pairs(parts[27])),
            record_times={key: float(moment) - now for key, moment in _pairs(parts[28]).items()},
            records=set(_pairs(parts[29])),
            records_end_in=(parts[30], parts[31]),
            checkpoints={key.decode() for key in parts[34]},
        )

    async def others(self) -> set[str]:
        """Return all keys that do not belong to the queue, except for reports of clients."""
        keys = [key for key in await self._raw.keys("*") if not key.endswith(REPORTS)]
        return {key.decode() for key in keys} - {*self._names}

    async def keys_and_dumps(self) -> dict[str, bytes]:
        """Return everything on the server, as it is stored, except for reports of clients."""
        names = [key for key in await self._raw.keys("*") if not key.endswith(REPORTS)]
        keys = sorted(key.decode() for key in names)
        return {key: await self._raw.dump(key) for key in keys}

    async def values(self) -> list[bytes]:
        """Return the payloads of all live messages, in queue order."""
        stored = await self.look()
        return [stored.bodies[key].partition(b"\n")[2] for key in stored.order]


def _attempts(record: bytes) -> tuple[int, int]:
    attempt_count, uncounted = record.partition(b":")[0].split(b"-")
    return int(attempt_count), int(uncounted)


def hours(microseconds: float) -> int:
    """Round a moment to whole hours, so that the time the test itself takes does not count."""
    return round(microseconds / _HOUR_US)


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
