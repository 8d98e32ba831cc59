"""Recompute instead of keep: a function whose graph is thrown away and made again in backward.

The function runs once in the forward pass, only to learn what it touches besides its arguments:
leaves, and results of others. Its graph is dropped. In the backward pass it runs again on the same
arguments, and that graph is played back at once, as far as borders that stand for all of these:

    input ┆ border ──▶ … the function's own graph … ──▶ outputs
    leaf  ┆ border ──▶ …

What arrives at the borders is given to what they stand for by the pass around it, so that hooks run
there once and nothing beyond is played back, or freed, before its time.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiograd.autograd.grad_mode import enable_grad, recording
from aiograd.autograd.graph import Accumulate, Joint, Node, Part, freed, modified
from aiograd.autograd.op import parent_of
from aiograd.autograd.sweep import Sweep
from aiograd.autograd.tensor import Tensor
from aiograd.errors import GradError


class Checkpointed:
    """A function that keeps its arguments, and not its graph, for the backward pass."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not recording.get():
            return self.function(*args, **kwargs)
        call = functools.partial(self.function, *args, **kwargs)
        result, outputs, leaves, others = _first_run(call)
        # What has outlived the graph is somebody else's: a result that the function only reads.
        known = [node for other in others if (node := other()) is not None]
        metas = tuple((t.data.shape, t.data.dtype) for t, _ in outputs)
        node = CheckpointNode(self.function.__name__, call, leaves, known, metas)
        for index, (output, recorded) in enumerate(outputs):
            if recorded:
                output._node = Part(node, index, *metas[index])
        return result


def checkpoint(function: Callable[..., Any]) -> Checkpointed:
    """Make a plain function recompute itself in backward instead of keeping its graph.

    It must give the same result when run again, and must not call other workers.

        y = await ag.rpc_async("worker1", ag.checkpoint(block), args=(x,))
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError("checkpoint() takes a plain function: an async one cannot be run again")
    if not callable(function):
        raise TypeError(f"checkpoint() takes a function, not {type(function).__name__}")
    return Checkpointed(function)


class CheckpointNode(Joint):
    """Runs the function again and plays its graph back."""

    __slots__ = ("call", "ends", "function", "inputs", "metas", "seen")

    def __init__(
        self,
        function: str,
        call: functools.partial[Any],
        leaves: Sequence[Tensor],
        others: Sequence[Node],
        metas: tuple[tuple[tuple[int, ...], Any], ...],
    ) -> None:
        self.function = function
        self.call: functools.partial[Any] | None = call  # None once freed
        self.inputs, self.metas = _inputs(call), metas
        self.seen = [_Seen.now(t) for t in (*_tensors((call.args, call.keywords)), *leaves)]
        # What gradients are for: the inputs first. A checkpoint around this one may change
        # `parents`, but not what the function will meet.
        self.ends = tuple([_node_of(t) for t in (*self.inputs, *leaves)]) + tuple(others)
        self.parents = self.ends
        self.outputs = len(metas)
        self.shape, self.dtype, self.hooks = (), None, None

    @property
    def name(self) -> str:
        return f"checkpoint({self.function})"

    def run(self, grads: list[Any], create_graph: bool, retain: bool) -> Sequence[Any]:
        if self.call is None:
            raise freed(self.name)
        if any(seen.changed for seen in self.seen):
            raise modified(self.name)
        borders = [_Border(node) for node in self.ends]
        result = _run(self.call, _stand_ins(self.inputs, borders))
        met = dict(zip(self.ends, borders, strict=True))
        starts = []
        for output, gradient in zip(_tensors(result), grads, strict=True):
            node = parent_of(output)
            if gradient is not None and node is not None:
                starts.append((met.get(node, node), gradient))
        entries = [node for node, _ in starts]
        _cut(entries, met)
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
        self.parents = (self.behind,)

    def run(self, grad: Any, create_graph: bool, retain: bool) -> Sequence[Any]:
        return (grad,)


class _Seen(NamedTuple):
    """A tensor as it was when the function first ran: its version, and the cell it was read from.

    An owner's optimiser may give a leaf a new array, with a new cell.
    """

    tensor: Tensor
    cell: list[int]
    version: int

    @classmethod
    def now(cls, tensor: Tensor) -> _Seen:
        if tensor._cell is None:
            tensor._cell = [0]
        return cls(tensor, tensor._cell, tensor._cell[0])

    @property
    def changed(self) -> bool:
        return self.tensor._cell is not self.cell or self.cell[0] != self.version


def _first_run(
    call: functools.partial[Any],
) -> tuple[Any, list[tuple[Tensor, bool]], list[Tensor], list[weakref.ref[Node]]]:
    """The result with its graph cut off, and what that graph has led to.

    Its tensors, each with whether it was recorded; the leaves; all other nodes, not held, so that
    those that nobody else holds are gone when this returns.
    """
    inputs = _inputs(call)
    borders = [_Border(_node_of(t)) for t in inputs]
    result = _run(call, _stand_ins(inputs, borders))
    outputs = list(_tensors(result))
    leaves, others = _reached([t for t in outputs if t.requires_grad])
    for border in borders:
        border.open()  # the function may have put a tensor aside
    cut = {id(t): t.detach() for t in outputs}
    pairs = [(cut[id(t)], t.requires_grad) for t in outputs]
    return _replace(result, cut), pairs, leaves, others


def _run(call: functools.partial[Any], stand_ins: dict[int, Tensor]) -> Any:
    """Run a partial call with some tensors replaced, and generators as they were."""
    with enable_grad():
        args = _replace(call.args, stand_ins)
        return call.func(*args, **_replace(call.keywords, stand_ins))


def _inputs(call: functools.partial[Any]) -> list[Tensor]:
    """The arguments that gradients are for, each once."""
    found = {id(t): t for t in _tensors((call.args, call.keywords)) if t.requires_grad}
    return list(found.values())


def _stand_ins(inputs: Sequence[Tensor], borders: Sequence[_Border]) -> dict[int, Tensor]:
    """For each input, by its id, the same value that was made by a border."""
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
    """What these outputs were made from: the leaves, and the results in between."""
    reached = dict.fromkeys([_node_of(t) for t in outputs])
    stack = list(reached)
    for node in stack:  # grows while it is read
        if isinstance(node, Joint) and not node.parents:
            raise GradError("a checkpointed function must not call other workers", "received")
        for parent in node.parents:
            if parent is not None and parent not in reached:
                reached[parent] = None
                stack.append(parent)
    leaves = [node.variable for node in stack if isinstance(node, Accumulate)]
    results = [node for node in stack if not isinstance(node, Accumulate | Joint)]
    return leaves, [weakref.ref(node) for node in results]


def _cut(entries: Sequence[Node], met: Mapping[Node, _Border]) -> None:
    """Let a graph that was just made end at borders instead of the nodes they stand for."""
    stack = list(dict.fromkeys(entries))
    reached = set(stack)
    for node in stack:  # grows while it is read
        node.parents = tuple([p if p is None else met.get(p, p) for p in node.parents])
        for parent in node.parents:
            if parent is not None and parent not in reached:
                reached.add(parent)
                stack.append(parent)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a tree of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _replace(value: Any, new: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value)  # both runs must draw the same numbers
    if isinstance(value, tuple):
        items = [_replace(item, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_replace(item, new) for item in value]
    if isinstance(value, dict):
        return {key: _replace(item, new) for key, item in value.items()}
    return value
