"""The update rules: SGD, Adam and its variants, and those that give every entry its own pace.

    rule                        step for a parameter with gradient g
    SGD                         against g, or against a velocity
    Adam, AdamW, Adamax         by running averages of g and of its size
    Adagrad, RMSprop            g over the root of summed or averaged squares of g
    Adadelta                    g scaled to the size of earlier steps
    Rprop                       by the sign of g only

A rule is a subclass of `Optimizer` with an `update`; `_checked` makes settings of the arguments of
its constructor. State keys (`momentum_buffer`, `exp_avg`, …) are torch's, so that states can be
compared and converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop"]

# ── settings ──────────────────────────────────────────────────────────────────────────────────────

# What `locals()` holds besides the settings.
_OTHERS = ("self", "params", "__class__")


def _not_negative(value: Any) -> bool:
    return bool(value >= 0)


_SENSIBLE: dict[str, Callable[[Any], bool]] = {
    "lr": _not_negative,
    "lr_decay": _not_negative,
    "weight_decay": _not_negative,
    "momentum": _not_negative,
    "eps": _not_negative,
    "alpha": _not_negative,
    "initial_accumulator_value": _not_negative,
    "rho": lambda value: 0 <= value <= 1,
    "betas": lambda value: all(0 <= beta < 1 for beta in value),
    "etas": lambda value: 0 < value[0] < 1 < value[1],
}


def _checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimiser's constructor, its `locals()`, as settings.

    Raises ValueError, with the name of the setting, for a value that makes no sense.
    """
    settings = {name: value for name, value in arguments.items() if name not in _OTHERS}
    for name, value in settings.items():
        # nan fails every comparison, so it is refused as well.
        if name in _SENSIBLE and not _SENSIBLE[name](value):
            raise ValueError(f"invalid {name}: {value}")
    return settings


# ── gradient descent ──────────────────────────────────────────────────────────────────────────────


class SGD(Optimizer):
    """Step against the gradient; `momentum` keeps a velocity, `nesterov` looks one step ahead.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.SGD([w], lr=0.1, momentum=0.9)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum needs a momentum and no dampening")
        super().__init__(params, _checked(locals()))

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Step against the gradient, or against the velocity where there is momentum."""
        grad = decayed(grad, param, group)
        momentum = float(group["momentum"])
        if momentum:
            velocity = state.get("momentum_buffer")
            if velocity is None:
                # As in torch the first velocity is the gradient, without dampening. A copy: the
                # gradient belongs to others.
                velocity = state["momentum_buffer"] = grad.copy()
            else:
                velocity *= momentum
                velocity += (1 - float(group["dampening"])) * grad
            # A new array, or the buffer itself, which is only read below.
            grad = grad + momentum * velocity if group["nesterov"] else velocity
        param -= float(group["lr"]) * grad

    def update_rows(self, param: Any, grad: Coo, state: State, group: Group) -> bool:
        """Step on the rows that have a gradient; velocity and decay would move all."""
        if group["momentum"] or group["weight_decay"]:
            return False
        param[tuple(grad.indices)] -= float(group["lr"]) * grad.values
        return True


# ── Adam ──────────────────────────────────────────────────────────────────────────────────────────


class Adam(Optimizer):
    """Adam; with `amsgrad` the second average never shrinks.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.Adam([w], lr=0.01)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

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
        super().__init__(params, _checked(locals()))

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
    """Adam with weight decay that acts on the parameter itself, not through the averages.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.AdamW([w], lr=0.01)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

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
    """Adam with the largest gradient seen, slowly forgotten, in place of the average square.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.Adamax([w], lr=0.01)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

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
        super().__init__(params, _checked(locals()))

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


# ── a pace for every entry ────────────────────────────────────────────────────────────────────────


class Adagrad(Optimizer):
    """Divide by the root of the sum of all squared gradients so far.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.Adagrad([w], lr=0.01)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

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
        super().__init__(params, _checked(locals()))

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
    """Divide by the root of a running average of squared gradients.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.RMSprop([w], lr=0.01)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

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
        super().__init__(params, _checked(locals()))

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
    """Scale steps so that they have the size of earlier steps; needs no learning rate.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.Adadelta([w])
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

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
        super().__init__(params, _checked(locals()))

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
    """Use only the sign of the gradient; steps grow while it stays and shrink when it turns.

    >>> w = ag.nn.Parameter([1.0, 2.0])
    >>> opt = ag.optim.Rprop([w], lr=0.01)
    >>> (w * w).sum().backward()
    >>> opt.step()
    >>> bool((w.numpy() < [1.0, 2.0]).all())
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _checked(locals()))

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
