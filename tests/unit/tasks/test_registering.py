"""Registering functions as tasks, and calling them: no client is there yet."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator  # noqa: TC003 - tasks read annotations
from datetime import timedelta
from typing import Any

import pytest

import delayq
from delayq import BadArguments, BadInput, BadName, ConfigurationError, Tasks
from delayq._reliable.offer import OfferOptions
from delayq._reliable.settings import HandleOptions
from delayq.tasks import INJECTED
from tests.support.cases import naming


class Db:
    pass


@pytest.fixture
def tasks() -> Tasks:
    return Tasks("mails")


async def send_mail(to: str, subject: str = "hi") -> str:
    """Send a mail."""
    return f"{subject}, {to}"


async def test_a_task_is_called_and_looks_like_its_function(tasks: Tasks) -> None:
    task = tasks.task(max_attempts=5)(send_mail)
    assert await task("ada", subject="hello") == "hello, ada"
    assert (task.__name__, task.__doc__) == ("send_mail", "Send a mail.")  # type: ignore[attr-defined]
    assert inspect.signature(task) == inspect.signature(send_mail)

    @tasks.task
    def add(a: int, *, b: int = 1, message: delayq.Message = INJECTED) -> None: ...

    for method in (add.offer, add.options(delay=1).offer_sync, add.to_offer):
        assert str(inspect.signature(method)).startswith("(a: 'int', *, b: 'int' = 1) -> ")
    assert task.function is send_mail
    assert tasks.task(name="twice")(lambda n: 2 * n)(21) == 42


def test_a_task_has_a_name_of_its_own(tasks: Tasks) -> None:
    def inner() -> None: ...

    assert tasks.task(inner).name == "inner", "neither module nor class: functions may move"
    assert tasks.task(name="another")(inner).name == "another"
    tasks.task(name="send", aliases=["mail"])(send_mail)
    for name, aliases in (("send", []), ("mail", []), ("new", ["send"])):
        with pytest.raises(
            ConfigurationError, match=r"already has a task '(send|mail)': send_mail"
        ):
            tasks.task(name=name, aliases=aliases)(send_mail)
    Tasks("others").task(name="send")(send_mail)
    wrong: Any
    for wrong in ("", "two\nlines", 7, None):
        with naming(wrong), pytest.raises(BadInput, match="a task needs a name"):
            tasks.task(aliases=[wrong])(send_mail)


def test_only_a_function_is_a_task(tasks: Tasks) -> None:
    def many() -> Iterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="does not yield"):
        tasks.task(many)
    with pytest.raises(ConfigurationError, match="must be a function"):
        tasks.task(name="five")(5)  # type: ignore[arg-type]
    # A partial function is one, and has no name.
    to_ada = functools.partial(send_mail, "ada")
    with pytest.raises(BadInput, match="a task needs a name"):
        tasks.task(to_ada)
    assert tasks.task(name="to_ada")(to_ada).name == "to_ada"


def test_settings_and_options_are_checked_at_once(tasks: Tasks) -> None:
    cases: list[dict[str, Any]] = [
        {"max_attempts": 0},
        {"max_attempts": True},
        {"timeout": 0},
        {"timeout": -1},
        {"backoff": 5},
    ]
    for settings in cases:
        with naming(settings), pytest.raises(BadInput):
            tasks.task(**settings)
    for name in ("", None):
        with pytest.raises(BadName):
            Tasks(name)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="lease must be"):
        Tasks("mails", lease=0)
    with pytest.raises(TypeError, match="leese"):
        Tasks("mails", leese=5)  # type: ignore[call-arg]
    assert Tasks("mails", lease=timedelta(minutes=1)).settings == {"lease": timedelta(minutes=1)}
    with pytest.raises(BadInput, match="no option 'dely', only delay, at, id"):
        tasks.task(send_mail).options(dely=3)  # type: ignore[call-arg]


def test_options_of_queues_and_offers_are_typed_for_tasks_too() -> None:
    queue = inspect.signature(delayq.Client.reliable_queue).parameters
    assert [*HandleOptions.__annotations__] == [*queue][3:]
    offer = inspect.signature(delayq.ReliableQueue.offer).parameters
    assert [*OfferOptions.__annotations__] == [*offer][2:]


def test_a_call_that_does_not_fit_is_refused(tasks: Tasks) -> None:
    cases: list[Any] = [
        (lambda task: task.to_offer(), r"send_mail\(\): missing a required argument: 'to'"),
        (lambda task: task.to_offer("a", "b", "c"), "too many positional arguments"),
        (lambda task: task.to_offer("a", title="b"), "unexpected keyword argument 'title'$"),
        (
            lambda task: task.to_offer("a", delay=3),
            r"'delay'; give .* task\.options\(delay=\.\.\.\)",
        ),
    ]
    task = tasks.task(send_mail)
    for call, reason in cases:
        with naming(call, reason):
            with pytest.raises(BadArguments, match=reason) as caught:
                call(task)
            assert isinstance(caught.value, TypeError), "as when the function is called"


def test_only_a_worker_fills_what_is_injected(tasks: Tasks) -> None:
    @tasks.task
    def store(value: int, db: Db = INJECTED) -> Db:
        return db

    assert store.to_offer(1).value.arguments == {"value": 1}
    with pytest.raises(BadArguments, match="the worker fills 'db'"):
        store.to_offer(1, db=Db())
    with pytest.raises(BadArguments, match="not called by a worker: pass db="):
        store(1)
    assert isinstance(store(1, Db()), Db)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        store()  # type: ignore[call-arg]

    def nameless(db: Db = INJECTED, /) -> None: ...

    with pytest.raises(ConfigurationError, match="positional-only"):
        tasks.task(nameless)


def test_options_add_up(tasks: Tasks) -> None:
    task = tasks.task(send_mail)
    offer = task.options(delay=3, id="a").options(delay=5).to_offer("ada")
    assert (offer.delay, offer.id, offer.value.task) == (5, "a", "send_mail")
    assert task.to_offer("ada").delay is None
    with pytest.raises(BadInput, match="durability is not an option of a single call"):
        task.options(durability="fsync").to_offer("ada")
