"""What all optimisers share: parameter groups, state, and the loop over parameters in a step.

A rule is one method, `update(param, grad, state, group)`, that changes the array `param` in place.
Where the gradients come from is decided by the caller of `step`: `.grad` of the parameters, or a
mapping such as `ctx.gradients`. Rules live beside this file; learning rates over time in
`schedules.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.autograd.grad_mode import enable_grad
from aiograd.autograd.tensor import Tensor

State = dict[str, Any]
Group = dict[str, Any]
Gradients = Mapping[Tensor, Tensor]


class Optimizer:
    """Base of the optimisers. `params` are tensors, or dicts with "params" and own settings.

    A sparse gradient becomes a dense one unless the rule knows better: SGD without momentum and
    weight decay and Adagrad without weight decay only touch the rows that have a gradient.

        >>> base, head = ag.nn.Linear(2, 2), ag.nn.Linear(2, 1)
        >>> groups = [{"params": base.parameters(), "lr": 0.01}, {"params": head.parameters()}]
        >>> opt = ag.optim.SGD(groups, lr=0.1)
        >>> [group["lr"] for group in opt.param_groups]
        [0.01, 0.1]
    """

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        # A Tensor is iterable: each of its rows would be taken for a parameter.
        if isinstance(params, Tensor):
            raise TypeError("an optimizer takes several parameters; put the one into a list")
        self.defaults: Group = dict(defaults)
        self.param_groups: list[Group] = []
        # Keyed by identity; made at a parameter's first step.
        self.state: dict[Tensor, State] = {}
        entries = list(params)
        if not entries:
            raise ValueError("the optimizer got an empty list of parameters")
        groups = entries if isinstance(entries[0], Mapping) else [{"params": entries}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Optimise further parameters, with settings of their own where given."""
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        known = {id(p) for other in self.param_groups for p in other["params"]}
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(f"an optimizer takes Tensors, not {type(param).__name__}")
            # A step would write to the array of a result, which the next forward pass computes
            # anew.
            if not param.is_leaf:
                raise ValueError("only leaf tensors can be optimised; use detach() or no_grad()")
            if id(param) in known:
                raise ValueError("a parameter was given to the optimizer twice")
            known.add(id(param))
        self.param_groups.append({**self.defaults, **group, "params": params})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget `.grad` of every parameter, or fill it with zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none or param.grad is None:
                    param.grad = None
                else:
                    param.grad = Tensor(np.zeros(param.shape, param.dtype))

    def step(self, grads: Gradients | Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient.

        Gradients are taken from `grads` where it is given (a mapping from parameter to gradient),
        else from `.grad`. A function instead of a mapping is called first, with recording on, to
        compute them; its result is returned.
        """
        result = None
        if grads is not None and not isinstance(grads, Mapping):
            # A closure computes the loss anew, also where the caller is in `no_grad()`.
            with enable_grad():
                result = grads()
            grads = None
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad if grads is None else grads.get(param)
                if grad is not None:
                    self._apply(param, grad.raw, group)
        return result

    def step_with(self, grads: Gradients) -> Any:
        """Step with these gradients, also where a subclass has a `step()` of its own.

        Such a step reads `.grad`, so it finds them there; what was there is put back afterwards.
        """
        if type(self).step is Optimizer.step:
            return self.step(grads)
        params = self._params()
        before = [param.grad for param in params]
        try:
            for param in params:
                param.grad = grads.get(param)
            return self.step()
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad

    def _apply(self, param: Tensor, grad: Any, group: Group) -> None:
        """Hand one parameter and its gradient to the rule, in the form it can write to."""
        state = self.state.setdefault(param, {})
        if group.get("maximize"):
            # A new array: the gradient itself belongs to the context or to `.grad`.
            grad = -grad
        if isinstance(grad, Coo):
            if not param.is_sparse and self.update_rows(param.raw, grad.coalesce(), state, group):
                param._written()
                return
            grad = grad.to_dense()
        if param.is_sparse:
            raise TypeError("a sparse parameter cannot be optimised; use its values instead")
        array = param.raw
        if not array.ndim:
            # What numpy computes from an array without axes is a scalar, which rules cannot write
            # to. As a row of one it is an ordinary array over the same memory.
            array, grad = array.reshape(1), np.reshape(grad, 1)
        if grad.dtype.kind == "c":
            _update_complex(self, array, grad, state, group)
        else:
            self.update(array, grad, state, group)
        param._written()

    def update(self, param: Any, grad: Any, state: State, group: Group) -> None:
        """Change the array `param` in place; `grad` must stay as it is. The rule of a subclass."""
        raise NotImplementedError(f"{type(self).__name__} needs an update() or a step() of its own")

    def update_rows(self, param: Any, grad: Coo, state: State, group: Group) -> bool:
        """Change only the entries with a gradient; False where the rule needs all of them."""
        return False

    # ── saving and loading ──────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameters, which are numbered in the order they were given."""
        # Numbers, as tensors have no names; the order of the groups is the same when it is loaded.
        numbers = {id(p): i for i, p in enumerate(self._params())}
        return {
            "state": {
                # Copied, since steps change the arrays in place.
                numbers[id(param)]: copy.deepcopy(state)
                for param, state in self.state.items()
            },
            "param_groups": [
                {**group, "params": [numbers[id(p)] for p in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave; the parameters must be the same in number."""
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the saved state belongs to an optimizer with other parameter groups")
        params = self._params()
        self.state = {
            params[number]: copy.deepcopy(state) for number, state in state_dict["state"].items()
        }
        for mine, saved in zip(self.param_groups, groups, strict=True):
            # Settings are overwritten, parameters stay: the saved ones are only numbers.
            mine.update({**copy.deepcopy(saved), "params": mine["params"]})

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            lines.append(f"  group {number}: {len(group['params'])} parameters")
            lines += [f"    {key}: {group[key]}" for key in sorted(group) if key != "params"]
        return "\n".join([*lines, ")"])


def _update_complex(rule: Optimizer, param: Any, grad: Any, state: State, group: Group) -> None:
    """Real and imaginary parts are optimised as two numbers each."""
    real = np.zeros(0, param.dtype).real.dtype
    # A view as twice as many real numbers needs contiguous memory; else work in a copy.
    work = np.asarray(param, order="C")
    rule.update(
        work.reshape(-1).view(real),
        np.asarray(grad, order="C").reshape(-1).view(real),
        state,
        group,
    )
    if work is not param:
        param[...] = work


def decayed(grad: Any, param: Any, group: Group) -> Any:
    """Return the gradient with that of `weight_decay / 2 · param²` added."""
    decay = group["weight_decay"]
    return grad + decay * param if decay else grad


def lerp(average: Any, new: Any, weight: float) -> None:
    """Move a running average towards a new value, in place."""
    # average += weight * (new - average), with one array instead of three.
    step = new - average
    step *= weight
    average += step


def average_square(average: Any, grad: Any, keep: float) -> None:
    """Update a running average of squares, in place."""
    # In place throughout: squares of all parameters would else be allocated anew in every step.
    average *= keep
    square = grad * grad
    square *= 1 - keep
    average += square
