"""Recorded operations: what their nodes save, and how they play it back.

A node saves arrays, not Tensors: of its result and arguments as much as its rules read
(`rules.Plan`), with the version cell of each, so that a write in between is noticed. An array is
the one its Tensor had when the operation ran; a leaf may be given another one while a graph still
needs it (several trainers, one parameter: each gets the gradients of the values it saw). With
`create_graph` the Tensors are made again, from the arrays and the nodes that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from aiograd.autograd.array import Gradient
from aiograd.autograd.graph import Hook, Joint, Node, Part, freed, modified
from aiograd.autograd.op.rules import Meta, Plan, Rule, Rules
from aiograd.autograd.tensor import Tensor, is_sparse_array, wrap
from aiograd.errors import GradError

_ndarray = np.ndarray
_new = object.__new__

Cell = list[int]  # [version]
Saved = tuple[list[Any], list[Cell], int]

_ONE = (True,)
# The cell of a saved ndarray or number. Writes of a user to a plain array are not counted, so
# they go unnoticed; the cell keeps `cells` parallel to what is saved.
_NEVER: Cell = [0]


class Operation(Protocol):
    """What recording and its nodes need of an operation (`op.Op`)."""

    name: str
    rules: tuple[Rule | None, ...]
    each: Rule | None  # one rule, called for every argument, or
    joint: Rule | None  # one rule, called once for all arguments
    plans: dict[tuple[bool, ...], Plan]  # what to save, by which arguments want a gradient

    def check_parameters(self, kwargs: dict[str, Any]) -> None:
        """Raise TypeError for parameters that a rule does not know."""

    def plan(self, wanted: tuple[bool, ...]) -> Plan:
        """Make and cache the plan for these arguments."""
        ...


class OpNode(Node):
    """A recorded operation with one output."""

    __slots__ = ("cells", "kwargs", "op", "plan", "saved", "version")  # filled by `record`

    op: Operation
    plan: Plan
    kwargs: dict[str, Any]
    saved: list[Any] | None  # [result, *arguments] as far as the rules need them; None once freed
    cells: list[Cell]  # the version cells of what is saved, that of the result last
    version: int  # their sum when it was saved: versions only grow, so any write shows in it

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.op.name

    def run(
        self, grad: Gradient, create_graph: bool, retain: bool, rules: Rules = None
    ) -> Sequence[Gradient]:
        """See `Node.run`. With `rules`, by these alone: one half of the operation's own."""
        saved = self.saved
        if saved is None:
            raise freed(self.op.name)
        cells = self.cells
        # Without cells nothing was saved as a value: there is nothing to check, to restore or to
        # free, and any number of passes may come through.
        if cells:
            # Each version only grows, so that the sum is the same exactly if no version has
            # changed. One number to compare instead of one per saved array.
            version = self.version
            for cell in cells:
                version -= cell[0]
            if version:
                raise modified(self.op.name)
            if create_graph:
                saved = self._restored(saved)
            if not retain:
                self.saved = None
        if rules is None:
            rules = self.plan.rules
        if self.kwargs or rules is None or len(saved) > 3:
            return self._run_any(grad, saved, rules)
        # One and two arguments without parameters, written out: most nodes are such. A node with
        # one argument exists because that argument wants a gradient, so its rule is never None.
        if len(saved) == 2:
            y, a = saved
            return (rules[0](grad, y, a),)
        y, a, b = saved
        first, second = rules
        return (
            None if first is None else first(grad, y, a, b),
            None if second is None else second(grad, y, a, b),
        )

    def _run_any(self, grad: Gradient, saved: list[Any], rules: Rules) -> Sequence[Gradient]:
        """Run the rules of any number of arguments, with parameters."""
        kwargs = self.kwargs
        if rules is not None:
            return [None if rule is None else rule(grad, *saved, **kwargs) for rule in rules]
        each = self.op.each
        if each is None:
            # One rule for all arguments, called once.
            assert self.op.joint is not None
            return _as_many(self.op.joint(grad, *saved, **kwargs), self)
        y, *args = saved
        return [
            None if parent is None else each(grad, y, i, *args, **kwargs)
            for i, parent in enumerate(self.parents)
        ]

    def _restored(self, saved: list[Any]) -> list[Any]:
        """Return what was saved as Tensors, so that the rules are recorded."""
        values = list(saved)
        if self.plan.keeps_result:
            # The result was made by this very node: a second derivative that reads it comes back
            # here.
            values[0] = _tensor(values[0], self, self.cells[-1])
        return _restore(self.plan, values, self.cells, self.parents)


class LightNode(Node):
    """A recorded operator of two arguments whose rules need neither of them, such as `+`.

    The same as an OpNode that saved nothing, with half the fields to fill and to clear. Operators
    on small arrays (`ops/table.py`) make these without a call in between.
    """

    __slots__ = ("op",)

    op: Operation

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.op.name

    def run(self, grad: Gradient, create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """See `Node.run`. The rules read the gradient alone, so the other arguments are None."""
        first, second = self.parents
        rule_a, rule_b = self.op.rules
        return (
            None if first is None or rule_a is None else rule_a(grad, None, None, None),
            None if second is None or rule_b is None else rule_b(grad, None, None, None),
        )


class JointOpNode(Joint):
    """A recorded operation with several outputs."""

    __slots__ = ("cells", "kwargs", "metas", "op", "plan", "saved", "version")

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    outputs: int
    shape: tuple[int, ...]
    dtype: Any

    op: Operation
    plan: Plan
    kwargs: dict[str, Any]
    cells: list[list[int]]
    version: int

    def __init__(
        self,
        op: Operation,
        plan: Plan,
        parents: tuple[Node | None, ...],
        saved: Saved,
        kwargs: dict[str, Any],
        metas: tuple[tuple[tuple[int, ...], Any], ...],
    ) -> None:
        self.op, self.plan, self.parents, self.kwargs = op, plan, parents, kwargs
        self.saved: list[Any] | None
        self.saved, self.cells, self.version = saved
        # Shape and dtype of each output: one that nobody used still needs zeros as its gradient,
        # because one rule computes with the gradients of all outputs.
        self.metas: tuple[tuple[tuple[int, ...], Any], ...] = metas
        self.outputs = len(metas)
        self.shape, self.dtype, self.hooks = (), None, None

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.op.name

    def run(self, grad: list[Gradient], create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """See `Node.run`. The one rule of the operation gets a gradient for every output."""
        if self.saved is None:
            raise freed(self.op.name)
        if sum([cell[0] for cell in self.cells]) != self.version:
            raise modified(self.op.name)
        ys, *args = self._restored(self.saved) if create_graph else self.saved
        filled = []
        for g, (shape, dtype) in zip(grad, self.metas, strict=True):
            if g is None and dtype.kind in "fc":
                g = np.zeros(shape, dtype)
                g = wrap(g) if create_graph else g
            filled.append(g)
        assert self.op.joint is not None
        found = _as_many(self.op.joint(filled, ys, *args, **self.kwargs), self)
        if not retain and self.cells:
            self.saved = None
        return found

    def _restored(self, saved: list[Any]) -> list[Any]:
        values, cells = list(saved), self.cells
        if self.plan.keeps_result:
            # Parts of integers would never get a gradient; they have none (see `record_all`).
            parts = [
                Part(self, i, *meta) if meta[1].kind in "fc" else None
                for i, meta in enumerate(self.metas)
            ]
            values[0] = tuple(map(_tensor, values[0], parts, cells[-len(parts) :]))
        return _restore(self.plan, values, cells, self.parents)


# ── recording ───────────────────────────────────────────────────────────────────────────────────


def record(
    op: Operation,
    args: Sequence[Any],
    y: Any,
    kwargs: dict[str, Any],
    parents: tuple[Node | None, ...],
) -> Tensor:
    """Wrap the result `y`, made from `args`, in a Tensor that remembers how it was made."""
    if y.__class__ is not _ndarray and not is_sparse_array(y):
        y = np.asarray(y)
    dtype = y.dtype
    if dtype.kind not in "fc":
        return wrap(y)  # comparisons, rounding to integers: nothing flows back
    # Field by field, without `__init__`: the call alone would cost more than all the assignments,
    # and this is done once per operation.
    node = _new(OpNode)
    node.op = op
    node.plan = plan = _plan(op, kwargs, parents)
    node.parents = parents
    node.kwargs = kwargs
    node.shape = y.shape
    node.dtype = dtype
    node.hooks = None
    tensor = wrap(y, node)
    # Before anything is saved: a result that is a view of an argument has the argument's cell, and
    # it is that one which must be among `cells`.
    if y.base is not None:
        share_version(tensor, args)
    saved, cells, version = _save(plan, args)
    if plan.keeps_result:
        cell = tensor._cell
        if cell is None:
            cell = tensor._cell = [0]
        # The array, not the Tensor: the Tensor holds this node, and the two would be a cycle that
        # only the garbage collector frees.
        saved[0] = y
        cells.append(cell)
        version += cell[0]
    node.saved = saved
    node.cells = cells
    node.version = version
    return tensor


def record_all(
    op: Operation,
    args: Sequence[Any],
    results: Sequence[Tensor],
    kwargs: dict[str, Any],
    parents: tuple[Node | None, ...],
) -> None:
    """Make the results of an operation with several outputs remember how they were made."""
    plan = _plan(op, kwargs, parents)
    saved, cells, version = _save(plan, args)
    arrays = tuple([tensor.raw for tensor in results])
    if plan.keeps_result:
        saved[0] = arrays
        for tensor in results:
            if tensor._cell is None:
                tensor._cell = [0]
            cells.append(tensor._cell)
            version += tensor._cell[0]
    metas = tuple([(y.shape, y.dtype) for y in arrays])
    node = JointOpNode(op, plan, parents, (saved, cells, version), kwargs, metas)
    for index, tensor in enumerate(results):
        # Counts and positions among the outputs have no gradient.
        if tensor.raw.dtype.kind in "fc":
            tensor._node = Part(node, index, *metas[index])


def _plan(op: Operation, kwargs: dict[str, Any], parents: tuple[Node | None, ...]) -> Plan:
    """Return what to save, given which arguments want a gradient."""
    # The key of the cache, built by hand for one and two arguments. An operation with one rule for
    # all its arguments has one plan for each number of them.
    if len(parents) == 2:
        pattern: tuple[bool, ...] = (parents[0] is not None, parents[1] is not None)
    elif len(parents) == 1:
        pattern = _ONE
    elif op.rules:
        pattern = tuple([parent is not None for parent in parents])
    else:
        pattern = _ONE * len(parents)
    if kwargs:
        # A parameter that no rule knows would be ignored in backward: a wrong gradient without a
        # word.
        op.check_parameters(kwargs)
    return op.plans.get(pattern) or op.plan(pattern)


def _save(plan: Plan, args: Sequence[Any]) -> Saved:
    """Save what the rules read of `args`, with room for the result in front."""
    saved: list[Any] = [None] * (len(args) + 1)
    cells: list[Cell] = []
    version = 0
    for i in plan.values:
        arg = args[i]
        if isinstance(arg, Tensor):
            cell = arg._cell
            if cell is None:
                # Cells are made when they are first needed: most tensors are never saved, and most
                # of those that are were never written to.
                cell = arg._cell = [0]
            else:
                version += cell[0]
            saved[i + 1] = arg.raw
            cells.append(cell)
        else:
            saved[i + 1] = arg
            cells.append(_NEVER)
    for i in plan.shapes:
        arg = args[i]
        saved[i + 1] = Meta(arg.raw if isinstance(arg, Tensor) else arg)
    return saved, cells, version


def _restore(
    plan: Plan, values: list[Any], cells: Sequence[Cell], parents: Sequence[Node | None]
) -> list[Any]:
    """Put Tensors, made by `parents`, in place of the arguments' arrays."""
    # `cells` is longer by those of the results, which are last.
    for i, cell in zip(plan.values, cells, strict=False):
        if cell is not _NEVER:
            values[i + 1] = _tensor(values[i + 1], parents[i], cell)
    return values


def _tensor(data: Any, node: Node | None, cell: Cell) -> Tensor:
    tensor = wrap(data, node)
    tensor._cell = cell
    return tensor


def share_version(result: Tensor, args: Sequence[Any]) -> None:
    """Make a view count writes together with the tensor whose memory it shows.

    Without this, a write through one name goes unnoticed by a graph that saved the other.
    """
    data, base = result.raw, result.raw.base
    for arg in args:
        # The cheap tests first. The last one is for views that name another base: those that
        # strides were given for. It compares bounds only and may say yes to neighbours in one
        # buffer; they then count too many writes, which is safe.
        if isinstance(arg, Tensor) and (
            arg.raw is base
            or arg.raw.base is base
            or (arg.raw.__class__ is _ndarray and np.may_share_memory(arg.raw, data))
        ):
            if arg._cell is None:
                arg._cell = [0] if result._cell is None else result._cell
            result._cell = arg._cell
            return


def _as_many(given: Any, node: OpNode | JointOpNode) -> Sequence[Gradient]:
    """Return what a rule for all arguments gave, one gradient for each of them."""
    found: Sequence[Any] = given if isinstance(given, list | tuple) else (given,)
    # A list is easily one short in a rule that a user wrote; the sweep would then pair gradients
    # and inputs wrongly.
    if len(found) != len(node.parents):
        raise wrong_count(node.op.name, len(found), len(node.parents))
    return found


def wrong_count(name: str, given: int, expected: int) -> GradError:
    """Make the error for a rule that gave too few or too many gradients."""
    return GradError(
        f"the backward rule of {name} returned {given} gradients for {expected} inputs", "count"
    )
