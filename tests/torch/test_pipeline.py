"""A pipeline of torch modules learns as one model in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import aiograd as ag
from tests.torch.functions import DTYPE, fill, leaf

SCHEDULES = ["gpipe", "1f1b"]


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as started:
        yield started


class Part(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3, dtype=DTYPE)
        fill(self, seed)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.layer(x).tanh()


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*[Part(seed) for seed in range(3)])


def stages() -> list[ag.torch.RemoteModule[Part]]:
    return [ag.torch.RemoteModule(f"worker{n % 2}", Part, args=(n,)) for n in range(3)]


def runs(stage: ag.RRef) -> int:
    return stage.local_value().runs


def gradients(stage: ag.RRef) -> list[torch.Tensor]:
    found = ag.current_context().gradients
    return [found[p] for p in stage.local_value().parameters()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("front", ["data", "leaf", "made"])
async def test_gradients_equal_those_of_one_process(
    cluster, schedule: str, recompute: bool, front: str
):
    x, target, w = leaf(7, 3).detach(), leaf(7, 3, seed=1).detach(), leaf(7, 3, seed=2)

    def batch() -> torch.Tensor:
        return x if front == "data" else w if front == "leaf" else (w * x).exp()

    pipe = ag.nn.Pipeline(stages(), schedule, microbatches=3, recompute=recompute)
    here = model()
    expected_loss = torch.nn.functional.mse_loss(here(batch()), target)
    wanted = [*here.parameters(), *([] if front == "data" else [w])]
    expected = list(torch.autograd.grad(expected_loss, wanted))
    async with ag.context() as ctx:
        loss = await pipe.train_step(batch(), target, torch.nn.functional.mse_loss)
        found = [
            gradient
            for stage in pipe.stages
            for gradient in await ag.rpc_async(stage.owner(), gradients, args=(stage,))
        ]
        if front != "data":
            found.append(ctx.gradients[w])
        assert len(ctx.gradients) == (front != "data")
    assert loss == pytest.approx(expected_loss.item())
    torch.testing.assert_close(found, expected)
    assert w.grad is None
    times = [await ag.rpc_async(stage.owner(), runs, args=(stage,)) for stage in pipe.stages]
    assert times == [3 * (1 + recompute)] * 3


async def test_the_whole_batch_goes_through_in_order(cluster):
    pipe, x = ag.nn.Pipeline(stages(), microbatches=4), leaf(9, 3).detach()
    torch.testing.assert_close((await pipe(x)).detach(), model()(x).detach())


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_a_pipeline_learns_with_an_optimiser_of_torch(cluster, schedule: str):
    x, target = leaf(8, 3).detach(), leaf(8, 3, seed=1).detach()
    pipe, here = ag.nn.Pipeline(stages(), schedule, microbatches=4), model()
    params = await pipe.remote_parameters()
    opt = await ag.torch.DistributedOptimizer(torch.optim.AdamW, params, lr=0.05)
    theirs = torch.optim.AdamW(here.parameters(), lr=0.05)
    for _ in range(4):
        async with ag.context() as ctx:
            mine = await pipe.train_step(x, target, torch.nn.functional.mse_loss)
            await opt.step(ctx)
        theirs.zero_grad()
        loss = torch.nn.functional.mse_loss(here(x), target)
        loss.backward()
        theirs.step()
        assert mine == pytest.approx(loss.item())


async def test_stages_may_be_references_and_what_is_no_module_is_named(cluster):
    pipe = ag.nn.Pipeline([ag.remote("worker0", torch.nn.Linear, args=(3, 2))])
    assert (await pipe(torch.ones(4, 3))).shape == (4, 2)
    with pytest.raises(ValueError, match=r"no nn\.Module"):
        await ag.nn.Pipeline([ag.remote("worker0", np.ones, args=(3,))])(torch.ones(4, 3))
    with pytest.raises(ValueError, match="empty"):
        await pipe(torch.ones(0, 3))
