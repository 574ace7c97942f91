"""Dead letters are kept for a time, and up to a number, if the queue's settings say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import TRIM_DEAD
from delayq.admin.acl import acl_rules
from tests.support.reliable import leased
from tests.support.reliable_fixtures import LEASE

if TYPE_CHECKING:
    from delayq import Client
    from tests.support.reliable import Jobs
    from tests.support.servers import PrivateServer

KEYS = ReliableKeys.of("jobs")
DAY = 86_400


async def die(queue: Jobs, *ids: str) -> None:
    """Make a dead letter of a new message under each id, in that order."""
    for key in ids:
        await (await leased(queue, 0, id=key)).bury("why")


async def grow_old(raw: Any, *names: str, by: float) -> None:
    """Make it as if these letters had died ``by`` seconds earlier."""
    for name in names:
        await raw.zincrby(KEYS.dead, -by * 1_000_000, name)


@pytest.mark.every_server
async def test_no_call_drops_more_than_a_bounded_number(jobs: Jobs, raw: Any) -> None:
    names = [f"{n:04d}" for n in range(1500)]
    await raw.zadd(KEYS.dead, {name: n + 1 for n, name in enumerate(names)})
    await raw.hset(KEYS.dead_messages, mapping=dict.fromkeys(names, "{}\n1\n0"))
    await jobs.configure(keep_dead=60, max_dead=10)
    left = [await jobs._open.partitions[0].store.trim_dead() for _ in range(4)]
    assert left == [600, 600, 300, 0]
    assert await raw.hlen(KEYS.dead_messages) == 0


@pytest.mark.every_server
async def test_a_limit_that_cannot_be_read_is_none(jobs: Jobs, raw: Any) -> None:
    await die(jobs, "a")
    # Without a limit, letters stay.
    await grow_old(raw, "a", by=10_000 * DAY)
    for n, text in enumerate(("junk", "-1", "nan", "1e400", "")):
        await raw.hset(KEYS.settings, mapping={"keep_dead": text, "max_dead": text})
        await die(jobs, "b")
        assert await raw.zcard(KEYS.dead) == 2 + n, text


async def test_a_user_that_may_only_look_sees_letters_that_are_about_to_go(
    jobs: Jobs, server: PrivateServer, raw: Any
) -> None:
    await die(jobs, "a", "b")
    await jobs.configure(max_dead=1)
    rules = acl_rules("dashboard", reliable=["jobs"])
    await raw.execute_command("ACL", "SETUSER", "reader", "on", ">secret", *rules)
    url = server.url.replace("://", "://reader:secret@")
    async with delayq.connect(url) as theirs:
        letters = await theirs.reliable_queue("jobs").dead.list()
        assert [letter.id for letter in letters] == ["a", "b"]
    assert [letter.id for letter in await jobs.dead.list()] == ["b"]


async def test_the_limit_of_dead_letters_applies_to_each_partition(client: Client) -> None:
    queue = client.reliable_queue("parts", lease=LEASE, partitions=4, max_dead=1)
    await die(queue, *(f"{n}" for n in range(40)))
    assert len(await queue.dead.list()) == 4
    assert TRIM_DEAD.roles == {"admin"}
