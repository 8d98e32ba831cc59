"""One reverse pass, as a state machine without I/O: feed gradients in, drain what became ready.

    sweep = Sweep(entries)            count the contributions to every node the entries reach
    sweep.feed(entry, gradient)       each entry is fed exactly once; None says "no gradient"
    for sink, gradient in sweep.drain(): ...

A node runs when every contribution is in. Contributions may be None; a node that only got None
passes None on without computing, so an unused branch costs nothing and never blocks. Nodes
without parents (leaves, received tensors) are sinks: they come out of `drain` with the sum of
their gradients.

A local backward pass feeds its roots and drains once. A distributed one feeds what peers send,
in whatever order, and drains after each message. Work that no peer waits for is deferred: rules
that only give gradients of leaves run in `drain_late`, after the gradients for peers have been
sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from aiograd.autograd.array import Gradient
from aiograd.autograd.grad_mode import enable_grad, recording
from aiograd.autograd.graph import Accumulate, Joint, Node, Part
from aiograd.autograd.handed_out import WATCHES, check_all
from aiograd.autograd.op import OPS
from aiograd.autograd.sparse import mask
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.errors import GradError

_ndarray = np.ndarray
# Looked up once: the loop below runs per node, and global names cost less than attributes.
_references = sys.getrefcount
_add: Any = np.add.reduce
_NOBODY: frozenset[Node] = frozenset()

# A node in two halves, each its rules and the parents they are for: one to run, one to defer.
Half = tuple[list[Any], list[Node | None]]
Halves = Mapping[Node, tuple[Half, Half]]
OnSink = Callable[[Node, Gradient], Gradient]


def contributions(entries: Iterable[Node]) -> dict[Node, int]:
    """Count the contributions to each node that the entries reach, themselves included."""
    # Counted per edge, not per node: `x * x` contributes to x twice, and an entry is fed once more
    # than its consumers contribute.
    need: dict[Node, int] = {}
    reached: list[Node] = []  # grows while it is read
    for node in entries:
        if node in need:
            need[node] += 1
        else:
            need[node] = 1
            reached.append(node)
    reach = reached.append
    # Breadth-first over a list that grows; a recursion would end at Python's limit in a long chain.
    for node in reached:
        for parent in node.parents:
            if parent is not None:
                if parent in need:
                    need[parent] += 1
                else:
                    need[parent] = 1
                    reach(parent)
    return need


class Sweep:
    """The state of one reverse pass over the part of the tape that `entries` reach."""

    def __init__(
        self,
        entries: Iterable[Node],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        capture: Iterable[Node] = (),
        counts: Mapping[Node, int] | None = None,  # of `contributions`, if they are known
        halves: Halves | None = None,  # nodes of which a part is deferred
    ) -> None:
        if WATCHES:
            check_all()
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.captured: dict[Node, Gradient] = {}  # gradients of the nodes asked for in `capture`
        self._capture = frozenset(capture) if capture else _NOBODY
        # Contributions still missing, per node. `counts` belong to a topology that the next pass
        # over the same graph uses again, so they are copied.
        self._need = contributions(entries) if counts is None else dict(counts)
        self._grads: dict[Node, Gradient] = {}  # sums so far; a list of slots for a Joint
        # Sums that this sweep allocated and may add to in place. A first contribution is not one:
        # the rule may have given the same array to several parents, as that of `a + b` does.
        self._ours: set[Node] = set()
        # Nodes to run, each followed by its gradient; a flat stack spares a tuple per node. The
        # order does not matter: a node comes here once, when nothing is missing.
        self._ready: list[Any] = []
        self._sinks: list[tuple[Node, Gradient]] = []
        self._halves = halves
        self.late: list[tuple[Any, Any, Half]] = []  # nodes, their gradients, and what waits
        self._on_sink: OnSink | None = None  # of the drain that is running
        self.failed: Node | None = None  # the node whose rule or hook raised

    def __contains__(self, node: Node) -> bool:
        return node in self._need

    @property
    def complete(self) -> bool:
        """True when no node waits for a contribution."""
        return not self._need

    @property
    def waiting(self) -> list[tuple[Node, int]]:
        """The nodes that still wait, with the number of contributions each one misses."""
        return list(self._need.items())

    def feed(self, node: Node, grad: Gradient) -> None:
        """Give an entry its gradient (a list with one slot per output for a `Joint`)."""
        # Gradients from outside (a user, a peer) have any type; those of rules are checked in the
        # loop. A Joint is fed a list of slots, which its own rule checks.
        if (
            grad is not None
            and not isinstance(node, Joint)
            and (self.create_graph or not fits(grad, node))
        ):
            grad = conform(grad, node, node, self.create_graph)
        self._deposit(node, grad)

    def _deposit(self, node: Node, grad: Gradient) -> None:
        # Popped and put back where others are missing: most nodes have one consumer, and then this
        # is the only access.
        missing = self._need.pop(node)
        if missing == 1:
            if node in self._grads:
                grad = self._total(node, grad)
            self._ready += (node, grad)
        else:
            self._need[node] = missing - 1
            if grad is not None:
                self._add(node, grad)

    def _add(self, node: Node, grad: Gradient) -> None:
        """Note a contribution to a node that still waits for others."""
        old = self._grads.get(node)
        if old is None:
            self._grads[node] = grad
        elif isinstance(node, Joint):
            raise AssertionError("a Joint is fed once, or through its parts")
        elif node in self._ours:
            # `old` is a sum of ours that nobody else has seen.
            old += grad
        else:
            # Sums of sparse arrays and of recorded Tensors are new objects every time; only a plain
            # array can be added to in place.
            total = old + grad if grad.__class__ is _ndarray else plus(old, grad)
            self._grads[node] = total
            if total.__class__ is _ndarray:
                self._ours.add(node)

    def _total(self, node: Node, grad: Gradient) -> Any:
        """What a node has got so far, and its last contribution."""
        if grad is not None:
            self._add(node, grad)
        self._ours.discard(node)
        return self._grads.pop(node)

    def drain(self, on_sink: OnSink | None = None) -> list[tuple[Node, Gradient]]:
        """Run everything that is ready, and return the sinks that are now known.

        `on_sink` is shown each sink, and returns the gradient to give back. It may feed other
        entries: what they make ready runs in the same drain.
        """
        if not self._ready:
            sinks, self._sinks = self._sinks, []
            return sinks
        # Rules and hooks that get Tensors are recorded with create_graph, and only then. Set per
        # drain and not per node, and reset even if a hook raises.
        token = recording.set(self.create_graph)
        self._on_sink = on_sink
        try:
            self._run_ready()
        finally:
            recording.reset(token)
            self._on_sink = None  # it may refer to this sweep, and would keep it alive
        sinks, self._sinks = self._sinks, []
        return sinks

    def drain_late(self) -> list[tuple[Node, Gradient]]:
        """Run the deferred halves, and return the leaves that are now known."""
        token = recording.set(self.create_graph)
        try:
            self._run_late()
            self._run_ready()
        finally:
            recording.reset(token)
        sinks, self._sinks = self._sinks, []
        return sinks

    @np.errstate(all="ignore")  # an infinite slope is a value, not worth a warning
    def _run_ready(self) -> None:
        """The inner loop of every backward pass; flat, because its cost is paid once per node."""
        ready, grads, need = self._ready, self._grads, self._need
        create_graph, retain, capture = self.create_graph, self.retain_graph, self._capture
        pop, take, halves = ready.pop, need.pop, self._halves
        node: Any = None
        try:
            while ready:
                grad = pop()
                node = pop()
                if node.hooks is not None and grad is not None:
                    grad = _run_hooks(node.hooks, grad, node, create_graph)
                parents = node.parents
                if not parents:
                    # `_end` counts references to find out whether the sink's gradient is shared.
                    # The names of the last round may still hold it.
                    contributions = part = None
                    self._end(node, grad)
                    continue
                # Before the node runs: `captured` is the gradient of the node's output, hooks
                # included.
                if capture and node in capture:
                    self.captured[node] = grad
                # Nothing to compute. None is passed on all the way, because a node behind it may
                # wait for this contribution to be complete.
                if grad is None or node.__class__ is Part:
                    self._pass_on(node, grad)
                    continue
                if halves is not None and node in halves:
                    (rules, parents), later = halves[node]
                    # Retained in any case: the deferred half reads the same saved values, and frees
                    # them.
                    contributions = node.run(grad, create_graph, True, rules)
                    self.late.append((node, grad, later))
                else:
                    contributions = node.run(grad, create_graph, retain)
                index = 0
                for parent in parents:
                    part = contributions[index]
                    index += 1
                    if parent is None:
                        continue
                    # Nearly every gradient fits. Dtypes of numbers are singletons, so identity is
                    # enough to be sure; where it fails, `conform` looks again. Tensors
                    # (create_graph) always take that way.
                    if part is not None and (
                        part.__class__ is not _ndarray
                        or part.shape != parent.shape
                        or part.dtype is not parent.dtype
                    ):
                        part = conform(part, parent, node, create_graph)
                    # `_deposit`, written out: this runs once per edge of the graph.
                    missing = take(parent)
                    if missing == 1:
                        if parent in grads:
                            part = self._total(parent, part)
                        ready += (parent, part)
                    else:
                        need[parent] = missing - 1
                        if part is not None:
                            self._add(parent, part)
        except Exception:
            # For the engine, which tells all workers the operation that failed.
            self.failed = node
            raise

    @np.errstate(all="ignore")
    def _run_late(self) -> None:
        """Run the deferred halves; they only contribute to leaves, which are sinks."""
        late, self.late = self.late, []
        node: Any = None
        try:
            for node, grad, (rules, parents) in late:
                contributions = node.run(grad, self.create_graph, self.retain_graph, rules)
                for parent, part in zip(parents, contributions, strict=True):
                    if parent is not None:
                        if part is not None and (self.create_graph or not fits(part, parent)):
                            part = conform(part, parent, node, self.create_graph)
                        self._deposit(parent, part)
        except Exception:
            self.failed = node
            raise

    def _end(self, node: Node, grad: Gradient) -> None:
        """Note the gradient of a sink; a leaf's in an array that nobody else holds.

        `.grad` is written to, by later passes and by users, so no other gradient may share its
        memory. A copy of every leaf's gradient would be safe and costs as much as many a rule; so
        the sweep copies only what it cannot prove to be its own.
        """
        if grad is not None and node.__class__ is Accumulate:
            leaf = node.variable
            if leaf._hooks:
                # Hooks of a leaf sit on the tensor and run here, on the sum: its node may be a new
                # one in every graph.
                grad = _run_hooks(leaf._hooks.values(), grad, node, self.create_graph)
            if leaf.raw.__class__ is not _ndarray:
                grad = _in_layout_of(leaf.raw, grad)
            if grad.__class__ is _ndarray:
                # A view shows memory of another array, often read-only (the gradient of a sum).
                # Memory in odd order would slow down optimisers and messages. Else the number of
                # references tells whether a rule, a parent or a caller still holds the array.
                if grad.base is not None or not grad.flags.forc or self._is_shared(grad):
                    grad = grad.copy()
            elif isinstance(grad, np.generic):
                # Rules on arrays without axes give numpy scalars; users expect an array in `.grad`.
                grad = np.asarray(grad)
            elif isinstance(grad, Tensor):
                grad = own(grad)
            # A sparse array: the same two questions.
            elif self._is_shared(grad) or not grad.contiguous:
                grad = grad.copy()
        if self._capture and node in self._capture:
            self.captured[node] = grad
        if self._on_sink is not None:
            grad = self._on_sink(node, grad)
        self._sinks.append((node, grad))

    def _is_shared(self, grad: Gradient) -> bool:
        """Return whether anything but this sweep refers to an array.

        A method, so that `_Probe` measures the count on the very same path.
        """
        return _references(grad) > _ALONE

    def _pass_on(self, node: Any, grad: Gradient) -> None:
        """Pass on the gradient of one of several outputs, or None where there is none."""
        if grad is not None:
            joint = node.joint
            slots = self._grads.get(joint)
            if slots is None:
                # A Function or a received message with one output: no slots to fill.
                if joint.outputs == 1 and self._need[joint] == 1:
                    del self._need[joint]
                    self._ready += (joint, [grad])
                    return
                slots = self._grads[joint] = [None] * joint.outputs
            old = slots[node.index]
            slots[node.index] = grad if old is None else plus(old, grad)
        # The gradient of a Part is in its slot already; what is passed on is that one contribution
        # less is missing.
        for parent in node.parents:
            if parent is not None:
                self._deposit(parent, None)


def plus(old: Gradient, new: Gradient) -> Gradient:
    """Return the sum of two gradients; they may be tensors of another library."""
    try:
        return old + new
    except RuntimeError:
        # Libraries add a sparse tensor to a dense one, but not always a dense one to a sparse one.
        return new + old


def own(grad: Tensor) -> Tensor:
    """Return a recorded gradient with memory of its own, and a node of its own for hooks."""
    # Recorded, since a second derivative goes through the copy; a plain copy would cut the graph.
    with enable_grad():
        copied: Tensor = OPS["copy"](grad)
    return copied


def _in_layout_of(leaf: Any, grad: Gradient) -> Any:
    """A sparse leaf gets a sparse gradient, at the leaf's positions if it came as a dense one."""
    if isinstance(grad, Tensor) and not grad.is_sparse:
        return mask(grad, leaf)
    return leaf.mask(grad) if grad.__class__ is _ndarray else grad


def _run_hooks(hooks: Iterable[Any], grad: Gradient, node: Node, create_graph: bool) -> Any:
    # A hook may write to the gradient it is shown, and other nodes may hold the same array; a numpy
    # scalar cannot be written to at all. So hooks get a copy.
    if isinstance(grad, Tensor):
        grad = own(grad)
    else:
        grad = np.array(grad) if isinstance(grad, np.generic) else grad.copy()
    # A copy of the list: a hook may remove itself or register another one.
    for hook in list(hooks):
        given = grad if isinstance(grad, Tensor) else wrap(grad)
        result = hook(given)
        if result is not None:
            # A hook may return anything; the rule of the node must not see that.
            grad = conform(result, node, node, create_graph)
    return grad


def fits(grad: Gradient, target: Node) -> bool:
    """Return whether a gradient is a plain array of the shape and dtype it should have."""
    return grad.__class__ is _ndarray and grad.shape == target.shape and grad.dtype is target.dtype


def conform(grad: Gradient, target: Node, source: Node, create_graph: bool = False) -> Any:
    """Bring a gradient to the shape and dtype of what it is the gradient of.

    The one place where broadcasting and type promotion of the forward pass are undone.
    """
    if target.dtype is None:
        return grad  # a node of another library's graph, which does that by itself
    if create_graph:
        if not isinstance(grad, Tensor):
            grad = wrap(grad if hasattr(grad, "dtype") else np.asarray(grad))
    elif grad.__class__ is not _ndarray:
        if isinstance(grad, Tensor):
            grad = grad.raw
        # A rule may return a Python number.
        elif not hasattr(grad, "dtype"):
            grad = np.asarray(grad)
    shape = grad.shape
    if shape != target.shape:
        # The two common cases, found without building lists of axes.
        if grad.__class__ is _ndarray and shape[1:] == target.shape:  # a bias
            grad = _add(grad, 0)
        elif grad.__class__ is _ndarray and (*shape[:-1], 1) == target.shape:  # a norm of each row
            grad = _add(grad, -1, None, None, True)
        else:
            grad = _unbroadcast(grad, target, source)
    if grad.dtype is not target.dtype and grad.dtype != target.dtype:
        if grad.dtype.kind == "c" and target.dtype.kind != "c":
            # A real input cannot move along the imaginary axis, so that part of the slope is
            # dropped; `astype` would do the same with a warning.
            grad = grad.real
        grad = grad.astype(target.dtype)
    return grad


def _unbroadcast(grad: Gradient, target: Node, source: Node) -> Any:
    """Sum over the axes that the forward pass added or stretched."""
    shape = target.shape
    extra = len(grad.shape) - len(shape)
    if extra > 0:
        grad = _summed(grad, 0 if extra == 1 else tuple(range(extra)), False)
    if grad.shape != shape and extra >= 0:
        sizes = zip(shape, grad.shape, strict=True)
        grad = _summed(grad, tuple([i for i, (n, m) in enumerate(sizes) if n == 1 != m]), True)
    # The rule itself is wrong, usually one that a user wrote: name it.
    if grad.shape != shape:
        raise GradError(
            f"{source.name} gave a gradient of shape {tuple(grad.shape)} "
            f"for an input of shape {shape}",
            "shape",
        )
    return grad


def _summed(grad: Gradient, axis: int | tuple[int, ...], keepdims: bool) -> Any:
    if grad.__class__ is _ndarray:
        return _add(grad, axis, None, None, keepdims)
    return grad.sum(axis=axis, keepdims=keepdims)


class _Probe(Sweep):
    """Takes a leaf's gradient along the usual path and counts the references to it."""

    holders: int

    def _is_shared(self, grad: Gradient) -> bool:
        self.holders = _references(grad)
        return False


def _holders_of_an_own_array() -> int:
    """Return what `_is_shared` counts if the sweep alone holds an array.

    Measured at import: how many references a call holds differs between versions of Python.
    """
    leaf = Tensor(np.ones(1), requires_grad=True).accumulator()
    probe = _Probe([leaf])
    probe.feed(leaf, np.ones(1))
    probe.drain()
    return probe.holders


_ALONE = _holders_of_an_own_array()
