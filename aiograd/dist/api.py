"""The public verbs of distributed differentiation: `backward` by context or id, and `grad`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.autograd.backward import grad as local_grad
from aiograd.autograd.backward import results
from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.foreign import as_list, entries, input_node, library_of
from aiograd.dist.registry import contexts, resolve
from aiograd.dist.nodes import RecvNode
from aiograd.errors import GradError


async def backward(
    ctx_or_id: Context | int,
    roots: Sequence[Tensor] | Tensor,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    timeout: float | None = None,
) -> None:
    """Run a backward pass from `roots` in a context, as `await ctx.backward(*roots, …)` does.

        >>> w = ag.ones(2, requires_grad=True)
        >>> async with ag.context() as ctx:
        ...     await ag.backward(ctx, [(w * w).sum()])
        ...     print(ctx.gradients[w].tolist())
        [2.0, 2.0]
    """
    if not isinstance(roots, Tensor | list | tuple) and library_of(roots) is None:
        raise TypeError(f"the roots of backward are a list of Tensors, not {type(roots).__name__}")
    context = resolve(ctx_or_id)
    await context.backward(
        *as_list(roots),
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

        >>> x = ag.tensor(3.0, requires_grad=True)
        >>> async with ag.context():
        ...     y = await ag.rpc_async("worker1", ag.power, args=(x, 3))
        ...     (slope,) = await ag.grad(y, x, create_graph=True)
        ...     (bend,) = await ag.grad(slope, x)
        ...     print(float(slope), float(bend))
        27.0 18.0
    """
    wanted = as_list(inputs)
    nodes = [input_node(tensor) for tensor in wanted]
    starts = entries(outputs, grad_outputs, create_graph)
    # Found by the graph, not by CURRENT: the tensors may belong to a context that is not entered here.
    context = _context_of([node for node, _ in starts])
    libraries = {id(library): library for t in (*as_list(outputs), *wanted) if (library := library_of(t))}
    if context is None:
        # The first is enough: two libraries have no local graph in common.
        for library in libraries.values():
            return library.grad(
                outputs,
                inputs,
                grad_outputs,
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=allow_unused,
            )
        return local_grad(
            outputs,
            inputs,
            grad_outputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
        )
    for library in libraries.values():
        context.foreign = library
    found = await context.home.engine.derivatives(
        context,
        starts,
        nodes,
        retain_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
    )
    if not libraries:
        return tuple(results(nodes, found, allow_unused))
    return tuple(_results(wanted, nodes, found, allow_unused))


def _results(
    inputs: list[Any], nodes: list[Node], found: dict[Node, Any], allow_unused: bool
) -> list[Any]:
    """Return what was found for each input; those of other libraries as their tensors."""
    values: list[Any] = []
    for position, (tensor, node) in enumerate(zip(inputs, nodes, strict=True)):
        library = library_of(tensor)
        value = found.get(node)
        if library is None:
            values += results([node], found, allow_unused)
        elif value is None and not allow_unused:
            raise GradError(
                f"input {position} was not used to make the outputs; "
                "pass allow_unused=True to get None for it",
                "unused",
            )
        else:
            # The gradient of a result was passed on to others, and may have been asked for twice.
            values.append(None if value is None else library.copy(value))
    return values


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
