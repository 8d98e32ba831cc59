"""Tensors that go back to where they came from: their gradients need not go round."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.dist import boundary
from aiograd.rpc.extension import SEND


class Counting:
    """Counts what one worker sends, by kind."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def on_send(self, kind, to):
        self.kinds.append(kind)
        return SEND


async def chain(x, w, length):
    """x · w^length, each product made on worker1 from the result of the last."""
    middle = x
    for _ in range(length):
        middle = await ag.rpc_async("worker1", ag.multiply, args=(middle, w))
    return middle


@pytest.mark.parametrize("size", [3, 100_000])
async def test_a_chain_of_calls_to_one_worker_is_played_back_in_one_round_trip(workers, size):
    x = ag.tensor(np.arange(size) % 7.0, requires_grad=True)
    w = ag.tensor(np.full(size, 2.0), requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await chain(x, w, 5)
        counting = ag.current_worker().agent.fault_injector = Counting()
        await ctx.backward(y.sum())
        assert len(counting.kinds) == 1
        ag.current_worker().agent.fault_injector = None
        assert np.array_equal(ctx.gradients[x].numpy(), np.full(size, 32.0))
        assert np.array_equal(ctx.gradients[w].numpy(), 5 * 16.0 * x.numpy())


async def test_uses_of_a_middle_result_besides_the_loop_count_too(workers):
    x = ag.tensor([3.0], requires_grad=True)
    w = ag.tensor([2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        middle = await chain(x, w, 1)
        y = await ag.rpc_async("worker1", ag.multiply, args=(middle, w))
        z = await ag.rpc_async("worker0", ag.multiply, args=(middle, middle))
        await ctx.backward((y + z + 10.0 * middle).sum())
        # x·w·w + (x·w)² + 10·x·w
        assert ctx.gradients[x].tolist() == [4.0 + 2 * 3 * 4 + 20.0]
        assert ctx.gradients[w].tolist() == [2 * 3 * 2.0 + 2 * 9 * 2 + 30.0]


async def test_a_hook_on_a_middle_result_sees_its_gradient_and_may_change_it(workers):
    x = ag.tensor([3.0], requires_grad=True)
    w = ag.tensor([2.0], requires_grad=True)
    seen = []
    async with workers(2), ag.context() as ctx:
        first = await chain(x, w, 1)
        second = await chain(first, w, 1)
        loss = (await chain(second, w, 1)).sum()
        await ctx.backward(loss, retain_graph=True)
        assert ctx.gradients[x].tolist() == [8.0]

        def hook(gradient):
            seen.append(gradient.tolist())
            return gradient * 10.0

        second.register_hook(hook)  # also after a pass that took the short cut
        await ctx.backward(loss, retain_graph=True)
        assert seen == [[2.0]]
        assert ctx.gradients[x].tolist() == [8.0 + 80.0]


async def test_a_retained_pass_sees_what_was_sent_since_the_last_one(workers):
    x = ag.tensor([3.0], requires_grad=True)
    w = ag.tensor([2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        first = await chain(x, w, 2)
        loss = first.sum()
        for n in (1, 2, 3):
            await ctx.backward(loss, retain_graph=True)
            assert ctx.gradients[x].tolist() == [4.0 * n]
        more = await chain(first, w, 1)
        await ctx.backward(loss, retain_graph=True)  # its result is not used
        assert ctx.gradients[x].tolist() == [16.0]
        await ctx.backward(more.sum(), retain_graph=True)
        assert ctx.gradients[x].tolist() == [24.0]
        await ctx.backward(loss, retain_graph=True)
        assert ctx.gradients[x].tolist() == [28.0]


async def test_the_derivative_by_a_middle_result_is_found(workers):
    x = ag.tensor([3.0], requires_grad=True)
    w = ag.tensor([2.0], requires_grad=True)
    async with workers(2), ag.context():
        middle = await chain(x, w, 2)
        y = await chain(middle, w, 2)
        by_middle, by_x = await ag.grad(y.sum(), [middle, x], create_graph=True)
        assert by_middle.tolist() == [4.0]
        assert by_x.tolist() == [16.0]
        (second,) = await ag.grad(by_x.sum(), [w])
        assert second.tolist() == [4 * 2.0**3]


async def test_boundary_hooks_on_either_side_work_as_if_gradients_went_round(workers):
    def hooked(context_id, there):
        context = ag.get_context(context_id)
        context.on_crossing(boundary.clipped(0.5) if there else lambda crossing, array: None)

    x = ag.tensor([3.0, 4.0], requires_grad=True)
    w = ag.tensor([1.0, 1.0], requires_grad=True)
    found = []
    async with workers(2):
        for here in (False, True):
            async with ag.context() as ctx:
                y = await chain(x, w, 3)
                await ag.rpc_async("worker1", hooked, args=(ctx.id, True))
                if here:
                    ctx.on_crossing(lambda crossing, array: None)  # so that nothing is cut short
                await ctx.backward((y * ag.tensor([3.0, 4.0])).sum())
                found.append(ctx.gradients[x].numpy())
    np.testing.assert_allclose(found[0], [0.3, 0.4])
    np.testing.assert_allclose(found[0], found[1])


async def test_loops_through_the_worker_itself_are_closed(workers):
    x = ag.tensor([3.0], requires_grad=True)
    async with workers(1), ag.context() as ctx:
        y = x
        for _ in range(4):
            y = await ag.rpc_async("driver", ag.multiply, args=(y, 2.0))
        await ctx.backward(y.sum(), retain_graph=True)
        await ctx.backward(y.sum())
        assert ctx.gradients[x].tolist() == [32.0]
