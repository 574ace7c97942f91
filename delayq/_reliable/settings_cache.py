"""A client's copy of a queue's settings: it reads them, declares and changes them, and is notified
of changes.

The settings are in a hash on the queue's server, in partition 0, where each change is one script.
The other partitions have copies, because a script reads only the keys of its own slot. Each change
gives the settings a higher *epoch*, and a copy gives way only to one of a higher epoch. So a
client that finds a copy missing or old replaces it, in any order and as often as it likes.

The number of partitions is stored by the first client that stores a message, or by an earlier
declaration, and stays. Offers and schedules carry the number by which they were placed, and a
script that knows another one refuses the call before it writes anything: the server has lost its
data, a partition has no copy yet, or the queue was given another number while nothing was in it.
The client then reads the settings and repeats the call, so that callers notice nothing.

Before a queue gets a number, a client looks at its second partition: that may have a copy of
settings that the server of the first one has lost or evicted.

A notification, or an epoch in the reply to a re-check, makes a client read the settings again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from delayq._logging import about
from delayq._redis.connection import own_copy
from delayq._redis.error_reader import SettingsChanged
from delayq._redis.retry import retry_delay
from delayq._reliable.settings import ChangeOutcome, StoredSettings, repartition
from delayq.errors import (
    Closed,
    ConfigurationError,
    DelayqError,
    OutcomeUnknown,
    ServerError,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from delayq._background import Background
    from delayq._engine.context import EngineContext
    from delayq._reliable.settings import Difference, SettingTexts
    from delayq._reliable.store import ReliableStore

R = TypeVar("R")

_log = logging.getLogger("delayq")

MOST_TRIES = 10
"""How often a call is made that is refused because settings have changed."""
# Queues, and their settings of which code declares another value than the server has: one warning
# is enough, however many handles declare it.
_WARNED: set[tuple[str, str]] = set()
# How long to wait before asking again for the number of partitions, seconds.
_PAUSE = 0.05


class SettingsCache:
    """The settings of one queue as this client last read them, and the calls that change them.

    Attributes:
        name: The queue's name.
        store_of: Returns the data of the partition with that number.
        stored: The settings on the server when they were last read.
    """

    def __init__(
        self,
        name: str,
        store_of: Callable[[int], ReliableStore],
        background: Background,
        changed: Callable[[StoredSettings], object],
    ) -> None:
        """Args:
        name: The queue's name.
        store_of: Returns the data of the partition with that number, whether or not the queue has
            it now.
        background: Runs the task that reads the settings again.
        changed: Called with the settings when they are known, and whenever they have changed.
        """
        self.name: str = name
        self.store_of: Callable[[int], ReliableStore] = store_of
        self._store = store_of(0)
        self._background = background
        self._changed = changed
        # Declared by the handles on this client.
        self._declared: dict[str, str] = {}
        # Numbers the reads, so that an earlier one never replaces a later one.
        self._reads = itertools.count(1)
        self._newest = 0
        self._reading: asyncio.Task[Any] | None = None
        self._read_again = False
        # Partitions whose copies differed at the last re-check.
        self._differing: set[int] = set()
        self.stored: StoredSettings = StoredSettings({})

    @property
    def is_known(self) -> bool:
        """Whether the settings were read."""
        return self._newest > 0

    async def learn(self, declared: SettingTexts, *, set_partition_count: bool = False) -> None:
        """Read the settings, unless they are known, and declare those that a handle has given.

        Args:
            declared: The settings that the handle has given.
            set_partition_count: Whether a queue without a number of partitions gets one, because
                the handle is about to store something.

        Raises:
            ConfigurationError: The queue has another number of partitions; or another release has
                written its settings.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        if (
            not self.is_known
            or (set_partition_count and not self.stored.has_partition_count)
            or self.stored.missing(declared)
            or self._unknown_differences(declared)
        ):
            with nothing_sent_yet():
                number = (
                    {"partitions": self._declared.get("partitions", "1")}
                    if set_partition_count
                    else {}
                )
                stored = await self.read({**number, **declared})
                stored.check_partitions(self.name, declared)
        self._declared = {**declared, **self._declared}
        self._warn(declared)

    async def read(self, declarations: SettingTexts | None = None) -> StoredSettings:
        """Read the settings from the server, and declare ``declarations`` where it has none.

        Raises as :meth:`learn`.
        """
        with nothing_sent_yet():
            number = next(self._reads)
            stored = await self._store.settings()
            stored.check_layout(self.name)
            # What was in force last counts more than what the code says.
            stored_fields = self.stored.fields
            declared = {**(declarations or {}), **self._declared}
            declared = {name: stored_fields.get(name, text) for name, text in declared.items()}
            if self.stored.has_partition_count:
                declared = {**declared, "partitions": str(self.stored.partitions)}
            elif not stored.has_partition_count:
                declared = {**declared, **await self._copied()}
            # The server may have lost its data.
            if missing := stored.missing(declared):
                return await self._declare(missing)
            self._adopt(stored, number)
            return stored

    async def _copied(self) -> SettingTexts:
        """Return the settings of which the second partition has a copy, although the first has
        none: its server has lost or evicted them.
        """
        # Where it cannot be reached, or the user may not, a new queue is the likelier case.
        with suppress(DelayqError):
            copy = await self.store_of(1).settings()
            copy.check_layout(self.name)
            if copy.has_partition_count:
                _log.warning(
                    "queue %r: the server has lost its settings: the copy that a partition has is"
                    " declared instead",
                    self.name,
                    extra=about(self.name),
                )
                return copy.to_declare()
        return {}

    async def configure(self, changes: SettingTexts) -> StoredSettings:
        """Change settings, and return all of them.

        Raises:
            ConfigurationError: The queue would have another number of partitions, and is not empty;
                or as for :meth:`learn`.
            OutcomeUnknown: They may have been changed, or not in every partition yet.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        if not changes:
            return await self.read()
        number = next(self._reads)
        outcome, stored = await self._store.configure("change", changes)
        if outcome is ChangeOutcome.OTHER_NUMBER:
            number = next(self._reads)
            outcome, stored = await self._renumber(stored, changes)
        self._check_shares(outcome, {**stored.fields, **changes})
        if outcome is ChangeOutcome.BUSY:
            raise ServerUnavailable(
                f"nothing was changed: queue {self.name!r} is being moved to {stored.moving_to}"
                " partitions"
            )
        self._adopt(stored, number)
        try:
            await self._copy(stored, range(1, stored.partitions))
        except ServerUnavailable as error:
            raise OutcomeUnknown(
                f"the settings are changed, but not in every partition yet: {error}"
            ) from error.__cause__
        return stored

    async def write(
        self, home_of: Callable[[int], int], call: Callable[[int, int], Awaitable[R]]
    ) -> R:
        """Make a call that changes something in the partition to which it belongs.

        Args:
            home_of: Returns the partition for a number of partitions.
            call: Makes the call to a partition, with the number of partitions.
        """
        partition = 0

        async def call_its_partition() -> R:
            nonlocal partition
            await self.learn({}, set_partition_count=True)
            count = self.stored.partitions
            partition = home_of(count)
            return await call(partition, count)

        return await self.repeat(call_its_partition, lambda: partition)

    async def repeat(
        self, call: Callable[[], Awaitable[R]], partition: Callable[[], int] = lambda: 0
    ) -> R:
        """Make a call again for as long as a partition refuses it because settings have changed.

        Args:
            call: Makes the call.
            partition: Returns the one that has refused the last call.

        Raises:
            ServerUnavailable: The queue is being moved to another number of partitions. Nothing was
                done.
        """
        for _ in range(MOST_TRIES):
            try:
                return await call()
            except SettingsChanged:
                await self.after_refusal(partition())
        raise ServerUnavailable(
            f"nothing was done: the settings of queue {self.name!r} keep changing"
        )

    async def after_refusal(self, partition: int) -> None:
        """Wait until a call can be repeated that a partition has refused.

        Raises as :meth:`learn`.
        """
        with nothing_sent_yet():
            stored = await self.read()
            began = time.monotonic()
            while stored.refuses_offers:
                # Not for long: the server ends this if the client that began it has died. To move a
                # queue that is not empty may take longer.
                if time.monotonic() - began > self._store.client.retry_for:
                    stored.check_at_rest(self.name)
                await asyncio.sleep(_PAUSE)
                number = next(self._reads)
                _, stored = await self._store.configure("change", {})
                self._adopt(stored, number)
            if 0 < partition < stored.partitions:
                await self._copy(stored, [partition])

    def on_epoch(self, partition: int, epoch: str) -> None:
        """Act on the epoch that a partition has now."""
        if epoch != self.stored.epoch:
            if partition:
                self._differing.add(partition)
            self.on_change()

    def on_change(self) -> None:
        """Read the settings again soon, because they may have changed."""
        if not self.is_known:
            return
        self._read_again = True
        if self._reading is None:
            self._reading = self._background.spawn(self._read_all(), f"settings of {self.name}")

    async def _read_all(self) -> None:
        try:
            while self._read_again:
                self._read_again = False
                stored = await self.read()
                differing, self._differing = self._differing, set()
                if not stored.refuses_offers:
                    await self._copy(stored, (n for n in differing if n < stored.partitions))
        except DelayqError as error:
            _log.warning(
                "queue %r: reading the settings failed: %s",
                self.name,
                error,
                extra=about(self.name),
            )
        finally:
            self._reading = None

    def differences(self) -> list[Difference]:
        """Return the settings that handles declare and of which the server has another value."""
        return self.stored.differences(self._declared)

    def _unknown_differences(self, declared: SettingTexts) -> list[Difference]:
        return [
            difference
            for difference in self.stored.differences(declared)
            if (self.name, difference.name) not in _WARNED
        ]

    def _warn(self, declared: SettingTexts) -> None:
        """Warn of settings that a handle declares and that do not count, once in this process."""
        for difference in self._unknown_differences(declared):
            _WARNED.add((self.name, difference.name))
            _log.warning(
                "queue %r: %s. The value on the server counts; to change it, run: %s",
                self.name,
                difference.text,
                difference.command(self.name),
                extra=about(self.name),
            )

    # Changing

    async def _declare(self, declared: SettingTexts) -> StoredSettings:
        """Store those of these settings of which none is stored, and return all."""
        number = next(self._reads)
        outcome, stored = await self._store.configure("declare", declared)
        self._check_shares(outcome, {**declared, **stored.fields})
        self._adopt(stored, number)
        if outcome is ChangeOutcome.CHANGED:
            # A partition that is not reached gets its copy from the first client that it refuses.
            with suppress(DelayqError):
                await self._copy(stored, range(1, stored.partitions))
        return stored

    def _check_shares(self, outcome: ChangeOutcome, declared: SettingTexts) -> None:
        if outcome is ChangeOutcome.TOO_SMALL:
            StoredSettings(declared).check_shares(self.name)

    async def _copy(self, stored: StoredSettings, partitions: Iterable[int]) -> None:
        """Give partitions copies of these settings, unless they have newer ones.

        Waits for all calls, then raises the first error.
        """
        calls = (self._copy_to(stored, partition) for partition in partitions)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _copy_to(self, stored: StoredSettings, partition: int) -> None:
        store = self.store_of(partition)
        try:
            epoch = await store.copy_settings(stored, partition)
            if epoch == stored.epoch or (await self._store.settings()).epoch != stored.epoch:
                return
            # The server of partition 0 has lost the change of which this is a copy.
            number = next(self._reads)
            _, stored = await self._store.configure("change", {}, above=epoch)
            self._adopt(stored, number)
            await store.copy_settings(stored, partition)
        except SettingsChanged:
            (await store.settings()).check_layout(self.name)

    async def _renumber(
        self, stored: StoredSettings, changes: SettingTexts
    ) -> tuple[ChangeOutcome, StoredSettings]:
        """Give a queue in which nothing is another number of partitions, and other changes.

        Meanwhile, offers wait. If this client dies, they go on after some seconds, as before.
        """
        token, first = secrets.token_hex(8), self._store
        other_stores = [self.store_of(number) for number in range(1, stored.partitions)]
        try:
            for _ in range(MOST_TRIES):
                outcome, stored = await first.renumber("close", token, changes)
                if outcome is ChangeOutcome.CLOSED:
                    vacated = (store.vacate(stored.epoch) for store in other_stores)
                    if not all(await asyncio.gather(*vacated)):
                        outcome = ChangeOutcome.IN_USE
                        break
                    outcome, stored = await first.renumber("commit", token, changes)
                if outcome is not ChangeOutcome.LOST:
                    break
        except BaseException:
            self._background.spawn(self._reopen(token), f"settings of {self.name}")
            raise
        if outcome in (ChangeOutcome.BUSY, ChangeOutcome.LOST):
            raise ServerUnavailable(
                f"nothing was changed: another client changes the partitions of {self.name!r}"
            )
        if outcome in (ChangeOutcome.IN_USE, ChangeOutcome.TOO_SMALL):
            await self._reopen(token)
        if outcome is ChangeOutcome.IN_USE:
            raise ConfigurationError(
                f"queue {self.name!r} is not empty, so it keeps its number of partitions,"
                f" {stored.partitions}: to change that, run: {repartition(self.name, changes)}"
            )
        return outcome, stored

    async def _reopen(self, token: str) -> None:
        # Otherwise, the first client that is refused does.
        with suppress(DelayqError):
            await self._store.renumber("reopen", token, {"partitions": "1"})

    def _adopt(self, stored: StoredSettings, number: int) -> None:
        stored.check_layout(self.name)
        if number < self._newest:
            return
        was_known, before = self.is_known, self.stored
        self._newest, self.stored = number, stored
        if not was_known or before.epoch != stored.epoch:
            self._changed(stored)


class Declaration:
    """Declares the settings of a queue that a handle was given, at the handle's first call.

    Attributes:
        is_made: Whether the settings on the server are known, and agree with the declared ones.
    """

    def __init__(
        self,
        settings: SettingsCache,
        declared: SettingTexts,
        services: EngineContext,
        closing: asyncio.Future[None],
    ) -> None:
        """Args:
        settings: The settings of the queue.
        declared: The settings that the handle was given.
        services: The client's services.
        closing: Done when the queue is closed.
        """
        self.is_made: bool = False
        self._settings = settings
        self._declared = declared
        self._background = services.background
        self._retry_most = services.retry_most
        self._closing = closing
        # The calls under way, by ``set_partition_count``.
        self._making: dict[bool, asyncio.Task[DelayqError | None]] = {}

    async def make(self, *, set_partition_count: bool = False) -> None:
        """Learn the settings on the server, and declare those of the handle.

        Concurrent callers share one call. Raises as :meth:`SettingsCache.learn`, and
        :class:`~delayq.Closed`.

        Args:
            set_partition_count: As for :meth:`SettingsCache.learn`.
        """
        if (making := self._making.get(set_partition_count)) is None:
            making = self._making[set_partition_count] = self._background.spawn(
                self._make(set_partition_count), f"settings of {self._settings.name}"
            )
        futures: set[asyncio.Future[Any]] = {making, self._closing}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        self._check_open()
        if (error := making.result()) is not None:
            raise own_copy(error)

    async def make_within(self, wait: float | None) -> float | None:
        """Declare as :meth:`make`, for a caller that waits ``wait`` seconds for messages.

        A caller that waits for messages waits for the server as well.

        Returns:
            How long the caller still waits, in seconds.

        Raises:
            TimeoutError: The time is over.
        """
        loop = self._closing.get_loop()
        deadline = loop.time() + wait if wait else None
        tries = 0
        async with asyncio.timeout_at(deadline):
            while not self.is_made:
                try:
                    await self.make()
                except ServerRefused:
                    raise
                except ServerError:
                    if wait == 0:
                        raise
                    tries += 1
                    pause = retry_delay(tries, longest=self._retry_most)
                    await asyncio.wait({self._closing}, timeout=pause)
                    self._check_open()
        return wait if deadline is None else max(deadline - loop.time(), 0.001)

    def give_way(self, changes: SettingTexts) -> None:
        """Declare the changed settings from now on, where the handle declared other ones."""
        self._declared = {name: changes.get(name, text) for name, text in self._declared.items()}

    def _check_open(self) -> None:
        if self._closing.done():
            raise Closed("the queue is closed")

    async def _make(self, set_partition_count: bool) -> DelayqError | None:
        try:
            await self._settings.learn(self._declared, set_partition_count=set_partition_count)
        except DelayqError as error:
            return error
        else:
            self.is_made = True
            return None
        finally:
            del self._making[set_partition_count]


@contextmanager
def nothing_sent_yet() -> Iterator[None]:
    """Turn OutcomeUnknown in this block into ServerUnavailable: the caller's own call comes after
    the block, so it was not sent.
    """
    try:
        yield
    except OutcomeUnknown as error:
        raise ServerUnavailable(f"nothing was sent yet: {error}") from error.__cause__
