"""The rights that a user of the server needs for its work with queues, and no more: rules for ``ACL
SETUSER`` and ACL files.

The rules work from Redis 6.2 on. The server checks the commands within scripts as if the user had
sent them, so a role includes the commands of its scripts. Tests let each role do its whole job,
then remove one rule at a time to see something fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from delayq._delayed import scripts as delayed_scripts
from delayq._delayed.keys import RESERVED, DelayedKeys
from delayq._engine.durability import parse
from delayq._engine.scripts import RESYNC
from delayq._redis.rights import commands
from delayq._reliable import scripts as reliable_scripts
from delayq._reliable.keys import (
    PRIORITIES,
    SALT_LENGTH,
    ReliableKeys,
    check_partitions,
    partition_prefix,
)
from delayq.errors import BadInput, BadName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delayq._redis.scripts import Script

Role = Literal["producer", "consumer", "admin", "dashboard"]
"""A producer offers, cancels and reschedules; a consumer takes and acknowledges; an admin cleans
up; a dashboard only reads.
"""

Servers = Literal["one", "cluster", "sentinel"]
"""Whether there is a single server, a cluster, or a server behind Sentinels."""

ROLES: tuple[Role, ...] = ("producer", "consumer", "admin", "dashboard")

# Every role connects and listens for notifications. EVAL is for a server that does not know a
# script yet.
_EVERYBODY = "ping subscribe unsubscribe"
_SCRIPTS = "eval evalsha"

# Placeholders, until the pattern is written, for the rest of a name, one character of a token, a
# priority and a digit: these code points are noncharacters.
_REST, _ONE, _PRIORITY, _DIGIT = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_SPECIAL = re.compile(r"[*?\[\\]")
# Characters that a rule cannot contain, because it would end there.
_NOT_IN_RULES = re.compile(f"[\0\t\n\v\f\r {_REST}{_ONE}{_PRIORITY}{_DIGIT}]")
# Commands that find the right server.
_SERVERS: dict[Servers, str] = {"one": "", "cluster": "asking cluster|slots", "sentinel": ""}


@dataclass(frozen=True)
class _Delayed:
    """The work that a role does with a delayed queue.

    Attributes:
        scripts: The scripts it runs.
        besides: The commands it sends in addition.
        keys: The keys it accesses.
        never: Commands in its scripts that it never reaches.
    """

    scripts: tuple[Script, ...]
    besides: str
    keys: Callable[[DelayedKeys], Iterable[str]]
    never: str = ""


@dataclass(frozen=True)
class _Reliable:
    """The work that a role does with a reliable queue. Attributes as in :class:`_Delayed`."""

    scripts: tuple[Script, ...]
    besides: str
    keys: Callable[[ReliableKeys], Iterable[str]]
    never: str = ""


_CLIENT = 12 * _ONE
_LOOKS_AT_DELAYED = "time llen lindex lrange hmget zcard zcount zrange zrevrange"
_LOOKS_AT_RELIABLE = "zcard zrange hmget hgetall hscan"

DELAYED: dict[Role, _Delayed] = {
    # No access to the ready list: other processes move due messages.
    "producer": _Delayed(
        (delayed_scripts.OFFER, delayed_scripts.CANCEL, delayed_scripts.RESCHEDULE),
        "",
        lambda keys: (keys.timeout, keys.ordered, keys.channel),
    ),
    "consumer": _Delayed(
        (
            delayed_scripts.TRANSFER,
            delayed_scripts.GIVE_BACK,
            delayed_scripts.SET_ASIDE,
            RESYNC,
            delayed_scripts.ACK,
            delayed_scripts.NACK,
            delayed_scripts.EXTEND,
            delayed_scripts.RELEASE,
        ),
        "blmove unlink rpush",
        lambda keys: (
            keys.ready,
            keys.timeout,
            keys.ordered,
            keys.channel,
            keys.quarantine,
            keys.leases,
            keys.leased,
            keys.turns,
            keys.fence(f"{_CLIENT}-{8 * _ONE}"),
        ),
    ),
    "admin": _Delayed(
        (
            delayed_scripts.CANCEL,
            delayed_scripts.RESCHEDULE,
            delayed_scripts.PURGE,
            delayed_scripts.POLL_PENDING,
            delayed_scripts.POLL_LAST,
            delayed_scripts.EXPIRE,
            delayed_scripts.MIGRATE,
            # The messages it polled are confirmed, go back, or go to quarantine.
            delayed_scripts.ACK,
            delayed_scripts.GIVE_BACK,
            delayed_scripts.SET_ASIDE,
        ),
        f"{_LOOKS_AT_DELAYED} zscan unlink",
        lambda keys: (
            keys.ready,
            keys.timeout,
            keys.ordered,
            keys.channel,
            keys.quarantine,
            keys.leases,
            keys.leased,
            keys.fence(f"{_CLIENT}-{8 * _ONE}"),
        ),
    ),
    "dashboard": _Delayed(
        (),
        _LOOKS_AT_DELAYED,
        lambda keys: (
            keys.ready,
            keys.timeout,
            keys.ordered,
            keys.quarantine,
            keys.leases,
            keys.leased,
        ),
    ),
}

RELIABLE: dict[Role, _Reliable] = {
    "producer": _Reliable(
        (
            reliable_scripts.OFFER,
            reliable_scripts.CANCEL,
            reliable_scripts.RESCHEDULE,
            reliable_scripts.CONFIGURE,
        ),
        "unlink",
        lambda keys: (
            *_messages(keys),
            keys.wake,
            keys.done,
            keys.settings,
            keys.call(f"{_CLIENT}-{_ONE}"),
        ),
    ),
    "consumer": _Reliable(
        (
            reliable_scripts.CLAIM,
            reliable_scripts.ACK,
            reliable_scripts.NACK,
            reliable_scripts.RELEASE,
            reliable_scripts.EXTEND,
            reliable_scripts.BURY,
            reliable_scripts.SCHEDULE,
            reliable_scripts.UNSCHEDULE,
            reliable_scripts.OCCUR,
            reliable_scripts.RECUR,
            reliable_scripts.REFILL,
            reliable_scripts.CONFIGURE,
            RESYNC,
        ),
        "hscan hmget hget time",
        lambda keys: (
            *_messages(keys),
            keys.wake,
            keys.done,
            keys.dead,
            keys.dead_messages,
            keys.paused,
            keys.schedules,
            keys.settings,
        ),
        # Of the re-check, it reaches only the part for reliable queues.
        never="llen",
    ),
    "admin": _Reliable(
        (
            reliable_scripts.GET,
            reliable_scripts.LIST,
            reliable_scripts.LEASED,
            reliable_scripts.STATS,
            reliable_scripts.PURGE,
            reliable_scripts.REDRIVE,
            reliable_scripts.DROP_DEAD,
            reliable_scripts.RESUME,
            reliable_scripts.CANCEL,
            reliable_scripts.RESCHEDULE,
            reliable_scripts.UNSCHEDULE,
            reliable_scripts.CONFIGURE,
        ),
        f"{_LOOKS_AT_RELIABLE} set zmscore",
        lambda keys: (
            *_messages(keys),
            keys.wake,
            keys.dead,
            keys.dead_messages,
            keys.paused,
            keys.schedules,
            keys.settings,
        ),
    ),
    "dashboard": _Reliable(
        (
            reliable_scripts.GET,
            reliable_scripts.LIST,
            reliable_scripts.LEASED,
            reliable_scripts.STATS,
        ),
        _LOOKS_AT_RELIABLE,
        lambda keys: (
            *_messages(keys),
            keys.dead,
            keys.dead_messages,
            keys.paused,
            keys.schedules,
            keys.settings,
        ),
    ),
}


def _commands(work: _Delayed | _Reliable) -> set[str]:
    if not work.scripts:
        return {*work.besides.split()}
    of_scripts = {command.lower() for script in work.scripts for command in commands(script)}
    return {*_SCRIPTS.split(), *work.besides.split()} | of_scripts - {*work.never.split()}


def acl_rules(
    role: Role,
    *,
    delayed: Iterable[str] = (),
    reliable: Iterable[str] = (),
    prefix: bool = False,
    database: int = 0,
    partitions: int | None = None,
    servers: Servers = "one",
    durability: str = "memory",
) -> list[str]:
    """Return the rules for a user with one role for some queues, to be used as ``ACL SETUSER name
    on >password`` plus these.

    They take away all rights the user had before. For two roles, use two users, or the rules of
    both with the reset rules removed from the second; a client needs the rights for everything it
    does.

    Args:
        role: ``"producer"``: offer, cancel, reschedule. ``"consumer"``: take, acknowledge, schedule
            recurring messages: everything a worker does. ``"admin"``: inspect, purge, redrive,
            pause, migrate. ``"dashboard"``: inspect, without changing anything.
        delayed: Names of delayed queues as the server knows them: with a ``name_mapper``, the names
            it returns.
        reliable: The same for reliable queues.
        prefix: Whether the names are prefixes. For delayed queues, a prefix then covers only names
            without braces, unless it contains a complete hash tag.
        database: The database, if it is not the first.
        partitions: The number of partitions of the reliable queues; None if they are not
            partitioned.
        servers: ``"cluster"`` or ``"sentinel"``, if there are several servers. The Sentinels
            themselves require ``+sentinel|get-master-addr-by-name`` of a user.
        durability: The durability that offers ask for, as in :meth:`~delayq.ReliableQueue.offer`.

    Returns:
        The rules, each one word.

    Raises:
        BadInput: No queue is named; or the role, number of partitions, kind of servers or
            durability is invalid.
        BadName: As for a queue; or a name contains white space, which no rule can contain; or a
            prefix covers keys of other queues.
    """
    if role not in ROLES:
        raise BadInput(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    if servers not in _SERVERS:
        raise BadInput(f"servers must be one of {', '.join(_SERVERS)}, not {servers!r}")
    wanted: set[str] = set(f"{_EVERYBODY} {_SERVERS[servers]}".split())
    if (promise := parse(durability)) is not None and role == "producer":
        wanted.add(str(promise.command[0]).lower())
    keys: list[str] = []
    channels: list[str] = []
    for name in delayed:
        one = DelayedKeys.of(_whole(name, prefix=prefix, ready=True))
        wanted.update(_commands(DELAYED[role]))
        keys += DELAYED[role].keys(one)
        channels += (one.channel, one.turns)
    for name in reliable:
        wanted.update(_commands(RELIABLE[role]))
        for other in _of_partitions(_whole(name, prefix=prefix, ready=False), partitions):
            keys += RELIABLE[role].keys(other)
            channels.append(other.wake)
    if not channels:
        raise BadInput("name at least one queue")
    if database:
        wanted.add("select")
    return [
        "resetkeys",
        "resetchannels",
        "-@all",
        *(f"+{command}" for command in sorted(wanted)),
        *(f"~{_pattern(key)}" for key in dict.fromkeys(keys)),
        *(f"&{_pattern(channel)}" for channel in dict.fromkeys(channels)),
    ]


def _of_partitions(name: str, partitions: int | None) -> list[ReliableKeys]:
    """Return the keys of a queue; for a partitioned one, for each number of digits that its
    partitions have.
    """
    if partitions is None:
        return [ReliableKeys.of(name)]
    check_partitions(partitions)
    return [
        ReliableKeys.below(name, partition_prefix(name, digits * _DIGIT, SALT_LENGTH * _ONE))
        for digits in range(1, len(str(partitions - 1)) + 1)
    ]


def _messages(keys: ReliableKeys) -> tuple[str, ...]:
    first, second = keys.live[:2]
    return (first, second[:-1] + _PRIORITY, *keys.messages[PRIORITIES:])


def _whole(name: str, *, prefix: bool, ready: bool) -> str:
    """Return a name, with a placeholder for its end if it is only a prefix."""
    if not isinstance(name, str) or not name:
        raise BadName("a queue's name must be a non-empty str")
    if _NOT_IN_RULES.search(name):
        raise BadName(f"ACL rules cannot contain whitespace or noncharacters, but {name!r} does")
    if not prefix:
        return name
    if ready and any(reserved.startswith(name) for reserved in RESERVED):
        raise BadName(f"keys of other queues also begin with {name!r}: use a longer prefix")
    return name + _REST


def _pattern(key: str) -> str:
    pattern = _SPECIAL.sub(r"\\\g<0>", key)
    return pattern.translate(
        {ord(_REST): "*", ord(_ONE): "?", ord(_PRIORITY): "[1-9]", ord(_DIGIT): "[0-9]"}
    )
