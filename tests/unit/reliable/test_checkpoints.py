"""The stored form of a checkpoint, without a server."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from delayq._reliable.checkpoints import Saved, pack, unpack

MOMENTS = st.lists(st.integers(0, 10**16), min_size=1, max_size=3).map(tuple)
MARKS = st.text("0123456789abcdef", max_size=12)


@given(
    st.integers(0, 10**16 - 1),
    st.none() | st.binary(),
    st.dictionaries(st.text(max_size=9), st.binary(), max_size=3),
    st.dictionaries(MARKS, MOMENTS, max_size=3),
)
def test_a_checkpoint_is_read_back(
    number: int,
    state: bytes | None,
    steps: dict[str, bytes],
    sleeps: dict[str, tuple[int, ...]],
) -> None:
    saved = Saved(number, state, steps, sleeps)
    assert unpack(pack(saved)) == saved


@given(st.binary() | st.from_regex(rb"[0-9];[0-9]?;[0-9=, ]*\n[0-9]:[0-9]:.*", fullmatch=True))
def test_a_damaged_one_is_refused(checkpoint: bytes) -> None:
    with suppress(ValueError):
        unpack(checkpoint)
