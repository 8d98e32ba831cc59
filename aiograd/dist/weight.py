"""How long a sweep could take: whether it may run on the loop, and what of it can wait.

A thread costs a fifth of a millisecond to reach, so a few milliseconds of arithmetic are better done
right here; calls and heartbeats then wait that long. Estimated is the work, not the size of the
results: a product of matrices computes a thousand times as much per element as a sum does.

A product with a parameter gives two gradients that take equally long: one goes on to a peer, who
waits for it, the other one stays here. So the second one can be put off until the first has left.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, prod
from typing import Any, Final

from aiograd.autograd.graph import Accumulate, Node, Part
from aiograd.autograd.recorded import OpNode
from aiograd.autograd.sweep import Half, Halves
from aiograd.dist.nodes import RecvNode, SendNode

LONG: Final = 5e6  # nanoseconds; even at half the expected speed nobody waits for more than ten ms
LATE: Final = 4e5  # of a product: half of it is worth a message, since who puts off must tell the end
HELD: Final = 64 << 20  # bytes of gradients that are held longer than they had to be, at most
_NODE: Final = 3000.0  # nanoseconds to run any node at all
_ELEMENT: Final = 2.0  # for one element of a gradient, in a handful of ufuncs
_PRODUCT: Final = 0.015  # per byte: for one term of both gradients of a product of matrices
_DECOMPOSITION: Final = 10 * _PRODUCT  # the same of a solution, decomposition or general product

_PRODUCTS: Final = frozenset({"matmul", "bmm"})
_DIVISIBLE: Final = frozenset({"matmul", "bmm", "linear"})
_DECOMPOSITIONS: Final = frozenset(
    {"einsum", "inv", "det", "slogdet", "solve", "cholesky", "eigh", "svd", "qr", "pinv"}
)


def weigh(nodes: Iterable[Node]) -> float:
    """The nanoseconds that running these nodes could take; without end if users' code is in it."""
    total = 0.0
    for node in nodes:
        if node.hooks is not None:
            return inf
        kind = node.__class__
        if kind is Part or kind is SendNode or kind is RecvNode:
            continue
        if kind is Accumulate:
            if node.variable._hooks:  # type: ignore[attr-defined]
                return inf
            continue
        name = getattr(getattr(node, "op", None), "op_name", None)
        if name is None:
            return inf
        total += _NODE + _work(name, node)
        if total > LONG:
            break
    return total


def _work(name: str, node: Node) -> float:
    if name in _PRODUCTS:
        return _product(node)
    shapes = [parent.shape for parent in node.parents if parent is not None]
    elements = sum(map(prod, shapes))
    if name in _DECOMPOSITIONS:
        longest = max((max(shape, default=1) for shape in shapes), default=1)
        return _DECOMPOSITION * _bytes(node) * elements * longest
    return _ELEMENT * elements


def _product(node: Node) -> float:
    left, right, *_ = node.parents
    if left is not None:
        terms = left.shape[-1] if left.shape else 1
    else:
        assert right is not None
        terms = right.shape[-2 if len(right.shape) > 1 else 0]
    return _PRODUCT * _bytes(node) * prod(node.shape) * terms


def _bytes(node: Node) -> int:
    return getattr(node.dtype, "itemsize", 8)


def halves(nodes: Iterable[Node]) -> Halves | None:
    """The products of which a part can wait: rules that give nothing but gradients of leaves."""
    found: dict[Node, tuple[Half, Half]] = {}
    held = 0
    for node in nodes:
        if node.__class__ is OpNode and node.op.name in _DIVISIBLE:
            first, later = _divided(node)
            if any(first[1]) and any(later[1]) and _product(node) > LATE:
                held += _bytes(node) * prod(node.shape)
                if held > HELD:
                    break
                found[node] = first, later
    return found or None


def _divided(node: Any) -> tuple[Half, Half]:
    """What goes on from a node, and what ends at leaves."""
    first: Half = ([], [])
    later: Half = ([], [])
    for rule, parent in zip(node.plan.rules or (), node.parents, strict=False):
        ends = parent.__class__ is Accumulate
        for (rules, parents), chosen in ((first, not ends), (later, ends)):
            rules.append(rule if chosen else None)
            parents.append(parent if chosen else None)
    return first, later
