"""All clients of a reliable queue share its settings, whichever of them declares or changes one."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import delayq
from delayq import ConfigurationError, Offer, QueueSettings
from delayq._reliable import settings_cache
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.scripts import CLAIM, OFFER, OFFER_NEW, SCHEDULE, SET_GROUP
from delayq._reliable.settings import LAYOUT
from delayq._reliable.store import ReliableStore
from delayq.admin.acl import acl_rules
from tests.support.depth import examples
from tests.support.reliable_fixtures import raw
from tests.support.reliable_store import HOUR, Store
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delayq import Client, ReliableQueue
    from delayq._redis.scripts import Script
    from tests.support.servers import PrivateServer

__all__ = ["raw"]

KEYS = ReliableKeys.of("jobs")


@pytest.fixture
async def other(server: PrivateServer) -> AsyncIterator[Client]:
    """A client of another process, as far as the server can tell."""
    async with delayq.connect(server.url, resync_interval=0.05) as client:
        yield client


async def epoch(raw: Any) -> bytes | None:
    epoch: bytes | None = await raw.hget(KEYS.settings, "epoch")
    return epoch


async def offer(raw: Any, script: Script, number: int, *message: str | bytes | int) -> Any:
    """Call one of the scripts for offers, for a client that knows of no settings."""
    keys = [*KEYS.of_script(script), KEYS.call("x")]
    return await raw.eval(script.text, len(keys), *keys, number, 1, *message)


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test before have warned of a difference."""
    monkeypatch.setattr(settings_cache, "_WARNED", set())


class TestDeclaring:
    async def test_a_handle_that_says_nothing_stores_nothing_but_the_number_of_partitions(
        self, client: Client, raw: Any
    ) -> None:
        jobs = client.reliable_queue("jobs")
        assert (await jobs.stats()).delayed == 0
        assert await jobs.claim() == []
        assert await raw.exists(KEYS.settings) == 0
        await jobs.offer(1, HOUR)
        stored = await raw.hgetall(KEYS.settings)
        assert stored.pop(b"epoch").isdigit()
        assert stored == {b"layout": LAYOUT.encode(), b"partitions": b"1"}
        assert await jobs.settings() == QueueSettings()
        await raw.flushall()
        await jobs.schedule("daily", every=HOUR, value=1)
        assert await raw.hget(KEYS.settings, "layout") == LAYOUT.encode()

    async def test_a_producer_that_names_only_the_queue_keeps_to_what_is_stored(
        self, client: Client, other: Client
    ) -> None:
        await client.reliable_queue("jobs", max_size=2, dedup_window=60).offer_many([Offer(1)] * 2)
        producer = other.reliable_queue("jobs")
        with pytest.raises(delayq.QueueFull):
            await producer.offer(3)
        (message, _) = await client.reliable_queue("jobs").claim(2)
        await message.ack()
        with pytest.raises(delayq.DuplicateMessage):
            await producer.offer(4, id=message.id)
        await producer.offer(5)

    async def test_no_process_stops_while_a_deployment_and_an_operator_change_each_setting(
        self, server: PrivateServer, client: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        def declared(number: int, expired: str, command: str) -> tuple[dict[str, Any], list[str]]:
            limit = delayq.Limit(number, 1000 * number)
            seconds = {"dedup_window": 60 * number, "keep": 90 * number}
            settings = {"group_limit": limit, "limit": limit, "max_size": 100 * number, **seconds}
            return {**settings, "expired": expired}, command.split("; ")

        old, to_old = declared(
            *(1, "drop"),
            "dedup-window 60; expired drop; group-limit 1,1000/1s; keep 90; limit 1,1000/1s;"
            " max-size 100",
        )
        new, to_new = declared(
            *(2, "dead"),
            "dedup-window 120; expired dead; group-limit 2,2000/1s; keep 180; limit 2,2000/1s;"
            " max-size 200",
        )
        operators, _ = declared(3, "dead", "")
        handled: list[int] = []

        @asynccontextmanager
        async def process(settings: dict[str, Any], *commands: str) -> AsyncIterator[None]:
            """Run a worker and a producer that declare these, in what counts as a new process."""
            settings_cache._WARNED.clear()
            caplog.clear()
            worker = delayq.Worker(server.url)
            worker.listener("jobs", **settings)(handled.append)
            async with worker, delayq.connect(server.url) as producer:
                for _ in range(2):
                    await producer.reliable_queue("jobs", **settings).offer(1, group="g")
                count = len(handled)
                await until(lambda: len(handled) > count)
                warnings = [
                    record.getMessage() for record in caplog.records if record.levelno >= 30
                ]
                assert sorted(line.partition("configure jobs --")[2] for line in warnings) == [
                    *commands
                ]
                yield

        jobs = client.reliable_queue("jobs")
        async with process(old):
            stored = await jobs.settings()
            async with process(new, *to_new):
                assert await jobs.settings() == stored
                assert (
                    "queue 'jobs': max_size is 100 on the server, and 200 in the code. The value on"
                    " the server counts; to change it, run: delayq configure jobs --max-size 200\n"
                ) in caplog.text
                await jobs.configure(**operators)
                chosen = await jobs.settings()
                assert chosen.limit == operators["limit"]
                async with (
                    process(old, *to_old),
                    process(new, *(line for line in to_new if line != "expired dead")),
                ):
                    assert await jobs.settings() == chosen
                    await jobs.configure(**new)
                    async with process(new):
                        assert (await jobs.settings()).limit == new["limit"]
        await until(lambda: len(handled) == 10)

    async def test_first_calls_made_at_once_read_the_settings_together(
        self, client: Client
    ) -> None:
        jobs = client.reliable_queue("jobs")
        before = client.statistics().round_trips
        await asyncio.gather(*(jobs.offer(n, HOUR) for n in range(50)))
        assert client.statistics().round_trips - before < 12
        # A queue that is known costs another handle nothing.
        before = client.statistics().round_trips
        await client.reliable_queue("jobs").offer(1, HOUR)
        assert client.statistics().round_trips - before == 1

    async def test_a_handle_takes_what_it_leaves_out_from_the_others_of_its_client(
        self, client: Client
    ) -> None:
        codec = delayq.StringCodec()
        client.reliable_queue("jobs", lease=5, max_attempts=2, codec=codec, max_payload=3)
        jobs: ReliableQueue[str] = client.reliable_queue("jobs")
        assert jobs._codec is codec
        with pytest.raises(delayq.PayloadTooLarge):
            await jobs.offer("four")
        await jobs.offer("1")
        (message,) = await jobs.claim()
        assert message.value == "1"


class TestConfiguring:
    async def test_configuring_the_present_values_starts_no_new_epoch(
        self, client: Client, raw: Any
    ) -> None:
        jobs = client.reliable_queue("jobs")
        await jobs.configure()
        invalid: list[dict[str, Any]] = [
            {"max_size": 0},
            {"expired": "x"},
            {"dedup_window": -1},
            {"partitions": 0},
        ]
        for settings in invalid:
            with pytest.raises(delayq.BadInput):
                await jobs.configure(**settings)
        assert await raw.exists(KEYS.settings) == 0
        await jobs.configure(max_size=5)
        before = await epoch(raw)
        assert before is not None
        await jobs.configure(max_size=5)
        assert await epoch(raw) == before
        await jobs.configure(max_size=6)
        assert int(await epoch(raw) or 0) > int(before)
        await jobs.aclose()
        for call in (jobs.configure, jobs.settings):
            with pytest.raises(delayq.Closed):
                await call()

    async def test_everything_that_is_configured_at_once_is_kept(
        self, client: Client, other: Client
    ) -> None:
        jobs, theirs = client.reliable_queue("jobs"), other.reliable_queue("jobs")
        await asyncio.gather(
            jobs.configure(max_size=7),
            theirs.configure(expired="dead"),
            jobs.configure(dedup_window=9),
        )
        assert await jobs.settings() == QueueSettings(1, 7, "dead", 9.0)


class TestStaleClients:
    async def test_offers_on_their_way_are_stored_whatever_is_configured_meanwhile(
        self, client: Client, other: Client, raw: Any
    ) -> None:
        jobs, theirs = client.reliable_queue("jobs"), other.reliable_queue("jobs")
        offers = [asyncio.create_task(jobs.offer(n, HOUR, id=f"id {n}")) for n in range(1500)]
        changed, stored = 0, 0
        while stored < len(offers) and changed < 50:
            await theirs.configure(max_size=1_000_000 + changed % 2)
            changed += 1
            # Settings that change without end could keep offers back for too long.
            await until(lambda: sum(offer.done() for offer in offers) > stored)  # noqa: B023
            stored = sum(offer.done() for offer in offers)
        assert await asyncio.gather(*offers) == [f"id {n}" for n in range(1500)]
        assert changed > 1
        assert client.queue_statistics()[0].offered == 1500
        assert client.statistics().errors == 0
        assert await raw.hlen(KEYS.named("bodies")) == 1500

    async def test_a_refused_batch_keeps_the_order_of_offers(
        self, client: Client, other: Client
    ) -> None:
        jobs, theirs = client.reliable_queue("jobs"), other.reliable_queue("jobs")
        await jobs.offer(-1)
        await theirs.configure(max_size=1000)
        await asyncio.gather(*(jobs.offer(n) for n in range(500)))
        found: list[int] = []
        while messages := await theirs.claim(100):
            found += [message.value for message in messages]
        assert found == [*range(-1, 500)]

    async def test_a_waiting_claim_goes_on(self, server: PrivateServer, other: Client) -> None:
        theirs = other.reliable_queue("jobs")
        # No re-check comes to its help.
        async with delayq.connect(server.url, resync_interval=3600) as client:
            claiming = asyncio.create_task(client.reliable_queue("jobs").claim(wait=60))
            await until(lambda: client.statistics().waiting == 1)
            await theirs.configure(expired="dead")
            await theirs.offer(1, 0.05)
            (message,) = await claiming
            assert message.value == 1
            assert client.queue_statistics()[0].errors == 0

    async def test_a_refused_script_has_written_nothing(self, client: Client, raw: Any) -> None:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1)
        full, plain = ("new", 0, 0, 0, 0, "raise", b"\n1"), ("new", 0, b"\n1")
        calls: list[tuple[Script, tuple[Any, ...]]] = [
            (OFFER, (1, 2, *full)),
            (OFFER_NEW, (1, 2, *plain)),
            (SCHEDULE, (2, "name", "", 0, 1, 0, 0, b"\n1")),
            (SET_GROUP, (2, "a", "pause", "")),
        ]
        limited: list[tuple[Script, tuple[Any, ...]]] = [(OFFER_NEW, (1, 1, *plain))]
        foreign = [*calls, (CLAIM, (1, 10, HOUR * 1_000_000, 0, "", 1, "", "", 0))]
        for changed, refused in (
            ({"layout": LAYOUT}, calls),
            ({"max_size": "5"}, limited),
            ({"layout": "3"}, foreign),
        ):
            await raw.hset(KEYS.settings, mapping=changed)
            before = await Store(raw, "jobs").keys_and_dumps()
            for script, args in refused:
                call = [KEYS.call("x")] if "call" in script.keys else []
                keys = [*KEYS.of_script(script), *call]
                with pytest.raises(Exception, match="DELAYQ_SETTINGS"):
                    await raw.eval(script.text, len(keys), *keys, *args)
            assert await Store(raw, "jobs").keys_and_dumps() == before

    async def test_an_offer_repeated_with_the_other_script_after_a_change_is_stored_once(
        self, client: Client, raw: Any
    ) -> None:
        """The first reply was lost: the repetition must not be refused."""
        full, plain = ("a", 0, 0, 0, 0, "raise", b"\n1"), ("b", 0, b"\n1")
        await client.reliable_queue("jobs", partitions=1).stats()
        for number, status in ((1, 1), (3, -1)):
            assert await offer(raw, OFFER_NEW, number, *plain) == status
            assert await offer(raw, OFFER, number, *full) == status
            assert await offer(raw, OFFER, number + 1, *full) == [status]
            assert await offer(raw, OFFER_NEW, number + 1, *plain) == [status]
        await client.reliable_queue("jobs").configure(max_size=1)
        assert await offer(raw, OFFER, 4, *full) == [-1]
        # The client repeats it by another script, because there is a limit now.
        assert await offer(raw, OFFER_NEW, 4, *plain) == [-1]


class TestHearing:
    @staticmethod
    def known(client: Client) -> QueueSettings:
        (queue,) = client.session.scheduler.parts
        return queue.queue.settings.stored.public()  # type: ignore[attr-defined,no-any-return]

    async def test_a_notification_alone_brings_new_settings(
        self, server: PrivateServer, client: Client
    ) -> None:
        async with delayq.connect(server.url, resync_interval=60) as idle:
            await idle.reliable_queue("jobs").claim()

            async def is_known() -> bool:
                await client.reliable_queue("jobs").configure(max_size=5)
                await client.reliable_queue("jobs").configure(max_size=6)
                return self.known(idle).max_size == 6

            await until(is_known)

    @pytest.mark.parametrize("by", ["re-check", "subscription"])
    async def test_a_re_check_makes_up_for_a_lost_notification(
        self, server: PrivateServer, raw: Any, by: str
    ) -> None:
        resync = 0.05 if by == "re-check" else 60
        async with delayq.connect(server.url, resync_interval=resync) as client:
            claiming = asyncio.create_task(client.reliable_queue("jobs").claim(wait=30))
            await until(lambda: client.statistics().waiting == 1)
            await until(lambda: client.session.scheduler.parts[0].queue.settings.stored)  # type: ignore[attr-defined]
            # As if it had been published while the link was down.
            await raw.hset(KEYS.settings, mapping={"layout": LAYOUT, "epoch": "9", "max_size": "3"})
            if by == "subscription":
                await raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await until(lambda: self.known(client).max_size == 3)
            claiming.cancel()


class TestLosingAndBreaking:
    async def test_a_server_that_lost_everything_is_told_what_handles_declare_and_configured(
        self, client: Client, other: Client, raw: Any
    ) -> None:
        jobs, theirs = client.reliable_queue("jobs", max_size=9), other.reliable_queue("jobs")
        await jobs.offer(1)
        await theirs.offer(1)
        await jobs.configure(max_size=2)
        await raw.flushall()
        # Who declared nothing goes on, and the others hear of it.
        await theirs.offer(1)
        await until(theirs.settings, equals=QueueSettings(1, 2))
        await jobs.offer(1)
        with pytest.raises(delayq.QueueFull):
            await theirs.offer(3)
        assert len(await theirs.claim(5)) == 2
        assert await theirs.settings() == QueueSettings(1, 2)

    async def test_settings_that_changed_behind_a_loss_are_noticed(
        self, client: Client, other: Client, raw: Any
    ) -> None:
        """The second settings must not look like the first ones, of which nothing is left."""
        jobs = client.reliable_queue("jobs")
        await jobs.configure(max_size=1)
        await raw.flushall()
        await other.reliable_queue("jobs", max_size=7).stats()
        await jobs.offer(1)
        assert jobs._open.settings.stored.max_size == 7

    async def test_a_layout_of_another_release_is_refused_by_every_call(
        self, client: Client, raw: Any
    ) -> None:
        jobs = client.reliable_queue("jobs")
        calls: list[Callable[[], Any]] = [
            lambda: jobs.offer(1),
            jobs.claim,
            lambda: jobs.claim(wait=5),
            lambda: anext(aiter(jobs)),
            jobs.stats,
            lambda: jobs.configure(max_size=5),
            jobs.settings,
            lambda: jobs.schedule("a", every=1, value=1),
        ]
        for layout, why in (("3", "a newer release"), ("1", "another release")):
            await raw.hset(KEYS.settings, "layout", layout)
            for call in calls:
                with pytest.raises(ConfigurationError, match=why):
                    await call()
            assert await raw.hgetall(KEYS.settings) == {b"layout": layout.encode()}

    async def test_a_layout_that_changes_meanwhile_is_noticed(
        self, client: Client, raw: Any
    ) -> None:
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1)
        await jobs.claim(5)
        claiming = asyncio.create_task(jobs.claim(5, wait=30))
        await until(lambda: client.statistics().waiting == 1)
        await raw.hset(KEYS.settings, "layout", "3")
        with pytest.raises(ConfigurationError, match="a newer release"):
            await jobs.offer(1)
        client.session.scheduler.parts[0].wake()
        with pytest.raises(ConfigurationError, match="a newer release"):
            await claiming

    async def test_a_key_of_a_foreign_type_is_reported_and_stays(
        self, client: Client, raw: Any
    ) -> None:
        await raw.set(KEYS.settings, "mine")
        jobs = client.reliable_queue("jobs")
        for call in (lambda: jobs.offer(1), jobs.claim, jobs.stats, lambda: jobs.claim(wait=5)):
            with pytest.raises(delayq.ServerRefused, match="wrong type"):
                await call()
        assert await raw.get(KEYS.settings) == b"mine"

    async def test_fields_that_cannot_be_read_count_as_left_out(
        self, client: Client, raw: Any
    ) -> None:
        junk = {"epoch": "what", "max_size": "x", "expired": "?", "renumbering": ",a,-1"}
        junk |= {"layout": LAYOUT, "dedup_window": "soon", "partitions": "-3"}
        await raw.hset(KEYS.settings, mapping=junk)
        jobs = client.reliable_queue("jobs")
        await jobs.offer(1, id="a")
        (message,) = await jobs.claim()
        await message.ack()
        await jobs.offer(1, id="a")
        assert await jobs.settings() == QueueSettings()
        assert await jobs.configure(max_size=3) == QueueSettings(1, 3)

    @pytest.mark.parametrize("removed", ["settings", "hmget"])
    async def test_a_user_who_may_not_read_settings_is_told_and_writes_nothing(
        self, server: PrivateServer, raw: Any, removed: str
    ) -> None:
        rules = [
            rule
            for rule in acl_rules("producer", reliable=["jobs"])
            if not rule.endswith((f":{removed}", f"+{removed}"))
        ]
        await raw.execute_command("ACL", "SETUSER", "app", "on", ">secret", *rules)
        url = server.url.replace("://", "://app:secret@", 1)
        async with delayq.connect(url) as client:
            jobs = client.reliable_queue("jobs")
            with pytest.raises(delayq.ServerRefused, match=r"NOPERM|ermission"):
                await jobs.offer(1)
            with pytest.raises(delayq.ServerRefused, match=r"NOPERM|ermission"):
                await jobs.configure(max_size=1)
        assert await raw.keys("*") == []


class TestPartitions:
    """The settings of a queue that has partitions, each with a copy."""

    @staticmethod
    async def are_alike(raw: Any, max_size: bytes, count: int = 4) -> bool:
        copies = [
            await raw.hgetall(ReliableKeys.of("jobs", partition=n).settings) for n in range(count)
        ]
        assert copies[0][b"partitions"] == b"%d" % count
        return copies == [copies[0]] * count and copies[0][b"max_size"] == max_size

    async def test_clients_that_declare_at_once_agree_in_two_calls(
        self, server: PrivateServer, raw: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One of them only offers, and all call the server whenever another one has."""
        calls = 0

        def slowly(name: str) -> None:
            call = getattr(ReliableStore, name)

            async def called(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                await asyncio.sleep(random.uniform(0, 0.02))
                result = await call(*args, **options)
                await asyncio.sleep(random.uniform(0, 0.02))
                return result

            monkeypatch.setattr(ReliableStore, name, called)

        for name in ("settings", "configure", "copy_settings"):
            slowly(name)
        for _ in range(10):
            await raw.flushall()
            calls = 0
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(delayq.connect(server.url, resync_interval=60))
                    for _ in range(5)
                ]
                queues = [
                    clients[0].reliable_queue("jobs"),
                    *(c.reliable_queue("jobs", partitions=6, max_size=99) for c in clients[1:]),
                ]
                offers = [queue.offer_many([Offer(1) for _ in range(20)]) for queue in queues]
                results = await asyncio.gather(*offers, return_exceptions=True)
            number = int(await raw.hget(KEYS.settings, "partitions"))
            refused = [isinstance(result, ConfigurationError) for result in results]
            # All agree on the number of whoever came first.
            assert refused == ([False] * 5 if number == 6 else [False] + [True] * 4)
            assert number == 1 or await self.are_alike(raw, b"99", 6)
            # To declare, then to copy what was declared; and whoever came too early for its copies.
            assert calls <= 5 + 5 + 2 * 6 * 5

    @pytest.mark.parametrize("epoch", [None, b"5", b"4000000000000000"])
    async def test_a_stale_copy_of_the_settings_is_replaced(
        self, client: Client, raw: Any, epoch: bytes | None
    ) -> None:
        """Its client died while it configured, its server lost it, or that of the first partition
        lost a change.
        """
        jobs = client.reliable_queue("jobs", partitions=4, max_size=100)
        await jobs.stats()
        assert await self.are_alike(raw, b"100")
        there = ReliableKeys.of("jobs", partition=2).settings
        await raw.delete(there)
        if epoch is not None:
            await raw.hset(there, mapping={"layout": LAYOUT, "epoch": epoch, "max_size": "1"})
        await jobs.offer_many([Offer(n, id=f"m{n}") for n in range(40)])
        assert await raw.hmget(there, "max_size", "partitions") == [b"100", b"4"]
        # A re-check finds it as well.
        await raw.hset(there, mapping={"epoch": "5", "max_size": "1"})
        claiming = asyncio.create_task(jobs.claim(41, wait=60))
        await until(lambda: self.are_alike(raw, b"100"))
        claiming.cancel()


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "max_size": st.sampled_from([None, 1, 2]),
        "expired": st.sampled_from(["drop", "dead"]),
        "dedup_window": st.sampled_from([0, 1, 60]),
    },
)


def test_declarations_and_configurations_follow_a_plain_model(server: PrivateServer) -> None:
    loop = asyncio.new_event_loop()

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.clients = [self.open() for _ in range(3)]
            self.stored: dict[str, Any] = {}
            # What each handle declares, and whether it has had a successful call.
            self.handles: list[tuple[ReliableQueue[int], dict[str, Any], list[bool]]] = []
            loop.run_until_complete(self.clients[0].session.server.flush())

        def open(self) -> Client:
            return loop.run_until_complete(
                delayq.connect(server.url, resync_interval=60).__aenter__()
            )

        async def queue(self, client: int, **declared: Any) -> ReliableQueue[int]:
            return self.clients[client].reliable_queue("jobs", **declared)

        @rule(client=st.integers(0, 2), declared=SETTINGS)
        def new_handle(self, client: int, declared: dict[str, Any]) -> None:
            queue = loop.run_until_complete(self.queue(client, **declared))
            self.handles.append((queue, dict(declared), []))

        @rule(which=st.integers(0, 50))
        def call(self, which: int) -> None:
            if not self.handles:
                return
            queue, declared, called = self.handles[which % len(self.handles)]
            loop.run_until_complete(queue.claim())
            if not called:
                self.stored = {**declared, **self.stored}
                called.append(True)

        @rule(which=st.integers(0, 50), changes=SETTINGS)
        def configure(self, which: int, changes: dict[str, Any]) -> None:
            if not self.handles:
                return
            queue, declared, _ = self.handles[which % len(self.handles)]
            found = loop.run_until_complete(queue.configure(**changes))
            self.stored |= changes
            declared.update({name: changes[name] for name in declared if name in changes})
            assert found == self.expected()

        @rule(client=st.integers(0, 2))
        def read(self, client: int) -> None:
            queue = loop.run_until_complete(self.queue(client))
            assert loop.run_until_complete(queue.settings()) == self.expected()

        def expected(self) -> QueueSettings:
            return QueueSettings(**{"dedup_window": 0.0, **self.stored})

        def teardown(self) -> None:
            for client in self.clients:
                loop.run_until_complete(client.aclose())

    try:
        run_state_machine_as_test(
            Machine,
            settings=hypothesis_settings(
                max_examples=examples(100), stateful_step_count=15, deadline=None
            ),
        )
    finally:
        loop.close()
