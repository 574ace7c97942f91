"""A forked child gets an error from a client, and works with a synchronous one. It harms no other.

One fork is in ``make test``, the others are in the gate.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import output_of, run_python

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
                    await asyncio.wait_for(call(), 30)
                except delayq.ConfigurationError as error:
                    assert "another process" in str(error), error
                else:
                    raise AssertionError("no error")
            async def settle():
                try:
                    await asyncio.wait_for(message.ack(), 30)
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
LEAVES_AT_ONCE = """
            os._exit(0)
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    "child",
    [IN_A_NEW_LOOP, CLOSES, LEAVES_AT_ONCE],
    ids=["uses", "closes", "leaves"],
)
def test_a_forked_child_must_open_its_own_and_harms_none(server: PrivateServer, child: str) -> None:
    program = PROGRAM.replace("{child}", child.strip())
    assert output_of("-c", program, server.url) == "well"


# Synchronous clients

BEGIN = """
import ctypes, gc, os, signal, sys, threading, time
import delayq
from delayq.codecs import StringCodec

address = sys.argv[1]
client = delayq.sync.connect(address)
mails, orders = client.reliable_queue("mails"), client.delayed_queue("orders")

def fork(in_child, fork=os.fork):
    child = fork()
    if child == 0:
        # Kills a child that hangs.
        signal.alarm(60)
        in_child()
        sys.exit()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child failed: {status}"
"""


USED = """
texts = client.reliable_queue("texts", codec=StringCodec())
same = client.reliable_queue("texts")
receipts = [orders.offer(n, delay=3600) for n in range(3)]
mails.offer(0)
assert client.statistics().connections

def serve():
    # In another order: settings are inherited in the order of the declarations.
    assert same.get(same.offer("a text")).value == "a text"
    assert mails.offer(1) and mails.stats().ready == 2
    assert receipts[0].cancel() and not receipts[0].cancel()
    assert receipts[1].reschedule(7200)
    assert client.statistics().round_trips < 25, client.statistics()
    gc.collect()
    client.close()
    gc.collect()

fork(serve)
for n in range(100):
    mails.offer(n)
assert mails.stats().ready == 102
assert not receipts[0].cancel() and receipts[1].cancel() and receipts[2].cancel()
client.close()
print("well")
"""
MORE = {
    "unused before, as in gunicorn --preload": """
def serve():
    for _ in range(10):
        mails.offer(1)
assert threading.active_count() == 1
for _ in range(3):
    fork(serve)
assert threading.active_count() == 1
assert mails.stats().ready == 30
print("well")
""",
    "finalizers in the child": """
from delayq.sync import _portal
mails.offer(1)

def finalize():
    (inherited,) = _portal._inherited
    for watched in [*inherited._selector.get_map().values()]:
        inherited._loop._remove_reader(watched.fd)

fork(finalize)
ended = threading.Thread(target=mails.offer, args=[2], daemon=True)
ended.start()
ended.join(60)
print("deaf" if ended.is_alive() else "well")
""",
    "a call during a fork": """
from delayq.sync import _portal
mails.offer(1)
_portal._before_fork()
ended = threading.Thread(target=mails.offer, args=[2], daemon=True)
ended.start()
ended.join(60)
print("hangs" if ended.is_alive() else "well")
_portal._after_fork_in_parent()
""",
    "while other threads call": """
stop, offered = threading.Event(), []
def offer():
    count = 0
    while not stop.is_set():
        mails.offer(count)
        orders.offer(count, delay=3600)
        count += 1
    offered.append(count)

threads = [threading.Thread(target=offer) for _ in range(4)]
for thread in threads:
    thread.start()

def serve():
    with delayq.sync.connect(address) as other:
        assert other.reliable_queue("others").offer(1)
    assert mails.offer("child") and orders.offer("child", delay=3600).cancel()

for turn in range(5):
    time.sleep(0.02)
    fork(serve)
stop.set()
for thread in threads:
    thread.join(30)
    assert not thread.is_alive()
assert mails.stats().ready == sum(offered) + 5
assert orders.pending.size() == sum(offered)
assert client.reliable_queue("others").stats().ready == 5
print("well")
""",
    "a signal": """
told = []
sys.unraisablehook = lambda ignored: told.append(str(ignored.exc_value))

def handle(*_):
    handled.append(True)
    raise TimeoutError("it is late")

async def block(_):
    blocks.set()
    while not handled:
        time.sleep(0.01)

handled = []

blocks = threading.Event()
threading.Thread(target=client.run, args=[block]).start()
blocks.wait()
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.1)
fork(lambda: None)
ended = threading.Thread(target=mails.offer, args=[1], daemon=True)
ended.start()
ended.join(60)
assert told == ["it is late"], told
print("hangs" if ended.is_alive() else "well")
""",
    # As uWSGI does. Python itself cannot do that any more once there are threads.
    "in C": """
for _ in range(3):
    fork(lambda: mails.offer(1), ctypes.PyDLL(None).fork)
for _ in range(10):
    mails.offer(1)
assert mails.stats().ready == 13
print("well")
""",
}


@pytest.mark.parametrize(
    "case", ["used before", *(pytest.param(name, marks=pytest.mark.gate) for name in MORE)]
)
def test_a_synchronous_client_works_in_a_child_and_leaves_the_parent_alone(
    server: PrivateServer, case: str
) -> None:
    # From Python 3.12 on, there is a warning for each fork of a process that has threads.
    warnings = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
    program = f"{BEGIN}\n{MORE.get(case, USED)}"
    done = run_python(*warnings, "-c", program, server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
