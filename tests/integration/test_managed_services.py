"""Work on managed services, with the commands taken away that each of them refuses.

The lists are those of docs/production.md. Where a service does not say whether it has a command, it
has none here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import delayq
from delayq.admin.doctor import diagnose
from tests.support.board import browse, page, texts
from tests.support.servers import PrivateServer
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.clusters import TestCluster
    from tests.support.servers import Kind

pytestmark = pytest.mark.gate  # starts a server for each service

STORAGE = "config debug save bgsave bgrewriteaof migrate replicaof shutdown"
USERS = "acl|setuser acl|deluser acl|load acl|save"
NO_CONFIRMATION = "wait waitaof"
SERVICES = {
    "ElastiCache": f"{STORAGE} slaveof sync",
    "ElastiCache Serverless, a cluster": f"{STORAGE} slaveof sync acl {NO_CONFIRMATION}",
    "MemoryDB, a cluster": f"{STORAGE} slaveof sync psync module {USERS} cluster|setslot",
    "Upstash": f"{STORAGE} slaveof acl|dryrun client|kill spublish ssubscribe {NO_CONFIRMATION}",
    "Azure Cache for Redis": "config debug save bgsave bgrewriteaof migrate shutdown slaveof",
    "Azure Managed Redis": "debug save bgsave bgrewriteaof lastsave migrate replicaof shutdown"
    f" slaveof sync psync role select swapdb move asking reset readonly cluster {USERS}",
    "Memorystore for Redis": f"{STORAGE} acl cluster command lastsave monitor object",
    "Memorystore for Redis Cluster, a cluster": f"{STORAGE} acl {NO_CONFIRMATION}",
    "Memorystore for Valkey": f"{STORAGE} acl {NO_CONFIRMATION}",
}
EVICTION = ("maxmemory-policy", "volatile-lru")
# What the doctor says if a command is missing.
MISSING = {
    "config": "this user may not run CONFIG",
    "acl": "cannot check the rights of this user in advance",
    "wait": 'not "replicas:',
    "waitaof": 'not "fsync": ',
}


@contextmanager
def simulated(service: str, kind: Kind, cluster: TestCluster) -> Iterator[str]:
    """Yield the address of a server, or of a cluster, that refuses what the service refuses.

    It evicts keys, as most services do unless they are told not to.
    """
    refused = SERVICES[service].split()
    if service.endswith("a cluster"):
        rules = ["on", "nopass", "~*", "&*", "+@all", *(f"-{command}" for command in refused)]
        for node in cluster.nodes:
            assert node.call("CONFIG", "SET", *EVICTION) == b"+OK"
            assert node.call("ACL", "SETUSER", "managed", "reset", *rules) == b"+OK"
        yield cluster.url.replace("://", "://managed:any@")
        return
    options = [f"--{EVICTION[0]}", EVICTION[1]]
    for command in refused:
        if "|" not in command:
            options += ["--rename-command", command, ""]
    with PrivateServer(kind, appendonly="everysec", options=tuple(options)) as server:
        if rules := [f"-{command}" for command in refused if "|" in command]:
            assert server.call("ACL", "SETUSER", "default", *rules) == b"+OK"
        yield server.url


@pytest.mark.parametrize("service", SERVICES)
async def test_work_is_done_and_a_doctor_names_what_is_missing(
    service: str, server_kind: Kind, cluster: TestCluster
) -> None:
    with simulated(service, server_kind, cluster) as url:
        async with delayq.connect(url) as client:
            worker, seen = delayq.Worker(client), list[str]()
            mails: delayq.ReliableQueue[str] = client.reliable_queue("mails")

            @worker.listener("mails", max_attempts=1)
            async def send(value: str) -> None:
                seen.append(value)
                if value == "bad":
                    raise ValueError(value)

            async def finished() -> bool:
                return len(seen) == 2 and (await mails.stats()).dead == 1

            async with worker:
                await mails.offer("good", 0.01)
                await mails.offer("bad")
                await until(finished)
            await mails.pause()
            stats = await mails.stats()
            assert (sorted(seen), stats.dead, stats.paused) == (["bad", "good"], 1, True)
            findings = [finding async for finding in diagnose(client)]
            async with browse(delayq.dashboard(client)) as browser:
                assert "mails reliable dead letters paused" in texts(await page(browser, ""))
    assert not [finding for finding in findings if finding.level == "wrong"]
    told = "\n".join(f"{finding.text} {finding.advice}" for finding in findings)
    refused = SERVICES[service].replace("acl|dryrun", "acl").split()
    for command, words in MISSING.items():
        assert (words in told) == (command in refused), (command, told)
