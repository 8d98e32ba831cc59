"""The public verbs of distributed differentiation: `backward` by context or id, and `grad`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.autograd.backward import entries, input_node, results
from aiograd.autograd.backward import grad as local_grad
from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.registry import contexts, resolve
from aiograd.dist.nodes import RecvNode


async def backward(
    ctx_or_id: Context | int,
    roots: Sequence[Tensor] | Tensor,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    timeout: float | None = None,
) -> None:
    """Run a backward pass from `roots` in a context, as `await ctx.backward(*roots, …)` does."""
    if not isinstance(roots, Tensor | list | tuple):
        raise TypeError(f"the roots of backward are a list of Tensors, not {type(roots).__name__}")
    context = resolve(ctx_or_id)
    await context.backward(
        *([roots] if isinstance(roots, Tensor) else roots),
        retain_graph=retain_graph,
        create_graph=create_graph,
        timeout=timeout,
    )


async def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the derivatives of `outputs` by `inputs`, across all workers the graph passes through.

    Both may be any tensors of this worker: leaves, results, received ones. Touches neither
    `ctx.gradients` nor `.grad`. With `create_graph` the derivatives can be differentiated again.
    """
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    nodes = [input_node(tensor) for tensor in wanted]
    starts = entries(outputs, grad_outputs, create_graph)
    # Found by the graph, not by CURRENT: the tensors may belong to a context that is not entered here.
    context = _context_of([node for node, _ in starts])
    if context is None:
        return local_grad(
            outputs,
            inputs,
            grad_outputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
        )
    found = await context.home.engine.derivatives(
        context,
        starts,
        nodes,
        retain_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
    )
    return tuple(results(nodes, found, allow_unused))


def _context_of(roots: list[Node]) -> Context | None:
    """Return the context whose edges these roots reach; None if the graph is all local.

    The first one found is enough: a pass that reaches an edge of another context fails.
    """
    stack, seen = list(roots), set(roots)
    while stack:
        node = stack.pop()
        if isinstance(node, RecvNode):
            return contexts().get(node.context_id)
        # A graph may share nodes many times over: each is visited once.
        for parent in node.parents:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return None
