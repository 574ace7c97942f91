"""All that the server has of one partition of a reliable queue, except for what offers store.

A store has a typed method for each script and command. Nothing else knows which script or command a
question takes, with which keys, or in which shape its reply comes, except for
:mod:`delayq._reliable.moved_partition` and the modules that store offers. Methods that run at once
raise the errors of :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`. For calls that
leave in batches, or when a queue closes, methods build the :class:`Request` instead. All moments
and durations are in microseconds.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from delayq._engine.store import due_counts
from delayq._redis.scripts import Request
from delayq._reliable import scripts
from delayq._reliable.batch_store import BatchStore
from delayq._reliable.claim_store import ClaimStore
from delayq._reliable.failures import kept_text, unpack_error
from delayq._reliable.letter_store import LetterStore
from delayq._reliable.outcomes import Outcome
from delayq._reliable.replies import (
    MessageHead,
    MessageTimes,
    Purged,
    StoredGroup,
    StoredMessage,
    parse_us,
)
from delayq._reliable.report_format import activity_of, worker_of
from delayq._reliable.schedule_store import ScheduleStore
from delayq._reliable.scripts import PAGE
from delayq._reliable.settings import HASH_FIELDS, ChangeOutcome, StoredSettings
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayq._durations import DueTime
    from delayq._reliable.report_format import Unit
    from delayq._reliable.settings import SettingTexts
    from delayq.stats import Activity, WorkerInfo

# How many messages a call lists. To list one takes the server twice as long as to drop one, and in
# one of fifty calls, it also collects the garbage of scripts, for several times as long.
_LISTED = 50


class Watched(NamedTuple):
    """The state of a message that is followed.

    Attributes:
        outcome: Its end, or that it is alive.
        state: Its state; empty unless it is alive. So are those that follow.
        due_us: When it is or was due, in microseconds.
        attempt: The number of its attempt.
        offered: When it was offered, as its body has it.
        report: The last report of its handler, behind the moment when that was; empty if there is
            none.
    """

    outcome: Outcome
    state: str = ""
    due_us: int = 0
    attempt: int = 0
    offered: bytes = b""
    report: bytes = b""


class ReliableStore(ClaimStore, LetterStore, ScheduleStore, BatchStore):
    """Reads and changes settings and messages, besides what its bases do."""

    # Settings

    async def settings(self) -> StoredSettings:
        """Return the settings that are stored here: those of the queue, or a partition's copy."""
        return StoredSettings.of(
            await self.client.command("HMGET", self.keys.settings, *HASH_FIELDS)
        )

    async def configure(
        self, mode: Literal["declare", "change"], changes: SettingTexts, *, above: str = ""
    ) -> tuple[ChangeOutcome, StoredSettings]:
        """Change settings of the queue, in its first partition.

        Args:
            mode: Whether to keep what is stored, or to replace it.
            changes: The settings.
            above: An epoch, above which that of these settings must be.

        Returns:
            What became of it, and the settings that are stored now.
        """
        parts = chain.from_iterable(changes.items())
        return _changed(await self.run(scripts.CONFIGURE, mode, above, *parts))

    async def renumber(
        self, step: Literal["close", "commit", "reopen"], token: str, changes: SettingTexts
    ) -> tuple[ChangeOutcome, StoredSettings]:
        """Give the queue another number of partitions, and other changes, in its first partition.

        Args:
            step: What to do: see ``renumber.lua``.
            token: Names the caller.
            changes: The settings, among them ``partitions``.

        Returns:
            As :meth:`configure`.
        """
        further_changes = chain.from_iterable(
            change for change in changes.items() if change[0] != "partitions"
        )
        return _changed(
            await self.run(scripts.RENUMBER, step, token, changes["partitions"], *further_changes)
        )

    async def vacate(self, epoch: str) -> bool:
        """Drop the copy of the settings if nothing is in the partition, and return whether that is
        so. From then on, only a copy of a higher epoch is accepted.
        """
        return bool(await self.run(scripts.VACATE, epoch))

    async def repartition(
        self,
        step: Literal["begin", "close", "move", "resume", "end", "undo", "give up"],
        token: str,
        partitions: int,
    ) -> tuple[ChangeOutcome, StoredSettings]:
        """Go on with moving the queue to another number of partitions, in its first partition.

        ``repartition.lua`` explains the steps. ``token`` names the caller. Returns as
        :meth:`configure`.
        """
        return _changed(await self.run(scripts.REPARTITION, step, token, partitions))

    async def copy_settings(self, settings: StoredSettings, partition: int) -> str:
        """Replace the copy of the settings in this partition, unless it is newer.

        Returns:
            The epoch of the copy that is there now.

        Raises:
            SettingsChanged: Another release has written it.
        """
        parts = chain.from_iterable(settings.given().items())
        epoch: bytes = await self.run(scripts.COPY_SETTINGS, partition, settings.epoch, *parts)
        return epoch.decode(errors="replace")

    async def set_group(self, partitions: int, group: str, change: str, limit: str = "") -> bool:
        """Pause or resume a group, or give it a limit of its own.

        Args:
            partitions: The number of partitions by which the group lies here.
            group: The group's name.
            change: ``"pause"``, ``"resume"`` or ``"limit"``.
            limit: The limit, as the server stores it; empty for that of the queue.

        Returns:
            Whether it was paused.

        Raises:
            SettingsChanged: The queue has another number of partitions. Nothing was changed.
        """
        return bool(await self.run(scripts.SET_GROUP, partitions, group, change, limit))

    async def groups(self, first: str, limit: int, *, after: bool = False) -> list[StoredGroup]:
        """List up to ``limit`` groups by name, from one on, or from behind it."""
        groups: list[StoredGroup] = []
        name: str | bytes = first
        while len(groups) < limit:
            count = min(PAGE, limit - len(groups))
            page = await self.run(scripts.LIST_GROUPS, name, int(after), count)
            groups += map(StoredGroup.of, page)
            if len(page) < count:
                break
            name, after = groups[-1].name, True
        return groups

    # Offering

    async def forget_calls(self, calls: Sequence[str]) -> None:
        """Delete the replies that are kept for repetitions of calls, by their keys."""
        await self.client.command("UNLINK", *calls)

    async def expire_call(self, call: str, within_ms: int) -> None:
        """Keep the reply of a call for at most ``within_ms`` milliseconds, by its key."""
        await self.client.command("PEXPIRE", call, within_ms)

    # By id

    async def cancel(self, ids: Sequence[str | bytes], *, leased: bool = False) -> list[bool]:
        """Remove messages, and return which were there.

        Those that workers have stay unless ``leased`` is true.
        """
        return [bool(done) for done in await self.run(scripts.CANCEL, int(leased), *ids)]

    async def reschedule(self, ids: Sequence[str | bytes], when: DueTime) -> list[bool]:
        """Give messages that no worker has a new due time, and return which were there."""
        return [bool(done) for done in await self.run(scripts.RESCHEDULE, when, *ids)]

    async def bury_waiting(self, ids: Sequence[str | bytes], reason: str) -> list[bytes | None]:
        """Make dead letters of messages that no worker has. Returns their names; None for those
        that were not there. Of a long reason, the end is stored.
        """
        names: list[bytes | None] = await self.run(scripts.BURY_WAITING, kept_text(reason), *ids)
        return names

    async def get(self, id: str | bytes) -> StoredMessage | None:  # noqa: A002
        """Return a live message; None if there is none with that id."""
        (message,) = await self.get_many([id.encode() if isinstance(id, str) else id])
        return message

    async def get_many(
        self, ids: Sequence[bytes], *, payloads: bool = True
    ) -> list[StoredMessage | None]:
        """Return live messages as :meth:`get` does, or with empty payloads."""
        return [
            None if facts is None else StoredMessage.of(name, facts)
            for name, facts in zip(
                ids, await self.run(scripts.GET, int(not payloads), *ids), strict=True
            )
        ]

    async def get_with_checkpoint(self, id: str | bytes) -> StoredMessage | None:  # noqa: A002
        """Return a live message as :meth:`get` does, with its checkpoint."""
        message = await self.get(id)
        return message and message._replace(checkpoint=await self.checkpoint(message.id))

    async def checkpoint(self, id: bytes) -> bytes | None:  # noqa: A002
        """Return the checkpoint of a live message, as :func:`delayq._reliable.checkpoints.unpack`
        takes it; None if it has none.
        """
        reply: list[bytes | None] = await self.client.command(
            "HMGET", self.keys.named("checkpoints"), id
        )
        return reply[0]

    async def outcome(self, id: str) -> tuple[Outcome, StoredMessage | None]:  # noqa: A002
        """Return what is known about the end of a message, and the message if it is alive."""
        *outcome, live = await self.run(scripts.OUTCOME, id)
        return Outcome.of(outcome), None if live is None else StoredMessage.of(id.encode(), live)

    async def await_end(self, id: str, for_us: int) -> Outcome:  # noqa: A002
        """Return what is known about the end of a message; if it is alive, have its end announced
        if it comes within ``for_us``.
        """
        return Outcome.of(await self.run(scripts.AWAIT, id, for_us))

    async def watch(self, id: str, for_us: int) -> Watched:  # noqa: A002
        """Return what is known about a message and its end; if it is alive, have its progress and
        its end announced for as long as ``for_us``.
        """
        reply = await self.run(scripts.WATCH, id, for_us)
        outcome, (state, due, attempt, offered, report) = Outcome.of(reply[:8]), reply[8:]
        if state is None:
            return Watched(outcome)
        return Watched(outcome, state.decode(), parse_us(due), int(attempt), offered, report)

    async def times(self, message: StoredMessage) -> MessageTimes:
        """Return what is stored about a message's times, beyond what :meth:`get` returns."""
        attempts = await self.client.command("HGET", self.keys.named("attempts"), message.id)
        expiry = await self.client.command("HGET", self.keys.expiries, message.id)
        return MessageTimes.of(message.body, attempts, expiry)

    async def expiries(self, ids: Sequence[bytes]) -> list[int | None]:
        """Return when the time to live of each message ends; None if it has none."""
        reply = await self.client.command("HMGET", self.keys.expiries, *ids)
        return [None if expiry is None else parse_us(expiry) for expiry in reply]

    async def unique_until(self, ids: Sequence[bytes]) -> list[int | None]:
        """Return when the window of each id ends in which it counts as taken, whatever becomes of
        the message; None if it has none.
        """
        reply = await self.client.command("ZMSCORE", self.keys.remembered, *ids)
        return [None if score is None else parse_us(score) for score in reply]

    # Inspection and cleanup

    async def depth(self) -> QueueDepth:
        """Count the messages by state."""
        delayed, ready, leased, dead, oldest_us, paused_us = await self.run(scripts.STATS)
        return QueueDepth(
            *(delayed, ready, leased, dead, oldest_us / 1_000_000),
            paused=paused_us >= 0,
            paused_for=paused_us / 1_000_000 if paused_us > 0 else None,
        )

    async def slot_free_us(self) -> int | None:
        """Return when the limit of the queue may let another message run, in microseconds, if a
        claim waits for that; None if none does.
        """
        score = await self.client.command("ZSCORE", self.keys.named("group_turns"), "")
        return None if score is None else parse_us(score)

    async def has_new_limits(self) -> bool:
        """Return whether limits have changed, and no claim has given all groups, and the queue
        itself, their turns by them since.
        """
        reply = await self.client.command("HMGET", self.keys.settings, "turns_updated_to")
        return reply[0] is not None

    async def missing_keys(self) -> str:
        """Return what seems to be missing of the queue's keys; empty if nothing is.

        A server that is short of memory evicts whole keys, if its policy lets it.
        """
        bodiless, out_of_line, is_unlisted = await self.run(scripts.EVICTED)
        if bodiless:
            return f"{bodiless:,} messages have lost their content"
        if out_of_line:
            return f"{out_of_line:,} messages of groups wait where no worker finds them"
        return "messages are in no list" if is_unlisted else ""

    async def mend(self) -> None:
        """Put messages back where they wait. Those whose contents were evicted are lost."""
        cursor = await self.run(scripts.MEND, 0)
        while cursor != b"0":
            cursor = await self.run(scripts.MEND, cursor)

    async def tally(self, counts: str) -> None:
        """Add what a client has done to the history, without repeating the call."""
        await self.client.run_once(scripts.TALLY, self.keys.of_script(scripts.TALLY), (counts,))

    def register_request(self, worker: str, counts_us: int, facts: str) -> Request:
        """Build the call that lists a client among those that work on the queue, for ``counts_us``;
        0 removes it.
        """
        return Request(
            scripts.REGISTER, self.keys.of_script(scripts.REGISTER), (worker, counts_us, facts)
        )

    async def workers(self) -> list[WorkerInfo]:
        """Return the clients that work on the queue."""
        workers: list[WorkerInfo | None] = []
        is_full = True
        while is_full:
            reply = await self.run(scripts.LIST_WORKERS, len(workers), PAGE)
            pairs = zip(reply[::2], reply[1::2], strict=True)
            workers += [worker_of(self.keys.name, ends_us, facts) for ends_us, facts in pairs]
            is_full = len(reply) == 2 * PAGE
        return [worker for worker in workers if worker is not None]

    async def activity(self, unit: Unit, span: int) -> list[Activity]:
        """Return what happened in the last minutes or hours, oldest first."""
        _, *counts = await self.run(scripts.ACTIVITY, unit, span)
        return [activity_of(unit, count) for count in counts]

    async def page(self, state: str, offset: int, limit: int) -> list[StoredMessage | None]:
        """List messages in one state, with None for each that has expired.

        If these are fewer than ``limit``, there are no more.
        """
        messages: list[StoredMessage | None] = []
        for first in range(0, limit, _LISTED):
            count = min(_LISTED, limit - first)
            reply = await self.run(scripts.LIST, state, 0, offset + first, count)
            messages += [
                None if facts is None else StoredMessage.of(name, facts)
                for name, facts in zip(reply[::2], reply[1::2], strict=True)
            ]
            if len(reply) < 2 * count:
                break
        return messages

    async def heads(self, state: str, offset: int, limit: int) -> list[MessageHead | None]:
        """List up to a page of messages as :meth:`page` does, without their bodies."""
        reply = await self.run(scripts.LIST, state, 1, offset, limit)
        return [None if facts is None else MessageHead.of(facts) for facts in reply[1::2]]

    async def count_failed(self) -> int:
        """Count the live messages of which an attempt has failed."""
        return int(await self.client.command("HLEN", self.keys.named("errors")))

    async def failed(self, cursor: str) -> tuple[str, dict[bytes, str]]:
        """Return the last error of about a page of live messages of which an attempt has failed,
        in one line and by their ids, in no order; and the cursor of the next ones, ``"0"`` at the
        end.

        Messages that fail or end meanwhile may be missing, and any may be returned again by one of
        the next calls. If there are only some hundreds, all of them may come at once.

        Args:
            cursor: ``"0"`` to begin.
        """
        following, fields = await self.client.command(
            "HSCAN", self.keys.named("errors"), cursor, "COUNT", PAGE
        )
        pairs = zip(fields[::2], fields[1::2], strict=True)
        lines = {id: unpack_error(error.decode(errors="replace"))[0] for id, error in pairs}  # noqa: A001
        return following.decode(), lines

    async def recorded(self, offset: int, limit: int) -> list[tuple[bytes, int]]:
        """Return the ids of up to ``limit`` messages with a record, and when it was changed last,
        in microseconds; those of the last changes first.
        """
        reply = await self.client.command(
            "ZRANGE", self.keys.record_times, -offset - limit, -offset - 1, "WITHSCORES"
        )
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return [(id, parse_us(score)) for id, score in pairs][::-1]  # noqa: A001

    async def count_recorded(self) -> int:
        """Count the messages with a record, which may not have ended."""
        return int(await self.client.command("ZCARD", self.keys.record_times))

    async def length(self, state: str) -> int:
        """Count the messages in one state as :meth:`page` does, with those that have expired."""
        count, _ = await self.run(scripts.LIST, state, 0, 0, 0)
        return int(count)

    async def count_expired(self, state: str) -> int:
        """Count the messages in one state that have expired."""
        _, expired = await self.run(scripts.LIST, state, 0, 0, 0)
        return int(expired)

    async def purge(self, state: str, since_us: int, after: bytes = b"") -> Purged:
        """Drop up to a page of messages in one state, or in ``"all"``, but spare those that
        have followed from batches since the purge began, at ``since_us``.

        ``after`` is the place to go on behind; empty to begin.
        """
        dropped, expired, is_end, after = await self.run(
            scripts.PURGE, state, PAGE, since_us, after
        )
        return Purged(dropped, expired, bool(is_end), after)

    async def purge_all(self, state: str) -> AsyncIterator[int]:
        """Drop the messages in one state, page by page, and yield how many each page had."""
        since_us = await self.client.time_us(self.keys.leased)
        after, some_dropped = b"", False
        while True:
            is_first = not after
            page = await self.purge(state, since_us, after)
            yield page.dropped
            some_dropped = (some_dropped and not is_first) or page.dropped + page.expired > 0
            after = page.after
            if page.is_end:
                # It has taken several calls to pass the spared ones. Meanwhile a message may have
                # moved to a place behind them.
                if is_first or not some_dropped:
                    return
                after = b""

    async def pause(self) -> None:
        """Stop all claims. The time of an earlier pause stays."""
        now_us = await self.client.time_us(self.keys.paused)
        await self.client.command("SET", self.keys.paused, now_us // 1000, "NX")

    async def resume(self) -> bool:
        """End a pause, and return whether there was one."""
        return bool(await self.run(scripts.RESUME))

    async def summon(self, share: int, at_hand: int) -> None:
        """Summon as many dormant clients as the due messages need beyond the number that is
        ``at_hand``, if each client takes ``share`` messages.
        """
        await self.run(scripts.SUMMON, share, at_hand)

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        """Return how many waiting messages come due between each of some moments and the next, and
        after the last one.
        """
        sets = (*self.keys.waiting, self.keys.named("group_waiting"))
        return await due_counts(self.client, sets, edges)

    async def remove(self) -> int:
        """Remove every key of the queue, and return how many there were."""
        keys = {
            key.decode(errors="surrogateescape")
            async for key in self.client.scan(self.keys.pattern, self.keys.wake)
        }
        return sum([int(await self.client.command("UNLINK", key)) for key in keys])


def _changed(reply: Any) -> tuple[ChangeOutcome, StoredSettings]:
    outcome, *values = reply
    return ChangeOutcome(outcome.decode()), StoredSettings.of(values)
