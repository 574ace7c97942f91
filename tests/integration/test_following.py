"""Following messages: what handlers report, and every state up to the last."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

import delayq
from delayq import BadInput, Offer
from delayq.errors import ResultTimeout
from delayq.integrations.starlette import follow_response
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from delayq import Client, MessageEvent
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer


@pytest.fixture
async def jobs(client: Client) -> Jobs:
    return client.reliable_queue("jobs", lease=60, keep=3600)


class Following:
    """Collects the events of a message in the background."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self.events: list[MessageEvent] = []
        self._jobs = jobs
        self._name = name
        self._came = asyncio.Event()

    async def run(self) -> None:
        async for event in self._jobs.follow(self._name, 20):
            self.events.append(event)
            self._came.set()

    async def until(self, **facts: Any) -> MessageEvent:
        """Wait for an event with these facts, and return it."""
        async with asyncio.timeout(20):
            while True:
                self._came.clear()
                for event in self.events:
                    if facts.items() <= vars(event).items():
                        return event
                await self._came.wait()


async def until_followed(jobs: Jobs, name: str) -> None:
    """Wait until the server knows that somebody follows a message."""
    (keys,) = await jobs.key_sets()
    server = jobs.session.server
    await until(lambda: server.command("ZSCORE", keys.awaited, name))


@pytest.mark.every_server
async def test_reports_and_the_end_come_at_once(jobs: Jobs) -> None:
    await jobs.offer("video", id="v", delay=3600)
    following = Following(jobs, "v")
    async with running(following.run()) as (follower,):
        await following.until(state="delayed", attempt=0, done=None)
        await jobs.reschedule("v", 0)
        (message,) = await jobs.claim(wait=10)
        await message.progress(3, total=10, text="rendering")
        event = await following.until(state="leased", attempt=1, done=3, total=10, text="rendering")
        assert not event.is_final
        await message.ack()
        await follower
    last = following.events[-1]
    assert (last.state, last.done, last.attempt, last.is_final) == ("done", 3, 1, True)
    assert [event.at for event in following.events] == sorted(e.at for e in following.events)


async def test_latecomers_get_the_last_report_or_the_end(jobs: Jobs) -> None:
    await jobs.offer("video", id="v")
    (message,) = await jobs.claim(wait=10)
    await message.progress(0.5)
    async for event in jobs.follow("v", 10):
        assert (event.state, event.done, event.total, event.text) == ("leased", 0.5, None, None)
        break
    await message.ack()
    assert [event.state async for event in jobs.follow("v", 10)] == ["done"]


async def test_ten_reports_a_second_and_the_last_one_reach_the_server(jobs: Jobs, raw: Any) -> None:
    await jobs.offer("video", id="v")
    (message,) = await jobs.claim(wait=10)
    await raw.config_resetstat()
    began = asyncio.get_running_loop().time()
    for number in range(500):
        await message.progress(number)
        await asyncio.sleep(0.001)
    await message.nack(delay=3600)
    took = asyncio.get_running_loop().time() - began
    calls = (await raw.info("commandstats"))["cmdstat_hset"]["calls"]
    # With those of the retry, and of what the client reports.
    assert calls <= 10 * took + 10
    events = jobs.follow("v", 10)
    assert (await anext(events)).done == 499


async def test_a_handler_cancelled_while_it_reports_has_acknowledged(jobs: Jobs, raw: Any) -> None:
    await jobs.offer("video", id="v")
    (message,) = await jobs.claim(wait=10)
    await message.progress(1)
    await message.progress(2)
    await raw.client_pause(300, all=False)
    acking = asyncio.create_task(message.ack())
    await asyncio.sleep(0.05)
    acking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acking
    assert [event.state async for event in jobs.follow("v", 10)][-1] == "done"


async def test_a_report_after_the_lease_is_refused(jobs: Jobs) -> None:
    await jobs.offer("video", id="v")
    (message,) = await jobs.claim(wait=10)
    assert await jobs.cancel("v", running=True)
    with pytest.raises(delayq.LeaseLost):
        await message.progress(1)


async def test_a_checkpoint_and_a_report_do_not_disturb_each_other(jobs: Jobs) -> None:
    await jobs.offer("video", id="v")
    (message,) = await jobs.claim(wait=10)
    await message.progress(1)
    await message.save({"row": 7})
    await asyncio.sleep(0.11)
    await message.progress(2)
    assert (await anext(jobs.follow("v", 10))).done == 2
    await message.bury("broken")
    assert await jobs.dead.redrive() == 1
    (again,) = await jobs.claim(wait=10)
    assert await again.load() == {"row": 7}


@pytest.mark.parametrize(
    ("keep", "end", "state"),
    [
        (3600, "ack", "done"),
        (3600, "bury", "dead"),
        (3600, "cancel", "dropped"),
        (None, "ack", "unknown"),
        (None, "bury", "dead"),
    ],
)
async def test_the_last_event_tells_how_it_ended_as_far_as_that_is_known(
    client: Client, keep: float | None, end: str, state: str
) -> None:
    jobs: Jobs = client.reliable_queue("jobs", keep=keep)
    await jobs.offer("video", id="v")
    following = Following(jobs, "v")
    async with running(following.run()) as (follower,):
        await following.until(state="ready")
        if end == "cancel":
            await jobs.cancel("v")
        else:
            (message,) = await jobs.claim(wait=10)
            await (message.ack() if end == "ack" else message.bury("no money"))
        await follower
    assert following.events[-1].state == state
    assert following.events[-1].error == ("no money" if end == "bury" else "")


async def test_the_end_is_that_of_the_message_which_was_followed(jobs: Jobs) -> None:
    await jobs.offer("first", id="v")
    events = jobs.follow("v", 10)
    assert (await anext(events)).state == "ready"
    (message,) = await jobs.claim(wait=10)
    await message.ack()
    await jobs.offer("second", id="v")
    assert [event.state async for event in events][-1] == "done"


async def test_a_message_that_nobody_knows_is_unknown(jobs: Jobs) -> None:
    assert [event.state async for event in jobs.follow("nobody")] == ["unknown"]


async def test_following_ends_after_its_timeout(jobs: Jobs) -> None:
    await jobs.offer("video", id="v", delay=3600)
    events = jobs.follow("v", 0.05)
    assert (await anext(events)).state == "delayed"
    with pytest.raises(ResultTimeout):
        await anext(events)


@pytest.mark.parametrize(
    "report", [{"done": -1}, {"done": "1"}, {"done": 1, "total": True}, {"done": 1, "text": 5}]
)
async def test_bad_reports_are_refused(jobs: Jobs, report: dict[str, Any]) -> None:
    await jobs.offer("video")
    (message,) = await jobs.claim(wait=10)
    with pytest.raises(BadInput):
        await message.progress(**report)


async def test_messages_of_all_partitions_are_followed(client: Client) -> None:
    jobs: Jobs = client.reliable_queue("jobs", partitions=4, keep=3600)
    ids = await jobs.offer_many([Offer(number, group=f"g{number}") for number in range(8)])
    messages = await jobs.claim(8, wait=10)
    while len(messages) < 8:
        messages += await jobs.claim(8, wait=10)
    for message in messages:
        await message.ack()
    for name in ids:
        assert [event.state async for event in jobs.follow(name, 10)] == ["done"]


async def test_code_that_is_not_async_follows(jobs: Jobs, server: PrivateServer) -> None:
    await jobs.offer("video", id="v")

    def follow() -> list[str]:
        with delayq.sync.connect(server.url) as client:
            return [event.state for event in client.reliable_queue("jobs").follow("v", 20)]

    async with running(asyncio.to_thread(follow)) as (following,):
        (message,) = await jobs.claim(wait=10)
        await message.ack()
        assert (await following)[-1] == "done"


async def test_a_browser_gets_server_sent_events(jobs: Jobs) -> None:
    await jobs.offer("video", id="v")
    (message,) = await jobs.claim(wait=10)
    await message.progress(3, total=10)

    async def progress(_: Request) -> Response:
        return follow_response(jobs, "v", 20)

    app = Starlette(routes=[Route("/progress", progress)])
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://shop") as browser,
        running(browser.get("/progress")) as (request,),
    ):
        await until_followed(jobs, "v")
        await message.ack()
        response = await request
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.split("\n\n")[:-1]]
    assert [kind for kind, _ in events] == ["event: message", "event: end"]
    first, last = (json.loads(data.removeprefix("data: ")) for _, data in events)
    assert (first["state"], first["done"], first["total"]) == ("leased", 3, 10)
    assert last["state"] == "done"
