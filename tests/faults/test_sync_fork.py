"""A synchronous client that was created before a fork works in the child, and harms no other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import run_python

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

BEGIN = """
import ctypes, gc, multiprocessing, os, sys, threading, time
import delayq
from delayq.codecs import StringCodec

address = sys.argv[1]
client = delayq.sync.connect(address)
mails, orders = client.reliable_queue("mails"), client.delayed_queue("orders")

def wait_for(child, within=30):
    end = time.monotonic() + within
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"the child failed: {status}"
            return
        time.sleep(0.01)
    os.kill(child, 9)
    raise AssertionError("the child hangs")

def fork(in_child, fork=os.fork):
    child = fork()
    if child == 0:
        in_child()
        sys.exit()
    wait_for(child)
"""


def run(program: str, address: str, prints: str = "well\n") -> None:
    # From Python 3.12 on, there is a warning for each fork of a process that has threads.
    warnings = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
    done = run_python(*warnings, "-c", f"{BEGIN}\n{program}", address)
    assert (done.returncode, done.stdout, done.stderr) == (0, prints, "")


def test_a_client_that_was_not_used_before_starts_no_thread_until_then(
    server: PrivateServer,
) -> None:
    """As in ``gunicorn --preload``."""
    program = """
def serve():
    for _ in range(10):
        mails.offer(1)
assert threading.active_count() == 1
for _ in range(3):
    fork(serve)
assert threading.active_count() == 1
assert mails.stats().ready == 30
print("well")
"""
    run(program, server.url)


def test_a_client_that_was_used_before_has_its_own_connections_in_the_child(
    server: PrivateServer,
) -> None:
    program = """
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
    assert client.statistics().round_trips < 20
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
    run(program, server.url)


def test_finalizers_in_the_child_leave_the_sockets_of_the_parent_watched(
    server: PrivateServer,
) -> None:
    program = """
from delayq.sync import _portal
mails.offer(1)

def finalize():
    (inherited,) = _portal._inherited
    for watched in [*inherited._selector.get_map().values()]:
        inherited._loop._remove_reader(watched.fd)

fork(finalize)
ended = threading.Thread(target=mails.offer, args=[2], daemon=True)
ended.start()
ended.join(10)
print("deaf" if ended.is_alive() else "well")
"""
    run(program, server.url)


def test_forks_while_other_threads_call_hang_nowhere(server: PrivateServer) -> None:
    program = """
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

for turn in range(15):
    time.sleep(0.02)
    fork(serve)
stop.set()
for thread in threads:
    thread.join(30)
    assert not thread.is_alive()
assert mails.stats().ready == sum(offered) + 15
assert orders.pending.size() == sum(offered)
assert client.reliable_queue("others").stats().ready == 15
print("well")
"""
    run(program, server.url)


def test_a_signal_during_a_fork_leaves_the_parent_usable(server: PrivateServer) -> None:
    program = """
import signal
sys.unraisablehook = lambda ignored: print(ignored.exc_value)

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
ended.join(10)
print("hangs" if ended.is_alive() else "well")
"""
    run(program, server.url, "it is late\nwell\n")


def test_a_signal_handler_may_make_a_call_during_a_fork(server: PrivateServer) -> None:
    program = """
from delayq.sync import _portal
mails.offer(1)
_portal._before_fork()
ended = threading.Thread(target=mails.offer, args=[2], daemon=True)
ended.start()
ended.join(10)
print("hangs" if ended.is_alive() else "well")
_portal._after_fork_in_parent()
"""
    run(program, server.url)


def test_processes_of_multiprocessing(server: PrivateServer) -> None:
    program = """
def serve(number):
    mails.offer(number)

mails.offer(0)
with multiprocessing.get_context("fork").Pool(3) as pool:
    pool.map(serve, range(30))
    pool.close()
    pool.join()
assert mails.stats().ready == 31
print("well")
"""
    run(program, server.url)


def test_a_child_uses_the_private_server_of_its_parent() -> None:
    program = """
mails.offer(1)
fork(lambda: mails.offer(2))
assert mails.stats().ready == 2
print("well")
"""
    run(program, "embedded:")


def test_a_server_in_c_may_fork_without_telling_python(server: PrivateServer) -> None:
    """As uWSGI does. Python itself cannot do that any more once there are threads."""
    program = """
for _ in range(3):
    fork(lambda: mails.offer(1), ctypes.PyDLL(None).fork)
for _ in range(10):
    mails.offer(1)
assert mails.stats().ready == 13
print("well")
"""
    run(program, server.url)
