"""Whole models learn along the same curve as in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import aiograd as ag


def copy_into(mine: ag.nn.Module, theirs: Any) -> None:
    """Start both models from the same numbers; names and shapes agree."""
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    mine.load_state_dict(state)


def curve(mine: Any, theirs: Any, x: Any, y: Any, optimizer: str, **options: Any) -> Any:
    """The losses of both models over twelve steps."""
    ours = getattr(ag.optim, optimizer)(mine.parameters(), **options)
    reference = getattr(torch.optim, optimizer)(theirs.parameters(), **options)
    losses: list[tuple[float, float]] = []
    for step in range(12):
        rows = slice(16 * (step % 4), 16 * (step % 4) + 16)
        ours.zero_grad()
        loss = ag.nn.functional.cross_entropy(mine(ag.tensor(x[rows])), ag.tensor(y[rows]))
        loss.backward()
        ours.step()
        reference.zero_grad()
        goal = torch.nn.functional.cross_entropy(
            theirs(torch.tensor(x[rows])), torch.tensor(y[rows])
        )
        goal.backward()
        reference.step()
        losses.append((loss.item(), goal.item()))
    return np.array(losses)


def mlp(nn: Any, **options: Any) -> Any:
    return nn.Sequential(
        nn.Linear(20, 32, **options),
        nn.GELU(),
        nn.LayerNorm(32, **options),
        nn.Linear(32, 16, **options),
        nn.Tanh(),
        nn.Linear(16, 5, **options),
    )


def conv_net(nn: Any, **options: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False, **options),  # the norm takes any bias away
        nn.BatchNorm2d(6, **options),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, stride=2, **options),
        nn.SiLU(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32, 5, **options),
    )


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.01}), ("AdamW", {"lr": 0.01})],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 2e-3)])
@pytest.mark.parametrize(("build", "shape"), [(mlp, (64, 20)), (conv_net, (64, 1, 14, 14))])
def test_a_model_learns_as_in_torch(
    build: Any, shape: Any, dtype: str, tolerance: float, optimizer: str, options: Any
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape).astype(dtype), rng.integers(0, 5, 64)
    torch.manual_seed(0)
    theirs = build(torch.nn, dtype=getattr(torch, dtype))
    mine = build(ag.nn, dtype=np.dtype(dtype))
    copy_into(mine, theirs)
    losses = curve(mine, theirs, x, y, optimizer, **options)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=tolerance, atol=tolerance)
    assert losses[-1, 0] < losses[0, 0]
    for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert a.dtype == b.numpy().dtype, name
        np.testing.assert_allclose(
            a.numpy(), b.numpy(), rtol=20 * tolerance, atol=20 * tolerance, err_msg=name
        )


def test_an_embedding_bag_learns_as_in_torch() -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(16, 4))
    mine = ag.nn.EmbeddingBag(16, 4, mode="sum", sparse=True)
    theirs = torch.nn.EmbeddingBag(16, 4, mode="sum", sparse=True, dtype=torch.float64)
    mine.load_state_dict({"weight": table})
    theirs.weight.data[...] = torch.tensor(table)
    weights = rng.random(8)
    rows, offsets = np.array([1, 2, 4, 5, 4, 3, 2, 9]), np.array([0, 4])
    (mine(rows, offsets, ag.tensor(weights)) ** 2).sum().backward()
    given = (torch.tensor(rows), torch.tensor(offsets), torch.tensor(weights))
    (theirs(*given) ** 2).sum().backward()
    assert mine.weight.grad.is_sparse
    assert theirs.weight.grad.is_sparse
    np.testing.assert_allclose(mine.weight.grad.numpy(), theirs.weight.grad.to_dense().numpy())
