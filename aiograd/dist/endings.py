"""How a pass that cannot be finished ends: on every participant, before anyone hears of it.

Whoever sees a failure reports it to the originator. The originator drops its part and tells the
peers it had to do with; each of them does the same; when the survivors have acknowledged,
`BackwardFailed` is raised. So nothing of a failed pass can be read once backward has raised.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from aiograd.dist.failures import failure_of
from aiograd.dist.running import Running
from aiograd.errors import BackwardFailed, PassTimedOut, WorkerLost
from aiograd.rpc.directory import PeerInfo

if TYPE_CHECKING:
    from aiograd.dist.engine import Engine

ABORT_WAIT = 2.0  # seconds that survivors get to acknowledge the end of a failed pass
LATE_WAIT = 0.2  # the same where time is up already: one that is silent will hear it when it wakes


class Endings:
    """Ends the passes of one engine that failed, were cancelled or lost a participant."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.agent, self.shell = engine.agent, engine.shell

    def failed(self, running: Running, error: Exception) -> None:
        """Something here went wrong: end the pass, or have its originator end it."""
        if not self._engine.is_live(running) or running.over:
            return
        play = running.play
        node = play.sweep.failed
        op = node.name if node is not None else ""
        worker = getattr(error, "worker", "") or self.agent.name
        if isinstance(error, WorkerLost):
            op = ""
        else:
            worker = self.agent.name
        failure = failure_of(worker, op, error)
        if running.done is not None:
            self.agent.spawn(self._end_unless_over(running, failure))
        else:
            fault = self.shell.describe(error, play.originator)
            running.context.failure = failure  # in doubt: no number is shown until it is settled
            running.context.changed()
            self.agent.spawn(self._report(running, failure, (worker, op, fault)))

    async def _report(
        self, running: Running, failure: BackwardFailed, facts: tuple[str, str, Any]
    ) -> None:
        """Tell the originator, and learn whether the pass had ended well before."""
        context, play = running.context, running.play
        try:
            well = await self.shell.ask(
                play.originator,
                "gradients.failed",
                context.id,
                play.number,
                *facts,
                timeout=ABORT_WAIT,
            )
        except Exception:
            well = False
        if not well:
            await self.end(running, failure)
        elif context.failure is failure:
            context.failure = None
            context.commit(play.number)
            context.changed()

    async def _end_unless_over(self, running: Running, failure: BackwardFailed) -> None:
        if not running.over:  # it may have ended well in the same tick
            await self.end(running, failure)

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
        if running is not None and running.done is not None and not running.over:
            error = self.shell.rebuild(fault, sender, worker)
            self.agent.spawn(self._end_unless_over(running, failure_of(worker, op, error)))
            return False
        context = self._engine.contexts.find(context_id)
        return context is not None and number not in context.aborted

    async def end(self, running: Running, failure: BackwardFailed) -> None:
        """End a pass that failed: here first, then wherever it went; then tell who awaits it."""
        if self._drop(running, failure):
            await self._tell_abort(running, failure)
        done = running.done
        if done is not None and not done.done():
            done.set_exception(failure)
            done.exception()  # whoever still awaits it gets it all the same

    def cancelled(self, running: Running) -> None:
        """Nobody awaits a pass any more: end it here at once, and elsewhere soon."""
        failure = BackwardFailed(self.agent.name, "", "it was cancelled")
        if self._drop(running, failure):
            self.agent.spawn(self._tell_abort(running, failure))

    def _drop(self, running: Running, failure: BackwardFailed) -> bool:
        context, number = running.context, running.play.number
        if number in context.aborted:
            return False
        context.aborted.add(number)
        context.passes.pop(number, None)
        context.failure = failure
        context.changed()
        self._engine.passes.pop((context.id, number), None)
        return True

    async def _tell_abort(self, running: Running, failure: BackwardFailed) -> None:
        """Tell everyone we had to do with, who tell others in turn; then those nobody may tell."""
        late = isinstance(failure, PassTimedOut)
        known = (running.play.informed | running.play.heard) - {self.agent.name}
        silent = await self._abort(running, failure, known, LATE_WAIT if late else ABORT_WAIT)
        if silent and running.done is not None:
            # Who is silent may have told somebody else of the pass, and says nothing to it now.
            # Partners are left out: whom they work with is nothing to the others.
            members = {p.name for p in self.agent.directory if not self.agent.restricts(p)}
            others = members - known - {self.agent.name}
            await self._abort(running, failure, others, LATE_WAIT)

    async def _abort(
        self, running: Running, failure: BackwardFailed, peers: set[str], seconds: float
    ) -> bool:
        """End a pass at some peers; whether one of them has not acknowledged it in time."""
        waiting = []
        for peer in sorted(peers):
            with contextlib.suppress(Exception):
                fault = self.shell.describe(failure, peer)
                context_id, number = running.context.id, running.play.number
                # Without an end: an abort that is given up may never be heard, and the peer would
                # show numbers of a pass that has failed.
                waiting.append(
                    self.shell.insist(peer, "gradients.abort", context_id, number, fault)
                )
        if not waiting:
            return False
        _, silent = await asyncio.wait(waiting, timeout=seconds)
        return bool(silent)

    async def abort_asked(self, sender: PeerInfo, context_id: int, number: int, fault: Any) -> None:
        context = self._engine.contexts.find(context_id)
        if context is None:
            return
        running = self._engine.passes.get((context_id, number))
        failure = self.shell.rebuild(fault, sender, sender.name)
        if not isinstance(failure, BackwardFailed):
            failure = BackwardFailed(sender.name, "", str(failure))
        if running is None:
            if number not in context.aborted:
                context.aborted.add(number)
                context.passes.pop(number, None)
                context.failure = failure
                context.changed()
            return
        await self.end(running, failure)

    def lost(self, peer: PeerInfo, error: Exception) -> None:
        """A peer died: passes it took part in cannot end any more."""
        for running in list(self._engine.passes.values()):
            play = running.play
            if running.done is None and play.originator == peer.name:
                failure = failure_of(peer.name, "", error)
                self.agent.spawn(self.end(running, failure))
            elif peer.name in play.informed or peer.name in play.heard:
                # Even if our part is complete: credit we sent there is lost. A pass that has ended
                # meanwhile is not harmed, its originator does not listen any more.
                self.failed(running, WorkerLost(peer.name, "unknown", str(error)))
