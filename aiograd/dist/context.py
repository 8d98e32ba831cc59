"""A context: what one worker knows of one distributed computation.

Each worker that a call made inside the context reaches keeps its own part: the ends of its edges,
whom it told, the gradients of its own leaves. Where parts come from and how they end is
`contexts.py`; how passes run is `engine.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiograd.autograd.graph import HookHandle
from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import Tensor, wrap
from aiograd._html import ORANGE, card, code, quiet, table
from aiograd.dist.boundary import CrossingHook, crossed_all
from aiograd.dist.inspect import explain
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.dist.backward.outcomes import Outcomes
from aiograd.dist.backward.state import Pass
from aiograd.dist.backward.plan import Topology
from aiograd.errors import BackwardFailed, NestedContext, PassUndecided, UnknownContext
from aiograd.rpc.directory import PeerInfo

if TYPE_CHECKING:
    from aiograd.dist.registry import Contexts
    from aiograd.dist.graph import ContextGraph

CURRENT: ContextVar[Context | None] = ContextVar("aiograd_context", default=None)


class Context:
    """One worker's part of a distributed autograd context; `async with ag.context() as ctx:`."""

    def __init__(self, home: Contexts, context_id: int) -> None:
        self.id = context_id
        self.home = home
        self.since = home.steps  # what optimisers did on this worker before it has been seen
        self.sends: dict[int, SendNode] = {}
        self.receives: dict[int, RecvNode] = {}
        self.told: dict[str, PeerInfo] = {}  # whom we sent the context to, so whom to release
        self._once_told: set[str] = set()  # names of those who were lost afterwards
        self.callers: dict[bytes, str] = {}  # who sent it to us: incarnation → name
        self.partners: dict[bytes, str] = {}  # to or from whom edges lead: incarnation → name
        self.lost: set[bytes] = set()  # peers that were lost while this context was open
        self.lost_edges: set[bytes] = set()  # peers to which an edge was lost, here or elsewhere
        self.totals: dict[Tensor, Tensor] = {}  # gradients of passes that ended well
        self.passes: dict[int, Pass] = {}  # passes joined here whose outcome is not known
        self.outcomes = Outcomes()
        self.aborted: set[int] = set()
        self.early: dict[int, list[Any]] = {}  # messages of passes we have not been told of yet
        self.failure: BackwardFailed | None = None  # of a pass, until a later one ends well
        self._failed: tuple[bytes, int] = (b"", -1)  # the originator and number of that pass
        self.released = False
        self.hooks: dict[int, CrossingHook] = {}  # asked about every array that leaves this worker
        self.topology: Topology | None = None  # of the last pass, while the tape is retained
        self.roots: list[Node] = []  # of the last pass started here, for the picture
        self.seconds = 0.0  # spent computing in passes on this worker

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
            if CURRENT.get() is not self and not self.used:
                self.home.release(self.id)  # made for this block, which will not be left
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if CURRENT.get() is self:
            CURRENT.set(None)
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
            if CURRENT.get() is self:
                CURRENT.set(None)

    async def release(self) -> None:
        """Leave the context for good, on every worker; a second time does nothing."""
        if CURRENT.get() is self:
            CURRENT.set(None)
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
        self.home.agent.here()
        await self.home.engine.backward(
            self, roots, retain_graph=retain_graph, create_graph=create_graph, timeout=timeout
        )

    @property
    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients of this worker's leaves, by leaf; summed over the passes so far.

        Raises `BackwardFailed` after a pass that failed, and `PassUndecided` while this worker has
        not heard from the originator of a pass how it ended.
        """
        self.check()
        for number, play in list(self.passes.items()):  # we may be in a thread
            # A pass that was begun here and still runs is no secret: its numbers are not shown.
            if play.terms.keep and number not in self.outcomes.running:
                gone = play.originator.incarnation in self.home.gone
                why = "its originator is lost" if gone else ""
                raise PassUndecided(self.id, play.originator.name, why)
        if self.failure is not None:
            raise self.failure
        return dict(self.totals)

    def ended_well(self, originator: bytes, number: int) -> None:
        """A pass is known to have ended well: its gradients join the totals."""
        ended = self.passes.get(number)
        if ended is not None:
            # Replaced at once, and before the pass is forgotten: a thread that reads meanwhile
            # sees all of these gradients or none.
            self.totals = _add_up(self.totals, ended.gradients)
            del self.passes[number]
        if self.failure is not None:
            # Numbers of different originators cannot be compared. A pass of another one counts
            # if it began here after the failure was known.
            if ended is not None and ended.retries is self.failure:
                self.failure = None
            self.outlived(originator, number)

    def outlived(self, originator: bytes, number: int) -> None:
        """A pass of this number ended well: an earlier failure hides the numbers no longer."""
        who, failed = self._failed
        if originator == who and number > failed:
            self.failure = None

    def ended_badly(self, originator: bytes, number: int, failure: BackwardFailed) -> bool:
        """A pass is known to have failed: forget its gradients; False if that was known before."""
        if number in self.aborted:
            return False
        self.aborted.add(number)
        self.passes.pop(number, None)
        if number > self.outcomes.best(originator):  # else the news of it comes late
            self.failure, self._failed = failure, (originator, number)
        return True

    def replace_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Put another gradient in the place of a leaf's, e.g. a clipped one."""
        if leaf not in self.gradients:
            raise KeyError("the leaf has no gradient in this context")
        self.totals[leaf] = gradient.detach()

    def take_gradient(self, leaf: Tensor) -> Tensor | None:
        """Take a leaf's gradient of passes started here out, e.g. of one made only for them."""
        return self.totals.pop(leaf, None)

    def on_crossing(self, hook: CrossingHook) -> HookHandle:
        """Show `hook(crossing, array)` every array of the context that leaves this worker.

        It cannot write to it, and may return another one of the same shape: clipped, noisy, of a
        smaller dtype (undone on arrival). `crossing.way` is "forward" for values and "backward" for
        gradients. Ready-made hooks are in `aiograd.dist.boundary`.
        """
        return HookHandle.on_dict(self.hooks, hook)

    # ── inspection ──────────────────────────────────────────────────────────────────────────────

    @property
    def known_workers(self) -> set[str]:
        """The names of the workers this one sent the context to."""
        return self._once_told | self.told.keys()

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
        return await explain(self.home.engine, self)

    def graph(self) -> ContextGraph:
        """Draw the context: this worker's part at once, all workers' with `await ctx.graph()`."""
        from aiograd.dist.graph import picture

        self.check()
        return picture(self)

    def _repr_html_(self) -> str:
        rows = {
            "worker": code(self.home.agent.name),
            "known workers": ", ".join(map(code, sorted(self.known_workers))) or quiet("none yet"),
            "edges": f"{len(self.sends)} sent, {len(self.receives)} received",
            "gradients": "failed" if self.failure is not None else str(len(self.totals)),
        }
        body = quiet(" · released") if self.released else table(rows.items())
        return card(ORANGE, f"<b>Context</b> {self.id}", body)

    @property
    def used(self) -> bool:
        """Whether anything has happened in this context."""
        return bool(self.told or self.callers or self.totals or self.passes)

    # ── for the machinery ───────────────────────────────────────────────────────────────────────

    def cut_off(self, peer: PeerInfo) -> None:
        """A start of a worker is lost: its edges are, too, and its part ends by its lease.

        If the two find each other again, and the context goes there once more, it is told of the
        end as others are.
        """
        told = self.told.get(peer.name)
        if told is not None and told.incarnation == peer.incarnation:
            del self.told[peer.name]
            self._once_told.add(peer.name)
            self.lost.add(peer.incarnation)
        elif peer.incarnation in self.partners or peer.incarnation in self.callers:
            self.lost.add(peer.incarnation)

    def neighbours(self) -> list[PeerInfo]:
        """The members to which the context went from here, or from which it came."""
        agent = self.home.agent
        found = {peer.incarnation: peer for peer in self.told.values()}
        for incarnation, name in self.callers.items():
            peer = agent.directory.get(name)
            if peer is not None and peer.incarnation == incarnation:
                found[incarnation] = peer
        return [
            peer
            for incarnation, peer in found.items()
            if incarnation != agent.incarnation and incarnation not in self.home.gone
        ]

    def unsend(self, edge: int) -> None:
        """The message of this edge never left."""
        self.sends.pop(edge, None)
        self.topology = None

    def leaving(self, peer: str, gradient: Any) -> Any:
        """What our boundary hooks make of one gradient for a peer."""
        found = crossed_all(self.hooks, self.id, peer, [gradient])
        return gradient if found is None else found[0]

    def check(self) -> None:
        if self.released:
            raise UnknownContext(self.id, "it was released")


def _add_up(totals: dict[Tensor, Tensor], gradients: dict[Tensor, Any]) -> dict[Tensor, Tensor]:
    totals = dict(totals)
    for leaf, gradient in gradients.items():
        old = totals.get(leaf)
        if old is None:
            totals[leaf] = gradient if isinstance(gradient, Tensor) else wrap(gradient)
        elif isinstance(gradient, Tensor) or old.requires_grad:
            totals[leaf] = old + gradient
        else:
            totals[leaf] = wrap(old.data + gradient)
    return totals
