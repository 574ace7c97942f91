"""``async with message`` and ``async with delivery``: the block's own error propagates."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from tests.support.reliable_fixtures import LEASE
from tests.support.waiting import be_impatient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, Delivery, Message
    from tests.support.servers import PrivateServer

Held = Any
"""A message or a delivery: both settle themselves in the same way."""


@pytest.fixture
async def client(own_server: PrivateServer) -> AsyncIterator[Client]:
    async with delayq.connect(own_server.url) as client:
        yield client


async def of_a_reliable_queue(client: Client) -> Message[Any]:
    queue = client.reliable_queue("jobs", lease=LEASE)
    await queue.offer(1)
    (message,) = await queue.claim()
    return message


async def of_a_delayed_queue(client: Client) -> Delivery[Any]:
    queue = client.delayed_queue("orders")
    await queue.offer(1, delay=0)
    async for delivery in queue.deliveries(lease=LEASE):
        return delivery
    raise AssertionError


# When the server is gone, the outcome depends on which side notices first.
LOST = "could not be given back: LeaseLost"
AWAY = "could not be given back: ServerUnavailable|may not have been given back: OutcomeUnknown"


@pytest.fixture(params=[of_a_reliable_queue, of_a_delayed_queue])
async def held(
    request: pytest.FixtureRequest, client: Client, monkeypatch: pytest.MonkeyPatch
) -> Held:
    held = await request.param(client)
    be_impatient(monkeypatch, 0.2)
    return held


@pytest.mark.parametrize(("gone", "said"), [("lease", LOST), ("server", AWAY)])
async def test_an_error_goes_on_though_the_lease_or_the_server_is_gone(
    held: Held, own_server: PrivateServer, gone: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with held:
            own_server.flush() if gone == "lease" else own_server.kill()
            raise ZeroDivisionError
    assert re.search(said, caplog.text)


@pytest.mark.parametrize("settling", [False, True], ids=["in the block", "while it settles"])
async def test_a_cancellation_goes_on_without_a_server(
    held: Held, own_server: PrivateServer, settling: bool
) -> None:
    inside, go_on, leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle() -> None:
        async with held:
            inside.set()
            await go_on.wait()
            leaving.set()
            raise ZeroDivisionError

    task = asyncio.create_task(handle())
    await inside.wait()
    if settling:
        own_server.pause()
        go_on.set()
        await leaving.wait()
        # Without the server, it can only wait for it by now.
        assert not task.done()
    else:
        own_server.kill()
    task.cancel()
    await asyncio.sleep(0)
    if settling:
        own_server.resume()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_lost_lease_is_raised_where_it_hides_no_other_error(
    held: Held, client: Client, own_server: PrivateServer
) -> None:
    with pytest.raises(delayq.LeaseLost):
        async with held:
            own_server.flush()
    # A message that cannot be retried as it was told would end as if all were well.
    message = await of_a_reliable_queue(client)
    with pytest.raises(delayq.LeaseLost):  # noqa: PT012
        async with message:
            own_server.flush()
            raise delayq.RetryAfter(5)
