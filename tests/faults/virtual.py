"""An event loop with simulated time and randomness from a seed: every run is repeatable."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import os
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis.utils

from delayq._engine import session as _session
from delayq._reliable import ids as _ids
from delayq._timer.timer import HashedWheelTimer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

EPOCH = 1_700_000_000
"""The time at which each simulation begins, seconds since 1970."""
# How long a turn of the loop takes, seconds. If it took none, a busy loop would never let time
# pass.
_TURN = 1e-6


class Process:
    """An operating-system process: everything that runs because of it dies with it."""

    def __init__(self, name: str) -> None:
        self.name: str = name

    def __repr__(self) -> str:
        return f"<Process {self.name}>"


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that never waits: it jumps to the next moment at which there is work.

    Every callback belongs to the process that scheduled it; :meth:`halt` stops those of a process.
    """

    def __init__(self, connect: Callable[[Any], Awaitable[Any]], until: float) -> None:
        super().__init__()
        self._selector = self
        self._connect = connect
        self._now = 0.0
        self._until = until
        self._held: dict[
            Process, list[tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]]
        ] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self.process: Process | None = None
        self.complaints: list[str] = []
        self.set_task_factory(self._new_task)
        self.set_exception_handler(
            lambda _, told: self.complaints.append(f"{told['message']}: {told.get('exception')!r}")
        )

    # Time

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the time instead of waiting for events, as the loop asks of its selector."""
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
        """Assign everything that is called or scheduled in this block to a process."""
        before, self.process = self.process, process
        try:
            yield
        finally:
            self.process = before

    def halt(self, process: Process) -> None:
        """Stop all callbacks of a process: no ``finally`` runs, and no peer is notified."""
        self._held.setdefault(process, [])

    def resume(self, process: Process) -> None:
        """Run the callbacks of a process that were held back, and let it continue."""
        with self.within(process):
            for callback, args, context in self._held.pop(process):
                self.call_soon(callback, *args, context=context)

    def end_all(self, within: float) -> None:
        """Revive the dead and cancel everything, so that Python ends no coroutine at random."""
        self._until = math.inf
        self.run_until_complete(self._end_all(within))
        self.run_until_complete(self.shutdown_asyncgens())

    async def _end_all(self, within: float) -> None:
        for process in list(self._held):
            self.resume(process)
        while tasks := [
            task for task in self._tasks if not task.done() and task is not asyncio.current_task()
        ]:
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
        return super().call_at(
            when, self._call, self.process, callback, args, context, context=context
        )

    def _call(
        self,
        process: Process | None,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        if process is not None and process in self._held:
            self._held[process].append((callback, args, context))
            return
        before, self.process = self.process, process
        try:
            callback(*args)
        finally:
            self.process = before

    # Other things that asyncio asks of a loop

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        return await self._connect(protocol_factory)

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        task = _Task(work, loop, len(self._tasks), options)
        self._tasks.append(task)
        return task


class _Task(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, not on its memory address."""

    def __init__(
        self, work: Any, loop: asyncio.AbstractEventLoop, number: int, options: dict[str, Any]
    ) -> None:
        self._number = number
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


@contextmanager
def governed(loop: VirtualLoop, seed: str) -> Iterator[None]:
    """Make every clock in this block the loop's, and all randomness come from the seed."""
    secret = random.Random(f"secrets {seed}")
    state = random.getstate()

    def now_ns() -> int:
        return EPOCH * 1_000_000_000 + int(loop.time() * 1_000_000_000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", now_ns)
        patch.setattr(time, "time", lambda: now_ns() / 1_000_000_000)
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(os, "urandom", secret.randbytes)
        # Clients tell the server in which process they are.
        patch.setattr(os, "getpid", lambda: 1)
        # The source of randomness of the ``secrets`` module.
        patch.setattr(random, "_urandom", secret.randbytes)
        # Its default clock was fixed when it was defined. With another clock it uses the loop's
        # timer instead of a timerfd.
        patch.setattr(
            _session,
            "HashedWheelTimer",
            lambda *wheel: HashedWheelTimer(*wheel, clock=loop.time),
        )
        # The ids of earlier simulations are in the future of this one.
        for name, none in (("_until_ns", 0), ("_ids", iter(())), ("_upper", 0)):
            patch.setattr(_ids, name, none)
        # It reads a file for each connection to learn its own version.
        patch.setattr(redis.utils, "get_lib_version", lambda: "0")
        random.seed(f"chance {seed}")
        collecting = gc.isenabled()
        # The collector would run at moments that depend on everything that ran before.
        gc.disable()
        try:
            yield
        finally:
            random.setstate(state)
            if collecting:
                gc.enable()
