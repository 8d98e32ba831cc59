"""The nodes of a context's graph as torch shows them: `name()`, `next_functions`, `variable`."""

from __future__ import annotations

from typing import Any

from aiograd.autograd.graph import Node
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.torch.nodes import Leaf, Port, TorchNode, shown

__all__ = ["GraphFunction"]


class GraphFunction:
    """One node. Equal to another of the same node, and to the torch node that it stands for."""

    def __init__(self, node: Any) -> None:
        self._node: Any = node

    def name(self) -> str:
        """Return the name that torch gives such a node."""
        if isinstance(self._node, RecvNode):
            return "torch::distributed::autograd::RecvRpcBackward"
        if isinstance(self._node, SendNode):
            return "torch::distributed::autograd::SendRpcBackward"
        if isinstance(self._node, Leaf):
            return "torch::autograd::AccumulateGrad"
        return str(self._node.name)

    @property
    def variable(self) -> Any:
        """The tensor, if the node is that of a leaf."""
        return self._node.variable

    @property
    def next_functions(self) -> tuple[tuple[GraphFunction | None, int], ...]:
        """What lies behind the node, each with the number of its output."""
        if isinstance(self._node, TorchNode):
            return tuple([_after(node, number) for node, number in self._node.node.next_functions])
        return tuple([_behind(parent) for parent in self._node.parents])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GraphFunction):
            return bool(self._node == other._node)
        # A torch node: the one of received tensors knows the end of its edge.
        own = getattr(self._node, "node", None)
        return own is other if own is not None else getattr(other, "end", None) is self._node

    def __hash__(self) -> int:
        return hash(self._node)


def _behind(parent: Node | None) -> tuple[GraphFunction | None, int]:
    if parent is None:
        return None, 0
    if isinstance(parent, Port):
        return _after(*parent.place)
    return GraphFunction(parent), 0


def _after(node: Any, number: int) -> tuple[GraphFunction | None, int]:
    return (None if node is None else GraphFunction(shown(node))), number
