"""The rights that a user of the server needs for its work with queues, and no more: rules for ``ACL
SETUSER`` and ACL files.

The rules work from Redis 6.2 on. The server checks the commands within scripts as if the user had
sent them, so a role includes the commands of its scripts. Tests let each role do its whole job, and
try what is not the job of a role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from delayq._checks import describe_value
from delayq._engine.durability import parse
from delayq._redis.rights import commands as commands_of
from delayq._redis.scripts import scripts_in
from delayq._redisson.keys import RESERVED, DelayedKeys
from delayq._reliable.keys import (
    MESSAGES,
    PRIORITIES,
    SALT_LENGTH,
    ReliableKeys,
    check_partitions,
    partition_prefix,
)
from delayq.errors import BadInput, BadName

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from delayq._redis.scripts import Script

Role = Literal["producer", "consumer", "admin", "dashboard"]
"""A producer offers, cancels and reschedules; a consumer takes and acknowledges; an admin cleans
up; a dashboard only reads.
"""

Servers = Literal["one", "cluster", "sentinel"]
"""Whether there is a single server, a cluster, or a server behind Sentinels."""

Kind = Literal["delayed", "reliable"]

ROLES: tuple[Role, ...] = ("producer", "consumer", "admin", "dashboard")

# Every role connects and listens for notifications. EVAL is for a server that does not know a
# script yet.
_EVERYBODY = "ping subscribe unsubscribe"
_SCRIPTS = "eval evalsha"

# Placeholders, until the pattern is written, for the rest of a name, one character of a token, a
# priority and a digit: these code points are noncharacters.
_ANY_SUFFIX, _ANY_CHARACTER = "\ufdd0", "\ufdd1"
_ANY_PRIORITY, _ANY_DIGIT = "\ufdd2", "\ufdd3"
_ANY_CLIENT = 12 * _ANY_CHARACTER
# Commands of scripts that need only one subcommand.
_SUBCOMMANDS = {"pubsub": "pubsub|numsub"}
_SPECIAL = re.compile(r"[*?\[\\]")
# Characters that a rule cannot contain, because it would end there.
_NOT_IN_RULES = re.compile(
    f"[\0\t\n\v\f\r {_ANY_SUFFIX}{_ANY_CHARACTER}{_ANY_PRIORITY}{_ANY_DIGIT}]"
)
# Commands that find the right server.
_SERVERS: dict[Servers, str] = {"one": "", "cluster": "asking cluster|slots", "sentinel": ""}


@dataclass(frozen=True)
class _Work:
    """The work of a role with queues of one kind, apart from running the scripts that name it.

    Attributes:
        commands: The commands that it sends itself.
        keys: The keys that it accesses by them, beyond those of its scripts, by their names there.
        never: Commands in its scripts that it never reaches.
    """

    commands: str = ""
    keys: str = ""
    never: str = ""


_READ_DELAYED = "time llen lindex lrange hmget zcard zcount zrange zrevrange"
_READ_RELIABLE = "zcard zrange hmget hgetall"

_WORK: dict[tuple[Kind, Role], _Work] = {
    # No access to the ready list: other processes move due messages.
    ("delayed", "producer"): _Work(),
    ("delayed", "consumer"): _Work("blmove unlink rpush", "summons"),
    ("delayed", "admin"): _Work(f"{_READ_DELAYED} zscan unlink"),
    ("delayed", "dashboard"): _Work(
        _READ_DELAYED, "ready timeout ordered quarantine leases leased"
    ),
    ("reliable", "producer"): _Work("unlink"),
    # It runs only the reliable-queue branch of the re-check.
    ("reliable", "consumer"): _Work("hscan hmget hget time unlink", never="llen"),
    # The last commands and keys are those of a move to another number of partitions.
    ("reliable", "admin"): _Work(
        f"{_READ_RELIABLE} hscan set zmscore hset hdel hlen pttl pexpire unlink zrem"
        " time zcount zscore zrangebylex zremrangebylex",
        "remembered shared_moments awaited record_times records rate_log batches batch_members"
        " aside",
    ),
    ("reliable", "dashboard"): _Work(
        f"{_READ_RELIABLE} hscan zrangebylex zscore",
        "dead_messages schedules settings batch_members group_turns",
    ),
}

_KEYS_OF_DELAYED = "ready timeout ordered channel quarantine leases leased turns summons"
_KEYS_OF_RELIABLE = (
    "wake summons remembered shared_moments dead dead_messages paused kept_slots schedules"
    " record_times records awaited batches batch_members settings history workers worker_facts"
)


_FOLDERS: dict[Kind, str] = {"delayed": "redisson", "reliable": "reliable"}
"""Where the scripts of each kind of queue lie."""


def scripts_of(kind: Kind, role: Role) -> list[Script]:
    """Return the scripts that a role runs on queues of one kind: those whose files name it."""
    scripts = (*scripts_in(""), *scripts_in(_FOLDERS[kind]))
    return [script for script in scripts if role in script.roles]


def acl_rules(
    role: Role,
    *,
    delayed: Iterable[str] = (),
    reliable: Iterable[str] = (),
    prefix: bool = False,
    database: int = 0,
    partitions: int = 1,
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
            pause, migrate. ``"dashboard"``: inspect, without changing anything. All but the last
            may change the settings of a reliable queue, because the first handle that declares one
            stores it; only an admin can change the number of partitions.
        delayed: Names of delayed queues as the server knows them: with a ``name_mapper``, the names
            it returns.
        reliable: The same for reliable queues.
        prefix: Whether the names are prefixes. For delayed queues, a prefix then covers only names
            without braces, unless it contains a complete hash tag.
        database: The database, if it is not the first.
        partitions: The largest number of partitions that the reliable queues have, or will get.
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
    commands: set[str] = set(f"{_EVERYBODY} {_SERVERS[servers]}".split())
    if (level := parse(durability)) is not None and role == "producer":
        commands.add(str(level.command[0]).lower())
    keys: list[str] = []
    channels: list[str] = []
    for name in delayed:
        role_commands, key_names = _work_of("delayed", role)
        queue = DelayedKeys.of(_with_any_suffix(name, prefix=prefix, ready=True))
        commands |= role_commands
        keys += _delayed_keys(queue, key_names)
        channels += (queue.channel, queue.turns)
        channels += [queue.summons] if role == "consumer" else []
    for name in reliable:
        role_commands, key_names = _work_of("reliable", role)
        commands |= role_commands
        for part in _of_partitions(_with_any_suffix(name, prefix=prefix, ready=False), partitions):
            keys += _reliable_keys(part, key_names)
            channels += _reliable_channels(part, role)
    if not channels:
        raise BadInput("name at least one queue")
    if database:
        commands.add("select")
    return [
        "resetkeys",
        "resetchannels",
        "-@all",
        *(f"+{command}" for command in sorted(commands)),
        *(f"~{_pattern(key)}" for key in dict.fromkeys(keys)),
        *(f"&{_pattern(channel)}" for channel in dict.fromkeys(channels)),
    ]


def _of_partitions(name: str, partitions: int) -> list[ReliableKeys]:
    """Return the keys of a queue's first partition, and of the others for each number of digits
    that their numbers have.
    """
    check_partitions(partitions)
    lengths = range(1, len(str(partitions - 1)) + 1) if partitions > 1 else ()
    return [
        ReliableKeys.of(name),
        *(
            ReliableKeys.below(
                name, partition_prefix(name, length * _ANY_DIGIT, SALT_LENGTH * _ANY_CHARACTER)
            )
            for length in lengths
        ),
    ]


def _work_of(kind: Kind, role: Role) -> tuple[set[str], set[str]]:
    """Return the commands that a role needs for queues of one kind, and the names of its keys."""
    work, scripts = _WORK[kind, role], scripts_of(kind, role)
    of_scripts = {command.lower() for script in scripts for command in commands_of(script)}
    of_scripts = {_SUBCOMMANDS.get(name, name) for name in of_scripts - {*work.never.split()}}
    calls = {*_SCRIPTS.split()} if scripts else set()
    names = {name for script in scripts for name in script.keys}
    return calls | of_scripts | {*work.commands.split()}, names | {*work.keys.split()}


def _delayed_keys(keys: DelayedKeys, names: Container[str]) -> list[str]:
    every: dict[str, str] = {name: getattr(keys, name) for name in _KEYS_OF_DELAYED.split()}
    every["fence"] = keys.fence(f"{_ANY_CLIENT}-{8 * _ANY_CHARACTER}")
    return [key for name, key in every.items() if name in names]


def _reliable_keys(keys: ReliableKeys, names: Container[str]) -> list[str]:
    first, second = keys.waiting[:2]
    every = {"waiting_0": first, "waiting_1": second[:-1] + _ANY_PRIORITY}
    for name in (*MESSAGES[PRIORITIES:], *_KEYS_OF_RELIABLE.split()):
        every[name] = keys.named(name)
    every["call"] = keys.call(f"{_ANY_CLIENT}-{_ANY_CHARACTER}")
    every["aside"] = keys.wake.removesuffix("wake") + f"aside:{_ANY_SUFFIX}"
    return [key for name, key in every.items() if name in names]


def _reliable_channels(keys: ReliableKeys, role: Role) -> list[str]:
    channels = [keys.settings]
    if role != "dashboard":
        channels.append(keys.wake)
    if role == "consumer":
        channels.append(keys.summons)
    return channels


def _with_any_suffix(name: str, *, prefix: bool, ready: bool) -> str:
    """Return a name, with a placeholder for its end if it is only a prefix."""
    if not isinstance(name, str) or not name:
        raise BadName(f"a queue's name must be a non-empty str, not {describe_value(name)}")
    if _NOT_IN_RULES.search(name):
        raise BadName(f"ACL rules cannot contain whitespace or noncharacters, but {name!r} does")
    if not prefix:
        return name
    if ready and any(reserved.startswith(name) for reserved in RESERVED):
        raise BadName(f"keys of other queues also begin with {name!r}: use a longer prefix")
    return name + _ANY_SUFFIX


def _pattern(key: str) -> str:
    pattern = _SPECIAL.sub(r"\\\g<0>", key)
    return pattern.translate(
        {
            ord(_ANY_SUFFIX): "*",
            ord(_ANY_CHARACTER): "?",
            ord(_ANY_PRIORITY): "[1-9]",
            ord(_ANY_DIGIT): "[0-9]",
        }
    )
