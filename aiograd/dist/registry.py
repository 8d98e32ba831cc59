"""All contexts of a worker, and the functions that open and find them.

A context is opened on one worker and appears on every worker that a call made inside it
reaches. Leaving it releases it everywhere: each worker forgets its part first and then notifies the
peers it sent the context to, so the release follows the calls and ends by itself. A released context
never comes back. When a worker that sent it is lost, the worker that opened it is asked after a lease
whether it is still open, because the release may have got lost with the lost worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, Protocol

from aiograd.autograd.tensor import Tensor
from aiograd.dist.access import ContextAccess
from aiograd.dist.channel import Channel
from aiograd.dist.context import CURRENT, Backward, Context
from aiograd.dist.lost_peers import LostPeers
from aiograd.dist.released import ReleasedForPartners
from aiograd.errors import (
    AiogradError,
    DeadlineExceeded,
    NestedContext,
    NoContext,
    UnknownContext,
)
from aiograd.rpc.agent import Agent, current_agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.notify import Coalescer, Notifier

_log = logging.getLogger("aiograd.dist")

SETTLE_TIME: Final = 60.0  # seconds that a shutdown without a deadline waits for passes
ASK_WAIT: Final = 5.0  # seconds to answer whether a context is still open
# Ids of released contexts that late messages must not bring back. REMEMBERED of them are kept in any
# case, and up to MOST while they are younger than LATELY: no message is that late.
REMEMBERED, MOST = 4096, 65536
LATELY = 60.0  # seconds


class Engine(Backward, Protocol):
    """What runs passes, as the registry knows it: it also has to know of releases and losses."""

    def released(self, context: Context) -> None:
        """End the passes of a context that was left."""

    def peer_lost(self, peer: PeerInfo, error: Exception) -> None:
        """End the passes that need a lost peer."""

    def edge_lost(self, context: Context, name: str, incarnation: bytes) -> None:
        """End the passes of a context in which an edge to that incarnation was lost."""

    def running(self) -> int:
        """Return how many passes are under way."""

    def close(self) -> None:
        """Stop; the worker is closing."""


class ContextRegistry:
    """All contexts of one worker; the agent's part for distributed autograd."""

    channel: Channel

    def __init__(self, agent: Agent) -> None:
        self.channel = channel = Channel(agent)
        self.engine: Engine  # set by `attach`: the engine needs the registry, too
        self.access: ContextAccess = ContextAccess(channel, self)
        self.lost_peers: LostPeers = LostPeers()
        self.steps: int = 0  # of optimisers on this worker's leaves, so far
        self._variables = agent.context.copy()
        self._notifier = Notifier(agent, self.lost_peers, self._variables)
        # Releases still to be sent, by the incarnation of their recipient.
        self._releases: dict[bytes, tuple[PeerInfo, list[int]]] = {}
        self._coalescer = Coalescer(agent.loop, self._variables, self._send_releases)
        self._table: dict[int, Context] = {}
        self._released: OrderedDict[int, float] = OrderedDict()  # id → loop time of its release
        self._partners_released = ReleasedForPartners()
        # A restarted worker must not give out the ids of its former self.
        self._ids = itertools.count(channel.random_start())
        self._edges = itertools.count(channel.random_start() + 1)  # edge 0 means "no edge"

    def new_edge(self) -> int:
        """Return the id of a new edge: unique in the cluster, by the rank in its top bits."""
        return self.channel.rank << 48 | next(self._edges)

    def new(self) -> Context:
        """Open a context on this worker."""
        self.channel.check_affinity()
        number = next(self._ids)
        # A restricted peer may speak of any context whose id it knows, so it must not guess one.
        if self.channel.directory.has_partners:
            number = self.channel.unguessable()
        context = Context(self, self.channel.rank << 48 | number)
        self._table[context.id] = context
        return context

    def get(self, context_id: int) -> Context:
        """Return this worker's part of a context; UnknownContext if it has none."""
        context = self._table.get(context_id)
        if context is None:
            raise UnknownContext(context_id)
        return context

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, if it has one."""
        return self._table.get(context_id)

    def all(self) -> list[Context]:
        """Return all open contexts, oldest first."""
        return list(self._table.values())

    def arriving(self, context_id: int, sender: PeerInfo, kind: str) -> Context | None:
        """Return the context of a message, made on first sight; None if it was released."""
        context = self._table.get(context_id)
        if context is None:
            # The context of a reply is made by its call. If it is gone, it was released meanwhile,
            # maybe so long ago that its id is forgotten.
            if context_id in self._released or kind == "reply":
                return None
            if context_id in self._partners_released:
                return None
            context = self._table[context_id] = Context(self, context_id)
        if kind != "reply":
            context.callers[sender.incarnation] = sender.name
        return context

    def count_step(self) -> tuple[int, int]:
        """Count a step of an optimiser; return its number, and the newest that all contexts saw.

        May run in any thread.
        """
        contexts = list(self._table.values())  # oldest first
        self.steps += 1
        return self.steps, contexts[0].since if contexts else self.steps

    def current(self) -> Context | None:
        """Return the context that a call made here and now carries."""
        context = CURRENT.get()
        # Several workers may share a loop, and so its tasks' variables: the context must be ours.
        if context is None or context.released or context.home is not self:
            return None
        return context

    def enter(self, context: Context) -> None:
        """Make a context current in this task; NestedContext if another one is open in it."""
        context.check()
        current = CURRENT.get()
        if current is not None and not current.released:
            raise NestedContext(
                f"context {current.id} is already open in this task; contexts do not nest"
            )
        CURRENT.set(context)

    # ── release ─────────────────────────────────────────────────────────────────────────────────

    def release(self, context_id: int) -> None:
        """Forget a context here, then release it at every peer we sent it to; from any thread."""
        context = self._table.pop(context_id, None)
        if context is None:
            return
        context.released = True
        if context.brought_by:
            self._partners_released.add(context.brought_by, context_id)
        else:
            self._released[context_id] = self.channel.time()
        self.channel.on_loop(self._end, context)

    def _forget_old(self) -> None:
        released, now = self._released, self.channel.time()
        while len(released) > REMEMBERED:  # threads may add to it meanwhile
            oldest, when = released.popitem(last=False)
            if len(released) < MOST and when > now - LATELY:
                released[oldest] = when
                released.move_to_end(oldest, last=False)
                return

    def _end(self, context: Context) -> None:
        """End the passes of a released context, and schedule its release at others."""
        if len(self._released) > REMEMBERED:
            self._forget_old()
        self.engine.released(context)
        # The traceback of a failure holds the frames that hold the context: all that was computed in
        # them would stay until the next garbage collection. Timers that were cancelled stay in the
        # loop until their time, with the variables that name the context.
        context.failure, context.totals = None, {}
        for peer in context.recipients.values():
            if peer.name != self.channel.name:
                self._releases.setdefault(peer.incarnation, (peer, []))[1].append(context.id)
        if self._releases:
            self._coalescer.schedule()
        # A user may hold on to the context, but not to the graph and its arrays through it.
        context.sends.clear()
        context.receives.clear()
        context.topology = None
        for hold in context.holds.values():
            hold.close()

    def _send_releases(self) -> None:
        releases, self._releases = self._releases, {}
        for peer, ids in releases.values():
            # Lazy: nobody waits for a release, so it rides in front of the next message.
            self._notifier.notify(peer, _ignore, "context.release", *ids, lazy=True)

    def release_received(self, sender: PeerInfo, *context_ids: int) -> None:
        """Release contexts that a peer has released."""
        for context_id in context_ids:
            context = self._table.get(context_id)
            if context is not None:
                recipient = context.recipients.get(sender.name)
                if recipient is not None and recipient.incarnation == sender.incarnation:
                    del context.recipients[sender.name]  # it forgot the context before it sent this
                self.release(context_id)
            else:
                # The calls that would have brought the context may still be under way: large
                # messages are overtaken.
                self._released[context_id] = self.channel.time()
                if len(self._released) > REMEMBERED:
                    self._forget_old()

    # ── losses ──────────────────────────────────────────────────────────────────────────────────

    def peer_lost(self, peer: PeerInfo, error: Exception) -> None:
        """Fail the passes of a dead peer; contexts that only it could release end by lease."""
        concerned = [context for context in self.all() if peer.incarnation in context.edge_peers]
        # In this order: passes that fail now must find the loss noted, in contexts and in the table.
        for context in self.all():
            context.cut_off(peer)
        self.lost_peers.add(peer.incarnation, peer.name)
        self.engine.peer_lost(peer, error)
        self._spread_loss(peer.name, peer.incarnation, concerned, self.channel.incarnation)
        for context in self.all():
            if context.id >> 48 == self.channel.rank:
                continue  # opened here, so it is left here
            if context.callers.pop(peer.incarnation, None) is not None:
                # Not at once: the caller may be cut off only from us, and the context still in use.
                self.channel.later(self.channel.lease, self._doubt, context)

    def _spread_loss(
        self, name: str, incarnation: bytes, contexts: list[Context], source: bytes
    ) -> None:
        """Notify the neighbours in some contexts that an edge was lost, and they theirs.

        A pass that runs may not have reached us, and its originator need not know that the context
        went to the lost worker at all. Only the originator can fail the pass before it gets here.
        """
        by_peer: dict[bytes, tuple[PeerInfo, list[int]]] = {}
        for context in contexts:
            if incarnation not in context.lost_edges:  # so that the news goes round only once
                context.lost_edges.add(incarnation)
                self.engine.edge_lost(context, name, incarnation)
                for peer in self._neighbours(context):
                    if peer.incarnation != source and not self.channel.restricts(peer):
                        by_peer.setdefault(peer.incarnation, (peer, []))[1].append(context.id)
        for peer, ids in by_peer.values():
            with contextlib.suppress(AiogradError):  # lost as well: then `peer_lost` follows
                self.channel.post(peer, "context.lost", name, incarnation, ids)

    def _neighbours(self, context: Context) -> list[PeerInfo]:
        """Return the members to which a context went from here, or from which it came."""
        found = {peer.incarnation: peer for peer in context.recipients.values()}
        for incarnation, name in context.callers.items():
            peer = self.channel.directory.get(name)
            # The directory may know a successor of the caller by now, which has no part of it.
            if peer is not None and peer.incarnation == incarnation:
                found[incarnation] = peer
        return [
            peer
            for incarnation, peer in found.items()
            if incarnation != self.channel.incarnation and incarnation not in self.lost_peers
        ]

    def loss_received(self, sender: PeerInfo, name: str, incarnation: bytes, ids: list[int]) -> None:
        """Fail passes and notify others: a neighbour has lost an edge, or was notified of it."""
        # With which workers a restricted peer works does not concern others.
        if not self.channel.restricts(sender):
            found = [context for id in ids if (context := self.find(id)) is not None]
            self._spread_loss(name, incarnation, found, sender.incarnation)

    def peer_returned(self, peer: PeerInfo) -> None:
        """Let contexts opened from now on use a lost peer that is back in a new session."""
        self.lost_peers.discard(peer.incarnation)

    def _doubt(self, context: Context) -> None:
        """Ask whether a context is still open: the peer that would have released it is gone.

        Its other callers are no help: they may wait for our release in turn.
        """
        if not context.released and not self.channel.closed:
            self.channel.spawn(self._ask_home(context))

    async def _ask_home(self, context: Context) -> None:
        """Ask the worker that opened a context whether it is still open; release it if not."""
        home = self.channel.directory.get(context.id >> 48)
        known = False
        # The id names the rank that opened the context, not its incarnation. A successor of that
        # worker does not know the id, since ids start at random, and answers "no".
        if home is not None and home.incarnation not in self.lost_peers:
            try:
                known = await self.channel.ask(home, "context.known", context.id, timeout=ASK_WAIT)
            except DeadlineExceeded:
                known = True  # silent, not gone: ask again
            except AiogradError:
                pass
        if known:
            self.channel.later(self.channel.lease, self._doubt, context)
        else:
            _log.info("%s: releasing context %d by lease", self.channel.name, context.id)
            self.release(context.id)

    def known(self, sender: PeerInfo, context_id: int) -> bool:
        """Answer a peer whether a context is open here."""
        return context_id in self._table

    # ── the agent's part ────────────────────────────────────────────────────────────────────────

    def watched(self) -> Iterator[bytes]:
        """Give the incarnations with which this worker shares an open context."""
        for context in self._table.values():
            yield from context.callers
            yield from context.edge_peers
            yield from (peer.incarnation for peer in context.recipients.values())

    def counters(self) -> dict[str, int]:
        """Return what `debug_info` shows of contexts and passes."""
        return {"contexts": len(self._table), "backward_passes": self.engine.running()}

    async def settle(self, deadline: float) -> None:
        """Wait until this worker has done its part of all passes; `deadline` is loop time.

        Calls are waited for elsewhere, but a pass has none: its messages are one-way.
        """
        loop = asyncio.get_running_loop()
        # Half of the time that is left: what a peer does not answer must not use up what the rest of
        # the shutdown needs.
        limit = loop.time() + min((deadline - loop.time()) / 2, SETTLE_TIME)
        while self.engine.running() and loop.time() < limit:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Release this worker's contexts everywhere, and its parts of others' here."""
        self.engine.close()
        for context in self.all():
            if context.id >> 48 != self.channel.rank:
                context.recipients.clear()  # not ours to end: others may still work in it
            self.release(context.id)
        # What waits for its 5 ms must leave now: nothing runs on this loop for us afterwards.
        self._coalescer.close()
        self._variables.run(self._send_releases)
        self._notifier.close()


def _ignore(answer: Any, error: Any) -> None:
    """Ignore the acknowledgement of a release: nothing here depends on it."""


def contexts() -> ContextRegistry:
    """Return the contexts of the current worker."""
    part: ContextRegistry = current_agent().parts[ContextRegistry]
    return part


def context() -> Context:
    """Open a distributed autograd context on the current worker.

    Use it as `async with ag.context() as ctx:`, or plain `with`. Every call made inside carries the
    context, and `await ctx.backward(loss)` runs the backward pass through all of them.

        >>> w = ag.ones(2, requires_grad=True)
        >>> async with ag.context() as ctx:
        ...     y = await ag.rpc_async("worker1", ag.exp, args=(w,))
        ...     await ctx.backward(y.sum())
        ...     print(ctx.gradients[w].shape)
        (2,)
    """
    return contexts().new()


def current_context() -> Context:
    """Return the context of this task; NoContext if there is none.

        >>> async with ag.context() as ctx:
        ...     print(ag.current_context() is ctx)
        True
    """
    current = CURRENT.get()
    if current is None or current.released:
        raise NoContext("no autograd context is open here; use `async with ag.context():`")
    return current


def get_context(id: int) -> Context:
    """Return this worker's part of a context; UnknownContext if it has none.

        >>> def known(id):
        ...     return ag.get_context(id).id == id
        >>> async with ag.context() as ctx:
        ...     print(await ag.rpc_async("worker1", known, args=(ctx.id,)))
        True
    """
    if not isinstance(id, int):
        raise TypeError(f"a context id is an int, not {type(id).__name__}")
    return contexts().get(id)


def resolve(ctx_or_id: Context | int) -> Context:
    """Return this worker's part of a context, given by itself, by another part or by its id."""
    if isinstance(ctx_or_id, Context):
        home = contexts()
        if ctx_or_id.home is home:
            ctx_or_id.check()
            return ctx_or_id
        return home.get(ctx_or_id.id)
    if isinstance(ctx_or_id, bool) or not isinstance(ctx_or_id, int):
        raise TypeError(f"a context or its id is needed, not {type(ctx_or_id).__name__}")
    return contexts().get(ctx_or_id)


def get_gradients(ctx_or_id: Context | int) -> dict[Tensor, Tensor]:
    """Return the gradients of this worker's leaves in a context.

        >>> w = ag.ones(2, requires_grad=True)
        >>> async with ag.context() as ctx:
        ...     await ctx.backward((w * 3).sum())
        ...     print(ag.get_gradients(ctx.id)[w].tolist())
        [3.0, 3.0]
    """
    return resolve(ctx_or_id).gradients
