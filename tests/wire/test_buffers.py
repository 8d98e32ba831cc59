"""Blocks come back when the last array over them is gone, and not before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.wire.buffers import ALIGN, IDLE, LARGE, Arena, BufferPool

SIZE = 64 * ALIGN


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_is_used_again_when_the_last_view_of_it_is_gone():
    memory = BufferPool()
    array = memory.take(LARGE)
    where = address(array)
    view = array[16:].view(np.float32)[::2]
    del array
    other = memory.take(LARGE)
    assert address(other) != where
    del view
    assert address(memory.take(LARGE)) == where


def test_blocks_are_writable_and_of_the_size_asked_for():
    array = BufferPool().take(LARGE + 5)
    array[:] = 7
    assert array.shape == (LARGE + 5,)
    assert array.flags.writeable


def test_small_arrays_are_left_to_numpy():
    memory = BufferPool()
    assert memory.take(10).base is None
    memory.trim()
    assert memory.idle == 0


def test_blocks_nobody_wants_are_let_go():
    memory = BufferPool()
    memory.take(LARGE)
    memory.trim()
    assert memory.idle == LARGE
    memory.trim()
    assert memory.idle == 0


def test_idle_memory_is_bounded():
    memory = BufferPool()
    arrays = [memory.take(IDLE // 2 - 1) for _ in range(3)]
    del arrays
    memory.trim()
    assert memory.idle <= IDLE


def test_idle_blocks_are_let_go_before_memory_is_missing(monkeypatch):
    memory, empty = BufferPool(), np.empty
    memory.take(LARGE)
    memory.take(2 * LARGE)

    def scarce(size, dtype):
        if memory.idle:
            raise MemoryError(size)
        return empty(size, dtype)

    monkeypatch.setattr("aiograd.wire.buffers.np.empty", scarce)
    assert memory.take(3 * LARGE).nbytes == 3 * LARGE
    assert memory.idle == 0
    monkeypatch.setattr(
        "aiograd.wire.buffers.np.empty", lambda *_: (_ for _ in ()).throw(MemoryError)
    )
    with pytest.raises(MemoryError):
        memory.take(4 * LARGE)


# ── the arena ───────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * ALIGN)), max_size=60))
def test_blocks_never_overlap_and_all_room_comes_back(steps):
    arena, taken = Arena(SIZE), {}
    for free, number in steps:
        if free and taken:
            offset = sorted(taken)[number % len(taken)]
            arena.free(offset)
            del taken[offset]
        elif (offset := arena.take(number)) is not None:
            assert offset % ALIGN == 0
            assert offset + number <= SIZE
            for other, size in taken.items():
                assert offset + number <= other or other + size <= offset
            taken[offset] = number
        assert list(arena.taken) == list(taken)
    for offset in taken:
        arena.free(offset)
    assert arena.take(SIZE) == 0, "the free parts did not grow together again"


def test_a_block_that_does_not_fit_is_refused():
    arena = Arena(SIZE)
    assert arena.take(SIZE + 1) is None
    arena.take(ALIGN)
    assert arena.take(SIZE) is None


def test_the_block_freed_last_is_taken_first():
    arena = Arena(SIZE)
    first, _ = arena.take(100), arena.take(100)
    arena.free(first)
    assert arena.take(100) == first


def test_freeing_what_was_not_taken_is_an_error():
    with pytest.raises(KeyError):
        Arena(SIZE).free(ALIGN)
