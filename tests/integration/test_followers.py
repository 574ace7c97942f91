"""Messages that follow from others: stored by the acknowledgement, once, or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Offer
from delayq._reliable.ids import home_of, partition_of
from tests.support.tasks import running

if TYPE_CHECKING:
    from delayq import Client, Message
    from tests.support.reliable import Jobs


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", lease=60)


async def only(jobs: Jobs) -> Message[Any]:
    (message,) = await jobs.claim(10, wait=10)
    return message


async def fail_after_then(jobs: Jobs) -> None:
    async with await only(jobs) as message:
        message.then(Offer("next"))
        raise LookupError


@pytest.mark.every_server
async def test_a_chain_leads_from_step_to_step(jobs: Jobs) -> None:
    chain = Offer("pay", group="acme", priority=3, headers={"trace": "1"})
    chain = chain.then(Offer("pack")).then(Offer("ship", priority=5, headers={"trace": "2"}))
    (first,) = await jobs.offer_many([chain])
    seen = []
    for _ in range(3):
        async with await only(jobs) as message:
            seen.append((message.value, message.group, message.priority, message.headers))
        assert (await jobs.stats()).leased == 0
    assert seen == [
        ("pay", "acme", 3, {"trace": "1"}),
        ("pack", "acme", 3, {"trace": "1"}),
        ("ship", "acme", 5, {"trace": "2"}),
    ]
    assert (await jobs.stats()).ready == 0
    assert len(first) == 12


@pytest.mark.every_server
async def test_what_a_handler_adds_is_stored_when_its_block_ends(jobs: Jobs) -> None:
    await jobs.offer("order", id="o")
    async with await only(jobs) as message:
        message.then(Offer("later", delay=3600, id="later"))
        message.then(Offer("now"))
        assert await jobs.get("later") is None
    later = await jobs.get("later")
    assert later is not None
    assert later.state == "delayed"
    assert (await only(jobs)).value == "now"


async def test_nothing_is_stored_if_the_handler_fails_or_the_message_dies(jobs: Jobs) -> None:
    await jobs.offer("order", max_attempts=2)
    for _ in range(2):
        with pytest.raises(LookupError):
            await fail_after_then(jobs)
        for waiting in await jobs.list("delayed"):
            await jobs.reschedule(waiting.id, 0)
    assert (await jobs.stats()).dead == 1
    assert await jobs.list("ready") == []


async def test_an_ack_takes_followers_and_a_result(client: Client) -> None:
    jobs = client.reliable_queue("jobs", keep=3600)
    await jobs.offer("a", id="a")
    message: Message[Any] = await only(jobs)
    await message.ack(42, then=[Offer("b", id="b"), Offer("c", id="c")])
    assert await jobs.result("a", 0) == 42
    assert {m.id for m in await jobs.claim(10)} == {"b", "c"}


async def test_concurrent_acks_share_a_call_with_and_without_followers(jobs: Jobs) -> None:
    await jobs.offer_many([Offer(n, id=f"{n}") for n in range(50)])
    messages = await jobs.claim(50)
    await asyncio.gather(*(m.ack(then=[Offer(-m.value)] if m.value % 2 else ()) for m in messages))
    assert {m.value for m in await jobs.claim(50)} == {-n for n in range(1, 50, 2)}


async def test_acks_of_messages_with_headers_hide_no_follower(jobs: Jobs) -> None:
    for n in range(3):
        await jobs.offer_many([Offer(name, headers={"from": "f"}) for name in "abcd"])
        first, leading, with_headers, last = await jobs.claim(4)
        assert with_headers.headers == {"from": "f"}
        # The first one leaves alone, and the next two share a call.
        await asyncio.gather(first.ack(), leading.ack(then=[Offer(f"x{n}")]), with_headers.ack())
        await last.ack(then=[Offer(f"y{n}")])
        assert {m.value for m in await jobs.list("ready")} == {f"x{n}", f"y{n}"}
        for message in await jobs.claim(2):
            await message.ack()


async def test_followers_lie_in_the_partition_of_their_predecessor(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=5)
    await jobs.offer_many([Offer(n).then(Offer(n + 100)) for n in range(20)])
    for expected in (range(20), range(100, 120)):
        seen: list[int] = []
        while len(seen) < 20:
            for message in await jobs.claim(20, wait=10):
                seen.append(message.value)
                assert (await jobs.get(message.id)) is not None
                await message.ack()
        assert sorted(seen) == [*expected]
    await jobs.offer_many([Offer("a").then(Offer("b", group="acme")).then(Offer("c"))])
    message = await only(jobs)
    elsewhere = next(n for n in range(100) if partition_of(f"d{n}", 5) != home_of("acme", 5))
    with pytest.raises(delayq.BadInput, match="must lie in its partition"):
        message.then(Offer("d", id=f"d{elsewhere}"))
    await message.ack()
    assert (await only(jobs)).group == "acme"


@pytest.mark.parametrize(
    ("offer", "error", "match"),
    [
        (Offer(0, delay=-1), delayq.BadDelay, "delay"),
        ("not an offer", delayq.BadInput, "takes a delayq.Offer"),
        (Offer("x" * 2_000_000), delayq.PayloadTooLarge, "2000002"),
        (Offer(object()), delayq.EncodeError, "object"),
    ],
)
async def test_a_bad_follower_is_refused_before_anything_is_written(
    jobs: Jobs, offer: Any, error: type[Exception], match: str
) -> None:
    await jobs.offer("a", id="a")
    message = await only(jobs)
    with pytest.raises(error, match=match):
        message.then(offer)
    with pytest.raises(error, match=match):
        await message.ack(then=[Offer("fine"), offer])
    assert (await jobs.stats()).leased == 1


async def test_a_message_has_at_most_a_hundred_followers(jobs: Jobs) -> None:
    await jobs.offer("a")
    message = await only(jobs)
    for n in range(100):
        message.then(Offer(n))
    with pytest.raises(delayq.BadInput, match="at most 100"):
        message.then(Offer(100))
    chain = Offer(0)
    for n in range(100):
        chain = chain.then(Offer(n))
    with pytest.raises(delayq.BadInput, match="at most 100"):
        chain.then(Offer(100))


async def test_tasks_lead_to_tasks(client: Client) -> None:
    tasks, done = delayq.Tasks("orders"), asyncio.Queue[str]()

    @tasks.task
    async def mail(order: int) -> None:
        done.put_nowait(f"mailed {order}")

    @tasks.task
    async def ship(message: delayq.Message[Any], order: int) -> None:
        done.put_nowait(f"shipped {order}")
        message.then(mail.to_offer(order))

    @tasks.task
    async def charge(order: int) -> None:
        done.put_nowait(f"charged {order}")

    worker = delayq.Worker(client)
    worker.include(tasks)
    tasks.bind(client)
    # The worker fills the message, which type checkers cannot know.
    shipping = ship.to_offer(order=1)  # type: ignore[call-arg]
    await tasks.offer_many([charge.to_offer(1).then(shipping)])
    async with running(worker.run()):
        steps = [await asyncio.wait_for(done.get(), 20) for _ in range(3)]
    tasks.unbind(client)
    assert steps == ["charged 1", "shipped 1", "mailed 1"]


async def test_each_message_of_a_batch_leads_to_its_own(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs")
    worker, seen = delayq.Worker(client), asyncio.Queue[list[Any]]()

    @worker.listener("jobs", batch=10)
    async def handle(messages: list[delayq.Message[int]]) -> None:
        for message in messages:
            if message.value < 10:
                message.then(Offer(message.value + 10))
        seen.put_nowait([message.value for message in messages])

    await jobs.offer_many([Offer(n) for n in range(5)])
    async with running(worker.run()):
        values: set[int] = set()
        while len(values) < 10:
            values |= {*await asyncio.wait_for(seen.get(), 20)}
    assert values == {*range(5), *range(10, 15)}
