"""Copies made by two cores."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiograd.rpc.link.shared_memory import PARALLEL_FROM, Copier


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "size", [0, 1, PARALLEL_FROM - 1, PARALLEL_FROM, 3 * PARALLEL_FROM + 12_345]
)
def test_every_byte_is_copied(cores, size):
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    memory = np.zeros(size + 2, np.uint8)
    copier = Copier(cores)
    copier.copy(memory[1:-1], source)
    copier.close()
    assert (memory[1:-1] == source).all()
    assert memory[0] == memory[-1] == 0


def test_a_thread_helps_with_large_ones_only_and_ends():
    copier, before = Copier(2), threading.active_count()
    copier.copy(np.zeros(100, np.uint8), np.ones(100, np.uint8))
    assert threading.active_count() == before
    copier.copy(np.zeros(PARALLEL_FROM, np.uint8), np.ones(PARALLEL_FROM, np.uint8))
    assert threading.active_count() == before + 1
    copier.close()
    assert threading.active_count() == before
    copier.close()


def test_a_copy_that_cannot_be_made_is_an_error():
    copier = Copier(2)
    memory = np.zeros(PARALLEL_FROM, np.uint8)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copier.copy(memory, np.ones(PARALLEL_FROM, np.uint8))
    copier.close()
