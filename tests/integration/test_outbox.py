"""The outbox: messages in the transaction of the data they are about, and the relay that stores
them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, event, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import delayq
from delayq.outbox import Outbox, Relay, RelayCounts, _relay, _rows, _table
from tests.support.command_line import Cli
from tests.support.postgres import NOT_FOUND, PrivatePostgres, find_programs
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.support.servers import PrivateServer

    AnyEngine = Engine | AsyncEngine

DRIVERS = ("sqlite", "sqlite+aiosqlite", "psycopg", "psycopg_async", "asyncpg")
BOTH = ("sqlite", "psycopg")


@pytest.fixture(scope="session")
def _postgres() -> Iterator[Callable[[], PrivatePostgres]]:
    """Start a PostgreSQL for the session, when the first test asks for it."""
    servers: list[PrivatePostgres] = []

    def get() -> PrivatePostgres:
        if not servers:
            programs = find_programs()
            if programs is None:
                pytest.skip(NOT_FOUND)
            servers.append(PrivatePostgres(programs))
            servers[0].start()
        return servers[0]

    yield get
    for server in servers:
        server.close()


@pytest.fixture
def database(
    request: pytest.FixtureRequest, tmp_path: Path, _postgres: Callable[[], PrivatePostgres]
) -> str:
    """Return the address of an empty database."""
    driver: str = getattr(request, "param", "sqlite")
    if driver.startswith("sqlite"):
        return f"{driver}:///{tmp_path}/db"
    server = _postgres()
    server.sql("DROP SCHEMA public CASCADE")
    server.sql("CREATE SCHEMA public")
    return server.url(driver)


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AnyEngine]:
    driver = database.partition(":")[0].partition("+")[2]
    if driver in ("aiosqlite", "psycopg_async", "asyncpg"):
        found = create_async_engine(database)
        yield found
        await found.dispose()
    else:
        one = create_engine(database)
        yield one
        one.dispose()


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[delayq.Client]:
    async with delayq.connect(server.url) as client:
        yield client


@pytest.fixture
async def outbox(engine: AnyEngine) -> Outbox:
    """Return an outbox with an empty table."""
    outbox = Outbox(engine=engine)
    await _run(engine, outbox.table.create)
    return outbox


async def _run(engine: AnyEngine, work: Callable[[Any], Any]) -> Any:
    """Call a function with a connection, and commit."""
    if isinstance(engine, AsyncEngine):
        async with engine.begin() as connection:
            return await connection.run_sync(work)
    with engine.begin() as connection:
        return work(connection)


async def _rows_of(outbox: Outbox) -> list[Any]:
    assert outbox.engine is not None
    query = select(outbox.table).order_by(outbox.table.c.number)
    rows: list[Any] = await _run(outbox.engine, lambda connection: connection.execute(query).all())
    return rows


async def _values(client: delayq.Client, queue: str = "mails") -> list[Any]:
    """Take and handle what is due."""
    values = []
    for message in await client.reliable_queue(queue).claim(1000):
        values.append(message.value)
        await message.ack()
    return values


def each_driver(function: Any) -> Any:
    return pytest.mark.parametrize("database", DRIVERS, indirect=True)(function)


def each_database(function: Any) -> Any:
    return pytest.mark.parametrize("database", BOTH, indirect=True)(function)


class TestWriting:
    @each_driver
    async def test_a_message_is_stored_if_its_transaction_is_committed(
        self, outbox: Outbox, engine: AnyEngine, client: delayq.Client
    ) -> None:
        if isinstance(engine, AsyncEngine):
            async with AsyncSession(engine) as session:
                outbox.offer(session.sync_session, "mails", "committed")
                await session.commit()
                outbox.offer(session.sync_session, "mails", "rolled back")
                await session.flush()
                await session.rollback()
        else:
            with Session(engine) as session:
                outbox.offer(session, "mails", "committed")
                session.commit()
                outbox.offer(session, "mails", "rolled back")
                session.flush()
                session.rollback()
        counts = await outbox.relay().drain(client)
        assert counts == RelayCounts(1, 0)
        assert await _values(client) == ["committed"]
        assert await _rows_of(outbox) == []

    @each_database
    async def test_a_connection_will_do(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        with engine.begin() as connection:
            kept = outbox.offer(connection, "mails", 1)
            with connection.begin_nested() as savepoint:
                outbox.offer(connection, "mails", 2)
                savepoint.rollback()
            assert outbox.offer(connection, "mails", 3, id="own") == "own"
        await outbox.relay().drain(client)
        messages = await client.reliable_queue("mails").claim(10)
        assert [(message.value, message.id) for message in messages] == [(1, kept), (3, "own")]

    async def test_every_option_of_an_offer_comes_along(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        with Session(engine) as session, session.begin():
            outbox.offer(
                session,
                "mails",
                {"a": 1},
                headers={"k": "v"},
                priority=3,
                ttl=60,
                max_attempts=2,
                timeout=5,
                group="ada",
                id="x",
                unique_for=60,
            )
        await outbox.relay().drain(client)
        (message,) = await client.reliable_queue("mails").claim()
        assert message.value == {"a": 1}
        assert (message.id, message.headers, message.priority) == ("x", {"k": "v"}, 3)
        assert message.group == "ada"
        await message.ack()
        with pytest.raises(delayq.DuplicateMessage):
            await client.reliable_queue("mails").offer(1, id="x")

    async def test_calls_of_tasks_know_their_queue_and_codec(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        tasks = delayq.Tasks("mails")
        sent = []

        @tasks.task
        async def send(to: str) -> None:
            sent.append(to)

        with Session(engine) as session, session.begin():
            outbox.offer(session, send.options(id="mail-1").to_offer("ada"))
        worker = delayq.Worker(client)
        worker.include(tasks)
        worker.relay(outbox, engine)
        await worker.run(burst=True)
        assert sent == ["ada"]

    async def test_codecs_are_chosen_by_queue(self, engine: Engine, client: delayq.Client) -> None:
        outbox = Outbox(engine=engine, codecs={"texts": delayq.StringCodec()})
        outbox.table.create(engine)
        with engine.begin() as connection:
            outbox.offer(connection, "texts", "plain")
        await outbox.relay().drain(client)
        queue = client.reliable_queue("texts", codec=delayq.StringCodec())
        assert [message.value for message in await queue.claim()] == ["plain"]

    @pytest.mark.parametrize(
        ("arguments", "options"),
        [
            (("mails", 1), {"delay": -1}),
            (("mails", 1), {"delay": 1, "at": datetime.now(UTC)}),
            (("mails", 1), {"at": datetime(2030, 1, 1)}),  # noqa: DTZ001
            (("mails", 1), {"priority": 10}),
            (("mails", 1), {"ttl": 1, "delay": 2}),
            (("mails", 1), {"unique_for": 5}),
            (("", 1), {}),
            (("mails", object()), {}),
            (("mails", "x" * 600_000), {}),
            ((delayq.Offer(1),), {}),
        ],
    )
    async def test_what_is_wrong_is_refused_before_anything_is_written(
        self, outbox: Outbox, engine: Engine, arguments: Any, options: Any
    ) -> None:
        with Session(engine) as session, session.begin():
            with pytest.raises((delayq.BadInput, delayq.EncodeError)):
                outbox.offer(session, *arguments, **options)
            assert not session.new

    async def test_other_objects_are_refused(self, outbox: Outbox) -> None:
        async with AsyncSession(create_async_engine("sqlite+aiosqlite://")) as session:
            with pytest.raises(delayq.BadInput, match="sync_session"):
                outbox.offer(session, "mails", 1)  # type: ignore[call-overload]

    async def test_the_table_can_be_part_of_other_metadata(self, engine: Engine) -> None:
        metadata = MetaData()
        outbox = Outbox("my_outbox", metadata=metadata)
        assert metadata.tables["my_outbox"] is outbox.table
        metadata.create_all(engine)
        with engine.begin() as connection:
            outbox.offer(connection, "mails", 1)

    def test_an_engine_is_needed(self) -> None:
        with pytest.raises(delayq.ConfigurationError, match="no engine"):
            Outbox().relay()


class TestTimes:
    @each_database
    async def test_a_delay_counts_from_the_row_and_a_moment_stays_one(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        moment = datetime(2040, 1, 1, 12, 30, tzinfo=UTC)
        with engine.begin() as connection:
            outbox.offer(connection, "mails", "in an hour", delay=3600, ttl=7200)
            outbox.offer(connection, "mails", "at a moment", at=moment)
            outbox.offer(connection, "mails", "due by now", delay=5)
            outbox.offer(connection, "mails", "expired by now", ttl=5)
            # As if they had been written half an hour ago.
            connection.execute(
                update(outbox.table).values(created_us=outbox.table.c.created_us - 1800 * 10**6)
            )
        await outbox.relay().drain(client)
        assert await _values(client) == ["due by now"]
        first, second = await client.reliable_queue("mails").list("delayed")
        assert (first.value, second.value) == ("in an hour", "at a moment")
        until_due = first.due_at - await client.server_time()
        assert timedelta(minutes=29) < until_due <= timedelta(minutes=30, seconds=5)
        assert second.due_at == moment


class TestRelaying:
    @each_database
    async def test_rows_of_a_queue_keep_their_order(
        self,
        outbox: Outbox,
        engine: Engine,
        client: delayq.Client,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(_table, "BATCH_ROWS", 7)
        with engine.begin() as connection:
            for number in range(50):
                outbox.offer(connection, f"queue-{number % 3}", number)
        await outbox.relay().drain(client)
        for queue in range(3):
            assert await _values(client, f"queue-{queue}") == [*range(queue, 50, 3)]

    @each_database
    async def test_several_relays_store_each_row_once_and_in_order(
        self,
        outbox: Outbox,
        engine: Engine,
        client: delayq.Client,
        server: PrivateServer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(_table, "BATCH_ROWS", 5)
        monkeypatch.setattr(_relay, "POLL_INTERVAL", 0.01)
        # Each of them takes over from those that are alive, too, so that they are in each other's
        # way as much as possible.
        monkeypatch.setattr(_relay, "_TAKE_OVER_AFTER", 0.0)
        total = 300

        async def write() -> None:
            for number in range(0, total, 3):
                with engine.begin() as connection:
                    for one in range(number, number + 3):
                        outbox.offer(connection, "mails", one)
                await asyncio.sleep(0)

        async with (
            delayq.connect(server.url) as second,
            delayq.connect(server.url) as third,
            outbox.relay().running(client),
            outbox.relay().running(second),
            outbox.relay().running(third),
        ):
            await write()
            seen: list[Any] = []

            async def all_seen() -> bool:
                seen.extend(await _values(client))
                return len(seen) >= total and not await _rows_of(outbox)

            await until(all_seen)
        assert seen == [*range(total)]
        assert await _values(client) == []

    @each_database
    async def test_a_row_that_can_never_be_stored_is_set_aside(
        self, outbox: Outbox, engine: Engine, client: delayq.Client, caplog: Any
    ) -> None:
        await client.reliable_queue("mails").offer("first", id="taken")
        with engine.begin() as connection:
            outbox.offer(connection, "mails", "again", id="taken")
            outbox.offer(connection, "mails", "ignored", id="taken", on_duplicate="ignore")
            outbox.offer(connection, "mails", "damaged", id="damaged")
            outbox.offer(connection, "mails", "ends", at=datetime(2050, 1, 1, tzinfo=UTC), ttl=5)
            outbox.offer(connection, "}", "no name for a queue")
            outbox.offer(connection, "mails", "good")
            connection.execute(
                update(outbox.table).where(outbox.table.c.id == "damaged").values(body=b"no line")
            )
        assert await outbox.relay().drain(client) == RelayCounts(2, 4)
        assert await _values(client) == ["first", "good"]
        errors = {row.number: row.error for row in await _rows_of(outbox)}
        assert "already taken" in errors[1]
        assert "damaged" in errors[3]
        assert "ttl ends before" in errors[4]
        assert "BadName" in errors[5]
        assert len(errors) == 4
        assert caplog.text.count("is set aside") == 4
        # Somebody mends it.
        with engine.begin() as connection:
            connection.execute(
                update(outbox.table).where(outbox.table.c.number == 1).values(error=None, id="new")
            )
        assert await outbox.relay().drain(client) == RelayCounts(1, 0)
        assert await _values(client) == ["again"]

    async def test_replace_takes_the_place_of_the_earlier_message(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        await client.reliable_queue("mails").offer("first", id="x")
        with engine.begin() as connection:
            outbox.offer(connection, "mails", "second", id="x", on_duplicate="replace")
        await outbox.relay().drain(client)
        assert await _values(client) == ["second"]

    async def test_a_full_queue_holds_up_no_other(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        queue = client.reliable_queue("full", max_size=2)
        await queue.offer("a")
        with engine.begin() as connection:
            for number in range(5):
                outbox.offer(connection, "full", number)
            outbox.offer(connection, "mails", "good")
        async with outbox.relay().running(client):
            await until(lambda: _values(client))
            seen: list[Any] = []

            async def all_seen() -> bool:
                seen.extend(await _values(client, "full"))
                return len(seen) == 6

            await until(all_seen)
        assert seen == ["a", *range(5)]

    async def test_messages_lie_in_the_partitions_of_their_ids_and_groups(
        self, outbox: Outbox, engine: Engine, client: delayq.Client
    ) -> None:
        queue = client.reliable_queue("mails", partitions=4)
        await queue.stats()
        with engine.begin() as connection:
            ids = [outbox.offer(connection, "mails", number) for number in range(40)]
            grouped = outbox.offer(connection, "mails", "grouped", group="ada")
        await outbox.relay().drain(client)
        for message_id in [*ids, grouped]:
            assert await queue.get(message_id) is not None
        assert await queue.cancel(ids[3])

    async def test_the_server_may_be_away(
        self, outbox: Outbox, engine: Engine, own_server: PrivateServer
    ) -> None:
        async with delayq.connect(own_server.url, retry_for=0.05) as client:
            with engine.begin() as connection:
                outbox.offer(connection, "mails", 1)
            async with outbox.relay().running(client):
                await until(lambda: _values(client))
                own_server.kill()
                with engine.begin() as connection:
                    outbox.offer(connection, "mails", 2)
                await asyncio.sleep(0.2)
                own_server.start()

                async def arrived() -> bool:
                    try:
                        return await _values(client) == [2]
                    except delayq.ServerError:
                        return False

                await until(arrived)

    async def test_durability_is_waited_for(
        self, outbox: Outbox, engine: Engine, own_server: PrivateServer
    ) -> None:
        async with delayq.connect(own_server.url) as client:
            with engine.begin() as connection:
                outbox.offer(connection, "mails", 1)
            relay = outbox.relay(durability="fsync")
            assert await relay.drain(client) == RelayCounts(1, 0)
            own_server.restart()
            assert await _values(client) == [1]
        with pytest.raises(delayq.BadInput):
            outbox.relay(durability="never")

    async def test_a_table_that_is_not_there_is_said_at_once(
        self, engine: Engine, client: delayq.Client
    ) -> None:
        with pytest.raises(delayq.ConfigurationError, match="cannot be read"):
            async with Outbox("missing", engine=engine).relay().running(client):
                pass

    @pytest.mark.parametrize("database", ["psycopg", "psycopg_async", "asyncpg"], indirect=True)
    async def test_a_notification_wakes_the_relay(
        self,
        outbox: Outbox,
        engine: AnyEngine,
        client: delayq.Client,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(_relay, "POLL_INTERVAL", 1000.0)
        async with outbox.relay().running(client):
            # The connection that listens may not be there yet.
            async def heard() -> bool:
                await _run(engine, lambda c: outbox.offer(c, "mails", 1))
                await asyncio.sleep(0.05)
                return bool(await _values(client))

            await until(heard)

    async def test_a_worker_relays_while_it_runs_and_says_where_to(
        self,
        outbox: Outbox,
        engine: Engine,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO", "delayq")
        worker = delayq.Worker(f"embedded:{tmp_path}/queues")
        seen = []

        @worker.listener("mails")
        async def handle(value: int) -> None:
            seen.append(value)

        worker.relay(outbox, engine)
        async with worker:
            with engine.begin() as connection:
                outbox.offer(connection, "mails", 1)
            await until(lambda: bool(seen))
        assert seen == [1]
        assert await _rows_of(outbox) == []
        line = f"the worker relays the outbox {outbox.table.name} to embedded:{tmp_path}/queues"
        assert line in caplog.messages

    async def test_a_worker_may_do_nothing_but_relay(
        self, outbox: Outbox, engine: Engine, server: PrivateServer, client: delayq.Client
    ) -> None:
        worker = delayq.Worker(server.url)
        worker.relay(outbox, engine)
        with engine.begin() as connection:
            outbox.offer(connection, "mails", 1)
        await worker.run(burst=True)
        assert await _values(client) == [1]


class TestMarks:
    def test_a_mark_is_read_as_it_was_written(self) -> None:
        for numbers in ((1,), (1, 2, 3), (1, 3, 4, 9), (7, 8)):
            mark = _rows.Mark("rtoken", 4, numbers)
            assert _rows.Mark.parse(str(mark)) == mark
        assert str(_rows.Mark("t", 1, (1, 2, 3, 5))) == "1 t 1 1-3,5"
        # One of a later release.
        with pytest.raises(ValueError, match="newer"):
            _rows.Mark.parse("2 token 1 1")

    def test_a_batch_has_few_bytes_or_one_row(self) -> None:
        large = _rows.BATCH_BYTES
        assert _rows.first_bytes([(1, 2 * large), (2, 1)]) == [1]
        assert _rows.first_bytes([(1, large // 2), (2, large // 2), (3, 1)]) == [1, 2]


class TestDeaths:
    @pytest.mark.gate
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @each_database
    async def test_a_relay_that_is_killed_at_any_step_loses_and_doubles_nothing(
        self,
        outbox: Outbox,
        engine: Engine,
        database: str,
        server: PrivateServer,
        client: delayq.Client,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Kill the process before and after each statement, commit and call to the server.

        What it has stored until then is handled before the next relay begins: a row that it stored
        and did not delete is stored a second time by every relay that only compares ids.
        """
        monkeypatch.setattr(_table, "BATCH_ROWS", 3)
        monkeypatch.setattr(_relay, "_TAKE_OVER_AFTER", 0.0)
        places: set[str] = set()
        doubled_by_retry = 0
        for step in itertools.count(1):
            with engine.begin() as connection:
                for number in range(7):
                    outbox.offer(connection, "mails", number, id="own" if number == 4 else None)
            with engine.connect() as connection:
                outbox.offer(connection, "mails", "rolled back")
            place = _die_at(step, database, server.url)
            seen = await _values(client)
            doubled_by_retry += bool(seen) and bool(await _rows_of(outbox))
            await outbox.relay().drain(client)
            seen += await _values(client)
            assert seen == [*range(7)], f"killed at step {step}: {place}"
            assert await _rows_of(outbox) == []
            if place is None:
                break
            places.add(place)
        assert step > 40
        assert {"before commit", "after commit", "before store", "after store"} <= places
        # The case that this is about has occurred.
        assert doubled_by_retry > 3


def _die_at(step: int, database: str, url: str) -> str | None:
    """Run a relay in a process of its own that kills itself at a step. Return the name of the step;
    None if it has come to its end.
    """
    report, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report)
        try:
            asyncio.run(_relay_until(step, database, url, ours))
            os._exit(0)
        except BaseException:
            # Whatever it is, this process must not go on with the tests.
            os._exit(3)
    os.close(ours)
    with os.fdopen(report) as pipe:
        place = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return place
    assert os.WEXITSTATUS(status) == 0
    return None


async def _relay_until(step: int, database: str, url: str, report: int) -> None:
    from delayq._reliable.relay_port import RelayPort

    counted = itertools.count(1)

    def pass_by(place: str) -> None:
        if next(counted) == step:
            os.write(report, place.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    engine = create_engine(database)
    event.listen(engine, "before_cursor_execute", lambda *_: pass_by("before statement"))
    event.listen(engine, "after_cursor_execute", lambda *_: pass_by("after statement"))
    event.listen(engine, "commit", lambda _: pass_by("before commit"))
    original_send, original_step = RelayPort._send, Relay.step

    async def send(*args: Any) -> Any:
        pass_by("before store")
        outcome = await original_send(*args)
        pass_by("after store")
        return outcome

    async def stepped(*args: Any) -> Any:
        batch = await original_step(*args)
        pass_by("after commit")
        return batch

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(RelayPort, "_send", send)
    monkeypatch.setattr(Relay, "step", stepped)
    async with delayq.connect(url) as client:
        await Outbox(engine=engine).relay().drain(client)


APPLICATION = """
from sqlalchemy import create_engine
from delayq.outbox import Outbox
engine = create_engine({url!r})
outbox = Outbox("delayq_outbox")
complete = Outbox("delayq_outbox", engine=engine)
"""


class TestCommand:
    @pytest.fixture
    def cli(
        self,
        server: PrivateServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> Iterator[Cli]:
        """Return the command line in a directory with an application and one row in its outbox."""
        url = f"sqlite:///{tmp_path}/db"
        (tmp_path / "outbox_app.py").write_text(APPLICATION.format(url=url))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])
        engine = create_engine(url)
        outbox = Outbox(engine=engine)
        outbox.table.create(engine)
        with engine.begin() as connection:
            outbox.offer(connection, "mails", 1)
        engine.dispose()
        yield Cli(server.url, capsys)
        sys.modules.pop("outbox_app", None)

    @pytest.mark.parametrize(
        "given",
        ["complete", "outbox --engine outbox_app:engine", "outbox --database-url sqlite:///db"],
    )
    def test_it_relays_what_is_there(self, cli: Cli, given: str) -> None:
        told = [{"outbox": "delayq_outbox", "stored": 1, "set_aside": 0}]
        assert cli(f"relay outbox_app:{given} --burst") == (0, told), cli.error
        assert cli("stats mails")[1][0]["ready"] == 1
        status, out = cli.plain(f"relay outbox_app:{given} --burst")
        assert (status, "relayed 0 messages of delayq_outbox" in out) == (0, True)

    def test_a_signal_stops_it(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("delayq.cli.relay.tell", lambda *_, **__: os.kill(os.getpid(), 15))
        status, _ = cli("relay outbox_app:complete")
        assert status == 0

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("relay outbox_app:outbox", "has no engine: pass --engine"),
            ("relay outbox_app:engine", "is a Engine, not a delayq.outbox.Outbox"),
            ("relay outbox_app:outbox --engine outbox_app:outbox", "not an engine of SQLAlchemy"),
            ("relay outbox_app:outbox --database-url nonsense", "is no address of SQLAlchemy"),
            ("relay outbox_app:outbox --database-url mysql+pymysql://h/d", "driver"),
            ("relay outbox_app:outbox --database-url sqlite:///other", "cannot be read"),
            ("relay nowhere:outbox", "there is no module 'nowhere'"),
        ],
    )
    def test_what_is_wrong_is_said_in_a_line(self, cli: Cli, line: str, problem: str) -> None:
        status, _ = cli.plain(line)
        assert status == 2
        assert problem in " ".join(cli.error.split())
