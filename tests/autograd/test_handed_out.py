"""Writes to memory that `numpy()` handed out: noticed, never a wrong gradient."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.handed_out import SAMPLED, WATCHES
from aiograd.errors import GradError


def graph():
    x, w = ag.ones(4), ag.ones(4, requires_grad=True)
    return x, w, (x * w).sum()


@pytest.mark.parametrize("which", [0, 1])
def test_a_write_through_an_array_that_is_still_held_is_noticed(which):
    tensors = graph()
    tensors = *tensors[:2], (tensors[0] * tensors[1] * tensors[1]).sum()
    array = tensors[which].numpy()
    array[0] = 5.0
    with pytest.raises(GradError) as caught:
        tensors[2].backward()
    assert caught.value.reason == "modified"


def test_a_write_through_an_array_that_is_gone_is_noticed():
    x, _, loss = graph()
    x.numpy()[0] = 5.0
    with pytest.raises(GradError):
        loss.backward()


def test_a_write_through_a_slice_is_noticed():
    x, _, loss = graph()
    part = x.numpy().reshape(2, 2)[1]
    gc.collect()
    part[0] = 5.0
    with pytest.raises(GradError):
        loss.backward()


def test_a_write_through_an_array_from_before_the_recording_is_noticed():
    x, w = ag.ones(4), ag.ones(4, requires_grad=True)
    array = x.numpy()
    array[0] = 2.0  # before: no harm
    loss = (x * w).sum()
    array[1] = 5.0
    with pytest.raises(GradError):
        loss.backward()


def test_asarray_shares_and_is_watched():
    x, _, loss = graph()
    np.asarray(x)[0] = 5.0
    with pytest.raises(GradError):
        loss.backward()


def test_writes_of_an_optimiser_between_passes_are_no_surprise():
    x, w = ag.ones(4), ag.ones(4, requires_grad=True)
    held, detached = w.numpy(), w.detach().numpy()
    for _ in range(3):
        (x * w * w).sum().backward()
        with ag.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
    np.testing.assert_array_equal(held, detached)
    np.testing.assert_array_equal(held, w.numpy())


def test_a_write_to_a_large_array_is_noticed():
    x, w = ag.ones(SAMPLED // 4), ag.ones(SAMPLED // 4, requires_grad=True)
    loss = (x * w).sum()
    x.numpy()[:] = 2.0
    with pytest.raises(GradError):
        loss.backward()


def test_nothing_is_watched_when_nobody_holds_an_array():
    x, _, loss = graph()
    others = set(WATCHES)
    array = x.numpy()
    assert len(set(WATCHES) - others) == 1
    array.sum()
    del array
    assert set(WATCHES) <= others
    loss.backward()


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64", "int8", "bool"])
def test_numpy_gives_the_value_over_the_same_memory(shape, dtype):
    tensor = ag.zeros(shape, dtype=dtype)
    array = tensor.numpy()
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    array[...] = 1
    assert (tensor.data == 1).all()
    assert tensor.T.numpy().shape == shape[::-1]
