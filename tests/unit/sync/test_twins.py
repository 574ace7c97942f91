"""Each synchronous class has the methods of its asynchronous twin, and passes on every argument."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, assert_type, get_overloads

import pytest

import delayq
from delayq import sync
from delayq._redisson.pending import Pending
from delayq._redisson.ready import Ready
from delayq.codecs import StringCodec
from delayq.sync._link import Link
from tests.support.cases import naming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TWINS: dict[type, type] = {
    sync.Client: delayq.Client,
    sync.ReliableQueue: delayq.ReliableQueue,
    sync.DelayedQueue: delayq.DelayedQueue,
    sync.DeadLetters: delayq.DeadLetters,
    sync.Groups: delayq.Groups,
    sync.Receipt: delayq.Receipt,
    sync.Pending: Pending,
    sync.Ready: Ready,
}
# Messages are taken by a worker, or by asynchronous code, which gives them back if it is cancelled.
TAKING = {"claim", "deliveries", "drain", "poll", "poll_many", "take"}
# For the library itself, or under another name.
OTHERS = {"aclose", "is_new", "keep_codec", "label", "private_server", "session", "through"}
OTHERS |= {"worker_port"}
ONLY_SYNCHRONOUS = {"arun", "close", "run"}
# How to reach each class's twin from its queue.
PATHS: dict[type, str] = {sync.DeadLetters: "dead", sync.Groups: "groups"}
PATHS |= {sync.Pending: "pending", sync.Ready: "ready"}


def methods(owner: type) -> dict[str, Any]:
    """Return the public methods and properties of a class, by name."""
    found = inspect.getmembers(
        owner, lambda member: inspect.isfunction(member) or isinstance(member, property)
    )
    return {name: value for name, value in found if not name.startswith("_")}


def form(function: Callable[..., Any]) -> tuple[list[Any], Any]:
    """Return the parameters of a function, with defaults and annotations, and what it returns."""
    signature = inspect.signature(function)
    return [*signature.parameters.values()], signature.return_annotation


def every_method(*owners: type) -> Iterator[tuple[type, str, Any]]:
    for owner in owners or TWINS:
        for name, method in methods(owner).items():
            if not isinstance(method, property) and name not in ONLY_SYNCHRONOUS:
                yield owner, name, method


def test_each_class_has_the_methods_of_its_twin_in_the_same_form() -> None:
    for owner, twin in TWINS.items():
        missing = methods(twin).keys() - methods(owner).keys() - TAKING - OTHERS
        assert not missing, f"add {missing} to delayq.sync.{owner.__name__}"
        assert methods(owner).keys() - methods(twin).keys() <= ONLY_SYNCHRONOUS
    for owner, name, method in every_method():
        other = getattr(TWINS[owner], name)
        assert form(method) == form(other), f"change delayq.sync.{owner.__name__}.{name} as well"
        assert [*map(form, get_overloads(method))] == [*map(form, get_overloads(other))], name
        assert not inspect.iscoroutinefunction(method), name
        assert method.__doc__, name
    assert form(sync.connect) == form(delayq.connect)
    # Annotations are compared as text, so the same name must not stand for two types.
    same = {name for name in sync.__all__ if name in delayq.__all__}
    twins = {owner.__name__ for owner in TWINS if owner.__name__ in delayq.__all__}
    assert same == twins | {"connect"}


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
        return asyncio.sleep(0, ())


class RecordingDoor:
    """Stands for a queue that is open, and returns an empty tuple from each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run(self, call: Callable[[Any], Any]) -> Any:
        return asyncio.run(call(Recorder(self.calls)))


def test_each_method_passes_on_every_argument() -> None:
    for owner, name, _ in every_method(sync.ReliableQueue, sync.DelayedQueue, *PATHS):
        door = RecordingDoor()
        handle = owner("mails", door) if owner not in PATHS else owner(door)
        parameters = [*inspect.signature(getattr(handle, name)).parameters.values()]
        given = {parameter.name: [object()] for parameter in parameters}
        with naming(owner, name):
            getattr(handle, name)(**given)
            ((path, args, kwargs),) = door.calls
            assert path == ".".join(filter(None, (PATHS.get(owner), name)))
            twin = inspect.signature(getattr(TWINS[owner], name))
            assert dict(twin.bind(None, *args, **kwargs).arguments) == {"self": None, **given}


SETTINGS: dict[str, dict[str, Any]] = {
    "reliable_queue": {"codec": StringCodec(), "lease": 5.0, "max_attempts": 3, "max_size": 7}
    | {"dedup_window": 60.0, "backoff": delayq.Backoff.fixed(5), "expired": "dead"}
    | {"when_full": "wait", "max_payload": 1000, "durability": "fsync", "partitions": 2}
    | {"keep_dead": 60.0, "max_dead": 7, "keep": 60.0, "max_kept": 7}
    | {"limit": delayq.Limit(concurrency=50), "group_limit": delayq.Limit(rate=5)},
    "delayed_queue": {"codec": StringCodec(), "max_payload": 1000}
    | {"ordered_list": False, "durability": "fsync"},
}


def test_clients_and_queues_are_opened_with_every_setting_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared: list[Callable[[Any], Any]] = []
    monkeypatch.setattr(Link, "declare", lambda _, open_on: declared.append(open_on))
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


def test_what_is_wrong_is_refused_where_it_is_written() -> None:
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
