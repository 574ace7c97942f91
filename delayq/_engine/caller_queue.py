"""Decides which waiting caller gets which items, and how many to claim from each source. Pure.

The items of one queue come from one or more *sources*: its partitions. Callers wait in one queue,
whichever source serves them. A claim from a source reserves a part of what the callers have room
for, so that two claims at a time do not bring twice as much. A source that finds everything
reserved is asked later, if any caller still has room by then.

Each call costs more than the items in it, so few sources are asked for many items each, and take
turns. A source with a backlog can fill all callers; of others, several are asked.

A caller whose items come from several sources gets them together: when it has all it asked for,
when every source has answered that was being asked at the time of its first item, or after
:data:`GATHER_WINDOW`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

Item = TypeVar("Item")

Numbered = tuple[int, Item]
"""An item with its number in the order of claiming, so that returned items keep that order."""

GATHER_WINDOW = 0.05
"""How long a source that does not answer may hold up the others, in seconds."""

# A source that had more than it was asked for is expected to bring this many times as many.
_GROWTH = 8


class Reservation(NamedTuple):
    """How many items a claim takes, and for callers of which policy."""

    size: int
    policy: Any


_NO_ITEMS = Reservation(0, None)
# The policy of the last caller before the first one has joined.
_NO_POLICY = object()


class Source:
    """The state of one source.

    Claims and probes are numbered together, so that a reply counts only for the callers that
    joined before its question.

    Attributes:
        claim_number: The number of the claim in progress; 0 if there is none.
        reservation: The items that this claim takes.
        is_requested: Whether a claim was requested that has not begun yet.
        probe: The number of the last probe, until its reply has come; 0 if there is none.
        asked_at: When the claim or the probe began, or when it was requested, in seconds.
        expected: How many items the next claim is expected to bring: several times as many as the
            last one if that left some.
    """

    def __init__(self) -> None:
        self.claim_number: int = 0
        self.reservation: Reservation = _NO_ITEMS
        self.is_requested: bool = False
        self.probe: int = 0
        self.asked_at: float = 0.0
        self.expected: int = 1

    @property
    def is_pending(self) -> bool:
        """Whether its server is being asked."""
        return self.is_requested or self.claim_number > 0 or self.probe > 0

    def is_slow(self, now: float) -> bool:
        """Return whether its server is taking so long to answer that nothing waits for it."""
        return now >= self.asked_at + GATHER_WINDOW


class QueuedCaller(Generic[Item]):
    """A caller in the queue.

    Attributes:
        max_items: The largest number of items it takes.
        nowait: Whether it leaves as soon as every source has answered.
        policy: Only items of the same policy are for this caller.
        joined_after: The number of the last claim or probe before it joined.
        items: The items it has so far.
        unanswered: If it does not wait: the sources that have not answered it.
        gathering: Once it has an item: the sources whose replies it still waits for.
        gather_until: How long it waits for them, in seconds.
        error: If it does not wait: the first error of a source.
    """

    unanswered: set[Source]
    gather_until: float

    __slots__ = (
        "error",
        "gather_until",
        "gathering",
        "items",
        "joined_after",
        "max_items",
        "nowait",
        "policy",
        "unanswered",
    )

    def __init__(self, max_items: int, policy: Hashable = None, *, nowait: bool = False) -> None:
        self.max_items: int = max_items
        self.nowait: bool = nowait
        self.policy: Any = policy
        self.joined_after: int = 0
        self.items: list[Numbered[Item]] = []
        self.gathering: set[Source] | None = None
        self.error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether the caller still takes items."""
        return True

    def take_items(self) -> list[Numbered[Item]]:
        """Remove and return the items that the caller was handed, if any."""
        items = self.items.copy()
        self.items.clear()
        return items


class CallerQueue(Generic[Item]):
    """The waiting callers in order of arrival, and the claims for them."""

    def __init__(self, policy_of: Callable[[Item], Hashable] = lambda _: None) -> None:
        """Create a queue. ``policy_of`` returns the policy of the callers that may have an item."""
        self._policy_of = policy_of
        self._callers: dict[QueuedCaller[Item], None] = {}
        # Number of callers that wait for items that are still to come.
        self._patient = 0
        self._sources: list[Source] = []
        # Sources that may have items, in the order in which claims are requested from them.
        self._candidates: dict[Source, None] = {}
        # The number of the last claim or probe, and that of the last item.
        self._last_question = 0
        self._last_item = 0
        # The policy of the last caller, and whether callers of several policies have joined.
        self._policy: Any = _NO_POLICY
        self._has_policies = False

    @property
    def callers(self) -> list[QueuedCaller[Item]]:
        """The callers, in order of arrival."""
        return list(self._callers)

    @property
    def is_idle(self) -> bool:
        """Whether no caller is in the queue and no claim is in progress."""
        return not self._callers and not any(source.claim_number for source in self._sources)

    @property
    def has_patient_callers(self) -> bool:
        """Whether a caller waits for items that are still to come, and not for a reply only."""
        return self._patient > 0

    @property
    def capacity(self) -> int:
        """Number of items the callers would take now."""
        capacity = 0
        for caller in self._callers:
            if caller.is_open:
                capacity += caller.max_items - len(caller.items)
        return capacity

    @property
    def wants_items(self) -> bool:
        """Whether the callers would take items now."""
        return self.capacity > 0

    def add_source(self, source: Source) -> None:
        """Add a source, which has to answer the callers that are in the queue, too."""
        self._sources.append(source)
        for caller in self._callers:
            if caller.nowait:
                caller.unanswered.add(source)

    def join(self, caller: QueuedCaller[Item]) -> None:
        """Add a caller at the end of the queue."""
        if caller.policy is not self._policy and caller.policy != self._policy:
            self._has_policies = self._policy is not _NO_POLICY
            self._policy = caller.policy
        caller.joined_after = self._last_question
        if caller.nowait:
            caller.unanswered = set(self._sources)
        else:
            self._patient += 1
        self._callers[caller] = None

    def leave(self, caller: QueuedCaller[Item]) -> bool:
        """Remove a caller, and return whether that was the last patient one."""
        if caller not in self._callers:
            return False
        del self._callers[caller]
        self._patient -= not caller.nowait
        return not caller.nowait and not self._patient

    # Probes and claims

    def begin_probe(self, sources: Iterable[Source], now: float) -> int:
        """Ask sources whether they may have items, and return the number of the probe."""
        self._last_question += 1
        for source in sources:
            if not source.is_pending:
                source.asked_at = now
            source.probe = self._last_question
        return self._last_question

    def end_probe(self, source: Source, number: int, *, may_have_items: bool) -> None:
        """Record the reply of a source to a probe."""
        if source.probe == number:
            source.probe = 0
        if may_have_items:
            self.assume_items(source)
        else:
            self._record_empty(source, number)

    def assume_items(self, source: Source) -> None:
        """Have claims requested from a source, which may have items."""
        self._candidates.setdefault(source)

    def begin_claim(self, source: Source, now: float, max_items: int) -> Reservation:
        """Begin to claim up to ``max_items``, or nothing if everything is reserved."""
        self._last_question += 1
        source.claim_number = self._last_question
        source.is_requested, source.asked_at = False, now
        if len(self._sources) == 1 and not self._has_policies:
            count, policy = self.capacity, self._policy
        else:
            count, policy = self._unreserved(now, source)
            if count and len(self._sources) > 1:
                self._candidates.pop(source, None)
                # The others that are about to begin take their shares.
                sharing = 1 + sum(
                    sibling.is_requested and not sibling.is_slow(now) for sibling in self._sources
                )
                count = -(-count // sharing)
            elif not count and self.capacity:
                self._candidates.setdefault(source)
        source.reservation = Reservation(min(count, max_items), policy)
        return source.reservation

    def record_claimed(
        self, source: Source, items: Collection[Item], *, has_more: bool
    ) -> list[Numbered[Item]]:
        """End a claim that was carried out, and return its items with their numbers. Hand them out
        next.

        If it ``has_more``, the source has more due items, and a caller that does not wait stays for
        the next claim. Otherwise the source has none left, whatever the claim's size and policy.
        """
        number, source.claim_number, source.reservation = source.claim_number, 0, _NO_ITEMS
        source.expected = 1
        if not has_more:
            if number:
                self._record_empty(source, number)
        elif len(self._sources) > 1:
            source.expected = max(1, len(items) * _GROWTH)
            self._candidates.setdefault(source)
        numbered = list(enumerate(items, self._last_item + 1))
        self._last_item += len(numbered)
        return numbered

    def abort_claim(self, source: Source) -> None:
        """End a claim that brought nothing, and tells nothing of the source."""
        source.claim_number, source.reservation = 0, _NO_ITEMS

    def fail(self, source: Source, error: Exception) -> None:
        """Record that a probe has failed, or a claim, which was aborted."""
        source.is_requested, source.probe, source.expected = False, 0, 1
        # It is asked again when its next call is due.
        self._candidates.pop(source, None)
        for caller in self._callers:
            if caller.nowait:
                caller.error = caller.error or error
                caller.unanswered.discard(source)
            if caller.gathering is not None:
                caller.gathering.discard(source)

    def _record_empty(self, source: Source, number: int) -> None:
        """Record that a source has nothing for the callers that joined before this question."""
        for caller in self._callers:
            if caller.gathering is not None:
                caller.gathering.discard(source)
            if caller.nowait and caller.joined_after < number:
                caller.unanswered.discard(source)

    # Items

    def hand_out(
        self, items: list[Numbered[Item]], *, has_more: bool = False
    ) -> list[Numbered[Item]]:
        """Hand items to the callers, in order, and return the remaining ones.

        If it ``has_more``, the source is claimed from again at once: the first callers get all they
        have room for, and handle it while the others wait.
        """
        if not self._has_policies:
            return self._hand_out(items, None, has_more=has_more)
        by_policy: dict[Hashable, list[Numbered[Item]]] = {}
        for numbered in items:
            by_policy.setdefault(self._policy_of(numbered[1]), []).append(numbered)
        remaining: list[Numbered[Item]] = []
        for policy, same_policy in by_policy.items():
            remaining += self._hand_out(same_policy, policy, has_more=has_more)
        return remaining

    def _hand_out(
        self, items: list[Numbered[Item]], policy: Hashable, *, has_more: bool
    ) -> list[Numbered[Item]]:
        # The callers for whom the items were claimed come first. If one of them returns some, they
        # go to the late ones, in order.
        in_time: list[QueuedCaller[Item]] = []
        late: list[QueuedCaller[Item]] = []
        for caller in self._callers:
            if caller.is_open and (not self._has_policies or caller.policy == policy):
                (in_time if caller.joined_after < self._last_question else late).append(caller)
        start = 0
        for callers in (in_time, late):
            for index, caller in enumerate(callers):
                share = caller.max_items - len(caller.items)
                if not has_more:
                    # Equal shares of what remains; the first callers get the remainder.
                    share = min(share, -((start - len(items)) // (len(callers) - index)))
                caller.items += items[start : start + share]
                start = min(start + share, len(items))
        return items[start:]

    def served(self, now: float, *, has_more: bool = False) -> list[QueuedCaller[Item]]:
        """Return the callers whose wait is over: with their items, an error, or nothing."""
        served: list[QueuedCaller[Item]] = []
        # The sources that callers with items wait for: determined when they are needed.
        pending_sources: Sequence[Source] | None = () if len(self._sources) == 1 else None
        for caller in self._callers:
            if not caller.is_open:
                continue
            if len(caller.items) >= caller.max_items:
                served.append(caller)
            elif caller.items:
                if pending_sources is None:
                    pending_sources = [
                        source
                        for source in self._sources
                        if (
                            not source.is_slow(now)
                            if source.is_pending
                            else source in self._candidates
                        )
                    ]
                if caller.gathering is None:
                    caller.gathering, caller.gather_until = (
                        set(pending_sources),
                        now + GATHER_WINDOW,
                    )
                caller.gathering.intersection_update(pending_sources)
                if not caller.gathering or now >= caller.gather_until:
                    served.append(caller)
            elif caller.nowait and not has_more and not caller.unanswered:
                # While there is more, no caller leaves with nothing: the next claim follows at
                # once.
                served.append(caller)
        return served

    # Which sources to ask

    def unprobed_sources(self) -> list[int]:
        """Return the indexes of the sources that are neither being asked, nor known to have items,
        so that they would be asked as soon as a caller has room.
        """
        candidates = self._candidates
        return [
            index
            for index, source in enumerate(self._sources)
            if source not in candidates and not source.is_pending
        ]

    def next_sources(self, now: float) -> tuple[list[Source], list[Source]]:
        """Return the sources from which claims are to be requested, for what is not reserved, and
        those to probe.

        A probe tells a caller that does not wait what a source has that may have nothing, while the
        sources that are known to have items do not have enough.
        """
        to_request: list[Source] = []
        if not self._callers or not (room := self._unreserved(now).size):
            return to_request, []
        for source in self._sources:
            if source.is_requested and not source.is_slow(now):
                room -= source.expected
        if room <= 0:
            return to_request, []
        for source in self._candidates:
            if not (source.claim_number or source.is_requested):
                to_request.append(source)
                room -= source.expected
                if room <= 0:
                    break
        for source in to_request:
            del self._candidates[source]
            source.is_requested, source.asked_at = True, now
        return to_request, self._unanswered() if room > 0 else []

    def _unanswered(self) -> list[Source]:
        unanswered: set[Source] = set()
        for caller in self._callers:
            if caller.nowait and caller.is_open:
                unanswered |= caller.unanswered
        return [
            self._sources[index]
            for index in (self.unprobed_sources() if unanswered else ())
            if self._sources[index] in unanswered
        ]

    def deadline(self, now: float) -> float | None:
        """Return when to call :meth:`served` again; None if only an event changes anything."""
        deadlines = [
            caller.gather_until for caller in self._callers if caller.gathering and caller.is_open
        ]
        if deadlines or self._candidates:
            deadlines += [
                source.asked_at + GATHER_WINDOW
                for source in self._sources
                if source.is_pending and not source.is_slow(now)
            ]
        return min(deadlines, default=None)

    def _unreserved(self, now: float, source: Source | None = None) -> Reservation:
        """Return how many items callers have room for that no claim, but one from ``source``, has
        reserved: for the first policy of which there are any.
        """
        if not self._callers:
            return _NO_ITEMS
        room: dict[Any, int] = {}
        if self._has_policies:
            for caller in self._callers:
                if caller.is_open:
                    free = caller.max_items - len(caller.items)
                    room[caller.policy] = room.get(caller.policy, 0) + free
        else:
            room[self._policy] = self.capacity
        for claimed in self._sources:
            count, policy = claimed.reservation
            # A server that does not answer must not keep the others from serving.
            if count and claimed is not source and policy in room and not claimed.is_slow(now):
                room[policy] -= count
        for policy, count in room.items():
            if count > 0:
                return Reservation(count, policy)
        return _NO_ITEMS
