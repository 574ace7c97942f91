"""Run random operations on batches and chains of a real queue and on a plain model of them.

The model only follows what test_reliable_model.py is about: which due messages a claim hands out,
and when the queue notices that one has expired or has no attempts left. It foresees the states of
all members, and what is stored because of them, exactly once.

Time passes in whole hours, by changing what is stored: see reliable_store.py. Batches themselves
are not moved, so none is forgotten.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

import delayq
from delayq import Offer
from delayq._reliable.ids import follower_id
from tests.support.machines import QueueMachine, opened, run_machine
from tests.support.reliable_store import HOUR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq import Batch, Message
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

LEASE, MAX_ATTEMPTS = 4, 2
KINDS: dict[str, dict[str, Any]] = {
    "dropping": {},
    "burying": {"expired": "dead"},
    "keeping": {"expired": "dead", "keep": 3 * HOUR},
}
# An id, hours of delay and of life after it, and how many messages follow one after the other.
IDS, DELAYS = st.sampled_from(["a", "b", None, None]), st.sampled_from([0, 0, 0, 2])
OFFER = st.tuples(IDS, DELAYS, st.sampled_from([None, None, 1, 5]), st.sampled_from([0, 0, 1, 2]))
OFFERS = st.lists(OFFER, max_size=5, unique_by=lambda offered: offered[0] or object())
# Which of several. What is drawn does not depend on the state, because ids are random.
PICK = st.integers(0, 30)
Offered = tuple[str | None, int, int | None, int]


@dataclass(eq=False)
class Members:
    """A batch, what is still to follow from it, and the states of its messages."""

    batch: Batch
    then: str | None
    on_failure: str | None
    states: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Live:
    id: str
    value: str
    due: int
    expires: int | None = None
    chain: tuple[str, ...] = ()
    batch: Members | None = None
    # Its id in the batch; None if it follows from it.
    member: str | None = None
    attempts: int = 0
    lease: object | None = None
    ends: int = 0


class Held(NamedTuple):
    message: Message[str]
    live: Live
    lease: object


class BatchesMachine(QueueMachine):
    @initialize(kind=st.sampled_from(sorted(KINDS)), offers=OFFERS)
    def begin(self, kind: str, offers: list[Offered]) -> None:
        self.run(self.forget_the_last_example())
        self.queue, self.store = self.queues[kind], self.stores[kind]
        self.fate_of_expired = "dead" if "expired" in KINDS[kind] else "cancelled"
        self.now = self.steps = self.values = 0
        self.live: dict[str, Live] = {}
        self.dead: list[Live] = []
        self.batches: list[Members] = []
        self.held: list[Held] = []
        offers = [("a", 0, None, 1), *(offer for offer in offers if offer[0] != "a")]
        self.offer_batch(offers, then=True, on_failure=True)

    # The model

    def is_running(self, live: Live) -> bool:
        return live.lease is not None and live.ends > self.now

    def is_gone(self, live: Live) -> bool:
        """Return whether a message has expired, and no worker has it."""
        expired = live.expires is not None and live.expires <= self.now
        return expired and not self.is_running(live)

    def find(self, key: str) -> Live | None:
        live = self.live.get(key)
        return None if live is None or self.is_gone(live) else live

    def add(self, live: Live) -> None:
        if (expired := self.live.pop(live.id, None)) is not None:
            # It gets another id, which is unpredictable.
            expired.id, expired.lease = f"{live.id}\0{expired.value}", None
            self.live[expired.id] = expired
        self.live[live.id] = live

    def follow(self, predecessor: str, number: int, value: str, *chain: str, **of: Any) -> None:
        key = follower_id(predecessor.encode(), number, 0, 1)
        if self.find(key) is None:
            self.add(Live(key, value, self.now, chain=chain, **of))

    def end(self, live: Live, state: str) -> None:
        del self.live[live.id]
        if state == "dead":
            self.dead.append(live)
        self.end_member(live, state)

    def end_member(self, live: Live, state: str) -> None:
        members = live.batch
        if members is None or live.member is None or members.states[live.member] != "open":
            return
        members.states[live.member] = state
        if state != "handled" and members.on_failure:
            self.follow(members.batch.id, 1, members.on_failure, batch=members)
            members.on_failure = None
        self.complete(members)

    def open_members(self, members: Members) -> list[Live]:
        lives = [live for live in self.live.values() if live.batch is members]
        return [live for live in lives if live.member and members.states[live.member] == "open"]

    def complete(self, members: Members) -> None:
        if members.then and set(members.states.values()) <= {"handled"}:
            self.follow(members.batch.id, 0, members.then, batch=members)
            members.then = None

    def handle(self, live: Live, *then: str) -> None:
        chains = [live.chain, *((value,) for value in then)]
        for number, chain in enumerate(filter(None, chains)):
            self.follow(live.id, number, *chain)
        self.end(live, "handled")

    # Offers

    def value(self) -> str:
        self.values += 1
        return f"v{self.values}"

    def new_offer(
        self, key: str | None, delay: int, life: int | None, length: int, **options: Any
    ) -> tuple[Offer[str], Live]:
        value, *chain = (self.value() for _ in range(length + 1))
        ttl = None if life is None else (delay + life) * HOUR
        offer = Offer(value, id=key, delay=delay * HOUR, ttl=ttl, **options)
        for follower in chain:
            offer = offer.then(Offer(follower))
        due = self.now + delay
        return offer, Live(key or "", value, due, None if life is None else due + life, (*chain,))

    @rule(offers=OFFERS, then=st.booleans(), on_failure=st.booleans())
    def offer_batch(self, offers: list[Offered], *, then: bool, on_failure: bool) -> None:
        pairs = [self.new_offer(*offered, on_duplicate="ignore") for offered in offers]
        values = [self.value() if is_given else None for is_given in (then, on_failure)]
        successors = [Offer(value) if value else None for value in values]
        sending = self.queue.offer_batch(
            [offer for offer, _ in pairs], then=successors[0], on_failure=successors[1]
        )
        members = Members(self.run(sending), values[0], values[1])
        ids = {value: key for key, value in self.look()[0].items()}
        for _, live in pairs:
            # The batch leaves out those whose ids are taken.
            if not live.id or self.find(live.id) is None:
                live.id = live.member = live.id or ids[live.value]
                live.batch, members.states[live.id] = members, "open"
                self.add(live)
        self.batches.append(members)
        self.complete(members)

    @rule(offered=OFFER)
    def replace(self, offered: Offered) -> None:
        key = offered[0] or "a"
        offer, live = self.new_offer(key, *offered[1:], on_duplicate="replace")
        former = self.find(key)
        if former is not None and self.is_running(former):
            with pytest.raises(delayq.DuplicateMessage):
                self.run(self.queue.offer_many([offer]))
            return
        self.run(self.queue.offer_many([offer]))
        if former is not None:
            live.batch, live.member = former.batch, former.member
            del self.live[key]
        self.add(live)

    # Leases

    @rule(count=st.sampled_from([1, 2, 100]))
    def claim(self, count: int) -> None:
        messages = self.run(self.queue.claim(count))
        for live in self.live.values():
            if not self.is_running(live):
                live.lease = None
        # What follows from those that it has dropped may be among the messages.
        self.end_dropped(*self.look())
        lives = {live.value: live for live in self.live.values()}
        for message in messages:
            live = lives[message.value]
            assert live.lease is None
            assert live.due <= self.now
            assert not self.is_gone(live)
            assert (message.batch and message.batch.id) == (live.batch and live.batch.batch.id)
            live.lease, live.ends, live.attempts = object(), self.now + LEASE, live.attempts + 1
            self.held.append(Held(message, live, live.lease))

    def is_ours(self, held: Held) -> bool:
        return self.live.get(held.live.id) is held.live and held.live.lease is held.lease

    HOW = st.sampled_from(["ack", "ack", "lead on", "nack", "bury", "release"])

    @rule(pick=PICK, how=HOW, delay=DELAYS)
    def settle(self, pick: int, how: str, delay: int) -> None:
        if not self.held:
            return
        message, live, _ = held = self.held.pop(pick % len(self.held))
        then = [self.value(), self.value()] if how == "lead on" else []
        work = {
            "nack": lambda: message.nack(delay * HOUR),
            "bury": lambda: message.bury("no good"),
            "release": message.release,
        }.get(how, lambda: message.ack(then=map(Offer, then)))
        if not self.is_ours(held):
            with pytest.raises(delayq.LeaseLost):
                self.run(work())
            return
        self.run(work())
        live.lease = None
        if how in ("ack", "lead on"):
            self.handle(live, *then)
        elif how == "bury" or live.value in self.look()[1]:
            assert how == "bury" or (how == "nack" and live.attempts >= MAX_ATTEMPTS)
            self.end(live, "dead")
        elif how == "nack":
            expires = self.now + delay if live.expires is None else live.expires
            live.due = min(self.now + delay, max(self.now, expires))

    @rule()
    def ack_together(self) -> None:
        ours = [held for held in self.held if self.is_ours(held)]
        # If one of them has the id of what follows from another one, their order decides.
        next_ids = {follower_id(held.live.id.encode(), 0, 0, 1) for held in ours}
        ours = [held for held in ours if held.live.id not in next_ids]

        async def ack() -> None:
            await asyncio.gather(*(held.message.ack() for held in ours))

        self.run(ack())
        for held in ours:
            self.held.remove(held)
            self.handle(held.live)

    @rule(hours=st.sampled_from([1, 2, LEASE]))
    def time_passes(self, hours: int) -> None:
        self.run(self.store.let_pass(hours * HOUR))
        self.now += hours

    # Without a lease

    def may_cancel(self, live: Live, *, running: bool) -> bool:
        return not self.is_gone(live) and (running or not self.is_running(live))

    @rule(pick=PICK, running=st.booleans())
    def cancel(self, pick: int, *, running: bool) -> None:
        if not self.live:
            return
        live = [*self.live.values()][pick % len(self.live)]
        may_cancel = self.may_cancel(live, running=running)
        assert self.run(self.queue.cancel(live.id, running=running)) is may_cancel
        if may_cancel:
            self.end(live, "cancelled")

    @rule(pick=PICK, running=st.booleans())
    def cancel_batch(self, pick: int, *, running: bool) -> None:
        members = self.batches[pick % len(self.batches)]
        lives = self.open_members(members)
        cancelled = [live for live in lives if self.may_cancel(live, running=running)]
        assert self.run(members.batch.cancel(running=running)) == len(cancelled)
        for live in lives:
            if live in cancelled:
                self.end(live, "cancelled")
            elif live.id != live.member:
                # It has expired, and its id was freed: it stays until a claim drops it.
                self.end_member(live, self.fate_of_expired)

    @rule(state=st.sampled_from(["delayed", "ready", "all"]))
    def purge(self, state: Any) -> None:
        def state_of(live: Live) -> str:
            if self.is_running(live):
                return "leased"
            return "ready" if live.lease or live.due <= self.now else "delayed"

        lives = [live for live in self.live.values() if state in ("all", state_of(live))]
        expected = sum(not self.is_gone(live) for live in lives)
        assert self.run(self.queue.purge(state)) == expected
        for live in lives:
            self.end(live, "cancelled")

    @rule(pick=PICK, everything=st.booleans())
    def redrive(self, pick: int, *, everything: bool) -> None:
        in_order = self.look()[1]
        letters = sorted(self.dead, key=lambda letter: in_order.index(letter.value))
        oldest = {letter.id.partition("\0")[0]: letter for letter in reversed(letters)}
        ids = [*oldest] if everything or not oldest else [[*oldest][pick % len(oldest)]]
        free = {name: oldest[name] for name in ids if self.find(name) is None}
        assert self.run(self.queue.dead.redrive(None if everything else ids)) == len(free)
        for name, letter in free.items():
            self.dead.remove(letter)
            self.add(dataclasses.replace(letter, id=name, due=self.now, expires=None, attempts=0))
            if letter.batch is not None and letter.member is not None:
                letter.batch.states[letter.member] = "open"

    # What is compared after each step

    def look(self) -> tuple[dict[str, str], list[str]]:
        """Return the values of messages by their ids, and those of dead letters in order."""
        stored = self.run(self.store.look())
        stored.demand_no_orphans()
        values = {key: value_of(body) for key, body in stored.bodies.items()}
        return values, [value_of(stored.dead_messages[name]) for name in stored.dead]

    def end_dropped(self, values: dict[str, str], letters: list[str]) -> None:
        """Let messages end that are not stored any more, and check that they may."""
        for live in [live for live in self.live.values() if live.value not in values.values()]:
            is_dead = live.value in letters
            if self.is_gone(live):
                assert is_dead is (self.fate_of_expired == "dead")
            else:
                assert is_dead, f"{live} is lost"
                assert live.lease is None
                assert live.attempts >= MAX_ATTEMPTS
            self.end(live, "dead" if is_dead else "cancelled")

    @invariant()
    def everything_is_what_the_model_says(self) -> None:
        self.steps += 1
        # Reading a status may end what has expired, so not after every step.
        batches = self.batches if self.steps % 2 else []
        statuses, dropped = [], set[Live]()
        for members in batches:
            statuses.append(self.run(members.batch.status()))
            for live in self.open_members(members):
                namesake = self.live.get(live.member or "")
                is_gone = namesake is not None and self.is_gone(namesake)
                if live is namesake and is_gone:
                    dropped.add(live)
                elif is_gone and namesake not in dropped:
                    self.end_member(live, self.fate_of_expired)
        values, letters = self.look()
        self.end_dropped(values, letters)
        assert sorted(values.values()) == sorted(live.value for live in self.live.values())
        assert sorted(letters) == sorted(letter.value for letter in self.dead)
        for members, status in zip(batches, statuses, strict=True):
            states = Counter(members.states.values())
            lives = self.open_members(members)
            assert states["open"] == len(lives)
            assert status.running == sum(map(self.is_running, lives))
            assert status.waiting == states["open"] - status.running
            ends = (status.handled, status.dead, status.cancelled)
            assert ends == (states["handled"], states["dead"], states["cancelled"])
            assert status.is_finished is (not lives)
            assert (status.finished_at is not None) is (not lives)

    def teardown(self) -> None:
        """Check that all batches end once everything is handled."""
        while getattr(self, "live", None):
            self.time_passes(10)
            self.claim(100)
            self.everything_is_what_the_model_says()
            self.ack_together()
            self.everything_is_what_the_model_says()


def value_of(body: bytes) -> str:
    """Return the payload of a body or a dead letter, which is behind its followers."""
    (value,) = re.findall(r'"(v\d+)"$', body.decode())
    return str(value)


@pytest.fixture
def machine(server: PrivateServer) -> Iterator[type[BatchesMachine]]:
    options = {"lease": LEASE * HOUR, "max_attempts": MAX_ATTEMPTS}
    with opened(BatchesMachine, server.url, KINDS, **options) as machine:
        yield machine


@pytest.mark.hypothesis
def test_batches_and_chains_behave_like_their_model(machine: type[BatchesMachine]) -> None:
    run_machine(machine, 1_000, usually=60, steps=25)
