"""The properties that all messages share that one consumer takes from one partition."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Protocol

from delayq._generics import T

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from delayq._engine.lease_keeper import LeaseKeeper
    from delayq._reliable.batches import Batch
    from delayq._reliable.claims import ClaimAcknowledger
    from delayq._reliable.failures import RetryRules
    from delayq._reliable.offer_encoder import OfferEncoder
    from delayq._reliable.partition import Partition
    from delayq._reliable.replies import Claim
    from delayq._reliable.reports import Reports
    from delayq.codecs import Codec
    from delayq.instrumentation import Hooks


class MessageConsumer(Protocol):
    """The part of a consumer that its messages use.

    Attributes:
        is_stopping: Returns whether the handlers of messages are to end soon.
    """

    is_stopping: Callable[[], bool]

    def batch(self, id: str) -> Batch:  # noqa: A002
        """Return the batch with an id."""
        ...


@dataclass(frozen=True, slots=True)
class MessageContext(Generic[T]):
    """The properties that all messages share that one consumer takes from one partition.

    Attributes:
        codec: Decodes their values.
        partition: The partition they come from.
        acknowledger: Acknowledges them.
        retry_rules: Decides what becomes of them after a failed attempt.
        keeper: Renews their leases.
        loop: The client's event loop.
        cancelled: As in :class:`MessageNotifications`.
        hooks: The observers to notify.
        reports: Measures how late messages are, and how long handlers take.
        encoder: Encodes the results of handlers, and the messages that follow.
        consumer: The consumer that took them.
        variants: The contexts that differ from this one in their retry rules, by these.
    """

    codec: Codec[T]
    partition: Partition
    acknowledger: ClaimAcknowledger
    retry_rules: RetryRules
    keeper: LeaseKeeper[Claim]
    loop: asyncio.AbstractEventLoop
    cancelled: Mapping[tuple[bytes, bytes], None]
    hooks: Hooks
    reports: Reports
    encoder: OfferEncoder[T]
    consumer: MessageConsumer
    variants: dict[RetryRules, MessageContext[T]] = field(default_factory=dict, compare=False)

    def with_rules(self, rules: RetryRules) -> MessageContext[T]:
        """Return this context with other retry rules."""
        if rules not in self.variants:
            self.variants[rules] = replace(self, retry_rules=rules)
        return self.variants[rules]
