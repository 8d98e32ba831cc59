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
    library  what `dist.foreign` asks of a library of tensors
    optim    torch's optimisers at the owner: a step on a copy, which is then published

Each imports only modules above it. A torch tensor that is sent, or arrives, loads this package by
itself; `import aiograd` never does.
"""

from aiograd.dist import foreign
from aiograd.torch.library import Torch

__all__ = ["TORCH"]

TORCH = Torch()
foreign.register(TORCH)
