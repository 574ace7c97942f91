"""Handles one message: runs the handler and everything around it, and acts on the outcome."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from logging import DEBUG, ERROR, INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delayq import tasks
from delayq._durations import seconds
from delayq._engine.leases import HANDLED_TWICE
from delayq._functions import UNSET
from delayq._logging import log
from delayq._reliable.failures import (
    Interrupted,
    RetryAfter,
    RetryRules,
    Snooze,
    describe,
    instruction_of,
    is_instruction,
)
from delayq._reliable.message import Message
from delayq.errors import (
    BadArguments,
    DecodeError,
    DelayqError,
    LeaseLost,
    MessageCancelled,
    ServerError,
    ServerUnavailable,
    UnknownTask,
)
from delayq.worker._injection import Scope
from delayq.worker._listeners import Bury, decide_retry
from delayq.worker._threads import NotBegun

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from types import TracebackType

    from delayq._durations import Duration
    from delayq._engine.caller_queue import Numbered
    from delayq._reliable.consumer import WorkerMessage, WorkerPort
    from delayq._reliable.replies import Claim
    from delayq.tasks import Call
    from delayq.tasks._tasks import TaskOptions
    from delayq.worker._injection import Dependency
    from delayq.worker._listeners import Listener
    from delayq.worker._threads import Threads

    Claimed = Numbered[Claim]
    Middleware = Callable[[Message[Any], "CallNext"], Awaitable[None]]

CallNext = Callable[[], Awaitable[None]]
"""The second argument of a middleware: runs the rest, the handler last."""

# How long to wait for the next message if the system cannot provide a thread, in seconds.
_NO_THREAD_PAUSE = 1.0
# The error of a dead letter whose last attempt ended without a result.
_SPENT = "it had no attempt left: its last one ended with its worker, or its lease was lost"
CALLERS = (str(Path(__file__).parent), str(Path(tasks.__file__).parent))
"""The folders of the packages that call handlers."""


class Handling:
    """Handles the messages of one listener."""

    def __init__(
        self,
        listener: Listener,
        middleware: Sequence[Middleware],
        dependencies: Mapping[Any, Dependency],
        instances: Mapping[Any, Any],
        threads: Threads,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Args:
        listener: The listener whose messages are handled.
        middleware: The middleware around the handler, outermost first.
        dependencies: How dependencies are made, by type.
        instances: The dependencies that exist for the whole run, by type.
        threads: Runs handlers that are not coroutine functions.
        is_cancelled: Returns whether it is the worker that has cancelled its handlers.
        """
        self._queue = listener.settings.queue
        self._timeout = listener.settings.timeout
        self._listener = listener
        self._plan = listener.plan
        self._middleware = tuple(reversed(middleware))
        self._dependencies = dependencies
        self._instances = instances
        self._threads = threads
        self._is_cancelled = is_cancelled
        # Each message would pay for asking again.
        self._logs_success = logging.getLogger("delayq").isEnabledFor(DEBUG)
        self._is_bare = self._plan.is_async and not (middleware or self._plan.injected)

    async def handle(self, message: WorkerMessage[Any]) -> None:
        """Handle a message and settle it.

        Raises only errors that end the task: cancellation, and ``KeyboardInterrupt``.
        """
        try:
            # As ``async with message``, whose methods are called directly where nothing waits.
            task = message.begin() or await self._enter(message)
            if task is None:
                return
            try:
                cancellations, failure = task.cancelling(), None
                try:
                    self._note_success(message, await self._call(message))
                except BaseException as error:
                    if self._ends_task(error, message):
                        raise
                    failure = error
                if failure is not None or task.cancelling() > cancellations:
                    await self._end_failed(message, failure, task, cancellations)
            except BaseException as error:
                if not await message.__aexit__(type(error), error, error.__traceback__):
                    raise
            else:
                if not message.end():
                    await message.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - no error of a single message ends the worker
            self._log_unsettled(message, error)

    async def _enter(self, message: WorkerMessage[Any]) -> asyncio.Task[object] | None:
        """Enter the block of a message that cannot be begun at once, and return the current task;
        return None if the message is not to be begun at all.
        """
        if message.is_expired:
            # The next claim expires it.
            await settle(message, message.give_back_unbegun)
            return None
        await message.__aenter__()
        return asyncio.current_task()

    def _note_success(self, message: WorkerMessage[Any], result: object) -> None:
        """Log that a message was handled, and have its result stored with the acknowledgement, if
        its queue keeps results.

        One that cannot be stored does not make the message fail: its work has been done, and would
        be done again.
        """
        if self._logs_success:
            self._log(DEBUG, message, "was handled in attempt %d", message.attempt)
        if result is None:
            return
        try:
            message.keep_result(result)
        except Exception as error:  # noqa: BLE001 - a codec of the user's raises anything
            # The text of a foreign error may quote the result, which may be private.
            is_ours = isinstance(error, DelayqError)
            reason = str(error) if is_ours else f"its codec raised {type(error).__name__}"
            text = "was handled, but its result, a %s, is not stored, and reads as None: %s"
            self._log(ERROR, message, text, type(result).__name__, reason)

    async def _end_failed(
        self,
        message: WorkerMessage[Any],
        failure: BaseException | None,
        task: asyncio.Task[object],
        cancellations: int,
    ) -> None:
        """Act on the error of a handler, or undo its cancellation of its task, which has other
        messages to handle. There were ``cancellations`` before.
        """
        if task.cancelling() > cancellations and not self._must_end(message):
            try:
                # A cancellation that has not been delivered yet arrives here.
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if self._must_end(message):
                    raise
            while task.cancelling() > cancellations and not self._must_end(message):
                task.uncancel()
        if failure is not None:
            await self._fail(message, failure)

    async def bury(self, message: WorkerMessage[Any], reason: str, error: str) -> None:
        """Make a message a dead letter without calling the handler. Raises as :meth:`handle`."""
        try:
            async with message:
                self._log(ERROR, message, "became a dead letter: %s", error)
                await settle(message, partial(message.bury, reason, error))
        except Exception as failure:  # noqa: BLE001 - as above
            self._log_unsettled(message, failure)

    def _log_unsettled(self, message: WorkerMessage[Any], error: Exception) -> None:
        if isinstance(error, MessageCancelled):
            self._log(INFO, message, "was cancelled")
        elif isinstance(error, LeaseLost):
            name = f"message {message.id!r}"
            id, attempt = message.id, message.attempt  # noqa: A001
            log(WARNING, self._queue, HANDLED_TWICE, name, message=id, attempt=attempt)
        elif isinstance(error, DelayqError):
            self._log(WARNING, message, "could not be settled and will be redelivered: %s", error)
        else:
            text = "could not be settled and will be redelivered when its lease ends"
            self._log(ERROR, message, text, error=error)

    async def _bury_undecodable(self, message: WorkerMessage[Any], error: BaseException) -> None:
        """Make a message a dead letter: no later attempt could read it either."""
        reason, text = _undecodable(error)
        self._log(ERROR, message, "cannot be decoded and became a dead letter: %s", text)
        message.report_failure(error)
        await settle(message, partial(message.bury, reason, text))

    def _log(
        self,
        level: int,
        message: WorkerMessage[Any],
        text: str,
        *args: object,
        error: BaseException | None = None,
    ) -> None:
        task = self._listener.task
        log(
            level,
            self._queue,
            f"message %r {text}" if task is None else f"message %r, a call of %r, {text}",
            *((message.id,) if task is None else (message.id, task)),
            *args,
            message=message.id,
            attempt=message.attempt,
            task=task,
            error=error,
        )

    def _time_limit(self, message: WorkerMessage[Any]) -> float | None:
        """Return how long handling a message may take: its own timeout, or the listener's."""
        timeout = message.timeout
        return self._timeout if timeout is None else timeout

    async def _within(
        self, seconds: float, call: Awaitable[Any], timeout: asyncio.Timeout | None = None
    ) -> Any:
        """Await a call for at most ``seconds``; if ``timeout`` is given, that decides when."""
        timeout = asyncio.timeout(seconds) if timeout is None else timeout
        try:
            async with timeout:
                result = await call
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise TimeoutError(f"timed out after {seconds:g} s") from error.__cause__
        if timeout.expired():
            raise TimeoutError(f"timed out after {seconds:g} s, and ignored its cancellation")
        return result

    def _ends_task(self, error: BaseException, message: WorkerMessage[Any]) -> bool:
        """Return whether an error ends the task. Any other concerns only its message, even if the
        handler has cancelled its own task.
        """
        return isinstance(error, KeyboardInterrupt) or (
            isinstance(error, asyncio.CancelledError) and self._must_end(message)
        )

    def _must_end(self, message: WorkerMessage[Any]) -> bool:
        return message.is_lost or self._is_cancelled()

    async def _give_back_and_pause(self, message: WorkerMessage[Any], error: NotBegun) -> None:
        """Give back a message whose handler could not begin, and pause before the next one."""
        text = "is given back: cannot start a thread for its handler: %s"
        self._log(ERROR, message, text, error)
        message.report_failure(error)
        await settle(message, message.give_back_unbegun)
        await asyncio.sleep(_NO_THREAD_PAUSE)

    def _call(self, message: WorkerMessage[Any]) -> Awaitable[Any]:
        """Decode a message, and return the call that handles it, within its time limit."""
        # Decoding tells whether the message has options.
        value, timeout = message.value, self._timeout
        if message.has_options:
            timeout = self._time_limit(message)
        # The most frequent case, and the one whose speed counts.
        call: Awaitable[Any] = (
            self._listener.handler(message if self._plan.takes_message else value)
            if self._is_bare
            else self._around(message, value)
        )
        return call if timeout is None else self._within(timeout, call)

    async def _around(self, message: WorkerMessage[Any], value: Any) -> Any:
        if not self._middleware:
            return await self._handle_value(message, value)
        result: Any = None

        async def handle() -> None:
            nonlocal result
            result = await self._handle_value(message, value)

        call: Callable[[], Awaitable[None]] = handle
        for middleware in self._middleware:
            call = partial(middleware, message, call)
        await call()
        return result

    async def _handle_value(self, message: WorkerMessage[Any], value: Any) -> Any:
        first = message if self._plan.takes_message else value
        return await self._call_handler(first, {Message: message, **self._instances}, [message])

    async def _call_handler(
        self, first: Any, instances: dict[Any, Any], messages: Sequence[WorkerMessage[Any]]
    ) -> Any:
        """Call the handler for these messages.

        Args:
            first: Its first argument.
            instances: The dependencies that exist, from which the other arguments are filled.
            messages: The messages that it handles.
        """
        plan, handler = self._plan, self._listener.handler
        if not plan.injected:
            return await (
                handler(first)
                if plan.is_async
                else self._in_thread(partial(handler, first), messages)
            )
        failure: BaseException | None = None
        result: Any = None
        async with AsyncExitStack() as stack:
            try:
                scope = Scope(self._dependencies, instances, stack)
                arguments = await scope.fill(plan.injected)
                result = await (
                    handler(first, **arguments)
                    if plan.is_async
                    else self._in_thread(partial(handler, first, **arguments), messages)
                )
            except BaseException as error:
                failure = error
                raise
        if failure is not None:
            # A dependency has not raised the error again, but the handler has failed all the same.
            raise failure
        return result

    async def _in_thread(
        self, call: Callable[[], Any], messages: Sequence[WorkerMessage[Any]]
    ) -> Any:
        def on_return() -> None:
            for message in messages:
                message.handler_ended()

        def on_abandon() -> Callable[[], None]:
            # Cancelled messages keep their slots until the function returns.
            for message in messages:
                message.handler_outlives()
            return on_return

        result = await self._threads.run(call, on_abandon)
        # A decorator may have turned a coroutine function into a plain one.
        return await result if inspect.isawaitable(result) else result

    async def _fail(self, message: WorkerMessage[Any], error: BaseException) -> None:
        if isinstance(error, NotBegun):
            await self._give_back_and_pause(message, error)
            return
        if not message.is_decoded:
            await self._bury_undecodable(message, error)
            return
        message.report_failure(error)
        error.with_traceback(below_the_worker(error.__traceback__))
        outcome, call = self._outcome_of(message, error)
        instruction = instruction_of(error) if is_instruction(error) else None
        if instruction is not None:
            text = "was answered in attempt %d with %s: %s"
            kind = type(instruction).__name__
            self._log(INFO, message, text, message.attempt, kind, instruction)
        else:
            text = "failed in attempt %s, and %s"
            self._log(ERROR, message, text, _attempt_text(message), outcome, error=error)
        await settle(message, call)

    def _outcome_of(
        self, message: WorkerMessage[Any], error: BaseException
    ) -> tuple[str, Callable[[], Awaitable[None]]]:
        """Decide what becomes of a message whose handler has failed, by the error or by what the
        listener says about it.

        Returns:
            What becomes of it, in words, and the call that does it.
        """
        if message.is_done:
            return "had been settled before", _do_nothing
        decision = decide_retry(error, self._listener.settings.on_error)
        # An instruction is stored by its reason, and no error is.
        is_error = not is_instruction(error)
        if isinstance(decision, Bury):
            stored_error = error if is_error else ""
            call = partial(message.bury, decision.reason, stored_error)
            return f"is a dead letter now: {decision.reason}", call
        match decision.later:
            case Interrupted() as interruption:
                return "goes back", partial(message.interrupt, interruption)
            case Snooze(delay=delay):
                return f"waits for {_delay_text(delay)}", partial(message.snooze, delay)
            case RetryAfter(delay=delay, reason=reason):
                call = partial(message.nack, delay, error if is_error else reason)
            case None:
                delay = (decision.backoff or message.backoff).delay(message.attempt)
                call = partial(message.nack, delay, error)
        return _retry_text(message, delay), call


class TaskHandling:
    """Handles the messages of one queue, each as its task says."""

    def __init__(
        self,
        port: WorkerPort,
        handlings: Mapping[str, Handling],
        unreadable: Handling,
        task_options: Mapping[str, TaskOptions],
    ) -> None:
        """Args:
        port: Claims the messages. The server then gives up a message only after the most
            attempts that any of the tasks has.
        handlings: How calls are handled, by the name of the task.
        unreadable: How the other messages are handled.
        task_options: The retries of the tasks, by name.
        """
        self._handlings = handlings
        self._unreadable = unreadable
        # By the name of the task.
        self._retry_rules = {
            name: RetryRules(
                port.policy.max_attempts
                if options.max_attempts is UNSET
                else options.max_attempts or 0,
                options.backoff or port.backoff,
            )
            for name, options in task_options.items()
        }
        limits = [rules.max_attempts for rules in self._retry_rules.values()]
        port.set_max_attempts(max(limits) if all(limits) else 0)

    def handle(self, message: WorkerMessage[Call]) -> Coroutine[Any, Any, None]:
        """Handle a message and settle it, as :meth:`Handling.handle` does."""
        try:
            task = message.value.task
        except DecodeError:
            return self._unreadable.handle(message)
        message.retry_by(self._retry_rules[task])
        handling = self._handlings[task]
        # Its body need not be parsed for the limit in the first attempt.
        max_attempts = message.max_attempts if message.attempt > 1 else None
        if max_attempts and message.counted_attempts > max_attempts:
            return handling.bury(message, "attempts", _SPENT)
        return handling.handle(message)


async def _do_nothing() -> None:
    """Leave a message as it is."""


def _retry_text(message: WorkerMessage[Any], delay: Duration) -> str:
    """Return what becomes of a message that is to be retried after a delay."""
    if message.is_lost:
        return "has lost its lease"
    if message.is_last_attempt:
        return "is a dead letter now"
    if seconds(delay, "delay") > message.lives_for:
        return "expires before it would be retried"
    return f"is retried in {_delay_text(delay)}"


def _attempt_text(message: WorkerMessage[Any]) -> str:
    """Return the number of an attempt, and how many there are at most, such as ``3 of 10``."""
    max_attempts = message.max_attempts
    if max_attempts is None:
        return str(message.attempt)
    # Those that do not count come on top.
    return f"{message.attempt} of {max_attempts + message.attempt - message.counted_attempts}"


def _delay_text(delay: Duration) -> str:
    """Return a delay such as ``8 s`` or ``1:30:00``."""
    delay_s = seconds(delay, "delay")
    return f"{delay_s:.3g} s" if delay_s < 100 else str(timedelta(seconds=round(delay_s)))


async def settle(message: WorkerMessage[Any], call: Callable[[], Awaitable[None]]) -> None:
    """Settle a message; try once more if the server was not available, and so nothing was done.

    If that fails, the message stays leased until its lease ends. Otherwise, the end of its block
    would retry it for the server's error.
    """
    try:
        try:
            await call()
        except ServerUnavailable:
            await call()
    except ServerError:
        message.leave_to_lease()
        raise


def below_the_worker(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the worker's own frames at its top."""
    remaining = trace
    while remaining is not None and remaining.tb_frame.f_code.co_filename.startswith(CALLERS):
        remaining = remaining.tb_next
    return remaining or trace


def _undecodable(error: BaseException) -> tuple[str, str]:
    """Return the reason of a dead letter whose payload cannot be decoded, and what is wrong."""
    cause = error.__cause__
    if isinstance(error, UnknownTask):
        return "unknown task", error.reason
    if isinstance(cause, BadArguments):
        return "bad arguments", str(cause)
    if not isinstance(error, DecodeError):
        return "undecodable", describe(error)
    return "undecodable", error.reason
