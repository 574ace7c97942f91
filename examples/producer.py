"""Offer a few greetings, each with its own delay.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    python examples/producer.py

Run ``examples/consumer.py`` with the same ``$DELAYQ_URL``, before or after.
"""

import asyncio
from datetime import UTC, datetime, timedelta

import delayq

GREETINGS = {"hello": 0.0, "hallo": 0.5, "bonjour": 1.0, "hola": 1.5}


async def main() -> None:
    async with delayq.connect() as client:
        queue = client.delayed_queue("greetings")
        for text, delay in GREETINGS.items():
            # Only for the consumer, which prints how late it was. The queue keeps its own due time.
            due_at = datetime.now(UTC) + timedelta(seconds=delay)
            receipt = await queue.offer({"text": text, "due_at": due_at.isoformat()}, delay=delay)
            print(f"{text} is due at {receipt.due_at:%H:%M:%S.%f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
