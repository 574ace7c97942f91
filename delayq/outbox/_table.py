"""The table of an outbox in SQLAlchemy, and the statements that read and change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    delete,
    func,
    literal_column,
    select,
    update,
)

from delayq.errors import ConfigurationError
from delayq.outbox._rows import (
    BATCH_ROWS,
    CHANNEL,
    FIELDS,
    LONGEST_NAME,
    Mark,
    Row,
    RowBatch,
    first_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement, Connection, ScalarSelect

    from delayq.outbox._rows import Result

# SQLite numbers only INTEGER columns by itself.
_NUMBER = BigInteger().with_variant(Integer, "sqlite")


def new_table(name: str, metadata: MetaData, schema: str | None) -> Table:
    """Return the table of an outbox."""
    table = Table(
        name,
        metadata,
        Column("number", _NUMBER, primary_key=True, autoincrement=True),
        Column("queue", String(LONGEST_NAME), nullable=False),
        Column("id", String(LONGEST_NAME), nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("priority", SmallInteger, nullable=False),
        Column("delay_us", BigInteger),
        Column("at_us", BigInteger),
        Column("ttl_us", BigInteger, nullable=False),
        Column("unique_us", BigInteger, nullable=False),
        Column("on_duplicate", String(8), nullable=False),
        Column("created_us", BigInteger, nullable=False),
        Column("mark", Text),
        Column("error", Text),
        schema=schema,
        # A number that was deleted is never used again.
        sqlite_autoincrement=True,
    )
    waiting = table.c.error.is_(None)
    Index(
        f"{name}_waiting",
        table.c.queue,
        table.c.number,
        postgresql_where=waiting,
        sqlite_where=waiting,
    )
    marked = table.c.mark.is_not(None)
    Index(f"{name}_marked", table.c.queue, postgresql_where=marked, sqlite_where=marked)
    return table


# In a transaction, clock_timestamp() goes on, while now() is the beginning of it.
_NOW: dict[str, ColumnElement[int]] = {
    "postgresql": literal_column(
        "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)", BigInteger
    ),
    "sqlite": literal_column(
        "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)", BigInteger
    ),
}


def check_dialect(name: str) -> None:
    """Raise ConfigurationError for a database that an outbox cannot be in."""
    if name not in _NOW:
        raise ConfigurationError(
            f"an outbox can be in PostgreSQL or SQLite, but this database is {name}"
        )


def created_us(dialect: str, queue: str) -> ColumnElement[int] | ScalarSelect[int]:
    """Return the expression for when a row is written: the time on the database's clock, in
    microseconds since 1970.

    On PostgreSQL, it also announces the row when the transaction is committed.
    """
    now = _NOW[dialect]
    if dialect != "postgresql":
        return now
    # In the same statement, because another one would cost the caller a round trip.
    announcement = func.pg_notify(CHANNEL, queue).table_valued("announced")
    return select(now).select_from(announcement).scalar_subquery()


class SqlRows:
    """The rows of an outbox in SQLAlchemy: see :class:`delayq.outbox._rows.Rows`."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def queues(self, connection: Connection) -> list[str]:
        """Return the names of the queues that have rows to be sent."""
        table = self._table
        first = select(func.min(table.c.queue)).where(table.c.error.is_(None))
        names: list[str] = []
        # From one to the next by the index, because DISTINCT reads every row.
        name = connection.scalar(first)
        while name is not None:
            names.append(name)
            name = connection.scalar(first.where(table.c.queue > name))
        return names

    def begin(
        self,
        connection: Connection,
        queue: str,
        new_mark: Callable[[Sequence[int]], Mark] | None,
    ) -> RowBatch | None:
        """Return the next batch of a queue, if there is one that can be begun."""
        table, dialect = self._table, connection.dialect.name
        if dialect == "postgresql":
            # Until the transaction ends. SKIP LOCKED would let a second relay begin with the rows
            # behind those of the first, and so break their order.
            lock = func.hashtextextended(f"{table.fullname} {queue}", 0)
            if not connection.scalar(select(func.pg_try_advisory_xact_lock(lock))):
                return None
        else:
            # A write, even of nothing, takes the lock of the database: what is read next cannot be
            # changed by another relay before this one has written its mark.
            connection.execute(update(table).where(table.c.number == -1).values(mark=None))
        text = connection.scalar(
            select(table.c.mark).where(table.c.queue == queue, table.c.mark.is_not(None)).limit(1)
        )
        if text is not None:
            mark = Mark.parse(text)
        else:
            sizes = connection.execute(
                select(table.c.number, func.length(table.c.body))
                .where(table.c.queue == queue, table.c.error.is_(None))
                .order_by(table.c.number)
                .limit(BATCH_ROWS)
            )
            numbers = first_bytes((number, size) for number, size in sizes)
            if new_mark is None or not numbers:
                return None
            mark = new_mark(numbers)
            connection.execute(
                update(table).where(table.c.number == numbers[0]).values(mark=str(mark))
            )
        rows = connection.execute(
            select(table.c.number, *(table.c[name] for name in FIELDS), _NOW[dialect])
            .where(table.c.number.in_(mark.numbers))
            .order_by(table.c.number)
        ).all()
        now_us = max(row[-1] for row in rows) if rows else 0
        return RowBatch(mark, [Row(*row[:-1]) for row in rows], now_us)

    def finish(self, connection: Connection, queue: str, result: Result) -> None:
        """Delete the rows that are stored, set others aside, and remove the mark."""
        table = self._table
        for number, error in result.errors.items():
            connection.execute(
                update(table).where(table.c.number == number).values(error=error, mark=None)
            )
        if stored := result.stored:
            connection.execute(delete(table).where(table.c.number.in_(stored)))
        if result.unsent:
            # Another relay that has finished this batch, too, may have begun the next one.
            mark = str(result.mark)
            connection.execute(
                update(table).where(table.c.queue == queue, table.c.mark == mark).values(mark=None)
            )
