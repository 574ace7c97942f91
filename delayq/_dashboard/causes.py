"""Pages of causes: the messages of some queues, counted by why they failed or died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, get_args

from starlette.exceptions import HTTPException

from delayq._dashboard.counts import Count
from delayq.admin.letters import GroupBy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delayq._dashboard.sources import AnySource, ReliableSource

GROUPINGS: tuple[GroupBy, ...] = get_args(GroupBy)
"""The ways to group."""
_CAUSES = 50
# The time until a page that counts goes on where scripts do not run, in seconds.
_REFRESH = 2


class CauseCount(Count, Protocol):
    """A count by cause."""

    @property
    def number_of_causes(self) -> int: ...


C = TypeVar("C", bound=CauseCount)
G = TypeVar("G")


class Causes(NamedTuple):
    """A page of causes.

    Attributes:
        lines: A cause in one queue each, as the page's table shows them.
        number: The number of causes so far.
        examined: How many messages were examined.
        total: How many there are.
        is_complete: Whether all counts are complete.
        troubles: The queues that could not be read, and why.
        offset: How many causes come before.
        limit: How many causes a page shows.
    """

    lines: Sequence[Any]
    number: int
    examined: int
    total: int
    is_complete: bool
    troubles: Sequence[tuple[AnySource, str]]
    offset: int
    limit: int = _CAUSES

    @property
    def refresh(self) -> int:
        """The time until the page goes on where scripts do not run, in seconds; 0 for never."""
        return 0 if self.is_complete else _REFRESH


def causes_page(
    counts: Iterable[tuple[ReliableSource, int, C | str | None]],
    offset: int,
    read: Callable[[C, int], Iterable[G]],
    order: Callable[[G], Any],
    line: Callable[[ReliableSource, C, G], object],
) -> Causes:
    """Return a page of the causes in some queues so far.

    Args:
        counts: Each queue with the number of its messages, which stands for its count before that
            has begun, and its count: None before that, or why it was refused.
        offset: The number of causes to skip.
        read: Returns the first causes of a count in this order, up to a number of them.
        order: Returns what decides which cause comes first: the largest.
        line: Returns a line of the page's table.
    """
    begun: list[tuple[ReliableSource, C]] = []
    troubles: list[tuple[AnySource, str]] = []
    total, is_complete = 0, True
    for source, number, count in counts:
        if isinstance(count, str):
            troubles.append((source, count))
        elif count is None:
            total, is_complete = total + number, False
        else:
            begun.append((source, count))
            total, is_complete = total + count.total, is_complete and count.is_complete
    entries = [
        (source, count, cause) for source, count in begun for cause in read(count, offset + _CAUSES)
    ]
    entries.sort(key=lambda entry: order(entry[2]), reverse=True)
    return Causes(
        [line(*entry) for entry in entries[offset : offset + _CAUSES]],
        sum(count.number_of_causes for _, count in begun),
        sum(count.examined for _, count in begun),
        total,
        is_complete,
        troubles,
        offset,
    )


def check_grouping(by: str) -> None:
    """Raise HTTPException unless ``by`` is a way to group, or empty."""
    if by and by not in GROUPINGS:
        raise HTTPException(404, "Messages are grouped by error, type or reason.")
