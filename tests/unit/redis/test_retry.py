"""Calls are repeated after some errors, for a limited time, and the first reply of several
servers counts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import ServerError, ServerRefused, ServerUnavailable
from delayq._redis import retry as module
from delayq._redis.client import RedisClient
from delayq._redis.retry import first_of, is_not_now, retry_delay
from delayq._redis.topology import Topology
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Never

    Attempt = tuple[str, Callable[[], Coroutine[None, None, str]]]


SCRIPT = "f_" + "0123456789abcdef" * 2 + "01234567"


LATER = f"""
BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.
LOADING Redis is loading the dataset in memory
READONLY You can't write against a read only replica.
READONLY You can't write against a read only replica. script: 1234, on @user_script:1.
MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.
CLUSTERDOWN Hash slot not served
TRYAGAIN Multiple keys request during rehashing of slot
NOREPLICAS Not enough good replicas to write.
MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.
MISCONF Errors writing to the AOF file: No space left on device
UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)
max number of clients reached
Error running script (call to {SCRIPT}): @user_script:12: -READONLY You can't write
Error running script (call to {SCRIPT}): @user_script:12: @user_script: 12: -MISCONF Redis is
"""
NEVER = f"""
NOPERM User dev-BUSY has no permissions to run the 'evalsha' command
NOPERM User LOADING has no permissions to access the 'x-READONLY' key
ACL failure in script: this user MISCONF has no permissions to run the 'zadd' command
Error running script (call to {SCRIPT}): @user_script:3: NOPERM User -BUSY has no permissions
unknown command 'TRYAGAIN'
BUSYKEY Target key name already exists.
BUSYGROUP Consumer Group name already exists
OOM command not allowed when used memory > 'maxmemory'.
WRONGTYPE Operation against a key holding the wrong kind of value
"""


def test_a_server_that_cannot_serve_now_may_later() -> None:
    for text in LATER.strip().splitlines():
        assert is_not_now(text), text


def test_an_error_for_good_is_not_taken_for_one_whatever_it_quotes() -> None:
    for text in NEVER.strip().splitlines():
        assert not is_not_now(text), text


@given(st.integers(1, 10_000))
def test_the_delay_before_a_retry_doubles_up_to_its_bound_with_jitter(attempt: int) -> None:
    assert 0.01 <= retry_delay(attempt) <= 5.0
    assert retry_delay(attempt, longest=0.5) <= 0.5
    assert retry_delay(1) <= 0.02
    assert retry_delay(50) >= 2.5


class Servers:
    """Servers that behave as a test demands, and record the order in which they were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    def answers(self, name: str, error: Exception | None = None) -> Attempt:
        async def attempt() -> str:
            self.asked.append(name)
            if error:
                raise error
            return name

        return name, attempt

    def hangs(self, name: str) -> Attempt:
        gate = self.gates[name] = asyncio.Event()

        async def attempt() -> str:
            self.asked.append(name)
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            return name

        return name, attempt


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setattr(module, "ASK_NEXT_AFTER", 0.01)
    return Servers()


async def test_a_server_that_was_slow_may_answer_first(servers: Servers) -> None:
    for names in ("a", "ab"):
        servers.asked.clear()
        unused: list[str] = []
        attempts = [servers.hangs("a"), servers.hangs("b")]
        asking = asyncio.create_task(first_of("all", attempts, unused.append))
        await until(lambda: len(servers.asked) == 2)
        for name in names:
            servers.gates[name].set()
        reply = await asking
        await asyncio.sleep(0)
        assert {reply, *unused} == {*names}


async def test_a_call_is_refused_only_if_every_server_refuses(servers: Servers) -> None:
    for kind in (ServerRefused, ServerUnavailable):
        attempts = [servers.answers("a", ServerRefused("no")), servers.answers("b", kind("never"))]
        with pytest.raises(ServerError, match="all: no; never") as caught:
            await first_of("all", attempts)
        assert type(caught.value) is kind


async def test_a_caller_that_is_cancelled_leaves_nothing_behind(servers: Servers) -> None:
    asking = asyncio.create_task(first_of("all", [servers.hangs("a")]))
    await until(lambda: servers.asked)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert servers.cancelled == ["a"]


class Unknown(Topology):
    """Servers that nobody can find."""

    spread = True

    async def refresh(self) -> Never:
        await asyncio.Event().wait()
        raise AssertionError

    async def find_pool(self, key: str | None) -> Never:
        del key
        await self.refresh()

    async def candidates(self) -> Never:
        await self.refresh()


async def test_a_call_that_is_retried_for_less_time_gives_up_finding_a_server_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delayq._redis.client._SHORTEST_TRY", 0.01)
    client = RedisClient(Unknown(), retry_for=0)
    for call in (client.open(), client.command("GET", "key"), client.everywhere("INFO")):
        with pytest.raises(delayq.ServerUnavailable, match="find out in time"):
            await asyncio.wait_for(call, 60)
