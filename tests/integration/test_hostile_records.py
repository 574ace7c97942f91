"""Whatever the keys hold, each well-formed message comes once, and the rest is quarantined."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack, payload_of
from delayq.codecs import BytesCodec
from tests.support.depth import nightly
from tests.support.tasks import running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.every_server

KEYS = DelayedKeys.of("orders")


def hostile(chance: random.Random, number: int) -> bytes:
    """Make a record that another program may have left: of any form, cut, longer, or noise."""
    payload, record_id = b"%d" % number, chance.randbytes(8)
    old = [record_id + len(payload).to_bytes(size, "little") + payload for size in (8, 4)]
    record = chance.choice([pack(record_id, payload, 8), pack(record_id, payload, 4), *old])
    noise = chance.randbytes(chance.randrange(40))
    cut, lengthened = record[: chance.randrange(len(record))], record + chance.randbytes(3)
    endless = b"\x08" + record_id + b"\xff" * 8 + payload
    return chance.choice([record, record, cut, lengthened, noise, endless, b""])


@pytest.mark.parametrize("seed", [0, *map(nightly, range(1, 5))])
async def test_hostile_records_do_no_harm(server: PrivateServer, raw: Any, seed: int) -> None:
    chance = random.Random(seed)
    records = list(dict.fromkeys(hostile(chance, number) for number in range(400)))
    scores = [-math.inf, -1e300, -5.0, 0.0, 0.5, 1.0, 1e3, 1e12, 1.7e12]
    good = Counter(payload for record in records if (payload := payload_of(record)) is not None)
    got: Counter[bytes] = Counter()
    async with delayq.connect(server.url, resync_interval=0.1) as client:
        await raw.zadd(KEYS.timeout, {record: chance.choice(scores) for record in records})
        # The list has some of the records, in another order, some twice, and one that the sorted
        # set does not have.
        listed = [chance.choice(records) for _ in range(300)] + [b"stray"]
        await raw.rpush(KEYS.ordered, *listed)
        never = pack(b"ABCDEFGH", b"never", 8)
        await raw.zadd(KEYS.timeout, {never: math.inf})
        queue = client.delayed_queue("orders", codec=BytesCodec())

        async def consume() -> None:
            async for payload in queue:
                got[payload] += 1

        async with running(consume()):
            await until(lambda: got.total() >= good.total())
            await until(lambda: raw.zcard(KEYS.timeout), equals=1)
            assert got == good
            bad = [record for record in records if payload_of(record) is None]
            assert Counter(await raw.lrange(KEYS.quarantine, 0, -1)) == Counter(bad)
            assert client.statistics().quarantined == len(bad)
            assert await raw.zrange(KEYS.timeout, 0, -1) == [never]

            before, started = client.statistics().round_trips, time.monotonic()
            await asyncio.sleep(0.3)
            # The re-check and the ping, each ten times a second.
            most = 20 + 30 * (time.monotonic() - started)
            assert client.statistics().round_trips - before <= most
            assert got == good
