"""The names of every key and channel. No key string stands anywhere else; ``docs/redis-data-model.md`` shows the same table."""

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
"""Bytes. Redisson knows no limit; nobody has come near this one."""

_ORDERED, _TIMEOUT, _CHANNEL = "redisson_delay_queue", "redisson_delay_queue_timeout", "redisson_delay_queue_channel"
_QUARANTINE, _LEASES, _LEASED, _TURNS = "delayq_quarantine", "delayq_leases", "delayq_leased", "delayq_turns"
_FENCE = "delayq_fence"
_RELIABLE, _PARTITION = "delayq:{", "delayq:part:{"

# A delayed queue's ready list has the queue's own name. No other key does, so it must not look like one.
RESERVED = (
    *(f"{prefix}:" for prefix in (_ORDERED, _TIMEOUT, _CHANNEL, _QUARANTINE, _LEASES, _LEASED, _TURNS, _FENCE)),
    _RELIABLE,
    _PARTITION,
)
"""How no delayed queue's name begins."""


@dataclass(frozen=True, slots=True)
class DelayedKeys:
    """The keys of one delayed queue. The first four are Redisson's."""

    name: str
    """What the queue is called in this process."""
    ready: str
    """LIST of payloads that are due: the queue's name on the server."""
    ordered: str
    """LIST of records in offer order."""
    timeout: str
    """ZSET of the same records, scored by due time, ms."""
    channel: str
    """Channel on which the due time of a new head is announced, decimal ms."""
    quarantine: str
    """LIST of records and payloads that nobody can read."""
    leases: str
    """ZSET of the tokens of what is out with a client, scored by the end of its lease, ms."""
    leased: str
    """HASH of those payloads and records by token."""
    turns: str
    """Channel on which a client says that what was due is moved: so that the others need not look."""

    @classmethod
    def of(cls, name: str, mapper: Callable[[str], str] | None = None) -> DelayedKeys:
        """Derive the keys of queue ``name``.

        Args:
            name: What the queue is called here.
            mapper: Turns it into its name on the server, as Redisson's NameMapper does.

        Raises:
            BadName: A name is empty, too long or no text; or it is that of another queue's key; or the keys would lie in
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
        """STRING that keeps a call that was given up, or that was carried out already, from doing anything."""
        return _prefixed(f"{_FENCE}:{call}", self.ready)


PRIORITIES = 10
"""Priorities go from 0 to 9."""
_MOST_PARTITIONS = 1024
_SALTS = string.digits + string.ascii_lowercase
SALT_LENGTH = 3
SLOTS = 16384
"""Of a cluster."""

# A name may hold anything: what comes last decides.
_FACTS = r"\}:(?:live(?::[1-9])?|bodies|leases|attempts|expiries|errors|priorities|done|dead|dead:messages|paused|schedules)$"
_OF_RELIABLE = re.compile(r"delayq:\{(.+)" + _FACTS, re.DOTALL)
_OF_PARTITION = re.compile(r"delayq:part:\{([0-9]{1,4}):[0-9a-z]{3}:(.+)" + _FACTS, re.DOTALL)
_OF_DELAYED = re.compile(f"(?:{_TIMEOUT}|{_ORDERED}|{_QUARANTINE}|{_LEASES}):(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReliableKeys:
    """The keys of one reliable queue. ``lua/reliable/include/queue.lua`` says what ``messages`` are."""

    name: str
    """What the queue is called in this process; one of its partitions: ``name/number``."""
    whole: str
    """What it is called with all its partitions."""
    messages: tuple[str, ...]
    """Ten sorted sets of ids, one for each priority, and what is known of each message: in the order of all scripts."""
    wake: str
    """Channel on which the due time of a new head is announced, decimal microseconds."""
    done: str
    """ZSET of ids that were handled lately, scored by how long they are remembered, microseconds."""
    dead: str
    """ZSET of ids of dead letters, scored by when they died, microseconds."""
    dead_messages: str
    """HASH of dead letters by id."""
    paused: str
    """STRING that is there while the queue is paused."""
    schedules: str
    """HASH of recurring messages by name."""

    @classmethod
    def of(cls, name: str, mapper: Callable[[str], str] | None = None, partition: int | None = None) -> ReliableKeys:
        """Derive the keys of queue ``name``, or of one of its partitions; else as :meth:`DelayedKeys.of`."""
        mapped = _checked(_checked(name) if mapper is None else mapper(_checked(name)))
        if partition is not None:
            return cls.below(f"{name}/{partition}", partition_prefix(mapped, str(partition), salt(mapped, partition)), name)
        # All have the same prefix, so the same hash tag: what stands before the first closing brace, if that is anything.
        if mapped.startswith("}"):
            raise BadName(f"the keys of {mapped!r} would lie in different cluster slots: a name must not begin with a brace")
        return cls.below(name, f"{_RELIABLE}{mapped}}}:")

    @classmethod
    def below(cls, name: str, prefix: str, whole: str | None = None) -> ReliableKeys:
        """The keys that begin with ``prefix``."""
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
        """A pattern that all keys of the queue match, and no others."""
        return re.sub(r"[*?\[\]\\]", r"\\\g<0>", self.wake.removesuffix("wake")) + "*"

    def call(self, session: str) -> str:
        """STRING: what the last call of one client was, and its reply, so that it can be repeated."""
        return self.wake.removesuffix("wake") + f"call:{session}"


def partition_prefix(name: str, partition: str, salt: str) -> str:
    """How the keys of one partition begin. No queue of any name has keys that begin like that."""
    return f"{_PARTITION}{partition}:{salt}:{name}}}:"


@lru_cache(maxsize=4 * _MOST_PARTITIONS)
def salt(name: str, partition: int) -> str:
    """What lets a partition's keys lie where they belong: evenly over a cluster's slots, however many partitions there are.

    The first places are 0, 1/2, 1/4, 3/4, 1/8 of all slots (van der Corput's sequence): so the first ones, whatever their
    number, lie evenly, and more of them move none. Each has a stretch of a 64th of all slots, or as many as are needed.
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
"""A pattern that every key matches by which a queue can be known, and few others."""


def queue_of(key: str) -> tuple[Literal["delayed", "reliable"], str, int | None] | None:
    """Which queue has a key, and which of its partitions; None where none has it, or the key does not tell.

    A delayed queue's ready list is a list of any name. ``a`` and ``{a}`` have the same keys: ``a`` stands for both.
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
    """Raise BadInput unless a queue can have so many."""
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
    """Redisson's rule, byte for byte: a name with a brace anywhere is taken to carry its own hash tag."""
    return f"{prefix}:{name}" if "{" in name else f"{prefix}:{{{name}}}"


def hash_tag(key: str) -> str:
    """The part of ``key`` that decides its cluster slot (Redis Cluster specification, "Hash tags")."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


def slot_of(key: str) -> int:
    """The slot of a cluster in which ``key`` lies, by its CRC16 (Redis Cluster specification, "Key distribution model").

    The standard library's ``crc_hqx`` is that CRC16.
    """
    return crc_hqx(hash_tag(key).encode(errors="surrogateescape"), 0) % SLOTS
