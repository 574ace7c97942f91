"""The number of partitions changes at the worst moment: between two steps of another call."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq import Limit, Offer
from delayq._reliable import known_settings
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.placement import home_of, partition_of
from delayq._reliable.store import ReliableStore
from tests.support.reliable_fixtures import raw
from tests.support.reliable_store import HOUR, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from delayq import Client, ReliableQueue
    from delayq._reliable.settings import StoredSettings
    from tests.support.servers import PrivateServer

__all__ = ["raw"]


@pytest.fixture
async def jobs(client: Client) -> ReliableQueue[int]:
    return client.reliable_queue("jobs")


@pytest.fixture
async def theirs(server: PrivateServer) -> AsyncIterator[ReliableQueue[int]]:
    """The queue as another process sees it."""
    async with delayq.connect(server.url) as client:
        yield client.reliable_queue("jobs")


@pytest.fixture
async def stale(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ReliableQueue[int]]:
    """The queue as a process sees it that knows one partition and hears of no change."""
    async with delayq.connect(server.url, resync_interval=HOUR) as client:
        queue: ReliableQueue[int] = client.reliable_queue("jobs")
        await queue.stats()
        monkeypatch.setattr(queue._open.settings, "on_change", lambda: None)
        yield queue


def ids_that_move(before: int, after: int) -> list[str]:
    """Return ids that are placed in other partitions after the change."""
    return [
        name
        for name in (f"m{n}" for n in range(100))
        if partition_of(name, before) != partition_of(name, after)
    ]


async def copies(raw: Any, count: int) -> list[dict[bytes, bytes]]:
    return [await raw.hgetall(ReliableKeys.of("jobs", partition=n).settings) for n in range(count)]


async def are_repaired(raw: Any, before: list[dict[bytes, bytes]]) -> bool:
    """Return whether the copies are alike, and say what they said before, under a new epoch."""
    truth, *others = await copies(raw, len(before))
    return (
        truth[b"epoch"] != before[0][b"epoch"]
        and others == [truth] * len(others)
        and ({**truth, b"epoch": b""} == {**before[0], b"epoch": b""})
    )


def before_next(
    monkeypatch: pytest.MonkeyPatch, target: Any, method: str, step: Callable[[], Awaitable[object]]
) -> None:
    """Take a step right before the next call of a method carries on, once."""
    original = getattr(target, method)

    async def wrapped(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(target, method, original)
        await step()
        return await original(*args, **more)

    monkeypatch.setattr(target, method, wrapped)


def after_next(
    monkeypatch: pytest.MonkeyPatch, target: Any, method: str, step: Callable[[], Awaitable[object]]
) -> None:
    """Take a step right after the next call of a method, once."""
    original = getattr(target, method)

    async def wrapped(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(target, method, original)
        result = await original(*args, **more)
        await step()
        return result

    monkeypatch.setattr(target, method, wrapped)


class TestOffersDuringGrowth:
    @pytest.mark.parametrize("call", ["offer", "offer_many"])
    async def test_messages_that_wait_to_be_sent_are_placed_again(
        self, jobs: ReliableQueue[int], stale: ReliableQueue[int], call: str
    ) -> None:
        await jobs.configure(partitions=4)
        if call == "offer":
            # The first one leaves alone, and is refused. The others wait behind it.
            await asyncio.gather(*(stale.offer(n, HOUR, id=f"m{n}") for n in range(1000)))
        else:
            await stale.offer_many([Offer(n, delay=HOUR, id=f"m{n}") for n in range(1000)])
        depths = [await each.store.depth() for each in stale._open.partitions]
        assert sum(depth.delayed for depth in depths) == 1000
        for n in range(1000):
            name = f"m{n}"
            assert await stale._open.partitions[partition_of(name, 4)].store.get(name)

    async def test_a_search_in_former_places_is_repeated(
        self,
        client: Client,
        jobs: ReliableQueue[int],
        theirs: ReliableQueue[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Another client stores a message where the search had not looked."""
        await jobs.offer(0, HOUR)
        await jobs.configure(partitions=2)
        name = ids_that_move(2, 8)[0]

        async def grow() -> None:
            await theirs.configure(partitions=8)
            await theirs.offer(1, HOUR, id=name)
            await jobs.settings()

        after_next(monkeypatch, jobs._open.partitions[0].store, "knows", grow)
        with pytest.raises(delayq.DuplicateMessage):
            await jobs.offer(2, HOUR, id=name)
        found = await theirs.get(name)
        assert found is not None
        assert found.value == 1
        assert (await theirs.stats()).delayed == 2

    async def test_a_message_that_ends_while_it_is_replaced_makes_room_for_the_new_one(
        self,
        jobs: ReliableQueue[int],
        theirs: ReliableQueue[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        name = ids_that_move(1, 4)[0]
        await jobs.offer_many([Offer(0, delay=HOUR), Offer(1, delay=HOUR, id=name)])
        await jobs.configure(partitions=4)
        after_next(
            monkeypatch,
            jobs._open.partitions[0].store,
            "knows",
            lambda: theirs.cancel(name),
        )
        await jobs.offer(2, HOUR, id=name, on_duplicate="replace")
        stored = await jobs._open.place(name).store.get(name)
        assert stored is not None
        assert (await jobs.stats()).delayed == 2

    async def test_a_schedule_is_stored_where_all_clients_look_for_it(
        self, jobs: ReliableQueue[int], stale: ReliableQueue[int]
    ) -> None:
        name = next(name for name in map(str, itertools.count()) if home_of(name, 4))
        await jobs.configure(partitions=4)
        await jobs.schedule(name, every=HOUR, value=1)
        await stale.schedule(name, every=HOUR, value=1)
        assert [each.name for each in await jobs.schedules()] == [name]
        assert (await jobs.stats()).delayed == 1

    async def test_a_message_offered_before_the_first_declaration_is_found_after_it(
        self, jobs: ReliableQueue[int], theirs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first offer declares nothing, and so leaves no epoch."""
        name = ids_that_move(1, 4)[0]

        async def offer() -> None:
            await theirs.offer(1, HOUR, id=name)

        before_next(monkeypatch, jobs._open.settings._writer, "_take_over_pause", offer)
        await jobs.configure(partitions=4)
        assert await jobs.get(name) is not None
        with pytest.raises(delayq.DuplicateMessage):
            await jobs.offer(2, HOUR, id=name)

    @pytest.mark.parametrize("many", [False, True])
    async def test_an_offer_to_a_queue_that_is_closing_is_told_so(
        self,
        jobs: ReliableQueue[int],
        stale: ReliableQueue[int],
        monkeypatch: pytest.MonkeyPatch,
        many: bool,
    ) -> None:
        await jobs.configure(partitions=4)
        closing: list[asyncio.Future[None]] = []

        async def close() -> None:
            closing.append(asyncio.ensure_future(stale.aclose()))
            await asyncio.sleep(0)

        before_next(monkeypatch, stale._open.settings, "read", close)
        with pytest.raises(delayq.Closed):
            await (stale.offer_many([Offer(1)] * 9) if many else stale.offer(1))
        await asyncio.gather(*closing)

    async def test_an_offer_needs_no_server_but_that_of_its_partition(
        self, jobs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await jobs.configure(partitions=4)

        async def fail(_: object) -> None:
            raise delayq.ServerUnavailable("away")

        monkeypatch.setattr(jobs._open.partitions[0].offers, "under", fail)
        name = ids_that_move(1, 4)[0]
        with pytest.raises(delayq.NotDurable) as caught:
            await jobs.offer(1, id=name, durability="replicas:1")
        assert caught.value.stored == (name,)

    @pytest.mark.parametrize("spread", [False, True], ids=["one server", "cluster"])
    async def test_an_offer_fails_if_no_server_of_a_partition_in_use_answers(
        self, jobs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch, spread: bool
    ) -> None:
        await jobs.configure(partitions=4)
        # The client still has the others.
        await jobs.configure(partitions=2)
        tried: list[Any] = []

        def fail(sent: Sequence[Any], _: Sequence[int]) -> asyncio.Future[list[Any]]:
            tried.append(sent)
            assert len(tried) < 10
            failed = asyncio.get_running_loop().create_future()
            failed.set_result([delayq.ServerUnavailable("away")] * len(sent))
            return failed

        for partition in jobs._open.partitions:
            monkeypatch.setattr(partition.offers.commits, "submit_many", fail)
        monkeypatch.setattr(type(jobs._open.services.nodes), "spread", spread)
        with pytest.raises(delayq.ServerUnavailable):
            await jobs.offer_many([Offer(1)])
        assert len(tried) == (2 if spread else 1)


class TestClientsThatWereNotTold:
    async def test_calls_by_id_find_the_message(
        self, jobs: ReliableQueue[int], stale: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each of them asks the wrong partition first, whatever was learnt by the one before."""
        name = ids_that_move(1, 4)[0]
        settings = stale._open.settings
        old = settings.stored
        await jobs.configure(partitions=4)
        await jobs.offer(1, HOUR, id=name)
        await jobs.schedule("s", every=HOUR, value=1)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: stale.get(name),
            lambda: stale.reschedule(name, HOUR),
            lambda: stale.cancel(name),
            lambda: stale.unschedule("s"),
        ]
        for call in calls:
            monkeypatch.setattr(settings, "stored", old)
            assert await call()
        assert await stale.get(name) is None

    async def test_calls_for_all_messages_reach_every_partition(
        self, jobs: ReliableQueue[int], stale: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = stale._open.settings
        old = settings.stored
        await jobs.configure(partitions=4)
        await jobs.offer_many([Offer(n) for n in range(40)])
        calls: list[tuple[Callable[[], Awaitable[Any]], Callable[[Any], bool]]] = [
            (stale.stats, lambda depth: depth.ready == 40),
            (lambda: stale.list("ready"), lambda found: len(found) == 40),
            (stale.purge, lambda dropped: dropped == 40),
        ]
        for call, is_right in calls:
            monkeypatch.setattr(settings, "stored", old)
            monkeypatch.setattr(stale._open, "partitions", stale._open.partitions[:1])
            assert is_right(await call())
        assert (await jobs.stats()).ready == 0

    async def test_a_pause_reaches_every_partition(
        self, jobs: ReliableQueue[int], stale: ReliableQueue[int]
    ) -> None:
        await jobs.configure(partitions=4)
        await stale.pause()
        await jobs.offer_many([Offer(n) for n in range(40)])
        assert await jobs.claim(40) == []

    @pytest.mark.usefixtures("_full_batches")
    @pytest.mark.parametrize("paused", [True, False])
    async def test_a_pause_in_the_moment_of_growth_reaches_the_new_partitions(
        self,
        jobs: ReliableQueue[int],
        theirs: ReliableQueue[int],
        monkeypatch: pytest.MonkeyPatch,
        paused: bool,
    ) -> None:
        await theirs.stats()
        if not paused:
            await theirs.pause()

        async def change() -> None:
            await (theirs.pause() if paused else theirs.resume())

        writer = jobs._open.settings._writer
        after_next(monkeypatch, writer, "_take_over_pause", change)
        await jobs.configure(partitions=4)
        await jobs.offer_many([Offer(n) for n in range(40)])
        assert len(await jobs.claim(40, wait=0.2 if paused else 5)) == (0 if paused else 40)

    async def test_a_pause_that_ends_during_another_change_ended(
        self, jobs: ReliableQueue[int], theirs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await jobs.pause()
        settings = jobs._open.settings
        before_next(monkeypatch, settings, "read", lambda: theirs.configure(max_size=9))
        assert await jobs.resume()
        assert not await jobs.resume()


class TestChangesThatStopHalfWay:
    async def test_a_configurer_that_stood_still_does_not_drop_messages(
        self,
        jobs: ReliableQueue[int],
        theirs: ReliableQueue[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It has found the partitions empty, and others go on without it meanwhile."""
        monkeypatch.setattr(known_settings, "_DIFFERS_FOR", 0.1)
        await jobs.configure(partitions=4)
        await theirs.stats()
        name = next(name for name in ids_that_move(1, 4) if partition_of(name, 4) == 2)

        async def offer() -> None:
            await theirs.offer(1, HOUR, id=name)

        writer = jobs._open.settings._writer
        # Between the last look at the partitions and the change.
        before_next(monkeypatch, writer, "_take_over_pause", offer)
        with pytest.raises(delayq.ConfigurationError, match="is not empty"):
            await jobs.configure(partitions=1)
        assert (await jobs.settings()).partitions == 4
        assert await theirs.cancel(name)

    async def test_a_change_that_is_cancelled_leaves_nothing_behind(
        self, jobs: ReliableQueue[int], raw: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await jobs.configure(partitions=4, max_size=100)
        before = await copies(raw, 8)
        changing = asyncio.ensure_future(asyncio.sleep(0))
        await changing

        async def cancel() -> None:
            changing.cancel()
            await asyncio.sleep(0)

        store = ReliableStore
        configure = store.configure
        calls = itertools.count()

        async def counted(self: ReliableStore, expected: str, new: StoredSettings) -> str:
            if next(calls) == 3:
                await cancel()
            return await configure(self, expected, new)

        monkeypatch.setattr(store, "configure", counted)
        changing = asyncio.ensure_future(jobs.configure(partitions=8, dedup_window=60))  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await changing
        async with asyncio.timeout(5):
            while not await are_repaired(raw, before[:4]):
                await asyncio.sleep(0.01)
        await jobs.offer_many([Offer(n) for n in range(100)])

    async def test_a_change_that_fails_does_not_bring_back_settings_that_have_ended(
        self, jobs: ReliableQueue[int], theirs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise clients with the old settings could store an id in its old place again."""
        await jobs.configure(partitions=2)
        await theirs.stats()
        old = jobs._open.settings.stored
        writer = theirs._open.settings._writer

        async def overtake() -> None:
            await jobs.configure(partitions=4)
            raise delayq.ServerUnavailable("the link broke")

        before_next(monkeypatch, writer, "_take_over_pause", overtake)
        with pytest.raises(delayq.ServerUnavailable):
            await theirs.configure(partitions=8)
        assert (await jobs.settings()).partitions == 4
        for partition in jobs._open.partitions:
            assert (await partition.store.settings()).epoch != old.epoch
        name = ids_that_move(2, 4)[0]
        await jobs.offer(1, HOUR, id=name)
        await jobs.cancel(name)

    async def test_ids_that_are_remembered_keep_their_partition(
        self, jobs: ReliableQueue[int], raw: Any
    ) -> None:
        await jobs.configure(partitions=4, dedup_window=HOUR)
        name = next(name for name in ids_that_move(2, 4) if partition_of(name, 4) > 1)
        await jobs.offer(1, id=name)
        (message,) = await jobs.claim()
        await message.ack()
        with pytest.raises(delayq.ConfigurationError, match=r"remembers ids .* dedup_window"):
            await jobs.configure(partitions=2)
        await Store(raw, "jobs", partition_of(name, 4)).let_pass(HOUR + 1)
        assert (await jobs.configure(partitions=2)).partitions == 2

    async def test_two_first_declarations_at_once_agree_without_a_pause(
        self, server: PrivateServer, raw: Any
    ) -> None:
        async with delayq.connect(server.url) as one, delayq.connect(server.url) as two:
            queues = [each.reliable_queue("jobs", partitions=8) for each in (one, two)]
            for _ in range(20):
                await asyncio.gather(*(queue.settings() for queue in queues))
                await asyncio.gather(*(queue.offer_many([Offer(1)]) for queue in queues))
                epochs = {copy.get(b"epoch") for copy in await copies(raw, 8)}
                assert len(epochs) == 1
                await raw.flushall()

    async def test_settings_that_were_withdrawn_leave_no_field_behind(
        self, jobs: ReliableQueue[int], raw: Any
    ) -> None:
        await jobs.configure(partitions=4)
        await jobs.offer(1, HOUR)
        before = await copies(raw, 4)
        with pytest.raises(delayq.ConfigurationError, match="is not empty"):
            await jobs.configure(partitions=2, max_size=1)
        assert await copies(raw, 4) == before

    async def test_changes_under_one_clock_have_different_epochs(
        self, jobs: ReliableQueue[int], theirs: ReliableQueue[int], raw: Any
    ) -> None:
        """A client whose clock was an hour ahead has made the last change."""
        await jobs.configure(max_size=1)
        ahead = b"9000000000000000"
        await raw.hset(ReliableKeys.of("jobs").settings, "epoch", ahead)
        await asyncio.gather(jobs.settings(), theirs.settings())
        await asyncio.gather(jobs.configure(max_size=5), theirs.configure(partitions=4))
        assert await jobs.settings() == await theirs.settings()
        assert jobs._open.settings.epoch == theirs._open.settings.epoch
        settings = await jobs.settings()
        assert (settings.partitions, settings.max_size) == (4, 5)


def groups_that_move(before: int, after: int, count: int = 6) -> list[str]:
    """Return names of groups that lie in other partitions after the change."""
    names = (f"tenant {n}" for n in range(100))
    moving = (name for name in names if home_of(name, before) != home_of(name, after))
    return list(itertools.islice(moving, count))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 8), (8, 2), (4, 1)])
async def test_a_group_without_messages_keeps_its_settings(
    jobs: ReliableQueue[int], theirs: ReliableQueue[int], before: int, after: int
) -> None:
    await jobs.configure(partitions=before)
    limited, ordered, paused, *_, reset = names = groups_that_move(before, after)
    await jobs.groups.set_limit(limited, Limit(concurrency=3, rate=100))
    await jobs.groups.set_limit(ordered, Limit(ordered=True))
    await jobs.groups.set_limit(paused, Limit(concurrency=2))
    await jobs.groups.pause(paused)
    await jobs.groups.set_limit(reset, Limit(concurrency=1))
    await jobs.configure(partitions=after)
    for queue in (jobs, theirs):
        assert (await queue.groups.get(limited)).limit == Limit(concurrency=3, rate=100)
        assert (await queue.groups.get(ordered)).limit == Limit(ordered=True)
        found = await queue.groups.get(paused)
        assert (found.limit, found.paused) == (Limit(concurrency=2), True)
    # Nothing is left where they were: neither in the list, nor after they have moved back.
    assert {group.name for group in await jobs.groups.list()} == {*names[:3], reset}
    assert len(await jobs.groups.list()) == 4
    await jobs.groups.set_limit(reset, None)
    await jobs.configure(partitions=before)
    assert (await jobs.groups.get(reset)).limit is None
    await jobs.offer_many([Offer(1, group=paused), Offer(2, group=limited)])
    assert [message.value for message in await jobs.claim(10)] == [2]


async def test_a_group_with_messages_stays_and_keeps_its_settings(jobs: ReliableQueue[int]) -> None:
    name, *_ = groups_that_move(1, 4)
    await jobs.groups.set_limit(name, Limit(ordered=True))
    await jobs.offer_many([Offer(1, group=name), Offer(2, group=name)])
    await jobs.configure(partitions=4)
    (first,) = await jobs.claim(10)
    await jobs.offer(3, group=name)
    assert not await jobs.claim(10)
    await first.ack()
    for number in (2, 3):
        (message,) = await jobs.claim(10)
        assert message.value == number
        await message.ack()
    # Now it can move.
    await jobs.configure(max_size=1000)
    await jobs.offer_many([Offer(4, group=name), Offer(5, group=name)])
    assert [message.value for message in await jobs.claim(10)] == [4]


async def test_a_group_changed_by_settings_that_are_over_is_changed_where_it_lies(
    jobs: ReliableQueue[int], theirs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *_ = groups_that_move(1, 4)
    await jobs.groups.set_limit(name, Limit(concurrency=1))
    set_group = ReliableStore.set_group

    async def late(self: ReliableStore, *args: Any) -> bool:
        monkeypatch.setattr(ReliableStore, "set_group", set_group)
        await theirs.configure(partitions=4)
        return await set_group(self, *args)

    monkeypatch.setattr(ReliableStore, "set_group", late)
    await jobs.groups.set_limit(name, Limit(concurrency=2))
    assert (await theirs.groups.get(name)).limit == Limit(concurrency=2)
    assert len(await theirs.groups.list()) == 1


async def test_a_group_changed_while_it_moves_is_changed_where_it_comes_to_lie(
    jobs: ReliableQueue[int], theirs: ReliableQueue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, new, *_ = groups_that_move(1, 4)
    await jobs.groups.set_limit(changed, Limit(concurrency=1))
    put = ReliableStore.put_own_settings

    async def slowly(self: ReliableStore, group: bytes, text: bytes) -> None:
        monkeypatch.setattr(ReliableStore, "put_own_settings", put)
        await put(self, group, text)
        await theirs.groups.set_limit(changed, Limit(concurrency=2))
        await theirs.groups.pause(new)

    monkeypatch.setattr(ReliableStore, "put_own_settings", slowly)
    await jobs.configure(partitions=4)
    assert (await theirs.groups.get(changed)).limit == Limit(concurrency=2)
    assert (await theirs.groups.get(new)).paused
    assert len(await theirs.groups.list()) == 2
