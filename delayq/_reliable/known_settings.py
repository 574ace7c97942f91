"""What one client knows of a queue's settings, and how it learns that they have changed.

The settings are in a hash on the queue's server. Each partition has a copy, because a script reads
only the keys of its own slot; the copy of partition 0 decides, and is written last. Every change
gives the settings a new *epoch*. A client sends the epoch that it knows with each offer and each
claim, and a script that knows another one refuses the call before it writes anything. The client
then reads the settings and repeats the call, so that callers notice nothing.

A notification, or an epoch in the answer of a re-check, makes a client read the settings earlier.

A client that dies while it changes the settings may leave copies with an epoch that never comes
into force. The first client that is refused there for more than a second writes the settings that
are in force to that copy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from delayq._logging import about
from delayq._reliable.settings import UNDECLARED
from delayq.errors import (
    ConfigurationError,
    DelayqError,
    OutcomeUnknown,
    ServerRefused,
    ServerUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from delayq._engine.context import EngineContext
    from delayq._reliable.settings import Declared, StoredSettings
    from delayq._reliable.store import ReliableStore

_log = logging.getLogger("delayq")

# How long a partition may differ from partition 0 before its copy is replaced, seconds.
_DIFFERS_FOR = 1.0
# How long to wait before asking such a partition again, seconds.
_PAUSE = 0.02


class KnownSettings:
    """The settings of one queue, as far as this client knows them.

    Attributes:
        stored: What was on the server when it was last read; None until then.
        epoch: The epoch to send with offers and claims.
        max_size: The number of live messages beyond which offers are refused; 0 for no limit.
    """

    def __init__(
        self,
        name: str,
        store_of: Callable[[int], ReliableStore],
        services: EngineContext,
        changed: Callable[[StoredSettings], object],
    ) -> None:
        """Args:
        name: The queue's name.
        store_of: Returns the data of the partition with that number.
        services: The services the queue is built from.
        changed: Called with the settings when they are known, and whenever they have changed.
        """
        self._name = name
        self._store_of = store_of
        self._background = services.background
        self._changed = changed
        # What the handles on this client have declared.
        self._declared: dict[str, str] = {}
        # Tells what was read later from what was read earlier.
        self._reads = itertools.count()
        self._newest = -1
        self._reading: asyncio.Task[Any] | None = None
        self._read_again = False
        self._differences: dict[int, _Difference] = {}
        self.stored: StoredSettings | None = None
        self.epoch: str = UNDECLARED
        self.max_size: int = 0

    async def learn(self, declared: Declared) -> None:
        """Read the settings, unless they are known, and declare those that a handle has given.

        Raises:
            ConfigurationError: Other settings are stored; or another release has written them.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        if self.stored is not None and all(
            self.stored.fields.get(name) == text for name, text in declared.items()
        ):
            self._declared = {**declared, **self._declared}
            return
        with _before_a_call():
            stored = await self.read()
            while True:
                stored.check(self._name, declared)
                if not (missing := stored.missing(declared)):
                    break
                stored = await self._change(stored, missing) or await self.read()
        self._declared = {**declared, **self._declared}

    async def read(self) -> StoredSettings:
        """Read the settings from the server. Raises as :meth:`learn`."""
        while True:
            number = next(self._reads)
            stored = await self._store_of(0).settings()
            stored.check_layout(self._name)
            # The server may have lost its data.
            if not (missing := stored.missing(self._declared)):
                self._adopt(stored, number)
                return stored
            await self._change(stored, missing)

    async def configure(self, changes: Declared) -> StoredSettings:
        """Change settings, and return all of them.

        Raises:
            ConfigurationError: The queue is not empty, and would have fewer partitions; or as for
                :meth:`learn`.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        while True:
            stored = await self.read()
            if all(stored.fields.get(name) == text for name, text in changes.items()):
                changed: StoredSettings | None = stored
            else:
                changed = await self._change(stored, changes)
            if changed is not None:
                break
        # This client does not declare what it has just changed.
        self._declared |= {name: text for name, text in changes.items() if name in self._declared}
        return await self._forget_former(changed)

    async def after_refusal(self, partition: int, epoch: str) -> None:
        """Wait until a call can be repeated that a partition refused, because it was made with this
        epoch.

        Raises as :meth:`learn`.
        """
        with _before_a_call():
            await self._learn_why(partition, epoch)

    async def _learn_why(self, partition: int, epoch: str) -> None:
        if self.epoch == epoch:
            await self.read()
        if self.epoch != epoch or self.stored is None or partition == 0:
            return
        # Another client is changing the settings, or has died meanwhile.
        now = asyncio.get_running_loop().time()
        difference = self._differences.get(partition)
        if difference is None or not difference.goes_on(epoch, now):
            difference = self._differences[partition] = _Difference(epoch, now)
        difference.last = now
        if now - difference.since < _DIFFERS_FOR:
            await asyncio.sleep(_PAUSE)
        else:
            await self._copy(self.stored, partition, epoch)
            self._differences.pop(partition, None)

    @property
    def placement(self) -> int:
        """The number of partitions among which messages are placed."""
        return 1 if self.stored is None else self.stored.partitions

    def on_epoch(self, epoch: str) -> None:
        """Act on the epoch that the server has now."""
        if epoch != self.epoch:
            self.on_change()

    def on_change(self) -> None:
        """Read the settings again soon, because they may have changed."""
        if self.stored is None:
            return
        self._read_again = True
        if self._reading is None:
            self._reading = self._background.spawn(self._read_all(), f"settings of {self._name}")

    async def _read_all(self) -> None:
        try:
            while self._read_again:
                self._read_again = False
                await self.read()
        except DelayqError as error:
            _log.warning(
                "queue %r: reading the settings failed: %s",
                self._name,
                error,
                extra=about(self._name),
            )
        finally:
            self._reading = None

    def _adopt(self, stored: StoredSettings, number: int) -> None:
        if number < self._newest:
            return
        self._newest = number
        before, self.stored = self.stored, stored
        self.epoch, self.max_size = stored.epoch, stored.max_size
        if before is None or before.epoch != stored.epoch:
            self._changed(stored)

    async def _change(self, stored: StoredSettings, changes: Declared) -> StoredSettings | None:
        """Replace the stored settings, and return the new ones.

        Returns None if others have been stored meanwhile.
        """
        # Nothing is compared with this time: it makes an epoch differ from those that the server
        # has lost.
        new = stored.changed(changes, stored.next_epoch(time.time_ns() // 1000))
        dropped = range(new.partitions, stored.partitions)
        if dropped:
            await self._check_empty(range(stored.partitions), new)
        # From here on, no client that knows the old settings reaches any partition but the first.
        for partition in range(1, max(new.partitions, stored.partitions)):
            await self._copy(new, partition, stored.epoch)
        if dropped:
            try:
                await self._check_empty(dropped, new)
            except BaseException:
                for partition in range(1, stored.partitions):
                    await self._copy(stored, partition, new.epoch)
                raise
        await self._take_over_pause(range(stored.partitions, new.partitions))
        if await self._store_of(0).configure(stored.epoch, new) != new.epoch:
            return None
        self._adopt(new, next(self._reads))
        return new

    async def _take_over_pause(self, partitions: Iterable[int]) -> None:
        """Pause new partitions if the queue is paused; otherwise resume them, in case they were
        part of the queue before.
        """
        if not partitions:
            return
        # A user that may not look, or not pause, leaves them as they are.
        with suppress(ServerRefused):
            is_paused = (await self._store_of(0).depth()).paused
            for partition in partitions:
                store = self._store_of(partition)
                await (store.pause() if is_paused else store.resume())

    async def _copy(self, settings: StoredSettings, partition: int, expected: str) -> None:
        """Write a partition's copy, which probably has the expected epoch."""
        store = self._store_of(partition)
        while (found := await store.configure(expected, settings)) != settings.epoch:
            if found == expected:
                (await store.settings()).check_layout(self._name)
            expected = found

    async def _forget_former(self, stored: StoredSettings) -> StoredSettings:
        """Forget former numbers of partitions if no message or remembered id was placed by them."""
        if not stored.former:
            return stored
        # A user that may not count messages leaves this to another one.
        with suppress(ServerRefused):
            places = range(max(stored.partitions, *stored.former))
            remembered = [await self._store_of(place).remembers() for place in places]
            if not any(remembered) and await self._are_empty(places):
                return await self._change(stored, {"former": ""}) or stored
        return stored

    async def _check_empty(self, partitions: Iterable[int], new: StoredSettings) -> None:
        if not await self._are_empty(partitions):
            raise ConfigurationError(
                f"queue {self._name!r} is not empty, and would lose messages of some partitions:"
                f" before you configure {new.partitions} partitions, let its workers finish, or "
                "purge it, purge or redrive its dead letters, and unschedule what recurs"
            )

    async def _are_empty(self, partitions: Iterable[int]) -> bool:
        depths = await asyncio.gather(
            *(self._store_of(partition).depth() for partition in partitions)
        )
        if any(depth.delayed or depth.ready or depth.leased or depth.dead for depth in depths):
            return False
        scheduled = [await self._store_of(partition).has_schedules() for partition in partitions]
        return not any(scheduled)


@contextmanager
def _before_a_call() -> Iterator[None]:
    """Raise ServerUnavailable where nothing is unknown about the caller's own call: it was not made
    yet.
    """
    try:
        yield
    except OutcomeUnknown as error:
        raise ServerUnavailable(f"the queue's settings are not known: {error}") from error.__cause__


class _Difference:
    """A partition whose settings differ from those of partition 0.

    Attributes:
        since: When this was seen first, in seconds.
        last: When this was seen last, in seconds.
    """

    def __init__(self, epoch: str, now: float) -> None:
        self._epoch = epoch
        self.since: float = now
        self.last: float = now

    def goes_on(self, epoch: str, now: float) -> bool:
        """Return whether a difference seen now is the same one."""
        return epoch == self._epoch and now - self.last < _DIFFERS_FOR
