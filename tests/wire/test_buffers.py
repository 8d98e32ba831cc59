"""Blocks come back when the last array over them is gone, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.wire.buffers import IDLE, LARGE, Memory


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_is_used_again_when_the_last_view_of_it_is_gone():
    memory = Memory()
    array = memory.take(LARGE)
    where = address(array)
    view = array[16:].view(np.float32)[::2]
    del array
    other = memory.take(LARGE)
    assert address(other) != where
    del view
    assert address(memory.take(LARGE)) == where


def test_blocks_are_writable_and_of_the_size_asked_for():
    array = Memory().take(LARGE + 5)
    array[:] = 7
    assert array.shape == (LARGE + 5,)
    assert array.flags.writeable


def test_small_arrays_are_left_to_numpy():
    memory = Memory()
    assert memory.take(10).base is None
    memory.trim()
    assert memory.idle == 0


def test_blocks_nobody_wants_are_let_go():
    memory = Memory()
    memory.take(LARGE)
    memory.trim()
    assert memory.idle == LARGE
    memory.trim()
    assert memory.idle == 0


def test_idle_memory_is_bounded():
    memory = Memory()
    arrays = [memory.take(IDLE // 2 - 1) for _ in range(3)]
    del arrays
    memory.trim()
    assert memory.idle <= IDLE


def test_idle_blocks_are_let_go_before_memory_is_missing(monkeypatch):
    memory, empty = Memory(), np.empty
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
