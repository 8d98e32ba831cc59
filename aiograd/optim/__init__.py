"""Optimisers, learning rates over time, and limits on gradients.

    optimizer      Optimizer: groups, state, the loop over parameters
    rules          SGD, Adam, AdamW, Adamax, Adagrad, RMSprop, Adadelta, Rprop
    clip           limits on gradients
    schedules      learning rates over time
    owned          the owner's side of a distributed optimiser
    distributed    DistributedOptimizer: parameters on many workers

A new optimiser is a subclass of `Optimizer` in `rules.py`, and its name here. Only the last two
know of workers (`rpc`, `rref`, `dist`); they are imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiograd.optim.clip import clip_grad_norm, clip_grad_value
from aiograd.optim.optimizer import Optimizer
from aiograd.optim.rules import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop, Rprop
from aiograd.optim.schedules import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    ReduceLROnPlateau,
    Scheduler,
    StepLR,
)

if TYPE_CHECKING:
    from aiograd.optim.distributed import DistributedOptimizer

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CosineAnnealingLR",
    "DistributedOptimizer",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "Optimizer",
    "RMSprop",
    "ReduceLROnPlateau",
    "Rprop",
    "Scheduler",
    "StepLR",
    "clip_grad_norm",
    "clip_grad_value",
]


def __getattr__(name: str) -> Any:
    # Models of one process need no workers, so what does is imported when asked for.
    if name == "DistributedOptimizer":
        from aiograd.optim.distributed import DistributedOptimizer

        return DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# So that completion in a shell finds what is imported later.
def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
