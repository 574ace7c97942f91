"""The floor: a queue written by hand with redis-py.

No retries, no acknowledgements, no notifications.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from benchmarks._peers.adapter import Notes, Offers, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEYS = ["benchmark:due", "benchmark:messages"]
STORE = """
for at = 1, #ARGV, 3 do
  redis.call('ZADD', KEYS[1], ARGV[at], ARGV[at + 1])
  redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2])
end
"""
CLAIM = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
local messages = {}
if #ids > 0 then
  messages = redis.call('HMGET', KEYS[2], unpack(ids))
  redis.call('ZREM', KEYS[1], unpack(ids))
  redis.call('HDEL', KEYS[2], unpack(ids))
end
return {messages, redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2] or ''}
"""
# Messages that are offered in the meantime are noticed after this time, seconds.
LONGEST_SLEEP = 0.3


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    async with Redis.from_url(url) as server:
        store = server.register_script(STORE)

        async def offer_many(dues: list[float]) -> None:
            for at in range(0, len(dues), 100):
                arguments: list[Any] = []
                for due in dues[at : at + 100]:
                    arguments += (due, uuid.uuid4().bytes, json.dumps(payload(due)))
                await store(KEYS, arguments)

        async def offer_one(due: float) -> None:
            await offer_many([due])

        yield Offers(offer_one, offer_many)


def handle(url: str, best: bool, notes: Notes) -> None:
    notes.by_thread()
    limit = 100 if best else 1

    async def run() -> None:
        async with Redis.from_url(url) as server:
            claim = server.register_script(CLAIM)
            while True:
                messages, following = await claim(KEYS, [time.time(), limit])
                for message in messages:
                    notes.add(json.loads(message)["due"])
                wait = LONGEST_SLEEP if following == b"" else float(following) - time.time()
                if wait > 0:
                    await asyncio.sleep(min(wait, LONGEST_SLEEP))

    asyncio.run(run())


if __name__ == "__main__":
    main(offers, handle)
