"""The calls about batches of messages."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal, NamedTuple

from delayq._redis.pipeline import WaitingServer
from delayq._reliable.bodies import pack
from delayq._reliable.outcomes import parse_record
from delayq._reliable.scripts import (
    BATCH_STATUS,
    CANCEL_MEMBERS,
    JOIN_BATCH,
    LIST_MEMBERS,
    PAGE,
    READ_RECORDS,
    SEAL_BATCH,
    UNFINISHED,
    Part,
    ScriptRunner,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayq._redis.durability import Durability
    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.outcomes import Record

# The states of messages: see lua/reliable/include/batches.lua.
_OPEN, _HANDLED, _FOLLOWING = "o", "h", "f"
# How many batches one call looks at.
_BATCHES_PER_CALL = 1_000
# The number of bytes before a batch's id in the members that tell when batches may be dropped.
_BEFORE_ID = 18


class BatchCounts(NamedTuple):
    """The messages of a batch by their states: the reply of ``batch_status.lua``.

    Attributes:
        created_us: When the batch was created, in microseconds.
        total: How many messages it has; None if it was not offered whole.
        ended_us: When it ended, in microseconds; 0 while it has not.
        open: The number of messages that have not ended.
        handled: The number of those that were acknowledged.
        dead: The number of dead letters.
        cancelled: The number of those that were cancelled or dropped, or have expired.
        running: How many of those that are open have a worker.
        some_expired: Whether a message of the batch, or one that follows from it, has expired,
            which no claim has noticed yet. A hint: see ``batch_status.lua``.
    """

    created_us: int
    total: int | None
    ended_us: int
    open: int
    handled: int
    dead: int
    cancelled: int
    running: int
    some_expired: bool


class BatchStore(ScriptRunner):
    """Creates batches, and reads them."""

    async def join_batch(
        self,
        partitions: int,
        batch: str,
        ids: Sequence[str],
        then: OptionsMessage | None = None,
        on_failure: OptionsMessage | None = None,
    ) -> Sequence[str]:
        """Let messages that are about to be offered join a batch, and create it if it is new.

        Args:
            partitions: The number of partitions by which the batch lies here.
            batch: The batch's id.
            ids: The ids of the messages.
            then: The message that follows when all were handled. Like the next one, it is stored
                when the batch is created.
            on_failure: The message that follows when the first one is lost to the batch.

        Returns:
            The ids of messages to follow that are taken: then nothing was changed.

        Raises:
            SettingsChanged: The queue has another number of partitions, or is about to get one.
                Nothing was changed.
        """
        followers = (b"" if offer is None else pack([offer]) for offer in (then, on_failure))
        taken_ids = await self.run(JOIN_BATCH, partitions, batch, *followers, *ids)
        return [id.decode(errors="replace") for id in taken_ids]  # noqa: A001

    async def check_durability(self, durability: Durability) -> None:
        """Raise ServerRefused, before anything is written, if the server does not support it."""
        await WaitingServer(self.client, durability).check_supported(self.keys.batches)

    async def seal_batch(
        self, batch: str, ids: Sequence[str], *, is_last: bool, durability: Durability | None
    ) -> tuple[bool, str]:
        """Take messages out of a batch that were not stored.

        Args:
            batch: The batch's id.
            ids: The ids of the messages.
            is_last: Whether no more leave it: then all others are stored.
            durability: How safe this has to be.

        Returns:
            Whether there is such a batch; and why this is not as safe as requested, which is empty
            if it is.
        """
        args: Sequence[Part] = (batch, int(is_last), *ids)
        if durability is None:
            return bool(await self.run(SEAL_BATCH, *args)), ""
        server = WaitingServer(self.client, durability)
        is_sealed, reply = await server.run(SEAL_BATCH, self.keys.of_script(SEAL_BATCH), args)
        return bool(is_sealed), durability.failure(reply)

    async def batch_counts(self, batch: str) -> BatchCounts | None:
        """Count the messages of a batch; None if there is no such batch."""
        reply = await self.run(BATCH_STATUS, batch)
        if reply is None:
            return None
        created, total, ended, *counts = reply
        counts[-1] = bool(counts[-1])
        return BatchCounts(int(created), None if total == b"?" else int(total), int(ended), *counts)

    async def unfinished_batches(self) -> AsyncIterator[tuple[int, list[str]]]:
        """Look at all batches, and yield for some hundred at a time how many dead letters they have
        had, and the ids of those of which messages, or what follows, have not ended.
        """
        after = b""
        while True:
            after, dead, *batches = await self.run(UNFINISHED, after, _BATCHES_PER_CALL)
            yield dead, [batch.decode(errors="replace") for batch in batches]
            if not after:
                return

    async def unfinished_message(self, batch: str) -> bytes | None:
        """Return the id of a message of a batch, or of one that follows from it, which has not
        ended; None if there is none.
        """
        for state in (_OPEN, _FOLLOWING):
            if reply := await self.run(LIST_MEMBERS, batch, state, "", 1):
                message_id: bytes = reply[0]
                return message_id
        return None

    async def end_expired(self, batch: str) -> None:
        """End the messages of a batch that have expired."""
        after = b""
        while (reply := await self.cancel_members(batch, "expired", after)) and reply[1]:
            after = reply[1]

    async def cancel_members(
        self, batch: str, scope: Literal["expired", "waiting", "all"], after: bytes
    ) -> tuple[int, bytes] | None:
        """End messages of a batch that have expired, and cancel others, up to some 500.

        Args:
            batch: The batch's id.
            scope: Only those that have expired; those that no worker has, too; or all.
            after: Go on behind this id; empty to begin.

        Returns:
            How many were cancelled, and the id to go on behind, which is empty if there are no
            more; None if there is no such batch.
        """
        reply = await self.run(CANCEL_MEMBERS, batch, scope, after)
        return None if reply is None else (reply[0], reply[1])

    async def handled_members(self, batch: str, after: bytes) -> list[tuple[bytes, Record | None]]:
        """Return the ids of messages of a batch that were handled, in order, up to a page, each
        with its record, if there is one. ``after`` is the last id of the page before, or empty.
        """
        reply: list[bytes] = await self.run(LIST_MEMBERS, batch, _HANDLED, after, PAGE)
        return [
            (id, None if stored is None else parse_record(stored, 0))
            for id, stored in zip(reply[::2], reply[1::2], strict=True)  # noqa: A001
        ]

    async def records(self, ids: Sequence[bytes]) -> list[Record | None]:
        """Return the records of messages, where there are any."""
        reply: list[bytes | None] = await self.run(READ_RECORDS, *ids)
        return [None if stored is None else parse_record(stored, 0) for stored in reply]

    async def newest_batches(self, limit: int) -> list[str]:
        """Return the ids of up to ``limit`` batches, newest first: ids sort by that."""
        # From the members that tell when each may be dropped: see batches.lua. One may change
        # meanwhile, and come twice.
        after, newest = b"[\0", list[bytes]()
        while True:
            page = await self.client.command(
                *("ZRANGEBYLEX", self.keys.batch_members, after, b"(\1"),
                *("LIMIT", 0, _BATCHES_PER_CALL),
            )
            ids = {*newest, *(member[_BEFORE_ID:] for member in page)}
            newest = heapq.nlargest(limit, ids)
            if len(page) < _BATCHES_PER_CALL:
                return [batch.decode(errors="replace") for batch in newest]
            after = b"(" + page[-1]
