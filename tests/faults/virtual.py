"""An event loop whose time is counted instead of measured, and whose chance is a seed: what runs in it runs the same again."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import math
import os
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis.utils

from delayq import _ids, _session
from delayq.timer import HashedWheelTimer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

EPOCH = 1_700_000_000
"""When each simulation begins, seconds since 1970."""
# So long a turn of the loop takes, seconds. With none, who goes round and round would never let time pass.
_TURN = 1e-6


class Process:
    """What stands for a process of an operating system: all that runs because of it dies with it."""

    def __init__(self, name: str) -> None:
        self.name: str = name

    def __repr__(self) -> str:
        return f"<Process {self.name}>"


class VirtualLoop(asyncio.BaseEventLoop):
    """Nothing waits here: when nobody has anything to do, it is at once the moment at which somebody has.

    Whatever is called belongs to the process that asked for the call; :meth:`halt` lets none of its calls happen any more.

    Attributes:
        process: The one that runs now, or None: the harness, the network, the server.
        complaints: What went wrong, and nobody was told.
    """

    def __init__(self, connect: Callable[[Any], Awaitable[Any]], until: float) -> None:
        """Args:
        connect: Makes connections, wherever they are to lead.
        until: What goes on for so long, seconds, will never end.
        """
        super().__init__()
        self._selector = self
        self._connect = connect
        self._now = 0.0
        self._until = until
        self._held: dict[Process, list[tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]]] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self.process: Process | None = None
        self.complaints: list[str] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(lambda _, told: self.complaints.append(f"{told['message']}: {told.get('exception')!r}"))

    # Time

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """What the loop asks of its selector: to wait until something happens."""
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self._now += max(timeout, _TURN)
        if self._now > self._until:
            raise AssertionError(f"it goes on for more than {self._until:g} s")
        return []

    def _process_events(self, _: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # Processes

    @contextmanager
    def within(self, process: Process | None) -> Iterator[None]:
        """What is called, or asked for, in this block belongs to a process."""
        before, self.process = self.process, process
        try:
            yield
        finally:
            self.process = before

    def halt(self, process: Process) -> None:
        """None of its calls happens any more: no ``finally`` runs, and nobody is told."""
        self._held.setdefault(process, [])

    def resume(self, process: Process) -> None:
        """What would have been called meanwhile is called now."""
        with self.within(process):
            for callback, args, context in self._held.pop(process):
                self.call_soon(callback, *args, context=context)

    def end_all(self, within: float) -> None:
        """Let the dead go on, and cancel everything: otherwise Python would end their coroutines wherever it finds them."""
        self._until = math.inf
        self.run_until_complete(self._end_all(within))
        self.run_until_complete(self.shutdown_asyncgens())

    async def _end_all(self, within: float) -> None:
        for process in list(self._held):
            self.resume(process)
        while tasks := [task for task in self._tasks if not task.done() and task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            if not (await asyncio.wait(tasks, timeout=within))[0]:
                raise AssertionError(f"{len(tasks)} tasks do not end: {tasks[0]}")

    def call_soon(  # type: ignore[override]  # that one's *args have names of types
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        return super().call_soon(self._call, self.process, callback, args, context, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        return super().call_at(when, self._call, self.process, callback, args, context, context=context)

    def _call(
        self, process: Process | None, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        if process is not None and process in self._held:
            self._held[process].append((callback, args, context))
            return
        before, self.process = self.process, process
        try:
            callback(*args)
        finally:
            self.process = before

    # What else asyncio asks of a loop

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        return await self._connect(protocol_factory)

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(work, loop, len(self._tasks), options)
        self._tasks.append(task)
        return task


class _Task(asyncio.Task[Any]):
    """A task that lies in sets where its number says. The others lie where their memory happens to be."""

    def __init__(self, work: Any, loop: asyncio.AbstractEventLoop, number: int, options: dict[str, Any]) -> None:
        self._number = number
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


@contextmanager
def governed(loop: VirtualLoop, seed: str) -> Iterator[None]:
    """In this block every clock is the loop's, and all chance comes from the seed."""
    secret = random.Random(f"secrets {seed}")
    state = random.getstate()

    def now_ns() -> int:
        return EPOCH * 1_000_000_000 + int(loop.time() * 1_000_000_000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", now_ns)
        patch.setattr(time, "time", lambda: now_ns() / 1_000_000_000)
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(os, "urandom", secret.randbytes)
        # What the module secrets is made of.
        patch.setattr(random, "_urandom", secret.randbytes)
        # It took its clock when it was defined; and one that is no timerfd's has the loop wake it.
        patch.setattr(_session, "HashedWheelTimer", lambda **options: HashedWheelTimer(clock=loop.time, **options))
        # The ids of earlier simulations lie in the future of this one.
        patch.setattr(_ids, "_state", (0, "", itertools.count()))
        # It reads a file for each connection to learn its own version.
        patch.setattr(redis.utils, "get_lib_version", lambda: "0")
        random.seed(f"chance {seed}")
        collecting = gc.isenabled()
        # It would end what nobody holds any more at a moment that depends on all that ran before.
        gc.disable()
        try:
            yield
        finally:
            random.setstate(state)
            if collecting:
                gc.enable()
