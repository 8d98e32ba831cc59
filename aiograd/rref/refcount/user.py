"""The user's side: forks held here of values that stay elsewhere. No I/O.

    remote()        ──▶ CREATING ────┐                    ┌──▶ RELEASING ──▶ RELEASED
    from the owner  ──▶              ├──▶ CONFIRMED ──┐   │    (told)        (answered)
    from a user     ──▶ CONFIRMING ──┤                ├───┘
                                     └──▶ FAILED ─────┘   once dropped, and no child is unconfirmed

A fork is FAILED, too, when the session with its owner is lost; then there is nothing to give back.

A fork is given back when user code has let go of it, its own existence is settled, and every child
made from it has been confirmed by the owner: so at every moment the owner knows at least one fork
of any reference that is alive somewhere.

What must be told to others collects in the outbox until the shell takes it, once per tick: a
thousand releases to one owner are one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiograd.errors import OwnerLost
from aiograd.rref.refcount.records import BY_OWNER, Held, Party, RefId, Use

# On the way of every reference: an attribute of an enum is looked up slowly.
_CONFIRMING: Final = Use.CONFIRMING
_CONFIRMED: Final = Use.CONFIRMED
_FAILED: Final = Use.FAILED
_RELEASING: Final = Use.RELEASING
_RELEASED: Final = Use.RELEASED


class Batch:
    """All that is to be told to one worker."""

    __slots__ = ("accepts", "forks", "releases", "to")

    def __init__(self, to: Party) -> None:
        self.to = to
        self.forks: list[Held] = []  # to the owner: we hold these
        self.accepts: list[RefId] = []  # to the parent: these are confirmed, let go
        self.releases: list[Held] = []  # to the owner: we are done with these


class Numbers:
    """Numbers for the fork requests to one owner, and which of them are still unanswered."""

    __slots__ = ("_next", "_open")

    def __init__(self) -> None:
        self._next = 0
        self._open: set[int] = set()

    def issue(self) -> tuple[int, int]:
        """Return a fresh number, and the lowest one that is unanswered."""
        number = self._next
        self._next += 1
        self._open.add(number)
        return number, min(self._open)

    def close(self, number: int) -> None:
        self._open.discard(number)


class Using:
    """The forks of one worker."""

    def __init__(self, me: Party) -> None:
        self.me = me
        self.held: dict[RefId, Held] = {}  # by fork
        self.children: dict[RefId, Held] = {}  # fork of an unconfirmed child → its parent here
        self._numbers: dict[bytes, Numbers] = {}  # per incarnation of the owner
        self.outbox: dict[bytes, Batch] = {}  # what there is to tell, by incarnation

    # ── making ──────────────────────────────────────────────────────────────────────────────

    def receive(self, ref_id: RefId, fork: RefId, owner: Party, parent: Party, known: int) -> Held:
        """A reference came in a message; unless its owner sent it, the owner must be told."""
        use = Use.CONFIRMED if known == BY_OWNER else Use.CONFIRMING
        held = self.held[fork] = Held(ref_id, fork, owner, use)
        if use is Use.CONFIRMING:
            held.parent, held.claim = parent, known
            self._batch(owner).forks.append(held)
        return held

    def answered(self, held: Held, error: Exception | None = None) -> None:
        """The owner knows this fork now, or it is known that it never will."""
        if held.use > _CONFIRMING:
            return
        if error is None:
            held.use, held.never_created = _CONFIRMED, False
        else:
            held.use, held.error = Use.FAILED, error
        if held.parent is not None:  # also after a failure: the parent need not wait any longer
            self.accept(held.parent, held.fork)
            held.parent = None
        if held.on_confirmed or held.on_failed:
            confirmed, failed = held.on_confirmed, held.on_failed
            held.on_confirmed = held.on_failed = ()
            for wake in (*confirmed, *failed) if error is not None else confirmed:
                wake()
        if held.dropped:
            self._let_go(held)

    # ── sharing ─────────────────────────────────────────────────────────────────────────────

    def share(self, held: Held, child: RefId) -> None:
        self.children[child] = held
        held.children += 1

    def accept(self, parent: Party, child: RefId) -> None:
        self._batch(parent).accepts.append(child)

    def accepted(self, forks: Iterable[RefId]) -> None:
        """Children were confirmed, or will never be."""
        for fork in forks:
            if (parent := self.children.pop(fork, None)) is not None:
                parent.children -= 1
                self._let_go(parent)

    # ── letting go ──────────────────────────────────────────────────────────────────────────

    def drop(self, held: Held) -> None:
        """User code does not need this fork any more."""
        held.dropped = True
        self._let_go(held)

    def force(self, held: Held) -> None:
        """Give a fork back without waiting for its creation: this worker shuts down."""
        held.dropped = True
        if held.use is Use.CREATING:
            held.use = Use.FAILED
        self._let_go(held)

    def released(self, held: Held) -> None:
        """The owner has let go, or is gone."""
        held.use = _RELEASED
        self.held.pop(held.fork, None)
        if held.on_released:
            waiting, held.on_released = held.on_released, ()
            for wake in waiting:
                wake()

    def _let_go(self, held: Held) -> None:
        if held.dropped and not held.children and _CONFIRMED <= held.use < _RELEASING:
            if held.use is _FAILED and held.fork not in self.held:
                return self.released(held)  # its session is lost
            held.use = _RELEASING
            batch = self.outbox.get(held.owner.incarnation) or self._batch(held.owner)
            batch.releases.append(held)

    def sever(self, owner: bytes) -> None:
        """The session with an owner is lost, and with it all forks of its values, for ever."""
        for held in [held for held in self.held.values() if held.owner.incarnation == owner]:
            # A creation that has not failed with the session was not sent in it. What is being
            # released ends with the message that says so.
            if held.use is Use.CREATING or held.use >= _RELEASING:
                continue
            del self.held[held.fork]
            error = OwnerLost(held.owner.name)
            self.answered(held, error)
            held.use, held.error = _FAILED, error
            self._let_go(held)

    # ── telling ─────────────────────────────────────────────────────────────────────────────

    def take(self) -> list[Batch]:
        """Return what has collected, one batch per worker."""
        batches = list(self.outbox.values())
        self.outbox.clear()
        return batches

    def number(self, owner: Party) -> tuple[int, int]:
        numbers = self._numbers.get(owner.incarnation)
        if numbers is None:
            numbers = self._numbers[owner.incarnation] = Numbers()
        return numbers.issue()

    def close(self, owner: Party, number: int) -> None:
        self._numbers[owner.incarnation].close(number)

    def _batch(self, to: Party) -> Batch:
        batch = self.outbox.get(to.incarnation)
        if batch is None:
            batch = self.outbox[to.incarnation] = Batch(to)
        return batch
