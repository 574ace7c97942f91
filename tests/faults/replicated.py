"""Servers with replicas for a storm: a master behind Sentinels, or the masters of a cluster.

::

    python -m tests.faults.storm --servers sentinel --kind reliable --minutes 10
    python -m tests.faults.storm --servers cluster --kind plain --minutes 10

Clients reach every server and Sentinel over links of its own (``tests.links.detour``), which break as on one server. Every fault
here keeps each write that the servers have answered, so the checker allows nothing that it does not allow
on one server:

- A planned failover hands over when the replica has received everything. A cluster does that itself
  (``CLUSTER FAILOVER``). Sentinels let the old master go on writing for some seconds, so its writes wait
  (``CLIENT PAUSE ... WRITE``) until it is a replica.
- A master that is killed starts again with all that it has answered (``appendfsync always``), and a master that is
  stopped goes on. Both stay masters: no replica takes over by itself.

These faults are left out:

- *An unplanned failover.* Replication is asynchronous, so the promoted replica may lack the last writes: an offer is
  lost, a message that was acknowledged comes again, a ``DelayedQueue`` delivers one twice. WAIT
  (``durability="replicas:N"``) covers offers alone. A checker that allowed all of that would overlook real flaws.
  ``tests/integration`` has unplanned failovers with bounds for what they lose.
- *A plain* ``SENTINEL FAILOVER``, for the same reason: what the old master answers meanwhile is lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.clusters import TestCluster, Watched, admin, wait_for
from tests.servers import memory_disk

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.servers import Kind, PrivateServer

_KEEPS_ALL = ("--appendfsync", "always")
# Milliseconds, longer than any fault: Sentinels must not choose another master by themselves.
_DOWN_AFTER = 120_000
_PAUSE = 60_000
# Seconds after which a failover is asked for again: a cluster's replica gives up after five.
_TAKES_OVER = 6.0


class BehindSentinels(Watched):
    """A master with two replicas, and three Sentinels who start a failover only when they are asked."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind, options=_KEEPS_ALL, within=memory_disk())

    def start(self) -> None:
        super().start()
        for sentinel in self.sentinels:
            with admin(sentinel) as redis:
                redis.execute_command("SENTINEL", "SET", self.SERVICE, "down-after-milliseconds", _DOWN_AFTER)

    def list_all(self) -> Sequence[PrivateServer]:
        """Return every server that clients connect to."""
        return [*self.servers, *self.sentinels]

    def list_masters(self) -> Sequence[PrivateServer]:
        """Return every server that takes writes."""
        return [self.master()]

    def master_of(self, key: str) -> PrivateServer:
        """Return the master that has a key."""
        del key
        return self.master()

    def hand_over(self, key: str, chance: random.Random) -> None:
        """Let a replica take the place of the master that has a key, with every write."""
        old = self.master_of(key)
        others = [server for server in self.servers if server is not old]
        asked_at = 0.0

        def done() -> bool:
            nonlocal asked_at
            if self._agreed() not in (None, old):
                return True
            if time.monotonic() - asked_at > _TAKES_OVER:
                # One that was begun may have been abandoned.
                sentinel.execute_command("SENTINEL", "FAILOVER", self.SERVICE)
                asked_at = time.monotonic()
            return False

        with admin(old) as redis, admin(chance.choice(self.sentinels)) as sentinel:
            redis.execute_command("CLIENT", "PAUSE", _PAUSE, "WRITE")
            try:
                wait_for(lambda: all(_follows(other, old) for other in others), "the replicas have everything")
                wait_for(done, "the failover")
                redis.execute_command("REPLICAOF", "127.0.0.1", self.master().port)
            finally:
                redis.execute_command("CLIENT", "UNPAUSE")

    def wait_until_sound(self) -> None:
        """Wait until all agree about the master, and each replica has, also on its disk, what the master has."""

        def sound() -> bool:
            master = self._agreed()
            return master is not None and all(
                _is_on_disk(server) and (server is master or _follows(server, master)) for server in self.servers
            )

        wait_for(sound, "the servers are sound")

    def kill_a_sentinel(self) -> None:
        """Kill the Sentinel that clients may ask first, with their connections to the master. Start it again."""
        master = self.master()
        self.sentinels[0].kill()
        master.call("CLIENT", "KILL", "TYPE", "normal")
        time.sleep(0.5)
        self.sentinels[0].start()

    def _agreed(self) -> PrivateServer | None:
        """The master, if all Sentinels name the same one."""
        first, *more = {self.master(sentinel) for sentinel in self.sentinels}
        return None if more else first


class InCluster(TestCluster):
    """Three masters of a cluster, each with a replica, which takes over only when it is asked."""

    def __init__(self, kind: Kind) -> None:
        options = (*_KEEPS_ALL, "--cluster-replica-no-failover", "yes")
        super().__init__(kind, masters=3, replicas=3, options=options, within=memory_disk())

    def list_all(self) -> Sequence[PrivateServer]:
        """Return every server that clients connect to."""
        return self.nodes

    def list_masters(self) -> Sequence[PrivateServer]:
        """Return every server that takes writes."""
        ports = set(self.slots(self.nodes[0]).values())
        return [node for node in self.nodes if node.port in ports]

    def master_of(self, key: str) -> PrivateServer:
        """Return the master that has a key."""
        return self.owner(key)

    def hand_over(self, key: str, _: random.Random) -> None:
        """Let a replica take the place of the master that has a key, with every write."""
        old = self.master_of(key)
        replica = next(node for node in self.nodes if _master_port(node) == old.port)
        asked_at = 0.0

        def done() -> bool:
            nonlocal asked_at
            if self.owner(key, replica) is replica:
                return True
            if time.monotonic() - asked_at > _TAKES_OVER:
                with admin(replica) as redis:
                    redis.execute_command("CLUSTER", "FAILOVER")
                asked_at = time.monotonic()
            return False

        wait_for(done, "the failover")

    def wait_until_sound(self) -> None:
        """Wait until all agree about the masters, and each replica has, also on its disk, what its master has."""

        def sound() -> bool:
            states = [self.info(node) for node in self.nodes]
            if any(
                state["cluster_state"] != "ok" or state["cluster_slots_ok"] != state["cluster_slots_assigned"] for state in states
            ):
                return False
            if any(self.slots(node) != self.slots(self.nodes[0]) for node in self.nodes):
                return False
            masters = self.list_masters()
            by_port = {master.port: master for master in masters}
            return all(
                _is_on_disk(node) and (node in masters or _follows(node, by_port[_master_port(node) or 0])) for node in self.nodes
            )

        wait_for(sound, "the cluster is sound")


Replicated = BehindSentinels | InCluster


def _master_port(server: PrivateServer) -> int | None:
    """The port of the server that a replica follows; None for a master."""
    with admin(server) as redis:
        port: int | None = redis.info("replication").get("master_port")
    return port


def _follows(replica: PrivateServer, master: PrivateServer) -> bool:
    """Whether a replica has all that its master had when this was called."""
    with admin(master) as redis:
        written = redis.info("replication")["master_repl_offset"]
    with admin(replica) as redis:
        told = redis.info("replication")
    return bool(
        told["role"] == "slave"
        and told["master_port"] == master.port
        and told["master_link_status"] == "up"
        and told["slave_repl_offset"] >= written
    )


def _is_on_disk(server: PrivateServer) -> bool:
    """Whether a server would find all its data again: not while it rewrites its file, as it does after a full synchronization."""
    with admin(server) as redis:
        told = redis.info("persistence")
    return not (told["loading"] or told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"])
