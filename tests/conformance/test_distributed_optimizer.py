"""One optimiser over parameters on several workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import UnknownContext


class Layer:
    """One 3 × 3 weight and the product with it."""

    def __init__(self, seed: int, requires_grad: bool = True) -> None:
        values = np.random.default_rng(seed).standard_normal((3, 3))
        self.w = ag.tensor(values, requires_grad=requires_grad)

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        return self.w @ x

    def weight(self) -> ag.Tensor:
        return self.w


def inputs() -> tuple[ag.Tensor, ag.Tensor]:
    rng = np.random.default_rng(42)
    make = rng.standard_normal
    return ag.tensor(make((3, 3)), requires_grad=True), ag.tensor(make((3, 3)), requires_grad=True)


def step_locally(layers: list[Layer], cls: Any, steps: int, **settings: Any) -> list[np.ndarray]:
    """The same as below, without any calls."""
    optimizer = cls([layer.w for layer in layers], **settings)
    for _ in range(steps):
        t1, t2 = inputs()
        for layer in layers:
            layer.w.grad = None
        (layers[1].forward(layers[0].forward(t2)) + t1).sum().backward()
        optimizer.step()
    return [layer.w.numpy().copy() for layer in layers]


async def step_remotely(
    flags: list[bool], cls: Any, steps: int, **settings: Any
) -> list[np.ndarray]:
    """Two layers on two workers, forward through both, backward, a step on both."""
    modules = [
        ag.remote("worker0", Layer, args=(0, flags[0])),
        ag.remote("worker1", Layer, args=(1, flags[1])),
    ]
    params = [module.remote().weight() for module in modules]
    optimizer = await ag.optim.DistributedOptimizer(cls, params, **settings)
    for _ in range(steps):
        t1, t2 = inputs()
        async with ag.context() as ctx:
            first = await modules[0].rpc_async().forward(t2)
            second = await modules[1].rpc_async().forward(first)
            await ctx.backward((second + t1).sum())
            await optimizer.step(ctx)
    return [(await param.to_here()).numpy() for param in params]


RULES: list[tuple[str, dict[str, Any]]] = [
    ("Adagrad", {"lr": 0.05}),
    ("Adam", {"lr": 1e-2, "amsgrad": True}),
    ("AdamW", {"lr": 0.05, "amsgrad": True}),
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    ("Adadelta", {"rho": 0.95}),
    ("RMSprop", {"lr": 0.05}),
    ("Adamax", {"lr": 0.05}),
    ("Rprop", {"lr": 0.05}),
]


@pytest.mark.parametrize(("name", "settings"), RULES)
async def test_opt_equals_local(workers, name, settings):
    cls = getattr(ag.optim, name)
    before = [Layer(seed).w.numpy() for seed in range(2)]
    async with workers(2):
        for steps in (1, 3):
            expected = step_locally([Layer(0), Layer(1)], cls, steps, **settings)
            found = await step_remotely([True, True], cls, steps, **settings)
            for old, new, local in zip(before, found, expected, strict=True):
                np.testing.assert_allclose(new, local, rtol=1e-12)
                assert not np.allclose(new, old)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("SGD", {"lr": 0.05}), ("RMSprop", {"lr": 0.05}), ("Rprop", {"lr": 0.05}), ("Adadelta", {})],
)
async def test_opt_none_grads(workers, name, settings):
    cls = getattr(ag.optim, name)
    before = [Layer(seed).w.numpy() for seed in range(2)]
    async with workers(2):
        expected = step_locally([Layer(0, False), Layer(1)], cls, 1, **settings)
        found = await step_remotely([False, True], cls, 1, **settings)
        np.testing.assert_array_equal(found[0], before[0])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
        assert not np.allclose(found[1], before[1])


class FailsToStep(ag.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("Error running optimizer.")


class FailsToStart(ag.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        raise ValueError("Error creating optimizer.")


async def test_opt_step_error(workers):
    async with workers(2):
        with pytest.raises(ValueError, match=r"Error running optimizer\."):
            await step_remotely([True, True], FailsToStep, 1)
        found = await step_remotely([True, True], ag.optim.SGD, 1, lr=0.05)
        assert len(found) == 2


async def test_opt_ctor_error(workers):
    async with workers(2):
        with pytest.raises(ValueError, match=r"Error creating optimizer\.") as caught:
            await step_remotely([True, True], FailsToStart, 1)
        assert any("failed too" in note for note in caught.value.__notes__)


async def test_opt_ctor_error_appears_at_the_first_step_when_not_awaited_before(workers):
    async with workers(2):
        params = [ag.remote("worker1", Layer, args=(0,)).remote().weight()]
        optimizer = ag.optim.DistributedOptimizer(FailsToStart, params)
        async with ag.context() as ctx:
            with pytest.raises(ValueError, match=r"Error creating optimizer\."):
                await optimizer.step(ctx)


async def test_z_opt_bad_ctx(workers):
    async with workers(2):
        params = [ag.remote("worker1", Layer, args=(0,)).remote().weight()]
        optimizer = await ag.optim.DistributedOptimizer(ag.optim.SGD, params, lr=0.1)
        with pytest.raises(UnknownContext, match="100"):
            await optimizer.step(100)
        async with ag.context() as ctx:
            pass
        with pytest.raises(UnknownContext):
            await optimizer.step(ctx)
