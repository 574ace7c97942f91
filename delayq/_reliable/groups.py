"""The groups of a reliable queue: their limits, pauses and figures."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from delayq._durations import datetime_at
from delayq._reliable.ids import checked_group
from delayq._reliable.limits import limit_text, parse_limit
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from delayq._reliable.limits import Limit
    from delayq._reliable.replies import StoredGroup
    from delayq._reliable.store import ReliableStore


@dataclass(frozen=True)
class Group:
    """A group of a queue's messages.

    Attributes:
        name: The group's name.
        waiting: The number of its messages that wait, due or not.
        ready: The number of these that are due.
        running: The number of its messages that workers have.
        next_at: When one of its messages may be handed out, as far as its own limit goes (UTC); a
            moment that has passed if one may be by now, and None if none is foreseen.
        limit: Its own limit, or else the queue's ``group_limit``; None if there is none.
        has_own_limit: Whether that limit, or its absence, is its own.
        paused: Whether it is paused.
        oldest_due_at: When the oldest of its due messages fell due (UTC); None if none is due.
    """

    name: str
    waiting: int
    ready: int
    running: int
    next_at: datetime | None
    limit: Limit | None
    has_own_limit: bool
    paused: bool
    oldest_due_at: datetime | None = None


class Groups:
    """The groups of one queue.

    A group exists as long as it has messages, a limit of its own, or a pause. Every method may
    raise the errors of :class:`~delayq.errors.ServerError`.
    """

    def __init__(
        self,
        store_of: Callable[[str], Awaitable[ReliableStore]],
        change: Callable[[str, str, str], Awaitable[bool]],
        every: Callable[[], Awaitable[Sequence[ReliableStore]]],
    ) -> None:
        """Args:
        store_of: Returns the data of the partition of a group.
        change: Changes a group. Gets its name, what to do, and the limit if it gets one.
        every: Returns the data of all partitions.
        """
        self._store_of = store_of
        self._change = change
        self._every = every

    async def set_limit(self, group: str, limit: Limit | None) -> None:
        """Give a group a limit of its own, instead of the queue's ``group_limit``.

        Messages that run stay, and count.

        Args:
            group: The group's name. It need not have messages.
            limit: The limit; ``Limit()`` for none, and None for that of the queue.

        Raises:
            BadInput: The name or the limit is invalid.
            OutcomeUnknown: The reply was lost. Calling it again is safe.
        """
        checked_group(group)
        text = "" if limit is None else limit_text(limit, "limit", of_groups=True)
        await self._change(group, "limit", text)

    async def get(self, group: str) -> Group:
        """Return a group. One that has no messages, and never had any, is empty."""
        groups = await (await self._store_of(checked_group(group))).groups(group, 1)
        if groups and groups[0].name == group.encode():
            return to_group(groups[0])
        settings = await (await self._every())[0].settings()
        limit = settings.public().group_limit
        return Group(group, 0, 0, 0, None, limit, has_own_limit=False, paused=False)

    async def list(self, *, after: str | None = None, limit: int = 100) -> list[Group]:
        """List groups by name.

        Args:
            after: List only groups whose names come after this one, such as the last name of the
                page before.
            limit: The largest number of groups to return.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise BadInput(f"limit must be an int of at least 0, not {limit!r}")
        if after is not None:
            checked_group(after)
        parts = [
            await store.groups(after or "", limit, after=after is not None)
            for store in await self._every()
        ]
        merged = heapq.merge(*parts, key=lambda stored: stored.name)
        return [to_group(group) for group in islice(merged, limit)]

    async def pause(self, group: str) -> None:
        """Stop handing out messages of a group, in every process, until :meth:`resume`.

        Leased messages are not affected.
        """
        await self._change(checked_group(group), "pause", "")

    async def resume(self, group: str) -> bool:
        """End a group's pause, and return whether there was one."""
        return await self._change(checked_group(group), "resume", "")


def to_group(stored: StoredGroup) -> Group:
    """Return a group as users see it."""
    return Group(
        stored.name.decode(errors="replace"),
        stored.waiting,
        stored.due,
        stored.running,
        None if stored.next_us is None else datetime_at(stored.next_us),
        parse_limit(stored.limit),
        stored.has_own_limit,
        stored.is_paused,
        None if stored.oldest_us is None else datetime_at(stored.oldest_us),
    )
