"""A worker dies near the end of a pass: what ended well counts, what failed shows no number."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import aiograd as ag
from aiograd.rpc.agent import current_agent
from aiograd.testing import simulate
from tests.support.waiting import until


async def multiply(path: list[str], x: ag.Tensor, kept: bool = False) -> ag.Tensor:
    """By three, at the end of the path; by a leaf of that worker, if it should have one."""
    if path:
        return await ag.rpc_async(path[0], multiply, args=(path[1:], x, kept))
    return x * (ag.tensor([3.0, 3.0], requires_grad=True) if kept else 3.0)


@pytest.mark.parametrize("tick", range(0, 40, 2))
def test_a_death_around_the_end_of_a_pass_never_halves_a_gradient(tick):
    """The second pass ends in the very tick in which the participant is lost, or near it."""

    async def program(world) -> None:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await multiply(["worker0"], x)
            await ctx.backward(y.sum(), retain_graph=True)
            world.loop.call_later(tick * 1e-4, world.crash, "worker0", context=world.context)
            try:
                await ctx.backward(y.sum())
            except ag.errors.BackwardFailed:
                with pytest.raises(ag.errors.BackwardFailed):
                    _ = ctx.gradients
            else:
                assert np.array_equal(ctx.gradients[x].numpy(), [6.0, 6.0])

    simulate(program, seed=tick, workers=1)


def test_numbers_stay_readable_when_a_participant_dies_after_a_good_pass():
    """The neighbour is in doubt, asks the originator, and learns that the pass had ended well."""

    async def program(world) -> None:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await multiply(["worker0", "worker1"], x, kept=True)
            await ctx.backward(y.sum())
            world.crash("worker0")
            await until(lambda: ag.rpc_async("worker1", knows_the_loss_of, args=("worker0",)))
            await until(lambda: ag.rpc_async("worker1", is_sure, args=(ctx.id,)))
            assert await ag.rpc_async("worker1", found, args=(ctx.id,)) == [[1.0, 2.0]]
            assert np.array_equal(ctx.gradients[x].numpy(), [3.0, 3.0])

    simulate(program, workers=2)


async def found(context_id: int) -> list[list[float]]:
    return [gradient.tolist() for gradient in ag.get_gradients(context_id).values()]


async def is_sure(context_id: int) -> bool:
    """Whether no failure of a pass is in the way of what it gave."""
    return ag.get_context(context_id).failure is None


async def knows_the_loss_of(name: str) -> bool:
    agent = current_agent()
    return name in {peer for peer, _ in agent.links.losses}


class FallAsleep(ag.Function):
    """On its way back, the worker that sent the gradient stops for a minute."""

    worlds: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        FallAsleep.worlds[-1].pause("worker0", 60.0)
        return gradient


async def weigh(path: list[str], x: ag.Tensor) -> ag.Tensor:
    if path:
        return await ag.rpc_async(path[0], weigh, args=(path[1:], x))
    return FallAsleep.apply(x) * ag.tensor([3.0, 3.0], requires_grad=True)


def test_a_worker_known_only_to_a_silent_one_shows_no_number_of_a_failed_pass():
    """worker0 passed gradients on to worker1, and cannot tell it that the pass has failed."""

    async def program(world) -> None:
        FallAsleep.worlds.append(world)
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await weigh(["worker0", "worker1"], x)
            with pytest.raises(ag.errors.BackwardFailed):
                await ctx.backward(y.sum(), timeout=3.0)
            with pytest.raises(ag.errors.BackwardFailed):
                await ag.rpc_async("worker1", found, args=(ctx.id,))

    simulate(program, workers=3)
