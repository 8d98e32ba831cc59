"""How a pass that cannot be finished ends: on every participant, before its originator raises.

Whoever sees a failure reports it to the originator, which alone decides the outcome. The originator
drops its part and tells the peers it exchanged messages with; each of them does the same. If one of
them is lost or silent, those that only it had invited are told directly. When the survivors have
acknowledged, `BackwardFailed` is raised.

Nothing of a failed pass can be read even by a worker that hears of all this late: it shows no number
before it knows the outcome (`outcomes.py`).

A participant whose own part is unfinished holds credit, so the pass cannot have ended well: it may
call the pass failed before the originator does. One whose part is done cannot know.

The errors of a failed backward pass: each is also what its cause was.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any
from aiograd.dist.context import Context
from aiograd.dist.backward.active import Running
from aiograd.errors import AiogradError, BackwardFailed, Overloaded, PassTimedOut, WorkerLost
from aiograd.rpc.directory import PeerInfo
from aiograd.errors import BackwardFailed, GradError, PassRefused

if TYPE_CHECKING:
    from aiograd.dist.backward.engine import Engine


ABORT_WAIT = 2.0  # seconds that survivors get to acknowledge the end of a failed pass
# The same if a worker was lost: the failure is promised within a second of that, and others may be
# out of reach, too.
LOSS_WAIT = 0.5
LATE_WAIT = 0.2  # the same where time is up already: one that is silent will hear it when it wakes


class Endings:
    """Ends the passes of one engine that failed, were cancelled or lost a participant."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.agent, self.shell = engine.agent, engine.shell
        # Passes that we tell peers the end of: an abort that comes meanwhile waits for that.
        self._telling: dict[tuple[int, int], asyncio.Future[bool]] = {}

    # ── seeing a failure ────────────────────────────────────────────────────────────────────────

    def failed(self, running: Running, error: Exception) -> None:
        """Something here went wrong: end the pass, or have its originator end it."""
        if not self._engine.is_live(running) or running.over:
            return
        play = running.play
        node = play.sweep.failed
        op = node.name if node is not None else ""
        worker = getattr(error, "worker", "") or self.agent.name
        if isinstance(error, WorkerLost | Overloaded):  # another worker's fault, and no op's
            op = ""
        else:
            worker = self.agent.name
        failure = failure_of(worker, op, error)
        if running.done is not None:
            self.agent.spawn(self._end_unless_over(running, failure))
            return
        if not play.complete:
            self.agent.spawn(self.end(running, failure))
        self._report(running, (worker, op, error))

    def _report(self, running: Running, facts: tuple[str, str, Exception]) -> None:
        """Tell the originator until it has heard it; it may answer that the pass had ended well."""
        context, play = running.context, running.play
        worker, op, error = facts
        home = self._peer(play.originator.name, play.originator.incarnation)
        if home is None:
            return  # lost, too: `lost` deals with that
        with contextlib.suppress(AiogradError):
            fault = self.shell.describe(error, home)
            args = (context.id, play.number, worker, op, fault)
            answer = self.shell.insist(home, "gradients.failed", *args)
            answer.add_done_callback(lambda done: self._answered(running, done))

    def _answered(self, running: Running, answer: asyncio.Future[Any]) -> None:
        """The originator knows. Unless the pass had ended well, it ends it everywhere now."""
        if answer.cancelled() or answer.exception() is not None or not answer.result():
            return
        context, number = running.context, running.play.number
        if number in context.passes:
            context.ended_well(running.play.originator.incarnation, number)
        self._engine.passes.pop((context.id, number), None)

    def failure_reported(
        self,
        sender: PeerInfo,
        context_id: int,
        number: int,
        worker: str,
        op: str,
        fault: Any,
    ) -> bool:
        """A participant cannot go on; the answer says whether the pass had ended well before."""
        running = self._engine.passes.get((context_id, number))
        if running is not None and running.done is not None:
            if not running.over:
                error = self.shell.rebuild(fault, sender, worker)
                self.agent.spawn(self._end_unless_over(running, failure_of(worker, op, error)))
            return False  # or not decided yet, in the tick of its end
        context = self._engine.contexts.find(context_id)
        return context is not None and number not in context.aborted

    def lost(self, peer: PeerInfo, error: Exception) -> None:
        """A start of a peer is gone: passes that need it cannot end any more."""
        for key, running in list(self._engine.passes.items()):
            play = running.play
            if running.done is None and play.originator.incarnation == peer.incarnation:
                if play.complete:
                    # It may have ended well: whoever heard so from the originator may tell us.
                    # Until then its numbers are not shown.
                    del self._engine.passes[key]
                else:
                    self.agent.spawn(self.end(running, failure_of(peer.name, "", error)))
            elif play.names(peer.incarnation):
                # Even if our part is complete: credit we sent there is lost. A pass that has ended
                # meanwhile is not harmed, its originator says so.
                self.failed(running, WorkerLost(peer.name, "unknown", str(error)))

    def edge_lost(self, context: Context, name: str, incarnation: bytes) -> None:
        """Somebody has lost an edge of a context: passes that were begun here before fail.

        One that begins when the loss is known counts the edges of the lost worker as "none".
        """
        loss = self._engine.contexts.gone.get(incarnation, math.inf)
        for running in list(self._engine.passes.values()):
            if running.context is context and running.done is not None and running.losses < loss:
                self.failed(running, WorkerLost(name, "unknown", "it was lost during the pass"))

    def refused(self, peer: PeerInfo, error: Exception) -> None:
        """A peer could not take a gradient message: passes that went there have lost credit.

        It does not say which message that was, so all of them fail."""
        for running in list(self._engine.passes.values()):
            if peer.incarnation in running.play.informed:
                self.failed(running, error)

    # ── ending a pass ───────────────────────────────────────────────────────────────────────────

    async def _end_unless_over(self, running: Running, failure: BackwardFailed) -> None:
        if not running.over:  # it may have ended well in the same tick
            await self.end(running, failure)

    async def end(self, running: Running, failure: BackwardFailed) -> None:
        """End a pass that failed: here first, then wherever it went; then tell who awaits it."""
        if self._drop(running, failure):
            await self._spread(running, failure)
        elif (telling := self._telling.get((running.context.id, running.play.number))) is not None:
            await asyncio.shield(telling)  # it failed twice: survivors must hear of it all the same
        done = running.done
        if done is not None and not done.done():
            done.set_exception(failure)
            done.exception()  # whoever still awaits it gets it all the same

    def cancelled(self, running: Running) -> None:
        """Nobody awaits a pass any more: end it here at once, and elsewhere soon."""
        failure = BackwardFailed(self.agent.name, "", "it was cancelled")
        if self._drop(running, failure):
            self._spread(running, failure)

    def _drop(self, running: Running, failure: BackwardFailed) -> bool:
        """Forget our part of a failed pass; False if that is done already."""
        context, play = running.context, running.play
        self._engine.passes.pop((context.id, play.number), None)
        if running.done is not None:
            context.outcomes.decided(play.number, well=False)
        return context.ended_badly(play.originator.incarnation, play.number, failure)

    # ── telling others ──────────────────────────────────────────────────────────────────────────

    def _spread(self, running: Running, failure: BackwardFailed) -> asyncio.Future[bool]:
        """Tell others in a task of its own: it goes on if whoever began it is cancelled."""
        key = running.context.id, running.play.number
        task = self._telling[key] = self.agent.spawn(self._tell_abort(running, failure))
        task.add_done_callback(lambda _: self._telling.pop(key, None))
        return asyncio.shield(task)

    async def _tell_abort(self, running: Running, failure: BackwardFailed) -> bool:
        """Tell every peer of the pass, who tell others in turn; whether all have acknowledged.

        The originator then tells all members that nobody else may have told.
        """
        play, late = running.play, isinstance(failure, PassTimedOut)
        wait = LATE_WAIT if late else LOSS_WAIT if _is_loss(failure) else ABORT_WAIT
        known = play.informed | play.heard
        for incarnation in (self.agent.incarnation, play.originator.incarnation):
            known.pop(incarnation, None)  # the originator decides, and is told by a report
        peers = [self._peer(name, incarnation) for incarnation, name in known.items()]
        there = [peer for peer in peers if peer is not None]
        if running.done is None:
            heard = await self._abort(running, failure, there, wait)
            return heard and len(there) == len(peers)
        # A peer that is lost or silent may have invited somebody else, and cannot tell it now.
        # Partners are left out: whom they work with is nothing to the others. They show no number
        # of the pass, since they hear of no outcome.
        others = [
            peer
            for peer in self.agent.directory
            if peer.incarnation != self.agent.incarnation
            and peer.incarnation not in known
            and peer.incarnation not in self._engine.contexts.gone
            and not self.agent.restricts(peer)
        ]
        if _is_loss(failure):
            return await self._abort(running, failure, there + others, wait)
        heard = await self._abort(running, failure, there, wait)
        if not heard or len(there) < len(peers):
            await self._abort(running, failure, others, LATE_WAIT)
        return heard

    async def _abort(
        self, running: Running, failure: BackwardFailed, peers: list[PeerInfo], seconds: float
    ) -> bool:
        """End a pass at some peers; whether they and all they told have acknowledged it in time."""
        play, waiting = running.play, []
        heard = True
        for peer in peers:
            try:
                fault = self.shell.describe(failure, peer)
                args = (running.context.id, play.number, play.originator.incarnation, fault)
                # Without an end: a peer that hears of it late should know why there is no number.
                answer = self.shell.insist(peer, "gradients.abort", *args)
            except AiogradError:
                heard = False
                continue
            if _is_loss(failure) and peer.name == failure.worker:
                heard = False  # others know that it is lost: it is told in case that it is not
            else:
                waiting.append(answer)
        if not waiting:
            return heard
        done, silent = await asyncio.wait(waiting, timeout=seconds)
        return heard and not silent and all(_is_true(answer) for answer in done)

    def abort_asked(
        self, sender: PeerInfo, context_id: int, number: int, originator: bytes, fault: Any
    ) -> bool | asyncio.Future[bool]:
        """A pass has failed; the answer says whether everyone we told has acknowledged it.

        No coroutine: a message that comes right behind it must find the pass ended.
        """
        context = self._engine.contexts.find(context_id)
        if context is None:
            return True
        running = self._engine.passes.get((context_id, number))
        failure = self.shell.rebuild(fault, sender, sender.name)
        if not isinstance(failure, BackwardFailed):
            failure = BackwardFailed(sender.name, "", str(failure))
        if running is None:
            context.ended_badly(originator, number, failure)
            telling = self._telling.get((context_id, number))
            # A peer that we are waiting for may ask back: it must not wait for us in turn.
            if telling is None or sender.incarnation != originator:
                return True
            return asyncio.shield(telling)
        if running.done is not None or not self._drop(running, failure):
            return True  # our own pass, which only we decide; or known already
        if sender.incarnation != originator:  # who may not know the originator, or reach it
            self._report(running, (failure.worker, failure.op, failure))
        return self._spread(running, failure)

    def _peer(self, name: str, incarnation: bytes) -> PeerInfo | None:
        """This very start of a worker, if it is still there."""
        if incarnation in self._engine.contexts.gone:
            return None  # it is no use to dial it again: it has lost the pass, too
        try:
            return self.agent.links.exactly(name, incarnation).peer
        except AiogradError:
            return None


def _is_loss(failure: BackwardFailed) -> bool:
    """Whether a pass failed because a worker was lost."""
    return isinstance(failure.__cause__, WorkerLost)


def _is_true(answer: asyncio.Future[Any]) -> bool:
    return not answer.cancelled() and answer.exception() is None and answer.result() is True


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
