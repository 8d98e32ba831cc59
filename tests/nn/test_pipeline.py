"""A model in stages learns as one in one piece."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag

ROWS = 5


async def stages(count: int = 2) -> list[ag.nn.RemoteModule]:
    return [await ag.nn.RemoteModule(f"worker{i}", ag.nn.Linear, args=(3, 3)) for i in range(count)]


def squares(y: ag.Tensor, target: np.ndarray) -> ag.Tensor:
    return ag.nn.functional.mse_loss(y, target)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("front", [lambda w, x: x * w, lambda w, x: w], ids=["made", "leaf"])
async def test_what_the_input_was_made_from_gets_its_gradient(cluster, schedule: str, front):
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 3))
    w = ag.tensor(rng.normal(size=(ROWS, 3)), requires_grad=True)
    async with cluster(2):
        modules = await stages()
        pipe = ag.nn.Pipeline(modules, schedule, microbatches=3)
        async with ag.context() as ctx:
            y = front(w, x)
            for module in modules:
                y = await module(y)
            await ctx.backward(squares(y, target))
            expected = ctx.gradients[w].numpy()
        async with ag.context() as ctx:
            await pipe.train_step(front(w, x), target, squares)
            assert list(ctx.gradients) == [w]
            np.testing.assert_allclose(ctx.gradients[w].numpy(), expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
async def test_an_empty_batch_is_refused(cluster, schedule: str):
    async with cluster(1):
        pipe = ag.nn.Pipeline(await stages(1), schedule)
        async with ag.context():
            with pytest.raises(ValueError, match="empty"):
                await pipe.train_step(np.ones((0, 3)), np.ones((0, 3)), squares)
        with pytest.raises(ValueError, match="empty"):
            await pipe(np.ones((0, 3)))


async def test_the_parameters_of_all_stages_are_found(cluster):
    async with cluster(2):
        pipe = ag.nn.Pipeline(await stages())
        parameters = await pipe.remote_parameters()
        assert [p.owner_name() for p in parameters] == ["worker0"] * 2 + ["worker1"] * 2
        assert [(await p).shape for p in parameters] == [(3, 3), (3,)] * 2
