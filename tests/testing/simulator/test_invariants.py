"""Outcome agreement (I11): which answers about a pass are right."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.dist.registry import context
from aiograd.errors import BackwardFailed, PassUndecided, UnknownContext
from aiograd.rpc.api import rpc_async
from aiograd.testing import simulate
from aiograd.testing.simulator.invariants import Outcome, disagreement, read
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


def test_a_worker_may_forget_a_context_when_it_has_lost_the_worker_that_opened_it():
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
