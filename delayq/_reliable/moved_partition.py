"""One partition, as the process sees it that moves the queue: see :mod:`delayq._reliable.mover`.

All moments and durations are in microseconds, unless their names say otherwise. Methods raise the
errors of :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`; those that change
something raise :class:`~delayq._redis.error_reader.SettingsChanged`, and change nothing, if another
process has taken the move over, or it has ended.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Literal

from delayq._redis.error_reader import SettingsChanged
from delayq._redis.scripts import Script
from delayq._reliable.bodies import parse, parse_letter
from delayq._reliable.ids import home_of
from delayq._reliable.keys import MESSAGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from delayq._reliable.settings import StoredSettings
    from delayq._reliable.store import ReliableStore

PAUSE_FOR_MOVE = Script("reliable/pause_for_move")
SET_ASIDE = Script("reliable/set_aside")
RECEIVE = Script("reliable/receive")
RECEIVE_LETTERS = Script("reliable/receive_letters")
DROP = Script("reliable/drop")
DISCARD = Script("reliable/discard")

Entry = tuple[bytes, bytes]
"""A member of a sorted set and its score, or a field of a hash and its value."""
Letter = tuple[bytes, bytes, bytes]
"""The name of a dead letter, when it died, and its text."""
Kind = Literal["scores", "fields", "new fields"]
"""How entries are stored: see ``receive.lua``."""
ASIDE = (
    *MESSAGES,
    *("remembered", "shared_moments", "dead", "dead_messages", "schedules"),
    *("record_times", "records", "awaited", "kept_slots", "batches", "batch_members"),
)
"""The keys of a partition whose content was placed by the number of partitions."""
GROUP_FIELD = b"group:"
"""The beginning of the names of settings that groups have of their own."""
# Keys that the server drops when nothing in them counts any more.
_EXPIRING = (
    *("remembered", "shared_moments", "record_times", "records", "awaited", "rate_log"),
    *("batches", "batch_members"),
)
# How many dead letters are read at a time, for they may be large.
_LETTERS = 50
# The range of the members of `rate_log` that belong to no group.
_STARTS_OF_QUEUE = (b"[\0", b"(\0:")


class MovedPartition:
    """Reads and changes a partition of a queue that is moved, and what was set aside there.

    Attributes:
        number: The partition.
    """

    def __init__(self, store: ReliableStore, number: int) -> None:
        self.number: int = number
        self._store = store
        self._client = store.client
        self._keys = store.keys
        # By this, the partition knows the process that may change it.
        self._epoch = ""

    async def take(self, settings: StoredSettings) -> None:
        """Let only this process change the partition.

        Args:
            settings: The settings since this process has begun, or continued, the move.
        """
        if self._epoch == settings.epoch:
            return
        # The settings of the first partition are those of the queue.
        if self.number and await self._store.copy_settings(settings, self.number) != settings.epoch:
            raise SettingsChanged("another process has taken the move over")
        self._epoch = settings.epoch

    async def pause(self) -> None:
        """Pause the partition for the move."""
        await self._run_pause("pause")

    async def end_pause(self, step: Literal["resume", "stay", "retire"]) -> None:
        """End the pause for the move: see ``pause_for_move.lua``."""
        await self._run_pause(step)

    async def _run_pause(self, step: str) -> None:
        keys = self._keys.of_script(PAUSE_FOR_MOVE)
        await self._client.run(PAUSE_FOR_MOVE, keys, (self._epoch, step))

    async def count_running(self) -> int:
        """Count the messages that workers have, and those that were cancelled and still run."""
        after = f"({await self._client.time_us(self._keys.leased)}"
        counts = [
            await self._client.command("ZCOUNT", key, after, "+inf")
            for key in (self._keys.leased, self._keys.kept_slots)
        ]
        return sum(counts)

    async def message_of_batch(self) -> tuple[str, str] | None:
        """Return the id of a message that belongs to a batch, or follows from it, and has not
        ended, and the batch; None if there is none. Messages that have expired end.
        """
        async for _, batches in self._store.unfinished_batches():
            for batch in batches:
                await self._store.end_expired(batch)
                if (message_id := await self._store.unfinished_message(batch)) is not None:
                    return message_id.decode(errors="replace"), batch
        return None

    async def letter_to_part(self, partitions: int) -> tuple[str, str] | None:
        """Return the id of a dead letter that belongs to a batch, and whose group lies in another
        one of so many partitions, and the batch; None if there is none.
        """
        # Most queues have none of a batch, and many letters.
        if not sum([dead async for dead, _ in self._store.unfinished_batches()]):
            return None
        async for letters in self._scan(self._keys.dead_messages, _LETTERS):
            for name, letter in letters:
                with suppress(ValueError):
                    parts = parse(parse_letter(letter)[1])
                    if parts.group is None or parts.batch is None:
                        continue
                    if home_of(parts.group, partitions) == home_of(parts.batch, partitions):
                        continue
                    # Others are forgotten, and nothing would follow from them.
                    if await self._store.batch_counts(parts.batch) is not None:
                        return name.partition(b"\0")[0].decode(errors="replace"), parts.batch
        return None

    async def set_aside(self, partitions: str) -> int:
        """Put everything aside, unless workers have messages, and let nothing be stored here.

        Args:
            partitions: The number of partitions that is stored meanwhile.

        Returns:
            How many messages workers have, with those that were cancelled and still run.
        """
        pairs = ((self._keys.named(name), self._keys.aside(name)) for name in ASIDE)
        fixed_keys = (self._keys.leased, self._keys.kept_slots, self._keys.settings)
        keys = (*fixed_keys, *chain.from_iterable(pairs))
        return int(await self._client.run(SET_ASIDE, keys, (self._epoch, partitions)))

    async def is_aside(self) -> bool:
        """Return whether everything was put aside since the move began, as far as the partition
        knows: a server that has failed over may have lost that.
        """
        return (await self._client.command("HMGET", self._keys.settings, "aside"))[0] is not None

    async def is_in_use(self) -> bool:
        """Return whether there is anything that was not put aside."""
        return bool(await self._client.command("EXISTS", *map(self._keys.named, ASIDE)))

    async def receive(
        self,
        name: str,
        kind: Kind,
        entries: Iterable[Entry],
        lives_ms: int = 0,
    ) -> list[bytes]:
        """Store entries that were set aside in other partitions, under the key of this name.

        Args:
            name: Of the key, as scripts name it.
            kind: See ``receive.lua``.
            entries: Each member or field, and its score or value.
            lives_ms: For how many milliseconds the key lives at least; 0 for good.

        Returns:
            The fields that were not stored, because they have other values.
        """
        keys = (self._keys.settings, self._keys.named(name))
        parts = chain.from_iterable(entries)
        return list(await self._client.run(RECEIVE, keys, (self._epoch, lives_ms, kind, *parts)))

    async def receive_letters(self, letters: Iterable[Letter]) -> None:
        """Store dead letters that were set aside in other partitions."""
        keys, parts = self._keys.of_script(RECEIVE_LETTERS), chain.from_iterable(letters)
        await self._client.run(RECEIVE_LETTERS, keys, (self._epoch, *parts))

    # What was set aside

    async def has_anything(self) -> bool:
        """Return whether anything was set aside."""
        return bool(await self._client.command("EXISTS", *map(self._keys.aside, ASIDE)))

    async def count(self) -> int:
        """Count the messages."""
        return int(await self._client.command("HLEN", self._keys.aside("bodies")))

    async def time_us(self) -> int:
        """Return the time of the server."""
        return await self._client.time_us(self._keys.leased)

    async def members(self, name: str, limit: int) -> list[Entry]:
        """Return the first members of a sorted set, and their scores."""
        key = self._keys.aside(name)
        return _pairs(await self._client.command("ZRANGE", key, 0, limit - 1, "WITHSCORES"))

    async def starts(self) -> list[bytes]:
        """Return the starts that the rate of the whole queue counts."""
        key = self._keys.aside("rate_log")
        return list(await self._client.command("ZRANGEBYLEX", key, *_STARTS_OF_QUEUE))

    async def starts_of_groups(self, limit: int) -> list[Entry]:
        """Return the first starts that rates of groups count, and their scores."""
        key, after = self._keys.aside("rate_log"), _STARTS_OF_QUEUE[1].replace(b"(", b"[")
        starts = await self._client.command("ZRANGEBYLEX", key, after, "+", "LIMIT", 0, limit)
        return [(member, b"0") for member in starts]

    async def fields(self, name: str, limit: int) -> AsyncIterator[list[Entry]]:
        """Yield the fields of a hash and their values, up to ``limit`` at a time."""
        async for page in self._scan(self._keys.aside(name), limit):
            yield page

    async def values(self, name: str, fields: Iterable[bytes]) -> list[bytes | None]:
        """Return the values of fields of a hash."""
        return list(await self._client.command("HMGET", self._keys.aside(name), *fields))

    async def lives_ms(self, name: str) -> int:
        """Return for how many milliseconds a key still lives; 0 if it has no end."""
        if name not in _EXPIRING:
            return 0
        remaining = await self._client.command("PTTL", self._keys.aside(name))
        return 0 if remaining == -1 else max(int(remaining), 1)

    async def drop_members(self, name: str, members: Iterable[bytes]) -> None:
        """Drop members of a sorted set."""
        await self._drop("members", self._keys.aside(name), members)

    async def drop_fields(self, name: str, fields: Iterable[bytes]) -> None:
        """Drop fields of a hash."""
        await self._drop("fields", self._keys.aside(name), fields)

    async def drop_everything(self) -> None:
        """Drop all keys, and then the note that everything was put aside.

        In two calls, because a script cannot try the right to delete before its first write.
        """
        keys = (self._keys.settings, *map(self._keys.aside, ASIDE))
        await self._client.run(DISCARD, keys, (self._epoch,))
        await self._drop("fields", self._keys.settings, (b"aside",))

    async def _drop(
        self, kind: Literal["members", "fields"], key: str, entries: Iterable[bytes]
    ) -> None:
        keys = (self._keys.settings, key)
        await self._client.run(DROP, keys, (self._epoch, kind, *entries))

    # Settings of groups are not set aside

    async def group_settings(self, limit: int) -> AsyncIterator[list[Entry]]:
        """Yield the settings that groups have of their own."""
        async for page in self._scan(self._keys.settings, limit):
            yield [entry for entry in page if entry[0].startswith(GROUP_FIELD)]

    async def drop_group_settings(self, fields: Iterable[bytes]) -> None:
        """Drop such settings."""
        await self._drop("fields", self._keys.settings, fields)

    # Internals

    async def _scan(self, key: str, limit: int) -> AsyncIterator[list[Entry]]:
        """Read a hash, up to ``limit`` fields at a time. Some may come twice."""
        cursor = b"0"
        while True:
            cursor, reply = await self._client.command("HSCAN", key, cursor, "COUNT", limit)
            fields = _pairs(reply)
            # The server returns a small hash whole.
            for at in range(0, len(fields), limit):
                yield fields[at : at + limit]
            if cursor == b"0":
                return


def _pairs(reply: Sequence[bytes]) -> list[Entry]:
    return list(zip(reply[::2], reply[1::2], strict=True))
