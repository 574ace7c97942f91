"""Generated ids are short and sorted, never repeat, and lie in the partition that is asked for."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayq._reliable.ids import ENDINGS, endings_in, new_block, new_id, partition_of


def test_generated_ids_need_no_quoting_and_sort_by_creation() -> None:
    ids = [new_id() for _ in range(20_000)]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{12}", made) for made in ids)
    assert ids == sorted(set(ids))


def test_a_clock_that_is_set_back_repeats_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [new_id() for _ in range(100)]
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    ids = before + [new_id() for _ in range(100)]
    assert ids == sorted(set(ids))


def test_threads_never_generate_the_same_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        batches = [*pool.map(lambda _: [new_id() for _ in range(5000)], range(16))]
    assert len(set().union(*batches)) == 16 * 5000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_generates_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    # Time is frozen, so both ids are made in the same millisecond.
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    new_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, "".join(new_id() for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 10_000).decode()
    os.close(reading)
    os.close(writing)
    theirs = {text[at : at + 12] for at in range(0, len(text), 12)}
    assert len(theirs) == 100
    assert theirs.isdisjoint(new_id() for _ in range(100))


@given(st.text(ENDINGS[0] + "az09_Q", min_size=10, max_size=10), st.integers(1, 1024), st.data())
def test_an_id_lies_in_the_partition_for_which_it_was_made(
    beginning: str, partitions: int, data: st.DataObject
) -> None:
    partition = data.draw(st.integers(0, partitions - 1))
    endings = endings_in(beginning, partition, partitions)
    assert {partition_of(beginning + ending, partitions) for ending in endings} <= {partition}
    assert list(endings) == sorted(set(endings))


def test_every_partition_has_many_generated_ids() -> None:
    for partitions, least in ((2, 2000), (5, 250), (16, 250), (64, 60)):
        for partition in range(partitions):
            assert len(endings_in(new_block()[0], partition, partitions)) >= least, partitions
    # Where there are very many partitions, one of the next blocks has some.
    for partition in range(0, 1024, 8):
        assert any(endings_in(new_block()[0], partition, 1024) for _ in range(20)), partition


def test_no_block_of_ids_is_generated_twice() -> None:
    blocks = [new_block()[0] for _ in range(10_000)]
    assert blocks == sorted(set(blocks))
