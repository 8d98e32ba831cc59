"""Losses as modules: the functions of `functional.py` with their settings."""

from __future__ import annotations

from typing import Any

from aiograd.autograd.tensor import Tensor
from aiograd.nn import functional
from aiograd.nn.module import Module


class _Loss(Module):
    """`reduction` is "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        # In the constructor: a misspelt word would else show in the first step of a long job.
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
        self.reduction = reduction


class MSELoss(_Loss):
    """The squared difference.

    >>> float(ag.nn.MSELoss()(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0])))
    2.0
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """Compare element by element; both of one shape."""
        result: Tensor = functional.mse_loss(input, target, self.reduction)
        return result


class L1Loss(_Loss):
    """The absolute difference.

    >>> float(ag.nn.L1Loss()(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0])))
    1.0
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """Compare element by element; both of one shape."""
        result: Tensor = functional.l1_loss(input, target, self.reduction)
        return result


class CrossEntropyLoss(_Loss):
    """Logits against classes (integers) or probabilities of classes.

    >>> round(float(ag.nn.CrossEntropyLoss()(ag.zeros(1, 4), [2])), 4)
    1.3863
    """

    ignore_index: int
    label_smoothing: float

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction)
        # A buffer, so that it is saved and converted with the model, and not trained.
        self.register_buffer("weight", None if weight is None else Tensor(weight))
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    weight: Tensor | None

    def forward(self, input: Any, target: Any) -> Tensor:
        """Compare logits (batch, classes, …) with classes or with their probabilities."""
        result: Tensor = functional.cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing
        )
        return result


class NLLLoss(_Loss):
    """Log probabilities against classes.

    >>> round(float(ag.nn.NLLLoss()(ag.log_softmax(ag.zeros(1, 4)), [2])), 4)
    1.3863
    """

    def forward(self, input: Any, target: Any) -> Tensor:
        """Compare log probabilities (batch, classes, …) with classes."""
        result: Tensor = functional.nll_loss(input, target, reduction=self.reduction)
        return result


class BCEWithLogitsLoss(_Loss):
    """Logits against probabilities between 0 and 1.

    >>> round(float(ag.nn.BCEWithLogitsLoss()(ag.zeros(1), ag.ones(1))), 4)
    0.6931
    """

    def __init__(self, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self.register_buffer("pos_weight", None if pos_weight is None else Tensor(pos_weight))

    pos_weight: Tensor | None

    def forward(self, input: Any, target: Any) -> Tensor:
        """Compare logits with probabilities of the same shape."""
        result: Tensor = functional.binary_cross_entropy_with_logits(
            input, target, reduction=self.reduction, pos_weight=self.pos_weight
        )
        return result
