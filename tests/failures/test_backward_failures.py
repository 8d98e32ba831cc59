"""F8: a worker fails in the middle of a backward pass."""

from __future__ import annotations

import asyncio
import time

import pytest

import aiograd as ag
from aiograd.dist.backward.abort import LATE_WAIT
from aiograd.errors import BackwardFailed, ContextError, WorkerLost
from tests.failures.work import (
    RELEASED,
    SEEN,
    kill,
    now,
    outcome,
    release_threads,
    stopped,
    told,
    until,
)
from tests.support.waiting import until_not


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
            assert str(error).count("lost worker") == 1
            figure("F8", "killed during a pass: `BackwardFailed`", 0.5, when - killed)
            with pytest.raises(BackwardFailed):
                _ = ctx.gradients
            assert await ag.rpc_async("worker0", gradients_of, (ctx.id,)) in ("BackwardFailed", [])
        left = now()
        await until_not(lambda: contexts_left(["worker0", "worker2"]))
        await until_not(lambda: ag.debug_info()["contexts"])
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


class Gate(ag.Function):
    """The identity; its backward runs in a thread, and waits there for the word."""

    @staticmethod
    def forward(ctx, x):
        return x + 0.0

    @staticmethod
    def backward(ctx, gradient):
        SEEN["at the gate"] = now()
        RELEASED.wait()
        return gradient


async def chain(path, x, gate):
    """Multiply by two on every worker of the path; a parameter of three is on the last one.

    The worker `gate` waits in backward, after those behind it have done their part.
    """
    x = (Gate.apply(x) if path[0] == gate else x) * 2.0
    if len(path) > 1:
        return await ag.rpc_async(path[1], chain, (path[1:], x, gate))
    KEPT[:] = [ag.tensor([3.0, 3.0], requires_grad=True)]
    return x * KEPT[0]


async def behind_a_gate(path, x):
    """The same, but gradients wait here before they reach those behind."""
    return Gate.apply(await ag.rpc_async(path[0], chain, (path, x * 2.0, "")))


@pytest.mark.parametrize("restarted", [False, True])
async def test_f8_a_worker_lost_while_another_computes_fails_the_pass(cluster, figure, restarted):
    """driver → worker0 → worker1; the pass has not reached worker1 when it is lost.

    Its successor knows none of its edges: it must neither get the gradient nor answer for it.
    """
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(2) as c, ag.context() as ctx:
        y = await ag.rpc_async("worker0", behind_a_gate, (["worker1"], x))
        running = asyncio.create_task(outcome(ctx.backward((y + x).sum(), timeout=10.0)))
        await told("worker0", "at the gate")
        killed = kill(c, "worker1")
        if restarted:
            await c.restart("worker1")
            await ag.rpc_async("worker0", release_threads)
        error, when = await running
        await ag.rpc_async("worker0", release_threads)
        assert isinstance(error, BackwardFailed)
        assert error.worker == "worker1"
        figure("F8", "lost while another computes: `BackwardFailed`", 1.0, when - killed)
        with pytest.raises(BackwardFailed):
            _ = ctx.gradients


async def test_f8_a_worker_replaced_while_the_driver_computes_fails_the_pass(cluster):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    SEEN.clear()
    RELEASED.clear()
    async with cluster(1) as c, ag.context() as ctx:
        y = Gate.apply(await ag.rpc_async("worker0", chain, (["worker0"], x, "")))
        running = asyncio.create_task(outcome(ctx.backward((y + x).sum())))
        await until(lambda: "at the gate" in SEEN)
        kill(c, "worker0")
        await c.restart("worker0")
        RELEASED.set()
        error, _ = await running
        assert isinstance(error, BackwardFailed)
        assert error.worker == "worker0"
        with pytest.raises(BackwardFailed):
            _ = ctx.gradients


async def test_f8_a_loss_that_only_a_worker_knows_which_the_pass_has_not_reached(cluster, figure):
    """driver → worker0 → worker1; the driver computes, and has no edge to the lost worker1."""
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    SEEN.clear()
    RELEASED.clear()
    async with cluster(2) as c, ag.context() as ctx:
        path = ["worker0", "worker1"]
        y = Gate.apply(await ag.rpc_async("worker0", chain, (path, x, "")))
        running = asyncio.create_task(outcome(ctx.backward((y + x).sum(), timeout=10.0)))
        await until(lambda: "at the gate" in SEEN)
        killed = kill(c, "worker1")
        error, when = await running
        RELEASED.set()
        assert isinstance(error, BackwardFailed)
        assert error.worker == "worker1"
        figure("F8", "lost before the pass reaches it: `BackwardFailed`", 1.0, when - killed)


PATH = ["worker0", "worker1", "worker2", "worker3"]


async def test_f8_survivors_that_only_the_lost_one_invited_show_no_number(cluster):
    """worker1 is killed when worker2 and worker3 have their gradients, and only it knew them."""
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(4) as c, ag.context() as ctx:
        y = await ag.rpc_async("worker0", chain, (PATH, x, "worker1"))
        running = asyncio.create_task(outcome(ctx.backward(y.sum())))
        await told("worker1", "at the gate")
        # Their part is done, but the pass is not decided.
        assert await ag.rpc_async("worker3", gradients_of, (ctx.id,)) == "PassUndecided"
        kill(c, "worker1")
        error, _ = await running
        assert isinstance(error, BackwardFailed)
        assert error.worker == "worker1"
        for name in ("worker3", "worker2", "worker0"):
            shown = await ag.rpc_async(name, gradients_of, (ctx.id,))
            assert shown == "BackwardFailed", f"{name} shows {shown}"


async def test_f8_a_loss_after_a_pass_that_ended_well_hides_no_number(cluster):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(4) as c:
        ctx = ag.context()
        with ctx.active():
            y = await ag.rpc_async("worker0", chain, (PATH, x, ""))
            await ctx.backward(y.sum())
            right = [[16.0, 32.0]]
            assert await ag.rpc_async("worker3", gradients_of, (ctx.id,)) == right
            await c.kill("worker2")
            # worker3 exchanged messages with worker2 only; it knows the outcome by now.
            assert await ag.rpc_async("worker3", gradients_of, (ctx.id,)) == right
        # The same outside the context, by a call that does not take it along.
        assert await ag.rpc_async("worker3", gradients_of, (ctx.id,)) == right
        assert ctx.gradients[x].tolist() == [48.0, 48.0]
        await ctx.release()


async def test_f8_every_participant_answers_with_numbers_after_a_good_pass(cluster):
    """Also to calls outside the context, right after a pass that was awaited outside it."""
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with cluster(4):
        ctx = ag.context()
        with ctx.active():
            y = await ag.rpc_async("worker0", chain, (PATH, x, ""))
            loss = y.sum()
        await ctx.backward(loss)
        assert await ag.rpc_async("worker3", gradients_of, (ctx.id,)) == [[16.0, 32.0]]
        await ctx.release()
