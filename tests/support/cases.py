"""Many cases in one test."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def naming(*case: object) -> Iterator[None]:
    """Name the case that a block tries in whatever the block raises, ``pytest.fail`` included."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(_shown, case))}")
        raise


def _shown(fact: object) -> str:
    try:
        return repr(fact)[:200]
    except Exception:
        # One that contains itself, or a number with too many digits.
        return f"a {type(fact).__name__}"
