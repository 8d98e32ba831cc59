"""All contexts of a worker, and the functions that open and find them.

A context is opened on one worker and appears on every worker that a call made inside it
reaches. Leaving it releases it everywhere: each worker forgets its part first and then tells
those it told, so the word follows the calls and ends by itself. A released context never comes
back. When a worker that sent it is lost, whoever opened it is asked after a lease whether it is
still open, because the word may have got lost with that worker.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import CURRENT, Context
from aiograd.dist.access import Partners
from aiograd.dist.channel import Shell
from aiograd.errors import (
    AiogradError,
    DeadlineExceeded,
    NestedContext,
    NoContext,
    UnknownContext,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.agent import current_agent
from aiograd.rpc.directory import LOST_PEERS, PeerInfo
from aiograd.rpc.coalesce import Coalescer
from aiograd.rpc.notify import Notifier

if TYPE_CHECKING:
    from aiograd.dist.backward.engine import Engine

ASKING = 5.0  # seconds to answer whether a context is still open
# Released ids we refuse to bring back: so many, and as many more as were released lately.
REMEMBERED, MOST = 4096, 65536
LATELY = 60.0  # seconds; a message is never that late


class Contexts:
    """All contexts of one worker; the agent's part for distributed autograd."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.shell = Shell(agent)
        self.engine: Engine  # set by `attach`
        self.partners = Partners(self)
        self.losses = 0  # of peers, so far
        self.gone: dict[bytes, int] = {}  # incarnations of lost peers; the how manieth loss it was
        self.steps = 0  # of optimisers on this worker's leaves, so far
        self._variables = agent.context.copy()
        self._notifier = Notifier(agent, self.gone, self._variables)
        self._ends: dict[bytes, tuple[PeerInfo, list[int]]] = {}  # still to be told, by receiver
        self._coalescer = Coalescer(agent.loop, self._variables, self._tell_ends)
        self._table: dict[int, Context] = {}
        self._released: OrderedDict[int, float] = OrderedDict()  # with the loop time of it
        # A restarted worker must not give out the ids of its former self.
        self._ids = itertools.count(agent.runtime.random.getrandbits(24) << 20)
        self._edges = itertools.count((agent.runtime.random.getrandbits(24) << 20) + 1)

    def new_edge(self) -> int:
        return self.agent.rank << 48 | next(self._edges)

    def new(self) -> Context:
        self.agent.here()
        number = next(self._ids)
        if self.agent.directory.has_partners:  # who must not guess it
            number = int.from_bytes(self.agent.runtime.token_bytes(6), "little")
        context = Context(self, self.agent.rank << 48 | number)
        self._table[context.id] = context
        return context

    def get(self, context_id: int) -> Context:
        context = self._table.get(context_id)
        if context is None:
            raise UnknownContext(context_id)
        return context

    def find(self, context_id: int) -> Context | None:
        return self._table.get(context_id)

    def all(self) -> list[Context]:
        return list(self._table.values())

    def arriving(self, context_id: int, sender: PeerInfo, kind: str) -> Context | None:
        """The context a message belongs to; made on first sight, never brought back."""
        context = self._table.get(context_id)
        if context is None:
            if context_id in self._released or kind == "reply":
                return None
            context = self._table[context_id] = Context(self, context_id)
        if kind != "reply":
            context.callers[sender.incarnation] = sender.name
        return context

    def count_step(self) -> tuple[int, int]:
        """An optimiser has stepped: the number of the step, and up to which all contexts saw."""
        contexts = list(self._table.values())  # in the order they came; we are in any thread
        self.steps += 1
        return self.steps, contexts[0].since if contexts else self.steps

    def current(self) -> Context | None:
        context = CURRENT.get()
        if context is None or context.released or context.home is not self:
            return None
        return context

    def enter_new(self, context: Context) -> None:
        context.check()
        current = CURRENT.get()
        if current is not None and not current.released:
            raise NestedContext(
                f"context {current.id} is already open in this task; contexts do not nest"
            )
        CURRENT.set(context)

    # ── release ─────────────────────────────────────────────────────────────────────────────────

    def release(self, context_id: int) -> None:
        """Forget a context here, then tell everyone we told; from any thread."""
        context = self._table.pop(context_id, None)
        if context is None:
            return
        context.released = True
        self._released[context_id] = self.agent.loop.time()
        self.shell.on_loop(self._tell, context)

    def _forget_old(self) -> None:
        released, now = self._released, self.agent.loop.time()
        while len(released) > REMEMBERED:  # threads may add to it meanwhile
            oldest, when = released.popitem(last=False)
            if len(released) < MOST and when > now - LATELY:
                released[oldest] = when
                released.move_to_end(oldest, last=False)
                return

    def _tell(self, context: Context) -> None:
        if len(self._released) > REMEMBERED:
            self._forget_old()
        self.engine.released(context)
        for peer in context.told.values():
            if peer.name != self.agent.name:
                self._ends.setdefault(peer.incarnation, (peer, []))[1].append(context.id)
        if self._ends:
            self._coalescer.schedule()
        context.sends.clear()
        context.receives.clear()
        context.topology = None

    def _tell_ends(self) -> None:
        ends, self._ends = self._ends, {}
        for peer, ids in ends.values():
            self._notifier.notify(peer, _whatever, "context.release", *ids, lazy=True)

    def release_asked(self, sender: PeerInfo, *context_ids: int) -> None:
        for context_id in context_ids:
            self._end(sender, context_id)

    def _end(self, sender: PeerInfo, context_id: int) -> None:
        context = self._table.get(context_id)
        if context is not None:
            told = context.told.get(sender.name)
            if told is not None and told.incarnation == sender.incarnation:
                del context.told[sender.name]  # it forgot before it told us
            self.release(context_id)
        else:  # the calls that would have made it may still be under way
            self._released[context_id] = self.agent.loop.time()
            if len(self._released) > REMEMBERED:
                self._forget_old()

    def lost(self, peer: PeerInfo, error: Exception) -> None:
        """A peer is dead: its passes fail, and contexts only it could release end by lease."""
        concerned = [context for context in self.all() if peer.incarnation in context.partners]
        for context in self.all():
            context.cut_off(peer)
        self.losses += 1
        self.gone.setdefault(peer.incarnation, self.losses)
        self.engine.endings.lost(peer, error)
        self._spread_loss(peer.name, peer.incarnation, concerned, self.agent.info)
        if len(self.gone) > 2 * LOST_PEERS:  # the directory has forgotten it, too
            del self.gone[next(iter(self.gone))]
        for context in list(self._table.values()):
            if context.id >> 48 == self.agent.rank:
                continue  # ours: whoever opened it will leave it
            if context.callers.pop(peer.incarnation, None) is not None:
                self.shell.later(self.agent.options.lease, self._doubt, context)

    def _spread_loss(
        self, name: str, incarnation: bytes, contexts: list[Context], teller: PeerInfo
    ) -> None:
        """Tell the neighbours in some contexts that an edge was lost, and they theirs.

        A pass that runs may not have reached us, and its originator need not know that the context
        went to the lost worker at all. Only it can fail the pass before it gets here.
        """
        by_peer: dict[bytes, tuple[PeerInfo, list[int]]] = {}
        for context in contexts:
            if incarnation not in context.lost_edges:
                context.lost_edges.add(incarnation)
                self.engine.endings.edge_lost(context, name, incarnation)
                for peer in context.neighbours():
                    if peer.incarnation != teller.incarnation and not self.agent.restricts(peer):
                        by_peer.setdefault(peer.incarnation, (peer, []))[1].append(context.id)
        for peer, ids in by_peer.values():
            with contextlib.suppress(AiogradError):  # lost, too, which is told of its own
                self.agent.post(peer, "context.lost", name, incarnation, ids)

    def edges_lost(self, sender: PeerInfo, name: str, incarnation: bytes, ids: list[int]) -> None:
        """A neighbour has lost an edge to some start of a worker, or heard so."""
        if not self.agent.restricts(sender):  # whom partners work with is their own business
            found = [context for id in ids if (context := self.find(id)) is not None]
            self._spread_loss(name, incarnation, found, sender)

    def returned(self, peer: PeerInfo) -> None:
        """A peer that was lost is back in a new session: contexts opened from now on may use it."""
        self.gone.pop(peer.incarnation, None)

    def _doubt(self, context: Context) -> None:
        """Who would have released a context is gone, and the other callers may wait for us."""
        if not context.released and not self.agent.closed:
            self.agent.spawn(self._ask_home(context))

    async def _ask_home(self, context: Context) -> None:
        """Ask whoever opened a context whether it is still open; release it if not."""
        home = self.agent.directory.get(context.id >> 48)
        known = False
        if home is not None and home.incarnation not in self.gone:
            try:
                known = await self.shell.ask(home, "context.known", context.id, timeout=ASKING)
            except DeadlineExceeded:
                known = True  # silent, not gone: ask again
            except AiogradError:
                pass
        if known:
            self.shell.later(self.agent.options.lease, self._doubt, context)
        else:
            self.release(context.id)

    def known(self, sender: PeerInfo, context_id: int) -> bool:
        return context_id in self._table

    # ── the agent's part ────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, int]:
        return {"contexts": len(self._table), "backward_passes": self.engine.running()}

    async def close(self) -> None:
        self.engine.close()
        for context in list(self._table.values()):
            if context.id >> 48 != self.agent.rank:
                context.told.clear()  # it is not ours to end: others may still work in it
            self.release(context.id)
        self._coalescer.close()
        self._variables.run(self._tell_ends)
        self._notifier.close()


def _whatever(answer: Any, error: Any) -> None:
    """Who is told of an end has nothing to say to it."""


def contexts() -> Contexts:
    """The contexts of the current worker."""
    part: Contexts = current_agent().parts[Contexts]
    return part


def context() -> Context:
    """Open a distributed autograd context on the current worker.

    Use it as `async with ag.context() as ctx:`, or plain `with`. Every call made inside takes the
    context along, and `await ctx.backward(loss)` plays all of it backwards.
    """
    return contexts().new()


def current_context() -> Context:
    """Return the context of this task; NoContext if there is none."""
    current = CURRENT.get()
    if current is None or current.released:
        raise NoContext("no autograd context is open here; use `async with ag.context():`")
    return current


def get_context(id: int) -> Context:
    """Return this worker's part of a context; UnknownContext if it has none."""
    if not isinstance(id, int):
        raise TypeError(f"a context id is an int, not {type(id).__name__}")
    return contexts().get(id)


def resolve(ctx_or_id: Context | int) -> Context:
    """This worker's part of the context that is meant."""
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
    """Return the gradients of this worker's leaves in a context."""
    return resolve(ctx_or_id).gradients
