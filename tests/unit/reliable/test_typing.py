"""The types that a type checker sees: this file is checked, and run as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_type

import delayq
from delayq import DeadLetter, DeadLetters, Message, Offer, ReliableQueue

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer


@dataclass(frozen=True)
class Order:
    number: int


class OrderCodec:
    def encode(self, value: Order) -> bytes:
        return str(value.number).encode()

    def decode(self, data: bytes) -> Order:
        return Order(int(data))


async def test_the_type_of_a_value_reaches_every_corner(server: PrivateServer) -> None:
    async with delayq.connect(server.url) as client:
        queue = client.reliable_queue("orders", codec=OrderCodec(), max_attempts=1)
        assert_type(queue, ReliableQueue[Order])
        assert_type(client.reliable_queue("anything"), ReliableQueue[Any])

        assert_type(await queue.offer(Order(1), id="one"), str)
        offers = [Offer(value=Order(2)), Offer(value=Order(3), priority=1)]
        assert_type(offers, list[Offer[Order]])
        assert_type(await queue.offer_many(offers), list[str])

        assert_type(await queue.get("one"), Message[Order] | None)
        assert_type(await queue.peek(), list[Message[Order]])
        assert_type(await queue.list("ready"), list[Message[Order]])
        messages = await queue.claim(2)
        assert_type(messages, list[Message[Order]])
        assert_type(messages[0].value, Order)
        assert [message.value.number for message in messages] == [3, 1]
        async with messages[0] as message:
            assert_type(message, Message[Order])
        await messages[1].bury("no good")
        async for message in queue:
            assert_type(message, Message[Order])
            assert_type(message.headers, dict[str, str])
            async with message:
                break

        assert_type(queue.dead, DeadLetters[Order])
        letters = await queue.dead.list()
        assert_type(letters, list[DeadLetter[Order]])
        assert_type(letters[0].value, Order)
        assert letters[0].value == Order(1)
        assert_type(await queue.dead.redrive(), int)
        assert_type(await queue.cancel("one"), bool)
        assert_type(await queue.reschedule("one", 1), bool)
        assert_type(await queue.stats(), delayq.QueueDepth)
