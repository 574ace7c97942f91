"""Clusters, and servers watched by Sentinels, which end with the test that starts them."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from delayq._redis.slots import SLOTS
from tests.support.servers import Kind, PrivateServer, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

# The silence after which the other nodes count a server as dead, ms.
NODE_TIMEOUT = 1000
_WITHIN = 60.0
# While one master is away, the others keep serving their slots.
_NODE = f"""
--cluster-enabled yes --cluster-config-file nodes.conf --cluster-node-timeout {NODE_TIMEOUT}
--cluster-replica-validity-factor 0 --cluster-require-full-coverage no --appendonly yes
""".split()
_FAST = ("--repl-diskless-sync-delay", "0", "--maxclients", "4000")


def wait_for(condition: Callable[[], object], what: str, within: float = _WITHIN) -> None:
    """Wait until ``condition`` holds. A condition that raises does not hold."""
    give_up_at = time.monotonic() + within
    reason: object = None
    while time.monotonic() < give_up_at:
        try:
            if condition():
                return
        except (RedisError, OSError) as error:
            reason = error
        time.sleep(0.02)
    raise TimeoutError(f"{what}: not within {within:g} s ({reason})")


def admin(server: PrivateServer) -> Redis:
    """Return a client to administer a server."""
    return Redis(unix_socket_path=str(server.socket_path), socket_timeout=10, decode_responses=True)


def wait_for_link(replica: PrivateServer) -> None:
    """Wait until a replica hears its master."""
    with admin(replica) as redis:
        wait_for(lambda: redis.info("replication")["master_link_status"] == "up", "the link")


def is_replicated(master: PrivateServer) -> bool:
    """Tell whether all replicas have everything that the master has confirmed."""
    with admin(master) as redis:
        replication = redis.info("replication")
    return all(
        replication[f"slave{n}"]["offset"] == replication["master_repl_offset"]
        for n in range(replication["connected_slaves"])
    )


class _Several:
    """Servers that start together and stop at the end of the block."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    start: Callable[[], None]
    close: Callable[[], None]


class TestCluster(_Several):
    """Masters that share the slots evenly, followed by replicas assigned to them in turn."""

    __test__ = False

    def __init__(
        self,
        kind: Kind,
        masters: int = 3,
        replicas: int = 0,
        *,
        options: tuple[str, ...] = (),
        within: Path | None = None,
    ) -> None:
        self.masters = masters
        self.nodes = [self._node(kind, options, within) for _ in range(masters + replicas)]

    @staticmethod
    def _node(kind: Kind, more: tuple[str, ...], within: Path | None) -> PrivateServer:
        options = ("--cluster-port", str(free_port()), *_NODE, *_FAST, *more)
        return PrivateServer(kind, tcp=True, options=options, within=within)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start all nodes and wait until they form one cluster."""
        for epoch, node in enumerate(self.nodes, 1):
            node.start()
            with admin(node) as redis:
                redis.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
                # A node forgets one that it was told to meet and did not reach in this time.
                redis.config_set("cluster-node-timeout", 60_000)
        for place in range(self.masters):
            first, last = place * SLOTS // self.masters, (place + 1) * SLOTS // self.masters - 1
            with admin(self.nodes[place]) as redis:
                redis.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        with admin(self.nodes[0]) as redis:
            for node in self.nodes[1:]:
                port = int(node._options[node._options.index("--cluster-port") + 1])
                redis.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, port)
        wait_for(
            lambda: all(
                self.info(node)["cluster_known_nodes"] == str(len(self.nodes))
                for node in self.nodes
            ),
            "the nodes meet",
        )
        for place, node in enumerate(self.nodes[self.masters :]):
            master = self.id_of(self.nodes[place % self.masters])
            with admin(node) as redis:
                wait_for(
                    lambda redis=redis, master=master: redis.execute_command(  # type: ignore[misc]
                        "CLUSTER", "REPLICATE", master
                    ),
                    "a replica",
                )
            wait_for_link(node)
        wait_for(
            lambda: all(self.info(node)["cluster_state"] == "ok" for node in self.nodes),
            "the cluster's state",
        )
        for node in self.nodes:
            wait_for(lambda node=node: len(self.slots(node)) >= self.masters, "all know the slots")  # type: ignore[misc]
            with admin(node) as redis:
                redis.config_set("cluster-node-timeout", NODE_TIMEOUT)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def info(self, node: PrivateServer) -> dict[str, str]:
        """Return the node's ``CLUSTER INFO``."""
        with admin(node) as redis:
            reply = redis.execute_command("CLUSTER", "INFO")
        if isinstance(reply, dict):
            return reply
        return dict(line.split(":", 1) for line in reply.split())

    def id_of(self, node: PrivateServer) -> str:
        """Return the id by which the cluster knows the node."""
        with admin(node) as redis:
            return str(redis.execute_command("CLUSTER", "MYID"))

    def slots(self, node: PrivateServer) -> dict[tuple[int, int], int]:
        """Return the port of the master of each slot range, as this node knows it."""
        with admin(node) as redis:
            reply = redis.execute_command("CLUSTER", "SLOTS")
        if isinstance(reply, dict):
            return {(first, last): facts["primary"][1] for (first, last), facts in reply.items()}
        return {(first, last): master[1] for first, last, master, *_ in reply}

    def owner(self, key: str, by: PrivateServer | None = None) -> PrivateServer:
        """Return the node that owns ``key``, as the first node or the node ``by`` knows it."""
        port = self._master_of(by or self.nodes[0], key_slot(key.encode()))
        return next(node for node in self.nodes if node.port == port)

    def move(
        self, key: str, to: PrivateServer, *, between: Callable[[], None] = lambda: None
    ) -> None:
        """Move the slot of ``key``, calling ``between`` after the first of its keys."""
        slot, source = key_slot(key.encode()), self.owner(key)
        source_id, target_id = self.id_of(source), self.id_of(to)
        with admin(source) as source_admin, admin(to) as right:
            right.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
            source_admin.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
            is_slot_assigned = False
            while keys := source_admin.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
                source_admin.execute_command(
                    "MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys
                )
                if not is_slot_assigned:
                    is_slot_assigned = True
                    between()
            for redis in (right, source_admin):
                redis.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        for node in self.nodes:
            if node.is_running() and node not in (source, to):
                wait_for(
                    lambda node=node: self._master_of(node, slot) == to.port,  # type: ignore[misc]
                    "the others hear of it",
                )

    def _master_of(self, node: PrivateServer, slot: int) -> int:
        return next(
            port for (first, last), port in self.slots(node).items() if first <= slot <= last
        )


class SentinelServer(PrivateServer):
    """A Sentinel that watches the master at a port of 127.0.0.1 under the name ``shop``."""

    def __init__(
        self,
        kind: Kind,
        port: int | None,
        quorum: int = 1,
        password: str | None = None,
        *,
        down_after: int = 1000,
    ) -> None:
        super().__init__(kind, tcp=True)
        secret = f"requirepass {password}\n" if password else ""
        self._settings = f"""\
port {self.port}
bind 127.0.0.1
unixsocket s
{secret}sentinel monitor shop 127.0.0.1 {port} {quorum}
sentinel down-after-milliseconds shop {down_after}
sentinel failover-timeout shop 5000
sentinel parallel-syncs shop 2
"""

    def _ping(self) -> bytes:
        return super()._ping().replace(b"-NOAUTH Authentication required.", b"+PONG")

    def _command(self) -> list[str]:
        configuration = self.directory / "sentinel.conf"
        if not configuration.exists():
            configuration.write_text(self._settings)
        return self.tied([str(self.kind.binary), "sentinel.conf", "--sentinel"])


class Watched(_Several):
    """One master, two replicas, and three Sentinels that watch them under the name ``shop``."""

    SERVICE = "shop"

    def __init__(
        self, kind: Kind, *, options: tuple[str, ...] = (), within: Path | None = None
    ) -> None:
        options = ("--appendonly", "yes", *_FAST, *options)
        self.servers = [
            PrivateServer(kind, tcp=True, options=options, within=within) for _ in range(3)
        ]
        self.sentinels = [SentinelServer(kind, self.servers[0].port, 2) for _ in range(3)]

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{places}/{self.SERVICE}"

    def start(self) -> None:
        """Start everything and wait until the Sentinels know one another and the replicas."""
        for server in self.servers:
            server.start()
        for server in self.servers[1:]:
            with admin(server) as redis:
                redis.execute_command("REPLICAOF", "127.0.0.1", self.servers[0].port)
            wait_for_link(server)
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            self._let_recover(sentinel)
            wait_for(
                lambda sentinel=sentinel: self._knows_all(sentinel),  # type: ignore[misc]
                "a Sentinel knows the others",
            )

    def close(self) -> None:
        for each in (*self.sentinels, *self.servers):
            each.close()

    def master(self, by: SentinelServer | None = None) -> PrivateServer:
        """Return the master, as the first Sentinel or the Sentinel ``by`` knows it."""
        with admin(by or self.sentinels[0]) as redis:
            _, port = redis.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def fail_over(self) -> None:
        """Promote another server to master, as an operator does."""
        old, asked_at = self.master(), -math.inf

        def failed_over() -> bool:
            nonlocal asked_at
            if self.master() is not old:
                return True
            if time.monotonic() > asked_at + 10:
                # Again: a Sentinel gives up if the machine pauses.
                asked_at = time.monotonic()
                with admin(self.sentinels[0]) as redis:
                    redis.execute_command("SENTINEL", "FAILOVER", self.SERVICE)
            return False

        wait_for(failed_over, "the failover")

    @staticmethod
    def _let_recover(sentinel: SentinelServer) -> None:
        """Shorten what a Sentinel does after a pause of the machine: nothing, for 30 s."""
        with admin(sentinel) as redis, suppress(ResponseError):  # Redis 6.2 cannot.
            redis.execute_command("SENTINEL", "DEBUG", "TILT-PERIOD", 1000)

    def _knows_all(self, sentinel: PrivateServer) -> bool:
        with admin(sentinel) as redis:
            state = redis.execute_command("SENTINEL", "MASTER", self.SERVICE)
        if isinstance(state, list):
            state = dict(zip(state[::2], state[1::2], strict=True))
        return int(state["num-slaves"]) == 2 and int(state["num-other-sentinels"]) == 2
