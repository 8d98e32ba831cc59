"""Where a pass starts: which roots are fit, and whether what they reach is heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.autograd.graph import Node, Part
from aiograd.autograd.op import parent_of
from aiograd.autograd.recorded import JointOpNode, LightNode, OpNode
from aiograd.autograd.sweep import Sweep
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.errors import GradError

HEAVY = 250_000  # elements in a sweep from which on it must not hold up the loop


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
        one = np.ones(root.shape, root.dtype)
        found.append((node, wrap(one) if create_graph else one))
    return found


def is_heavy(sweep: Sweep) -> bool:
    """Tell whether draining could hold up the loop: large arrays, or code that is not ours."""
    total = 0
    for node, _ in sweep.waiting:
        if isinstance(node, OpNode | LightNode | JointOpNode):
            if node.hooks is not None or getattr(node.op, "op_name", None) is None:
                return True
            total += math.prod(node.shape)
            if total > HEAVY:
                return True
        elif node.hooks is not None or not _is_ours(node):
            return True
    return False


def _is_ours(node: Node) -> bool:
    variable = getattr(node, "variable", None)
    if variable is not None:
        return not variable._hooks
    return isinstance(node, Part | SendNode | RecvNode)
