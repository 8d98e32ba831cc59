"""Optimisers, learning rates over time, and limits on gradients."""

from aiograd.optim.adam import Adam, Adamax, AdamW
from aiograd.optim.adaptive import Adadelta, Adagrad, RMSprop, Rprop
from aiograd.optim.clip import clip_grad_norm, clip_grad_value
from aiograd.optim.optimizer import Optimizer
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
from aiograd.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CosineAnnealingLR",
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
