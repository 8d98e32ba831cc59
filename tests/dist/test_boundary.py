"""Hooks at the border between workers."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.dist import boundary
from aiograd.errors import GradError, SerializationError


def square(x):
    return x * x


async def test_a_hook_sees_values_going_and_gradients_going_back(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    seen = []
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(lambda crossing, array: seen.append((crossing, array.tolist())))
        y = await ag.rpc_async("worker1", square, args=(x,))
        await ctx.backward((y * 3.0).sum())
        assert ctx.gradients[x].tolist() == [6.0, 12.0]
    assert [(c.peer, c.way, a) for c, a in seen] == [
        ("worker1", "forward", [1.0, 2.0]),
        ("worker1", "backward", [3.0, 3.0]),
    ]


async def test_gradients_can_be_clipped_and_blurred_on_their_way(workers):
    x = ag.tensor([3.0, 4.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(boundary.clipped(0.5))
        y = await ag.rpc_async("worker1", ag.multiply, args=(x, 1.0))
        await ctx.backward((y * ag.tensor([3.0, 4.0])).sum())
        np.testing.assert_allclose(ctx.gradients[x].numpy(), [0.3, 0.4])
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(boundary.noisy(0.1, np.random.default_rng(0)))
        y = await ag.rpc_async("worker1", ag.multiply, args=(x, 1.0))
        await ctx.backward(y.sum())
        expected = 1.0 + np.random.default_rng(0).normal(0.0, 0.1, 2)
        np.testing.assert_allclose(ctx.gradients[x].numpy(), expected)


async def test_a_smaller_dtype_on_the_wire_is_undone_on_arrival(workers):
    x = ag.tensor([1.0, 1 / 3], requires_grad=True)

    def look(value):
        return value * 1.0, str(value.dtype), value.numpy().tolist()

    async with workers(2), ag.context() as ctx:
        handle = ctx.on_crossing(boundary.as_dtype("float16"))
        y, dtype, values = await ag.rpc_async("worker1", look, args=(x,))
        assert dtype == "float64"
        assert values == [1.0, float(np.float16(1 / 3))]
        await ctx.backward((y * (1 / 3)).sum())
        assert ctx.gradients[x].dtype == np.float64
        assert ctx.gradients[x].tolist() == [float(np.float16(1 / 3))] * 2
        handle.remove()
        _, _, values = await ag.rpc_async("worker1", look, args=(x,))
        assert values == [1.0, 1 / 3]


async def test_a_hook_must_keep_the_shape(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(lambda crossing, array: array[:1])
        with pytest.raises(GradError, match="keep the shape"):
            await ag.rpc_async("worker1", square, args=(x,))
        assert ctx.send_nodes == {}


async def test_a_hook_cannot_write_to_what_stays_here(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(lambda crossing, array: np.negative(array, out=array))
        with pytest.raises(SerializationError, match="read-only"):
            await ag.rpc_async("worker1", square, args=(x,))
        assert ctx.send_nodes == {}
    assert x.tolist() == [1.0, 2.0]


async def test_a_hook_may_return_what_it_was_shown(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(lambda crossing, array: array)
        y = await ag.rpc_async("worker1", square, args=(x,))
        await ctx.backward(y.sum())
        assert ctx.gradients[x].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (boundary.clipped(1.0), [0.6, 0.0, 0.8, 0.0]),
        (boundary.as_dtype("float16"), [3.0, 0.0, 4.0, 0.0]),
        (lambda crossing, array: array * 2.0 if crossing.way == "backward" else None, [6, 0, 8, 0]),
        (lambda crossing, array: ag.tensor(array), [3.0, 0.0, 4.0, 0.0]),
    ],
)
async def test_sparse_arrays_pass_hooks_as_they_are(workers, hook, expected):
    x = ag.sparse.coo_tensor([[0, 2]], [1.0, 1.0], (4,), requires_grad=True)
    weights = ag.sparse.coo_tensor([[0, 2, 2]], [3.0, 1.0, 3.0], (4,))

    def same(value):
        assert value.is_sparse
        return value * 1.0

    seen = []
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(hook)
        ctx.on_crossing(lambda crossing, array: seen.append(type(array).__name__))
        y = await ag.rpc_async("worker1", same, args=(x,))
        await ctx.backward(ag.sparse.sum(y * weights))
        assert ctx.gradients[x].is_sparse
        np.testing.assert_allclose(ctx.gradients[x].to_dense().numpy(), expected)
    assert seen == ["Coo", "Coo"]


async def test_a_hook_cannot_write_to_a_sparse_array(workers):
    x = ag.sparse.coo_tensor([[0, 2]], [1.0, 1.0], (4,), requires_grad=True)
    seen = []
    async with workers(2), ag.context() as ctx:
        ctx.on_crossing(lambda crossing, array: seen.append(array.values.flags.writeable))
        await ag.rpc_async("worker1", ag.sparse.sum, args=(x,))
    assert seen == [False]
