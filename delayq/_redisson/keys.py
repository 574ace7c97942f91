"""The names of a delayed queue's keys and channels, as in ``docs/redis-data-model.md``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delayq._redis.slots import PARTITION, RELIABLE, checked_name, hash_tag
from delayq.errors import BadName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._redis.scripts import Script

# In the order of the fields of DelayedKeys.
_PREFIXES = (
    "redisson_delay_queue",
    "redisson_delay_queue_timeout",
    "redisson_delay_queue_channel",
    "delayq_quarantine",
    "delayq_leases",
    "delayq_leased",
    "delayq_turns",
    "delayq_summons",
)
_FENCE = "delayq_fence"

# A ready list has the queue's own name, which must not look like another key.
RESERVED = (*(f"{prefix}:" for prefix in (*_PREFIXES, _FENCE)), RELIABLE, PARTITION)
"""The beginnings that a delayed queue's name must not have."""

_NAMED = re.compile(
    "(?:redisson_delay_queue(?:_timeout)?|delayq_quarantine|delayq_leases):(.+)", re.DOTALL
)


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
    """Channel on which a client announces that it has moved the due messages, so that the others
    need not look.
    """
    summons: str
    """Channel on which dormant clients are called: how many of them are needed."""
    _of_scripts: dict[str, tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, name: str, mapper: Callable[[str], str] | None = None) -> DelayedKeys:
        """Derive the keys of a queue; ``mapper`` returns its name on the server.

        Raises:
            BadName: A name is empty, too long or not text; or it is that of another queue's key; or
                the keys would lie in different slots of a cluster.
        """
        mapped = checked_name(checked_name(name) if mapper is None else mapper(checked_name(name)))
        if mapped.startswith(RESERVED):
            raise BadName(f"{mapped!r} is already the name of a key of another queue")
        keys = cls(name, mapped, *(_prefixed(prefix, mapped) for prefix in _PREFIXES))
        if hash_tag(keys.ready) != hash_tag(keys.ordered):
            raise BadName(
                f"the keys of {mapped!r} would be in different cluster slots: use no braces, or a"
                " single {tag}"
            )
        return keys

    def of_script(self, script: Script, **of_call: str) -> Sequence[str]:
        """Return the keys of a script in its order, with those of this one call."""
        script_keys = self._of_scripts.get(script.name)
        if script_keys is None:
            script_keys = tuple(
                "" if name in of_call else getattr(self, name) for name in script.keys
            )
            self._of_scripts[script.name] = script_keys
        if not of_call:
            return script_keys
        keys = [*script_keys]
        for name, key in of_call.items():
            keys[script.keys.index(name)] = key
        return keys

    def fence(self, call: str) -> str:
        """Return the name of a STRING that disables a call that was given up or carried out."""
        return _prefixed(f"{_FENCE}:{call}", self.ready)


def name_in(key: str) -> str | None:
    """Return the queue that has a key other than a ready list; ``a`` for both ``a`` and ``{a}``."""
    match = _NAMED.match(key)
    if match is None:
        return None
    name: str = match[1]
    inner = name[1:-1]
    return inner if name == f"{{{inner}}}" and not {"{", "}"} & {*inner} else name


def _prefixed(prefix: str, name: str) -> str:
    """Prefix a name by Redisson's rule: one with a brace is taken to carry its own hash tag."""
    return f"{prefix}:{name}" if "{" in name else f"{prefix}:{{{name}}}"
