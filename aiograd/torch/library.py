"""Torch as a library of tensors: what `dist.foreign` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, Final

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from aiograd.autograd.graph import Node
from aiograd.dist.nodes import SendNode
from aiograd.errors import GradError
from aiograd.torch.engine import plus
from aiograd.torch.memory import DTYPES, NAMES, put_together, take_apart
from aiograd.torch.nodes import Port
from aiograd.torch.published import recomputed
from aiograd.torch.stages import Condensed, condense
from aiograd.torch.travel import TensorTraveller
from aiograd.wire.fastcodec import BORROW_FROM

_SMALL: Final = 1024  # elements
_NUMPY: Final[dict[Any, Any]] = {torch.float32: np.dtype("f4"), torch.float64: np.dtype("f8")}
_NUMPY_NAMES: Final[dict[str, Any]] = {NAMES[dtype]: code for dtype, code in _NUMPY.items()}


class Torch:
    """The library of `torch.Tensor`s."""

    tensor_class = torch.Tensor

    def __init__(self) -> None:
        self.traveller = self.box = TensorTraveller(self)

    def use_threads(self, count: int) -> None:
        """Let operations of this process compute on several threads."""
        torch.set_num_threads(count)

    # ── roots and inputs ────────────────────────────────────────────────────────────────────────

    def entry(
        self, root: torch.Tensor, gradient: Any, create_graph: bool, allow_leaf: bool
    ) -> tuple[Node, Any]:
        """Check the root of a pass; its port, and the gradient it starts with."""
        if not root.requires_grad:
            raise GradError(
                "this tensor does not require grad and has no gradient function; "
                "was it made under no_grad(), or from tensors without requires_grad=True?",
                "no_requires_grad",
            )
        if gradient is None:
            if root.numel() != 1:
                raise GradError(
                    "backward needs a scalar, or a gradient for this tensor of shape "
                    f"{tuple(root.shape)}; reduce it first, e.g. with .sum()",
                    "not_scalar",
                )
            gradient = torch.ones_like(root, memory_format=torch.preserve_format)
        elif not isinstance(gradient, torch.Tensor):
            raise TypeError(f"the gradient of a torch tensor is one, not {type(gradient).__name__}")
        if gradient.shape != root.shape:
            raise GradError(
                f"a gradient of shape {tuple(gradient.shape)} does not fit a tensor of shape "
                f"{tuple(root.shape)}",
                "shape",
            )
        if root.is_leaf and not allow_leaf:
            raise GradError(
                "a root is a leaf without a gradient function: nothing to play backwards",
                "no_grad_fn",
            )
        return Port(root), gradient if create_graph else gradient.detach()

    def input_node(self, tensor: torch.Tensor) -> Node:
        """Return the port of a tensor that derivatives are asked for."""
        if not tensor.requires_grad:
            raise GradError("an input does not require grad", "no_requires_grad")
        return Port(tensor)

    # ── passes ──────────────────────────────────────────────────────────────────────────────────

    def condense(
        self,
        roots: Sequence[Node],
        sends: Mapping[int, SendNode],
        captures: Sequence[Node],
        keep: bool,
    ) -> Condensed:
        """Make stages of the graph behind all ports among these nodes."""
        return condense(roots, sends, captures, keep)

    def add(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the sum of two gradients."""
        total: torch.Tensor = plus(old, new)
        return total

    def copy(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient in memory that nobody else holds."""
        return gradient.clone()

    def backward(self, tensor: torch.Tensor, retain_graph: bool) -> None:
        """Run a local backward pass, into `.grad`."""
        tensor.backward(retain_graph=retain_graph)

    def grad(self, outputs: Any, inputs: Any, gradients: Any, **flags: Any) -> tuple[Any, ...]:
        """Return local derivatives."""
        found: tuple[Any, ...] = torch.autograd.grad(outputs, inputs, gradients, **flags)
        return found

    def checkpoint(self, call: Callable[[], Any]) -> Any:
        """Run a function whose graph is recomputed in the backward pass."""
        return checkpoint(recomputed(call), use_reentrant=False)

    def concatenate(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join tensors along their first axis."""
        return torch.cat(list(tensors))

    def pack(self, gradient: torch.Tensor, buffers: list[PickleBuffer]) -> list[Any] | None:
        """Return a dense gradient as plain data; None for one that is sparse or recorded."""
        dtype = gradient.dtype
        if dtype in _NUMPY:
            # Fast path for small gradients, and large ones that lie in order. Those of a sum are
            # one number expanded, and slow to take apart: `dist.e2e_loop` (`benchmarks/peers`,
            # aiograd-torch) takes a sixth less.
            try:
                array = gradient.numpy()
            except (RuntimeError, TypeError):  # sparse, recorded, or negative by a bit
                pass
            else:
                if array.size <= _SMALL:
                    memory = bytearray(array.tobytes())
                    return [self.traveller.tag, NAMES[dtype], array.shape, None, memory]
                if array.nbytes >= BORROW_FROM and array.flags.c_contiguous:
                    buffers.append(PickleBuffer(array.reshape(-1).view(np.uint8)))
                    return [self.traveller.tag, NAMES[dtype], array.shape, None, buffers[-1]]
        if gradient.requires_grad or gradient.layout is not torch.strided or gradient.is_quantized:
            return None
        _, name, shape, strides, memory = take_apart(gradient)
        if memory.nbytes < BORROW_FROM:
            return [self.traveller.tag, name, shape, strides, bytearray(memory.tobytes())]
        buffers.append(PickleBuffer(memory))
        return [self.traveller.tag, name, shape, strides, buffers[-1]]

    def unpack(self, packed: list[Any]) -> torch.Tensor:
        """Return the gradient that was packed by a trusted peer."""
        _, name, shape, strides, memory = packed
        if strides is None and name in _NUMPY_NAMES and memory.__class__ is bytearray and memory:
            return torch.from_numpy(np.ndarray(shape, _NUMPY_NAMES[name], memory))
        return put_together(("dense", name, shape, strides, memory))

    # ── boundaries ──────────────────────────────────────────────────────────────────────────────

    def show(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
        """Return what a hook sees, and whether it has written to it: torch has no read-only."""
        shown = tensor.detach()
        version = shown._version
        return shown, lambda: shown._version != version

    def norm(self, tensor: torch.Tensor) -> float:
        """Return the norm of all elements."""
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        return float(torch.linalg.vector_norm(values))

    def noise(
        self, tensor: torch.Tensor, scale: float, generator: np.random.Generator
    ) -> torch.Tensor:
        """Return the tensor with normal noise added."""
        drawn = torch.as_tensor(generator.normal(0.0, scale, tuple(tensor.shape)))
        return tensor + drawn.to(tensor.dtype)

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor | None:
        """Return a floating tensor in another dtype; None for others."""
        return tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else None
