"""Finds out why the messages of a reliable queue are late, and what would help."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal

from delayq._durations import datetime_at
from delayq._reliable.groups import to_group
from delayq._reliable.limits import Limit, write_limit
from delayq._reliable.store import ReliableStore
from delayq.admin.catalog import FoundQueue
from delayq.admin.wording import describe_group_state, describe_limit
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._reliable.groups import Group
    from delayq.admin.reliable import ReliableInspector
    from delayq.stats import QueueDepth, WorkerInfo

Reason = Literal[
    "paused",
    "limit",
    "groups",
    "no_consumers",
    "silent_workers",
    "blocked_loop",
    "busy_workers",
    "idle_workers",
    "slow_consumers",
]
"""The kinds of reasons why messages are late."""
# The number of groups of a partition that are read, and of those that are named.
_MOST_GROUPS = 100
_MOST_NAMED = 3
# A blocked event loop explains why messages are late for this time after it ran again, seconds.
_MATTERS_FOR = 60.0
# It does so if it was blocked for this share of the time for which messages have been late.
_BLOCKED_SHARE = 0.25
_MORE_WORKERS = "start more workers, or raise their concurrency"
ADVICE_ON_BLOCKING = "make that function a plain one, not async, or use asyncio.to_thread() in it"
"""The advice about a handler that blocks the event loop."""


@dataclass(frozen=True)
class Delay:
    """Why messages are late.

    Attributes:
        cause: The reason, in words.
        advice: What would help.
        reason: The kind of the reason.
        is_wrong: Whether nobody meant it: messages are due, and nothing takes them.
    """

    cause: str
    advice: str
    reason: Reason
    is_wrong: bool = False


async def explain_delay(
    inspector: ReliableInspector, depth: QueueDepth, span: Callable[[float], str]
) -> Delay:
    """Return why due messages of a queue wait.

    Args:
        inspector: The queue.
        depth: The number of its messages by state.
        span: Formats a duration in seconds.
    """
    queue = FoundQueue("reliable", inspector.name).argument
    if depth.paused:
        return Delay("the queue is paused", f"resume it: delayq resume {queue}", "paused")
    now = datetime.now(UTC)
    groups: Sequence[Group] = ()
    # The user may not know.
    with suppress(ServerRefused):
        now = await inspector.now()
        if held_back := await _limit_of_queue(inspector, queue, depth, now, span):
            return held_back
        groups = await _first_groups(inspector)
        if held_back := _limits_of_groups(queue, groups, depth, now, span):
            return held_back
    return await _lack_of_workers(inspector, queue, groups, depth, now, span)


async def _limit_of_queue(
    inspector: ReliableInspector,
    queue: str,
    depth: QueueDepth,
    now: datetime,
    span: Callable[[float], str],
) -> Delay | None:
    limit: Limit | None = (await inspector.settings()).limit
    if limit is None:
        return None
    is_full = limit.concurrency is not None and depth.leased >= limit.concurrency
    if not is_full and (limit.rate is None or not await _awaits_rate(inspector, now)):
        return None
    return Delay(
        f"at its limit of {describe_limit(limit, span)}",
        f"to raise it: delayq configure {queue} --limit N",
        "limit",
    )


async def _awaits_rate(inspector: ReliableInspector, now: datetime) -> bool:
    """Return whether the limit of the queue lets nothing run in one of its partitions."""
    moments = await inspector.call_each(ReliableStore.slot_free_us)
    if not any(moment is not None and datetime_at(moment) > now for moment in moments):
        return False
    # That moment is by the former limit until a claim follows a change.
    return not any(await inspector.call_each(ReliableStore.has_new_limits))


async def _first_groups(inspector: ReliableInspector) -> list[Group]:
    return [
        to_group(group)
        for store in inspector.stores
        for group in await store.groups("", _MOST_GROUPS)
    ]


def _limits_of_groups(
    queue: str,
    groups: Sequence[Group],
    depth: QueueDepth,
    now: datetime,
    span: Callable[[float], str],
) -> Delay | None:
    """Return which groups keep their messages back, if those are all that are due."""
    held_back = [
        group
        for group in groups
        if group.ready and describe_group_state(group, now) not in ("ok", "due")
    ]
    if not held_back or sum(group.ready for group in held_back) < depth.ready:
        return None
    held_back.sort(key=lambda group: -group.ready)
    causes = [_describe(group, now, span) for group in islice(held_back, _MOST_NAMED)]
    if len(held_back) > _MOST_NAMED:
        causes.append(f"and {len(held_back) - _MOST_NAMED:,} more groups")
    return Delay("; ".join(causes), f"see: delayq groups list {queue}", "groups")


def _describe(group: Group, now: datetime, span: Callable[[float], str]) -> str:
    state = describe_group_state(group, now)
    if state == "at its limit":
        state = f"at its limit of {describe_limit(group.limit, span)}"
    return f"group {group.name!r}, with {group.ready:,} ready, is {state}"


async def _lack_of_workers(
    inspector: ReliableInspector,
    queue: str,
    groups: Sequence[Group],
    depth: QueueDepth,
    now: datetime,
    span: Callable[[float], str],
) -> Delay:
    try:
        workers: Sequence[WorkerInfo] = await inspector.workers()
    except ServerRefused:
        workers = ()
    if not depth.leased and not workers:
        advice = "start a worker: delayq worker MODULE:ATTRIBUTE"
        return Delay("no consumers", advice, "no_consumers", is_wrong=True)
    return (
        _blocked_loops(workers, depth, now, span)
        or _use_by_one_group(queue, workers, groups, depth, now)
        or _use_of_slots(queue, workers, depth)
    )


def _use_by_one_group(
    queue: str,
    workers: Sequence[WorkerInfo],
    groups: Sequence[Group],
    depth: QueueDepth,
    now: datetime,
) -> Delay | None:
    """Return which group has most slots, if none is left for a group that could use one."""
    slots = sum(worker.slots for worker in workers)
    has_waiting = any(
        not group.running and describe_group_state(group, now) == "due" for group in groups
    )
    if slots < 2 or depth.leased < slots or not has_waiting:
        return None
    group = max(groups, key=lambda group: group.running)
    # Groups take turns: only slow messages let one have more than half of the slots.
    if 2 * group.running <= slots:
        return None
    share = f"{group.running:,} of" if group.running < slots else "all"
    advice = (
        "to free slots at once, see what runs, and cancel what can be repeated: delayq list"
        f" {queue} --state leased; delayq cancel {queue} ID --running"
    )
    limit = group.limit or Limit()
    # Otherwise it was limited after its messages had begun.
    if not limit.ordered and (limit.concurrency or slots) > slots // 2:
        # A new limit replaces the rate, too.
        text = write_limit(replace(limit, concurrency=slots // 2))
        name = ("-- " if group.name.startswith("-") else "") + shlex.quote(group.name)
        advice = f"limit it: delayq groups limit {queue} {name} {text}; {advice}"
    return Delay(
        f"group {group.name!r} uses {share} {slots:,} slots of workers, while other groups wait",
        advice,
        "busy_workers",
    )


def _use_of_slots(queue: str, workers: Sequence[WorkerInfo], depth: QueueDepth) -> Delay:
    slots, free = sum(worker.slots for worker in workers), sum(worker.free for worker in workers)
    if slots and depth.leased < slots and not free:
        cause = f"all slots of workers are in use, {slots - depth.leased:,} of them by other queues"
        return Delay(cause, _MORE_WORKERS, "busy_workers")
    if not depth.leased:
        advice = f"look at their logs: delayq workers {queue} lists them"
        return Delay("workers listen, but take nothing", advice, "idle_workers", is_wrong=True)
    if slots and depth.leased < slots:
        cause = f"{depth.leased:,} of {slots:,} slots of workers are in use"
        return Delay(cause, f"look at the workers: delayq workers {queue}", "idle_workers")
    if slots:
        cause = f"all {slots:,} slots of workers are in use"
        return Delay(cause, _MORE_WORKERS, "busy_workers")
    return Delay("consumers do not keep up", _MORE_WORKERS, "slow_consumers")


def _blocked_loops(
    workers: Sequence[WorkerInfo],
    depth: QueueDepth,
    now: datetime,
    span: Callable[[float], str],
) -> Delay | None:
    """Return which workers cannot work, if that is all of them, or which one could not lately."""
    silent = [
        (silence, worker) for worker in workers if (silence := worker.silence(now)) is not None
    ]
    if silent and len(silent) == len(workers):
        silence, worker = min(silent, key=lambda pair: pair[0])
        cause = f"no worker has reported for {span(silence)}, {_process(worker)} last"
        if worker.blocked is not None:
            cause += f"; {worker.blocked.code} had blocked its event loop"
        advice = "see whether it runs, and what blocks its event loop: its log names the code"
        return Delay(cause, advice, "silent_workers", is_wrong=True)
    lately = [
        (worker, worker.blocked)
        for worker in workers
        if worker.blocked is not None
        and (now - worker.blocked.until).total_seconds() <= _MATTERS_FOR
        and worker.blocked.recent >= _BLOCKED_SHARE * min(depth.oldest_due_age, _MATTERS_FOR)
    ]
    if not lately:
        return None
    worker, blocked = max(lately, key=lambda pair: pair[1].seconds)
    cause = (
        f"{blocked.code} blocked the event loop of {_process(worker)} for {span(blocked.seconds)}"
    )
    return Delay(cause, ADVICE_ON_BLOCKING, "blocked_loop", is_wrong=True)


def _process(worker: WorkerInfo) -> str:
    return f"process {worker.pid} on {worker.host}"
