"""Registering functions as tasks, calling them, and the form of calls in messages."""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq import (
    BadArguments,
    BadInput,
    BadName,
    ConfigurationError,
    DecodeError,
    Tasks,
    UnknownTask,
)
from delayq._reliable.offer import OfferOptions
from delayq._reliable.settings import HandleOptions
from delayq.tasks import INJECTED, Call
from tests.support.cases import naming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayq import Task


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


@dataclass
class Order:
    id: int
    item: str = "book"


@dataclass
class Large(Order):
    size: int = 0


class Model(pydantic.BaseModel):
    made_by: str = pydantic.Field(alias="madeBy")


class Struct(msgspec.Struct):
    id: int


class Colour(Enum):
    RED = "red"


def sent(task: Task[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """Return a call as it is stored."""
    return task._tasks.codec.encode(task.to_offer(*args, **kwargs).value)


def received(tasks: Tasks, value: Any) -> Any:
    """Return a call as a worker reads it."""
    return tasks.codec.decode(value if isinstance(value, bytes) else json.dumps(value).encode())


def carry_out(tasks: Tasks, payload: bytes) -> Any:
    call = received(tasks, payload)
    return tasks.by_name[call.task].arguments.call(call.arguments, {})


def test_a_call_is_a_json_object_with_named_arguments(tasks: Tasks) -> None:
    @tasks.task(name="send mail")
    def send_mail(to: str, subject: str = "hi") -> None: ...

    assert sent(send_mail, "ada", subject="later") == (
        b'{"task":"send mail","args":{"to":"ada","subject":"later"}}'
    )
    # The default is the function's when it is called.
    assert sent(send_mail, "ada") == b'{"task":"send mail","args":{"to":"ada"}}'
    # Other languages may write it with more, and less.
    wanted = Call("send mail", {"to": "ada"})
    assert repr(wanted) == "Call(task='send mail')", "no payload is in a traceback"
    assert received(tasks, b'{ "args": {"to": "ada"}, "task": "send mail", "by": 1}') == wanted
    with pytest.raises(BadArguments, match=r"send_mail\(\): missing a required argument: 'to'"):
        received(tasks, {"task": "send mail"})
    with pytest.raises(UnknownTask, match="no task is registered as 'gone': register one") as error:
        received(tasks, {"task": "gone", "args": {}})
    assert error.value.task == "gone"
    for value in [1, [], {}, {"task": None}, b"no JSON"]:
        with naming(value), pytest.raises(DecodeError):
            received(tasks, value)
    for value in ({"task": "send"}, Call("gone", {})):
        with pytest.raises(BadInput):
            tasks.codec.encode(value)  # type: ignore[arg-type]


def test_arguments_arrive_with_their_types() -> None:
    cases: list[Any] = [
        (Order(1), Order),
        (Model(madeBy="ada"), Model),
        (Struct(2), Struct),
        (datetime(2030, 1, 1, tzinfo=UTC), datetime),
        ([Order(1), None], list[Order | None]),
        ((1, "a"), tuple[int, str]),
        ({Colour.RED: {1, 2}}, dict[Colour, set[int]]),
        ({"any": ["thing", 1]}, Any),
        (None, None),
        (3.0, float),
    ]
    for value, kind in cases:
        tasks = Tasks("mails")

        # Arguments of one function may be read by different libraries.
        def echo(value: Any, also: Model | None = None) -> Any:
            return value

        echo.__annotations__["value"] = kind
        with naming(value, kind):
            result = carry_out(tasks, sent(tasks.task(echo), value))
            assert result == value
            assert type(result) is type(value)


def positional(a: int, /, b: int = 2, *, c: int = 3) -> Any:
    return a, b, c


def variable(a: int, b: int = 2, *rest: int, **named: int) -> Any:
    return a, b, rest, named


def plain(a, b=2):  # type: ignore[no-untyped-def]
    return a, b


def nothing() -> Any:
    return ()


def private(_a: int, self: int, model_config: int = 0) -> Any:  # names that a class could refuse
    return _a, self, model_config


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = [
    (positional, (1,), {}, (1, 2, 3)),
    (positional, (1, 5), {"c": 6}, (1, 5, 6)),
    (positional, (1,), {"b": 7}, (1, 7, 3)),
    (variable, (1,), {}, (1, 2, (), {})),
    (variable, (1, 5, 6, 7), {"x": 8}, (1, 5, (6, 7), {"x": 8})),
    (variable, (), {"a": 1, "named": 8}, (1, 2, (), {"named": 8})),
    (plain, ("x", [1]), {}, ("x", [1])),
    (nothing, (), {}, ()),
    (private, (1, 2), {}, (1, 2, 0)),
]


@pytest.mark.parametrize("library", ["msgspec", "pydantic", "json"])
def test_functions_of_all_signatures_are_called_as_the_caller_wrote(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *{"msgspec", "pydantic"} - {library})
    for function, args, kwargs, result in CALLS:
        with naming(function, args, kwargs):
            tasks = Tasks("mails")
            assert carry_out(tasks, sent(tasks.task(function), *args, **kwargs)) == result
    # Another program may leave out what has a default.
    tasks.task(variable)
    call = {"task": "variable", "args": {"a": 1, "rest": [3]}}
    assert carry_out(tasks, json.dumps(call).encode()) == (1, 2, (3,), {})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text('ab\u00e9"\\', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("kl", max_size=2), inner),
    max_leaves=5,
)


def every_kind(a: Any, /, b: Any = 2, *rest: Any, c: Any = "c", **named: Any) -> Any:
    return a, b, rest, c, named


@given(
    args=st.lists(VALUES, min_size=1, max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["c", "x", "rest", "named", "a"]), VALUES),
)
def test_any_call_arrives_as_it_was_made(args: list[Any], kwargs: dict[str, Any]) -> None:
    tasks = Tasks("mails")
    payload = sent(tasks.task(every_kind), *args, **kwargs)
    assert carry_out(tasks, payload) == every_kind(*args, **kwargs)


def without(monkeypatch: pytest.MonkeyPatch, *libraries: str) -> None:
    """Make typed values be read without these libraries."""
    from delayq.codecs import _type_codecs

    def import_module(name: str) -> None:
        if name in libraries:
            raise ImportError(name)

    monkeypatch.setattr(_type_codecs, "import_module", import_module)


@pytest.mark.parametrize("library", ["msgspec", "pydantic", "json"])
def test_an_argument_of_another_type_is_refused_before_it_is_sent(
    tasks: Tasks, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *{"msgspec", "pydantic"} - {library})

    @tasks.task
    def close(order: Order, numbers: list[int] | None = None) -> None: ...

    wrong: list[Any] = [("secret",), (Order("secret"),), (Order(1), ["secret"])]  # type: ignore[arg-type]
    for args in wrong:
        with pytest.raises(BadArguments, match=r"close\(\), '(order|numbers)': ") as caught:
            sent(close, *args)
        assert "secret" not in str(caught.value), "values may be private"
    with pytest.raises(BadArguments, match=r"'order': value is a Large, and would come back as an"):
        sent(close, Large(1, size=2))
