"""Tasks in tests: run at once, or recorded."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from anyio import to_thread

from delayq._background import running_loop
from delayq._durations import seconds
from delayq._functions import annotation_of, is_kind, name_of, show
from delayq._reliable.ids import new_id
from delayq._reliable.offer import Offer
from delayq._reliable.offer_encoder import OfferEncoder
from delayq._reliable.settings import DEFAULTS
from delayq.codecs.json import result_codec
from delayq.errors import ConfigurationError, NoResult, ResultTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from delayq._durations import Duration
    from delayq.tasks import Call, Task, Tasks

R = TypeVar("R")


@contextmanager
def recorded(*tasks: Tasks) -> Iterator[list[Offer[Call]]]:
    """Record the calls of these tasks that are offered in the block. Nothing is sent or called.

    They are checked, written as JSON, and read again, as on their way to a worker. Their results
    never come: ``result()`` raises :class:`~delayq.ResultTimeout` at once.

    Returns:
        The calls, with their options: ``[offer.value.task, offer.value.arguments, offer.delay]``.
    """
    with _replace_bindings(tasks, None) as offers:
        yield offers


@contextmanager
def eager(
    *tasks: Tasks, provide: Mapping[Any, object] | None = None
) -> Iterator[list[Offer[Call]]]:
    """Run the calls of these tasks that are offered in the block, at once, whatever their delay.

    ``offer()`` and ``offer_many()`` return when the functions have returned, and raise their
    errors; there are no retries. ``result()`` returns what a function has returned. Scheduled calls
    are only recorded. Arguments are checked, written as JSON, and read again, as on their way to a
    worker.

    Args:
        *tasks: The tasks. They need not be bound to a client.
        provide: The objects for the parameters that a worker would fill, by type.

    Returns:
        The calls, as :func:`recorded`.
    """
    with _replace_bindings(tasks, provide or {}) as offers:
        yield offers


@contextmanager
def _replace_bindings(
    groups: Iterable[Tasks], provided: Mapping[Any, object] | None
) -> Iterator[list[Offer[Call]]]:
    offers: list[Offer[Call]] = []
    with ExitStack() as stack:
        for tasks in groups:
            recorder = _Recorder(tasks, offers, provided)
            tasks.add_binding(recorder, recorder)
            stack.callback(tasks.unbind, recorder)
        yield offers


class _Recorder:
    """Takes the place of a client and its queue."""

    is_sync = False

    def __init__(
        self, tasks: Tasks, offers: list[Offer[Call]], provided: Mapping[Any, object] | None
    ) -> None:
        self._tasks = tasks
        self._offers = offers
        self._provided = provided
        self._ids: set[str] = set()
        self._results: dict[str, Any] = {}
        self._encoder = OfferEncoder(tasks.codec, DEFAULTS.options["max_payload"] or 0)

    def queue(self) -> Any:
        return self

    async def offer(self, call: Call, *, durability: str | None = None, **options: Any) -> str:
        (id_,) = await self.offer_many([Offer(call, **options)], durability=durability)
        return id_

    async def offer_many(
        self, offers: Iterable[Offer[Call]], *, durability: str | None = None
    ) -> list[str]:
        del durability
        recorded = self._record(list(offers))
        for id_, call in recorded:
            if self._provided is not None:
                run, is_coroutine = self._prepare(call, self._provided)
                result = run() if is_coroutine else await to_thread.run_sync(run)
                self._results[id_] = await result if inspect.isawaitable(result) else result
        return [id_ for id_, _ in recorded]

    async def result_payload(self, id: str, timeout: Duration | None = None) -> bytes | None:  # noqa: A002
        if id in self._results:
            result = self._results[id]
            return None if result is None else result_codec(self._tasks.codec).encode(result)
        if id in self._ids:
            raise ResultTimeout(id, 0.0 if timeout is None else seconds(timeout, "timeout"))
        raise NoResult(id, keeps=True)

    def run(self, work: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
        if running_loop() is None:
            return asyncio.run(work(self))
        # One loop cannot run inside another.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(copy_context().run, asyncio.run, work(self)).result()

    async def schedule(self, name: str, *, value: Call, **options: Any) -> datetime:
        del name
        fields = Offer.__dataclass_fields__
        self._record([Offer(value, **{key: options[key] for key in options if key in fields})])
        return datetime.now(UTC)

    def _record(self, offers: Sequence[Offer[Call]]) -> list[tuple[str, Call]]:
        """Record offers, and return their ids, and the calls as a worker reads them."""
        messages = self._encoder.messages(offers)
        codec = self._tasks.codec
        calls = [codec.decode(codec.encode(offer.value)) for offer in offers]
        self._offers += [
            replace(offer, value=call) for offer, call in zip(offers, calls, strict=True)
        ]
        ids = [message.id or new_id() for message in messages]
        self._ids.update(ids)
        return [*zip(ids, calls, strict=True)]

    def _prepare(
        self, call: Call, provided: Mapping[Any, object]
    ) -> tuple[Callable[[], Any], bool]:
        """Return what makes a call, and whether that returns a coroutine."""
        task = self._tasks.by_name[call.task]
        injected = {
            parameter.name: _provide(task, parameter.name, provided)
            for parameter in task.arguments.injected
        }
        return (
            partial(task.arguments.call, call.arguments, injected),
            is_kind(inspect.iscoroutinefunction, task.function),
        )


def _provide(task: Task[Any, Any], parameter: str, provided: Mapping[Any, object]) -> object:
    kind = annotation_of(task.function, parameter)
    for key in (kind, get_origin(kind)):
        if key in provided:
            return provided[key]
    raise ConfigurationError(
        f"{name_of(task.function)}() asks for a {show(kind)}: pass eager(...,"
        f" provide={{{show(kind)}: ...}})"
    )
