"""The owner's side of a distributed optimiser: steps in turn, and how old their gradients are.

A context saw a parameter as it was when the context came to its owner, or later. It may not have
seen the steps of others since then; their number is how far its gradients are behind. A trainer
with a bound on that takes a turn at every owner before it steps at any: so it is refused everywhere
or nowhere, and no other trainer that takes turns steps in between.

A guest (see `Options.mode`) may have optimisers of exposed classes, of the parameters to which it
holds references, and use gradients of contexts that it takes part in.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.registry import contexts, resolve
from aiograd.errors import NotAllowed
from aiograd.optim.clip import gradient_norm
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import expose
from aiograd.rpc.callee.exposure import is_exposed
from aiograd.rpc.scope import current_guest
from aiograd.rref.rref import RRef


class History:
    """Which context changed which parameter when, as long as a context lives that may not know."""

    def __init__(self) -> None:
        # By the id of a parameter: the number of each step that changed it, and its context. By id,
        # so that the history keeps no parameter alive; the entry goes with the parameter.
        self._steps: dict[int, deque[tuple[int, int]]] = {}

    def add(self, params: Iterable[Tensor], step: int, context_id: int, oldest: int) -> None:
        """Note a step; those up to `oldest` were seen by every live context and are dropped."""
        for param in params:
            known = self._steps.get(id(param))
            if known is None:
                known = self._steps[id(param)] = deque()
                # An id may be used again by another tensor; its history must not be found then.
                weakref.finalize(param, self._steps.pop, id(param), None).atexit = False
            while known and known[0][0] <= oldest:
                known.popleft()
            known.append((step, context_id))

    def behind(self, params: Iterable[Tensor], since: int, context_id: int) -> int:
        """Return how often other contexts have changed the most changed of these parameters."""
        return max((self._count(param, since, context_id) for param in params), default=0)

    def _count(self, param: Tensor, since: int, context_id: int) -> int:
        known = self._steps.get(id(param), ())
        return sum(step > since and context != context_id for step, context in known)


class Steps:
    """One per worker: steps on its parameters are done one after another."""

    def __init__(self) -> None:
        # Held while parameters change. A thread's lock: steps are plain functions, which run in the
        # worker's threads.
        self.lock: threading.Lock = threading.Lock()
        # Held by the trainer whose bound was checked, from the check to its step. A second lock,
        # because it is held across messages, and trainers without a bound do not wait for it.
        self.turn: asyncio.Lock = asyncio.Lock()
        self.history: History = History()


def _steps() -> Steps:
    """Return the one `Steps` of this worker."""
    # Per worker, not per process: several may share one.
    found: Steps = current_agent().parts.setdefault(Steps, Steps())
    return found


@expose
def make(
    cls: type[Optimizer], params: list[RRef[Tensor]], args: Any, kwargs: Any
) -> tuple[RRef[Optimizer], list[Group]]:
    """Make the local optimiser; return a reference to it, and the settings it starts with."""
    _check_guest(cls)
    local = cls([param.local_value() for param in params], *args, **kwargs)
    return RRef(local), settings_of(local.param_groups)


def _check_guest(cls: Any) -> None:
    """Raise NotAllowed if the caller is a guest and the class is not exposed to guests."""
    if current_guest() is None:
        return
    if not (isinstance(cls, type) and issubclass(cls, Optimizer) and is_exposed(cls)):
        name = getattr(cls, "__name__", type(cls).__name__)
        raise NotAllowed(f"{name} is no optimiser that is exposed here", current_agent().name)


def _local(optimizer: RRef[Optimizer]) -> Optimizer:
    """Return the optimiser that the caller means, if it may use it."""
    local: Optimizer = optimizer.local_value()
    _check_guest(type(local))
    return local


def _context(context_id: int) -> Context:
    """Return the context that the caller means, if it takes part in it."""
    guest = current_guest()
    if guest is not None:
        contexts().access.takes_part(guest, context_id)
    return resolve(context_id)


def settings_of(groups: Iterable[Group]) -> list[Group]:
    """Return parameter groups without the parameters, which stay here."""
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]


def _use(local: Optimizer, settings: list[Group]) -> None:
    for group, wanted in zip(local.param_groups, settings, strict=True):
        group.update(wanted)


def _own_gradients(local: Optimizer, context: Context) -> dict[Tensor, Tensor]:
    """Return the gradients of the optimiser's parameters in the context."""
    gradients = context.gradients
    params = (param for group in local.param_groups for param in group["params"])
    return {param: gradients[param] for param in params if param in gradients}


@expose
async def take_turn(optimizer: RRef[Optimizer], context_id: int) -> AsyncIterator[int]:
    """Yield one item, how far the caller's gradients are behind, and hold the turn.

    It is the caller's turn until it closes the stream.
    """
    steps = _steps()
    async with steps.turn:
        context = _context(context_id)
        params = _own_gradients(_local(optimizer), context)
        yield steps.history.behind(params, context.since, context_id)
        # A guest must not hold the turn for longer than a call may take. A member is trusted to end
        # it, and its death ends the stream.
        patience = math.inf if current_guest() is None else current_agent().options.timeout
        async with asyncio.timeout(None if patience == math.inf else patience):
            await asyncio.Event().wait()


@expose
def step(optimizer: RRef[Optimizer], context_id: int, settings: list[Group]) -> None:
    """Step with these settings, on the parameters that have a gradient in the context."""
    context, local, steps = _context(context_id), _local(optimizer), _steps()
    changing = _own_gradients(local, context)
    with steps.lock:
        _use(local, settings)
        for param in changing:
            # Graphs and messages of other trainers keep the array they saw.
            param.renew()
        local.step_with(context.gradients)
        # Numbered while the lock is held, so that numbers rise in the order of the steps.
        number, oldest = context.home.count_step()
        steps.history.add(changing, number, context_id, oldest)


@expose
def squared_norm(optimizer: RRef[Optimizer], context_id: int) -> float:
    """Return the squared norm of the gradients here; squares of owners add up."""
    own = _own_gradients(_local(optimizer), _context(context_id))
    return gradient_norm(own.values()) ** 2


@expose
def scale(optimizer: RRef[Optimizer], context_id: int, factor: float) -> None:
    """Multiply the gradients here by a factor, in the context."""
    context = _context(context_id)
    for param, gradient in _own_gradients(_local(optimizer), context).items():
        # A new tensor: the old one may have been read and kept.
        context.replace_gradient(param, gradient * factor)


@expose
def state_dict(optimizer: RRef[Optimizer], settings: list[Group]) -> Any:
    """Return the local optimiser's state, with the caller's settings."""
    local = _local(optimizer)
    with _steps().lock:
        _use(local, settings)
        return listed(local.state_dict())


@expose
def load_state_dict(optimizer: RRef[Optimizer], state: Any) -> None:
    """Restore the local optimiser's state."""
    local = _local(optimizer)
    with _steps().lock:
        local.load_state_dict(numbered(state))


def listed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in a form that every peer accepts.

    Peers that exchange plain data only take no dict whose keys are not text.
    """
    return {**state, "state": list(state["state"].items())}


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it was before `listed`."""
    return {**state, "state": dict(state["state"])}
