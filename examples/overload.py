"""Three more things that go wrong in production, to find with `delayq doctor` or the dashboard.

    export DELAYQ_URL=embedded:./example-data
    python examples/overload.py            # goes on until Ctrl-C

The way through it is in docs/operations.md. After a minute:

- `syncs` has a tenant that waits at its limit
- `payments` fails in most attempts, and nothing is dead yet
- `thumbs` has a handler that blocks the event loop of its worker
"""

import asyncio
import logging
import sys
import time

import delayq

worker = delayq.Worker(shutdown_timeout=1)  # on $DELAYQ_URL
blocked = delayq.Worker(concurrency=3, shutdown_timeout=1)


@worker.listener("syncs", group_limit=delayq.Limit(concurrency=2))
async def sync(tenant: str) -> None:
    await asyncio.sleep(600 if tenant == "acme" else 0.01)


@worker.listener("payments", max_attempts=50, backoff=delayq.Backoff.fixed(5))
async def pay(invoice: int) -> None:
    raise ConnectionError(f"bank.example.org does not answer for invoice {invoice}")


@blocked.listener("thumbs")
async def shrink(picture: str) -> None:
    # As a library does that knows nothing of asyncio.
    time.sleep(1.2)  # noqa: ASYNC251
    print(picture, "is small", flush=True)


async def main() -> None:
    # The log would tell what is wrong. Here, delayq's tools shall.
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    if sys.argv[1:] == ["thumbs"]:
        async with blocked:
            # The other process has ended when it no longer holds this open.
            await asyncio.to_thread(sys.stdin.read)
        return
    # Its blocked event loop must not hold up the others.
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "thumbs", stdin=asyncio.subprocess.PIPE
    )
    try:
        async with worker:
            client = worker.client
            syncs = [delayq.Offer("acme", group="acme") for _ in range(300)]
            await client.reliable_queue("syncs").offer_many(syncs)
            invoices = [delayq.Offer(number) for number in range(40)]
            await client.reliable_queue("payments").offer_many(invoices)
            pictures = [delayq.Offer(f"picture-{number}.jpg") for number in range(1000)]
            await client.reliable_queue("thumbs").offer_many(pictures)
            print("everything goes wrong now; press Ctrl-C to end it", flush=True)
            await asyncio.Event().wait()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("ended")
