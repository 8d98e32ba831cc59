"""`torch.distributed.optim.DistributedOptimizer` on aiograd.

One local optimiser per owner, which steps on a copy and publishes it (`aiograd.torch.optim`), so
that several trainers of the same parameters each get the gradient of the values they saw. torch's
ordinary optimisers are used, not the functional ones of TorchScript.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from aiograd.compat.torch_rpc import api, autograd
from aiograd.compat.torch_rpc.rref import RRef
from aiograd.torch.optim import LocalOptimizer

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """An optimiser of torch over parameters that live on several workers, given by RRefs."""

    def __init__(
        self, optimizer_class: Any, params_rref: list[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        owners: dict[Any, list[RRef[Any]]] = defaultdict(list)
        for param in params_rref:
            owners[param.owner()].append(param)
        self.is_functional_optim = False
        self.remote_optimizers = _wait_for_all(
            [
                api.rpc_async(owner, _make, args=(optimizer_class, params, args, kwargs))
                for owner, params in owners.items()
            ]
        )

    def step(self, context_id: int) -> None:
        """Step on every owner at once, with the gradients of a context."""
        autograd._is_valid_context(context_id)
        _wait_for_all(
            [
                api.rpc_async(optimizer.owner(), _step, args=(optimizer, context_id))
                for optimizer in self.remote_optimizers
            ]
        )


def _make(cls: Any, params: list[RRef[Any]], args: Any, kwargs: Any) -> RRef[LocalOptimizer]:
    return RRef(LocalOptimizer(cls, [param.local_value() for param in params], *args, **kwargs))


def _step(optimizer: RRef[LocalOptimizer], context_id: int) -> None:
    optimizer.local_value().step(context_id)


def _wait_for_all(futures: list[Any]) -> list[Any]:
    """Wait for every owner; raise the last error."""
    results, failure = [], None
    for future in futures:
        try:
            results.append(future.wait())
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return results
