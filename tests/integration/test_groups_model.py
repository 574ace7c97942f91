"""Run random operations on a queue with groups and limits, and compare it with a plain model.

Unlike in test_reliable_model.py, the model does not foresee which group is next. It tells whether
each message might be handed out, whether another one could have been, and whether some group was
served twice while another one waited.

Time passes in whole hours, by changing what is stored: see reliable_store.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import delayq
from delayq import Limit
from tests.support.machines import QueueMachine, opened, run_machine
from tests.support.reliable_store import HOUR, Stored, hours
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayq import Message
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

LEASE, PER = 4, 2
GROUPS = ("a", "b", "a\1", "é/%")
# Few have a backlog, and most of these are of one group.
SOURCES = st.sampled_from([*GROUPS, "a", "a", "a", "b", None])
HOURS = st.sampled_from([0, 0, 0, 1, 2, 3])
OFFERS = st.lists(
    st.tuples(SOURCES, HOURS, st.sampled_from([0, 0, 9]), st.sampled_from([None, None, "x", "y"])),
    min_size=2,
    max_size=8,
)
LIMITS = st.sampled_from(
    [None, None, None, Limit(5), Limit(2), Limit(rate=6, per=PER * HOUR), Limit(3, 6, PER * HOUR)]
)
STATES = st.sampled_from(["delayed", "ready", "all"])
GROUP_LIMITS = st.sampled_from(
    [
        None,
        Limit(1),
        Limit(2),
        Limit(rate=2, per=PER * HOUR),
        Limit(2, 3, PER * HOUR),
        Limit(ordered=True),
        Limit(rate=2, per=PER * HOUR, ordered=True),
    ]
)

Moment = tuple[float, int, float]


@dataclass(eq=False)
class Live:
    id: str
    value: int
    group: str | None
    priority: int
    moment: Moment
    held: bool = False
    suspect: bool = False
    lease: object | None = None
    ends: float = 0
    lost: int = 0
    # When its lease began, by the rates that have counted that.
    started: dict[str | None, float] = field(default_factory=dict)


@dataclass
class Model:
    now: int = 0
    step: int = 0
    live: dict[str, Live] = field(default_factory=dict)
    dead: dict[str, Live] = field(default_factory=dict)
    limit: Limit | None = None
    group_limit: Limit | None = None
    # Whether the next claim has to give all groups their turns by limits that have changed.
    unsettled: bool = False
    own: dict[str, Limit] = field(default_factory=dict)
    asleep: set[str] = field(default_factory=set)
    starts: dict[str | None, list[float]] = field(default_factory=dict)
    paused: bool = False
    at_work: object | None = None
    # The groups in which cancelled messages keep slots, if they are limited there, until when, and
    # their leases.
    stopping: list[tuple[str | None, float, object]] = field(default_factory=list)
    # How often one source was served while another one could have been, since that was served.
    passed: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)

    def limit_of(self, group: str | None) -> Limit:
        if group is None:
            return Limit()
        return self.own.get(group, self.group_limit) or Limit()

    def of(self, group: str | None) -> list[Live]:
        return [message for message in self.live.values() if message.group == group]

    def is_running(self, message: Live) -> bool:
        return message.lease is not None and message.ends > self.now

    def is_lost(self, message: Live) -> bool:
        return message.lease is not None and message.ends <= self.now

    def stop(self, message: Live) -> None:
        """Keep the slots of a message that is cancelled while a worker has it."""
        limits = [self.limit_of(message.group), self.limit or Limit()]
        in_group, in_queue = (bool(limit.ordered or limit.concurrency) for limit in limits)
        if in_group or in_queue:
            group = message.group if in_group else None
            self.stopping.append((group, message.ends, message.lease))

    def kept(self, group: str | None) -> list[float]:
        """Return until when cancelled messages keep slots of a group, or of the queue."""
        return [ends for of, ends, _ in self.stopping if group == "" or (of == group and of)]

    def running(self, group: str) -> int:
        """Return how many messages have slots of a group."""
        ends = [*self.kept(group), *(each.ends for each in self.of(group) if each.lease)]
        return sum(end > self.now for end in ends)

    def leases_at_last_claim(self, group: str) -> int:
        """Return how many leases of a group the last claim left, ended ones too."""
        return len(self.kept(group)) + sum(each.lease is not None for each in self.of(group))

    def gate(self, limit: Limit, key: str | None, some: list[Live]) -> float:
        """Return when the limit lets another one of these messages run, at the earliest."""
        gate = float(self.now)
        concurrency = 1 if limit.ordered else limit.concurrency
        kept = [ends for ends in self.kept(key) if ends > self.now]
        ends = sorted([*kept, *(message.ends for message in some if self.is_running(message))])
        if concurrency is not None and len(ends) >= concurrency:
            gate = max(gate, ends[0])
        if limit.rate is not None:
            counted = sorted(start for start in self.starts.get(key, []) if start + PER > self.now)
            if len(counted) >= limit.rate:
                gate = max(gate, counted[len(counted) - limit.rate] + PER)
        return gate

    def counted(self, group: str | None) -> int:
        return sum(start + PER > self.now for start in self.starts.get(group, []))

    def gate_of(self, group: str | None) -> float:
        return self.gate(self.limit_of(group), group, self.of(group))

    def gate_of_queue(self) -> float:
        return self.gate(self.limit or Limit(), "", list(self.live.values()))

    def is_held_up(self, group: str | None) -> bool:
        """Return whether a message that was handed out holds its ordered group up."""
        ordered = self.limit_of(group).ordered
        holds = any(each.lease or each.suspect for each in self.of(group))
        return ordered and (holds or bool(self.kept(group)))

    def waiting(self, group: str | None) -> list[Live]:
        some = [each for each in self.of(group) if not each.lease and not each.suspect]
        # Those that hold their group up come by due time, whatever their priority.
        return sorted(some, key=lambda m: (not m.held, 0 if m.held else -m.priority, m.moment))

    def turn(self, group: str | None) -> float | None:
        """Return the hour from which on the next message of a group may be handed out."""
        waiting = self.waiting(group)
        if not waiting or self.is_held_up(group) or group in self.asleep:
            return None
        first = waiting[0]
        is_strict = first.held and self.limit_of(group).ordered
        due = first.moment[0] if is_strict else min(each.moment[0] for each in waiting)
        return max(due, self.gate_of(group))

    def next_of(self, group: str | None) -> Live | None:
        turn = self.turn(group)
        if turn is None or turn > self.now:
            return None
        return next(each for each in self.waiting(group) if each.moment[0] <= self.now)

    def sources(self) -> list[str | None]:
        return [each for each in (*GROUPS, None) if self.next_of(each) is not None]

    def suspects(self) -> list[Live]:
        return [
            each
            for each in self.live.values()
            if (
                each.suspect
                and each.group not in self.asleep
                and self.gate_of(each.group) <= self.now
            )
            or (each.group is None and each.suspect)
        ]

    def line_up_lost(self) -> None:
        for message in self.live.values():
            if self.is_lost(message):
                message.lost += 1
                message.lease, message.suspect = None, message.lost > 1
                message.held = not message.suspect and self.limit_of(message.group).ordered

    def start(self, message: Live, lease: object) -> None:
        message.lease, message.ends = lease, self.now + LEASE
        message.suspect, message.started = False, {}
        for key, limit in ((message.group, self.limit_of(message.group)), ("", self.limit)):
            if limit is not None and limit.rate is not None:
                self.starts.setdefault(key, []).append(self.now)
                message.started[key] = self.now

    def was_not_begun(self, message: Live) -> None:
        for key, start in message.started.items():
            self.starts[key].remove(start)

    def serve(self, group: str | None) -> None:
        """Record that a group was served, and check that no other one was passed over twice."""
        for other in self.forget_passed():
            if other == group:
                continue
            self.passed[other, group] += 1
            assert self.passed[other, group] < 2, f"{group!r} was served before {other!r} again"
        self.was_served(group)

    def was_served(self, group: str | None) -> None:
        for pair in [pair for pair in self.passed if pair[0] == group]:
            del self.passed[pair]

    def forget_passed(self) -> list[str | None]:
        """Forget who was passed over and has nothing to run any more; return all that have."""
        could = self.sources()
        for pair in [pair for pair in self.passed if pair[0] not in could]:
            del self.passed[pair]
        return could

    def moved(self, message: Live) -> None:
        """Record that a message that waits left its place, or another one may be ahead of it."""
        # Messages without a group have no place but that of the first of them in time.
        if message.group is None:
            self.was_served(None)

    def returns(self, message: Live, delay: float) -> None:
        message.held = self.limit_of(message.group).ordered
        message.lease, message.suspect, message.lost = None, False, 0
        message.moment = (self.now + delay, self.step, 0)


@dataclass
class Held:
    message: Message[int]
    lease: object
    id: str
    # Whether its client was told that the lease is over: then it asks for nothing more.
    told: bool = False


class GroupsMachine(QueueMachine):
    @initialize(what=OFFERS, limit=LIMITS, group_limit=GROUP_LIMITS)
    def begin(self, what: list[Any], limit: Limit | None, group_limit: Limit | None) -> None:
        self.run(self.forget_the_last_example())
        self.queue, self.store = self.queues["jobs"], self.stores["jobs"]
        self.model = Model()
        self.held: list[Held] = []
        self.values = 0
        self.configure(limit, group_limit)
        # A backlog shows most.
        self.offer([("a", 0, 0, None)] * 4 + [("b", 0, 0, None)] * 2 + what)

    def next_step(self) -> Model:
        self.model.step += 1
        return self.model

    def configure(self, limit: Limit | None, group_limit: Limit | None) -> None:
        model = self.next_step()
        self.run(self.queue.configure(limit=limit, group_limit=group_limit))
        if (limit, group_limit) != (model.limit, model.group_limit):
            model.unsettled = True
        model.limit, model.group_limit = limit, group_limit
        # Turns that were fair under the old limits say nothing about the new ones.
        model.passed.clear()

    @rule(what=OFFERS)
    def offer(self, what: list[Any]) -> None:
        model = self.next_step()
        for place, (group, delay, priority, key) in enumerate(what):
            self.values += 1
            known = model.live.get(key) if key else None
            work = self.queue.offer(
                self.values,
                delay * HOUR,
                group=group,
                priority=priority if group else 0,
                id=key,
                on_duplicate="replace" if key else "raise",
            )
            if known is not None and model.is_running(known):
                with pytest.raises(delayq.DuplicateMessage):
                    self.run(work)
                continue
            stored = self.run(work)
            if known is not None:
                model.moved(known)
                # The group of a message that is replaced may have nothing to run for a moment.
                del model.live[stored]
                model.forget_passed()
            moment = (model.now + delay, model.step, place)
            usual = priority if group else 0
            model.live[stored] = Live(stored, self.values, group, usual, moment)

    @rule(count=st.integers(1, 6))
    def claim(self, count: int) -> None:
        model = self.next_step()
        may_have_suspect = model.at_work is None or not any(
            each.lease is model.at_work and model.is_running(each) for each in model.live.values()
        )
        messages = self.run(self.queue.claim(count))
        if model.paused:
            assert not messages
            return
        model.unsettled = False
        model.line_up_lost()
        model.stopping = [each for each in model.stopping if each[1] > model.now]
        suspects = model.suspects()
        if model.gate_of_queue() > model.now:
            assert not messages
        elif may_have_suspect and suspects:
            (message,) = messages
            live = model.live[message.id]
            assert live in suspects
            self.take(message, live)
            model.at_work = live.lease
            if live.group is not None:
                model.was_served(live.group)
        else:
            for message in messages:
                live = model.live[message.id]
                assert model.gate_of_queue() <= model.now
                assert model.next_of(live.group) is live
                model.serve(live.group)
                self.take(message, live)
            if len(messages) < count:
                assert not model.sources() or model.gate_of_queue() > model.now

    @rule()
    def claim_all(self) -> None:
        self.claim(50)

    @rule(number=st.integers(1, 8))
    def claim_one_by_one(self, number: int) -> None:
        """Handle messages one at a time, as a worker does that has one handler."""
        for _ in range(number):
            before = len(self.held)
            self.claim(1)
            for held in self.held[before:]:
                self.end(held, "ack", 0)

    def take(self, message: Message[int], live: Live) -> None:
        assert (message.value, message.group) == (live.value, live.group)
        lease = object()
        self.model.start(live, lease)
        self.held.append(Held(message, lease, live.id))

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        how=st.sampled_from(["ack", "ack", "nack", "snooze", "bury", "release", "back", "extend"]),
        delay=HOURS,
    )
    def settle(self, data: st.DataObject, how: str, delay: int) -> None:
        self.end(data.draw(st.sampled_from(self.held)), how, delay)

    def end(self, held: Held, how: str, delay: int) -> None:
        model = self.next_step()
        live = model.live.get(held.id)
        ours = live is not None and live.lease is held.lease and not held.told
        if ours and how == "extend":
            assert live is not None
            # The slot of a lost lease may be another message's by now.
            has_slot = live.group is not None or (model.limit and model.limit.concurrency)
            ours = model.is_running(live) or not has_slot
        message = held.message
        work: dict[str, Any] = {
            "ack": message.ack,
            "nack": lambda: message.nack(delay * HOUR, "broken"),
            "snooze": lambda: message.snooze(delay * HOUR),
            "bury": lambda: message.bury("why"),
            "release": message.release,
            # As what no handler has begun goes back.
            "back": lambda: message._give_back(is_begun=False),
            "extend": lambda: message.extend((delay + 1) * HOUR),
        }
        if model.at_work is held.lease and how != "extend":
            model.at_work = None
        if not ours:
            with pytest.raises(delayq.LeaseLost):
                self.run(work[how]())
            # Now it has surely ended.
            self.run(until(lambda: not self.queue._open.partitions[0].acknowledger._slots_to_free))
            model.stopping = [each for each in model.stopping if each[2] is not held.lease]
            held.told = True
            if how == "extend" and model.at_work is held.lease:
                model.at_work = None
            return
        assert live is not None
        self.run(work[how]())
        if how == "extend":
            live.ends = model.now + delay + 1
            return
        self.held.remove(held)
        if how in ("ack", "bury"):
            del model.live[live.id]
            if how == "bury":
                model.dead[live.id] = live
        elif how in ("release", "back"):
            if how == "back":
                model.was_not_begun(live)
            was_held, lost, moment = live.held, live.lost, live.moment
            model.returns(live, 0)
            live.lost, live.moment = lost, moment
            if lost > 1:
                live.held, live.suspect = was_held, True
        else:
            model.returns(live, delay)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), running=st.booleans())
    def cancel(self, data: st.DataObject, running: bool) -> None:
        model = self.next_step()
        live = model.live[data.draw(st.sampled_from(sorted(model.live)))]
        may_go = running or not model.is_running(live)
        assert self.run(self.queue.cancel(live.id, running=running)) is may_go
        if may_go:
            model.moved(live)
            if model.is_running(live):
                model.stop(live)
            del model.live[live.id]

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), delay=HOURS)
    def reschedule(self, data: st.DataObject, delay: int) -> None:
        model = self.next_step()
        live = model.live[data.draw(st.sampled_from(sorted(model.live)))]
        may_go = not model.is_running(live)
        assert self.run(self.queue.reschedule(live.id, delay * HOUR)) is may_go
        if may_go:
            model.moved(live)
            was_out = live.held or live.suspect or live.lease is not None
            model.returns(live, delay)
            live.held = live.held and was_out

    @rule(hours=st.integers(1, 5))
    def let_pass(self, hours: int) -> None:
        model = self.next_step()
        self.run(self.store.let_pass(hours * HOUR))
        model.now += hours
        for held in self.held:
            if (start := held.message._claim.start) is not None:
                moved = start._replace(at_us=start.at_us - hours * HOUR * 1_000_000)
                held.message._claim.counted_start = moved  # type: ignore[misc]  # a slot of its base

    @rule(
        how=st.sampled_from(["limits", "group", "group", "sleep", "pause", "redrive", "purge"]),
        limits=st.tuples(LIMITS, GROUP_LIMITS),
        state=STATES,
    )
    def rarely(self, how: str, limits: tuple[Limit | None, Limit | None], state: Any) -> None:
        group = GROUPS[self.model.step % len(GROUPS)]
        if how == "limits":
            self.configure(*limits)
        elif how == "group":
            self.set_limit(group, limits[1])
        elif how == "sleep":
            self.sleep_or_wake(group)
        elif how == "pause" or self.model.paused:
            self.pause_or_resume()
        elif how == "redrive":
            self.redrive()
        elif self.model.step % 4 == 0:
            self.purge(state)

    def set_limit(self, group: str, limit: Limit | None) -> None:
        model = self.next_step()
        self.run(self.queue.groups.set_limit(group, limit))
        model.own.pop(group, None)
        if limit is not None:
            model.own[group] = limit
        model.passed.clear()

    def sleep_or_wake(self, group: str) -> None:
        model = self.next_step()
        if group in model.asleep:
            assert self.run(self.queue.groups.resume(group)) is True
            model.asleep.discard(group)
        else:
            self.run(self.queue.groups.pause(group))
            model.asleep.add(group)

    def pause_or_resume(self) -> None:
        model = self.next_step()
        self.run(self.queue.resume() if model.paused else self.queue.pause())
        model.paused = not model.paused

    def redrive(self) -> None:
        model = self.next_step()
        free = [key for key in model.dead if key not in model.live]
        assert self.run(self.queue.dead.redrive(free)) == len(free)
        for place, key in enumerate(free):
            dead = model.dead.pop(key)
            moment = (model.now, model.step, place)
            model.live[key] = Live(key, dead.value, dead.group, dead.priority, moment)

    def purge(self, state: Any) -> None:
        model = self.next_step()
        gone = [
            each
            for each in model.live.values()
            if state == "all"
            or (
                state == "delayed"
                and not each.lease
                and not each.suspect
                and each.moment[0] > model.now
            )
            or (state == "ready" and self.is_ready(each))
        ]
        assert self.run(self.queue.purge(state)) == len(gone)
        for each in gone:
            if model.is_running(each):
                model.stop(each)
            del model.live[each.id]

    def is_ready(self, message: Live) -> bool:
        if message.lease is not None:
            return self.model.is_lost(message)
        return message.suspect or message.moment[0] <= self.model.now

    @invariant()
    def everything_is_what_the_model_says(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        model, stored = self.model, await self.store.look()
        model.forget_passed()
        stored.demand_no_orphans()
        assert set(stored.live) == set(model.live)
        assert set(stored.leases) == {
            each.id
            for each in model.live.values()
            if each.lease or (each.suspect and each.group is None)
        }
        assert len(stored.kept_slots) == len(model.stopping)
        of_live = {key: place for key, place in stored.positions.items() if key in model.live}
        assert {key: parts(place)[:2] for key, place in of_live.items()} == {
            each.id: (each.group, level_of(each))
            for each in model.live.values()
            if each.group is not None
        }
        for key, place in stored.positions.items():
            if (end := stored.leases.get(key)) is not None:
                assert parts(place)[2] == pytest.approx(stored.now + end, abs=0.3)
        assert (
            await self.raw.hexists(self.store.keys.settings, "turns_updated_to") is model.unsettled
        )
        for group in GROUPS if not model.unsettled else ():
            self.compare_turns(group, stored)
        queue = self.queue
        stats = await queue.stats()
        ready = sum(map(self.is_ready, model.live.values()))
        leased = sum(map(model.is_running, model.live.values()))
        delayed = len(model.live) - ready - leased
        assert (stats.delayed, stats.ready, stats.leased) == (delayed, ready, leased)

        known = {known.group for known in model.live.values()} | {*model.own, *model.asleep}
        known |= {group for group, _, _ in model.stopping}
        listed = await queue.groups.list()
        names = sorted((name for name in known if name is not None), key=str.encode)
        assert [each.name for each in listed] == names
        for each in listed:
            some = model.of(each.name)
            running = model.running(each.name)
            kept = sum(ends > model.now for ends in model.kept(each.name))
            assert (each.waiting, each.running) == (len(some) + kept - running, running)
            assert each.paused is (each.name in model.asleep)
            assert each.limit == model.own.get(each.name, model.group_limit)

    def compare_turns(self, group: str, stored: Stored) -> None:
        model = self.model
        turn, limit = model.turn(group), model.limit_of(group)
        if limit.concurrency is not None and model.leases_at_last_claim(group) > limit.concurrency:
            # The limit was lowered: claims look again whenever a lease ends.
            return
        if limit.rate is not None and model.counted(group) > limit.rate:
            return
        assert (group in stored.group_turns) == (turn is not None), group
        if turn is not None:
            stored_turn = stored.group_turns[group]
            assert (stored_turn <= 0) == (turn <= model.now)
            assert turn <= model.now or hours(stored_turn) == turn - model.now
        suspects = [each for each in model.of(group) if each.suspect]
        assert (group in stored.suspect_turns) == (bool(suspects) and group not in model.asleep)
        if suspects and group not in model.asleep:
            gate = model.gate_of(group)
            assert (stored.suspect_turns[group] <= 0) == (gate <= model.now)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.run(self.finish())

    async def finish(self) -> None:
        await self.queue.configure(limit=None, group_limit=None)
        await self.queue.resume()
        for group in GROUPS:
            await self.queue.groups.set_limit(group, None)
            await self.queue.groups.resume(group)
        await self.store.let_pass(10 * HOUR)
        while messages := await self.queue.claim(100):
            for message in messages:
                await message.ack()
        stored = await self.store.look()
        stored.demand_no_orphans()
        assert not stored.live
        assert not any((stored.group_members, stored.group_turns, stored.suspect_turns))


def parts(place: str) -> tuple[str, str, float]:
    group, _, rest = place.partition("\0")
    return group, rest[0], float(rest[1:])


def level_of(message: Live) -> str:
    if message.lease is not None:
        return "~"
    if message.suspect:
        return "?"
    return "!" if message.held else str(9 - message.priority)


@pytest.fixture
def machine(server: PrivateServer) -> Iterator[type[GroupsMachine]]:
    options = {"lease": LEASE * HOUR, "max_attempts": None}
    with opened(GroupsMachine, server.url, {"jobs": options}) as machine:
        yield machine


@pytest.mark.hypothesis
def test_a_queue_with_groups_behaves_like_its_model(machine: type[GroupsMachine]) -> None:
    run_machine(machine, 1_000, usually=60, steps=25)
