"""Bugs on purpose: the simulator must find each of them, or it is the simulator that is broken.

Each replaces one method of the library while a simulation runs. Nothing of this is in the library
itself.

    with planted("forget_credit"):
        reports = [run(make_plan(seed)) for seed in range(2000)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from aiograd.autograd.tensor import Tensor
from aiograd.dist.backward.abort import Endings
from aiograd.dist.backward.active import Running
from aiograd.dist.backward.engine import Engine
from aiograd.dist.backward.outcomes import Outcomes
from aiograd.dist.backward.state import NONE, Pass
from aiograd.dist.context import Context
from aiograd.dist.registry import Contexts
from aiograd.errors import BackwardFailed, WorkerLost
from aiograd.rpc.caller import calls
from aiograd.rpc.caller.calls import Caller
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.dialer import Reconnection
from aiograd.rpc.link.link import Link
from aiograd.rpc.link.links import Links
from aiograd.rpc.link.receive import Once, Receiving
from aiograd.rpc.link.send import Outbox
from aiograd.rpc.runtime.deadlines import Deadlines
from aiograd.rref.refcount.owner import Owning
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.user import Using
from aiograd.wire.messages import NUMBERED
from aiograd.wire.session import Session


class Bug(NamedTuple):
    """What goes wrong, and which method is replaced by what `make(original)` gives.

    Where several lines of defence hold, one bug has to take all of them away: `more`.
    """

    text: str
    where: Any
    name: str
    make: Callable[[Any], Any]
    more: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()

    @property
    def patches(self) -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
        return ((self.where, self.name, self.make), *self.more)


def _run_twice(original: Any) -> Any:
    return lambda self, number: True


def _nothing(original: Any) -> Any:
    return lambda self, *args, **kwargs: None


async def _soon(self: Any, *args: Any) -> None:
    """Does nothing."""


def _no_cancel(original: Any) -> Any:
    def cancelled(self: Caller, future: Any) -> None:
        put, self._link.put_small = self._link.put_small, _nothing(None)  # type: ignore[method-assign]
        try:
            original(self, future)
        finally:
            self._link.put_small = put  # type: ignore[method-assign]

    return cancelled


def _never_drained(original: Any) -> Any:
    def resume(self: Outbox) -> None:
        self.paused = False  # and what waits goes on waiting

    return resume


def _late(original: Any) -> Any:
    return lambda self, deadline, seconds=None: original(self, deadline + 1.0)


def _claim_no(original: Any) -> Any:
    return lambda error, executed: original(error, "no")


def _free_early(original: Any) -> Any:
    def release(self: Owning, releases: Any) -> None:
        for ref_id, _, _ in releases:
            if (owned := self.owners.get(ref_id)) is not None:
                owned.forks.clear()
        original(self, releases)

    return release


def _miss_unreached(original: Any) -> Any:
    def collect(self: Pass, sinks: Any) -> Any:
        self.topology.unreached = []
        return original(self, sinks)

    return collect


def _answer_twice(original: Any) -> Any:
    def feed(self: Pass, sender: PeerInfo, answers: Any, *rest: Any) -> None:
        doubled = [
            (edge, None if grads is None else [None if g is None else g + g for g in grads], loops)
            for edge, grads, loops in answers
        ]
        original(self, sender, doubled, *rest)

    return feed


def _forget_credit(original: Any) -> Any:
    def feed(
        self: Pass, sender: PeerInfo, answers: Any, expected: Any, credit: Any, reached: int
    ) -> None:
        forgotten = self.heard and self.here.incarnation != self.originator.incarnation
        original(self, sender, answers, expected, NONE if forgotten else credit, reached)

    return feed


def _resurrect(original: Any) -> Any:
    def arriving(self: Contexts, context_id: int, sender: Any, kind: str) -> Any:
        self._released.pop(context_id, None)
        return original(self, context_id, sender, "call")

    return arriving


def _by_name(original: Any) -> Any:
    return lambda self, name, incarnation: self._agent.link(name)


def _named_by_messages(original: Any) -> Any:
    """Only who has sent or got a message of the pass is needed, not who has an edge."""
    return lambda self, incarnation: incarnation in self.informed or incarnation in self.heard


def _answered_by_name(original: Any) -> Any:
    """Whoever has the name may answer, and a gradient that nobody awaits is ignored."""

    def feed(self: Pass, sender: PeerInfo, answers: Any, *rest: Any) -> None:
        for send in self.awaited.values():
            if send.peer == sender.name:
                sender = PeerInfo(sender.name, sender.rank, send.incarnation)
        original(self, sender, [each for each in answers if each[0] in self.awaited], *rest)

    return feed


def _dropped_posts(original: Any) -> Any:
    """A message that cannot be sent is no failure."""

    def failed(self: Endings, running: Running, error: Exception) -> None:
        if not (isinstance(error, WorkerLost) and error.executed == "no"):
            original(self, running, error)

    return failed


def _shown_early(original: Any) -> Any:
    """What is complete here is shown, however the pass ends elsewhere."""

    def gradients(self: Context) -> dict[Tensor, Any]:
        self.check()
        if self.failure is not None:
            raise self.failure
        shown: dict[Tensor, Any] = dict(self.totals)
        for play in self.passes.values():
            if play.complete and play.here.incarnation != play.originator.incarnation:
                for leaf, gradient in play.gradients.items():
                    shown[leaf] = shown[leaf] + gradient if leaf in shown else gradient
        return shown

    return property(gradients)


def _failed_in_doubt(original: Any) -> Any:
    """A participant that loses a peer takes the pass for failed, even if its part was done."""

    def failed(self: Endings, running: Running, error: Exception) -> None:
        original(self, running, error)
        play = running.play
        if running.done is None:
            failure = BackwardFailed(getattr(error, "worker", ""), "", str(error))
            running.context.ended_badly(play.originator.incarnation, play.number, failure)

    return failed


def _all_well(original: Any) -> Any:
    return lambda self, number, well: original(self, number, True)


def _keeps_failures(original: Any) -> Any:
    def ended_badly(self: Context, originator: bytes, number: int, failure: Any) -> bool:
        play = self.passes.get(number)
        fresh = bool(original(self, originator, number, failure))
        if fresh and play is not None:
            self.totals = {**self.totals, **{k: Tensor(v) for k, v in play.gradients.items()}}
            self.failure = None
        return fresh

    return ended_badly


def _forget_release(original: Any) -> Any:
    def tell(self: Contexts, context: Context) -> None:
        context.told.clear()
        original(self, context)

    return tell


def _resend_all(original: Any) -> Any:
    return lambda self, position: list(self.kept)


def _resend_nothing(original: Any) -> Any:
    return lambda self, position: []


def _fresh_reader(original: Any) -> Any:
    def opened(self: Link, transport: Any, received: int = 0) -> None:
        self._reader = None
        original(self, transport, received)

    return opened


def _forget_overtaken(original: Any) -> Any:
    def take(self: Receiving, kind: int, flags: int, id: int, *rest: Any) -> None:
        if kind not in NUMBERED or id > self._once._last - 4096:
            original(self, kind, flags, id, *rest)

    return take


BUGS: Final[dict[str, Bug]] = {
    "run_twice": Bug("copies of a message are not noticed", Once, "fresh", _run_twice),
    "forget_overtaken": Bug(
        "a call that thousands overtake never runs", Receiving, "_take", _forget_overtaken
    ),
    "no_cancel": Bug("a cancelled call goes on over there", Caller, "cancelled", _no_cancel),
    "lost_drain": Bug("nothing is sent after a pause", Outbox, "resume", _never_drained),
    "late_deadline": Bug("deadlines come a second late", Deadlines, "bucket", _late),
    "claims_no": Bug("says that a lost call never ran", calls, "lost", _claim_no),
    "unnoticed_death": Bug("a closed connection is ignored", Link, "disconnected", _nothing),
    "unheeded_exit": Bug(
        "the end of a process is told, and not believed", Links, "declare_lost", _nothing
    ),
    "resend_all": Bug("what came is sent again", Session, "rest", _resend_all),
    "resend_nothing": Bug("what a cut took is not sent again", Session, "rest", _resend_nothing),
    "no_ack": Bug("what came is kept for ever", Session, "acknowledged", _nothing),
    "half_frames": Bug("what came of a frame before a cut is gone", Link, "opened", _fresh_reader),
    "no_return": Bug("nobody dials after a cut", Reconnection, "_dial", lambda _: _soon),
    "no_lease": Bug("what the dead held is never freed", Protocol, "lease_over", _nothing),
    "missing_release": Bug("dropped references stay", Using, "_let_go", _nothing),
    "early_free": Bug("the first release frees the value", Owning, "release", _free_early),
    "miss_unreached": Bug("unused edges are not answered", Pass, "collect", _miss_unreached),
    "answer_twice": Bug("gradients of edges count twice", Pass, "feed", _answer_twice),
    "forget_credit": Bug("credit gets lost on the way", Pass, "feed", _forget_credit),
    "resurrect": Bug("a late message brings a context back", Contexts, "arriving", _resurrect),
    "forget_context": Bug("others are not told of the end", Contexts, "_tell", _forget_release),
    "silent_abort": Bug(
        "survivors hear nothing of a failure", Endings, "_tell_abort", lambda _: _soon
    ),
    "show_partial": Bug("a failed pass shows numbers", Context, "ended_badly", _keeps_failures),
    "successors": Bug(
        "whoever has the name of a lost worker takes part in its place",
        Links,
        "exactly",
        _by_name,
        (
            (Pass, "names", _named_by_messages),
            (Pass, "feed", _answered_by_name),
            (Context, "cut_off", _nothing),
            (Endings, "edge_lost", _nothing),
        ),
    ),
    "late_loss": Bug(
        "the loss of a worker that a pass has not reached yet is not noticed",
        Pass,
        "names",
        _named_by_messages,
        ((Endings, "edge_lost", _nothing),),
    ),
    "kept_to_itself": Bug(
        "a worker that the pass has not reached tells nobody that it lost an edge",
        Contexts,
        "_spread_loss",
        _nothing,
    ),
    "dropped_posts": Bug(
        "a gradient for a lost worker vanishes",
        Endings,
        "failed",
        _dropped_posts,
        ((Pass, "names", _named_by_messages),),
    ),
    "shown_early": Bug("numbers are shown before the outcome", Context, "gradients", _shown_early),
    "failed_in_doubt": Bug(
        "a loss after a good pass makes it a failed one", Endings, "failed", _failed_in_doubt
    ),
    "all_well": Bug(
        "participants hear of no failure, but that all passes ended well",
        Outcomes,
        "decided",
        _all_well,
        ((Endings, "_tell_abort", lambda _: _soon),),
    ),
    "untold": Bug("calls do not bring outcomes along", Engine, "tell_outcomes", _nothing),
}


@contextmanager
def planted(name: str) -> Iterator[Bug]:
    """Put one bug into the library for a while."""
    bug = BUGS[name]
    originals = [vars(where)[name] for where, name, _ in bug.patches]
    try:
        for (where, name, make), original in zip(bug.patches, originals, strict=True):
            setattr(where, name, make(original))
        yield bug
    finally:
        for (where, name, _), original in zip(bug.patches, originals, strict=True):
            setattr(where, name, original)
