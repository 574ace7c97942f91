"""The server, with the findings of ``delayq doctor``, and the processes that work on its queues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delayq._dashboard.board import Page
from delayq._dashboard.rendering import span
from delayq._dashboard.rows import MessageRef, Row
from delayq._dashboard.sources import ReliableSource
from delayq._durations import datetime_at
from delayq.admin.catalog import FoundQueue
from delayq.admin.doctor import diagnose
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq.admin.doctor import Finding
    from delayq.stats import BlockedLoop, RunningMessage, WorkerInfo


# How long findings count, in seconds: the rights of every role are looked at.
_FRESH = 10.0
_MAX_QUEUES = 50


@dataclass(frozen=True)
class Server:
    """The figures of one server, from its INFO."""

    info: Mapping[str, str]

    @property
    def name(self) -> str:
        version = self.info.get("valkey_version")
        if version:
            return f"Valkey {version}"
        version = self.info.get("redis_version")
        return f"Redis {version}" if version else "A server that does not tell its version"

    def number(self, name: str) -> int:
        text = self.info.get(name, "0")
        return int(text) if text.isdigit() else 0

    @property
    def facts(self) -> dict[str, str]:
        """What the server tells about itself, by label. Not every service tells everything."""
        info, share = self.info, self.memory_share
        memory = info.get("used_memory_human", "?")
        memory += (
            ", no maximum"
            if share is None
            else f" of {info.get('maxmemory_human', '?')}, {share} %"
        )
        blocked = f"{self.number('blocked_clients'):,} blocked"
        has_log = info.get("aof_enabled") == "1"
        facts = {
            "uptime_in_seconds": ("Up for", span(self.number("uptime_in_seconds") * 1_000_000)),
            "used_memory": ("Memory", memory),
            "maxmemory_policy": ("When memory is full", info.get("maxmemory_policy", "")),
            "aof_enabled": ("Persistence", "append-only file" if has_log else "snapshots only"),
            "role": ("Role", info.get("role", "")),
            "connected_slaves": ("Replicas", f"{self.number('connected_slaves'):,}"),
            "connected_clients": (
                "Clients",
                f"{self.number('connected_clients'):,} connected, {blocked}",
            ),
            "instantaneous_ops_per_sec": (
                "Commands per second",
                f"{self.number('instantaneous_ops_per_sec'):,}",
            ),
        }
        return dict(fact for name, fact in facts.items() if name in info)

    @property
    def memory_share(self) -> int | None:
        """Return the percentage of the memory in use; None without a maximum."""
        maximum = self.number("maxmemory")
        return min(100, round(100 * self.number("used_memory") / maximum)) if maximum else None


async def load_server(board: Board, request: Request) -> Mapping[str, Any]:
    servers, findings = await board.shared("server", lambda: _search_queue(board), _FRESH)
    return {"servers": servers, "findings": findings}


async def _search_queue(board: Board) -> tuple[list[Server], list[Finding]]:
    try:
        infos = await board.session().server.info()
    except ServerRefused:
        infos = []
    found_queues = await board.queues.find_all()
    queues = [FoundQueue(*queue) for queue in found_queues[:_MAX_QUEUES]]
    findings = [finding async for finding in diagnose(board.client, queues)]
    return [Server(info) for info in infos], findings


SERVER = Page("/server", "server.html", load_server, label="Server", scope="server", refresh=30)


# Maximum number of processes that are shown.
_MAX_SHOWN = 200


@dataclass(frozen=True)
class Process:
    """A process, and the clients in it that work on queues: usually one for each queue."""

    host: str
    pid: int
    now_us: int
    clients: list[tuple[ReliableSource, WorkerInfo]] = field(default_factory=list)

    @property
    def sorted_clients(self) -> list[tuple[ReliableSource, WorkerInfo]]:
        return sorted(self.clients, key=lambda client: (client[1].queue, client[1].started_at))

    @property
    def last(self) -> WorkerInfo:
        """The client that has reported last."""
        return max((worker for _, worker in self.clients), key=lambda worker: worker.seen_at)

    @property
    def silence(self) -> float | None:
        """For how many seconds it has not reported, if its next report is overdue."""
        return self.last.silence(datetime_at(self.now_us))

    @property
    def running(self) -> int:
        return sum(worker.running for _, worker in self.clients)

    @property
    def slots(self) -> int:
        """How many messages it handles at a time. Queues share the slots of a worker."""
        return max(worker.process_slots for _, worker in self.clients)

    @property
    def started_at(self) -> datetime:
        return min(worker.started_at for _, worker in self.clients)

    @property
    def blocked(self) -> BlockedLoop | None:
        """The code that blocked an event loop last, if any did within an hour."""
        return self.last.blocked


async def load_workers(board: Board, request: Request) -> Mapping[str, Any]:
    selected = await board.reliable(request) if request.query_params.get("name") else None
    sources = [selected] if selected is not None else await _reliable_sources(board)
    now = await board.now()
    processes: dict[tuple[str, int], Process] = {}
    troubles: list[tuple[ReliableSource, str]] = []
    for source, workers in zip(sources, await board.live.workers(sources), strict=True):
        if isinstance(workers, str):
            troubles.append((source, workers))
        else:
            for worker in workers:
                key = worker.host, worker.pid
                processes.setdefault(key, Process(*key, now)).clients.append((source, worker))
    return {
        "processes": [process for _, process in sorted(processes.items())][:_MAX_SHOWN],
        "total": len(processes),
        "troubles": troubles,
        "chosen": selected,
        "now": now,
        "row_of": _row_of,
    }


async def _reliable_sources(board: Board) -> list[ReliableSource]:
    sources = [board.queues.of(*queue) for queue in await board.queues.find_all()]
    return [source for source in sources if isinstance(source, ReliableSource)]


def _row_of(message: RunningMessage) -> Row:
    """Return what a link to a message needs."""
    return Row(MessageRef(message.id.encode(), message.partition), "leased", None)


WORKERS = Page("/workers", "workers.html", load_workers, label="Workers", scope="server", refresh=5)
