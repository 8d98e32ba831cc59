"""How workers agree on who still uses a value: one worker's part, without I/O.

The owner keeps a value while it knows a fork of it. A reference travels as a fork of its own, and
there are four ways for one to come about:

    remote()         creator ──creation──▶ owner            the answer confirms the creator's fork
    owner → user     the owner registers the fork as it sends; nothing more to say
    user → owner     no fork; the owner answers *accepted*, until then the sender keeps its own
    user → user      the receiver tells the owner (*fork request*), then the sender (*accepted*);
                     until then the sender keeps its own fork

Nothing here assumes an order of messages, only that the shell repeats a message until it is
answered or the session with the receiver is lost. A loss cuts off all that was agreed on in that
session: references to the lost worker's values are dead for ever, and its own forks are kept for a
lease, as of nobody. It may come back in a new session, and begins with nothing then. A restarted
worker has another incarnation and is somebody else.

         user                                          owner
    lost its Held have an error from now on       its forks belong to a *ghost* from now on
         ┊                                             ┊ a lease later: reclaimed
    back ids up to the loss are never created ──▶      what waits for one of these is told

`Protocol` joins the owner's side (`owning`), the user's side (`using`) and the forks that were sent
away (`watch`). What it wants told to others is in `using`'s outbox; `owners.RRefs` carries it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from aiograd.errors import OwnerLost, RRefReleased
from aiograd.rpc.directory import LOST_PEERS
from aiograd.rref.refcount.audit import Watch
from aiograd.rref.refcount.owner import Owning
from aiograd.rref.refcount.records import (
    BY_CONFIRMED,
    BY_OWNER,
    CREATING,
    NOWHERE,
    ForkData,
    Held,
    Owned,
    Party,
    Place,
    RefId,
    Use,
    again,
)
from aiograd.rref.refcount.user import Using

# Answers to a question about a fork.
UNKNOWN: Final = 0
CONFIRMING: Final = 1
SETTLED: Final = 2


class Protocol:
    """All that one worker knows about references."""

    def __init__(self, me: Party) -> None:
        self.me = me
        self.owning = Owning(me)
        self.using = Using(me)
        self.watch = Watch()  # forks we sent away, by their fork id
        self._shared: dict[RefId, RefId] = {}  # watched fork of our own value → reference
        self._counter = itertools.count()
        self._stamp = me.stamp
        # Incarnations out of reach, and the number of the loss. It comes from the counter of ids:
        # all that was made before has a lower one, and what a new session makes, a higher one.
        self.gone: dict[bytes, int] = {}
        # Losses whose lease is not over: number → who, and the forks it was sent.
        self._severed: dict[int, tuple[bytes, list[RefId]]] = {}

    def new_id(self) -> RefId:
        return (self.me.rank, self._stamp, next(self._counter))

    # ── creation ────────────────────────────────────────────────────────────────────────────

    def own(self, value: object, line: Place = NOWHERE) -> Owned:
        """Own a value that nobody else knows of yet; it enters the table when it is shared."""
        owned = Owned(self.new_id(), line)
        owned.value, owned.ready = value, True
        return owned

    def create(self, owner: Party) -> Held:
        """A reference to what another worker makes; its fork is the next number: one travels."""
        rank, stamp, count = self.me.rank, self._stamp, self._counter
        ref_id, fork = (rank, stamp, next(count)), (rank, stamp, next(count))
        held = self.using.held[fork] = Held(ref_id, fork, owner, CREATING)
        return held

    def create_here(self, line: Place = NOWHERE) -> Owned:
        """A creation sent to oneself: owner at once, and kept by itself until it is answered."""
        return self.owning.begin_here(self.new_id(), line)

    def created_here(self, owned: Owned, doubt: Exception | None = None) -> None:
        """The creation sent to oneself was answered, or was given up."""
        owned.doubt = doubt
        self.owning.release([(owned.id, owned.id, doubt is not None)])
        waiting, owned.on_answered = owned.on_answered, ()
        for wake in waiting:
            wake()

    def forget(self, made: Owned | Held) -> None:
        """A creation that could not even be sent."""
        if isinstance(made, Held):
            self.using.held.pop(made.fork, None)
        else:
            self.owning.owners.pop(made.id, None)

    # ── sharing ─────────────────────────────────────────────────────────────────────────────

    def depart(self, ref: Owned | Held, to: Party) -> ForkData:
        """Turn a reference into what travels. Whatever cannot be used cannot be shared."""
        self.check(ref)
        fork = self.new_id()
        if isinstance(ref, Owned):
            self.owning.share(ref, fork, to.incarnation)
            self._shared[fork] = ref.id
            owner, known = self.me, BY_OWNER
        else:
            self.using.share(ref, fork)
            owner, known = ref.owner, ref.known
        self.watch.add(fork, to.incarnation)
        return (owner.name, owner.rank, owner.incarnation, ref.id, fork, known)

    def undo(self, data: ForkData) -> None:
        """What departed never left, or was refused unread."""
        self._give_up([data[4]])

    def arrive(self, data: ForkData, sender: Party) -> Owned | Held:
        """Turn what travelled into a reference of this worker. A `Held` may be CONFIRMING."""
        name, rank, incarnation, ref_id, fork, known = data
        if incarnation != self.me.incarnation:
            owner = sender if known == BY_OWNER else Party(name, rank, incarnation)
            return self.using.receive(ref_id, fork, owner, sender, known)
        if known == BY_OWNER:  # we sent it to ourselves; the fork has done its duty
            owned = self.owning.returned(ref_id, BY_CONFIRMED, self.me.name)
            self._give_up([fork])
            return owned
        self.using.accept(sender, fork)
        return self.owning.returned(ref_id, known, sender.name)

    def check(self, ref: Owned | Held) -> None:
        """Raise why a reference cannot be used, if so."""
        if isinstance(ref, Owned):
            if ref.doubt is not None:
                raise again(ref.doubt)
            return
        if ref.dropped or ref.use >= Use.RELEASING:
            raise RRefReleased(
                f"this reference to a value on {ref.owner.name} was used after deletion: it was "
                "released, or its worker was shut down",
                ref.owner.name,
            )
        if ref.error is not None:
            if ref.owner.incarnation in self.gone:  # says more than that a creation failed
                raise OwnerLost(ref.owner.name)
            raise again(ref.error)

    # ── what others tell ────────────────────────────────────────────────────────────────────

    def look_up(self, sender: Party, ref_id: RefId, fork: RefId, known: int) -> Owned:
        """Return what `sender` uses by this fork, ready or not; RRefExpired if it may not."""
        owned = self.owning.look_up(sender, ref_id, fork, known)
        if self._shared:
            self._forget(fork)
        return owned

    def requested(
        self, sender: Party, number: int, low: int, forks: Iterable[tuple[RefId, RefId, int]]
    ) -> list[bool]:
        return self.owning.request(sender.incarnation, number, low, forks)

    def accepted(self, forks: Sequence[RefId]) -> None:
        self.using.accepted(forks)
        for fork in forks:
            self.watch.discard(fork)

    def released(self, releases: Iterable[tuple[RefId, RefId, int]]) -> None:
        releases = list(releases)
        self.owning.release(releases)
        if self._shared:
            for _, fork, _ in releases:
                self._forget(fork)

    def look_for(self, forks: Iterable[RefId]) -> list[int]:
        """What is known here of forks that somebody sent us and heard nothing of since."""
        held = [self.using.held.get(fork) for fork in forks]
        return [
            UNKNOWN if one is None else CONFIRMING if one.use is Use.CONFIRMING else SETTLED
            for one in held
        ]

    # ── forks that were sent away ───────────────────────────────────────────────────────────

    def audited(self, asked: Sequence[RefId], found: Sequence[int], hurry: bool) -> None:
        """Take the answer about forks that we sent away."""
        pairs = list(zip(asked, found, strict=True))
        self._give_up(self.watch.answered(asked, [f for f, n in pairs if n == UNKNOWN], hurry))
        for fork, known in pairs:
            if known != UNKNOWN:
                self._forget(fork)  # an owner knows enough
        self.accepted([fork for fork, known in pairs if known == SETTLED])  # so does a parent

    def _forget(self, fork: RefId) -> None:
        """A fork of our own value has been heard of: from now on it will be given back."""
        if self._shared.pop(fork, None) is not None:
            self.watch.discard(fork)

    def _give_up(self, forks: Sequence[RefId]) -> None:
        self.using.accepted(forks)
        self.owning.release(
            [(ref_id, fork, False) for fork in forks if (ref_id := self._shared.pop(fork, None))]
        )
        for fork in forks:
            self.watch.discard(fork)

    # ── death and return ────────────────────────────────────────────────────────────────────

    def lost(self, incarnation: bytes) -> int:
        """A session is lost. Returns the number to give to `lease_over` after the lease."""
        self.gone.pop(incarnation, None)
        number = self.gone[incarnation] = next(self._counter)
        if len(self.gone) > 2 * LOST_PEERS:  # whose lease is over, and whom no directory knows
            del self.gone[next(iter(self.gone))]
        self.using.sever(incarnation)
        self.owning.sever(incarnation, _ghost(incarnation, number))
        forks = self.watch.held_by(incarnation)
        for fork in forks:
            self.watch.discard(fork)  # there is nobody to ask any more
        self._severed[number] = incarnation, forks
        return number

    def returned(self, incarnation: bytes) -> int | None:
        """A new session begins. Returns what to tell the peer for its `session_begun`."""
        return self.gone.pop(incarnation, None)

    def session_begun(self, peer: Party, number: int) -> None:
        """What the peer created under ids up to this number, and is not here, never comes."""
        self.owning.expire(peer, number)

    def lease_over(self, gone: Party, number: int) -> bool:
        """Take back what a worker held when it was lost. Returns whether it is still out of
        reach since that loss."""
        out_of_reach = self.gone.get(gone.incarnation) == number
        if out_of_reach:  # else it has told itself what never comes
            self.owning.expire(gone)
        _, forks = self._severed.pop(number, (b"", []))
        self._give_up(forks)
        self.owning.reclaim(_ghost(gone.incarnation, number))
        return out_of_reach

    def end_of(self, gone: Party) -> None:
        """Do not wait for the lease of somebody who was lost: this worker shuts down."""
        for number, (incarnation, _) in list(self._severed.items()):
            if incarnation == gone.incarnation:
                self.lease_over(gone, number)

    # ── counting ────────────────────────────────────────────────────────────────────────────

    @property
    def at_rest(self) -> bool:
        """Nothing is held, shared or on its way."""
        return not (self.owning.owners or self.using.held or self.using.children)


def _ghost(incarnation: bytes, number: int) -> bytes:
    """Whose forks they are when a session is lost: nobody's who can ask for them."""
    return incarnation + number.to_bytes(8, "big")
