"""Stochastic gradient descent, with momentum where wanted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiograd.autograd.coo import Coo
from aiograd.optim.optimizer import Group, Optimizer, State, decayed
from aiograd.optim.settings import checked


class SGD(Optimizer):
    """Step against the gradient; `momentum` keeps a velocity, `nesterov` looks one step ahead."""

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
        super().__init__(params, checked(locals()))

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
