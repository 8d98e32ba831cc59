"""Writes to memory that users hold as arrays: noticed, never a wrong gradient."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd import handed_out
from aiograd.autograd.handed_out import SAMPLED, SOURCE_SAMPLED, WATCHES
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


# ── data ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("held", [True, False])
def test_a_write_through_data_is_noticed(held):
    x, _, loss = graph()
    array = x.data
    array[0] = 5.0
    if not held:
        del array
    with pytest.raises(GradError) as caught:
        loss.backward()
    assert caught.value.reason == "modified"


def test_an_update_of_data_in_place_is_noticed():
    w = ag.ones(4, requires_grad=True)
    loss = (w * w).sum()
    w.data -= 0.5
    np.testing.assert_array_equal(w.numpy(), np.full(4, 0.5))
    with pytest.raises(GradError):
        loss.backward()


def test_updates_of_data_between_passes_train():
    x, w = ag.ones(4), ag.zeros(4, requires_grad=True)
    for _ in range(60):
        ((x * w - 1.0) ** 2).sum().backward()
        w.data -= 0.1 * w.grad.data
        w.grad = None
    np.testing.assert_allclose(w.numpy(), 1.0, atol=1e-4)


def test_a_new_array_as_data_leaves_graphs_the_old_one():
    w = ag.ones(4, requires_grad=True)
    loss = (w * w).sum()
    for value in (np.full(4, 7.0), ag.full(4, 7.0)):
        w.data = value
        np.testing.assert_array_equal(w.numpy(), 7.0)
    loss.backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full(4, 2.0))
    with pytest.raises(TypeError, match="text"):
        w.data = np.array(["a"])


def test_a_held_array_may_be_filled_before_each_recording():
    x, w = ag.zeros(4), ag.ones(4, requires_grad=True)
    array = x.data
    for value in (1.0, 2.0, 3.0):
        array[:] = value
        (x * w).sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full(4, 6.0))


def test_a_write_to_the_whole_is_noticed_after_a_part_was_handed_out():
    x, w = ag.ones(4), ag.ones(4, requires_grad=True)
    loss = (x * w).sum()
    part = x[:2].numpy()
    whole = x.numpy()
    whole[3] = 5.0
    with pytest.raises(GradError):
        loss.backward()
    assert part.sum() == 2


def test_handing_out_the_memory_of_a_checkpoint_is_no_write():
    x, w = ag.ones(4), ag.ones(4, requires_grad=True)
    loss = ag.checkpoint(lambda a, b: (a * b * b).sum())(x, w)
    array = w.numpy()
    loss.backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full(4, 2.0))
    loss = ag.checkpoint(lambda a, b: (a * b * b).sum())(x, w)
    array[0] = 3.0
    with pytest.raises(GradError):
        loss.backward()


# ── the source of from_numpy ────────────────────────────────────────────────────────────────────


def weighted(source):
    x, w = ag.from_numpy(source), ag.ones(source.shape, requires_grad=True)
    return w, (x * w).sum()


@pytest.mark.parametrize(
    "shape",
    [(4,), (SOURCE_SAMPLED // 8,), (SOURCE_SAMPLED // 4 + 5,), (300, 500)],
    ids=["small", "all of it is read", "sampled", "a matrix"],
)
@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_a_write_to_the_source_of_a_tensor_is_noticed(shape, order):
    source = np.ones(shape, order="F" if order == "F" else "C")
    if order == "strided":
        source = np.ones((*shape, 2))[..., 0]
    w, loss = weighted(source)
    source[...] = 3.0
    with pytest.raises(GradError) as caught:
        loss.backward()
    assert caught.value.reason == "modified"
    assert w.grad is None


def test_a_write_to_one_row_of_a_batch_is_noticed():
    source = np.ones((64, 784))
    _, loss = weighted(source)
    source[63] = 0.0
    with pytest.raises(GradError):
        loss.backward()


def test_a_write_to_a_source_that_is_gone_by_the_pass_is_noticed():
    source = np.ones(4)
    _, loss = weighted(source)
    source[0] = 5.0
    del source
    with pytest.raises(GradError):
        loss.backward()


def test_a_source_may_be_filled_before_each_recording():
    source, w = np.zeros(4), ag.ones(4, requires_grad=True)
    x = ag.from_numpy(source)
    for value in (1.0, 2.0, 3.0):
        source[:] = value
        (x * w).sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full(4, 6.0))


def test_a_source_that_nobody_else_holds_is_not_read_again(monkeypatch):
    read = []
    monkeypatch.setattr(
        handed_out, "_checksum", lambda data, limit, start: read.append(data.shape) or start
    )
    w, x = ag.ones(4, requires_grad=True), ag.from_numpy(np.ones(4))
    for _ in range(5):
        (x * w).sum().backward()
    assert len(read) == 1
    np.testing.assert_array_equal(w.grad.numpy(), np.full(4, 5.0))


def test_a_tensor_that_nobody_holds_has_a_plain_version_cell():
    x, _, _ = graph()
    assert type(x._cell) is list
