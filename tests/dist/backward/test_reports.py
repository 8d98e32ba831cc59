"""Participants learn how passes ended: with the next message of the context, or soon without one."""

from __future__ import annotations

import pytest

import aiograd as ag
from aiograd.errors import PassUndecided
from aiograd.testing import Faults
from tests.support.waiting import until

LEAVES: dict[str, ag.Tensor] = {}


def scale(x: ag.Tensor) -> ag.Tensor:
    leaf = LEAVES.setdefault(ag.current_worker().name, ag.tensor([3.0], requires_grad=True))
    return x * leaf


def read(context_id: int) -> object:
    """The gradient of this worker's leaf, or the name of the error."""
    try:
        return ag.get_gradients(context_id)[LEAVES[ag.current_worker().name]].item()
    except PassUndecided as error:
        return type(error).__name__


async def read_outside(name: str, context_id: int) -> object:
    """The same, asked by a call that does not carry the context, nor a report."""
    return await ag.current_worker().agent.context.copy().run(ag.rpc_async, name, read, (context_id,))


@pytest.fixture(autouse=True)
def _no_leaves():
    LEAVES.clear()


async def test_a_call_of_the_originator_brings_the_outcome_with_it(workers, monkeypatch):
    monkeypatch.setattr("aiograd.dist.backward.reports.LAZY", 3600.0)
    async with workers(1), ag.context() as ctx:
        y = await ag.rpc_async("worker0", scale, args=(ag.tensor([2.0], requires_grad=True),))
        await ctx.backward(y.sum())
        assert await read_outside("worker0", ctx.id) == "PassUndecided"
        assert await ag.rpc_async("worker0", read, args=(ctx.id,)) == 2.0
        assert await read_outside("worker0", ctx.id) == 2.0


async def test_a_participant_that_gets_no_message_learns_the_outcome_soon(workers):
    async with workers(1), ag.context() as ctx:
        y = await ag.rpc_async("worker0", scale, args=(ag.tensor([2.0], requires_grad=True),))
        await ctx.backward(y.sum())

        async def learned():
            return await read_outside("worker0", ctx.id) == 2.0

        await until(learned)
        assert await read_outside("worker0", ctx.id) == 2.0


async def test_a_report_that_was_lost_with_its_sending_leaves_the_pass_undecided(workers):
    async with workers(1) as cluster, ag.context() as ctx:
        y = await ag.rpc_async("worker0", scale, args=(ag.tensor([2.0], requires_grad=True),))
        cluster.driver.faults = Faults(fail=["gradients.outcomes"])
        await ctx.backward(y.sum())
        assert await ag.rpc_async("worker0", read, args=(ctx.id,)) == "PassUndecided"
