"""Loops: tensors that came from a peer and went back to it as they were.

    W: y ═══ edge r ═══▶ D: y' ═══ edge e ═══▶ W: y''       no arithmetic at D

Step by step, the gradient of y'' would travel to D, only to come back with the answer to r. So D
answers r at once, and says what is missing: "and what you have for tensor i of e". W finds that on
its own tape. A chain of n calls to one worker, each given the result of the last, is thus played
back in one round trip instead of n.

D, in the middle, decides in each pass, because only D knows whether something observes y' (a hook,
`grad` by it, a boundary hook). A tensor that closes a loop opens none: else both ends could leave
its gradient to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from aiograd.autograd.graph import Node, Part
from aiograd.autograd.sweep import Sweep, plus
from aiograd.dist.nodes import RecvNode, SendNode

Loop = tuple[int, int, int]  # to tensor `slot` of the answered edge: what `edge` has for `place`


def closes_loop(node: Node | None, context_id: int, incarnation: bytes) -> bool:
    """Tell whether the output of a node came from that very incarnation in this context.

    Called for every tensor on its way out, so the cheapest test comes first.
    """
    if node.__class__ is not Part:
        return False
    part: Any = node
    joint = part.joint
    return (
        joint.__class__ is RecvNode
        and joint.incarnation == incarnation
        and joint.context_id == context_id
        # A tensor that closed a loop when it came opens none, or both ends would leave its gradient
        # to the other.
        and not joint.loops >> part.index & 1
    )


def cut(send: SendNode, capture: Container[Node], opened: dict[RecvNode, list[Loop]]) -> SendNode:
    """Return the sending end for one pass, without what its peer finds on its own tape.

    A copy: the next pass may have a hook, and must see the whole end again.
    """
    parents: list[Any] = list(send.parents)
    for place, part in enumerate(parents):
        if send.loops >> place & 1:
            # Observed here: its gradient has to come round, so that the observer sees it.
            if not _is_seen(part, capture) and not _is_seen(part.joint, capture):
                opened.setdefault(part.joint, []).append((part.index, send.edge, place))
                parents[place] = None
    return SendNode(send.edge, send.peer, send.incarnation, tuple(parents))


def _is_seen(node: Any, capture: Container[Node]) -> bool:
    """Tell whether a hook or `grad` wants the gradient of a node."""
    return node.hooks is not None or node in capture


class Closing:
    """What one pass takes from this worker's own tape for edges that a peer has answered."""

    def __init__(self, sweep: Sweep, leaving: Callable[[str, Any], Any] | None = None) -> None:
        self._sweep = sweep
        self._leaving = leaving  # what boundary hooks make of a gradient for a peer
        self._wanted: dict[int, list[tuple[int, SendNode, int]]] = {}  # edge → place, for, slot
        self._found: dict[int, list[Any]] = {}  # gradients that came before they were wanted
        # Answered edges that wait for something of ours: how many pieces, and the slots so far.
        self.open: dict[SendNode, list[Any]] = {}

    def answered(
        self,
        send: SendNode,
        gradients: list[Any] | None,
        missing: Iterable[tuple[int, RecvNode, int]],
    ) -> None:
        """Take the answer to an edge: these gradients, and what we have at those places."""
        slots = [None] * send.outputs if gradients is None else list(gradients)
        count = 0
        for slot, node, place in missing:
            # Still in the sweep: its gradient is not computed yet, so the answer waits for it.
            if node in self._sweep:
                self._wanted.setdefault(node.edge, []).append((place, send, slot))
                count += 1
            elif node.edge in self._found:
                self._add(slots, slot, self._found[node.edge][place], send)
        if count:
            self.open[send] = [count, slots]
        else:
            self._feed(send, slots)

    def take(self, node: Node, gradients: Any) -> Any:
        """Close loops with the gradients of a sink; return those that are left to send.

        `Sweep.drain` calls it for each sink. A closed loop may make more nodes ready, whose results
        close the next loop of a chain in the same drain."""
        if node.__class__ is not RecvNode or not node.loops:
            return gradients
        return self._close(node, gradients)

    def _close(self, node: Any, gradients: list[Any] | None) -> list[Any] | None:
        wanted = self._wanted.pop(node.edge, ())
        for place, send, slot in wanted:
            account = self.open[send]
            account[0] -= 1
            if gradients is not None:
                self._add(account[1], slot, gradients[place], send)
            if not account[0]:
                del self.open[send]
                self._feed(send, account[1])
        if gradients is None:
            return None
        # Gradients that were used here must not travel as well, or they would count twice.
        left = list(gradients)
        for place, _, _ in wanted:
            left[place] = None
        empty = True
        for place, each in enumerate(left):
            if each is not None:
                empty = False
                # Its answer may still be under way and ask for it. It also travels, as the peer may
                # not treat it as a loop in this pass.
                if node.loops >> place & 1:
                    self._found[node.edge] = left
        return None if empty else left

    def forget(self) -> None:
        """Free gradients kept for answers to come: there are none any more."""
        self._found.clear()

    def _add(self, slots: list[Any], slot: int, gradient: Any, send: SendNode) -> None:
        if gradient is not None:
            # It does not cross a boundary now, but without the loop it would have.
            if self._leaving is not None:
                gradient = self._leaving(send.peer, gradient)
            old = slots[slot]
            slots[slot] = gradient if old is None else plus(old, gradient)

    def _feed(self, send: SendNode, slots: list[Any]) -> None:
        # Only "none": then the whole edge is, and nothing behind it needs to be computed.
        for each in slots:
            if each is not None:
                self._sweep.feed(send, slots)
                return
        self._sweep.feed(send, None)
