"""The tape behind a tensor, as a `Graph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiograd.autograd.graph import Accumulate, Joint, Node
from aiograd.autograd.op import parent_of
from aiograd.autograd.tensor import Tensor
from aiograd.viz.graph import Graph, GraphEdge, GraphNode


def graph(
    tensor: Tensor,
    names: Mapping[str, Tensor] | None = None,
    *,
    max_nodes: int = 300,
    worker: str | None = None,
) -> Graph:
    """Draw how `tensor` was made, leaves on top and the tensor at the bottom.

    `names` gives leaves their names, e.g. `dict(model.named_parameters())`. Beyond `max_nodes` the
    rest of the tape is left out and marked with "…".
    """
    called = {id(leaf): name for name, leaf in (names or {}).items()}
    start = parent_of(tensor)
    if start is None:
        only = GraphNode("tensor", "constant", _detail(tensor.shape, tensor.dtype), "root", worker)
        return Graph([only], [])
    root = tensor.grad_fn or start
    nodes: dict[Node, GraphNode] = {}
    edges: list[GraphEdge] = []
    waiting = [root]
    found = {root}
    cut = False
    while waiting:
        node = waiting.pop(0)
        nodes[node] = _box(node, called, worker, root if tensor.grad_fn is root else None, tensor)
        for parent, index in node.next_nodes:
            if parent not in found:
                if len(found) >= max_nodes:
                    cut = True
                    edges.append(GraphEdge("more", _key(node)))
                    continue
                found.add(parent)
                waiting.append(parent)
            label = f"[{index}]" if isinstance(parent, Joint) and parent.outputs > 1 else ""
            edges.append(GraphEdge(_key(parent), _key(node), label))
    boxes = list(nodes.values())
    if cut:
        boxes.append(GraphNode("more", "…", "left out", "more", worker))
    return Graph(boxes, dict.fromkeys(edges))


def _key(node: Node) -> str:
    return f"{id(node):x}"


def _box(
    node: Node, called: Mapping[int, str], worker: str | None, root: Node | None, tensor: Tensor
) -> GraphNode:
    if isinstance(node, Accumulate):
        leaf = node.variable
        label = called.get(id(leaf), "leaf")
        return GraphNode(_key(node), label, _detail(leaf.shape, leaf.dtype), "leaf", worker)
    kind = {"Send": "send", "Recv": "recv"}.get(node.name, "op")
    if node is root:
        return GraphNode(_key(node), node.name, _detail(tensor.shape, tensor.dtype), "root", worker)
    if isinstance(node, Joint):
        detail = f"{node.outputs} outputs" if node.outputs > 1 else ""
    else:
        detail = _detail(node.shape, node.dtype)
    return GraphNode(_key(node), node.name, detail, kind, worker)


def _detail(shape: tuple[int, ...], dtype: Any) -> str:
    size = " × ".join(map(str, shape)) if shape else "scalar"
    return size if str(dtype) == "float64" else f"{size} · {dtype}"
