"""One worker's part of one backward pass, as a state machine without I/O.

    feed(...)     a message of the pass came in (or, at the originator, the roots)
    drain()       run what became ready; this step computes, and may run in a thread
    collect(...)  what to send now, one message per peer; whether this worker is through
    drain_late()  if `late`: compute what `drain` has deferred, or the last steps, and collect again

Every edge is answered exactly once, with gradients or with none, so nothing waits for a reply
nobody used; `loops` says how some are answered before their gradients have gone round. Three rules
make that exact:

- On joining, a worker sweeps its tape from the roots (originator only) and from every SendNode
  of the context that exists then. RecvNodes that no entry reaches are answered "none" at once.
- Its first message to each peer it once sent tensors to lists the edges it expects answers for.
  The peer answers "none" for those it did not know when it joined: they were lost, refused or
  still under way, so they cannot have influenced the roots. (The listing is what lets peers
  join that would hear of the pass in no other way.)
- An answer "none" for an edge that is not awaited is ignored: the edge was made after the join.
  A gradient for such an edge fails the pass: roots cannot depend on an edge that was made later,
  so it is a gradient that somebody waits for in vain.

Peers are distinguished by their incarnation. A worker that was restarted under its name knows none of
the edges of its predecessor, so it must neither get nor give an answer in its place.

The originator knows the end by returned credit: it starts with 1, every message carries a part,
a worker keeps a part while its sweep is unfinished and otherwise sends all it has onwards or
home. When all credit is home, every gradient is where it belongs: n + 1 hops for a chain of n,
not 2n. Every message also lists the participants that the pass has reached so far, as a set of ranks.
Credit is never lost in a pass that ends well, so the originator then knows all participants, and can
report the outcome to them.

A gradient for a peer leaves first: work for gradients that stay here is deferred until then, so
that both workers compute at once. The originator is no such peer: it waits for the end of the pass,
and so for the deferred work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiograd.autograd.graph import Accumulate, Node
from aiograd.autograd.sweep import Sweep
from aiograd.autograd.tensor import Tensor
from aiograd.dist.backward.credit import ALL, NONE, Credit, is_all, split, together
from aiograd.dist.backward.loops import Closing, Loop
from aiograd.dist.backward.plan import Topology
from aiograd.dist.nodes import LastStep, RecvNode, SendNode
from aiograd.errors import BackwardFailed, GradError, WorkerLost
from aiograd.rpc.directory import PeerInfo

PassKey = tuple[int, int]  # the id of its context, and its number
# An edge, the gradients of its tensors or none at all, and what its sender finds on its own tape.
Answer = tuple[int, list[Any] | None, list[Loop] | None]

@dataclass(slots=True)
class Message:
    """What one worker sends another in a pass."""

    to: bytes  # the incarnation of the recipient
    name: str  # and its name
    answers: list[Answer] = field(default_factory=list)
    expected: list[int] | None = None  # in the first message to a peer: edges we await answers for
    credit: Credit = NONE
    invites: bool = False  # the peer may not have heard of the pass yet


class Terms(NamedTuple):
    """What a pass asks of every participant; travels with each of its messages."""

    retain_graph: bool = False
    create_graph: bool = False
    keep: bool = True  # whether leaves keep their gradients in the context (backward) or not (grad)


class Pass:
    """The state of one pass on one worker."""

    key: tuple[int, int]
    originator: PeerInfo
    here: PeerInfo
    terms: Terms
    context_id: int
    number: int
    late: bool

    def __init__(
        self,
        key: PassKey,
        originator: PeerInfo,
        here: PeerInfo,
        terms: Terms,
        topology: Topology,
        leaving: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self.key, self.originator, self.here, self.terms = key, originator, here, terms
        self.context_id, self.number = key
        self.topology = topology
        self.gradients: dict[Tensor, Any] = {}  # leaf → its gradient in this pass
        self.awaited: dict[int, SendNode] = dict(topology.awaited)  # a copy: the next pass may use the topology again
        self.credit: Credit = NONE
        self.informed: dict[bytes, str] = {}  # peers that got a message of ours, and their names
        self.heard: dict[bytes, str] = {}  # peers that sent us one
        # Participants that we know of, a bit for each rank: a set that costs a few bytes to send.
        self.reached: int = 1 << here.rank
        self.sweep: Sweep = Sweep(
            (),
            retain_graph=terms.retain_graph,
            create_graph=terms.create_graph,
            capture=topology.capture,
            counts=topology.counts,
            halves=None if terms.create_graph else topology.halves(originator.incarnation),
        )
        self.hold: Any = None  # gives back a partner's share at the end, if a partner invited us
        # A failure that was known here when the pass began: the pass undoes it by ending well.
        self.retries: BackwardFailed | None = None
        self._leaving = leaving  # what boundary hooks make of a gradient for a peer
        self._closing: Closing | None = None  # most passes have no loops
        if topology.closes_loops:
            self._closing = Closing(self.sweep, leaving)
        self._out: dict[bytes, Message] = {}
        self._first = True
        # There is something to drain and to collect, maybe in a thread just now. Only `collect` ends
        # that: a pass that counted as complete while a thread computes would show partial gradients.
        self._fed = False
        self.late = False  # work was deferred
        self._last: list[tuple[LastStep, list[Any]]] = []  # with the gradients of their leaves
        # Nobody will answer for a receiver that is gone. "None" is right unless a root depends on
        # what it received, and then a gradient for its RecvNode fails the pass (see `_answer`).
        for send in topology.dead:
            self.sweep.feed(send, None)

    @property
    def complete(self) -> bool:
        """Whether every awaited answer has come and all work here is done."""
        if self.awaited or self._fed or self.late or self._last:
            return False
        # Answered edges may still wait for gradients of our own tape.
        return self._closing is None or not self._closing.open

    @property
    def over(self) -> bool:
        """At the originator: whether the pass has ended everywhere."""
        return is_all(self.credit) and self.complete

    def start(self, roots: Iterable[tuple[Node, Any]]) -> None:
        """At the originator: feed the roots and take all credit."""
        self.credit = ALL
        self._fed = True
        for node, gradient in roots:
            self.sweep.feed(node, gradient)

    def feed(
        self,
        sender: PeerInfo,
        answers: Iterable[Answer],
        expected: list[int] | None,
        credit: Credit,
        reached: int,
    ) -> None:
        """Take in a message of the pass."""
        peer = sender.incarnation
        self.heard[peer] = sender.name
        self.reached |= reached
        self.credit = together(self.credit, credit)
        # Whatever is wrong below fails the pass, and a failed pass needs no credit to end.
        for edge, gradients, loops in answers:
            send = self.awaited.get(edge)
            if send is None or send.incarnation != peer:
                # "None" for an edge made after the join is harmless. A gradient is not: some worker
                # waits for it, under an edge id that this incarnation does not await.
                if any(gradient is not None for gradient in gradients or ()):
                    raise GradError(self._unknown(sender.name, edge), "edge")
            else:
                if gradients is not None and len(gradients) != send.outputs:
                    raise GradError(
                        f"{send.peer} answered edge {edge} with {len(gradients)} gradients "
                        f"for {send.outputs} tensors",
                        "shape",
                    )
                del self.awaited[edge]
                self._fed = True
                if loops:
                    if self._closing is None:
                        self._closing = Closing(self.sweep, self._leaving)
                    self._closing.answered(send, gradients, self._places(send, loops))
                else:
                    self.sweep.feed(send, gradients)
        # Edges of the peer that we did not know when we joined: lost, refused or still under way.
        for edge in expected or ():
            known = self.topology.receives.get(edge)
            if known is None or known.incarnation != peer:
                self._to(peer, sender.name).answers.append((edge, None, None))

    def _unknown(self, sender: str, edge: int) -> str:
        return (
            f"{sender} sent a gradient for edge {edge}, which {self.here.name} does not await: "
            "it was answered before, or belongs to another start of this worker"
        )

    def _places(self, send: SendNode, loops: list[Loop]) -> Iterator[tuple[int, RecvNode, int]]:
        """Yield where on our tape the rest of an answer is; not for edges that came after we joined."""
        for slot, edge, place in loops:
            node = self.topology.receives.get(edge)
            if node is None:
                continue
            is_loop = node.loops >> place & 1
            if node.incarnation != send.incarnation or slot >= send.outputs or not is_loop:
                raise GradError(f"{send.peer} answered edge {send.edge} with no loop", "loop")
            yield slot, node, place

    def drain(self) -> list[tuple[Node, Any]]:
        """Run every node whose inputs are all there, but defer work that no peer waits for.

        Computes only, and never awaits: with `feed` and `collect` on the loop, a pass needs no lock.
        """
        sinks = self.sweep.drain(None if self._closing is None else self._closing.take)
        if self.sweep.late and not self._is_urgent(sinks):
            sinks += self.sweep.drain_late()
        return sinks

    def drain_late(self) -> list[tuple[Node, Any]]:
        """Run the deferred work; the last steps of the pass if there is no other."""
        if self.sweep.late:
            return self.sweep.drain_late()
        last, self._last = self._last, []
        sinks: list[tuple[Node, Any]] = []
        for step, gradients in last:
            try:
                found = step.finish(gradients, self.terms.create_graph)
            except Exception:
                self.sweep.failed = step
                raise
            sinks += zip(step.leaves, found, strict=True)
        return sinks

    def _is_urgent(self, sinks: Iterable[tuple[Node, Any]]) -> bool:
        """Whether a peer could compute with one of these gradients while we do the deferred work."""
        # Not ourselves, either: calls to oneself are edges, too, but one worker computes one thing.
        at_home = (self.originator.incarnation, self.here.incarnation)
        for node, gradient in sinks:
            if isinstance(node, RecvNode) and gradient is not None:
                if node.incarnation not in at_home:
                    return True
        return False

    def collect(self, sinks: Iterable[tuple[Node, Any]]) -> list[Message]:
        """Keep what reached leaves; return the messages to send, each with its share of credit."""
        self._fed, self.late = False, bool(self.sweep.late)
        for node, gradient in sinks:
            if isinstance(node, RecvNode):
                self._answer(node, gradient)
            elif isinstance(node, Accumulate):
                if gradient is not None and self.terms.keep:
                    self.gradients[node.variable] = gradient
            elif gradient is not None and isinstance(node, LastStep):
                self._last.append((node, gradient))
        # They may block until peers have gone on, so everything for peers must have left before.
        if self._last and not self.awaited and (self._closing is None or not self._closing.open):
            self.late = True
        # With the first answers, so that in ordinary programs the listing costs no message of its own.
        if self._first:
            self._first = False
            self._begin()
        messages, self._out = list(self._out.values()), {}
        self._share_credit(messages)
        return messages

    def _begin(self) -> None:
        """Add to the first messages which edges need no gradient, and which we await."""
        for node in self.topology.unreached:
            self._answer(node, None)
        for edge, send in self.awaited.items():
            message = self._to(send.incarnation, send.peer)
            if message.expected is None:
                message.expected = []
            message.expected.append(edge)

    def _to(self, peer: bytes, name: str) -> Message:
        message = self._out.get(peer)
        if message is None:
            message = self._out[peer] = Message(peer, name)
        return message

    def _answer(self, node: RecvNode, gradients: list[Any] | None) -> None:
        # An edge belongs to the context it crossed in: its other end is not in this pass.
        if node.context_id != self.context_id:
            if gradients is not None:
                raise GradError(
                    f"this pass of context {self.context_id} reached a tensor that was received "
                    f"in context {node.context_id}; a graph must not cross contexts",
                    "context",
                )
        elif node.incarnation in self.topology.gone:
            # An unused result of a dead worker does no harm; a used one must not be dropped silently.
            if gradients is not None:
                raise WorkerLost(node.peer, "no", "it died before the backward pass")
        else:
            loops = self.topology.loops.get(node)
            self._to(node.incarnation, node.peer).answers.append((node.edge, gradients, loops))

    def _share_credit(self, messages: list[Message]) -> None:
        complete = self.complete
        if complete and self._closing is not None:
            self._closing.forget()
        # Credit kept while the sweep is unfinished is what stops the originator from ending the pass
        # when a gradient here still waits for a "none" that carries no credit.
        if not messages:
            # Nothing to send, so credit goes home of its own: the last hop of the pass.
            home = self.originator
            if not complete or self.here.incarnation == home.incarnation:
                return
            messages.append(Message(home.incarnation, home.name))
        keep = 0 if complete else 1
        share, rest = split(self.credit, len(messages) + keep)
        for message in messages:
            message.credit = share
            # Invited by the first message only, and not if the peer has sent us one: it has joined.
            if message.to not in self.informed:
                self.informed[message.to] = message.name
                message.invites = message.to not in self.heard
        if keep:
            self.credit = rest
        else:
            # With the remainder of the division, so that all of it leaves.
            messages[-1].credit = rest
            self.credit = NONE

    def names(self, incarnation: bytes) -> bool:
        """Tell whether this pass needs that incarnation: by an edge, or by a message."""
        # By a message: it may hold credit. By an edge: its answer, or the answer to it, will be missed,
        # even if the pass has not reached it yet.
        if incarnation in self.informed or incarnation in self.heard:
            return True
        if incarnation in self.topology.gone:
            return False  # lost before we joined: its edges count as "none"
        sends, receives = self.topology.awaited.values(), self.topology.receives.values()
        return any(send.incarnation == incarnation for send in sends) or any(
            node.incarnation == incarnation for node in receives
        )

    def waits_for(self) -> str:
        """Describe which answers this worker waits for, for people."""
        owed: dict[str, int] = {}
        for send in self.awaited.values():
            owed[send.peer] = owed.get(send.peer, 0) + 1
        if not owed:
            return f"{self.here.name} waits for nobody"
        edges = ", ".join(f"{count} edges of {peer}" for peer, count in owed.items())
        return f"{self.here.name} waits for {edges}"
