"""Offers to a reliable queue: what is checked before they leave, and what their outcomes mean."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from delayq._durations import Duration, delay_us, microseconds
from delayq._ids import checked_id, new_id
from delayq._redis.bodies import content
from delayq._redis.durability import Unconfirmed
from delayq._redis.keys import PRIORITIES
from delayq._redis.retry import retry_delay
from delayq._scheduling.reliable_offers import NewMessage
from delayq.errors import (
    BadDelay,
    BadInput,
    Closed,
    DuplicateMessage,
    EncodeError,
    NotDurable,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
)

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence
    from datetime import datetime

    from delayq._redis.group_commit import GroupCommit
    from delayq.codecs import Codec

    # What becomes of each is a number of offer.lua's, perhaps in Unconfirmed.
    Commits = GroupCommit[NewMessage, Any]

T = TypeVar("T")

OnDuplicate = Literal["raise", "ignore", "replace"]

# What offer.lua says of a message.
_STORED, _REPLACED, _IGNORED, _DUPLICATE, _FULL = 1, 2, 0, -1, -2
THERE = (_STORED, _REPLACED, _IGNORED)
_LARGEST_HEADERS = 16 * 1024


# No slots: with them, frozen and generic, Offer[int](...) fails on Python 3.11.
@dataclass(frozen=True, kw_only=True)
class Offer(Generic[T]):
    """One message for :meth:`ReliableQueue.offer_many`. Its fields are the arguments of :meth:`ReliableQueue.offer`.

    ``repr`` shows neither value nor headers: they may be private, and tracebacks are logged.
    """

    value: T = field(kw_only=False, repr=False)
    delay: Duration | None = None
    at: datetime | None = None
    id: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    priority: int = 0
    ttl: Duration | None = None
    on_duplicate: OnDuplicate = "raise"


class Offering(Generic[T]):
    """One handle's way in."""

    def __init__(self, codec: Codec[T], max_payload: int, *, waits: bool) -> None:
        """Args:
        max_payload: Bytes.
        waits: Whether offers wait for room where the queue is full.
        """
        self._codec = codec
        self._max_payload = max_payload
        self._waits = waits

    def message(
        self,
        value: T,
        delay: Duration | None,
        at: datetime | None,
        id: str | None,  # noqa: A002
        headers: Mapping[str, str] | None,
        priority: int,
        ttl: Duration | None,
        on_duplicate: OnDuplicate,
    ) -> NewMessage:
        """Check everything about one message, and encode it.

        Raises:
            BadInput, EncodeError: As :meth:`delayq.ReliableQueue.offer`.
        """
        payload = self._codec.encode(value)
        if not isinstance(payload, bytes):
            raise EncodeError(f"{type(self._codec).__name__}.encode returned {type(payload).__name__}, not bytes")
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload)
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority < PRIORITIES:
            raise BadInput(f"priority is an int from 0 to {PRIORITIES - 1}, not {priority!r}")
        if on_duplicate not in ("raise", "ignore", "replace"):
            raise BadInput(f'on_duplicate is "raise", "ignore" or "replace", not {on_duplicate!r}')
        ttl_us = 0 if ttl is None else microseconds(ttl, "ttl")
        if ttl is not None and not ttl_us:
            raise BadDelay("ttl must be more than 0")
        wait_us = delay_us(delay, at)
        if ttl_us and ttl_us <= wait_us:
            raise BadDelay("ttl ends before the message is due: it counts from now, so make it longer than the delay")
        return NewMessage(
            new_id() if id is None else checked_id(id),
            priority,
            wait_us,
            ttl_us,
            on_duplicate,
            content(_checked_headers(headers), payload),
        )

    async def outcomes(self, commits: Commits, messages: Sequence[NewMessage]) -> MutableSequence[Any]:
        """Send them, and say what became of each."""
        try:
            futures = commits.submit_many((message, len(message.content)) for message in messages)
            return await asyncio.gather(*futures, return_exceptions=True)
        except Closed as error:
            return [error] * len(messages)

    async def store(
        self, commits: Commits, messages: MutableSequence[NewMessage], outcomes: MutableSequence[Any], *, made_up: Sequence[bool]
    ) -> Sequence[NewMessage]:
        """Offer again what was not stored and may be, until all are stored. ``made_up``: whose id is our own.

        Raises:
            What :meth:`delayq.ReliableQueue.offer_many` does.
        """
        tries = 0
        unconfirmed: dict[int, str] = {}
        while True:
            again = []
            for place, outcome in enumerate(outcomes):
                if isinstance(outcome, Unconfirmed):
                    outcomes[place], unconfirmed[place] = outcome
                if outcome == _DUPLICATE and made_up[place]:
                    # Another process has made up the same one.
                    messages[place] = messages[place]._replace(id=new_id())
                    again.append(place)
            if not again and self._waits and _FULL in outcomes:
                tries += 1
                await asyncio.sleep(retry_delay(tries, most=1.0))
                again = [place for place, outcome in enumerate(outcomes) if outcome == _FULL]
            if not again:
                self.raise_for([message.id for message in messages], outcomes)
                if unconfirmed:
                    ids = tuple(messages[place].id for place in unconfirmed)
                    raise NotDurable(f"{len(ids)} messages are stored, but {next(iter(unconfirmed.values()))}", ids)
                return messages
            for place, outcome in zip(again, await self.outcomes(commits, [messages[place] for place in again]), strict=True):
                unconfirmed.pop(place, None)
                outcomes[place] = outcome

    def raise_for(self, ids: Sequence[str], outcomes: Sequence[int | BaseException]) -> None:
        """Raise what says that not all of these messages are stored; return if they are."""
        # Each id once: one list may name it twice.
        stored = tuple(dict.fromkeys(name for name, outcome in zip(ids, outcomes, strict=True) if outcome in THERE))
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            unknown = next((error for error in errors if isinstance(error, OutcomeUnknown)), None)
            if stored or unknown:
                error = unknown or errors[0]
                raise OutcomeUnknown(
                    f"{len(stored)} of {len(ids)} messages are stored, the others may be: {error}", stored
                ) from error
            raise errors[0]
        refused = {name: outcome for name, outcome in zip(ids, outcomes, strict=True) if outcome in (_DUPLICATE, _FULL)}
        if refused:
            kinds = Counter(refused.values())
            kind = DuplicateMessage if kinds[_DUPLICATE] else QueueFull
            raise kind(tuple(refused), stored)


def with_headers(offers: Sequence[Offer[T]], headers: Mapping[str, str]) -> Sequence[Offer[T]]:
    """Offers that have these headers too, but for those that have others of that name."""
    return [replace(offer, headers=merged(offer.headers, headers)) for offer in offers] if headers else offers


def merged(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> Mapping[str, str] | None:
    """``headers``, and those of ``more`` that are not among them. What is no mapping stays as it is, to be refused."""
    if not more or (headers is not None and not isinstance(headers, Mapping)):
        return headers
    return {**more, **(headers or {})}


def _checked_headers(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise BadInput(f"headers are a mapping of str to str, not {type(headers).__name__}")
    size = 0
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadInput("headers are str by str")
        size += len((name + text).encode(errors="surrogatepass"))
    if size > _LARGEST_HEADERS:
        raise BadInput(f"headers have {_LARGEST_HEADERS} bytes at most, not {size}")
    return headers
