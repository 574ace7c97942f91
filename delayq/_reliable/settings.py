"""The settings of a reliable queue: those of the queue, kept on its server, and those of a handle.
Pure.

A handle may leave each setting out. Of the queue's settings, those that a handle *declares* are
stored if the server has none yet; otherwise the stored ones count, and a warning tells the
difference. Of its own settings, a handle inherits those that it leaves out from the other handles
of the queue on this client, or uses the default.

Everything here decides without asking a server: :mod:`delayq._reliable.settings_cache` does that.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast

from delayq._checks import check_limit, check_max_payload
from delayq._durations import Duration, microseconds
from delayq._engine import durability as durabilities
from delayq._reliable.keys import MOST_PARTITIONS, check_partitions
from delayq._reliable.limits import limit_text, parse_limit, write_limit
from delayq.backoff import Backoff, check_backoff
from delayq.errors import BadInput, ConfigurationError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self, Unpack

    from delayq._reliable.limits import Limit

Expired = Literal["drop", "dead"]
WhenFull = Literal["raise", "wait"]


_SHORTEST_LEASE_US = 1_000

LAYOUT = "2"
"""The layout of the keys that this release knows, as in ``lua/reliable/include/settings.lua``.

It rises when an earlier release, with its own scripts, would harm what this one stores, or break a
promise about it: that release then refuses the queue.
"""
UNDECLARED = "0"
"""The epoch of a queue of whose settings none was ever stored."""
BOOKKEEPING_FIELDS = ("layout", "epoch", "renumbering", "moving")
"""The fields of the hash on the server that are no settings."""

SettingTexts = Mapping[str, str]
"""Settings of a queue by their names, each as the text that the server stores."""

RETRIES = Backoff.exponential(base=1, factor=2, max=300, jitter=0.1)
"""The default of ``backoff``."""


MOST_KEPT = 10_000
"""The default of ``max_kept``, as in ``lua/reliable/include/records.lua``."""


# A question mark: the number is about to change.
_NUMBER = re.compile(r"([1-9][0-9]{0,3})\??")


class ChangeOutcome(StrEnum):
    """What became of a change of settings: see ``configure.lua`` and ``renumber.lua``."""

    CHANGED = "changed"
    SAME = "same"
    OTHER_NUMBER = "other number"
    TOO_SMALL = "too small"
    CLOSED = "closed"
    BUSY = "busy"
    LOST = "lost"
    IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue, which all its clients share.

    :meth:`ReliableQueue.settings` returns them.

    Attributes:
        partitions: The number of partitions.
        max_size: The number of live messages beyond which offers are refused; None for no limit.
        expired: How messages past their time to live are treated: ``"drop"`` or ``"dead"``.
        dedup_window: How long the id of a handled message still counts as taken, in seconds.
        keep_dead: How long dead letters stay, in seconds; None for no limit.
        max_dead: The number of dead letters beyond which the oldest are dropped; None for no limit.
        keep: How long results and attempts of finished messages stay, in seconds; 0 for not at all.
        max_kept: The number of messages whose results and attempts stay at most.
        limit: How many messages run at a time and start in a period; None for no limit.
        group_limit: The same for each group that has no limit of its own.
    """

    partitions: int = 1
    max_size: int | None = None
    expired: Expired = "drop"
    dedup_window: float = 0.0
    keep_dead: float | None = None
    max_dead: int | None = None
    keep: float = 0.0
    max_kept: int = MOST_KEPT
    limit: Limit | None = None
    group_limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that a client sends with its claims.

    Attributes:
        lease_us: Length of a worker's lease on a message, in microseconds.
        max_attempts: Number of attempts after which a message becomes a dead letter; 0 for no
            limit.
    """

    lease_us: int
    max_attempts: int


class QueueOptions(TypedDict, total=False):
    """The settings of a queue: the arguments of :meth:`ReliableQueue.configure`.

    :meth:`delayq.Client.reliable_queue` explains all options of a queue. One that is None counts as
    left out, except where None stands for "no limit".
    """

    partitions: int | None
    max_size: int | None
    expired: Expired | None
    dedup_window: Duration | None
    keep_dead: Duration | None
    max_dead: int | None
    keep: Duration | None
    max_kept: int | None
    limit: Limit | None
    group_limit: Limit | None


HASH_FIELDS = (*BOOKKEEPING_FIELDS, *QueueOptions.__annotations__)
"""The fields of the hash on the server, in the order of ``lua/reliable/include/change.lua``."""


class ListenerOptions(QueueOptions, total=False):
    """The settings that :meth:`delayq.Worker.listener` takes."""

    lease: Duration | None
    max_attempts: int | None
    backoff: Backoff | None
    when_full: WhenFull | None
    max_payload: int | None


class HandleOptions(ListenerOptions, total=False):
    """The settings that :meth:`delayq.Client.reliable_queue` takes."""

    durability: str | None


_NO_LIMIT_IF_NONE = {"max_size", "keep_dead", "max_dead", "limit", "group_limit", "max_attempts"}


def check_names(function: str, options: Mapping[str, object], allowed: type[Any]) -> None:
    """Raise TypeError if a function was given an option that it does not take."""
    for name in options:
        if name not in allowed.__annotations__:
            similar = difflib.get_close_matches(name, allowed.__annotations__, 1)
            hint = f". Did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _without_left_out(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in options.items()
        if value is not None or name in _NO_LIMIT_IF_NONE
    }


class HandleSettings:
    """The settings that one handle was given, without those that were left out.

    Attributes:
        options: The settings by their names.
    """

    def __init__(self, **options: Unpack[HandleOptions]) -> None:
        self.options: HandleOptions = cast("HandleOptions", _without_left_out(options))

    def check(self) -> None:
        """Check every setting that was given.

        Raises:
            BadInput: One of them is invalid.
        """
        options = self.options
        lease = options.get("lease")
        if lease is not None and microseconds(lease, "lease") < _SHORTEST_LEASE_US:
            raise BadInput(
                "lease must be at least 1 ms: otherwise a message is redelivered before its handler"
                " starts"
            )
        check_limit(options.get("max_attempts"), "max_attempts")
        if (backoff := options.get("backoff")) is not None:
            check_backoff(backoff)
        if (max_payload := options.get("max_payload")) is not None:
            check_max_payload(max_payload)
        if (durability := options.get("durability")) is not None:
            durabilities.parse(durability)
        if (when_full := options.get("when_full")) not in (None, "raise", "wait"):
            raise BadInput(f'when_full must be "raise" or "wait", not {when_full!r}')
        self.declared()

    def declared(self) -> dict[str, str]:
        """Return the settings of the queue that the handle declares, as the server stores them.

        Raises:
            BadInput: One of them is invalid.
        """
        return _stored_texts(self.options)

    def inherit(self, other: HandleSettings) -> HandleSettings:
        """Return these settings, with the handle's own ones that were left out taken from
        ``other``.
        """
        inherited = {name: value for name, value in other.options.items() if name not in FORMATS}
        return HandleSettings(**cast("HandleOptions", {**inherited, **self.options}))

    def policy(self) -> Policy:
        """Return the settings that are sent with claims. Both must be given."""
        lease_us = microseconds(self.options["lease"] or 0, "lease")
        return Policy(lease_us, self.options["max_attempts"] or 0)


DEFAULTS = HandleSettings(
    lease=30.0,
    max_attempts=10,
    backoff=RETRIES,
    when_full="raise",
    max_payload=512 * 1024,
    durability="memory",
)
"""The settings of a handle for which no other is known."""


class Difference(NamedTuple):
    """A setting that code declares, and of which the server has another value.

    Attributes:
        name: The setting.
        stored: The value on the server, as the server stores it.
        declared: The value in the code, as the server would store it.
    """

    name: str
    stored: str
    declared: str

    @property
    def text(self) -> str:
        """Both values, in words."""
        stored, declared = in_code(self.name, self.stored), in_code(self.name, self.declared)
        return f"{self.name} is {stored} on the server, and {declared} in the code"

    def command(self, queue: str) -> str:
        """Return the command that gives the server the value in the code."""
        if self.name == "partitions":
            return repartition(queue, {self.name: self.declared})
        value = shlex.quote(option_text(self.name, self.declared))
        option = f"--{self.name.replace('_', '-')} {value}"
        return f"delayq configure {shlex.quote(queue)} {option}"


class StoredSettings:
    """The settings of a queue that its server has.

    Attributes:
        fields: Every field that is stored, as text.
        epoch: Changes whenever a setting does; ``0`` if none was ever stored.
        partitions: The number of partitions.
        has_partition_count: Whether this number is stored, and so stays. If not, it is 1.
        refuses_offers: Whether nothing can be stored now, because the number is about to change.
        moving_to: To which number of partitions the queue is being moved, if it is.
        has_one_partition: Whether there is only one partition.
        max_size: The number of live messages beyond which offers are refused; 0 for no limit.
        drops_letters: Whether dead letters are dropped at some age or number.
        keep_us: How long records of finished messages are kept, in microseconds; 0 for not at all.
    """

    __slots__ = (
        "drops_letters",
        "epoch",
        "fields",
        "has_one_partition",
        "has_partition_count",
        "keep_us",
        "max_size",
        "moving_to",
        "partitions",
        "refuses_offers",
    )

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields: Mapping[str, str] = fields
        self.epoch: str = fields.get("epoch", UNDECLARED)
        number = _NUMBER.fullmatch(fields.get("partitions", ""))
        self.has_partition_count: bool = number is not None and int(number[1]) <= MOST_PARTITIONS
        self.partitions: int = (
            int(number[1]) if number is not None and self.has_partition_count else 1
        )
        self.refuses_offers: bool = self.has_partition_count and fields["partitions"].endswith("?")
        moving = _NUMBER.match(fields.get("moving", ""))
        self.moving_to: int | None = int(moving[1]) if moving is not None else None
        self.has_one_partition: bool = self.partitions == 1
        self.max_size: int = max(_number(fields.get("max_size")), 0)
        limits = (_number(fields.get(name)) for name in ("keep_dead", "max_dead"))
        self.keep_us: int = max(_number(fields.get("keep")), 0)
        self.drops_letters: bool = any(limit > 0 for limit in limits)

    @classmethod
    def of(cls, values: Iterable[bytes | None]) -> Self:
        """Parse the values of :data:`HASH_FIELDS`."""
        fields = zip(HASH_FIELDS, values, strict=True)
        return cls(
            {name: value.decode(errors="replace") for name, value in fields if value is not None}
        )

    def public(self) -> QueueSettings:
        """Return the settings as users see them."""
        values = {name: form.read(self.fields.get(name)) for name, form in FORMATS.items()}
        return QueueSettings(**{**values, "partitions": self.partitions})

    def check_layout(self, queue: str) -> None:
        """Check that this release can work with the queue.

        Raises:
            ConfigurationError: A newer or an older release has written it.
        """
        layout = self.fields.get("layout", LAYOUT)
        if layout == LAYOUT:
            return
        mismatch = (
            f"queue {queue!r} has layout {layout}, and this release of delayq knows layout {LAYOUT}"
        )
        if _number(layout) > int(LAYOUT):
            raise ConfigurationError(
                f"{mismatch}: a newer release has written it. Upgrade delayq in this process"
            )
        raise ConfigurationError(
            f"{mismatch}: another release has written it. Let that release handle its messages,"
            " or use another name"
        )

    def given(self) -> dict[str, str]:
        """Return the settings that somebody has given, as they are stored."""
        return {name: text for name, text in self.fields.items() if name not in BOOKKEEPING_FIELDS}

    def to_declare(self) -> dict[str, str]:
        """Return what to declare, so that the server has these settings again."""
        return {**self.given(), "partitions": str(self.partitions)}

    def missing(self, declared: SettingTexts) -> dict[str, str]:
        """Return those of the declared settings of which none is stored."""
        return {name: text for name, text in declared.items() if self._text(name) is None}

    def differences(self, declared: SettingTexts) -> list[Difference]:
        """Return those of the declared settings of which another value is stored."""
        return [
            Difference(name, stored, text)
            for name, text in declared.items()
            if (stored := self._text(name)) not in (None, text)
        ]

    def _text(self, name: str) -> str | None:
        if name == "partitions":
            return str(self.partitions) if self.has_partition_count else None
        return self.fields.get(name)

    def check_partitions(self, queue: str, declared: SettingTexts) -> None:
        """Check that a handle does not declare another number of partitions.

        Raises:
            ConfigurationError: It does.
        """
        number = declared.get("partitions")
        if self.has_partition_count and number not in (None, str(self.partitions)):
            raise ConfigurationError(
                f"queue {queue!r} has {self.partitions} partitions on the server, and {number}"
                f" here: leave partitions out, or run: {repartition(queue, declared)}"
            )

    def check_at_rest(self, queue: str) -> None:
        """Check that the queue is not being moved to another number of partitions.

        Raises:
            ServerUnavailable: It is, and what it has cannot be reached.
        """
        if self.refuses_offers:
            self.check_not_moving(queue)

    def check_not_moving(self, queue: str) -> None:
        """Check that no move to another number of partitions has begun.

        Raises:
            ServerUnavailable: One has. The queue is paused, and will go on by itself.
        """
        if self.moving_to is not None:
            raise ServerUnavailable(
                f"nothing was done: queue {queue!r} is being moved to {self.moving_to} partitions;"
                " try again when that has ended. If it was interrupted, continue it with:"
                f" delayq repartition {shlex.quote(queue)} --to {self.moving_to}"
            )

    def check_shares(self, queue: str) -> None:
        """Check that each partition gets a part of the queue's limit.

        Raises:
            ConfigurationError: There are more partitions than messages that may run, or start.
        """
        limit = parse_limit(self.fields.get("limit"))
        for name in ("concurrency", "rate"):
            number = None if limit is None else getattr(limit, name)
            if number is not None and number < self.partitions:
                raise ConfigurationError(
                    f"queue {queue!r} has {self.partitions} partitions, which share its limit out,"
                    f" so its {name} must be at least as large, not {number}: raise it, or use"
                    " fewer partitions"
                )


def repartition(queue: str, changes: SettingTexts) -> str:
    """Return the command that gives a queue another number of partitions."""
    return f"delayq repartition {shlex.quote(queue)} --to {changes['partitions']}"


def setting_texts(**options: Unpack[QueueOptions]) -> dict[str, str]:
    """Return settings of a queue as the server stores them.

    Raises:
        BadInput: One of them is invalid.
    """
    return _stored_texts(_without_left_out(options))


def _stored_texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: form.write(name, options[name]) for name, form in FORMATS.items() if name in options
    }


def _number(text: object) -> int:
    """Return the whole number in a text; 0 if there is none, as another program may have left."""
    try:
        return int(text)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return 0


def in_code(name: str, text: str) -> str:
    """Return a stored setting as a user would write it in code."""
    if name not in FORMATS:
        return text
    value = FORMATS[name].read(text)
    return f"{value:.15g}" if isinstance(value, float) else repr(value)


def option_text(name: str, text: str) -> str:
    """Return a stored setting as the option of ``delayq configure`` takes it."""
    value = FORMATS[name].read(text)
    if FORMATS[name].kind == "limit":
        return write_limit(value)
    return f"{value:.15g}" if isinstance(value, float) and value else str(value or "none")


class Format(NamedTuple):
    """The forms of a setting of a queue: in code, on the server, and as people write it.

    Attributes:
        kind: How people write it: ``"number"``; ``"count"``, which is a number or ``none``;
            ``"duration"``; ``"limit"``; or ``"choice"``, one of several words.
        write: Returns the stored text for a setting's name and value. Raises BadInput if the value
            is invalid.
        read: Returns the value, whatever another program may have stored, or for None, the default.
    """

    kind: Literal["number", "count", "duration", "limit", "choice"]
    write: Callable[[str, Any], str]
    read: Callable[[str | None], Any]


def _write_partitions(_: str, number: int) -> str:
    check_partitions(number)
    return str(number)


def _write_expired(_: str, expired: str) -> str:
    if expired not in ("drop", "dead"):
        raise BadInput(f'expired must be "drop" or "dead", not {expired!r}')
    return expired


def _write_count(name: str, count: int | None) -> str:
    check_limit(count, name)
    return str(count or 0)


def _write_duration(name: str, duration: Duration) -> str:
    return str(microseconds(duration, name))


def _write_keep_dead(name: str, duration: Duration | None) -> str:
    text = "0" if duration is None else _write_duration(name, duration)
    if duration is not None and text == "0":
        raise BadInput("keep_dead must be more than 0, or None for no limit")
    return text


def _write_limit(name: str, limit: Limit | None) -> str:
    return limit_text(limit, name, of_groups=name == "group_limit")


def _read_count(text: str | None, default: int | None = None) -> int | None:
    number = _number(text)
    return number if number > 0 else default


def _read_duration(text: str | None) -> float:
    return max(_number(text), 0) / 1_000_000


# In the order of the attributes of QueueSettings.
FORMATS: Mapping[str, Format] = {
    "partitions": Format("number", _write_partitions, partial(_read_count, default=1)),
    "max_size": Format("count", _write_count, _read_count),
    "expired": Format("choice", _write_expired, lambda text: "dead" if text == "dead" else "drop"),
    "dedup_window": Format("duration", _write_duration, _read_duration),
    "keep_dead": Format("duration", _write_keep_dead, lambda text: _read_duration(text) or None),
    "max_dead": Format("count", _write_count, _read_count),
    "keep": Format("duration", _write_duration, _read_duration),
    "max_kept": Format("number", _write_count, partial(_read_count, default=MOST_KEPT)),
    "limit": Format("limit", _write_limit, parse_limit),
    "group_limit": Format("limit", _write_limit, parse_limit),
}
"""The settings of a queue."""
