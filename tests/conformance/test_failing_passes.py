"""Backward passes that fail: at once, with the right error, at the right caller."""

from __future__ import annotations

import asyncio
import time

import pytest

import aiograd as ag
from aiograd.errors import BackwardFailed, GradError, UnknownContext, WorkerLost
from tests.conformance.forms import FORMS, backward_passes, call, leaf, plus
from tests.support.waiting import until


class Faulty(ag.Function):
    """Passes its input on; on the way back it fails while the switch is on."""

    on = True

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        if Faulty.on:
            raise ValueError("Simulate error on backward pass")
        return g * 1.0


@pytest.fixture(autouse=True)
def _the_fault_is_on():
    Faulty.on = True
    yield
    Faulty.on = True


def faulty(x: ag.Tensor) -> ag.Tensor:
    return Faulty.apply(x)


@pytest.mark.parametrize("form", FORMS)
async def test_err_forward(workers, form):
    async with workers(2), ag.context() as ctx:
        t1, t2 = ag.rand(3, 3, requires_grad=True), ag.rand(6, 6, requires_grad=True)
        with pytest.raises(ValueError, match="matmul"):
            await call(form, "worker1", ag.matmul, t1, t2)
        good = await call(form, "worker1", ag.matmul, t1, t1)
        await ctx.backward(good.sum())
        assert set(ctx.gradients) == {t1}


async def test_err_engine_deep(workers):
    t1, t2 = leaf(seed=1), leaf(seed=2)
    async with workers(2), ag.context() as ctx:
        x = await ag.rpc_async("worker1", ag.add, args=(t1, t2))
        x = await ag.rpc_async("worker1", ag.mul, args=(x, t2))
        x = Faulty.apply(x)
        x = await ag.rpc_async("worker1", plus, args=(x, t2))
        x = await ag.rpc_async("worker1", ag.div, args=(x, t2))
        with pytest.raises(BackwardFailed, match="Simulate error on backward pass") as caught:
            await ctx.backward(x.sum())
        assert (caught.value.worker, caught.value.op) == ("driver", "Faulty")
        assert isinstance(caught.value.__cause__, ValueError)
        assert isinstance(caught.value, RuntimeError)
        assert (await ag.rpc_async("worker1", ag.debug_info))["backward_passes"] == 0


async def call_onwards(to: str, func: object, x: ag.Tensor) -> ag.Tensor:
    return await ag.rpc_async(to, func, args=(x,))


async def test_err_py_nested(workers):
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker0", call_onwards, args=("worker1", faulty, leaf()))
        with pytest.raises(BackwardFailed, match="Simulate error on backward pass") as caught:
            await ctx.backward(y.sum())
        assert caught.value.worker == "worker1"
        assert isinstance(caught.value.__cause__, ValueError)


async def test_err_recover(workers):
    t = leaf()
    async with workers(2), ag.context() as ctx:
        y = await ag.rpc_async("worker0", call_onwards, args=("worker1", faulty, t))
        loss = y.sum()
        for _ in range(50):
            with pytest.raises(BackwardFailed, match="Simulate error"):
                await ctx.backward(loss, retain_graph=True)
        with pytest.raises(BackwardFailed):
            _ = ctx.gradients
        Faulty.on = False
        for _ in range(49):
            await ctx.backward(loss, retain_graph=True)
        assert ctx.gradients[t].tolist() == [[49.0] * 3] * 3


WITHIN = 1.0 * 4  # seconds; a lost worker is promised to be known within 1


@pytest.mark.parametrize("when", ["before the pass", "during the pass"])
async def test_err_node_death(workers, when):
    async with workers(2, processes=True, rest=False, timeout=30.0) as cluster, ag.context() as ctx:
        t = leaf()
        func = plus if when == "before the pass" else stuck
        y = await ag.rpc_async("worker1", func, args=(t, t))
        running = None
        if when == "during the pass":
            running = asyncio.create_task(ctx.backward(y.sum()))
            await until(lambda: backward_passes("worker1"))
        await cluster.kill("worker1")
        began = time.monotonic()
        with pytest.raises(BackwardFailed, match="worker1") as caught:
            await (running or ctx.backward(y.sum()))
        assert time.monotonic() - began < WITHIN
        assert caught.value.worker == "worker1"
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert ag.debug_info()["backward_passes"] == 0
        # The others go on, in this very context.
        z = await ag.rpc_async("worker0", plus, args=(t, t))
        await ctx.backward(z.sum())
        assert ctx.gradients[t].tolist() == [[2.0] * 3] * 3


def stuck(x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    class Stuck(ag.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            time.sleep(60)  # the process is killed long before
            return g

    return Stuck.apply(x + y)


async def test_err_node_death_last_hop(workers):
    async with workers(3, processes=True, rest=False, timeout=30.0) as cluster, ag.context() as ctx:
        t = leaf()
        y = await ag.rpc_async("worker1", call_onwards, args=("worker2", double, t))
        await cluster.kill("worker2")
        began = time.monotonic()
        with pytest.raises(BackwardFailed, match="worker2") as caught:
            await ctx.backward(y.sum())
        assert time.monotonic() - began < WITHIN
        assert caught.value.worker == "worker2"
        assert (await cluster["worker1"].call(ag.debug_info))["backward_passes"] == 0
        with pytest.raises(BackwardFailed):
            await cluster["worker1"].call(read_gradients, ctx.id)


def double(x: ag.Tensor) -> ag.Tensor:
    return x * 2.0


def read_gradients(context_id: int) -> int:
    return len(ag.get_gradients(context_id))


async def test_err_unknown_ctx(workers):
    t = leaf()
    async with workers(1):
        with pytest.raises(UnknownContext, match="100") as caught:
            await ag.backward(100, [(t * t).sum()])
        assert caught.value.context_id == 100
        assert isinstance(caught.value, RuntimeError)
        with pytest.raises(UnknownContext):
            ag.get_gradients(100)


async def test_err_bad_args(workers):
    t = leaf()
    async with workers(1), ag.context() as ctx:
        with pytest.raises(TypeError):
            await ag.backward(ctx, None)
        with pytest.raises(TypeError):
            await ag.backward(None, None)
        with pytest.raises(TypeError):
            await ctx.backward(None)
        for roots, reason in [
            ([], "no_roots"),
            ([ag.ones(1)], "no_requires_grad"),
            ([t * t], "not_scalar"),
            ([ag.tensor(1.0, requires_grad=True)], "no_grad_fn"),
        ]:
            with pytest.raises(GradError) as caught:
                await ag.backward(ctx.id, roots)
            assert caught.value.reason == reason
        assert ctx.gradients == {}
        assert ag.debug_info()["backward_passes"] == 0


async def test_limit_unused_send_does_not_hold_up_a_pass(workers):
    t = leaf()
    async with workers(2), ag.context() as ctx:
        await ag.rpc_async("worker1", ag.mul, args=(t, t))  # thrown away
        used = await ag.rpc_async("worker0", ag.add, args=(t, t))
        await ctx.backward(used.sum())
        assert ctx.gradients[t].tolist() == [[2.0] * 3] * 3
        assert (await ag.rpc_async("worker1", ag.debug_info))["backward_passes"] == 0
