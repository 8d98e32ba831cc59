"""F8: a worker fails in the middle of a backward pass."""

from __future__ import annotations

import asyncio
import time

import pytest

import aiograd as ag
from aiograd.dist.endings import LATE_WAIT
from aiograd.errors import BackwardFailed, ContextError, WorkerLost
from tests.failures.work import SEEN, kill, now, outcome, stopped, told


class Slow(ag.Function):
    """The identity; its backward takes for ever."""

    @staticmethod
    def forward(ctx, x):
        return x + 0.0

    @staticmethod
    def backward(ctx, gradient):
        SEEN["backward"] = now()
        time.sleep(30.0)
        return gradient


def slow(x):
    return Slow.apply(x)


async def through(to, x):
    y = await ag.rpc_async(to, slow, (x * 2.0,))
    return y * 3.0


async def gradients_of(context_id):
    """What can be read of a context on this worker: an error's name, or numbers."""
    try:
        return [value.tolist() for value in ag.get_gradients(context_id).values()]
    except ContextError as error:
        return type(error).__name__


async def contexts_left(names):
    found = await asyncio.gather(*(ag.rpc_async(name, ag.debug_info) for name in names))
    return sum(each["contexts"] for each in found)


async def test_f8_a_worker_killed_in_a_pass_fails_it_everywhere(cluster, figure):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(3) as c:
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker0", through, ("worker1", x))
            running = asyncio.create_task(outcome(ctx.backward((y * x).sum())))
            # Its loop still answers: rules that take long run off it.
            await told("worker1", "backward")
            killed = kill(c, "worker1")
            error, when = await running
            assert isinstance(error, BackwardFailed)
            assert error.worker == "worker1"
            assert isinstance(error.__cause__, WorkerLost)
            figure("F8", "killed during a pass: `BackwardFailed`", 0.5, when - killed)
            with pytest.raises(BackwardFailed):
                _ = ctx.gradients
            assert await ag.rpc_async("worker0", gradients_of, (ctx.id,)) in ("BackwardFailed", [])
        left = now()
        while await contexts_left(["worker0", "worker2"]) or ag.debug_info()["contexts"]:
            await asyncio.sleep(0.002)
        figure("F8", "… contexts of survivors freed after leaving", 2.0, now() - left)


def make():
    KEPT.append(ag.tensor([3.0, 4.0], requires_grad=True))


def times_kept(x):
    return x * KEPT[0]


KEPT: list[ag.Tensor] = []


async def test_f8_a_worker_stopped_in_a_pass_ends_it_at_its_deadline(cluster, figure):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(2) as c:
        await ag.rpc_async("worker0", make)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker0", times_kept, (x,))
            with stopped(c, "worker0"):
                began = now()
                error, when = await outcome(ctx.backward(y.sum(), timeout=0.5))
                assert isinstance(error, BackwardFailed)
                assert isinstance(error, TimeoutError)
                figure("F8", "stopped during a pass: past its deadline", 0.25, when - began - 0.5)
                with pytest.raises(BackwardFailed):
                    _ = ctx.gradients
                await asyncio.sleep(2 * LATE_WAIT)  # longer than anybody waits for its word
            # It wakes, and finds the pass and its end: there is no number to be read.
            assert await ag.rpc_async("worker0", gradients_of, (ctx.id,)) == "PassTimedOut"
