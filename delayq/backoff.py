"""How long a failed message waits for its next attempt. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from delayq._checks import describe_value
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delayq._durations import Duration

# Longer waits are meaningless: a hundred years, seconds.
_LONGEST = 100 * 365.25 * 86_400


@dataclass(frozen=True, slots=True)
class Backoff:
    """Retry delays by attempt. Create one with one of the class methods.

    Attributes:
        delays: The delays after the first attempts, seconds. The last one applies to all later
            attempts, multiplied by ``factor`` for each.
        factor: The multiplier for each further delay: above 1 the delays grow, below 1 they shrink.
        max: The longest delay, seconds.
        jitter: The random part of a delay, 0 to 1: with 0.1, the delay is anything from 90 to 110
            %, so that messages that failed together do not come back together.
    """

    delays: tuple[float, ...]
    factor: float = 1.0
    max: float = _LONGEST
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not self.delays:
            raise BadInput("a backoff needs at least one delay")
        # The dataclass is frozen.
        object.__setattr__(self, "delays", tuple(map(_number, self.delays)))
        object.__setattr__(self, "max", _number(self.max))
        facts = (("factor", self.factor), ("max", self.max), ("jitter", self.jitter))
        for name, value in (*(("a delay", delay) for delay in self.delays), *facts):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value < 0
            ):
                raise BadInput(
                    f"{name} of a backoff must be a non-negative number, not"
                    f" {describe_value(value)}"
                )
        if self.jitter > 1:
            raise BadInput(f"jitter must be between 0 and 1, not {self.jitter!r}")

    @classmethod
    def fixed(cls, delay: Duration, *, jitter: float = 0.0) -> Backoff:
        """Wait the same delay every time: seconds or a timedelta."""
        return cls((_number(delay),), jitter=jitter)

    @classmethod
    def exponential(
        cls,
        base: Duration = 1.0,
        factor: float = 2.0,
        max: Duration = 3600.0,  # noqa: A002
        jitter: float = 0.1,
    ) -> Backoff:
        """Start with ``base`` and multiply by ``factor`` each time, up to ``max``: seconds or
        timedeltas.

        A factor below 1 shrinks delays.
        """
        return cls((_number(base),), factor=factor, max=_number(max), jitter=jitter)

    @classmethod
    def fibonacci(
        cls,
        base: Duration = 1.0,
        max: Duration = 3600.0,  # noqa: A002
        jitter: float = 0.1,
    ) -> Backoff:
        """Wait 1, 1, 2, 3, 5, 8 ... times ``base``, up to ``max``: seconds or timedeltas."""
        steps = [1, 1]
        # Enough steps to exceed any maximum.
        while len(steps) < 60:
            steps.append(steps[-1] + steps[-2])
        delays = tuple(_number(base) * step for step in steps)
        return cls(delays, max=_number(max), jitter=jitter)

    @classmethod
    def explicit(cls, delays: Iterable[Duration], *, jitter: float = 0.0) -> Backoff:
        """Wait these delays one after the other, and repeat the last one: seconds or timedeltas."""
        return cls(tuple(map(_number, delays)), jitter=jitter)

    def delay(self, attempt: int, chance: Callable[[], float] = random.random) -> float:
        """Return how long to wait after attempt number ``attempt`` has failed, seconds.

        Args:
            attempt: The number of the attempt, starting at 1.
            chance: Returns a random number from 0 to 1, for the jitter.
        """
        index = max(attempt, 1) - 1
        beyond = index - (len(self.delays) - 1)
        delay = self.delays[min(index, len(self.delays) - 1)]
        if beyond > 0 and self.factor != 1 and delay:
            # Use logarithms, because a power with a large attempt exceeds what a float can hold.
            exponent = math.log(delay) + beyond * (
                math.log(self.factor) if self.factor else -math.inf
            )
            delay = math.exp(min(exponent, math.log(_LONGEST)))
        delay = min(delay, self.max)
        return min(delay * (1 + self.jitter * (2 * chance() - 1)), self.max)


def _number(duration: Duration) -> float:
    """Return a duration in seconds; anything else is returned as it is, to be refused."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def check_backoff(backoff: object) -> None:
    """Raise :class:`~delayq.BadInput` unless it is a :class:`Backoff`."""
    if not isinstance(backoff, Backoff):
        raise BadInput(
            f"backoff must be a delayq.Backoff, such as Backoff.fixed(5), not {backoff!r}"
        )
