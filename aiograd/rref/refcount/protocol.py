"""How workers agree on which values are still used: one worker's part, without I/O.

The owner keeps a value while it knows a fork of it. A reference travels as a fork of its own, and
there are four ways for one to come about:

    remote()         creator ──creation──▶ owner            the answer confirms the creator's fork
    owner → user     the owner registers the fork as it sends; nothing more to say
    user → owner     no fork; the owner answers *accepted*, until then the sender keeps its own
    user → user      the receiver notifies the owner (*fork request*), then the sender (*accepted*);
                     until then the sender keeps its own fork

Nothing here assumes an order of messages, only that the shell repeats a message until it is
answered or the session with the recipient is lost. A loss cuts off all that was agreed on in that
session: references to the lost worker's values are dead for ever, and its own forks are kept for a
lease, in the name of a *ghost*. The worker may come back in a new session, and begins with nothing
then. A restarted worker has another incarnation and is another worker.

         user                                          owner
    lost its forks have failed from now on        its forks belong to a ghost from now on
         ┊                                             ┊ a lease later: reclaimed
    back ids up to the loss are never created ──▶      waiters for one of these get an error

`Protocol` joins the owner's side (`owner`), the user's side (`user`) and the forks that were sent
(`audit`). Notifications to others are in the user table's outbox; `services.Messenger` sends them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from aiograd.errors import OwnerLost, RRefReleased
from aiograd.rpc.directory import LOST_PEERS, PeerInfo, forget_one
from aiograd.rref.refcount.audit import Audit
from aiograd.rref.refcount.owner import OwnerTable
from aiograd.rref.refcount.records import (
    BY_CONFIRMED,
    BY_OWNER,
    CREATING,
    UNKNOWN_SITE,
    CallSite,
    Fork,
    ForkData,
    OwnerRecord,
    Record,
    RefId,
    Use,
    UserRecord,
    fresh_copy,
    stamp_of,
)
from aiograd.rref.refcount.user import UserTable

# Answers to a question about a fork.
UNKNOWN: Final = 0
CONFIRMING: Final = 1
SETTLED: Final = 2


class Protocol:
    """All that one worker knows about references. Its methods belong to the worker's loop."""

    def __init__(self, me: PeerInfo) -> None:
        self.me = me
        self.owner_table: OwnerTable = OwnerTable(me)
        self.user_table: UserTable = UserTable()
        self.audit: Audit = Audit()  # forks we sent
        self._shared: dict[RefId, RefId] = {}  # audited fork of our own value → its reference
        self._counter = itertools.count()
        self._stamp = stamp_of(me.incarnation)
        # Incarnations out of reach → number of the loss. The number comes from the counter of ids:
        # all that was made before has a lower one, and what a new session makes, a higher one.
        self.unreachable: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}  # of those
        # Losses whose lease is not over: number → the lost worker, and the forks it was sent.
        self._leases: dict[int, tuple[PeerInfo, list[RefId]]] = {}

    def new_id(self) -> RefId:
        """Return a fresh id for a reference or a fork."""
        return (self.me.rank, self._stamp, next(self._counter))

    # ── creation ────────────────────────────────────────────────────────────────────────────

    def own(self, value: object, call_site: CallSite = UNKNOWN_SITE) -> OwnerRecord:
        """Own a value that no other worker knows of; it enters the table when it is shared."""
        record = OwnerRecord(self.new_id(), call_site)
        record.value, record.ready = value, True
        return record

    def create(self, owner: PeerInfo) -> UserRecord:
        """Record a reference to what another worker is asked to create.

        The id of its fork is the next number, so that the creation need carry only one id.
        """
        # `new_id` twice, written out: every remote() passes here.
        rank, stamp, count = self.me.rank, self._stamp, self._counter
        ref_id, fork = (rank, stamp, next(count)), (rank, stamp, next(count))
        record = self.user_table.records[fork] = UserRecord(ref_id, fork, owner, CREATING)
        return record

    def create_here(self, call_site: CallSite = UNKNOWN_SITE) -> OwnerRecord:
        """Record a creation sent to ourselves; it keeps itself until it is answered."""
        return self.owner_table.begin_here(self.new_id(), call_site)

    def created_here(self, record: OwnerRecord, error: Exception | None = None) -> None:
        """Take the outcome of a creation sent to ourselves: answered, or `error` if abandoned."""
        record.creator_error = error
        # The fork that `create_here` made. After an error the creation may still arrive, as from
        # any creator: the mark says so.
        self.owner_table.release([(record.id, record.id, error is not None)])
        waiting, record.on_answered = record.on_answered, ()
        for wake in waiting:
            wake()

    def discard_creation(self, record: Record) -> None:
        """Forget a creation that could not even be sent: no other worker knows of it."""
        if isinstance(record, UserRecord):
            self.user_table.records.pop(record.fork, None)
        else:
            self.owner_table.records.pop(record.id, None)

    # ── sharing ─────────────────────────────────────────────────────────────────────────────

    def depart(self, record: Record, to: PeerInfo) -> ForkData:
        """Fork a reference for a message to `to`. What cannot be used cannot be shared."""
        self.check(record)
        fork = self.new_id()
        if isinstance(record, OwnerRecord):
            self.owner_table.share(record, fork, to.incarnation)
            self._shared[fork] = record.id
            owner, known = self.me, BY_OWNER
        else:
            self.user_table.share(record, fork)
            owner, known = record.owner, record.known
        self.audit.add(fork, to)
        return (owner.name, owner.rank, owner.incarnation, record.id, fork, known)

    def undo(self, data: ForkData) -> None:
        """Take back a fork whose message never left, or was refused unread."""
        self._abandon([data[4]])

    def arrive(self, data: ForkData, sender: PeerInfo) -> Record:
        """Turn a fork that arrived into a record here. A `UserRecord` may be CONFIRMING."""
        name, rank, incarnation, ref_id, fork, known = data
        if incarnation != self.me.incarnation:
            # A third worker's addresses are not needed: messages to it go by its name, after a
            # look into the directory whether this incarnation is still the member.
            owner = sender if known == BY_OWNER else PeerInfo(name, rank, incarnation)
            return self.user_table.receive(ref_id, fork, owner, sender, known)
        if known == BY_OWNER:
            # We sent it to ourselves: the fork kept the value while it was under way.
            record = self.owner_table.returned(ref_id, BY_CONFIRMED, self.me.name)
            self._abandon([fork])
            return record
        # The owner needs no fork of its own value, so the sender may release its own at once.
        self.user_table.accept(sender, fork)
        return self.owner_table.returned(ref_id, known, sender.name)

    def check(self, record: Record) -> None:
        """Raise the reason if a reference cannot be used."""
        if isinstance(record, OwnerRecord):
            if record.creator_error is not None:
                raise fresh_copy(record.creator_error)
            return
        if record.dropped or record.use >= Use.RELEASING:
            raise RRefReleased(
                f"this reference to a value on {record.owner.name} was used after deletion: it was "
                "released, or its worker was shut down",
                record.owner.name,
            )
        if record.error is not None:
            # A loss says more than the error of a creation that failed with it.
            if record.owner.incarnation in self.unreachable:
                raise OwnerLost(record.owner.name)
            raise fresh_copy(record.error)

    # ── messages of other workers ───────────────────────────────────────────────────────────

    def look_up(self, sender: PeerInfo, ref_id: RefId, fork: RefId, known: int) -> OwnerRecord:
        """Return the value that `sender` uses by this fork, ready or not.

        Raises RRefExpired or RRefReleased if it may not.
        """
        record = self.owner_table.look_up(sender, ref_id, fork, known)
        # A use proves that the fork arrived. `_shared` has only forks that this worker sent of its
        # own values and has not heard of; without any, the call is spared.
        if self._shared:
            self._heard_of(fork)
        return record

    def requested(
        self, sender: PeerInfo, number: int, low: int, forks: Iterable[Fork]
    ) -> list[bool]:
        """Take a fork request: see `OwnerTable.request`."""
        return self.owner_table.request(sender.incarnation, number, low, forks)

    def accepted(self, forks: Sequence[RefId]) -> None:
        """Take an acceptance: these children of our forks are confirmed."""
        self.user_table.accepted(forks)
        for fork in forks:
            self.audit.discard(fork)

    def released(self, releases: Iterable[Fork]) -> None:
        """Take releases of forks of our values."""
        releases = list(releases)
        self.owner_table.release(releases)
        if self._shared:
            for _, fork, _ in releases:
                self._heard_of(fork)

    def report_forks(self, forks: Iterable[RefId]) -> list[int]:
        """Answer an audit: UNKNOWN, CONFIRMING or SETTLED for each fork that was sent to us."""
        # A fork that was released is UNKNOWN, too. The sharer abandons it then, which changes
        # nothing at an owner that has removed it already.
        records = [self.user_table.records.get(fork) for fork in forks]
        return [
            UNKNOWN if one is None else CONFIRMING if one.use is Use.CONFIRMING else SETTLED
            for one in records
        ]

    # ── forks that were sent ────────────────────────────────────────────────────────────────

    def take_audit(self, asked: Sequence[RefId], found: Sequence[int], at_shutdown: bool) -> None:
        """Take the answer to an audit; ValueError if its length differs from the question's."""
        pairs = list(zip(asked, found, strict=True))
        unknown = [fork for fork, state in pairs if state == UNKNOWN]
        self._abandon(self.audit.answered(asked, unknown, at_shutdown))
        for fork, state in pairs:
            if state != UNKNOWN:
                self._heard_of(fork)
        # A parent must keep its fork until the owner has confirmed the child.
        self.accepted([fork for fork, state in pairs if state == SETTLED])

    def _heard_of(self, fork: RefId) -> None:
        """End the audit of a fork of our own value: its holder has it and will release it."""
        if self._shared.pop(fork, None) is not None:
            self.audit.discard(fork)

    def _abandon(self, forks: Sequence[RefId]) -> None:
        """Release forks in the name of recipients that never got them."""
        self.user_table.accepted(forks)
        self.owner_table.release(
            [(ref_id, fork, False) for fork in forks if (ref_id := self._shared.pop(fork, None))]
        )
        for fork in forks:
            self.audit.discard(fork)

    # ── loss and return ─────────────────────────────────────────────────────────────────────

    def watched(self) -> set[bytes]:
        """Return the incarnations of all whose loss changes something here."""
        found = self.owner_table.holders()
        found.update(record.owner.incarnation for record in self.user_table.records.values())
        found.update(self.audit.holders())
        return found

    def lost(self, peer: PeerInfo) -> int:
        """Cut off a lost session. Returns its number, for `lease_over` after the lease."""
        incarnation = peer.incarnation
        # Off first, so that the order of the dict is that of the last losses.
        self.unreachable.pop(incarnation, None)
        number = self.unreachable[incarnation] = next(self._counter)
        self._names[incarnation] = peer.name
        if len(self.unreachable) > 2 * LOST_PEERS:
            # An old one: its lease is over, and the directory has forgotten it, too.
            del self._names[forget_one(self.unreachable, self._names.__getitem__)]
        self.user_table.sever(incarnation)
        self.owner_table.sever(incarnation, _ghost(incarnation, number))
        forks = self.audit.held_by(incarnation)
        for fork in forks:
            self.audit.discard(fork)  # the holder cannot be asked any more; its lease decides
        self._leases[number] = peer, forks
        return number

    def returned(self, incarnation: bytes) -> int | None:
        """Begin a new session. Returns the number for the peer's `session_begun`, if any."""
        self._names.pop(incarnation, None)
        return self.unreachable.pop(incarnation, None)

    def session_begun(self, peer: PeerInfo, number: int) -> None:
        """Fail creations of the peer under ids up to this number that have not arrived."""
        self.owner_table.expire(peer, number)

    def lease_over(self, number: int) -> None:
        """Reclaim what a worker held when it was lost. A second time it does nothing."""
        if (lease := self._leases.pop(number, None)) is None:
            return
        peer, forks = lease
        # If it has come back since, its `rref.session` message says which ids never come.
        if self.unreachable.get(peer.incarnation) == number:
            self.owner_table.expire(peer)
        # Forks that it was sent and never confirmed: their parents here need not wait any longer.
        self._abandon(forks)
        self.owner_table.reclaim(_ghost(peer.incarnation, number))

    def leased(self, name: str) -> set[bytes]:
        """Return the lost starts of a worker whose leases are not over."""
        return {peer.incarnation for peer, _ in self._leases.values() if peer.name == name}

    def end_leases(self) -> None:
        """End the leases of all lost workers: this worker shuts down and does not wait."""
        for number in list(self._leases):
            self.lease_over(number)

    # ── counting ────────────────────────────────────────────────────────────────────────────

    @property
    def at_rest(self) -> bool:
        """Whether nothing is owned for others, used or under way."""
        return not (self.owner_table.records or self.user_table.records or self.user_table.children)


def _ghost(incarnation: bytes, number: int) -> bytes:
    """Return the holder of forks whose session is lost: equal to no incarnation that can ask."""
    return incarnation + number.to_bytes(8, "big")
