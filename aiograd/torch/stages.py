"""Condensing: a torch graph becomes *stages*, which are ordinary nodes of the tape.

    entries (roots, SendNodes) ─▶ Part(stage, i) ─▶ Stage ─▶ Leaf, Part(RecvNode, i), Part(stage, j)

A stage is the set of torch nodes that depend on exactly the same entries. It runs as one call of
torch's C++ engine, so hooks, saved tensors, custom Functions, anomaly mode, sparse gradients and
`create_graph` are handled by the engine. The sweep decides which stage waits for what.

Why this is exact. Every torch node is in one stage, and a stage runs when all of its entries were
answered, so a node runs once, on the sum of its gradients. Within a run, a node of the stage
depends on nodes of the stage only: anything else that reaches it would be one more entry. What
leaves the stage for a node of another one (an *exit*) is handed to that stage by the sweep, which
sums it up.

A leaf without hooks may end several stages, and the sweep adds up its gradients. A leaf with hooks
and a received tensor count as inner nodes: their hooks run once, on the sum.

Hooks on the AccumulateGrad node of a leaf, as DistributedDataParallel has them, may block until
other processes have come as far. Such leaves end at `Accumulation`, the last step of a pass.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge

from aiograd.autograd.graph import Joint, Node, Part
from aiograd.dist.nodes import LastStep, SendNode
from aiograd.errors import GradError
from aiograd.torch.engine import (
    Border,
    is_alone,
    may_have_reducers,
    plus,
    run_bordered,
    run_hooks,
    run_leaves,
    run_plain,
)
from aiograd.torch.memory import span
from aiograd.torch.nodes import ACCUMULATE, RECEIVED, Leaf, Place, Port, is_observed, node_hooks

# ── nodes of the tape ───────────────────────────────────────────────────────────────────────────


class Stage(Joint):
    """Torch nodes that depend on the same entries; one slot per place that they are fed at."""

    __slots__ = ("_edges", "border", "captures", "culprit", "exits", "own", "roots", "work")

    def __init__(self) -> None:
        self.roots: list[Place] = []  # where it is fed, one per slot
        self.exits: list[Place] = []  # where gradients leave it, one per parent
        self.captures: list[Place] = []  # inner places whose gradients are asked for: more parents
        self.border: Border | None = None  # if something goes on to another stage
        self.own: frozenset[Place] = frozenset()  # exits whose hooks a bordered run leaves out
        self._edges: tuple[list[GradientEdge], list[GradientEdge]] | None = None  # of a plain run
        self.work = inf  # nanoseconds, see `plan.weigh`
        self.culprit: str = ""  # the torch node that has failed
        self.parents: tuple[Node | None, ...] = ()
        self.shape, self.dtype, self.hooks = (), None, None

    @property
    def outputs(self) -> int:  # type: ignore[override]
        """The number of slots."""
        return len(self.roots)

    @property
    def name(self) -> str:
        """The torch node that has failed, or the first one of the stage."""
        return self.culprit or self.roots[0][0].name()

    def run(self, grads: list[Any], create_graph: bool, retain: bool) -> Sequence[Any]:
        """Give the gradient of every parent: one run of torch's engine."""
        for grad in grads:
            if grad is not None and not isinstance(grad, torch.Tensor):
                raise GradError(
                    f"{self.name} got a {type(grad).__name__} as gradient", "not_tensor"
                )
        try:
            if self.border is None:
                found = self._run_plain(grads, create_graph, retain)
            else:
                found = self._run_bordered(self.border, grads, create_graph, retain)
        except Exception as error:
            self.culprit, translated = explained(error, self.roots)
            if translated is error:
                raise
            raise translated from error
        # All of them are asked about before one is copied: the copy would make the other one of two
        # leaves with the same gradient its only holder, and which one it is should not matter.
        places = [
            place
            for place, parent in enumerate(self.parents)
            if parent.__class__ is Leaf and found[place] is not None
        ]
        alone = [is_alone(found, place) for place in places]
        for place, is_own in zip(places, alone, strict=True):
            leaf: Any = self.parents[place]
            found[place] = owned(found[place], leaf.variable, is_own)
        return found

    def _run_plain(self, grads: list[Any], create_graph: bool, retain: bool) -> list[Any]:
        if self._edges is None:  # the next pass over a retained graph uses them again
            self._edges = (
                [GradientEdge(*place) for place in self.roots],
                [GradientEdge(*place) for place in (*self.exits, *self.captures)],
            )
        starts, ends = self._edges
        if len(grads) > 1:  # the only root of a stage has a gradient, or the stage does not run
            starts = [edge for edge, grad in zip(starts, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        return list(run_plain(starts, grads, ends, retain, create_graph))

    def _run_bordered(
        self, border: Border, grads: list[Any], create_graph: bool, retain: bool
    ) -> list[Any]:
        starts, values = [], []
        fed: dict[Place, Any] = {}
        for place, grad in zip(self.roots, grads, strict=True):
            if grad is None:
                continue
            if is_end(place[0]):
                fed[place] = grad  # it is an exit as well: there is nothing to run
            else:
                starts.append(GradientEdge(*place))
                values.append(grad)
        taken: dict[Place, Any] = {}
        if starts:
            taken = run_bordered(border, starts, values, retain, create_graph)
        for place, grad in fed.items():
            taken[place] = plus(taken[place], grad) if place in taken else grad
        own = [place for place in self.exits if place in self.own and place in taken]
        if own:
            found = run_hooks(own, [taken[place] for place in own], create_graph)
            taken.update(zip(own, found, strict=True))
        return [taken.get(place) for place in (*self.exits, *self.captures)]


class EndEntry(Node):
    """An end of the graph that was sent, or is a root: checks a gradient from outside.

    A leaf, or a received tensor that nothing observes: there is no torch node to run.
    """

    __slots__ = ("_dtype", "_leaf", "_shape")
    work = 0.0

    def __init__(self, port: Port, end: Node, leaf: Leaf | None) -> None:
        self._shape, self._dtype = port.shape, port.dtype
        self._leaf = leaf
        self.parents = (end,)
        self.shape, self.dtype, self.hooks = (), None, None

    @property
    def name(self) -> str:
        """What torch calls such an end."""
        return "ReceivedBackward" if self._leaf is None else "AccumulateGrad"

    def run(self, grad: Any, create_graph: bool, retain: bool) -> Sequence[Any]:
        """Pass the gradient on; a leaf gets it in memory of its own."""
        if not isinstance(grad, torch.Tensor) or grad.shape != self._shape:
            what = getattr(grad, "shape", type(grad).__name__)
            kind = "tensor" if self._leaf is None else "leaf"
            raise GradError(
                f"a gradient of shape {what} does not fit a {kind} of shape {self._shape}", "shape"
            )
        if grad.dtype is not self._dtype:
            grad = grad.to(self._dtype)
        return (grad if self._leaf is None else owned(grad, self._leaf.variable, False),)


class Accumulation(LastStep):
    """The nodes of leaves that have hooks: run once, all together, on the sums."""

    __slots__ = ("_nodes",)
    name = "AccumulateGrad"
    leaves: list[Any]

    def __init__(self) -> None:
        self.leaves = []
        self._nodes: list[Any] = []  # keeps them, and so their hooks
        self.parents, self.shape, self.dtype, self.hooks = (), (), None, None

    @property
    def outputs(self) -> int:  # type: ignore[override]
        """The number of slots."""
        return len(self.leaves)

    def add(self, leaf: Leaf, node: Any) -> Part:
        """Return what feeds the node of a leaf."""
        self.leaves.append(leaf)
        self._nodes.append(node)
        return Part(self, len(self.leaves) - 1, (), None)

    def finish(self, grads: Sequence[Any], create_graph: bool) -> Sequence[Any]:
        """Run the nodes of the leaves that have got a gradient."""
        found = list(grads)
        fed = [place for place, grad in enumerate(grads) if grad is not None]
        leaves = [self.leaves[place].variable for place in fed]
        # The tensors themselves, not detached ones: torch copies what others hold, and tells by
        # the references to the tensor, not to its memory.
        given = [grads[place].detach() if create_graph else grads[place] for place in fed]
        made = run_leaves(leaves, given)
        for place, gradient in zip(fed, made, strict=True):
            if not create_graph:
                found[place] = gradient
            elif not torch.equal(gradient, grads[place]):
                raise GradError(
                    "a hook of an AccumulateGrad node, perhaps of DistributedDataParallel, has "
                    "changed a gradient; it cannot be recorded with create_graph=True",
                    "hook",
                )
        return found


class Captured(Node):
    """A sink for the gradient of an inner tensor that was asked for."""

    __slots__ = ()
    name = "capture"
    work = 0.0

    def __init__(self) -> None:
        self.parents, self.shape, self.dtype, self.hooks = (), (), None, None


def is_end(node: Any) -> bool:
    """Tell whether a torch graph ends at a node: at a leaf, or at received tensors."""
    return node.__class__ is ACCUMULATE or node.__class__ is RECEIVED


def owned(gradient: torch.Tensor, variable: torch.Tensor, alone: bool) -> torch.Tensor:
    """Return a leaf's gradient in memory that nobody else holds, in the order of the leaf's.

    `a + b` gives both leaves the same tensor; torch's AccumulateGrad copies where that shows.
    """
    if gradient.requires_grad:
        return gradient if alone else gradient.clone()
    if gradient.layout is not torch.strided:
        if not alone or gradient.layout is not torch.sparse_coo:
            return gradient.clone()
        dense = gradient._indices().is_contiguous() and gradient._values().is_contiguous()
        return gradient if dense else gradient.clone()
    strides = variable.stride() if variable.layout is torch.strided else None
    is_dense = strides is not None and span(variable.shape, strides) == variable.numel()
    if alone and (gradient.stride() == strides if is_dense else gradient.is_contiguous()):
        return gradient
    if is_dense:
        return torch.empty_like(variable, dtype=gradient.dtype).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


# ── condensing ──────────────────────────────────────────────────────────────────────────────────


class Condensed:
    """The stages of a torch graph, and what stands for each port in a pass."""

    def __init__(self, roots: Sequence[Node], keep: bool) -> None:
        self.roots = list(roots)  # of the pass, ports among them: they keep the graph alive
        self.keep = keep  # whether gradients of leaves are for the context
        self.reducers = keep and may_have_reducers()
        self.stands: dict[Node, Node] = {}  # entries: roots, and parents of SendNodes
        self.wanted: dict[Node, Node] = {}  # what derivatives are asked for by
        self.leaves: dict[Any, Leaf] = {}  # by torch's node
        self.accumulation = Accumulation()
        self.last: dict[Any, Part] = {}  # leaves that end there, by torch's node
        self.received: dict[Place, Part] = {}  # received tensors
        # Those of them that count as ends without hooks.
        self.unobserved: set[Place] = set()
        # Received tensors that went back as they were, which nothing here observes: by edge and
        # place. Their gradients need not enter the graph, see `dist.backward.loops`.
        self.looping: dict[tuple[int, int], Port] = {}

    def leaf(self, node: Any) -> Leaf:
        """Return the sink of a leaf."""
        leaf = self.leaves.get(node)
        if leaf is None:
            leaf = self.leaves[node] = Leaf(node.variable)
            observed = self.keep and node_hooks.possible and leaf.observe(node)
            if observed or self.reducers:
                self.last[node] = self.accumulation.add(leaf, node)
        return leaf

    def end(self, place: Place) -> Node:
        """Return where gradients end: a leaf's sink, the hooks of its node, a received tensor."""
        node, number = place
        if node.__class__ is ACCUMULATE:
            leaf = self.leaf(node)
            return self.last.get(node) or leaf
        part = self.received.get(place)
        if part is None:
            part = self.received[place] = Part(node.end, node.places[number], (), None)
        return part

    def is_simple(self, place: Place) -> bool:
        """Tell whether an end has no hooks: its gradients may come one by one, in any order."""
        node, number = place
        if node.__class__ is ACCUMULATE:
            return not self.leaf(node).hooked
        if node.__class__ is not RECEIVED or is_observed(node, number):
            return False
        self.unobserved.add(place)
        return True

    def enter_end(self, port: Port) -> bool:
        """Let gradients for a port go to an end right away, if it is one and no hook runs there."""
        if port not in self.stands:
            place = port.place
            if not is_end(place[0]) or not (self.is_simple(place) or place[0] in self.last):
                return False
            leaf = self.leaf(place[0]) if place[0].__class__ is ACCUMULATE else None
            self.stands[port] = EndEntry(port, self.end(place), leaf)
        return True

    def send(self, send: SendNode) -> SendNode:
        """Return a sending end without ports."""
        if not send.loops:
            stands = self.stands.get
            parents = [stands(node, node) for node in send.parents]  # type: ignore[arg-type]
            return SendNode(send.edge, send.peer, send.incarnation, tuple(parents))
        parents, loops = list(send.parents), send.loops
        for place, port in enumerate(parents):
            if isinstance(port, Port):
                if (send.edge, place) in self.looping:
                    parents[place] = Part(port.joint, port.index, (), None)
                else:
                    parents[place] = self.stands[port]
                    loops &= ~(1 << place)  # the gradient has to come round, for its observers
        return SendNode(send.edge, send.peer, send.incarnation, tuple(parents), loops)

    def fits(self, keep: bool) -> bool:
        """Tell whether nothing has got its first hook, or lost its last one, since."""
        if keep is not self.keep or (keep and may_have_reducers()) is not self.reducers:
            return False
        if any(port.observed for port in self.looping.values()):
            return False
        if any(is_observed(node, number) for node, number in self.unobserved):
            return False
        return all(leaf.fits() for leaf in self.leaves.values())


def condense(
    roots: Sequence[Node], sends: Mapping[int, SendNode], captures: Sequence[Node], keep: bool
) -> Condensed:
    """Make stages of everything that ports among roots and parents of SendNodes reach.

    `keep`: gradients of leaves are for the context, and hooks of their nodes run.
    """
    made = Condensed(roots, keep)
    # All roots are fed at once, so they are one entry.
    entries = [_ports(roots)]
    for edge, send in sends.items():
        ports = _ports(send.parents)
        if send.loops and ports:
            for place, port in enumerate(send.parents):
                if not (send.loops >> place & 1 and isinstance(port, Port)):
                    continue
                if not port.observed and port not in captures:
                    made.looping[edge, place] = port
                    ports.remove(port)
        entries.append(ports)
    # What is an end itself is no entry: no torch node depends on it.
    entries = [[port for port in ports if not made.enter_end(port)] for ports in entries]
    entries = [ports for ports in entries if ports]
    inner: Mapping[Any, int] = {}
    if entries:
        graph = _Graph(made, entries)
        graph.make_stages(_ports(captures))
        inner = graph.sets
    for port in _ports(captures):
        if port in made.wanted:
            continue
        node, number = port.place
        if is_end(node) and (node in inner or port in made.stands):
            made.wanted[port] = (
                made.leaf(node) if node.__class__ is ACCUMULATE else made.end((node, number))
            )
        else:
            made.wanted[port] = Captured()  # not reached: nothing is ever captured there
    return made


def _ports(nodes: Iterable[Node | None]) -> list[Port]:
    return [node for node in nodes if isinstance(node, Port)]


class _Graph:
    """A torch graph while it is condensed."""

    def __init__(self, made: Condensed, entries: Sequence[Sequence[Port]]) -> None:
        self.made, self.entries = made, entries
        self.nexts: dict[Any, Any] = {}  # node → its edges
        self.sets: dict[Any, int] = {}  # node → the entries it depends on, a bit for each
        self.stages: dict[int, Stage] = {}
        self.parts: dict[Place, Part] = {}  # places that stages are fed at

    def make_stages(self, captures: Sequence[Port]) -> None:
        """Make the stages, and what stands for the ports."""
        if not self._make_apart(captures):
            self._walk()
            self._make_several(captures)

    def _make_apart(self, captures: Sequence[Port]) -> bool:
        """Make one stage for each entry; False if two of them meet before the ends of the graph.

        The usual case: one call, or calls that do not use each other's results. Every edge is
        looked at once, and no sets are needed. A transformer takes two thirds of the time
        (`benchmarks/peers`, local.condense).
        """
        made = self.made
        owners: dict[Any, int] = {}  # node → its entry
        ends: dict[Place, int] = {}  # end → the first entry that reaches it
        found: list[tuple[Sequence[Port], list[Any], dict[Place, None]]] = []
        for number, ports in enumerate(self.entries):
            leaving: dict[Place, None] = {}
            reached: list[Any] = []
            for port in ports:
                node = port.place[0]
                if is_end(node):  # a root, with hooks
                    leaving[port.place] = None
                elif node not in owners:
                    owners[node] = number
                    reached.append(node)
                elif owners[node] != number:
                    return False
            for node in reached:  # grows while it is read
                for place in node.next_functions:
                    behind = place[0]
                    # `is_end`, written out: this runs once per edge of the graph.
                    kind = behind.__class__
                    if kind is ACCUMULATE or kind is RECEIVED:
                        leaving[place] = None
                    elif behind not in owners:
                        if behind is not None:
                            owners[behind] = number
                            reached.append(behind)
                    elif owners[behind] != number:
                        return False
            for place in leaving:
                if ends.setdefault(place, number) != number and not made.is_simple(place):
                    return False
            found.append((ports, reached, leaving))
        parents = [[made.end(place) for place in leaving] for _, _, leaving in found]
        if any(made.leaf(node).hooked for node in made.last):
            return False
        inner: dict[int, dict[Place, Node]] = {}
        if captures:
            self.sets = {**owners, **{place[0]: number for place, number in ends.items()}}
            inner = self._captures(captures)
        for number, (ports, nodes, leaving) in enumerate(found):
            stage = Stage()
            for port in ports:
                if port not in made.stands:
                    made.stands[port] = Part(stage, len(stage.roots), (), None)
                    stage.roots.append(port.place)
            stage.exits = list(leaving)
            stage.parents = tuple(parents[number])
            if number in inner:
                stage.captures = list(inner[number])
                stage.parents += tuple(inner[number].values())
            # Without parents, nothing behind it needs a gradient.
            stage.work = _work(nodes, stage.exits) if stage.parents else 0.0
        return True

    def _walk(self) -> None:
        """Find all nodes, and the entries that each depends on."""
        nexts, sets = self.nexts, self.sets
        needs: dict[Any, int] = {}
        for number, ports in enumerate(self.entries):
            for port in ports:
                node = port.place[0]
                sets[node] = sets.get(node, 0) | 1 << number
                needs[node] = 0
        reached = list(needs)
        reach = reached.append
        for node in reached:  # grows while it is read
            kind = node.__class__
            if kind is ACCUMULATE or kind is RECEIVED:
                nexts[node] = ()
                if kind is ACCUMULATE:
                    self.made.leaf(node)
                continue
            nexts[node] = edges = node.next_functions
            for behind, _ in edges:
                if behind is not None:
                    if behind in needs:
                        needs[behind] += 1
                    else:
                        needs[behind] = 1
                        reach(behind)
        # A node's set is known when the sets of all nodes before it are.
        ready = [node for node in reached if not needs[node]]
        while ready:
            node = ready.pop()
            known = sets[node]
            for behind, _ in nexts[node]:
                if behind is not None:
                    sets[behind] = sets.get(behind, 0) | known
                    needs[behind] -= 1
                    if not needs[behind]:
                        ready.append(behind)

    def _make_several(self, captures: Sequence[Port]) -> None:
        made, sets, last = self.made, self.sets, self.made.last
        for ports in self.entries:
            for port in ports:
                if port not in made.stands:
                    made.stands[port] = self._part(port.place)
        exits: dict[int, dict[Place, Any]] = {}  # set → exit → whether it ends that stage itself
        makers: dict[int, dict[Any, list[tuple[int, Place]]]] = {}
        bordered: set[int] = set()
        members: dict[int, list[Any]] = {}
        current, leaving = 0, exits.get(0, {})  # of the stage of the last node
        inside: Any = None
        for node, edges in self.nexts.items():
            known = sets[node]
            if not edges:
                if not is_end(node):
                    members.setdefault(known, []).append(node)
                continue
            if known != current:
                current = known
                inside = members.setdefault(known, []).append
                leaving = exits.setdefault(known, {})
            inside(node)
            for index, place in enumerate(edges):
                behind = place[0]
                # `is_end`, written out: this runs once per edge of the graph.
                kind = behind.__class__
                ends = kind is ACCUMULATE or kind is RECEIVED
                if not ends and (behind is None or sets[behind] == known):
                    continue
                if behind in last:
                    # Its node is not run here. A capture would call the hooks of the tensor, which
                    # are called with those of the node.
                    leaving[place] = not made.leaf(behind).hooked
                    if not leaving[place]:
                        bordered.add(known)
                elif ends and (sets[behind] == known or made.is_simple(place)):
                    leaving[place] = True
                else:
                    leaving[place] = False
                    bordered.add(known)
                makers.setdefault(known, {}).setdefault(node, []).append((index, place))
        for leaving in list(exits.values()):
            for place, ends in leaving.items():
                if not ends and place[0] not in last:
                    self._part(place)
        # Ends that are fed from outside of their stage are exits of it, too.
        for place in self.parts:
            if is_end(place[0]):
                exits.setdefault(sets[place[0]], {})[place] = True
        wanted = self._captures(captures)
        for known in {**exits, **wanted}:
            leaving, inner = exits.get(known, {}), wanted.get(known, {})
            if not leaving and not inner:
                if known in self.stages:
                    self.stages[known].work = 0.0  # nothing behind it needs a gradient
                continue
            stage = self._stage(known)
            stage.exits = list(leaving)
            stage.captures = list(inner)
            stage.parents = (
                *[self._parent(place, ends) for place, ends in leaving.items()],
                *inner.values(),
            )
            nodes = members.get(known, [])
            if known in bordered:
                low = [node for node in nodes if node._sequence_nr() < 2]
                stage.border = Border(stage.exits, makers[known], low, stage.captures)
                stage.own = frozenset(
                    place
                    for place, ends in leaving.items()
                    if ends and place[0] not in last and not made.is_simple(place)
                )
            else:
                stage.work = _work(nodes, stage.exits)

    def _captures(self, captures: Sequence[Port]) -> dict[int, dict[Place, Node]]:
        """Return for each set the inner places whose gradients are asked for, with their sinks."""
        found: dict[int, dict[Place, Node]] = {}
        for port in captures:
            node, number = port.place
            if node in self.sets and not is_end(node):
                sinks = found.setdefault(self.sets[node], {})
                self.made.wanted[port] = sinks.setdefault((node, number), Captured())
        return found

    def _stage(self, known: int) -> Stage:
        stage = self.stages.get(known)
        if stage is None:
            stage = self.stages[known] = Stage()
        return stage

    def _part(self, place: Place) -> Part:
        """Return what feeds a place of a stage."""
        part = self.parts.get(place)
        if part is None:
            stage = self._stage(self.sets[place[0]])
            part = self.parts[place] = Part(stage, len(stage.roots), (), None)
            stage.roots.append(place)
        return part

    def _parent(self, place: Place, ends: bool) -> Node:
        if not ends and place[0] not in self.made.last:
            return self._part(place)
        return self.made.end(place)


# ── how long it could take ──────────────────────────────────────────────────────────────────────

_NODES: Final = 64  # of a stage that may run on the loop
_NODE: Final = 5000.0  # nanoseconds to run any node at all
_ELEMENT: Final = 2.0  # for an element of a gradient
_PRODUCT: Final = 0.1  # for one term of both gradients of a product of matrices
_PRODUCTS: Final = re.compile(r"Mm|Mv|Matmul|Linear|Dot|Embedding")
_LONG: Final = re.compile(r"Conv|Linalg|Svd|Cholesky|Solve|Inverse|Rnn|Lstm|Attention|Fft")


_in_threads = False


def always_in_threads() -> None:
    """Let no stage of this process run on a loop.

    For programs whose hooks make blocking calls: torch does not show the hooks of inner tensors, so
    that a small stage with one would run on the loop, and wait for itself.
    """
    global _in_threads
    _in_threads = True


def _work(nodes: Sequence[Any], exits: Sequence[Place]) -> float:
    """Estimate the nanoseconds of a stage; infinite if code of the user's could be in it."""
    if _in_threads or len(nodes) > _NODES:
        return inf
    total, products, longest = 0.0, 0.0, 1
    for node, _ in exits:
        if node.__class__ is ACCUMULATE:
            variable = node.variable
            if variable._backward_hooks:
                return inf
            longest = max(longest, *variable.shape, 1)
    for node in nodes:
        if isinstance(node, torch._C._FunctionBase):
            return inf
        name = node.name()
        if _LONG.search(name):
            return inf
        elements = 0
        for metadata in node._input_metadata:
            shape = metadata.shape
            elements += prod(shape)
            longest = max(longest, *shape, 1)
        total += _NODE + _ELEMENT * elements
        if _PRODUCTS.search(name):
            products += elements
    return total + _PRODUCT * products * longest


# ── what went wrong ─────────────────────────────────────────────────────────────────────────────


def explained(error: Exception, roots: Sequence[Place]) -> tuple[str, Exception]:
    """Return the torch node that raised, as far as it can be known, and the error to show."""
    text = str(error)
    first = roots[0][0].name()
    if isinstance(error, GradError):
        return first, error
    if "backward through the graph a second time" in text or "have already been freed" in text:
        name = _freed_node(roots) or first
        return name, GradError(
            f"the values that {name} saved for the backward pass were already freed by an earlier "
            "pass; give the earlier pass retain_graph=True to run a second one",
            "freed",
        )
    name = _raiser(error) or _named(text) or first
    if "modified by an inplace operation" in text:
        return name, GradError(f"{text} Write into a copy instead.", "modified")
    if "use_reentrant" in text or "Checkpointing is not compatible" in text:
        return name, GradError(
            "a reentrant checkpoint cannot run in the pass of a context; "
            "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            "reentrant",
        )
    return name, error


def _freed_node(roots: Sequence[Place]) -> str:
    """Return the first torch node whose saved values are gone."""
    reached = dict.fromkeys(node for node, _ in roots)
    stack = list(reached)
    for node in stack:  # grows while it is read
        if _is_freed(node):
            name: str = node.name()
            return name
        for behind, _ in node.next_functions:
            if behind is not None and behind not in reached:
                reached[behind] = None
                stack.append(behind)
    return ""


def _is_freed(node: Any) -> bool:
    names = [name for name in dir(node) if name.startswith(("_saved_", "saved_tensors"))]
    for name in names:
        try:
            getattr(node, name)
        except RuntimeError as error:
            if "freed" in str(error) or "second time" in str(error):
                return True
        except Exception:
            continue
    return False


def _raiser(error: Exception) -> str:
    """Return the Function in whose `backward` an error was raised, from its traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, torch._C._FunctionBase) and frame.f_code.co_name == "backward":
                return str(value.name())
    return ""


def _named(text: str) -> str:
    """Return the torch node that an error of the engine names."""
    found = re.search(r"\b(\w+Backward\d*)\b", text)
    return found.group(1) if found else ""
