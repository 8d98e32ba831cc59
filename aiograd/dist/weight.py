"""How long a sweep could take: whether it may run on the loop, or must not hold it up.

A thread costs a fifth of a millisecond to reach, so a few milliseconds of arithmetic are better done
right here; calls and heartbeats then wait that long. Estimated is the work, not the size of the
results: a product of matrices computes a thousand times as much per element as a sum does.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

from aiograd.autograd.graph import Accumulate, Node, Part
from aiograd.dist.nodes import RecvNode, SendNode

LONG: Final = 5e6  # nanoseconds; even at half the expected speed nobody waits for more than ten ms
_NODE: Final = 3000.0  # nanoseconds to run any node at all
_ELEMENT: Final = 2.0  # for one element of a gradient, in a handful of ufuncs
_PRODUCT: Final = 0.015  # per byte: for one term of both gradients of a product of matrices
_DECOMPOSITION: Final = 10 * _PRODUCT  # the same of a solution, decomposition or general product

_PRODUCTS: Final = frozenset({"matmul", "bmm"})
_DECOMPOSITIONS: Final = frozenset(
    {"einsum", "inv", "det", "slogdet", "solve", "cholesky", "eigh", "svd", "qr", "pinv"}
)


def is_heavy(nodes: Iterable[Node]) -> bool:
    """Tell whether running these nodes could hold up the loop: much work, or code of the user's."""
    total = 0.0
    for node in nodes:
        if node.hooks is not None:
            return True
        kind = node.__class__
        if kind is Part or kind is SendNode or kind is RecvNode:
            continue
        if kind is Accumulate:
            if node.variable._hooks:  # type: ignore[attr-defined]
                return True
            continue
        name = getattr(getattr(node, "op", None), "op_name", None)
        if name is None:
            return True
        total += _NODE + _work(name, node)
        if total > LONG:
            return True
    return False


def _work(name: str, node: Node) -> float:
    if name in _PRODUCTS:
        return _PRODUCT * _bytes(node) * prod(node.shape) * _contracted(node)
    shapes = [parent.shape for parent in node.parents if parent is not None]
    elements = sum(map(prod, shapes))
    if name in _DECOMPOSITIONS:
        longest = max((max(shape, default=1) for shape in shapes), default=1)
        return _DECOMPOSITION * _bytes(node) * elements * longest
    return _ELEMENT * elements


def _contracted(node: Any) -> int:
    """How many terms each element of a product of matrices sums."""
    left, right = node.parents
    if left is not None:
        return int(left.shape[-1]) if left.shape else 1
    return int(right.shape[-2 if len(right.shape) > 1 else 0])


def _bytes(node: Any) -> int:
    return getattr(node.dtype, "itemsize", 8)
