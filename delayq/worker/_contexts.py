"""Gives each message its own context variables without giving it its own task."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator


class InOwnContext:
    """Awaits a coroutine in a copy of the current context, so that variables it sets do not outlive
    it.

    One task handles many messages, and a variable that one of them has set (a request id for the
    log, a span) must not be visible to the next. A task for each message would cost more than
    everything else in the worker.
    """

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, run = self._coroutine, copy_context().run
        try:
            waits_for = run(coroutine.send, None)
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
