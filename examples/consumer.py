"""Print greetings when they are due, until Ctrl-C.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    python examples/consumer.py            # or --count 4, to end after four

Run ``examples/producer.py`` with the same ``$DELAYQ_URL``, before or after.
"""

import argparse
import asyncio
from datetime import UTC, datetime

import delayq


async def main(count: int | None) -> None:
    async with delayq.connect() as client:
        printed = 0
        async for greeting in client.delayed_queue("greetings"):
            late = datetime.now(UTC) - datetime.fromisoformat(greeting["due_at"])
            print(f"{greeting['text']}, {late.total_seconds() * 1000:.1f} ms late", flush=True)
            printed += 1
            if printed == count:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print greetings when they are due.")
    parser.add_argument("--count", type=int, help="end after this many greetings")
    asyncio.run(main(parser.parse_args().count))
