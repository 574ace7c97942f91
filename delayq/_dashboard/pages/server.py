"""The server: its figures, and the findings of ``delayq doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delayq._dashboard.page import Page
from delayq._redis import server_info
from delayq.admin.catalog import FoundQueue
from delayq.admin.doctor import diagnose
from delayq.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from delayq._dashboard.board import Board
    from delayq.admin.doctor import Finding

# How long findings count, in seconds: the rights of every role are looked at.
_FRESH = 10.0
_MOST_QUEUES = 50


@dataclass(frozen=True)
class Server:
    """The figures of one server, from its INFO."""

    info: Mapping[str, str]

    @property
    def name(self) -> str:
        version = self.info.get("valkey_version")
        return f"Valkey {version}" if version else f"Redis {self.info.get('redis_version', '?')}"

    def number(self, name: str) -> int:
        text = self.info.get(name, "0")
        return int(text) if text.isdigit() else 0

    @property
    def memory_share(self) -> int | None:
        """Return the percentage of the memory in use; None without a maximum."""
        most = self.number("maxmemory")
        return min(100, round(100 * self.number("used_memory") / most)) if most else None


async def load(board: Board, request: Request) -> Mapping[str, Any]:
    servers, findings = await board.shared("server", lambda: _look(board), _FRESH)
    return {"servers": servers, "findings": findings}


async def _look(board: Board) -> tuple[list[Server], list[Finding]]:
    try:
        infos = await server_info.servers(board.session().server)
    except ServerRefused:
        infos = []
    known = await board.queues.find_all()
    queues = [FoundQueue(*each) for each in known[:_MOST_QUEUES]]
    findings = [finding async for finding in diagnose(board.client, queues)]
    return [Server(info) for info in infos], findings


PAGE = Page("/server", "server.html", load, label="Server", scope="server", refresh=30)
