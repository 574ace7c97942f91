"""The names of all keys and channels. No other module has key strings; ``docs/redis-data-model.md`` shows the same table."""

from __future__ import annotations

import re
import string
from binascii import crc_hqx
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal

from delayq.errors import BadInput, BadName

if TYPE_CHECKING:
    from collections.abc import Callable


LONGEST_NAME = 512
"""In bytes. Redisson has no limit; no name in practice comes near this one."""

_ORDERED, _TIMEOUT, _CHANNEL = "redisson_delay_queue", "redisson_delay_queue_timeout", "redisson_delay_queue_channel"
_QUARANTINE, _LEASES, _LEASED, _TURNS = "delayq_quarantine", "delayq_leases", "delayq_leased", "delayq_turns"
_FENCE = "delayq_fence"
_RELIABLE, _PARTITION = "delayq:{", "delayq:part:{"

# A delayed queue's ready list has the queue's own name. No other key does, so the name must not look like another key.
RESERVED = (
    *(f"{prefix}:" for prefix in (_ORDERED, _TIMEOUT, _CHANNEL, _QUARANTINE, _LEASES, _LEASED, _TURNS, _FENCE)),
    _RELIABLE,
    _PARTITION,
)
"""The beginnings that a delayed queue's name must not have."""


@dataclass(frozen=True, slots=True)
class DelayedKeys:
    """The keys of one delayed queue. The first four are Redisson's."""

    name: str
    """The queue's name in this process."""
    ready: str
    """LIST of payloads that are due: the queue's name on the server."""
    ordered: str
    """LIST of records in offer order."""
    timeout: str
    """ZSET of the same records, scored by due time, ms."""
    channel: str
    """Channel that announces the due time of a new head, decimal ms."""
    quarantine: str
    """LIST of records and payloads that cannot be read."""
    leases: str
    """ZSET of the tokens of messages that clients hold, scored by the end of the lease, ms."""
    leased: str
    """HASH of the payloads and records of those messages by token."""
    turns: str
    """Channel on which a client announces that it has moved the due messages, so that the others need not look."""

    @classmethod
    def of(cls, name: str, mapper: Callable[[str], str] | None = None) -> DelayedKeys:
        """Derive the keys of queue ``name``.

        Args:
            name: The queue's name in this process.
            mapper: Turns it into the queue's name on the server, as Redisson's NameMapper does.

        Raises:
            BadName: A name is empty, too long or not text; or it is that of another queue's key; or the keys would lie in
                different slots of a cluster.
        """
        mapped = _checked(_checked(name) if mapper is None else mapper(_checked(name)))
        if mapped.startswith(RESERVED):
            raise BadName(f"{mapped!r} is the name of another queue's key")
        keys = cls(
            name=name,
            ready=mapped,
            ordered=_prefixed(_ORDERED, mapped),
            timeout=_prefixed(_TIMEOUT, mapped),
            channel=_prefixed(_CHANNEL, mapped),
            quarantine=_prefixed(_QUARANTINE, mapped),
            leases=_prefixed(_LEASES, mapped),
            leased=_prefixed(_LEASED, mapped),
            turns=_prefixed(_TURNS, mapped),
        )
        if hash_tag(keys.ready) != hash_tag(keys.ordered):
            raise BadName(f"the keys of {mapped!r} would lie in different cluster slots: use no braces, or one {{tag}}")
        return keys

    def fence(self, call: str) -> str:
        """Return the name of a STRING that disables a call, because it was given up or has been carried out already."""
        return _prefixed(f"{_FENCE}:{call}", self.ready)


PRIORITIES = 10
"""Priorities range from 0 to 9."""
_MOST_PARTITIONS = 1024
_SALTS = string.digits + string.ascii_lowercase
SALT_LENGTH = 3
SLOTS = 16384
"""The number of hash slots in a cluster."""

# A queue's name may contain anything, so the end of the key decides.
_FACTS = r"\}:(?:live(?::[1-9])?|bodies|leases|attempts|expiries|errors|priorities|done|dead|dead:messages|paused|schedules)$"
_OF_RELIABLE = re.compile(r"delayq:\{(.+)" + _FACTS, re.DOTALL)
_OF_PARTITION = re.compile(r"delayq:part:\{([0-9]{1,4}):[0-9a-z]{3}:(.+)" + _FACTS, re.DOTALL)
_OF_DELAYED = re.compile(f"(?:{_TIMEOUT}|{_ORDERED}|{_QUARANTINE}|{_LEASES}):(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReliableKeys:
    """The keys of one reliable queue. ``lua/reliable/include/queue.lua`` describes the ``messages``."""

    name: str
    """The queue's name in this process; for one of its partitions, ``name/number``."""
    whole: str
    """The name of the queue with all its partitions."""
    messages: tuple[str, ...]
    """Ten sorted sets of ids, one for each priority, then the facts about each message, in the order that all scripts use."""
    wake: str
    """Channel that announces the due time of a new head, decimal microseconds."""
    done: str
    """ZSET of ids that were handled lately, scored by when they are forgotten, microseconds."""
    dead: str
    """ZSET of ids of dead letters, scored by when they died, microseconds."""
    dead_messages: str
    """HASH of dead letters by id."""
    paused: str
    """STRING that exists while the queue is paused."""
    schedules: str
    """HASH of recurring messages by name."""

    @classmethod
    def of(cls, name: str, mapper: Callable[[str], str] | None = None, partition: int | None = None) -> ReliableKeys:
        """Derive the keys of queue ``name``, or of one of its partitions. Otherwise the same as :meth:`DelayedKeys.of`."""
        mapped = _checked(_checked(name) if mapper is None else mapper(_checked(name)))
        if partition is not None:
            return cls.below(f"{name}/{partition}", partition_prefix(mapped, str(partition), salt(mapped, partition)), name)
        # All have the same prefix and therefore the same hash tag: the part before the first closing brace, unless it is empty.
        if mapped.startswith("}"):
            raise BadName(f"the keys of {mapped!r} would lie in different cluster slots: a name must not begin with a brace")
        return cls.below(name, f"{_RELIABLE}{mapped}}}:")

    @classmethod
    def below(cls, name: str, prefix: str, whole: str | None = None) -> ReliableKeys:
        """Return the keys that begin with ``prefix``."""
        live = (f"{prefix}live", *(f"{prefix}live:{priority}" for priority in range(1, PRIORITIES)))
        facts = ("bodies", "leases", "attempts", "expiries", "errors", "priorities")
        return cls(
            name=name,
            whole=name if whole is None else whole,
            messages=(*live, *(prefix + fact for fact in facts)),
            wake=f"{prefix}wake",
            done=f"{prefix}done",
            dead=f"{prefix}dead",
            dead_messages=f"{prefix}dead:messages",
            paused=f"{prefix}paused",
            schedules=f"{prefix}schedules",
        )

    @property
    def live(self) -> tuple[str, ...]:
        """The sorted sets of ids, one for each priority."""
        return self.messages[:PRIORITIES]

    @property
    def leases(self) -> str:
        """HASH of leases by id."""
        return self.messages[11]

    @property
    def priorities(self) -> str:
        """HASH of priorities by id, where they are not 0."""
        return self.messages[15]

    @property
    def pattern(self) -> str:
        """A pattern that matches all keys of the queue, and no others."""
        return re.sub(r"[*?\[\]\\]", r"\\\g<0>", self.wake.removesuffix("wake")) + "*"

    def call(self, session: str) -> str:
        """Return the name of the STRING that keeps one client's last call and its reply, so that the call can be repeated."""
        return self.wake.removesuffix("wake") + f"call:{session}"


def partition_prefix(name: str, partition: str, salt: str) -> str:
    """Return the prefix of one partition's keys. No queue has keys that begin like that, whatever its name."""
    return f"{_PARTITION}{partition}:{salt}:{name}}}:"


@lru_cache(maxsize=4 * _MOST_PARTITIONS)
def salt(name: str, partition: int) -> str:
    """Return the salt that spreads the partitions' keys evenly over a cluster's slots, however many partitions there are.

    The first places are 0, 1/2, 1/4, 3/4, 1/8 of all slots (van der Corput's sequence). So the first partitions lie
    evenly, whatever their number, and adding more moves none. Each has a stretch of a 64th of all slots, or as many stretches
    as are needed.
    """
    bits = max(6, partition.bit_length())
    stretch = int(f"{partition:0{bits}b}"[::-1], 2)
    found: str = next(
        tried
        for tried in map("".join, product(_SALTS, repeat=SALT_LENGTH))
        if slot_of(partition_prefix(name, str(partition), tried)) * 2**bits // SLOTS == stretch
    )
    return found


QUEUE_KEYS = "[dr]e[dl][ai]*"
"""A pattern that matches every key by which a queue can be recognised, and few others."""


def queue_of(key: str) -> tuple[Literal["delayed", "reliable"], str, int | None] | None:
    """Return the queue that has a key, and which of its partitions. None if no queue has it, or the key does not tell.

    A delayed queue's ready list is a list of any name. ``a`` and ``{a}`` have the same keys, so ``a`` is returned for both.
    """
    if found := _OF_PARTITION.match(key):
        return "reliable", found[2], int(found[1])
    if found := _OF_RELIABLE.match(key):
        return "reliable", found[1], None
    if (found := _OF_DELAYED.match(key)) and found[1]:
        name = found[1]
        inner = name[1:-1]
        return "delayed", inner if name == f"{{{inner}}}" and not {"{", "}"} & {*inner} else name, None
    return None


def check_partitions(partitions: int) -> None:
    """Raise BadInput unless a queue can have this number of partitions."""
    if isinstance(partitions, bool) or not isinstance(partitions, int) or not 1 <= partitions <= _MOST_PARTITIONS:
        raise BadInput(f"partitions is an int from 1 to {_MOST_PARTITIONS}, not {partitions!r}")


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise BadName("a queue's name is a non-empty str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadName(f"the name {name!r} cannot be written as UTF-8") from None
    if size > LONGEST_NAME:
        raise BadName(f"a queue's name has {LONGEST_NAME} bytes at most, not {size}")
    return name


def _prefixed(prefix: str, name: str) -> str:
    """Prefix a name by Redisson's rule, byte for byte: a name that contains a brace is taken to carry its own hash tag."""
    return f"{prefix}:{name}" if "{" in name else f"{prefix}:{{{name}}}"


def hash_tag(key: str) -> str:
    """Return the part of ``key`` that decides its cluster slot (Redis Cluster specification, "Hash tags")."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


def slot_of(key: str) -> int:
    """Return the cluster slot of ``key``, by its CRC16 (Redis Cluster specification, "Key distribution model").

    The standard library's ``crc_hqx`` is that CRC16.
    """
    return crc_hqx(hash_tag(key).encode(errors="surrogateescape"), 0) % SLOTS
