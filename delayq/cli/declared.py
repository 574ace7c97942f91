"""``delayq configure --from``: gives queues the settings that an application declares."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from delayq._reliable.settings import Difference, option_text
from delayq.admin.reliable import ReliableInspector
from delayq.cli.errors import CommandFailed
from delayq.cli.output import print_json, say, tell
from delayq.cli.running import server_of, with_client
from delayq.cli.worker.child import demand_no_server, import_worker
from delayq.client import URL_VARIABLE
from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from delayq import Client
    from delayq.cli.options import Target


def configure_from(
    where: str, queue: Target | None, url: str | None, *, dry_run: bool, as_json: bool
) -> None:
    """Give the queues of a worker the settings that it declares, or only show them.

    Args:
        where: The worker, as ``module:attribute``.
        queue: The only queue to change; None for all.
        url: The server, for a worker that names none; None for that of the environment.
        dry_run: Whether to change nothing.
        as_json: Whether to print JSON.
    """
    # After the import of delayq, so that no module in that directory can shadow its imports.
    sys.path.insert(0, str(Path.cwd()))
    worker = import_worker(where)
    if url:
        demand_no_server(worker, where)
    server = worker.server or server_of(url or os.environ.get(URL_VARIABLE))
    declared = worker.declared_settings()
    if queue is not None:
        if queue.name not in declared:
            raise CommandFailed(f"{where} does not handle queue {queue.name!r}")
        declared = {queue.name: declared[queue.name]}

    async def act(client: Client) -> bool:
        tell(f"the server is {client.label}")
        count, complete = 0, True
        for name, settings in declared.items():
            inspector = ReliableInspector.of(client, name)
            for difference in await inspector.undeclared(settings):
                changes = {difference.name: difference.declared}
                error = "" if dry_run else await _change(inspector, changes)
                _show(name, difference, error, changed=not (dry_run or error), as_json=as_json)
                count, complete = count + 1, complete and not error
        if not (count or as_json):
            say(f"the server has what {where} declares")
        return complete

    if not with_client(server, act):
        raise typer.Exit(1)


async def _change(inspector: ReliableInspector, changes: dict[str, str]) -> str:
    """Change one setting, and return why that cannot be; empty if it was changed."""
    try:
        await inspector.configure(changes)
    except ConfigurationError as error:
        return str(error)
    return ""


def _show(queue: str, difference: Difference, error: str, *, changed: bool, as_json: bool) -> None:
    name, stored, declared = difference
    before = option_text(name, stored) if stored else None
    after = option_text(name, declared)
    if as_json:
        facts: dict[str, Any] = {"queue": queue, "setting": name, "server": before, "code": after}
        print_json({**facts, "changed": changed, "error": error or None})
        return
    text = f"{queue}: {name.replace('_', ' ')} {before or 'not set'} -> {after}"
    say(text if changed else f"{text} (not changed)")
    if error:
        tell(error)
