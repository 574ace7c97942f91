"""The data of one reliable queue: a typed method for each script and command.

Nothing else knows which script or command a question takes, with which keys, or in which shape its
reply comes, except for :mod:`delayq._reliable.moved_partition`. Methods that run at once raise the
errors of :meth:`RedisClient.run <delayq._redis.client.RedisClient.run>`. For calls that leave in
batches, or when a queue closes, methods build the :class:`Request` instead. All moments and
durations are in microseconds.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from delayq._engine.store import due_counts
from delayq._redis.scripts import Request, Script
from delayq._reliable.outcomes import Outcome, attempt_of, offered_of
from delayq._reliable.replies import (
    ClaimReply,
    Death,
    Extended,
    MessageHead,
    MessageTimes,
    Occurrence,
    Purged,
    Redriven,
    StoredGroup,
    StoredLetter,
    StoredMessage,
    StoredSchedules,
    parse_us,
)
from delayq._reliable.report_format import activity_of, worker_of
from delayq._reliable.settings import FIELDS, ChangeOutcome, StoredSettings
from delayq.stats import QueueDepth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._durations import When
    from delayq._redis.client import RedisClient
    from delayq._reliable.bodies import OptionsMessage
    from delayq._reliable.keys import ReliableKeys
    from delayq._reliable.replies import Claim
    from delayq._reliable.report_format import Unit
    from delayq._reliable.settings import Declared, Policy
    from delayq._reliable.timing import Timing
    from delayq.stats import Activity, WorkerInfo

OFFER = Script("reliable/offer")
OFFER_NEW = Script("reliable/offer_new")
CLAIM = Script("reliable/claim")
ACK = Script("reliable/ack")
NACK = Script("reliable/nack")
RELEASE = Script("reliable/release")
RELEASE_CALL = Script("reliable/release_call")
EXTEND = Script("reliable/extend")
BURY = Script("reliable/bury")
CANCEL = Script("reliable/cancel")
FREE_SLOTS = Script("reliable/free_slots")
RESCHEDULE = Script("reliable/reschedule")
GET = Script("reliable/get")
LIST = Script("reliable/list")
STATS = Script("reliable/stats")
EVICTED = Script("reliable/evicted")
MEND = Script("reliable/mend")
SUMMON = Script("reliable/summon")
PURGE = Script("reliable/purge")
REDRIVE = Script("reliable/redrive")
DROP_DEAD = Script("reliable/drop_dead")
TRIM_DEAD = Script("reliable/trim_dead")
FINISH = Script("reliable/finish")
OUTCOME = Script("reliable/outcome")
AWAIT = Script("reliable/await")
RESUME = Script("reliable/resume")
SCHEDULE = Script("reliable/schedule")
UNSCHEDULE = Script("reliable/unschedule")
PAUSE_SCHEDULE = Script("reliable/pause_schedule")
RESUME_SCHEDULE = Script("reliable/resume_schedule")
OCCUR = Script("reliable/occur")
RECUR = Script("reliable/recur")
REFILL = Script("reliable/refill")
CONFIGURE = Script("reliable/configure")
RENUMBER = Script("reliable/renumber")
VACATE = Script("reliable/vacate")
REPARTITION = Script("reliable/repartition")
COPY_SETTINGS = Script("reliable/copy_settings")
SET_GROUP = Script("reliable/set_group")
LIST_GROUPS = Script("reliable/list_groups")
TALLY = Script("reliable/tally")
ACTIVITY = Script("reliable/activity")
REGISTER = Script("reliable/register")
LIST_WORKERS = Script("reliable/list_workers")

Part = str | bytes | int

PAGE = 100
"""How many messages one script looks at or drops: a script blocks the whole server while it
runs.
"""
# Prefix of the record of a schedule that ended while one of its occurrences was being handled.
_ENDED = b'{"ended":'
# The replies of redrive.lua for letters that stay, and for one that was empty.
_TAKEN, _UNREADABLE, _EMPTY = -1, -2, -3


class ReliableStore:
    """Reads and changes what the server has of one queue.

    Attributes:
        client: Runs the calls.
        keys: The queue's keys.
    """

    def __init__(self, client: RedisClient, keys: ReliableKeys) -> None:
        self.client: RedisClient = client
        self.keys: ReliableKeys = keys

    # Settings

    async def settings(self) -> StoredSettings:
        """Return the settings that are stored here: those of the queue, or a partition's copy."""
        return StoredSettings.of(await self.client.command("HMGET", self.keys.settings, *FIELDS))

    async def configure(
        self, mode: Literal["declare", "change"], changes: Declared, *, above: str = ""
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
        return _changed(await self._run(CONFIGURE, mode, above, *parts))

    async def renumber(
        self, step: Literal["hold", "commit", "release"], token: str, changes: Declared
    ) -> tuple[ChangeOutcome, StoredSettings]:
        """Give the queue another number of partitions, and other changes, in its first partition.

        Args:
            step: What to do: see ``renumber.lua``.
            token: Names the caller.
            changes: The settings, among them ``partitions``.

        Returns:
            As :meth:`configure`.
        """
        others = chain.from_iterable(
            change for change in changes.items() if change[0] != "partitions"
        )
        return _changed(await self._run(RENUMBER, step, token, changes["partitions"], *others))

    async def vacate(self, epoch: str) -> bool:
        """Drop the copy of the settings if nothing is in the partition, and return whether that is
        so. From then on, only a copy of a higher epoch is accepted.
        """
        return bool(await self._run(VACATE, epoch))

    async def repartition(
        self,
        step: Literal["begin", "hold", "move", "resume", "end", "undo", "give up"],
        token: str,
        partitions: int,
    ) -> tuple[ChangeOutcome, StoredSettings]:
        """Go on with moving the queue to another number of partitions, in its first partition.

        ``repartition.lua`` explains the steps. ``token`` names the caller. Returns as
        :meth:`configure`.
        """
        return _changed(await self._run(REPARTITION, step, token, partitions))

    async def copy_settings(self, settings: StoredSettings, partition: int) -> str:
        """Replace the copy of the settings in this partition, unless it is newer.

        Returns:
            The epoch of the copy that is there now.

        Raises:
            SettingsChanged: Another release has written it.
        """
        derived = ("layout", "epoch", "renumbering", "moving")
        parts = chain.from_iterable(
            item for item in settings.fields.items() if item[0] not in derived
        )
        epoch: bytes = await self._run(COPY_SETTINGS, partition, settings.epoch, *parts)
        return epoch.decode(errors="replace")

    async def set_group(self, partitions: int, group: str, what: str, limit: str = "") -> bool:
        """Pause or resume a group, or give it a limit of its own.

        Args:
            partitions: The number of partitions by which the group lies here.
            group: The group's name.
            what: ``"pause"``, ``"resume"`` or ``"limit"``.
            limit: The limit, as the server stores it; empty for that of the queue.

        Returns:
            Whether it was paused.

        Raises:
            SettingsChanged: The queue has another number of partitions. Nothing was changed.
        """
        return bool(await self._run(SET_GROUP, partitions, group, what, limit))

    async def groups(self, first: str, limit: int, *, after: bool = False) -> list[StoredGroup]:
        """List up to ``limit`` groups by name, from one on, or from behind it."""
        found: list[StoredGroup] = []
        name: str | bytes = first
        while len(found) < limit:
            asked = min(PAGE, limit - len(found))
            some = await self._run(LIST_GROUPS, name, int(after), asked)
            found += map(StoredGroup.of, some)
            if len(some) < asked:
                break
            name, after = found[-1].name, True
        return found

    # Offering

    async def forget_calls(self, calls: Sequence[str]) -> None:
        """Delete the replies that are kept for repetitions of calls, by their keys."""
        await self.client.command("UNLINK", *calls)

    # Claiming

    async def claim(
        self,
        call: str,
        number: int,
        limit: int,
        policy: Policy,
        signature: str,
        *,
        may_be_suspect: bool,
        held: Claim | None,
        alone: bool,
    ) -> ClaimReply:
        """Claim due messages, without repeating the call.

        Args:
            call: The key of the client's claims, which tells :meth:`release_call` what the last one
                has handed out.
            number: Tells it from the earlier ones with this key.
            limit: The largest number of messages.
            policy: The settings of those who want the messages.
            signature: Published with the notice to other clients; empty for no notice.
            may_be_suspect: Whether the client may have a suspect.
            held: The suspect of this queue that the client has at work, if any.
            alone: Whether the client has nothing at work, and makes no other claim.

        Raises:
            SettingsChanged: The settings have the layout of another release.
        """
        reply = await self.client.run_once(
            CLAIM,
            (*self.keys.of_script(CLAIM), call),
            (
                number,
                limit,
                policy.lease_us,
                policy.max_attempts,
                signature,
                int(may_be_suspect),
                int(alone),
                "" if held is None else held.id,
                "" if held is None else held.token,
            ),
            lambda _: None,
        )
        return ClaimReply._make(reply)

    async def release_call(self, call: str, number: int) -> None:
        """Give back every message that a claim has handed out, whose answer was lost.

        If the claim arrives later, it hands out nothing.
        """
        keys = (*self.keys.of_script(RELEASE_CALL), call)
        await self.client.run(RELEASE_CALL, keys, (number,))

    # The ends of claims

    def ack_request(self, claims: Sequence[Claim]) -> Request:
        """Build the call that deletes handled messages.

        The reply has 1 for each, or 0 if the lease was not ours any more.
        """
        return Request(ACK, self.keys.of_script(ACK), _by_token(claims))

    def finish_request(self, claims: Sequence[Claim]) -> Request:
        """Build the call that deletes handled messages, and keeps their results and attempts.

        The reply is as for :meth:`ack_request`.
        """
        args: list[Part] = [_runs_of(claims)]
        for claim in claims:
            payload = getattr(claim, "result", None)
            args += (
                claim.id,
                offered_of(claim.body),
                # It was tried before, or redriven.
                int(claim.attempt > 1 or claim.known_due_us is not None),
                attempt_of(claim),
                b"" if payload is None else b"=" + payload,
            )
        return Request(FINISH, self.keys.of_script(FINISH), args)

    def nack_request(
        self, claim: Claim, delay_us: int, error: str, *, counts: bool = True, attempt: bytes = b""
    ) -> Request:
        """Build the call that makes a message due again after ``delay_us``.

        ``counts`` tells whether the attempt counts, and ``attempt`` is what to record about it, if
        anything. The reply is as for :meth:`ack_request`.
        """
        args = (*claim.name, delay_us, int(counts), error, offered_of(claim.body), attempt)
        return Request(NACK, self.keys.of_script(NACK), args)

    def bury_request(self, claim: Claim, why: str, attempt: bytes = b"") -> Request:
        """Build the call that makes a message a dead letter; ``why`` is JSON.

        ``attempt`` and the reply are as for :meth:`nack_request`.
        """
        args = (*claim.name, why, offered_of(claim.body), attempt)
        return Request(BURY, self.keys.of_script(BURY), args)

    def release_request(self, claims: Iterable[Claim], *, is_begun: bool = False) -> Request:
        """Build the call that gives messages back.

        Those that no handler has begun do not count as started. The reply is as for
        :meth:`ack_request`.
        """
        parts = [
            part
            for claim in claims
            for part in (*claim.name, "" if is_begun else claim.start.at_us if claim.start else 0)
        ]
        return Request(RELEASE, self.keys.of_script(RELEASE), parts)

    async def extend(
        self, claims: Sequence[Claim], lease_us: int, *, alone: bool = True
    ) -> Extended:
        """Make leases end ``lease_us`` from now. If not ``alone``, messages that were alone in this
        client are not any more.
        """
        now_us, *held = await self._run(EXTEND, lease_us, int(alone), *_by_token(claims))
        return Extended(now_us, [bool(each) for each in held])

    # By id

    async def cancel(self, ids: Sequence[str | bytes], *, leased: bool = False) -> list[bool]:
        """Remove messages, and return which were there.

        Those that workers have stay unless ``leased`` is true.
        """
        return [bool(each) for each in await self._run(CANCEL, int(leased), *ids)]

    async def free_slots(self, claims: Sequence[Claim]) -> None:
        """Free the slots of cancelled messages whose handlers have ended."""
        await self._run(FREE_SLOTS, *(part for claim in claims for part in claim.name))

    async def reschedule(self, ids: Sequence[str | bytes], when: When) -> list[bool]:
        """Make messages due then that no worker has, and return which were
        there.
        """
        return [bool(each) for each in await self._run(RESCHEDULE, when, *ids)]

    async def get(self, id: str | bytes) -> StoredMessage | None:  # noqa: A002
        """Return a live message; None if there is none with that id."""
        (found,) = await self.get_many([id.encode() if isinstance(id, str) else id])
        return found

    async def get_many(self, ids: Sequence[bytes]) -> list[StoredMessage | None]:
        """Return live messages as :meth:`get` does."""
        return [
            None if facts is None else StoredMessage.of(name, facts)
            for name, facts in zip(ids, await self._run(GET, *ids), strict=True)
        ]

    async def outcome(self, id: str) -> tuple[Outcome, StoredMessage | None]:  # noqa: A002
        """Return what is known about the end of a message, and the message if it is alive."""
        *outcome, live = await self._run(OUTCOME, id)
        return Outcome.of(outcome), None if live is None else StoredMessage.of(id.encode(), live)

    async def await_end(self, id: str, for_us: int) -> Outcome:  # noqa: A002
        """Return what is known about the end of a message; if it is alive, have its end announced
        if it comes within ``for_us``.
        """
        return Outcome.of(await self._run(AWAIT, id, for_us))

    async def times(self, message: StoredMessage) -> MessageTimes:
        """Return what is stored about a message's times, beyond what :meth:`get` returns."""
        record = await self.client.command("HGET", self.keys.named("attempts"), message.id)
        expiry = await self.client.command("HGET", self.keys.expiries, message.id)
        return MessageTimes.of(message.body, record, expiry)

    async def expiries(self, ids: Sequence[bytes]) -> list[int | None]:
        """Return when the time to live of each message ends; None if it has none."""
        found = await self.client.command("HMGET", self.keys.expiries, *ids)
        return [None if expiry is None else parse_us(expiry) for expiry in found]

    async def taken_until(self, ids: Sequence[bytes]) -> list[int | None]:
        """Return until when each id counts as taken, whatever becomes of the message; None if it
        does not.
        """
        found = await self.client.command("ZMSCORE", self.keys.done, *ids)
        return [None if until is None else parse_us(until) for until in found]

    # Inspection and cleanup

    async def depth(self) -> QueueDepth:
        """Count the messages by state."""
        delayed, ready, leased, dead, oldest_us, paused = await self._run(STATS)
        return QueueDepth(delayed, ready, leased, dead, oldest_us / 1_000_000, paused=bool(paused))

    async def missing_keys(self) -> str:
        """Return what seems to be missing of the queue's keys; empty if nothing is.

        Servers evict whole keys if their memory is short and they may.
        """
        lost, out_of_line, is_unlisted = await self._run(EVICTED)
        if lost:
            return f"{lost:,} messages have lost their content"
        if out_of_line:
            return f"{out_of_line:,} messages of groups wait where no worker finds them"
        return "messages are in no list" if is_unlisted else ""

    async def mend(self) -> None:
        """Put messages back where they wait. Those whose contents were evicted are lost."""
        cursor = await self._run(MEND, 0)
        while cursor != b"0":
            cursor = await self._run(MEND, cursor)

    async def tally(self, counts: str) -> None:
        """Add what a client has done to the history, without repeating the call."""
        await self.client.run_once(TALLY, self.keys.of_script(TALLY), (counts,), lambda _: None)

    def register_request(self, worker: str, counts_us: int, facts: str) -> Request:
        """Build the call that lists a client among those that work on the queue, for ``counts_us``;
        0 removes it.
        """
        return Request(REGISTER, self.keys.of_script(REGISTER), (worker, counts_us, facts))

    async def workers(self) -> list[WorkerInfo]:
        """Return the clients that work on the queue."""
        found: list[WorkerInfo | None] = []
        asked = True
        while asked:
            some = await self._run(LIST_WORKERS, len(found), PAGE)
            pairs = zip(some[::2], some[1::2], strict=True)
            found += [worker_of(self.keys.name, until, facts) for until, facts in pairs]
            asked = len(some) == 2 * PAGE
        return [each for each in found if each is not None]

    async def activity(self, unit: Unit, span: int) -> list[Activity]:
        """Return what happened in the last minutes or hours, oldest first."""
        _, *found = await self._run(ACTIVITY, unit, span)
        return [activity_of(unit, each) for each in found]

    async def page(self, state: str, offset: int, limit: int) -> list[StoredMessage | None]:
        """List messages in one state, with None in the place of each that has expired.

        If these are fewer than ``limit``, there are no more. No script looks at more than
        :data:`PAGE`.
        """
        found: list[StoredMessage | None] = []
        for at in range(0, limit, PAGE):
            asked = min(PAGE, limit - at)
            some = await self._run(LIST, state, 0, offset + at, asked)
            pairs = zip(some[::2], some[1::2], strict=True)
            found += [None if it is None else StoredMessage.of(name, it) for name, it in pairs]
            if len(some) < 2 * asked:
                break
        return found

    async def heads(self, state: str, offset: int, limit: int) -> list[MessageHead | None]:
        """List up to :data:`PAGE` messages as :meth:`page` does, without their bodies."""
        some = await self._run(LIST, state, 1, offset, limit)
        return [None if it is None else MessageHead.of(it) for it in some[1::2]]

    async def length(self, state: str) -> int:
        """Count the messages in one state as :meth:`page` does, with those that have expired."""
        count, _ = await self._run(LIST, state, 0, 0, 0)
        return int(count)

    async def count_expired(self, state: str) -> int:
        """Count the messages in one state that have expired."""
        _, expired = await self._run(LIST, state, 0, 0, 0)
        return int(expired)

    async def purge(self, state: str) -> Purged:
        """Drop up to :data:`PAGE` messages in one state, or in ``"all"``."""
        dropped, expired = await self._run(PURGE, state, PAGE)
        return Purged(dropped, dropped + expired < PAGE)

    async def pause(self) -> None:
        """Stop all claims."""
        await self.client.command("SET", self.keys.paused, "1")

    async def resume(self) -> bool:
        """End a pause, and return whether there was one."""
        return bool(await self._run(RESUME))

    async def summon(self, share: int, left: int) -> None:
        """Call as many dormant clients as the due messages need if each takes ``share``.

        For ``left`` of them, those that listen suffice.
        """
        await self._run(SUMMON, share, left)

    async def due_counts(self, edges: Sequence[int]) -> list[int]:
        """Return how many waiting messages come due between each of some moments and the next, and
        after the last one.
        """
        sets = (*self.keys.waiting, self.keys.named("grouped"))
        return await due_counts(self.client, sets, edges)

    async def remove(self) -> int:
        """Remove every key of the queue, and return how many there were."""
        found = {
            key.decode(errors="surrogateescape")
            async for key in self.client.scan(self.keys.pattern, self.keys.wake)
        }
        return sum([int(await self.client.command("UNLINK", key)) for key in found])

    # Dead letters

    async def count_dead(self) -> int:
        """Count the dead letters."""
        return int(await self.client.command("ZCARD", self.keys.dead))

    async def dead_page(self, offset: int, limit: int) -> list[StoredLetter]:
        """List up to ``limit`` dead letters, oldest first; ``limit`` is at least 1."""
        deaths = await self.deaths(offset, limit)
        return [letter for letter in await self.letters_of(deaths) if letter is not None]

    async def deaths(self, offset: int, limit: int) -> list[Death]:
        """List up to ``limit`` dead letters, oldest first, without reading them; ``limit`` is at
        least 1.
        """
        found = await self.client.command(
            "ZRANGE", self.keys.dead, offset, offset + limit - 1, "WITHSCORES"
        )
        return [Death(name, parse_us(at)) for name, at in zip(found[::2], found[1::2], strict=True)]

    async def letters_of(self, deaths: Sequence[Death]) -> list[StoredLetter | None]:
        """Read dead letters; None for each that was redriven or dropped meanwhile.

        No command reads more than :data:`PAGE`.
        """
        found: list[StoredLetter | None] = []
        for at in range(0, len(deaths), PAGE):
            some = deaths[at : at + PAGE]
            letters = await self.client.command(
                "HMGET", self.keys.dead_messages, *(each.name for each in some)
            )
            found += [
                None if letter is None else StoredLetter(each.name, letter, each.died_us)
                for each, letter in zip(some, letters, strict=True)
            ]
        return found

    async def dead_letter(self, name: bytes) -> StoredLetter | None:
        """Return one dead letter; None if there is none of that name."""
        died = await self.client.command("ZSCORE", self.keys.dead, name)
        letter = await self.client.command("HGET", self.keys.dead_messages, name)
        return (
            None if died is None or letter is None else StoredLetter(name, letter, parse_us(died))
        )

    async def dead_names(self, offset: int, limit: int) -> Sequence[bytes]:
        """List the names of up to ``limit`` dead letters, oldest first; ``limit`` is at least 1."""
        names: list[bytes] = await self.client.command(
            "ZRANGE", self.keys.dead, offset, offset + limit - 1
        )
        return names

    async def find_dead(self, chosen: Iterable[str | bytes]) -> list[str | bytes]:
        """Return the names of the dead letters that exist, for ids of messages (str) and names of
        letters (bytes); each once.

        Of several letters with one id, the oldest comes first.
        """
        wanted = list(dict.fromkeys(chosen))
        if not wanted:
            return wanted
        ids = [each.encode() for each in wanted if isinstance(each, str)]
        # See lua/reliable/include/letters.lua.
        stamps = (
            await self.client.command("HMGET", self.keys.dead_messages, *(id + b"\0" for id in ids))  # noqa: A001
            if ids
            else []
        )
        some = [[each] for each in wanted if isinstance(each, bytes)]
        some += [
            [id, *(id + b"\0" + stamp for stamp in (more or b"").split())]
            for id, more in zip(ids, stamps, strict=True)  # noqa: A001
        ]
        names = [name for each in some for name in each]
        died = dict(
            zip(names, await self.client.command("ZMSCORE", self.keys.dead, *names), strict=True)
        )
        there = (
            [(float(died[name]), name) for name in each if died[name] is not None] for each in some
        )
        return [name for each in there for _, name in sorted(each)]

    async def redrive(self, names: Sequence[str | bytes]) -> Redriven:
        """Requeue dead letters that existed a moment ago.

        A letter stays if it is unreadable, or if a live message has its id.
        """
        replies = await self._run(REDRIVE, *names)
        stayed = replies.count(_TAKEN) + replies.count(_UNREADABLE)
        # A missing letter has been requeued: the reply to a first try was lost.
        return Redriven(len(names) - stayed - replies.count(_EMPTY), stayed)

    async def drop_dead(self, names: Sequence[str | bytes]) -> None:
        """Drop dead letters for good."""
        await self._run(DROP_DEAD, *names)

    async def trim_dead(self) -> int:
        """Drop some of the dead letters that are too old or too many, and return how many."""
        return int(await self._run(TRIM_DEAD))

    # Recurring messages

    async def now_us(self) -> int:
        """Return the server's time, shifted as far as tests have moved it."""
        shift = await self.client.command("HGET", self.keys.schedules, "")
        return await self.client.time_us() + int(shift or 0)

    async def schedule(
        self,
        partitions: int,
        name: str,
        timing: Timing,
        version: int,
        message: OptionsMessage,
        moments: Sequence[int],
    ) -> int:
        """Make a message recur, and return when it is due next.

        ``moments`` are the next ones if there is no period. Raises SettingsChanged if the queue has
        another number of partitions.
        """
        due_us, _ = await self._run(
            SCHEDULE,
            partitions,
            name,
            timing.text,
            version,
            timing.every_us,
            message.priority,
            message.ttl_us,
            message.content,
            *moments,
        )
        return int(due_us)

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule and its waiting message, and return whether it was there."""
        return bool(await self._run(UNSCHEDULE, name))

    async def pause_schedule(self, name: str) -> bool:
        """Pause a schedule, drop its waiting message, and return whether there is that schedule."""
        return bool(await self._run(PAUSE_SCHEDULE, name))

    async def resume_schedule(self, name: str) -> bool:
        """Resume a schedule, and return whether there is one of that name."""
        return bool(await self._run(RESUME_SCHEDULE, name))

    async def schedules(self) -> StoredSchedules:
        """Return all schedules."""
        stored = await self.client.command("HGETALL", self.keys.schedules)
        records: dict[bytes, bytes] = dict(zip(stored[::2], stored[1::2], strict=True))
        shift_us = int(records.pop(b"", 0))
        return StoredSchedules(
            {name: record for name, record in records.items() if not record.startswith(_ENDED)},
            shift_us,
        )

    async def schedule_names(self, cursor: bytes, count: int) -> tuple[bytes, set[str]]:
        """Return the next cursor and the names of about ``count`` schedules. Some may come twice.

        The first cursor is ``b"0"``, and so is the one after the last page.
        """
        following, found = await self.client.command(
            "HSCAN", self.keys.schedules, cursor, "COUNT", count
        )
        return following, {name.decode(errors="replace") for name in found[::2] if name}

    async def schedule_record(self, name: str) -> bytes | None:
        """Return the record of one schedule; None if there is none of that name."""
        record: bytes | None = await self.client.command("HGET", self.keys.schedules, name)
        return record

    async def occur(self, claims: Sequence[Claim]) -> list[Occurrence]:
        """Put in place what follows the claimed occurrences, and return what became of each of
        them.
        """
        reply = await self._run(OCCUR, *(part for claim in claims for part in claim.name))
        return [
            Occurrence(bool(handed_out), moments)
            for handed_out, moments in zip(reply[::2], reply[1::2], strict=True)
        ]

    async def recur(self, names: Sequence[str]) -> list[int]:
        """Put missing occurrences in place.

        Returns:
            How many were missing; then for each schedule how many moments are known beyond its next
                one: -1 if that does not matter, -2 if there is no such schedule.
        """
        reply: list[int] = await self._run(RECUR, *names)
        return reply

    async def refill(self, name: str, timing: Timing, moments: Sequence[int]) -> None:
        """Store more moments of a schedule, if it still has that timing."""
        await self._run(REFILL, name, timing.text, *moments)

    # Internals

    async def _run(self, script: Script, *args: Part) -> Any:
        return await self.client.run(script, self.keys.of_script(script), args)


def _changed(reply: Any) -> tuple[ChangeOutcome, StoredSettings]:
    outcome, *values = reply
    return ChangeOutcome(outcome.decode()), StoredSettings.of(values)


def _by_token(claims: Sequence[Claim]) -> list[Part]:
    """Return how many claims in a row have the same token, and the token; then their ids."""
    return [_runs_of(claims), *(claim.id for claim in claims)]


def _runs_of(claims: Sequence[Claim]) -> bytes:
    """Return how many claims in a row have the same token, and the token."""
    runs, token, count = [], b"", 0
    for claim in claims:
        if claim.token != token:
            runs.append(b"%d:%b" % (count, token))
            token, count = claim.token, 0
        count += 1
    runs.append(b"%d:%b" % (count, token))
    return b" ".join(runs[1:])
