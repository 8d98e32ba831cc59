"""Contexts are released on every worker they reached, also when the worker that opened them dies."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiograd as ag
from aiograd.dist.registry import ContextRegistry
from aiograd.errors import BackwardFailed
from tests.support.waiting import until, until_not


async def visit(path: list[str]) -> None:
    if path:
        await ag.rpc_async(path[0], visit, args=(path[1:],))


async def open_and_visit(path: list[str]) -> None:
    ctx = ag.context()
    with ctx.active():
        await visit(path)


async def count_contexts() -> int:
    return ag.debug_info()["contexts"]


@pytest.mark.parametrize(("lately", "kept"), [(0.0, 5), (60.0, 8)])
async def test_ids_of_released_contexts_do_not_pile_up(workers, monkeypatch, lately, kept):
    for name, value in {"REMEMBERED": 5, "MOST": 8, "LATELY": lately}.items():
        monkeypatch.setattr(f"aiograd.dist.registry.{name}", value)
    async with workers(1):
        ids = []
        for _ in range(20):
            async with ag.context() as ctx:
                ids.append(ctx.id)
        assert list(ctx.home._released) == ids[-kept:]


@pytest.mark.parametrize(
    "path", [["worker1", "worker1"], ["worker1", "worker2", "worker1", "worker2"]]
)
async def test_workers_that_called_each_other_do_not_keep_a_dead_workers_context(workers, path):
    async with workers(3, lease=0.1) as cluster:
        await ag.rpc_async("worker0", open_and_visit, args=(path,))
        assert await ag.rpc_async("worker1", count_contexts) == 1
        await cluster.kill("worker0")
        for name in ("worker1", "worker2"):
            await until_not(lambda name=name: ag.rpc_async(name, count_contexts))


async def test_an_open_context_survives_the_loss_of_one_of_its_callers(workers):
    async with workers(2, lease=0.05) as cluster, ag.context() as ctx:
        await visit(["worker1"])
        await visit(["worker0", "worker1"])
        await cluster.kill("worker0")
        asked = asyncio.Event()
        home = ag.current_worker().agent
        known = home.services["context.known"]

        def watch(*args):
            asked.set()
            return known(*args)

        home.services["context.known"] = watch
        await asked.wait()
        assert home.parts[ContextRegistry].find(ctx.id) is ctx
        assert await ag.rpc_async("worker1", count_contexts) == 1


async def through(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    return await ag.rpc_async(path[0], through, args=(x, path[1:])) if path else x * 2.0


releases: list[tuple[str, str]] = []  # of contexts: sender and recipient


async def listen() -> None:
    agent = ag.current_worker().agent
    release = agent.services["context.release"]

    def hear(sender, *context_ids):
        releases.extend((sender.name, agent.name) for _ in context_ids)
        return release(sender, *context_ids)

    agent.services["context.release"] = hear


async def test_a_release_is_not_sent_back_to_the_worker_it_came_from(workers):
    releases.clear()
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2) as cluster:
        await listen()
        await asyncio.gather(*[worker.call(listen) for worker in cluster])
        async with ag.context():
            await through(x, ["worker0", "worker1"])
        for _ in range(2):  # a release is lazy: it travels in front of other messages
            await through(x, ["worker0", "worker1"])
    assert releases == [("driver", "worker0"), ("worker0", "worker1")]


class Slow(ag.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.3)  # blocks a thread, as long computations do
        return gradient * 2.0


def slow(x: ag.Tensor) -> ag.Tensor:
    return Slow.apply(x)


async def test_a_worker_that_is_told_to_leave_does_its_part_of_a_pass_first():
    x = ag.ones(2, requires_grad=True)
    async with ag.LocalCluster(2) as cluster, ag.context() as ctx:
        y = await cluster["worker1"].call(slow, x)
        passing = asyncio.ensure_future(ctx.backward(y.sum()))
        await until(lambda: count_passes(cluster["worker1"]))
        await cluster.scale(1)
        await passing
        assert ctx.gradients[x].tolist() == [2.0, 2.0]


async def count_passes(worker: ag.Handle) -> int:
    return (await worker.call(ag.debug_info))["backward_passes"]


class Failing(ag.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


def fail_later(x: ag.Tensor) -> ag.Tensor:
    return Failing.apply(x)


async def yield_multiples(x: ag.Tensor) -> AsyncIterator[ag.Tensor]:
    for k in range(3):
        yield x * k


async def fail_there(x: ag.Tensor, ctx: ag.Context) -> None:
    y = await ag.rpc_async("worker0", fail_later, args=(x,))
    with pytest.raises(BackwardFailed):
        await ctx.backward(y.sum())
    with pytest.raises(BackwardFailed):
        _ = ctx.gradients


async def fail_here(x: ag.Tensor, ctx: ag.Context) -> None:
    y = fail_later(await ag.rpc_async("worker0", ag.exp, args=(x,)))
    with pytest.raises(BackwardFailed):
        await ctx.backward(y.sum())


async def fail_grad(x: ag.Tensor, ctx: ag.Context) -> None:
    y = await ag.rpc_async("worker0", fail_later, args=(x,))
    with pytest.raises(BackwardFailed):
        await ag.grad(y.sum(), [x])


async def time_out(x: ag.Tensor, ctx: ag.Context) -> None:
    y = await ag.rpc_async("worker0", slow, args=(x,))
    with pytest.raises(BackwardFailed):
        await ctx.backward(y.sum(), timeout=0.05)


async def read_stream(x: ag.Tensor, ctx: ag.Context) -> None:
    total = ag.zeros(2)
    async for y in ag.rpc_stream("worker0", yield_multiples, args=(x,)):
        total = total + y
    await ctx.backward(total.sum())


@pytest.mark.parametrize("work", [fail_there, fail_here, fail_grad, time_out, read_stream])
async def test_a_context_that_was_left_keeps_no_tensors_until_the_next_collection(work):
    async with ag.LocalCluster(1):
        gc.collect()
        gc.disable()
        try:
            kept = await leave_after(work)
            await until(lambda: kept() is None)
            assert ag.debug_info()["contexts"] == 0
        finally:
            gc.enable()


async def leave_after(work: Any) -> weakref.ref[ag.Tensor]:
    x = ag.ones(2, requires_grad=True)
    async with ag.context() as ctx:
        await work(x, ctx)
    return weakref.ref(x)
