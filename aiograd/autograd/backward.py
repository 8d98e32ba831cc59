"""The local backward pass: into `.grad` of the leaves, or as a tuple of derivatives.

Both build one `Sweep` over the graph of this process. A graph that reaches a tensor received from
another worker cannot be played back locally; its Recv node says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd._frames import warn
from aiograd.autograd.array import Gradient
from aiograd.autograd.graph import Accumulate, Joint, Node
from aiograd.autograd.op import parent_of
from aiograd.autograd.sweep import Sweep, own
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.errors import GradError, GraphCutWarning


def backward(
    tensors: Tensor | Sequence[Tensor],
    gradients: Any = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Add the derivative of `tensors` to `.grad` of every leaf they were made from."""
    starts = entries(tensors, gradients, create_graph)
    sweep = Sweep(
        [node for node, _ in starts],
        retain_graph=retain_graph or create_graph,
        create_graph=create_graph,
    )
    # The sweep must be the only holder of these gradients: a leaf gets an array without a copy only
    # if nobody else refers to it (`Sweep._end`). So the names here are dropped, and each entry is
    # popped before it is fed.
    del gradients, tensors
    while starts:
        sweep.feed(*starts.pop())
    for sink, grad in sweep.drain():
        if grad is not None:
            deposit(sink, grad)
    # Every entry was fed, so every node has had all of its contributions.
    if not sweep.complete:
        raise AssertionError(f"nodes still wait: {sweep.waiting}")


def _of_one(
    self: Tensor, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False
) -> None:
    """Add the derivative of this tensor to `.grad` of every leaf it was made from."""
    backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph)


# Attached from here, because `tensor.py` cannot import what is built on it.
_of_one.__name__, _of_one.__qualname__ = "backward", "Tensor.backward"
Tensor.backward = _of_one  # type: ignore[method-assign]


def deposit(sink: Node, grad: Gradient) -> None:
    """Add a gradient that arrived at a leaf to its `.grad`."""
    if not isinstance(sink, Accumulate):
        refuse_received(sink)
        return
    leaf = sink.variable
    if leaf._leaf is not True:
        warn_of_cut(leaf)
    if not isinstance(grad, Tensor):
        grad = wrap(grad)
    old = leaf._grad
    leaf._grad = grad if old is None else accumulated(old, grad)
    if leaf._after_hooks:
        # A copy, since a hook may remove itself.
        for hook in list(leaf._after_hooks.values()):
            hook(leaf)


def warn_of_cut(leaf: Tensor) -> None:
    """Warn if a gradient ends in a result that a call brought without its graph."""
    if leaf._leaf is not False:  # else its flag was cleared since
        warn(cut_text(leaf._leaf, "result.requires_grad_()"), GraphCutWarning)


def cut_text(origin: object, cure: str) -> str:
    """Return what to tell of a gradient that ends in the result of `origin`, a call."""
    return (
        "this backward pass ends in a result that came without its graph, so what it was computed "
        f"from gets no gradient. It is the result of {origin}, which was called outside of a "
        "context: put the call and the pass in `async with ag.context() as ctx:`, and use "
        f"`await ctx.backward(loss)`. If it shall be a leaf of its own, say so with `{cure}`"
    )


def accumulated(old: Tensor, new: Tensor) -> Tensor:
    """Return the sum of two gradients of one leaf, in the old array if it is not recorded."""
    # One of them was made with create_graph: a sum in place would cut it off its graph.
    if old.requires_grad or new.requires_grad:
        return old + new
    if old.raw.__class__ is np.ndarray and new.raw.__class__ is np.ndarray:
        # In place as in torch, so a user who kept `x.grad` sees it grow; the version tells graphs
        # that saved it.
        old.raw += new.raw
        old._written()
        return old
    return wrap(old.raw + new.raw)


def refuse_received(sink: Node) -> None:
    """Raise for a sink that is no leaf: the graph ends at a tensor of another worker."""
    if isinstance(sink, Joint):
        raise GradError(
            "this graph reaches a tensor that was received from another worker; "
            "use `await ctx.backward(...)` of its context instead of a local backward",
            "received",
        )
    raise AssertionError(f"{sink.name} is no end of a graph")


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the derivatives of `outputs` by `inputs`, without touching any `.grad`."""
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    nodes = [input_node(tensor) for tensor in wanted]
    starts = entries(outputs, grad_outputs, create_graph)
    # torch's default: a graph that will be differentiated again is kept.
    retain = create_graph if retain_graph is None else retain_graph
    sweep = Sweep(
        [node for node, _ in starts],
        retain_graph=retain,
        create_graph=create_graph,
        capture=nodes,
    )
    for node, value in starts:
        sweep.feed(node, value)
    for sink, value in sweep.drain():
        # A sink that is no leaf is a Recv node, the only Joint without parents. If no gradient
        # arrived, the received tensor did not matter, and neither does where it came from.
        if value is None:
            continue
        if isinstance(sink, Joint):
            refuse_received(sink)
        elif isinstance(sink, Accumulate) and sink not in nodes and sink.variable._leaf is not True:
            warn_of_cut(sink.variable)
    return tuple(results(nodes, sweep.captured, allow_unused))


def results(nodes: Sequence[Node], found: dict[Node, Gradient], allow_unused: bool) -> list[Any]:
    """Return the gradients found for `nodes`, as Tensors whose memory nobody else holds."""
    values: list[Tensor | None] = []
    asked: set[Node] = set()
    for position, node in enumerate(nodes):
        value = found.get(node)
        if value is None and not allow_unused:
            raise GradError(
                f"input {position} was not used to make the outputs; "
                "pass allow_unused=True to get None for it",
                "unused",
            )
        if value is not None and (node in asked or not isinstance(node, Accumulate)):
            # The sweep gave a leaf an array of its own (`Sweep._end`), once. A second request for
            # the same input, and the gradient of a result, which was passed on to others, are
            # copied.
            value = own(value) if isinstance(value, Tensor) else value.copy()
        asked.add(node)
        values.append(value if value is None or isinstance(value, Tensor) else wrap(value))
    return values


def input_node(tensor: Any) -> Node:
    """Return the node behind a tensor that derivatives are asked for."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"derivatives are taken by Tensors, not by {type(tensor).__name__}")
    node = parent_of(tensor)
    if node is None:
        raise GradError("an input does not require grad", "no_requires_grad")
    return node


# ── roots ───────────────────────────────────────────────────────────────────────────────────────


def entries(
    tensors: Tensor | Sequence[Tensor],
    gradients: Any = None,
    create_graph: bool = False,
    *,
    allow_leaf: bool = True,
) -> list[tuple[Node, Gradient]]:
    """Check the roots of a pass; return the node behind each one with the gradient it starts with.

    Local and distributed passes refuse the same roots, in the same words, with one difference,
    which is torch's. A local pass may start at a leaf, which then gets the gradient itself. The
    pass of a context may not (`allow_leaf=False`): a result that was received outside of the
    context is such a leaf, and a pass that quietly ends there would lose the gradients of the
    worker it came from.
    """
    if isinstance(tensors, Tensor):
        if isinstance(gradients, list | tuple) and len(gradients) == 1:
            (gradients,) = gradients
        return [_entry(tensors, gradients, create_graph, allow_leaf)]
    roots = list(tensors)
    if not roots:
        raise GradError("backward needs at least one tensor to start from", "no_roots")
    if gradients is None:
        gradients = [None] * len(roots)
    elif not isinstance(gradients, list | tuple):
        gradients = [gradients]
    if len(gradients) != len(roots):
        raise GradError(f"{len(roots)} outputs but {len(gradients)} gradients", "shape")
    pairs = zip(roots, gradients, strict=True)
    return [_entry(root, value, create_graph, allow_leaf) for root, value in pairs]


def _entry(root: Any, gradient: Any, create_graph: bool, allow_leaf: bool) -> tuple[Node, Gradient]:
    if not isinstance(root, Tensor):
        raise TypeError(f"backward starts from Tensors, not from {type(root).__name__}")
    node = parent_of(root)
    if node is None:
        raise GradError(
            "this tensor does not require grad and has no gradient function; "
            "was it made under no_grad(), or from tensors without requires_grad=True?",
            "no_requires_grad",
        )
    value = _root_gradient(root, gradient, create_graph)
    if root.is_leaf and not allow_leaf:
        raise GradError(
            "a root is a leaf without a gradient function: nothing to play backwards", "no_grad_fn"
        )
    return node, value


def _root_gradient(root: Tensor, value: Any, create_graph: bool) -> Any:
    data = root.raw
    if value is None:
        if data.size != 1:
            raise GradError(
                f"backward needs a scalar, or a gradient for this tensor of shape {root.shape}; "
                "reduce it first, e.g. with .sum()",
                "not_scalar",
            )
        # An array even where one number would do: it fits the node as it is, so that `Sweep.feed`
        # has nothing to convert, and a received root is answered with an array.
        value = np.array(1, data.dtype) if data.shape == () else np.ones(data.shape, data.dtype)
    elif not isinstance(value, Tensor):
        value = np.asarray(value)
    if tuple(value.shape) != root.shape:
        raise GradError(
            f"a gradient of shape {tuple(value.shape)} does not fit a tensor of shape {root.shape}",
            "shape",
        )
    if create_graph:
        return value if isinstance(value, Tensor) else wrap(value)
    return value.raw if isinstance(value, Tensor) else value
