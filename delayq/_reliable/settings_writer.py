"""Changes the settings of a reliable queue on its server, in every partition.

Each change gives the settings a new *epoch*, which is never used again. The copies of the
partitions are written first, and that of partition 0 last: with it, the change comes into force,
unless another one has come into force meanwhile. Until then, a partition whose copy is written
refuses every client, so nothing can be stored there by the settings that are about to end.

A change that fails half way leaves copies with an epoch that never comes into force. The client
that made it repairs them; if it has died, the first client that is refused there for some seconds
does. A repair gives the settings in force a new epoch, in partition 0 first, and then replaces the
other copies. So a change that still goes on, or a call that is still on its way, fails.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from delayq._reliable.placement import home_of
from delayq._reliable.store import ReliableStore
from delayq.errors import ConfigurationError, DelayqError, ServerRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delayq._background import Background
    from delayq._reliable.settings import Declared, StoredSettings

R = TypeVar("R")

# The settings that groups have of their own, as the server stores them, by partition and group.
_Moved = dict[int, dict[bytes, bytes]]


class SettingsWriter:
    """Changes the settings of one queue."""

    def __init__(
        self, name: str, store_of: Callable[[int], ReliableStore], background: Background
    ) -> None:
        """Args:
        name: The queue's name.
        store_of: Returns the data of the partition with that number.
        background: Owns the tasks that repair copies.
        """
        self._name = name
        self._store_of = store_of
        self._background = background

    async def change(self, stored: StoredSettings, changes: Declared) -> StoredSettings | None:
        """Replace the stored settings, and return the new ones.

        Returns None, without having changed any setting, if others came into force meanwhile.

        Raises:
            ConfigurationError: The queue would have fewer partitions, and is not empty, or
                remembers ids in those that would go. Nothing was changed.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        new = _renewed(stored, changes)
        new.check_shares(self._name)
        copies = range(1, max(new.partitions, stored.partitions))
        dropped = range(new.partitions, stored.partitions)
        added = range(stored.partitions, new.partitions)
        if dropped:
            await self._check_empty(range(stored.partitions), new)
        try:
            await self._of_each(copies, lambda store: self._copy(new, store, stored.epoch))
            if dropped:
                # Nothing can arrive there any more.
                await self._check_empty(dropped, new)
                await self._check_forgotten(dropped)
            await self._take_over_pause(added)
            moved = await self._copy_groups(stored, new)
            # Clients that know no settings may store something before this.
            expected = "" if stored.is_new else stored.epoch
            is_in_force = await self._store_of(0).configure(expected, new) == new.epoch
        except BaseException as error:
            if not copies:
                raise
            repairing = self._background.spawn(self._try_repair(), f"settings of {self._name}")
            if isinstance(error, DelayqError):
                await asyncio.wait({repairing})
            raise
        if not is_in_force:
            if copies:
                await self.repair()
            return None
        # A pause that began before the change came into force may have missed the new partitions.
        with suppress(DelayqError):
            await self._take_over_pause(added)
        # So may a change to a group. Settings that stay behind no longer count, and the next move
        # drops them.
        with suppress(DelayqError):
            await self._drop_groups(moved, new)
        return new

    async def repair(self) -> StoredSettings:
        """Give the settings in force a new epoch, and replace all copies. Returns them.

        A copy whose server does not answer is left to the first client that is refused there.
        """
        first = self._store_of(0)
        while True:
            stored = await first.settings()
            stored.check_layout(self._name)
            new = _renewed(stored, {})
            expected = "" if stored.is_new else stored.epoch
            if await first.configure(expected, new) == new.epoch:
                break
        with suppress(DelayqError):
            await self._of_each(
                range(1, new.partitions),
                lambda store: self._copy(new, store, stored.epoch, in_force=True),
            )
        return new

    async def _try_repair(self) -> None:
        # Otherwise, the first client that is refused by a copy repairs it.
        with suppress(DelayqError):
            await self.repair()

    async def forget_former(self, stored: StoredSettings) -> StoredSettings | None:
        """Forget former numbers of partitions if no message or remembered id was placed by them.

        Returns the new settings; None if nothing was changed.
        """
        if not stored.former:
            return None
        # A user that may not count messages leaves this to another one.
        with suppress(ServerRefused):
            places = range(max(stored.partitions, *stored.former))
            # In this order: the last message may be handled, and then remembered, in between.
            if (
                await self._are_empty(places)
                and not await self._remember(places)
                and not any(await self._of_each(places, ReliableStore.has_records))
            ):
                return await self.change(stored, {"former": ""})
        return None

    async def _copy(
        self, new: StoredSettings, store: ReliableStore, expected: str, *, in_force: bool = False
    ) -> None:
        """Write a partition's copy, which probably has the expected epoch.

        Settings ``in_force`` are written only as long as they are.
        """
        while (found := await store.configure(expected, new)) != new.epoch:
            if found == expected:
                (await store.settings()).check_layout(self._name)
            if in_force and (await self._store_of(0).settings()).epoch != new.epoch:
                return
            expected = found

    async def _take_over_pause(self, partitions: Sequence[int]) -> None:
        """Pause new partitions if the queue is paused; otherwise resume them, in case they were
        part of the queue before.

        A pause begins, and ends, with partition 0.
        """
        first = self._store_of(0)
        # A user that may not look, or not pause, leaves them as they are.
        with suppress(ServerRefused):
            was_paused: bool | None = None
            while partitions and was_paused is not (is_paused := (await first.depth()).paused):
                was_paused = is_paused
                call = ReliableStore.pause if is_paused else ReliableStore.resume
                await self._of_each(partitions, call)

    async def _copy_groups(self, stored: StoredSettings, new: StoredSettings) -> _Moved:
        """Copy what groups have of their own to the partitions in which these groups will lie.

        Returns what has to go where it was once the new settings are in force.
        """
        before, after = stored.partitions_of_groups, new.partitions_of_groups
        if before == after or stored.is_new:
            return {}
        # Partition 0 accepts changes to groups until the end.
        moved: _Moved = {0: {}}
        places = range(max(stored.partitions, new.partitions))
        found = await self._of_each(places, ReliableStore.own_settings)
        # First what earlier moves have left behind.
        for place, own in zip(places, found, strict=True):
            for group in own:
                if _home(group, before) != place:
                    await self._store_of(place).put_own_settings(group, b"")
        for place, own in zip(places, found, strict=True):
            for group, text in own.items():
                if _home(group, before) == place != _home(group, after):
                    await self._store_of(_home(group, after)).put_own_settings(group, text)
                    moved.setdefault(place, {})[group] = text
        return moved

    async def _drop_groups(self, moved: _Moved, new: StoredSettings) -> None:
        """Drop what was copied, and copy it again if it has changed since."""
        for place, own in moved.items():
            store = self._store_of(place)
            left = await store.own_settings()
            for group in own | left:
                home = _home(group, new.partitions_of_groups)
                if home == place:
                    continue
                if (text := left.get(group, b"")) != own.get(group, b""):
                    await self._store_of(home).put_own_settings(group, text)
                await store.put_own_settings(group, b"")

    async def _check_empty(self, partitions: Sequence[int], new: StoredSettings) -> None:
        if not await self._are_empty(partitions):
            raise ConfigurationError(
                f"queue {self._name!r} is not empty, and would lose messages of some partitions:"
                f" before you configure {new.partitions} partitions, let its workers finish, or "
                "purge it, purge or redrive its dead letters, and unschedule what recurs"
            )

    async def _check_forgotten(self, partitions: Sequence[int]) -> None:
        if await self._remember(partitions):
            raise ConfigurationError(
                f"queue {self._name!r} remembers ids in partitions that would go:"
                " wait until its dedup_window and each unique_for have passed"
            )

    async def _are_empty(self, partitions: Sequence[int]) -> bool:
        depths = await self._of_each(partitions, ReliableStore.depth)
        if any(depth.delayed or depth.ready or depth.leased or depth.dead for depth in depths):
            return False
        return not any(await self._of_each(partitions, ReliableStore.has_schedules))

    async def _remember(self, partitions: Sequence[int]) -> bool:
        return any(await self._of_each(partitions, ReliableStore.remembers))

    async def _of_each(
        self, partitions: Sequence[int], of: Callable[[ReliableStore], Awaitable[R]]
    ) -> list[R]:
        """Call ``of`` for these partitions at once; wait for all, then raise the first error."""
        calls = (of(self._store_of(partition)) for partition in partitions)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]  # none is an error


def _home(group: bytes, partitions: int) -> int:
    return home_of(group.decode(errors="replace"), partitions)


def _renewed(stored: StoredSettings, changes: Declared) -> StoredSettings:
    # Nothing is compared with this time: it makes an epoch differ from those that the server has
    # lost.
    return stored.changed(changes, stored.next_epoch(time.time_ns() // 1000))
