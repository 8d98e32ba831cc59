"""The owner's side of a distributed optimiser: steps in turn, and how old their gradients are.

A context saw a parameter as it was when the context came to its owner, or later. What others have
stepped since then it may not have seen; their number is how far its gradients are behind. A
trainer with a bound on that takes a turn at every owner before it steps at any: so it is refused
everywhere or nowhere, and nobody else who takes turns steps in between.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.contexts import resolve
from aiograd.optim.clip import gradient_norm
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.rpc.current import current_agent
from aiograd.rref.rref import RRef


class History:
    """Who changed which parameter when, for as long as a context lives that may not know."""

    def __init__(self) -> None:
        # By the id of a parameter: the number of each step that changed it, and its context.
        self._steps: dict[int, deque[tuple[int, int]]] = {}

    def add(self, params: Iterable[Tensor], step: int, context_id: int, oldest: int) -> None:
        """Note a step; those up to `oldest` were seen by every context there is."""
        for param in params:
            known = self._steps.get(id(param))
            if known is None:
                known = self._steps[id(param)] = deque()
                weakref.finalize(param, self._steps.pop, id(param), None).atexit = False
            while known and known[0][0] <= oldest:
                known.popleft()
            known.append((step, context_id))

    def behind(self, params: Iterable[Tensor], since: int, context_id: int) -> int:
        """How often others have changed the most changed of these parameters."""
        return max((self._count(param, since, context_id) for param in params), default=0)

    def _count(self, param: Tensor, since: int, context_id: int) -> int:
        known = self._steps.get(id(param), ())
        return sum(step > since and who != context_id for step, who in known)


class Steps:
    """One per worker: steps on its parameters are done one after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while parameters change, in whatever thread
        self.turn = asyncio.Lock()  # held by the trainer whose bound was checked
        self.history = History()


def _steps() -> Steps:
    found: Steps = current_agent().parts.setdefault(Steps, Steps())
    return found


def make(
    cls: type[Optimizer], params: list[RRef], args: Any, kwargs: Any
) -> tuple[RRef, list[Group]]:
    """Make the local optimiser; a reference to it, and the settings it starts with."""
    local = cls([param.local_value() for param in params], *args, **kwargs)
    return RRef(local), settings_of(local.param_groups)


def settings_of(groups: Iterable[Group]) -> list[Group]:
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]


def _use(local: Optimizer, settings: list[Group]) -> None:
    for group, wanted in zip(local.param_groups, settings, strict=True):
        group.update(wanted)


def _own_gradients(local: Optimizer, context: Context) -> dict[Tensor, Tensor]:
    gradients = context.gradients
    params = (param for group in local.param_groups for param in group["params"])
    return {param: gradients[param] for param in params if param in gradients}


async def take_turn(optimizer: RRef, context_id: int) -> AsyncIterator[int]:
    """A stream of one item: it is the caller's turn until it closes the stream, and so far behind
    are its gradients."""
    steps = _steps()
    async with steps.turn:
        context = resolve(context_id)
        params = _own_gradients(optimizer.local_value(), context)
        yield steps.history.behind(params, context.since, context_id)
        await asyncio.Event().wait()


def step(optimizer: RRef, context_id: int, settings: list[Group]) -> None:
    """Step with these settings, on the parameters that have a gradient in the context."""
    context, local, steps = resolve(context_id), optimizer.local_value(), _steps()
    changing = _own_gradients(local, context)
    with steps.lock:
        _use(local, settings)
        for param in changing:
            param.renew()  # graphs and messages of other trainers keep what they saw
        local.step_with(context.gradients)
        number, oldest = context.home.count_step()
        steps.history.add(changing, number, context_id, oldest)


def squared_norm(optimizer: RRef, context_id: int) -> float:
    own = _own_gradients(optimizer.local_value(), resolve(context_id))
    return gradient_norm(own.values()) ** 2


def scale(optimizer: RRef, context_id: int, factor: float) -> None:
    context = resolve(context_id)
    for param, gradient in _own_gradients(optimizer.local_value(), context).items():
        context.replace_gradient(param, gradient * factor)


def state_dict(optimizer: RRef, settings: list[Group]) -> Any:
    local: Optimizer = optimizer.local_value()
    with _steps().lock:
        _use(local, settings)
        return local.state_dict()


def load_state_dict(optimizer: RRef, state: Any) -> None:
    with _steps().lock:
        optimizer.local_value().load_state_dict(state)
