"""Helpers for the benchmarks that move messages: pending messages, Redisson's steps beside ours,
and the server's own time.
"""

from __future__ import annotations

import random
import resource
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from redis import Redis

from delayq._embedded.server import EmbeddedServer
from delayq._redisson.records import pack
from delayq._redisson.store import TRANSFER

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from benchmarks._profile import Profile
    from delayq._redisson.keys import DelayedKeys

BATCH = 100
# Scripts never call these, so clients sent them all. Commands that scripts call are counted under
# other names.
SENT = (
    "evalsha",
    "eval",
    "ping",
    "blmove",
    "hello",
    "auth",
    "client|setname",
    "client|setinfo",
    "subscribe",
    "unsubscribe",
)

# For each due record: append its payload to the ready list, and search the ordered list for it from
# the head.
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
    parser.add_argument(
        "--server",
        metavar="URL",
        help=(
            "use this server, which must be dedicated to the benchmark, instead of a private Valkey"
        ),
    )


@contextmanager
def measured_server(url: str | None) -> Iterator[Any]:
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedServer(None)).url
        yield stack.enter_context(Redis.from_url(url, socket_timeout=600))


def address(server: Any, url: str | None) -> str:
    """Return the address at which samples find the server: the one that was asked for, or the
    private one.
    """
    return url or f"unix://{server.connection_pool.connection_kwargs['path']}"


class Counts(NamedTuple):
    """A server's work so far: script calls and the time they took, commands that clients sent, and
    its processor time.
    """

    scripts: float
    script_us: float
    sent: float
    cpu_us: float

    @classmethod
    def of(cls, server: Any) -> Counts:
        calls, cpu = server.info("commandstats"), server.info("cpu")
        scripts = [calls[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in calls]
        sent = sum(calls.get(f"cmdstat_{name}", {}).get("calls", 0) for name in SENT)
        cpu_us = (cpu["used_cpu_user"] + cpu["used_cpu_sys"]) * 1e6
        return cls(
            sum(calls_of_script["calls"] for calls_of_script in scripts),
            sum(calls_of_script["usec"] for calls_of_script in scripts),
            sent,
            cpu_us,
        )

    def spent_since(self, before: Counts) -> Counts:
        return Counts(*(now - earlier for now, earlier in zip(self, before, strict=True)))


def kernel_time() -> float:
    """Return how long this process has spent in system calls, seconds: its system time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


class Meter:
    """Measures elapsed time, and the processor time of this process and the server, from its
    creation until it is read.

    Attributes:
        profile: Profiles the same period if there is one. It slows the process down.
    """

    profile: ClassVar[Profile | None] = None

    def __init__(self, server: Any) -> None:
        self._server = server
        self._counts = Counts.of(server)
        if self.profile is not None:
            self.profile.begin(server)
        self._kernel = kernel_time()
        self._cpu, self._at = time.process_time(), time.perf_counter()

    def read(self, count: int) -> dict[str, float]:
        """Return how many per second, and the cost of each in microseconds and in script calls."""
        seconds, cpu = time.perf_counter() - self._at, time.process_time() - self._cpu
        kernel = kernel_time() - self._kernel
        if self.profile is not None:
            self.profile.end(self._server, count)
        spent = Counts.of(self._server).spent_since(self._counts)
        totals = {
            "client_us": cpu * 1e6,
            "kernel_us": kernel * 1e6,
            "script_us": spent.script_us,
            "server_us": spent.cpu_us,
            "scripts": spent.scripts,
        }
        return {"rate": count / seconds} | {name: figure / count for name, figure in totals.items()}


def images(server: Any) -> dict[bytes, bytes]:
    """Return everything that the server holds, for :func:`put_back`."""
    return {key: server.dump(key) for key in server.keys("*")}


def put_back(server: Any, stored: dict[bytes, bytes]) -> None:
    """Make the server hold exactly this."""
    server.execute_command("FLUSHALL", "SYNC")
    for key, image in stored.items():
        server.restore(key, 0, image)


def fill(
    server: Any,
    keys: DelayedKeys,
    pending: int,
    *,
    java_ids: bool,
    due: Callable[[int], int],
    payload: Callable[[int], bytes],
) -> None:
    """Store messages as if offered at random times, a millisecond apart on average, as web requests
    arrive.

    ``due`` and ``payload`` return the due time and the payload of a message, given its place.

    With ``java_ids`` their ids are random, like those that Redisson writes.
    """
    server.delete(keys.timeout, keys.ordered, keys.ready)
    chance = random.Random(1)
    offered = time.time() * 1_000_000 - 2000 * pending
    for first in range(0, pending, 1000):
        scored: list[Any] = []
        for place in range(first, min(first + 1000, pending)):
            offered += chance.expovariate(0.001)
            record_id = (
                chance.randbytes(8) if java_ids else (int(offered) * 4096).to_bytes(8, "big")
            )
            scored += (due(place), pack(record_id, payload(place), 8))
        server.execute_command("ZADD", keys.timeout, *scored)
        server.rpush(keys.ordered, *scored[1::2])


def timed(server: Any, text: str, keys: list[str], *args: Any) -> tuple[float, Any]:
    """Run a script that the server already knows.

    Return how many ms it blocked the server, and its reply.
    """
    sha = server.script_load(text)
    server.config_resetstat()
    answer = server.evalsha(sha, len(keys), *keys, *args)
    return server.info("commandstats")["cmdstat_evalsha"]["usec"] / 1000, answer


def redisson_transfer(server: Any, keys: DelayedKeys) -> tuple[float, bool]:
    """Move due messages by Redisson's steps. Return the ms, and whether there was more to move."""
    now = int(time.time() * 1000)
    milliseconds, head = timed(
        server, REDISSON, [keys.ready, keys.timeout, keys.ordered], now, BATCH
    )
    return milliseconds, head is not None and int(head) <= now


def delayq_transfer(server: Any, keys: DelayedKeys, *, listed: bool = True) -> tuple[float, bool]:
    """Move due messages by our script; unless ``listed``, the ordered list is empty.

    Return the same as above.
    """
    named = {name: getattr(keys, name) for name in TRANSFER.keys if name != "fence"}
    named["fence"] = keys.fence("benchmark")
    if not listed:
        named["ordered"] = keys.ordered + ":none"
    arguments = {
        "limit": BATCH,
        "take": 0,
        "most_bytes": 0,
        "lease_us": 1000,
        "each": 0,
        "call": "call",
        "signature": "",
    }
    milliseconds, answer = timed(
        server,
        TRANSFER.text,
        [named[n] for n in TRANSFER.keys],
        *(arguments[n] for n in TRANSFER.args),
    )
    return milliseconds, answer[1] == 0
