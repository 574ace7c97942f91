"""Runs coroutines one after the other in a task, each in a context of its own."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
    from contextvars import Context


def run_to_first_wait(coroutine: Coroutine[Any, Any, None]) -> Remainder | None:
    """Run a coroutine up to its first wait, and return what is left to await; None if it has ended.

    It runs in a copy of the current context, so that variables it sets do not outlive it. One task
    handles many messages, and a variable that one of them has set (a request id for the log, a
    span) must not be visible to the next. A task for each message would cost more than everything
    else in the worker.
    """
    context = copy_context()
    try:
        waits_for = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return Remainder(coroutine, context, waits_for)


class Remainder:
    """Awaits the remainder of a coroutine in its own context."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], context: Context, waits_for: Any
    ) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, run, waits_for = self._coroutine, self._context.run, self._waits_for
        try:
            while True:
                try:
                    answer = yield waits_for
                except BaseException as error:  # noqa: BLE001 - any error belongs to the coroutine
                    waits_for = run(coroutine.throw, error)
                else:
                    waits_for = run(coroutine.send, answer)
        except StopIteration:
            return
        finally:
            coroutine.close()
