"""The settings of a reliable queue: those of the queue, kept on its server, and those of a handle.

A handle may leave each setting out. Of the queue's settings, those that a handle *declares* are
stored if the server has none yet, and must be the same as the stored ones otherwise. Of its own
settings, a handle inherits those that it leaves out from the other handles of the queue on this
client, or uses the default.

Everything here decides without asking a server: :mod:`delayq._reliable.known_settings` does that.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypedDict

from delayq._durations import Duration, check_max_payload, microseconds
from delayq._engine import durability as durabilities
from delayq._reliable.keys import MOST_PARTITIONS, check_partitions
from delayq._reliable.limits import limit_text, parse_limit
from delayq._unset import UNSET, Unset
from delayq.backoff import Backoff, check_backoff
from delayq.errors import BadInput, ConfigurationError

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
    "former",
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
"""The fields of the hash on the server."""

Declared = Mapping[str, str]
"""Settings of a queue that somebody has given, as the server stores them, by their names."""

RETRIES = Backoff.exponential(base=1, factor=2, max=300, jitter=0.1)
"""The default of ``backoff``."""


MOST_KEPT = 10_000
"""The default of ``max_kept``, as in ``lua/reliable/include/kept.lua``."""


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


class StoredSettings:
    """The settings of a queue that its server has.

    Attributes:
        fields: Every field that is stored, as text.
        epoch: Changes whenever a setting does; ``0`` if none was ever stored.
        partitions: The number of partitions.
        former: Numbers of partitions that the queue had before, by which messages may still be
            placed.
        partitions_of_groups: The number of partitions by which groups are placed: the first one, as
            long as messages may still be placed by it, so that no group is ever split.
        is_whole: Whether every message is in the one partition.
        max_size: The number of live messages beyond which offers are refused; 0 for no limit.
        drops_letters: Whether dead letters are dropped at some age or number.
        keep_us: How long records of finished messages are kept, in microseconds; 0 for not at all.
    """

    __slots__ = (
        "drops_letters",
        "epoch",
        "fields",
        "former",
        "is_whole",
        "keep_us",
        "max_size",
        "partitions",
        "partitions_of_groups",
    )

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields: Mapping[str, str] = fields
        self.epoch: str = fields.get("epoch", UNDECLARED)
        self.partitions: int = _partitions(fields.get("partitions"))
        former = map(_number, fields.get("former", "").split(","))
        self.former: tuple[int, ...] = tuple(
            number for number in former if 0 < number <= MOST_PARTITIONS
        )
        # A queue that had more partitions than now was empty when it lost them.
        smaller = (number for number in self.former if number < self.partitions)
        self.partitions_of_groups: int = next(smaller, self.partitions)
        self.is_whole: bool = self.partitions == 1 and not self.former
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

    @property
    def is_new(self) -> bool:
        """Whether neither a message nor a setting was ever stored."""
        return "layout" not in self.fields

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

    def check(self, queue: str, declared: Declared) -> None:
        """Check that a handle may declare these settings.

        Raises:
            ConfigurationError: Others are stored.
        """
        differing = [
            f"{name} is {_shown(name, self.fields[name])} on the server, and "
            f"{_shown(name, text)} here"
            for name, text in declared.items()
            if self.fields.get(name, text) != text
        ]
        if differing:
            what = "it" if len(differing) == 1 else "them"
            raise ConfigurationError(
                f"queue {queue!r}: {'; '.join(differing)}: "
                f"call configure() to change {what}, or leave {what} out"
            )

    def missing(self, declared: Declared) -> dict[str, str]:
        """Return those of the declared settings of which none is stored."""
        return {name: text for name, text in declared.items() if name not in self.fields}

    def changed(self, changes: Declared, epoch: str) -> StoredSettings:
        """Return what to store for these changes, under a new epoch."""
        fields = {**self.fields, **changes, "layout": LAYOUT, "epoch": epoch}
        now, before = _partitions(fields.get("partitions")), self.partitions
        # Messages stay where they are: they are found by the number that placed them.
        if "partitions" in changes:
            former = dict.fromkeys(() if self.is_new else (*self.former, before))
            fields["former"] = ",".join(str(number) for number in former if number != now)
        return StoredSettings(fields)

    def share_of(self, partition: int) -> str:
        """Return the part of the queue's limit that one of its partitions has, as the server stores
        it; empty if no limit was declared.
        """
        limit, count = parse_limit(self.fields.get("limit")), self.partitions
        if limit is None:
            return self.fields.get("limit", "")
        # Those of a queue that is about to have fewer partitions get nothing more to do.
        place = partition % count

        def share(number: int | None) -> int | None:
            return None if number is None else number // count + (place < number % count)

        own = replace(limit, concurrency=share(limit.concurrency), rate=share(limit.rate))
        return limit_text(own, "limit", of_groups=False)

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

    def next_epoch(self, now_us: int) -> str:
        """Return an epoch for the next change: higher than this one, probably higher than any that
        was lost with the server's data, and different from that of any other change.
        """
        return str(max(_number(self.epoch), now_us) + 1 + secrets.randbelow(1_000_000))


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
        raise BadInput(f"{name} must be None or an int of at least 1, not {limit!r}")


def _number(text: object) -> int:
    """Return the whole number in a text; 0 if there is none, as another program may have left."""
    try:
        return int(text)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return 0


def _partitions(text: str | None) -> int:
    number = _number(text)
    return number if 1 <= number <= MOST_PARTITIONS else 1


def _most_kept(text: str | None) -> int:
    number = _number(text)
    return number if number > 0 else MOST_KEPT


def _shown(name: str, text: str) -> str:
    """Return a stored setting as a user would write it."""
    return _SHOWN.get(name, str)(text)


_SHOWN: dict[str, Callable[[str], str]] = {
    "max_size": lambda text: str(_number(text) or None),
    "expired": repr,
    "dedup_window": lambda text: f"{_number(text) / 1_000_000:g}",
    "keep_dead": lambda text: f"{_number(text) / 1_000_000:g}" if _number(text) else "None",
    "max_dead": lambda text: str(_number(text) or None),
    "keep": lambda text: f"{_number(text) / 1_000_000:g}",
    "limit": lambda text: repr(parse_limit(text)),
    "group_limit": lambda text: repr(parse_limit(text)),
}
