"""Recurring messages: one occurrence per name waits, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

import delayq
from delayq._reliable.store import OCCUR, RECUR, SCHEDULE
from delayq._reliable.timing import cron_moments
from delayq.testing import Clock, advance
from tests.integration.test_faults import Faults
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client, ReliableQueue
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

needs_cron = pytest.mark.skipif(find_spec("cronsim") is None, reason="cronsim is not installed")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
SCHEDULES = "delayq:{jobs}:schedules"


@pytest.fixture
async def jobs(client: Client) -> delayq.ReliableQueue[Any]:
    return client.reliable_queue("jobs")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


async def waiting(jobs: ReliableQueue[Any]) -> list[Any]:
    """Return the values of waiting messages."""
    return [message.value for message in [*await jobs.list("ready"), *await jobs.list("delayed")]]


async def take(jobs: ReliableQueue[Any]) -> delayq.Message[Any]:
    """Claim the only message that is due."""
    (message,) = await jobs.claim(10)
    return message


def facts(record: bytes) -> Any:
    return json.loads(record.partition(b"\n")[0])


# Definitions


async def test_the_first_is_due_after_one_period_and_they_do_not_drift(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    before = await client.server_time()
    first = await jobs.schedule("tick", every=60, value="tick")
    assert timedelta(seconds=60) <= first - before < timedelta(seconds=65)
    assert await jobs.claim() == []
    started = datetime.now(UTC)
    moved = first
    for turn in range(1, 6):
        # Each occurrence is claimed late.
        await advance(jobs, 75)
        message = await take(jobs)
        assert message.value == "tick"
        await message.ack()
        (known,) = await jobs.schedules()
        assert known.next_at is not None
        assert known.last_at == message.due_at
        moved = known.next_at + turn * timedelta(seconds=75)
    # 5 times 75 s make 6 periods and 15 s.
    assert moved - first == timedelta(seconds=6 * 60)
    assert datetime.now(UTC) - started < timedelta(seconds=40)


async def test_saying_the_same_again_changes_nothing(
    client: Client, jobs: ReliableQueue[Any], raw: Any
) -> None:
    due = await jobs.schedule(
        "tick", every=60, value={"a": 1}, headers={"h": "x"}, priority=2, ttl=30
    )
    stored = facts(await raw.hget(SCHEDULES, "tick"))
    body = await raw.hgetall("delayq:{jobs}:bodies")
    await asyncio.sleep(0.01)
    again = client.reliable_queue("jobs")
    assert (
        await again.schedule(
            "tick",
            every=timedelta(minutes=1),
            value={"a": 1},
            headers={"h": "x"},
            priority=2,
            ttl=30,
        )
        == due
    )
    assert facts(await raw.hget(SCHEDULES, "tick")) == stored
    assert await raw.hgetall("delayq:{jobs}:bodies") == body
    (message,) = await jobs.list("delayed")
    assert (message.value, message.headers, message.priority, message.due_at) == (
        {"a": 1},
        {"h": "x"},
        2,
        due,
    )
    assert message.id == f"tick@{due.timestamp() * 1_000_000:.0f}"


async def test_another_value_takes_the_place_of_the_one_that_waits_and_is_due_when_that_was(
    jobs: ReliableQueue[Any],
) -> None:
    due = await jobs.schedule("tick", every=60, value="old")
    await advance(jobs, 20)
    assert await jobs.schedule("tick", every=60, value="new", priority=3) == due - timedelta(
        seconds=20
    )
    assert await waiting(jobs) == ["new"]
    await advance(jobs, 41)
    message = await take(jobs)
    assert (message.value, message.priority) == ("new", 3)
    assert await waiting(jobs) == ["new"]


async def test_another_timing_starts_anew(jobs: ReliableQueue[Any], client: Client) -> None:
    await jobs.schedule("tick", every=60, value="old")
    due = await jobs.schedule("tick", every=3600, value="new")
    assert due - await client.server_time() > timedelta(minutes=59)
    assert await waiting(jobs) == ["new"]
    (known,) = await jobs.schedules()
    assert (known.every, known.cron, known.timezone, known.next_at) == (HOUR, None, None, due)
    assert await jobs.schedule("tick", every=60, value="old") < due
    assert await waiting(jobs) == ["old"]


async def test_the_higher_version_wins_whoever_comes_last(jobs: ReliableQueue[Any]) -> None:
    await jobs.schedule("tick", every=60, value="v1", version=1)
    due = await jobs.schedule("tick", every=50, value="v2", version=2)
    for _ in range(3):
        assert await jobs.schedule("tick", every=60, value="v1", version=1) == due
        assert await jobs.schedule("tick", every=60, value="none") == due
    assert await waiting(jobs) == ["v2"]
    # Handling a message does not bring back an old definition either.
    await advance(jobs, 51)
    await (await take(jobs)).ack()
    assert await waiting(jobs) == ["v2"]
    assert [known.version for known in await jobs.schedules()] == [2]
    await jobs.schedule("tick", every=50, value="v2 again", version=2)
    assert await waiting(jobs) == ["v2 again"]


async def test_what_cannot_work_is_refused_before_anything_is_written(
    jobs: ReliableQueue[Any], raw: Any
) -> None:
    wrongs: list[dict[str, Any]] = [
        {"every": 0},
        {},
        {"every": 1, "cron": "* * * * *"},
        {"every": 1, "version": -1},
        {"every": 1, "version": True},
        {"every": 1, "priority": 10},
        {"every": 1, "ttl": 0},
        {"every": 1, "headers": {"a": 1}},
        {"every": 1, "value": object()},
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


async def test_names_may_be_anything_and_do_not_mix(jobs: ReliableQueue[Any]) -> None:
    names = ["a", "a@1780000000000000", "@", "ü\n☃", "a@", "x" * 495]
    for name in names:
        await jobs.schedule(name, every=60, value=name)
    for _ in range(2):
        await advance(jobs, 61)
        messages = await jobs.claim(20)
        assert sorted(message.value for message in messages) == sorted(names)
        for message in messages:
            await message.ack()
    assert sorted(await waiting(jobs)) == sorted(names)
    assert sorted(known.name for known in await jobs.schedules()) == sorted(names)


async def test_a_message_of_another_making_with_such_an_id_is_a_plain_message(
    jobs: ReliableQueue[Any], raw: Any
) -> None:
    await jobs.offer("plain", id="me@1780000000000000")
    async for message in jobs:
        assert message.value == "plain"
        await message.ack()
        break
    assert await raw.exists(SCHEDULES) == 0


# Many processes

_PROCESS = """
import asyncio, sys, delayq
async def main():
    async with delayq.connect(sys.argv[1]) as client:
        jobs = client.reliable_queue("jobs")
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range(20):
            await jobs.schedule("tick", every=3600, value="tick")
asyncio.run(main())
"""


async def test_eight_processes_that_schedule_at_once_leave_one_message(
    server: PrivateServer, jobs: ReliableQueue[Any]
) -> None:
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROCESS, server.url, stdin=pipe, stdout=pipe
        )
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdout
        assert await process.stdout.readline() == b"ready\n"
    await asyncio.gather(*(process.communicate(b"\n") for process in processes))
    assert [process.returncode for process in processes] == [0] * 8
    assert await waiting(jobs) == ["tick"]


async def test_each_occurrence_is_handled_once_however_many_schedule_and_work(
    server: PrivateServer, jobs: ReliableQueue[Any]
) -> None:
    handled: list[str] = []

    async def work(queue: ReliableQueue[Any]) -> None:
        async for message in queue:
            async with message:
                handled.append(message.id)
                await asyncio.sleep(0)

    clients = [delayq.connect(server.url) for _ in range(8)]
    for client in clients:
        await client.__aenter__()
    queues: list[ReliableQueue[Any]] = [client.reliable_queue("jobs") for client in clients]
    workers = [asyncio.create_task(work(queue)) for queue in queues]
    await asyncio.gather(
        *(queue.schedule("tick", every=60, value=1) for queue in queues for _ in range(5))
    )
    for count in range(1, 20):
        await advance(jobs, 60)

        async def done(count: int = count) -> bool:
            return (
                len(handled) >= count
                and len(await waiting(jobs)) == 1
                and (await jobs.stats()).leased == 0
            )

        await until(done)
        await queues[count % 8].schedule("tick", every=60, value=1)
    for client in clients:
        await client.aclose()
    await asyncio.gather(*workers)
    assert len(handled) == len(set(handled)) == 19


_DYING = """
import asyncio, sys, delayq
async def main():
    async with delayq.connect(sys.argv[1]) as client:
        jobs = client.reliable_queue("jobs")
        if sys.argv[2] == "before":
            # Dies between the claim and what follows it.
            async def never(self, taken):
                print("claimed", flush=True)
                await asyncio.sleep(3600)
            delayq._reliable.recurrence.Recurrence.begin = never
        async for message in jobs:
            print("claimed", flush=True)
            await asyncio.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_worker_that_is_killed_does_not_end_the_recurrence(
    server: PrivateServer, jobs: ReliableQueue[Any], when: str
) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _DYING, server.url, when, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    assert await asyncio.wait_for(process.stdout.readline(), 20) == b"claimed\n"
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert (await jobs.stats()).leased == 1
    assert (await jobs.stats()).delayed == (1 if when == "after" else 0)
    await advance(jobs, 31)
    again = await take(jobs)
    assert again.attempt == 2
    assert len(await jobs.list("delayed")) == 1
    await again.ack()
    await advance(jobs, 60)
    assert (await take(jobs)).attempt == 1
    assert await waiting(jobs) == ["tick"]


async def test_after_a_restart_of_the_server_it_goes_on(own_server: PrivateServer) -> None:
    async with delayq.connect(own_server.url) as client:
        jobs = client.reliable_queue("jobs")
        due = await jobs.schedule("tick", every=60, value="tick")
        await asyncio.sleep(1.2)  # until it has been written to disk
        own_server.restart()
        await until(lambda: _answers(client))
        assert [known.next_at for known in await jobs.schedules()] == [due]
        await advance(jobs, 61)
        await (await take(jobs)).ack()
        assert await waiting(jobs) == ["tick"]


async def _answers(client: Client) -> bool:
    try:
        await client.server_time()
    except delayq.ServerError:
        return False
    return True


# The life of an occurrence


async def test_the_next_one_waits_before_the_handler_has_the_one_before(
    jobs: ReliableQueue[Any],
) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    async for message in jobs:
        assert await waiting(jobs) == ["tick"]
        (after,) = await jobs.list("delayed")
        assert after.due_at == message.due_at + timedelta(seconds=60)
        await message.ack()
        break
    assert await waiting(jobs) == ["tick"]


async def test_what_was_missed_runs_once_and_then_on_schedule(jobs: ReliableQueue[Any]) -> None:
    due = await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 10 * 60 + 30)
    late = await take(jobs)
    assert late.due_at == due - timedelta(seconds=630)
    await late.ack()
    assert await jobs.claim() == []
    (after,) = await jobs.list("delayed")
    assert after.due_at - late.due_at == timedelta(seconds=600)


@pytest.mark.parametrize("end", ["ack", "nack", "bury", "release"])
async def test_however_it_ends_one_waits(jobs: ReliableQueue[Any], end: str) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    message = await take(jobs)
    if end == "nack":
        await message.nack(delay=5)
    else:
        await (message.bury("no good") if end == "bury" else getattr(message, end)())
    following = [one for one in await jobs.list("delayed") if one.id != message.id]
    assert len(following) == 1
    if end in ("nack", "release"):
        await advance(jobs, 6)
        again = await take(jobs)
        assert again.id == message.id
        await again.ack()
    await advance(jobs, 60)
    await (await take(jobs)).ack()
    assert len(await waiting(jobs)) == 1


async def test_one_that_comes_due_while_the_one_before_is_alive_is_passed_over(
    jobs: ReliableQueue[Any], raw: Any
) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    slow = await take(jobs)
    for _ in range(3):
        await advance(jobs, 20)
        await slow.extend(1000)
    assert await jobs.claim(5) == []
    assert await jobs.claim(5, wait=0.05) == []
    assert (await jobs.stats()).leased == 1
    assert len(await jobs.list("delayed")) == 1
    # A message that waits for another attempt is still alive.
    await slow.nack(delay=500)
    await advance(jobs, 60)
    assert await jobs.claim(5) == []
    assert len(await jobs.list("delayed")) == 2
    await advance(jobs, 450)
    assert [message.id for message in await jobs.claim(5)] == [slow.id]
    (again,) = await jobs.list("leased")
    assert again.attempt == 2
    assert await raw.hlen("delayq:{jobs}:bodies") == 2


async def test_a_claim_that_finds_only_what_is_passed_over_waits_on(
    jobs: ReliableQueue[Any],
) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    slow = await take(jobs)
    await slow.extend(1000)
    await advance(jobs, 60)
    await jobs.offer("other", id="other")
    (other,) = await jobs.claim(1)
    assert other.value == "other"
    await other.ack()
    await advance(jobs, 60)
    claim = asyncio.create_task(jobs.claim(1, wait=20))
    await asyncio.sleep(0.05)
    assert not claim.done()
    await jobs.offer("last")
    assert [message.value for message in await claim] == ["last"]


@pytest.mark.parametrize("how", ["cancel", "purge", "expire"])
async def test_one_that_is_lost_is_replaced_by_the_one_after_it(
    server: PrivateServer, how: str
) -> None:
    async with delayq.connect(server.url, resync_interval=0.05) as client:
        jobs = client.reliable_queue("jobs")
        due = await jobs.schedule("tick", every=60, value="tick", ttl=5)
        (message,) = await jobs.list("delayed")
        if how == "cancel":
            assert await jobs.cancel(message.id)
        elif how == "purge":
            assert await jobs.purge() == 1
        else:
            await advance(jobs, 66)
            due -= timedelta(seconds=66)
            assert await jobs.claim() == []
        await until(lambda: _one_waits(jobs))
        (after,) = await jobs.list("delayed")
        assert after.due_at == due + timedelta(seconds=60)
        assert (await jobs.stats()).dead == 0


async def _one_waits(jobs: ReliableQueue[Any]) -> bool:
    return len(await waiting(jobs)) == 1


async def test_scheduling_again_does_not_bring_a_cancelled_one_back(
    jobs: ReliableQueue[Any],
) -> None:
    due = await jobs.schedule("tick", every=60, value="tick")
    (message,) = await jobs.list("delayed")
    await jobs.cancel(message.id)
    assert await jobs.schedule("tick", every=60, value="tick") == due + timedelta(seconds=60)
    assert len(await waiting(jobs)) == 1


async def test_one_that_is_hastened_does_not_come_a_second_time(jobs: ReliableQueue[Any]) -> None:
    due = await jobs.schedule("tick", every=60, value="tick")
    (message,) = await jobs.list("delayed")
    assert await jobs.reschedule(message.id, 0)
    await (await take(jobs)).ack()
    (after,) = await jobs.list("delayed")
    assert after.due_at == due + timedelta(seconds=60)


async def test_a_dead_letter_that_lives_again_disturbs_nothing(jobs: ReliableQueue[Any]) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    await (await take(jobs)).bury("broken")
    await advance(jobs, 60)
    await (await take(jobs)).ack()
    assert await jobs.dead.redrive() == 1
    await (await take(jobs)).ack()
    assert len(await waiting(jobs)) == 1


async def test_the_time_to_live_counts_from_the_moment_it_is_due(jobs: ReliableQueue[Any]) -> None:
    await jobs.schedule("tick", every=60, value="tick", ttl=10)
    await advance(jobs, 65)
    await (await take(jobs)).ack()
    await advance(jobs, 66)
    assert await jobs.claim() == []


# Unscheduling


async def test_unscheduling_drops_the_one_that_waits(jobs: ReliableQueue[Any], raw: Any) -> None:
    await jobs.schedule("tick", every=60, value="tick", priority=4)
    assert await jobs.unschedule("tick") is True
    assert await jobs.unschedule("tick") is False
    assert await waiting(jobs) == []
    assert await jobs.schedules() == []
    await raw.delete(*[key for key in await raw.keys() if b":call:" in key] or ["none"])
    assert await raw.keys() == [b"delayq:{jobs}:settings"]


async def test_unscheduling_leaves_the_one_that_a_worker_has(jobs: ReliableQueue[Any]) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    message = await take(jobs)
    assert await jobs.unschedule("tick")
    assert await waiting(jobs) == []
    await message.nack(delay=0)
    again = await take(jobs)
    assert again.id == message.id
    await again.ack()
    await advance(jobs, 3600)
    assert await jobs.claim() == []
    assert (await jobs.stats()).leased == 0


async def test_nobody_brings_an_unscheduled_one_back(server: PrivateServer) -> None:
    async with (
        delayq.connect(server.url, resync_interval=0.05) as one,
        delayq.connect(server.url, resync_interval=0.05) as other,
    ):
        queues: list[ReliableQueue[Any]] = [
            one.reliable_queue("jobs"),
            other.reliable_queue("jobs"),
        ]
        for queue in queues:
            await queue.schedule("tick", every=60, value="tick")
        assert await queues[0].unschedule("tick")
        await asyncio.sleep(0.3)
        assert await waiting(queues[1]) == []
        # No client looks at it any more.
        trips = [client.statistics().round_trips for client in (one, other)]
        timers = [client.statistics().timers for client in (one, other)]
        assert timers == [0, 0]
        assert len(trips) == 2


async def test_a_redefinition_while_one_is_at_work(jobs: ReliableQueue[Any]) -> None:
    await jobs.schedule("tick", every=60, value="old")
    await advance(jobs, 60)
    message = await take(jobs)
    await jobs.schedule("tick", every=30, value="new")
    assert await waiting(jobs) == ["new"]
    await message.ack()
    assert await waiting(jobs) == ["new"]
    await advance(jobs, 31)
    assert (await take(jobs)).value == "new"


# Cost


DAMAGED = [
    b"",
    b"no JSON\ncontent",
    b"[]\ncontent",
    b"{}\ncontent",
    b'{"next":"x","last":"","timing":"{}","every":"5","first":"0","ttl":"0","version":"0","priority":0,"upcoming":[]}\ncontent',
    b'{"next":"","last":"","timing":"{}","every":"x","first":"0","ttl":"0","version":"0","priority":0,"upcoming":[]}\ncontent',
    b'{"next":"","last":"","timing":"{}","every":"0","first":"0","ttl":"0","version":"0","priority":99,"upcoming":[]}\ncontent',
    b'{"next":"","last":"","timing":"{}","every":"0","first":"0","ttl":"0","version":"0","priority":0,"upcoming":[{}]}\ncontent',
]


@pytest.mark.parametrize("record", DAMAGED)
async def test_a_damaged_record_disturbs_no_other_one_and_is_mended_by_its_next_definition(
    client: Client, jobs: ReliableQueue[Any], raw: Any, record: bytes
) -> None:
    await jobs.schedule("good", every=HOUR, value=1)
    await jobs.schedule("bad", every=HOUR, value=2)
    await raw.hset(SCHEDULES, "bad", record)
    assert [each.name for each in await jobs.schedules()] == ["good"]
    await jobs._open.partitions[0].recurrence.look()
    await advance(client, HOUR)
    for message in await jobs.claim(10):
        await message.ack()
    assert 1 in await waiting(jobs)
    await jobs.schedule("bad", every=HOUR, value=3)
    assert [each.name for each in await jobs.schedules()] == ["bad", "good"]
    await raw.hset(SCHEDULES, "bad", record)
    assert await jobs.unschedule("bad")
    assert not await jobs.unschedule("bad")


async def test_a_queue_without_schedules_pays_nothing_and_one_with_pays_one_call_per_interval(
    server: PrivateServer, faults: Faults
) -> None:
    async with delayq.connect(server.url, resync_interval=0.2) as client:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1)
        await (await take(jobs)).ack()
        await asyncio.sleep(0.5)
        assert not {
            name for name in faults.calls if name in (OCCUR.name, RECUR.name, SCHEDULE.name)
        }
        handles: list[ReliableQueue[Any]] = [client.reliable_queue("jobs") for _ in range(5)]
        for handle in handles:
            await handle.schedule("a", every=60, value=1)
            await handle.schedule("b", every=60, value=1)
        started = time.monotonic()
        await until(lambda: faults.calls.count(RECUR.name) >= 5)
        assert faults.calls.count(RECUR.name) <= (time.monotonic() - started) / 0.2 + 2


@pytest.mark.parametrize("fault", ["unsent", "lost"])
async def test_calls_that_fail_are_made_again(
    jobs: ReliableQueue[Any], faults: Faults, fault: str
) -> None:
    faults.plan = lambda name, n: fault if name in (SCHEDULE.name, OCCUR.name) and n <= 2 else None
    await jobs.schedule("tick", every=60, value="tick")
    assert await waiting(jobs) == ["tick"]
    await advance(jobs, 60)
    message = await take(jobs)
    assert await waiting(jobs) == ["tick"]
    await message.ack()
    assert (await jobs.stats()).ready == 0


async def test_without_an_answer_the_message_is_handled_and_the_look_mends_the_rest(
    jobs: ReliableQueue[Any], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.0)
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    faults.plan = lambda name, n: "unsent" if name == OCCUR.name else None
    await (await take(jobs)).ack()
    assert await waiting(jobs) == []
    await advance(jobs, 0)
    assert await waiting(jobs) == ["tick"]


async def test_a_caller_who_is_cancelled_before_the_next_one_is_in_place_gives_his_back(
    jobs: ReliableQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.schedule("tick", every=60, value="tick")
    await advance(jobs, 60)
    run, asked = jobs._open.partitions[0].store.client.run, asyncio.Event()

    async def stalled(script: Any, *args: Any) -> Any:
        if script is OCCUR and not asked.is_set():
            asked.set()
            await asyncio.sleep(3600)
        return await run(script, *args)

    monkeypatch.setattr(jobs._open.partitions[0].store.client, "run", stalled)
    claim = asyncio.create_task(jobs.claim())
    await asked.wait()
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)

    async def back() -> bool:
        return (await jobs.stats()).ready == 1

    await until(back)
    message = await take(jobs)
    assert message.attempt == 1
    assert len(await jobs.list("delayed")) == 1


# Cron


@needs_cron
async def test_cron_in_a_time_zone_over_two_years_of_daylight_saving(
    client: Client, jobs: ReliableQueue[Any]
) -> None:
    zone = ZoneInfo("Europe/Berlin")
    clock = Clock(jobs)
    start = await clock.now()
    await jobs.schedule("night", cron="30 2 * * *", timezone=zone, value="night")
    seen: list[datetime] = []
    while len(seen) < 800:
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
    moments = cron_moments("30 2 * * *", zone, start)
    assert seen == [next(moments) for _ in seen]
    (known,) = await jobs.schedules()
    assert (known.cron, known.timezone, known.every) == ("30 2 * * *", "Europe/Berlin", None)


@needs_cron
async def test_a_process_that_cannot_compute_moments_lives_on_those_that_are_known(
    server: PrivateServer,
    jobs: ReliableQueue[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await jobs.schedule("tick", cron="0 * * * *", value="tick")
    await jobs.aclose()
    async with delayq.connect(server.url, resync_interval=3600) as worker:
        queue: ReliableQueue[Any] = worker.reliable_queue("jobs")
        monkeypatch.setitem(sys.modules, "cronsim", None)
        for _ in range(32):
            await advance(queue, HOUR)
            await (await take(queue)).ack()
        assert await waiting(queue) == []
        assert [known.next_at for known in await queue.schedules()] == [None]
        assert "cannot compute the occurrences" in caplog.text
        monkeypatch.delitem(sys.modules, "cronsim")
        await advance(queue, HOUR)
        await until(lambda: _one_waits(queue))
        (message,) = await queue.list("delayed")
        assert timedelta(0) < message.due_at - await worker.server_time() <= HOUR


@needs_cron
async def test_moments_are_computed_ahead_while_there_are_some_left(
    jobs: ReliableQueue[Any], raw: Any
) -> None:
    await jobs.schedule("tick", cron="*/1 * * * *", value="tick")
    for _ in range(80):
        await advance(jobs, 60)
        await (await take(jobs)).ack()
        assert len(await waiting(jobs)) == 1

    async def enough() -> bool:
        return len(facts(await raw.hget(SCHEDULES, "tick"))["upcoming"]) >= 8

    await until(enough)


async def test_a_consumer_that_never_scheduled_keeps_a_recurrence_going(
    server: PrivateServer,
) -> None:
    async with delayq.connect(server.url) as deploying:
        queue = deploying.reliable_queue("jobs")
        await queue.schedule("tick", every=60, value="tick", ttl=10)
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        queue = client.reliable_queue("jobs")
        # No worker has run for so long that the occurrence has expired. The claim that drops it
        # schedules the next one.
        await advance(queue, 100)
        assert await queue.claim() == []
        await until(lambda: is_waiting(queue))
    async with delayq.connect(server.url) as cleaning:
        await cleaning.reliable_queue("jobs").purge()
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        queue = client.reliable_queue("jobs")
        claiming = asyncio.create_task(queue.claim(wait=3600))
        await until(lambda: is_waiting(queue))
        claiming.cancel()


async def is_waiting(queue: ReliableQueue[Any]) -> bool:
    return (await queue.stats()).delayed == 1


async def test_a_schedule_that_begins_again_waits_for_the_occurrence_at_work(
    jobs: ReliableQueue[Any],
) -> None:
    await jobs.schedule("tick", every=60, value=1)
    await advance(jobs, 60)
    (message,) = await jobs.claim()
    assert await jobs.unschedule("tick")
    assert await jobs.schedules() == []
    assert not await jobs.unschedule("tick")
    await jobs.schedule("tick", every=20, value=2)
    # This is still within the lease.
    await advance(jobs, 20)
    assert await jobs.claim() == []
    await message.ack()
    await advance(jobs, 20)
    assert [each.value for each in await jobs.claim()] == [2]


async def test_an_occurrence_whose_follow_up_is_unknown_is_not_handed_out_beside_the_one_at_work(
    jobs: ReliableQueue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await jobs.schedule("tick", every=5, value=1)
    await advance(jobs, 5)
    (message,) = await jobs.claim()
    run = jobs._open.partitions[0].store.client.run

    async def lost(script: Any, *args: Any) -> Any:
        answer = await run(script, *args)
        if script is OCCUR:
            raise delayq.OutcomeUnknown("planned")
        return answer

    monkeypatch.setattr(jobs._open.partitions[0].store.client, "run", lost)
    await advance(jobs, 5)
    assert await jobs.claim() == []
    monkeypatch.undo()
    await message.ack()
    await advance(jobs, 5)
    assert len(await jobs.claim()) == 1
