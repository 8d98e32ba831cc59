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
import contextlib
import itertools
import math
from collections.abc import Awaitable, Iterable, Sequence
from time import perf_counter  # a measurement for people, never a decision
from typing import Any

import numpy as np

from aiograd.autograd.graph import JointOpNode, LightNode, Node, OpNode, Part
from aiograd.autograd.op import parent_of
from aiograd.autograd.sweep import Sweep
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.dist.boundary import crossed_all
from aiograd.dist.context import Context, Contexts
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.dist.passes import Credit, Pass, Terms
from aiograd.errors import (
    BackwardFailed,
    DeadlineExceeded,
    GradError,
    UnknownContext,
    WorkerLost,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.current import DEADLINE
from aiograd.rpc.directory import PeerInfo

HEAVY = 250_000  # elements in a sweep from which on it must not hold up the loop
ABORT_WAIT = 2.0  # seconds that survivors get to acknowledge the end of a failed pass


class PassTimedOut(BackwardFailed, DeadlineExceeded):
    """A backward pass that did not end within its time."""

    def __init__(self, worker: str, op: str = "", why: str = "", seconds: float = 0.0) -> None:
        Exception.__init__(self, worker, op, why, seconds)
        self.worker, self.op, self.why = worker, op, why
        self.function, self.seconds = "backward", seconds

    __str__ = BackwardFailed.__str__


class PassRefused(BackwardFailed, GradError):
    """A backward pass that cannot be played: freed, modified, or crossing contexts."""

    def __init__(self, worker: str, op: str = "", why: str = "", reason: str = "other") -> None:
        Exception.__init__(self, worker, op, why, reason)
        self.worker, self.op, self.why, self.reason = worker, op, why, reason

    __str__ = BackwardFailed.__str__


class Running:
    """A pass and what the shell needs to know of it."""

    __slots__ = ("context", "done", "draining", "floor", "heavy", "inbox", "play")

    def __init__(
        self, context: Context, play: Pass, floor: int, done: asyncio.Future[None] | None
    ) -> None:
        self.context, self.play = context, play
        self.floor = floor  # passes of this originator below this number had ended when it began
        self.done = done  # at the originator: ends with the pass
        self.draining = False  # a thread is computing
        self.inbox: list[tuple[Any, ...]] = []  # messages that came meanwhile
        self.heavy = is_heavy(play.sweep)


class Engine:
    """All passes that run on one worker."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.agent: Agent = contexts.agent
        self.shell = contexts.shell
        self._running: dict[tuple[int, int], Running] = {}
        self._led: dict[int, None] = {}  # numbers of the passes we started, still under way
        self._counter = itertools.count(self.agent.runtime.random.getrandbits(24) << 20)

    def running(self) -> int:
        """How many passes have something to do or to wait for here."""
        return sum(
            not r.play.complete or r.draining or r.done is not None for r in self._running.values()
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
        entries = [(root_node(root), _ones(root, create_graph)) for root in _checked(roots)]
        context.roots = [node for node, _ in entries]
        terms = Terms(retain_graph or create_graph, create_graph, True)
        running = self._start(context, terms, entries, ())
        await self._finish(running, timeout)
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
        terms = Terms(retain_graph, create_graph, False)
        running = self._start(context, terms, entries, capture)
        await self._finish(running, timeout)
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
        running = self._running[context.id, number] = Running(context, play, floor, done)
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
        ends: list[SendNode | RecvNode] = [*context.sends.values(), *context.receives.values()]
        gone = {end.incarnation for end in ends if self._is_gone(end)}
        return Pass(
            number,
            originator,
            self.agent.name,
            terms,
            context.sends,
            context.receives,
            context_id=context.id,
            roots=[node for node, _ in entries],
            capture=capture,
            gone=gone,
        )

    def _is_gone(self, node: SendNode | RecvNode) -> bool:
        peer = self.agent.directory.get(node.peer)
        return (
            peer is None
            or peer.incarnation != node.incarnation
            or node.incarnation in self.contexts.gone
        )

    async def _finish(self, running: Running, timeout: float | None) -> None:
        """Wait for the end of a pass we started; end it everywhere if it does not end well."""
        play, agent = running.play, self.agent
        assert running.done is not None
        seconds = self._budget(timeout)
        try:
            if not running.done.done() or running.done.exception() is not None:
                async with asyncio.timeout(None if seconds == math.inf else seconds) as limit:
                    await asyncio.shield(running.done)
        except TimeoutError:
            if not limit.expired():
                raise
            owing = sorted({send.peer for send in play.awaited.values()}) or [agent.name]
            why = f"it did not end within {seconds:g} s; {play.waits_for()}"
            failure = PassTimedOut(owing[0], "", why, seconds)
            await self._end(running, failure)
            raise failure from DeadlineExceeded(owing[0], "backward", seconds)
        except asyncio.CancelledError:
            agent.spawn(self._end(running, BackwardFailed(agent.name, "", "it was cancelled")))
            raise
        finally:
            self._led.pop(play.number, None)
            self._running.pop((running.context.id, play.number), None)

    def _budget(self, timeout: float | None) -> float:
        if timeout is not None:
            if timeout <= 0:
                raise ValueError(f"a timeout is a positive number of seconds, not {timeout!r}")
            return min(timeout, DEADLINE.get() - self.agent.runtime.time())
        left = DEADLINE.get() - self.agent.runtime.time()
        return left if left != math.inf else self.agent.options.timeout

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _advance(self, running: Running) -> None:
        """Drain and send, here or, when that could take long, in a thread."""
        if running.heavy:
            running.draining = True
            self.agent.spawn(self._advance_in_thread(running))
            return
        began = perf_counter()
        try:
            sinks = running.play.drain()
            running.context.seconds += perf_counter() - began
            self._send(running, sinks)
        except Exception as error:
            self._failed(running, error)

    async def _advance_in_thread(self, running: Running) -> None:
        try:
            while True:
                began = perf_counter()
                sinks = await self.shell.in_thread(running.play.drain)
                running.context.seconds += perf_counter() - began
                if not self._is_live(running):
                    return
                self._send(running, sinks)
                if not running.inbox:
                    return
                for message in running.inbox:
                    running.play.feed(*message)
                running.inbox.clear()
        except Exception as error:
            self._failed(running, error)
        finally:
            running.draining = False

    def _is_live(self, running: Running) -> bool:
        return self._running.get((running.context.id, running.play.number)) is running

    def _send(self, running: Running, sinks: list[tuple[Node, Any]]) -> None:
        play, context = running.play, running.context
        for message in play.collect(sinks):
            if context.hooks and message.answers:
                message.answers = [
                    (edge, crossed_all(context.hooks, context.id, message.to, gradients))
                    for edge, gradients in message.answers
                ]
            self.agent.post(
                message.to,
                "gradients",
                context.id,
                play.number,
                *message.credit,
                message.answers,
                message.expected,
                (play.originator, running.floor, *play.terms) if message.invites else None,
                held=context if play.terms.create_graph else None,
            )
        context.changed()
        if running.done is not None and play.over and not running.done.done():
            if play.sweep.complete:
                running.done.set_result(None)
            else:
                raise AssertionError(f"all credit is home, but {play.waits_for()}")

    def arrived(
        self,
        sender: PeerInfo,
        context_id: int,
        number: int,
        credit: int,
        places: int,
        answers: list[tuple[int, list[Any] | None]],
        expected: list[int] | None,
        invitation: tuple[str, int, bool, bool, bool] | None,
    ) -> None:
        """A message of a pass came in."""
        message = (sender.name, answers, expected, Credit(credit, places))
        running = self._running.get((context_id, number))
        if running is None:
            context = self.contexts.arriving(context_id, sender, "gradients")
            if context is None or number in context.aborted:
                return
            if invitation is None:  # it overtook the large message that tells of the pass
                context.early.setdefault(number, []).append(message)
                return
            running = self._join(context, number, *invitation)
            running.inbox = context.early.pop(number, [])
        running.inbox.append(message)
        if not running.draining:
            self._take_in(running)

    def _join(
        self, context: Context, number: int, originator: str, floor: int, *terms: bool
    ) -> Running:
        self._commit_below(context, originator, floor)
        play = self._pass(context, number, originator, Terms(*terms))
        running = self._running[context.id, number] = Running(context, play, floor, None)
        context.passes[number] = play
        context.failure = None
        return running

    def _take_in(self, running: Running) -> None:
        try:
            for message in running.inbox:
                running.play.feed(*message)
            running.inbox.clear()
        except Exception as error:
            self._failed(running, error)
        else:
            self._advance(running)

    def _commit_below(self, context: Context, originator: str, floor: int) -> None:
        """Passes of the same originator that it no longer runs have ended well."""
        for number in [n for n in context.passes if n < floor and n not in self._led]:
            if context.passes[number].originator == originator:
                self._running.pop((context.id, number), None)
                context.commit(number)

    # ── failing ─────────────────────────────────────────────────────────────────────────────────

    def _failed(self, running: Running, error: Exception) -> None:
        """Something here went wrong: end the pass, or have its originator end it."""
        if not self._is_live(running):
            return
        play = running.play
        node = play.sweep.failed
        op = node.name if node is not None else ""
        worker = getattr(error, "worker", "") or self.agent.name
        if isinstance(error, WorkerLost):
            op = ""
        else:
            worker = self.agent.name
        if running.done is not None:
            self.agent.spawn(self._end(running, failure_of(worker, op, error)))
        else:
            fault = self.shell.describe(error)
            try:
                self.agent.post(
                    play.originator,
                    "gradients.failed",
                    running.context.id,
                    play.number,
                    worker,
                    op,
                    fault,
                )
            except Exception:
                self.agent.spawn(self._end(running, failure_of(worker, op, error)))

    def failure_reported(
        self,
        sender: PeerInfo,
        context_id: int,
        number: int,
        worker: str,
        op: str,
        fault: Any,
    ) -> None:
        running = self._running.get((context_id, number))
        if running is not None and running.done is not None:
            error = self.shell.rebuild(fault, worker)
            self.agent.spawn(self._end(running, failure_of(worker, op, error)))

    async def _end(self, running: Running, failure: BackwardFailed) -> None:
        """End a pass that failed: here first, then wherever it went; then tell who awaits it."""
        if self._drop(running, failure):
            await self._tell_abort(running, failure)
        done = running.done
        if done is not None and not done.done():
            done.set_exception(failure)
            done.exception()  # whoever still awaits it gets it all the same

    def _drop(self, running: Running, failure: BackwardFailed) -> bool:
        context, number = running.context, running.play.number
        if number in context.aborted:
            return False
        context.aborted.add(number)
        context.passes.pop(number, None)
        context.failure = failure
        context.changed()
        self._running.pop((context.id, number), None)
        return True

    async def _tell_abort(self, running: Running, failure: BackwardFailed) -> None:
        play = running.play
        peers = (play.informed | play.heard) - {self.agent.name}
        fault = self.shell.describe(failure)
        waiting = []
        for peer in sorted(peers):
            with contextlib.suppress(Exception):
                waiting.append(
                    self.shell.ask(
                        peer,
                        "gradients.abort",
                        running.context.id,
                        play.number,
                        fault,
                        timeout=ABORT_WAIT,
                    )
                )
        await asyncio.gather(*waiting, return_exceptions=True)

    async def abort_asked(self, sender: PeerInfo, context_id: int, number: int, fault: Any) -> None:
        context = self.contexts.find(context_id)
        if context is None:
            return
        running = self._running.get((context_id, number))
        failure = self.shell.rebuild(fault, sender.name)
        if not isinstance(failure, BackwardFailed):
            failure = BackwardFailed(sender.name, "", str(failure))
        if running is None:
            if number not in context.aborted:
                context.aborted.add(number)
                context.passes.pop(number, None)
                context.failure = failure
                context.changed()
            return
        await self._end(running, failure)

    def lost(self, peer: PeerInfo, error: Exception) -> None:
        """A peer died: passes it took part in cannot end any more."""
        for running in list(self._running.values()):
            play = running.play
            if running.done is None and play.originator == peer.name:
                failure = failure_of(peer.name, "", error)
                self.agent.spawn(self._end(running, failure))
            elif peer.name in play.informed or peer.name in play.heard:
                # Even if our part is complete: credit we sent there is lost. A pass that has ended
                # meanwhile is not harmed, its originator does not listen any more.
                self._failed(running, WorkerLost(peer.name, "unknown", str(error)))

    # ── for people ──────────────────────────────────────────────────────────────────────────────

    def waits(self, sender: PeerInfo, context_id: int) -> tuple[list[str], list[str]]:
        """What our part of a context waits for, and whom to ask besides."""
        plays = [r.play for (c, _), r in self._running.items() if c == context_id]
        lines = [
            f"pass {play.number & 0xFFFFF}: {play.waits_for()}"
            for play in plays
            if not play.complete or play.originator == self.agent.name
        ]
        return lines, sorted({peer for play in plays for peer in play.informed | play.heard})

    async def explain(self, context: Context) -> str:
        me = self.agent.info
        told, waiting = {self.agent.name}, set()
        lines, peers = self.waits(me, context.id)
        waiting.update(peers)
        while waiting := waiting - told:
            name = waiting.pop()
            told.add(name)
            try:
                more, peers = await self.shell.ask(name, "gradients.waits", context.id, timeout=2.0)
            except Exception as error:
                more, peers = [f"{name} does not answer: {error}"], []
            lines += more
            waiting.update(peers)
        return "\n".join(lines) or "no backward pass is under way"

    def released(self, context: Context) -> None:
        """A context was left: its passes end here; who awaits one is told."""
        for (context_id, number), running in list(self._running.items()):
            if context_id == context.id:
                del self._running[context_id, number]
                if running.done is not None and not running.done.done():
                    error = UnknownContext(context_id, "it was released while a backward pass ran")
                    running.done.set_exception(error)
                    running.done.exception()


def failure_of(worker: str, op: str, error: BaseException) -> BackwardFailed:
    """The error that a failed pass raises, with its cause chained."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, BackwardFailed):
        return error
    failure: BackwardFailed
    if isinstance(error, GradError):
        failure = PassRefused(worker, op, why, error.reason)
    else:
        failure = BackwardFailed(worker, op, why)
    failure.__cause__ = error
    return failure


# ── roots ───────────────────────────────────────────────────────────────────────────────────────


def _checked(roots: Sequence[Tensor]) -> Sequence[Tensor]:
    if not roots:
        raise GradError("backward needs at least one root tensor", "no_roots")
    for root in roots:
        if not isinstance(root, Tensor):
            raise TypeError(f"the roots of backward are Tensors, not {type(root).__name__}")
        if not root.requires_grad:
            raise GradError(
                "a root does not require grad: nothing it was made from did", "no_requires_grad"
            )
        if root.size != 1:
            raise GradError(
                f"a root has shape {root.shape}; backward needs scalars, reduce it with .sum()",
                "not_scalar",
            )
        if root.is_leaf:
            raise GradError(
                "a root is a leaf without a gradient function: nothing to play backwards",
                "no_grad_fn",
            )
    return roots


def root_node(root: Tensor) -> Node:
    node = parent_of(root)
    assert node is not None
    return node


def _ones(root: Tensor, create_graph: bool) -> Any:
    ones = np.ones(root.shape, root.dtype)
    return wrap(ones) if create_graph else ones


def is_heavy(sweep: Sweep) -> bool:
    """Tell whether draining could hold up the loop: large arrays, or code that is not ours."""
    total = 0
    for node, _ in sweep.waiting:
        if isinstance(node, OpNode | LightNode | JointOpNode):
            if node.hooks is not None or getattr(node.op, "op_name", None) is None:
                return True
            total += math.prod(node.shape)
            if total > HEAVY:
                return True
        elif node.hooks is not None or not _is_ours(node):
            return True
    return False


def _is_ours(node: Node) -> bool:
    variable = getattr(node, "variable", None)
    if variable is not None:
        return not variable._hooks
    return isinstance(node, Part | SendNode | RecvNode)


def entries_of(roots: Iterable[Tensor], gradients: Iterable[Any]) -> list[tuple[Node, Any]]:
    return [(root_node(root), g) for root, g in zip(roots, gradients, strict=True)]
