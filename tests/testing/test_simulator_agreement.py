"""What the simulator lets workers answer, and the faults and threads with which it asks them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from aiograd.dist.registry import context
from aiograd.errors import BackwardFailed, PassUndecided, UnknownContext
from aiograd.rpc.api import rpc_async
from aiograd.testing import simulate
from aiograd.testing.simulator import Fault
from aiograd.testing.simulator.invariants import Outcome, disagreement, read
from aiograd.testing.simulator.plan import REPLACED, make_plan
from aiograd.testing.simulator.workload.gradients import heavy
from aiograd.testing.simulator.world import World, here

LEAF, OTHER = ag.ones(2, requires_grad=True), ag.ones(2, requires_grad=True)
SUMS = {LEAF: np.array([2.0, 4.0])}
EXACT, WRONG = {LEAF: np.array([2.0, 4.0])}, {LEAF: np.array([2.0, 5.0])}
FAILED = BackwardFailed("b", "", "it was lost")
UNDECIDED, UNKNOWN = PassUndecided(7, "a"), UnknownContext(7)


@pytest.mark.parametrize("answer", [EXACT, UNDECIDED])
def test_after_a_good_pass_a_worker_shows_the_sums_or_does_not_know(answer):
    assert disagreement(answer, Outcome.GOOD, SUMS) == ""


@pytest.mark.parametrize(
    "answer", [{}, WRONG, {OTHER: np.array([2.0, 4.0])}, {**EXACT, OTHER: 1.0}, FAILED, UNKNOWN]
)
def test_after_a_good_pass_no_worker_says_anything_else(answer):
    assert disagreement(answer, Outcome.GOOD, SUMS)


@pytest.mark.parametrize("outcome", [Outcome.RUNNING, Outcome.FAILED])
@pytest.mark.parametrize("answer", [{}, UNDECIDED, FAILED, UNKNOWN])
def test_without_a_good_outcome_a_worker_shows_nothing(outcome, answer):
    assert disagreement(answer, outcome, SUMS) == ""
    assert disagreement(EXACT, outcome, SUMS)
    assert disagreement(WRONG, outcome, SUMS, reached=False)


@pytest.mark.parametrize("outcome", [Outcome.RUNNING, Outcome.FAILED])
def test_a_worker_that_a_pass_has_not_reached_may_show_sums_of_earlier_ones(outcome):
    assert disagreement(EXACT, outcome, SUMS, reached=False) == ""


def test_a_worker_may_forget_a_context_when_it_has_lost_who_opened_it():
    assert disagreement(UNKNOWN, Outcome.GOOD, SUMS, forgotten=True) == ""
    assert disagreement(FAILED, Outcome.GOOD, SUMS, forgotten=True)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


async def keep(x):
    """Multiply with a parameter that this worker keeps."""
    here().shelf["w"] = w = ag.full((2,), 3.0, requires_grad=True)
    return x * w


def test_a_reading_is_what_the_worker_would_show_and_sends_nothing():
    async def program(world: World):
        x = ag.ones(2, requires_grad=True)
        async with context() as ctx:
            loss = (await rpc_async("worker0", keep, (x,))).sum()
            steps = world.loop.steps
            before = read(world.nodes["worker0"], ctx.id)
            nobody = read(world.nodes["worker1"], ctx.id)
            assert world.loop.steps == steps
            await ctx.backward(loss)
            await rpc_async("worker0", keep, (x,))
            return before, nobody, read(world.nodes["driver"], ctx.id)[x].tolist()

    before, nobody, own = simulate(program)
    assert before == {}
    assert isinstance(nobody, UnknownContext)
    assert own == [3.0, 3.0]


# ── threads and faults ──────────────────────────────────────────────────────────────────────────


async def weighty(x, seconds):
    return heavy(x, seconds)


def test_a_heavy_gradient_takes_simulated_time_while_the_loop_goes_on():
    async def program() -> tuple[float, int]:
        loop, ticks = asyncio.get_running_loop(), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.1)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        x = ag.ones(2, requires_grad=True)
        async with context() as ctx:
            loss = (await rpc_async("worker0", weighty, (x, 2.0))).sum()
            begin = loop.time()
            await ctx.backward(loss)
            assert ctx.gradients[x].tolist() == [1.0, 1.0]
        ticking.cancel()
        return loop.time() - begin, ticks

    seconds, ticks = simulate(program)
    assert 2.0 <= seconds < 2.2
    assert 19 <= ticks <= 22


def test_the_thread_of_a_crashed_worker_never_goes_on():
    async def program(world: World) -> None:
        x = ag.ones(2, requires_grad=True)
        async with context() as ctx:
            loss = (await rpc_async("worker0", weighty, (x, 2.0))).sum()
            world.loop.call_later(1.0, world.crash, "worker0", context=world.context)
            with pytest.raises(BackwardFailed) as caught:
                await ctx.backward(loss)
        assert caught.value.worker == "worker0"
        assert 1.0 <= world.loop.time() < 2.0

    simulate(program)


def test_a_replaced_worker_is_another_start_of_the_same_name():
    async def program(world: World) -> tuple[int, bool]:
        old = world.nodes["worker0"]
        await asyncio.sleep(2.0)
        assert await rpc_async("worker0", keep, (2.0,)) is not None
        return world.nodes["worker0"].start_number, old.alive

    assert simulate(program, faults=[Fault(1.0, "replace", "worker0")]) == (1, False)


def test_a_share_of_all_seeds_replaces_workers_while_threads_compute():
    plans = [make_plan(seed) for seed in range(400)]
    replaced = [plan for plan in plans if plan.profile == "replaced"]
    assert 0.5 * REPLACED < len(replaced) / len(plans) < 2 * REPLACED
    assert all(plan.themes == ["drains"] for plan in replaced)
    assert any(fault.kind == "replace" for plan in replaced for fault in plan.faults)
