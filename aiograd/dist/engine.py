"""The async backward engine: carries the messages of passes between workers.

All decisions are those of `Pass`; this module gives it events and sends what it returns.
Messages are one-way, one per peer and drain, to all peers at once:

    gradients        answers, expected edges, a share of credit
    gradients.failed a participant tells the originator that it cannot go on
    gradients.abort  the originator ends the pass; each worker drops its part and passes the word on

State changes on the loop only. A drain with heavy arrays or with code of the user's runs in a
thread; what arrives meanwhile waits for it.
"""

from __future__ import annotations

import asyncio
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
from aiograd.dist.context import Context
from aiograd.dist.contexts import Contexts
from aiograd.dist.endings import Endings
from aiograd.dist.mail import flatten, unflatten
from aiograd.dist.passes import Answer, Pass, Terms
from aiograd.dist.roots import entries as roots_of
from aiograd.dist.running import Late, Running
from aiograd.dist.topology import Topology
from aiograd.errors import (
    BackwardFailed,
    DeadlineExceeded,
    GradError,
    PassTimedOut,
    ProtocolError,
    UnknownContext,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.current import DEADLINE
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import check_timeout
from aiograd.rpc.tracing import trace_pass


class Engine:
    """All passes that run on one worker."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.agent: Agent = contexts.agent
        self.shell = contexts.shell
        self.endings = Endings(self)
        self.passes: dict[tuple[int, int], Running] = {}
        self._led: dict[int, None] = {}  # numbers of the passes we started, still under way
        self._counter = itertools.count(self.agent.runtime.random.getrandbits(24) << 20)

    def running(self) -> int:
        """How many passes have something to do or to wait for here."""
        return sum(
            not r.play.complete or r.draining or r.done is not None for r in self.passes.values()
        )

    def leads(self, context: Context, number: int) -> bool:
        return number in self._led

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
        context.failure = None
        context.commit(running.play.number)

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
        context.passes.pop(running.play.number, None)
        return running.play.sweep.captured

    def _start(
        self,
        context: Context,
        terms: Terms,
        entries: Sequence[tuple[Node, Any]],
        capture: Sequence[Node],
    ) -> Running:
        number = self.agent.rank << 48 | next(self._counter)
        self._led[number] = None
        floor = next(iter(self._led))
        done = self.agent.loop.create_future()
        play = self._pass(context, number, self.agent.name, terms, entries, capture)
        running = self.passes[context.id, number] = Running(context, play, floor, done)
        running.trace = trace_pass(self.agent)
        context.passes[number] = play
        play.start(entries)
        self._advance(running)
        return running

    def _pass(
        self,
        context: Context,
        number: int,
        originator: str,
        terms: Terms,
        entries: Sequence[tuple[Node, Any]] = (),
        capture: Sequence[Node] = (),
    ) -> Pass:
        return Pass(
            number,
            originator,
            self.agent.name,
            terms,
            context.sends,
            context.receives,
            context_id=context.id,
            capture=capture,
            topology=self._topology(context, entries, terms, capture),
            leaving=context.leaving if context.hooks else None,
        )

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
        gone: list[bytes] = []
        for incarnation, name in context.partners.items():
            peer = self.agent.directory.members.get(name)
            if peer is None or peer.incarnation != incarnation or incarnation in self.contexts.gone:
                gone.append(incarnation)
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
        finally:
            running.unlimit()
            self._led.pop(play.number, None)
            self.passes.pop((running.context.id, play.number), None)
            if running.trace is not None:
                running.trace.end(None if play.over else sys.exception())

    def _budget(self, timeout: float | None) -> float:
        left = DEADLINE.get() - self.agent.runtime.time()
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
                    (edge, crossed_all(context.hooks, context.id, message.to, gradients), loops)
                    for edge, gradients, loops in message.answers
                ]
            invitation = (play.originator, running.floor, *play.terms) if message.invites else None
            head = (context.id, play.number, *message.credit, message.expected, invitation)
            lent: list[PickleBuffer] = []
            flat = flatten(message.answers, lent)
            if flat is None or not self.agent.post_plain(
                message.to, "gradients.flat", (*head, flat), lent
            ):
                held = context if play.terms.create_graph else None
                self.agent.post(message.to, "gradients", *head, message.answers, held=held)
            if running.trace is not None:
                running.posted(message.to, message.answers, began)
        context.changed()
        if running.done is not None:
            self._end_if_over(running, running.done)

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
        expected: list[int] | None,
        invitation: tuple[str, int, bool, bool, bool] | None,
        answers: list[Answer],
    ) -> None:
        """A message of a pass came in."""
        message = (sender.name, answers, expected, (credit, places))
        running = self.passes.get((context_id, number))
        if running is None:
            context = self.contexts.arriving(context_id, sender, "gradients")
            if context is None or number in context.aborted:
                return
            if invitation is None:  # it overtook the large message that tells of the pass
                context.early.setdefault(number, []).append(message)
                return
            running = self._join(context, number, *invitation)
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
        context_id, number, credit, places, expected, invitation, flat = load
        answers = unflatten(flat)
        self.arrived(sender, context_id, number, credit, places, expected, invitation, answers)

    def _join(
        self, context: Context, number: int, originator: str, floor: int, *terms: bool
    ) -> Running:
        self._commit_below(context, originator, floor)
        play = self._pass(context, number, originator, Terms(*terms))
        running = self.passes[context.id, number] = Running(context, play, floor, None)
        running.trace = trace_pass(self.agent)
        context.passes[number] = play
        context.failure = None
        return running

    def _commit_below(self, context: Context, originator: str, floor: int) -> None:
        """Passes of the same originator that it no longer runs have ended well."""
        for number, play in list(context.passes.items()):
            if number < floor and play.originator == originator and number not in self._led:
                self.passes.pop((context.id, number), None)
                context.commit(number)

    def released(self, context: Context) -> None:
        """A context was left: its passes end here; who awaits one is told."""
        for (context_id, number), running in list(self.passes.items()):
            if context_id == context.id:
                del self.passes[context_id, number]
                if running.done is not None and not running.done.done():
                    error = UnknownContext(context_id, "it was released while a backward pass ran")
                    running.done.set_exception(error)
                    running.done.exception()
