"""What a pass will visit on one worker, how long that could take, and what of it can be deferred.

`Topology` is found once, and good for every pass over the same tape.

A thread costs a fifth of a millisecond to reach, so a few milliseconds of arithmetic are better done
on the loop; calls and heartbeats then wait that long. Estimated is the work, not the size of the
results: a product of matrices computes a thousand times as much per element as a sum does.

A product with a parameter gives two gradients that take equally long: one goes on to a peer, which
waits for it, the other one stays here. So the second one can be deferred until the first has left,
and in a chain two workers compute at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any, Final, Protocol

from aiograd.autograd.graph import Accumulate, HookHandle, Node, Part
from aiograd.autograd.op.nodes import OpNode
from aiograd.autograd.sweep import Half, Halves, contributions
from aiograd.dist.backward.loops import Loop, cut
from aiograd.dist.nodes import RecvNode, SendNode


class Condensed(Protocol):
    """What one pass runs in place of the graph of another library; `dist.foreign` tells more."""

    @property
    def roots(self) -> Sequence[Node]:
        """The roots it was made for."""

    @property
    def stands(self) -> Mapping[Node, Node]:
        """For each port that gradients enter by, the node to feed."""

    def send(self, send: SendNode) -> SendNode:
        """Return a sending end without ports; a copy, since the next pass may be another one."""

    @property
    def wanted(self) -> Mapping[Node, Node]:
        """For each port that derivatives are asked for by, the node to capture."""

    def fits(self, keep: bool) -> bool:
        """Tell whether another pass from the same roots would be condensed to the same."""


class Topology:
    """The ends of edges a worker has, and how many contributions each node behind them will get."""

    __slots__ = (
        "_halves",
        "_hooks_seen",
        "_opened",
        "_work",
        "awaited",
        "capture",
        "closes_loops",
        "condensed",
        "counts",
        "dead",
        "gone",
        "heavy",
        "loops",
        "receives",
        "roots",
        "unreached",
    )

    roots: list[Node]
    gone: list[bytes]
    capture: Collection[Node]
    receives: dict[int, RecvNode]

    def __init__(
        self,
        sends: Mapping[int, SendNode],
        receives: Mapping[int, RecvNode],
        roots: Iterable[Node] = (),
        *,
        capture: Collection[Node] = (),
        gone: Collection[bytes] = (),
        loops: bool = True,
        condensed: Condensed | None = None,
    ) -> None:
        # What stands for graphs of another library, if there are any; `sends`, `roots` and `capture`
        # are without ports then.
        self.condensed: Condensed | None = condensed
        self.roots, self.gone, self.capture = list(roots), list(gone), capture
        sends, self.receives = dict(sends), dict(receives)  # copies: threads may add to them
        self.loops: dict[RecvNode, list[Loop]] = {}  # what peers find on their own tapes
        self.awaited: dict[int, SendNode] = {}  # by edge
        # Whose receivers were gone before the pass: nobody will answer, so they are not awaited.
        self.dead: list[SendNode] = []
        for edge, send in sends.items():
            if gone and send.incarnation in gone:
                self.dead.append(send)
            elif send.loops and loops:
                self.awaited[edge] = cut(send, capture, self.loops)
            else:
                self.awaited[edge] = send
        # Dead ones count, too: the nodes behind them must get a "none" before they can run.
        self.counts: dict[Node, int] = contributions([*self.roots, *self.awaited.values(), *self.dead])
        self._work = weigh(self.counts)
        self.heavy: bool = self._work > LONG
        self._halves: Halves | None = None  # looked for only where a peer could wait
        self.unreached: list[RecvNode] = []  # no root depends on them: answered "none" at once
        self.closes_loops: bool = False  # whether a peer may find something on our tape
        for node in self.receives.values():
            if node not in self.counts:
                self.unreached.append(node)
            if node.loops:
                self.closes_loops = True
        self._hooks_seen = -2  # `HookHandle.registered` when `fits` found no hooks in here
        # Parts whose gradients are left to a peer: a hook on one of them would miss its gradient.
        self._opened: list[Any] = []
        for opened in self.loops.values():
            for _, edge, place in opened:
                self._opened.append(sends[edge].parents[place])

    def halves(self, originator: bytes) -> Halves | None:
        """Return what can be deferred while peers compute; None if all is for the originator."""
        # The originator waits for the end of the pass, so to it nothing may be sent early.
        if self._work > LATE and self._halves is None:
            for node in self.receives.values():
                if node.incarnation != originator:
                    self._halves = halves(self.counts)
                    break
        return self._halves

    def fits(
        self,
        roots: Collection[Node],
        gone: Collection[bytes],
        sends: int,
        receives: int,
        keep: bool = True,
    ) -> bool:
        """Tell whether a pass from these roots visits the same.

        Numbers of edges are enough to compare, since edges are only ever added; `Context.unsend`
        drops the topology.
        """
        if (
            receives != len(self.receives)
            or sends != len(self.awaited) + len(self.dead)
            or (self.roots if self.condensed is None else self.condensed.roots) != roots
            or self.gone != gone
        ):
            return False
        if self.condensed is not None and not self.condensed.fits(keep):
            return False
        # A hook that was added since is code of the user's: the drain must leave the loop, and loops
        # must not pass it by. A pass with hooks is weighed anew each time. Most programs register
        # hooks before their passes or never, so one number mostly spares the look at every node.
        registered = HookHandle.registered
        if registered == self._hooks_seen:
            return True
        for node in self.counts:
            if node.hooks is not None:
                return False
            if node.__class__ is Accumulate and node.variable._hooks:
                return False
        for part in self._opened:
            if part.hooks is not None:
                return False
        self._hooks_seen = registered
        return True


# Nanoseconds. Even at half the expected speed nobody waits for more than ten milliseconds.
LONG: Final = 5e6
# Nanoseconds of a product. Half of it must be worth a message: a worker that defers work keeps its
# credit, and sends it home in one message more.
LATE: Final = 4e5
HELD: Final = 64 << 20  # bytes of gradients that deferred work may hold longer than needed, at most
_NODE: Final = 3000.0  # nanoseconds to run any node at all
_ELEMENT: Final = 2.0  # nanoseconds for one element of a gradient, in a handful of ufuncs
_PRODUCT: Final = 0.015  # per byte: for one term of both gradients of a product of matrices
_DECOMPOSITION: Final = 10 * _PRODUCT  # the same of a solution, decomposition or general product

_PASSING: Final = frozenset({Part, SendNode, RecvNode})  # nothing is computed at these nodes
_PRODUCTS: Final = frozenset({"matmul", "bmm"})
_DIVISIBLE: Final = frozenset({"matmul", "bmm", "linear"})
_DECOMPOSITIONS: Final = frozenset(
    {"einsum", "inv", "det", "slogdet", "solve", "cholesky", "eigh", "svd", "qr", "pinv"}
)


def weigh(nodes: Iterable[Node]) -> float:
    """Estimate the nanoseconds that running these nodes could take; infinite for users' code."""
    total: float = 0.0
    for node in nodes:
        # A hook is code of the user's. It may block, or call `rpc_sync`, which a loop must not.
        if node.hooks is not None:
            return inf
        kind = node.__class__
        if kind in _PASSING:
            continue
        if kind is Accumulate:
            if node.variable._hooks:  # type: ignore[attr-defined]
                return inf
            continue
        # A Function of the user's has no name in our table: it may do anything, for any time.
        name = getattr(getattr(node, "op", None), "op_name", None)
        if name is None:
            # A node of another library's graph says it itself.
            total += getattr(node, "work", inf)
        else:
            total += _NODE + _work(name, node)
        if total > LONG:
            break  # a thread is needed anyway, and a large tape should not be weighed to its end
    return total


def _work(name: str, node: Node) -> float:
    if name in _PRODUCTS:
        return _product(node)
    elements = 0
    for parent in node.parents:
        if parent is not None:
            elements += prod(parent.shape)
    if name in _DECOMPOSITIONS:
        sizes = [size for parent in node.parents if parent is not None for size in parent.shape]
        return _DECOMPOSITION * _bytes(node) * elements * max(sizes, default=1)
    return _ELEMENT * elements


def _product(node: Node) -> float:
    left, right, *_ = node.parents
    # The shape of the product lacks the axis that was summed; either operand has it. One of them is
    # None if it needs no gradient.
    if left is not None:
        terms = left.shape[-1] if left.shape else 1
    else:
        assert right is not None
        terms = right.shape[-2 if len(right.shape) > 1 else 0]
    return _PRODUCT * _bytes(node) * prod(node.shape) * terms


def _bytes(node: Node) -> int:
    return getattr(node.dtype, "itemsize", 8)


def halves(nodes: Iterable[Node]) -> Halves | None:
    """Return the products of which a part can be deferred: rules that only reach leaves."""
    found: dict[Node, tuple[Half, Half]] = {}
    held = 0
    for node in nodes:
        if node.__class__ is OpNode and node.op.name in _DIVISIBLE:
            first, later = _divided(node)
            if any(first[1]) and any(later[1]) and _product(node) > LATE:
                # A deferred rule keeps the gradient of its product alive.
                held += _bytes(node) * prod(node.shape)
                if held > HELD:
                    break
                found[node] = first, later
    return found or None


def _divided(node: Any) -> tuple[Half, Half]:
    """Divide the rules of a node into those that go on and those that end at leaves."""
    first: Half = ([], [])
    later: Half = ([], [])
    for rule, parent in zip(node.plan.rules or (), node.parents, strict=False):
        ends = parent.__class__ is Accumulate
        for (rules, parents), chosen in ((first, not ends), (later, ends)):
            rules.append(rule if chosen else None)
            parents.append(parent if chosen else None)
    return first, later
