"""A forked child gets an error, and the parent's connections are left alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import output_of

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

# Forks while a client is open, and has the child do something with it. The parent uses it before
# and after.
PROGRAM = """
import asyncio, os, sys, warnings
import delayq

async def main():
    async with delayq.connect(sys.argv[1]) as client:
        jobs, orders = client.reliable_queue("jobs"), client.delayed_queue("orders")
        await jobs.offer(1)
        await orders.offer(1)
        (message,) = await jobs.claim()
        child = os.fork()
        if child == 0:
            {child}
        assert os.waitpid(child, 0)[1] == 0, "the child failed"
        await message.ack()
        assert await orders.take() == 1
        assert [await jobs.offer(n) is not None for n in range(100)] == [True] * 100
        assert len(await jobs.claim(100)) == 100
        assert await jobs.dead.size() == 0

asyncio.run(main())
print("well")
"""

IN_A_NEW_LOOP = """
            asyncio.events._set_running_loop(None)
            calls = (
                lambda: jobs.offer(1), lambda: jobs.claim(), lambda: jobs.stats(),
                lambda: jobs.dead.size(), lambda: orders.take(), lambda: orders.offer(1),
                lambda: orders.ready.size(), lambda: orders.pending.size(),
                lambda: client.server_time(),
            )
            async def attempt(call):
                try:
                    await asyncio.wait_for(call(), 5)
                except delayq.ConfigurationError as error:
                    assert "another process" in str(error), error
                else:
                    raise AssertionError("no error")
            async def settle():
                try:
                    await asyncio.wait_for(message.ack(), 5)
                except RuntimeError:
                    return
                raise AssertionError("no error")
            try:
                for call in calls:
                    asyncio.run(attempt(call))
                asyncio.run(settle())
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
"""
CLOSES = """
            await client.aclose()
            os._exit(0)
"""
GOES_ON = """
            try:
                await jobs.offer(1)
            except delayq.ConfigurationError as error:
                os._exit(0 if "another process" in str(error) else 1)
            os._exit(2)
"""
LEAVES_AT_ONCE = """
            os._exit(0)
"""


@pytest.mark.parametrize(
    "child",
    [IN_A_NEW_LOOP, CLOSES, GOES_ON, LEAVES_AT_ONCE],
    ids=["uses", "closes", "goes on", "leaves"],
)
def test_a_forked_child_must_open_its_own_and_harms_none(server: PrivateServer, child: str) -> None:
    program = PROGRAM.replace("{child}", child.strip())
    assert output_of("-c", program, server.url) == "well"
