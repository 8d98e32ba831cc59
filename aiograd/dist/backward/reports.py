"""Reports of outcomes: how participants learn from the originator how its passes ended.

`outcomes.py` says what a report is and why it may be late. This module sends reports and applies
those that arrive. A report travels in front of the next message of the context to a peer, so calls of
the originator bring it with them at no extra wake-up. A participant that gets no message is sent one
after a short while; if the context is left by then, none is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from aiograd.dist.backward.active import PassTable
from aiograd.dist.backward.outcomes import Report
from aiograd.dist.channel import Channel
from aiograd.dist.context import CURRENT, Context
from aiograd.errors import AiogradError, BackwardFailed
from aiograd.rpc.directory import PeerInfo

# Seconds after which participants that nothing was sent to get a report. Long enough that most
# contexts are left by then, and that many passes share a message.
LAZY = 0.005


class ContextLookup(Protocol):
    """The contexts of this worker."""

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""

    def all(self) -> list[Context]:
        """Return all open contexts."""


class OutcomeReports:
    """Sends and applies the reports of one worker."""

    def __init__(self, channel: Channel, passes: PassTable, contexts: ContextLookup) -> None:
        self._channel, self._passes, self._contexts = channel, passes, contexts
        # Contexts with outcomes to report at the next timer, and to whom: a bit for each rank.
        self._pending: dict[Context, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Send nothing of its own any more."""
        if self._timer is not None:
            self._timer.cancel()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def announce(self, context: Context, ranks: int) -> None:
        """Let participants know soon that a pass begun here ended well."""
        self._pending[context] = self._pending.get(context, 0) | ranks
        if CURRENT.get() is not context or context.id >> 48 != self._channel.rank:
            # The task that awaited the pass may go on outside the context, or on another worker.
            # Calls made there do not carry the outcome, so it must be on its way before them.
            self._send_pending()
        elif self._timer is None:
            self._timer = self._channel.later(LAZY, self._send_pending)

    def _send_pending(self) -> None:
        """Report to participants to which nothing was sent since their pass ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, {}
        for context, ranks in pending.items():
            while ranks and not context.released:
                rank = ranks.bit_length() - 1
                ranks -= 1 << rank
                peer = self._channel.directory.get(rank)
                # A peer that was lost while the context was open stays lost for it.
                if peer is not None and peer.incarnation not in context.lost:
                    self.send(context, peer)

    def send(self, context: Context, peer: PeerInfo) -> None:
        """Send a peer what it does not know, before a message of the context to it.

        May run in any thread, as calls may be made from any.
        """
        if not context.outcomes.knows_all(peer.incarnation):
            # A peer that is lost: the message itself will fail, and say why.
            with contextlib.suppress(AiogradError):
                me = (self._channel.name, self._channel.incarnation)
                reports = [tuple(report) for report in context.outcomes.tell(peer.incarnation, me)]
                self._channel.post(peer, "gradients.outcomes", context.id, reports)

    def refused(self, peer: PeerInfo, error: Exception) -> None:
        """Send again what a peer could not take, with the next message of its context."""
        for context in self._contexts.all():
            context.outcomes.forget_told(peer.incarnation)

    # ── applying ────────────────────────────────────────────────────────────────────────────────

    def received(self, sender: PeerInfo, context_id: int, reports: list[tuple[Any, ...]]) -> None:
        """Take in what a peer says of outcomes."""
        context = self._contexts.find(context_id)
        if context is None:
            return
        for entry in reports:
            report = Report(*entry)
            # Of our own passes only we decide; what comes back is what we said earlier.
            if report.incarnation == self._channel.incarnation:
                continue
            # A restricted peer speaks for itself only: it must not decide over passes of others.
            foreign = report.incarnation != sender.incarnation
            if foreign and self._channel.restricts(sender):
                continue
            if context.outcomes.learn(report, sender.incarnation):
                self._apply(context, report)

    def _apply(self, context: Context, report: Report) -> None:
        """Count passes, or forget them, as their originator decided."""
        for number, state in list(context.passes.items()):
            if state.originator.incarnation != report.incarnation:
                continue
            well = report.outcome(number)
            if well is not None:
                self._passes.discard((context.id, number))
            if well:
                context.ended_well(report.incarnation, number)
            elif well is False:
                failure = BackwardFailed(report.name, "", "its originator ended the pass")
                context.ended_badly(report.incarnation, number, failure)
        # A pass that ended well without us still ends the failure of an earlier one.
        context.outlived(report.incarnation, report.best)
