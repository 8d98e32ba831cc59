"""The async backward engine: carries the messages of passes between workers.

All decisions are those of `Pass`; this module gives it events and sends what it returns.
Messages are one-way, one per peer and drain, to all peers at once:

    gradients           answers, expected edges, a share of credit, the ranks the pass has reached
    gradients.failed    a participant reports to the originator that it cannot go on  (`abort.py`)
    gradients.abort     the originator ends the pass; each worker drops its part and passes it on
    gradients.outcomes  how passes ended (`reports.py`): in front of the next message of the context
                        to a peer; if there is none for a while, of its own

Peers are addressed by incarnation: a message for a worker that is gone fails here, and never
reaches its successor.

State changes on the loop only, between awaits, so it needs no lock. A drain with heavy arrays or with
code of the user's runs in a thread; messages that arrive meanwhile wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from pickle import PickleBuffer
from time import perf_counter  # a measurement for people, never a decision
from typing import Any, Protocol

from aiograd.autograd.backward import entries as roots_of
from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import Tensor
from aiograd.dist.backward.abort import AbortProtocol
from aiograd.dist.backward.active import ActivePass, Late, PassTable
from aiograd.dist.backward.codec import PackedAnswer, decode, encode
from aiograd.dist.backward.credit import Credit
from aiograd.dist.backward.plan import Topology
from aiograd.dist.backward.reports import OutcomeReports
from aiograd.dist.backward.state import Answer, Message, Pass, Terms
from aiograd.dist.boundary import crossed_all
from aiograd.dist.channel import Channel
from aiograd.dist.context import CURRENT, Context
from aiograd.dist.foreign import entries as any_roots_of
from aiograd.dist.foreign import library_of
from aiograd.dist.inspect import explain
from aiograd.dist.lost_peers import LostPeers
from aiograd.errors import DeadlineExceeded, GradError, PassTimedOut, UnknownContext, WorkerLost
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.link import Link
from aiograd.rpc.options import check_timeout

# A gradient message: answers, expected edges, credit, ranks reached. `Pass.feed` takes these.
Body = tuple[list[Answer | PackedAnswer], list[int] | None, Credit, int]
# In the first message to a peer: name, rank and incarnation of the originator, then the Terms.
# Last, if the pass is part of a trace: its W3C `traceparent`. Partners neither get nor give it.
Invitation = (
    tuple[str, int, bytes, bool, bool, bool] | tuple[str, int, bytes, bool, bool, bool, str]
)


class ContextLookup(Protocol):
    """The contexts of this worker."""

    def get(self, context_id: int) -> Context:
        """Return this worker's part of a context; UnknownContext if it has none."""

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""

    def arriving(self, context_id: int, sender: PeerInfo, kind: str) -> Context | None:
        """Return the context of a message, made on first sight; None if it was released."""

    def all(self) -> list[Context]:
        """Return all open contexts."""


class Engine:
    """All passes that run on one worker."""

    def __init__(self, channel: Channel, contexts: ContextLookup, lost_peers: LostPeers) -> None:
        self._channel, self._contexts, self._lost_peers = channel, contexts, lost_peers
        self.passes: PassTable = PassTable()
        self.abort: AbortProtocol = AbortProtocol(channel, self.passes, contexts, lost_peers)
        self.reports: OutcomeReports = OutcomeReports(channel, self.passes, contexts)
        # A restarted worker must not reuse the numbers of its former self.
        self._counter = itertools.count(channel.random_start())

    def running(self) -> int:
        """Return how many passes have something to do or to wait for here."""
        return sum(active.waits for active in self.passes.all())

    def close(self) -> None:
        """Report no outcomes any more; the worker is closing."""
        self.reports.close()

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    async def backward(
        self,
        context: Context,
        roots: Sequence[Tensor],
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Run a pass from scalar roots; its gradients join the totals of the context.

        Raises BackwardFailed when the pass has ended on every participant that can be reached.
        """
        self._channel.check_affinity()
        context.check()
        seconds = self._budget(timeout)
        for root in roots:
            if root.__class__ is not Tensor and (library := library_of(root)) is not None:
                context.foreign = library
        find = roots_of if context.foreign is None else any_roots_of
        entries = find(roots, create_graph=create_graph, allow_leaf=False)
        context.roots = [node for node, _ in entries]
        terms = Terms(retain_graph or create_graph, create_graph, True)
        await self._finish(self._start(context, terms, entries, ()), seconds)

    def from_value(
        self, value: Any, context_id: int | None, retain_graph: bool
    ) -> Awaitable[None] | None:
        """Start a pass from a value that an RRef holds here; without a context, a local one."""
        library = library_of(value)
        if not isinstance(value, Tensor) and library is None:
            raise GradError(
                f"backward needs a Tensor, but the RRef holds {type(value).__name__}", "not_tensor"
            )
        if context_id is None:
            if library is None:
                value.backward(retain_graph=retain_graph)
            else:
                library.backward(value, retain_graph)
            return None
        return self.backward(self._contexts.get(context_id), [value], retain_graph=retain_graph)

    async def derivatives(
        self,
        context: Context,
        entries: Sequence[tuple[Node, Any]],
        capture: Sequence[Node],
        *,
        retain_graph: bool,
        create_graph: bool,
    ) -> dict[Node, Any]:
        """Run a pass that keeps no gradients but returns those of the `capture` nodes."""
        context.check()
        seconds = self._budget(None)
        terms = Terms(retain_graph, create_graph, False)
        active = self._start(context, terms, entries, capture)
        state, finish = active.state, self._finish(active, seconds)
        del active  # it holds the error of a pass that fails, whose traceback holds this frame
        await finish
        captured, condensed = state.sweep.captured, state.topology.condensed
        if condensed is None:
            return captured
        return {node: captured.get(condensed.wanted.get(node, node)) for node in capture}

    async def explain(self, context_id: int) -> str:
        """Describe who waits for whom in the passes of a context."""
        return await explain(self.passes, self._channel, context_id)

    def _start(
        self,
        context: Context,
        terms: Terms,
        entries: Sequence[tuple[Node, Any]],
        capture: Sequence[Node],
    ) -> ActivePass:
        me = self._channel.me
        number = me.rank << 48 | next(self._counter)
        state = self._pass(context, number, me, terms, entries, capture)
        done = self._channel.future()
        active = ActivePass(context, state, done, self._lost_peers.count)
        self.passes.add(active)
        context.outcomes.begun(number)
        active.trace = self._channel.trace_pass()
        condensed = state.topology.condensed
        if condensed is not None:
            entries = [(condensed.stands.get(node, node), value) for node, value in entries]
        state.start(entries)
        self._advance(active)
        return active

    def _pass(
        self,
        context: Context,
        number: int,
        originator: PeerInfo,
        terms: Terms,
        entries: Sequence[tuple[Node, Any]] = (),
        capture: Sequence[Node] = (),
    ) -> Pass:
        topology = self._topology(context, entries, terms, capture)
        leaving = context.leaving if context.hooks else None
        key = (context.id, number)
        state = Pass(key, originator, self._channel.me, terms, topology, leaving)
        # If it ends well, that undoes this failure (see `Context.ended_well`).
        state.retries = context.failure
        context.passes[number] = state
        return state

    def _topology(
        self,
        context: Context,
        entries: Sequence[tuple[Node, Any]],
        terms: Terms,
        capture: Sequence[Node],
    ) -> Topology:
        """Return what a pass will visit here: as the last one did, if nothing has changed since."""
        roots = [node for node, _ in entries] if entries else []
        sends, receives = context.sends, context.receives
        # A peer that was lost while the context was open stays lost for it, even if the two find
        # each other again: messages of the context got lost with their session. The directory is
        # no help here: it may not know the successor of a worker yet that we have edges to.
        lost = context.lost
        gone = [peer for peer in context.edge_peers if peer in lost] if lost else []
        known = context.topology
        if known is not None and not capture and not context.hooks:
            if known.fits(roots, gone, len(sends), len(receives), terms.keep):
                return known
        again = terms.retain_graph and not capture and not context.hooks
        condensed = None
        if context.foreign is not None:
            sends = dict(sends)  # a copy: threads may add to it
            condensed = context.foreign.condense(roots, sends, capture, terms.keep)
            sends = {edge: condensed.send(send) for edge, send in sends.items()}
            roots = [condensed.stands.get(node, node) for node in roots]
            capture = [condensed.wanted.get(node, node) for node in capture]
        # Boundary hooks must see every gradient that leaves, so none may be left to a loop.
        loops = not context.hooks
        found = Topology(
            sends, receives, roots, capture=capture, gone=gone, loops=loops, condensed=condensed
        )
        # Not held on to if the graph will be freed; nor if it depends on this pass alone.
        context.topology = found if again else None
        return found

    async def _finish(self, active: ActivePass, seconds: float) -> None:
        """Wait for the end of a pass we started; end it everywhere if it does not end well."""
        state, done = active.state, active.done
        late: PassTimedOut | None = None
        assert done is not None
        try:
            if not done.done() and seconds != math.inf:
                active.limit(self._channel.deadline_in(seconds))
            await done
        except Late:
            owing = sorted({send.peer for send in state.awaited.values()}) or [self._channel.name]
            why = f"it did not end within {seconds:g} s; {state.waits_for()}"
            late = PassTimedOut(owing[0], "", why, seconds)
            await self.abort.end(active, late)
            raise late from DeadlineExceeded(owing[0], "backward", seconds)
        except asyncio.CancelledError:
            # Without waiting for acknowledgements: a cancellation must pass through at once.
            self.abort.cancelled(active)
            raise
        else:
            self._succeeded(active)
        finally:
            active.unlimit()
            self.passes.discard(active.key)
            if active.trace is not None:
                active.trace.end(None if state.over else sys.exception())
            # The traceback of an error holds this frame, which must not hold the error in turn.
            del active, done, late

    def _succeeded(self, active: ActivePass) -> None:
        """Decide that a pass ended well. From here on nobody may show it as failed."""
        context, state, me = active.context, active.state, self._channel.me
        context.outcomes.decided(state.number, well=True)
        context.ended_well(me.incarnation, state.number)
        # A pass that keeps no gradients has no number that anybody could want to read.
        others = state.reached & ~(1 << me.rank) if state.terms.keep else 0
        if others and not context.released:
            self.reports.announce(context, others)

    def _budget(self, timeout: float | None) -> float:
        """Return the seconds a pass may take: never more than the call in which it runs has left."""
        left = self._channel.time_left()
        if timeout is not None:
            return min(check_timeout(timeout), left)
        return left if left != math.inf else self._channel.default_timeout

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _advance(self, active: ActivePass) -> None:
        """Drain and send: here or, when that could take long, in a thread."""
        if active.heavy:
            active.draining = True
            trace = active.trace
            variables = None if trace is None else trace.variables
            self._channel.spawn(self._advance_in_thread(active), variables)
            return
        self._step(active, active.state.drain)

    def _step(self, active: ActivePass, drain: Callable[[], list[tuple[Node, Any]]]) -> None:
        began = perf_counter()
        try:
            sinks = drain()
            active.computed(perf_counter() - began)
            self._send(active, sinks)
        except Exception as error:
            self.abort.failed(active, error)
        else:
            if active.state.late:
                # In the next tick: the messages just posted leave at the end of this one.
                self._channel.next_tick(self._advance_late, active)

    def _advance_late(self, active: ActivePass) -> None:
        if active.state.late and self.passes.is_live(active):
            # The peer that waits for our message may share this core with us.
            self._channel.yield_core()
            self._step(active, active.state.drain_late)

    async def _advance_in_thread(self, active: ActivePass) -> None:
        drain = active.state.drain
        # Not the context of the task that has begun the pass: other steps of the pass begin with
        # messages, and hooks must not depend on which step they run in.
        CURRENT.set(None)
        try:
            while True:
                began = perf_counter()
                sinks = await self._channel.in_thread(drain)
                active.computed(perf_counter() - began)
                # It may have been aborted while the thread computed: its gradients are void then.
                if not self.passes.is_live(active):
                    return
                self._send(active, sinks)
                # Messages first: a peer may wait for an answer to them, and for deferred work none.
                if active.inbox:
                    active.feed()
                    drain = active.state.drain
                elif active.state.late:
                    drain = active.state.drain_late
                else:
                    return
        except Exception as error:
            self.abort.failed(active, error)
        finally:
            active.draining = False
            del active  # it holds the error that the pass ends with, whose cause holds this frame

    def _send(self, active: ActivePass, sinks: list[tuple[Node, Any]]) -> None:
        context = active.context
        # All messages of a drain at once: peers compute their parts in parallel.
        for message in active.state.collect(sinks):
            began = 0.0 if active.trace is None else perf_counter()
            if context.hooks and message.answers:
                active.traced(_cross, context, message)
            self._post(active, message)
            if active.trace is not None:
                active.posted(message.name, message.answers, began)
        if active.done is not None:
            self._end_if_over(active, active.done)

    def _post(self, active: ActivePass, message: Message) -> None:
        """Post a gradient message: the one place that chooses its encoding."""
        context, state, channel = active.context, active.state, self._channel
        link = self._link(active, message)
        invitation: Invitation | None = None
        if message.invites:
            invitation = (*state.originator.identity, *state.terms)
            if active.trace is not None and active.trace.traceparent and not link.restricted:
                invitation = (*invitation, active.trace.traceparent)
        rest = (message.expected, message.credit, state.reached)
        if not link.restricted:
            buffers: list[PickleBuffer] = []
            packed = encode(message.answers, buffers)
            if packed is not None:
                # Recorded gradients are Tensors, which `encode` leaves to the general codec: packed
                # ones never need the context, in which `create_graph` records their edges.
                args = (context.id, state.number, invitation, (packed, *rest))
                channel.post_plain(link, "gradients", args, buffers)
                return
        carried = context if state.terms.create_graph else None
        body = (message.answers, *rest)
        channel.post(
            link.peer, "gradients", context.id, state.number, invitation, body, carried=carried
        )

    def _link(self, active: ActivePass, message: Message) -> Link:
        """Return the link for a message of a pass; WorkerLost if its recipient is lost."""
        # A new session with the recipient would know nothing of the pass.
        if message.to in active.context.lost:
            raise WorkerLost(message.name, "no", "it was lost while the context was open")
        try:
            return self._channel.link_to(message.name, message.to)
        except WorkerLost:
            if message.answers or message.expected or message.to in self._lost_peers:
                raise
            # Credit for an originator that the coordinator has not announced to us yet. Credit may
            # take any way home, so it goes back to a peer that has found us.
            for incarnation, name in active.state.heard.items():
                if incarnation not in self._lost_peers:
                    return self._channel.link_to(name, incarnation)
            raise

    def _end_if_over(self, active: ActivePass, done: asyncio.Future[None]) -> None:
        state = active.state
        if state.over and not done.done():
            if state.sweep.complete:
                done.set_result(None)
            else:
                # The protocol is wrong, then. Waiting would hang for ever, so say what is missing.
                raise AssertionError(f"all credit is home, but {state.waits_for()}")

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def arrived(
        self,
        sender: PeerInfo,
        context_id: int,
        number: int,
        invitation: Invitation | None,
        body: Body,
    ) -> None:
        """Take in a message of a pass, and go on with the pass."""
        answers, expected, credit, reached = body
        message = (sender, decode(answers), expected, credit, reached)
        active = self.passes.get((context_id, number))
        if active is None:
            # Made on first sight: a worker that no message of the context has reached must join, too,
            # and answer "none" for the edges that were lost or are still under way to it.
            context = self._contexts.arriving(context_id, sender, "gradients")
            if context is None or number in context.aborted:
                return
            if invitation is None:  # it overtook the large message that carries the invitation
                context.early.setdefault(number, []).append(message)
                return
            joined = self._join(context, sender, number, invitation)
            if joined is None:
                return
            active = joined
            active.inbox = context.early.pop(number, [])
        elif active.done is not None and not (answers or expected or active.draining):
            # Nothing but credit that comes home, in nearly every pass once: nothing to drain.
            active.state.feed(*message)
            self._end_if_over(active, active.done)
            return
        active.inbox.append(message)
        if active.draining:
            return  # the thread computes in the same state; it looks at the inbox when it is done
        try:
            active.feed()
        except Exception as error:
            self.abort.failed(active, error)
        else:
            self._advance(active)

    def _join(
        self, context: Context, sender: PeerInfo, number: int, invitation: Invitation
    ) -> ActivePass | None:
        """Take part in a pass; None if it is known to be decided, and its messages come late."""
        name, rank, incarnation, *terms = invitation[:6]
        # A late message of a decided pass must not start it again: nobody would end it.
        if context.outcomes.outcome(incarnation, number) is not None:
            return None
        invited_by_originator = sender.incarnation == incarnation
        originator = sender if invited_by_originator else PeerInfo(name, rank, incarnation)
        state = self._pass(context, number, originator, Terms(*terms))
        active = ActivePass(context, state, None, self._lost_peers.count)
        self.passes.add(active)
        parent = invitation[6] if len(invitation) == 7 else ""
        active.trace = self._channel.trace_joined_pass(parent)
        return active

    # ── what the registry reports ───────────────────────────────────────────────────────────────

    def peer_lost(self, peer: PeerInfo, error: Exception) -> None:
        """End the passes that need an incarnation which is gone."""
        self.abort.peer_lost(peer, error)

    def edge_lost(self, context: Context, name: str, incarnation: bytes) -> None:
        """Fail the passes of a context that began before a worker in it lost that incarnation."""
        self.abort.edge_lost(context, name, incarnation)

    def released(self, context: Context) -> None:
        """End the passes of a context that was left; a task that awaits one gets UnknownContext."""
        for active in self.passes.of(context.id):
            self.passes.discard(active.key)
            active.fail(UnknownContext(context.id, "it was released while a backward pass ran"))


def _cross(context: Context, message: Message) -> None:
    """Let the hooks of a context see, and change, the gradients of a message."""
    message.answers = [
        (edge, crossed_all(context.hooks, context.id, message.name, gradients), loops)
        for edge, gradients, loops in message.answers
    ]
