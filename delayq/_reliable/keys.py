"""The names of a reliable queue's keys and channels.

``docs/redis-data-model.md`` shows the same table.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from delayq._redis.slots import PARTITION, RELIABLE, SLOTS, checked_name, slot_of
from delayq.errors import BadInput, BadName

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq._redis.scripts import Script

PRIORITIES = 10
"""Priorities range from 0 to 9."""
MESSAGES = (
    *(f"waiting_{priority}" for priority in range(PRIORITIES)),
    "leased",
    "tokens",
    "bodies",
    "attempts",
    "expiries",
    "errors",
    "priorities",
    "positions",
    "group_members",
    "group_waiting",
    "group_turns",
    "suspect_turns",
    "rate_log",
    "expiry_index",
    "checkpoints",
)
"""The names that scripts give to the keys of messages, which ``queue.lua`` and ``leases.lua`` in
``lua/reliable/include`` describe.
"""
MOST_PARTITIONS = 1024
"""The largest number of partitions of a queue."""
_SALTS = string.digits + string.ascii_lowercase
SALT_LENGTH = 3

# A queue's name may contain anything, so the end of the key decides.
_FACTS = (
    r"\}:(?:waiting(?::[1-9])?|remembered|shared_moments|dead|dead:messages|paused|kept_slots"
    rf"|schedules|record_times|records|workers|history|batches|batch_members|{'|'.join(MESSAGES[PRIORITIES:])})$"
)
_KEY = re.compile(r"delayq:\{(.+)" + _FACTS, re.DOTALL)
_KEY_OF_PARTITION = re.compile(r"delayq:part:\{([0-9]{1,4}):[0-9a-z]{3}:(.+)" + _FACTS, re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReliableKeys:
    """The keys of one reliable queue.

    ``queue.lua`` and ``leases.lua`` in ``lua/reliable/include`` describe the ``messages``.
    """

    name: str
    """The queue's name in this process; for a partition but the first, ``name/number``."""
    messages: tuple[str, ...]
    """Ten sorted sets of ids of messages that wait, one for each priority, then the set of leased
    ones and the facts about each message, in the order that all scripts use.
    """
    wake: str
    """Channel that announces the due time of a new head, decimal microseconds."""
    summons: str
    """Channel on which dormant clients are called: how many of them are needed."""
    remembered: str
    """ZSET of ids that count as taken, scored by the end of that time, microseconds."""
    shared_moments: str
    """ZSET of moments for which several messages were offered, scored by the due time of the last
    one, microseconds.
    """
    dead: str
    """ZSET of ids of dead letters, scored by when they died, microseconds."""
    dead_messages: str
    """HASH of dead letters by id."""
    paused: str
    """STRING that exists while the queue is paused: since when, ms; "1" if that is unknown."""
    kept_slots: str
    """ZSET of cancelled messages that keep their slots, scored by the end of their leases,
    microseconds.
    """
    schedules: str
    """HASH of recurring messages by name."""
    record_times: str
    """ZSET of ids of messages of which a record is kept, scored by its last change,
    microseconds.
    """
    records: str
    """HASH of these records by id."""
    awaited: str
    """ZSET of ids whose end clients wait for, scored by the end of that, microseconds."""
    batches: str
    """HASH of batches by id, and of the messages that follow from them."""
    batch_members: str
    """ZSET of the messages of batches, by batch, state and id, all with the same score."""
    history: str
    """HASH of what happened in the queue, by minute and hour."""
    workers: str
    """ZSET of clients that work on the queue, scored by the end of their entry, microseconds."""
    worker_facts: str
    """HASH of what they report of themselves."""
    settings: str
    """HASH of the queue's settings, and channel that announces their changes; those of the first
    partition decide.
    """
    _of_scripts: dict[str, tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls, name: str, mapper: Callable[[str], str] | None = None, partition: int = 0
    ) -> ReliableKeys:
        """Derive the keys of one partition of queue ``name``. The first one has the queue's own.

        Otherwise the same as :meth:`DelayedKeys.of`.
        """
        mapped = checked_name(checked_name(name) if mapper is None else mapper(checked_name(name)))
        if partition:
            return cls.below(
                f"{name}/{partition}",
                partition_prefix(mapped, str(partition), salt(mapped, partition)),
            )
        # All have the same prefix and therefore the same hash tag: the part before the first
        # closing brace, unless it is empty.
        if mapped.startswith("}"):
            raise BadName(
                f"the keys of {mapped!r} would be in different cluster slots: the name must not"
                " begin with a brace"
            )
        return cls.below(name, f"{RELIABLE}{mapped}}}:")

    @classmethod
    def below(cls, name: str, prefix: str) -> ReliableKeys:
        """Return the keys that begin with ``prefix``."""
        lower_priorities = (f"{prefix}waiting:{priority}" for priority in range(1, PRIORITIES))
        details = (prefix + fact for fact in MESSAGES[PRIORITIES:])
        return cls(
            name=name,
            messages=(f"{prefix}waiting", *lower_priorities, *details),
            wake=f"{prefix}wake",
            summons=f"{prefix}summons",
            remembered=f"{prefix}remembered",
            shared_moments=f"{prefix}shared_moments",
            dead=f"{prefix}dead",
            dead_messages=f"{prefix}dead:messages",
            paused=f"{prefix}paused",
            kept_slots=f"{prefix}kept_slots",
            schedules=f"{prefix}schedules",
            record_times=f"{prefix}record_times",
            records=f"{prefix}records",
            awaited=f"{prefix}awaited",
            batches=f"{prefix}batches",
            batch_members=f"{prefix}batch_members",
            history=f"{prefix}history",
            workers=f"{prefix}workers",
            worker_facts=f"{prefix}workers:facts",
            settings=f"{prefix}settings",
        )

    @property
    def waiting(self) -> tuple[str, ...]:
        """The sorted sets of ids of messages that wait, one for each priority."""
        return self.messages[:PRIORITIES]

    @property
    def leased(self) -> str:
        """ZSET of ids of messages that workers have, scored by the end of the lease,
        microseconds.
        """
        return self.named("leased")

    @property
    def expiries(self) -> str:
        """HASH of the ends of times to live by id, microseconds."""
        return self.named("expiries")

    @property
    def recheck_keys(self) -> tuple[str, ...]:
        """The keys that a re-check examines, in the order that ``recheck.lua`` expects."""
        shared_keys = (self.kept_slots, self.schedules, self.settings, self.wake, self.summons)
        turns = (self.named("group_turns"), self.named("suspect_turns"))
        return (self.leased, *self.waiting, *turns, *shared_keys)

    @property
    def pattern(self) -> str:
        """A pattern that matches all keys of the queue, and no others."""
        return re.sub(r"[*?\[\]\\]", r"\\\g<0>", self.wake.removesuffix("wake")) + "*"

    def named(self, name: str) -> str:
        """Return the key that the scripts call ``name``."""
        key: str = self.messages[MESSAGES.index(name)] if name in MESSAGES else getattr(self, name)
        return key

    def aside(self, name: str) -> str:
        """Return where the key of this name lies while the queue is moved to another number of
        partitions.
        """
        prefix = self.wake.removesuffix("wake")
        return f"{prefix}aside:{self.named(name).removeprefix(prefix)}"

    def of_script(self, script: Script) -> tuple[str, ...]:
        """Return the keys to pass to a script, as its declaration names them.

        The key of a client's call is left out.
        """
        keys = self._of_scripts.get(script.name)
        if keys is None:
            keys = self._of_scripts[script.name] = tuple(
                self.named(name) for name in script.keys if name != "call"
            )
        return keys

    def call(self, session: str) -> str:
        """Return the name of the STRING that keeps one client's last call and its reply, so that
        the call can be repeated.
        """
        return self.wake.removesuffix("wake") + f"call:{session}"


def partition_prefix(name: str, partition: str, salt: str) -> str:
    """Return the prefix of one partition's keys.

    No queue has keys that begin like that, whatever its name.
    """
    return f"{PARTITION}{partition}:{salt}:{name}}}:"


@lru_cache(maxsize=4 * MOST_PARTITIONS)
def salt(name: str, partition: int) -> str:
    """Return the salt that spreads the partitions' keys evenly over a cluster's slots, however many
    partitions there are.

    The first one has the queue's own keys, and no salt. The next ones lie at 1/2, 1/4, 3/4, 1/8 of
    all slots (van der Corput's sequence). So they lie evenly, whatever their number, and adding
    more moves none. Each has a stretch of a 64th of all slots, or as many stretches as are needed.
    """
    bits = max(6, partition.bit_length())
    stretch = int(f"{partition:0{bits}b}"[::-1], 2)
    matching: str = next(
        candidate
        for candidate in map("".join, product(_SALTS, repeat=SALT_LENGTH))
        if slot_of(partition_prefix(name, str(partition), candidate)) * 2**bits // SLOTS == stretch
    )
    return matching


def name_in(key: str) -> tuple[str, int] | None:
    """Return the name of the reliable queue that has a key, and the partition; None if it is
    another key.
    """
    if match := _KEY_OF_PARTITION.match(key):
        return match[2], int(match[1])
    if match := _KEY.match(key):
        return match[1], 0
    return None


def check_partitions(partitions: int) -> None:
    """Raise BadInput unless a queue can have this number of partitions."""
    if (
        isinstance(partitions, bool)
        or not isinstance(partitions, int)
        or not 1 <= partitions <= MOST_PARTITIONS
    ):
        raise BadInput(f"partitions must be an int from 1 to {MOST_PARTITIONS}, not {partitions!r}")
