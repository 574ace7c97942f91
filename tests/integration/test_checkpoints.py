"""What handlers save of their work goes with the message, and the next attempt goes on from it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Interrupted, Offer
from delayq._reliable.checkpoints import Saved, pack
from delayq._reliable.keys import ReliableKeys
from delayq.admin.reliable import ReliableInspector
from delayq.testing import advance
from tests.support.reliable import Jobs, claim_one, depths
from tests.support.reliable_store import Store
from tests.support.tasks import running

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client, Message

HOUR = 3600
KEYS = ReliableKeys.of("jobs")


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    jobs: Jobs = client.reliable_queue("jobs", lease=60)
    await jobs.offer(1, id="a", ttl=9 * HOUR)
    return jobs


async def again(jobs: Jobs, message: Message[Any]) -> Message[Any]:
    """Return the message in its next attempt."""
    await message.nack(0)
    return await claim_one(jobs)


@pytest.mark.every_server
async def test_an_attempt_goes_on_from_what_the_last_one_saved(jobs: Jobs) -> None:
    for end in ("nack", "snooze", "release"):
        message = await claim_one(jobs)
        state = await message.load(default={"rows": []})
        await message.save({"rows": [*state["rows"], end]})
        await (message.release() if end == "release" else getattr(message, end)(0))
    assert await (await claim_one(jobs)).load() == {"rows": ["nack", "snooze", "release"]}


@pytest.mark.every_server
async def test_only_who_has_the_lease_saves(jobs: Jobs, client: Client) -> None:
    first = await claim_one(jobs)
    await first.save("first")
    await advance(client, 61)
    with pytest.raises(delayq.LeaseLost):
        await first.save("too late")
    second = await claim_one(jobs)
    assert await second.load() == "first"
    await second.save("second")
    with pytest.raises(delayq.LeaseLost):
        await first.save("much too late")
    with pytest.raises(delayq.LeaseLost):
        await first.step("charge", print)
    assert await (await again(jobs, second)).load() == "second"


async def replace(jobs: Jobs, message: Message[Any]) -> None:
    await message.nack(HOUR)
    await jobs.offer(2, id="a", on_duplicate="replace")


ENDS: dict[str, Callable[[Jobs, Message[Any]], Any]] = {
    "acknowledged": lambda _, message: message.ack(),
    "followed": lambda _, message: message.ack(then=[Offer(2)]),
    "cancelled": lambda jobs, _: jobs.cancel("a", running=True),
    "purged": lambda jobs, _: jobs.purge(),
    "replaced": replace,
    "expired": lambda _, message: message.snooze(HOUR),
}


@pytest.mark.every_server
@pytest.mark.parametrize("end", ENDS)
async def test_a_checkpoint_goes_with_its_message(
    jobs: Jobs, client: Client, raw: Any, end: str
) -> None:
    message = await claim_one(jobs)
    await message.save("state")
    await ENDS[end](jobs, message)
    if end == "expired":
        await advance(client, 10 * HOUR)
        assert await jobs.claim(1) == []
    assert (await Store(raw, "jobs").look()).checkpoints == set()


@pytest.mark.every_server
async def test_a_redriven_letter_goes_on_where_it_died(jobs: Jobs) -> None:
    message = await claim_one(jobs)
    await message.save({"row": 7})
    await message.bury("no good")
    assert [letter.value for letter in await jobs.dead.list()] == [1]
    history = await jobs.history("a")
    assert history is not None
    assert (history.payload, history.error) == (b"1", "no good")
    await jobs.dead.redrive()
    message = await claim_one(jobs)
    assert await message.load() == {"row": 7}
    assert message.value == 1


async def test_a_step_runs_once(jobs: Jobs) -> None:
    calls: list[Any] = []

    async def charge(order: int, *, by: str) -> dict[str, Any]:
        calls.append(order)
        return {"order": order, "by": by}

    def fail() -> None:
        calls.append("fail")
        raise OSError("no connection")

    message = await claim_one(jobs)
    for attempt in (1, 2):
        receipt = await message.step("charge", charge, 4, by="card")
        assert receipt == {"order": 4, "by": "card"}
        await message.step("nothing", calls.append, "nothing")
        assert await message.load() is None
        for _ in range(2):
            # What has failed may be tried again, in this attempt or a later one.
            with pytest.raises(OSError, match="no connection"):
                await message.step("fail", fail)
        assert message.attempt == attempt
        message = await again(jobs, message)
    assert calls == [4, "nothing", "fail", "fail", "fail", "fail"]


async def test_steps_side_by_side_keep_all_their_results(jobs: Jobs) -> None:
    message = await claim_one(jobs)
    await asyncio.gather(*(message.step(f"{n}", lambda n: n, n) for n in range(9)))
    await message.save("state")
    message = await again(jobs, message)
    assert [await message.step(f"{n}", int) for n in range(9)] == [*range(9)]
    assert await message.load() == "state"


async def test_errors_say_what_is_wrong_and_nothing_is_stored(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs", max_payload=100)
    await jobs.offer(1)
    message = await claim_one(jobs)
    await message.step("twice", int)
    for name in ("twice", "", "x" * 600, 5, "\udc80"):
        with pytest.raises(delayq.BadInput, match="step"):
            await message.step(name, int)  # type: ignore[call-overload]
    with pytest.raises(delayq.EncodeError, match="the result of the step 'odd' cannot be kept"):
        await message.step("odd", object)
    with pytest.raises(delayq.PayloadTooLarge, match="result of the step 'large' has 202 bytes"):
        await message.step("large", str, "x" * 200)
    with pytest.raises(delayq.PayloadTooLarge, match="checkpoint with the state has"):
        await message.save("x" * 95)
    with pytest.raises(delayq.EncodeError, match="the state cannot be kept"):
        await message.save(object())
    with pytest.raises(delayq.BadDelay):
        await message.sleep(-1)
    assert await (await again(jobs, message)).load() is None


async def test_a_late_call_does_not_undo_a_later_one(jobs: Jobs, client: Client) -> None:
    message = await claim_one(jobs)
    assert await message.load("nothing") == "nothing"
    saving = asyncio.create_task(message.save("cancelled"))
    await asyncio.sleep(0)
    saving.cancel()
    await message.save("stored")
    late = pack(Saved(number=1, state=b'"late"'))
    store = ReliableInspector.of(client, "jobs").store(0)
    assert await store.save(message._claim, late)
    assert await (await again(jobs, message)).load() == "stored"


async def test_another_codec_or_damaged_text_is_told(jobs: Jobs, client: Client, raw: Any) -> None:
    message = await claim_one(jobs)
    await message.save("text")
    for damaged in (b"5;3;\n", b"x", b"1;;\n3:1:"):
        await raw.hset(KEYS.named("checkpoints"), "a", damaged)
        read = await jobs.get("a")
        assert read is not None
        with pytest.raises(delayq.DecodeError, match="message 'a'"):
            await read.load()
    await message.save("whole again")
    await message.nack(0)
    longs = client.reliable_queue("jobs", codec=delayq.codecs.LongCodec())
    with pytest.raises(delayq.DecodeError, match="LongCodec"):
        await (await claim_one(longs)).load()


async def handle_sleeping(message: Message[Any]) -> None:
    async with message:
        for _ in range(2):
            await message.sleep(HOUR)
        await message.sleep(0)


async def handle_in_rounds(message: Message[Any]) -> None:
    async with message:
        if (rounds := await message.load(0)) < 2:
            await message.save(rounds + 1)
            await message.sleep(HOUR)


@pytest.mark.every_server
@pytest.mark.parametrize("handle", [handle_sleeping, handle_in_rounds])
async def test_a_message_sleeps_on_the_server(jobs: Jobs, client: Client, handle: Any) -> None:
    for _ in range(2):
        await handle(await claim_one(jobs))
        assert await depths(jobs) == (1, 0, 0, 0)
        if handle is handle_sleeping:
            # It is not over yet.
            await jobs.reschedule("a", 0)
            await handle(await claim_one(jobs))
            assert await depths(jobs) == (1, 0, 0, 0)
        await advance(client, HOUR)
    message = await claim_one(jobs)
    assert message.attempt == 1
    await handle(message)
    assert await depths(jobs) == (0, 0, 0, 0)


async def test_without_a_block_a_message_that_sleeps_goes_back_at_once(jobs: Jobs) -> None:
    with pytest.raises(Interrupted, match="sleep for 1:00:00"):
        await (await claim_one(jobs)).sleep(HOUR)
    assert await depths(jobs) == (1, 0, 0, 0)


async def test_a_failure_beside_a_sleep_counts(jobs: Jobs) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError

    async def handle(message: Message[Any]) -> None:
        async with message, asyncio.TaskGroup() as group:
            group.create_task(fail())
            try:
                await asyncio.sleep(60)
            finally:
                await message.sleep(HOUR)

    with pytest.raises(BaseExceptionGroup):
        await handle(await claim_one(jobs))
    await jobs.reschedule("a", 0)
    assert (await claim_one(jobs)).attempt == 2


CALLS: dict[str, Callable[[Message[Any]], Any]] = {
    "save": lambda message: message.save(1),
    "step": lambda message: message.step("never", pytest.fail),
    "sleep": lambda message: message.sleep(HOUR),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_stopping_worker_interrupts_handlers(jobs: Jobs, client: Client, call: str) -> None:
    runs: list[Any] = []

    async def handle(message: delayq.Message[int]) -> None:
        worker.stop()
        runs.append((await message.load(0), message.attempt))
        if len(runs) == 1:
            # It is no error.
            with suppress(Exception):
                await CALLS[call](message)
            runs.append("went on")

    for _ in range(2):
        worker = delayq.Worker(client)
        worker.listener("jobs")(handle)
        await asyncio.wait_for(worker.run(), 20)
        await jobs.reschedule("a", 0)
    assert runs == [(0, 1), (1 if call == "save" else 0, 1)]
    assert await depths(jobs) == (0, 0, 0, 0)


async def test_tasks_and_batches_go_on_as_well(client: Client) -> None:
    tasks, done = delayq.Tasks("orders"), asyncio.Queue[Any]()
    calls: list[Any] = []
    failures = [OSError("once")]

    def call(order: int) -> str:
        calls.append(order)
        return f"no {order}"

    @tasks.task
    async def ship(order: int, message: delayq.Message[Any]) -> None:
        tracking = await message.step("ship", call, order)
        await message.sleep(0.05)
        done.put_nowait(tracking)

    worker = delayq.Worker(client)

    @worker.listener("many", batch=3, linger=5)
    async def handle(messages: list[delayq.Message[int]]) -> None:
        for message in messages:
            await message.step("count", calls.append, message.value)
        if failures:
            raise failures.pop()
        done.put_nowait([message.attempt for message in messages])

    tasks.bind(client)
    worker.include(tasks)
    numbers = client.reliable_queue("many", backoff=delayq.Backoff.fixed(0))
    await numbers.offer_many([Offer(n) for n in range(3)])
    await ship.offer(7)  # type: ignore[call-arg]
    async with running(worker.run()):
        results = [await asyncio.wait_for(done.get(), 20) for _ in range(2)]
    tasks.unbind(client)
    assert sorted(map(str, results)) == ["[2, 2, 2]", "no 7"]
    assert sorted(calls) == [0, 1, 2, 7]


async def test_it_moves_to_other_partitions(jobs: Jobs, client: Client) -> None:
    message = await claim_one(jobs)
    await message.save({"row": 7})
    await message.snooze(0)
    await ReliableInspector.of(client, "jobs").repartition(3)
    assert await (await claim_one(jobs)).load() == {"row": 7}
