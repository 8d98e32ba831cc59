"""The owner's side of a distributed optimiser: steps in turn, and how old their gradients are.

A context saw a parameter as it was when the context came to its owner, or later. It may not have
seen the steps of others since then; their number is how far its gradients are behind. A trainer
with a bound on that takes a turn at every owner before it steps at any: so it is refused everywhere
or nowhere, and no other trainer that takes turns steps in between.

A guest (see `Options.mode`) may have optimisers of exposed classes, of the parameters to which it
holds references, and use gradients of contexts that it takes part in.

Nothing here knows whose tensors the parameters are: an optimiser of another library takes part
behind a `LocalOptimizer` of its own, as `aiograd.torch.optim` has one.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Protocol

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

    def add(self, params: Iterable[Any], step: int, context_id: int, oldest: int) -> None:
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

    def behind(self, params: Iterable[Any], since: int, context_id: int) -> int:
        """Return how often other contexts have changed the most changed of these parameters."""
        return max((self._count(param, since, context_id) for param in params), default=0)

    def _count(self, param: Any, since: int, context_id: int) -> int:
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


class LocalOptimizer(Protocol):
    """An optimiser of some parameters of this worker."""

    @property
    def optimizer(self) -> Any:
        """The library's optimiser: its class must be exposed to guests who use it."""

    @property
    def param_groups(self) -> list[Group]:
        """The settings of its steps, by group."""

    @property
    def params(self) -> list[Any]:
        """The parameters that it changes."""

    def step_with(self, gradients: Mapping[Any, Any]) -> None:
        """Step; graphs and messages that have seen a parameter keep the memory they saw."""

    def norm(self, gradients: Iterable[Any]) -> float:
        """Return the norm of all gradients taken as one vector."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the parameters, as a copy."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""


class OwnOptimizer:
    """A `LocalOptimizer` of Tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.norm = gradient_norm
        self.state_dict: Callable[[], dict[str, Any]] = optimizer.state_dict
        self.load_state_dict: Callable[[Mapping[str, Any]], None] = optimizer.load_state_dict

    @property
    def param_groups(self) -> list[Group]:
        """The settings of its steps, by group."""
        return self.optimizer.param_groups

    @property
    def params(self) -> list[Tensor]:
        """The parameters that it changes."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def step_with(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Step; graphs and messages of other trainers keep the array they saw."""
        for param in self.params:
            if param in gradients:
                param.renew()
        self.optimizer.step_with(gradients)


@expose
def make(
    cls: type[Optimizer], params: list[RRef[Tensor]], args: Any, kwargs: Any
) -> tuple[RRef[LocalOptimizer], list[Group]]:
    """Make the local optimiser; return a reference to it, and the settings it starts with."""
    check_guest(cls, Optimizer)
    made = cls([param.local_value() for param in params], *args, **kwargs)
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"a DistributedOptimizer takes a class of ag.optim, not {cls!r}; for optimisers of "
            "torch there is ag.torch.DistributedOptimizer"
        )
    return referred(OwnOptimizer(made))


def referred(local: LocalOptimizer) -> tuple[RRef[LocalOptimizer], list[Group]]:
    """Return what a distributed optimiser keeps of a local one."""
    return RRef(local), settings_of(local.param_groups)


def check_guest(cls: Any, base: type = object) -> None:
    """Raise NotAllowed if the caller is a guest, and the class no `base` that guests may use."""
    if current_guest() is None:
        return
    if not (isinstance(cls, type) and issubclass(cls, base) and is_exposed(cls)):
        name = getattr(cls, "__name__", type(cls).__name__)
        raise NotAllowed(f"{name} is no optimiser that is exposed here", current_agent().name)


def _local(optimizer: RRef[LocalOptimizer]) -> LocalOptimizer:
    """Return the optimiser that the caller means, if it may use it."""
    local: Any = optimizer.local_value()
    # Whatever it is: a guest may send any reference.
    check_guest(type(getattr(local, "optimizer", None)))
    checked: LocalOptimizer = local
    return checked


def _context(context_id: int) -> Context:
    """Return the context that the caller means, if it takes part in it."""
    guest = current_guest()
    if guest is not None:
        contexts().access.takes_part(guest, context_id)
    return resolve(context_id)


def settings_of(groups: Iterable[Group]) -> list[Group]:
    """Return parameter groups without the parameters, which stay here."""
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]


def _use(local: LocalOptimizer, settings: list[Group]) -> None:
    for group, wanted in zip(local.param_groups, settings, strict=True):
        group.update(wanted)


def _own_gradients(local: LocalOptimizer, context: Context) -> dict[Any, Any]:
    """Return the gradients of the optimiser's parameters in the context."""
    gradients = context.gradients
    return {param: gradients[param] for param in local.params if param in gradients}


@expose
async def take_turn(optimizer: RRef[LocalOptimizer], context_id: int) -> AsyncIterator[int]:
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
def step(optimizer: RRef[LocalOptimizer], context_id: int, settings: list[Group]) -> None:
    """Step with these settings, on the parameters that have a gradient in the context."""
    context, local, steps = _context(context_id), _local(optimizer), _steps()
    changing = _own_gradients(local, context)
    with steps.lock:
        _use(local, settings)
        local.step_with(changing)
        # Numbered while the lock is held, so that numbers rise in the order of the steps.
        number, oldest = context.home.count_step()
        steps.history.add(changing, number, context_id, oldest)


@expose
def squared_norm(optimizer: RRef[LocalOptimizer], context_id: int) -> float:
    """Return the squared norm of the gradients here; squares of owners add up."""
    local = _local(optimizer)
    return local.norm(_own_gradients(local, _context(context_id)).values()) ** 2


@expose
def scale(optimizer: RRef[LocalOptimizer], context_id: int, factor: float) -> None:
    """Multiply the gradients here by a factor, in the context."""
    context = _context(context_id)
    for param, gradient in _own_gradients(_local(optimizer), context).items():
        # A new tensor: the old one may have been read and kept.
        context.replace_gradient(param, gradient * factor)


@expose
def state_dict(optimizer: RRef[LocalOptimizer], settings: list[Group]) -> Any:
    """Return the local optimiser's state, with the caller's settings."""
    local = _local(optimizer)
    with _steps().lock:
        _use(local, settings)
        return listed(local.state_dict())


@expose
def load_state_dict(optimizer: RRef[LocalOptimizer], state: Any) -> None:
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
