"""Checks a server and its queues for problems, and suggests what to do about them."""

from __future__ import annotations

import asyncio
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from delayq._redis.durability import Durability
from delayq._redis.rights import missing_rights
from delayq._redis.slots import SLOTS
from delayq._redisson.keys import DelayedKeys
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import ROLES, acl_rules
from delayq.admin.catalog import FoundQueue, list_queues
from delayq.admin.delayed import DelayedInspector
from delayq.admin.delays import ADVICE_ON_BLOCKING, explain_delay
from delayq.admin.failures import find_wave, newest_deaths
from delayq.admin.reliable import ReliableInspector
from delayq.errors import BadName, DelayqError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from delayq._reliable.store import ReliableStore
    from delayq.admin.acl import Role
    from delayq.client import Client
    from delayq.stats import QueueDepth

Level = Literal["ok", "note", "wrong"]

_OLDEST_VERSION = (6, 2)
# Seconds. Deliveries do not depend on this clock; offers with a moment do only for a trip's time.
_MAX_CLOCK_ERROR = 5.0
_MEMORY_SHORT = 0.9
# The queue name for checking the user's rights if there is no queue: any name will do.
_ABSENT_QUEUE = "delayq-doctor"
_AFTER_EVICTION = (
    "set maxmemory-policy to noeviction, and start a worker, which puts back what waits; offer"
    " again what has lost its content"
)
_REPLICAS, _FSYNC = Durability(replicas=1), Durability(replicas=0)
# The number of processes, and of causes, that are named.
_NAMED = 3
_NAME_LENGTH = 80


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``"ok"``; ``"note"``: possibly intended; ``"wrong"``: broken, or about to lose data.
        check: The thing that was checked.
        text: The result.
        advice: What to do about it; empty if there is nothing to do.
    """

    level: Level
    check: str
    text: str
    advice: str = ""


async def diagnose(
    client: Client,
    queues: Sequence[FoundQueue] | None = None,
    *,
    role: Role | None = None,
    overdue: float = 60.0,
) -> AsyncIterator[Finding]:
    """Check the server and queues, without changing anything.

    Args:
        client: An open client.
        queues: The queues to check; all that exist if None.
        role: The role that our user must be able to fill, if known.
        overdue: The age in seconds above which a due message that no consumer takes is reported as
            wrong.

    Raises:
        ServerUnavailable: The server does not answer.
    """
    findings, infos = await _servers(client)
    for finding in findings:
        yield finding
    if cluster := await _cluster(client):
        yield cluster
    yield await _durability(client, infos)
    yield await _clock(client)
    if queues is None:
        queues = ()
        try:
            queues = await list_queues(client)
        except ServerRefused as error:
            text = f"this user may not list them: {error}"
            advice = "name the queues: delayq doctor NAME delayed:NAME"
            yield Finding("note", "queues", text, advice)
        else:
            yield Finding("ok", "queues", f"{len(queues)} found")
    async for finding in _rights(client, queues, role):
        yield finding
    blocked: dict[tuple[str, int], Finding] = {}
    for queue in queues:
        yield await _queue(client, queue, overdue)
        async for finding in _notes(client, queue):
            yield finding
        blocked.update(await _blocked_loops(client, queue))
    for finding in blocked.values():
        yield finding


async def _servers(client: Client) -> tuple[list[Finding], Sequence[Mapping[str, str]]]:
    """Return what is to be known about the servers, and their figures: none without INFO."""
    try:
        infos = await client.session.server.info()
    except ServerRefused as error:
        text = f"version, role, persistence and memory are not checked: {error}"
        advice = "to have them checked, let this user run INFO, if the service has it"
        return [Finding("note", "server", text, advice)], ()
    can_configure = await client.session.server.can_configure()
    return [finding for info in infos for finding in _of_server(info, can_configure)], infos


def _of_server(info: Mapping[str, str], can_configure: bool) -> Iterator[Finding]:
    yield from (_version(info), _role(info))
    yield from (_persistence(info, can_configure), _memory(info, can_configure))


def _to_set(name: str, value: str, can_configure: bool) -> str:
    """Return the advice to change a setting of the server."""
    if can_configure:
        return f"CONFIG SET {name} {value}, and set it in the server's configuration file as well"
    return (
        f"set {name} to {value} where the server is configured, such as the console of a managed"
        " service: this user may not run CONFIG"
    )


def _version(info: Mapping[str, str]) -> Finding:
    name, version = "Valkey", info.get("valkey_version", "")
    if not version:
        name, version = "Redis", info.get("redis_version", "")
    if not version:
        advice = "make sure that it corresponds to Redis 6.2 or newer"
        return Finding("note", "version", "the server does not tell it", advice)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _OLDEST_VERSION:
        advice = "upgrade: delayq needs Redis 6.2 or newer, or Valkey"
        return Finding("wrong", "version", f"{name} {version}", advice)
    up = _ago(int(info.get("uptime_in_seconds", 0)))
    return Finding("ok", "version", f"{name} {version}, up for {up}")


def _role(info: Mapping[str, str]) -> Finding:
    replicas = info.get("connected_slaves", "0")
    if info.get("role", "master") != "master":
        master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        advice = f"use the address of its master, {master}, or redis+sentinel://"
        return Finding("wrong", "role", "a replica, which accepts no writes", advice)
    return Finding("ok", "role", f"a master, with {_count(int(replicas), 'replica')}")


def _persistence(info: Mapping[str, str], can_configure: bool = True) -> Finding:
    check = "persistence"
    if info.get("loading", "0") != "0":
        return Finding("wrong", check, "still loading its data", "wait until it has finished")
    if "aof_enabled" not in info:
        advice = "look for it in the documentation or the console of the service"
        return Finding("note", check, "the server does not tell how it keeps its data", advice)
    status, write = "rdb_last_bgsave_status", "snapshot"
    if has_log := info.get("aof_enabled", "0") == "1":
        status, write = "aof_last_write_status", "write to the append-only file"
    if info.get(status, "ok") != "ok":
        advice = "check whether the disk is full, and see the server's log"
        return Finding("wrong", check, f"the last {write} failed", advice)
    if has_log:
        return Finding("ok", check, "append-only file")
    changes = int(info.get("rdb_changes_since_last_save", 0))
    return Finding(
        "note",
        check,
        "no append-only file: a crash loses all changes since the last snapshot, currently"
        f" {_count(changes, 'change')}",
        _to_set("appendonly", "yes", can_configure),
    )


def _memory(info: Mapping[str, str], can_configure: bool = True) -> Finding:
    in_use, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "maxmemory-policy unknown")
    text = (
        f"{_bytes(in_use)} used"
        + (f" of {_bytes(limit)}" if limit else ", no limit")
        + f", {policy}"
    )
    if "maxmemory_policy" not in info:
        advice = _to_set("maxmemory-policy", "noeviction", can_configure)
        return Finding("note", "memory", text, advice)
    if policy != "noeviction":
        advice = _to_set("maxmemory-policy", "noeviction", can_configure)
        if limit:
            text += ": the server drops messages when memory is short"
            return Finding("wrong", "memory", text, advice)
        text += ": if a limit is set, the server will drop messages"
        return Finding("note", "memory", text, advice)
    if limit and in_use > limit * _MEMORY_SHORT:
        text += ": offers will be refused when memory is full"
        return Finding("wrong", "memory", text, "raise maxmemory or purge queues")
    return Finding("ok", "memory", text)


async def _cluster(client: Client) -> Finding | None:
    server, spread = client.session.server, client.session.nodes.spread
    try:
        info = await server.cluster_info()
    except ServerRefused as error:
        # A single server that is not in a cluster replies with an error.
        text = f"this user may not run CLUSTER INFO: {error}"
        return Finding("note", "cluster", text) if spread else None
    covered = int(info.get("cluster_slots_ok", 0))
    text = (
        f"{info.get('cluster_state', '?')}, {covered:,} of {SLOTS:,} slots served by"
        f" {info.get('cluster_size', '?')} masters"
    )
    if not spread and info.get("cluster_size", "1") != "1":
        text = f"{text}, but the address names a single server"
        return Finding("wrong", "cluster", text, "use redis+cluster://host:port")
    if info.get("cluster_state") != "ok" or covered < SLOTS:
        advice = "find the missing servers: redis-cli --cluster check host:port"
        return Finding("wrong", "cluster", text, advice)
    return Finding("ok", "cluster", text)


async def _durability(client: Client, infos: Sequence[Mapping[str, str]]) -> Finding:
    """Return how safe offers can be on every server, and why not safer."""
    # Not every service tells them.
    counts = [int(info["connected_slaves"]) for info in infos if "connected_slaves" in info]
    replicas = min(counts, default=None)
    possible, refused = ['"memory"'], ""
    for name, durability in (f'"replicas:{replicas or "N"}"', _REPLICAS), ('"fsync"', _FSYNC):
        try:
            await client.session.server.everywhere(*durability.probe)
        except ServerRefused as error:
            refused += f"; not {name}: {error}"
        else:
            if replicas == 0 and durability is _REPLICAS:
                refused += '; "replicas:N" needs replicas, and a master has none'
            else:
                possible.append(name)
    return Finding("ok", "durability", f"possible for offers: {', '.join(possible)}{refused}")


async def _clock(client: Client) -> Finding:
    try:
        ahead, round_trip = await clock_ahead(client)
    except ServerRefused as error:
        return Finding("note", "clock", f"this user may not read the server's time: {error}")
    side = "ahead of" if ahead > 0 else "behind"
    text = (
        f"the server's clock is {abs(ahead) * 1000:,.1f} ms {side} this machine's; a round trip"
        f" takes {round_trip * 1000:.1f} ms"
    )
    if abs(ahead) > _MAX_CLOCK_ERROR:
        advice = "delays are still correct, because the server's clock decides; synchronise both"
        return Finding("note", "clock", text, f"{advice} with NTP")
    return Finding("ok", "clock", text)


async def clock_ahead(client: Client, questions: int = 10) -> tuple[float, float]:
    """Return how far the server's clock is ahead of ours, by the quickest reply, and how long that
    took, in seconds.
    """
    replies: list[tuple[float, float]] = []
    for _ in range(questions):
        asked_at = time.time()
        server_time = (await client.server_time()).timestamp()
        answered_at = time.time()
        replies.append((answered_at - asked_at, server_time - (asked_at + answered_at) / 2))
    took, ahead = min(replies)
    return ahead, took


async def _rights(
    client: Client, queues: Sequence[FoundQueue], role: Role | None
) -> AsyncIterator[Finding]:
    server = client.session.server
    fulfilled: list[str] = []
    lacks: dict[str, str] = {}
    # It takes a while to read the texts of all scripts, from which the rules follow.
    await asyncio.to_thread(_read_all_rules)
    # One queue of each kind represents all. No user has rules for names that rules cannot have.
    samples = {queue.kind: queue for queue in reversed(queues) if _can_be_granted(queue)}
    samples = samples or {"reliable": FoundQueue("reliable", _ABSENT_QUEUE)}
    try:
        user = await server.user()
        for candidate in ROLES if role is None else (role,):
            if missing := [
                right
                for queue in samples.values()
                async for right in _missing_rights(client, user, candidate, queue)
            ]:
                lacks[candidate] = ", ".join(dict.fromkeys(missing))
            else:
                fulfilled.append(candidate)
    except ServerRefused as error:
        # ACL DRYRUN needs Redis 7, and the right to call it.
        yield Finding(
            "note",
            "rights",
            f"cannot check the rights of this user in advance: {error}",
            "look for refusals below, and in the logs of producers and workers",
        )
        return
    arguments = " ".join(queue.argument for queue in samples.values())
    for lacking, rights in lacks.items():
        level: Level = "wrong" if lacking == role else "note"
        excerpt = rights if len(rights) <= 60 else f"{rights[:57]}..."
        text = f"user {user!r} cannot act as {lacking}: lacks {excerpt}"
        yield Finding(level, "rights", text, f"see: delayq acl {lacking} {arguments}")
    if fulfilled:
        yield Finding("ok", "rights", f"user {user!r} can act as: {', '.join(fulfilled)}")


def _read_all_rules() -> None:
    for role in ROLES:
        acl_rules(role, reliable=[_ABSENT_QUEUE], delayed=[_ABSENT_QUEUE])


def _can_be_granted(queue: FoundQueue) -> bool:
    try:
        _rules("admin", queue)
    except BadName:
        return False
    return True


def _rules(role: Role, queue: FoundQueue) -> list[str]:
    if queue.kind == "reliable":
        return acl_rules(role, reliable=[queue.name], partitions=queue.partitions)
    return acl_rules(role, delayed=[queue.name])


async def _missing_rights(
    client: Client, user: str, role: Role, queue: FoundQueue
) -> AsyncIterator[str]:
    """Yield the rights that the user lacks. Raises ServerRefused if the server does not tell."""
    server = client.session.server
    if queue.kind == "reliable":
        keys = ReliableKeys.of(queue.name)
        key, channel = keys.messages[0], keys.settings if role == "dashboard" else keys.wake
    else:
        delayed = DelayedKeys.of(queue.name)
        key, channel = delayed.timeout, delayed.channel
    commands = [
        rule[1:] for rule in _rules(role, queue) if rule.startswith("+") and "|" not in rule
    ]
    async for right in missing_rights(server.command, user, commands, key, channel):
        yield right


async def _queue(client: Client, queue: FoundQueue, overdue: float) -> Finding:
    check = f"{queue.kind} {queue.name}"
    try:
        inspector = queue.inspector(client)
        level, text, advice = await (
            _delayed(inspector, queue, overdue)
            if isinstance(inspector, DelayedInspector)
            else _reliable(inspector, queue, overdue)
        )
    except ServerRefused as error:
        advice = f"see the rights that it needs: delayq acl dashboard {queue.argument}"
        return Finding("wrong", check, str(error), advice)
    except DelayqError as error:
        return Finding("wrong", check, str(error))
    return Finding(level, check, text, advice)


async def _notes(client: Client, queue: FoundQueue) -> AsyncIterator[Finding]:
    """Yield what else is to be known about a reliable queue."""
    if queue.kind == "reliable":
        async for finding in _failures(client, queue):
            yield finding
        async for finding in _differences(client, queue):
            yield finding


async def _differences(client: Client, queue: FoundQueue) -> AsyncIterator[Finding]:
    """Yield the settings of which processes declare another value than the server has."""
    # Other findings tell which rights are missing.
    with suppress(DelayqError):
        inspector = ReliableInspector(client.session, queue.name)
        for difference, workers in await inspector.differences():
            names = _listing([f"{worker.host}:{worker.pid}" for worker in workers])
            yield Finding(
                "note",
                f"reliable {queue.name}",
                f"{difference.text} of {names}: the value on the server counts",
                f"{difference.command(queue.argument)}, or change the code",
            )


async def _failures(client: Client, queue: FoundQueue) -> AsyncIterator[Finding]:
    """Yield that many attempts of a queue have failed within the last minutes."""
    # Other findings tell which rights are missing.
    with suppress(DelayqError):
        inspector = ReliableInspector(client.session, queue.name)
        await inspector.all_stores()
        if wave := await find_wave(inspector):
            name = queue.argument
            # A part is found as well, and a long error fits.
            error = f"--error {shlex.quote(wave.error[:_NAME_LENGTH])}"
            is_paused = (await inspector.depth()).paused
            advice = "" if is_paused else f"until the cause is mended: delayq pause {name}; "
            if wave.is_deadly:
                choice = error if wave.error else "--error TEXT, or --reason TEXT"
                advice += (
                    f"{'when the cause is mended' if is_paused else 'then'}: delayq resume {name};"
                    f" delayq dead redrive {name} {choice} (first with --dry-run: older dead"
                    " letters may match, too)"
                )
            elif wave.error:
                advice += (
                    f"look at them: delayq search {name} {error}; if they will never succeed:"
                    f" delayq bury {name} {error}"
                )
            else:
                advice += f"look at them: delayq list {name} --state delayed"
            yield Finding("note", f"reliable {queue.name}", f"failing: {wave.text}", advice)


async def _blocked_loops(client: Client, queue: FoundQueue) -> dict[tuple[str, int], Finding]:
    """Return the findings about processes whose event loop was blocked within an hour."""
    if queue.kind == "delayed":
        return {}
    # Other findings tell which rights are missing.
    with suppress(DelayqError):
        inspector = ReliableInspector(client.session, queue.name)
        now = await inspector.now()
        return {
            (worker.host, worker.pid): Finding(
                "note",
                f"process {worker.pid} on {worker.host}",
                f"its event loop was blocked for {worker.blocked.seconds:.1f} s by"
                f" {worker.blocked.code}, {_ago(int((now - worker.blocked.until).total_seconds()))}"
                " ago",
                ADVICE_ON_BLOCKING,
            )
            for worker in await inspector.workers()
            if worker.blocked is not None
        }
    return {}


async def _reliable(
    inspector: ReliableInspector, queue: FoundQueue, overdue: float
) -> tuple[Level, str, str]:
    stores = await inspector.all_stores()
    if missing := await _missing_keys(stores):
        return "wrong", f"{missing}: the server has evicted keys of this queue", _AFTER_EVICTION
    stats = await inspector.depth()
    if not (stats.ready or stats.delayed or stats.leased or stats.dead or stats.paused) and (
        not await inspector.exists()
    ):
        return "note", "there is no such queue", "delayq queues lists those that there are"
    return await _state(inspector, queue, stats, overdue)


async def _state(
    inspector: ReliableInspector, queue: FoundQueue, stats: QueueDepth, overdue: float
) -> tuple[Level, str, str]:
    text = (
        f"{stats.ready:,} ready, {stats.delayed:,} delayed, {stats.leased:,} leased, {stats.dead:,}"
        " dead"
    )
    is_late = stats.ready and stats.oldest_due_age > overdue
    if stats.paused:
        since = "" if stats.paused_for is None else f" for {_ago(int(stats.paused_for))}"
        level: Level = "wrong" if is_late else "note"
        return level, f"{text}: paused{since}", f"delayq resume {queue.argument}"
    if is_late:
        delay = await explain_delay(inspector, stats, lambda seconds: _ago(int(seconds)))
        cause = f"{_ago(int(stats.oldest_due_age))} late: {delay.cause}"
        return "wrong" if delay.is_wrong else "note", f"{text}: {cause}", delay.advice
    if (stats.ready or stats.delayed) and not stats.leased and not await _has_workers(inspector):
        advice = "start a worker: delayq worker MODULE:ATTRIBUTE"
        return "note", f"{text}: no consumers", advice
    if stats.dead:
        name = queue.argument
        return (
            "note",
            text + await _causes_of_death(inspector, stats.dead),
            (
                f"see why: delayq dead list {name} --group-by error; when a cause is mended: delayq"
                f" dead redrive {name} --error TEXT, or --reason TEXT; if they will never succeed:"
                f" delayq dead purge {name} --error TEXT, or --reason TEXT"
            ),
        )
    return "ok", text, ""


async def _causes_of_death(inspector: ReliableInspector, dead: int) -> str:
    # The user may not read dead letters, and they may be gone by now.
    with suppress(ServerRefused):
        if deaths := await newest_deaths(inspector):
            read = deaths.total()
            return (f": of the newest {read}, " if read < dead else ": ") + ", ".join(
                f"{count} {cause if len(cause) <= _NAME_LENGTH else cause[:_NAME_LENGTH] + '...'}"
                for cause, count in deaths.most_common(_NAMED)
            )
    return ""


async def _missing_keys(stores: Sequence[ReliableStore]) -> str:
    """Return the keys that the server seems to have evicted; empty if there are none."""
    for store in stores:
        # Other findings say which rights are missing.
        with suppress(ServerRefused):
            if missing := await store.missing_keys():
                return missing
    return ""


async def _has_workers(inspector: ReliableInspector) -> bool:
    """Return whether a process works on a queue; also True if the user may not know."""
    try:
        return bool(await inspector.workers())
    except ServerRefused:
        return True


async def _delayed(
    inspector: DelayedInspector, queue: FoundQueue, overdue: float
) -> tuple[Level, str, str]:
    stats = await inspector.depth()
    text = f"{stats.ready:,} ready, {stats.delayed:,} delayed, {stats.leased:,} leased"
    if stats.quarantined is not None:
        text += f", {stats.quarantined:,} unreadable"
    if stats.oldest_due_age > overdue:
        text += f": due for {_ago(int(stats.oldest_due_age))}, but not moved"
        return "wrong", text, "start a consumer: no process has the queue open"
    if stats.quarantined:
        return "note", text, f"delayq inspect {queue.argument} --state quarantined"
    return "ok", text, ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _listing(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    suffix = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + suffix


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _ago(seconds: int) -> str:
    """Return a duration in words, approximately."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
