"""Contexts and passes in plain functions, which run in threads of their worker."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiograd as ag
from tests.support.waiting import until_not


def double(x):
    return x * 2.0


def train(peer):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    with ag.context() as ctx:
        y = ag.rpc_sync(peer, double, args=(x,))
        z = ag.run_sync(ag.rpc_async(peer, double, args=(y,)))
        ag.run_sync(ctx.backward(z.sum(), retain_graph=True))
        (g,) = ag.run_sync(ag.grad((y * y).sum(), x))
        return ctx.id >> 48, ctx.gradients[x].tolist(), g.tolist(), sorted(ctx.known_workers)


async def count_contexts(worker):
    return (await worker.call(ag.debug_info))["contexts"]


async def test_a_plain_function_can_open_a_context_and_run_backward(workers):
    async with workers(2) as cluster:
        rank, gradient, g, known = await ag.rpc_async("worker0", train, args=("worker1",))
        assert (rank, gradient, g) == (0, [4.0, 4.0], [8.0, 16.0])
        assert known == ["worker1"]
        for worker in cluster:
            await until_not(lambda worker=worker: count_contexts(worker))


async def test_a_thread_of_the_driver_can_use_the_cluster(workers):
    async with workers(2):
        assert (await asyncio.to_thread(train, "worker0"))[1] == [4.0, 4.0]
        result = []
        thread = threading.Thread(target=lambda: result.append(train("worker1")))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert result[0][1] == [4.0, 4.0]


async def test_plain_functions_run_under_the_callers_context(workers):
    def deeper(x):
        assert ag.current_context().id
        return ag.rpc_sync("worker1", double, args=(x * 3.0,))

    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker0", deeper, args=(x,))
        await ctx.backward(y.sum())
        assert ctx.gradients[x].item() == 6.0
        with pytest.raises(ag.errors.NestedContext):
            await ag.rpc_async("worker0", train, args=("worker1",))
