"""A message of a reliable queue, and what you can do with it while you hold its lease."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import anyio

from delayq._durations import Duration, datetime_at, microseconds
from delayq._engine.leases import LEASE_ENDED, await_ack, check_outcome, settle_quietly
from delayq._generics import T
from delayq._reliable.bodies import may_lead_on, parse, plain_payload
from delayq._reliable.checkpoints import Checkpoint
from delayq._reliable.failures import (
    Interrupted,
    Reject,
    RetryAfter,
    Snooze,
    errors_in,
    instruction_of,
    is_instruction,
    kept_text,
    pack_error,
    unpack_error,
)
from delayq._reliable.following import ProgressReporter
from delayq.codecs.protocol import decode_error
from delayq.errors import Closed, DecodeError, LeaseLost, MessageCancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable
    from datetime import datetime
    from types import TracebackType
    from typing import Self

    from delayq._engine.prefetch import Ahead
    from delayq._reliable.batches import Batch
    from delayq._reliable.bodies import Body, OptionsMessage
    from delayq._reliable.message_context import MessageContext
    from delayq._reliable.offer import Offer
    from delayq._reliable.replies import Claim, LiveState
    from delayq.instrumentation import Observation

P = ParamSpec("P")
R = TypeVar("R")

# The bytes of a result that take the place of a message in a call: so it has a megabyte at most.
_RESULT_UNIT = 5_000


class Message(Generic[T]):
    """A message, and the lease under which you hold it.

    Use it as a context manager: it renews its lease while the block runs, and acknowledges or
    retries the message afterwards. When the block

    - ends, the message is acknowledged with :meth:`ack`. In a loop over the queue that has more
      messages at hand, or is fetching the next batch, this does not wait for the server's reply; a
      refusal is logged;
    - raises, the message is retried with :meth:`nack` and the queue's backoff, or becomes a dead
      letter if that was the last attempt. Your error propagates, and an error of that call is only
      logged. :class:`RetryAfter`, :class:`Snooze` and :class:`Reject`, alone or in an exception
      group, are instructions and do not propagate;
    - is cancelled, the message becomes available again at once, and the attempt does not count. So
      put ``asyncio.timeout()`` inside the block, where it raises ``TimeoutError``; around the
      block, it would cancel the block again on every delivery;
    - is still running when the lease is lost, the block is cancelled and :class:`~delayq.LeaseLost`
      is raised; :class:`~delayq.MessageCancelled` if the message was cancelled.

    Attributes:
        id: The message's id.
        attempt: The number of this attempt, starting at 1; for a message that is not leased, the
            number of attempts used.
        priority: 0 to 9.
        state: The message's state when it was read.
    """

    __slots__ = (
        "_ahead",
        "_awaits_ack",
        "_cancelled",
        "_cancelling",
        "_checkpoint",
        "_claim",
        "_context",
        "_is_back",
        "_is_lost",
        "_observation",
        "_parsed",
        "_reporter",
        "_settled",
        "_task",
        "_value",
        "state",
    )

    def __init__(
        self,
        claim: Claim,
        context: MessageContext[T],
        state: LiveState = "leased",
        ahead: Ahead | None = None,
    ) -> None:
        """Args:
        claim: The facts known about the message.
        context: The properties that it shares with other messages.
        state: Its state. It can be acknowledged or retried if ``claim`` has a token.
        ahead: The messages its consumer has fetched and will handle next.
        """
        self.state: LiveState = state
        self._claim = claim
        self._context = context
        self._ahead = ahead
        self._awaits_ack = False
        self._parsed: Body | None = None
        self._value: tuple[T] | None = None
        self._settled = not claim.token
        self._is_lost = False
        self._task: asyncio.Task[object] | None = None
        self._observation: Observation | None = None
        self._is_back = False

    @property
    def id(self) -> str:
        return self._claim.id.decode(errors="replace")

    @property
    def attempt(self) -> int:
        return self._claim.attempt

    @property
    def priority(self) -> int:
        return self._claim.priority

    @property
    def value(self) -> T:
        """The value that was offered, decoded on first access.

        Raises:
            DecodeError: The codec cannot decode it.
        """
        if self._value is None:
            payload = plain_payload(self._claim.body)
            if payload is None:
                payload = self._parts().payload
            codec = self._context.codec
            try:
                self._value = (codec.decode(payload),)
            except Exception as error:  # noqa: BLE001 - a codec of the user's may raise anything
                failure = decode_error(error, codec, payload, self._context.partition.name, self.id)
            else:
                return self._value[0]
            raise failure
        return self._value[0]

    @property
    def headers(self) -> dict[str, str]:
        """The headers that were offered with it."""
        return self._parts().headers

    @property
    def max_attempts(self) -> int | None:
        """The number of attempts after which it becomes a dead letter: its own limit, or else that
        of the queue handle; None for no limit.
        """
        with suppress(DecodeError):
            if (max_attempts := self._parts().max_attempts) is not None:
                return max_attempts
        return self._context.retry_rules.max_attempts or None

    @property
    def is_last_attempt(self) -> bool:
        """Whether the message becomes a dead letter if this attempt fails."""
        max_attempts = self.max_attempts
        # Attempts do not count if they were lost with a worker that another message may have
        # killed.
        return (
            max_attempts is not None and self._claim.attempt - self._claim.uncounted >= max_attempts
        )

    @property
    def timeout(self) -> float | None:
        """How long a worker lets its handler run, in seconds, if it was offered with a ``timeout``
        of its own.
        """
        timeout_us = self._parts().timeout_us
        return None if timeout_us is None else timeout_us / 1_000_000

    @property
    def group(self) -> str | None:
        """The group that it was offered with; None if it has none."""
        return self._parts().group

    @property
    def batch(self) -> Batch | None:
        """The batch that it belongs to, or that it follows from; None if there is none."""
        batch = self._parts().batch
        return None if batch is None else self._context.consumer.batch(batch)

    @property
    def enqueued_at(self) -> datetime:
        """The time it was offered, by the server's clock (UTC)."""
        return datetime_at(self._parts().enqueued_us)

    @property
    def due_at(self) -> datetime:
        """The time it was due, by the server's clock (UTC); for a message leased to another worker,
        the time that lease ends.
        """
        return datetime_at(self._claim.due_us)

    @property
    def lease_ends_at(self) -> datetime:
        """The time the lease ends, by the server's clock (UTC)."""
        return datetime_at(self._claim.ends_us)

    @property
    def last_error(self) -> str | None:
        """The error of the last attempt, usually a traceback, for a message that was read without
        being claimed.
        """
        error = getattr(self._claim, "error", None)
        return None if error is None else unpack_error(error)[1]

    def then(self, offer: Offer[Any]) -> None:
        """Have the acknowledgement of this message store another one: both happen, or neither.

        In an ``async with`` block, that is when the block ends normally; if the message is retried
        or dies instead, nothing is stored. The other message inherits group, priority and headers,
        unless it has its own, and its delay counts from the acknowledgement. Without an id of its
        own it gets one that is derived from this message's, so that it is stored once, whatever is
        repeated; if a message has its id by then, it is not stored.

        Args:
            offer: The message to store. Call this again for further ones, up to 100.

        Raises:
            BadInput: The offer is not valid, or its message would lie in another partition, because
                of its id or group.
            BadDelay, EncodeError, PayloadTooLarge: As for :meth:`ReliableQueue.offer`. All
                followers together may take as many bytes as one payload.
            LeaseLost: The message is not yours any more.
        """
        self._require_lease()
        context, claim = self._context, self._claim
        follower = context.encoder.follower(offer, self)
        context.partition.check_home(follower)
        followers = [*(claim.followers if self._leads_on() else ()), follower]
        context.encoder.packed(followers)
        self._add_followers(followers)

    async def ack(self, result: object = None, *, then: Iterable[Offer[Any]] = ()) -> None:
        """Acknowledge the message: it has been handled, and is deleted.

        Concurrent calls share a round trip.

        Args:
            result: The result, which :meth:`ReliableQueue.result` returns if the queue has
                ``keep`` set; otherwise, it is ignored.
            then: Messages to store in the same step, as by :meth:`then`.

        Raises:
            BadInput, BadDelay: As for :meth:`then`. The message is still yours.
            EncodeError, PayloadTooLarge: The queue's codec cannot encode the result, or it is
                larger than ``max_payload``. The message is still yours.
            LeaseLost: The lease had ended: another worker may have the message. Nothing was
                changed.
            OutcomeUnknown: The reply was lost. If the call was not carried out, the message is
                redelivered.
            ServerUnavailable, ServerRefused, Closed: Not carried out: the message is redelivered
                when the lease ends.
        """
        self._require_lease()
        for offer in then:
            self.then(offer)
        self.keep_result(result)
        claim = self._claim
        size = len(getattr(claim, "result", b""))
        if self._leads_on():
            size += sum(len(follower.content) for follower in claim.followers)
            self._context.acknowledger.has_followers = True
        # Not by _settle(), because many acks may be in flight, and each coroutine costs memory.
        self._context.keeper.let_go(claim)
        try:
            if hasattr(self, "_reporter"):
                await self._flush_report()
            check_outcome(await self._context.acknowledger.ack(claim, 1 + size // _RESULT_UNIT))
        except asyncio.CancelledError:
            # The acknowledgement is carried out all the same, so the message is not given back.
            self._mark_settled()
            raise
        except LeaseLost:
            self._hold_on(is_lost=True)
            raise self._loss() from None
        except BaseException:
            self._hold_on()
            raise
        self._mark_settled()

    async def _flush_report(self) -> None:
        """Send the last report before the acknowledgement.

        If the caller is cancelled meanwhile, the message has been handled all the same.
        """
        try:
            await self._reporter.flush()
        except asyncio.CancelledError:
            self._context.acknowledger.ack_and_forget(self._claim, sys.maxsize)
            raise

    def _leads_on(self) -> bool:
        """Return whether the acknowledgement may store messages, and note these with the claim."""
        claim = self._claim
        if hasattr(claim, "followers"):
            return True
        # Most bodies are plain, and need no closer look. Decoding a value parses all others.
        if self._parsed is None and (self._value is not None or not may_lead_on(claim.body)):
            return False
        with suppress(DecodeError):
            parts = self._parts()
            if parts.followers or parts.batch is not None:
                self._add_followers(parts.followers)
                return True
        return False

    def _add_followers(self, followers: Iterable[OptionsMessage]) -> None:
        """Have the acknowledgement store these messages, or none, and count for its batch."""
        claim = self._claim
        named = self._context.partition.with_ids(claim.id, followers)
        claim.followers = named  # type: ignore[misc]  # a slot of its base
        # Their acknowledgement is awaited.
        self._awaits_ack = True

    @property
    def keeps_result(self) -> bool:
        """Whether its queue keeps results."""
        return self._context.partition.queue.settings.stored.keep_us > 0

    def keep_result(self, result: object) -> None:
        """Have the next acknowledgement store a result, if the queue keeps results.

        Raises:
            EncodeError, PayloadTooLarge: As for :meth:`ack`.
        """
        if result is None or not self.keeps_result:
            return
        payload = self._context.encoder.result(result)
        self._claim.result = payload  # type: ignore[misc]  # a slot of its base
        if len(payload) > _RESULT_UNIT:
            # It waits for its acknowledgement, which shares a call with fewer others.
            self._awaits_ack = True

    async def nack(
        self, delay: Duration | None = None, error: BaseException | str | None = None
    ) -> None:
        """Report a failure: the message is retried after a delay, or becomes a dead letter if that
        was its last attempt.

        Args:
            delay: Seconds or a timedelta. By default, the delay that the queue's backoff gives.
            error: Stored with the message.

        Raises:
            BadDelay: As for :meth:`ReliableQueue.offer`. Otherwise as :meth:`ack`.
        """
        self._require_lease()
        text = pack_error(error)
        if self.is_last_attempt:
            await self._die("attempts", text)
            return
        delay_us = microseconds(
            self._context.retry_rules.backoff.delay(self.attempt) if delay is None else delay
        )
        await self._settle(self._context.acknowledger.nack(self._claim, delay_us, text))

    async def snooze(self, delay: Duration) -> None:
        """Give the message back until a delay has passed. The attempt does not count.

        Args:
            delay: Seconds or a timedelta.

        Raises:
            BadDelay: As for :meth:`ReliableQueue.offer`. Otherwise as :meth:`ack`.
        """
        self._require_lease()
        delay_us = microseconds(delay)
        await self._settle(self._context.acknowledger.snooze(self._claim, delay_us))

    async def progress(
        self, done: float, total: float | None = None, text: str | None = None
    ) -> None:
        """Report how far the work is, to all who :meth:`~ReliableQueue.follow` the message.

        At most ten reports a second reach the server, the last one in any case. If the server does
        not take a report, the work goes on without it.

        Args:
            done: How much is done, from 0.
            total: How much there is to do, if that is known.
            text: What is being done now, up to 1,000 characters.

        Raises:
            BadInput: An argument is not valid.
            LeaseLost: The lease is over.
        """
        self._require_lease()
        if not hasattr(self, "_reporter"):
            self._reporter: ProgressReporter = ProgressReporter(
                self._claim, self._context, self._find_lost
            )
            # Its acknowledgement comes behind the last report.
            self._awaits_ack = True
        await self._reporter.report(done, total, text)

    async def load(self, default: Any = None) -> Any:
        """Return the state that :meth:`save` has stored last, in this attempt or an earlier one.

        It takes one call for each attempt, and also works for a message that was only read.

        Args:
            default: Returned if nothing was saved.

        Raises:
            DecodeError: The queue's codec cannot decode the state.
            ServerError: The state could not be read.
        """
        return await self._saved_progress.load(default)

    async def save(self, state: Any) -> None:
        """Store how far the work has come, in place of what was saved before.

        The state belongs to the message: it stays through retries, and with a dead letter, whose
        redrive goes on from there; it goes when the message does.

        Args:
            state: A value that the queue's codec encodes. All that is saved of a message, with the
                results of its steps, may take ``max_payload`` bytes.

        Raises:
            EncodeError, PayloadTooLarge: The codec cannot encode the state, or it is too large.
                Nothing was stored.
            Interrupted: The state is stored, and the worker is stopping: let it pass.
            LeaseLost: The lease is over. Nothing was stored.
            OutcomeUnknown: The reply was lost. The state may be stored.
            ServerUnavailable, ServerRefused, Closed: The state is not stored.
        """
        await self._saved_progress.save(state)

    @overload
    async def step(
        self,
        name: str,
        function: Callable[P, Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...

    @overload
    async def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    async def step(
        self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function once, and return its result; in later attempts, return the stored result
        without another call.

        If the worker dies before the result is stored, or storing it fails, a later attempt calls
        the function again. A function that is not a coroutine function runs in a thread.

        Args:
            name: The name of the step: each in a handler needs its own.
            function: The function. If it raises, nothing is stored, and its error propagates.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            The result, as the queue's codec reads it.

        Raises:
            BadInput: This run of the handler has called a step of that name before, or the name is
                not valid.
            EncodeError, PayloadTooLarge: As for :meth:`save`, after the function was called.
            Interrupted: The function was not called, because the worker is stopping: let it pass.
            LeaseLost: As for :meth:`save`, before or after the function was called.
        """
        return await self._saved_progress.step(name, function, args, kwargs)

    async def sleep(self, seconds: Duration) -> None:
        """Let the message wait on the server, and its handler start again from its beginning. The
        attempt does not count.

        The handler ends here, by :class:`Interrupted`, and its block, or the worker, gives the
        message back. When the handler comes here again, this returns at once. A sleep is known by
        its order among those since the state that was saved last: after another state, it is
        another sleep. A message with a time to live may expire meanwhile.

        Args:
            seconds: Seconds or a timedelta.

        Raises:
            BadDelay: As for :meth:`ReliableQueue.offer`.
            Interrupted: The message is to wait, or the worker is stopping: let it pass.
            LeaseLost: As for :meth:`save`.
        """
        remaining_us = await self._saved_progress.sleep(microseconds(seconds))
        if remaining_us:
            delay = timedelta(microseconds=remaining_us)
            if self._task is None:
                # No block gives it back.
                await self.snooze(delay)
            raise Interrupted(delay)

    @property
    def _saved_progress(self) -> Checkpoint:
        # Most messages have no use for it.
        if not hasattr(self, "_checkpoint"):
            self._checkpoint = Checkpoint(
                self._claim, self._context, self._require_lease, self._find_lost
            )
        return self._checkpoint

    async def extend(self, duration: Duration) -> None:
        """Make the lease end ``duration`` (seconds or a timedelta) from now, instead of at its
        previous end.

        Raises:
            BadDelay: As for :meth:`ReliableQueue.offer`. Otherwise as :meth:`ack`.
        """
        self._require_lease()
        lease_us = microseconds(duration, "lease")
        (is_ours,) = await self._context.acknowledger.extend([self._claim], lease_us)
        if not is_ours:
            raise self._find_lost()
        self._context.keeper.extended(self._claim, lease_us)

    async def bury(self, reason: str, error: BaseException | str | None = None) -> None:
        """Make the message a dead letter, even if attempts are left. Raises as :meth:`ack`.

        Args:
            reason: Why it is buried.
            error: Stored with it.
        """
        self._require_lease()
        await self._die(reason, pack_error(error))

    async def release(self) -> None:
        """Give the message back: it keeps its due time, and the attempt does not count. A rate of
        the queue or group counts it as started.

        Raises as :meth:`ack`.
        """
        await self._give_back(is_begun=True)

    async def _give_back(self, *, is_begun: bool) -> None:
        """Give the message back. Unless its handler ``is_begun``, no rate counts it as started."""
        self._require_lease()
        await self._settle(self._context.acknowledger.release(self._claim, is_begun=is_begun))
        self._is_back = True

    async def __aenter__(self) -> Self:
        is_confirmed = False
        while self._begin(is_confirmed=is_confirmed) is None:
            try:
                await self._confirm_lease()
            except asyncio.CancelledError:
                # As within the block.
                await settle_quietly(
                    self._give_back(is_begun=False), self._context.partition.name, self.id
                )
                raise
            is_confirmed = True
        return self

    def _begin(self, *, is_confirmed: bool = False) -> asyncio.Task[object] | None:
        """Begin the block, and return the task in which it runs; do nothing and return None if the
        lease must be confirmed first.
        """
        context, claim = self._context, self._claim
        now = context.loop.time()
        if (
            self._settled
            # Less than half of the lease may remain, because the message has waited here.
            or (now > claim.fresh_until and not is_confirmed)
            or (context.cancelled and claim.lease_id in context.cancelled)
            or context.keeper.closed
        ):
            return None
        # With the loop, current_task() need not look it up.
        self._task = task = asyncio.current_task(context.loop)
        assert task is not None, "an async with block must run in a task"
        self._cancelled = False
        self._cancelling = task.cancelling()
        claim.begun_at = now  # type: ignore[misc]  # a slot of its base
        context.keeper.hold(claim, self._lose)
        if is_confirmed:
            # The server may not have answered.
            context.keeper.hurry(claim)
        if context.hooks.around_handling:
            self._observation = context.hooks.begin_handling(context.partition.queue.name, self)
        return task

    async def _confirm_lease(self) -> None:
        """Restore the full lease. Raises :class:`LeaseLost` if it is lost."""
        self._require_lease()
        context, claim = self._context, self._claim
        if context.keeper.closed:
            raise Closed("the queue is closed: the message is redelivered when its lease ends")
        if claim.lease_id in context.cancelled or await context.keeper.freshen([claim]):
            raise self._find_lost()

    def _end(self, error: BaseException | None = None) -> bool:
        """End the block, which has raised ``error``, and return True; return False if
        :meth:`__aexit__` must follow, because something has to be awaited or raised.

        Safe to call again, as :meth:`__aexit__` does.
        """
        context, claim = self._context, self._claim
        if (task := self._task) is not None:
            self._task = None
            context.keeper.let_go(claim)
            if not self._is_back:
                handling = context.reports.handling
                handling.skip -= 1
                if handling.skip < 0:
                    handling.add(context.loop.time() - claim.begun_at)
            if self._observation is not None:
                self._end_observation(error)
            if self._cancelled:
                # Another cancellation of the task propagates.
                self._cancelled = task.uncancel() <= self._cancelling
        # A message whose lease is lost counts as settled.
        if error is not None or self._settled:
            return False
        ahead = self._ahead
        if (
            ahead is not None
            and (ahead or ahead.is_fetching)
            and not self._awaits_ack
            # Nothing follows from a plain value: see then() and _parts(). For others, ack() looks
            # closer.
            and ((self._value is not None and self._parsed is None) or not may_lead_on(claim.body))
            and context.acknowledger.ack_and_forget(claim, ahead.max_unanswered)
        ):
            self._settled = True
            return True
        return False

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._end(error):
            return False
        if self._is_lost:
            # Perhaps it was cancelled, and has kept its slots until now.
            self._context.acknowledger.free_slots(self._claim)
            if error is None or is_instruction(error):
                raise self._loss()
            if self._cancelled and isinstance(error, asyncio.CancelledError):
                raise self._loss() from None
            return False
        if self._settled:
            return error is not None and is_instruction(error)
        if error is None:
            # Needs no shield: the ack is carried out even if this task is cancelled.
            await await_ack(self._ahead, self.ack())
            return False
        if is_instruction(error):
            # Instructions do not propagate, so an error in carrying them out hides no other error.
            with anyio.CancelScope(shield=True):
                await self._settle_failed(error)
            return True
        await settle_quietly(self._settle_failed(error), self._context.partition.name, self.id)
        return False

    def __repr__(self) -> str:
        return f"<Message {self.id!r}, {self.state}, attempt {self.attempt}>"

    async def _settle_failed(self, error: BaseException) -> None:
        instruction = instruction_of(error)
        if isinstance(instruction, Interrupted):
            await self._interrupt(instruction)
            return
        if isinstance(instruction, Snooze):
            await self.snooze(instruction.delay)
            return
        # An instruction is stored by its reason.
        reason = instruction.reason if instruction and is_instruction(error) else None
        if isinstance(instruction, RetryAfter):
            await self.nack(instruction.delay, error if reason is None else reason)
        elif isinstance(instruction, Reject):
            await self._die(
                instruction.reason or "rejected", pack_error(error) if reason is None else ""
            )
        elif any(isinstance(member, Exception) for member in errors_in(error)):
            await self.nack(error=error)
        else:
            await self.release()

    async def _interrupt(self, interruption: Interrupted) -> None:
        """Give the message back whose handler was interrupted."""
        if interruption.delay is None:
            await self.release()
        else:
            await self.snooze(interruption.delay)

    def _end_observation(self, error: BaseException | None) -> None:
        observation, self._observation = self._observation, None
        assert observation is not None
        if self._is_back and error is None and observation.error is None:
            # It was not handled, so observers get no duration.
            observation.started = 0.0
        context = self._context
        context.hooks.end_handling(
            observation, context.partition.queue.name, self._loss() if self._is_lost else error
        )

    async def _die(self, reason: str, error: str) -> None:
        claim = self._claim
        death = {"reason": kept_text(reason), "attempt": claim.attempt, "priority": claim.priority}
        line = json.dumps({**death, "error": error}, separators=(",", ":"))
        await self._settle(self._context.acknowledger.bury(claim, line, error))

    async def _settle(self, call: Awaitable[None]) -> None:
        """Make the call that retries, buries or releases the message.

        A renewal that arrived after it would find no lease, and report it as lost.
        """
        if hasattr(self, "_reporter"):
            await self._reporter.flush()
        self._context.keeper.let_go(self._claim)
        try:
            await call
        except LeaseLost:
            self._hold_on(is_lost=True)
            raise self._loss() from None
        except BaseException:
            self._hold_on()
            raise
        self._mark_settled()

    def _hold_on(self, *, is_lost: bool = False) -> None:
        """Keep the lease after a call that was to end it, if its block still runs.

        If the lease is lost, the block ends at the next renewal.
        """
        if self._task is not None:
            self._context.keeper.hold(self._claim, self._lose)
            if not is_lost:
                self._context.keeper.hurry(self._claim)

    def _parts(self) -> Body:
        if self._parsed is None:
            try:
                self._parsed = parse(self._claim.body)
            except ValueError as error:
                raise DecodeError("ReliableQueue", self._claim.body, str(error)) from error
        return self._parsed

    def _require_lease(self) -> None:
        if self._is_lost:
            raise self._loss()
        if self._settled:
            raise LeaseLost(
                "the message is not leased to this consumer: it is already settled, or was only"
                " read"
            )

    def _mark_settled(self) -> None:
        self._settled = True
        self._context.keeper.let_go(self._claim)

    def _loss(self) -> LeaseLost:
        """Return the error to raise because the lease is lost."""
        if self._task is None:
            self._context.acknowledger.free_slots(self._claim)
        if self._claim.lease_id in self._context.cancelled:
            return MessageCancelled("the message was cancelled: it is gone")
        return LeaseLost(LEASE_ENDED)

    def _find_lost(self) -> LeaseLost:
        """Note that a call of this message has found its lease lost, and return the error."""
        self._lose()
        return self._loss()

    def _lose(self) -> None:
        self._is_lost = self._settled = True
        # If this task found the loss by a call of its own, that call raises.
        if self._task is not None and self._task is not asyncio.current_task():
            self._cancelled = True
            self._task.cancel("the lease of the message was lost")
