"""Leases: which worker holds a message, for how long, and what happens when the lease ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import anyio
import pytest

import delayq
from delayq._engine.prefetch import Prefetched
from delayq._engine.suspects import ClaimTerms
from delayq._reliable.claims import ClaimAcknowledger
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import ACK, CLAIM, EXTEND
from tests.support.reliable import (
    Jobs,
    claim_one,
    depths,
    get,
    leased,
    listed,
    offers,
)
from tests.support.reliable_fixtures import LEASE
from tests.support.reliable_store import HOUR, Store, hours
from tests.support.tasks import end
from tests.support.waiting import be_impatient, until

if TYPE_CHECKING:
    from delayq import Client, Message
    from delayq._engine.lease_keeper import LeaseKeeper
    from delayq._reliable.replies import Claim
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

NONE = (0, 0, 0, 0)


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases of an hour every 0.1 s: a late renewal costs none of them."""
    monkeypatch.setattr("delayq._engine.lease_keeper._TIMES", 36_000)


def keeper_of(queue: Jobs) -> LeaseKeeper[Claim]:
    return queue._open.partitions[0].keeper(queue._consumer.policy.lease_us)


async def steal(raw: Any, message: Message[Any]) -> None:
    """Make it look as if another worker now holds the message."""
    await raw.hset("delayq:{jobs}:tokens", message.id, "somebody else's")


def demand_no_cancellation() -> None:
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def demand_returned(store: Store) -> None:
    """Assert that no message is leased, and that no attempt counts."""
    stored = await store.look()
    assert (stored.leases, stored.attempts) == ({}, {})


@pytest.mark.every_server
async def test_a_lease_ends_by_the_servers_clock(client: Client, jobs: Jobs, store: Store) -> None:
    before = await client.server_time()
    message = await leased(jobs, id="a")
    after = await client.server_time()
    assert (message.lease_ends_at - before).total_seconds() >= LEASE
    assert (message.lease_ends_at - after).total_seconds() <= LEASE
    assert hours((await store.look()).live["a"][1]) == 1
    await message.extend(5 * HOUR)
    assert 5 * HOUR <= (message.lease_ends_at - after).total_seconds() < 5 * HOUR + 60
    assert hours((await store.look()).live["a"][1]) == 5
    # Readers see the end of the lease in place of the due time.
    seen = await get(jobs, "a")
    assert (seen.state, seen.attempt) == ("leased", 1)
    assert seen.due_at == seen.lease_ends_at
    assert abs(seen.lease_ends_at - message.lease_ends_at) <= timedelta(microseconds=1)


async def test_a_waiting_claim_gets_a_message_whose_lease_ends(server: PrivateServer) -> None:
    # Only the client's own timer wakes it, for a lease of its own or of another client.
    async with (
        delayq.connect(server.url, resync_interval=HOUR) as client,
        delayq.connect(server.url, resync_interval=HOUR) as other,
    ):
        queue = client.reliable_queue("jobs", lease=0.3)
        first = await leased(queue)
        await asyncio.wait_for(claim_one(queue, wait=60), 30)
        second = await asyncio.wait_for(claim_one(other.reliable_queue("jobs"), wait=60), 30)
        assert await client.server_time() >= first.lease_ends_at
        assert (second.id, second.value, second.attempt) == (first.id, 1, 3)
        assert second.due_at == first.due_at


# Moments at which a lease may end that is about to begin.
_TAKE_ENDS = """do
  local time = redis.call('TIME')
  local first = time[1] * 1000000 + time[2] + ARGV[3]
  for ends = first, first + 5000 do
    local text = string.format('%.0f', ends)
    redis.call('ZADD', KEYS[11], text, 'ends at ' .. text)
  end
end
"""


@pytest.mark.every_server
async def test_an_end_of_leases_names_one_claim(jobs: Jobs, raw: Any) -> None:
    await jobs.offer(1, id="a")
    keys = ReliableKeys.of("jobs")
    names = (*keys.of_script(CLAIM), keys.call("0"))
    values = (1, 1, HOUR * 1_000_000, 0, "", 1, 0, "", "")
    reply = await raw.eval(_TAKE_ENDS + CLAIM.text, len(names), *names, *values)
    token = reply[5]
    assert await raw.zrangebyscore(keys.leased, token, token) == [b"a"] == reply[6]


@pytest.mark.every_server
async def test_a_claim_that_is_given_up_spares_a_lease_that_ends_at_the_same_moment(
    jobs: Jobs, store: Store, raw: Any
) -> None:
    """By chance, after a worker has extended its lease."""
    await jobs.offer_many(offers(3, ids=True))
    (held,) = await jobs.claim()
    partition = jobs._open.partitions[0]
    call = partition.keys.call("a-client")
    terms = ClaimTerms(may_bring_suspect=True, is_alone=False)
    reply = await partition.store.claim(
        call, 1, 2, jobs._consumer.policy, "", terms=terms, own_suspect=None
    )
    await raw.zadd(partition.keys.leased, {held.id: reply.ends_us})
    await raw.hset(partition.keys.named("tokens"), held.id, held._claim.token)
    await partition.store.release_call(call, 1)
    assert set((await store.look()).leases) == {held.id}
    assert await listed(jobs, "ready") == [1, 2]
    await held.ack()


# Renewal


async def test_the_leases_of_a_queue_are_renewed_in_one_call(
    client: Client, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Renewed every 0.2 s, yet no message waits for half of its lease before its block begins.
    monkeypatch.setattr("delayq._engine.lease_keeper._TIMES", HOUR * 5)
    queue = client.reliable_queue("jobs", lease=HOUR)
    await queue.offer_many(offers(100))

    async def handle(message: Message[int]) -> None:
        async with message:
            await until(lambda: faults.calls.count(EXTEND.name) >= 3)

    await asyncio.gather(*(handle(message) for message in await queue.claim(100)))
    assert keeper_of(queue).count == 0
    before, renewals = client.statistics().timers, faults.calls.count(EXTEND.name)
    # One by one, it would be three hundred.
    assert renewals < 30
    await asyncio.sleep(0.3)
    assert client.statistics().timers <= before
    assert faults.calls.count(EXTEND.name) == renewals


async def test_a_lease_that_was_made_short_is_renewed_in_its_block(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._engine.lease_keeper._TIMES", 60)
    message = await leased(client.reliable_queue("jobs", lease=HOUR))
    async with message:
        await message.extend(30)
        # A timer that goes by the usual lease would fire in a minute.
        await until(lambda: lasts_longer(store))
    assert not (await store.look()).leases


async def lasts_longer(store: Store) -> bool:
    (end,) = (await store.look()).leases.values()
    return end > 60_000_000


@pytest.mark.usefixtures("_eager")
async def test_renewals_that_fail_for_a_while_cost_no_lease_even_if_it_has_ended(
    jobs: Jobs, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = keeper_of(jobs)
    extend, errors = keeper._extend, [TimeoutError(), delayq.ServerUnavailable("it is away")]

    async def fail_twice(claims: Any, lease_us: int) -> list[bool]:
        if errors:
            raise errors.pop()
        return await extend(claims, lease_us)

    monkeypatch.setattr(keeper, "_extend", fail_twice)
    async with await leased(jobs):
        await store.let_pass(2 * LEASE)
        # Nobody has taken it meanwhile.
        await until(lambda: lasts_longer(store))
    assert await depths(jobs) == NONE
    assert keeper.lost_count == 0
    for reason in ("it is away", "no reply in time"):
        assert f"cannot renew 1 leases: {reason}" in caplog.text


async def test_a_lease_that_cannot_be_confirmed_is_lost_only_if_it_has_surely_ended(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, ended = await leased(jobs), await leased(jobs)
    clock = message._context.partition.clock
    # They have waited here for most of their leases, one has a minute left, and the server is away.
    message._claim.ends_us -= int((clock.seconds_until(message._claim.ends_us) - 60) * 1_000_000)
    message._claim.fresh_until = ended._claim.fresh_until = 0.0
    ended._claim.ends_us = 1
    away = AsyncMock(side_effect=delayq.ServerUnavailable("it is away"))
    monkeypatch.setattr(message._context.partition.store, "extend", away)
    with pytest.raises(delayq.LeaseLost):
        async with ended:
            raise AssertionError
    async with message:
        # It is renewed in time.
        assert keeper_of(jobs)._due_at < clock.local() + 31


async def test_a_message_is_not_begun_once_its_queue_is_closed(client: Client, jobs: Jobs) -> None:
    message = await leased(jobs)
    await jobs.aclose()
    delayed = client.delayed_queue("orders")
    await delayed.offer(1)
    delivery = await anext(aiter(delayed.deliveries(60)))
    await delayed.aclose()
    for block in (message, delivery):
        with pytest.raises(delayq.Closed, match="redelivered when its lease ends"):
            async with block:
                pass


async def test_a_loop_skips_messages_that_were_lost(
    jobs: Jobs, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler suddenly becomes slow, and other workers get the messages it had claimed ahead."""
    # However long this process pauses, batches grow, and none of their messages go back.
    monkeypatch.setattr("delayq._engine.prefetch.WITHIN", HOUR)
    await jobs.offer_many(offers(100, ids=True))
    seen: list[int] = []
    stolen: list[str] = []
    async for message in jobs:
        async with message:
            seen.append(message.value)
            assert isinstance(message._ahead, Prefetched)
            ahead = [claim for _, claim in message._ahead]
            if len(ahead) >= 5 and not stolen:
                stolen = [claim.id.decode() for claim in ahead[:3]]
                for key in stolen:
                    await raw.hset("delayq:{jobs}:tokens", key, "somebody else's")
                    await raw.zadd("delayq:{jobs}:leased", {key: 9e18})
                for claim in ahead:
                    claim.fresh_until = 0  # as if they had waited for most of their lease
        if len(seen) == 97:
            break
    assert sorted(seen) == [n for n in range(100) if str(n) not in stolen]


# Leases that are lost in spite of renewal


@pytest.mark.parametrize(
    ("reaction", "error"),
    [
        (None, delayq.LeaseLost),
        ("swallow", delayq.LeaseLost),
        ("raise", ZeroDivisionError),
        # An instruction cannot be followed without a lease.
        ("reject", delayq.LeaseLost),
    ],
)
@pytest.mark.usefixtures("_eager")
async def test_a_handler_whose_lease_is_lost_is_cancelled_and_told(
    jobs: Jobs, raw: Any, reaction: str | None, error: type[Exception]
) -> None:
    message = await leased(jobs)
    ended: list[str] = []
    with pytest.raises(error):  # noqa: PT012
        async with message:
            try:
                await steal(raw, message)
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                if reaction == "raise":
                    raise ZeroDivisionError from None
                if reaction == "reject":
                    raise delayq.Reject("bad") from None
                if reaction is None:
                    raise
    assert ended == ["cancelled"]
    await asyncio.sleep(0)  # no trace of the cancellation is left
    demand_no_cancellation()
    assert keeper_of(jobs).lost_count == 1
    assert await jobs.dead.size() == 0


async def test_a_renewal_in_flight_does_not_hide_that_the_next_one_is_urgent(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, urgent = await leased(jobs), await leased(jobs)
    keeper, gate = keeper_of(jobs), asyncio.Event()
    renewed: list[int] = []

    async def extend(claims: Any, _lease_us: int) -> list[bool]:
        renewed.append(len(claims))
        await gate.wait()
        return [True] * len(claims)

    monkeypatch.setattr(keeper, "_extend", extend)
    monkeypatch.setattr("delayq._engine.lease_keeper._SOON", LEASE * 100)
    async with first:
        keeper._arm(0)
        await until(lambda: renewed == [1])
        async with urgent:
            urgent._claim.ends_us = 0
            keeper.hurry(urgent._claim)
            armed = keeper._timeout
            await until(lambda: keeper._timeout is not armed)
            gate.set()
            await until(lambda: renewed == [1, 2])


async def test_a_caller_that_is_cancelled_while_a_lease_is_confirmed_gives_the_message_back(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, asked = await leased(jobs), asyncio.Event()
    message._claim.fresh_until = 0.0

    async def silent(*_: Any) -> Any:
        asked.set()
        await asyncio.sleep(3600)

    async def enter() -> None:
        async with message:
            raise AssertionError

    monkeypatch.setattr(message._context.partition.store, "extend", silent)
    entering = asyncio.create_task(enter())
    await asked.wait()
    await end(entering)
    assert entering.cancelled()
    assert await depths(jobs) == (0, 1, 0, 0)


async def test_a_handler_told_by_extending_is_not_cancelled_as_well(jobs: Jobs, raw: Any) -> None:
    message = await leased(jobs)
    with pytest.raises(delayq.LeaseLost):  # noqa: PT012
        async with message:
            await steal(raw, message)
            await message.extend(HOUR)
    await asyncio.sleep(0)
    demand_no_cancellation()


@pytest.mark.usefixtures("_eager")
async def test_a_handler_also_cancelled_outside_stays_so(jobs: Jobs, raw: Any) -> None:
    message = await leased(jobs)

    async def work() -> None:
        async with message:
            try:
                await steal(raw, message)
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                worker.cancel()
                raise

    worker = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await worker


@pytest.mark.usefixtures("_eager")
async def test_a_task_that_swallowed_a_cancellation_is_told(jobs: Jobs, raw: Any) -> None:
    message = await leased(jobs)

    async def work() -> None:
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        async with message:
            await steal(raw, message)
            await asyncio.sleep(60)

    worker = asyncio.create_task(work())
    with pytest.raises(delayq.LeaseLost):
        await worker


async def test_a_renewal_of_a_message_just_settled_reports_no_loss(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply of settling is still on its way when the lease is due for renewal."""
    settling = jobs._open.partitions[0].acknowledger
    for how in ("ack", "nack", "release", "bury"):
        message = await leased(jobs)

        async def slowly(*args: object, how: str = how, **options: object) -> object:
            outcome = await getattr(ClaimAcknowledger, how)(settling, *args, **options)
            assert await keeper_of(jobs).renew()
            await asyncio.sleep(0)
            return outcome

        monkeypatch.setattr(settling, how, slowly)
        async with message:
            await (message.bury("no good") if how == "bury" else getattr(message, how)())
        assert keeper_of(jobs).lost_count == 0, how
        await jobs.purge()


async def test_a_handler_whose_ack_failed_keeps_its_lease(jobs: Jobs, faults: Faults) -> None:
    async with await leased(jobs) as message:
        with pytest.MonkeyPatch.context() as patience:
            be_impatient(patience, 0.05)
            faults.plan = lambda name, _n: "unsent" if name == ACK.name else None
            with pytest.raises(delayq.ServerUnavailable):
                await message.ack()
            faults.plan = lambda _name, _n: None
        assert keeper_of(jobs).count == 1
    assert keeper_of(jobs).count == 0


async def test_a_handler_is_told_when_its_lease_ends_while_the_server_is_away(
    own_server: PrivateServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with delayq.connect(own_server.url) as client:
        message = await leased(client.reliable_queue("jobs", lease=3))
        # The handler is told without waiting for a call's own deadline, which is a minute.
        with own_server.paused(), pytest.raises(delayq.LeaseLost):
            async with asyncio.timeout(30), message:
                await asyncio.sleep(60)
        assert "cannot renew 1 leases" in caplog.text


# Handlers that end in other ways


async def test_a_deadline_around_the_block_gives_the_message_back(jobs: Jobs, store: Store) -> None:
    message = await leased(jobs)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02), message:
            await asyncio.sleep(60)
    await demand_returned(store)
    with anyio.CancelScope() as scope:
        async with await claim_one(jobs):
            scope.cancel()
            await anyio.sleep(60)
    assert scope.cancelled_caught
    await demand_returned(store)


@pytest.mark.every_server
async def test_a_message_settled_in_its_block_is_left_alone_after(client: Client, raw: Any) -> None:
    ends: dict[str, tuple[tuple[Any, ...], int, int]] = {
        "ack": ((), 0, 0),
        "nack": ((HOUR,), 1, 0),
        "bury": (("no good",), 0, 1),
        "release": ((), 1, 0),
    }
    for how, (arguments, alive, dead) in ends.items():
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with await leased(client.reliable_queue(how)) as message:
                await getattr(message, how)(*arguments)
                raise ZeroDivisionError
        stored = await Store(raw, how).look()
        assert (len(stored.bodies), len(stored.dead), stored.errors) == (alive, dead, {}), how


# Cancelling


@pytest.mark.every_server
async def test_cancelling_what_runs_ends_its_block(jobs: Jobs) -> None:
    message = await leased(jobs, id=" 1 2  3 ")
    began = asyncio.Event()

    async def handle() -> None:
        async with message:
            began.set()
            await asyncio.sleep(60)

    handling = asyncio.create_task(handle())
    await began.wait()
    assert await jobs.cancel(message.id, running=True)
    with pytest.raises(delayq.MessageCancelled):
        await handling
    for settle in (message.ack, message.nack, message.release):
        with pytest.raises(delayq.MessageCancelled):
            await settle()
    assert await depths(jobs) == NONE


async def test_a_message_that_is_cancelled_while_its_lease_is_confirmed_is_not_handled(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = await leased(jobs, id="a")
    # As if it had waited here for most of its lease.
    message._claim.fresh_until = 0
    keeper = message._context.keeper
    freshen = keeper.freshen

    async def freshen_slowly(claims: Any) -> Any:
        lost = await freshen(claims)
        assert await jobs.cancel("a", running=True)
        await until(lambda: bool(jobs._open.notifications.cancelled))
        return lost

    monkeypatch.setattr(keeper, "freshen", freshen_slowly)
    with pytest.raises(delayq.MessageCancelled):
        async with message:
            raise AssertionError("it was handed out")
    assert not keeper.count


@pytest.mark.every_server
async def test_a_message_that_was_claimed_ahead_and_cancelled_is_not_handed_out(jobs: Jobs) -> None:
    await jobs.offer_many(offers(50, ids=True))
    seen: list[int] = []
    async for message in jobs:
        async with message:
            seen.append(message.value)
        if len(seen) == 1:
            ids = [str(n) for n in range(50) if n not in seen]
            assert await jobs.cancel_many(ids[:48], running=True) == [True] * 48
            # The announcements have been read once this client has heard of a later message.
            await jobs.offer(50, id="last", delay=0.05)
        if len(seen) == 3:
            break
    assert seen == [0, 49, 50]
