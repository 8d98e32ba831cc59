"""What a pass will visit on one worker: found once, and good for every pass over the same tape.

How long a sweep could take: whether it may run on the loop, and what of it can wait.

A thread costs a fifth of a millisecond to reach, so a few milliseconds of arithmetic are better done
right here; calls and heartbeats then wait that long. Estimated is the work, not the size of the
results: a product of matrices computes a thousand times as much per element as a sum does.

A product with a parameter gives two gradients that take equally long: one goes on to a peer, who
waits for it, the other one stays here. So the second one can be put off until the first has left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf, prod
from typing import Any, Final

from aiograd.autograd.graph import Accumulate, Node, Part
from aiograd.autograd.op_nodes import OpNode
from aiograd.autograd.sweep import Half, Halves, contributions
from aiograd.dist.backward.loops import Loop, cut
from aiograd.dist.nodes import RecvNode, SendNode


class Topology:
    """The ends of edges a worker has, and how many contributions each node behind them will get."""

    __slots__ = (
        "_halves",
        "_opened",
        "_work",
        "awaited",
        "capture",
        "closes_loops",
        "counts",
        "dead",
        "gone",
        "heavy",
        "loops",
        "receives",
        "roots",
        "unreached",
    )

    def __init__(
        self,
        sends: Mapping[int, SendNode],
        receives: Mapping[int, RecvNode],
        roots: Iterable[Node] = (),
        *,
        capture: Collection[Node] = (),
        gone: Collection[bytes] = (),
        loops: bool = True,
    ) -> None:
        self.roots, self.gone, self.capture = list(roots), list(gone), capture
        sends, self.receives = dict(sends), dict(receives)  # copies: threads may add to them
        self.loops: dict[RecvNode, list[Loop]] = {}  # what peers find on their own tapes
        self.awaited: dict[int, SendNode] = {}  # by edge
        self.dead: list[SendNode] = []  # whose receivers were gone before the pass
        for edge, send in sends.items():
            if gone and send.incarnation in gone:
                self.dead.append(send)
            elif send.loops and loops:
                self.awaited[edge] = cut(send, capture, self.loops)
            else:
                self.awaited[edge] = send
        self.counts = contributions([*self.roots, *self.awaited.values(), *self.dead])
        self._work = weigh(self.counts)
        self.heavy = self._work > LONG
        self._halves: Halves | None = None
        self.unreached: list[RecvNode] = []
        self.closes_loops = False  # whether a peer may find something on our tape
        for node in self.receives.values():
            if node not in self.counts:
                self.unreached.append(node)
            if node.loops:
                self.closes_loops = True
        self._opened: list[Any] = []
        for opened in self.loops.values():
            for _, edge, place in opened:
                self._opened.append(sends[edge].parents[place])

    def halves(self, originator: bytes) -> Halves | None:
        """What can wait while peers go on with the rest; nothing if all is for the originator."""
        if self._work > LATE and self._halves is None:
            for node in self.receives.values():
                if node.incarnation != originator:
                    self._halves = halves(self.counts)
                    break
        return self._halves

    def fits(
        self, roots: Collection[Node], gone: Collection[bytes], sends: int, receives: int
    ) -> bool:
        """Whether a pass from these roots visits the same; edges are only ever added."""
        if (
            receives != len(self.receives)
            or sends != len(self.awaited) + len(self.dead)
            or self.roots != roots
            or self.gone != gone
        ):
            return False
        for node in self.counts:
            if node.hooks is not None:
                return False
            if node.__class__ is Accumulate and node.variable._hooks:
                return False
        for part in self._opened:
            if part.hooks is not None:
                return False
        return True


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
