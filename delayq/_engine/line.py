"""Decides which waiting caller gets which items, and how many items to ask each source for. Pure.

The items of one queue come from one or more *sources*: its partitions. Callers wait in one line,
whichever source serves them. An attempt to take from a source reserves a part of what the callers
want, so that two attempts at a time do not take twice as much. A source that finds everything
reserved is asked later, if anything is still wanted by then.

Each call costs more than the items in it, so few sources are asked for many items each, and take
turns. A source with a backlog can bring everything that is wanted; of others, several are asked.

A caller whose items come from several sources gets them together: when it has all it wants, when
every source has answered that was being asked at the time of its first item, or after a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

Item = TypeVar("Item")

Taken = tuple[int, Item]
"""An item with its place in the order of taking, so that items given back keep that order."""

MOMENT = 0.05
"""How long a source that does not answer may hold up the others, in seconds."""
CONTESTED = 1.0
"""How long others may still wait for slots of a limit that have become free, in seconds."""


# How many times as many items a source is expected to bring that had more than it was asked for.
_GROWTH = 8


def shares(count: int, wants: Sequence[int]) -> list[int]:
    """Share ``count`` items equally among callers. The first ones get the remainder."""
    result = []
    for place, want in enumerate(wants):
        others = len(wants) - place
        share = min(want, -(-count // others))
        result.append(share)
        count -= share
    return result


class Order(NamedTuple):
    """How many items an attempt takes, and for callers of which policy."""

    take: int
    policy: Any


class Source:
    """One source, as the line knows it.

    Attributes:
        attempt: The number of the attempt in progress; 0 if there is none.
        order: The items that this attempt takes.
        asked: Whether it was asked to begin one, and has not yet.
        look: The number of the last look, until that has found something; 0 if there is none.
        since: When the attempt or the look began, or when it was asked, in seconds.
        brings: How many items it is expected to bring if it is asked: several times as many as it
            brought last if it had more.
        is_held: Whether limits hold back items of it that are due, as far as is known.
    """

    def __init__(self) -> None:
        self.attempt: int = 0
        self.order: Order = Order(0, None)
        self.asked: bool = False
        self.look: int = 0
        self.since: float = 0.0
        self.brings: int = 1
        self.is_held: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether its server is being asked."""
        return self.asked or self.attempt > 0 or self.look > 0

    def is_slow(self, now: float) -> bool:
        """Return whether its server has not answered for :data:`MOMENT`: nothing waits for it."""
        return now >= self.since + MOMENT


class Place(Generic[Item]):
    """A caller in line.

    Attributes:
        want: The largest number of items it takes.
        once: Whether it leaves as soon as every source has answered.
        policy: Only items of the same policy are for this caller.
        joined: The number of the last attempt before it joined.
        items: The items it has so far.
        unanswered: For a caller that takes once: the sources that have not answered it.
        gathers: Once it has an item: the sources whose answers it still waits for.
        until: How long it waits for them, in seconds.
        error: The first error of a source, for a caller that takes once.
    """

    unanswered: set[Source]
    until: float

    __slots__ = (
        "error",
        "gathers",
        "items",
        "joined",
        "once",
        "policy",
        "unanswered",
        "until",
        "want",
    )

    def __init__(self, want: int, policy: Hashable = None, *, once: bool = False) -> None:
        self.want: int = want
        self.once: bool = once
        self.policy: Any = policy
        self.joined: int = 0
        self.items: list[Taken[Item]] = []
        self.gathers: set[Source] | None = None
        self.error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether the caller still takes items."""
        return True

    def take_items(self) -> list[Taken[Item]]:
        """Remove and return the items that the caller was handed, if any."""
        taken = self.items.copy()
        self.items.clear()
        return taken


class Line(Generic[Item]):
    """The waiting callers in order of arrival, and the attempts to take for them.

    Attributes:
        patient: Number of callers that wait for items that are still to come.
        mixed: Whether callers of more than one policy have joined so far.
        holders: Number of sources whose limits hold back items that are due, as far as is known.
        contested_until: How long others would handle what is fetched ahead here, in seconds.
    """

    def __init__(self) -> None:
        self._places: dict[Place[Item], None] = {}
        self._sources: list[Source] = []
        # Sources that may have items, in the order in which they are asked for more.
        self._candidates: dict[Source, None] = {}
        self._attempts = 0
        self._policy: Any = _NONE_YET
        self._taken = 0
        self.patient: int = 0
        self.mixed: bool = False
        self.holders: int = 0
        self.contested_until: float = 0.0

    @property
    def places(self) -> list[Place[Item]]:
        """The callers, in order of arrival."""
        return list(self._places)

    @property
    def is_idle(self) -> bool:
        """Whether no caller is in line and no attempt is in progress."""
        return not self._places and not any(source.attempt for source in self._sources)

    @property
    def wanted(self) -> int:
        """Number of items the callers would take now."""
        wanted = 0
        for place in self._places:
            if place.is_open:
                wanted += place.want - len(place.items)
        return wanted

    def add(self, source: Source) -> None:
        """Add a source, which has to answer the callers that are in line, too."""
        self._sources.append(source)
        for place in self._places:
            if place.once:
                place.unanswered.add(source)

    def join(self, place: Place[Item]) -> None:
        """Add a caller at the end of the line."""
        if place.policy is not self._policy and place.policy != self._policy:
            self.mixed = self._policy is not _NONE_YET
            self._policy = place.policy
        place.joined = self._attempts
        if place.once:
            place.unanswered = set(self._sources)
        else:
            self.patient += 1
        self._places[place] = None

    def leave(self, place: Place[Item]) -> bool:
        """Remove a caller, and return whether that was the last patient one."""
        if place not in self._places:
            return False
        del self._places[place]
        self.patient -= not place.once
        return not place.once and not self.patient

    # Attempts

    def look(self, sources: Iterable[Source], now: float) -> int:
        """Look at sources before asking them. Returns the number of the look."""
        self._attempts += 1
        for source in sources:
            if not source.is_pending:
                source.since = now
            source.look = self._attempts
        return self._attempts

    def looked(self, source: Source, number: int, *, may_have_items: bool) -> None:
        """Record what a look has found."""
        if source.look == number:
            source.look = 0
        if may_have_items:
            self._candidates.setdefault(source)
        else:
            self._answer(source, number)

    def begin(self, source: Source, now: float, most: int) -> Order:
        """Begin an attempt to take up to ``most`` items, or nothing if everything is reserved."""
        self._attempts += 1
        source.attempt = self._attempts
        source.asked, source.since = False, now
        if len(self._sources) == 1 and not self.mixed:
            order = Order(min(self.wanted, most), self._policy)
            source.order = order
            return order
        order = self._unreserved(now, source)
        if order.take and len(self._sources) > 1:
            self._candidates.pop(source, None)
            # The others that are about to begin take their shares.
            order = Order(-(-order.take // (1 + self._asked(now))), order.policy)
        elif not order.take and self.wanted:
            self._candidates.setdefault(source)
        if order.take > most:
            order = Order(most, order.policy)
        source.order = order
        return order

    def end(self, source: Source, got: int, *, more: bool) -> None:
        """End an attempt that brought items, to be handed out next.

        If it has ``more``, it has not answered any caller yet. Otherwise nothing is left, whatever
        was ordered, and for callers of any policy.
        """
        number = source.attempt
        self.over(source)
        source.brings = 1
        if more and len(self._sources) > 1:
            source.brings = max(1, got * _GROWTH)
            self._candidates.setdefault(source)
        if not more and number:
            self._answer(source, number)

    def limits_found(self, source: Source, now: float, *, is_held: bool, are_others: bool) -> None:
        """Note whether limits hold back items of a source, and whether there are others who would
        handle what is fetched ahead here.
        """
        self.holders += is_held - source.is_held
        source.is_held = is_held
        if is_held and are_others:
            self.contested_until = now + CONTESTED

    def over(self, source: Source) -> None:
        """End an attempt, whatever its outcome."""
        source.attempt = 0
        source.order = _NOTHING

    def fail(self, source: Source, error: Exception) -> None:
        """Note that an attempt or a look has failed."""
        source.asked, source.look, source.brings = False, 0, 1
        # It is asked again when its next call is due.
        self._candidates.pop(source, None)
        for place in self._places:
            if place.once:
                place.error = place.error or error
                place.unanswered.discard(source)
            if place.gathers is not None:
                place.gathers.discard(source)

    def _answer(self, source: Source, number: int) -> None:
        """Note that an attempt or a look has answered the callers that joined before it."""
        for place in self._places:
            if place.gathers is not None:
                place.gathers.discard(source)
            if place.once and place.joined < number:
                place.unanswered.discard(source)

    # Items

    def number(self, items: Iterable[Item]) -> list[Taken[Item]]:
        """Give items that have just arrived their places in the order of taking."""
        taken = list(enumerate(items, self._taken + 1))
        self._taken += len(taken)
        return taken

    def hand_out(
        self, taken: list[Taken[Item]], policy: Hashable, *, more: bool
    ) -> list[Taken[Item]]:
        """Give items of one policy to the callers, in order, and return those that are left.

        If ``more`` are to come at once, the first callers get all they want, and handle it while
        the rest arrives for the others.
        """
        waiting = [
            place
            for place in self._places
            if place.is_open and (not self.mixed or place.policy == policy)
        ]
        # The callers for whom the attempt was made come first. Items that one of them gives back
        # then go to the others, in order.
        for is_late in (False, True):
            if not taken:
                break
            places = [place for place in waiting if (place.joined >= self._attempts) is is_late]
            wants = [place.want - len(place.items) for place in places]
            at = 0
            for place, want in zip(
                places, wants if more else shares(len(taken), wants), strict=True
            ):
                place.items += taken[at : at + want]
                at += want
            taken = taken[at:]
        return taken

    def settle(self, now: float, *, more: bool = False) -> list[Place[Item]]:
        """Return the callers to serve now: with their items, an error, or nothing."""
        served: list[Place[Item]] = []
        # Found when it is needed.
        awaited: Sequence[Source] | None = () if len(self._sources) == 1 else None
        for place in self._places:
            if not place.is_open:
                continue
            if len(place.items) >= place.want:
                served.append(place)
            elif place.items:
                if awaited is None:
                    awaited = [source for source in self._sources if self._is_awaited(source, now)]
                if place.gathers is None:
                    place.gathers, place.until = set(awaited), now + MOMENT
                place.gathers.intersection_update(awaited)
                if not place.gathers or now >= place.until:
                    served.append(place)
            elif place.once and not more and not place.unanswered:
                # While there is more, no caller is told that there is nothing: the next attempt
                # follows at once.
                served.append(place)
        return served

    # Demand

    def unknown_sources(self) -> list[int]:
        """Return the numbers of the sources that are not being asked, and that are not asked either
        as soon as more is wanted.
        """
        candidates = self._candidates
        return [
            number
            for number, source in enumerate(self._sources)
            if source not in candidates and not source.is_pending
        ]

    def next_sources(self, now: float) -> tuple[list[Source], list[Source]]:
        """Return the sources that shall begin an attempt soon, for what is not reserved, and those
        to look at.

        Those have to answer a caller that takes once, and are not known to have anything, while the
        ones that are known do not have all that is wanted.
        """
        chosen: list[Source] = []
        if not self._places or (left := self._uncovered(now)) <= 0:
            return chosen, []
        for source in self._candidates:
            if not (source.attempt or source.asked):
                chosen.append(source)
                if (left := left - source.brings) <= 0:
                    break
        for source in chosen:
            del self._candidates[source]
            source.asked, source.since = True, now
        return chosen, self._unanswered() if left > 0 else []

    def _unanswered(self) -> list[Source]:
        unanswered: set[Source] = set()
        for place in self._places:
            if place.once and place.is_open:
                unanswered |= place.unanswered
        return [
            self._sources[number]
            for number in (self.unknown_sources() if unanswered else ())
            if self._sources[number] in unanswered
        ]

    def deadline(self, now: float) -> float | None:
        """Return when to settle again; None if only an event changes anything."""
        moments = [place.until for place in self._places if place.gathers and place.is_open]
        if moments or self._candidates:
            moments += [
                source.since + MOMENT
                for source in self._sources
                if source.is_pending and not source.is_slow(now)
            ]
        return min(moments, default=None)

    def _is_awaited(self, source: Source, now: float) -> bool:
        """Return whether callers that have items wait for those of this source."""
        return not source.is_slow(now) if source.is_pending else source in self._candidates

    def _uncovered(self, now: float) -> int:
        """Return how much is wanted that no attempt has reserved, and no source that was asked is
        expected to bring.
        """
        count = self._unreserved(now).take
        if count:
            for source in self._sources:
                if source.asked and not source.is_slow(now):
                    count -= source.brings
        return count

    def _asked(self, now: float) -> int:
        """Return how many sources are about to begin."""
        return sum(source.asked and not source.is_slow(now) for source in self._sources)

    def _unreserved(self, now: float, source: Source | None = None) -> Order:
        """Return how much is wanted and not reserved, for the first policy of which there is
        any.
        """
        if not self._places:
            return _NOTHING
        wanted = self._wanted_by_policy() if self.mixed else {self._policy: self.wanted}
        for other in self._sources:
            take, policy = other.order
            # A server that does not answer must not keep the others from serving.
            if take and other is not source and policy in wanted and not other.is_slow(now):
                wanted[policy] -= take
        return next((Order(take, policy) for policy, take in wanted.items() if take > 0), _NOTHING)

    def _wanted_by_policy(self) -> dict[Any, int]:
        """Return how much is wanted by the callers of each policy, in order of arrival."""
        wanted: dict[Any, int] = {}
        for place in self._places:
            if place.is_open:
                want = place.want - len(place.items)
                wanted[place.policy] = wanted.get(place.policy, 0) + want
        return wanted


_NOTHING = Order(0, None)
# The policy of the last caller before the first one.
_NONE_YET = object()
