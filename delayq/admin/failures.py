"""Tells whether many attempts of a queue fail, before its messages become dead letters, and why."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from delayq.admin.letters import LetterFacts, cause_of
from delayq.errors import ServerRefused
from delayq.stats import Activity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delayq.admin.reliable import ReliableInspector

WAVE_MINUTES = 3
"""Over how many minutes the failures of a wave are counted, with the current one."""
# From how many failed attempts in this time, and from which share of all attempts, a queue fails.
_LEAST_FAILED = 10
_FAILED_SHARE = 0.1
# The number of dead letters that are read for their errors.
_LETTERS = 25


def is_wave(handled: int, failed: int) -> bool:
    """Return whether a tenth or more of the attempts failed, and at least ten of them."""
    return failed >= _LEAST_FAILED and failed >= _FAILED_SHARE * (failed + handled)


class Wave(NamedTuple):
    """Many failed attempts within the last minutes.

    Attributes:
        text: Their rate and the most frequent error, in words.
        error: The type of that error; empty if none is known.
        is_deadly: Whether after most of them, the message died.
    """

    text: str
    error: str
    is_deadly: bool


def describe_wave(retried: int, dead: int, seconds: float, errors: Iterable[str]) -> Wave:
    """Return a wave of failures within some seconds, and the most frequent of some errors."""
    count, name = max((retried, "retries"), (dead, "dead letters"))
    rate = count / seconds
    if rate < 1:
        text = f"{60 * rate:,.0f} {name} a minute"
    else:
        text = f"{rate:,.0f} {name} a second" if rate >= 10 else f"{rate:.1f} {name} a second"
    kinds = Counter(cause_of(error, "", "type") for error in errors if error)
    error = kinds.most_common(1)[0][0] if kinds else ""
    return Wave(f"{text}: {error}" if error else text, error, dead > retried)


async def last_errors(inspector: ReliableInspector, *, of_dead: bool) -> list[str]:
    """Return the last errors of the newest dead letters if ``of_dead``, otherwise of some messages
    that wait for another attempt, each in one line; of the others if there are none.
    """
    read = [_errors_of_failed, _errors_of_dead]
    for errors_of in reversed(read) if of_dead else read:
        if errors := await errors_of(inspector):
            return errors
    return []


async def _errors_of_failed(inspector: ReliableInspector) -> list[str]:
    failed = await inspector.call_each(lambda store: store.failed("0"))
    return [error for _, part in failed for error in part.values()]


async def _errors_of_dead(inspector: ReliableInspector) -> list[str]:
    return [letter.error for letter in await _newest_letters(inspector)]


async def newest_deaths(inspector: ReliableInspector) -> Counter[str]:
    """Count the newest dead letters by the type of their error, or else by their reason."""
    letters = await _newest_letters(inspector)
    return Counter(cause_of(letter.error, letter.reason, "type") for letter in letters)


async def _newest_letters(inspector: ReliableInspector) -> list[LetterFacts]:
    count = max(1, _LETTERS // len(inspector.stores))
    letters = await inspector.call_each(lambda store: store.newest_dead(0, count))
    return [LetterFacts.of(letter) for part in letters for letter in part]


async def find_wave(inspector: ReliableInspector, *, with_error: bool = True) -> Wave | None:
    """Return that many attempts have failed within the last minutes; None if they have not.

    ``with_error`` is whether the most frequent error is looked for and named, too.
    """
    try:
        minutes = await inspector.activity("m", WAVE_MINUTES)
    except ServerRefused:
        # The user may not know.
        return None
    sums = Activity.total(minutes)
    if not is_wave(sums.handled, sums.failed + sums.dead):
        return None
    errors: list[str] = []
    now = time.time()
    # The user may not read errors, or not ask for the server's time.
    with suppress(ServerRefused):
        if with_error:
            errors = await last_errors(inspector, of_dead=sums.dead > sums.failed)
    with suppress(ServerRefused):
        now = (await inspector.now()).timestamp()
    # The current minute has not ended.
    elapsed = max(60.0 * (WAVE_MINUTES - 1), now - minutes[0].start.timestamp())
    return describe_wave(sums.failed, sums.dead, min(elapsed, sums.seconds), errors)
