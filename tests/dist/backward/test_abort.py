"""Passes that fail, time out or are cancelled end everywhere: one typed error, nothing partial."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiograd as ag
from aiograd.errors import BackwardFailed, UnknownContext
from tests.support.waiting import until, until_not


class Broken(ag.Function):
    """Passes its input on; fails on the way back while the switch is on."""

    on = True

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        if Broken.on:
            raise ValueError("no way back")
        return g * 1.0


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
    Broken.on = True
    GATE.clear()
    yield
    GATE.set()


def double(x):
    return x * 2.0


def broken(x):
    return Broken.apply(x)


def slow(x):
    return Slow.apply(x)


async def passes_on_worker1():
    return (await ag.rpc_async("worker1", ag.debug_info))["backward_passes"]


def gradient_errors(ctx_id):
    try:
        return dict.fromkeys(map(str, ag.get_gradients(ctx_id)))
    except Exception as error:
        return type(error).__name__


async def test_a_failing_rule_names_worker_and_op_and_chains_its_cause(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", broken, args=(x,))
        with pytest.raises(BackwardFailed, match="no way back") as caught:
            await ctx.backward(y.sum())
        assert caught.value.worker == "worker1"
        assert caught.value.op == "Broken"
        assert isinstance(caught.value.__cause__, ValueError)


async def test_no_gradient_of_a_failed_pass_can_be_read_anywhere(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(3), ag.context() as ctx:
        a = await ag.rpc_async("worker0", double, args=(x,))
        b = await ag.rpc_async("worker1", broken, args=(x,))
        with pytest.raises(BackwardFailed):
            await ctx.backward((a + b).sum(), retain_graph=True)
        with pytest.raises(BackwardFailed):
            _ = ctx.gradients
        for name in ("worker0", "worker1"):
            assert await ag.rpc_async(name, gradient_errors, args=(ctx.id,)) == "BackwardFailed"


async def test_a_retry_in_the_same_context_works_and_earlier_sums_come_back(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", broken, args=(x,))
        Broken.on = False
        await ctx.backward(y.sum(), retain_graph=True)
        Broken.on = True
        with pytest.raises(BackwardFailed):
            await ctx.backward(y.sum(), retain_graph=True)
        Broken.on = False
        await ctx.backward(y.sum(), retain_graph=True)
        assert ctx.gradients[x].tolist() == [2.0, 2.0]


async def test_other_contexts_do_not_notice_a_failure(workers):
    x = ag.tensor([1.0], requires_grad=True)

    async def good():
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", double, args=(x,))
            await ctx.backward(y.sum())
            return ctx.gradients[x].item()

    async def bad():
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", broken, args=(x,))
            with pytest.raises(BackwardFailed):
                await ctx.backward(y.sum())

    async with workers(2):
        results = await asyncio.gather(*[good() if i % 2 else bad() for i in range(10)])
    assert results[1::2] == [2.0] * 5


async def test_a_timeout_ends_the_pass_on_all_workers(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2) as cluster, ag.context() as ctx:
        y = await ag.rpc_async("worker1", slow, args=(x,))
        with pytest.raises(BackwardFailed) as caught:
            await ctx.backward(y.sum(), timeout=0.1)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.worker == "worker1"
        GATE.set()
        for worker in cluster:
            assert (await worker.call(ag.debug_info))["backward_passes"] == 0


async def test_cancelling_a_pass_ends_it_everywhere(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker1", slow, args=(x,))
        running = asyncio.create_task(ctx.backward(y.sum()))
        await until(passes_on_worker1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until_not(passes_on_worker1)
        GATE.set()
        assert ag.debug_info()["backward_passes"] == 0
        with pytest.raises(BackwardFailed, match="cancelled"):
            _ = ctx.gradients


async def test_leaving_the_context_ends_a_running_pass(workers):
    x = ag.tensor([1.0], requires_grad=True)
    async with workers(2):
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", slow, args=(x,))
            running = asyncio.create_task(ctx.backward(y.sum()))
            await until(passes_on_worker1)
        with pytest.raises(UnknownContext):
            await running
        GATE.set()


def forget(name: str) -> None:
    ag.current_worker().agent.directory.remove(name)


def fail(gradient: ag.Tensor) -> None:
    raise ValueError("on purpose")


async def failing(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    if path:
        return await ag.rpc_async(path[0], failing, args=(x, path[1:]))
    y = x * 3.0
    y.register_hook(fail)
    return y * 1.0


async def failing_pass(path: list[str]) -> str:
    async with ag.context() as ctx:
        y = await failing(ag.ones(2, requires_grad=True), path)
        with pytest.raises(ag.errors.BackwardFailed) as caught:
            await ctx.backward(y.sum(), timeout=20.0)
        return type(caught.value).__name__ + " " + caught.value.worker


async def test_a_failure_reaches_an_originator_that_the_failing_worker_does_not_know(workers):
    async with workers(3):
        await ag.rpc_async("worker1", forget, args=("worker2",))
        path = ["worker0", "worker1"]
        found = await ag.rpc_async("worker2", failing_pass, args=(path,))
        assert found == "BackwardFailed worker1"
