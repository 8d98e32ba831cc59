"""Blocks of an arena never overlap, and what is given back can be taken again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.wire.buffers import ALIGN, Arena

SIZE = 64 * ALIGN


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * ALIGN)), max_size=60))
def test_blocks_never_overlap_and_all_room_comes_back(steps):
    arena, taken = Arena(SIZE), {}
    for give, number in steps:
        if give and taken:
            offset = sorted(taken)[number % len(taken)]
            arena.give(offset)
            del taken[offset]
        elif (offset := arena.take(number)) is not None:
            assert offset % ALIGN == 0
            assert offset + number <= SIZE
            for other, size in taken.items():
                assert offset + number <= other or other + size <= offset
            taken[offset] = number
        assert list(arena.taken) == list(taken)
    for offset in taken:
        arena.give(offset)
    assert arena.take(SIZE) == 0, "the free parts did not grow together again"


def test_a_block_that_does_not_fit_is_refused():
    arena = Arena(SIZE)
    assert arena.take(SIZE + 1) is None
    arena.take(ALIGN)
    assert arena.take(SIZE) is None


def test_what_was_given_back_last_is_taken_first():
    arena = Arena(SIZE)
    first, _ = arena.take(100), arena.take(100)
    arena.give(first)
    assert arena.take(100) == first


def test_giving_back_what_was_not_taken_is_an_error():
    with pytest.raises(KeyError):
        Arena(SIZE).give(ALIGN)
