"""Two workers, one account: a worker that finds it locked puts the message back for a moment
instead of waiting.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    python examples/lock_conflict.py

A worker that waits for a lock can do nothing else in the meantime, and enough waiting workers bring
all work to a halt. Here the message returns to the queue with a short delay, and the worker
continues with the next one.
"""

import asyncio
import os
from typing import Any

from redis.asyncio import Redis

import delayq

RETRY_AFTER = 0.2
TRANSFERS = [("alice", 10), ("alice", 20), ("bob", 30), ("alice", 40)]


async def work(
    name: str, redis: Redis, queue: delayq.DelayedQueue[Any], booked: asyncio.Queue[int]
) -> None:
    async for transfer in queue:
        # SET key token NX PX. The lock expires by itself if this process dies, and only the token's
        # owner releases it.
        lock = redis.lock(f"lock:{transfer['account']}", timeout=10, blocking=False)
        if not await lock.acquire():
            print(
                f"{name}: {transfer['account']} is locked, the transfer of {transfer['amount']}"
                " will be retried",
                flush=True,
            )
            await queue.offer(transfer, delay=RETRY_AFTER)
            continue
        try:
            await asyncio.sleep(0.3)  # the work
            print(f"{name}: booked {transfer['amount']} for {transfer['account']}", flush=True)
            booked.put_nowait(transfer["amount"])
        finally:
            await lock.release()


async def main() -> None:
    # delayq takes the address from the client; the lock uses the client itself.
    redis = Redis.from_url(os.environ["DELAYQ_URL"])
    async with redis, delayq.connect(redis) as client:
        queue = client.delayed_queue("transfers")
        booked: asyncio.Queue[int] = asyncio.Queue()
        workers = [
            asyncio.create_task(work(name, redis, queue, booked))
            for name in ("worker 1", "worker 2")
        ]
        await queue.offer_many(
            [({"account": account, "amount": amount}, 0) for account, amount in TRANSFERS]
        )
        total = sum([await booked.get() for _ in TRANSFERS])
        print(f"booked {total} in all", flush=True)
        await queue.aclose()  # ends the loops
        await asyncio.gather(*workers)


if __name__ == "__main__":
    asyncio.run(main())
