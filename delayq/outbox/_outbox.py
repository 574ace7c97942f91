"""The outbox: a table in which messages wait for the commit of the caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

try:
    from sqlalchemy import Connection, MetaData, Table, insert
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session, registry
except ImportError as _error:
    raise ImportError(
        f"an Outbox needs SQLAlchemy 2: pip install 'delayq[outbox]' ({_error})"
    ) from _error

from delayq._checks import check_max_payload
from delayq._functions import spell_out
from delayq._reliable.offer import MessageOptions, Offer
from delayq._reliable.settings import DEFAULTS
from delayq.codecs import JsonCodec
from delayq.codecs.protocol import check_codec, codec_of_queue
from delayq.errors import BadInput, ConfigurationError
from delayq.outbox._engines import AsyncDatabase, ThreadedDatabase
from delayq.outbox._relay import Relay
from delayq.outbox._rows import new_row
from delayq.outbox._table import SqlRows, check_dialect, created_us, new_table
from delayq.tasks._calls import Call

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack

    from sqlalchemy import Engine

    from delayq.codecs import Codec

_MAX_PAYLOAD = DEFAULTS.options["max_payload"] or 0


class Outbox:
    """A table in which messages wait until the transaction that has written them is committed.

    ::

        outbox = Outbox("delayq_outbox", metadata=Base.metadata)

        with Session(engine) as session, session.begin():
            session.add(order)
            outbox.offer(session, "mails", {"order": order.id}, delay=30)

    A relay then stores the messages in their queues: :meth:`delayq.Worker.relay`, ``delayq relay``,
    or :meth:`relay`. PostgreSQL and SQLite are supported.

    Attributes:
        table: The table, for ``metadata.create_all()`` or Alembic.
        engine: The engine that was given.
    """

    def __init__(
        self,
        name: str = "delayq_outbox",
        *,
        metadata: MetaData | None = None,
        schema: str | None = None,
        engine: Engine | AsyncEngine | None = None,
        codecs: Mapping[str, Codec[Any]] | None = None,
        max_payload: int = _MAX_PAYLOAD,
    ) -> None:
        """Create an outbox. This touches no database.

        Args:
            name: The table's name.
            metadata: The metadata that the table becomes a part of; its own by default.
            schema: The table's schema.
            engine: The database, for ``delayq relay`` and for a :meth:`relay` that is given none.
            codecs: How values become bytes, by the name of the queue; as JSON in queues that are
                not named here. Tasks know their own.
            max_payload: The largest encoded value allowed, bytes.

        Raises:
            BadInput: ``max_payload`` or a codec is invalid.
        """
        check_max_payload(max_payload)
        for codec in (codecs or {}).values():
            check_codec(codec)
        self.table: Table = new_table(name, MetaData() if metadata is None else metadata, schema)
        self.engine: Engine | AsyncEngine | None = engine
        self._codecs = dict(codecs or {})
        self._max_payload = max_payload
        # Rows of a Session are objects: it writes those with the commit at the latest, also for an
        # AsyncSession, in whose coroutines nothing could be executed here.
        self._row_class: type[Any] = type("OutboxRow", (), {})
        registry().map_imperatively(self._row_class, self.table)

    @overload
    def offer(self, session: Session | Connection, queue: Offer[Call], /) -> str: ...
    @overload
    def offer(
        self,
        session: Session | Connection,
        queue: str,
        value: Any,
        /,
        **options: Unpack[MessageOptions],
    ) -> str: ...
    @spell_out(MessageOptions)
    def offer(
        self,
        session: Session | Connection,
        queue: str | Offer[Any],
        value: Any = None,
        /,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Write a message into the outbox, in the transaction of a session or connection.

        It is stored in its queue after the commit, and never if the transaction is rolled back.
        ``delay``, ``ttl`` and ``unique_for`` count from this call, by the database's clock. If a
        message with the same ``id`` is there when the row is relayed, the row is set aside, unless
        ``on_duplicate`` says otherwise.

        Args:
            session: A ``Session``, an ``AsyncSession.sync_session``, or a ``Connection``. A session
                writes the row when it flushes: with the commit at the latest.
            queue: The queue's name; or a call from :meth:`delayq.Task.to_offer`, whose options come
                with it.
            value: Any value that the codec of the queue can encode.
            **options: As for :meth:`delayq.ReliableQueue.offer`. ``durability`` is not among them:
                see :meth:`relay`.

        Returns:
            The message's id.

        Raises:
            BadInput, EncodeError: Nothing was written.
            ConfigurationError: The database is neither PostgreSQL nor SQLite.
        """
        row = self._row(queue, value, options)
        if isinstance(session, Connection):
            self._add_created(row, session.dialect.name)
            session.execute(insert(self.table).values(**row))
            return str(row["id"])
        if not isinstance(session, Session):
            raise BadInput(
                "offer() takes a Session or a Connection of SQLAlchemy, not"
                f" {type(session).__name__}: of an AsyncSession, pass its sync_session; of an"
                " AsyncConnection, call this in its run_sync()"
            )
        self._add_created(row, session.get_bind(self._row_class).dialect.name)
        entry = self._row_class()
        for name, content in row.items():
            setattr(entry, name, content)
        session.add(entry)
        return str(row["id"])

    def relay(
        self, engine: Engine | AsyncEngine | None = None, *, durability: str | None = None
    ) -> Relay:
        """Return a relay, which stores the messages in their queues once it runs.

        :meth:`delayq.Worker.relay` and ``delayq relay`` run one.

        Args:
            engine: The database; that of the outbox by default.
            durability: How safe messages must be before their rows are deleted, as for
                :meth:`delayq.ReliableQueue.offer`.

        Raises:
            ConfigurationError: There is no engine, or the database is neither PostgreSQL nor
                SQLite.
            BadInput: ``durability`` is invalid.
        """
        engine = self.engine if engine is None else engine
        if engine is None:
            raise ConfigurationError(
                f"the outbox {self.table.fullname!r} has no engine: pass it here, or to Outbox()"
            )
        check_dialect(engine.dialect.name)
        database = (
            AsyncDatabase(engine) if isinstance(engine, AsyncEngine) else ThreadedDatabase(engine)
        )
        return Relay(self.table.fullname, SqlRows(self.table), database, durability)

    def _row(self, queue: str | Offer[Any], value: Any, options: MessageOptions) -> dict[str, Any]:
        """Return the values of a row, without the time. Raises as :meth:`offer`."""
        if isinstance(queue, Offer):
            if value is not None or options:
                raise BadInput("the options of a call come with it: task.options(...).to_offer()")
            home = queue.value.home if isinstance(queue.value, Call) else None
            if home is None:
                raise BadInput(
                    "an Offer by itself does not say in which queue it belongs: pass a call from"
                    " task.to_offer(), or the queue's name and the value"
                )
            max_payload = home.settings.get("max_payload") or self._max_payload
            return new_row(home.name, queue, home.codec, max_payload)
        codec = codec_of_queue(self._codecs.get(queue) or JsonCodec(), queue)
        offer: Offer[Any] = Offer(value, **options)
        return new_row(queue, offer, codec, self._max_payload)

    def _add_created(self, row: dict[str, Any], dialect: str) -> None:
        check_dialect(dialect)
        row["created_us"] = created_us(dialect, row["queue"])

    def __repr__(self) -> str:
        return f"<Outbox {self.table.fullname!r}>"
