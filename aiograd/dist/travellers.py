"""How tensors and contexts travel with calls: what `dist` plugs into an agent.

A tensor that requires grad, sent inside a context, leaves a `SendNode` behind and arrives
behind a `RecvNode`; outside a context it arrives as an independent leaf with the same flag. One
message is one edge, however many tensors it carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.autograd.coo import Coo
from aiograd.autograd.graph import Node, Part
from aiograd.autograd.op import parent_of
from aiograd.autograd.tensor import Tensor, rebuild, wrap
from aiograd.dist.boundary import Crossing, crossed
from aiograd.dist.context import CURRENT, Context
from aiograd.dist.backward.loops import closes_loop
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.errors import ProtocolError
from aiograd.rpc.extension import Arrival, Departure

if TYPE_CHECKING:
    from aiograd.dist.registry import Contexts

EDGE = "edge"  # the key of this message's tensors (departing) or RecvNode (arriving) in `scratch`
LOOPS = "loops"  # the key of a bit per tensor that closes a loop


def _board(node: Node | None, departure: Departure) -> int:
    """Let a tensor that needs grad join the edge of its message: twice its place, and its bit."""
    scratch = departure.scratch
    nodes: list[Node | None] | None = scratch.get(EDGE)
    if nodes is None:
        nodes = scratch[EDGE] = []
    place = len(nodes)
    nodes.append(node)
    if node.__class__ is Part and closes_loop(node, departure.carried.id, departure.to.incarnation):
        scratch[LOOPS] = scratch.get(LOOPS, 0) | 1 << place
        return 2 * place + 1
    return 2 * place


def _alight(node: RecvNode, ticket: int, array: Any) -> Part:
    """The place of a received tensor behind the end of its edge."""
    place = ticket >> 1
    if ticket & 1:
        node.loops |= 1 << place
    return Part(node, place, array.shape, array.dtype)


class TensorTraveller:
    """Takes care of tensors on the way."""

    tag = "tensor"

    def depart(self, tensor: Tensor, departure: Departure) -> Any:
        # A class is code, so a partner gets a plain Tensor.
        cls = None if tensor.__class__ is Tensor or departure.plain else tensor.__class__
        if not tensor.requires_grad:
            return tensor.data, False, -1, cls
        if departure.carried is None:
            return tensor.data, True, -1, cls
        ticket = _board(parent_of(tensor), departure)
        array = tensor.data
        if departure.carried.hooks:
            crossing = Crossing(departure.carried.id, departure.to.name, "forward")
            array = crossed(departure.carried.hooks, crossing, array)
            if array.dtype != tensor.data.dtype:
                return (array, tensor.data.dtype.str), True, ticket, cls
        return array, True, ticket, cls

    def arrive(self, data: Any, arrival: Arrival) -> Tensor:
        array, requires_grad, ticket, cls = data
        if array.__class__ is tuple:  # a hook at the boundary sent it in another dtype
            array = array[0].astype(_floating(array[1]))
        if not isinstance(array, np.ndarray | Coo):
            raise ProtocolError(f"a tensor of {type(array).__name__}", arrival.sender.name)
        node: RecvNode | None = arrival.scratch.get(EDGE)
        if node is not None and ticket >> 1 >= node.outputs:
            raise ProtocolError("a tensor of another message", arrival.sender.name)
        if ticket < 0 or node is None:
            return rebuild(cls or Tensor, array, requires_grad)
        tensor = rebuild(Tensor, array, False)
        tensor._node = _alight(node, ticket, array)
        return tensor


def _floating(name: Any) -> np.dtype[Any]:
    """The dtype of that name, if it is a plain one: others could make giants of small arrays."""
    dtype = np.dtype(str(name)[:8])
    if dtype.kind not in "fc":
        raise ProtocolError(f"a tensor cannot become {dtype}")
    return dtype


class TensorBox:
    """Takes small dense tensors along the quick road: an array, and what there is to say of it."""

    def open(self, tensor: Tensor, departure: Departure | None) -> tuple[Any, int] | None:
        array, node = tensor.data, tensor._node
        if array.__class__ is not np.ndarray:
            return None
        if node is None and not tensor._leaf:
            return array, 0
        if departure is None or departure.carried is None:
            return array, 1
        if departure.carried.hooks:
            return None
        return array, 2 + _board(tensor.accumulator() if node is None else node, departure)

    def close(self, array: Any, note: int, arrival: Arrival | None) -> Tensor:
        node = None if arrival is None or note < 2 else arrival.scratch.get(EDGE)
        if node is not None:
            return wrap(array, _alight(node, note - 2, array))
        tensor = wrap(array)
        tensor._leaf = note > 0
        return tensor


class ContextBaggage:
    """Takes the current context along with calls and replies."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self.current = contexts.current
        self.enter = CURRENT.set

    def depart(self, carried: Context | None, departure: Departure) -> Any:
        if carried is None or carried.released:
            return None
        nodes = departure.scratch.get(EDGE)
        peer = departure.to
        if carried.outcomes.version:
            self._contexts.engine.tell_outcomes(carried, peer)
        if not nodes:
            # The answer of a function or a fetch may need grad, even if no argument does.
            if departure.kind in ("op", "reply", "gradients"):
                return None
            carried.told[peer.name] = peer
            return carried.id, 0, 0
        edge = self._contexts.new_edge()
        loops = departure.scratch.get(LOOPS, 0)
        carried.sends[edge] = SendNode(edge, peer.name, peer.incarnation, tuple(nodes), loops)
        carried.partners[peer.incarnation] = peer.name
        departure.undo.append(lambda: carried.unsend(edge))
        carried.told[peer.name] = peer
        return carried.id, edge, len(nodes)

    def arrive(self, data: Any, arrival: Arrival) -> Context | None:
        if self._contexts.agent.restricts(arrival.sender):
            self._contexts.partners.may_bring(arrival.sender, data)
        context_id, edge, outputs = data
        context = self._contexts.arriving(context_id, arrival.sender, arrival.kind)
        if context is not None and edge:
            sender = arrival.sender
            node = RecvNode(context_id, edge, sender.name, sender.incarnation, outputs)
            context.receives[edge] = arrival.scratch[EDGE] = node
            context.partners[sender.incarnation] = sender.name
        return context
