"""The reliable queue: at-least-once delivery, with leases, retries and dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal

import anyio

from delayq._durations import Duration, estimated_delay, seconds, when_due
from delayq._engine import durability as durabilities
from delayq._functions import spell_out
from delayq._generics import T
from delayq._reliable.batches import BatchOffers
from delayq._reliable.consumer import Consumer, WorkerPort
from delayq._reliable.dead_letters import DeadLetters
from delayq._reliable.following import follow
from delayq._reliable.groups import Groups
from delayq._reliable.ids import checked_id
from delayq._reliable.message import Message
from delayq._reliable.offer import STORED, USUAL_PRIORITY, Offer
from delayq._reliable.offer_encoder import OfferEncoder, with_headers
from delayq._reliable.open_queue import OpenReliableQueue
from delayq._reliable.report_format import checked_span
from delayq._reliable.schedules import Recurring
from delayq._reliable.sending import Sender
from delayq._reliable.settings import RETRIES, QueueOptions, check_names, setting_texts
from delayq._reliable.settings_cache import Declaration
from delayq._reliable.stored_messages import StoredMessages
from delayq.codecs import JsonCodec
from delayq.codecs.json import result_codec
from delayq.codecs.protocol import decode
from delayq.errors import BadDelay, BadInput, Closed, DelayqError
from delayq.instrumentation import OfferEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from datetime import datetime
    from typing import Self, Unpack

    from delayq._engine.session import Session
    from delayq._reliable.batches import Batch
    from delayq._reliable.bodies import NewMessage
    from delayq._reliable.following import MessageEvent
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.offer import OnDuplicate
    from delayq._reliable.outcomes import MessageHistory
    from delayq._reliable.relay_port import RelayPort
    from delayq._reliable.replies import LiveState
    from delayq._reliable.settings import HandleSettings, QueueSettings
    from delayq._reliable.store import ReliableStore
    from delayq.codecs import Codec
    from delayq.stats import Activity, QueueDepth


class ReliableQueue(Recurring[T], Generic[T]):
    """A queue that delivers each message after its own delay, and redelivers it until it has been
    handled.

    Create one with :meth:`delayq.Client.reliable_queue`. Messages are ordered by priority, then due
    time, then offer order.

    Attributes:
        name: The queue's name.
        dead: The queue's dead letters: :class:`~delayq.DeadLetters`.
        groups: The groups of its messages: :class:`~delayq.Groups`.
    """

    def __init__(
        self,
        name: str,
        keys_of: Callable[[int], ReliableKeys],
        codec: Codec[T] | None,
        own_settings: HandleSettings,
        session: Session,
    ) -> None:
        own_settings.check()
        self.session: Session = session
        self._open: OpenReliableQueue = OpenReliableQueue.open(
            name, keys_of, own_settings, session.scheduler
        )
        settings, handle_codec = self._open.defaults.complete(own_settings, codec)
        self._codec = handle_codec or JsonCodec()
        self._declaration = Declaration(
            self._open.settings, own_settings.declared(), self._open.services, self._open.closing
        )
        if own_settings.declared():
            # The server may lose what is declared here, and others store anew without it.
            self._open.partitions[0].listen()
        self._hooks = self._open.services.hooks
        self._encoder: OfferEncoder[T] = OfferEncoder(
            self._codec, settings.options.get("max_payload") or 0
        )
        self._consumer: Consumer[Message[T]] = Consumer(
            self._open,
            self._declaration,
            self._codec,
            settings.policy(),
            settings.options.get("backoff") or RETRIES,
            self._encoder,
            self._check_open,
            Message,
        )
        self._sender = Sender(
            self._open,
            self._declaration,
            durabilities.parse(settings.options.get("durability") or ""),
            waits_for_room=settings.options.get("when_full") == "wait",
        )
        self._stored: StoredMessages[T] = StoredMessages(self._consumer)
        self.dead: DeadLetters[T] = DeadLetters(self._stored.letters_by_store, self._codec)
        self.groups: Groups = Groups(
            self._stored.store_of_group, self._stored.set_group, self._stored.stores
        )

    @property
    def name(self) -> str:
        return self._open.name

    # Offering

    async def offer(
        self,
        value: T,
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
        id: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        unique_for: Duration | None = None,
        on_duplicate: OnDuplicate = "raise",
        group: str | None = None,
        durability: str | None = None,
    ) -> str:
        """Store a message that becomes due after a delay. Concurrent calls share a round trip.

        Args:
            value: Any value that the codec can encode.
            delay: Seconds or a timedelta; without ``delay`` and ``at`` the message is due now.
            at: Instead of ``delay``, the moment when it is due, with a timezone, by the server's
                clock. Several messages for one moment come in the order of their offers. A moment
                in the past means now.
            id: Your own id for the message, up to 512 bytes; generated if None. Only one message
                with a given id lives at a time.
            headers: Text to store with it, by name; up to 16 KiB in all.
            priority: 0 to 9. Among due messages, the highest priority goes first.
            ttl: Seconds or a timedelta from now: if the message comes due or is retried after that,
                it is dropped or becomes a dead letter, as the queue's ``expired`` says; at the end
                of its ttl, even if it was put off for longer.
            max_attempts: The number of attempts after which it becomes a dead letter, instead of
                that of the queue.
            timeout: How long a handler may take, seconds or a timedelta, instead of the
                ``timeout`` of the worker's listener.
            unique_for: Seconds or a timedelta from now: the ``id`` counts as taken for that long,
                whatever becomes of the message. Without it, it is taken as long as the message
                lives, and then for the queue's ``dedup_window``.
            on_duplicate: How to treat an ``id`` that is taken: ``"raise"``, ``"ignore"`` (the
                earlier message stays), or ``"replace"`` (this message takes its place; raises if a
                worker has the earlier one).
            group: The message's group, up to 512 bytes, such as a tenant. Groups take turns, and
                the messages without a group count as one more of them; the queue's ``group_limit``
                counts in each. See :class:`~delayq.Limit`.
            durability: How safe the message must be before this returns, overriding the queue's own
                setting. ``"memory"``: the server has it. ``"fsync"``: it is on the server's disk;
                needs Valkey, or Redis 7.2 or later, with ``appendonly yes``. ``"replicas:N"``: N
                replicas have it too.

        Returns:
            The message's id.

        Raises:
            BadInput, EncodeError: Nothing was written.
            DuplicateMessage, QueueFull: Nothing was written.
            ServerUnavailable, ServerRefused, Closed: It is not stored. Offering it again is safe.
            OutcomeUnknown: It may be stored. A call whose reply was lost is repeated for
                ``retry_for`` first, and never stored twice.
            NotDurable: It is stored, but did not become as safe as requested within 2 s.
        """
        self._check_open()
        message: NewMessage
        # OfferEncoder.message asks the same of an Offer: an option belongs in both places. `is`,
        # because a bool or a float that equals the usual priority is to be refused below.
        if (
            id is None
            and ttl is None
            and max_attempts is None
            and timeout is None
            and unique_for is None
            and group is None
            and priority is USUAL_PRIORITY
            and on_duplicate == "raise"
            and not self._hooks.sending
        ):
            message = self._encoder.plain(value, delay, at, headers)
        else:
            offer = Offer(
                value,
                delay=delay,
                at=at,
                id=id,
                headers=headers,
                priority=priority,
                ttl=ttl,
                max_attempts=max_attempts,
                timeout=timeout,
                unique_for=unique_for,
                on_duplicate=on_duplicate,
                group=group,
            )
            if self._hooks.sending:
                return await self._offer_observed(offer, durability)
            message = self._encoder.with_options(offer)
        sender = self._sender
        if (submitted := sender.submit_now(message, durability)) is None:
            return await sender.send(message, durability)
        # Awaited here, because each coroutine in between takes its time.
        message, future = submitted
        try:
            outcome = await future
        except DelayqError as error:
            outcome = error
        if outcome is STORED:
            return message.id
        return await sender.finish(message, durability, outcome)

    async def _offer_observed(self, offer: Offer[T], durability: str | None) -> str:
        """Offer as :meth:`offer`, and notify observers."""
        delay = estimated_delay(offer.delay, offer.at)
        sending = OfferEvent(self.name, "reliable", 1, batch=False, delay=delay)
        with self._hooks.around_sending(sending):
            (offer,) = with_headers([offer], sending.headers)
            message_id = await self._sender.send(self._encoder.message(offer), durability)
            sending.ids = (message_id,)
        return message_id

    async def offer_many(
        self, offers: Iterable[Offer[T]], *, durability: str | None = None
    ) -> list[str]:
        """Store many messages in few round trips. All of them are checked before any is written.

        Args:
            offers: The messages.
            durability: Overrides the queue's own setting, as in :meth:`offer`.

        Returns:
            Their ids, in order.

        Raises:
            DuplicateMessage, QueueFull, OutcomeUnknown: Some are not stored; ``stored`` has the ids
                of those that are. Only the server can tell whether a ``ttl`` ends before the moment
                ``at``, so such a message may raise the last of these.
            NotDurable: ``stored`` has the ids of those that are stored, but did not become as safe
                as requested within 2 s. Otherwise as :meth:`offer`.
        """
        self._check_open()
        if not isinstance(offers, Iterable):
            raise BadInput(f"offers must be a list of Offer, not {offers!r}")
        checked = list(offers)
        if not (hooks := self._hooks).sending:
            return await self._sender.send_many(self._encoder.messages(checked), durability)
        sending = OfferEvent(self.name, "reliable", len(checked), batch=True, delay=None)
        with hooks.around_sending(sending):
            messages = self._encoder.messages(with_headers(checked, sending.headers))
            sending.ids = ids = await self._sender.send_many(messages, durability)
        return ids

    async def offer_batch(
        self,
        offers: Iterable[Offer[T]],
        *,
        then: Offer[T] | None = None,
        on_failure: Offer[T] | None = None,
        durability: str | None = None,
    ) -> Batch:
        """Store messages that belong together, and what follows when all of them have ended.

        Args:
            offers: The messages, up to 100,000. They lie in one partition: if the queue has
                several, give all of them the same group, or neither group nor id. One whose id is
                taken, with ``on_duplicate="ignore"``, does not belong to the batch.
            then: A message that is stored once, when all of them have been handled: at once if
                there are none.
            on_failure: A message that is stored once, when the first of them becomes a dead letter,
                expires, or is cancelled or purged. If dead letters are redriven and handled,
                ``then`` is stored as well. If another message gets the id of what follows in the
                meantime, it is stored under another id; or, with ``on_duplicate="ignore"``, not.
            durability: Overrides the queue's own setting, as in :meth:`offer`.

        Returns:
            The batch. ``message.batch`` gives it to the handlers of its messages, and of those that
            follow.

        Raises:
            BadInput, EncodeError: Nothing was written.
            DuplicateMessage, QueueFull, OutcomeUnknown, ServerError, Closed: The messages are not
                stored, or only some of them are, as for :meth:`offer_many`. Then the batch never
                finishes, and its status says that it was not offered whole. If the id of ``then``
                or ``on_failure`` is taken, nothing was written.
            NoBatch: The server has lost the batch meanwhile, as after a failover. The messages are
                stored, and nothing follows from them.
            NotDurable: The batch is stored whole, but not as safely as requested. If the server has
                the batch, or may have it, ``batch_id`` of the error has its id.
        """
        self._check_open()
        if not isinstance(offers, Iterable):
            raise BadInput(f"offers must be a list of Offer, not {offers!r}")
        checked: Sequence[Offer[T]] = list(offers)
        batches = BatchOffers(self._open, self._sender, self._encoder)
        if not (hooks := self._hooks).sending:
            encoded = batches.encode(checked, then, on_failure)
            batch, _ = await batches.send(encoded, durability)
        else:
            sending = OfferEvent(self.name, "reliable", len(checked), batch=True, delay=None)
            with hooks.around_sending(sending):
                encoded = batches.encode(checked, then, on_failure, sending.headers)
                batch, sending.ids = await batches.send(encoded, durability)
        return self._consumer.batch(batch)

    def batch(self, id: str) -> Batch:  # noqa: A002
        """Return the batch with an id. Its methods tell whether there is one."""
        self._check_open()
        return self._consumer.batch(checked_id(id))

    # Taking

    async def claim(self, limit: int = 1, wait: Duration = 0.0) -> list[Message[T]]:
        """Take up to ``limit`` due messages, each under a lease.

        Args:
            limit: The largest number of messages to take; at most 100 come at once.
            wait: How long to wait for the first, seconds or a timedelta. With 0 the call does not
                wait for messages.

        Returns:
            The messages; an empty list if none came. If the queue has partitions, a list shorter
            than ``limit`` does not mean that no more are due, because once it has messages, the
            call waits at most 50 ms for the other partitions.

        Raises:
            ServerUnavailable, OutcomeUnknown: Only with ``wait=0``: the server did not answer. A
                longer call waits for the server as it waits for messages. Messages that were
                claimed by a call whose reply was lost go back.
            ServerRefused: The server does not permit claiming.
            Closed: The queue or client is closed, or is closed while the call waits.
        """
        self._check_open()
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise BadInput(f"limit must be an int of at least 1, not {limit!r}")
        items = await self._consumer.claim(limit, seconds(wait, "wait"))
        return [self._consumer.wrap(claim) for _, claim in items]

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        """Take messages as they come due, each under a lease, until the queue or client closes.

        Wrap the handling of each in ``async with message``, which acknowledges or retries it. Some
        messages are claimed ahead: up to 100 where handling is quick, none where it takes long;
        their leases run from then on. Those that wait while you handle one for more than some 50 ms
        go back, and so do the others when you leave the loop.
        """
        return self._consumer.stream()

    # By id

    async def cancel(self, id: str, *, running: bool = False) -> bool:  # noqa: A002
        """Remove a message, due or not, unless a worker has it.

        Args:
            id: The message's id.
            running: Remove it even if a worker has it. Its handler is cancelled, at once if its
                process listens to the queue, otherwise when it renews the lease. A
                function that runs in a thread goes on, and its outcome does not count. The message
                keeps its slots of a limit until its handler has ended, or its lease.

        Returns:
            True if it was there and will not be delivered. False if there is no message with that
            id, or a worker has it and ``running`` is false.

        Raises:
            OutcomeUnknown: The reply was lost: it may have been cancelled. With any other error, it
                was not.
        """
        return (await self.cancel_many([id], running=running))[0]

    async def cancel_many(self, ids: Iterable[str], *, running: bool = False) -> list[bool]:
        """Remove messages as :meth:`cancel` does, up to 100 in a round trip.

        Returns:
            For each id, in order, what :meth:`cancel` returns.

        Raises:
            OutcomeUnknown: Some were cancelled, or may have been. With any other error, none was.
        """
        return await self._stored.change(
            ids, lambda store, page: store.cancel(page, leased=running)
        )

    async def bury(self, id: str, reason: str) -> bool:  # noqa: A002
        """Make a message a dead letter, due or not, unless a worker has it. It is not tried again,
        unless it is redriven.

        Args:
            id: The message's id.
            reason: Why it is buried. Its last error, if there is one, stays beside it.

        Returns:
            True if it was there. False if there is no message with that id, or a worker has it.

        Raises:
            OutcomeUnknown: The reply was lost: it may have been buried. With any other error, it
                was not.
        """
        return (await self.bury_many([id], reason))[0]

    async def bury_many(self, ids: Iterable[str], reason: str) -> list[bool]:
        """Make messages dead letters as :meth:`bury` does, up to 100 in a round trip.

        Returns:
            For each id, in order, what :meth:`bury` returns.

        Raises:
            OutcomeUnknown: Some were buried, or may have been. With any other error, none was.
        """
        if not isinstance(reason, str) or not reason:
            raise BadInput(f"reason must be a text that says why, not {reason!r}")

        async def bury(store: ReliableStore, page: Sequence[str]) -> list[bool]:
            names = await store.bury_waiting(page, reason)
            return [name is not None for name in names]

        return await self._stored.change(ids, bury)

    async def reschedule(
        self,
        id: str,  # noqa: A002
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> bool:
        """Make a message due ``delay`` from now, or at ``at``, unless a worker has it.

        Returns:
            True if it was there. False if there is no message with that id, or a worker has it.

        Raises:
            BadDelay: As for :meth:`offer`.
            OutcomeUnknown: The reply was lost: it may have been rescheduled. With any other error,
                it was not.
        """
        return (await self.reschedule_many([id], delay, at=at))[0]

    async def reschedule_many(
        self,
        ids: Iterable[str],
        delay: Duration | None = None,
        *,
        at: datetime | None = None,
    ) -> list[bool]:
        """Reschedule messages as :meth:`reschedule` does, up to 100 in a round trip.

        Returns:
            For each id, in order, what :meth:`reschedule` returns.

        Raises:
            BadDelay: As for :meth:`offer`.
            OutcomeUnknown: Some were rescheduled, or may have been. With any other error, none was.
        """
        self._check_open()
        if delay is None and at is None:
            raise BadDelay("pass delay or at")
        due = when_due(delay, at)
        return await self._stored.change(ids, lambda store, page: store.reschedule(page, due))

    async def get(self, id: str) -> Message[T] | None:  # noqa: A002
        """Return a live message without leasing it to you; None if there is no message with that
        id.
        """
        return await self._stored.get(id)

    # Results

    async def result(self, id: str, timeout: Duration | None = None) -> Any:  # noqa: A002
        """Return what the handler of a message has returned, or :meth:`Message.ack` was given.

        Waits until the message has been acknowledged, or is dead. Works if the queue has ``keep``
        set, for as long as that says. If the id is offered again right after that, a call that
        waits may wait for the new message instead: an id tells messages apart only while they live.

        Args:
            id: The message's id.
            timeout: How long to wait, seconds or a timedelta; None to wait as long as it takes, 0
                to look once.

        Raises:
            MessageFailed: It became a dead letter. The error holds the last error of the handler.
            NoResult: There is no message of that id, and no result: it was cancelled, purged,
                dropped or never offered, or the result is not kept any more; or it was acknowledged
                while the queue had no ``keep``.
            ResultTimeout: It has not ended within ``timeout``.
            DecodeError: The codec cannot decode the result.
            ServerError: Only with a ``timeout`` of 0, or if the server refuses the call: a longer
                wait lasts until the server answers.
            Closed: The queue or client is closed, or is closed while the call waits.
        """
        if (payload := await self.result_payload(id, timeout)) is None:
            return None
        return decode(result_codec(self._codec), payload, self.name, id)

    async def history(self, id: str) -> MessageHistory | None:  # noqa: A002
        """Return what is known about a message, alive or not; None if that is nothing.

        Attempts and results are known if the queue has ``keep`` set, for as long as that says.
        """
        return await self._stored.history(id)

    def follow(
        self,
        id: str,  # noqa: A002
        timeout: Duration | None = None,
    ) -> AsyncIterator[MessageEvent]:
        """Follow a message: yield its state now, each change, and at last how it ended.

        ::

            async for event in queue.follow(id):
                print(event.state, event.done, event.total)

        What a handler reports by :meth:`Message.progress` comes at once, and so does the end, if
        the queue has ``keep`` set. Other changes may come some seconds later. The last event is
        never missed, whatever becomes of connections; but without ``keep``, nobody can know how a
        message ended that is gone: then its state is ``"unknown"``.

        Args:
            id: The message's id.
            timeout: How long to follow it, seconds or a timedelta; None for as long as it takes.

        Raises:
            ResultTimeout: It has not ended within ``timeout``.
            ServerError: The server refuses the calls.
            Closed: The queue or client is closed, or is closed meanwhile.
        """
        self._check_open()
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        return follow(self._open, checked_id(id), timeout_s)

    # Inspection and cleanup

    async def stats(self) -> QueueDepth:
        """Return the number of messages in each state.

        Costs the server next to nothing, however many there are.
        """
        return await self._stored.depth()

    async def activity(
        self, *, minutes: int | None = None, hours: int | None = None
    ) -> list[Activity]:
        """Return what happened in the queue, in all processes, minute by minute or hour by hour.

        Each process reports with every re-check, so the newest figures are some seconds old. To
        add several of them up, use :meth:`Activity.total() <delayq.stats.Activity.total>`.

        Args:
            minutes: The number of minutes, up to 1,440, of which the last one has not ended yet;
                60 if both are left out.
            hours: Instead, the number of hours, up to 720.

        Returns:
            One for each minute or hour, oldest first, also if nothing happened.
        """
        self._check_open()
        unit, span = checked_span(minutes, hours)
        return await self._open.partitions[0].store.activity(unit, span)

    async def peek(self, limit: int = 1) -> list[Message[T]]:
        """Return the messages to be claimed next: the ready ones, then those that come due.

        They are not leased to you.
        """
        messages = await self.list("ready", limit=limit)
        if len(messages) < limit:
            messages += await self.list("delayed", limit=limit - len(messages))
        return messages

    async def list(
        self, state: LiveState, *, offset: int = 0, limit: int = 100
    ) -> list[Message[T]]:
        """Return messages in one state, in the order in which they will come.

        Those whose last lease was lost come first, whatever their priority. They are not leased to
        you.

        Args:
            state: ``"delayed"``, ``"ready"`` or ``"leased"``. For dead letters see :attr:`dead`.
            offset: The number of messages to skip. Those that have expired do not count. If the
                queue has partitions, or messages with a time to live, skipping takes time in
                proportion to it.
            limit: The largest number of messages to return.
        """
        return await self._stored.list(state, offset, limit)

    async def purge(
        self,
        state: Literal["delayed", "ready", "all"] = "all",
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Drop messages, in steps that do not block the server, and return how many.

        Dead letters stay: see :attr:`dead`. So does what follows from batches that this ends.

        Args:
            state: ``"delayed"`` or ``"ready"``; ``"all"`` also drops the messages that workers
                hold, whose acks then raise :class:`~delayq.LeaseLost`.
            progress: Called after each step with the number of messages dropped so far, and the
                total.

        Raises:
            OutcomeUnknown: Some messages were dropped, or may have been. With any other error, none
                was.
        """
        return await self._stored.purge(state, progress)

    async def pause(self) -> None:
        """Stop all claims, in every process, until :meth:`resume`.

        Leased messages are not affected.
        """
        await self._stored.pause()

    async def resume(self) -> bool:
        """End a pause, and return whether there was one."""
        return await self._stored.resume()

    # Settings

    async def settings(self) -> QueueSettings:
        """Return the queue's settings, which all its clients share."""
        self._check_open()
        return (await self._open.settings.read()).public()

    @spell_out(QueueOptions)
    async def configure(self, **changes: Unpack[QueueOptions]) -> QueueSettings:
        """Change settings of the queue, for all its clients, and return all of them.

        Clients that have the queue open use the new settings from their next call on; none of
        their calls fails because of the change. Messages that run stay, and count for new limits.
        Ids of messages that have been handled keep their ``dedup_window``. Code that still declares
        other settings goes on with these, and logs a warning when it starts the next time.

        Args:
            **changes: As for :meth:`delayq.Client.reliable_queue`. Settings that are left out stay
                as they are. Only a queue with nothing in it gets another number of ``partitions``:
                neither messages, dead letters and schedules nor ids and starts that still count,
                results, a pause, or groups with settings of their own. For any other queue, run
                ``delayq repartition``.

        Raises:
            BadInput: A setting is invalid. Nothing was changed.
            ConfigurationError: The queue is not empty, and would have another number of partitions.
            ServerRefused: The user lacks a right: see :func:`delayq.admin.acl.acl_rules`.
            OutcomeUnknown: The reply was lost: the settings may have been changed. Calling it again
                is safe.
        """
        check_names("configure", changes, QueueOptions)
        declared = setting_texts(**changes)
        self._check_open()
        settings = await self._open.settings.configure(declared)
        self._declaration.give_way(declared)
        return settings.public()

    # Closing

    async def aclose(self) -> None:
        """Close the queue on this client, for every handle of that name.

        Its messages stay on the server.

        Waiting calls raise :class:`~delayq.Closed`, loops over the queue simply end, and messages
        that were claimed but not handed to a consumer go back. Takes as long as
        :meth:`delayq.Client.aclose`. Closing twice does nothing.
        """
        with anyio.CancelScope(shield=True):
            await self.session.close_parts(self._open.opened_partitions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<ReliableQueue {self.name!r}>"

    # Internals

    def keep_codec(self) -> None:
        """Keep other handles of this client from inheriting this handle's codec."""
        if self._open.defaults.codec is self._codec:
            self._open.defaults.codec = None

    @property
    def closed(self) -> bool:
        """Whether the queue was closed on this client."""
        return self._open.closed

    async def key_sets(self) -> Sequence[ReliableKeys]:
        """Return the keys of each partition."""
        queue = await self._consumer.declare()
        return [partition.keys for partition in queue.partitions]

    def worker_port(self, concurrency: int) -> WorkerPort:
        """Return the part that a worker uses that handles ``concurrency`` messages at a time."""
        return WorkerPort(self._consumer, concurrency)

    def relay_port(self) -> RelayPort:
        """Return the part that the relay of an outbox uses."""
        from delayq._reliable.relay_port import RelayPort  # noqa: PLC0415 - few programs need it

        self._check_open()
        return RelayPort(self._open, self._declaration, self._sender.durability)

    async def result_payload(self, id: str, timeout: Duration | None = None) -> bytes | None:  # noqa: A002
        """Return the encoded result of a message, as :meth:`result` does; None for no result."""
        return await self._stored.result(id, timeout)

    def _check_open(self) -> None:
        self.session.check_loop()
        if self._open.closing.done():
            raise Closed("the queue is closed")
