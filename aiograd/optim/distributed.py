"""One optimiser over parameters that live on many workers.

Each owner gets a local optimiser for its own parameters (`owned.py`). A step is one call per owner,
all at once; gradients are taken from the context, where they already are, and never touch `.grad`.
Steps of several trainers on the same owner run one after another, so each one is whole. Between a
trainer's forward pass and its step others may have stepped: its gradients are then those of the
values it saw, and `staleness` bounds how often that may have happened.

Settings such as the learning rate are kept here, in `param_groups`; the changed ones are sent with
each step. So schedulers work as on a local optimiser, without messages of their own.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self

from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.registry import resolve
from aiograd.errors import StaleGradients
from aiograd.optim import owned
from aiograd.optim.optimizer import Group, Optimizer
from aiograd.rpc.api import rpc_async, rpc_stream
from aiograd.rref.rref import RRef


class DistributedOptimizer:
    """`opt = await ag.optim.DistributedOptimizer(ag.optim.SGD, param_rrefs, lr=0.1)`.

    With `staleness=n` a step is refused with `StaleGradients`, on all owners, if other contexts
    have stepped more than `n` times on one of its parameters since this context came to the owner;
    the remedy is to compute the gradients anew in a new context. 0 gives the same result as
    trainers that take turns, from forward to step. A trainer that is refused was overtaken by
    another one, so one of them always makes progress. Without a bound no step is ever refused, or
    waits for more than the steps of others. Give the bound to every optimiser of shared parameters:
    steps of one without it count as well, but such a step may run between the check and the step of
    another.

        >>> m = ag.nn.RemoteModule("worker1", ag.nn.Linear, args=(4, 1))
        >>> rrefs = await m.remote_parameters()
        >>> opt = await ag.optim.DistributedOptimizer(ag.optim.SGD, rrefs, lr=0.1)
        >>> before = (await rrefs[1]).tolist()
        >>> async with ag.context() as ctx:
        ...     loss = (await m(ag.ones(8, 4))).mean()
        ...     await ctx.backward(loss)
        ...     await opt.step(ctx)
        >>> round(before[0] - (await rrefs[1]).tolist()[0], 6)  # the bias has a gradient of 1
        0.1
    """

    # What owners make their optimisers with; another library's has another one.
    _make_local: ClassVar[Callable[..., Any]] = staticmethod(owned.make)

    def __init__(
        self,
        cls: type[Optimizer],
        param_rrefs: Iterable[RRef[Tensor]],
        *args: Any,
        staleness: int | None = None,
        **kwargs: Any,
    ) -> None:
        if staleness is not None and not (type(staleness) is int and staleness >= 0):
            raise ValueError(f"staleness is None or a number of steps, not {staleness!r}")
        if inspect.isawaitable(param_rrefs):
            if inspect.iscoroutine(param_rrefs):
                param_rrefs.close()  # else Python also warns that it was never awaited
            raise TypeError(
                "a DistributedOptimizer takes RRefs of parameters, not something that would give "
                "them; did you forget `await`, as in `await m.remote_parameters()`?"
            )
        owners: dict[str, list[RRef[Tensor]]] = {}
        for param in param_rrefs:
            if not isinstance(param, RRef):
                raise TypeError(
                    "a DistributedOptimizer takes RRefs of parameters, "
                    f"not {type(param).__name__}; wrap local ones in ag.RRef(...)"
                )
            owners.setdefault(param.owner_name(), []).append(param)
        if not owners:
            raise ValueError("the optimizer got an empty list of parameters")
        self.staleness = staleness
        # Started here and awaited later, so that all owners work at once.
        self._making = {
            owner: rpc_async(owner, self._make_local, args=(cls, rrefs, args, kwargs))
            for owner, rrefs in owners.items()
        }
        # Owner → its local optimiser, once made.
        self._locals: dict[str, RRef[owned.LocalOptimizer]] | None = None
        self._groups: list[Group] = []
        self._first: list[Group] = []  # the same as the owners made them
        # What was ever different from that. A setting that was changed back must be sent too:
        # owners have the changed one.
        self._changed: list[set[str]] = []

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._made().__await__()
        return self

    async def _made(self) -> dict[str, RRef[owned.LocalOptimizer]]:
        """Wait until every owner has its local optimiser; return the references."""
        if self._locals is None:
            made = await _all(self._making)
            if self._locals is None:  # another task may have been faster
                self._locals = {owner: rref for owner, (rref, _) in made.items()}
                # The same for all owners: they were given the same arguments.
                self._first = next(iter(made.values()))[1]
                self._groups = [dict(group) for group in self._first]
                self._changed = [set() for _ in self._first]
        return self._locals

    @property
    def param_groups(self) -> list[Group]:
        """The settings, to read and to change; the next step takes them to every owner."""
        if self._locals is None:
            raise RuntimeError(
                "the optimizer is still being made; `await` it before you look at its settings"
            )
        return self._groups

    def _settings(self) -> list[Group]:
        """Return what owners must know: every setting that was changed here, now or ever."""
        for group, first, changed in zip(self._groups, self._first, self._changed, strict=True):
            changed |= {key for key in group if key not in first or first[key] != group[key]}
        pairs = zip(self._groups, self._changed, strict=True)
        return [{key: group[key] for key in changed} for group, changed in pairs]

    async def _everywhere(self, function: Any, *args: Any) -> dict[str, Any]:
        """Call `function(local optimiser, *args)` on every owner at once."""
        found = await self._made()
        return await _all(
            {owner: rpc_async(owner, function, args=(rref, *args)) for owner, rref in found.items()}
        )

    async def step(self, ctx_or_id: Context | int) -> None:
        """Update every parameter that has a gradient in the context, on all owners at once.

        `StaleGradients` if there is a bound on their age and one owner finds them older; then no
        parameter has changed anywhere. Any other failure, of an owner or of this worker on its way,
        may leave a step that some owners have taken and others have not.
        """
        context_id, found = resolve(ctx_or_id).id, await self._made()
        settings = self._settings()
        async with AsyncExitStack() as turns:
            if self.staleness is not None:
                # A turn at every owner before a step at any, so that a step is refused everywhere
                # or nowhere. Checking owner by owner while stepping would save a round trip, and
                # leave parameters of which some have taken a step that others refused. All trainers
                # ask in the order of names, so that no two wait for each other.
                for owner in sorted(found):
                    # A stream, because it ends with its trainer: the turn of one that died is
                    # released.
                    turn = rpc_stream(owner, owned.take_turn, args=(found[owner], context_id))
                    turns.push_async_callback(turn.aclose)
                    behind = await anext(turn)
                    if behind > self.staleness:
                        raise StaleGradients(owner, behind, self.staleness)
            await self._everywhere(owned.step, context_id, settings)

    async def clip_grad_norm(self, ctx: Context | int, max_norm: float) -> float:
        """Scale the gradients of a context so that their norm over all owners is at most this.

        Returns the norm before. Call it between `backward` and `step`.
        """
        context_id = resolve(ctx).id
        squares = await self._everywhere(owned.squared_norm, context_id)
        norm = math.sqrt(sum(squares.values()))
        if norm > max_norm:
            await self._everywhere(owned.scale, context_id, max_norm / (norm + 1e-6))
        return norm

    async def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps from now on."""
        await self._made()
        for group in self._groups:
            group["lr"] = lr

    async def state_dict(self) -> dict[str, Any]:
        """Return the state of the local optimisers, by owner."""
        await self._made()
        found = await self._everywhere(owned.state_dict, self._settings())
        return {owner: owned.numbered(state) for owner, state in found.items()}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, settings included."""
        found = await self._made()
        # States are by owner, and name parameters by number: they only fit the same distribution.
        if set(state) != set(found):
            raise ValueError(f"the state is of owners {sorted(state)}, here are {sorted(found)}")
        await _all(
            {
                owner: rpc_async(
                    owner, owned.load_state_dict, args=(rref, owned.listed(state[owner]))
                )
                for owner, rref in found.items()
            }
        )
        loaded = owned.settings_of(next(iter(state.values()))["param_groups"])
        for group, settings in zip(self._groups, loaded, strict=True):
            group.update(settings)


async def _all(calls: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """Wait for every owner; raise the first error, with a note for each other one."""
    # All answers, also after an error, so that every failure is named and no call is left running.
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
