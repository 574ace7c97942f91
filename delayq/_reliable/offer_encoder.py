"""Checks and encodes the messages that are offered to a reliable queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol

from delayq._checks import check_limit, describe_value
from delayq._durations import Duration, microseconds, when_due
from delayq._generics import T
from delayq._reliable.bodies import OptionsMessage, content, format_delay, pack, plain_message
from delayq._reliable.ids import checked_group, checked_new_id
from delayq._reliable.keys import PRIORITIES
from delayq._reliable.offer import (
    ENDS_EARLY_TEXT,
    MAX_FOLLOWERS,
    DefaultPriority,
    Offer,
)
from delayq.codecs.json import result_codec
from delayq.errors import BadDelay, BadInput, EncodeError, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delayq._reliable.bodies import NewMessage
    from delayq.codecs import Codec

_LARGEST_HEADERS = 16 * 1024


class Inherited(Protocol):
    """The part of a message that its followers inherit."""

    @property
    def group(self) -> str | None: ...

    @property
    def priority(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str] | None: ...


class OfferEncoder(Generic[T]):
    """Checks and encodes the messages offered through one queue handle."""

    def __init__(self, codec: Codec[T], max_payload: int) -> None:
        """Args:
        codec: Encodes the values.
        max_payload: The largest encoded value allowed, bytes.
        """
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
            message_content = b"\n" + payload
        else:
            message_content = self._content(payload, headers)
        if at is not None:
            return plain_message(("", when_due(delay, at), message_content))
        try:
            return plain_message(("", 0 if delay is None else _delay_text(delay), message_content))
        except TypeError:
            # It cannot be hashed, so it is not a duration.
            microseconds(delay or 0)
            raise

    def message(self, offer: Offer[T]) -> NewMessage:
        """Check and encode any message. Raises as :meth:`plain`."""
        # ReliableQueue.offer asks the same of its arguments: an option belongs in both places.
        if (
            offer.id is None
            and offer.ttl is None
            and offer.unique_for is None
            and offer.max_attempts is None
            and offer.timeout is None
            and offer.group is None
            and not offer.priority
            and offer.on_duplicate == "raise"
            and not offer.followers
        ):
            return self.plain(offer.value, offer.delay, offer.at, offer.headers)
        return self.with_options(offer)

    def with_options(self, offer: Offer[T]) -> OptionsMessage:
        """Check and encode a message with its options. Raises as :meth:`plain`."""
        followers = [self.follower(follower, offer) for follower in offer.followers]
        message_content = self._content(
            self._encode(offer.value),
            offer.headers,
            offer.max_attempts,
            offer.timeout,
            offer.group,
            self.packed(followers),
        )
        priority, on_duplicate = offer.priority, offer.on_duplicate
        if (
            isinstance(priority, bool)
            or not isinstance(priority, int)
            or not 0 <= priority < PRIORITIES
        ):
            raise BadInput(
                f"priority must be an int from 0 to {PRIORITIES - 1}, not"
                f" {describe_value(priority)}"
            )
        if on_duplicate not in ("raise", "ignore", "replace"):
            raise BadInput(
                'on_duplicate must be "raise", "ignore" or "replace", not'
                f" {describe_value(on_duplicate)}"
            )
        ttl_us = 0 if offer.ttl is None else microseconds(offer.ttl, "ttl")
        if offer.ttl is not None and not ttl_us:
            raise BadDelay("ttl must be more than 0")
        when = when_due(offer.delay, offer.at)
        # Whether a moment comes first, the server's clock decides.
        if ttl_us and isinstance(when, int) and ttl_us <= when:
            raise BadDelay(ENDS_EARLY_TEXT)
        unique_us = 0 if offer.unique_for is None else microseconds(offer.unique_for, "unique_for")
        if offer.unique_for is not None and not unique_us:
            raise BadDelay("unique_for must be more than 0")
        if unique_us and offer.id is None:
            raise BadInput(
                "unique_for needs an id: without one, every message has an id of its own"
            )
        return OptionsMessage(
            "" if offer.id is None else checked_new_id(offer.id),
            int(priority),
            format_delay(when) if isinstance(when, int) else when,
            ttl_us,
            unique_us,
            on_duplicate,
            message_content,
            offer.id is None,
            offer.group,
            tuple(dict.fromkeys(name for follower in followers for name in follower.all_names)),
        )

    def follower(self, offer: Offer[Any], predecessor: Inherited) -> OptionsMessage:
        """Check and encode a message that follows from another, whose group, priority and headers
        it inherits unless it has its own. Raises as :meth:`plain`.
        """
        if not isinstance(offer, Offer):
            raise BadInput(
                f"then takes a delayq.Offer, not {describe_value(offer)}: pass Offer(value, ...),"
                " or to_offer(...) of a task"
            )
        return self.with_options(
            replace(
                offer,
                group=predecessor.group if offer.group is None else offer.group,
                priority=(
                    predecessor.priority
                    if isinstance(offer.priority, DefaultPriority)
                    else offer.priority
                ),
                headers=predecessor.headers if offer.headers is None else offer.headers,
            )
        )

    def packed(self, followers: Sequence[OptionsMessage]) -> bytes:
        """Return the form in which followers are stored with the message that leads to them.

        Raises:
            BadInput: They are too many.
            PayloadTooLarge: They take more bytes than ``max_payload``.
        """
        if not followers:
            return b""
        if len(followers) > MAX_FOLLOWERS:
            raise BadInput(f"a message leads to at most {MAX_FOLLOWERS} others")
        packed = pack(followers)
        if len(packed) > self._max_payload:
            raise PayloadTooLarge(len(packed), self._max_payload)
        return packed

    def result(self, value: object, subject: str = "the result") -> bytes:
        """Encode the result of a handler, or another value that is kept with a message.

        Args:
            value: The value.
            subject: Its name, for errors.

        Raises:
            EncodeError, PayloadTooLarge: As for :meth:`delayq.Message.ack`.
        """
        codec = result_codec(self._codec)
        try:
            payload = codec.encode(value)
        except EncodeError as error:
            raise EncodeError(f"{subject} cannot be kept: {error}") from error.__cause__
        if not isinstance(payload, bytes):
            raise EncodeError(
                f"{type(codec).__name__}.encode returned {type(payload).__name__}, not bytes"
            )
        self.check_size(payload, subject)
        return payload

    def check_size(self, payload: bytes, subject: str) -> None:
        """Check that bytes are not more than ``max_payload``.

        Raises:
            PayloadTooLarge: They are more. It says so of ``subject``.
        """
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload, subject)

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
        followers: bytes = b"",
    ) -> bytes:
        if not isinstance(payload, bytes):
            raise EncodeError(
                f"{type(self._codec).__name__}.encode returned {type(payload).__name__}, not bytes"
            )
        if len(payload) > self._max_payload:
            raise PayloadTooLarge(len(payload), self._max_payload)
        check_limit(max_attempts, "max_attempts")
        timeout_us = None if timeout is None else microseconds(timeout, "timeout")
        if timeout_us == 0:
            raise BadDelay("timeout must be more than 0")
        headers = None if headers is None else _checked(headers)
        if group is not None:
            checked_group(group)
        return content(headers, payload, max_attempts, timeout_us, group, followers)


def with_headers(offers: Sequence[Offer[T]], headers: Mapping[str, str]) -> Sequence[Offer[T]]:
    """Add these headers to the offers that have no header of the same name."""
    return (
        [replace(offer, headers=_merged(offer.headers, headers)) for offer in offers]
        if headers
        else offers
    )


def _merged(
    headers: Mapping[str, str] | None, added: Mapping[str, str]
) -> Mapping[str, str] | None:
    """Return ``headers``, plus those of ``added`` that they lack.

    Anything but a mapping is returned as it is, to be refused.
    """
    if not added or (headers is not None and not isinstance(headers, Mapping)):
        return headers
    return {**added, **(headers or {})}


def _checked(headers: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(headers, Mapping):
        raise BadInput(f"headers must be a mapping of str to str, not {_private(headers)}")
    size = 0
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadInput(f"headers must map str to str, not {_private(name)} to {_private(text)}")
        size += len((name + text).encode(errors="surrogatepass"))
    if size > _LARGEST_HEADERS:
        raise BadInput(f"headers must have at most {_LARGEST_HEADERS} bytes, not {size}")
    return headers


def _private(wrong: object) -> str:
    """Return a number or None with its type; of other values, which may be private, the type."""
    is_number = wrong is None or isinstance(wrong, int | float)
    return describe_value(wrong) if is_number else f"a {type(wrong).__name__}"


@lru_cache(1024, typed=True)
def _delay_text(delay: Duration) -> int | str:
    """Return a delay as a body has it. Raises BadDelay, and TypeError for what has no hash."""
    return format_delay(microseconds(delay))
