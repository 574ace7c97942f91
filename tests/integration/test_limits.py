"""A value that is too large, or not a number, is refused before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq.codecs import BytesCodec

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayq import Client

LONG = "x" * 513


async def test_nothing_is_written_of_what_is_too_much(client: Client, raw: Any) -> None:
    jobs = client.reliable_queue("jobs", codec=BytesCodec(), max_payload=100)
    orders = client.delayed_queue("orders", codec=BytesCodec(), max_payload=100)
    calls: list[Callable[[], Any]] = [
        lambda: orders.offer_many([(b"", 1), (bytes(101), 1)]),
        lambda: jobs.offer_many([delayq.Offer(b""), delayq.Offer(bytes(101))]),
        lambda: jobs.offer(b"", headers={"a": "é" * 8_192}),
        lambda: jobs.offer(b"", ttl=2.0**53),
        lambda: jobs.schedule(LONG, every=1, value=b""),
        lambda: jobs.schedule("a", cron="* * * * " + "1," * 300 + "1", value=b""),
        lambda: jobs.schedule("a", every=1, value=bytes(101)),
        lambda: jobs.schedule("a", every=1, value=b"", version=2**53 + 1),
        lambda: jobs.get(LONG),
        lambda: orders.pending.poll_last_and_offer_first_to(LONG),
    ]
    for call in calls:
        with pytest.raises(delayq.BadInput):
            await call()
    assert not await raw.keys("*")
    with pytest.raises(delayq.BadName):
        client.delayed_queue(LONG)
    queue: Any = orders
    for count in (2.5, "3", True, -1):
        with pytest.raises(delayq.BadInput, match="max_items"):
            await queue.drain(count)
        with pytest.raises(delayq.BadInput, match="n must be an int"):
            await queue.pending.poll_many(count)
    size: Any
    for size in (-1, True, 1.5, "1", 2**29):
        with pytest.raises(delayq.BadInput, match="max_payload"):
            client.delayed_queue("orders", max_payload=size)
    with pytest.raises(delayq.BadName):
        delayq.Worker(client).listener(LONG)(lambda value: None)
