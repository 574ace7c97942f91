"""Servers with replicas for a storm: a master behind Sentinels, or the masters of a cluster.

::

    python -m tests.faults.storm --servers sentinel --kind reliable --minutes 10
    python -m tests.faults.storm --servers cluster --kind plain --minutes 10

Clients reach every server and Sentinel over links of its own (``tests.support.links.detour``),
which break as they do with one server. Every fault here preserves each write that the servers have
confirmed, so the checker allows nothing that it does not also allow with one server:

- A planned failover hands over once the replica has received everything. A cluster ensures that
  itself (``CLUSTER FAILOVER``). Sentinels let the old master keep writing for some seconds, so its
  writes are paused (``CLIENT PAUSE ... WRITE``) until it is a replica.
- A master that is killed restarts with everything that it has confirmed (``appendfsync always``),
  and a master that is stopped resumes. Both remain masters: no replica takes over by itself.

Left out are an unplanned failover and a plain ``SENTINEL FAILOVER``: replication is asynchronous,
so the promoted replica may lack the last writes, and a checker that allowed such losses would
overlook real flaws. ``tests/integration`` has unplanned failovers, with bounds on their losses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.clusters import TestCluster, Watched, admin, wait_for
from tests.support.servers import memory_disk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.support.servers import Kind, PrivateServer

_KEEPS_ALL = ("--appendfsync", "always")
# Milliseconds, longer than any fault: Sentinels must not choose another master by themselves.
_DOWN_AFTER = 120_000
_PAUSE = 60_000
# Seconds after which a failover is requested again: a cluster's replica gives up after five.
_TAKES_OVER = 6.0


class BehindSentinels(Watched):
    """A master with two replicas, and three Sentinels that start a failover only on request."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind, options=_KEEPS_ALL, within=memory_disk())

    def start(self) -> None:
        super().start()
        for sentinel in self.sentinels:
            with admin(sentinel) as redis:
                redis.execute_command(
                    "SENTINEL", "SET", self.SERVICE, "down-after-milliseconds", _DOWN_AFTER
                )

    def list_all(self) -> Sequence[PrivateServer]:
        """Return every server that clients connect to."""
        return [*self.servers, *self.sentinels]

    def list_masters(self) -> Sequence[PrivateServer]:
        return [self.master()]

    def master_of(self, _: str) -> PrivateServer:
        return self.master()

    def hand_over(self, _: str, chance: random.Random) -> None:
        """Replace the master with a replica that has every write."""
        old = self.master()
        others = [server for server in self.servers if server is not old]

        with admin(old) as redis, admin(chance.choice(self.sentinels)) as sentinel:
            redis.execute_command("CLIENT", "PAUSE", _PAUSE, "WRITE")
            try:
                wait_for(
                    lambda: all(_follows(other, old) for other in others),
                    "the replicas have everything",
                )
                _ask_for_a_failover(
                    lambda: sentinel.execute_command("SENTINEL", "FAILOVER", self.SERVICE),
                    lambda: self._agreed() not in (None, old),
                )
                redis.execute_command("REPLICAOF", "127.0.0.1", self.master().port)
            finally:
                redis.execute_command("CLIENT", "UNPAUSE")

    def wait_until_sound(self) -> None:
        """Wait until all agree on the master, whose data every replica has on disk."""

        def sound() -> bool:
            master = self._agreed()
            return master is not None and all(
                _is_on_disk(server) and (server is master or _follows(server, master))
                for server in self.servers
            )

        wait_for(sound, "the servers are sound")

    def kill_a_sentinel(self) -> None:
        """Restart the Sentinel that clients ask first, and cut their connections to the master."""
        master = self.master()
        self.sentinels[0].kill()
        master.call("CLIENT", "KILL", "TYPE", "normal")
        time.sleep(0.5)
        self.sentinels[0].start()

    def _agreed(self) -> PrivateServer | None:
        """Return the master, if all Sentinels name the same one."""
        first, *more = {self.master(sentinel) for sentinel in self.sentinels}
        return None if more else first


class InCluster(TestCluster):
    """A cluster of three masters, each with a replica that takes over only on request."""

    def __init__(self, kind: Kind) -> None:
        options = (*_KEEPS_ALL, "--cluster-replica-no-failover", "yes")
        super().__init__(kind, masters=3, replicas=3, options=options, within=memory_disk())

    def list_all(self) -> Sequence[PrivateServer]:
        return self.nodes

    def list_masters(self) -> Sequence[PrivateServer]:
        ports = set(self.slots(self.nodes[0]).values())
        return [node for node in self.nodes if node.port in ports]

    def master_of(self, key: str) -> PrivateServer:
        return self.owner(key)

    def hand_over(self, key: str, _: random.Random) -> None:
        old = self.owner(key)
        replica = next(node for node in self.nodes if _master_port(node) == old.port)
        with admin(replica) as redis:
            _ask_for_a_failover(
                lambda: redis.execute_command("CLUSTER", "FAILOVER"),
                lambda: self.owner(key, replica) is replica,
            )

    def wait_until_sound(self) -> None:
        """Wait until all agree on the masters, whose data every replica has on disk."""

        def sound() -> bool:
            for node in self.nodes:
                state = self.info(node)
                if (
                    state["cluster_state"] != "ok"
                    or state["cluster_slots_ok"] != state["cluster_slots_assigned"]
                    or self.slots(node) != self.slots(self.nodes[0])
                ):
                    return False
            masters = self.list_masters()
            by_port = {master.port: master for master in masters}
            return all(
                _is_on_disk(node)
                and (node in masters or _follows(node, by_port[_master_port(node) or 0]))
                for node in self.nodes
            )

        wait_for(sound, "the cluster is sound")


Replicated = BehindSentinels | InCluster


def _ask_for_a_failover(ask: Callable[[], object], done: Callable[[], bool]) -> None:
    """Ask until it is done: an earlier failover may have been abandoned."""
    asked_at = 0.0

    def is_done() -> bool:
        nonlocal asked_at
        if not done() and time.monotonic() - asked_at > _TAKES_OVER:
            ask()
            asked_at = time.monotonic()
        return done()

    wait_for(is_done, "the failover")


def _master_port(server: PrivateServer) -> int | None:
    """Return the port of the server that a replica follows; None for a master."""
    with admin(server) as redis:
        port: int | None = redis.info("replication").get("master_port")
    return port


def _follows(replica: PrivateServer, master: PrivateServer) -> bool:
    """Return whether a replica has everything that its master had when this was called."""
    with admin(master) as redis:
        written = redis.info("replication")["master_repl_offset"]
    with admin(replica) as redis:
        replication = redis.info("replication")
    return bool(
        replication["role"] == "slave"
        and replication["master_port"] == master.port
        and replication["master_link_status"] == "up"
        and replication["slave_repl_offset"] >= written
    )


def _is_on_disk(server: PrivateServer) -> bool:
    """Return whether all data is on disk: not while the file is rewritten."""
    with admin(server) as redis:
        persistence = redis.info("persistence")
    return not (
        persistence["loading"]
        or persistence["aof_rewrite_in_progress"]
        or persistence["aof_rewrite_scheduled"]
    )
