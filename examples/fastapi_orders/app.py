"""A shop that closes unpaid orders after 30 minutes.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    uvicorn app:app --app-dir examples/fastapi_orders
    python examples/fastapi_orders/close_orders.py          # in another terminal

    curl -X POST localhost:8000/orders -H 'content-type: application/json' -d '{"item": "book"}'
    curl -X POST localhost:8000/orders/ID/pay
    curl localhost:8000/orders/ID

``$ORDER_TIMEOUT_SECONDS`` replaces the default of 1800 seconds. Orders are kept in ``orders.db``,
or in the file ``$ORDERS_DB``.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orders
from fastapi import FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool
from orders import NewOrder, Order, State

import delayq

TIMEOUT = float(os.environ.get("ORDER_TIMEOUT_SECONDS", "1800"))


class Timeouts:
    """The queue "close-orders", and receipts for the messages that this process offered to it."""

    def __init__(self, client: delayq.Client) -> None:
        self._queue: delayq.DelayedQueue[str] = client.delayed_queue("close-orders")
        self._receipts: dict[str, delayq.Receipt[str]] = {}

    async def start(self, order_id: str) -> None:
        self._receipts[order_id] = await self._queue.offer(order_id, delay=TIMEOUT)
        # After that, there is nothing left to cancel.
        asyncio.get_running_loop().call_later(TIMEOUT, self._receipts.pop, order_id, None)

    async def cancel(self, order_id: str) -> None:
        # After a restart the receipt is gone. The message then arrives, finds the order paid, and
        # has no effect.
        if receipt := self._receipts.pop(order_id, None):
            await receipt.cancel()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with delayq.connect() as client:
        app.state.timeouts = Timeouts(client)
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def create_order(new: NewOrder) -> Order:
    order = orders.draft(new)
    # Start the timeout first: a timeout without an order does nothing, but an order without one
    # would stay unpaid for good.
    await app.state.timeouts.start(order.id)
    await run_in_threadpool(orders.save, order)
    return order


@app.get("/orders/{order_id}")
async def get_order(order_id: str) -> Order:
    order = await run_in_threadpool(orders.find, order_id)
    if order is None:
        raise HTTPException(404, "no such order")
    return order


@app.post("/orders/{order_id}/pay")
async def pay_order(order_id: str) -> Order:
    if not await run_in_threadpool(orders.settle, order_id, State.PAID):
        order = await get_order(order_id)
        raise HTTPException(409, f"the order is {order.state}")
    await app.state.timeouts.cancel(order_id)
    return await get_order(order_id)
