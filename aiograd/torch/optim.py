"""Optimisers of torch at the owner of the parameters, for gradients that are in a context.

    step     gradients of the context ─▶ torch's optimiser, on a copy ─▶ published in the parameter

torch steps in place. Where several trainers share parameters, the step of one then changes what
the forward pass of another has saved, and torch refuses that one's backward pass. Here a step is
made on a copy, which then becomes the memory of the parameter (`published.py`). So each trainer
gets the gradient of the values it saw.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from aiograd import optim
from aiograd.dist.registry import resolve
from aiograd.optim import owned
from aiograd.optim.optimizer import Group
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import expose
from aiograd.rref.rref import RRef
from aiograd.torch.published import pin_this_thread, pinned, publish, register, runs_pinned

__all__ = ["DistributedOptimizer", "LocalOptimizer", "pinned"]

# One step at a time in a process: trainers have optimisers of their own for the same parameters.
_steps = threading.Lock()


class LocalOptimizer:
    """An optimiser of torch over parameters of this process; steps take a context's gradients."""

    def __init__(
        self, cls: Any, parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        self.params = list(parameters)
        if len({id(parameter) for parameter in self.params}) < len(self.params):
            raise ValueError("a parameter was given to the optimizer twice")
        # The optimiser works on these; their memory is that of the parameters, or the next one.
        self._copies = [_copy_of(parameter) for parameter in self.params]
        self.optimizer = cls(self._copies, *args, **kwargs)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"an optimiser of torch is needed, and {cls!r} made "
                f"{type(self.optimizer).__name__}; for those of ag.optim there is "
                "ag.optim.DistributedOptimizer"
            )
        for parameter in self.params:
            register(parameter)

    @property
    def param_groups(self) -> list[Group]:
        """The settings of its steps, by group."""
        groups: list[Group] = self.optimizer.param_groups
        return groups

    def step(self, ctx_or_id: Any) -> None:
        """Step with the gradients of a context; parameters without one stay as they are."""
        self.step_with(resolve(ctx_or_id).gradients)

    def step_with(self, gradients: Mapping[Any, Any]) -> None:
        """Step with these gradients, by parameter; graphs keep the memory they saw."""
        # By identity: the mapping's keys are tensors.
        found = {id(leaf): gradient for leaf, gradient in gradients.items()}
        with _steps, torch.no_grad():
            stepped = []
            for parameter, copied in zip(self.params, self._copies, strict=True):
                gradient = found.get(id(parameter))
                copied.grad = gradient
                if gradient is not None:
                    # From the parameter: another optimiser, or the user, may have changed it.
                    copied.data = parameter.detach().clone(memory_format=torch.preserve_format)
                    stepped.append((parameter, copied))
            try:
                with torch.enable_grad():  # torch's optimisers switch it off themselves
                    self.optimizer.step()
            finally:
                for copied in self._copies:
                    copied.grad = None
            publish(stepped)

    def norm(self, gradients: Iterable[torch.Tensor]) -> float:
        """Return the norm of all gradients taken as one vector."""
        numbers = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return math.sqrt(sum(float(torch.linalg.vector_norm(each)) ** 2 for each in numbers))

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the parameters, as a copy: steps change it in place."""
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.optimizer.load_state_dict(state)


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(
            f"an optimiser of torch takes torch tensors, not {type(parameter).__name__}"
        )
    if not parameter.is_leaf:
        raise ValueError("can't optimize a non-leaf Tensor")
    # A clone: a detached tensor shares the count of writes, and a step is no write for others.
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)


@expose
def make(
    cls: Any, params: list[RRef[Any]], args: Any, kwargs: Any
) -> tuple[RRef[owned.LocalOptimizer], list[Group]]:
    """Make the local optimiser; return a reference to it, and the settings it starts with."""
    owned.check_guest(cls, torch.optim.Optimizer)
    local = LocalOptimizer(cls, [param.local_value() for param in params], *args, **kwargs)
    agent = current_agent()
    if agent.wrapper is None:
        # From now on all graphs here keep the parameters they saw.
        agent.wrapper = runs_pinned
        agent.loop.call_soon_threadsafe(pin_this_thread)
    return owned.referred(local)


class DistributedOptimizer(optim.DistributedOptimizer):
    """`opt = await ag.torch.DistributedOptimizer(torch.optim.SGD, param_rrefs, lr=0.1)`.

    Everything that `ag.optim.DistributedOptimizer` has, over an optimiser of torch at each owner:
    one call per owner and step, `clip_grad_norm`, `state_dict`, schedulers of `ag.optim`, a bound
    on `staleness`. Gradients are those of the context; no `.grad` is touched. A step replaces the
    memory of a parameter, so several trainers may share it, and forward passes that are under way
    keep what they saw.
    """

    _make_local: ClassVar[Callable[..., Any]] = staticmethod(make)

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        param_rrefs: Iterable[RRef[Any]],
        *args: Any,
        staleness: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(cls, param_rrefs, *args, staleness=staleness, **kwargs)
