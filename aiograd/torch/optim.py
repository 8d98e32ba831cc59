"""Optimisers of torch at the owner of the parameters, for gradients that are in a context.

    step     gradients of the context ─▶ torch's optimiser, on a copy ─▶ published in the parameter
    pinned   what a forward pass saves of a parameter stays as the pass saw it

torch steps in place. Where several trainers share parameters, the step of one then changes what
the forward pass of another has saved, and torch refuses that one's backward pass. Here a step is
made on a copy, which then becomes the memory of the parameter; a graph that saved the old memory
keeps it. So each trainer gets the gradient of the values it saw.

torch saves a parameter as the object, not as its memory, so that a new memory would be seen by old
graphs, and give wrong gradients without a word. `pinned` saves the memory instead.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from aiograd.dist.registry import contexts, resolve

__all__ = ["LocalOptimizer", "pinned"]

# One step at a time in a process: trainers have optimisers of their own for the same parameters.
_steps = threading.Lock()
# Parameters whose memory is replaced by steps. By identity: `==` of tensors compares elements.
_published: dict[int, weakref.ref[torch.Tensor]] = {}


class LocalOptimizer:
    """An optimiser of torch over parameters of this process; steps take a context's gradients."""

    def __init__(
        self, cls: Any, parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        self.parameters = list(parameters)
        # The optimiser works on these; their memory is that of the parameters, or the next one.
        self._copies = [_copy_of(parameter) for parameter in self.parameters]
        self.optimizer = cls(self._copies, *args, **kwargs)
        # Old memory with the contexts that may read it: a kernel in another thread does not own
        # what it reads, and would read freed memory.
        self._old: list[tuple[list[torch.Tensor], list[Any]]] = []
        for parameter in self.parameters:
            _published[id(parameter)] = weakref.ref(parameter, _forget(id(parameter)))

    def step(self, ctx_or_id: Any) -> None:
        """Step with the gradients of a context; parameters without one stay as they are."""
        gradients = resolve(ctx_or_id).gradients
        # By identity: the mapping's keys are tensors.
        found = {id(leaf): gradient for leaf, gradient in gradients.items()}
        with _steps, torch.no_grad():
            stepped = []
            for parameter, copy in zip(self.parameters, self._copies, strict=True):
                gradient = found.get(id(parameter))
                copy.grad = gradient
                if gradient is not None:
                    # From the parameter: another optimiser, or the user, may have changed it.
                    copy.data = parameter.detach().clone(memory_format=torch.preserve_format)
                    stepped.append((parameter, copy))
            with torch.enable_grad():  # torch's optimisers switch it off themselves
                self.optimizer.step()
            self._publish(stepped)
            for copy in self._copies:
                copy.grad = None

    def _publish(self, stepped: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        old = [parameter.data for parameter, _ in stepped]
        for parameter, copy in stepped:
            parameter.data = copy.data
        self._old = [each for each in self._old if not all(context.released for context in each[1])]
        self._old.append((old, contexts().all()))


def _forget(key: int) -> Callable[[Any], None]:
    def forget(ended: Any) -> None:
        if _published.get(key) is ended:  # else the id is that of another parameter by now
            del _published[key]

    return forget


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(
            f"an optimiser of torch takes torch tensors, not {type(parameter).__name__}"
        )
    if not parameter.is_leaf:
        raise ValueError("can't optimize a non-leaf Tensor")
    # A clone: a detached tensor shares the count of writes, and a step is no write for others.
    return parameter.detach().clone().requires_grad_(parameter.requires_grad)


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Let graphs that are built in this block, in this thread, keep the memory of parameters."""
    if not _published:  # nothing is ever replaced: torch's own way is cheaper
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # A view of a parameter, such as the transposed weight of a linear layer, keeps its own memory.
    known = _published.get(id(tensor))
    parameter = None if known is None else known()
    if parameter is not None and parameter is tensor:
        # The memory as it is now: steps replace it.
        return parameter.detach(), tensor._version
    return tensor, tensor._version


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return what was saved; torch leaves it to hooks to see that nobody has written into it."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor
