"""Gradient messages that do not arrive fail their pass at once, with the reason."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.rpc.extension import FaultAction

SIZE = 600  # a gradient of 2.9 MB, more than the worker can take


async def scale(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    """Multiply on the last worker of the path by a parameter of its own."""
    if path:
        return await ag.rpc_async(path[0], scale, args=(x, path[1:]))
    return x * ag.ones(SIZE, SIZE, requires_grad=True)


def starve() -> None:
    agent = ag.current_worker().agent
    agent.budget.reserve(agent.options.inbound_budget - (1 << 20))


@pytest.mark.parametrize("path", [["worker0"], ["worker1", "worker0"]])
async def test_a_gradient_that_a_worker_cannot_take_fails_the_pass(workers, path):
    async with workers(2) as cluster, ag.context() as ctx:
        x = ag.ones(SIZE, SIZE, requires_grad=True)
        y = await scale(x, path)
        await cluster["worker0"].call(starve)
        weights = ag.tensor(np.arange(SIZE * SIZE, dtype=float).reshape(SIZE, SIZE))
        with pytest.raises(ag.errors.BackwardFailed) as caught:
            await ctx.backward((y * weights).sum(), timeout=20.0)
        assert caught.value.worker == "worker0"
        assert isinstance(caught.value.__cause__, ag.errors.Overloaded)


class Refusing:
    """Lets no gradient message be sent."""

    def on_send(self, kind: str, to: str) -> FaultAction:
        return FaultAction("fail" if kind.startswith("gradients") else "send")


async def test_a_gradient_that_cannot_be_sent_fails_the_pass(workers):
    async with workers(1), ag.context() as ctx:
        x = ag.ones(SIZE, SIZE, requires_grad=True)
        y = await scale(x, ["worker0"])
        ag.current_worker().faults = Refusing()
        with pytest.raises(ag.errors.BackwardFailed) as caught:
            await ctx.backward(y.sum(), timeout=20.0)
        assert caught.value.worker == "worker0"
        assert isinstance(caught.value.__cause__, ag.errors.WorkerLost)
