"""Batches: many messages that lead to one, once, when all of them have ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import BadInput, Batch, BatchTimeout, NoBatch, Offer
from delayq._redis.rights import Rights
from delayq._reliable.ids import home_of
from delayq._reliable.scripts import (
    BATCH_STATUS,
    CANCEL_MEMBERS,
    JOIN_BATCH,
    LIST_MEMBERS,
    SEAL_BATCH,
)
from delayq._reliable.sending import Sender
from delayq.admin.reliable import ReliableInspector
from delayq.errors import ConfigurationError, DuplicateMessage
from delayq.instrumentation import Observer
from delayq.tasks import INJECTED
from delayq.testing import advance
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from delayq import Client, Message
    from delayq._redis.scripts import Script
    from delayq.instrumentation import OfferEvent
    from tests.integration.test_faults import Faults
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

THEN, FAILURE = Offer("report"), Offer("alarm")


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", lease=60)


def members(count: int, **options: Any) -> list[Offer[Any]]:
    return [Offer(number, id=f"m{number}", **options) for number in range(count)]


async def offered(jobs: Jobs, count: int, **options: Any) -> Batch:
    return await jobs.offer_batch(members(count, **options), then=THEN, on_failure=FAILURE)


async def claimed(jobs: Jobs) -> list[Message[Any]]:
    return await jobs.claim(10, wait=10)


async def ack_all(jobs: Jobs) -> list[Any]:
    """Acknowledge what is due, and return its values."""
    messages = await jobs.claim(10)
    for message in messages:
        await message.ack()
    return [message.value for message in messages]


async def counts(batch: Batch) -> dict[str, int]:
    status = await batch.status()
    names = ("waiting", "running", "handled", "dead", "cancelled")
    assert sum(getattr(status, name) for name in names) == status.total
    return {name: count for name in names if (count := getattr(status, name))}


@pytest.mark.every_server
async def test_what_follows_is_stored_once_when_all_were_handled(jobs: Jobs) -> None:
    batch = await offered(jobs, 3)
    assert await counts(batch) == {"waiting": 3}
    messages = await claimed(jobs)
    assert [message.batch and message.batch.id for message in messages] == [batch.id] * 3
    assert await counts(batch) == {"running": 3}
    for message in messages:
        assert (await jobs.stats()).ready == 0
        assert not (await batch.status()).is_finished
        await message.ack()
    assert await counts(batch) == {"handled": 3}
    status = await batch.status()
    assert status.is_finished
    assert status.finished_at is not None
    assert status.finished_at >= status.created_at
    (report,) = await claimed(jobs)
    assert report.value == "report"
    assert report.batch is not None
    assert report.batch.id == batch.id
    await report.ack()
    assert await jobs.claim() == []


async def dies(jobs: Jobs) -> None:
    (message,) = await jobs.claim()
    await message.bury("no money")


async def is_cancelled(jobs: Jobs) -> None:
    assert await jobs.cancel("m0")


@pytest.mark.every_server
@pytest.mark.parametrize(("loss", "state"), [(dies, "dead"), (is_cancelled, "cancelled")])
async def test_the_first_message_that_is_lost_raises_the_alarm_once(
    jobs: Jobs, loss: Callable[[Any], Coroutine[Any, Any, None]], state: str
) -> None:
    batch = await offered(jobs, 3)
    await loss(jobs)
    assert await counts(batch) == {"waiting": 2, state: 1}
    assert set(await ack_all(jobs)) == {1, 2, "alarm"}
    assert (await batch.status()).is_finished
    assert await ack_all(jobs) == []


@pytest.mark.every_server
@pytest.mark.parametrize("expired", ["drop", "dead"])
@pytest.mark.parametrize("group", [None, "acme"])
async def test_an_expired_message_raises_the_alarm(
    client: Client, expired: Any, group: str | None
) -> None:
    jobs = client.reliable_queue("jobs", expired=expired)
    offers = [Offer("late", ttl=0.05, group=group), Offer("early", group=group)]
    batch = await jobs.offer_batch(offers, then=THEN, on_failure=Offer("alarm", group=group))
    await asyncio.sleep(0.1)
    values: list[Any] = []
    while len(values) < 2:
        values += [message.value for message in await claimed(jobs)]
    assert sorted(values) == ["alarm", "early"]
    state = "dead" if expired == "dead" else "cancelled"
    assert await counts(batch) == {"running": 1, state: 1}


async def test_a_dropped_dead_letter_stays_dead_to_the_batch(jobs: Jobs) -> None:
    batch = await offered(jobs, 1)
    await dies(jobs)
    assert await jobs.dead.purge() == 1
    assert await counts(batch) == {"dead": 1}
    assert await ack_all(jobs) == ["alarm"]


@pytest.mark.parametrize("delay", [0, 3600])
@pytest.mark.parametrize("group", [None, "acme"])
async def test_a_purge_keeps_the_alarm_it_raises(jobs: Jobs, delay: int, group: str | None) -> None:
    batches = [
        await jobs.offer_batch(
            [Offer(number, delay=60, group=group) for number in range(150)],
            on_failure=Offer("alarm", delay=delay, group=group),
        )
        for _ in range(2)
    ]
    # It goes in pages of a hundred.
    assert await jobs.purge("all") == 300
    assert [await counts(batch) for batch in batches] == [{"cancelled": 150}] * 2
    assert await jobs.purge("ready" if delay else "delayed") == 0
    assert await jobs.purge("all") == 2


async def test_a_purge_reads_the_alarms_that_it_raises_by_the_page(jobs: Jobs, raw: Any) -> None:
    for _ in range(299):
        await jobs.offer_batch([Offer(0, priority=9)], on_failure=FAILURE)
    await raw.config_resetstat()
    assert await jobs.purge("all") == 299
    assert (await raw.info("commandstats"))["cmdstat_zrangebyscore"]["calls"] < 200
    assert (await jobs.stats()).ready == 299
    assert await jobs.purge("ready") == 299


async def test_a_purge_drops_claims_while_it_passes_alarms(jobs: Jobs, client: Client) -> None:
    for _ in range(150):
        await jobs.offer_batch([Offer(0, priority=9)], on_failure=Offer("alarm", priority=5))
    await jobs.offer("other")
    (store,) = await ReliableInspector.of(client, "jobs").all_stores()
    dropped, claims = 0, list[Any]()
    async for of_page in store.purge_all("all"):
        dropped += of_page
        if dropped == 150 and not claims:
            claims = [*await jobs.claim(100), *await jobs.claim(100)]
            assert len(claims) == 151
    assert dropped == 151
    assert (await jobs.stats()).leased == 150


async def test_a_loop_without_awaited_acks_ends_the_batch(jobs: Jobs) -> None:
    batch = await jobs.offer_batch([Offer(number) for number in range(500)], then=THEN)
    async for message in jobs:
        async with message:
            pass
        if message.value == "report":
            break
    assert await counts(batch) == {"handled": 500}


async def test_an_ack_does_not_read_the_bodies_of_members(
    jobs: Jobs, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rights are tried by commands of their own, every few seconds.
    monkeypatch.setattr(Rights, "form", lambda _rights, _wire, script, _key: script)

    async def reads_of_an_ack() -> int:
        (message,) = await claimed(jobs)
        await raw.config_resetstat()
        await message.ack()
        return int((await raw.info("commandstats"))["cmdstat_hmget"]["calls"])

    await jobs.offer_many([Offer("a").then(Offer("b", delay=3600))])
    without_batch = await reads_of_an_ack()
    await jobs.offer_batch([Offer("c")])
    assert await reads_of_an_ack() == without_batch


async def test_what_follows_has_options_and_followers_of_its_own(jobs: Jobs) -> None:
    then = Offer("report", id="r", delay=3600, priority=7, headers={"a": "b"}).then(Offer("mail"))
    await jobs.offer_batch([Offer("a")], then=then)
    assert await ack_all(jobs) == ["a"]
    assert await jobs.reschedule("r", 0)
    (report,) = await claimed(jobs)
    assert (report.value, report.priority, report.headers) == ("report", 7, {"a": "b"})
    await report.ack()
    assert await ack_all(jobs) == ["mail"]


async def test_what_follows_finds_its_batch_however_late_it_is(jobs: Jobs, client: Client) -> None:
    batch = await jobs.offer_batch([Offer(0)], then=Offer("report", delay=7200))
    assert await ack_all(jobs) == [0]
    await advance(client, 7200)
    # The next batch to end drops those that are remembered no longer.
    await jobs.offer_batch([])
    (report,) = await claimed(jobs)
    assert report.batch is not None
    assert (await report.batch.status()).is_finished
    await report.ack()
    await advance(client, 3500)
    assert await counts(batch) == {"handled": 1}
    await advance(client, 200)
    await jobs.offer_batch([])
    with pytest.raises(NoBatch):
        await batch.status()


async def test_a_batch_is_known_a_week_after_what_follows_died(jobs: Jobs, client: Client) -> None:
    batch = await jobs.offer_batch([Offer(0)], then=THEN)
    assert await ack_all(jobs) == [0]
    (report,) = await claimed(jobs)
    await report.bury("no paper")
    await advance(client, 6 * 86_400)
    assert await jobs.dead.redrive() == 1
    await advance(client, 2 * 86_400)
    await jobs.offer_batch([])
    assert await counts(batch) == {"handled": 1}
    assert await ack_all(jobs) == ["report"]


async def test_the_last_batch_is_forgotten_although_none_comes_after_it(
    jobs: Jobs, client: Client, raw: Any
) -> None:
    await offered(jobs, 2)
    await advance(client, 30 * 86_400)
    assert sorted(await ack_all(jobs)) == [0, 1]
    assert await ack_all(jobs) == ["report"]
    assert await raw.keys("*:batch*") != []
    await advance(client, 3601)
    assert await raw.keys("*:batch*") == []


@pytest.mark.parametrize("argument", ["then", "on_failure"])
async def test_a_batch_is_refused_if_the_id_of_what_follows_is_taken(
    client: Client, raw: Any, argument: Any
) -> None:
    jobs = client.reliable_queue("jobs", dedup_window=60)
    await jobs.offer("other", id="waits", delay=3600)
    await jobs.offer("other", id="handled")
    assert await ack_all(jobs) == ["other"]
    for taken in ("waits", "handled"):
        with pytest.raises(DuplicateMessage) as caught:
            await jobs.offer_batch(members(1), **{argument: Offer("report", id=taken)})  # type: ignore[arg-type]
        assert (caught.value.ids, caught.value.stored) == ((taken,), ())
        assert caught.value.batch_id is None
    assert await raw.keys("*:batch*") == []
    assert await jobs.get("m0") is None


async def test_what_follows_is_stored_although_another_message_has_got_its_id(jobs: Jobs) -> None:
    then = Offer("report", id="r")
    batch = await jobs.offer_batch(members(1), then=then)
    other = await jobs.offer_batch([Offer(1)], then=Offer("ignored", id="r", on_duplicate="ignore"))
    await jobs.offer("in its way", id="r", delay=3600)
    assert await ack_all(jobs) == [0, 1]
    (report,) = await claimed(jobs)
    assert (report.value, report.id) == ("report", f"{batch.id}-then")
    assert report.batch is not None
    assert report.batch.id == batch.id
    await report.ack()
    assert (await other.status()).is_finished
    assert await ack_all(jobs) == []


async def test_a_batch_that_was_not_offered_whole_ends_only_if_it_is_cancelled(jobs: Jobs) -> None:
    await jobs.offer("other", id="m1", delay=3600)
    with pytest.raises(DuplicateMessage) as caught:
        await offered(jobs, 2)
    assert await ack_all(jobs) == [0]
    assert caught.value.batch_id is not None
    batch = jobs.batch(caught.value.batch_id)
    status = await batch.status()
    assert (status.was_offered_whole, status.is_finished, status.handled) == (False, False, 1)
    assert await ack_all(jobs) == []
    # The other one may still be about to be stored, as far as the server knows.
    assert await batch.cancel() == 0
    assert await counts(batch) == {"handled": 1, "cancelled": 1}
    assert await jobs.get("m1") is not None


async def test_a_batch_that_is_cancelled_while_it_is_offered_does_not_count_as_handled(
    client: Client, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Sender.send_members

    async def send_late(sender: Sender, *arguments: Any) -> Any:
        (status,) = await ReliableInspector.of(client, "jobs").batches(10)
        await jobs.batch(status.id).cancel()
        return await send(sender, *arguments)

    monkeypatch.setattr(Sender, "send_members", send_late)
    batch = await offered(jobs, 2)
    assert sorted(map(str, await ack_all(jobs))) == ["0", "1", "alarm"]
    assert await counts(batch) == {"cancelled": 2}
    assert await ack_all(jobs) == []


async def test_a_batch_is_sealed_where_it_lies_after_a_move(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, jobs = Sender.send_members, client.reliable_queue("jobs", partitions=2)

    async def send_and_move(sender: Sender, *arguments: Any) -> Any:
        outcome = await send(sender, *arguments)
        assert sorted(await ack_all(jobs)) == [0, 1]
        await ReliableInspector.of(client, "jobs").repartition(5)
        return outcome

    monkeypatch.setattr(Sender, "send_members", send_and_move)
    batch = await jobs.offer_batch([Offer(0), Offer(1)], then=THEN)
    assert await counts(batch) == {"handled": 2}
    assert await ack_all(jobs) == ["report"]


async def test_a_batch_that_is_lost_is_an_error(jobs: Jobs, raw: Any) -> None:
    async def lose() -> None:
        await until(lambda: raw.exists("delayq:{jobs}:bodies"))
        await raw.delete("delayq:{jobs}:batches")

    offers = [Offer(number) for number in range(3000)]
    async with running(lose()):
        with pytest.raises(NoBatch):
            await jobs.offer_batch(offers, then=THEN)


async def test_a_batch_that_is_not_durable_is_whole_all_the_same(jobs: Jobs) -> None:
    with pytest.raises(delayq.NotDurable) as caught:
        await jobs.offer_batch(members(2), then=THEN, durability="replicas:1")
    assert set(caught.value.stored) == {"m0", "m1"}
    assert await ack_all(jobs) == [0, 1]
    assert await ack_all(jobs) == ["report"]


async def test_the_note_that_a_batch_is_whole_is_as_safe_as_its_messages(jobs: Jobs) -> None:
    with pytest.raises(delayq.NotDurable, match="0 of 1 replicas") as caught:
        await jobs.offer_batch([], then=THEN, durability="replicas:1")
    assert caught.value.batch_id is not None
    assert (await jobs.batch(caught.value.batch_id).status()).was_offered_whole
    assert await ack_all(jobs) == ["report"]


async def test_a_batch_is_not_begun_if_its_durability_is_unsupported(jobs: Jobs, raw: Any) -> None:
    with pytest.raises(delayq.ServerRefused):
        await jobs.offer_batch(members(1), durability="fsync")
    assert await raw.keys("*:batch*") == []


async def test_headers_of_observers_reach_what_follows(jobs: Jobs, client: Client) -> None:
    class Tracer(Observer):
        def sending(self, sending: OfferEvent) -> None:
            sending.headers["trace"] = "1"

    client.observe(Tracer())
    await jobs.offer_batch(
        [Offer(0), Offer(1, headers={"trace": "own"})],
        then=THEN,
        on_failure=Offer("alarm", headers={"a": "b"}),
    )
    first, second = await claimed(jobs)
    await first.bury("no money")
    (alarm,) = await claimed(jobs)
    await second.ack()
    await jobs.dead.redrive()
    assert await ack_all(jobs) == [0]
    (report,) = await claimed(jobs)
    headers = [message.headers for message in (first, second, alarm, report)]
    assert headers == [
        {"trace": "1"},
        {"trace": "own"},
        {"trace": "1", "a": "b"},
        {"trace": "1"},
    ]


async def test_a_client_that_has_not_heard_of_new_partitions_offers_a_whole_batch(
    client: Client, server: PrivateServer
) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    await jobs.offer("known")
    assert await ack_all(jobs) == ["known"]
    async with delayq.connect(server.url) as other:
        await ReliableInspector.of(other, "jobs").repartition(5)
    batch = await jobs.offer_batch([Offer(n, group="acme") for n in range(5)], then=THEN)
    values: list[Any] = []
    while "report" not in values:
        values += await ack_all(jobs)
    assert await counts(batch) == {"handled": 5}


async def test_an_empty_batch_leads_on_at_once(jobs: Jobs) -> None:
    batch = await jobs.offer_batch([], then=THEN, on_failure=FAILURE)
    assert (await batch.wait(1)).total == 0
    assert await ack_all(jobs) == ["report"]


async def test_wait_lasts_until_all_have_ended(jobs: Jobs, client: Client) -> None:
    batch = await offered(jobs, 2)
    with pytest.raises(BatchTimeout, match="was not finished within 0 s"):
        await batch.wait(0)
    with pytest.raises(BatchTimeout):
        await batch.wait(0.01)
    async with running(batch.wait(20)) as (waiting,):
        await asyncio.sleep(0)
        await dies(jobs)
        assert not waiting.done()
        assert await ack_all(jobs) == [1, "alarm"]
        status = await waiting
    assert (status.dead, status.handled) == (1, 1)


async def test_a_batch_is_unknown_if_there_is_none(jobs: Jobs) -> None:
    batch = jobs.batch("123")
    for call in (batch.status, batch.wait, batch.cancel):
        with pytest.raises(NoBatch, match="there is no batch '123'"):
            await call()


async def test_cancel_ends_what_has_not_ended(jobs: Jobs) -> None:
    batch = await jobs.offer_batch(
        [Offer(number, priority=number % 2) for number in range(1250)], on_failure=FAILURE
    )
    first, second = await jobs.claim(2)
    await first.ack()
    assert await batch.cancel() == 1248
    assert await counts(batch) == {"running": 1, "handled": 1, "cancelled": 1248}
    assert await batch.cancel(running=True) == 1
    with pytest.raises(delayq.MessageCancelled):
        await second.ack()
    assert (await batch.status()).is_finished
    assert await ack_all(jobs) == ["alarm"]


@pytest.mark.every_server
@pytest.mark.parametrize("expired", ["drop", "dead"])
@pytest.mark.parametrize("group", [None, "acme"])
async def test_messages_that_expire_end_without_a_worker(
    client: Client, expired: Any, group: str | None
) -> None:
    jobs = client.reliable_queue("jobs", expired=expired, lease=3600)
    offers = [Offer("brief", ttl=60, group=group) for _ in range(1100)]
    batch = await jobs.offer_batch(
        [*offers, Offer("lasting", group=group)], on_failure=Offer("alarm", group=group)
    )
    (running,) = await jobs.claim()
    await advance(client, 600)
    state = "dead" if expired == "dead" else "cancelled"
    assert await counts(batch) == {"running": 1, "waiting": 1, state: 1099}
    depth = await jobs.stats()
    assert (depth.ready, depth.leased, depth.dead) == (2, 1, 1099 if expired == "dead" else 0)
    await running.ack()
    assert await ack_all(jobs) == ["lasting", "alarm"]
    assert (await batch.wait(0)).is_finished


async def test_whoever_waits_for_or_cancels_a_batch_ends_messages_that_have_expired(
    jobs: Jobs, client: Client
) -> None:
    batch = await offered(jobs, 3, ttl=60)
    other = await jobs.offer_batch([Offer("b", ttl=60)], then=THEN)
    await advance(client, 120)
    assert (await batch.wait(20)).cancelled == 3
    assert await other.cancel() == 0
    assert await counts(other) == {"cancelled": 1}
    assert await ack_all(jobs) == ["alarm"]


async def test_a_message_that_expires_is_noticed_among_many(jobs: Jobs, client: Client) -> None:
    await jobs.offer_many([Offer(0, ttl=60) for _ in range(1500)])
    batch = await jobs.offer_batch([*members(1500), Offer("brief", ttl=60)])
    await advance(client, 120)

    async def is_noticed() -> bool:
        return (await batch.status()).cancelled == 1

    # Each look is at some of them.
    await until(is_noticed)


async def test_a_cancellation_reads_a_bounded_number_of_bytes(jobs: Jobs, faults: Faults) -> None:
    offers = [Offer("x" * (400_000 if number else 1), id=f"m{number}") for number in range(6)]
    batch = await jobs.offer_batch(offers)
    faults.calls.clear()
    assert await batch.cancel() == 6
    assert faults.calls.count(CANCEL_MEMBERS.name) == 2


async def test_results_are_those_of_the_messages_that_were_handled(client: Client) -> None:
    jobs = client.reliable_queue("jobs", keep=3600)
    batch = await jobs.offer_batch(members(4), then=THEN)
    for message in await claimed(jobs):
        if message.value == 3:
            await message.bury("no")
        else:
            await message.ack(message.value * 2 if message.value else None)
    assert await batch.results() == {"m0": None, "m1": 2, "m2": 4}


@pytest.mark.every_server
async def test_a_batch_lies_in_one_partition(client: Client) -> None:
    jobs = client.reliable_queue("jobs", partitions=4)
    choices: list[dict[str, Any]] = [{}, {"group": "acme"}]
    for options in choices:
        offers = [Offer(number, **options) for number in range(50)]
        batch = await jobs.offer_batch([*offers, Offer(50, id="mine", **options)], then=THEN)
        values: list[Any] = []
        while "report" not in values:
            values += await ack_all(jobs)
        assert sorted(values[:-1]) == [*range(51)]
        assert await counts(batch) == {"handled": 51}
    for name in ("group", "id"):
        offers = [Offer(number, **{name: f"g{number}"}) for number in range(20)]  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="must lie in one partition, and queue 'jobs' has 4"):
            await jobs.offer_batch(offers)


async def test_a_queue_with_an_unfinished_batch_is_not_moved(client: Client) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    batch = await offered(jobs, 2)
    with pytest.raises(ConfigurationError, match=r"batches that have not ended.*delayq batch jobs"):
        await ReliableInspector.of(client, "jobs").repartition(3)
    assert await jobs.offer("still here")
    assert sorted(map(str, await ack_all(jobs))) == ["0", "1", "still here"]
    while not await ack_all(jobs):
        pass
    await ReliableInspector.of(client, "jobs").repartition(3)
    assert await counts(batch) == {"handled": 2}


async def test_a_queue_is_not_moved_before_what_follows_has_ended(client: Client) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    batch = await jobs.offer_batch([], then=Offer("report", id="report", delay=3600))
    with pytest.raises(
        ConfigurationError, match=f"message 'report' of batch '{batch.id}', or that follows"
    ):
        await ReliableInspector.of(client, "jobs").repartition(3)
    assert await jobs.cancel("report")
    await ReliableInspector.of(client, "jobs").repartition(3)
    assert (await batch.status()).is_finished


async def test_expired_messages_do_not_keep_a_queue_from_being_moved(client: Client) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    batch = await jobs.offer_batch([Offer(0, ttl=60), Offer(1, ttl=60)])
    await advance(client, 120)
    await ReliableInspector.of(client, "jobs").repartition(3)
    assert await counts(batch) == {"cancelled": 2}


@pytest.mark.parametrize("group", [None, "acme"])
async def test_a_redrive_after_a_move_ends_the_batch(client: Client, group: str | None) -> None:
    jobs = client.reliable_queue("jobs", partitions=2, keep=3600)
    offers = [Offer(number, id=f"m{number}" if group else None, group=group) for number in (0, 1)]
    batch = await jobs.offer_batch(offers, then=Offer("report", group=group))
    (lost, handled) = await claimed(jobs)
    await handled.ack("well")
    await lost.bury("no money")
    # Without a group, what counts for a batch goes with it.
    await ReliableInspector.of(client, "jobs").repartition(1 if group else 5)
    assert await jobs.dead.redrive() == 1
    values: list[Any] = []
    while len(values) < 2:
        values += await ack_all(jobs)
    assert values == [0, "report"]
    assert await counts(batch) == {"handled": 2}
    assert await batch.results() == {lost.id: None, handled.id: "well"}


async def test_a_move_does_not_part_a_dead_letter_from_its_batch(client: Client) -> None:
    jobs = client.reliable_queue("jobs", partitions=2)
    batch = await jobs.offer_batch([Offer(0, id="m0", group="acme")], then=THEN)
    await dies(jobs)
    numbers = (
        number for number in range(3, 99) if home_of("acme", number) != home_of(batch.id, number)
    )
    to = next(numbers)
    with pytest.raises(ConfigurationError, match=f"'m0' of batch '{batch.id}'.*redrive or purge"):
        await ReliableInspector.of(client, "jobs").repartition(to)
    assert await jobs.dead.purge() == 1
    await ReliableInspector.of(client, "jobs").repartition(to)
    assert await counts(batch) == {"dead": 1}


async def test_results_are_found_after_a_move(client: Client) -> None:
    jobs = client.reliable_queue("jobs", partitions=2, keep=3600)
    batch = await jobs.offer_batch([Offer(number) for number in range(150)])
    async for message in jobs:
        await message.ack(message.value)
        if message.value == 149:
            break
    await ReliableInspector.of(client, "jobs").repartition(5)
    assert sorted((await batch.results()).values()) == [*range(150)]


async def test_a_list_of_batches_reads_nothing_that_follows(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs")
    batches = [
        await jobs.offer_batch([Offer(0)], then=Offer("x" * 200_000), on_failure=FAILURE)
        for _ in range(3)
    ]
    await raw.config_resetstat()
    statuses = await ReliableInspector.of(client, "jobs").batches(9)
    assert {status.id for status in statuses} == {batch.id for batch in batches}
    assert (await raw.info("stats"))["total_net_output_bytes"] < 100_000


async def test_a_move_looks_at_many_batches_in_few_calls(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs")
    await asyncio.gather(*(jobs.offer_batch([]) for _ in range(1500)))
    await raw.config_resetstat()
    await ReliableInspector.of(client, "jobs").repartition(2)
    stats = await raw.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] < 300


async def test_a_late_call_does_not_open_again_what_has_ended(jobs: Jobs, raw: Any) -> None:
    batch = await offered(jobs, 1)
    assert await ack_all(jobs) == [0]
    keys = [f"delayq:{{jobs}}:{key}" for key in JOIN_BATCH.keys]
    await raw.eval(JOIN_BATCH.text, len(keys), *keys, 1, batch.id, "", "", "m0", "ignored")
    assert await counts(batch) == {"handled": 1}
    assert await ack_all(jobs) == ["report"]


@pytest.mark.parametrize("fault", ["unsent", "lost"])
@pytest.mark.parametrize("script", [JOIN_BATCH, SEAL_BATCH, BATCH_STATUS, LIST_MEMBERS])
async def test_a_call_about_a_batch_is_repeated_if_its_reply_is_lost(
    client: Client, faults: Faults, script: Script, fault: str
) -> None:
    jobs = client.reliable_queue("jobs", keep=3600)
    then = Offer("report", id="report")
    # The server has to know the scripts, or a call whose reply is lost is not carried out.
    await (await jobs.offer_batch(members(1), then=then)).results()
    assert await ack_all(jobs) == [0]
    assert await ack_all(jobs) == ["report"]
    faults.calls.clear()
    faults.plan = lambda name, n: fault if name == script.name and n == 1 else None
    batch = await jobs.offer_batch(members(2), then=then)
    assert await ack_all(jobs) == [0, 1]
    assert await batch.results() == {"m0": None, "m1": None}
    assert await ack_all(jobs) == ["report"]
    assert await ack_all(jobs) == []


async def test_a_cancellation_whose_reply_is_lost_may_be_repeated(
    jobs: Jobs, client: Client, faults: Faults
) -> None:
    # As above.
    assert await (await offered(jobs, 1)).cancel() == 1
    assert await ack_all(jobs) == ["alarm"]
    batch = await jobs.offer_batch([Offer(0), Offer(1, ttl=60)], on_failure=FAILURE)
    await advance(client, 120)
    faults.calls.clear()
    faults.plan = lambda name, n: "lost" if name == CANCEL_MEMBERS.name and n < 3 else None
    # Whoever only asks does not mind.
    assert await counts(batch) == {"waiting": 1, "cancelled": 1}
    with pytest.raises(delayq.OutcomeUnknown):
        await batch.cancel()
    assert await batch.cancel() == 0
    assert await counts(batch) == {"cancelled": 2}
    assert await ack_all(jobs) == ["alarm"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"offers": ["a"]}, r"offer_batch takes delayq.Offer objects, not 'a'"),
        ({"offers": 1}, "must be a list of Offer, not 1"),
        ({"offers": [Offer(1, id="a"), Offer(2, id="a")]}, "have the same id"),
        ({"offers": [Offer(1, id="a")], "then": Offer(2, id="a")}, "follow from it, have the same"),
        ({"offers": [Offer(1, id="a", on_duplicate="replace")]}, "cannot have on_duplicate"),
        ({"offers": [], "then": "x"}, r"then must be a delayq.Offer, not 'x'"),
        (
            {"offers": [], "on_failure": Offer(1, id="a", unique_for=5)},
            "on_failure is stored once in any case: leave unique_for out",
        ),
        ({"offers": [Offer(0)] * 100_001}, "at most 100000 messages, not 100001"),
    ],
)
async def test_bad_batches_are_refused_before_anything_is_written(
    jobs: Jobs, raw: Any, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(BadInput, match=error):
        await jobs.offer_batch(**arguments)
    assert await raw.keys("*") == []


async def test_calls_of_tasks_make_a_batch(client: Client) -> None:
    tasks, totals = delayq.Tasks("sums", keep=3600), list[int]()

    @tasks.task
    async def double(number: int) -> int:
        return 2 * number

    @tasks.task
    async def add_up(message: delayq.Message[Any] = INJECTED) -> None:
        assert message.batch is not None
        totals.append(sum((await message.batch.results()).values()))

    tasks.bind(client)
    worker = delayq.Worker(client)
    worker.include(tasks)
    async with worker:
        batch = await tasks.offer_batch(
            [double.to_offer(number) for number in range(50)], then=add_up.to_offer()
        )
        await batch.wait(20)
        while not totals:
            await asyncio.sleep(0.01)
    assert totals == [2450]


async def test_synchronous_code_offers_a_batch(jobs: Jobs, server: PrivateServer) -> None:
    def offer() -> tuple[int, int, int]:
        with delayq.sync.connect(server.url) as client:
            batch = client.reliable_queue("jobs").offer_batch(members(3), then=THEN)
            same = client.reliable_queue("jobs").batch(batch.id)
            return same.status().waiting, same.cancel(), same.wait(5).cancelled

    assert await asyncio.to_thread(offer) == (3, 3, 3)
