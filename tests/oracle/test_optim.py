"""Optimisers and learning rates move as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import aiograd as ag

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd nesterov": ("SGD", {"lr": 0.05, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    "sgd maximize": ("SGD", {"lr": 0.1, "momentum": 0.5, "maximize": True}),
    "adam": ("Adam", {"lr": 0.05}),
    "adam amsgrad": ("Adam", {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 0.05}),
    "adamw amsgrad": ("AdamW", {"lr": 0.05, "amsgrad": True, "betas": (0.8, 0.95)}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adagrad decay": (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
    "rmsprop": ("RMSprop", {"lr": 0.05}),
    "rmsprop centered": (
        "RMSprop",
        {"lr": 0.05, "centered": True, "momentum": 0.9, "weight_decay": 0.1},
    ),
    "adadelta": ("Adadelta", {"lr": 0.7, "weight_decay": 0.1}),
    "adamax": ("Adamax", {"lr": 0.05, "weight_decay": 0.1}),
    "rprop": ("Rprop", {"lr": 0.05}),
    "rprop etas": ("Rprop", {"lr": 0.05, "etas": (0.3, 1.5), "step_sizes": (1e-3, 0.2)}),
}


def loss_of(library: Any, w: Any, x: Any) -> Any:
    return ((library.tanh(x @ w) - 0.3) ** 2).sum()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_twenty_steps_give_the_same_parameters(case: str, dtype: Any) -> None:
    name, options = OPTIMIZERS[case]
    rng = np.random.default_rng(0)
    x, start = rng.normal(size=(5, 4)).astype(dtype), rng.normal(size=(4, 3)).astype(dtype)
    mine, theirs = ag.tensor(start, requires_grad=True), torch.tensor(start, requires_grad=True)
    ours = getattr(ag.optim, name)([mine], **options)
    reference = getattr(torch.optim, name)([theirs], **options)
    for _ in range(20):
        ours.zero_grad()
        loss_of(ag, mine, ag.tensor(x)).backward()
        ours.step()
        reference.zero_grad()
        loss_of(torch, theirs, torch.tensor(x)).backward()
        reference.step()
    assert mine.dtype == dtype
    tolerance = 1e-9 if dtype is np.float64 else 2e-4
    np.testing.assert_allclose(
        mine.numpy(), theirs.detach().numpy(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Adamax"])
def test_complex_parameters_move_as_pairs_of_numbers(name: str) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=4) + 1j * rng.normal(size=4)
    mine, theirs = ag.tensor(start, requires_grad=True), torch.tensor(start, requires_grad=True)
    ours = getattr(ag.optim, name)([mine], lr=0.1)
    reference = getattr(torch.optim, name)([theirs], lr=0.1)
    for _ in range(5):
        grad = rng.normal(size=4) + 1j * rng.normal(size=4)
        mine.grad, theirs.grad = ag.tensor(grad), torch.tensor(grad)
        ours.step()
        reference.step()
    np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:Sparse invariant")  # torch warns of its own optimizer
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_row_sparse_gradients_move_the_same_rows(name: str) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(8, 3))
    mine, theirs = ag.tensor(start, requires_grad=True), torch.tensor(start, requires_grad=True)
    ours = getattr(ag.optim, name)([mine], lr=0.1)
    reference = getattr(torch.optim, name)([theirs], lr=0.1)
    for _ in range(3):
        rows = rng.integers(0, 6, 5)
        ours.zero_grad()
        (ag.nn.functional.embedding(rows, mine, sparse=True) ** 2).sum().backward()
        ours.step()
        reference.zero_grad()
        picked = torch.nn.functional.embedding(torch.tensor(rows), theirs, sparse=True)
        (picked**2).sum().backward()
        reference.step()
    np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-12)


SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("StepLR", {"step_size": 3, "gamma": 0.5}),
    "milestones": ("MultiStepLR", {"milestones": [2, 5, 5], "gamma": 0.3}),
    "exponential": ("ExponentialLR", {"gamma": 0.8}),
    "cosine": ("CosineAnnealingLR", {"T_max": 8, "eta_min": 0.01}),
    "linear": ("LinearLR", {"start_factor": 0.25, "total_iters": 4}),
    "lambda": ("LambdaLR", {"lr_lambda": lambda epoch: 1 / (1 + epoch)}),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_learning_rates_follow_the_same_curve(case: str) -> None:
    name, options = SCHEDULES[case]
    ours = ag.optim.SGD([ag.zeros(1, requires_grad=True)], lr=0.1)
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    mine = getattr(ag.optim, name)(ours, **options)
    theirs = getattr(torch.optim.lr_scheduler, name)(reference, **options)
    for _ in range(12):
        assert mine.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-9)
        ours.step()
        mine.step()
        reference.step()
        theirs.step()


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_the_rate_is_lowered_at_the_same_plateaus(mode: str, threshold_mode: str) -> None:
    options: dict[str, Any] = {
        "mode": mode,
        "threshold_mode": threshold_mode,
        "patience": 2,
        "cooldown": 1,
        "threshold": 0.05,
        "min_lr": 0.002,
    }
    ours = ag.optim.SGD([ag.zeros(1, requires_grad=True)], lr=0.1)
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    mine = ag.optim.ReduceLROnPlateau(ours, **options)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(reference, **options)
    for value in np.random.default_rng(1).normal(size=40).cumsum().round(2):
        mine.step(value)
        theirs.step(value)
        assert mine.get_last_lr() == pytest.approx(theirs.get_last_lr())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_gradients_are_clipped_alike(norm_type: float, max_norm: float) -> None:
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(3, 4)), rng.normal(size=5)]
    mine = [ag.zeros(*g.shape, requires_grad=True) for g in grads]
    theirs = [torch.zeros(g.shape, dtype=torch.float64, requires_grad=True) for g in grads]
    for a, b, g in zip(mine, theirs, grads, strict=True):
        a.grad, b.grad = ag.tensor(g), torch.tensor(g)
    norm = ag.optim.clip_grad_norm(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert norm == pytest.approx(float(expected))
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_value_
    ag.optim.clip_grad_value(mine, 0.3)
    clip(theirs, 0.3)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-9)
