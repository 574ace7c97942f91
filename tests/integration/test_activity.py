"""The history of a queue, by minutes and by hours, as its clients report it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Backoff
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import TALLY
from delayq.admin.acl import acl_rules
from delayq.stats import Activity
from tests.support.reliable import offers
from tests.support.reliable_fixtures import faults
from tests.support.waiting import until

if TYPE_CHECKING:
    from delayq import Client, ReliableQueue
    from tests.integration.test_faults import Faults
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.usefixtures("_last_reports_arrive")
__all__ = ["faults"]

KEYS = ReliableKeys.of("jobs")


async def whole(queue: ReliableQueue[Any]) -> Activity:
    """Return what happened in the last two hours, so that the hour may change meanwhile."""
    return Activity.total(await queue.activity(hours=2))


async def handle(queue: ReliableQueue[Any], count: int) -> None:
    """Handle messages, of which those with the value "bad" fail."""
    for message in await queue.claim(count):
        with suppress(ZeroDivisionError):
            async with message:
                if message.value == "bad":
                    raise ZeroDivisionError


@pytest.mark.every_server
async def test_the_history_of_a_queue_adds_up_the_work_of_all_clients(
    server: PrivateServer, client: Client
) -> None:
    async with delayq.connect(server.url) as producer:
        await producer.reliable_queue("jobs").offer_many(offers(5))
    async with delayq.connect(server.url) as consumer:
        theirs = consumer.reliable_queue("jobs", backoff=Backoff.fixed(0))
        await handle(theirs, 4)
        await theirs.offer("bad", id="failing")
        await handle(theirs, 2)
        (message,) = await theirs.claim()
        await message.bury("why")
    activity = await whole(client.reliable_queue("jobs"))
    assert (activity.offered, activity.handled, activity.failed, activity.dead) == (6, 5, 1, 1)
    assert activity.lateness.count == 7
    assert activity.handling.count == 6
    for spread in (activity.lateness, activity.handling):
        assert spread.p50 is not None
        assert spread.p99 is not None
        assert spread.p50 <= spread.p99


async def test_the_history_of_a_queue_has_every_minute_and_hour_oldest_first(
    client: Client,
) -> None:
    queue = client.reliable_queue("jobs")
    minutes, hours = await queue.activity(), await queue.activity(hours=720)
    assert (len(minutes), len(hours)) == (60, 720)
    for activities, seconds in ((minutes, 60), (hours, 3600)):
        starts = [each.start.timestamp() for each in activities]
        assert starts == [starts[0] + seconds * i for i in range(len(activities))]
    assert minutes[-1].start <= await client.server_time()


@pytest.mark.usefixtures("_full_batches")
async def test_partitions_count_together_while_the_client_goes_on(server: PrivateServer) -> None:
    async with delayq.connect(server.url, resync_interval=0.05) as client:
        queue = client.reliable_queue("jobs", partitions=4)
        await queue.offer_many(offers(20))
        for message in await queue.claim(20):
            await message.ack()

        async def are_there(offered: int) -> bool:
            activity = await whole(queue)
            return (activity.offered, activity.handled) == (offered, 20)

        await until(lambda: are_there(20))
        await queue.offer(3)
        await until(lambda: are_there(21))


@pytest.mark.every_server
async def test_a_minute_of_an_earlier_day_is_not_counted(
    server: PrivateServer, client: Client, raw: Any
) -> None:
    now = (await client.server_time()).timestamp()
    for minute in range(int(now) // 60, int(now) // 60 + 2):
        await raw.hset(KEYS.history, f"m{minute % 1440}", f"{minute - 2880} o=99")
    queue = client.reliable_queue("jobs")
    assert Activity.total(await queue.activity(minutes=1440)).offered == 0
    async with delayq.connect(server.url) as other:
        await other.reliable_queue("jobs").offer(1)
    assert Activity.total(await queue.activity(minutes=1440)).offered == 1


@pytest.mark.every_server
async def test_a_history_is_kept_for_thirty_days_and_costs_no_call_for_each_message(
    server: PrivateServer, raw: Any, faults: Faults
) -> None:
    async with delayq.connect(server.url) as client:
        await client.reliable_queue("jobs").stats()
    # A client that did nothing reports nothing.
    assert not await raw.exists(KEYS.history)
    async with delayq.connect(server.url, resync_interval=3600) as client:
        queue = client.reliable_queue("jobs")
        for number in range(50):
            await queue.offer(number)
            await handle(queue, 1)
    # One with the look that follows the subscription, and one at the end.
    assert 1 <= faults.calls.count(TALLY.name) <= 2
    assert 719 * 3600 < await raw.ttl(KEYS.history) <= 720 * 3600


@pytest.mark.parametrize("fault", ["unsent", "lost"])
async def test_a_report_counts_once_whatever_fails(
    server: PrivateServer, client: Client, faults: Faults, fault: str
) -> None:
    # What the server did not get is reported later. A report whose reply is lost is not repeated.
    times = 2 if fault == "unsent" else 1
    faults.fail(TALLY, fault, times=times)
    async with delayq.connect(server.url, resync_interval=0.05) as other:
        queue = other.reliable_queue("jobs")
        await queue.offer(1)
        await until(lambda: TALLY.name in faults.calls)
        await queue.offer(2)
        await handle(queue, 2)
        await until(lambda: faults.calls.count(TALLY.name) > times)
    activity = await whole(client.reliable_queue("jobs"))
    assert (activity.offered, activity.lateness.count, activity.handling.count) == (2, 2, 2)


@pytest.mark.every_server
async def test_a_user_without_the_right_works_on_and_is_told_once(
    server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [*acl_rules("consumer", reliable=["jobs"]), *acl_rules("producer", reliable=["jobs"])]
    allowed = [
        rule
        for rule in dict.fromkeys(rules)
        if not rule.startswith(("reset", "-@", "&")) and rule != f"~{KEYS.history}"
    ]
    await raw.execute_command("ACL", "SETUSER", "old", "on", ">secret", "allchannels", *allowed)
    address = server.url.replace("://", "://old:secret@")
    with caplog.at_level(logging.WARNING, "delayq"):
        async with delayq.connect(address, resync_interval=0.05) as client:
            queue = client.reliable_queue("jobs")
            await queue.offer(1)
            await until(lambda: "leave out what this process does" in caplog.text)
            await queue.offer(2)
            await handle(queue, 2)
            assert queue._open.stats().acked == 2
    assert caplog.text.count("leave out what this process does") == 1
