"""What the benchmarks of moving messages share: pending messages, Redisson's steps beside ours, and the server's own time."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from redis import Redis

from delayq._redis.records import pack
from delayq._redis.scripts import TRANSFER
from delayq.embedded import EmbeddedServer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from delayq._redis.keys import DelayedKeys

BATCH = 100

# For each record due: append its payload to the ready list, and search the ordered list for it from the head.
REDISSON = """
local due = redis.call('ZRANGEBYSCORE', KEYS[2], 0, ARGV[1], 'LIMIT', 0, ARGV[2])
for _, record in ipairs(due) do
  local _, payload = struct.unpack('Bc0Lc0', record)
  redis.call('RPUSH', KEYS[1], payload)
  redis.call('LREM', KEYS[3], 1, record)
end
if #due > 0 then redis.call('ZREM', KEYS[2], unpack(due)) end
return redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
"""


def add_server_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help="one that is there for this alone, instead of a private Valkey")


@contextmanager
def measured_server(url: str | None) -> Iterator[Any]:
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedServer(None)).url
        yield stack.enter_context(Redis.from_url(url, socket_timeout=600))


def fill(
    server: Any, keys: DelayedKeys, pending: int, *, java_ids: bool, due: Callable[[int], int], payload: Callable[[int], bytes]
) -> None:
    """Store messages that were offered at random, a millisecond apart in the mean, as web requests come.

    ``due`` and ``payload`` tell of each by its place.

    With ``java_ids`` their ids are random, as Redisson writes them.
    """
    server.delete(keys.timeout, keys.ordered, keys.ready)
    chance = random.Random(1)
    offered = time.time() * 1_000_000 - 2000 * pending
    for first in range(0, pending, 1000):
        scored: list[Any] = []
        for place in range(first, min(first + 1000, pending)):
            offered += chance.expovariate(0.001)
            record_id = chance.randbytes(8) if java_ids else (int(offered) * 4096).to_bytes(8, "big")
            scored += (due(place), pack(record_id, payload(place), 8))
        server.execute_command("ZADD", keys.timeout, *scored)
        server.rpush(keys.ordered, *scored[1::2])


def timed(server: Any, text: str, keys: list[str], *args: Any) -> tuple[float, Any]:
    """Run a script that the server knows already. Return for how many ms it blocked the server, and its answer."""
    sha = server.script_load(text)
    server.config_resetstat()
    answer = server.evalsha(sha, len(keys), *keys, *args)
    return server.info("commandstats")["cmdstat_evalsha"]["usec"] / 1000, answer


def redisson_transfer(server: Any, keys: DelayedKeys) -> tuple[float, bool]:
    """Move what is due by Redisson's steps. Return the ms, and whether there was more to move."""
    now = int(time.time() * 1000)
    milliseconds, head = timed(server, REDISSON, [keys.ready, keys.timeout, keys.ordered], now, BATCH)
    return milliseconds, head is not None and int(head) <= now


def delayq_transfer(server: Any, keys: DelayedKeys, *, listed: bool = True) -> tuple[float, bool]:
    """Move what is due by ours; without ``listed`` there is nothing in the ordered list. Return as above."""
    named = {name: getattr(keys, name) for name in TRANSFER.keys if name != "taken"}
    named["taken"] = keys.taken("benchmark")
    if not listed:
        named["ordered"] = keys.ordered + ":none"
    given = {"limit": BATCH, "take": 0, "keep_ms": 1000, "lease_us": 0, "call": "call"}
    milliseconds, answer = timed(server, TRANSFER.text, [named[n] for n in TRANSFER.keys], *(given[n] for n in TRANSFER.args))
    return milliseconds, answer[1] == 0
