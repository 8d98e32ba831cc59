"""The two ends of an edge: where a tensor left a worker, and where it arrived at another.

    sender                               receiver
    x ──▶ SendNode  ═══ one message ═══▶ RecvNode ──▶ x' (received)

Forward, an edge is one message that carried tensors with gradients. In backward it is answered
exactly once per pass: the receiver's RecvNode ends its part of the tape, its gradients travel
back, and the sender's SendNode feeds them into the tape there. Both ends know the edge by the
same id. Both also know which of its tensors close a loop (see `loops`): a bit per tensor.

A `LastStep` is another end of the tape: what a library does with gradients of leaves at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.autograd.graph import Accumulate, Hook, Joint, Node


class SendNode(Joint):
    """Where gradients that come back from `peer` enter this worker's tape."""

    __slots__ = ("edge", "incarnation", "loops", "peer")

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    outputs: int
    shape: tuple[int, ...]
    dtype: Any

    edge: int
    peer: str
    incarnation: bytes
    loops: int

    name = "Send"

    def __init__(
        self,
        edge: int,
        peer: str,
        incarnation: bytes,
        parents: tuple[Node | None, ...],
        loops: int = 0,
    ) -> None:
        self.edge, self.peer, self.incarnation = edge, peer, incarnation
        self.parents, self.loops = parents, loops
        self.outputs = len(parents)
        # It has several outputs, so neither shape nor dtype of its own. Hooks sit on its parts.
        self.shape, self.dtype, self.hooks = (), None, None

    def run(self, grad: list[Any], create_graph: bool, retain: bool) -> Sequence[Any]:
        """Pass on the gradients that came back: nothing is computed at the end of an edge."""
        return grad


class RecvNode(Joint):
    """Where this worker's tape ends: gradients that reach it belong to `peer`."""

    # The context is kept, unlike in a SendNode: a pass of another context may reach this node through
    # the tape, and must fail then.
    __slots__ = ("context_id", "edge", "incarnation", "loops", "peer")

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    shape: tuple[int, ...]
    dtype: Any

    context_id: int
    edge: int
    peer: str
    incarnation: bytes
    loops: int

    name = "Recv"

    def __init__(
        self,
        context_id: int,
        edge: int,
        peer: str,
        incarnation: bytes,
        outputs: int,
        loops: int = 0,
    ) -> None:
        self.context_id, self.edge, self.peer = context_id, edge, peer
        self.incarnation, self.loops = incarnation, loops
        # No parents: the tape goes on at the peer, and gradients that arrive here are answers.
        self.parents = ()
        self.outputs = outputs
        self.shape, self.dtype, self.hooks = (), None, None


class LastStep(Joint):
    """What a library does with the gradients of leaves before the context keeps them.

    It may block until other processes do the same, as hooks that average gradients over a process
    group do. So it runs last: when this worker has sent everything in the pass, and awaits nothing.
    """

    __slots__ = ("leaves",)

    leaves: list[Accumulate]  # one per slot

    def finish(self, grads: Sequence[Any], create_graph: bool) -> Sequence[Any]:
        """Return the gradient to keep for each leaf; a slot is None where none came."""
        raise AssertionError(f"{self.name} does not finish gradients")
