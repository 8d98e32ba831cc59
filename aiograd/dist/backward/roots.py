"""Where a pass starts: which roots are fit, and with which gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.autograd.graph import Node
from aiograd.autograd.op import parent_of
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.errors import GradError


def checked(roots: Sequence[Tensor]) -> Sequence[Tensor]:
    if not roots:
        raise GradError("backward needs at least one root tensor", "no_roots")
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(f"the roots of backward are Tensors, not {type(root).__name__}")
        if not root.requires_grad:
            raise GradError(
                "a root does not require grad: nothing it was made from did", "no_requires_grad"
            )
        if root.size != 1:
            raise GradError(
                f"a root has shape {root.shape}; backward needs scalars, reduce it with .sum()",
                "not_scalar",
            )
        if root.is_leaf:
            raise GradError(
                "a root is a leaf without a gradient function: nothing to play backwards",
                "no_grad_fn",
            )
    return roots


def entries(roots: Sequence[Tensor], create_graph: bool) -> list[tuple[Node, Any]]:
    """The node behind each root, with a gradient of one."""
    found: list[tuple[Node, Any]] = []
    for root in checked(roots):
        node = parent_of(root)
        assert node is not None
        one = np.array(1, root.dtype) if root.data.shape == () else np.ones(root.shape, root.dtype)
        found.append((node, wrap(one) if create_graph else one))
    return found
