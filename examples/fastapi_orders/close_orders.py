"""Close the orders that nobody has paid in time. Belongs to ``app.py``, which tells how to run it."""

import asyncio

import orders

import delayq


async def main() -> None:
    async with delayq.connect() as client:
        print("waiting for orders to close", flush=True)
        async for order_id in client.delayed_queue("close-orders"):
            closed = await asyncio.to_thread(orders.settle, order_id, orders.State.CLOSED)
            print(f"order {order_id}: {'closed' if closed else 'nothing to do'}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
