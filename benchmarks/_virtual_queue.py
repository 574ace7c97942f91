"""One queue and its clients in virtual time: the clients' own plans, clocks and staggers, and a
network and a server that only cost time.

The server does what ``claim.lua``, ``notice.lua`` and ``recheck.lua`` do to due times and channels.
"""

from __future__ import annotations

import heapq
from collections import Counter
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._engine.server_clock import ServerClock
from delayq._engine.stagger import Stagger, parse_notice, parse_number
from delayq._engine.wakeup_plan import (
    DUE_NOW,
    Arm,
    Call,
    CallOutcome,
    Cancel,
    Wakeup,
    WakeupPlan,
    moment_after,
)
from delayq._redis.retry import retry_delay

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from delayq._engine.context import Channels
    from delayq._engine.wakeup_plan import Actions

# The server's time when a simulation begins, microseconds: far from 0, which means now.
EPOCH_US = 1_700_000_000_000_000


class Costs(NamedTuple):
    """The time that everything takes, seconds.

    Attributes:
        one_way: A packet's time between a client and a server.
        claim: The server's time for a claim and the acknowledgement of what it hands out.
        vain_claim: The server's time for a claim that finds nothing.
        recheck: The server's time for the re-check of one queue.
        subscribe: The server's time to subscribe or unsubscribe a client.
        publish: The server's time for each client that hears a publication.
        call: A client's time for a call of its own, and for the message that it brings.
        hear: A client's time for a publication that it hears.
    """

    one_way: float = 0.000_250
    claim: float = 0.000_045
    vain_claim: float = 0.000_020
    recheck: float = 0.000_015
    subscribe: float = 0.000_004
    publish: float = 0.000_003
    call: float = 0.000_200
    hear: float = 0.000_050


class World:
    """Virtual time: a line of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    @property
    def now_us(self) -> int:
        return EPOCH_US + int(self.now * 1_000_000)

    def at(self, moment: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(self.now, moment), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        self.at(self.now + seconds, act)

    def run(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end


class Worker:
    """A thread that does one thing after another: a server, or a process with clients."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_at = 0.0
        self.busy = 0.0

    def spend(self, seconds: float) -> float:
        """Do some work as soon as possible, and return when it is done."""
        self._free_at = max(self._world.now, self._free_at) + seconds
        self.busy += seconds
        return self._free_at


class Server(Worker):
    """The master of one queue.

    Attributes:
        counts: The number of calls and publications so far, by kind.
        down: Whether it answers nothing.
    """

    def __init__(self, world: World, costs: Costs, masters: int = 1) -> None:
        super().__init__(world)
        self.world = world
        self.costs = costs
        self.masters = masters
        self.counts: Counter[str] = Counter()
        self.down = False
        self._dues: list[int] = []
        # In the order of subscription.
        self._subscribed: dict[Channels, dict[VirtualClient, None]] = {"notices": {}, "summons": {}}
        # Each server counts those that subscribe there; the queue's own has the first place.
        self._subscribers: Counter[Channels] = Counter()
        # When the next summons may be given.
        self._summons_at = 0.0

    @property
    def listeners(self) -> list[VirtualClient]:
        return [*self._subscribed["notices"]]

    @property
    def remaining(self) -> int:
        """How many messages have not been handed out."""
        return len(self._dues)

    def offer(self, due: int) -> None:
        first = self._dues[0] if self._dues else None
        heapq.heappush(self._dues, due)
        if first is None or due < first:
            self._publish(b"%d" % due)

    def claim(self, signature: str) -> tuple[int, list[int], int, int]:
        """Return the time, the due time of a message that is handed out, the time until the next
        one is due, and how many clients were told.
        """
        now = self.world.now_us
        due = [heapq.heappop(self._dues)] if self._dues and self._dues[0] <= now else []
        wait = max(0, self._dues[0] - now) if self._dues else -1
        self.counts["claims"] += 1
        self.counts["vain claims"] += not due
        listeners = 0
        if due and wait and signature:
            following = -1 if wait < 0 else now + wait
            listeners = self._publish(f"{following} {now} {signature}".encode())
        return now, due, wait, listeners

    def recheck(self) -> tuple[int, int, float, int, int]:
        """Return the time, when the next message is due as plans take it, for how many seconds it
        has been, and how many clients listen here and rest here.
        """
        self.counts["re-checks"] += 1
        now = self.world.now_us
        due = self._dues[0] if self._dues else -1
        late = max(0, now - due) / 1e6 if self._dues else 0.0
        next_due = due if due < 0 or due > now else 0
        return now, next_due, late, self._subscribers["notices"], self._subscribers["summons"]

    def summon(self, at_hand: int) -> None:
        now = self.world.now_us
        excess = sum(moment <= now for moment in self._dues) - at_hand
        if excess > 0 and self.world.now >= self._summons_at:
            self.counts["summons"] += 1
            receivers = self._publish(b"%d" % excess, "summons")
            self._summons_at = self.world.now + 0.02 + receivers / 20_000

    def subscribe(self, client: VirtualClient, to: Channels) -> None:
        self.counts["subscriptions"] += 1
        for channel, clients in self._subscribed.items():
            if channel == to:
                self._subscribers[channel] += client.place == 0 and client not in clients
                clients[client] = None
            elif client in clients:
                self._subscribers[channel] -= client.place == 0
                del clients[client]

    def _publish(self, content: bytes, channel: Channels = "notices") -> int:
        listeners, clients = self._subscribers[channel], self._subscribed[channel]
        self.counts["publications"] += 1
        self.counts["heard"] += len(clients)
        sent = self.spend(self.costs.publish * listeners) + self.costs.one_way
        for client in clients:
            self.world.at(sent, partial(client.hear, content, channel))
        return listeners


class VirtualClient:
    """A client that consumes the queue, one message at a time.

    Attributes:
        place: The number of the server that it subscribes to.
        late: How late its messages were, seconds.
    """

    def __init__(
        self,
        server: Server,
        process: Worker,
        number: int,
        chance: random.Random,
        *,
        resync_interval: float = 5.0,
        hold: float = 0.0,
    ) -> None:
        self._server = server
        self._world = server.world
        self._process = process
        self._chance = chance
        self._interval = resync_interval
        self._hold = hold
        self.place = chance.randrange(server.masters)
        self.late: list[float] = []
        self._dead = self._calling = self._holds = False
        self._timer: Wakeup | None = None
        self._listens_to: Channels = "nothing"
        self._clock = ServerClock(lambda: self._world.now)
        self.plan = WakeupPlan(
            self._clock,
            Stagger(f"{number:x}", chance.random, lambda: server.masters, resync_interval),
            lambda: not self._holds,
            partial(retry_delay, longest=min(5.0, resync_interval)),
        )
        self.plan.stagger.is_dormant = True

    def start(self) -> None:
        self._act(self.plan.on_caller_joined())
        self._world.after(self._interval * self._chance.random(), self._recheck_again)

    def die(self) -> None:
        self._dead = True
        self._server.subscribe(self, "nothing")

    def move(self) -> None:
        """Subscribe to another server, because the connection to this one broke."""
        self._server.subscribe(self, "nothing")
        self.place = self._chance.randrange(1, self._server.masters)
        self._world.after(retry_delay(1, base=0.1, lowest_share=0.0), self._subscribe)

    # Channels

    def hear(self, content: bytes, channel: Channels) -> None:
        self._soon(self._server.costs.hear, lambda: self._on_message(content, channel))

    def _on_message(self, content: bytes, channel: Channels) -> None:
        if channel == "summons":
            self._act(self.plan.on_summons(parse_number(content) or 0))
        elif self._holds:
            self.plan.invalidate()
        elif (notice := parse_notice(content)) is not None:
            self._act(self.plan.on_notice(notice, self._world.now))
        elif (moment := parse_number(content)) is not None:
            self._act(self.plan.on_due(moment, self._world.now))

    def _listen(self, to: Channels) -> None:
        if to != self._listens_to:
            self._listens_to = to
            self._subscribe()

    def _subscribe(self) -> None:
        to = self._listens_to

        def subscribed() -> None:
            self._server.subscribe(self, to)
            self._reply(self._recheck)

        self._send(self._server.costs.subscribe, subscribed)

    # The re-check

    def _recheck_again(self) -> None:
        if not self._dead:
            self._recheck()
            self._world.after(self._interval, self._recheck_again)

    def _recheck(self) -> None:
        if self._holds:
            self._act(self.plan.on_no_callers())
            return
        asked_at = self._world.now

        def on_server() -> None:
            now, due, late, listeners, dormant = self._server.recheck()

            def on_reply() -> None:
                self._clock.observe(now, asked_at)
                self._act(self.plan.on_recheck(due, late, listeners, dormant, self._world.now))

            self._reply(on_reply)

        self._send(self._server.costs.recheck, on_server)

    # Calls

    def _act(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Call):
                self._call()
            elif isinstance(action, Arm):
                self._timer = action.wakeup
                self._world.at(action.wakeup.wake_at, partial(self._fire, action.wakeup))
            elif isinstance(action, Cancel):
                self._timer = None
            else:
                self._listen(action.to)

    def _fire(self, wakeup: Wakeup) -> None:
        if self._timer is wakeup and not self._dead:
            self._timer = None
            self._act(self.plan.on_timer(wakeup))

    def _call(self) -> None:
        if self._calling:
            return
        if not self.plan.begin_call():
            return
        if self._holds:
            self._end(self.plan.on_reply(CallOutcome.NO_CALLERS, self._world.now))
            return
        self._calling, asked_at = True, self._world.now
        signature = self.plan.stagger.signature(self._world.now, wants_messages=not self._holds)

        def on_server() -> None:
            now, messages, wait, listeners = self._server.claim(signature)
            self._server.spend(
                self._server.costs.claim if messages else self._server.costs.vain_claim
            )
            self._reply(lambda: self._claimed(asked_at, now, messages, wait, listeners))

        self._send(0.0, on_server, failed=lambda: self._end(self.plan.on_failure(self._world.now)))

    def _claimed(
        self, asked_at: float, now: int, messages: list[int], wait: int, listeners: int
    ) -> None:
        self._clock.observe(now, asked_at)
        if messages:
            self.plan.took_messages(listeners, self._world.now)
        if wait:
            self._act(self.plan.handed_out(now))
        elif (clients := self.plan.stagger.clients_at_hand(self._world.now)) is not None:
            self._send(self._server.costs.vain_claim, partial(self._server.summon, clients))
        self.late += [(self._world.now_us - due) / 1e6 for due in messages]
        if messages and self._hold:
            self._holds = True
            self._world.after(self._hold, self._handled)
        again = messages and not self._holds
        self._end(
            self.plan.on_reply(
                DUE_NOW if again and wait == 0 else moment_after(now, wait), self._world.now
            )
        )

    def _handled(self) -> None:
        self._holds = False
        if not self._dead:
            self._act(self.plan.on_caller_joined())

    def _end(self, actions: Actions) -> None:
        self._calling = False
        self._act(actions)
        self._call()

    # The network

    def _soon(self, cost: float, act: Callable[[], object]) -> None:
        """Do something as soon as this process can, unless it has died."""

        def unless_dead() -> None:
            if not self._dead:
                act()

        self._world.at(self._process.spend(cost), unless_dead)

    def _send(
        self, cost: float, serve: Callable[[], object], failed: Callable[[], object] | None = None
    ) -> None:
        def arrive() -> None:
            if not self._server.down:
                self._world.at(self._server.spend(cost), serve)
            elif failed is not None:
                self._reply(failed)

        self._soon(
            self._server.costs.call, lambda: self._world.after(self._server.costs.one_way, arrive)
        )

    def _reply(self, act: Callable[[], Any]) -> None:
        self._world.after(self._server.costs.one_way, lambda: self._soon(0.0, act))
