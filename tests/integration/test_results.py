"""Results and histories of messages, in a queue that keeps them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

import delayq
from delayq import Backoff, MessageFailed, NoResult, Offer, ResultTimeout
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import ACK, AWAIT, FINISH
from delayq.codecs import codec_for
from tests.support.reliable import Jobs, claim_all, claim_one, leased
from tests.support.reliable_fixtures import LEASE
from tests.support.tasks import end
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delayq import Client, MessageHistory
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

KEYS = ReliableKeys.of("jobs")
DAY = timedelta(days=1)
WITHIN = 20.0


@dataclass
class Invoice:
    number: int


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    queue = client.reliable_queue("jobs", lease=LEASE, keep=DAY, backoff=Backoff.fixed(0))
    # The first call declares the settings.
    await queue.stats()
    return queue


@pytest.fixture
async def other(server: PrivateServer) -> AsyncIterator[Client]:
    """A client of another process, as far as the server can tell, that never re-checks."""
    async with delayq.connect(server.url, resync_interval=3600) as client:
        yield client


async def waiting(client: Client, count: int = 1, name: str = "jobs") -> None:
    """Wait until this many calls of a client wait for a message."""
    results = client.reliable_queue(name)._open.notifications
    await until(lambda: sum(map(len, results._waits.values())), equals=count)


async def handle(queue: Jobs, result: object = None) -> None:
    """Handle the next message."""
    await (await claim_one(queue, wait=WITHIN)).ack(result)


async def fail(queue: Jobs, error: BaseException | str = "an error") -> None:
    """Fail the next message."""
    await (await claim_one(queue, wait=WITHIN)).nack(0, error)


async def history_of(queue: Jobs, key: str) -> MessageHistory:
    history = await queue.history(key)
    assert history is not None
    return history


# Results


@pytest.mark.every_server
async def test_a_result_is_what_the_message_was_acknowledged_with(
    jobs: Jobs, other: Client
) -> None:
    theirs = other.reliable_queue("jobs")
    results: list[Any] = [None, 0, "", False, [], {"a": [1, None]}, "\n\n"]
    for result in results:
        key = await jobs.offer(1)
        await handle(jobs, result)
        # It stays.
        for _ in range(2):
            assert await theirs.result(key, timeout=0) == result
    with pytest.raises(delayq.DecodeError):
        await other.reliable_queue("jobs", codec=delayq.codecs.LongCodec()).result(key)


async def test_a_result_comes_at_once_to_those_who_wait(jobs: Jobs, other: Client) -> None:
    theirs = other.reliable_queue("jobs")
    ids = [await theirs.offer(n) for n in range(3)]
    results = [asyncio.create_task(theirs.result(key, timeout=WITHIN)) for key in ids]
    again = asyncio.create_task(theirs.result(ids[0]))
    await waiting(other, 4)
    for n in range(3):
        await handle(jobs, n * 10)
    assert await asyncio.gather(*results, again) == [0, 10, 20, 0]


async def test_a_wait_for_a_result_ends_at_its_timeout(jobs: Jobs, raw: Any) -> None:
    key = await jobs.offer(1, id="mine")
    with pytest.raises(ResultTimeout, match=r"message 'mine' was not finished within 0\.05 s"):
        await jobs.result(key, timeout=timedelta(milliseconds=50))
    with pytest.raises(TimeoutError):
        await jobs.result(key, timeout=0)
    with pytest.raises(delayq.BadDelay):
        await jobs.result(key, timeout=-1)
    assert not jobs._open.notifications._waits
    # The server forgets it as well.
    assert 0 < await raw.pttl(KEYS.awaited) <= 120_000


@pytest.mark.every_server
async def test_a_message_that_dies_or_is_dropped_has_no_result(jobs: Jobs, other: Client) -> None:
    theirs = other.reliable_queue("jobs")
    ends: dict[str, Callable[[], Any]] = {
        "it failed": lambda: fail(jobs, ValueError("boo")),
        "cancelled": lambda: jobs.cancel("cancelled"),
        "ready": lambda: jobs.purge("ready"),
        "delayed": lambda: jobs.purge("delayed"),
        "all": lambda: jobs.purge("all"),
    }
    for key, end_it in ends.items():
        await theirs.offer(1, 3600 if key == "delayed" else 0, id=key, max_attempts=1)
        result = asyncio.create_task(theirs.result(key, timeout=WITHIN))
        await waiting(other)
        await end_it()
        with pytest.raises((MessageFailed, NoResult)) as caught:
            await result
        assert (type(caught.value) is MessageFailed) == (key == "it failed")
    with pytest.raises(MessageFailed, match=r"failed \(attempts\): ValueError: boo"):
        await theirs.result("it failed", timeout=0)
    for timeout in (None, 0, WITHIN):
        with pytest.raises(NoResult, match=r"'no such'.* never offered"):
            await jobs.result("no such", timeout)
    with pytest.raises(delayq.BadInput):
        await jobs.result("")


async def test_without_keep_there_is_no_result_and_nothing_is_kept(
    client: Client, raw: Any, faults: Faults
) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE)
    key = await queue.offer(1)
    with pytest.raises(NoResult, match="keeps none; give it keep=") as caught:
        await queue.result(key)
    assert not caught.value.keeps
    # A result that cannot be encoded is ignored as well.
    await handle(queue, object())
    with pytest.raises(NoResult):
        await queue.result(key)
    await queue.offer(2, max_attempts=1)
    await fail(queue)
    assert not await raw.exists(KEYS.record_times, KEYS.records, KEYS.awaited)
    assert ACK.name in faults.calls
    assert FINISH.name not in faults.calls


async def test_keep_can_be_turned_on_and_off(client: Client, other: Client, faults: Faults) -> None:
    queue, theirs = client.reliable_queue("jobs", lease=LEASE), other.reliable_queue("jobs")
    await queue.offer(1, id="a")
    (message,) = await theirs.claim()
    await queue.configure(keep=DAY)
    await until(lambda: theirs._open.settings.stored.keep_us)
    await message.ack("kept")
    assert await queue.result("a") == "kept"
    await queue.configure(keep=0)
    assert await queue.result("a") == "kept"
    await queue.offer(1, id="b")
    await handle(queue, "not kept")
    with pytest.raises(NoResult):
        await queue.result("b")


@pytest.mark.every_server
async def test_a_client_that_has_not_heard_that_nothing_is_kept_keeps_nothing(
    jobs: Jobs, raw: Any
) -> None:
    await jobs.offer(1, id="earlier")
    await handle(jobs)
    for how in ("ack", "nack", "bury"):
        message = await leased(jobs, 2, id=how)
        await raw.hset(KEYS.settings, "keep", "0")
        await (message.bury("an error") if how == "bury" else getattr(message, how)())
        assert await raw.hkeys(KEYS.records) == [b"earlier"], how
        assert await raw.exists(KEYS.named("bodies")) == (how == "nack")
        await jobs.purge()


@pytest.mark.every_server
async def test_a_client_that_has_not_heard_that_attempts_are_kept_records_none(
    client: Client, raw: Any
) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, backoff=Backoff.fixed(0))
    await queue.offer_many([Offer(1), Offer(2)])
    nacked, buried = await queue.claim(2)
    await raw.hset(KEYS.settings, "keep", "3600000000")
    await nacked.nack(0, "an error")
    await buried.bury("an error")
    assert not await raw.exists(KEYS.record_times, KEYS.records)


async def test_results_are_awaited_in_all_partitions(client: Client, faults: Faults) -> None:
    queue = client.reliable_queue("parts", lease=LEASE, partitions=4, keep=DAY)
    ids = [f"{n}" for n in range(40)]
    await queue.offer_many([Offer(n, id=key) for n, key in enumerate(ids)])
    results = [asyncio.create_task(queue.result(key, timeout=WITHIN)) for key in ids]
    await waiting(client, 40, "parts")
    # A wait goes on while the server is away, and a lost reply loses no result.
    faults.plan = lambda name, n: (
        ("unsent" if n % 2 else "lost") if name in (AWAIT.name, FINISH.name) and n < 5 else None
    )
    done = 0
    while done < 40:
        messages = await queue.claim(10, wait=WITHIN)
        done += len(messages)
        if done < 20:
            await asyncio.gather(*(message.ack(message.value * 2) for message in messages))
        else:
            for message in messages:
                await message.ack(message.value * 2)
    assert await asyncio.gather(*results) == [n * 2 for n in range(40)]


async def test_calls_by_id_reach_messages_of_groups_in_all_partitions(client: Client) -> None:
    queue = client.reliable_queue("parts", lease=LEASE, partitions=8, keep=DAY)
    # These look like ids that are generated.
    ids = [f"order-{n:06}" for n in range(16)]
    await queue.offer_many([Offer(n, id=key, group="a") for n, key in enumerate(ids)])
    for key in ids:
        assert await queue.get(key) is not None
        with pytest.raises(ResultTimeout):
            await queue.result(key, 0)
    assert await queue.reschedule_many(ids, 0) == [True] * 16
    for message in await queue.claim(16):
        await (message.ack(message.value) if message.value < 8 else message.bury("no good"))
    assert [await queue.result(key) for key in ids[:8]] == [*range(8)]
    states = [(await history_of(queue, key)).state for key in ids]
    assert states == ["done"] * 8 + ["dead"] * 8
    assert await queue.dead.redrive(ids) == 8
    assert await queue.cancel_many(ids) == [False] * 8 + [True] * 8


async def test_a_wait_ignores_the_result_of_an_earlier_message(
    jobs: Jobs, other: Client, raw: Any
) -> None:
    await jobs.offer(1, id="a")
    await handle(jobs, "earlier")
    await jobs.offer(2, id="a", delay=3600)
    result = asyncio.create_task(other.reliable_queue("jobs").result("a", timeout=WITHIN))
    await waiting(other)
    # The server knows of the wait, so the message was seen alive.
    await until(lambda: raw.exists(KEYS.awaited))
    assert await jobs.cancel("a")
    with pytest.raises(NoResult):
        await result


# What cannot be kept


async def test_a_result_that_cannot_be_stored_is_refused_and_the_message_stays(
    client: Client,
) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, keep=DAY, max_payload=100)
    message = await leased(queue, id="a")
    with pytest.raises(delayq.EncodeError, match="the result cannot be kept: JsonCodec"):
        await message.ack(object())
    with pytest.raises(delayq.PayloadTooLarge, match="max_payload=100"):
        await message.ack("x" * 99)
    await message.ack("x" * 98)
    assert await queue.result("a") == "x" * 98


async def test_large_results_share_a_call_with_few_others(jobs: Jobs, faults: Faults) -> None:
    await jobs.offer_many([Offer(n, id=f"{n}") for n in range(20)])
    results = ["x" * 300_000 + str(n) for n in range(20)]
    messages = await claim_all(jobs)
    await asyncio.gather(*(message.ack(results[message.value]) for message in messages))
    assert faults.calls.count(FINISH.name) >= 5
    assert [await jobs.result(f"{n}") for n in range(20)] == results


async def test_a_codec_of_one_type_leaves_results_as_json(client: Client, other: Client) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, keep=DAY, codec=codec_for(Invoice))
    await queue.offer(Invoice(1), id="a")
    await handle(queue, [Invoice(2), datetime(2026, 1, 1, tzinfo=UTC)])
    found = await other.reliable_queue("jobs").result("a")
    assert found == await queue.result("a")
    assert found[0] == {"number": 2}
    # That of any bytes keeps any bytes.
    blobs = client.reliable_queue("bytes", lease=LEASE, keep=DAY, codec=delayq.codecs.BytesCodec())
    for result in (b"", b"a\0b", b"\0\n\xff"):
        await blobs.offer(b"1", id="a")
        await handle(blobs, result)
        assert await blobs.result("a") == result


@pytest.mark.every_server
async def test_a_damaged_record_is_none(jobs: Jobs, raw: Any) -> None:
    for record in (b"", b"junk", b"done 1", b"done 1 9\n", b"result 1 2\nx\ny", b"\xff"):
        await jobs.offer(1, id="a")
        await handle(jobs, 1)
        await raw.hset(KEYS.records, "a", record)
        history = await jobs.history("a")
        assert history is None or history.attempts == (), record
        # The next message with that id has a record again.
        await jobs.offer(1, id="a")
        await fail(jobs)
        await handle(jobs, 2)
        assert await jobs.result("a") == 2
        history = await history_of(jobs, "a")
        assert [attempt.number for attempt in history.attempts] == [1, 2], record


# How long, and how many


@pytest.mark.every_server
async def test_no_call_drops_more_than_a_bounded_number(jobs: Jobs, raw: Any) -> None:
    names = [f"{n:04d}" for n in range(1000)]
    await raw.zadd(KEYS.record_times, {name: n + 1 for n, name in enumerate(names)})
    await raw.hset(KEYS.records, mapping=dict.fromkeys(names, "done 1 0\n"))
    left = []
    for n in range(2):
        await jobs.offer(1, id=f"new {n}")
        await handle(jobs)
        left.append(await raw.hlen(KEYS.records))
    assert left == [401, 2]


# Histories


@pytest.mark.every_server
async def test_a_message_that_is_just_finishing_has_a_history(jobs: Jobs, faults: Faults) -> None:
    """One script looks: between two, the message would be neither alive nor handled."""
    await jobs.offer(1, id="a")
    assert (await history_of(jobs, "a")).state == "ready"
    assert [call for call in faults.calls if call in {"reliable/get", "reliable/outcome"}] == [
        "reliable/outcome"
    ]


async def test_a_history_tells_the_attempts(jobs: Jobs) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    assert await jobs.history("a") is None
    await jobs.offer(1, 3600, id="a")
    history = await history_of(jobs, "a")
    assert (history.state, history.attempts, history.finished_at) == ("delayed", (), None)
    await jobs.reschedule("a", 0)
    await fail(jobs, ValueError("boo"))
    history = await history_of(jobs, "a")
    assert (history.state, len(history.attempts)) == ("ready", 1)
    assert history.is_live
    await handle(jobs, {"well": 1})
    history = await history_of(jobs, "a")
    assert (history.state, history.result, history.error) == ("done", {"well": 1}, "")
    assert not history.is_live
    first, second = history.attempts
    assert (first.number, first.error, second.number, second.error) == (1, "ValueError: boo", 2, "")
    assert first.traceback.endswith("ValueError: boo")
    assert first.worker == second.worker
    assert first.worker.endswith(f":{os.getpid()}")
    moments = [history.offered_at, first.started_at, first.finished_at, second.started_at]
    moments += [second.finished_at]
    assert history.finished_at == second.finished_at
    known = [moment for moment in moments if moment is not None]
    assert len(known) == 5
    assert before < known[0] <= known[1] <= known[2] <= known[3] <= known[4]


@pytest.mark.every_server
async def test_a_record_has_the_last_ten_attempts(jobs: Jobs, raw: Any) -> None:
    await jobs.offer(1, id="a", max_attempts=100)
    for n in range(1, 15):
        await fail(jobs, f"error {n}\n" + "x" * 9000)
    await handle(jobs, "well")
    history = await history_of(jobs, "a")
    assert [attempt.number for attempt in history.attempts] == [*range(6, 16)]
    assert history.attempts[0].error == "error 6"
    assert await raw.hstrlen(KEYS.records, "a") < 25_000
    assert await jobs.result("a") == "well"


# Faults


async def test_a_lost_announcement_is_made_up_for_by_the_re_check(
    jobs: Jobs, server: PrivateServer, raw: Any
) -> None:
    async with delayq.connect(server.url, resync_interval=0.1) as theirs:
        queue = theirs.reliable_queue("jobs")
        key = await queue.offer(1)
        result = asyncio.create_task(queue.result(key, timeout=WITHIN))
        await waiting(theirs)
        # Pretend that no client has asked for notifications.
        await raw.delete(KEYS.awaited)
        await until(lambda: raw.exists(KEYS.awaited))
        await raw.execute_command("ACL", "SETUSER", "default", "-publish")
        try:
            await handle(jobs, 3)
            assert await result == 3
        finally:
            await raw.execute_command("ACL", "SETUSER", "default", "+publish")


async def test_a_result_read_without_waiting_raises_while_the_server_is_away(
    jobs: Jobs, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await jobs.offer(1)
    faults.plan = lambda name, _: "unsent" if name == AWAIT.name else None
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.2)
    with pytest.raises(delayq.ServerError):
        await jobs.result(key, timeout=0)
    with pytest.raises(ResultTimeout):
        await jobs.result(key, timeout=0.2)


async def test_a_wait_that_is_cancelled_or_whose_queue_closes_leaves_nothing(
    jobs: Jobs, other: Client
) -> None:
    ids = [await jobs.offer(n) for n in range(20)]
    for beats in range(20):
        waits = [asyncio.create_task(jobs.result(key)) for key in ids]
        for _ in range(beats):
            await asyncio.sleep(0)
        for wait in waits:
            await end(wait)
    assert not jobs._open.notifications._waits
    await handle(jobs, 1)
    assert await jobs.result(ids[0]) == 1
    theirs = other.reliable_queue("jobs")
    result = asyncio.create_task(theirs.result(ids[1]))
    await waiting(other)
    await theirs.aclose()
    with pytest.raises(delayq.Closed):
        await result


# Workers


class Nothing:
    """JSON has no form for it."""


class Reply(pydantic.BaseModel):
    """As for the response of a web service, which no worker reads."""

    name: str
    password: str = pydantic.Field(default="", exclude=True)


async def test_a_worker_keeps_what_a_handler_returns(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The work has been done: nothing about its result makes it be done again."""
    queue = client.reliable_queue("jobs", lease=LEASE, keep=DAY, max_payload=100)
    worker, runs = delayq.Worker(client), []

    @worker.listener("jobs", backoff=Backoff.fixed(0), max_attempts=2, timeout=600)
    def double(value: int, message: delayq.Message[int]) -> Any:
        runs.append(value)
        unusual = {13: Nothing(), 14: "x" * 99, 15: Reply(name="ada", password="secret")}
        return unusual.get(value, value + message.value or None)

    @worker.middleware
    async def around(message: delayq.Message[Any], call: Any) -> None:
        await call()

    ids = [await queue.offer(value) for value in (1, 0, 13, 14, 15)]
    async with worker:
        results = [await queue.result(key, timeout=WITHIN) for key in ids]
    assert results == [2, None, None, None, {"name": "ada"}]
    assert sorted(runs) == [0, 1, 13, 14, 15]
    errors = sorted(message for message in caplog.messages if "is not stored" in message)
    assert len(errors) == 2
    assert any("its result, a Nothing" in error and "convert it first" in error for error in errors)
    assert any("its result, a str" in error and "max_payload=100" in error for error in errors)


async def test_every_message_of_a_batch_has_its_own_result(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    queue = client.reliable_queue("jobs", lease=LEASE, keep=DAY)
    worker = delayq.Worker(client)

    @worker.listener("jobs", batch=5, linger=60, max_attempts=1)
    async def handle_all(values: list[int]) -> list[Any] | int | None:
        return {0: [value * 2 for value in values], 5: None, 10: 5, 15: [object(), 1, 2, 3, 4]}[
            values[0]
        ]

    async with worker:
        for first in (0, 5, 10, 15):
            await queue.offer_many([Offer(n, id=f"{n}") for n in range(first, first + 5)])
            results = await asyncio.gather(
                *(queue.result(f"{n}", WITHIN) for n in range(first, first + 5))
            )
            assert results == {0: [0, 2, 4, 6, 8], 15: [None, 1, 2, 3, 4]}.get(first, [None] * 5)
    (warning,) = [message for message in caplog.messages if "no results are stored" in message]
    assert "a batch of 5 messages returned a int" in warning


async def test_a_task_returns_its_result_with_its_type(client: Client) -> None:
    tasks = delayq.Tasks("sums", keep=DAY)

    @tasks.task
    async def bill(number: int) -> Invoice:
        return Invoice(number)

    worker = delayq.Worker(client)
    worker.include(tasks)
    tasks.bind(client)
    async with worker:
        assert await bill.result(await bill.offer(5), timeout=WITHIN) == Invoice(5)
        key = await bill.offer(7)
        assert await asyncio.to_thread(bill.result_sync, key, WITHIN) == Invoice(7)
