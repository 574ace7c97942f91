"""The stored state of a reliable queue, seen from outside, and a way to let time pass for it.

The server's clock cannot be set, so everything stored is moved back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from delayq._reliable.keys import ReliableKeys

HOUR = 3600
_HOUR_US = HOUR * 1_000_000

_PASS = """
for at = 1, 10 do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[at], 0, -1)) do
    -- A suspect's score is its due time with a minus.
    local sign = tonumber(redis.call('ZSCORE', KEYS[at], id)) < 0 and 1 or -1
    redis.call('ZINCRBY', KEYS[at], sign * ARGV[1], id)
  end
end
for at = 17, 18 do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[at], 0, -1)) do
    redis.call('ZINCRBY', KEYS[at], -ARGV[1], id)
  end
end
local leases = redis.call('HGETALL', KEYS[12])
for i = 1, #leases, 2 do
  local attempt, due, token = string.match(leases[i + 1], '^(%d+):([%d.]+):(.*)$')
  local ends = string.format('%.2f', due - ARGV[1])
  redis.call('HSET', KEYS[12], leases[i], attempt .. ':' .. ends .. ':' .. token)
end
local expiries = redis.call('HGETALL', KEYS[14])
for i = 1, #expiries, 2 do
  redis.call('HSET', KEYS[14], expiries[i], string.format('%.2f', expiries[i + 1] - ARGV[1]))
end
"""

_DUMP = """
local reply = {redis.call('TIME')}
for at = 1, 10 do reply[#reply + 1] = redis.call('ZRANGE', KEYS[at], 0, -1, 'WITHSCORES') end
for at = 11, 16 do reply[#reply + 1] = redis.call('HGETALL', KEYS[at]) end
for at = 17, 18 do reply[#reply + 1] = redis.call('ZRANGE', KEYS[at], 0, -1, 'WITHSCORES') end
reply[#reply + 1] = redis.call('HGETALL', KEYS[19])
reply[#reply + 1] = redis.call('EXISTS', KEYS[20])
reply[#reply + 1] = redis.call('HGETALL', KEYS[21])
return reply
"""


@dataclass(frozen=True)
class Stored:
    """Everything under a queue's keys. Moments are in microseconds from the server's now."""

    live: dict[str, tuple[int, float]]
    """Priority and moment, by id."""
    suspects: set[str]
    """Ids of messages whose last lease has ended, as noticed by a claim."""
    order: list[str]
    """Ids by priority, then moment."""
    bodies: dict[str, bytes]
    leases: dict[str, bytes]
    attempts: dict[str, int]
    expiries: dict[str, float]
    errors: dict[str, str]
    priorities: dict[str, int]
    done: dict[str, float]
    dead: list[str]
    dead_messages: dict[str, bytes]
    paused: bool
    schedules: dict[str, bytes]

    def renamed(self, names: dict[str, str]) -> Stored:
        """Return a copy in which live messages have other ids."""

        def with_names(known: dict[str, Any]) -> dict[str, Any]:
            return {names.get(key, key): value for key, value in known.items()}

        known = ("live", "bodies", "leases", "attempts", "expiries", "errors", "priorities")
        changed: dict[str, Any] = {each: with_names(getattr(self, each)) for each in known}
        return replace(
            self,
            suspects={names[key] for key in self.suspects},
            order=[names[key] for key in self.order],
            **changed,
        )

    def demand_no_orphans(self) -> None:
        """Assert that every message is in one place, and every detail belongs to a message."""
        live = set(self.live)
        assert len(self.order) == len(live), "an id is in two live sets"
        assert set(self.bodies) == live
        for known in (self.leases, self.attempts, self.expiries, self.errors, self.priorities):
            assert set(known) <= live
        assert not set(self.attempts) & set(self.leases), (
            "the attempts of a leased message stand in its lease"
        )
        assert {
            key: priority for key, (priority, _) in self.live.items() if priority
        } == self.priorities
        letters = {name for name in self.dead_messages if not name.endswith("\0")}
        assert set(self.dead) == letters
        # Further dead letters with the same id are listed under that id.
        more = {
            name: stamps.decode().split()
            for name, stamps in self.dead_messages.items()
            if name.endswith("\0")
        }
        listed = {f"{name}{stamp}" for name, stamps in more.items() for stamp in stamps}
        assert listed == {name for name in letters if "\0" in name}


class Store:
    """Looks at one queue over a connection that nothing else uses, bypassing the library."""

    def __init__(self, connection: Any, name: str) -> None:
        self.keys = ReliableKeys.of(name)
        self._raw = connection
        known = ("done", "dead", "dead_messages", "paused", "schedules")
        self._names = (*self.keys.messages, *(getattr(self.keys, name) for name in known))

    async def let_pass(self, seconds: float) -> None:
        """Let ``seconds`` pass for everything that is stored."""
        await self._raw.eval(_PASS, len(self._names), *self._names, int(seconds * 1_000_000))

    async def look(self) -> Stored:
        """Read everything at a single moment."""
        (whole, rest), *parts = await self._raw.eval(_DUMP, len(self._names), *self._names)
        now = int(whole) * 1_000_000 + int(rest)
        sets, hashes = (
            [_pairs(part) for part in parts[:10]],
            [_pairs(part) for part in parts[10:16]],
        )
        bodies, leases, attempts, expiries, errors, priorities = hashes
        done, dead = (_pairs(part) for part in parts[16:18])
        return Stored(
            live={
                key: (at, abs(float(moment)) - now)
                for at in range(10)
                for key, moment in sets[at].items()
            },
            suspects={
                key for at in range(10) for key, moment in sets[at].items() if float(moment) < 0
            },
            order=[
                key
                for at in range(9, -1, -1)
                for key in sorted(sets[at], key=lambda key: _order(sets[at][key]))
            ],
            bodies=bodies,
            leases=leases,
            attempts={key: int(used.partition(b"-")[0]) for key, used in attempts.items()},
            expiries={key: float(end) - now for key, end in expiries.items()},
            errors={key: error.decode() for key, error in errors.items()},
            priorities={key: int(priority) for key, priority in priorities.items()},
            done={key: float(end) - now for key, end in done.items()},
            dead=list(dead),
            dead_messages=_pairs(parts[18]),
            paused=bool(parts[19]),
            schedules=_pairs(parts[20]),
        )

    async def others(self) -> set[str]:
        """Return all keys on the server that do not belong to the queue."""
        known = {*self._names, self.keys.settings}
        return {key.decode() for key in await self._raw.keys("*")} - known

    async def values(self) -> list[bytes]:
        """Return the payloads of all live messages, in queue order."""
        stored = await self.look()
        return [stored.bodies[key].partition(b"\n")[2] for key in stored.order]


def _order(score: bytes) -> tuple[bool, float]:
    """Return a sort key that puts suspects first. A suspect's score is its due time, negated."""
    return float(score) >= 0, abs(float(score))


def hours(microseconds: float) -> int:
    """Round a moment to whole hours, so that the time the test itself takes does not count."""
    return round(microseconds / _HOUR_US)


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
