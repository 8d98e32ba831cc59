"""How tensors and contexts travel with calls: what `dist` plugs into an agent.

A tensor that requires grad, sent inside a context, leaves a `SendNode` behind and arrives
behind a `RecvNode`; outside a context it arrives as an independent leaf with the same flag. One
message is one edge, however many tensors it carries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy import ndarray

from aiograd.autograd.coo import Coo
from aiograd.autograd.graph import Node, Part
from aiograd.autograd.op import parent_of
from aiograd.autograd.tensor import Tensor, rebuild, wrap
from aiograd.dist.boundary import Crossing, crossed
from aiograd.dist.context import CURRENT, Context
from aiograd.dist.backward.loops import closes_loop
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.errors import ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival, Departure
from aiograd.rpc.future import CallInfo
from aiograd.wire.safecodec import GROWN

EDGE = "edge"  # the key of this message's nodes (departing) or RecvNode (arriving) in `scratch`
LOOPS = "loops"  # the key of a bit per tensor that closes a loop

# The note that travels with an array and says which tensor it is. From ON_EDGE up it also says which
# tensor of the message's edge: ON_EDGE + 2 * place, plus 1 if the tensor closes a loop.
NO_GRAD: Final = 0
LEAF: Final = 1  # requires grad, but no graph crosses: it arrives as an independent leaf
ON_EDGE: Final = 2


def join_edge(node: Node, departure: Departure) -> int:
    """Let a tensor that `node` made join the edge of a message; its note."""
    scratch = departure.scratch
    nodes: list[Node | None] | None = scratch.get(EDGE)
    if nodes is None:
        nodes = scratch[EDGE] = []
    # One message is one edge, so the place in this list tells its tensors apart. The codec meets an
    # object only once, so a tensor that is sent twice in one message has one place, too.
    place = len(nodes)
    nodes.append(node)
    if node.__class__ is Part and closes_loop(node, departure.carried.id, departure.to.incarnation):
        scratch[LOOPS] = scratch.get(LOOPS, 0) | 1 << place
        return ON_EDGE + 2 * place + 1
    return ON_EDGE + 2 * place


def _end_of_edge(array: Any, note: int, arrival: Arrival | CallInfo | None) -> Part | None:
    """Return the node of a tensor that came over an edge; None if no graph crosses."""
    # No end in `scratch` if the context was released meanwhile.
    end: RecvNode | None
    if note < ON_EDGE or arrival is None or (end := arrival.scratch.get(EDGE)) is None:
        return None
    place = note - ON_EDGE >> 1
    # Both ends must agree which tensors close loops: the receiver learns it here.
    if note & 1:
        end.loops |= 1 << place
    return Part(end, place, array.shape, array.dtype)


class TensorTraveller:
    """Takes tensors from worker to worker, in two forms under one set of rules.

    The general form (`depart`, `arrive`) is for any tensor, and for restricted peers: it checks
    what arrives. The array form (`open`, `close`) is for dense Tensors on the fast path of
    `wire.fastcodec`: an array and its note, which that codec packs without the general one.
    """

    tag = "tensor"

    def depart(self, tensor: Tensor, departure: Departure) -> Any:
        """Take a tensor apart: its array, its note, its class, and its dtype if a hook changed it."""
        array, note = tensor.raw, NO_GRAD
        if tensor.requires_grad:
            node = None if departure.carried is None else parent_of(tensor)
            note = LEAF if node is None else join_edge(node, departure)
        # A class is code, so a restricted peer gets a plain Tensor.
        cls = None if tensor.__class__ is Tensor or departure.plain else tensor.__class__
        if note >= ON_EDGE and departure.carried.hooks:
            crossing = Crossing(departure.carried.id, departure.to.name, "forward")
            array = crossed(departure.carried.hooks, crossing, array)
            if array.dtype != tensor.raw.dtype:
                return array, note, cls, tensor.raw.dtype.str
        return array, note, cls, None

    def arrive(self, data: Any, arrival: Arrival) -> Tensor:
        """Put a tensor together; ProtocolError if a peer sent something else."""
        array, note, cls, dtype = data
        if dtype is not None:  # a boundary hook sent it in another dtype
            array = _as_sent(array, dtype, arrival)
        # A class is code: `rebuild` would make an object of it without its constructor, and of one
        # that is exposed for something else. From a restricted peer all come as plain Tensors.
        if arrival.restricted:
            cls = None
        if cls is not None and not (isinstance(cls, type) and issubclass(cls, Tensor)):
            raise ProtocolError("a tensor of a class that is no Tensor", arrival.sender.name)
        if not isinstance(array, np.ndarray | Coo):
            raise ProtocolError(f"a tensor of {type(array).__name__}", arrival.sender.name)
        node: RecvNode | None = arrival.scratch.get(EDGE)
        if node is not None and note - ON_EDGE >> 1 >= node.outputs:
            raise ProtocolError(
                f"tensor {note - ON_EDGE >> 1} of an edge with {node.outputs}", arrival.sender.name
            )
        part = _end_of_edge(array, note, arrival)
        if part is not None:
            return wrap(array, part)
        return rebuild(cls or Tensor, array, note != NO_GRAD and (arrival.origin() or True))

    def open(self, tensor: Tensor, departure: Departure | None) -> tuple[Any, int] | None:
        """Return a tensor's array and note; None if it needs the general form."""
        array = tensor.raw
        if array.__class__ is not ndarray:
            return None
        if departure is None or departure.carried is None:
            return array, LEAF if tensor.requires_grad else NO_GRAD
        node = parent_of(tensor)
        if node is None:
            return array, NO_GRAD
        # A hook may change the dtype, which only the general form can say. Asked before the tensor
        # joins the edge, because the general form lets it join again.
        if departure.carried.hooks:
            return None
        return array, join_edge(node, departure)

    def close(self, array: Any, note: int, arrival: Arrival | CallInfo | None) -> Tensor:
        """Return the tensor that `open` took apart. Only trusted peers send this form.

        `arrival` is its message, or all that matters of a reply without baggage: the call."""
        if note == NO_GRAD:
            return wrap(array)
        part = _end_of_edge(array, note, arrival)
        if part is not None:
            return wrap(array, part)
        # Of an argument, the gradient is computed right where it is wanted. Of a result, it stops
        # here, so a local pass that ends here says where the graph was cut.
        return wrap(array, None, (arrival is not None and arrival.origin()) or True)


# By name, since `np.dtype` knows more: "c32" takes 32 bytes for each byte that came.
_FLOATING: Final = {np.dtype(code).str: np.dtype(code) for code in "efdFD"}


def _as_sent(array: Any, name: Any, arrival: Arrival) -> Any:
    """Return an array in the dtype that it had before a hook changed it; ProtocolError for others.

    A hook may send floats as integers, but neither complex numbers as real ones nor the reverse.
    """
    dtype = _FLOATING.get(name) if type(name) is str else None
    if (
        dtype is None
        or not isinstance(array, np.ndarray | Coo)
        or (array.dtype.kind == "c") != (dtype.kind == "c")
    ):
        raise ProtocolError("a tensor of a malformed dtype", arrival.sender.name)
    found = array.astype(dtype)
    # It counts for a partner as it is now: eight bytes for each that came, perhaps.
    arrival.scratch[GROWN] = arrival.scratch.get(GROWN, 0) + max(found.nbytes - array.nbytes, 0)
    return found


class Contexts(Protocol):
    """The contexts of this worker."""

    def current(self) -> Context | None:
        """Return the context that a call made here and now carries."""

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""

    def new_edge(self) -> int:
        """Return the id of a new edge."""

    def arriving(self, context_id: int, sender: PeerInfo, kind: str) -> Context | None:
        """Return the context of a message, made on first sight; None if it was released."""


class Reports(Protocol):
    """What sends outcomes of passes in front of other messages."""

    def send(self, context: Context, peer: PeerInfo) -> None:
        """Send a peer what it does not know of a context's passes."""


class Access(Protocol):
    """What checks messages of restricted peers."""

    def may_bring(self, sender: PeerInfo, data: Any) -> None:
        """Raise if a restricted peer's message must not bring this baggage."""

    def brought(self, sender: PeerInfo, context: Context, edge: int, new: bool) -> None:
        """Count what a restricted peer's message has added here."""

    def keep(self, sender: PeerInfo, context: Context, size: int) -> None:
        """Let the memory of a message count while its context is open."""


class ContextBaggage:
    """Carries the current context with calls and replies."""

    def __init__(
        self,
        contexts: Contexts,
        reports: Reports,
        access: Access,
    ) -> None:
        self._contexts, self._reports, self._access = contexts, reports, access
        # Bound, not wrapped: every call asks for them.
        self.current: Callable[[], Context | None] = contexts.current
        self.enter: Callable[[Context | None], Token[Context | None]] = CURRENT.set

    def depart(self, carried: Context | None, departure: Departure) -> Any:
        """Return what rides with a message, and make the sending end of its edge.

        Runs after the payload is encoded, so `departure.scratch` knows all tensors of the message.
        """
        if carried is None or carried.released:
            return None
        nodes = departure.scratch.get(EDGE)
        peer = departure.to
        if carried.outcomes.version:  # 0, and no call, until a pass has ended
            self._reports.send(carried, peer)
        if not nodes:
            # The answer of a function or a fetch may need grad, even if no argument does. The result
            # of an op without such an argument never does, and nothing answers replies and gradients.
            if departure.kind in ("op", "reply", "gradients"):
                return None
            carried.recipients[peer.name] = peer
            return carried.id, 0, 0
        edge = self._contexts.new_edge()
        loops = departure.scratch.get(LOOPS, 0)
        carried.sends[edge] = SendNode(edge, peer.name, peer.incarnation, tuple(nodes), loops)
        carried.edge_peers[peer.incarnation] = peer.name
        # An edge whose message never left would never be answered.
        departure.undo.append(partial(carried.unsend, edge))
        carried.recipients[peer.name] = peer
        return carried.id, edge, len(nodes)

    def arrive(self, data: Any, arrival: Arrival) -> Context | None:
        """Find or make the context of a message, and the receiving end of its edge.

        Runs before the payload is decoded, so that its tensors find the end in `arrival.scratch`.
        """
        new = self._may_bring(data, arrival) if arrival.restricted else None
        context_id, edge, outputs = data
        context = self._contexts.arriving(context_id, arrival.sender, arrival.kind)
        if context is not None and edge:
            sender = arrival.sender
            node = RecvNode(context_id, edge, sender.name, sender.incarnation, outputs)
            context.receives[edge] = arrival.scratch[EDGE] = node
            context.edge_peers[sender.incarnation] = sender.name
        if new is not None and context is not None:
            self._access.brought(arrival.sender, context, edge, new)
        return context

    def _may_bring(self, data: Any, arrival: Arrival) -> bool | None:
        """Check a restricted peer's baggage; whether it brings a new context, None for a reply."""
        self._access.may_bring(arrival.sender, data)
        # A reply answers a call of our own, in a context that we brought there: nothing is counted.
        return None if arrival.kind == "reply" else self._contexts.find(data[0]) is None

    def keep(self, arrival: Arrival, size: int) -> bool:
        """Let the tape count for the memory of a restricted peer's message, if it came to the tape."""
        if EDGE not in arrival.scratch:
            return False
        self._access.keep(arrival.sender, arrival.carried, size)
        return True
