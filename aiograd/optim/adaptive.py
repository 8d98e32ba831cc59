"""Optimisers that give every entry its own pace: Adagrad, RMSprop, Adadelta, Rprop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.optim.optimizer import (
    Group,
    Optimizer,
    State,
    average_square,
    decayed,
    lerp,
)
from aiograd.optim.settings import checked


class Adagrad(Optimizer):
    """Divide by the root of the sum of all squared gradients so far."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, checked(locals()))

    def _begin(self, param: Any, state: State, group: Group) -> float:
        """Make the state, count the step and return its rate."""
        if not state:
            state.update(step=0, sum=np.full_like(param, group["initial_accumulator_value"]))
        state["step"] += 1
        # Counted per parameter, as the sum is.
        rate: float = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        return float(rate)

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Add the square, and divide by the root of the sum."""
        rate = self._begin(param, state, group)
        grad = decayed(grad, param, group)
        state["sum"] += grad * grad
        scale = np.sqrt(state["sum"])
        scale += float(group["eps"])
        np.divide(grad, scale, out=scale)
        scale *= rate
        param -= scale

    def update_rows(self, param: Any, grad: Coo, state: State, group: Group) -> bool:
        """The same for the rows that have a gradient: the others would not move."""
        # Weight decay moves every row. Complex numbers are optimised as two real ones each, which
        # rows are not cut into.
        if group["weight_decay"] or param.dtype.kind == "c":
            return False
        rate, rows = self._begin(param, state, group), tuple(grad.indices)
        state["sum"][rows] += grad.values * grad.values
        param[rows] -= rate * (grad.values / (np.sqrt(state["sum"][rows]) + float(group["eps"])))
        return True


class RMSprop(Optimizer):
    """Divide by the root of a running average of squared gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, checked(locals()))

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Divide by the root of the running average of squares, or of the variance."""
        if not state:
            state["square_avg"] = np.zeros_like(param)
        alpha, squares = float(group["alpha"]), state["square_avg"]
        grad = decayed(grad, param, group)
        average_square(squares, grad, alpha)
        if group["centered"]:
            # Made only where asked for: settings may change between steps.
            mean = state.setdefault("grad_avg", np.zeros_like(param))
            lerp(mean, grad, 1 - alpha)
            scale = np.sqrt(squares - mean * mean)
        else:
            scale = np.sqrt(squares)
        scale += float(group["eps"])
        np.divide(grad, scale, out=scale)
        if group["momentum"]:
            velocity = state.setdefault("momentum_buffer", np.zeros_like(param))
            # In place: the buffer is the state.
            velocity *= float(group["momentum"])
            velocity += scale
            scale = velocity
        param -= float(group["lr"]) * scale


class Adadelta(Optimizer):
    """Scale steps so that they have the size of earlier steps; needs no learning rate."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, checked(locals()))

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Scale the gradient by the ratio of earlier steps to earlier gradients."""
        if not state:
            state.update(square_avg=np.zeros_like(param), acc_delta=np.zeros_like(param))
        rho, eps = float(group["rho"]), float(group["eps"])
        grad = decayed(grad, param, group)
        average_square(state["square_avg"], grad, rho)
        step = np.sqrt(state["acc_delta"] + eps)
        step /= np.sqrt(state["square_avg"] + eps)
        step *= grad
        # After it was read: a step is scaled by those before it.
        average_square(state["acc_delta"], step, rho)
        param -= float(group["lr"]) * step


class Rprop(Optimizer):
    """Use only the sign of the gradient; steps grow while it stays and shrink when it turns."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, checked(locals()))

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Grow or shrink each step size by the sign of the last two gradients."""
        if not state:
            state.update(prev=np.zeros_like(param), step_size=np.full_like(param, group["lr"]))
        shrink, grow = map(float, group["etas"])
        sizes = state["step_size"]
        turn = grad * state["prev"]
        sizes *= np.where(turn > 0, grow, np.where(turn < 0, shrink, 1.0)).astype(sizes.dtype)
        # Steps that grow by a factor need a bound.
        np.clip(sizes, *map(float, group["step_sizes"]), out=sizes)
        # Where the sign has turned the last step went too far: stand still once, and do not count
        # the turn again.
        state["prev"] = grad = np.where(turn < 0, np.zeros((), grad.dtype), grad)
        param -= np.sign(grad) * sizes
