"""Generated ids can be made to lie in a certain partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayq._reliable.ids import ENDINGS, new_block
from delayq._reliable.placement import endings_in, partition_of


@given(st.text(ENDINGS[0] + "az09_Q", min_size=10, max_size=10), st.integers(1, 1024), st.data())
def test_an_id_lies_in_the_partition_for_which_it_was_made(
    beginning: str, partitions: int, data: st.DataObject
) -> None:
    partition = data.draw(st.integers(0, partitions - 1))
    endings = endings_in(beginning, partition, partitions)
    assert {partition_of(beginning + each, partitions) for each in endings} <= {partition}
    assert list(endings) == sorted(set(endings))


def test_there_are_many_for_each_partition() -> None:
    for partitions, least in ((2, 2000), (5, 250), (16, 250), (64, 60)):
        for partition in range(partitions):
            assert len(endings_in(new_block()[0], partition, partitions)) >= least, partitions
    # Where there are very many partitions, one of the next blocks has some.
    for partition in range(0, 1024, 8):
        assert any(endings_in(new_block()[0], partition, 1024) for _ in range(20)), partition


def test_no_block_comes_twice() -> None:
    blocks = [new_block()[0] for _ in range(10_000)]
    assert blocks == sorted(set(blocks))
