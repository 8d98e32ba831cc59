"""Contexts: what one worker knows of one distributed computation.

A context is opened on one worker and appears on every worker that a call made inside it
reaches. Each worker keeps its own part: the ends of its edges, whom it told, the gradients of
its own leaves. Leaving the context releases it everywhere: each worker forgets its part first
and then tells those it told, so the word follows the calls and ends by itself. A released
context never comes back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import HookHandle, Tensor, wrap
from aiograd.dist.boundary import CrossingHook
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.dist.passes import Pass
from aiograd.dist.shell import Shell
from aiograd.errors import BackwardFailed, NestedContext, NoContext, UnknownContext
from aiograd.rpc.agent import Agent
from aiograd.rpc.current import current_agent
from aiograd.rpc.directory import PeerInfo

if TYPE_CHECKING:
    from aiograd.dist.engine import Engine
    from aiograd.dist.picture import ContextGraph

_current: ContextVar[Context | None] = ContextVar("aiograd_context", default=None)

REMEMBERED = 65536  # released ids we refuse to bring back; a message is never that late


class Context:
    """One worker's part of a distributed autograd context; `async with ag.context() as ctx:`."""

    def __init__(self, home: Contexts, context_id: int) -> None:
        self.id = context_id
        self.home = home
        self.sends: dict[int, SendNode] = {}
        self.receives: dict[int, RecvNode] = {}
        self.told: dict[str, PeerInfo] = {}  # whom we sent the context to, so whom to release
        self.callers: dict[bytes, str] = {}  # who sent it to us: incarnation → name
        self.totals: dict[Tensor, Tensor] = {}  # gradients of passes that ended well
        self.passes: dict[int, Pass] = {}  # passes joined here that may not be over yet
        self.aborted: set[int] = set()
        self.early: dict[int, list[Any]] = {}  # messages of passes we have not been told of yet
        self.failure: BackwardFailed | None = None  # of the last pass, until a later one is good
        self.released = False
        self.hooks: dict[int, CrossingHook] = {}  # asked about every array that leaves this worker
        self.roots: list[Node] = []  # of the last pass started here, for the picture
        self.seconds = 0.0  # spent computing in passes on this worker
        self._view: dict[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        state = (
            "released"
            if self.released
            else f"{len(self.sends)} sent, {len(self.receives)} received"
        )
        return f"<Context {self.id} on {self.home.agent.name}: {state}>"

    # ── entering and leaving ────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Context:
        try:
            self.home.enter_new(self)
        except NestedContext:
            if _current.get() is not self and not self.used:
                self.home.release(self.id)  # made for this block, which will not be left
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _current.get() is self:
            _current.set(None)
        self.home.release(self.id)

    async def __aenter__(self) -> Context:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def active(self) -> Iterator[Context]:
        """Make this context current for a while without leaving it, e.g. in one notebook cell."""
        self.home.enter_new(self)
        try:
            yield self
        finally:
            if _current.get() is self:
                _current.set(None)

    async def release(self) -> None:
        """Leave the context for good, on every worker; a second time does nothing."""
        if _current.get() is self:
            _current.set(None)
        self.home.release(self.id)

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    async def backward(
        self,
        *roots: Tensor,
        retain_graph: bool = False,
        create_graph: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Play everything that the scalar `roots` depend on backwards, on all workers.

        Ends when every gradient is in its worker's `ctx.gradients`. Any failure anywhere ends the
        pass everywhere and raises `BackwardFailed`.
        """
        await self.home.engine.backward(
            self, roots, retain_graph=retain_graph, create_graph=create_graph, timeout=timeout
        )

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients of this worker's leaves, by leaf; summed over the passes so far."""
        self.check()
        if self.failure is not None:
            raise self.failure
        if self._view is None:
            view = dict(self.totals)
            for number in sorted(self.passes):
                if self.passes[number].complete and not self.home.engine.leads(self, number):
                    _add_up(view, self.passes[number].gradients)
            self._view = view
        return dict(self._view)

    def changed(self) -> None:
        """What `gradients` shows must be made anew."""
        self._view = None

    def commit(self, number: int) -> None:
        """A pass is known to have ended well: its gradients join the totals."""
        ended = self.passes.pop(number, None)
        if ended is not None:
            _add_up(self.totals, ended.gradients)
            self.changed()

    def replace_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Put another gradient in the place of a leaf's, e.g. a clipped one."""
        totals = self.gradients
        for number in [n for n, p in self.passes.items() if p.complete]:
            if not self.home.engine.leads(self, number):
                self.commit(number)
        if leaf not in totals:
            raise KeyError("the leaf has no gradient in this context")
        self.totals[leaf] = gradient.detach()
        self.changed()

    def on_crossing(self, hook: CrossingHook) -> HookHandle:
        """Show `hook(crossing, array)` every array of the context that leaves this worker.

        It may return another one of the same shape: clipped, noisy, of a smaller dtype (undone on
        arrival). `crossing.way` is "forward" for values and "backward" for gradients. Ready-made
        hooks are in `aiograd.dist.boundary`.
        """
        return HookHandle.on_dict(self.hooks, hook)

    # ── inspection ──────────────────────────────────────────────────────────────────────────────

    @property
    def known_workers(self) -> set[str]:
        """The names of the workers this one sent the context to."""
        return set(self.told)

    @property
    def send_nodes(self) -> dict[int, Node]:
        """The sending ends of edges on this worker, by edge id, in the order they were made."""
        return dict(self.sends)

    @property
    def recv_nodes(self) -> dict[int, Node]:
        """The receiving ends of edges on this worker, by edge id, in the order they were made."""
        return dict(self.receives)

    async def explain(self) -> str:
        """Tell who waits for whom in the passes of this context that are under way."""
        return await self.home.engine.explain(self)

    def graph(self) -> ContextGraph:
        """Draw the context: this worker's part at once, all workers' with `await ctx.graph()`."""
        from aiograd.dist.picture import picture

        self.check()
        return picture(self)

    def _repr_html_(self) -> str:
        rows = {
            "worker": self.home.agent.name,
            "known workers": ", ".join(sorted(self.told)) or "none yet",
            "edges": f"{len(self.sends)} sent, {len(self.receives)} received",
            "gradients": str(len(self.totals)),
        }
        cells = "".join(f"<tr><th>{k}</th><td>{v}</td></tr>" for k, v in rows.items())
        return f"<table><caption>Context {self.id}</caption>{cells}</table>"

    @property
    def used(self) -> bool:
        """Whether anything has happened in this context."""
        return bool(self.told or self.callers or self.totals or self.passes)

    # ── for the machinery ───────────────────────────────────────────────────────────────────────

    def met(self, peer: PeerInfo) -> None:
        self.told[peer.name] = peer

    def unsend(self, edge: int) -> None:
        """The message of this edge never left."""
        self.sends.pop(edge, None)

    def check(self) -> None:
        if self.released:
            raise UnknownContext(self.id, "it was released")


def _add_up(totals: dict[Tensor, Tensor], gradients: dict[Tensor, Any]) -> None:
    for leaf, gradient in gradients.items():
        new = gradient if isinstance(gradient, Tensor) else wrap(gradient)
        old = totals.get(leaf)
        if old is None:
            totals[leaf] = new
        elif old.requires_grad or new.requires_grad:
            totals[leaf] = old + new
        else:
            totals[leaf] = wrap(old.data + new.data)


class Contexts:
    """All contexts of one worker; the agent's part for distributed autograd."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.shell = Shell(agent)
        self.engine: Engine  # set by `attach`
        self.gone: set[bytes] = set()  # incarnations of peers known to be dead
        self._table: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        # A restarted worker must not give out the ids of its former self.
        self._ids = itertools.count(agent.runtime.random.getrandbits(24) << 20)
        self._edges = itertools.count((agent.runtime.random.getrandbits(24) << 20) + 1)

    def new_edge(self) -> int:
        return self.agent.rank << 48 | next(self._edges)

    def new(self) -> Context:
        context = Context(self, self.agent.rank << 48 | next(self._ids))
        self._table[context.id] = context
        return context

    def get(self, context_id: int) -> Context:
        context = self._table.get(context_id)
        if context is None:
            raise UnknownContext(context_id)
        return context

    def find(self, context_id: int) -> Context | None:
        return self._table.get(context_id)

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

    def current(self) -> Context | None:
        context = _current.get()
        if context is None or context.released or context.home is not self:
            return None
        return context

    def enter(self, context: Context | None) -> None:
        _current.set(context)

    def enter_new(self, context: Context) -> None:
        context.check()
        current = _current.get()
        if current is not None and not current.released:
            raise NestedContext(
                f"context {current.id} is already open in this task; contexts do not nest"
            )
        _current.set(context)

    # ── release ─────────────────────────────────────────────────────────────────────────────────

    def release(self, context_id: int) -> None:
        """Forget a context here, then tell everyone we told; from any thread."""
        context = self._table.pop(context_id, None)
        if context is None:
            return
        context.released = True
        self._released[context_id] = None
        while len(self._released) > REMEMBERED:
            self._released.popitem(last=False)
        self.shell.on_loop(self._tell, context)

    def _tell(self, context: Context) -> None:
        self.engine.released(context)
        for peer in context.told.values():
            if peer.name != self.agent.name and peer.incarnation not in self.gone:
                self.shell.inform(peer, "context.release", context.id)
        context.sends.clear()
        context.receives.clear()

    def release_asked(self, sender: PeerInfo, context_id: int) -> None:
        if context_id in self._table:
            self.release(context_id)
        else:  # the calls that would have made it may still be under way
            self._released[context_id] = None

    def lost(self, peer: PeerInfo, error: Exception) -> None:
        """A peer is dead: its passes fail, and contexts only it could release end by lease."""
        self.engine.lost(peer, error)
        self.gone.add(peer.incarnation)
        for context in list(self._table.values()):
            if context.id >> 48 == self.agent.rank:
                continue  # ours: whoever opened it will leave it
            if context.callers.pop(peer.incarnation, None) is not None and not context.callers:
                self.shell.later(self.agent.options.lease, self._expire, context)

    def _expire(self, context: Context) -> None:
        if not context.callers:
            self.release(context.id)

    # ── the agent's part ────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, int]:
        return {"contexts": len(self._table), "backward_passes": self.engine.running()}

    async def close(self) -> None:
        for context_id in list(self._table):
            self.release(context_id)


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
    current = _current.get()
    if current is None or current.released:
        raise NoContext("no autograd context is open here; use `async with ag.context():`")
    return current


def get_context(context_id: int) -> Context:
    """Return this worker's part of a context; UnknownContext if it has none."""
    if not isinstance(context_id, int):
        raise TypeError(f"a context id is an int, not {type(context_id).__name__}")
    return contexts().get(context_id)


def resolve(context_or_id: Context | int) -> Context:
    """This worker's part of the context that is meant."""
    if isinstance(context_or_id, Context):
        home = contexts()
        if context_or_id.home is home:
            context_or_id.check()
            return context_or_id
        return home.get(context_or_id.id)
    if isinstance(context_or_id, bool) or not isinstance(context_or_id, int):
        raise TypeError(f"a context or its id is needed, not {type(context_or_id).__name__}")
    return contexts().get(context_or_id)


def get_gradients(context_or_id: Context | int) -> dict[Tensor, Tensor]:
    """Return the gradients of this worker's leaves in a context."""
    return resolve(context_or_id).gradients
