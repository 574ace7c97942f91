"""Changes the settings of a reliable queue on its server, in every partition.

Each change gives the settings a new *epoch*, which is never used again. The copies of the
partitions are written first, and that of partition 0 last: with it, the change comes into force,
unless another one has come into force meanwhile. Until then, a partition whose copy is written
refuses every client, so nothing can be stored there by the settings that are about to end.

A client that dies half way leaves copies with an epoch that never comes into force. A client that
is refused there for a second replaces *all* copies under a new epoch, that of partition 0 included:
if the other client goes on after all, its change fails.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from delayq.errors import ConfigurationError, DelayqError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delayq._background import Background
    from delayq._reliable.settings import Declared, StoredSettings
    from delayq._reliable.store import ReliableStore


class SettingsWriter:
    """Changes the settings of one queue."""

    def __init__(
        self, name: str, store_of: Callable[[int], ReliableStore], background: Background
    ) -> None:
        """Args:
        name: The queue's name.
        store_of: Returns the data of the partition with that number.
        background: Owns the tasks that withdraw changes.
        """
        self._name = name
        self._store_of = store_of
        self._background = background

    async def change(self, stored: StoredSettings, changes: Declared) -> StoredSettings | None:
        """Replace the stored settings, and return the new ones.

        Returns None, without having changed anything, if others came into force meanwhile.

        Raises:
            ConfigurationError: The queue is not empty, and would have fewer partitions. Nothing was
                changed.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        # Nothing is compared with this time: it makes an epoch differ from those that the server
        # has lost.
        new = stored.changed(changes, stored.next_epoch(time.time_ns() // 1000))
        copies = range(1, max(new.partitions, stored.partitions))
        dropped = range(new.partitions, stored.partitions)
        added = range(stored.partitions, new.partitions)
        if dropped:
            await self._check_empty(range(stored.partitions), new)
        try:
            for partition in copies:
                await self._copy(new, partition, stored.epoch)
            if dropped:
                # Nothing can arrive there any more.
                await self._check_empty(dropped, new)
            await self._take_over_pause(added)
        except BaseException as error:
            withdrawing = self._background.spawn(
                self._withdraw(new, copies), f"settings of {self._name}"
            )
            if isinstance(error, DelayqError):
                await asyncio.wait({withdrawing})
            raise
        # Whatever interrupts this call, it may still come into force: it must not be withdrawn.
        if await self._store_of(0).configure(stored.epoch, new) != new.epoch:
            await self._withdraw(new, copies)
            return None
        # A pause that began before the change came into force may have missed the new partitions.
        await self._take_over_pause(added)
        return new

    async def forget_former(self, stored: StoredSettings) -> StoredSettings | None:
        """Forget former numbers of partitions if no message or remembered id was placed by them.

        Returns the new settings; None if nothing was changed.
        """
        if not stored.former:
            return None
        # A user that may not count messages leaves this to another one.
        with suppress(ServerRefused):
            places = range(max(stored.partitions, *stored.former))
            remembered = [await self._store_of(place).remembers() for place in places]
            if not any(remembered) and await self._are_empty(places):
                return await self.change(stored, {"former": ""})
        return None

    async def _copy(self, settings: StoredSettings, partition: int, expected: str) -> None:
        """Write a partition's copy, which probably has the expected epoch."""
        store = self._store_of(partition)
        while (found := await store.configure(expected, settings)) != settings.epoch:
            if found == expected:
                (await store.settings()).check_layout(self._name)
            expected = found

    async def _withdraw(self, new: StoredSettings, copies: Iterable[int]) -> None:
        """Replace the copies of settings that will not come into force by those in force."""
        # A copy that stays is replaced when a client is refused there.
        with suppress(DelayqError):
            stored = await self._store_of(0).settings()
            for partition in copies:
                await self._store_of(partition).configure(new.epoch, stored)

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
