"""Finds out why the messages of a reliable queue are late, and what would help."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from delayq._reliable.groups import to_group
from delayq._reliable.store import ReliableStore
from delayq.admin.wording import describe_group_state, describe_limit
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delayq._reliable.groups import Group
    from delayq._reliable.limits import Limit
    from delayq.admin.reliable import ReliableInspector
    from delayq.stats import QueueDepth, WorkerInfo

# The number of groups of a partition that are read, and of those that are named.
_MOST_GROUPS = 100
_MOST_NAMED = 3


@dataclass(frozen=True)
class Delay:
    """Why messages are late.

    Attributes:
        cause: The reason, in words.
        advice: What would help; ``QUEUE`` stands for the queue.
        is_wrong: Whether nobody meant it: messages are due, and nothing takes them.
    """

    cause: str
    advice: str
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
    if depth.paused:
        return Delay("the queue is paused", "resume it: delayq resume QUEUE")
    try:
        held_back = await _limit_of_queue(inspector, depth, span) or await _limits_of_groups(
            inspector, depth, span
        )
    except ServerRefused:
        # The user may not know.
        held_back = None
    return held_back or await _lack_of_workers(inspector, depth)


async def _limit_of_queue(
    inspector: ReliableInspector, depth: QueueDepth, span: Callable[[float], str]
) -> Delay | None:
    limit: Limit | None = (await inspector.settings()).limit
    if limit is None:
        return None
    is_full = limit.concurrency is not None and depth.leased >= limit.concurrency
    if not is_full and (limit.rate is None or not await _awaits_rate(inspector)):
        return None
    return Delay(
        f"at its limit of {describe_limit(limit, span)}",
        "to raise it: delayq configure QUEUE --limit N",
    )


async def _awaits_rate(inspector: ReliableInspector) -> bool:
    """Return whether the limit of the queue lets nothing run in one of its partitions."""
    moments = await inspector.call_each(ReliableStore.slot_free_us)
    return any(moment is not None and moment > time.time_ns() // 1000 for moment in moments)


async def _limits_of_groups(
    inspector: ReliableInspector, depth: QueueDepth, span: Callable[[float], str]
) -> Delay | None:
    """Return which groups keep their messages back, if those are all that are due."""
    groups = [
        to_group(group)
        for store in inspector.stores
        for group in await store.groups("", _MOST_GROUPS)
    ]
    now = datetime.now(UTC)
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
    return Delay("; ".join(causes), "see: delayq groups list QUEUE")


def _describe(group: Group, now: datetime, span: Callable[[float], str]) -> str:
    state = describe_group_state(group, now)
    if state == "at its limit":
        state = f"at its limit of {describe_limit(group.limit, span)}"
    return f"group {group.name!r}, with {group.ready:,} ready, is {state}"


async def _lack_of_workers(inspector: ReliableInspector, depth: QueueDepth) -> Delay:
    try:
        workers: Sequence[WorkerInfo] = await inspector.workers()
    except ServerRefused:
        workers = ()
    slots = sum(worker.slots for worker in workers)
    if not depth.leased and not workers:
        advice = "start a worker: delayq worker MODULE:ATTRIBUTE"
        return Delay("no worker listens", advice, is_wrong=True)
    if not depth.leased:
        advice = "look at their logs: their event loops may be blocked"
        return Delay("workers listen, but take nothing", advice, is_wrong=True)
    if slots and depth.leased < slots:
        cause = f"{depth.leased:,} of {slots:,} slots of workers are in use"
        return Delay(cause, "look at the workers: delayq workers QUEUE")
    cause = f"all {slots:,} slots of workers are in use" if slots else "consumers do not keep up"
    return Delay(cause, "start more workers, or raise their concurrency")
