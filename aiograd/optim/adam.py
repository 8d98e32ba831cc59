"""Adam and its variants: steps scaled by running averages of the gradient and of its size.

State keys (`exp_avg`, `exp_avg_sq`, …) are torch's, so that states can be compared and converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from aiograd.optim.optimizer import (
    Group,
    Optimizer,
    State,
    average_square,
    decayed,
    lerp,
)
from aiograd.optim.settings import checked


class Adam(Optimizer):
    """Adam; with `amsgrad` the second average never shrinks."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, checked(locals()))

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Step by the averages; weight decay is part of the gradient."""
        self._move(param, decayed(grad, param, group), state, group)

    def _move(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Update the averages and move the parameter against them."""
        # Made at the first step, so that a parameter without gradients costs no memory.
        if not state:
            state.update(step=0, exp_avg=np.zeros_like(param), exp_avg_sq=np.zeros_like(param))
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = np.zeros_like(param)
        # Per parameter, not per optimiser: one that had no gradient for a while has younger
        # averages.
        state["step"] += 1
        # Python floats: a float64 of numpy would widen float32 parameters.
        beta1, beta2 = map(float, group["betas"])
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        lerp(average, grad, 1 - beta1)
        average_square(squares, grad, beta2)
        if group["amsgrad"]:
            squares = np.maximum(state["max_exp_avg_sq"], squares, out=state["max_exp_avg_sq"])
        # One new array for the whole step; everything below works in it. The corrections for
        # averages that began at zero are applied to numbers where they can be, not to arrays.
        scale = np.sqrt(squares)
        scale /= math.sqrt(1 - beta2 ** state["step"])
        scale += float(group["eps"])
        np.divide(average, scale, out=scale)
        scale *= float(group["lr"]) / (1 - beta1 ** state["step"])
        param -= scale


class AdamW(Adam):
    """Adam with weight decay that acts on the parameter itself, not through the averages."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Shrink the parameter itself, then step as Adam without decay."""
        if group["weight_decay"]:
            # Before the step, as in torch and in the paper: decay is not scaled by the averages.
            param *= 1 - float(group["lr"]) * float(group["weight_decay"])
        self._move(param, grad, state, group)


class Adamax(Optimizer):
    """Adam with the largest gradient seen, slowly forgotten, in place of the average square."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, checked(locals()))

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Step by the average over the largest gradient seen, which decays."""
        if not state:
            state.update(step=0, exp_avg=np.zeros_like(param), exp_inf=np.zeros_like(param))
        state["step"] += 1
        beta1, beta2 = map(float, group["betas"])
        grad = decayed(grad, param, group)
        average, largest = state["exp_avg"], state["exp_inf"]
        lerp(average, grad, 1 - beta1)
        largest *= beta2
        np.maximum(largest, np.abs(grad) + float(group["eps"]), out=largest)
        param -= float(group["lr"]) / (1 - beta1 ** state["step"]) * (average / largest)
