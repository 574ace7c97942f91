"""The database of an outbox through SQLAlchemy."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import to_thread

from delayq.outbox._listening import LISTEN, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

R = TypeVar("R")

# Each statement sees what was committed before it, also by a relay that had the lock before.
_ISOLATION = {"postgresql": {"isolation_level": "READ COMMITTED"}}


class ThreadedDatabase:
    """The database of an :class:`~sqlalchemy.Engine`, whose calls run in threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._dialect = engine.dialect.name
        self._transactions = engine.execution_options(**_ISOLATION.get(self._dialect, {}))

    async def run(self, work: Callable[[Connection], R]) -> R:
        """Call a function with a connection, in a transaction, and commit it."""

        def act() -> R:
            with self._transactions.begin() as connection:
                return work(connection)

        return await to_thread.run_sync(act)

    def opened(
        self, notified: Callable[[str], object] | None
    ) -> AbstractAsyncContextManager[object]:
        """Call ``notified`` with the queue of each row that is committed."""
        if notified is None or self._dialect != "postgresql":
            return nullcontext()
        return listening(self._connect, notified)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        connection = await to_thread.run_sync(self._engine.connect)
        try:
            yield await to_thread.run_sync(_listen, connection)
        finally:
            await to_thread.run_sync(connection.close)


class AsyncDatabase:
    """The database of an :class:`~sqlalchemy.ext.asyncio.AsyncEngine`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._dialect = engine.dialect.name
        self._transactions = engine.execution_options(**_ISOLATION.get(self._dialect, {}))

    async def run(self, work: Callable[[Connection], R]) -> R:
        """Call a function with a connection, in a transaction, and commit it."""
        async with self._transactions.begin() as connection:
            return await connection.run_sync(work)

    def opened(
        self, notified: Callable[[str], object] | None
    ) -> AbstractAsyncContextManager[object]:
        """Call ``notified`` with the queue of each row that is committed."""
        if notified is None or self._dialect != "postgresql":
            return nullcontext()
        return listening(self._connect, notified)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        connection, driver = await self._engine.connect(), None
        try:
            driver = await connection.run_sync(_listen)
            yield driver
        finally:
            await connection.close()
            if driver is not None:
                # SQLAlchemy leaves a connection of psycopg open that belongs to no pool.
                await driver.close()


def _listen(connection: Connection) -> Any:
    """Listen on a connection, which belongs to no pool from then on, and return the driver's."""
    connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(LISTEN)
    driver = connection.connection.driver_connection
    connection.detach()
    return driver
