"""Run random operations on a real reliable queue and on a plain model of it, and compare them.

Time passes in whole hours, by changing what is stored: see reliable_store.py. A test itself takes
only a fraction of a second, so the speed of the machine does not matter: operations that fall on
the same hour keep the order in which they were made.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import delayq
from delayq._engine.suspects import ClaimTerms
from delayq._redis.client import RedisClient
from delayq.admin.reliable import ReliableInspector
from tests.support.machines import QueueMachine, opened, run_machine
from tests.support.reliable_store import HOUR, Stored, hours

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterable, Iterator

    from delayq import Client, Message
    from delayq._reliable.replies import ClaimReply
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

LEASE = 4
MAX_ATTEMPTS = 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "forgetful": {"expired": "drop", "dedup_window": 2 * HOUR},
    "small": {"expired": "dead", "max_size": 4},
    "keeping": {"keep": 3 * HOUR, "dedup_window": 2 * HOUR},
    "trimmed": {
        "expired": "dead",
        "keep": 4 * HOUR,
        "max_kept": 3,
        "keep_dead": 3 * HOUR,
        "max_dead": 2,
    },
}

Moment = tuple[float, int, float]
"""When something is due: the hour, the operation that set it, and its place within that operation.

Sorts as on the server.
"""

# Few ids, so that they are often taken. With None, an id is generated.
IDS = st.sampled_from(["a", "b", "c", "é", None, None])
HOURS = st.integers(0, 4)
PRIORITIES, LIVES = st.sampled_from([0, 0, 1, 9]), st.sampled_from([None, None, 1, 2, 5])
DUPLICATES = st.sampled_from(["raise", "ignore", "replace"])
WINDOWS, ATTEMPTS = st.sampled_from([None, None, None, 1, 3]), st.sampled_from([None, None, 1, 2])
OFFERS = st.lists(
    st.tuples(IDS, HOURS, PRIORITIES, LIVES, WINDOWS, ATTEMPTS, DUPLICATES), min_size=1, max_size=4
)
RESULTS = st.sampled_from([None, 0, "", "a result\n\n", [1, None]])
Offered = tuple[str | None, int, int, int | None, int | None, int | None, Any]
"""Id, hours of delay, priority, hours of life after the delay, hours for which the id counts as
taken if it was given, its own limit of attempts, and what to do with a duplicate.
"""


@dataclass
class Live:
    id: str
    value: int
    priority: int
    offered: int
    moment: Moment
    expires: int | None
    max_attempts: int = MAX_ATTEMPTS
    attempts: int = 0
    error: str | None = None
    # The holder, and the due time before the lease.
    lease: object | None = None
    was_due: Moment | None = None
    # How many attempts do not count, how many leases in a row were lost, and whether the message
    # waits as a suspect.
    uncounted: int = 0
    lost: int = 0
    suspect: bool = False
    # The hour at which its last lease was lost: until then, it could not expire.
    lost_at: float = 0
    # When it is due at the latest: a claim drops it as soon as it has expired.
    due_at_most: Moment | None = None

    def lose(self) -> None:
        """Count an attempt whose lease is lost."""
        self.lost += 1
        if self.lost <= 3:
            self.uncounted += 1
        elif self.lost >= 5:
            # It is to blame for the first three as well.
            self.uncounted = max(0, self.uncounted - 3)
        self.lease, self.lost_at = None, self.moment[0]


@dataclass
class Dead:
    # Sorts like the letter's name on the server, after the first letter of that id.
    name: str
    id: str
    value: int
    priority: int
    offered: int
    max_attempts: int
    attempts: int
    reason: str
    error: str
    died: Moment


@dataclass
class Record:
    """The record of the last message with an id that was retried, died or was acknowledged."""

    value: int
    offered: int
    changed: Moment
    is_done: bool
    result: object
    attempts: list[tuple[int, str]]
    """The number of each attempt, and its error."""

    def attempts_of(self, value: int) -> list[tuple[int, str | None]]:
        """Return the attempts of a message, with None as the error of one that was lost."""
        if self.value != value:
            return []
        attempts: list[tuple[int, str | None]] = []
        for number, error in self.attempts:
            last = attempts[-1][0] if attempts else number
            attempts += [(lost, None) for lost in range(last + 1, number)]
            attempts.append((number, error))
        return attempts


@dataclass
class Held:
    message: Message[int]
    lease: object
    id: str
    attempt: int
    uncounted: int
    over: bool = False


@dataclass
class Model:
    """The expected behaviour of a reliable queue, in plain Python."""

    kind: dict[str, Any]
    now: int = 0
    step: int = 0
    live: dict[str, Live] = field(default_factory=dict)
    dead: dict[str, Dead] = field(default_factory=dict)
    names: int = 0
    # The lease of the suspect that the client has at work.
    at_work: object | None = None
    done: dict[str, int] = field(default_factory=dict)
    paused: bool = False
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def max_size(self) -> int:
        return int(self.kind.get("max_size", 1000))

    def hours(self, setting: str) -> int:
        return int(self.kind.get(setting, 0)) // HOUR

    def in_order(self) -> list[Live]:
        """Return suspects, then those that have or had a lease by its end, then the others."""
        leased = [m for m in self.live.values() if m.lease or m.suspect]
        waiting = [m for m in self.live.values() if not m.lease and not m.suspect]
        # The leases of a call end at the same moment: then the server sorts by id.
        leased.sort(key=lambda m: (not m.suspect, m.moment, m.id.encode()))
        waiting.sort(key=lambda m: (-m.priority, m.moment, m.id.encode()))
        return [*leased, *waiting]

    def state(self, message: Live) -> str:
        if message.moment[0] <= self.now:
            return "ready"
        return "leased" if message.lease else "delayed"

    def is_gone(self, message: Live) -> bool:
        """Return whether the message counts as absent: it has expired and is not leased, but no
        claim has dropped it yet.
        """
        return (
            message.expires is not None
            and message.expires <= self.now
            and self.state(message) != "leased"
        )

    def find(self, key: str) -> Live | None:
        known = self.live.get(key)
        return None if known is None or self.is_gone(known) else known

    def set_aside(self, key: str) -> None:
        """Make room for a new message with the id of an expired one."""
        known = self.live.pop(key, None)
        if known is not None:
            self.names += 1
            known.id = f"{key}\0{self.names:016}"
            self.live[known.id] = known

    def of(self, state: str) -> list[Live]:
        return [m for m in self.in_order() if self.state(m) == state and not self.is_gone(m)]

    def after(self, delay: float, place: float = 0) -> Moment:
        return (self.now + delay, self.step, place)

    def offer(self, key: str, value: int, offered: Offered, place: int) -> str:
        _, delay, priority, ttl, window, most, on_duplicate = offered
        known = self.find(key)
        if known is None:
            self.set_aside(key)
        if known is not None:
            if on_duplicate != "replace" or self.state(known) == "leased":
                return "stored" if on_duplicate == "ignore" else "duplicate"
            del self.live[key]
        elif self.done.get(key, -1) > self.now and on_duplicate != "replace":
            return "stored" if on_duplicate == "ignore" else "duplicate"
        elif sum(not self.is_gone(each) for each in self.live.values()) >= self.max_size:
            return "full"
        expires = None if ttl is None else self.now + delay + ttl
        # Within one call, messages without a delay come before those due at that very moment.
        due = self.after(delay, place)
        live = Live(key, value, priority, self.now, due, expires, most or MAX_ATTEMPTS)
        live.due_at_most = None if expires is None else (expires, self.step, math.inf)
        self.live[key] = live
        if offered[0] and window:
            self.remember(key, window)
        return "stored"

    def remember(self, key: str, window: int) -> None:
        self.done[key] = max(self.done.get(key, -1), self.now + window)

    def drops(self, message: Live) -> bool:
        """Drop or bury a message that a claim finds, if it must not be handed out any more."""
        if message.expires is not None and message.expires <= self.now:
            if self.kind.get("expired") == "dead":
                self.die(message, "expired", message.error)
        elif message.attempts - message.uncounted >= message.max_attempts:
            self.die(message, "attempts", message.error)
        else:
            return False
        del self.live[message.id]
        return True

    def find_suspect(self, ready: list[Live]) -> Live | None:
        suspect: Live | None = None
        for message in ready:
            is_next = suspect is None or message.priority > suspect.priority
            if message.suspect and is_next and not self.drops(message):
                suspect = message
        return suspect

    def line_up_lost(self) -> None:
        for message in self.live.values():
            if message.lease and self.state(message) == "ready":
                message.lose()
                message.suspect = message.lost > 1
                if not message.suspect:
                    assert message.was_due is not None
                    message.moment = message.was_due

    def claim(self, count: int) -> list[Live]:
        claimed: list[Live] = []
        if self.paused:
            return claimed
        holder = next(
            (message for message in self.live.values() if message.lease is self.at_work), None
        )
        may_have_suspect = self.at_work is None or holder is None or self.state(holder) != "leased"
        self.line_up_lost()
        ready = [message for message in self.in_order() if self.state(message) == "ready"]
        suspect = self.find_suspect(ready) if may_have_suspect else None
        for message in ready:
            if len(claimed) == count or message.suspect:
                continue
            if suspect and suspect.priority >= message.priority and not claimed:
                break
            if not self.drops(message):
                message.was_due = message.moment
                claimed.append(message)
        self.trim_dead(of_this_step=True)
        if suspect and not claimed:
            claimed = [suspect]
        else:
            suspect = None
        for message in claimed:
            message.lease, message.moment = object(), self.after(LEASE)
            message.attempts += 1
            message.suspect = False
        if suspect:
            self.at_work = suspect.lease
        return claimed

    def over(self, lease: object) -> None:
        """Note that a message is settled or lost, so that the next suspect may come."""
        if self.at_work is lease:
            self.at_work = None

    def give_back(self, message: Live) -> None:
        assert message.was_due is not None
        message.moment, message.attempts = message.was_due, message.attempts - 1
        message.lease, message.suspect, message.lost_at = None, message.lost > 1, 0

    def postpone(self, message: Live, delay: int) -> None:
        message.lease, message.lost, message.suspect, message.lost_at = None, 0, False, 0
        message.moment = self.after(delay)
        if message.due_at_most is not None:
            # If it expired while a worker had it, that is now.
            message.moment = min(message.moment, max(self.after(0), message.due_at_most))

    def die(self, message: Live, reason: str, error: str | None) -> None:
        name = key = message.id.partition("\0")[0]
        if name in self.dead:
            self.names += 1
            name = f"{key}\0{self.names:016}"
        # Messages that die in one call die at the same moment, and the server sorts them by name.
        facts = (message.max_attempts, message.attempts, reason, error or "", self.after(0))
        self.dead[name] = Dead(name, key, message.value, message.priority, message.offered, *facts)

    def bury(self, held: Held, reason: str, error: str | None) -> None:
        live = self.live.pop(held.id)
        self.die(live, reason, error or live.error)
        self.trim_dead()
        self.record_attempt(held, live, error)

    def dead_in_order(self) -> list[Dead]:
        return sorted(self.dead.values(), key=lambda one: (one.died, one.name.encode()))

    def trim_dead(self, *, of_this_step: bool = False) -> None:
        """Drop letters that are too old or too many. A claim does so if it makes a letter."""
        letters = self.dead_in_order()
        if of_this_step and not any(letter.died == self.after(0) for letter in letters):
            return
        if keep := self.hours("keep_dead"):
            letters = [letter for letter in letters if letter.died[0] + keep > self.now]
        letters = letters[-int(self.kind.get("max_dead", 1000)) :]
        self.dead = {letter.name: letter for letter in letters}

    # Records

    def record_attempt(self, held: Held, live: Live, error: str | None) -> None:
        """Record an attempt that has not handled its message."""
        self.record(Record(live.value, live.offered, self.after(0), False, None, []), held, error)

    def record(self, new: Record, held: Held, error: str | None, *, is_last: bool = True) -> None:
        """Keep a record of an attempt that has just ended. The last one of a call drops those that
        are too old or many.
        """
        if not (keep := self.hours("keep")):
            return
        known = self.records.get(held.id)
        is_same = known is not None and known.value == new.value and not known.is_done
        before = known.attempts if known is not None and is_same else []
        new.attempts = [*before, (held.attempt, error or "")][-10:]
        self.records[held.id] = new
        if not is_last:
            return
        # Those that were acknowledged in one call were so at the same moment.
        in_order = sorted(
            self.records.items(), key=lambda item: (item[1].changed, item[0].encode())
        )
        fresh = [item for item in in_order if item[1].changed[0] + keep > self.now]
        self.records = dict(fresh[-int(self.kind.get("max_kept", 1000)) :])

    def fresh_record(self, key: str) -> Record | None:
        record = self.records.get(key)
        keep = self.hours("keep")
        return None if record is None or record.changed[0] + keep <= self.now else record

    def dies(self, key: str) -> Live | None:
        """Return the message that is to become a dead letter because it has expired."""
        return self.live.get(key) if self.kind.get("expired") == "dead" else None

    def end_of(self, key: str) -> Record | Dead | None:
        """Return the last end of a message with this id: of a record, or a dead letter."""
        record = self.fresh_record(key)
        letters = [letter for letter in self.dead_in_order() if letter.id == key]
        if record is not None and record.is_done:
            return letters[-1] if letters and letters[-1].died > record.changed else record
        return letters[-1] if letters else None

    def result(self, key: str) -> tuple[object, ...]:
        """Return the result of a message; or an error, and what it tells."""
        if self.find(key) is not None:
            return (delayq.ResultTimeout,)
        if dies := self.dies(key):
            return (delayq.MessageFailed, "expired", dies.error or "")
        end = self.end_of(key)
        if isinstance(end, Dead):
            return (delayq.MessageFailed, end.reason, end.error)
        return (delayq.NoResult,) if end is None else (None, end.result)

    def history(self, key: str) -> tuple[object, ...] | None:
        """Return the state, the hours of the offer and of the end, the attempts, the result and the
        error.
        """
        record, live, end = self.fresh_record(key), self.find(key), self.end_of(key)
        if live is not None:
            attempts = [] if record is None or record.is_done else record.attempts_of(live.value)
            return (self.state(live), live.offered, None, attempts, None, "")
        if dies := self.dies(key):
            attempts = [] if record is None else record.attempts_of(dies.value)
            # A worker may have had it meanwhile.
            died = max(dies.expires or 0, dies.moment[0] if dies.lease else dies.lost_at)
            return ("dead", dies.offered, died, attempts, None, dies.error or "expired")
        if isinstance(end, Dead):
            attempts = [] if record is None else record.attempts_of(end.value)
            return ("dead", end.offered, end.died[0], attempts, None, end.error or end.reason)
        if record is None:
            return None
        state, finished = ("done", record.changed[0]) if record.is_done else ("dropped", None)
        attempts = record.attempts_of(record.value)
        return (state, record.offered, finished, attempts, record.result, "")


async def told(work: Awaitable[object]) -> tuple[object, ...]:
    """Return the result of a message; or an error, and what it tells."""
    try:
        return (None, await work)
    except delayq.MessageFailed as error:
        return (type(error), error.reason, error.error.rsplit("\n", 1)[-1])
    except (delayq.NoResult, delayq.ResultTimeout) as error:
        return (type(error),)


@contextmanager
def calls_at_most(most: int, client: Client) -> Iterator[None]:
    """Cancel whoever makes another call by this client."""
    numbers, attempt = itertools.count(1), RedisClient._attempt

    async def attempt_or_end(server: RedisClient, key: str | None, call: Any) -> Any:
        if server is client.session.server and next(numbers) > most:
            raise asyncio.CancelledError
        return await attempt(server, key, call)

    with patch.object(RedisClient, "_attempt", attempt_or_end):
        yield


class ReliableMachine(QueueMachine):
    mover: Client
    # Those that wait for the result of a message, by its id.
    waits: dict[str, asyncio.Task[object]]

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        what=OFFERS,
        delays=st.lists(HOURS, min_size=2, max_size=5),
    )
    def begin(self, kind: str, what: list[Offered], delays: list[int]) -> None:
        self.queue, self.store = self.queues[kind], self.stores[kind]
        self.run(self.forget_the_last_example())
        self.model = Model(KINDS[kind])
        self.held: list[Held] = []
        self.values = 0
        # An empty queue reveals little.
        self.offer([(None, delay // 2, delay % 2, None, None, None, "raise") for delay in delays])
        self.offer(what)

    async def forget_the_last_example(self) -> None:
        for waiting in self.waits.values():
            waiting.cancel()
        await asyncio.gather(*self.waits.values(), return_exceptions=True)
        self.waits.clear()
        await super().forget_the_last_example()

    async def server_now(self) -> datetime:
        whole, rest = await self.raw.time()
        return datetime.fromtimestamp(whole + rest / 1_000_000, UTC)

    def next_step(self) -> Model:
        self.model.step += 1
        return self.model

    # Offers

    @rule(what=OFFERS)
    def offer(self, what: list[Offered]) -> None:
        model = self.next_step()
        offers = []
        for key, delay, priority, ttl, window, most, on_duplicate in what:
            self.values += 1
            offers.append(
                delayq.Offer(
                    value=self.values,
                    id=key,
                    delay=delay * HOUR,
                    priority=priority,
                    ttl=None if ttl is None else (delay + ttl) * HOUR,
                    max_attempts=most,
                    unique_for=window * HOUR if key and window else None,
                    on_duplicate=on_duplicate,
                )
            )
        ids: list[str] = []
        problem: delayq.DuplicateMessage | delayq.QueueFull | None = None
        try:
            ids = self.run(self.queue.offer_many(offers))
        except (delayq.DuplicateMessage, delayq.QueueFull) as error:
            problem = error
        bodies = self.run(self.store.look()).bodies
        by_value = {int(body.partition(b"\n")[2]): key for key, body in bodies.items()}
        outcomes = {}
        for place, (offer, offered) in enumerate(zip(offers, what, strict=True)):
            # A generated id is unknown if its message was refused, or replaced in the same call.
            made_up = by_value.get(offer.value, f"made up {offer.value}")
            known = offered[0] or (ids[place] if ids else made_up)
            outcomes[offer.value] = (known, model.offer(known, offer.value, offered, place))
        expected = {outcome for _, outcome in outcomes.values()}
        if problem is None:
            assert expected == {"stored"}
            assert [known for known, _ in outcomes.values()] == ids
        else:
            is_duplicate = "duplicate" in expected
            assert type(problem) is (delayq.DuplicateMessage if is_duplicate else delayq.QueueFull)
            given = {key for key, *_ in what if key}
            stored = {known for known, outcome in outcomes.values() if outcome == "stored"}
            refused = {known for known, outcome in outcomes.values() if outcome != "stored"}
            assert set(problem.stored) & given == stored & given
            assert set(problem.ids) & given == refused & given

    # Taking

    def take(self, messages: list[Message[int]], expected: list[Live]) -> None:
        assert [(m.id, m.value, m.attempt, m.priority, m.state) for m in messages] == [
            (m.id, m.value, m.attempts, m.priority, "leased") for m in expected
        ]
        for message, live in zip(messages, expected, strict=True):
            self.held.append(Held(message, live.lease, live.id, live.attempts, live.uncounted))

    @rule(count=st.integers(1, 5))
    def claim(self, count: int) -> None:
        expected = self.next_step().claim(count)
        self.take(self.run(self.queue.claim(count)), expected)

    @precondition(lambda self: not self.model.paused and self.model.of("ready"))
    @rule(count=st.integers(1, 5), delay=HOURS)
    def claim_and_fail(self, count: int, delay: int) -> None:
        """Produce messages that have used attempts."""
        before = len(self.held)
        self.claim(count)
        for held in self.held[before:]:
            model = self.next_step()
            self.settle(held, model.live[held.id], held.message.nack(delay * HOUR))
            self.failed(model, held, delay, None)

    @precondition(lambda self: not self.model.paused and self.model.of("ready"))
    @rule(count=st.integers(1, 3), result=RESULTS)
    def fail_and_finish(self, count: int, result: object) -> None:
        """Produce records of several attempts."""
        self.claim_and_fail(count, 0)
        before = len(self.held)
        self.claim(count)
        for held in self.held[before:]:
            model = self.next_step()
            self.settle(held, self.live_of(held), held.message.ack(result))
            self.handled(model, held, result)

    @precondition(lambda self: not self.model.paused and self.model.of("ready"))
    @rule(count=st.integers(1, 3))
    def claim_what_others_have_had_too_long(self, count: int) -> None:
        self.claim(count)
        # A message may die in the first claim, and its letter be too old in the second.
        self.run(self.compare_waits())
        self.time_passes(LEASE)
        self.claim(5)

    @precondition(lambda self: not self.model.paused and self.model.of("ready"))
    @rule(count=st.integers(1, 5), is_late=st.booleans())
    def claim_and_lose_the_reply(self, count: int, *, is_late: bool) -> None:
        """Check that the messages of a lost reply go back, and that a claim that arrives after it
        was given up hands out nothing.
        """
        model = self.next_step()
        claims = self.queue._open.partitions[0].claims
        claims._calls.number += 1
        claims._calls.is_unsure = True
        if not is_late:
            at_work = model.at_work
            for message in model.claim(count):
                model.give_back(message)
            model.at_work = at_work
            self.run(self.claim_directly(count))
        self.run(claims._recover())
        if is_late:
            reply = self.run(self.claim_directly(count))
            assert (reply.ids, reply.wait_us) == ([], -1)

    async def claim_directly(self, count: int) -> ClaimReply:
        partition = self.queue._open.partitions[0]
        claims, suspect = partition.claims, self.suspects.suspect
        is_ours = suspect is claims._suspect
        return await partition.store.claim(
            *(claims._calls.key, claims._calls.number, count, self.queue._consumer.policy, ""),
            terms=ClaimTerms(suspect is None or is_ours, is_alone=False),
            own_suspect=suspect if is_ours else None,
        )

    # With suspects, the grouping of messages depends on the speed of the machine.
    @precondition(
        lambda self: (
            not self.model.paused
            and self.model.of("ready")
            and all(not m.lease and not m.suspect for m in self.model.of("ready"))
            # The order in which letters are dropped, too.
            and "max_dead" not in self.model.kind
        )
    )
    @rule(count=st.integers(1, 3))
    def loop_and_break(self, count: int) -> None:
        """Check that messages claimed ahead go back unchanged."""
        model = self.next_step()
        expected = model.claim(1000)
        for message in expected[count:]:
            model.give_back(message)
        for place, message in enumerate(expected[:count]):
            message.moment = model.after(LEASE, place)

        async def loop() -> list[Message[int]]:
            taken: list[Message[int]] = []
            # Time has passed without the client being told.
            self.queue._open.partitions[0].claims.wakeups.plan.invalidate()
            async with aclosing(self.queue.__aiter__()) as messages:  # type: ignore[type-var]
                if expected:
                    async for message in messages:
                        taken.append(message)
                        if len(taken) == min(count, len(expected)):
                            break
                else:
                    assert await self.queue.claim(100) == []
            await self.queue._open.partitions[0].claims.source.return_queue.drain(10)
            # How many are claimed ahead depends on the machine, so claim and release the rest too.
            rest = await self.queue.claim(100)
            for message in rest:
                await message.release()
            for message in taken:
                # Which leases end at the same moment depends on the machine, too.
                await message.extend(LEASE * HOUR)
            return taken

        self.take(self.run(loop()), expected[:count])
        # The loop made several claims: messages that died in them did so one after another.
        stored = self.run(self.store.look())
        order = {
            int(stored.dead_messages[name].split(b"\n", 2)[2]): place
            for place, name in enumerate(stored.dead)
        }
        for letter in model.dead.values():
            if letter.died[:2] == (model.now, model.step):
                letter.died = (*letter.died[:2], order[letter.value])

    # Settling

    def pick(self, data: st.DataObject) -> tuple[Held, Live | None]:
        # A worker that has lost its lease to another one matters most, and is rare.
        late = [held for held in self.held if not held.over and self.taken_over(held)]
        prefer: bool = data.draw(st.booleans())
        held: Held = data.draw(st.sampled_from(late if late and prefer else self.held))
        return held, self.live_of(held)

    def live_of(self, held: Held) -> Live | None:
        """Return the message, if its worker still has it."""
        live = self.model.live.get(held.id)
        return None if live is None or live.lease is not held.lease or held.over else live

    def taken_over(self, held: Held) -> bool:
        live = self.model.live.get(held.id)
        return live is not None and live.lease is not None and live.lease is not held.lease

    def settle(self, held: Held, live: Live | None, work: Coroutine[Any, Any, Any]) -> bool:
        """Run the operation, and return whether it should have an effect."""
        self.model.over(held.lease)
        if live is None:
            with pytest.raises(delayq.LeaseLost):
                self.run(work)
            return False
        self.run(work)
        held.over = True
        return True

    @precondition(lambda self: self.held)
    @rule(data=st.data(), result=RESULTS)
    def ack(self, data: st.DataObject, result: object) -> None:
        model = self.next_step()
        held, live = self.pick(data)
        if self.settle(held, live, held.message.ack(result)):
            self.handled(model, held, result)

    @precondition(lambda self: len(self.held) > 1)
    @rule(results=st.booleans())
    def ack_together(self, *, results: bool) -> None:
        """Acknowledge everything at once: the first leaves by itself, the others in one call."""
        model = self.next_step()
        every = [held for held in self.held if not held.over and self.live_of(held) is not None]

        async def ack() -> None:
            await asyncio.gather(
                *(held.message.ack(held.attempt if results else None) for held in every)
            )

        self.run(ack())
        for place, held in enumerate(every):
            model.over(held.lease)
            held.over = True
            self.handled(
                model,
                held,
                held.attempt if results else None,
                call=min(place, 1),
                is_last=place == 0 or held is every[-1],
            )

    def handled(
        self,
        model: Model,
        held: Held,
        result: object = None,
        *,
        call: int = 0,
        is_last: bool = True,
    ) -> None:
        live = model.live.pop(held.id)
        if "dedup_window" in model.kind:
            model.remember(held.id, 2)
        record = Record(live.value, live.offered, model.after(0, call), True, result, [])
        model.record(record, held, None, is_last=is_last)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=HOURS, error=st.sampled_from([None, "it broke"]))
    def nack(self, data: st.DataObject, delay: int, error: str | None) -> None:
        model = self.next_step()
        held, live = self.pick(data)
        if self.settle(held, live, held.message.nack(delay * HOUR, error)):
            self.failed(model, held, delay, error)

    def failed(self, model: Model, held: Held, delay: int, error: str | None) -> None:
        live = model.live[held.id]
        if held.attempt - held.uncounted >= live.max_attempts:
            model.bury(held, "attempts", error)
        else:
            live.error = error or live.error
            model.postpone(live, delay)
            model.record_attempt(held, live, error)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=HOURS)
    def snooze(self, data: st.DataObject, delay: int) -> None:
        model = self.next_step()
        held, live = self.pick(data)
        if self.settle(held, live, held.message.snooze(delay * HOUR)):
            self.snoozed(model, held, delay)

    def snoozed(self, model: Model, held: Held, delay: int) -> None:
        live = model.live[held.id]
        live.attempts -= 1
        model.postpone(live, delay)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        model = self.next_step()
        held, live = self.pick(data)
        if self.settle(held, live, held.message.bury("no good")):
            model.bury(held, "no good", None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.next_step()
        held, live = self.pick(data)
        if self.settle(held, live, held.message.release()):
            self.untouched(held)

    def untouched(self, held: Held) -> None:
        self.model.give_back(self.model.live[held.id])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), duration=st.integers(1, 6))
    def extend(self, data: st.DataObject, duration: int) -> None:
        model = self.next_step()
        held, live = self.pick(data)
        at_work = model.at_work
        if self.settle(held, live, held.message.extend(duration * HOUR)):
            held.over, model.at_work = False, at_work
            model.live[held.id].moment = model.after(duration)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), how=st.sampled_from(["end", "raise", "again", "snooze", "reject", "cancel"])
    )
    def handle(self, data: st.DataObject, how: str) -> None:
        model = self.next_step()
        held, live = self.pick(data)

        async def handle() -> None:
            raising: dict[str, BaseException] = {
                "raise": ZeroDivisionError("divided"),
                "again": delayq.RetryAfter(2 * HOUR, "busy"),
                "snooze": delayq.Snooze(2 * HOUR),
                "reject": delayq.Reject("bad"),
                "cancel": asyncio.CancelledError(),
            }
            try:
                async with held.message:
                    if how in raising:
                        raise raising[how]
            except ZeroDivisionError:
                assert how == "raise"
            except asyncio.CancelledError:
                assert how == "cancel"

        if live is None and how in ("raise", "cancel"):
            # The block's own error propagates. A lost lease is logged, or raised at its start.
            model.over(held.lease)
            with suppress(delayq.LeaseLost):
                self.run(handle())
            return
        if not self.settle(held, live, handle()):
            return
        if how == "end":
            self.handled(model, held)
        elif how == "raise":
            self.failed(model, held, 1, "ZeroDivisionError: divided")
        elif how == "again":
            self.failed(model, held, 2, "busy")
        elif how == "snooze":
            self.snoozed(model, held, 2)
        elif how == "reject":
            model.bury(held, "bad", None)
        else:
            self.untouched(held)

    # By id

    def pick_free(self, data: st.DataObject) -> tuple[str, Live | None]:
        """Pick an id, and return its message if no worker has it."""
        keys = sorted(key for key in self.model.live if "\0" not in key)
        key: str = data.draw(st.sampled_from([*keys, "none"]))
        known = self.model.find(key)
        is_free = known is not None and self.model.state(known) != "leased"
        return key, known if is_free else None

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        model = self.next_step()
        key, free = self.pick_free(data)
        assert self.run(self.queue.cancel(key)) is (free is not None)
        if free is not None:
            del model.live[key]

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), delay=HOURS)
    def reschedule(self, data: st.DataObject, delay: int) -> None:
        model = self.next_step()
        key, free = self.pick_free(data)
        assert self.run(self.queue.reschedule(key, delay * HOUR)) is (free is not None)
        if free is not None:
            if free.lease:
                free.lose()
            model.postpone(free, delay)

    @precondition(lambda self: self.model.hours("keep") and self.model.live)
    @rule(data=st.data())
    def wait_for_a_result(self, data: st.DataObject) -> None:
        """Check that the end of the message wakes the call, or those that look instead of it."""
        self.next_step()
        keys = sorted(key for key in self.model.live if "\0" not in key)
        key: str = data.draw(st.sampled_from(keys or ["none"]))

        async def wait() -> None:
            if self.model.find(key) is not None and key not in self.waits:
                self.waits[key] = asyncio.create_task(self.queue.result(key))
                while not await self.raw.zscore(self.store.keys.awaited, key):
                    await asyncio.sleep(0)

        self.run(wait())

    # The whole queue

    @precondition(lambda self: self.model.live or self.model.done)
    @rule(passed=st.integers(1, 5))
    def time_passes(self, passed: int) -> None:
        model = self.next_step()
        model.now += passed
        if not any(map(model.fresh_record, model.records)):
            # The last one takes the others with it.
            model.records.clear()
        self.run(self.store.let_pass(passed * HOUR))
        # Time has passed without those that wait for the end of a message.
        self.queue._open.notifications.wake_all()
        # Workers tell the server when the messages that they have were offered.
        for held in self.held:
            claim = held.message._claim
            offered = int(claim.body[:16]) - passed * HOUR * 1_000_000
            claim.body = b"%016d%b" % (offered, claim.body[16:])

    @precondition(lambda self: self.model.paused or self.model.of("ready"))
    @rule()
    def pause_or_resume(self) -> None:
        if self.model.paused:
            assert self.run(self.queue.resume())
        else:
            self.run(self.queue.pause())
        self.model.paused = not self.model.paused

    # Now and then, because it takes hundreds of calls.
    @precondition(lambda self: self.model.step % 4 == 0 and not self.model.of("leased"))
    @rule(partitions=st.integers(2, 3), calls=st.lists(st.integers(1, 150), min_size=2, max_size=2))
    def repartition(self, partitions: int, calls: list[int]) -> None:
        """Move everything to other partitions and back, each time interrupted and continued."""
        self.next_step()

        async def move() -> None:
            for number, most in zip((partitions, 1), calls, strict=True):
                with suppress(asyncio.CancelledError), calls_at_most(most, self.mover):
                    await ReliableInspector.of(self.mover, self.queue.name).repartition(number)
                await ReliableInspector.of(self.mover, self.queue.name).repartition(number)

        self.run(move())

    @precondition(lambda self: len(self.model.live) > 3)
    @rule(state=st.sampled_from(["delayed", "ready", "all"]))
    def purge(self, state: Any) -> None:
        model = self.next_step()
        gone = [each for each in model.live.values() if state in ("all", model.state(each))]
        purged = self.run(self.queue.purge(state))
        assert purged == sum(not model.is_gone(message) for message in gone)
        for message in gone:
            del model.live[message.id]

    @precondition(lambda self: self.model.dead)
    @rule(data=st.data(), everything=st.booleans())
    def redrive(self, data: st.DataObject, everything: bool) -> None:
        model = self.next_step()
        model.trim_dead()
        letters = model.dead_in_order()
        chosen = [letter.id for letter in letters]
        if not everything:
            chosen = data.draw(st.lists(st.sampled_from([*chosen, "none"]), max_size=3))
        # Of several letters with one id, the oldest is redriven, and the others stay.
        first = {letter.id: letter for letter in reversed(letters)}
        free = [key for key in dict.fromkeys(chosen) if key in first and model.find(key) is None]
        steps: list[tuple[int, int]] = []
        progress = lambda *step: steps.append(step)
        ids = None if everything else chosen
        assert self.run(self.queue.dead.redrive(ids, progress=progress)) == len(free)
        assert steps == ([(len(chosen), len(chosen))] if chosen else [])
        for place, key in enumerate(free):
            letter = model.dead.pop(first[key].name)
            model.set_aside(key)
            due, most = model.after(0, place), letter.max_attempts
            model.live[key] = Live(
                key, letter.value, letter.priority, letter.offered, due, None, most
            )

    @precondition(lambda self: self.model.dead)
    @rule(data=st.data(), everything=st.booleans())
    def purge_dead(self, data: st.DataObject, everything: bool) -> None:
        model = self.next_step()
        model.trim_dead()
        chosen = sorted({letter.id for letter in model.dead.values()})
        if not everything:
            chosen = data.draw(st.lists(st.sampled_from([*chosen, "none"]), max_size=2))
        gone = [name for name, letter in model.dead.items() if letter.id in chosen]
        assert self.run(self.queue.dead.purge(None if everything else chosen)) == len(gone)
        for key in gone:
            del model.dead[key]

    # Invariants after each step

    @invariant()
    def everything_is_what_the_model_says(self) -> None:
        async def compare() -> None:
            self.compare_what_is_stored(await self.store.look())
            await self.compare_what_the_queue_tells()

        self.run(compare())

    def compare_what_is_stored(self, stored: Stored) -> None:
        stored.demand_no_orphans()
        model = self.model
        live = model.live
        # A message that was set aside has an unpredictable id, but each value is offered only once.
        ids = {message.value: message.id for message in live.values()}
        stored = stored.renamed(
            {key: ids[int(body.partition(b"\n")[2])] for key, body in stored.bodies.items()}
        )
        assert stored.order == [message.id for message in model.in_order()]
        assert {key: hours(moment) for key, (_, moment) in stored.live.items()} == {
            message.id: message.moment[0] - model.now for message in live.values()
        }
        assert stored.suspects == {message.id for message in live.values() if message.suspect}
        assert stored.lost == {m.id: m.lost for m in live.values() if m.lost}
        assert set(stored.leases) == {m.id for m in live.values() if m.lease or m.suspect}
        used = {m.id: m.attempts - bool(m.lease) for m in live.values()}
        assert {key: counts for key, counts in stored.attempts.items() if any(counts)} == {
            m.id: (used[m.id], m.uncounted) for m in live.values() if used[m.id] or m.uncounted
        }
        assert {key: hours(end) for key, end in stored.expiries.items()} == {
            m.id: m.expires - model.now for m in live.values() if m.expires is not None
        }
        assert {key: error.rsplit("\n", 1)[-1] for key, error in stored.errors.items()} == {
            m.id: m.error for m in live.values() if m.error
        }
        assert {key for key, end in stored.remembered.items() if end > 0} == {
            key for key, end in model.done.items() if end > model.now
        }
        assert [name.partition("\0")[0] for name in stored.dead] == [
            letter.id for letter in model.dead_in_order()
        ]
        assert stored.paused == model.paused
        assert {key: hours(moment) for key, moment in stored.record_times.items()} == {
            key: record.changed[0] - model.now for key, record in model.records.items()
        }
        assert max(stored.records_end_in) <= model.hours("keep") * HOUR * 1000

    async def compare_what_the_queue_tells(self) -> None:
        model, queue = self.model, self.queue
        live = model.live
        # Checks that cost a call take turns; everything stored is compared each time.
        states: tuple[Any, ...] = ("delayed", "ready", "leased")
        stats = await queue.stats()
        ready = model.of("ready")
        assert (stats.delayed, stats.ready, stats.leased) == tuple(len(model.of(s)) for s in states)
        assert (stats.dead, stats.paused) == (len(model.dead), model.paused)
        assert round(stats.oldest_due_age / HOUR) == max(
            (model.now - m.moment[0] for m in ready), default=0
        ) or any(model.is_gone(message) for message in live.values())
        for state in states[model.step % 3 :][:1]:
            seen = await queue.list(state)
            assert [(m.id, m.value, m.attempt, m.priority, m.state) for m in seen] == [
                (m.id, m.value, m.attempts, m.priority, state) for m in model.of(state)
            ]
        for known in sorted(key for key in live if "\0" not in key)[model.step % 5 :][:1]:
            message = await queue.get(known)
            expected = live[known]
            assert (message is None) == model.is_gone(expected)
            if message is None:
                continue
            assert (message.value, message.attempt) == (expected.value, expected.attempts)
            assert message.state == model.state(expected)
            assert (message.last_error or "").rsplit("\n", 1)[-1] == (expected.error or "")
        await self.compare_results(
            sorted({*live, *model.records, *model.dead})[model.step % 4 :][:2]
        )
        await self.compare_waits()
        if model.step % 3:
            return
        assert await queue.get("none") is None
        letters = await queue.dead.list() if model.dead else []
        if model.dead:
            # Listing them drops the old ones.
            model.trim_dead()
        assert [(x.id, x.value, x.priority, x.attempt, x.reason, x.error) for x in letters] == [
            (x.id, x.value, x.priority, x.attempts, x.reason, x.error)
            for x in model.dead_in_order()
        ]

    async def compare_results(self, ids: Iterable[str]) -> None:
        model, queue = self.model, self.queue
        if not model.hours("keep"):
            return
        for key in (each for each in ids if "\0" not in each):
            assert await told(queue.result(key, 0)) == model.result(key)
            history, expected = await queue.history(key), model.history(key)
            assert (history is None) == (expected is None)
            if history is None or expected is None:
                continue
            attempts = [
                (attempt.number, None if attempt.started_at is None else attempt.error)
                for attempt in history.attempts
            ]
            now = await self.server_now()
            offered, finished = (
                None if moment is None else model.now + round((moment - now).total_seconds() / HOUR)
                for moment in (history.offered_at, history.finished_at)
            )
            facts = (history.state, offered, finished, attempts, history.result, history.error)
            assert facts == expected

    async def compare_waits(self) -> None:
        """Check that exactly those are woken whose message has ended."""
        for key, waiting in list(self.waits.items()):
            expected = self.model.result(key)
            if expected == (delayq.ResultTimeout,):
                assert not waiting.done()
                continue
            async with asyncio.timeout(20):
                assert await told(waiting) == expected
            del self.waits[key]

    def teardown(self) -> None:
        """Check that handling everything leaves only dead letters and ids that are remembered."""
        if not hasattr(self, "model"):
            return
        # Former partitions keep their settings.
        others = {key.rpartition(":") for key in self.run(self.store.others())}
        assert {prefix for prefix, _, name in others if name != "settings"} <= {
            f"delayq:{{{self.queue.name}}}:call"
        }
        self.run(self.finish())

    async def finish(self) -> None:
        if self.model.paused:
            await self.queue.resume()
        # Make everything due, end every lease, and expire what is past its time.
        await self.store.let_pass(10 * HOUR)
        while messages := await self.queue.claim(100):
            for message in messages:
                await message.ack()
        await self.store.let_pass(2 * HOUR)
        stored = await self.store.look()
        stored.demand_no_orphans()
        assert not stored.live
        await self.queue.dead.purge()
        # The next offer forgets what was handled recently.
        await self.queue.offer(0, id="last")
        assert await self.queue.cancel("last")
        stored = await self.store.look()
        assert not any((stored.live, stored.bodies, stored.remembered, stored.dead_messages))


@pytest.fixture
def machine(server: PrivateServer) -> Iterator[type[ReliableMachine]]:
    """Make the machine for one server, with another client that moves the queues."""
    options = {"max_attempts": MAX_ATTEMPTS, "backoff": delayq.Backoff.fixed(HOUR)}
    mover = delayq.connect(server.url, resync_interval=HOUR)
    with opened(ReliableMachine, server.url, KINDS, lease=LEASE * HOUR, **options) as machine:
        machine.runner.run(mover.__aenter__())
        machine.mover, machine.waits = mover, {}
        yield machine
        machine.runner.run(mover.aclose())


@pytest.mark.hypothesis
def test_a_reliable_queue_behaves_like_its_model(machine: type[ReliableMachine]) -> None:
    run_machine(machine, 2_000, usually=120, steps=20)
