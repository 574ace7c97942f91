"""The tasks that a client owns, and calls that are made at once."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterable

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_log = logging.getLogger("delayq")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Background:
    """Starts tasks and ends them all together.

    Not a task group: a client may be opened in one task and closed in another, as test fixtures and
    web servers do, and a failure in one queue must not end the others.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start ``work``, after the caller's next wait. If it raises, the error is logged.

        Callers keep a reference to the task, which the end of the task clears. An eager task
        factory would let the task end before the reference is stored, so the factory is bypassed.
        """
        # A context of its own: otherwise a connection opened during a web request would keep that
        # request's variables alive.
        loop, context = asyncio.get_running_loop(), contextvars.Context()
        task: asyncio.Task[Any] = asyncio.Task(
            work, loop=loop, name=f"delayq {name}", context=context
        )
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("background task %r failed", task.get_name(), exc_info=error)

    async def aclose(self) -> None:
        """Cancel the tasks that are still running, and wait until they have ended."""
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def gather_all(calls: Iterable[Awaitable[R]]) -> list[R]:
    """Wait for all calls, so that none continues behind the others, then raise the first error."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


@overload
async def gather_mixed(first: Awaitable[R], second: Awaitable[S], /) -> tuple[R, S]: ...


@overload
async def gather_mixed(
    first: Awaitable[R], second: Awaitable[S], third: Awaitable[T], /
) -> tuple[R, S, T]: ...


async def gather_mixed(*calls: Awaitable[Any]) -> tuple[Any, ...]:
    """Wait for calls with different results, as :func:`gather_all` does."""
    return tuple(await gather_all(calls))
