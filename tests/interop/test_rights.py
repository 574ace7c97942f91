"""Python as a user with limited rights, beside a Redisson that may do everything."""

from __future__ import annotations

import asyncio

import pytest

import delayq
from delayq.admin.acl import acl_rules
from tests.interop.live import DEADLINE, Live, Log, random_messages
from tests.interop.pairs import TEXT
from tests.interop.settings import with_newest
from tests.support.depth import nightly
from tests.support.waiting import until

pytestmark = pytest.mark.java

USER, PASSWORD = "limited", "its-password"
MESSAGES = 400


async def take_what_it_may(log: Log, url: str, name: str) -> int:
    """Take until cancelled, no matter how often it is refused. Return the number of refusals."""
    refused = 0
    async with delayq.connect(url) as client:
        queue = client.delayed_queue(name, codec=TEXT.codec)
        try:
            while True:
                try:
                    log.came(await queue.take(), float("inf"))
                except delayq.ServerRefused:
                    refused += 1
                    await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            return refused


@with_newest
@pytest.mark.parametrize(
    "rights",
    [
        *("as delayq acl says", "no channel of notices"),
        *map(nightly, ("by hand", "no channels")),
    ],
)
async def test_no_message_is_stranded_whatever_python_may(live: Live, rights: str) -> None:
    channel = f"&redisson_delay_queue_channel:{{{live.name}}}"
    by_hand = (f"redisson_delay_queue*:{{{live.name}}}", f"delayq_*:{{{live.name}}}")
    rules = {
        "as delayq acl says": acl_rules("consumer", delayed=[live.name]),
        # The rules that docs/redisson.md gives.
        "by hand": [
            f"~{live.name}",
            *(f"{kind}{pattern}" for kind in "~&" for pattern in by_hand),
            "+@all",
        ],
        # The rights of a user on Redis 7 and Valkey that was given only keys and commands.
        "no channels": ["~*", "+@all"],
        "no channel of notices": ["~*", channel, "+@all"],
    }[rights]
    reply = live.server.call("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *rules)
    assert reply == b"+OK", reply
    url = live.server.url.replace("redis://", f"redis://{USER}:{PASSWORD}@")
    log, half = Log(), MESSAGES // 2
    from_java, from_python = random_messages(TEXT, half), random_messages(TEXT, half, half)
    java = await live.open()
    taking = asyncio.create_task(take_what_it_may(log, url, live.name))
    taken = asyncio.create_task(java.consume())
    # The client that offers is gone by then, and moves none of them.
    async with delayq.connect(live.server.url) as client:
        await log.offer_by_python(client.delayed_queue(live.name, codec=TEXT.codec), from_python)
    await log.offer_by_java(java, from_java)
    await live.drained()
    await java.stop()
    log.came_to_java(await asyncio.wait_for(taken, DEADLINE))
    await until(lambda: not log.missing(), DEADLINE)
    to_python = MESSAGES - len(taken.result())
    taking.cancel()
    refused = await taking
    live.server.call("ACL", "DELUSER", USER)
    await java.detach()
    log.check()
    if rights in {"as delayq acl says", "by hand"}:
        assert (refused, to_python > 0) == (0, True)
