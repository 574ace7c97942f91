"""The settings of a reliable queue: those of the queue, kept on its server, and those of a handle.

A handle may leave each setting out. Of the queue's settings, those that a handle *declares* are
stored if the server has none yet; otherwise the stored ones count, and a warning tells the
difference. Of its own settings, a handle inherits those that it leaves out from the other handles
of the queue on this client, or uses the default.

Everything here decides without asking a server: :mod:`delayq._reliable.known_settings` does that.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from delayq._durations import Duration, check_max_payload, microseconds
from delayq._engine import durability as durabilities
from delayq._reliable.keys import MOST_PARTITIONS, check_partitions
from delayq._reliable.limits import limit_text, parse_limit, write_limit
from delayq._unset import UNSET, Unset
from delayq._wording import given
from delayq.backoff import Backoff, check_backoff
from delayq.errors import BadInput, ConfigurationError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from delayq._reliable.limits import Limit

Expired = Literal["drop", "dead"]
WhenFull = Literal["raise", "wait"]


_SHORTEST_LEASE_US = 1_000

LAYOUT = "2"
"""The layout of the keys that this release knows, as in ``lua/reliable/include/settings.lua``."""
UNDECLARED = "0"
"""The epoch of a queue of whose settings none was ever stored."""
FIELDS = (
    "layout",
    "epoch",
    "partitions",
    "renumbering",
    "moving",
    "max_size",
    "expired",
    "dedup_window",
    "keep_dead",
    "max_dead",
    "keep",
    "max_kept",
    "limit",
    "group_limit",
)
"""The fields of the hash on the server, in the order of ``lua/reliable/include/change.lua``."""

Declared = Mapping[str, str]
"""Settings of a queue that somebody has given, as the server stores them, by their names."""

RETRIES = Backoff.exponential(base=1, factor=2, max=300, jitter=0.1)
"""The default of ``backoff``."""


MOST_KEPT = 10_000
"""The default of ``max_kept``, as in ``lua/reliable/include/kept.lua``."""


# A question mark: the number is about to change.
_NUMBER = re.compile(r"([1-9][0-9]{0,3})\??")


class ChangeOutcome(StrEnum):
    """What became of a change of settings: see ``configure.lua`` and ``renumber.lua``."""

    CHANGED = "changed"
    SAME = "same"
    OTHER_NUMBER = "other number"
    TOO_SMALL = "too small"
    HELD = "held"
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


class SettingsOptions(TypedDict, total=False):
    """The arguments of :meth:`delayq.Client.reliable_queue`, apart from the name and the codec."""

    lease: Duration | None
    max_attempts: int | Unset | None
    backoff: Backoff | None
    dedup_window: Duration | None
    expired: Expired | None
    max_size: int | Unset | None
    when_full: WhenFull | None
    max_payload: int | None
    durability: str | None
    partitions: int | None
    keep_dead: Duration | Unset | None
    max_dead: int | Unset | None
    keep: Duration | None
    max_kept: int | None
    limit: Limit | Unset | None
    group_limit: Limit | Unset | None


@dataclass(frozen=True)
class Settings:
    """The settings that one handle was given.

    One that is None was left out, unless the default is UNSET.
    :meth:`delayq.Client.reliable_queue` explains them.
    """

    lease: Duration | None = None
    max_attempts: int | Unset | None = UNSET
    backoff: Backoff | None = None
    dedup_window: Duration | None = None
    expired: Expired | None = None
    max_size: int | Unset | None = UNSET
    when_full: WhenFull | None = None
    max_payload: int | None = None
    durability: str | None = None
    partitions: int | None = None
    keep_dead: Duration | Unset | None = UNSET
    max_dead: int | Unset | None = UNSET
    keep: Duration | None = None
    max_kept: int | None = None
    limit: Limit | Unset | None = UNSET
    group_limit: Limit | Unset | None = UNSET

    def check(self) -> None:
        """Check every setting that was given.

        Raises:
            BadInput: One of them is invalid.
        """
        if self.lease is not None and microseconds(self.lease, "lease") < _SHORTEST_LEASE_US:
            raise BadInput(
                "lease must be at least 1 ms: otherwise a message is redelivered before its handler"
                " starts"
            )
        check_limit("max_attempts", self.max_attempts)
        if self.backoff is not None:
            check_backoff(self.backoff)
        if self.max_payload is not None:
            check_max_payload(self.max_payload)
        if self.durability is not None:
            durabilities.parse(self.durability)
        if self.when_full not in (None, "raise", "wait"):
            raise BadInput(f'when_full must be "raise" or "wait", not {self.when_full!r}')
        self.declared()

    def declared(self) -> dict[str, str]:
        """Return the settings of the queue that the handle declares.

        Raises:
            BadInput: One of them is invalid.
        """
        return declare(
            partitions=self.partitions,
            max_size=self.max_size,
            expired=self.expired,
            dedup_window=self.dedup_window,
            keep_dead=self.keep_dead,
            max_dead=self.max_dead,
            keep=self.keep,
            max_kept=self.max_kept,
            limit=self.limit,
            group_limit=self.group_limit,
        )

    def inherit(self, other: Settings) -> Settings:
        """Return these settings, with the handle's own ones that were left out taken from
        ``other``.
        """
        left_out = [name for name in _OF_HANDLE if getattr(self, name) is getattr(_NOTHING, name)]
        return replace(self, **{name: getattr(other, name) for name in left_out})

    def policy(self) -> Policy:
        """Return the settings that are sent with claims. Every one must be given."""
        return Policy(microseconds(self.lease or 0, "lease"), max(_number(self.max_attempts), 0))


_OF_HANDLE = ("lease", "max_attempts", "backoff", "when_full", "max_payload", "durability")
_NOTHING = Settings()
DEFAULTS = Settings(
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
        stored, declared = shown(self.name, self.stored), shown(self.name, self.declared)
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
        is_numbered: Whether this number is stored: then it stays.
        is_held: Whether nothing can be stored now, because the number is about to change.
        moving_to: To which number of partitions the queue is being moved, if it is.
        is_whole: Whether there is only one partition.
        max_size: The number of live messages beyond which offers are refused; 0 for no limit.
        drops_letters: Whether dead letters are dropped at some age or number.
        keep_us: How long records of finished messages are kept, in microseconds; 0 for not at all.
    """

    __slots__ = (
        "drops_letters",
        "epoch",
        "fields",
        "is_held",
        "is_numbered",
        "is_whole",
        "keep_us",
        "max_size",
        "moving_to",
        "partitions",
    )

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields: Mapping[str, str] = fields
        self.epoch: str = fields.get("epoch", UNDECLARED)
        number = _NUMBER.fullmatch(fields.get("partitions", ""))
        self.is_numbered: bool = number is not None and int(number[1]) <= MOST_PARTITIONS
        self.partitions: int = int(number[1]) if number is not None and self.is_numbered else 1
        self.is_held: bool = self.is_numbered and fields["partitions"].endswith("?")
        moving = _NUMBER.match(fields.get("moving", ""))
        self.moving_to: int | None = int(moving[1]) if moving is not None else None
        self.is_whole: bool = self.partitions == 1
        self.max_size: int = max(_number(fields.get("max_size")), 0)
        limits = (_number(fields.get(name)) for name in ("keep_dead", "max_dead"))
        self.keep_us: int = max(_number(fields.get("keep")), 0)
        self.drops_letters: bool = any(limit > 0 for limit in limits)

    @classmethod
    def of(cls, values: Iterable[bytes | None]) -> Self:
        """Parse the values of :data:`FIELDS`."""
        found = zip(FIELDS, values, strict=True)
        return cls(
            {name: value.decode(errors="replace") for name, value in found if value is not None}
        )

    def public(self) -> QueueSettings:
        """Return the settings as users see them."""
        return QueueSettings(
            self.partitions,
            self.max_size or None,
            "dead" if self.fields.get("expired") == "dead" else "drop",
            max(_number(self.fields.get("dedup_window")), 0) / 1_000_000,
            max(_number(self.fields.get("keep_dead")), 0) / 1_000_000 or None,
            max(_number(self.fields.get("max_dead")), 0) or None,
            self.keep_us / 1_000_000,
            _most_kept(self.fields.get("max_kept")),
            parse_limit(self.fields.get("limit")),
            parse_limit(self.fields.get("group_limit")),
        )

    def check_layout(self, queue: str) -> None:
        """Check that this release can work with the queue.

        Raises:
            ConfigurationError: A newer or an older release has written it.
        """
        layout = self.fields.get("layout", LAYOUT)
        if layout == LAYOUT:
            return
        what = (
            f"queue {queue!r} has layout {layout}, and this release of delayq knows layout {LAYOUT}"
        )
        if _number(layout) > int(LAYOUT):
            raise ConfigurationError(
                f"{what}: a newer release has written it. Upgrade delayq in this process"
            )
        raise ConfigurationError(
            f"{what}: another release has written it. Let that release handle its messages, or use"
            " another name"
        )

    def to_declare(self) -> dict[str, str]:
        """Return those that somebody has given."""
        derived = ("layout", "epoch", "renumbering", "moving")
        given = {name: text for name, text in self.fields.items() if name not in derived}
        return {**given, "partitions": str(self.partitions)}

    def missing(self, declared: Declared) -> dict[str, str]:
        """Return those of the declared settings of which none is stored."""
        return {name: text for name, text in declared.items() if self._text(name) is None}

    def differences(self, declared: Declared) -> list[Difference]:
        """Return those of the declared settings of which another value is stored."""
        return [
            Difference(name, stored, text)
            for name, text in declared.items()
            if (stored := self._text(name)) not in (None, text)
        ]

    def _text(self, name: str) -> str | None:
        if name == "partitions":
            return str(self.partitions) if self.is_numbered else None
        return self.fields.get(name)

    def check_partitions(self, queue: str, declared: Declared) -> None:
        """Check that a handle does not declare another number of partitions.

        Raises:
            ConfigurationError: It does.
        """
        number = declared.get("partitions")
        if self.is_numbered and number not in (None, str(self.partitions)):
            raise ConfigurationError(
                f"queue {queue!r} has {self.partitions} partitions on the server, and {number}"
                f" here: leave partitions out, or run: {repartition(queue, declared)}"
            )

    def check_at_rest(self, queue: str) -> None:
        """Check that the queue is not being moved to another number of partitions.

        Raises:
            ServerUnavailable: It is, and what it has cannot be reached.
        """
        if self.is_held:
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


def repartition(queue: str, changes: Declared) -> str:
    """Return the command that gives a queue another number of partitions."""
    return f"delayq repartition {shlex.quote(queue)} --to {changes['partitions']}"


def declare(
    *,
    partitions: int | None = None,
    max_size: int | Unset | None = UNSET,
    expired: Expired | None = None,
    dedup_window: Duration | None = None,
    keep_dead: Duration | Unset | None = UNSET,
    max_dead: int | Unset | None = UNSET,
    keep: Duration | None = None,
    max_kept: int | None = None,
    limit: Limit | Unset | None = UNSET,
    group_limit: Limit | Unset | None = UNSET,
) -> dict[str, str]:
    """Return the given settings of a queue as the server stores them.

    Raises:
        BadInput: One of them is invalid.
    """
    declared: dict[str, str] = {}
    if partitions is not None:
        check_partitions(partitions)
        declared["partitions"] = str(partitions)
    check_limit("max_size", max_size)
    if max_size is not UNSET:
        declared["max_size"] = str(max_size or 0)
    if expired is not None:
        if expired not in ("drop", "dead"):
            raise BadInput(f'expired must be "drop" or "dead", not {expired!r}')
        declared["expired"] = expired
    if dedup_window is not None:
        declared["dedup_window"] = str(microseconds(dedup_window, "dedup_window"))
    if limit is not UNSET:
        declared["limit"] = limit_text(limit, "limit", of_groups=False)
    if group_limit is not UNSET:
        declared["group_limit"] = limit_text(group_limit, "group_limit", of_groups=True)
    return declared | _declare_kept(keep_dead, max_dead, keep, max_kept)


def _declare_kept(
    keep_dead: Duration | Unset | None,
    max_dead: int | Unset | None,
    keep: Duration | None,
    max_kept: int | None,
) -> dict[str, str]:
    declared: dict[str, str] = {}
    if not isinstance(keep_dead, Unset):
        keep_us = 0 if keep_dead is None else microseconds(keep_dead, "keep_dead")
        if keep_dead is not None and not keep_us:
            raise BadInput("keep_dead must be more than 0, or None for no limit")
        declared["keep_dead"] = str(keep_us)
    check_limit("max_dead", max_dead)
    if max_dead is not UNSET:
        declared["max_dead"] = str(max_dead or 0)
    if keep is not None:
        declared["keep"] = str(microseconds(keep, "keep"))
    check_limit("max_kept", max_kept)
    if max_kept is not None:
        declared["max_kept"] = str(max_kept)
    return declared


def check_limit(name: str, limit: int | Unset | None) -> None:
    """Check a limit that may be left out.

    Raises:
        BadInput: It is neither None nor a whole number of at least 1.
    """
    if limit is None or limit is UNSET:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadInput(f"{name} must be None or an int of at least 1, not {given(limit)}")


def _number(text: object) -> int:
    """Return the whole number in a text; 0 if there is none, as another program may have left."""
    try:
        return int(text)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return 0


def _most_kept(text: str | None) -> int:
    number = _number(text)
    return number if number > 0 else MOST_KEPT


def shown(name: str, text: str) -> str:
    """Return a stored setting as a user would write it in code."""
    return _SHOWN.get(name, str)(text)


def _seconds(text: str) -> str:
    return f"{_number(text) / 1_000_000:.15g}"


def option_text(name: str, text: str) -> str:
    """Return a stored setting as the option of ``delayq configure`` takes it."""
    if name in ("limit", "group_limit"):
        return write_limit(parse_limit(text))
    if name in ("dedup_window", "keep_dead", "keep"):
        return _seconds(text) if _number(text) else "none"
    return "none" if text == "0" else text


_SHOWN: dict[str, Callable[[str], str]] = {
    "max_size": lambda text: str(_number(text) or None),
    "expired": repr,
    "dedup_window": _seconds,
    "keep_dead": lambda text: _seconds(text) if _number(text) else "None",
    "max_dead": lambda text: str(_number(text) or None),
    "keep": _seconds,
    "limit": lambda text: repr(parse_limit(text)),
    "group_limit": lambda text: repr(parse_limit(text)),
}
