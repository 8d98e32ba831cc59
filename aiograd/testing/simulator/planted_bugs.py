"""Planted bugs: the simulator must find each of them, or the simulator itself is broken.

Each replaces methods of the library while a simulation runs; nothing of this is in the library
itself. A comment above each replacement says what breaks, and which invariant shows it first.

    with planted("forget_credit"):
        reports = [run(make_plan(seed)) for seed in range(2000)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from aiograd.autograd.tensor import Tensor
from aiograd.dist.backward.abort import AbortProtocol
from aiograd.dist.backward.active import ActivePass
from aiograd.dist.backward.credit import NONE
from aiograd.dist.backward.outcomes import Outcomes
from aiograd.dist.backward.reports import OutcomeReports
from aiograd.dist.backward.state import Pass
from aiograd.dist.context import Context
from aiograd.dist.registry import ContextRegistry
from aiograd.errors import BackwardFailed, WorkerLost
from aiograd.rpc.caller import calls
from aiograd.rpc.caller.calls import Caller
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.dialer import Reconnection
from aiograd.rpc.link.inbox import Once
from aiograd.rpc.link.link import Link
from aiograd.rpc.link.links import Links
from aiograd.rpc.link.receive import Receiver
from aiograd.rpc.link.send import Outbox
from aiograd.rpc.runtime.deadlines import Deadlines
from aiograd.rref.refcount.owner import OwnerTable
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.user import UserTable
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
        """All methods that are replaced: (class or module, name, make)."""
        return ((self.where, self.name, self.make), *self.more)


# I4: a session that resumes sends again what was not acknowledged, so copies are usual, and only
# their numbers keep a call from running twice.
def _run_twice(original: Any) -> Any:
    return lambda self, number: True


def _nothing(original: Any) -> Any:
    return lambda self, *args, **kwargs: None


async def _soon(self: Any, *args: Any) -> None:
    """Do nothing, where a coroutine function is replaced."""


# I1: the caller's future is cancelled as ever, but the message that cancels the call over there is
# not sent.
def _no_cancel(original: Any) -> Any:
    def cancelled(self: Caller, future: Any) -> None:
        channel: Any = self._channel
        send, channel.send_control = channel.send_control, _nothing(None)
        try:
            original(self, future)
        finally:
            channel.send_control = send

    return cancelled


# I9: calls behind a full buffer are never sent, and end at their deadlines without any fault.
def _never_drained(original: Any) -> Any:
    def resume(self: Outbox) -> None:
        """Note that there is room, and send nothing."""
        self.paused = False

    return resume


# I1, I9: a message for a sleeping peer waits for a connection that nobody makes.
def _sound_sleep(original: Any) -> Any:
    def detach(self: Outbox, wake: Any = None) -> None:
        """Detach, and do not wake up for anything unless it only rests."""
        asleep = wake is not None and not hasattr(wake, "__self__")
        original(self, None if asleep else wake)

    return detach


# I1, I8: a message that crosses the agreement to sleep is not sent again after it.
def _forgetful_sleep(original: Any) -> Any:
    def fall_asleep(self: Link, *, linger: bool = False) -> None:
        """Fall asleep as if the peer had acknowledged everything."""
        original(self, linger=linger)
        self.session.kept.clear()
        self.session.base = self.session.sent

    return fall_asleep


# I9: the side that dials does not hear that the other one has something to send.
def _deaf_sleep(original: Any) -> Any:
    def answer(self: Link, offer: Any) -> Any:
        """Answer, but let no nudge wake the link up."""
        if self.is_asleep and self.session.nudged(offer):
            return self.session.answer(offer), self.session.received
        return original(self, offer)

    return answer


# I1: every deadline expires a second too late.
def _late(original: Any) -> Any:
    return lambda self, deadline, seconds=None: original(self, deadline + 1.0)


# I4: `executed="no"` promises that a call may be repeated; the ledger knows that it ran.
def _claim_no(original: Any) -> Any:
    return lambda error, executed: original(error, "no")


# I5: one release counts for all forks, so a value is freed while other workers hold references.
def _free_early(original: Any) -> Any:
    def release(self: OwnerTable, releases: Any) -> None:
        for ref_id, _, _ in releases:
            if (record := self.records.get(ref_id)) is not None:
                record.forks.clear()
        original(self, releases)

    return release


# I2: every edge is answered exactly once, with a gradient or with none. Without the answers for
# edges that the pass did not reach, a participant waits until the pass times out.
def _miss_unreached(original: Any) -> Any:
    def collect(self: Pass, sinks: Any) -> Any:
        """Forget the edges that the pass did not reach."""
        self.topology.unreached = []
        return original(self, sinks)

    return collect


# I2, I11: gradients that arrive from other workers count twice; local ones are right.
def _answer_twice(original: Any) -> Any:
    def feed(self: Pass, sender: PeerInfo, answers: Any, *rest: Any) -> None:
        doubled = [
            (edge, None if grads is None else [None if g is None else g + g for g in grads], loops)
            for edge, grads, loops in answers
        ]
        original(self, sender, doubled, *rest)

    return feed


# I1: a pass is over when all credit is back at its originator. A participant that drops some of it,
# when it hears of the pass for the second time, keeps the pass from ever ending.
def _forget_credit(original: Any) -> Any:
    def feed(
        self: Pass, sender: PeerInfo, answers: Any, expected: Any, credit: Any, reached: int
    ) -> None:
        forgotten = self.heard and self.here.incarnation != self.originator.incarnation
        original(self, sender, answers, expected, NONE if forgotten else credit, reached)

    return feed


# I7: a message that was under way when its context was released makes the context anew, and no
# other message will ever release that one: the counter of contexts is not 0 at rest.
def _resurrect(original: Any) -> Any:
    def arriving(self: ContextRegistry, context_id: int, sender: Any, kind: str) -> Any:
        """Forget that the context was released, and take any message for a call."""
        self._released.pop(context_id, None)
        return original(self, context_id, sender, "call")

    return arriving


# I11: messages go to the current start of a name, not to the start that the edge leads to. With
# the three replacements below this is the bug "successors", since each alone is caught elsewhere.
def _by_name(original: Any) -> Any:
    return lambda self, name, incarnation: self._agent.link(name)


def _named_by_messages(original: Any) -> Any:
    """Only who has sent or got a message of the pass is needed, not who has an edge."""
    return lambda self, incarnation: incarnation in self.informed or incarnation in self.heard


def _answered_by_name(original: Any) -> Any:
    """Any worker of that name may answer, and a gradient that nobody awaits is ignored."""

    def feed(self: Pass, sender: PeerInfo, answers: Any, *rest: Any) -> None:
        for send in self.awaited.values():
            if send.peer == sender.name:
                sender = PeerInfo(sender.name, sender.rank, send.incarnation)
        original(self, sender, [each for each in answers if each[0] in self.awaited], *rest)

    return feed


# I1: the edge of the lost worker stays open, and the pass fails only at its deadline.
def _dropped_posts(original: Any) -> Any:
    """A message that cannot be sent is no failure."""

    def failed(self: AbortProtocol, active: ActivePass, error: Exception) -> None:
        if not (isinstance(error, WorkerLost) and error.executed == "no"):
            original(self, active, error)

    return failed


# I11: a participant that has done its part cannot know yet whether others have.
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


# I11: the originator alone decides. A participant in doubt may not know, but may not guess either.
def _failed_in_doubt(original: Any) -> Any:
    """A participant that loses a peer takes the pass for failed, even if its part was done."""

    def failed(self: AbortProtocol, active: ActivePass, error: Exception) -> None:
        original(self, active, error)
        state = active.state
        if active.done is None:
            failure = BackwardFailed(getattr(error, "worker", ""), "", str(error))
            active.context.ended_badly(state.originator.incarnation, state.number, failure)

    return failed


# I11: failed passes are recorded as good ones, and the abort that would say otherwise is not sent.
def _all_well(original: Any) -> Any:
    return lambda self, number, well: original(self, number, True)


# I11: the partial sums of a failed pass become totals, as if it had ended well.
def _keeps_failures(original: Any) -> Any:
    def ended_badly(self: Context, originator: bytes, number: int, failure: Any) -> bool:
        play = self.passes.get(number)
        fresh = bool(original(self, originator, number, failure))
        if fresh and play is not None:
            self.totals = {**self.totals, **{k: Tensor(v) for k, v in play.gradients.items()}}
            self.failure = None
        return fresh

    return ended_badly


# I7: the opener of a context forgets which workers know it, so they keep it.
def _forget_release(original: Any) -> Any:
    def tell(self: ContextRegistry, context: Context) -> None:
        """Forget which workers know the context, then tell those."""
        context.recipients.clear()
        original(self, context)

    return tell


# I7, I9: after a cut, messages that had arrived are sent again; with the next replacement, messages
# that had not arrived are never sent.
def _resend_all(original: Any) -> Any:
    return lambda self, position: list(self.kept)


def _resend_nothing(original: Any) -> Any:
    return lambda self, position: []


# A cut falls into the middle of a frame; the resumed session continues at the next byte, and a
# new reader takes the rest of a body for a header.
def _fresh_reader(original: Any) -> Any:
    def opened(self: Link, transport: Any, received: int = 0) -> None:
        """Drop the reader of the broken connection, with its part of a frame."""
        self._reader = None
        original(self, transport, received)

    return opened


# I2: a window of the last 4,096 numbers takes a call that more have overtaken for a copy. The
# library once did so; only seeds with a crowd can find it.
def _forget_overtaken(original: Any) -> Any:
    def call_taker(self: Receiver, call: Any) -> Any:
        """Drop calls that are too far behind."""
        take = original(self, call)
        return lambda: take() if call.id > self._once._last - 4096 else None

    return call_taker


BUGS: Final[dict[str, Bug]] = {
    "run_twice": Bug("copies of a message are not noticed", Once, "fresh", _run_twice),
    "forget_overtaken": Bug(
        "a call that thousands overtake never runs", Receiver, "_call_taker", _forget_overtaken
    ),
    "no_cancel": Bug("a cancelled call goes on over there", Caller, "cancelled", _no_cancel),
    "lost_drain": Bug("nothing is sent after a pause", Outbox, "resume", _never_drained),
    "late_deadline": Bug("deadlines come a second late", Deadlines, "bucket", _late),
    "claims_no": Bug("says that a lost call never ran", calls, "lost", _claim_no),
    "unnoticed_death": Bug("a closed connection is ignored", Link, "disconnected", _nothing),
    "unheeded_exit": Bug(
        "the end of a process is told, and not believed", Links, "declare_lost", _nothing
    ),
    "resend_all": Bug("what came is sent again", Session, "unacknowledged", _resend_all),
    "resend_nothing": Bug(
        "what a cut took is not sent again", Session, "unacknowledged", _resend_nothing
    ),
    "no_ack": Bug("what came is kept for ever", Session, "acknowledged", _nothing),
    "half_frames": Bug("what came of a frame before a cut is gone", Link, "opened", _fresh_reader),
    "no_return": Bug("nobody dials after a cut", Reconnection, "_dial", lambda _: _soon),
    "sound_sleep": Bug("a call does not wake a link up", Outbox, "detach", _sound_sleep),
    "forgetful_sleep": Bug(
        "what crosses the agreement to sleep is gone", Link, "_fall_asleep", _forgetful_sleep
    ),
    "deaf_sleep": Bug("a nudge does not wake a link up", Link, "answer", _deaf_sleep),
    "no_lease": Bug("what the dead held is never freed", Protocol, "lease_over", _nothing),
    "missing_release": Bug("dropped references stay", UserTable, "_release_if_unused", _nothing),
    "early_free": Bug("the first release frees the value", OwnerTable, "release", _free_early),
    "miss_unreached": Bug("unused edges are not answered", Pass, "collect", _miss_unreached),
    "answer_twice": Bug("gradients of edges count twice", Pass, "feed", _answer_twice),
    "forget_credit": Bug("credit gets lost on the way", Pass, "feed", _forget_credit),
    "resurrect": Bug(
        "a late message brings a context back", ContextRegistry, "arriving", _resurrect
    ),
    "forget_context": Bug(
        "others are not told of the end", ContextRegistry, "_end", _forget_release
    ),
    "silent_abort": Bug(
        "survivors hear nothing of a failure", AbortProtocol, "_notify_all", lambda _: _soon
    ),
    "show_partial": Bug("a failed pass shows numbers", Context, "ended_badly", _keeps_failures),
    "successors": Bug(
        "a worker with the name of a lost one takes part in its place",
        Links,
        "exactly",
        _by_name,
        (
            (Pass, "names", _named_by_messages),
            (Pass, "feed", _answered_by_name),
            (Context, "cut_off", _nothing),
            (AbortProtocol, "edge_lost", _nothing),
        ),
    ),
    "late_loss": Bug(
        "the loss of a worker that a pass has not reached yet is not noticed",
        Pass,
        "names",
        _named_by_messages,
        ((AbortProtocol, "edge_lost", _nothing),),
    ),
    "kept_to_itself": Bug(
        "a worker that the pass has not reached tells nobody that it lost an edge",
        ContextRegistry,
        "_spread_loss",
        _nothing,
    ),
    "dropped_posts": Bug(
        "a gradient for a lost worker vanishes",
        AbortProtocol,
        "failed",
        _dropped_posts,
        ((Pass, "names", _named_by_messages),),
    ),
    "shown_early": Bug("numbers are shown before the outcome", Context, "gradients", _shown_early),
    "failed_in_doubt": Bug(
        "a loss after a good pass makes it a failed one", AbortProtocol, "failed", _failed_in_doubt
    ),
    "all_well": Bug(
        "participants hear of no failure, but that all passes ended well",
        Outcomes,
        "decided",
        _all_well,
        ((AbortProtocol, "_notify_all", lambda _: _soon),),
    ),
    "untold": Bug("calls do not piggyback outcomes", OutcomeReports, "send", _nothing),
}


@contextmanager
def planted(name: str, bugs: Mapping[str, Bug] = BUGS) -> Iterator[Bug]:
    """Put one bug into the library for a while."""
    bug = bugs[name]
    originals = [vars(where)[name] for where, name, _ in bug.patches]
    try:
        for (where, name, make), original in zip(bug.patches, originals, strict=True):
            setattr(where, name, make(original))
        yield bug
    finally:
        for (where, name, _), original in zip(bug.patches, originals, strict=True):
            setattr(where, name, original)
