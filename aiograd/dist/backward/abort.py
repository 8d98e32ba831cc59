"""How a pass that cannot be finished ends: on every participant, before its originator raises.

A worker that sees a failure reports it to the originator, which alone decides the outcome. The
originator drops its part and notifies the peers it exchanged messages with; each of them does the
same. If one of them is lost, those that only it had invited are notified directly: any member may be
one. When the survivors have acknowledged, `BackwardFailed` is raised.

    participant ── gradients.failed ──▶ originator ── gradients.abort ──▶ its peers ──▶ their peers
                                                   ◀── acknowledged ─────           ◀──

Nothing of a failed pass can be read even by a worker that learns all this late: it shows no number
before it knows the outcome (`outcomes.py`). So aborts are for speed and for good error texts; that no
number shows does not depend on them.

A participant whose own part is unfinished holds credit, so the pass cannot have ended well: it may
call the pass failed before the originator does. One whose part is done cannot know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final, Protocol

from aiograd.dist.backward.active import ActivePass, PassTable
from aiograd.dist.backward.state import PassKey
from aiograd.dist.channel import Channel
from aiograd.dist.context import Context
from aiograd.dist.lost_peers import LostPeers
from aiograd.errors import (
    AiogradError,
    BackwardFailed,
    GradError,
    Overloaded,
    PassRefused,
    PassTimedOut,
    WorkerLost,
)
from aiograd.rpc.directory import PeerInfo

_log = logging.getLogger("aiograd.dist")

ABORT_WAIT: Final = 2.0  # seconds that survivors get to acknowledge the end of a failed pass
# The same if a worker was lost: the failure is promised within a second of that, and others may be
# out of reach, too.
LOSS_WAIT: Final = 0.5
# The same where time is up already: a peer that is silent gets the abort when it wakes up.
LATE_WAIT: Final = 0.2


class ContextLookup(Protocol):
    """The contexts of this worker."""

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""


class AbortProtocol:
    """Ends the passes of one worker that failed, were cancelled or lost a participant."""

    def __init__(
        self, channel: Channel, passes: PassTable, contexts: ContextLookup, lost_peers: LostPeers
    ) -> None:
        self._channel, self._passes = channel, passes
        self._contexts, self._lost_peers = contexts, lost_peers
        # Passes whose peers are being notified: an abort that arrives meanwhile waits for that.
        self._spreading: dict[PassKey, asyncio.Future[bool]] = {}

    # ── seeing a failure ────────────────────────────────────────────────────────────────────────

    def failed(self, active: ActivePass, error: Exception) -> None:
        """End a pass in which something went wrong here, or have its originator end it."""
        if not self._passes.is_live(active) or active.over:
            return
        state = active.state
        node = state.sweep.failed
        op = node.name if node is not None else ""
        worker = self._channel.name
        if isinstance(error, WorkerLost | Overloaded):  # another worker is the cause, and no op
            worker, op = getattr(error, "worker", "") or worker, ""
        _log.debug("%s: pass %d failed at %s: %s", self._channel.name, state.number, worker, error)
        failure = failure_of(worker, op, error)
        if active.done is not None:
            self._channel.spawn(self._end_unless_over(active, failure))
            return
        # Only an unfinished part proves that the pass cannot have ended well (see above).
        if not state.complete:
            self._channel.spawn(self.end(active, failure))
        self._report(active, (worker, op, error))

    def _report(self, active: ActivePass, facts: tuple[str, str, Exception]) -> None:
        """Report a failure to the originator until it acknowledges.

        Its answer may be that the pass had ended well.
        """
        state = active.state
        worker, op, error = facts
        originator = self._reach(state.originator.name, state.originator.incarnation)
        if originator is None:
            return  # lost as well: `peer_lost` ends the pass
        with contextlib.suppress(AiogradError):
            fault = self._channel.describe(error, originator)
            args = (*active.key, worker, op, fault)
            answer = self._channel.notify(originator, "gradients.failed", *args)
            answer.add_done_callback(lambda done: self._answered(active, done))

    def _answered(self, active: ActivePass, answer: asyncio.Future[Any]) -> None:
        """Count the pass if it had ended well; else the originator aborts it everywhere now."""
        if answer.cancelled() or answer.exception() is not None or not answer.result():
            return
        context, state = active.context, active.state
        if state.number in context.passes:
            context.ended_well(state.originator.incarnation, state.number)
        self._passes.discard(active.key)

    def failure_reported(
        self, sender: PeerInfo, context_id: int, number: int, worker: str, op: str, fault: Any
    ) -> bool:
        """Handle a participant's failure; return whether the pass had ended well before."""
        active = self._passes.get((context_id, number))
        if active is not None and active.done is not None:
            if not active.over:
                error = self._channel.rebuild(fault, sender, worker)
                failure = failure_of(worker, op, error)
                self._channel.spawn(self._end_unless_over(active, failure))
            return False  # it fails, or its good end is not decided yet in this tick
        context = self._contexts.find(context_id)
        return context is not None and number not in context.aborted

    def peer_lost(self, peer: PeerInfo, error: Exception) -> None:
        """End the passes that need an incarnation which is gone."""
        for active in self._passes.all():
            state = active.state
            if active.done is None and state.originator.incarnation == peer.incarnation:
                if state.complete:
                    # The pass may have ended well: a worker that knows may report the outcome. Until
                    # then its numbers are not shown.
                    self._passes.discard(active.key)
                else:
                    self._channel.spawn(self.end(active, failure_of(peer.name, "", error)))
            elif state.names(peer.incarnation):
                # Even if our part is complete: credit we sent there is lost. A pass that has ended
                # meanwhile is not harmed, its originator says so.
                why = getattr(error, "why", "") or str(error)
                self.failed(active, WorkerLost(peer.name, "unknown", why))

    def edge_lost(self, context: Context, name: str, incarnation: bytes) -> None:
        """Fail the passes begun here before some worker of the context lost that incarnation.

        A pass that begins when the loss is known counts the edges of the lost worker as "none".
        """
        loss = self._lost_peers.order(incarnation)
        for active in self._passes.of(context.id):
            if active.done is not None and active.losses < loss:
                self.failed(active, WorkerLost(name, "unknown", "it was lost during the pass"))

    def refused(self, peer: PeerInfo, error: Exception) -> None:
        """Fail the passes that went to a peer which could not take a gradient message.

        Posts are not numbered for their senders, so the peer cannot say which message that was, and
        one of these passes has lost credit: it would be missed only at its deadline.
        """
        for active in self._passes.all():
            if peer.incarnation in active.state.informed:
                self.failed(active, error)

    # ── ending a pass ───────────────────────────────────────────────────────────────────────────

    async def _end_unless_over(self, active: ActivePass, failure: BackwardFailed) -> None:
        # Asked again, because this task starts later: the pass may have ended well in the same tick.
        if not active.over:
            await self.end(active, failure)

    async def end(self, active: ActivePass, failure: BackwardFailed) -> None:
        """End a pass that failed: here, then wherever it went; then raise where it is awaited."""
        if self._drop(active.context, active.state.originator.incarnation, active.key, failure):
            await self._spread(active, failure)
        elif (spreading := self._spreading.get(active.key)) is not None:
            # It failed twice. Survivors must know of it before the originator raises, either way.
            await asyncio.shield(spreading)
        active.fail(failure)

    def cancelled(self, active: ActivePass) -> None:
        """End a pass that nobody awaits any more: here at once, and elsewhere soon."""
        failure = BackwardFailed(self._channel.name, "", "it was cancelled")
        if self._drop(active.context, active.state.originator.incarnation, active.key, failure):
            self._spread(active, failure)

    def _drop(
        self, context: Context, originator: bytes, key: PassKey, failure: BackwardFailed
    ) -> bool:
        """Forget our part of a failed pass; False if that is done already."""
        self._passes.discard(key)
        context.outcomes.decided(key[1], well=False)  # does nothing unless it was begun here
        return context.ended_badly(originator, key[1], failure)

    # ── notifying others ────────────────────────────────────────────────────────────────────────

    def _spread(self, active: ActivePass, failure: BackwardFailed) -> asyncio.Future[bool]:
        """Notify peers in a task of its own: it goes on if the task that began it is cancelled."""
        key = active.key
        task = self._spreading[key] = self._channel.spawn(self._notify_all(active, failure))
        task.add_done_callback(lambda _: self._spreading.pop(key, None))
        return asyncio.shield(task)

    async def _notify_all(self, active: ActivePass, failure: BackwardFailed) -> bool:
        """Abort the pass at all its peers, which do so in turn; whether all have acknowledged.

        The originator then notifies the members that no other worker may have notified: all if one
        of its peers is lost, those that it is connected to if one is only silent.
        """
        state, late = active.state, isinstance(failure, PassTimedOut)
        wait = LATE_WAIT if late else LOSS_WAIT if _is_loss(failure) else ABORT_WAIT
        known = state.informed | state.heard
        # Not ourselves; and not the originator: it decides, and gets a report instead.
        for incarnation in (self._channel.incarnation, state.originator.incarnation):
            known.pop(incarnation, None)
        peers = [self._reach(name, incarnation) for incarnation, name in known.items()]
        there = [peer for peer in peers if peer is not None]
        if active.done is None:
            heard = await self._notify(active, failure, there, wait)
            return heard and len(there) == len(peers)
        # A peer that is lost or silent may have invited others, and cannot notify them now; nobody
        # else knows them. Restricted peers are left out: with which workers others work is not theirs
        # to know. They show no number of the pass, since they get no report of its outcome.
        others = [
            peer
            for peer in self._channel.directory
            if peer.incarnation != self._channel.incarnation
            and peer.incarnation not in known
            and peer.incarnation not in self._lost_peers
            and not self._channel.restricts(peer)
        ]
        if _is_loss(failure):
            # A lost worker never acknowledges, so the second round would always be needed: at once.
            return await self._notify(active, failure, there + others, wait)
        heard = await self._notify(active, failure, there, wait)
        if len(there) == len(peers):
            # Nobody is lost: one that is silent gets the abort when it wakes up, and passes it on.
            # Until then those it invited show no number. So no connection is made for this: a large
            # cluster would make one to every member, for each pass that fails.
            others = [peer for peer in others if self._channel.is_connected(peer)]
        if not heard or len(there) < len(peers):
            await self._notify(active, failure, others, LATE_WAIT)
        return heard

    async def _notify(
        self, active: ActivePass, failure: BackwardFailed, peers: list[PeerInfo], seconds: float
    ) -> bool:
        """Abort a pass at some peers; whether they and all they notified acknowledged in time."""
        originator, waiting, heard = active.state.originator.incarnation, [], True
        for peer in peers:
            try:
                fault = self._channel.describe(failure, peer)
                # Retried without an end, even after `seconds`: a peer that gets it late should know
                # why there is no number.
                answer = self._channel.notify(
                    peer, "gradients.abort", *active.key, originator, fault
                )
            except AiogradError:
                heard = False
                continue
            if _is_loss(failure) and peer.name == failure.worker:
                # Others know that it is lost. It is notified in case it is not, but nobody waits.
                heard = False
            else:
                waiting.append(answer)
        if not waiting:
            return heard
        done, silent = await asyncio.wait(waiting, timeout=seconds)
        if silent:
            _log.debug("%s: %d peers have not acknowledged an abort", self._channel.name, len(silent))
        return heard and not silent and all(_is_true(answer) for answer in done)

    def abort_received(
        self, sender: PeerInfo, context_id: int, number: int, originator: bytes, fault: Any
    ) -> bool | asyncio.Future[bool]:
        """Drop a failed pass; the answer says whether every peer we notified has acknowledged.

        No coroutine: a message that comes right behind the abort must find the pass ended.
        """
        context, key = self._contexts.find(context_id), (context_id, number)
        if context is None:
            return True
        active = self._passes.get(key)
        if active is not None and active.done is not None:
            return True  # our own pass, of which only we decide
        failure = self._channel.rebuild(fault, sender, sender.name)
        if not isinstance(failure, BackwardFailed):
            failure = BackwardFailed(sender.name, "", str(failure))
        known = originator if active is None else active.state.originator.incarnation
        dropped = self._drop(context, known, key, failure)
        if active is None:
            spreading = self._spreading.get(key)
            # Only the originator waits for our peers: one of them may be waiting for us, and has to
            # get an answer first.
            if spreading is None or sender.incarnation != originator:
                return True
            return asyncio.shield(spreading)
        if not dropped:
            return True
        if sender.incarnation != originator:  # the sender may not know the originator, or reach it
            self._report(active, (failure.worker, failure.op, failure))
        return self._spread(active, failure)

    def _reach(self, name: str, incarnation: bytes) -> PeerInfo | None:
        """Return this very incarnation of a worker, if it is still there."""
        if incarnation in self._lost_peers:
            return None  # dialling it again is of no use: it has lost the pass, too
        return self._channel.reach(name, incarnation)


def _is_loss(failure: BackwardFailed) -> bool:
    """Whether a pass failed because a worker was lost."""
    return isinstance(failure.__cause__, WorkerLost)


def _is_true(answer: asyncio.Future[Any]) -> bool:
    return not answer.cancelled() and answer.exception() is None and answer.result() is True


def failure_of(worker: str, op: str, error: BaseException) -> BackwardFailed:
    """Return the error that a failed pass raises, with its cause chained."""
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
