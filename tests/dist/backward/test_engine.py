"""Backward passes that overlap, cross or go deep: gradients are exact, and errors say what is wrong."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import BackwardFailed, GradError, UnknownContext


GATE = threading.Event()


class Slow(ag.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        GATE.wait(20)
        return g * 1.0


@pytest.fixture(autouse=True)
def _open_gate_at_the_end():
    GATE.clear()
    yield
    GATE.set()


def double(x):
    return x * 2.0


def slow(x):
    return Slow.apply(x)


async def through(x, *workers):
    """x through a chain of workers, doubled on each."""
    if not workers:
        return x * 2.0
    return await ag.rpc_async(workers[0], through, args=(x * 2.0, *workers[1:]))


async def test_a_heavy_rule_does_not_hold_up_the_loop_of_its_worker(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", slow, args=(x,))
        running = asyncio.create_task(ctx.backward(y.sum()))
        assert await ag.rpc_async("worker1", double, args=(21,)) == 42
        GATE.set()
        await running
        assert ctx.gradients[x].item() == 1.0


async def test_a_second_pass_over_a_freed_graph_names_the_worker(workers):
    x = ag.tensor([1.0, 3.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", ag.multiply, args=(x, x))
        z = y.sum()
        await ctx.backward(z)
        with pytest.raises(GradError, match="worker1") as caught:
            await ctx.backward(z)
        assert caught.value.reason == "freed"


async def test_concurrent_passes_in_one_context_all_end_right(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(3), ag.context() as ctx:
        y = await ag.rpc_async("worker0", through, args=(x, "worker1", "worker2"))
        await asyncio.gather(*[ctx.backward(y.sum(), retain_graph=True) for _ in range(8)])
        assert ctx.gradients[x].tolist() == [64.0, 64.0]


async def test_a_pass_must_not_cross_into_another_context(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2):
        async with ag.context():
            y = await ag.rpc_async("worker1", double, args=(x,))
        async with ag.context() as other:
            with pytest.raises(GradError, match="context"):
                await other.backward((y * 2.0).sum())


async def test_a_local_backward_says_to_use_the_context(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2), ag.context():
        y = await ag.rpc_async("worker1", double, args=(x,))
        with pytest.raises(GradError, match=r"ctx\.backward"):
            y.sum().backward()


async def test_a_chain_of_200_hops_comes_back(workers):
    x = ag.tensor([1.0], requires_grad=True)

    async def hop(value, left):
        if not left:
            return value * 1.0
        name = f"worker{left % 3}"
        return await ag.rpc_async(name, hop, args=(value + 1.0, left - 1))

    async with workers(3), ag.context() as ctx:
        y = await hop(x, 200)
        await ctx.backward(y.sum())
        assert ctx.gradients[x].item() == 1.0


async def test_a_64_way_fan_out_comes_together(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(4), ag.context() as ctx:
        calls = [ag.rpc_async(f"worker{i % 4}", double, args=(x,)) for i in range(64)]
        await ctx.backward(sum(await asyncio.gather(*calls)).sum())
        assert ctx.gradients[x].item() == 128.0


async def test_a_checkpointed_call_gives_the_same_gradients_without_its_graph(workers):
    rng = np.random.default_rng(3)
    x = ag.tensor(rng.standard_normal((4, 3)), requires_grad=True)
    w = ag.tensor(rng.standard_normal((3, 2)), requires_grad=True)

    def block(a, b):
        return ag.tanh(a @ b) * 2.0

    async with workers(2):
        found = []
        for function in (block, ag.checkpoint(block)):
            async with ag.context() as ctx:
                y = await ag.rpc_async("worker1", function, args=(x, w))
                await ctx.backward((y * y).sum())
                found.append((ctx.gradients[x].numpy(), ctx.gradients[w].numpy()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


async def test_a_hessian_vector_product_through_a_remote_call_is_exact(workers):
    x = ag.tensor([1.0, 2.0, -1.0], requires_grad=True)
    v = np.array([0.5, -1.0, 2.0])

    def cubes(a):
        return (a * a * a).sum()

    async with workers(2), ag.context():
        y = await ag.rpc_async("worker1", cubes, args=(x,))
        (g,) = await ag.grad(y, x, create_graph=True)
        (hv,) = await ag.grad((g * v).sum(), x)
    np.testing.assert_allclose(hv.numpy(), 6 * x.numpy() * v, rtol=1e-14)


async def test_every_leaf_gets_memory_of_its_own_also_with_create_graph(workers):
    x, y = (ag.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    async with workers(2), ag.context() as ctx:
        z = await ag.rpc_async("worker1", double, args=(x + y,))
        await ctx.backward(z.sum(), create_graph=True)
        with ag.no_grad():
            ctx.gradients[x][0] = 7.0
        assert ctx.gradients[y].tolist() == [2.0, 2.0]
        await ctx.backward((x + y).sum(), create_graph=True)
        await ctx.backward((x + y).sum())
        assert ctx.gradients[x].tolist() == [9.0, 4.0]
        assert ctx.gradients[y].tolist() == [4.0, 4.0]


async def test_derivatives_of_any_order_go_through_a_checkpointed_call(workers):
    x = ag.tensor([2.0, 3.0], requires_grad=True)

    def cube(a):
        return a * a * a

    async with workers(2), ag.context():
        y = (await ag.rpc_async("worker1", ag.checkpoint(cube), args=(x * 1.0,))).sum()
        for expected in ([12.0, 27.0], [12.0, 18.0], [6.0, 6.0]):
            (g,) = await ag.grad(y, x, create_graph=True)
            assert g.tolist() == expected
            y = g.sum()


async def test_edges_to_a_worker_that_the_directory_does_not_know_yet_are_no_lost_ones(workers):
    """A restarted worker may call before others have heard of it from the coordinator."""
    async with workers(2) as cluster, ag.context() as ctx:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        y = await ag.rpc_async("worker0", double, args=(x,))
        directory = cluster.driver.agent.directory
        known = directory.get("worker0")
        directory.remove("worker0")
        await ctx.backward(y.sum())
        directory.add(known)
        assert ctx.gradients[x].tolist() == [2.0, 2.0]


async def pass_of_ones_own(path: list[str]) -> list[float]:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with ag.context() as ctx:
        y = await along(x, path)
        await ctx.backward(y.sum(), timeout=20.0)
        return ctx.gradients[x].tolist()


async def along(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    return await ag.rpc_async(path[0], along, args=(x, path[1:])) if path else x * 3.0


def forget(name: str) -> None:
    ag.current_worker().agent.directory.remove(name)


async def test_credit_comes_home_from_a_worker_that_does_not_know_the_originator(workers):
    """worker1 has been told nothing of worker2 yet, and has never met it."""
    async with workers(3):
        await ag.rpc_async("worker1", forget, args=("worker2",))
        path = ["worker0", "worker1"]
        assert await ag.rpc_async("worker2", pass_of_ones_own, args=(path,)) == [3.0, 3.0]
