"""Recompute instead of save: a function whose graph is dropped and made again in backward.

The function runs once in the forward pass. Its graph only serves to learn what the function reads
besides its arguments (leaves, and results of other operations), and is dropped. In the backward
pass the function runs again on the same arguments, and that graph is played back at once, up to
borders that stand for everything the function reads:

    input ┆ border ──▶ … the function's own graph … ──▶ outputs
    leaf  ┆ border ──▶ …

The gradients that arrive at the borders are passed on by the pass around them, so that hooks run
there once and nothing beyond is played back, or freed, before its time. A replay that went on into
the graph around it would count a leaf twice that is both an argument and read by the function.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiograd.autograd.array import Gradient
from aiograd.autograd.grad_mode import enable_grad, recording
from aiograd.autograd.graph import Accumulate, Hook, Joint, Node, Part, freed, modified
from aiograd.autograd.handed_out import counter_of
from aiograd.autograd.op import parent_of
from aiograd.autograd.random import Replayable
from aiograd.autograd.sweep import Sweep
from aiograd.autograd.tensor import Tensor
from aiograd.errors import GradError

# Classes of tensors that other libraries record, and how each library recomputes a function.
FOREIGN: list[tuple[type, Callable[[Callable[[], Any]], Any]]] = []


class Checkpointed:
    """A function that keeps its arguments, and not its graph, for the backward pass."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not recording.get():
            # Nothing would be saved anyway.
            return self.function(*args, **kwargs)
        call = functools.partial(self.function, *args, **kwargs)
        for tensor_class, recompute in FOREIGN:
            if _holds((args, kwargs), tensor_class):
                return recompute(call)
        draws = Replayable()
        result, outputs, leaves, others = _first_run(call, draws)
        # The function's own nodes died with its graph. What is still alive is held from outside: a
        # result that the function only reads, so a gradient must reach it.
        known = [node for other in others if (node := other()) is not None]
        metas = tuple((t.raw.shape, t.raw.dtype) for t, _ in outputs)
        # One node, with all outputs as its parts, stands for the whole function.
        node = CheckpointNode(self.function.__name__, call, draws, leaves, known, metas)
        for index, (output, recorded) in enumerate(outputs):
            if recorded:
                output._node = Part(node, index, *metas[index])
        return result


def checkpoint(function: Callable[..., Any]) -> Checkpointed:
    """Make a plain function recompute itself in backward instead of keeping its graph.

    It must give the same result when run again, and must not call other workers. Random numbers
    without a `generator=` (dropout) are the same in both runs.

        >>> def block(x):
        ...     return ag.tanh(x) * 2
        >>> x = ag.ones(3, requires_grad=True)
        >>> async with ag.context() as ctx:
        ...     y = await ag.rpc_async("worker1", ag.checkpoint(block), args=(x,))
        ...     await ctx.backward(y.sum())
        ...     ctx.gradients[x].shape
        (3,)
    """
    # Replaying it would need the loop, and what it awaited may have changed.
    if inspect.iscoroutinefunction(function):
        raise TypeError("checkpoint() takes a plain function: an async one cannot be run again")
    if not callable(function):
        raise TypeError(f"checkpoint() takes a function, not {type(function).__name__}")
    return Checkpointed(function)


class CheckpointNode(Joint):
    """Runs the function again and plays its graph back; the recorded call of a checkpoint."""

    __slots__ = ("call", "draws", "ends", "function", "inputs", "metas", "seen")

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    outputs: int
    shape: tuple[int, ...]
    dtype: Any

    function: str
    draws: Replayable
    inputs: list[Tensor]
    metas: tuple[tuple[tuple[int, ...], Any], ...]

    def __init__(
        self,
        function: str,
        call: functools.partial[Any],
        draws: Replayable,
        leaves: Sequence[Tensor],
        others: Sequence[Node],
        metas: tuple[tuple[tuple[int, ...], Any], ...],
    ) -> None:
        self.function, self.draws = function, draws
        self.call: functools.partial[Any] | None = call  # None once freed
        self.inputs, self.metas = _inputs(call), metas
        self.seen: list[_Seen] = [
            _Seen.now(t) for t in (*_tensors((call.args, call.keywords)), *leaves)
        ]
        # The nodes that gradients are for, the inputs first. Kept beside `parents`, because a
        # checkpoint around this one replaces parents by its own borders (`_cut`), while the
        # function will meet the nodes themselves.
        self.ends: tuple[Node, ...] = tuple([_node_of(t) for t in (*self.inputs, *leaves)]) + tuple(
            others
        )
        self.parents = self.ends
        self.outputs = len(metas)
        self.shape, self.dtype, self.hooks = (), None, None

    @property
    def name(self) -> str:
        """The checkpointed function, as shown in errors and pictures."""
        return f"checkpoint({self.function})"

    def run(self, grads: list[Gradient], create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """See `Node.run`: run the function again, and sweep its graph up to the borders."""
        if self.call is None:
            raise freed(self.name)
        # The second run would compute with other numbers than the first.
        if any(seen.changed for seen in self.seen):
            raise modified(self.name)
        borders = [_Border(node) for node in self.ends]
        result = _run(self.call, self.draws, _stand_ins(self.inputs, borders))
        met = dict(zip(self.ends, borders, strict=True))
        starts = []
        for output, gradient in zip(_tensors(result), grads, strict=True):
            node = parent_of(output)
            if gradient is not None and node is not None:
                # An output may be something the function merely returns: then the border is the
                # entry itself.
                starts.append((met.get(node, node), gradient))
        entries = [node for node, _ in starts]
        # Inputs were replaced by stand-ins, but leaves and outer results are read by the function
        # as they are; the fresh graph is cut off from them here.
        _cut(entries, met)
        # A sweep of its own: it is complete when this returns, so its nodes can be freed at once
        # unless a second derivative will go through them.
        sweep = Sweep(
            entries, retain_graph=create_graph, create_graph=create_graph, capture=borders
        )
        for node, gradient in starts:
            sweep.feed(node, gradient)
        sweep.drain()
        for border in borders:
            border.open()  # derivatives of what was computed here go on behind it
        if not retain:
            self.call = None
        return [sweep.captured.get(border) for border in borders]


class _Border(Node):
    """Stands for a node in the graph of a function; while it is closed, the graph ends here."""

    __slots__ = ("behind",)
    name = "checkpoint"

    def __init__(self, behind: Node) -> None:
        self.behind = behind
        self.parents = ()
        self.shape, self.dtype, self.hooks = behind.shape, behind.dtype, None

    def open(self) -> None:
        """Let the graph go on behind this border; for second derivatives, after the replay."""
        self.parents = (self.behind,)

    def run(self, grad: Gradient, create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """Pass the gradient on unchanged."""
        return (grad,)


class _Seen(NamedTuple):
    """A tensor as it was when the function first ran: its version, and the cell it was read from.

    Both are compared: an owner's optimiser may give a leaf a new array, with a new cell.
    """

    tensor: Tensor
    cell: list[int]
    version: int

    @classmethod
    def now(cls, tensor: Tensor) -> _Seen:
        """Note the state of a tensor at this moment."""
        if tensor._cell is None:
            tensor._cell = [0]
        return cls(tensor, tensor._cell, tensor._cell[0])

    @property
    def changed(self) -> bool:
        """Whether the tensor was written to, or given another array, since then."""
        same = counter_of(self.tensor._cell) is counter_of(self.cell)
        return not same or self.cell[0] != self.version


def _first_run(
    call: functools.partial[Any], draws: Replayable
) -> tuple[Any, list[tuple[Tensor, bool]], list[Tensor], list[weakref.ref[Node]]]:
    """Return the result with its graph cut off, and what that graph has led to.

    Its tensors, each with whether it was recorded; the leaves; all other nodes, held weakly, so
    that those that nothing else holds are gone when this returns.
    """
    inputs = _inputs(call)
    borders = [_Border(_node_of(t)) for t in inputs]
    result = _run(call, draws, _stand_ins(inputs, borders))
    outputs = list(_tensors(result))
    leaves, others = _reached([t for t in outputs if t.requires_grad])
    for border in borders:
        # The function may have stored a tensor elsewhere, whose graph must not end at the border.
        border.open()
    # By id, so that a tensor that occurs twice in the result is one tensor afterwards.
    cut = {id(t): t.detach() for t in outputs}
    pairs = [(cut[id(t)], t.requires_grad) for t in outputs]
    return _replace(result, cut), pairs, leaves, others


def _run(call: functools.partial[Any], draws: Replayable, stand_ins: dict[int, Tensor]) -> Any:
    """Run a partial call with some tensors replaced, and generators as they were."""
    # A backward pass runs with recording off, and the replay is there to be recorded. Both runs
    # draw the same numbers: another mask of a dropout would give a wrong gradient.
    with enable_grad(), draws.running():
        args = _replace(call.args, stand_ins)
        return call.func(*args, **_replace(call.keywords, stand_ins))


def _inputs(call: functools.partial[Any]) -> list[Tensor]:
    """Return the arguments that gradients are for, each once."""
    found = {id(t): t for t in _tensors((call.args, call.keywords)) if t.requires_grad}
    return list(found.values())


def _stand_ins(inputs: Sequence[Tensor], borders: Sequence[_Border]) -> dict[int, Tensor]:
    """Return for each input, by its id, a tensor of the same value that a border made."""
    found = {}
    for tensor, border in zip(inputs, borders, strict=False):
        found[id(tensor)] = stand_in = tensor.detach()
        stand_in._node = border
    return found


def _node_of(tensor: Tensor) -> Node:
    node = parent_of(tensor)
    assert node is not None
    return node


def _reached(outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[weakref.ref[Node]]]:
    """Return what these outputs were made from: the leaves, and the results in between."""
    reached = dict.fromkeys([_node_of(t) for t in outputs])
    stack = list(reached)
    for node in stack:  # grows while it is read
        # Only a Recv node is a Joint without parents. A replay would call the other worker a second
        # time.
        if isinstance(node, Joint) and not node.parents:
            raise GradError("a checkpointed function must not call other workers", "received")
        for parent in node.parents:
            if parent is not None and parent not in reached:
                reached[parent] = None
                stack.append(parent)
    leaves = [node.variable for node in stack if isinstance(node, Accumulate)]
    # A Joint has no output of its own; the Parts in front of it are in the list.
    results = [node for node in stack if not isinstance(node, Accumulate | Joint)]
    return leaves, [weakref.ref(node) for node in results]


def _cut(entries: Sequence[Node], met: Mapping[Node, _Border]) -> None:
    """Make a graph that was just recorded end at borders instead of the nodes they stand for."""
    stack = list(dict.fromkeys(entries))
    reached = set(stack)
    for node in stack:  # grows while it is read
        # The nodes are our own: this run made them a moment ago, and nothing else refers to them.
        node.parents = tuple([p if p is None else met.get(p, p) for p in node.parents])
        for parent in node.parents:
            if parent is not None and parent not in reached:
                reached.add(parent)
                stack.append(parent)


def _holds(value: Any, kind: type) -> bool:
    """Tell whether an instance of a class is in a tree of tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return any(_holds(item, kind) for item in value)
    if isinstance(value, dict):
        return any(_holds(item, kind) for item in value.values())
    return isinstance(value, kind)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tree of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _replace(value: Any, new: dict[int, Tensor]) -> Any:
    """Return the tree with some tensors replaced, by their id, and generators copied."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if isinstance(value, np.random.Generator):
        # Both runs must draw the same numbers (dropout), so neither may move the caller's
        # generator.
        return copy.deepcopy(value)
    if isinstance(value, tuple):
        items = [_replace(item, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_replace(item, new) for item in value]
    if isinstance(value, dict):
        return {key: _replace(item, new) for key, item in value.items()}
    return value
