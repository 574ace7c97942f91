"""The items that each caller gets, and what each source is asked for."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from delayq._engine.line import MOMENT, Line, Order, Place, Source


class Callers:
    """A line with some sources, and what was handed to whom."""

    def __init__(self, sources: int = 3) -> None:
        self.line: Line[str] = Line()
        self.sources = [Source() for _ in range(sources)]
        for source in self.sources:
            self.line.add(source)
        self.now = 0.0

    def join(self, want: int = 1, policy: Any = "p", *, once: bool = False) -> Place[str]:
        place: Place[str] = Place(want, policy, once=once)
        self.line.join(place)
        return place

    def begin(self, source: int, most: int = 100) -> Order:
        return self.line.begin(self.sources[source], self.now, most)

    def end(self, source: int, *items: str, more: bool = False) -> list[str]:
        """Return the items that are left over."""
        policy = self.sources[source].order.policy
        self.line.end(self.sources[source], len(items), more=more)
        taken = self.line.number(items)
        return [item for _, item in self.line.hand_out(taken, policy, more=more)]

    def served(self, *, more: bool = False) -> list[Place[str]]:
        places = self.line.settle(self.now, more=more)
        for place in places:
            self.line.leave(place)
        return places

    def next(self) -> tuple[list[int], list[int]]:
        """Return the sources to ask and those to look at."""
        to_ask, to_look_at = self.line.next_sources(self.now)
        return [*map(self.sources.index, to_ask)], [*map(self.sources.index, to_look_at)]

    def asked(self) -> list[int]:
        return self.next()[0]

    def to_look_at(self) -> list[int]:
        return self.next()[1]

    def look(self, **due: bool) -> None:
        """Look at the sources named ``s0``, ``s1``, ..."""
        sources = [self.sources[int(name[1:])] for name in due]
        number = self.line.look(sources, self.now)
        for source, is_due in zip(sources, due.values(), strict=True):
            self.line.looked(source, number, may_have_items=is_due)


def of(place: Place[str]) -> list[str]:
    return [item for _, item in place.items]


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
        assert callers.begin(0, most=100).take == 100

    def test_while_there_is_more_the_first_callers_get_all_they_want(self) -> None:
        callers = Callers(1)
        first, second = callers.join(3), callers.join(3, once=True)
        callers.begin(0)
        callers.end(0, "a", "b", "c", more=True)
        assert callers.served(more=True) == [first]
        assert of(first) == ["a", "b", "c"]
        callers.begin(0)
        callers.end(0)
        assert callers.served() == [second]


class TestSeveralSources:
    def test_sources_that_have_something_share_what_is_wanted(self) -> None:
        callers = Callers()
        place = callers.join(10, once=True)
        callers.look(s0=True, s1=True, s2=True)
        assert callers.asked() == [0, 1, 2]
        assert [callers.begin(n).take for n in range(3)] == [4, 3, 3]
        for number, more in enumerate((True, False, False)):
            callers.end(number, "a", more=more)
        assert callers.asked() == [0], "only a source that has more is asked again"
        assert callers.begin(0).take == 7
        callers.end(0)
        assert callers.served() == [place]

    def test_a_server_that_does_not_answer_keeps_nothing_reserved_for_long(self) -> None:
        callers = Callers()
        place = callers.join(1)
        assert callers.begin(0).take == 1
        assert callers.begin(1).take == 0
        callers.line.over(callers.sources[1])
        assert callers.line.deadline(callers.now) == MOMENT
        callers.now = MOMENT
        assert callers.asked() == [1]
        assert callers.begin(1).take == 1
        callers.end(1, "a")
        assert callers.served() == [place]
        # The items that the slow one brings then go back.
        assert callers.end(0, "b") == ["b"]

    def test_items_of_several_sources_are_gathered_and_wait_for_none_asked_later(self) -> None:
        callers = Callers()
        place = callers.join(10)
        callers.begin(0, most=3)
        callers.begin(1, most=3)
        callers.end(0, "a")
        assert callers.served() == []
        callers.begin(2)
        callers.end(1, "b")
        assert callers.served() == [place]

    def test_items_wait_for_no_server_that_has_not_answered_for_a_moment(self) -> None:
        for hangs_in in ("attempt", "look"):
            callers = Callers(2)
            gone = callers.join()
            if hangs_in == "attempt":
                callers.begin(0)
            else:
                callers.line.look(callers.sources[:1], callers.now)
            callers.line.leave(gone)
            callers.now = 10.0
            # A look that follows waits behind what hangs already.
            callers.line.look(callers.sources[:1], callers.now)
            place = callers.join(10)
            callers.begin(1)
            callers.end(1, "a")
            assert callers.served() == [place], hangs_in

    def test_there_is_nothing_only_when_every_source_has_said_so(self) -> None:
        callers = Callers()
        callers.join(4)
        assert callers.to_look_at() == [], "who waits makes no source be looked at"
        place = callers.join(once=True)
        assert callers.to_look_at() == [0, 1, 2]
        callers.look(s0=False, s1=False)
        assert callers.served() == []
        callers.begin(2)
        callers.end(2)
        assert callers.served() == [place]

    def test_an_error_counts_only_if_nothing_came(self) -> None:
        for items in (["a"], []):
            callers = Callers(2)
            place, error = callers.join(3, once=True), ValueError("no")
            callers.begin(0, most=1)
            callers.begin(1)
            callers.line.over(callers.sources[0])
            callers.line.fail(callers.sources[0], error)
            assert callers.served() == []
            assert callers.asked() == [], "the line does not ask it again"
            callers.end(1, *items)
            assert callers.served() == [place]
            assert (of(place), place.error) == (items, error)

    def test_sources_with_a_backlog_take_turns(self) -> None:
        callers = Callers()
        callers.look(s0=True, s1=True, s2=True)
        asked = []
        for _ in range(6):
            callers.join(1)
            (source,) = callers.asked()
            asked.append(source)
            callers.begin(source)
            callers.end(source, "a", more=True)
            callers.served()
        assert asked == [0, 1, 2, 0, 1, 2]

    def test_who_takes_once_makes_others_be_looked_at_if_a_backlog_is_not_enough(self) -> None:
        callers = Callers()
        callers.join(1)
        callers.look(s0=True)
        callers.asked()
        callers.begin(0)
        callers.end(0, "a", more=True)
        callers.served()
        place = callers.join(4, once=True)
        assert callers.asked() == [0]
        assert callers.to_look_at() == []
        assert callers.begin(0).take == 4
        assert callers.to_look_at() == []
        callers.end(0)
        assert callers.served() == []
        assert callers.to_look_at() == [1, 2]
        callers.look(s1=False, s2=False)
        assert callers.served() == [place]


@st.composite
def events(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    place = st.tuples(st.just("join"), st.integers(1, 8), st.sampled_from("ab"), st.booleans())
    other = st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("end"), st.integers(0, 2), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("fail"), st.integers(0, 2)),
        st.tuples(st.just("look"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.sampled_from([0.01, MOMENT])),
    )
    return draw(st.lists(st.one_of(place, other), max_size=60))


@given(events())
# A caller leaves with an item while another source is asked.
@example(
    [("join", 5, "a", False), ("begin", 0, 3), ("begin", 1, 2), ("end", 0, 1, False), ("leave", 0)]
)
def test_whatever_happens_each_item_goes_to_one_caller_or_back(  # noqa: PLR0912 - one branch for each event
    plan: list[tuple[Any, ...]],
) -> None:
    """The model: the items in order, each of them with one caller of its policy, or left."""
    callers = Callers()
    line = callers.line
    places: list[Place[str]] = []
    came: dict[str, Any] = {}
    left: list[str] = []
    given_to: dict[str, Place[str]] = {}

    def serve() -> None:
        for place in callers.served():
            if not place.items and not place.error:
                # Every source has answered since it joined.
                assert place.once
                assert not place.unanswered
            assert len(place.items) <= place.want
            for item in of(place):
                assert item not in given_to
                given_to[item] = place

    for kind, *args in plan:
        if kind == "join":
            want, policy, once = args
            places.append(callers.join(want, policy, once=once))
        elif kind == "begin":
            place, most = args
            source = callers.sources[place]
            if source.attempt:
                continue
            others = [
                each.order
                for each in callers.sources
                if each.attempt and callers.now < each.since + MOMENT
            ]
            order = callers.begin(place, most)
            # Together, attempts that are fresh take no more than the callers of a policy want.
            wanted = sum(
                each.want - len(each.items) for each in line.places if each.policy == order.policy
            )
            reserved = sum(each.take for each in others if each.policy == order.policy)
            assert order.take <= most
            assert not order.take or order.take + reserved <= wanted
            if not order.take:
                line.over(source)
        elif kind == "end":
            place, count, more = args
            source = callers.sources[place]
            if not source.attempt:
                continue
            policy = source.order.policy
            items = [f"{len(came) + n}" for n in range(min(count, source.order.take))]
            came |= dict.fromkeys(items, policy)
            left += callers.end(place, *items, more=more)
        elif kind == "fail":
            source = callers.sources[args[0]]
            line.over(source)
            line.fail(source, ValueError())
        elif kind == "look":
            callers.look(**{f"s{args[0]}": args[1]})
        elif kind == "leave" and args[0] < len(line.places):
            gone = line.places[args[0]]
            line.leave(gone)
            left += [item for _, item in gone.take_items()]
        elif kind == "wait":
            callers.now += args[0]
        serve()
        for source in callers.to_look_at():
            assert not callers.sources[source].is_pending
        serve()
    with_callers = [item for place in line.places for item in of(place)]
    assert sorted([*given_to, *with_callers, *left]) == sorted(came)
    for item, place in given_to.items():
        assert came[item] == place.policy
    for place in places:
        numbers = [number for number, _ in place.items]
        assert numbers == sorted(numbers)
    # Nobody who has an item waits longer than a moment.
    callers.now += MOMENT
    serve()
    assert not any(place.items for place in line.places)
