"""Offers to a reliable queue, and the checks before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypedDict

from delayq._durations import Duration, microseconds, when_due
from delayq._generics import T
from delayq._reliable.bodies import brief, content
from delayq._reliable.ids import checked_group, checked_new_id
from delayq._reliable.keys import PRIORITIES
from delayq._reliable.new_message import ENDS_EARLY, OptionsMessage, plain_message
from delayq._reliable.outcomes import result_codec
from delayq._reliable.settings import check_limit
from delayq._wording import given
from delayq.errors import (
    BadDelay,
    BadInput,
    EncodeError,
    PayloadTooLarge,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from delayq._reliable.new_message import NewMessage
    from delayq.codecs import Codec


OnDuplicate = Literal["raise", "ignore", "replace"]

USUAL_PRIORITY = 0
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
    max_attempts: int | None = None
    timeout: Duration | None = None
    unique_for: Duration | None = None
    on_duplicate: OnDuplicate = "raise"
    group: str | None = None


class OfferOptions(TypedDict, total=False):
    """The arguments of :meth:`ReliableQueue.offer`, apart from the value."""

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
    durability: str | None


class HasIds(Protocol):
    """Generates ids."""

    @property
    def new_id(self) -> Callable[[], str]: ...


class OfferEncoder(Generic[T]):
    """Checks and encodes the messages offered through one queue handle."""

    def __init__(self, codec: Codec[T], max_payload: int, ids: HasIds) -> None:
        """Args:
        codec: Encodes the values.
        max_payload: The largest encoded value allowed, bytes.
        ids: Generates ids.
        """
        self._ids = ids
        self._codec = codec
        self._encode = codec.encode
        self._max_payload = max_payload

    def plain(
        self,
        value: T,
        delay: Duration | None,
        at: datetime | None,
        headers: Mapping[str, str] | None,
    ) -> NewMessage:
        """Check and encode a message whose other options are the default ones: most messages.

        Raises:
            BadInput, EncodeError: As for :meth:`delayq.ReliableQueue.offer`.
        """
        payload = self._encode(value)
        if headers is None and type(payload) is bytes and len(payload) <= self._max_payload:
            stored = b"\n" + payload
        else:
            stored = self._content(payload, headers)
        if at is None:
            wait_us = 0 if delay is None else microseconds(delay)
            return plain_message((self._ids.new_id(), brief(wait_us), stored))
        when = when_due(delay, at)
        return OptionsMessage(self._ids.new_id(), USUAL_PRIORITY, when, 0, 0, "raise", stored)

    def message(self, offer: Offer[T]) -> NewMessage:
        """Check and encode any message. Raises as :meth:`plain`."""
        if (
            offer.id is None
            and offer.ttl is None
            and offer.unique_for is None
            and offer.max_attempts is None
            and offer.timeout is None
            and offer.group is None
            and offer.priority is USUAL_PRIORITY
            and offer.on_duplicate == "raise"
        ):
            return self.plain(offer.value, offer.delay, offer.at, offer.headers)
        return self.with_options(offer)

    def with_options(self, offer: Offer[T]) -> OptionsMessage:
        """Check and encode a message with its options. Raises as :meth:`plain`."""
        stored = self._content(
            self._encode(offer.value),
            offer.headers,
            offer.max_attempts,
            offer.timeout,
            offer.group,
        )
        priority, on_duplicate = offer.priority, offer.on_duplicate
        if (
            isinstance(priority, bool)
            or not isinstance(priority, int)
            or not 0 <= priority < PRIORITIES
        ):
            raise BadInput(
                f"priority must be an int from 0 to {PRIORITIES - 1}, not {given(priority)}"
            )
        if on_duplicate not in ("raise", "ignore", "replace"):
            raise BadInput(
                f'on_duplicate must be "raise", "ignore" or "replace", not {given(on_duplicate)}'
            )
        ttl_us = 0 if offer.ttl is None else microseconds(offer.ttl, "ttl")
        if offer.ttl is not None and not ttl_us:
            raise BadDelay("ttl must be more than 0")
        when = when_due(offer.delay, offer.at)
        # Whether a moment comes first, the server's clock decides.
        if ttl_us and isinstance(when, int) and ttl_us <= when:
            raise BadDelay(ENDS_EARLY)
        unique_us = 0 if offer.unique_for is None else microseconds(offer.unique_for, "unique_for")
        if offer.unique_for is not None and not unique_us:
            raise BadDelay("unique_for must be more than 0")
        if unique_us and offer.id is None:
            raise BadInput(
                "unique_for needs an id: without one, every message has an id of its own"
            )
        return OptionsMessage(
            self._ids.new_id() if offer.id is None else checked_new_id(offer.id),
            priority,
            brief(when) if isinstance(when, int) else when,
            ttl_us,
            unique_us,
            on_duplicate,
            stored,
        )

    def result(self, value: object) -> bytes:
        """Encode the result of a handler.

        Raises:
            EncodeError, PayloadTooLarge: As for :meth:`delayq.Message.ack`.
        """
        codec = result_codec(self._codec)
        try:
            payload = codec.encode(value)
        except EncodeError as error:
            raise EncodeError(f"the result cannot be kept: {error}") from error.__cause__
        if not isinstance(payload, bytes):
            raise EncodeError(
                f"{type(codec).__name__}.encode returned {type(payload).__name__}, not bytes"
            )
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload)
        return payload

    def messages(self, offers: Sequence[Offer[T]]) -> list[NewMessage]:
        """Check and encode offers as :meth:`message` does."""
        for offer in offers:
            if not isinstance(offer, Offer):
                raise BadInput(
                    f"offer_many takes delayq.Offer objects, not {type(offer).__name__}: pass"
                    " Offer(value, ...)"
                )
        return [self.message(offer) for offer in offers]

    def _content(
        self,
        payload: bytes,
        headers: Mapping[str, str] | None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        group: str | None = None,
    ) -> bytes:
        if not isinstance(payload, bytes):
            raise EncodeError(
                f"{type(self._codec).__name__}.encode returned {type(payload).__name__}, not bytes"
            )
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload)
        check_limit("max_attempts", max_attempts)
        timeout_us = None if timeout is None else microseconds(timeout, "timeout")
        if timeout_us == 0:
            raise BadDelay("timeout must be more than 0")
        headers = None if headers is None else _checked(headers)
        if group is not None:
            checked_group(group)
        return content(headers, payload, max_attempts, timeout_us, group)


def with_headers(offers: Sequence[Offer[T]], headers: Mapping[str, str]) -> Sequence[Offer[T]]:
    """Add these headers to the offers that have no header of the same name."""
    return (
        [replace(offer, headers=_merged(offer.headers, headers)) for offer in offers]
        if headers
        else offers
    )


def _merged(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return ``headers``, plus those of ``more`` that they lack.

    Anything but a mapping is returned as it is, to be refused.
    """
    if not more or (headers is not None and not isinstance(headers, Mapping)):
        return headers
    return {**more, **(headers or {})}


def _checked(headers: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(headers, Mapping):
        raise BadInput(f"headers must be a mapping of str to str, not {_told(headers)}")
    size = 0
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadInput(f"headers must map str to str, not {_told(name)} to {_told(text)}")
        size += len((name + text).encode(errors="surrogatepass"))
    if size > _LARGEST_HEADERS:
        raise BadInput(f"headers must have at most {_LARGEST_HEADERS} bytes, not {size}")
    return headers


def _told(wrong: object) -> str:
    """Return a number or None with its type; of other values, which may be private, the type."""
    is_number = wrong is None or isinstance(wrong, int | float)
    return given(wrong) if is_number else f"a {type(wrong).__name__}"
