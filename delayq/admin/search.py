"""Searches messages for what they contain, step by step, so that no call holds up the server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

M = TypeVar("M")

# The number of messages read in a step.
_AT_A_TIME = 100


@dataclass(frozen=True)
class Searched:
    """The parts of a message that a search looks at.

    Attributes:
        payloads: Its payload, in each form in which it may be written.
        id: Its id; empty if it has none.
        error: Its last error.
        group: Its group; empty if it has none.
        headers: Its headers.
    """

    payloads: Sequence[str]
    id: str = ""
    error: str = ""
    group: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchQuery:
    """The texts that a message must contain: all of them, in any case.

    Attributes:
        payload: Text in its payload.
        id: Text in its id.
        error: Text in its last error.
        group: Text in the name of its group.
        headers: Text in each of these headers.
    """

    payload: str = ""
    id: str = ""
    error: str = ""
    group: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether every message matches."""
        return not (self.payload or self.id or self.error or self.group or self.headers)

    @property
    def needs_reliable(self) -> bool:
        """Whether only a message of a reliable queue can match."""
        return bool(self.error or self.group or self.headers)

    def matches(self, found: Searched) -> bool:
        return (
            self.id.lower() in found.id.lower()
            and self.error.lower() in found.error.lower()
            and self.group.lower() in found.group.lower()
            and all(
                name in found.headers and text.lower() in found.headers[name].lower()
                for name, text in self.headers.items()
            )
            and any(self.payload.lower() in text.lower() for text in found.payloads)
        )


@dataclass(frozen=True)
class Shelf(Generic[M]):
    """Messages that are read page by page, such as those in one state.

    Attributes:
        count: How many there are, with those that have expired.
        page: Reads some of them, from an offset on, with None in the place of each that has
            expired: an empty page is the end, a page of None is not.
    """

    count: int
    page: Callable[[int, int], Awaitable[Sequence[M | None]]]


class Search(Generic[M]):
    """A search, and how far it has come.

    Attributes:
        total: The number of messages on all shelves, with those that have expired.
        searched: How many of them were looked at.
    """

    def __init__(
        self, shelves: Sequence[Shelf[M]], matches: Callable[[M], bool], offset: int = 0
    ) -> None:
        """Args:
        shelves: The messages, in the order in which to look at them.
        matches: Returns whether a message is wanted. Called in a thread: payloads may be large.
        offset: The number of messages to skip.
        """
        self._shelves = shelves
        self._matches = matches
        self._offset = offset
        self.total: int = sum(shelf.count for shelf in shelves)
        self.searched: int = 0
        # Messages that were counted, and gone when they were to be read.
        self._missing = 0

    @property
    def next_offset(self) -> int | None:
        """Where to search on; None at the end."""
        until = self._offset + self.searched + self._missing
        return until if until < self.total else None

    async def run(
        self,
        *,
        most: int,
        limit: int,
        until: float = float("inf"),
        progress: Callable[[int, int], None] | None = None,
    ) -> list[M]:
        """Return the first messages that match.

        Args:
            most: Look at this many messages at most.
            limit: Stop once this many were found.
            until: Begin no step but the first after this moment of the monotonic clock.
            progress: Called after each step with the number of messages examined so far, and the
                number to examine.
        """
        found: list[M] = []
        skip = self._offset
        for shelf in self._shelves:
            at, skip = min(skip, shelf.count), max(0, skip - shelf.count)
            while at < shelf.count and (left := most - self.searched) > 0:
                if self.searched and time.monotonic() >= until:
                    return found
                page = await shelf.page(at, min(_AT_A_TIME, left, shelf.count - at))
                if not page:
                    # They are gone meanwhile. To search on from here would find none again.
                    self._missing += shelf.count - at
                    break
                wanted = await asyncio.to_thread(self._wanted, page)
                for message in wanted:
                    self.searched += 1
                    if message is not None:
                        found.append(message)
                        if len(found) == limit:
                            return found
                at += len(page)
                if progress is not None:
                    progress(self.searched, min(most, self.total - self._offset))
        return found

    def _wanted(self, page: Sequence[M | None]) -> list[M | None]:
        """Return the messages of a page that match, with None in the place of all others."""
        return [
            message if message is not None and self._matches(message) else None for message in page
        ]
