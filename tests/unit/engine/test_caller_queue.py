"""The items that each caller gets, what each source is asked for, and what is fetched ahead."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from delayq._engine.caller_queue import (
    GATHER_WINDOW,
    CallerQueue,
    QueuedCaller,
    Reservation,
    Source,
)
from delayq._engine.prefetch import MAX_MESSAGES, begun_soon, moving_mean, next_batch


class Callers:
    """A queue with some sources, and what was handed to whom."""

    def __init__(self, sources: int = 3) -> None:
        self.policies: dict[str, Any] = {}
        self.queue: CallerQueue[str] = CallerQueue(self.policies.get)
        self.sources = [Source() for _ in range(sources)]
        for source in self.sources:
            self.queue.add_source(source)
        self.now = 0.0

    def join(
        self, max_items: int = 1, policy: Any = "p", *, nowait: bool = False
    ) -> QueuedCaller[str]:
        caller: QueuedCaller[str] = QueuedCaller(max_items, policy, nowait=nowait)
        self.queue.join(caller)
        return caller

    def begin(self, source: int, max_items: int = 100) -> Reservation:
        return self.queue.begin_claim(self.sources[source], self.now, max_items)

    def end(self, source: int, *items: str, has_more: bool = False) -> list[str]:
        """Return the items that are left over."""
        self.policies |= dict.fromkeys(items, self.sources[source].reservation.policy)
        numbered = self.queue.record_claimed(self.sources[source], items, has_more=has_more)
        return [item for _, item in self.queue.hand_out(numbered, has_more=has_more)]

    def served(self, *, has_more: bool = False) -> list[QueuedCaller[str]]:
        served = self.queue.served(self.now, has_more=has_more)
        for caller in served:
            self.queue.leave(caller)
        return served

    def next(self) -> tuple[list[int], list[int]]:
        """Return the sources to ask and those to probe."""
        to_ask, to_probe = self.queue.next_sources(self.now)
        return [*map(self.sources.index, to_ask)], [*map(self.sources.index, to_probe)]

    def requested(self) -> list[int]:
        return self.next()[0]

    def to_probe(self) -> list[int]:
        return self.next()[1]

    def probe(self, **due: bool) -> None:
        """Probe the sources named ``s0``, ``s1``, ..."""
        sources = [self.sources[int(name[1:])] for name in due]
        number = self.queue.begin_probe(sources, self.now)
        for source, is_due in zip(sources, due.values(), strict=True):
            self.queue.end_probe(source, number, may_have_items=is_due)


def of(caller: QueuedCaller[str]) -> list[str]:
    return [item for _, item in caller.items]


class TestOneSource:
    def test_a_caller_is_served_as_soon_as_the_attempt_ends(self) -> None:
        callers = Callers(1)
        first, second = callers.join(5), callers.join(5)
        assert callers.begin(0) == (10, "p")
        assert callers.end(0, "a", "b", "c") == []
        assert callers.served() == [first, second]
        assert (of(first), of(second)) == (["a", "b"], ["c"])
        last = callers.join(1)
        callers.begin(0)
        assert callers.end(0, "d", "e") == ["e"], "what is too much is left"
        assert callers.served() == [last]
        callers.join(500)
        assert callers.begin(0, max_items=100).size == 100

    def test_the_first_callers_are_served_whole_while_there_is_more(self) -> None:
        callers = Callers(1)
        first, second = callers.join(3), callers.join(3, nowait=True)
        callers.begin(0)
        callers.end(0, "a", "b", "c", has_more=True)
        assert callers.served(has_more=True) == [first]
        assert of(first) == ["a", "b", "c"]
        callers.begin(0)
        callers.end(0)
        assert callers.served() == [second]


class TestSeveralSources:
    def test_sources_with_messages_share_the_demand(self) -> None:
        callers = Callers()
        caller = callers.join(10, nowait=True)
        callers.probe(s0=True, s1=True, s2=True)
        assert callers.requested() == [0, 1, 2]
        assert [callers.begin(n).size for n in range(3)] == [4, 3, 3]
        for number, has_more in enumerate((True, False, False)):
            callers.end(number, "a", has_more=has_more)
        assert callers.requested() == [0], "only a source that has more is asked again"
        assert callers.begin(0).size == 7
        callers.end(0)
        assert callers.served() == [caller]

    def test_a_server_that_does_not_answer_keeps_nothing_reserved_for_long(self) -> None:
        callers = Callers()
        caller = callers.join(1)
        assert callers.begin(0).size == 1
        assert callers.begin(1).size == 0
        callers.queue.abort_claim(callers.sources[1])
        assert callers.queue.deadline(callers.now) == GATHER_WINDOW
        callers.now = GATHER_WINDOW
        assert callers.requested() == [1]
        assert callers.begin(1).size == 1
        callers.end(1, "a")
        assert callers.served() == [caller]
        # The items that the slow one brings then go back.
        assert callers.end(0, "b") == ["b"]

    def test_items_of_several_sources_are_gathered_and_wait_for_none_asked_later(self) -> None:
        callers = Callers()
        caller = callers.join(10)
        callers.begin(0, max_items=3)
        callers.begin(1, max_items=3)
        callers.end(0, "a")
        assert callers.served() == []
        callers.begin(2)
        callers.end(1, "b")
        assert callers.served() == [caller]

    def test_an_error_counts_only_if_nothing_came(self) -> None:
        for items in (["a"], []):
            callers = Callers(2)
            caller, error = callers.join(3, nowait=True), ValueError("no")
            callers.begin(0, max_items=1)
            callers.begin(1)
            callers.queue.abort_claim(callers.sources[0])
            callers.queue.fail(callers.sources[0], error)
            assert callers.served() == []
            assert callers.requested() == [], "the queue does not ask it again"
            callers.end(1, *items)
            assert callers.served() == [caller]
            assert (of(caller), caller.error) == (items, error)

    def test_sources_with_a_backlog_take_turns(self) -> None:
        callers = Callers()
        callers.probe(s0=True, s1=True, s2=True)
        asked = []
        for _ in range(6):
            callers.join(1)
            (source,) = callers.requested()
            asked.append(source)
            callers.begin(source)
            callers.end(source, "a", has_more=True)
            callers.served()
        assert asked == [0, 1, 2, 0, 1, 2]

    def test_items_wait_for_no_server_that_has_not_answered_for_a_moment(self) -> None:
        for hangs_in in ("claim", "probe"):
            callers = Callers(2)
            gone = callers.join()
            if hangs_in == "claim":
                callers.begin(0)
            else:
                callers.queue.begin_probe(callers.sources[:1], callers.now)
            callers.queue.leave(gone)
            callers.now = 10.0
            # A probe that follows waits behind what hangs already.
            callers.queue.begin_probe(callers.sources[:1], callers.now)
            caller = callers.join(10)
            callers.begin(1)
            callers.end(1, "a")
            assert callers.served() == [caller], hangs_in

    def test_a_caller_that_does_not_wait_has_others_probed_if_a_backlog_is_not_enough(self) -> None:
        callers = Callers()
        callers.join(1)
        callers.probe(s0=True)
        callers.requested()
        callers.begin(0)
        callers.end(0, "a", has_more=True)
        callers.served()
        caller = callers.join(4, nowait=True)
        assert callers.requested() == [0]
        assert callers.to_probe() == []
        assert callers.begin(0).size == 4
        assert callers.to_probe() == []
        callers.end(0)
        assert callers.served() == []
        assert callers.to_probe() == [1, 2]
        callers.probe(s1=False, s2=False)
        assert callers.served() == [caller]


@st.composite
def events(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    join = st.tuples(st.just("join"), st.integers(1, 8), st.sampled_from("ab"), st.booleans())
    other = st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("end"), st.integers(0, 2), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("fail"), st.integers(0, 2)),
        st.tuples(st.just("probe"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.sampled_from([0.01, GATHER_WINDOW])),
    )
    return draw(st.lists(st.one_of(join, other), max_size=60))


@given(events())
# A caller leaves with an item while another source is asked.
@example(
    [("join", 5, "a", False), ("begin", 0, 3), ("begin", 1, 2), ("end", 0, 1, False), ("leave", 0)]
)
def test_every_item_goes_to_one_caller_or_back(  # noqa: PLR0912 - one branch for each event
    plan: list[tuple[Any, ...]],
) -> None:
    """The model: the items in order, each of them with one caller of its policy, or left."""
    callers = Callers()
    queue = callers.queue
    everyone: list[QueuedCaller[str]] = []
    came: dict[str, Any] = {}
    left: list[str] = []
    given_to: dict[str, QueuedCaller[str]] = {}

    def serve() -> None:
        for caller in callers.served():
            if not caller.items and not caller.error:
                # Every source has answered since it joined.
                assert caller.nowait
                assert not caller.unanswered
            assert len(caller.items) <= caller.max_items
            for item in of(caller):
                assert item not in given_to
                given_to[item] = caller

    for kind, *args in plan:
        if kind == "join":
            want, policy, nowait = args
            everyone.append(callers.join(want, policy, nowait=nowait))
        elif kind == "begin":
            index, max_items = args
            source = callers.sources[index]
            if source.claim_number:
                continue
            others = [
                source.reservation
                for source in callers.sources
                if source.claim_number and callers.now < source.asked_at + GATHER_WINDOW
            ]
            reservation = callers.begin(index, max_items)
            # Together, attempts that are fresh take no more than the callers of a policy want.
            wanted = sum(
                caller.max_items - len(caller.items)
                for caller in queue.callers
                if caller.policy == reservation.policy
            )
            reserved = sum(each.size for each in others if each.policy == reservation.policy)
            assert reservation.size <= max_items
            assert not reservation.size or reservation.size + reserved <= wanted
            if not reservation.size:
                queue.abort_claim(source)
        elif kind == "end":
            index, count, has_more = args
            source = callers.sources[index]
            if not source.claim_number:
                continue
            policy = source.reservation.policy
            items = [f"{len(came) + n}" for n in range(min(count, source.reservation.size))]
            came |= dict.fromkeys(items, policy)
            left += callers.end(index, *items, has_more=has_more)
        elif kind == "fail":
            source = callers.sources[args[0]]
            queue.abort_claim(source)
            queue.fail(source, ValueError())
        elif kind == "probe":
            callers.probe(**{f"s{args[0]}": args[1]})
        elif kind == "leave" and args[0] < len(queue.callers):
            gone = queue.callers[args[0]]
            queue.leave(gone)
            left += [item for _, item in gone.take_items()]
        elif kind == "wait":
            callers.now += args[0]
        serve()
        for source in callers.to_probe():
            assert not callers.sources[source].is_pending
        serve()
    with_callers = [item for caller in queue.callers for item in of(caller)]
    assert sorted([*given_to, *with_callers, *left]) == sorted(came)
    for item, caller in given_to.items():
        assert came[item] == caller.policy
    for caller in everyone:
        numbers = [number for number, _ in caller.items]
        assert numbers == sorted(numbers)
    # Nobody who has an item waits longer than a moment.
    callers.now += GATHER_WINDOW
    serve()
    assert not any(caller.items for caller in queue.callers)


def test_only_messages_that_are_begun_within_a_moment_are_fetched_ahead() -> None:
    for handlers, took, messages in (
        *((1, 60.0, 0), (100, 60.0, 0)),
        (100, 1.0, 5),  # 100 handlers begin five messages within 50 ms
        *((1, 0.01, 5), (10, 0.1, 5)),
        *((100, 0.0001, MAX_MESSAGES), (1, 0.0, MAX_MESSAGES)),
    ):
        assert begun_soon(handlers, took) == messages, (handlers, took)


def test_the_mean_duration_follows_the_most_recent_messages() -> None:
    took = moving_mean(None, 1.0)
    assert took == 1.0
    for _ in range(100):
        before, took = took, moving_mean(took, 0.0)
        assert took < before
    assert took < 0.01


def test_the_size_of_a_batch_follows_the_pace_of_the_handler() -> None:
    for batch, got, took, following in (
        *((1, 1, 0.0, 10), (64, 64, 0.001, MAX_MESSAGES)),  # quick handling fetches more
        *((100, 100, 60.0, 1), (1, 1, 1.0, 1)),  # slow handling fetches one
        (10, 1, 0.0, 10),  # a trickle does not grow
    ):
        assert next_batch(batch, got, took) == following, (batch, got, took)
