"""A context: what one worker knows of one distributed computation.

Each worker that a call made inside the context reaches keeps its own part: the ends of its edges,
the peers it sent the context to, the gradients of its own leaves. `registry.py` makes parts and ends
them, `backward/engine.py` runs passes; a context knows both only by the protocols below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from aiograd._html import ORANGE, card, code, quiet, table
from aiograd.autograd.graph import HookHandle, Node
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.dist.backward.outcomes import Outcomes
from aiograd.dist.backward.plan import Topology
from aiograd.dist.backward.state import Pass
from aiograd.dist.boundary import CrossingHook, crossed_all
from aiograd.dist.channel import Channel
from aiograd.dist.foreign import Library, library_of
from aiograd.dist.lost_peers import LostPeers
from aiograd.dist.nodes import RecvNode, SendNode
from aiograd.errors import BackwardFailed, MissingGradient, NestedContext, PassUndecided, UnknownContext
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.ledger import Account, Hold

if TYPE_CHECKING:
    # Not at run time: pictures need `viz`, which most programs never load.
    from aiograd.dist.graph import ContextGraph

SHOWN: Final = 20  # gradients in a notebook

# A ContextVar, not a field of the worker: concurrent tasks of one worker have contexts of their own.
CURRENT: ContextVar[Context | None] = ContextVar("aiograd_context", default=None)


class Backward(Protocol):
    """What runs the passes of a context."""

    async def backward(
        self,
        context: Context,
        roots: Sequence[Tensor],
        *,
        retain_graph: bool,
        create_graph: bool,
        timeout: float | None,
    ) -> None:
        """Run a pass that adds to the gradients of the context."""

    async def derivatives(
        self,
        context: Context,
        entries: Sequence[tuple[Node, Any]],
        capture: Sequence[Node],
        *,
        retain_graph: bool,
        create_graph: bool,
    ) -> dict[Node, Any]:
        """Run a pass that returns the gradients of the `capture` nodes and keeps none."""

    async def explain(self, context_id: int) -> str:
        """Describe who waits for whom in the passes of a context."""


class Home(Protocol):
    """The worker on which this part of a context lives."""

    @property
    def channel(self) -> Channel:
        """The way to the worker's loop and peers."""

    @property
    def engine(self) -> Backward:
        """What runs passes here."""

    @property
    def lost_peers(self) -> LostPeers:
        """The peers that this worker has lost."""

    @property
    def steps(self) -> int:
        """The steps of optimisers on this worker's leaves so far."""

    def count_step(self) -> tuple[int, int]:
        """Count a step; return its number, and the newest step that all open contexts saw."""

    def enter(self, context: Context) -> None:
        """Make a context current in this task; NestedContext if another one is open in it."""

    def release(self, context_id: int) -> None:
        """Forget a context here and on every worker it was sent to."""


class Gradients(dict[Tensor, Tensor]):
    """Gradients by leaf; looking up a tensor that has none says why (`MissingGradient`)."""

    def __missing__(self, leaf: object) -> NoReturn:
        raise MissingGradient(self._why(leaf))

    def _why(self, leaf: object) -> str:
        # By its shape, not its numbers: a tensor may have a million of them.
        if not isinstance(leaf, Tensor) and library_of(leaf) is None:
            return f"gradients are looked up by Tensor, not by {type(leaf).__name__}"
        tensor: Any = leaf
        what = f"this tensor of shape {tuple(tensor.shape)} has no gradient in this context"
        if not tensor.requires_grad:
            return f"{what}: it does not require grad (requires_grad=True)"
        if tensor.grad_fn is not None:
            name = tensor.grad_fn.name
            name = name() if callable(name) else name  # a method in torch
            return f"{what}: it is no leaf, but a result of {name}; use ag.grad for its derivative"
        if not self:
            return f"{what}: no backward pass has ended here; `await ctx.backward(loss)` first"
        return (
            f"{what}: no root of a backward pass depends on it (one that was sent to another "
            "worker is another tensor there)"
        )

    def _repr_html_(self) -> str:
        rows = [
            (code(tuple(leaf.shape)), code(leaf.dtype), f"{float(abs(gradient.numpy()).max()):.3g}")
            for leaf, gradient in list(self.items())[:SHOWN]
            if isinstance(gradient, Tensor) and gradient.size
        ]
        title = f"<b>gradients</b> {quiet(f'of {len(self)} leaves')}"
        return card(ORANGE, title, table(rows, ("leaf", "dtype", "largest")) if rows else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere tensors are others, and this class would have nothing to say.
        return dict, (dict(self),)



class Context:
    """One worker's part of a distributed autograd context; `async with ag.context() as ctx:`.

        >>> w = ag.ones(2, requires_grad=True)
        >>> async with ag.context() as ctx:
        ...     y = await ag.rpc_async("worker1", ag.multiply, args=(w, 3.0))
        ...     await ctx.backward(y.sum())
        ...     print(ctx.gradients[w].tolist(), ctx.known_workers)
        [3.0, 3.0] {'worker1'}
    """

    def __init__(self, home: Home, context_id: int) -> None:
        self.id = context_id
        self.home = home
        self.since: int = home.steps  # steps of optimisers on this worker that the context has seen
        self.sends: dict[int, SendNode] = {}
        self.receives: dict[int, RecvNode] = {}
        # Peers we sent the context to, so those to release it at: the release follows the calls.
        self.recipients: dict[str, PeerInfo] = {}
        self._lost_recipients: set[str] = set()  # names of recipients that were lost afterwards
        self.callers: dict[bytes, str] = {}  # peers that sent it to us: incarnation → name
        self.edge_peers: dict[bytes, str] = {}  # peers at the other ends of edges, likewise
        # Peers that were lost while this context was open. They stay lost for it, even if they come
        # back: messages of the context went with their session.
        self.lost: set[bytes] = set()
        # Peers to which an edge was lost, here or elsewhere: each loss is passed on once.
        self.lost_edges: set[bytes] = set()
        self.totals: dict[Tensor, Tensor] = {}  # gradients of passes that ended well
        # Passes joined here whose outcome is not known. They keep their gradients to themselves, so
        # that nothing of a failed one ever has to be taken out of the totals.
        self.passes: dict[int, Pass] = {}
        self.outcomes: Outcomes = Outcomes()  # how passes ended, and which peers know that
        self.aborted: set[int] = set()  # passes known to have failed: their late messages are void
        # Messages of passes without an invitation yet: they overtook the large one that carries it.
        self.early: dict[int, list[Any]] = {}
        # The error of a failed pass: reading gradients raises it until a later pass ends well.
        self.failure: BackwardFailed | None = None
        self._failed: tuple[bytes, int] = (b"", -1)  # the originator and number of that pass
        self.released = False
        self.brought_by: str = ""  # the name of the partner whose message made this part
        self.holds: dict[str, Hold] = {}  # what it takes of partners' shares, by their names
        # Messages of passes that wait here, by the name of their restricted sender: pass, and bytes.
        self.kept_messages: dict[str, list[tuple[int, int]]] = {}
        self.foreign: Library | None = None  # whose tensors are on edges here, or were roots
        self.hooks: dict[int, CrossingHook] = {}  # see every array that leaves this worker
        # Of the last pass, while the tape is retained: repeated passes need not walk the graph again.
        self.topology: Topology | None = None
        self.roots: list[Node] = []  # of the last pass started here, for the picture
        self.seconds: float = 0.0  # spent computing in passes on this worker

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Context cannot travel: a called function runs in its caller's (ag.current_context()); "
            "send ctx.id to name another one"
        )

    def __repr__(self) -> str:
        state = (
            "released"
            if self.released
            else f"{len(self.sends)} sent, {len(self.receives)} received"
        )
        return f"<Context {self.id} on {self.home.channel.name}: {state}>"

    # ── entering and leaving ────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Context:
        try:
            self.home.enter(self)
        except NestedContext:
            # It was made for this block, which will never be left, so nothing else would release it.
            if CURRENT.get() is not self and not self.used:
                self.home.release(self.id)
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

    # Nothing is awaited: leaving sends the release, and does not wait for its acknowledgement.
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
        self.home.enter(self)
        try:
            yield self
        finally:
            if CURRENT.get() is self:
                CURRENT.set(None)

    async def release(self) -> None:
        """Leave the context for good, on every worker; the second time does nothing."""
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
        await self.home.engine.backward(
            self, roots, retain_graph=retain_graph, create_graph=create_graph, timeout=timeout
        )

    @property
    def gradients(self) -> Gradients:
        """The gradients of this worker's leaves, by leaf; summed over the passes so far.

        Raises `BackwardFailed` after a pass that failed, and `PassUndecided` while this worker has
        not heard from the originator of a pass how it ended.
        """
        self.check()
        for number, play in list(self.passes.items()):  # a copy: this may run in a thread
            # A pass begun here is decided here, so there is nothing to wait for: while it runs, the
            # totals without it are right.
            if play.terms.keep and number not in self.outcomes.running:
                gone = play.originator.incarnation in self.home.lost_peers
                why = "its originator is lost" if gone else ""
                raise PassUndecided(self.id, play.originator.name, why)
        if self.failure is not None:
            raise self.failure
        return Gradients(self.totals)

    def ended_well(self, originator: bytes, number: int) -> None:
        """Add the gradients of a pass that is known to have ended well to the totals."""
        ended = self.passes.get(number)
        if ended is not None:
            # The mapping is replaced, not changed, and before the pass is forgotten: a thread that
            # reads meanwhile sees all of these gradients or none.
            self.totals = _add_up(self.totals, ended.gradients)
            del self.passes[number]
            if ended.hold is not None:
                ended.hold.give_back("passes")
        if self.failure is not None:
            # Numbers of different originators cannot be compared. A pass of another originator
            # ends the failure if it began here after the failure was known.
            if ended is not None and ended.retries is self.failure:
                self.failure = None
            self.outlived(originator, number)

    def outlived(self, originator: bytes, number: int) -> None:
        """Forget the failure of an earlier pass of an originator: this one ended well."""
        failed_originator, failed = self._failed
        if originator == failed_originator and number > failed:
            self.failure = None

    def ended_badly(self, originator: bytes, number: int, failure: BackwardFailed) -> bool:
        """Forget the gradients of a failed pass; False if the failure was known before."""
        if number in self.aborted:
            return False
        self.aborted.add(number)
        ended = self.passes.pop(number, None)
        if ended is not None and ended.hold is not None:
            ended.hold.give_back("passes")
        # A later pass of the same originator may have ended well before this abort arrived.
        if number > self.outcomes.best(originator):
            self.failure, self._failed = failure, (originator, number)
        return True

    def replace_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Replace the gradient of a leaf, e.g. by a clipped one; KeyError if it has none."""
        # By the property, which raises while a pass is undecided or has failed.
        if leaf not in self.gradients:
            raise KeyError("the leaf has no gradient in this context")
        self.totals[leaf] = gradient.detach()

    def take_gradient(self, leaf: Tensor) -> Tensor | None:
        """Remove and return a leaf's gradient, e.g. of a leaf made for one pass; None if none."""
        return self.totals.pop(leaf, None)

    def on_crossing(self, hook: CrossingHook) -> HookHandle:
        """Call `hook(crossing, array)` for every array of the context that leaves this worker.

        The array is read-only. The hook may return another one of the same shape: clipped, noisy,
        of a smaller dtype (undone on arrival). `crossing.way` is "forward" for values and "backward" for
        gradients. Ready-made hooks are in `aiograd.dist.boundary`.
        """
        return HookHandle.on_dict(self.hooks, hook)

    # ── inspection ──────────────────────────────────────────────────────────────────────────────

    @property
    def known_workers(self) -> set[str]:
        """The names of the workers this one sent the context to."""
        return self._lost_recipients | self.recipients.keys()

    @property
    def send_nodes(self) -> dict[int, Node]:
        """The sending ends of edges on this worker, by edge id, in the order they were made."""
        return dict(self.sends)

    @property
    def recv_nodes(self) -> dict[int, Node]:
        """The receiving ends of edges on this worker, by edge id, in the order they were made."""
        return dict(self.receives)

    async def explain(self) -> str:
        """Describe who waits for whom in the passes of this context that are under way."""
        return await self.home.engine.explain(self.id)

    def graph(self) -> ContextGraph:
        """Draw the context: this worker's part at once, all workers' with `await ctx.graph()`."""
        from aiograd.dist.graph import picture

        self.check()  # after a release the ends of edges are gone, and the picture would be empty
        return picture(self)

    def _repr_html_(self) -> str:
        rows = {
            "worker": code(self.home.channel.name),
            "known workers": ", ".join(map(code, sorted(self.known_workers))) or quiet("none yet"),
            "edges": f"{len(self.sends)} sent, {len(self.receives)} received",
            "gradients": "failed" if self.failure is not None else str(len(self.totals)),
        }
        body = quiet(" · released") if self.released else table(rows.items())
        return card(ORANGE, f"<b>Context</b> {self.id}", body)

    @property
    def used(self) -> bool:
        """Whether anything has happened in this context."""
        return bool(self.recipients or self.callers or self.totals or self.passes)

    @property
    def channel(self) -> Channel:
        """The way to the loop and the peers of the worker this part lives on."""
        return self.home.channel

    @property
    def peers(self) -> set[str]:
        """The names of the workers that the context went to from here, or came from."""
        return {*self.recipients, *self.callers.values()}

    # ── for the machinery ───────────────────────────────────────────────────────────────────────

    def cut_off(self, peer: PeerInfo) -> None:
        """Note that an incarnation is lost: its edges are, too, and its part ends by its lease.

        If the two workers find each other again and the context goes there once more, the peer is
        a recipient again and gets the release.
        """
        recipient = self.recipients.get(peer.name)
        if recipient is not None and recipient.incarnation == peer.incarnation:
            del self.recipients[peer.name]
            self._lost_recipients.add(peer.name)
            self.lost.add(peer.incarnation)
        elif peer.incarnation in self.edge_peers or peer.incarnation in self.callers:
            self.lost.add(peer.incarnation)

    def hold_of(self, account: Account) -> Hold:
        """Return what this part takes of a partner's share; given back when it is released."""
        hold = self.holds.get(account.name)
        if hold is None:
            hold = self.holds[account.name] = account.hold()
        return hold

    def unsend(self, edge: int) -> None:
        """Forget the sending end of an edge whose message never left."""
        # Without the end, no pass awaits an answer. The topology of the last pass may contain it.
        self.sends.pop(edge, None)
        self.topology = None

    def leaving(self, peer: str, gradient: Any) -> Any:
        """Return what the boundary hooks make of one gradient for a peer."""
        found = crossed_all(self.hooks, self.id, peer, [gradient])
        return gradient if found is None else found[0]

    def check(self) -> None:
        """Raise UnknownContext if the context was released."""
        if self.released:
            raise UnknownContext(self.id, "it was released")


def _add_up(totals: dict[Tensor, Tensor], gradients: dict[Tensor, Any]) -> dict[Tensor, Tensor]:
    """Return new totals; Tensors are added recorded, so that `create_graph` works on sums, too."""
    totals = dict(totals)
    for leaf, gradient in gradients.items():
        old = totals.get(leaf)
        if not isinstance(leaf, Tensor):
            library = library_of(leaf)
            assert library is not None
            totals[leaf] = gradient if old is None else library.add(old, gradient)
        elif old is None:
            totals[leaf] = gradient if isinstance(gradient, Tensor) else wrap(gradient)
        elif isinstance(gradient, Tensor) or old.requires_grad:
            totals[leaf] = old + gradient
        else:
            totals[leaf] = wrap(old.raw + gradient)
    return totals
