"""Contexts used in tasks, threads and functions other than the one that opened them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from tests.conformance.forms import leaf, plus


async def gradients_by_id(context_id: int) -> list[object]:
    return [g.tolist() for g in ag.get_gradients(context_id).values()]


async def test_jit_get_gradients_from_anything_that_has_the_id(workers):
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", plus, args=(leaf(seed=1), leaf(seed=2)))
        await ctx.backward(y.sum())
        ones = [[1.0] * 3] * 3
        assert await asyncio.create_task(gradients_by_id(ctx.id)) == [ones, ones]
        assert await ag.rpc_async("driver", gradients_by_id, args=(ctx.id,)) == [ones, ones]
        in_thread = await asyncio.to_thread(lambda: list(ag.get_gradients(ctx.id).values()))
        assert [g.tolist() for g in in_thread] == [ones, ones]


async def play(context_id: int, t1: ag.Tensor, t2: ag.Tensor) -> None:
    y = await ag.rpc_async("worker1", ag.add, args=(t1, t2))
    await ag.backward(context_id, [y.sum()])


def play_in_thread(context_id: int, t1: ag.Tensor, t2: ag.Tensor) -> None:
    y = ag.rpc_sync("worker1", ag.add, args=(t1, t2))
    ag.run_sync(ag.backward(context_id, [y.sum()]))


@pytest.mark.parametrize("where", ["task", "thread"])
async def test_jit_backward_from_anything_that_has_the_id(workers, where):
    t1, t2 = leaf(seed=1), leaf(seed=2)
    async with workers(2), ag.context() as ctx:
        if where == "task":
            await asyncio.create_task(play(ctx.id, t1, t2))
        else:
            await asyncio.to_thread(play_in_thread, ctx.id, t1, t2)
        assert set(ctx.gradients) == {t1, t2}
        assert ctx.gradients[t1].tolist() == [[1.0] * 3] * 3


async def test_jit_fork_context_is_inherited_by_tasks(workers):
    t1, t2 = leaf(seed=1), leaf(seed=2)

    async def forked() -> ag.Tensor:
        return await ag.rpc_async("worker1", ag.add, args=(t1, t2))

    async with workers(2), ag.context() as ctx:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(forked())
        assert len(ctx.send_nodes) == 1
        await ctx.backward(task.result().sum())
        assert set(ctx.gradients) == {t1, t2}


async def two_calls(t1: ag.Tensor, t2: ag.Tensor) -> ag.Tensor:
    first = await ag.rpc_async("worker1", ag.add, args=(t1, t2))
    await asyncio.to_thread(int)  # comes back from another thread
    second = await ag.rpc_async("worker0", ag.add, args=(t1, t2))
    return first + second


@pytest.mark.parametrize("to", [None, "worker1"])
async def test_jit_switch_thread_a_context_survives_every_await(workers, to):
    t1, t2 = leaf(seed=1), leaf(seed=2)
    async with workers(2), ag.context() as ctx:
        if to is None:
            y = await two_calls(t1, t2)
            assert len(ctx.send_nodes) == 2
        else:
            y = await ag.rpc_async(to, two_calls, args=(t1, t2))
        await ctx.backward(y.sum())
        np.testing.assert_array_equal(ctx.gradients[t1].numpy(), ctx.gradients[t2].numpy())
        assert ctx.gradients[t1].tolist() == [[2.0] * 3] * 3
