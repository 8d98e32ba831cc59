"""Recompute instead of keep: a function whose graph is thrown away and made again in backward.

The function runs once in the forward pass, only to learn which leaves it touches; its graph is
dropped. In the backward pass it runs again on the same arguments, and that graph is played back
at once.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.backward import grad
from aiograd.autograd.graph import Accumulate, Joint, Node, Part, freed
from aiograd.autograd.op import parent_of
from aiograd.autograd.recording import enable_grad, recording
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.errors import GradError


class Checkpointed:
    """A function that keeps its arguments, and not its graph, for the backward pass."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not recording.get():
            return self.function(*args, **kwargs)
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        call = functools.partial(self.function, *args, **kwargs)
        stand_ins = {id(t): t.detach().requires_grad_() for t in inputs}
        result = _run(call, stand_ins)
        outputs = list(_tensors(result))
        leaves = _leaves(outputs, stand_ins.values())
        metas = tuple((t.data.shape, t.data.dtype) for t in outputs)
        node = CheckpointNode(self.function.__name__, call, inputs, leaves, metas)
        replaced = {}
        for index, output in enumerate(outputs):
            fresh = replaced[id(output)] = wrap(output.data)
            if output.requires_grad:
                fresh._node = Part(node, index, *metas[index])
        return _replace(result, replaced)


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

    __slots__ = ("call", "function", "inputs", "leaves", "metas")

    def __init__(
        self,
        function: str,
        call: Callable[[], Any],
        inputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        metas: tuple[tuple[tuple[int, ...], Any], ...],
    ) -> None:
        self.function = function
        self.call: Callable[[], Any] | None = call  # None once freed
        self.inputs, self.leaves, self.metas = inputs, leaves, metas
        self.outputs = len(metas)
        self.parents = tuple(parent_of(t) for t in (*inputs, *leaves))
        self.shape, self.dtype, self.hooks = (), None, None

    @property
    def name(self) -> str:
        return f"checkpoint({self.function})"

    def run(self, grads: list[Any], create_graph: bool, retain: bool) -> Sequence[Any]:
        if self.call is None:
            raise freed(self.name)
        if create_graph:
            stand_ins = list(self.inputs)
            result = _run(self.call, {})
        else:
            stand_ins = [t.detach().requires_grad_() for t in self.inputs]
            pairs = zip(self.inputs, stand_ins, strict=True)
            result = _run(self.call, {id(t): new for t, new in pairs})
        roots, gradients = [], []
        for output, gradient in zip(_tensors(result), grads, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient if isinstance(gradient, Tensor) else wrap(gradient))
        found = grad(
            roots,
            [*stand_ins, *self.leaves],
            gradients,
            create_graph=create_graph,
            allow_unused=True,
        )
        if not retain:
            self.call = None
        return [t if t is None or create_graph else t.data for t in found]


def _run(call: Callable[[], Any], stand_ins: dict[int, Tensor]) -> Any:
    """Run a partial call with some tensors replaced, and generators as they were."""
    assert isinstance(call, functools.partial)
    with enable_grad():
        args = _replace(call.args, stand_ins)
        return call.func(*args, **_replace(call.keywords, stand_ins))


def _leaves(outputs: Sequence[Tensor], stand_ins: Iterable[Tensor]) -> list[Tensor]:
    """The leaves these outputs were made from, other than the stand-ins of the inputs."""
    roots = [t._node for t in outputs if t._node is not None]
    stack: list[Node] = list(dict.fromkeys(roots))
    seen = set(stack)
    found = []
    while stack:
        node = stack.pop()
        if isinstance(node, Joint) and not node.parents:
            raise GradError("a checkpointed function must not call other workers", "received")
        if isinstance(node, Accumulate):
            found.append(node.variable)
        for parent in node.parents:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    not_these = {id(t) for t in stand_ins}
    return [leaf for leaf in found if id(leaf) not in not_these]


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
