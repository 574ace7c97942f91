"""Each synchronous class has the methods of its asynchronous twin, and passes on every argument."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, assert_type

import pytest

import delayq
from delayq import sync
from delayq._redisson.views import Pending, Ready
from delayq.codecs import StringCodec
from delayq.sync._bridge import SyncBridge
from tests.support.cases import naming
from tests.support.stubs import STUB, stub

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

TWINS: dict[type, type] = {
    sync.Client: delayq.Client,
    sync.ReliableQueue: delayq.ReliableQueue,
    sync.DelayedQueue: delayq.DelayedQueue,
    sync.DeadLetters: delayq.DeadLetters,
    sync.Groups: delayq.Groups,
    sync.Batch: delayq.Batch,
    sync.Receipt: delayq.Receipt,
    sync.Pending: Pending,
    sync.Ready: Ready,
}
# How to reach each class's twin from its queue.
PATHS: dict[type, str] = {sync.DeadLetters: "dead", sync.Groups: "groups"}
PATHS |= {sync.Pending: "pending", sync.Ready: "ready"}


def test_the_stub_shows_type_checkers_the_methods_that_exist() -> None:
    assert STUB.read_text("utf-8") == stub(), "run make stubs, and look at the difference"


def methods(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the public methods of a class that its asynchronous twin has, too."""
    for name, member in inspect.getmembers(owner, inspect.isfunction):
        if not name.startswith("_") and hasattr(TWINS[owner], name):
            yield name, member


def test_a_method_looks_like_that_of_the_asynchronous_class() -> None:
    for owner, twin in TWINS.items():
        for name, method in methods(owner):
            with naming(owner, name):
                other = getattr(twin, name)
                assert inspect.signature(method) == inspect.signature(other)
                assert not inspect.iscoroutinefunction(method)
                assert method.__doc__
                assert (method.__name__, method.__qualname__) == (name, other.__qualname__)
    assert inspect.signature(sync.connect) == inspect.signature(delayq.connect)
    # Messages are taken by a worker, or by asynchronous code, which gives them back in time.
    assert not hasattr(sync.ReliableQueue, "claim")
    assert not hasattr(sync.DelayedQueue, "take")
    assert not hasattr(sync.Pending, "poll")


async def greet(_: delayq.Client, times: int) -> str:
    return "hello" * times


def types(client: sync.Client) -> None:
    """Show the types that users get. mypy checks it, and that it refuses what is ignored."""
    texts = client.reliable_queue("texts", codec=StringCodec())
    assert_type(texts, sync.ReliableQueue[str])
    assert_type(texts.offer("a text"), str)
    assert_type(texts.get("id"), delayq.Message[str] | None)
    assert_type(texts.dead.list(), list[delayq.DeadLetter[str]])
    texts.offer(3)  # type: ignore[arg-type]
    texts.offer("a text", on_duplicate="keep")  # type: ignore[arg-type]
    texts.offer_many([delayq.Offer(3)])  # type: ignore[arg-type]
    orders = client.delayed_queue("orders", codec=StringCodec())
    assert_type(orders.offer("an order", 3), sync.Receipt[str])
    assert_type(orders.pending.peek(), str | None)
    orders.offer_many([(3, 3)])  # type: ignore[list-item]
    assert_type(client.reliable_queue("any"), sync.ReliableQueue[Any])
    assert_type(client.run(greet, 3), str)
    client.run(greet, "3")  # type: ignore[arg-type]


class Recorder:
    """Records a call of any method, at any depth."""

    def __init__(self, calls: list[Any], path: str = "") -> None:
        self._calls = calls
        self._path = path

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(self._calls, f"{self._path}.{name}".lstrip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._path, args, kwargs))
        return Returned()


class Returned:
    """What a method returns that may be a coroutine function, or not."""

    def close(self) -> None:
        """Do nothing, as a coroutine does that has not begun."""

    def __await__(self) -> Generator[None, None, tuple[()]]:
        yield from ()
        return ()


class RecordingQueue:
    """Stands for a queue that is open, and returns an empty tuple from each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run(self, call: Callable[[Any], Any]) -> Any:
        return asyncio.run(call(Recorder(self.calls)))


def test_every_method_passes_on_every_argument() -> None:
    for owner in (sync.ReliableQueue, sync.DelayedQueue, *PATHS):
        for name, _ in methods(owner):
            queue: Any = RecordingQueue()
            proxy: Any = owner(queue) if owner in PATHS else owner("mails", queue)
            method = getattr(proxy, name)
            with naming(owner, name):
                given = {
                    parameter: [object()] for parameter in inspect.signature(method).parameters
                }
                method(**given)
                path = ".".join(filter(None, (PATHS.get(owner), name)))
                assert queue.calls == [(path, (), given)]


SETTINGS: dict[str, dict[str, Any]] = {
    "reliable_queue": {"codec": StringCodec(), "lease": 5.0, "max_attempts": 3, "max_size": 7}
    | {"dedup_window": 60.0, "backoff": delayq.Backoff.fixed(5), "expired": "dead"}
    | {"when_full": "wait", "max_payload": 1000, "durability": "fsync", "partitions": 2}
    | {"keep_dead": 60.0, "max_dead": 7, "keep": 60.0, "max_kept": 7}
    | {"limit": delayq.Limit(concurrency=50), "group_limit": delayq.Limit(rate=5)},
    "delayed_queue": {"codec": StringCodec(), "max_payload": 1000}
    | {"ordered_list": False, "durability": "fsync"},
}


def test_clients_and_queues_are_opened_with_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: list[Callable[[Any], Any]] = []
    monkeypatch.setattr(SyncBridge, "declare", lambda _, open_on: declared.append(open_on))
    client = sync.connect("redis://127.0.0.1:1")
    for kind, settings in SETTINGS.items():
        names = {*inspect.signature(getattr(sync.Client, kind)).parameters} - {"self", "name"}
        assert settings.keys() == names, "try the new setting here as well"
        getattr(client, kind)("mails", **settings)
        calls: list[Any] = []
        recorder: Any = Recorder(calls)
        declared.pop()(recorder).close()
        assert calls == [(kind, ("mails",), settings)]

    given: dict[str, Any] = {"resync_interval": 2.0, "max_connections": 2, "name_mapper": str}
    given["retry_for"] = 0.5
    made: list[Any] = []
    monkeypatch.setattr(delayq.client, "connect", lambda *args, **named: made.append((args, named)))
    sync.connect("redis://127.0.0.1:1", **given)
    # It binds the tasks itself.
    assert {*inspect.signature(sync.connect).parameters} == {"address", "tasks", *given}
    assert made == [(("redis://127.0.0.1:1",), given)]


def test_a_wrong_option_is_refused_by_the_call_that_has_it() -> None:
    client = sync.connect("redis://127.0.0.1:1")
    wrong: Any
    for wrong in ({"name": ""}, {"lease": 0}, {"codec": StringCodec}):
        with naming(wrong), pytest.raises(delayq.BadInput):
            client.reliable_queue(**({"name": "mails"} | wrong))
    for wrong in ({"name": ""}, {"durability": "some"}, {"ordered_list": 1}):
        with naming(wrong), pytest.raises(delayq.BadInput):
            client.delayed_queue(**({"name": "mails"} | wrong))
    with pytest.raises(delayq.ConfigurationError):
        sync.connect("http://127.0.0.1")
    with pytest.raises(delayq.BadInput):
        sync.connect("redis://127.0.0.1", max_connections=0)
