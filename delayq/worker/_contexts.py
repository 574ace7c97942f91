"""Context variables of its own for each message, without a task of its own."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator


class InOwnContext:
    """Awaits a coroutine in a copy of the current context: what it sets does not outlive it.

    It runs in the same task. One task handles many messages, and what one has set (a request id for the log, a span) must
    not be found by the next one; a task for each message would cost more than the whole rest of the worker.
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
                except BaseException as error:  # noqa: BLE001 - it is the coroutine's, whatever it is
                    waits_for = run(coroutine.throw, error)
                else:
                    waits_for = run(coroutine.send, answer)
        except StopIteration:
            return
        finally:
            coroutine.close()
