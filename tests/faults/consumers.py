"""Producers and consumers for storms: producers note what they were told, and consumers report what
they see to a witness. Some expect to be killed.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pytest

import delayq
from delayq import Offer
from tests.faults.history import Delivered, End, History, Notes, Offered, Told, now_us
from tests.support.links import detour

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime
    from pathlib import Path


Kind = Literal["reliable", "deliveries", "plain"]
KINDS: tuple[Kind, ...] = ("reliable", "deliveries", "plain")
"""The last one is a delayed queue without leases: a message that was taken is gone."""

QUEUE = "storm"
IDS = "storm-ids"
"""Has no consumers until everything is healed: its messages expire, and their ids are reused."""
LEASE = 3.0
RESYNC = 0.5
RETRY_DELAY = 0.2
_BACKOFF = delayq.Backoff.fixed(RETRY_DELAY)
DEADLINE = 1.0
"""Shorter than the usual five seconds, because a storm is short and should see deadlines pass."""
_DEADLINES = (
    "delayq._redis.connection.GIVE_UP_AFTER",
    "delayq._redis.client.GIVE_UP_AFTER",
    "delayq._redis.pool.OPEN_TIMEOUT",
    "delayq._engine.dispatcher.NOWAIT_TIMEOUT",
)


@dataclass(frozen=True)
class Habits:
    """How often a consumer does something unusual, each as a share of all messages."""

    fails: float = 0.01
    releases: float = 0.003
    waits_for_its_ack: float = 0.05
    dawdles: float = 0.0002
    leaves: float = 0.001
    resumes: float = 0.0
    """How often it goes on from what earlier attempts have saved, and saves in turn."""
    sleeps: float = 0.3
    """How often one that has saved lets its message sleep on the server: a share of these."""
    pauses: float = 0.002
    """Only without leases: how often it spends some milliseconds on a message."""


class Witness(Protocol):
    """Records what consumers see."""

    def began(self, delivered: Delivered) -> None: ...

    def ended(self, delivered: Delivered) -> None: ...


Leased = delayq.Message[int] | delayq.Delivery[int]


class Failed(Exception):
    """A deliberate failure of a handler."""


@dataclass
class Consumer:
    """A loop over a queue, which runs until it is cancelled or the queue closes."""

    client: delayq.Client
    kind: Kind
    who: str
    witness: Witness
    seed: object
    habits: Habits
    queue: str = QUEUE

    def __post_init__(self) -> None:
        self._chance = random.Random(repr(self.seed))
        self._unsure = False

    async def run(self) -> None:
        with suppress(delayq.Closed):
            while True:
                try:
                    if not await self._loop():
                        return
                except delayq.ServerError:
                    await asyncio.sleep(0.005)

    async def _loop(self) -> bool:
        """Consume until the loop is left; return False if it has ended because the queue closed."""
        messages: Any
        match self.kind:
            case "plain":
                return await self._plain()
            case "reliable":
                messages = aiter(open_reliable(self.client, self.queue))
            case "deliveries":
                messages = open_delayed(self.client).deliveries(LEASE, retry_delay=RETRY_DELAY)
        async with aclosing(messages):
            async for message in messages:
                one = _delivered(message, self.who)
                await self._handle(one, message)
                if self._chance.random() < self.habits.leaves:
                    return True
        return False

    async def _plain(self) -> bool:
        queue = open_delayed(self.client)
        if self._chance.random() < 0.2:
            # Take one at a time for a while, at times with hardly any patience.
            for _ in range(50):
                if (value := await queue.poll(self._chance.random() * 0.02)) is not None:
                    self._took(value)
            return True
        async with aclosing(queue.__aiter__()) as values:  # type: ignore[type-var]
            async for value in values:
                self._took(value)
                if self._chance.random() < self.habits.pauses:
                    await asyncio.sleep(self._chance.random() * 0.03)
                if self._chance.random() < self.habits.leaves:
                    return True
        return False

    def _took(self, value: int) -> None:
        at = now_us()
        self.witness.began(Delivered(value, at, self.who, claimed_us=at))

    async def _handle(self, one: Delivered, message: Leased) -> None:
        self.witness.began(one)
        try:
            async with message:
                try:
                    await self._do(one, message)
                finally:
                    one.ended_us = one.ended_us or now_us()
            if one.end is End.UNKNOWN:
                one.end = End.UNATTENDED
        except (Failed, delayq.OutcomeUnknown):
            pass
        except delayq.LeaseLost:
            # If an earlier reply was lost, that call itself may have ended the lease.
            if not self._unsure:
                one.end = End.LOST
        except (delayq.ServerError, delayq.Closed):
            # The call at the end of the block was not carried out, so the lease ends by itself.
            if not self._unsure and one.end is not End.NACKED:
                one.end = End.NONE
        except asyncio.CancelledError:
            # A consumer that was waiting for the reply to an acknowledgement has already sent it.
            one.end = {End.NONE: End.RETURNED, End.UNKNOWN: End.EITHER}.get(one.end, one.end)
            raise
        finally:
            # Otherwise, its handler has never begun.
            one.ended_us = one.ended_us or one.seen_us
            self.witness.ended(one)

    async def _do(self, one: Delivered, message: Leased) -> None:
        if isinstance(message, delayq.Message):
            # Nothing is kept unless the storm has said so.
            message.keep_result(_result_of(message))
            await self._resume(one, message)
        fate, habits, self._unsure = self._chance.random(), self.habits, False
        if fate < habits.fails:
            self._ends(one, End.NACKED)
            raise Failed
        fate -= habits.fails
        if fate < habits.releases and isinstance(message, delayq.Message):
            self._ends(one, End.RETURNED)
            with self._doubting(one):
                await message.release()
            if self._unsure:
                self._ends(one, End.EITHER)
            return
        fate -= habits.releases
        if 0 <= fate < habits.waits_for_its_ack:
            self._ends(one, End.UNKNOWN)
            with self._doubting(one):
                if isinstance(message, delayq.Message):
                    await message.ack(_result_of(message))
                else:
                    await message.ack()
                one.end = End.ACKED
            return
        if 0 <= fate - habits.waits_for_its_ack < habits.dawdles:
            await asyncio.sleep(self._chance.random() * 1.5 * LEASE)
        self._ends(one, End.UNKNOWN)

    async def _resume(self, one: Delivered, message: delayq.Message[int]) -> None:
        """Go on from what earlier attempts have saved, for some messages."""
        # By its key, so that all attempts do it.
        chance = random.Random(f"resume {one.key}").random()
        if chance >= self.habits.resumes:
            return

        async def call() -> int:
            return one.claimed_us

        try:
            one.loaded = await message.load(0)
            one.step = await message.step("once", call)
            if chance < self.habits.resumes * self.habits.sleeps:
                self._ends(one, End.RETURNED)
                await message.sleep(0.2)
                one.end, one.ended_us = End.NONE, 0
            # Not before it sleeps: after another state, it would sleep again.
            await message.save(one.claimed_us)
            one.saved = one.claimed_us
        except (delayq.ServerError, delayq.Closed):
            # It leaves the block, so that the message is retried.
            self._ends(one, End.NACKED)
            raise

    @contextmanager
    def _doubting(self, one: Delivered) -> Iterator[None]:
        """Note how a call fails that ends a message inside its block.

        If the reply was lost, the acknowledgement at the end of the block may find nothing left to
        do. If the call was refused, its error leaves the block, and the message is retried.
        """
        try:
            yield
        except delayq.OutcomeUnknown:
            self._unsure = True
        except (delayq.ServerError, delayq.Closed):
            self._ends(one, End.NACKED)
            raise

    def _ends(self, one: Delivered, end: End) -> None:
        """Report the end before trying it, because this process may be killed from now on."""
        one.end, one.ended_us = end, one.ended_us or now_us()
        self.witness.ended(one)


def _result_of(message: delayq.Message[int]) -> list[int]:
    return [message.value, message.attempt]


def _delivered(message: Leased, who: str) -> Delivered:
    # A delivery leaves the server when its lease begins, and the end of the lease was rounded up to
    # milliseconds.
    ends_us = micros(message.lease_ends_at)
    claimed_us = ends_us - int(LEASE * 1_000_000)
    one = Delivered(message.value, now_us(), who, claimed_us=claimed_us, ends_us=ends_us)
    if isinstance(message, delayq.Message):
        one.copy, one.attempt, one.due_us = message.id, message.attempt, micros(message.due_at)
    return one


class WorkerConsumer(Consumer):
    """A worker whose handler does what a consumer's loop does."""

    async def run(self) -> None:
        worker = delayq.Worker(self.client, concurrency=20)
        worker.listener(QUEUE, lease=LEASE, max_attempts=None, backoff=_BACKOFF)(self._handle_one)
        await worker.run()

    async def _handle_one(self, message: delayq.Message[int]) -> list[int]:
        one = _delivered(message, self.who)
        self.witness.began(one)
        fate, habits = self._chance.random(), self.habits
        try:
            await self._resume(one, message)
            if fate < habits.fails:
                one.end = End.NACKED
                raise Failed
            if fate < habits.fails + habits.pauses:
                await asyncio.sleep(self._chance.random() * 0.03)
            elif fate < habits.fails + habits.pauses + habits.dawdles:
                # Its lease is renewed in the meantime.
                await asyncio.sleep(self._chance.random() * 1.5 * LEASE)
            # The worker acknowledges the message, but does not report whether that succeeded.
            one.end = End.UNKNOWN
            return _result_of(message)
        except asyncio.CancelledError:
            one.end = End.RETURNED
            raise
        finally:
            self.witness.ended(one)


def open_reliable(client: delayq.Client, name: str = QUEUE) -> delayq.ReliableQueue[int]:
    """Open one of the storm's queues with the settings that all its clients share."""
    return client.reliable_queue(name, lease=LEASE, max_attempts=None, backoff=_BACKOFF)


def open_delayed(client: delayq.Client) -> delayq.DelayedQueue[int]:
    return client.delayed_queue(QUEUE)


def micros(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000)


def shorten_deadlines(set_to: Callable[[str, float], None] | None = None) -> None:
    """Make calls time out sooner, by calling ``set_to(name, seconds)`` for each deadline."""
    for name in _DEADLINES:
        (set_to or pytest.MonkeyPatch().setattr)(name, DEADLINE)


def main(
    url: str,
    detours: Mapping[int, int],
    notes: Path,
    who: str,
    kind: Kind,
    loops: int,
    seed: object,
    habits: Habits,
) -> None:
    """Consume in loops, or with a worker if there are none, over detours, until killed."""
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    shorten_deadlines()
    with detour(detours):
        asyncio.run(_consume(url, Notes(notes), who, kind, loops, seed, habits))


def die_with_parent() -> None:
    """Exit when the parent does, because there would be no process left to kill this one."""
    if (parent := multiprocessing.parent_process()) is not None:
        asyncio.get_running_loop().add_reader(parent.sentinel, os._exit, 1)


async def _consume(
    url: str, notes: Notes, who: str, kind: Kind, loops: int, seed: object, habits: Habits
) -> None:
    die_with_parent()
    while True:
        try:
            async with delayq.connect(url, resync_interval=RESYNC) as client:
                if not loops:
                    await WorkerConsumer(client, kind, who, notes, seed, habits).run()
                made = (Consumer(client, kind, who, notes, (seed, n), habits) for n in range(loops))
                await asyncio.gather(*(consumer.run() for consumer in made))
        except delayq.ServerError:
            # The process was started while the server was away.
            await asyncio.sleep(0.05)


_FAILED = (delayq.ServerUnavailable, delayq.ServerRefused)


def _begin(history: History, messages: Mapping[int, float]) -> None:
    began = now_us()
    for key, delay in messages.items():
        history.offered[key] = Offered(began + int(delay * 1_000_000))


async def offer_together(
    client: delayq.Client,
    kind: Kind,
    history: History,
    messages: Mapping[int, float],
    *,
    named: bool,
) -> None:
    """Offer messages in one call: their keys, each with its delay in seconds."""
    _begin(history, messages)
    outcome, stored = Told.OK, set[int]()
    try:
        if kind == "reliable":
            offers = [
                Offer(
                    key,
                    delay=delay,
                    id=f"m{key}" if named else None,
                    group=history.group_of(key),
                )
                for key, delay in messages.items()
            ]
            await open_reliable(client).offer_many(offers)
        else:
            await open_delayed(client).offer_many([*messages.items()])
    except delayq.OutcomeUnknown as error:
        outcome = Told.UNKNOWN
        if kind != "reliable":
            stored = {int(receipt._payload) for receipt in error.stored}
        elif named:
            stored = {int(name[1:]) for name in error.stored}
    except _FAILED:
        outcome = Told.FAILED
    for key in messages:
        history.offered[key].told = Told.OK if key in stored else outcome


async def offer_each(
    client: delayq.Client, kind: Kind, history: History, messages: Mapping[int, float]
) -> None:
    """Offer messages with a call for each of them, all at once."""
    _begin(history, messages)

    async def offer(key: int, delay: float) -> None:
        try:
            if kind == "reliable":
                await open_reliable(client).offer(key, delay, group=history.group_of(key))
            else:
                await open_delayed(client).offer(key, delay)
            history.offered[key].told = Told.OK
        except _FAILED:
            history.offered[key].told = Told.FAILED
        except delayq.OutcomeUnknown:
            pass

    await asyncio.gather(*(offer(key, delay) for key, delay in messages.items()))
