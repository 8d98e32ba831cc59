"""Torch tensors as first-class citizens: imported, they cross calls with their gradients.

    async with ag.context() as ctx:
        y = await ag.rpc_async("worker1", layer, args=(x,))     # x, y: torch.Tensor
        await ctx.backward(y.sum())
        ctx.gradients[weight]                                   # a torch.Tensor; no .grad is set

    memory   a tensor as plain data, and back; checked for restricted peers
    nodes    torch graphs as the tape sees them: ports, received tensors, leaves
    travel   how tensors travel with calls
    engine   runs of torch's engine over a part of a graph; the one user of private calls
    stages   a torch graph condensed into ordinary nodes of the tape
    published  parameters whose memory is replaced: what reads one keeps the memory that it saw
    light    operations that run right where their call arrives
    library  what `dist.foreign` asks of a library of tensors
    optim    torch's optimisers at the owner: a step on a copy, which is then published
    nn       torch's modules on other workers

Each imports only modules above it. A torch tensor that is sent, or arrives, loads this package by
itself; `import aiograd` never does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiograd.dist import foreign
from aiograd.torch import light
from aiograd.torch.library import Torch

if TYPE_CHECKING:
    from aiograd.torch.nn import RemoteModule
    from aiograd.torch.optim import DistributedOptimizer
    from aiograd.torch.published import pinned

__all__ = ["TORCH", "DistributedOptimizer", "RemoteModule", "light", "pinned"]

TORCH = Torch()
foreign.register(TORCH)

# Imported when asked for, with models and optimisers: most workers only send tensors.
_LATER = {
    "RemoteModule": "aiograd.torch.nn",
    "DistributedOptimizer": "aiograd.torch.optim",
    "pinned": "aiograd.torch.published",
}


def _import_later(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'aiograd.torch' has no attribute {name!r}")


if not TYPE_CHECKING:  # a checker would take every name for a public one
    __getattr__ = _import_later
