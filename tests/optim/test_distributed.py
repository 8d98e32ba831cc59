"""One optimiser over many owners: settings that travel with steps, and a bound on staleness."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import StaleGradients, WorkerLost
from aiograd.optim import owned
from aiograd.optim.schedules import (
    CosineAnnealingLR,
    LambdaLR,
    ReduceLROnPlateau,
    Scheduler,
    StepLR,
)

START = [1.0, -2.0]


def parameter() -> ag.Tensor:
    return ag.nn.Parameter(np.array(START))


def half_square(param: ag.RRef) -> ag.Tensor:
    """Its gradient is the parameter itself, so a step of SGD multiplies by 1 − lr."""
    value = param.local_value()
    return (value * value).sum() / 2


async def pull(ctx: ag.Context, *params: ag.RRef) -> None:
    """Forward and backward; the owners have gradients of what they see now."""
    with ctx.active():
        losses = [await ag.rpc_async(p.owner(), half_square, args=(p,)) for p in params]
    await ctx.backward(sum(losses))


def on(*names: str) -> list[ag.RRef]:
    return [ag.remote(name, parameter) for name in names]


async def values(params: list[ag.RRef]) -> list[list[float]]:
    return [(await param).tolist() for param in params]


# ── settings ────────────────────────────────────────────────────────────────────────────────────


def by_steps(optimizer: Any) -> Any:
    return StepLR(optimizer, 2, gamma=0.5)


def by_cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, 5)


def by_function(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


def by_plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize("schedule", [by_steps, by_cosine, by_function, by_plateau])
async def test_a_schedule_does_what_it_does_locally(cluster, schedule):
    local = [parameter(), parameter()]
    optimizer = ag.optim.SGD(local, lr=0.4, momentum=0.5)
    scheduler = schedule(optimizer)
    tell = () if isinstance(scheduler, Scheduler) else (1.0,)
    for _ in range(6):
        optimizer.zero_grad()
        sum((p * p).sum() / 2 for p in local).backward()
        optimizer.step()
        scheduler.step(*tell)

    async with cluster(2):
        params = on("worker0", "worker1")
        spread = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.4, momentum=0.5)
        scheduler = schedule(spread)
        for _ in range(6):
            async with ag.context() as ctx:
                losses = [await ag.rpc_async(p.owner(), half_square, args=(p,)) for p in params]
                await ctx.backward(sum(losses))
                await spread.step(ctx)
            scheduler.step(*tell)
        assert await values(params) == [p.tolist() for p in local]
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


async def test_settings_are_saved_and_come_back(cluster):
    async with cluster(2):
        params = on("worker0", "worker1")
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.4)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        scheduler.step()
        state = await optimizer.state_dict()
        assert [state[w]["param_groups"][0]["lr"] for w in ("worker0", "worker1")] == [0.2, 0.2]
        await optimizer.set_lr(0.7)
        assert scheduler.get_last_lr() == [0.7]
        await optimizer.load_state_dict(state)
        assert scheduler.get_last_lr() == [0.2]
        scheduler.step()
        assert scheduler.get_last_lr() == [0.1]


class Fading(ag.optim.Optimizer):
    """Halves its own rate with every step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: Any, grad: Any, state: Any, group: Any) -> None:
        param -= group["lr"] * grad
        group["lr"] /= 2


async def test_settings_that_nobody_changed_here_are_left_to_the_owner(cluster):
    async with cluster(1):
        params = on("worker0")
        optimizer = await ag.optim.DistributedOptimizer(Fading, params, lr=0.5)
        for _ in range(2):
            async with ag.context() as ctx:
                await ctx.backward(await ag.rpc_async("worker0", half_square, args=tuple(params)))
                await optimizer.step(ctx)
        assert await values(params) == [[x * 0.5 * 0.75 for x in START]]


async def test_settings_are_there_when_the_optimizer_is(cluster):
    async with cluster(1):
        optimizer = ag.optim.DistributedOptimizer(ag.optim.SGD, on("worker0"), lr=0.5)
        with pytest.raises(RuntimeError, match="`await` it"):
            StepLR(optimizer, 1)
        assert (await optimizer).param_groups[0]["lr"] == 0.5


async def test_the_norm_is_taken_and_clipped_over_all_owners(cluster):
    async with cluster(2):
        params = on("worker0", "worker1")
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=1.0)
        ctx = ag.context()
        await pull(ctx, *params)
        assert await optimizer.clip_grad_norm(ctx, 1.0) == pytest.approx(math.sqrt(10))
        assert await optimizer.clip_grad_norm(ctx, 5.0) == pytest.approx(1.0, abs=1e-6)
        await ctx.release()


def table() -> ag.nn.Module:
    return ag.nn.Embedding(1000, 2, sparse=True)


async def test_the_norm_of_rows_is_that_of_the_rows(cluster):
    async with cluster(1):
        module = await ag.nn.RemoteModule("worker0", table)
        params = await module.remote_parameters()
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=1.0)
        async with ag.context() as ctx:
            await ctx.backward((await module(np.array([3, 3, 8]))).sum())
            assert await optimizer.clip_grad_norm(ctx, 1.0) == pytest.approx(math.sqrt(10))
            assert await optimizer.clip_grad_norm(ctx, 1.0) == pytest.approx(1.0, abs=1e-6)
            await optimizer.step(ctx)


# ── staleness ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", [-1, 1.5, "fresh", True])
async def test_a_bound_is_a_number_of_steps(cluster, wrong):
    async with cluster(1):
        with pytest.raises(ValueError, match="staleness"):
            ag.optim.DistributedOptimizer(ag.optim.SGD, on("worker0"), lr=1.0, staleness=wrong)


@pytest.mark.parametrize("allowed", [0, 1, 2])
async def test_gradients_older_than_the_bound_are_refused(cluster, allowed):
    async with cluster(1):
        params = on("worker0")
        optimizer = await ag.optim.DistributedOptimizer(
            ag.optim.SGD, params, lr=0.5, staleness=allowed
        )
        contexts = [ag.context() for _ in range(4)]
        for ctx in contexts:
            await pull(ctx, *params)  # all of them see the first values
        refused = []
        for ctx in contexts:
            try:
                await optimizer.step(ctx)
            except StaleGradients as error:
                refused.append((error.worker, error.behind, error.allowed, error.reason))
            await ctx.release()
        assert refused == [("worker0", allowed + 1, allowed, "stale")] * (3 - allowed)
        taken = 1 + allowed
        np.testing.assert_allclose(await values(params), [[x * (1 - 0.5 * taken) for x in START]])


async def test_a_refused_step_changes_nothing_on_any_owner(cluster):
    async with cluster(3):
        params = on("worker0", "worker1", "worker2")
        both = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.5, staleness=0)
        one = await ag.optim.DistributedOptimizer(ag.optim.SGD, params[1:2], lr=0.5)
        slow, quick = ag.context(), ag.context()
        await pull(slow, *params)
        await pull(quick, params[1])
        await one.step(quick)
        before = await values(params)
        with pytest.raises(StaleGradients, match=r"1 times on worker1 .* 0 are allowed"):
            await both.step(slow)
        assert await values(params) == before
        await slow.release()
        again = ag.context()
        await pull(again, *params)
        await both.step(again)  # nobody keeps a turn
        await again.release()
        await quick.release()


async def test_ones_own_steps_and_those_on_other_parameters_do_not_count(cluster):
    async with cluster(1):
        mine, other = on("worker0", "worker0")
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, [mine], lr=0.5, staleness=0)
        elsewhere = await ag.optim.DistributedOptimizer(ag.optim.SGD, [other], lr=0.5, staleness=0)
        first, second = ag.context(), ag.context()
        await pull(first, mine)
        await pull(second, other)
        await elsewhere.step(second)
        await optimizer.step(first)
        await optimizer.step(first)
        assert await values([mine]) == [[0.0, 0.0]]
        await first.release()
        await second.release()


async def test_a_cancelled_wait_for_a_turn_lets_the_next_one_have_it(cluster):
    async with cluster(2):
        params = on("worker0", "worker1")
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.5, staleness=9)
        ctx = ag.context()
        await pull(ctx, *params)
        held = ag.rpc_stream(
            "worker1", owned.take_turn, args=(optimizer._locals["worker1"], ctx.id)
        )
        await anext(held)
        waiting = asyncio.ensure_future(optimizer.step(ctx))
        while (await ag.rpc_async("worker1", ag.debug_info))["running_calls"] < 2:
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await values(params) == [START, START]
        await held.aclose()
        await optimizer.step(ctx)
        assert await values(params) == [[x / 2 for x in START]] * 2
        await ctx.release()


async def trainer(params: list[ag.RRef], steps: int, names: list[str] | None = None) -> int:
    """Runs on a worker: steps until `steps` of its own were taken; how many were refused."""
    optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.1, staleness=0)
    taken = refused = 0
    while taken < steps:
        ctx = ag.context()
        await pull(ctx, *params)
        if names and not taken + refused:
            await ag.barrier(names)  # so that all but one begin with gradients that will be old
        try:
            await optimizer.step(ctx)
            taken += 1
        except StaleGradients:
            refused += 1
        await ctx.release()
    return refused


@pytest.mark.deadline(60)
async def test_without_staleness_many_trainers_do_what_one_would(cluster):
    names = ["owner0", "owner1", "trainer0", "trainer1", "trainer2"]
    async with cluster(5, names=names, processes=True) as c:
        params = on("owner0", "owner1")
        trainers = names[2:]
        refused = await asyncio.gather(*[c[t].call(trainer, params, 8, trainers) for t in trainers])
        expected = np.array(START)
        for _ in range(24):
            expected -= 0.1 * expected
        assert await values(params) == [expected.tolist()] * 2
        assert sum(refused) >= 2  # they did get into each other's way


async def hold_a_turn(optimizer: ag.RRef, ctx_id: int) -> None:
    turn = ag.rpc_stream(optimizer.owner_name(), owned.take_turn, args=(optimizer, ctx_id))
    await anext(turn)
    await asyncio.Event().wait()


async def test_a_trainer_that_dies_in_its_turn_holds_nobody_up(cluster):
    async with cluster(2, names=["owner", "doomed"], processes=True) as c:
        params = on("owner")
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.5, staleness=9)
        ctx = ag.context()
        await pull(ctx, *params)
        with ctx.active():
            held = c["doomed"].call(hold_a_turn, optimizer._locals["owner"], ctx.id)
        while not (await ag.rpc_async("owner", ag.debug_info))["running_calls"]:
            await asyncio.sleep(0)
        step = asyncio.ensure_future(optimizer.step(ctx))
        while (await ag.rpc_async("owner", ag.debug_info))["running_calls"] < 2:
            await asyncio.sleep(0)
        assert not step.done()
        await c.kill("doomed")
        async with asyncio.timeout(4 * 1.0):
            await step
        with pytest.raises(WorkerLost):
            await held
        assert await values(params) == [[x / 2 for x in START]]
        await ctx.release()


def after(steps: int) -> list[float]:
    value = np.array(START)
    for _ in range(steps):
        value -= 0.1 * value
    return value.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_trainers_take_turns_in_any_order_of_messages(seed):
    async def program() -> Any:
        params = on("worker0", "worker1")
        calls = [ag.rpc_async(f"worker{i}", trainer, args=(params, 4)) for i in (2, 3, 4)]
        await asyncio.gather(*calls)
        return await values(params)

    assert ag.testing.simulate(program, seed=seed, workers=5, faults="lazy") == [after(12)] * 2


@pytest.mark.parametrize("seed", range(20))
def test_a_trainer_may_die_at_any_moment(seed):
    async def program(world: Any) -> Any:
        params = on("worker0", "worker1")
        calls = [ag.rpc_async(f"worker{i}", trainer, args=(params, 4)) for i in (2, 3, 4)]
        await asyncio.sleep(random.Random(seed).uniform(0.0, 0.3))
        world.crash("worker4")
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, int)
        assert isinstance(second, int)
        assert isinstance(third, int | WorkerLost)
        return await values(params)

    whole = [after(steps) for steps in range(13)]
    taken = [whole.index(value) for value in ag.testing.simulate(program, seed=seed, workers=5)]
    assert min(taken) >= 8
    assert abs(taken[0] - taken[1]) <= 1  # of the one that died on its way from owner to owner
