"""An offer: a message to store, with its options and the messages that follow it; and its
outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict

from delayq._checks import describe_value
from delayq._generics import T
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from delayq._durations import Duration

OnDuplicate = Literal["raise", "ignore", "replace"]

USUAL_PRIORITY = 0


class DefaultPriority(int):
    """The priority of an offer that names none: 0, or that of the message it follows."""

    __slots__ = ()


DEFAULT_PRIORITY: int = DefaultPriority(USUAL_PRIORITY)
MAX_FOLLOWERS = 100
"""The largest number of messages that one leads to, those at the end of a chain included."""


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
    priority: int = DEFAULT_PRIORITY
    ttl: Duration | None = None
    max_attempts: int | None = None
    timeout: Duration | None = None
    unique_for: Duration | None = None
    on_duplicate: OnDuplicate = "raise"
    group: str | None = None
    followers: tuple[Offer[Any], ...] = field(default=(), repr=False)

    def then(self, offer: Offer[Any]) -> Offer[T]:
        """Return this offer with another one at the end of its chain, which is stored when the one
        before it is acknowledged: see :meth:`Message.then`.

        ::

            chain = Offer("charge").then(Offer("ship", delay=3600)).then(Offer("thank"))

        Raises:
            BadInput: ``offer`` is no offer, or the chain would lead to more than 100 others.
        """
        if not isinstance(offer, Offer):
            raise BadInput(
                f"then takes a delayq.Offer, not {describe_value(offer)}: pass Offer(value, ...),"
                " or to_offer(...) of a task"
            )
        steps: list[Offer[Any]] = [self]
        while steps[-1].followers:
            steps.append(steps[-1].followers[-1])
        if len(steps) > MAX_FOLLOWERS:
            raise BadInput(f"a message leads to at most {MAX_FOLLOWERS} others")
        chain_end: Offer[Any] = offer
        for step in reversed(steps):
            chain_end = replace(step, followers=(*step.followers[:-1], chain_end))
        return chain_end


class MessageOptions(TypedDict, total=False):
    """The options of one message: the fields of :class:`Offer` apart from its value and the
    messages that follow it.
    """

    delay: Duration | None
    at: datetime | None
    id: str | None
    headers: Mapping[str, str] | None
    priority: int
    ttl: Duration | None
    max_attempts: int | None
    timeout: Duration | None
    unique_for: Duration | None
    on_duplicate: OnDuplicate
    group: str | None


class OfferOptions(MessageOptions, total=False):
    """The arguments of :meth:`ReliableQueue.offer`, apart from the value."""

    durability: str | None


class OfferOutcome(IntEnum):
    """The outcome of offering a message: the replies of ``offer.lua``."""

    STORED = 1
    REPLACED = 2
    """Stored in the place of an earlier message with its id."""
    IGNORED = 0
    """There is one with its id already, which the caller wants to stay."""
    DUPLICATE = -1
    FULL = -2
    ENDS_EARLY = -5
    """It would expire before the moment for which it was offered."""


STORED = OfferOutcome.STORED
ENDS_EARLY_TEXT = (
    "ttl ends before the message is due: it counts from now, so make it longer than the delay"
)
