"""Close orders half a second after they were placed, in a worker.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    python examples/worker.py              # offers three orders, handles them, and ends

    cd examples && delayq worker worker:worker --processes 2     # runs forever, in two processes

The warehouse does not always answer; orders that it does not answer are retried a moment later.
"""

import asyncio
import random
from dataclasses import dataclass

import delayq


@dataclass
class Order:
    id: int
    item: str


worker = delayq.Worker()  # on $DELAYQ_URL
closed = asyncio.Semaphore(0)


class Warehouse:
    """A dependency of the handlers. In a real application, a database."""

    async def put_back(self, item: str) -> None:
        if random.random() < 0.3:
            raise ConnectionError("the warehouse does not answer")
        print(f"{item} is back on its shelf", flush=True)


@worker.dependency(once=True)
async def warehouse() -> Warehouse:
    return Warehouse()


@worker.listener(
    "close-orders", concurrency=10, timeout=5, on_error={ConnectionError: delayq.Backoff.fixed(0.1)}
)
async def close_order(order: Order, warehouse: Warehouse, message: delayq.Message[Order]) -> None:
    await warehouse.put_back(order.item)
    print(f"order {order.id} is closed, in attempt {message.attempt}", flush=True)
    closed.release()


async def main() -> None:
    async with worker:
        orders = worker.client.reliable_queue("close-orders")
        for number, item in enumerate(["book", "pen", "lamp"], start=1):
            await orders.offer(Order(number, item), delay=0.5)
        for _ in range(3):
            await closed.acquire()


if __name__ == "__main__":
    asyncio.run(main())
