"""Several servers could answer: ask one after the other, and beside those that are slow."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delayq.errors import ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

T = TypeVar("T")

# The next one is asked beside those that have not answered for so long, seconds. Over a long round trip, a connection with TLS
# takes as long: then several are asked, and the first answer counts.
ASK_NEXT_AFTER = 0.5
# All together have so long, seconds: a little less than a call may take, so that their reasons are told.
WITHIN = 4.5


async def first_of(
    label: str,
    attempts: Iterable[tuple[str, Callable[[], Coroutine[Any, Any, T]]]],
    unused: Callable[[T], object] = lambda _: None,
) -> T:
    """Return what the first attempt that succeeds returns.

    The next attempt starts at once where one fails, and beside it where one takes longer than :data:`ASK_NEXT_AFTER`.

    Args:
        label: What they are attempts at, for the error.
        attempts: Each with the name of its server.
        unused: Is given what other attempts return besides.

    Raises:
        ServerRefused: Every server refuses.
        ServerUnavailable: At least one may serve later.
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
            done, _ = await asyncio.wait(under_way, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    found = task.result()
                except ServerError as error:
                    del under_way[task]
                    errors.append(error)
                else:
                    del under_way[task]
                    return found
        errors += [ServerUnavailable(f"{name} does not answer within {WITHIN:g} s") for name in under_way.values()]
        raise _together(label, errors)
    finally:
        for task in under_way:
            task.cancel()
            task.add_done_callback(partial(_discard, unused))


def _together(label: str, errors: list[ServerError]) -> ServerError:
    if len(errors) == 1:
        return errors[0]
    kind = ServerRefused if errors and all(isinstance(error, ServerRefused) for error in errors) else ServerUnavailable
    return kind(f"{label}: {'; '.join(dict.fromkeys(map(str, errors))) or 'there is nobody to ask'}")


def _discard(unused: Callable[[T], object], task: asyncio.Task[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        unused(task.result())
