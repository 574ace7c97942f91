"""Asks several servers of which any could answer: one by one, or side by side if one is slow."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delayq.errors import ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

T = TypeVar("T")

# How long to wait for an answer before asking the next one as well, seconds. Over a long round
# trip, a TLS connection takes that long: then several are asked, and the first answer counts.
ASK_NEXT_AFTER = 0.5
# For all of them together, seconds: less than a call may take, to report the reasons.
WITHIN = 4.5


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
    give_up_at = loop.time() + WITHIN
    waiting = iter(attempts)
    under_way: dict[asyncio.Task[T], str] = {}
    errors: list[ServerError] = []
    try:
        while True:
            following = next(waiting, None)
            if following is not None:
                name, attempt = following
                under_way[loop.create_task(attempt(), name=f"delayq ask {name}")] = name
            left = give_up_at - loop.time()
            if not under_way or left <= 0:
                break
            patience = left if following is None else min(left, ASK_NEXT_AFTER)
            done, _ = await asyncio.wait(
                under_way, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                del under_way[task]
                try:
                    return task.result()
                except ServerError as error:
                    errors.append(error)
        errors += [
            ServerUnavailable(f"{name} did not answer within {WITHIN:g} s")
            for name in under_way.values()
        ]
        raise _together(label, errors)
    finally:
        for task in under_way:
            task.cancel()
            task.add_done_callback(partial(_discard, unused))


def _together(label: str, errors: list[ServerError]) -> ServerError:
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
