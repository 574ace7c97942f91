"""Recurring messages: one occurrence per name waits, whatever happens."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock
from zoneinfo import ZoneInfo

import pytest

import delayq
from delayq._reliable.scripts import OCCUR, SCHEDULE
from delayq._reliable.store import ReliableStore
from delayq._reliable.timing import cron_moments
from delayq.testing import Clock, advance
from tests.support.reliable import Jobs, claim_one, depths, listed, values
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

needs_cron = pytest.mark.skipif(find_spec("cronsim") is None, reason="cronsim is not installed")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
SCHEDULES = "delayq:{jobs}:schedules"


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs")


async def waiting(jobs: Jobs) -> list[Any]:
    """Return the values of waiting messages."""
    return await listed(jobs, "ready", "delayed")


async def schedule(jobs: Jobs, value: Any = "tick", **settings: Any) -> datetime:
    """Schedule ``tick``, every minute by default."""
    return await jobs.schedule("tick", **{"every": 60, **settings}, value=value)


async def take(jobs: Jobs, after: float = 0) -> delayq.Message[Any]:
    """Claim the only message that is due after some seconds."""
    if after:
        await advance(jobs, after)
    return await claim_one(jobs, 10)


async def first_tick(jobs: Jobs, **settings: Any) -> delayq.Message[Any]:
    """Schedule ``tick``, and claim its first occurrence."""
    await schedule(jobs, **settings)
    return await take(jobs, 60)


def facts(record: bytes) -> Any:
    return json.loads(record.partition(b"\n")[0])


# Definitions


@pytest.mark.every_server
async def test_occurrences_come_each_period_without_drift(client: Client, jobs: Jobs) -> None:
    before = await client.server_time()
    first = await jobs.schedule("tick", every=60, value="tick", max_attempts=2, timeout=5, ttl=74)
    assert timedelta(seconds=60) <= first - before < timedelta(seconds=90)
    assert await jobs.claim() == []
    moved = first
    for turn in range(1, 6):
        # Each occurrence is claimed late.
        await advance(jobs, 75)
        message = await take(jobs)
        assert (message.value, message.max_attempts, message.timeout) == ("tick", 2, 5.0)
        await message.ack()
        (known,) = await jobs.schedules()
        assert known.next_at is not None
        assert known.last_at == message.due_at
        moved = known.next_at + turn * timedelta(seconds=75)
    # 5 times 75 s make 6 periods and 15 s.
    assert moved - first == timedelta(seconds=6 * 60)


@pytest.mark.every_server
async def test_repeating_a_definition_changes_nothing(client: Client, jobs: Jobs, raw: Any) -> None:
    more: dict[str, Any] = {"value": {"a": 1}, "headers": {"h": "x"}, "priority": 2, "ttl": 30}
    more |= {"max_attempts": 2, "timeout": 5}
    due = await schedule(jobs, **more)
    stored = facts(await raw.hget(SCHEDULES, "tick"))
    body = await raw.hgetall("delayq:{jobs}:bodies")
    await asyncio.sleep(0.01)
    again = client.reliable_queue("jobs")
    assert await schedule(again, every=timedelta(minutes=1), **more) == due
    assert facts(await raw.hget(SCHEDULES, "tick")) == stored
    assert await raw.hgetall("delayq:{jobs}:bodies") == body
    (message,) = await jobs.list("delayed")
    assert (message.value, message.headers) == ({"a": 1}, {"h": "x"})
    assert (message.priority, message.due_at) == (2, due)
    assert message.id == f"tick@{due.timestamp() * 1_000_000:.0f}"


@pytest.mark.every_server
async def test_another_value_replaces_the_waiting_one_at_its_time(jobs: Jobs) -> None:
    due = await schedule(jobs, "old")
    await advance(jobs, 20)
    assert await schedule(jobs, "new", priority=3) == due - timedelta(seconds=20)
    assert await waiting(jobs) == ["new"]
    message = await take(jobs, 41)
    assert (message.value, message.priority) == ("new", 3)
    assert await waiting(jobs) == ["new"]
    # Nor does one that is at work hold the next definition up.
    await schedule(jobs, "newest", every=30)
    await message.ack()
    assert await waiting(jobs) == ["newest"]


async def test_another_value_replaces_one_that_has_been_due_for_a_while(jobs: Jobs) -> None:
    due = await schedule(jobs, "old")
    await advance(jobs, 70)
    await schedule(jobs, "new")
    message = await take(jobs)
    assert message.value == "new"
    assert message.due_at is not None
    assert abs(message.due_at - (due - timedelta(seconds=70))) < timedelta(seconds=1)
    # The due time is that of the body, by which a message that is given back waits again.
    await message.release()
    again = await take(jobs)
    assert (again.value, again.due_at) == ("new", message.due_at)


@pytest.mark.every_server
async def test_the_highest_version_wins_in_any_order(jobs: Jobs) -> None:
    await schedule(jobs, "v1", version=1)
    due = await schedule(jobs, "v2", every=50, version=2)
    for _ in range(3):
        assert await schedule(jobs, "v1", version=1) == due
        assert await schedule(jobs, "none") == due
    assert await waiting(jobs) == ["v2"]
    # Handling a message does not bring back an old definition either.
    await (await take(jobs, 51)).ack()
    assert await waiting(jobs) == ["v2"]
    assert [known.version for known in await jobs.schedules()] == [2]
    await schedule(jobs, "v2 again", every=50, version=2)
    assert await waiting(jobs) == ["v2 again"]


async def test_a_schedule_that_cannot_work_is_refused_before_anything_is_written(
    jobs: Jobs, raw: Any
) -> None:
    fields = {"cron": "* * * * *", "version": -1, "priority": 10, "ttl": 0, "value": object()}
    wrongs: list[dict[str, Any]] = [
        {},
        {"every": 0},
        *({"every": 1, name: value} for name, value in fields.items()),
        {"cron": "* * * * *", "timezone": "Europe/Atlantis"},
        *([{"cron": "nonsense"}, {"cron": "0 0 30 2 *"}] if find_spec("cronsim") else []),
    ]
    for wrong in wrongs:
        arguments: dict[str, Any] = {"value": 1, **wrong}
        with pytest.raises((delayq.BadInput, delayq.EncodeError)):
            await jobs.schedule("tick", **arguments)
    for name in ("", "x" * 500, 5, "\udc00"):
        with pytest.raises(delayq.BadInput):
            await jobs.schedule(name, every=1, value=1)  # type: ignore[arg-type]
        with pytest.raises(delayq.BadInput):
            await jobs.unschedule(name)  # type: ignore[arg-type]
    assert await raw.keys() == []
    assert await jobs.schedules() == []


async def test_names_may_be_anything_and_do_not_mix(jobs: Jobs) -> None:
    names = ["a", "a@1780000000000000", "@", "ü\n☃", "a@", "x" * 495]
    for name in names:
        await jobs.schedule(name, every=60, value=name)
    # A plain message may have such an id.
    await jobs.offer("plain", id="me@1780000000000000")
    for due in ([*names, "plain"], names):
        await advance(jobs, 61)
        messages = await jobs.claim(20)
        assert sorted(message.value for message in messages) == sorted(due)
        for message in messages:
            await message.ack()
    assert sorted(known.name for known in await jobs.schedules()) == sorted(names)


# Many clients


async def test_many_clients_handle_each_occurrence_once(server: PrivateServer) -> None:
    handled: list[str] = []

    async def work(queue: Jobs) -> None:
        async for message in queue:
            async with message:
                handled.append(message.id)
                await asyncio.sleep(0)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(delayq.connect(server.url)) for _ in range(8)]
        queues = [client.reliable_queue("jobs") for client in clients]
        workers = [asyncio.create_task(work(queue)) for queue in queues]
        await asyncio.gather(*(schedule(queue, 1) for queue in queues for _ in range(5)))
        assert len(await waiting(queues[0])) == 1
        for count in range(1, 20):
            await advance(queues[0], 60)
            await until(lambda count=count: len(handled) >= count)  # type: ignore[misc]
            await until(lambda: depths(queues[0]), equals=(1, 0, 0, 0))
            await schedule(queues[count % 8], 1)
    await asyncio.gather(*workers)
    assert len(handled) == len(set(handled)) == 19


# The life of an occurrence


@pytest.mark.every_server
async def test_missed_occurrences_run_once_and_then_on_schedule(jobs: Jobs) -> None:
    due = await schedule(jobs)
    late = await take(jobs, 10 * 60 + 30)
    assert late.due_at == due - timedelta(seconds=630)
    await late.ack()
    assert await jobs.claim() == []
    (after,) = await jobs.list("delayed")
    assert after.due_at - late.due_at == timedelta(seconds=600)


@pytest.mark.every_server
@pytest.mark.parametrize(
    ("end", "arguments"), [("ack", ()), ("nack", (5,)), ("bury", ("no good",)), ("release", ())]
)
async def test_one_occurrence_of_a_schedule_waits_however_the_last_one_ended(
    jobs: Jobs, end: str, arguments: Any
) -> None:
    message = await first_tick(jobs)
    await getattr(message, end)(*arguments)
    following = [one for one in await jobs.list("delayed") if one.id != message.id]
    assert len(following) == 1
    if end == "bury":
        assert await jobs.dead.redrive() == 1
    if end != "ack":
        again = await take(jobs, 6)
        assert again.id == message.id
        await again.ack()
    await (await take(jobs, 60)).ack()
    assert len(await waiting(jobs)) == 1


@pytest.mark.every_server
async def test_an_occurrence_is_skipped_while_the_last_one_lives(jobs: Jobs, raw: Any) -> None:
    slow = await first_tick(jobs)
    for _ in range(3):
        await advance(jobs, 20)
        await slow.extend(1000)
    assert await jobs.claim(5) == []
    assert await jobs.claim(5, wait=0.05) == []
    assert await depths(jobs) == (1, 0, 1, 0)
    # A message that waits for another attempt is still alive.
    await slow.nack(delay=500)
    await advance(jobs, 60)
    assert await jobs.claim(5) == []
    assert len(await jobs.list("delayed")) == 2
    assert (await take(jobs, 450)).id == slow.id
    (again,) = await jobs.list("leased")
    assert again.attempt == 2
    assert await raw.hlen("delayq:{jobs}:bodies") == 2


async def test_a_claim_that_gets_only_skipped_occurrences_goes_on_and_waits(jobs: Jobs) -> None:
    await (await first_tick(jobs)).extend(1000)
    await advance(jobs, 60)
    await jobs.offer("other")
    assert await values(jobs, 1) == ["other"]
    await advance(jobs, 60)
    claim = asyncio.create_task(values(jobs, 1, wait=60))
    await asyncio.sleep(0.05)
    assert not claim.done()
    await jobs.offer("last")
    assert await claim == ["last"]


@pytest.mark.parametrize("how", ["cancel", "purge", "expire", "reschedule"])
async def test_a_lost_occurrence_is_followed_by_the_next(server: PrivateServer, how: str) -> None:
    async with delayq.connect(server.url, resync_interval=0.05) as client:
        jobs = client.reliable_queue("jobs")
        due = await schedule(jobs, ttl=5)
        (message,) = await jobs.list("delayed")
        if how == "cancel":
            assert await jobs.cancel(message.id)
            # Nor does the next definition bring it back.
            assert await schedule(jobs, ttl=5) == due + timedelta(seconds=60)
        elif how == "purge":
            assert await jobs.purge() == 1
        elif how == "reschedule":
            assert await jobs.reschedule(message.id, 0)
            await (await take(jobs)).ack()
        else:
            await advance(jobs, 66)
            due -= timedelta(seconds=66)
            assert await jobs.claim() == []
        await until(lambda: waiting(jobs), equals=["tick"])
        (after,) = await jobs.list("delayed")
        assert after.due_at == due + timedelta(seconds=60)
        assert (await jobs.stats()).dead == 0


# Unscheduling


async def test_the_end_or_a_pause_of_a_schedule_leaves_the_occurrence_at_work(jobs: Jobs) -> None:
    message = await first_tick(jobs)
    await jobs.pause_schedule("tick")
    assert await waiting(jobs) == []
    await message.nack(delay=0)
    message = await take(jobs)
    await jobs.resume_schedule("tick")
    assert await waiting(jobs) == ["tick"]
    assert await jobs.unschedule("tick")
    assert await waiting(jobs) == []
    await message.nack(delay=0)
    message = await take(jobs)
    assert message.attempt == 3
    # A schedule that begins again waits for the occurrence at work.
    await schedule(jobs, 2, every=20)
    await advance(jobs, 20)
    assert await jobs.claim() == []
    await message.ack()
    assert (await take(jobs, 20)).value == 2


async def test_nothing_is_left_of_a_schedule_after_its_last_occurrence(
    jobs: Jobs, raw: Any
) -> None:
    message = await first_tick(jobs)
    for expected in (True, False, False):
        assert await jobs.unschedule("tick") is expected
    recurrence = jobs._open.partitions[0].recurrence
    await recurrence.check()
    assert await raw.hexists(SCHEDULES, "tick")
    await message.ack()
    await recurrence.check()
    assert not await raw.hexists(SCHEDULES, "tick")


@pytest.mark.every_server
@pytest.mark.parametrize("is_retried", [False, True])
async def test_unscheduling_drops_what_waits(jobs: Jobs, raw: Any, is_retried: bool) -> None:
    await schedule(jobs, priority=4)
    if is_retried:
        await (await take(jobs, 60)).nack(delay=3600)
    assert len(await waiting(jobs)) == 1 + is_retried
    assert await jobs.unschedule("tick") is True
    assert await jobs.unschedule("tick") is False
    assert await waiting(jobs) == []
    assert await jobs.schedules() == []
    assert not await raw.hexists(SCHEDULES, "tick")
    if not is_retried:
        left = {key for key in await raw.keys() if b":call:" not in key}
        assert left == {b"delayq:{jobs}:settings"}


# Pauses


@pytest.mark.every_server
async def test_a_paused_schedule_adds_nothing_until_it_is_resumed(
    client: Client, jobs: Jobs
) -> None:
    next_at = await schedule(jobs, priority=4)
    assert await jobs.pause_schedule("tick") is True
    assert await jobs.pause_schedule("tick") is True
    # Every process that starts defines it again.
    await schedule(jobs, "new")
    assert await waiting(jobs) == []
    (paused,) = await jobs.schedules()
    assert (paused.paused, paused.next_at) == (True, None)
    # A short pause leaves the next occurrence where it was.
    for _ in range(2):
        assert await jobs.resume_schedule("tick") is True
        (resumed,) = await jobs.schedules()
        assert (resumed.paused, resumed.next_at) == (False, next_at)
        assert await waiting(jobs) == ["new"]
    await jobs.pause_schedule("tick")
    await jobs._open.partitions[0].recurrence.check()
    await advance(jobs, 3600)
    assert await jobs.claim() == []
    now = await client.server_time()
    await jobs.resume_schedule("tick")
    # The occurrences that it missed are skipped, and the period goes on as before.
    (resumed,) = await jobs.schedules()
    assert resumed.next_at is not None
    assert timedelta(0) < resumed.next_at - now <= timedelta(seconds=61)
    # Another timing starts anew, and the end of a schedule is that of its pause.
    await jobs.pause_schedule("tick")
    await schedule(jobs, every=3600)
    await jobs.resume_schedule("tick")
    (resumed,) = await jobs.schedules()
    assert resumed.next_at is not None
    assert resumed.next_at - await client.server_time() > timedelta(minutes=59)
    await jobs.pause_schedule("tick")
    assert await jobs.unschedule("tick")
    assert await jobs.pause_schedule("tick") is False
    assert await jobs.resume_schedule("tick") is False
    await schedule(jobs)
    assert await waiting(jobs) == ["tick"]


async def test_a_schedule_paused_between_a_claim_and_its_follow_up_adds_nothing(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await schedule(jobs)
    store = jobs._open.partitions[0].store
    occur = store.occur

    async def pause_first(claims: Any) -> Any:
        await jobs.pause_schedule("tick")
        return await occur(claims)

    monkeypatch.setattr(store, "occur", pause_first)
    message = await take(jobs, 60)
    assert await waiting(jobs) == []
    await message.ack()
    await jobs._open.partitions[0].recurrence.check()
    assert await waiting(jobs) == []
    await jobs.resume_schedule("tick")
    assert await waiting(jobs) == ["tick"]


@pytest.mark.every_server
@needs_cron
async def test_a_pause_may_outlast_the_moments_that_are_known(jobs: Jobs) -> None:
    await schedule(jobs, every=None, cron="* * * * *")
    await jobs.pause_schedule("tick")
    await advance(jobs, timedelta(hours=2))
    await jobs.resume_schedule("tick")
    # A process that can compute the next ones does.
    await jobs._open.partitions[0].recurrence.check()
    await until(lambda: not jobs._open.partitions[0].recurrence._refilling)
    assert await waiting(jobs) == ["tick"]
    # So does the next definition, while it is paused.
    await jobs.pause_schedule("tick")
    await advance(jobs, timedelta(hours=2))
    await jobs.resume_schedule("tick")
    await jobs.pause_schedule("tick")
    await schedule(jobs, every=None, cron="* * * * *")
    await jobs.resume_schedule("tick")
    assert await waiting(jobs) == ["tick"]


# Faults


RECORD: dict[str, Any] = {
    **dict.fromkeys(("next", "last"), ""),
    **dict.fromkeys(("every", "first", "ttl", "version"), "0"),
    "timing": "{}",
    "priority": 0,
    "upcoming": [],
}
WRONG: list[dict[str, Any]] = [{"next": "x", "every": "5"}, {"every": "x"}]
WRONG += [{"priority": 99}, {"upcoming": [{}]}]
DAMAGED = [
    b"",
    *(b"%s\ncontent" % content for content in (b"no JSON", b"[]", b"{}")),
    *(json.dumps(RECORD | wrong).encode() + b"\ncontent" for wrong in WRONG),
]


@pytest.mark.every_server
async def test_a_damaged_record_disturbs_no_other_until_it_is_redefined(
    client: Client, jobs: Jobs, raw: Any
) -> None:
    await jobs.schedule("good", every=HOUR, value=1)
    for record in DAMAGED:
        await jobs.schedule("bad", every=HOUR, value=2)
        await raw.hset(SCHEDULES, "bad", record)
        assert [each.name for each in await jobs.schedules()] == ["good"], record
        await jobs._open.partitions[0].recurrence.check()
        await advance(client, HOUR)
        await values(jobs, 10)
        assert 1 in await waiting(jobs), record
        await jobs.schedule("bad", every=HOUR, value=3)
        assert [each.name for each in await jobs.schedules()] == ["bad", "good"]
        await raw.hset(SCHEDULES, "bad", record)
        assert await jobs.unschedule("bad"), record
        assert not await jobs.unschedule("bad")


async def test_checks_go_on_whatever_fails(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = AsyncMock(side_effect=[OSError("planned"), *[(b"0", {b"tick"})] * 1000])
    monkeypatch.setattr(ReliableStore, "schedule_names", look)
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        await schedule(client.reliable_queue("jobs"))
        await until(lambda: look.await_count > 1)


@pytest.mark.parametrize("fault", ["unsent", "lost"])
async def test_calls_that_fail_are_made_again(jobs: Jobs, faults: Faults, fault: str) -> None:
    faults.plan = lambda name, n: fault if name in (SCHEDULE.name, OCCUR.name) and n <= 2 else None
    await schedule(jobs)
    assert await waiting(jobs) == ["tick"]
    message = await take(jobs, 60)
    assert await waiting(jobs) == ["tick"]
    await message.ack()
    assert (await jobs.stats()).ready == 0


async def test_without_a_reply_the_message_is_handled_and_the_next_one_follows_later(
    jobs: Jobs, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    await schedule(jobs)
    faults.plan = lambda name, n: "unsent" if name == OCCUR.name else None
    with monkeypatch.context() as patch:
        patch.setattr("delayq._redis.client.RETRY_FOR", 0.0)
        await (await take(jobs, 60)).ack()
    assert await waiting(jobs) == []
    await advance(jobs, 0)
    assert await waiting(jobs) == ["tick"]


async def test_an_occurrence_of_unknown_outcome_waits(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = await first_tick(jobs)
    await message.extend(1000)
    client = jobs._open.partitions[0].store.client
    run = client.run

    async def lose_reply(script: Any, *args: Any) -> Any:
        reply = await run(script, *args)
        if script is OCCUR:
            raise delayq.OutcomeUnknown("planned")
        return reply

    monkeypatch.setattr(client, "run", lose_reply)
    await advance(jobs, 60)
    assert await jobs.claim() == []
    monkeypatch.undo()
    await message.ack()
    await take(jobs, 60)


async def test_a_cancelled_claim_is_returned(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    await schedule(jobs)
    await advance(jobs, 60)
    client = jobs._open.partitions[0].store.client
    run, asked = client.run, asyncio.Event()

    async def stalled(script: Any, *args: Any) -> Any:
        if script is OCCUR and not asked.is_set():
            asked.set()
            await asyncio.sleep(3600)
        return await run(script, *args)

    monkeypatch.setattr(client, "run", stalled)
    claim = asyncio.create_task(jobs.claim())
    await asked.wait()
    await end(claim)
    await until(lambda: depths(jobs), equals=(0, 1, 0, 0))
    assert (await take(jobs)).attempt == 1
    assert len(await jobs.list("delayed")) == 1


# Cron


@needs_cron
async def test_cron_over_two_years_of_daylight_saving_time(client: Client, jobs: Jobs) -> None:
    zone, cron = ZoneInfo("Europe/Berlin"), "30 2 * * 0"  # the nights in which it changes
    clock = Clock(jobs)
    start = await clock.now()
    await jobs.schedule("night", cron=cron, timezone=zone, value="night")
    seen: list[datetime] = []
    while len(seen) < 110:
        # Advance by irregular steps, so that nothing depends on whole days.
        (known,) = await jobs.schedules()
        assert known.next_at is not None
        await clock.advance(
            known.next_at - await client.server_time() + timedelta(milliseconds=500)
        )
        message = await take(jobs)
        seen.append(datetime.fromtimestamp(int(message.id[-16:]) / 1_000_000, UTC))
        await message.ack()
        assert len(await waiting(jobs)) == 1
    moments = cron_moments(cron, zone, start)
    assert seen == [next(moments) for _ in seen]
    (known,) = await jobs.schedules()
    assert (known.cron, known.timezone, known.every) == (cron, "Europe/Berlin", None)


@needs_cron
async def test_a_process_without_cronsim_uses_the_moments_that_are_stored(
    server: PrivateServer,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await jobs.schedule("tick", cron="0 * * * *", value="tick")
    await jobs.aclose()
    async with delayq.connect(server.url, resync_interval=3600) as worker:
        queue = worker.reliable_queue("jobs")
        monkeypatch.setitem(sys.modules, "cronsim", None)
        began, taken = await worker.server_time(), 0
        while taken < 40 and await waiting(queue):
            await (await take(queue, 3600)).ack()
            taken += 1
        # One is skipped if an hour begins meanwhile.
        skipped = (await worker.server_time()).hour != began.hour
        assert taken == 32 or (taken == 31 and skipped)
        assert [known.next_at for known in await queue.schedules()] == [None]
        assert "cannot compute the occurrences" in caplog.text
        monkeypatch.delitem(sys.modules, "cronsim")
        await advance(queue, HOUR)
        await until(lambda: waiting(queue), equals=["tick"])
        (message,) = await queue.list("delayed")
        assert timedelta(0) < message.due_at - await worker.server_time() <= HOUR


async def test_a_client_that_only_consumes_keeps_a_recurrence_going(
    server: PrivateServer, jobs: Jobs
) -> None:
    await schedule(jobs, ttl=10)
    await jobs.aclose()
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        queue = client.reliable_queue("jobs")
        # The occurrence has expired; the claim that drops it schedules the next one.
        await advance(queue, 100)
        assert await queue.claim() == []
        await until(lambda: waiting(queue), equals=["tick"])
    async with delayq.connect(server.url) as cleaning:
        await cleaning.reliable_queue("jobs").purge()
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        queue = client.reliable_queue("jobs")
        claiming = asyncio.create_task(queue.claim(wait=3600))
        await until(lambda: waiting(queue), equals=["tick"])
        claiming.cancel()
