"""The owner's side: which values stay here, and which forks keep them. No I/O.

A value is in the table while another worker may ask for it: while it has forks, while its function
runs, or while a use has overtaken the creation (*awaited*). Then it leaves the table, and lives on
only if user code here holds it.

Forks are added by the owner itself when it shares, by the creation, and by fork requests; they are
removed by releases. Releases and requests are retried, so they may arrive in any order, and several
times:

* a release of a fork that is not there is ignored, except that a creator which abandoned its
  creation may be faster than the creation itself: such a fork is remembered, and not registered
  when the creation arrives;
* a copy of a fork request must not bring a released fork back, so requests are numbered, and
  every number counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from aiograd.errors import ProtocolError, RRefError, RRefExpired, RRefReleased
from aiograd.rpc.directory import LOST_PEERS, PeerInfo, forget_one
from aiograd.rref.refcount.records import (
    BY_CREATOR,
    CallSite,
    Fork,
    OwnerRecord,
    RefId,
    stamp_of,
)

ABANDONED_LIMIT: Final = 65_536
"""Abandoned creations of a creator that never arrive must not pile up; it forgets the oldest."""


REQUESTS_LIMIT: Final = 65_536
"""Numbers of fork requests that one sender may have under way."""


class SeenRequests:
    """Deduplicates the numbered requests of one sender, which arrive in any order.

    The sender adds to each request its lowest unanswered number. Everything below was answered, so
    a message with such a number is a copy, and the set stays as small as what is under way.
    """

    __slots__ = ("_low", "_taken")

    def __init__(self) -> None:
        self._low = 0  # the sender has the answers to everything below
        self._taken: set[int] = set()

    def take(self, number: int, low: int) -> bool:
        """Return whether this is the first copy."""
        if low > self._low:
            self._low = low
            self._taken = {taken for taken in self._taken if taken >= low}
        if number < self._low or number in self._taken:
            return False
        # An honest sender raises `low` as answers come, and never has so many under way.
        if len(self._taken) >= REQUESTS_LIMIT:
            raise ProtocolError(f"{REQUESTS_LIMIT} fork requests are under way already")
        self._taken.add(number)
        return True


class OwnerTable:
    """The values of one worker that others may use."""

    def __init__(self, me: PeerInfo) -> None:
        self.me = me
        self.records: dict[RefId, OwnerRecord] = {}
        # Forks that were released before their creation arrived, by the stamp of their creator: one
        # that abandons many pushes out its own only. The inner dicts are there for their order.
        self._abandoned: dict[int, dict[RefId, None]] = {}
        self._requests: dict[bytes, SeenRequests] = {}  # by incarnation of the sender
        # Creators whose lease ran out, or which began a new session: stamp → high-water mark. An
        # unknown id up to it was reclaimed or never comes; one above may still be under way. One
        # number is enough, because ids of one creator rise in the order of creation.
        self._expired: dict[int, int] = {}
        self._creators: dict[int, str] = {}  # the names of those

    # ── creation ────────────────────────────────────────────────────────────────────────────

    def begin_here(self, ref_id: RefId, call_site: CallSite) -> OwnerRecord:
        """Add a value that this worker creates for itself; it is its own first fork."""
        record = self.records[ref_id] = OwnerRecord(ref_id, call_site)
        record.forks[ref_id] = self.me.incarnation
        return record

    def expect(self, sender: bytes, ref_id: RefId, fork: RefId, call_site: CallSite) -> None:
        """Add a value whose creation has arrived: its function is about to run here."""
        record = self.records.get(ref_id)
        if record is None:
            record = self.records[ref_id] = OwnerRecord(ref_id, call_site)
        # A use that overtook the creation has made the record without a call site.
        record.call_site = record.call_site if record.call_site[0] else call_site
        record.running = True
        # The function runs even if the creator has released the value already: calls of an
        # abandoned reference are not cancelled. Only the creator's fork is not registered.
        if self._abandoned and self._was_abandoned(fork):
            self._forget_abandoned(fork)
        else:
            record.forks[fork] = sender

    def made(
        self, sender: bytes, ref_id: RefId, fork: RefId, call_site: CallSite, value: Any
    ) -> None:
        """Add a value whose function has run on arrival: `expect` and `settle` in one."""
        if ref_id in self.records or (self._abandoned and self._was_abandoned(fork)):
            self.expect(sender, ref_id, fork, call_site)
            self.settle(ref_id, value)
        else:
            # The usual case, written out: nothing overtook the creation, so nobody waits for the
            # value, and its creator's fork keeps it.
            record = self.records[ref_id] = OwnerRecord(ref_id, call_site)
            record.value, record.ready = value, True
            record.forks[fork] = sender

    def settle(self, ref_id: RefId, value: Any, error: Exception | None = None) -> None:
        """Take the outcome of a creating function."""
        if (record := self.records.get(ref_id)) is None:
            return
        record.running = False
        record.settle(value, error)
        self._free_if_unused(record)

    # ── sharing ─────────────────────────────────────────────────────────────────────────────

    def share(self, record: OwnerRecord, fork: RefId, holder: bytes) -> None:
        """Register a fork that this worker sends; a value of its own enters the table by it."""
        self.records[record.id] = record
        record.forks[fork] = holder

    def returned(self, ref_id: RefId, known: int, shared_by: str) -> OwnerRecord:
        """Return the record of a reference that a user sent to this worker, its owner.

        It is one that has failed with RRefExpired if the value was freed.
        """
        record = self.records.get(ref_id)
        if record is None and known == BY_CREATOR and not self._was_reclaimed(ref_id):
            record = self.records[ref_id] = OwnerRecord(ref_id)
        if record is None:
            record = OwnerRecord(ref_id)  # outside the table: no other worker can ask for it
            record.settle(None, self._expiry(shared_by))
        if not record.ready:
            record.local_refs += 1
        return record

    def drop(self, record: OwnerRecord) -> None:
        """Take note that user code dropped a reference that `returned` gave it unready."""
        record.local_refs -= 1
        self._free_if_unused(record)

    def request(self, sender: bytes, number: int, low: int, forks: Iterable[Fork]) -> list[bool]:
        """Register forks that a user was given by other users; return which of them count."""
        requests = self._requests.setdefault(sender, SeenRequests())
        if not requests.take(number, low):
            # A copy: its answer was lost, or is under way. It gets the state of now, because a
            # release may have arrived in between.
            return [self._is_held(sender, ref_id, fork) for ref_id, fork, _ in forks]
        return [self._register(sender, ref_id, fork, known) for ref_id, fork, known in forks]

    def _register(self, sender: bytes, ref_id: RefId, fork: RefId, known: int) -> bool:
        record = self.records.get(ref_id)
        if record is None:
            if known != BY_CREATOR or self._was_reclaimed(ref_id):
                return False
            record = self.records[ref_id] = OwnerRecord(ref_id)
        record.forks[fork] = sender
        return True

    def _is_held(self, sender: bytes, ref_id: RefId, fork: RefId) -> bool:
        record = self.records.get(ref_id)
        return record is not None and record.forks.get(fork) == sender

    # ── use ─────────────────────────────────────────────────────────────────────────────────

    def look_up(self, sender: PeerInfo, ref_id: RefId, fork: RefId, known: int) -> OwnerRecord:
        """Return the value that `sender` may use by this fork, ready or not.

        Raises RRefReleased if the creator uses what it has abandoned, else RRefExpired.
        """
        record = self.records.get(ref_id)
        if record is not None:
            if record.forks.get(fork) == sender.incarnation:
                return record
            # The use overtook the message that registers its fork: creation or fork request.
            awaited = not record.ready and not record.running
            if awaited and known == BY_CREATOR and not self._was_abandoned(fork):
                return record
        elif self._was_abandoned(fork):
            raise RRefReleased(f"{sender.name} has released this reference", sender.name)
        elif known == BY_CREATOR and not self._was_reclaimed(ref_id):
            record = self.records[ref_id] = OwnerRecord(ref_id)
            return record
        raise self._expiry(sender.name)

    def _was_reclaimed(self, ref_id: RefId) -> bool:
        """Whether an unknown id was reclaimed, rather than not created yet."""
        return ref_id[2] <= self._expired.get(ref_id[1], -1)

    def _expiry(self, user: str) -> RRefExpired:
        return RRefExpired(
            f"{self.me.name} no longer keeps this value for {user}: the reference was given back, "
            f"or {user} was out of reach for longer than Options.lease; create the value again",
            self.me.name,
        )

    # ── release ─────────────────────────────────────────────────────────────────────────────

    def release(self, releases: Iterable[Fork]) -> None:
        """Remove forks. The mark says that the creation was never answered."""
        records = self.records
        for ref_id, fork, never_created in releases:
            record = records.get(ref_id)
            if record is None:
                if never_created:
                    self._remember_abandoned(fork)
                continue
            forks = record.forks
            forks.pop(fork, None)
            # The usual case first: the last fork of a finished value. It spares the calls below.
            if not forks and record.ready and not record.running:
                del records[ref_id]
                continue
            if never_created and not record.running and not record.ready:
                self._remember_abandoned(fork)  # its creation is under way, or lost
                record.abandoned = True
            if record.abandoned and not record.forks and not record.running:
                # No fork is left that a creation could arrive for, so waiters get an error now.
                record.settle(None, RRefError("RRef creation was given up", self.me.name))
            self._free_if_unused(record)

    def holders(self) -> set[bytes]:
        """Return the incarnations that hold forks of values here."""
        return {holder for record in self.records.values() for holder in record.forks.values()}

    def sever(self, incarnation: bytes, ghost: bytes) -> None:
        """Give the forks of a lost holder to a ghost until its lease is over.

        The holder may come back, but not to these: on its side they are lost already.
        """
        for record in self.records.values():
            for fork, holder in record.forks.items():
                if holder == incarnation:
                    record.forks[fork] = ghost
        # A request belongs to its session and is not repeated in the next one. Nor does a creation
        # arrive that was under way in it: nothing of a lost session is delivered any more.
        self._requests.pop(incarnation, None)
        self._abandoned.pop(stamp_of(incarnation), None)

    def reclaim(self, ghost: bytes) -> None:
        """Remove the forks of a ghost: the lease of the lost holder is over."""
        for record in list(self.records.values()):
            forks = [fork for fork, holder in record.forks.items() if holder == ghost]
            for fork in forks:
                del record.forks[fork]
            if forks:
                self._free_if_unused(record)

    def expire(self, creator: PeerInfo, last: int | None = None) -> None:
        """Fail creations of this worker that have not arrived: all, or those up to an id."""
        stamp = stamp_of(creator.incarnation)
        for fork in list(self._abandoned.get(stamp, ())):
            if last is None or fork[2] <= last:
                self._forget_abandoned(fork)
        theirs = [record for record in self.records.values() if record.id[1] == stamp]
        if last is not None:
            theirs = [record for record in theirs if record.id[2] <= last]
        for record in theirs:
            if not record.ready and not record.running:
                why = f"RRef creation never came: {creator.name}, which asked for it, is gone"
                record.settle(None, RRefError(why, creator.name))
            self._free_if_unused(record)
        if last is None:
            last = max((record.id[2] for record in theirs), default=-1)
        # `pop` and set: the entry moves to the end, so the one that is evicted is the oldest.
        self._expired[stamp] = max(last, self._expired.pop(stamp, -1))
        self._creators[stamp] = creator.name
        if len(self._expired) > 2 * LOST_PEERS:
            del self._creators[forget_one(self._expired, self._creators.__getitem__)]

    def comes_ahead(self, release: Fork) -> bool:
        """Whether a release came before its creation, so that it will be remembered."""
        ref_id, _, never_created = release
        record = self.records.get(ref_id)
        unmade = record is None or not (record.running or record.ready)
        return bool(never_created) and unmade

    def _remember_abandoned(self, fork: RefId) -> None:
        forks = self._abandoned.setdefault(fork[1], {})
        while len(forks) >= ABANDONED_LIMIT:
            del forks[next(iter(forks))]
        forks[fork] = None

    def _was_abandoned(self, fork: RefId) -> bool:
        return fork in self._abandoned.get(fork[1], ())

    def _forget_abandoned(self, fork: RefId) -> None:
        forks = self._abandoned[fork[1]]
        del forks[fork]
        if not forks:
            del self._abandoned[fork[1]]

    def _free_if_unused(self, record: OwnerRecord) -> None:
        if record.forks or record.running:
            return
        # An awaited record without anybody who waits may go: a late creation makes another one.
        if record.ready or not (record.local_refs or record.waiters):
            self.records.pop(record.id, None)

    def kept_for(self, incarnations: Collection[bytes]) -> int:
        """Count the forks that some starts of a worker hold, the values they have asked for, and
        what is remembered of creations that they abandoned; those of lost ones, too, while their
        leases run."""
        stamps = {stamp_of(incarnation) for incarnation in incarnations}
        # A ghost (see `protocol`) has the incarnation of the lost holder in front.
        held = sum(
            max(
                sum(holder[:16] in incarnations for holder in record.forks.values()),
                record.id[1] in stamps,
            )
            for record in self.records.values()
        )
        return held + sum(len(self._abandoned.get(stamp, ())) for stamp in stamps)

    def leaks(self) -> Sequence[OwnerRecord]:
        """Return the values that others keep alive here."""
        return [record for record in self.records.values() if record.forks]
