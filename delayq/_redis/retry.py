"""Trying a call: when it may be made again, within which time, and at which of several servers."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delayq.errors import ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable

T = TypeVar("T")

# Redis 6.2 puts words of its own before the error of a command in a script:
# "Error running script (call to f_…): @user_script:7: -READONLY …".
_IN_SCRIPT = r"(?:Error running script \(call to f_[0-9a-f]{40}\): (?:@user_script: ?\d+: )*-?)?"
_CODES = (
    "BUSY",  # another script runs
    "LOADING",  # it reads its data
    # A replica: after a failover another server is the master, or this one soon will be again.
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",  # a slot is moving, and half of the call's keys with it
    "NOREPLICAS",
    "MISCONF",  # the disk is full
    "UNBLOCKED",  # a call that waited, on a server that became a replica
)
# At the start of the text: the names quoted further back may look like a code.
_NOT_NOW = re.compile(rf"{_IN_SCRIPT}(?:(?:{'|'.join(_CODES)})\b|max number of clients)")
# The number of parts in which a limit is counted. The loop runs at least this often before it ends.
_PARTS_OF_LIMIT = 50

# How long to wait for a reply before asking the next one as well, seconds. Over a long round
# trip, a TLS connection takes that long: then several are asked, and the first reply counts.
ASK_NEXT_AFTER = 0.5
# For all of them together, seconds: less than a call may take, to report the reasons.
FIRST_WITHIN = 4.5


def is_not_now(text: str) -> bool:
    """Tell whether this error, without ``-`` and ``ERR``, says that the call may succeed later."""
    return _NOT_NOW.match(text) is not None


def retry_delay(
    attempt: int, *, base: float = 0.02, longest: float = 5.0, lowest_share: float = 0.5
) -> float:
    """Return the seconds before the next try: doubled, and at random so that clients spread."""
    ceiling = min(longest, base * 2.0 ** min(attempt - 1, 30))
    return ceiling * random.uniform(lowest_share, 1.0)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than this, not counting delays of the loop.

    A limit for a reply says something about the server. If the loop itself is late, because a
    thousand clients are opened at once or the machine was paused, the reply may lie here unread,
    and each step of a greeting has to wait for its turn. So a delay counts as one part of the limit
    at most, however long it is.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def count(part: int) -> None:
        nonlocal timer
        if part < _PARTS_OF_LIMIT:
            timer = loop.call_later(seconds / _PARTS_OF_LIMIT, count, part + 1)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / _PARTS_OF_LIMIT, count, 1)
        try:
            yield
        finally:
            timer.cancel()


async def first_of(
    label: str,
    attempts: Iterable[tuple[str, Callable[[], Coroutine[Any, Any, T]]]],
    unused: Callable[[T], object] = lambda _: None,
) -> T:
    """Return the result of the first attempt that succeeds.

    The next one starts when one fails, or has taken :data:`ASK_NEXT_AFTER`.

    Args:
        label: The purpose of the attempts, for the error.
        attempts: The attempts, each with the name of its server.
        unused: Called with each further result.

    Raises:
        ServerRefused: Every server refuses.
        ServerUnavailable: At least one server may serve later.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + FIRST_WITHIN
    untried = iter(attempts)
    under_way: dict[asyncio.Task[T], str] = {}
    errors: list[ServerError] = []
    try:
        while True:
            following = next(untried, None)
            if following is not None:
                name, attempt = following
                under_way[loop.create_task(attempt(), name=f"delayq ask {name}")] = name
            remaining = give_up_at - loop.time()
            if not under_way or remaining <= 0:
                break
            done, _ = await asyncio.wait(
                under_way,
                timeout=remaining if following is None else min(remaining, ASK_NEXT_AFTER),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                del under_way[task]
                try:
                    return task.result()
                except ServerError as error:
                    errors.append(error)
        errors += [
            ServerUnavailable(f"{name} did not answer within {FIRST_WITHIN:g} s")
            for name in under_way.values()
        ]
        raise _joint_error(label, errors)
    finally:
        for task in under_way:
            task.cancel()
            task.add_done_callback(partial(_discard, unused))


def _joint_error(label: str, errors: list[ServerError]) -> ServerError:
    if len(errors) == 1:
        return errors[0]
    kind = (
        ServerRefused
        if errors and all(isinstance(error, ServerRefused) for error in errors)
        else ServerUnavailable
    )
    return kind(f"{label}: {'; '.join(dict.fromkeys(map(str, errors))) or 'no server is known'}")


def _discard(unused: Callable[[T], object], task: asyncio.Task[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        unused(task.result())
