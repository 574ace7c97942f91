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
_STEP = 100


@dataclass(frozen=True)
class SearchFields:
    """The parts of a message that a search looks at.

    Attributes:
        payloads: Its payload, in each form in which it may be written; empty if it is encrypted.
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

    def matches(self, fields: SearchFields) -> bool | None:
        """Return whether a message matches; None if only its payload, which is encrypted, could
        tell.
        """
        if not (
            self.id.lower() in fields.id.lower()
            and self.error.lower() in fields.error.lower()
            and self.group.lower() in fields.group.lower()
            and all(
                name in fields.headers and text.lower() in fields.headers[name].lower()
                for name, text in self.headers.items()
            )
        ):
            return False
        if self.payload and not fields.payloads:
            return None
        return not self.payload or any(
            self.payload.lower() in text.lower() for text in fields.payloads
        )


@dataclass(frozen=True)
class SearchPages(Generic[M]):
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
        total: The number of messages in all sources, with those that have expired.
        searched: How many of them were examined.
        encrypted: How many of these may match, but could not be read.
    """

    def __init__(
        self,
        sources: Sequence[SearchPages[M]],
        matches: Callable[[M], bool | None],
        offset: int = 0,
    ) -> None:
        """Args:
        sources: The messages, in the order in which to examine them.
        matches: Returns whether a message matches; None if that cannot be told. Called in a thread:
            payloads may be large.
        offset: The number of messages to skip.
        """
        self._sources = sources
        self._matches = matches
        self._offset = offset
        self.total: int = sum(source.count for source in sources)
        self.searched: int = 0
        self.encrypted: int = 0
        # Messages that were counted, and gone when they were to be read.
        self._missing = 0

    @property
    def next_offset(self) -> int | None:
        """Where to search on; None at the end."""
        end = self._offset + self.searched + self._missing
        return end if end < self.total else None

    async def run(
        self,
        *,
        max_examined: int,
        limit: int,
        deadline: float = float("inf"),
        progress: Callable[[int, int], None] | None = None,
    ) -> list[M]:
        """Return the first messages that match.

        Args:
            max_examined: Examine this many messages at most.
            limit: Stop once this many match.
            deadline: Begin no step but the first after this moment of the monotonic clock.
            progress: Called after each step with the number of messages examined so far, and the
                number to examine.
        """
        matches: list[M] = []
        skip = self._offset
        for source in self._sources:
            at, skip = min(skip, source.count), max(0, skip - source.count)
            while at < source.count and (budget := max_examined - self.searched) > 0:
                if self.searched and time.monotonic() >= deadline:
                    return matches
                page = await source.page(at, min(_STEP, budget, source.count - at))
                if not page:
                    # They are gone meanwhile. To search on from here would find none again.
                    self._missing += source.count - at
                    break
                for message in await asyncio.to_thread(self._matches_in, page):
                    self.searched += 1
                    if message is not None:
                        matches.append(message)
                        if len(matches) == limit:
                            return matches
                at += len(page)
                if progress is not None:
                    progress(self.searched, min(max_examined, self.total - self._offset))
        return matches

    def _matches_in(self, page: Sequence[M | None]) -> list[M | None]:
        """Return the messages of a page that match, with None in the place of all others."""
        matching: list[M | None] = []
        for message in page:
            is_match = message is not None and self._matches(message)
            self.encrypted += is_match is None
            matching.append(message if is_match else None)
        return matching
