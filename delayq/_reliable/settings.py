"""The settings that a client uses for a reliable queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from delayq._durations import Duration, check_max_payload, microseconds
from delayq.backoff import Backoff
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

Expired = Literal["drop", "dead"]
WhenFull = Literal["raise", "wait"]

_SHORTEST_LEASE_US = 1_000

RETRIES = Backoff.exponential(base=1, factor=2, max=300, jitter=0.1)
"""The default of ``backoff``."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings with which one client uses a queue.

    Attributes:
        lease_us: Length of a worker's lease on a message, in microseconds.
        max_attempts: Number of attempts after which a message becomes a dead letter; 0 for no
            limit.
        expired: How to treat a message past its time to live: ``drop`` or ``dead``.
        remember_us: How long the id of a handled message still counts as a duplicate, in
            microseconds.
        max_size: Number of live messages beyond which offers are refused; 0 for no limit.
    """

    lease_us: int
    max_attempts: int
    expired: str
    remember_us: int
    max_size: int


@dataclass(frozen=True)
class Settings:
    """The settings of one queue; see :meth:`delayq.Client.reliable_queue`."""

    lease: Duration = 30.0
    max_attempts: int | None = 10
    backoff: Backoff = RETRIES
    dedup_window: Duration = 0.0
    expired: Expired = "drop"
    max_size: int | None = None
    when_full: WhenFull = "raise"
    max_payload: int = 512 * 1024
    durability: str = "memory"

    def policy(self) -> Policy:
        """Return the part of the settings that is sent to the server.

        Raises:
            BadInput: A setting is invalid.
        """
        lease_us = microseconds(self.lease, "lease")
        if lease_us < _SHORTEST_LEASE_US:
            raise BadInput(
                "lease must be at least 1 ms: otherwise a message is redelivered before its handler"
                " starts"
            )
        for name, count in (("max_attempts", self.max_attempts), ("max_size", self.max_size)):
            if count is not None and (
                isinstance(count, bool) or not isinstance(count, int) or count < 1
            ):
                raise BadInput(f"{name} must be None or an int of at least 1, not {count!r}")
        if not isinstance(self.backoff, Backoff):
            raise BadInput(
                f"backoff must be a delayq.Backoff, such as Backoff.fixed(5), not {self.backoff!r}"
            )
        check_max_payload(self.max_payload)
        if self.expired not in ("drop", "dead") or self.when_full not in ("raise", "wait"):
            raise BadInput(
                'expired must be "drop" or "dead", and when_full must be "raise" or "wait"'
            )
        return Policy(
            lease_us,
            self.max_attempts or 0,
            self.expired,
            microseconds(self.dedup_window, "dedup_window"),
            self.max_size or 0,
        )


def differing(there: Policy, wanted: Policy) -> str:
    """Name the settings in which two policies differ, with both values."""
    shown = [
        (name, show(getattr(there, field)), show(getattr(wanted, field)))
        for name, field, show in _SETTINGS
        if getattr(there, field) != getattr(wanted, field)
    ]
    return ", ".join(f"{name}={old} there, {name}={new} here" for name, old, new in shown)


def _seconds(us: int) -> str:
    return f"{us / 1_000_000:g}"


def _count(count: int) -> str:
    return str(count or None)


# The name of each setting, its field, and a function that formats its value.
_SETTINGS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("lease", "lease_us", _seconds),
    ("max_attempts", "max_attempts", _count),
    ("expired", "expired", repr),
    ("dedup_window", "remember_us", _seconds),
    ("max_size", "max_size", _count),
)
