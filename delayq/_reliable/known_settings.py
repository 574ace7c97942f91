"""Keeps a queue's settings as one client knows them, and learns when they have changed.

The settings are in a hash on the queue's server. Each partition has a copy, because a script reads
only the keys of its own slot; the copy of partition 0 decides. Every change gives the settings a
new *epoch*: see :mod:`delayq._reliable.settings_writer`. A client sends the epoch that it knows
with each offer and each claim, and a script that knows another one refuses the call before it
writes anything. The client then reads the settings and repeats the call, so that callers notice
nothing. A client that looks for a message and does not find it reads the settings too, in case it
has looked in the wrong partitions.

A notification, or an epoch in the answer of a re-check, makes a client read the settings earlier.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from delayq._logging import about
from delayq._reliable.settings import StoredSettings
from delayq._reliable.settings_writer import SettingsWriter
from delayq.errors import DelayqError, OutcomeUnknown, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayq._background import Background
    from delayq._reliable.settings import Declared
    from delayq._reliable.store import ReliableStore

_log = logging.getLogger("delayq")

# How long a partition may differ from partition 0 before its copy is replaced, seconds.
_DIFFERS_FOR = 3.0
# How often a change is tried that others have overtaken.
_TRIES = 20
# How long to wait before asking such a partition again, seconds.
_PAUSE = 0.02


class KnownSettings:
    """The settings of one queue, as far as this client knows them.

    Attributes:
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
        store_of: Returns the data of the partition with that number.
        background: Runs the task that reads the settings again.
        changed: Called with the settings when they are known, and whenever they have changed.
        """
        self._name = name
        self._store = store_of(0)
        self._writer = SettingsWriter(name, store_of, background)
        self._background = background
        self._changed = changed
        # Declared by the handles on this client.
        self._declared: dict[str, str] = {}
        # Tells what was read later from what was read earlier.
        self._reads = itertools.count(1)
        self._newest = 0
        self._reading: asyncio.Task[Any] | None = None
        self._read_again = False
        self._differences: dict[int, _Difference] = {}
        self.stored: StoredSettings = StoredSettings({})

    @property
    def is_known(self) -> bool:
        """Whether the settings were read."""
        return self._newest > 0

    @property
    def epoch(self) -> str:
        """The epoch to send with offers and claims."""
        return self.stored.epoch

    async def learn(self, declared: Declared) -> None:
        """Read the settings, unless they are known, and declare those that a handle has given.

        Raises:
            ConfigurationError: Other settings are stored; or another release has written them.
            ServerError: As for :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`.
        """
        if not self.is_known or any(
            self.stored.fields.get(name) != text for name, text in declared.items()
        ):
            with before_a_call():
                stored = await self.read()
                while True:
                    stored.check(self._name, declared)
                    if not (missing := stored.missing(declared)):
                        break
                    stored = await self._change(stored, missing) or await self.read()
        self._declared = {**declared, **self._declared}

    async def read(self) -> StoredSettings:
        """Read the settings from the server. Raises as :meth:`learn`."""
        with before_a_call():
            while True:
                number = next(self._reads)
                stored = await self._store.settings()
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
        for _ in range(_TRIES):
            stored = await self.read()
            if all(stored.fields.get(name) == text for name, text in changes.items()):
                break
            if (changed := await self._change(stored, changes)) is not None:
                stored = changed
                break
        else:
            raise ServerUnavailable("nothing was changed: other clients kept changing settings")
        # This client does not declare what it has just changed.
        self._declared |= {name: text for name, text in changes.items() if name in self._declared}
        # The change was made, whatever becomes of this.
        with suppress(DelayqError):
            if (changed := await self._writer.forget_former(stored)) is not None:
                self._adopt(changed, next(self._reads))
                return changed
        return stored

    async def after_refusal(self, partition: int, epoch: str) -> None:
        """Wait until a call can be repeated that a partition refused, because it was made with this
        epoch.

        Raises as :meth:`learn`.
        """
        if self.epoch == epoch:
            await self.read()
        if self.epoch != epoch or partition == 0:
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
            with before_a_call():
                self._adopt(await self._writer.repair(), next(self._reads))

    def on_epoch(self, epoch: str) -> None:
        """Act on the epoch that the server has now."""
        if epoch != self.epoch:
            self.on_change()

    def on_change(self) -> None:
        """Read the settings again soon, because they may have changed."""
        if not self.is_known:
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

    async def _change(self, stored: StoredSettings, changes: Declared) -> StoredSettings | None:
        """Change the settings as :meth:`SettingsWriter.change` does, and adopt the new ones."""
        if (new := await self._writer.change(stored, changes)) is not None:
            self._adopt(new, next(self._reads))
        return new

    def _adopt(self, stored: StoredSettings, number: int) -> None:
        if number < self._newest:
            return
        was_known, before = self.is_known, self.stored
        self._newest, self.stored = number, stored
        if not was_known or before.epoch != stored.epoch:
            self._changed(stored)


@contextmanager
def before_a_call() -> Iterator[None]:
    """Raise ServerUnavailable where nothing is unknown about the caller's own call: it was not made
    yet.
    """
    try:
        yield
    except OutcomeUnknown as error:
        raise ServerUnavailable(f"nothing was sent yet: {error}") from error.__cause__


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
