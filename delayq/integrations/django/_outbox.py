"""The outbox of a backend: tasks are written in the transaction of the caller, to the default
database, and relayed by the workers.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import Min
from django.db.models.expressions import RawSQL
from django.db.models.functions import Length

from delayq._reliable.offer import Offer
from delayq._reliable.settings import DEFAULTS
from delayq.codecs import JsonCodec
from delayq.outbox._listening import LISTEN, listening
from delayq.outbox._relay import Relay
from delayq.outbox._rows import (
    BATCH_ROWS,
    CHANNEL,
    FIELDS,
    Mark,
    Row,
    RowBatch,
    first_bytes,
    new_row,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from delayq.outbox._rows import Result

R = TypeVar("R")

# As in delayq.outbox._table.
_NOW = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
VENDORS = frozenset(_NOW)
"""The databases that an outbox can be in."""
_TABLE = "delayq_task_outbox"


def write(
    alias: str, queue: str, value: object, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """Write a task into the outbox, in the transaction of this thread.

    Args:
        alias: The key of the backend in ``TASKS``.
        queue: The queue's name.
        value: The message's value.
        options: Those of its offer.
        settings: Those of the queue.

    Returns:
        The message's id.

    Raises:
        BadInput, EncodeError: As for :meth:`delayq.ReliableQueue.offer`. Nothing was written.
    """
    max_payload = settings.get("max_payload") or DEFAULTS.options["max_payload"] or 0
    row = new_row(queue, Offer(value, **options), JsonCodec(), max_payload)
    vendor = connections[DEFAULT_DB_ALIAS].vendor
    now: str = _NOW[vendor]
    arguments: tuple[str, ...] = ()
    if vendor == "postgresql":
        # It also announces the row when the transaction is committed.
        now, arguments = f"(SELECT {now} FROM pg_notify(%s, %s))", (CHANNEL, queue)  # noqa: S608
    created = RawSQL(now, arguments)  # noqa: S611 - constants
    message_id = str(row.pop("id"))
    _rows().create(backend=alias, message_id=message_id, created_us=created, **row)
    return message_id


def _rows() -> Any:
    # Models can be imported when the apps are ready.
    from delayq.integrations.django.models import OutboxRow  # noqa: PLC0415

    model: Any = OutboxRow
    return model.objects.using(DEFAULT_DB_ALIAS)


class DjangoRows:
    """The rows of one backend: see :class:`delayq.outbox._rows.Rows`."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def queues(self, _connection: Any) -> list[str]:
        """Return the names of the queues that have rows to be sent."""
        waiting = _rows().filter(backend=self._alias, error=None)
        names: list[str] = []
        while True:
            others = waiting.filter(queue__gt=names[-1]) if names else waiting
            name = others.aggregate(first=Min("queue"))["first"]
            if name is None:
                return names
            names.append(name)

    def begin(
        self, connection: Any, queue: str, new_mark: Callable[[Sequence[int]], Mark] | None
    ) -> RowBatch | None:
        """Return the next batch of a queue, if there is one that can be begun."""
        rows = _rows().filter(backend=self._alias, queue=queue)
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))",
                    [f"{_TABLE} {self._alias} {queue}"],
                )
                if not cursor.fetchone()[0]:
                    return None
        else:
            # Takes the lock of the database: see delayq.outbox._table.
            _rows().filter(number=-1).update(mark=None)
        text = rows.filter(mark__isnull=False).values_list("mark", flat=True).first()
        if text is not None:
            mark = Mark.parse(text)
        else:
            sizes = (
                rows.filter(error=None)
                .order_by("number")
                .annotate(size=Length("body"))
                .values_list("number", "size")[:BATCH_ROWS]
            )
            numbers = first_bytes(sizes)
            if new_mark is None or not numbers:
                return None
            mark = new_mark(numbers)
            _rows().filter(number=numbers[0]).update(mark=str(mark))
        found = list(
            _rows()
            .filter(number__in=mark.numbers)
            .order_by("number")
            .annotate(now_us=RawSQL(_NOW[connection.vendor], ()))  # noqa: S611 - a constant
            .values_list("number", "message_id", *FIELDS[1:], "now_us")
        )
        batch = [Row(number, id_, bytes(body), *others) for number, id_, body, *others, _ in found]
        return RowBatch(mark, batch, max((row[-1] for row in found), default=0))

    def finish(self, _connection: Any, queue: str, result: Result) -> None:
        """Delete the rows that are stored, set others aside, and remove the mark."""
        for number, error in result.errors.items():
            _rows().filter(number=number).update(error=error, mark=None)
        if stored := result.stored:
            # No signals and no cascades, which would read the rows first.
            rows = _rows().filter(number__in=stored)
            rows._raw_delete(rows.db)  # noqa: SLF001 - what Django's own sessions use
        if result.unsent:
            rows = _rows().filter(backend=self._alias, queue=queue, mark=str(result.mark))
            rows.update(mark=None)


class DjangoDatabase:
    """The default database, which one thread uses while the relay runs."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[Any], R]) -> R:
        """Call a function with the connection, in a transaction, and commit it."""

        def act() -> R:
            connection = connections[DEFAULT_DB_ALIAS]
            try:
                with transaction.atomic(DEFAULT_DB_ALIAS):
                    return work(connection)
            except Exception:
                # It may have ended: the next call opens another one.
                connection.close()
                raise

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, act)

    @asynccontextmanager
    async def opened(self, notified: Callable[[str], object] | None) -> AsyncIterator[None]:
        """Keep the thread, and call ``notified`` with the queue of each row that is committed."""
        loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, "delayq outbox")
        try:
            if notified is not None and connections[DEFAULT_DB_ALIAS].vendor == "postgresql":
                async with listening(self._connect, notified):
                    yield
            else:
                yield
        finally:
            await loop.run_in_executor(self._executor, connections.close_all)
            self._executor.shutdown(wait=False)
            self._executor = None

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()

        def connect() -> Any:
            connection = connections.create_connection(DEFAULT_DB_ALIAS)
            connection.inc_thread_sharing()
            connection.ensure_connection()
            connection.connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(LISTEN)
            return connection

        connection = await loop.run_in_executor(self._executor, connect)
        try:
            yield connection.connection
        finally:
            await loop.run_in_executor(self._executor, connection.close)


class DjangoOutbox:
    """The outbox of one backend, for :meth:`delayq.Worker.relay`."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def relay(self, _engine: None, /, *, durability: str | None = None) -> Relay:
        """Return the relay for the rows of the backend."""
        return Relay(_TABLE, DjangoRows(self._alias), DjangoDatabase(), durability)
