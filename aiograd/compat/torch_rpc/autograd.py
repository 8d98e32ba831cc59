"""`torch.distributed.autograd` on aiograd's contexts: blocking, contexts are known by their ids."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from aiograd.compat.torch_rpc import process
from aiograd.compat.torch_rpc.failures import translate
from aiograd.compat.torch_rpc.graphs import GraphFunction
from aiograd.dist import registry
from aiograd.dist.api import backward as aiograd_backward
from aiograd.dist.context import CURRENT, Context
from aiograd.errors import AiogradError, BackwardFailed, NestedContext, NoContext
from aiograd.rpc.api import run_sync
from aiograd.torch.optim import pinned

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Tell whether distributed autograd can be used."""
    return True


def _init(worker_id: int) -> None:
    """Do nothing: a worker has its contexts from the start."""


class context:  # noqa: N801 - torch's name
    """A context for forward and backward passes over several workers: `with context() as id:`."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        self._pinned = pinned()
        self._pinned.__enter__()
        return self.autograd_context._context_id()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pinned.__exit__(None, None, None)
        _release_context(self.autograd_context._context_id())


class DistAutogradContext:
    """One worker's part of a context, for inspection."""

    def __init__(self, part: Context) -> None:
        self._part = part

    def _context_id(self) -> int:
        return self._part.id

    def _known_worker_ids(self) -> set[int]:
        worker = process.current().worker
        return {worker.get_worker_info(name).rank for name in self._part.known_workers}

    def _send_functions(self) -> dict[int, Any]:
        return {edge: GraphFunction(node) for edge, node in self._part.send_nodes.items()}

    def _recv_functions(self) -> dict[int, Any]:
        return {edge: GraphFunction(node) for edge, node in self._part.recv_nodes.items()}


def _new_context() -> DistAutogradContext:
    process.current()
    try:
        part = registry.context()
        part.__enter__()
    except NestedContext as error:
        raise RuntimeError(
            f"Already have an autograd context id for this thread: {error}"
        ) from error
    return DistAutogradContext(part)


def _release_context(context_id: int) -> None:
    part = _part(context_id)
    part.__exit__(None, None, None)


def _current_context() -> DistAutogradContext:
    try:
        return DistAutogradContext(registry.current_context())
    except NoContext as error:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. "
            "Please wrap your code using: `with torch.distributed.autograd.context() as context_id`"
        ) from error


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_part(context_id))


def _is_valid_context(context_id: int) -> None:
    _part(context_id)


def _part(context_id: int) -> Context:
    process.current()
    try:
        return registry.get_context(context_id)
    except AiogradError as error:
        raise translate(error) from error


def _get_max_id() -> int:
    return int(process.current().rank) << 48 | (1 << 48) - 1


def _get_debug_info() -> dict[str, str]:
    counters = process.current().worker.debug_info()
    return {
        "num_current_backward_passes": str(counters["backward_passes"]),
        "num_autograd_contexts": str(counters["contexts"]),
    }


def backward(context_id: int, roots: list[Any], retain_graph: bool = False) -> None:
    """Run a backward pass from scalar roots, on all workers of the context."""
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments. It takes a context id (int), a list of "
            f"tensors and retain_graph, not {type(context_id).__name__}, {type(roots).__name__}"
        )
    part = _part(context_id)
    _check_roots(roots)
    try:
        run_sync(aiograd_backward(part, roots, retain_graph=retain_graph))
    except BackwardFailed as error:
        raise _failure(error) from error
    except AiogradError as error:
        raise translate(error) from error


def _failure(error: BackwardFailed) -> RuntimeError:
    """Return torch's form of a failed pass: the number of the worker, and what went wrong there."""
    try:
        number = str(process.current().worker.get_worker_info(error.worker).rank)
    except AiogradError:  # it is gone
        number = error.worker
    return RuntimeError(f"Error on Node {number}: {error.__cause__ or error}")


def _check_roots(roots: Any) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                "backward(): incompatible function arguments. The roots are tensors, not "
                f"{type(root).__name__}"
            )
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(
                f"root of shape {list(root.shape)} is not a scalar, all roots need to be scalar"
            )
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function.")


def backward_from(value: Any, context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from the value of an RRef; without a context (-1) an ordinary one."""
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        root = value
        backward(context_id, [root], retain_graph)


def get_gradients(context_id: int) -> dict[Any, Any]:
    """Return the gradients of this worker's leaves in a context, by leaf."""
    part = _part(context_id)
    try:
        return dict(part.gradients)
    except AiogradError as error:
        raise translate(error) from error


def current_id() -> int | None:
    """Return the id of the context of this thread; None if there is none."""
    part = CURRENT.get()
    return None if part is None or part.released else part.id
