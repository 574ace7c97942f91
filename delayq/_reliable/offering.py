"""Offers to a reliable queue: the checks before they are sent, and the meaning of their
outcomes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from delayq._durations import Duration, delay_us, microseconds
from delayq._engine.durability import Unconfirmed
from delayq._redis.retry import retry_delay
from delayq._reliable.bodies import content
from delayq._reliable.ids import checked_id, new_id
from delayq._reliable.keys import PRIORITIES
from delayq._reliable.offers import NewMessage
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
    from collections.abc import Awaitable, Callable, MutableSequence, Sequence
    from datetime import datetime

    from delayq._engine.batcher import Batcher
    from delayq.codecs import Codec

    # The outcome of each message is a number from offer.lua, possibly inside Unconfirmed.
    Commits = Batcher[NewMessage, Any]

T = TypeVar("T")

OnDuplicate = Literal["raise", "ignore", "replace"]

# The outcomes of offer.lua.
_STORED, _REPLACED, IGNORED, DUPLICATE, _FULL = 1, 2, 0, -1, -2
THERE = (_STORED, _REPLACED, IGNORED)
_LARGEST_HEADERS = 16 * 1024


# No slots: with them, frozen and generic, Offer[int](...) fails on Python 3.11.
@dataclass(frozen=True, kw_only=True)
class Offer(Generic[T]):
    """A message for :meth:`ReliableQueue.offer_many`.

    Its fields are the arguments of :meth:`ReliableQueue.offer`.

    ``repr`` shows neither the value nor the headers: they may be private, and tracebacks are
    logged.
    """

    value: T = field(kw_only=False, repr=False)
    delay: Duration | None = None
    at: datetime | None = None
    id: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    priority: int = 0
    ttl: Duration | None = None
    on_duplicate: OnDuplicate = "raise"


class OfferEncoder(Generic[T]):
    """Checks, encodes and stores the messages offered through one queue handle."""

    def __init__(self, codec: Codec[T], max_payload: int, *, waits: bool) -> None:
        """Args:
        codec: Encodes the values.
        max_payload: The largest encoded value allowed, bytes.
        waits: Whether offers wait for room if the queue is full.
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
        """Check everything about a message, and encode it.

        Raises:
            BadInput, EncodeError: As for :meth:`delayq.ReliableQueue.offer`.
        """
        payload = self._codec.encode(value)
        if not isinstance(payload, bytes):
            raise EncodeError(
                f"{type(self._codec).__name__}.encode returned {type(payload).__name__}, not bytes"
            )
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload)
        if (
            isinstance(priority, bool)
            or not isinstance(priority, int)
            or not 0 <= priority < PRIORITIES
        ):
            raise BadInput(f"priority must be an int from 0 to {PRIORITIES - 1}, not {priority!r}")
        if on_duplicate not in ("raise", "ignore", "replace"):
            raise BadInput(
                f'on_duplicate must be "raise", "ignore" or "replace", not {on_duplicate!r}'
            )
        ttl_us = 0 if ttl is None else microseconds(ttl, "ttl")
        if ttl is not None and not ttl_us:
            raise BadDelay("ttl must be more than 0")
        wait_us = delay_us(delay, at)
        if ttl_us and ttl_us <= wait_us:
            raise BadDelay(
                "ttl ends before the message is due: it counts from now, so make it longer than the"
                " delay"
            )
        return NewMessage(
            new_id() if id is None else checked_id(id),
            priority,
            wait_us,
            ttl_us,
            on_duplicate,
            content(_checked_headers(headers), payload),
        )

    async def outcomes(
        self, commits: Commits, messages: Sequence[NewMessage]
    ) -> MutableSequence[Any]:
        """Send the messages, and return the outcome of each."""
        try:
            futures = commits.submit_many((message, len(message.content)) for message in messages)
            return await asyncio.gather(*futures, return_exceptions=True)
        except Closed as error:
            return [error] * len(messages)

    async def store(
        self,
        send: Callable[[Sequence[int]], Awaitable[Sequence[Any]]],
        messages: MutableSequence[NewMessage],
        outcomes: MutableSequence[Any],
        *,
        made_up: Sequence[bool],
        new_id: Callable[[], str],
    ) -> Sequence[NewMessage]:
        """Resubmit messages that hit a full queue or a generated id that was taken, until all are
        stored.

        Raises as :meth:`delayq.ReliableQueue.offer_many`.

        Args:
            send: Sends some of the messages again, by their places in the list.
            messages: The messages.
            outcomes: The outcome so far of each message.
            made_up: For each message, whether its id is generated.
            new_id: Generates an id.
        """
        tries = 0
        unconfirmed: dict[int, str] = {}
        while True:
            again = []
            for place, outcome in enumerate(outcomes):
                if isinstance(outcome, Unconfirmed):
                    outcomes[place], unconfirmed[place] = outcome
                if outcome == DUPLICATE and made_up[place]:
                    # Another process has generated the same id.
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
                    raise NotDurable(
                        f"{len(ids)} messages are stored, but {next(iter(unconfirmed.values()))}",
                        ids,
                    )
                return messages
            for place, outcome in zip(again, await send(again), strict=True):
                unconfirmed.pop(place, None)
                outcomes[place] = outcome

    def raise_for(self, ids: Sequence[str], outcomes: Sequence[int | BaseException]) -> None:
        """Raise the error for messages that are not stored; return if all of them are."""
        # Each id once: a list may contain the same id twice.
        stored = tuple(
            dict.fromkeys(
                name for name, outcome in zip(ids, outcomes, strict=True) if outcome in THERE
            )
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            unknown = next((error for error in errors if isinstance(error, OutcomeUnknown)), None)
            if stored or unknown:
                error = unknown or errors[0]
                raise OutcomeUnknown(
                    f"{len(stored)} of {len(ids)} messages are stored, and the others may be:"
                    f" {error}",
                    stored,
                ) from error
            raise errors[0]
        refused = {
            name: outcome
            for name, outcome in zip(ids, outcomes, strict=True)
            if outcome in (DUPLICATE, _FULL)
        }
        if refused:
            kinds = Counter(refused.values())
            kind = DuplicateMessage if kinds[DUPLICATE] else QueueFull
            raise kind(tuple(refused), stored)


def with_headers(offers: Sequence[Offer[T]], headers: Mapping[str, str]) -> Sequence[Offer[T]]:
    """Add these headers to the offers that have no header of the same name."""
    return (
        [replace(offer, headers=merged(offer.headers, headers)) for offer in offers]
        if headers
        else offers
    )


def merged(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return ``headers``, plus those of ``more`` that they lack.

    Anything but a mapping is returned as it is, to be refused.
    """
    if not more or (headers is not None and not isinstance(headers, Mapping)):
        return headers
    return {**more, **(headers or {})}


def _checked_headers(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise BadInput(f"headers must be a mapping of str to str, not {type(headers).__name__}")
    size = 0
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadInput("headers must map str to str")
        size += len((name + text).encode(errors="surrogatepass"))
    if size > _LARGEST_HEADERS:
        raise BadInput(f"headers must have at most {_LARGEST_HEADERS} bytes, not {size}")
    return headers
