"""One optimiser over parameters that live on many workers.

Each owner gets a local optimiser for its own parameters. A step is one call per owner, all at
once; gradients are taken from the context, where they already are, and never touch `.grad`.
Steps of several trainers on the same owner wait for each other, so each one is whole. Between a
trainer's forward pass and its step others may have stepped: its gradients are then those of the
values it saw.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Generator, Iterable, Mapping
from typing import Any

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.contexts import resolve
from aiograd.optim.optimizer import Optimizer
from aiograd.rpc.calls import rpc_async
from aiograd.rpc.current import current_agent
from aiograd.rref.rref import RRef


class DistributedOptimizer:
    """`opt = await ag.optim.DistributedOptimizer(ag.optim.SGD, param_rrefs, lr=0.1)`."""

    def __init__(
        self, optimizer_class: type[Optimizer], params: Iterable[RRef], *args: Any, **kwargs: Any
    ) -> None:
        owners: dict[str, list[RRef]] = {}
        for param in params:
            if not isinstance(param, RRef):
                raise TypeError(
                    "a DistributedOptimizer takes RRefs of parameters, "
                    f"not {type(param).__name__}; wrap local ones in ag.RRef(...)"
                )
            owners.setdefault(param.owner_name(), []).append(param)
        if not owners:
            raise ValueError("the optimizer got an empty list of parameters")
        self._making = {
            owner: rpc_async(owner, _make, args=(optimizer_class, rrefs, args, kwargs))
            for owner, rrefs in owners.items()
        }
        self._locals: dict[str, RRef] | None = None  # owner → its local optimiser, once made

    def __await__(self) -> Generator[Any, None, DistributedOptimizer]:
        yield from self._made().__await__()
        return self

    async def _made(self) -> dict[str, RRef]:
        if self._locals is None:
            self._locals = await _all(self._making)
        return self._locals

    async def _everywhere(self, function: Any, *args: Any) -> dict[str, Any]:
        """Call `function(local optimiser, *args)` on every owner at once."""
        found = await self._made()
        return await _all(
            {owner: rpc_async(owner, function, args=(rref, *args)) for owner, rref in found.items()}
        )

    async def step(self, context: Context | int) -> None:
        """Update every parameter that has a gradient in the context, on all owners at once."""
        await self._everywhere(_step, resolve(context).id)

    async def clip_grad_norm(self, context: Context | int, max_norm: float) -> float:
        """Scale the gradients of a context so that their norm over all owners is at most this.

        Returns the norm before. Call it between `backward` and `step`.
        """
        context_id = resolve(context).id
        squares = await self._everywhere(_squared_norm, context_id)
        norm = float(np.sqrt(sum(squares.values())))
        if norm > max_norm:
            await self._everywhere(_scale, context_id, max_norm / (norm + 1e-6))
        return norm

    async def set_lr(self, lr: float) -> None:
        """Set the learning rate on all owners, e.g. from a schedule."""
        await self._everywhere(_set_lr, lr)

    async def state_dict(self) -> dict[str, Any]:
        """The state of the local optimisers, by owner."""
        return await self._everywhere(_state_dict)

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the state back that `state_dict` gave."""
        found = await self._made()
        if set(state) != set(found):
            raise ValueError(f"the state is of owners {sorted(state)}, here are {sorted(found)}")
        await _all(
            {
                owner: rpc_async(owner, _load_state_dict, args=(rref, state[owner]))
                for owner, rref in found.items()
            }
        )


async def _all(calls: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """Wait for every owner; raise the first error, with a note for each other one."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    failed = {
        owner: result
        for owner, result in zip(calls, results, strict=True)
        if isinstance(result, BaseException)
    }
    if failed:
        (_, first), *others = failed.items()
        for owner, error in others:
            first.add_note(f"{owner} failed too: {type(error).__name__}: {error}")
        raise first
    return dict(zip(calls, results, strict=True))


# ── at the owners ───────────────────────────────────────────────────────────────────────────────


class _Steps:
    """One per worker: steps on its parameters are done one after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _lock() -> threading.Lock:
    lock: threading.Lock = current_agent().parts.setdefault(_Steps, _Steps()).lock
    return lock


def _make(cls: type[Optimizer], params: list[RRef], args: Any, kwargs: Any) -> RRef:
    return RRef(cls([param.local_value() for param in params], *args, **kwargs))


def _step(optimizer: RRef, context_id: int) -> None:
    gradients = resolve(context_id).gradients
    local = optimizer.local_value()
    with _lock():
        for group in local.param_groups:
            for param in group["params"]:
                if param in gradients:
                    param.renew()  # graphs and messages of other trainers keep what they saw
        local.step_with(gradients)


def _own_gradients(optimizer: RRef, context_id: int) -> dict[Tensor, Tensor]:
    gradients = resolve(context_id).gradients
    groups = optimizer.local_value().param_groups
    return {p: gradients[p] for group in groups for p in group["params"] if p in gradients}


def _squared_norm(optimizer: RRef, context_id: int) -> float:
    own = _own_gradients(optimizer, context_id).values()
    return float(sum(np.vdot(g.numpy(), g.numpy()).real for g in own))


def _scale(optimizer: RRef, context_id: int, factor: float) -> None:
    context = resolve(context_id)
    for param, gradient in _own_gradients(optimizer, context_id).items():
        context.replace_gradient(param, gradient * factor)


def _set_lr(optimizer: RRef, lr: float) -> None:
    with _lock():
        for group in optimizer.local_value().param_groups:
            group["lr"] = lr


def _state_dict(optimizer: RRef) -> Any:
    with _lock():
        return optimizer.local_value().state_dict()


def _load_state_dict(optimizer: RRef, state: Any) -> None:
    with _lock():
        optimizer.local_value().load_state_dict(state)
