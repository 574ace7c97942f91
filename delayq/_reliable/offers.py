"""Offers to a reliable queue: their encoding, and the calls that store them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

from delayq._checks import check_limit, describe_value
from delayq._durations import Duration, microseconds, when_due
from delayq._engine.batcher import Batcher
from delayq._engine.durability import DurableBatchers
from delayq._engine.wakeup import warn_of_refusal
from delayq._generics import T
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.scripts import Request
from delayq._reliable.bodies import (
    OptionsMessage,
    PlainMessage,
    brief,
    content,
    pack,
    plain_message,
)
from delayq._reliable.ids import checked_group, checked_new_id
from delayq._reliable.keys import PRIORITIES
from delayq._reliable.offer import MAX_FOLLOWERS, USUAL_PRIORITY, DefaultPriority, Offer
from delayq._reliable.scripts import OFFER, OFFER_NEW
from delayq._reliable.settings_cache import MOST_TRIES
from delayq.codecs.json import result_codec
from delayq.errors import (
    BadDelay,
    BadInput,
    ConfigurationError,
    EncodeError,
    PayloadTooLarge,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from delayq._engine.context import Counters, EngineContext
    from delayq._engine.durability import Results, Unconfirmed
    from delayq._redis.client import RedisClient
    from delayq._redis.durability import Durability
    from delayq._redis.pipeline import WaitingServer
    from delayq._reliable.bodies import NewMessage
    from delayq._reliable.settings_cache import SettingsCache
    from delayq._reliable.store import ReliableStore
    from delayq.codecs import Codec
    from delayq.errors import OutcomeUnknown

_LARGEST_HEADERS = 16 * 1024
ENDS_EARLY = (
    "ttl ends before the message is due: it counts from now, so make it longer than the delay"
)


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
            stored = b"\n" + payload
        else:
            stored = self._content(payload, headers)
        if at is not None:
            when = when_due(delay, at)
            return OptionsMessage(
                "",
                USUAL_PRIORITY,
                when,
                ttl_us=0,
                unique_us=0,
                on_duplicate="raise",
                content=stored,
                id_generated=True,
                group=None,
            )
        try:
            return plain_message(("", 0 if delay is None else _brief_delay(delay), stored))
        except TypeError:
            # It cannot be hashed, so it is no duration.
            microseconds(delay or 0)
            raise

    def message(self, offer: Offer[T]) -> NewMessage:
        """Check and encode any message. Raises as :meth:`plain`."""
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
        stored = self._content(
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
            raise BadDelay(ENDS_EARLY)
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
            brief(when) if isinstance(when, int) else when,
            ttl_us,
            unique_us,
            on_duplicate,
            stored,
            offer.id is None,
            offer.group,
            tuple(dict.fromkeys(name for follower in followers for name in follower.home_names)),
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
def _brief_delay(delay: Duration) -> int | str:
    """Return a delay as a body has it. Raises BadDelay, and TypeError for what has no hash."""
    return brief(microseconds(delay))


# Maximum number of messages, and of bytes, that share one script call: a script blocks the whole
# server while it runs.
_MESSAGES_PER_CALL = 200
_BYTES_PER_CALL = 256 * 1024
# A reply of offer_new.lua, and behind the outcomes of offer.lua: the messages are stored, but the
# user may not announce them.
_UNANNOUNCED = -3


def chunks(items: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide items into those of one call each, in their order. ``sizes`` are in bytes."""
    start = size = 0
    for position, item_size in enumerate(sizes):
        size += item_size
        if position > start and (size > _BYTES_PER_CALL or position - start == _MESSAGES_PER_CALL):
            yield items[start:position]
            start, size = position, item_size
    if items:
        yield items[start:]


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


STORED, REPLACED = OfferOutcome.STORED, OfferOutcome.REPLACED
# Looking one up in the class takes five times as long.
_OUTCOMES: Mapping[int, OfferOutcome] = {outcome.value: outcome for outcome in OfferOutcome}


class PartitionOffers:
    """Stores the messages offered to one partition, batching those of concurrent callers.

    Attributes:
        commits: The batcher that stores messages without further durability. Each message is as
            large as its content.
    """

    def __init__(
        self,
        index: int,
        store: ReliableStore,
        settings: SettingsCache,
        counters: Counters,
        services: EngineContext,
        *,
        wake: Callable[[], object],
        report_soon: Callable[[], object],
    ) -> None:
        """Args:
        index: The number of the partition.
        store: Its data on the server.
        settings: The settings of the queue.
        counters: Counts the messages that are stored.
        services: The client's services.
        wake: Makes this client look for due messages.
        report_soon: Called after messages were stored, to report the count of them.
        """
        self._index = index
        self._store = store
        self._settings = settings
        self._counters = counters
        self._background = services.background
        self._wake = wake
        self._report_soon = report_soon
        # The keys of the calls that were made: each keeps a reply on the server.
        self.call_keys: list[str] = []
        self._warned_of_refusal = False
        # A try of these calls that we gave up may still arrive. Their records keep it from storing,
        # and expire by themselves.
        self._uncertain_calls: set[str] = set()
        self._batchers: DurableBatchers[NewMessage, OfferOutcome] = DurableBatchers(
            self._store.client, self._store.keys.wake, self._new_batcher
        )
        self.commits: Batcher[NewMessage, OfferOutcome] = self._batchers.plain

    async def batcher_for(
        self, durability: Durability
    ) -> Batcher[NewMessage, OfferOutcome | Unconfirmed[OfferOutcome]]:
        """Return the batcher for a durability, as :meth:`DurableBatchers.batcher_for` does."""
        return await self._batchers.batcher_for(durability)

    def recall(self) -> None:
        """Fail what was not sent yet with :class:`SettingsChanged`: it may belong elsewhere now."""
        for commits in self._batchers.all:
            commits.recall(SettingsChanged("the number of partitions has changed"))

    async def aclose(self, grace: float) -> None:
        """Accept nothing more. Calls in flight have ``grace`` seconds to finish."""
        await self._batchers.aclose(grace)
        if finished_calls := [call for call in self.call_keys if call not in self._uncertain_calls]:
            with suppress(ServerError, TimeoutError):
                async with asyncio.timeout(grace / 2):
                    await self._store.forget_calls(finished_calls)

    def _new_batcher(
        self, server: RedisClient | WaitingServer, reading: Callable[[Results], Results]
    ) -> Batcher[NewMessage, Any]:
        # Identifies this client's calls: the server keeps the reply to the last one, in case that
        # reply is lost.
        session = secrets.token_hex(6)
        calls = [self._store.keys.call(f"{session}-{slot}") for slot in (0, 1)]
        last_number = 0

        def request(messages: Sequence[NewMessage], slot: int) -> Request:
            nonlocal last_number
            if not last_number:
                self.call_keys += calls
            last_number += 1
            return self.request(calls[slot], last_number, messages)

        return Batcher(
            server,
            self._background,
            request=request,
            repeat=partial(self._repeat, server),
            results=reading(self.outcomes),
            max_items=_MESSAGES_PER_CALL,
            max_bytes=_BYTES_PER_CALL,
            expires=True,
        )

    def outcomes(self, messages: Sequence[NewMessage], reply: Any) -> Sequence[OfferOutcome]:
        """Return the outcomes of messages from the reply to their call, and count them."""
        count = len(messages)
        if isinstance(reply, int):
            is_announced = reply != _UNANNOUNCED
            outcomes = [_OUTCOMES[reply if is_announced else STORED]] * count
        else:
            is_announced = len(reply) == count
            outcomes = [*map(_OUTCOMES.__getitem__, reply[:count])]
        if not is_announced:
            # At least this client looks.
            self._wake()
            if not self._warned_of_refusal:
                self._warned_of_refusal = True
                warn_of_refusal(self._store.keys.name)
        self._counters.offered += outcomes.count(STORED) + outcomes.count(REPLACED)
        self._report_soon()
        return outcomes

    def request(self, call: str, number: int, messages: Sequence[NewMessage]) -> Request:
        """Build the call that stores messages.

        If the queue has another number of partitions by now, or a size limit, the call fails with
        :class:`SettingsChanged`.

        Args:
            call: The key, the last one of the request, that keeps the reply so that the call can be
                repeated.
            number: Tells the call from the earlier ones with that key.
            messages: The messages.
        """
        settings = self._settings.stored
        arguments: Iterable[str | bytes | int]
        if settings.max_size or not {PlainMessage}.issuperset(map(type, messages)):
            script = OFFER
            arguments = chain.from_iterable(message.arguments for message in messages)
        else:
            # Of a plain message, the fields are the arguments.
            script, arguments = OFFER_NEW, chain.from_iterable(cast("Any", messages))
        keys = (*self._store.keys.of_script(script), call)
        return Request(script, keys, [number, settings.partitions, *arguments])

    async def _repeat(
        self,
        server: RedisClient | WaitingServer,
        request: Request,
        messages: Sequence[NewMessage],
        lost_reply: OutcomeUnknown | None,
    ) -> Any:
        number = cast("int", request.args[0])
        call, errors = request.keys[-1], self._store.client.errors
        if lost_reply is not None:
            self._uncertain_calls.add(call)
            if (
                request.deadline is not None
                and asyncio.get_running_loop().time() >= request.deadline
            ):
                raise lost_reply
        try:
            # The call keeps its number, so anything already carried out is not carried out again.
            for _ in range(MOST_TRIES):
                if self._settings.stored.partitions != request.args[1]:
                    # The messages belong elsewhere now: unless they are stored already, this is
                    # refused.
                    break
                try:
                    repetition = self.request(call, number, messages)
                    return await server.run(*repetition._replace(deadline=request.deadline))
                except SettingsChanged:
                    await self._settings.after_refusal(self._index)
            return await server.run(*request)
        except (ServerUnavailable, ServerRefused, ConfigurationError) as error:
            # Whatever happened to this try, an earlier one may have been carried out.
            raise lost_reply or error from error.__cause__
        finally:
            if self._store.client.errors != errors:
                # The error may have been this call's.
                self._uncertain_calls.add(call)
