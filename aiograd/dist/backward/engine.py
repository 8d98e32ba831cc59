"""The async backward engine: carries the messages of passes between workers.

All decisions are those of `Pass`; this module gives it events and sends what it returns.
Messages are one-way, one per peer and drain, to all peers at once:

    gradients           answers, expected edges, a share of credit, whom the pass has reached
    gradients.failed    a participant tells the originator that it cannot go on
    gradients.abort     the originator ends the pass; each worker drops its part and passes it on
    gradients.outcomes  how passes ended (`outcomes.py`): in front of the next message of the context
                        to a peer; if there is none for a while, of its own

Peers are addressed by incarnation: a message for a worker that is gone fails here, and never
reaches its successor.

State changes on the loop only. A drain with heavy arrays or with code of the user's runs in a
thread; what arrives meanwhile waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from pickle import PickleBuffer
from time import perf_counter  # a measurement for people, never a decision
from typing import Any

from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import Tensor
from aiograd.dist.boundary import crossed_all
from aiograd.dist.context import CURRENT, Context
from aiograd.dist.registry import Contexts
from aiograd.dist.backward.abort import Endings
from aiograd.dist.backward.mail import flatten, unflatten
from aiograd.dist.backward.outcomes import Report
from aiograd.dist.backward.state import Answer, Message, Pass, Terms
from aiograd.dist.backward.roots import entries as roots_of
from aiograd.dist.backward.active import Late, Running
from aiograd.dist.backward.plan import Topology
from aiograd.errors import (
    AiogradError,
    BackwardFailed,
    DeadlineExceeded,
    GradError,
    PassTimedOut,
    ProtocolError,
    UnknownContext,
    WorkerLost,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.scope import inherited_deadline
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.link import Link
from aiograd.rpc.options import check_timeout
from aiograd.rpc.observe.tracing import trace_pass


# Seconds after which participants that nothing was sent to hear how a pass ended. Long enough that
# most contexts are left by then, and that many passes share a message.
LAZY = 0.005


class Engine:
    """All passes that run on one worker."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.agent: Agent = contexts.agent
        self.shell = contexts.shell
        self.endings = Endings(self)
        self.me = PeerInfo(self.agent.name, self.agent.rank, self.agent.incarnation)
        self.passes: dict[tuple[int, int], Running] = {}
        # Contexts with outcomes to tell, and whom (a bit for each rank), at the next timer.
        self._untold: dict[Context, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._counter = itertools.count(self.agent.runtime.random.getrandbits(24) << 20)

    def running(self) -> int:
        """How many passes have something to do or to wait for here."""
        return sum(
            not r.play.complete or r.draining or r.done is not None for r in self.passes.values()
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

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
        context.check()
        seconds = self._budget(timeout)
        entries = roots_of(roots, create_graph)
        context.roots = [node for node, _ in entries]
        terms = Terms(retain_graph or create_graph, create_graph, True)
        running = self._start(context, terms, entries, ())
        await self._finish(running, seconds)

    def from_value(
        self, value: Any, context_id: int | None, retain_graph: bool
    ) -> Awaitable[None] | None:
        """Start a pass from a value that an RRef holds here; without a context, a local one."""
        if not isinstance(value, Tensor):
            raise GradError(
                f"backward needs a Tensor, but the RRef holds {type(value).__name__}", "not_tensor"
            )
        if context_id is None:
            value.backward(retain_graph=retain_graph)
            return None
        return self.backward(self.contexts.get(context_id), [value], retain_graph=retain_graph)

    async def derivatives(
        self,
        context: Context,
        entries: Sequence[tuple[Node, Any]],
        capture: Sequence[Node],
        *,
        retain_graph: bool,
        create_graph: bool,
        timeout: float | None = None,
    ) -> dict[Node, Any]:
        """Run a pass that leaves no gradients behind but those of the `capture` nodes."""
        context.check()
        seconds = self._budget(timeout)
        terms = Terms(retain_graph, create_graph, False)
        running = self._start(context, terms, entries, capture)
        await self._finish(running, seconds)
        return running.play.sweep.captured

    def _start(
        self,
        context: Context,
        terms: Terms,
        entries: Sequence[tuple[Node, Any]],
        capture: Sequence[Node],
    ) -> Running:
        number = self.agent.rank << 48 | next(self._counter)
        done = self.agent.loop.create_future()
        play = self._pass(context, number, self.me, terms, entries, capture)
        running = self.passes[context.id, number] = Running(context, play, done)
        context.outcomes.begun(number)
        running.trace = trace_pass(self.agent)
        play.start(entries)
        self._advance(running)
        return running

    def _pass(
        self,
        context: Context,
        number: int,
        originator: PeerInfo,
        terms: Terms,
        entries: Sequence[tuple[Node, Any]] = (),
        capture: Sequence[Node] = (),
    ) -> Pass:
        play = Pass(
            number,
            originator,
            self.me,
            terms,
            context.sends,
            context.receives,
            context_id=context.id,
            capture=capture,
            topology=self._topology(context, entries, terms, capture),
            leaving=context.leaving if context.hooks else None,
        )
        play.retries = context.failure
        context.passes[number] = play
        return play

    def _topology(
        self,
        context: Context,
        entries: Sequence[tuple[Node, Any]],
        terms: Terms,
        capture: Sequence[Node],
    ) -> Topology:
        """What a pass will visit here: what the last one did, if nothing has changed since."""
        roots = [node for node, _ in entries] if entries else []
        sends, receives = context.sends, context.receives
        # A peer that was lost while the context was open stays lost for it, even if the two find
        # each other again: messages of the context got lost with their session. The directory is
        # no help here: it may not know the successor of a worker yet that we have edges to.
        gone = [peer for peer in context.partners if peer in context.lost]
        known = context.topology
        if known is not None and not capture and not context.hooks:
            if known.fits(roots, gone, len(sends), len(receives)):
                return known
        loops = not context.hooks
        found = Topology(sends, receives, roots, capture=capture, gone=gone, loops=loops)
        # Not held on to if the graph will be freed; nor if it depends on this pass alone.
        again = terms.retain_graph and not capture and not context.hooks
        context.topology = found if again else None
        return found

    async def _finish(self, running: Running, seconds: float) -> None:
        """Wait for the end of a pass we started; end it everywhere if it does not end well."""
        play, agent = running.play, self.agent
        assert running.done is not None
        try:
            if not running.done.done() and seconds != math.inf:
                running.limit(agent.deadlines.bucket(agent.loop.time() + seconds))
            await running.done
        except Late:
            owing = sorted({send.peer for send in play.awaited.values()}) or [agent.name]
            why = f"it did not end within {seconds:g} s; {play.waits_for()}"
            late = PassTimedOut(owing[0], "", why, seconds)
            await self.endings.end(running, late)
            raise late from DeadlineExceeded(owing[0], "backward", seconds)
        except asyncio.CancelledError:
            self.endings.cancelled(running)
            raise
        else:
            self._succeeded(running)
        finally:
            running.unlimit()
            self.passes.pop((running.context.id, play.number), None)
            if running.trace is not None:
                running.trace.end(None if play.over else sys.exception())

    def _succeeded(self, running: Running) -> None:
        """Decide that a pass ended well. From here on nobody may show it as failed."""
        context, play = running.context, running.play
        context.outcomes.decided(play.number, well=True)
        context.ended_well(self.me.incarnation, play.number)
        # A pass that keeps no gradients has no number that anybody could want to read.
        others = play.reached & ~(1 << self.me.rank) if play.terms.keep else 0
        if not others or context.released:
            return
        self._untold[context] = self._untold.get(context, 0) | others
        if CURRENT.get() is not context or context.id >> 48 != self.me.rank:
            # Whoever awaits the pass may go on outside the context, or on another worker. Calls
            # made there do not take the outcome along, so it must be on its way before them.
            self._tell_untold()
        elif self._timer is None:
            self._timer = self.agent.loop.call_later(LAZY, self._tell_untold)

    def _budget(self, timeout: float | None) -> float:
        left = inherited_deadline() - self.agent.runtime.time()
        if timeout is not None:
            return min(check_timeout(timeout), left)
        return left if left != math.inf else self.agent.options.timeout

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _advance(self, running: Running) -> None:
        """Drain and send, here or, when that could take long, in a thread."""
        if running.heavy:
            running.draining = True
            self.agent.spawn(self._advance_in_thread(running))
            return
        self._step(running, running.play.drain)

    def _step(self, running: Running, drain: Callable[[], list[tuple[Node, Any]]]) -> None:
        began = perf_counter()
        try:
            sinks = drain()
            running.computed(perf_counter() - began)
            self._send(running, sinks)
        except Exception as error:
            self.endings.failed(running, error)
        else:
            if running.play.late:
                # In the next tick: what we have sent leaves at the end of this one.
                self.agent.loop.call_soon(self._advance_late, running)

    def _advance_late(self, running: Running) -> None:
        if running.play.late and self.is_live(running):
            self.shell.give_way()
            self._step(running, running.play.drain_late)

    async def _advance_in_thread(self, running: Running) -> None:
        drain = running.play.drain
        try:
            while True:
                began = perf_counter()
                sinks = await self.shell.in_thread(drain)
                running.computed(perf_counter() - began)
                if not self.is_live(running):
                    return
                self._send(running, sinks)
                if running.inbox:
                    running.feed()
                    drain = running.play.drain
                elif running.play.late:
                    drain = running.play.drain_late
                else:
                    return
        except Exception as error:
            self.endings.failed(running, error)
        finally:
            running.draining = False

    def is_live(self, running: Running) -> bool:
        return self.passes.get((running.context.id, running.play.number)) is running

    def _send(self, running: Running, sinks: list[tuple[Node, Any]]) -> None:
        play, context = running.play, running.context
        for message in play.collect(sinks):
            began = perf_counter()
            if context.hooks and message.answers:
                message.answers = [
                    (edge, crossed_all(context.hooks, context.id, message.name, gradients), loops)
                    for edge, gradients, loops in message.answers
                ]
            link = self._link(running, message)
            home = play.originator
            invitation = (*home.identity, *play.terms) if message.invites else None
            of_pass = (context.id, play.number, *message.credit, play.reached)
            head = (*of_pass, message.expected, invitation)
            lent: list[PickleBuffer] = []
            flat = flatten(message.answers, lent)
            if flat is None or not self.agent.post_plain(
                link, "gradients.flat", (*head, flat), lent
            ):
                held = context if play.terms.create_graph else None
                self.agent.post(link.peer, "gradients", *head, message.answers, carried=held)
            if running.trace is not None:
                running.posted(message.name, message.answers, began)
        if running.done is not None:
            self._end_if_over(running, running.done)

    def _link(self, running: Running, message: Message) -> Link:
        """The link for a message of a pass; WorkerLost if its recipient is lost."""
        if message.to in running.context.lost:  # a new session would know nothing of the pass
            raise WorkerLost(message.name, "no", "it was lost while the context was open")
        try:
            return self.agent.links.exactly(message.name, message.to)
        except WorkerLost:
            if message.answers or message.expected or message.to in self.contexts.gone:
                raise
            # Credit for an originator of which the coordinator has not told us yet. Credit may
            # take any way home, so it goes back to somebody who has found us.
            for incarnation, name in running.play.heard.items():
                if incarnation not in self.contexts.gone:
                    return self.agent.links.exactly(name, incarnation)
            raise

    def _end_if_over(self, running: Running, done: asyncio.Future[None]) -> None:
        play = running.play
        if play.over and not done.done():
            if play.sweep.complete:
                done.set_result(None)
            else:
                raise AssertionError(f"all credit is home, but {play.waits_for()}")

    def arrived(
        self,
        sender: PeerInfo,
        context_id: int,
        number: int,
        credit: int,
        places: int,
        reached: int,
        expected: list[int] | None,
        invitation: tuple[Any, ...] | None,
        answers: list[Answer],
    ) -> None:
        """A message of a pass came in."""
        message = (sender, answers, expected, (credit, places), reached)
        running = self.passes.get((context_id, number))
        if running is None:
            context = self.contexts.arriving(context_id, sender, "gradients")
            if context is None or number in context.aborted:
                return
            if invitation is None:  # it overtook the large message that tells of the pass
                context.early.setdefault(number, []).append(message)
                return
            joined = self._join(context, sender, number, *invitation)
            if joined is None:
                return
            running = joined
            running.inbox = context.early.pop(number, [])
        elif running.done is not None and not (answers or expected or running.draining):
            running.play.feed(*message)  # nothing but credit that comes home
            self._end_if_over(running, running.done)
            return
        running.inbox.append(message)
        if running.draining:
            return
        try:
            running.feed()
        except Exception as error:
            self.endings.failed(running, error)
        else:
            self._advance(running)

    def arrived_flat(self, sender: PeerInfo, *load: Any) -> None:
        """A message of a pass came in by the quick road, which no partner may take."""
        if self.agent.restricts(sender):
            raise ProtocolError("gradients that were not looked at", sender.name)
        context_id, number, credit, places, reached, expected, invitation, flat = load
        credits = (credit, places, reached)
        self.arrived(sender, context_id, number, *credits, expected, invitation, unflatten(flat))

    def _join(
        self,
        context: Context,
        sender: PeerInfo,
        number: int,
        name: str,
        rank: int,
        incarnation: bytes,
        *terms: bool,
    ) -> Running | None:
        """Take part in a pass; None if it is known to be decided, and its messages come late."""
        if context.outcomes.outcome(incarnation, number) is not None:
            return None
        invited_by_originator = sender.incarnation == incarnation
        originator = sender if invited_by_originator else PeerInfo(name, rank, incarnation)
        play = self._pass(context, number, originator, Terms(*terms))
        running = self.passes[context.id, number] = Running(context, play, None)
        running.trace = trace_pass(self.agent)
        return running

    # ── outcomes ────────────────────────────────────────────────────────────────────────────────

    def tell_outcomes(self, context: Context, peer: PeerInfo) -> None:
        """Before a message of the context goes to a peer: how passes ended, if it is news to it.

        May be called from any thread, as calls may be made from any."""
        if not context.outcomes.knows_all(peer.incarnation):
            with contextlib.suppress(AiogradError):  # the message itself will fail, and say why
                reports = self._reports(context, peer)
                self.agent.post(peer, "gradients.outcomes", context.id, reports)

    def _reports(self, context: Context, peer: PeerInfo) -> list[tuple[Any, ...]]:
        me = (self.agent.name, self.agent.incarnation)
        return [tuple(report) for report in context.outcomes.tell(peer.incarnation, me)]

    def _tell_untold(self) -> None:
        """Tell participants to whom nothing was sent since their pass ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        untold, self._untold = self._untold, {}
        for context, ranks in untold.items():
            while ranks and not context.released:
                rank = ranks.bit_length() - 1
                ranks -= 1 << rank
                peer = self.agent.directory.get(rank)
                if peer is not None and peer.incarnation not in context.lost:
                    self.tell_outcomes(context, peer)

    def outcomes_refused(self, peer: PeerInfo, error: Exception) -> None:
        """A peer could not take a report: the next message of the context brings it again."""
        for context in self.contexts.all():
            context.outcomes.forget_told(peer.incarnation)

    def outcomes_told(
        self, sender: PeerInfo, context_id: int, reports: list[tuple[Any, ...]]
    ) -> None:
        """A peer says how passes ended."""
        context = self.contexts.find(context_id)
        if context is not None:
            self._learn(context, sender, reports)

    def _learn(
        self, context: Context, sender: PeerInfo, reports: list[tuple[Any, ...]]
    ) -> None:
        for entry in reports:
            report = Report(*entry)
            # A partner speaks for itself only: it must not decide over passes of others.
            foreign = report.incarnation != sender.incarnation
            if report.incarnation == self.agent.incarnation:
                continue
            if foreign and self.agent.restricts(sender):
                continue
            if context.outcomes.learn(report, sender.incarnation):
                self._settle(context, report)

    def _settle(self, context: Context, report: Report) -> None:
        """Let passes count, or forget them, by what their originator says."""
        for number, play in list(context.passes.items()):
            if play.originator.incarnation != report.incarnation:
                continue
            well = report.outcome(number)
            if well is not None:
                self.passes.pop((context.id, number), None)
            if well:
                context.ended_well(report.incarnation, number)
            elif well is False:
                failure = BackwardFailed(report.name, "", "its originator ended the pass")
                context.ended_badly(report.incarnation, number, failure)
        context.outlived(report.incarnation, report.best)

    def released(self, context: Context) -> None:
        """A context was left: its passes end here; who awaits one is told."""
        for (context_id, number), running in list(self.passes.items()):
            if context_id == context.id:
                del self.passes[context_id, number]
                if running.done is not None and not running.done.done():
                    error = UnknownContext(context_id, "it was released while a backward pass ran")
                    running.done.set_exception(error)
                    running.done.exception()
