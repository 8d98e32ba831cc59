"""Losses as modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag

X = np.random.default_rng(0).normal(size=(6, 4))
CLASSES = np.array([0, 3, 1, 1, 2, 0])
LOGS = X - np.log(np.exp(X).sum(axis=1, keepdims=True))
ROWS = np.arange(6)


@pytest.mark.parametrize(
    ("loss", "target", "each"),
    [
        (ag.nn.MSELoss, X * 2, X**2),
        (ag.nn.L1Loss, X * 2, np.abs(X)),
        (ag.nn.CrossEntropyLoss, CLASSES, -LOGS[ROWS, CLASSES]),
        (ag.nn.NLLLoss, CLASSES, -X[ROWS, CLASSES]),
        (ag.nn.BCEWithLogitsLoss, (X > 0) * 1.0, np.log1p(np.exp(-np.abs(X)))),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_are_their_formulas(loss: Any, target: Any, each: Any, reduction: str) -> None:
    expected = each if reduction == "none" else getattr(each, reduction)()
    np.testing.assert_allclose(loss(reduction=reduction)(X, target).numpy(), expected)


def test_classes_can_be_weighted_and_ignored() -> None:
    weight = np.array([1.0, 2.0, 3.0, 4.0])
    loss = ag.nn.CrossEntropyLoss(weight=weight, ignore_index=1)
    kept = CLASSES != 1
    each = -LOGS[ROWS, CLASSES] * weight[CLASSES]
    assert loss(X, CLASSES).item() == pytest.approx(each[kept].sum() / weight[CLASSES][kept].sum())
    assert list(loss.state_dict()) == ["weight"]


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction"):
        ag.nn.MSELoss(reduction="median")


@pytest.mark.parametrize("loss", [ag.nn.MSELoss(), ag.nn.L1Loss()])
def test_losses_whose_shapes_broadcast_warn_and_name_both_shapes(loss):
    prediction, target = ag.ones(4, 1, requires_grad=True), ag.zeros(4)
    with pytest.warns(UserWarning, match=r"\(4, 1\).*\(4,\).*\(4, 4\)") as caught:
        loss(prediction, target)
    assert caught[0].filename == __file__
    loss(prediction, target.reshape(4, 1))  # a warning would fail the test
    loss(prediction, 0.5)
