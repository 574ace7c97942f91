"""Close orders that were not paid in time.

This belongs to ``app.py``, whose docstring shows how to run it.
"""

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
