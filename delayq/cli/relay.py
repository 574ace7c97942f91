"""The command ``delayq relay``: stores the messages of an outbox in their queues."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import delayq
from delayq.cli.options import AsJson, LogLevel, LogLevels, RequiredUrl
from delayq.cli.output import CommandFailed, report, tell
from delayq.cli.running import server_of, until_signalled
from delayq.cli.worker.child import import_attribute, log_to_stderr

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from delayq.outbox import Outbox, Relay


def relay(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:ATTRIBUTE", help="The delayq.outbox.Outbox, such as app.db:outbox."
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE",
            help=(
                "The engine of SQLAlchemy for its database, such as app.db:engine. Defaults to"
                " that of Outbox(engine=...)."
            ),
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="DELAYQ_DATABASE_URL",
            help="Its database, instead: postgresql+psycopg://user@host/shop.",
        ),
    ] = None,
    burst: Annotated[
        bool, typer.Option("--burst", help="Exit when the rows that are there are relayed.")
    ] = False,
    durability: Annotated[
        str | None,
        typer.Option(
            help="How safe a message must be before its row is deleted: fsync or replicas:N."
        ),
    ] = None,
    log_level: LogLevel = LogLevels.INFO,
    url: RequiredUrl = None,
    as_json: AsJson = False,
) -> None:
    """Store the messages of an outbox in their queues, as their transactions are committed.

    Modules are also imported from the working directory. Several relays may run; `worker.relay()`
    runs one within a worker. SIGTERM or Ctrl-C stops it when what it is sending is stored.

    Exit status: 0 after a stop or a burst; 2 if the outbox or the server cannot be reached.

    Example: `delayq relay app.db:outbox --engine app.db:engine`
    """
    server = server_of(url)
    sys.path.insert(0, str(Path.cwd()))
    log_to_stderr(log_level)
    outbox = _outbox(reference)
    found = _engine(engine, database_url) or outbox.engine
    if found is None:
        raise CommandFailed(
            f"{reference} has no engine: pass --engine app.db:engine or --database-url, or make it"
            " Outbox(engine=engine)"
        )
    relay = outbox.relay(found, durability=durability)

    async def main(caught: list[int]) -> None:
        async with delayq.connect(server) as client:
            try:
                await _relay(relay, client, burst=burst)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not caught or task is None:
                    raise
                task.uncancel()

    until_signalled(main)
    stored, set_aside = relay.counts.stored, relay.counts.set_aside
    report(
        {"outbox": relay.name, "stored": stored, "set_aside": set_aside},
        f"relayed {stored:,} {'message' if stored == 1 else 'messages'} of {relay.name}"
        + (f"; set aside {set_aside:,}, with their errors" if set_aside else ""),
        as_json=as_json,
    )


async def _relay(relay: Relay, client: delayq.Client, *, burst: bool) -> None:
    if burst:
        await relay.drain(client)
        return
    async with relay.running(client):
        tell(f"relaying {relay.name} to {client.label}; Ctrl-C stops", prefix="")
        await asyncio.Event().wait()


def _outbox(reference: str) -> Outbox:
    member = import_attribute(reference, "app.db:outbox")
    # The module has imported it, if it is one.
    from delayq.outbox import Outbox  # noqa: PLC0415 - an extra

    if not isinstance(member, Outbox):
        raise CommandFailed(f"{reference} is a {type(member).__name__}, not a delayq.outbox.Outbox")
    return member


def _engine(reference: str | None, database_url: str | None) -> Engine | AsyncEngine | None:
    """Return the engine that the command names, if it does."""
    from sqlalchemy import Engine, create_engine, make_url  # noqa: PLC0415 - an extra
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError  # noqa: PLC0415 - likewise
    from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine  # noqa: PLC0415 - likewise

    if reference is not None:
        member: Any = import_attribute(reference, "app.db:engine")
        if not isinstance(member, Engine | AsyncEngine):
            raise CommandFailed(
                f"{reference} is a {type(member).__name__}, not an engine of SQLAlchemy"
            )
        return member
    if not database_url:
        return None
    try:
        address = make_url(database_url)
        if address.get_dialect().is_async:
            return create_async_engine(address)
        return create_engine(address)
    except (ArgumentError, NoSuchModuleError) as error:
        # The text of the first quotes the address, and with it the password.
        raise CommandFailed(
            "--database-url is no address of SQLAlchemy, such as postgresql+psycopg://user@host/db"
        ) from error
    except ImportError as error:
        raise CommandFailed(f"the driver of --database-url is missing: {error}") from error
