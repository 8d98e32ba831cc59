"""The user's side: forks held here of values that stay elsewhere. No I/O.

    remote()        ──▶ CREATING ────┐                    ┌──▶ RELEASING ──▶ RELEASED
    from the owner  ──▶              ├──▶ CONFIRMED ──┐   │    (sent)        (acknowledged)
    from a user     ──▶ CONFIRMING ──┤                ├───┘
                                     └──▶ FAILED ─────┘   once dropped, and no child is unconfirmed

A fork is FAILED, too, when the session with its owner is lost; then there is nothing to release.

A fork is released when user code has dropped it, its own existence is settled, and every child
made from it has been confirmed by the owner: so at every moment the owner knows at least one fork
of any reference that is alive somewhere.

Notifications to others collect in the outbox until the shell takes them, once per tick: a thousand
releases to one owner are one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiograd.errors import OwnerLost
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.refcount.records import BY_OWNER, RefId, Use, UserRecord

# As in `records`: a lookup of an enum's member is slow.
_CONFIRMING: Final = Use.CONFIRMING
_CONFIRMED: Final = Use.CONFIRMED
_FAILED: Final = Use.FAILED
_RELEASING: Final = Use.RELEASING
_RELEASED: Final = Use.RELEASED


class Batch:
    """All notifications to one worker."""

    __slots__ = ("accepts", "forks", "releases", "to")

    def __init__(self, to: PeerInfo) -> None:
        self.to: PeerInfo = to
        self.forks: list[UserRecord] = []  # to the owner: we hold these
        self.accepts: list[RefId] = []  # to the parent: these children are confirmed
        self.releases: list[UserRecord] = []  # to the owner: we are done with these


class RequestNumbers:
    """Numbers for the fork requests to one owner, and which of them are still unanswered."""

    __slots__ = ("_next", "_open")

    def __init__(self) -> None:
        self._next = 0
        self._open: set[int] = set()

    def issue(self) -> tuple[int, int]:
        """Return a fresh number, and the lowest one that is unanswered.

        The second lets the owner forget all numbers below it: see `owner.SeenRequests`.
        """
        number = self._next
        self._next += 1
        # A small set: all forks of one tick are one request.
        self._open.add(number)
        return number, min(self._open)

    def close(self, number: int) -> None:
        """Mark a number as answered, or as never to be answered."""
        self._open.discard(number)


class UserTable:
    """The forks that one worker holds."""

    def __init__(self) -> None:
        self.records: dict[RefId, UserRecord] = {}  # by fork
        self.children: dict[RefId, UserRecord] = {}  # fork of an unconfirmed child → its parent
        self._numbers: dict[bytes, RequestNumbers] = {}  # by incarnation of the owner
        self.outbox: dict[bytes, Batch] = {}  # by incarnation of the recipient

    # ── creation and arrival ────────────────────────────────────────────────────────────────

    def receive(
        self, ref_id: RefId, fork: RefId, owner: PeerInfo, parent: PeerInfo, known: int
    ) -> UserRecord:
        """Record a fork that arrived in a message; unless the owner sent it, notify the owner."""
        use = Use.CONFIRMED if known == BY_OWNER else Use.CONFIRMING
        record = self.records[fork] = UserRecord(ref_id, fork, owner, use)
        if use is Use.CONFIRMING:
            record.parent, record.claim = parent, known
            self._batch(owner).forks.append(record)
        return record

    def answered(self, record: UserRecord, error: Exception | None = None) -> None:
        """Take the outcome of a creation or a fork request: confirmed, or the error."""
        if record.use > _CONFIRMING:
            return  # failed with its session already, or forced at shutdown
        if error is None:
            record.use, record.never_created = _CONFIRMED, False
        else:
            record.use, record.error = Use.FAILED, error
        if record.parent is not None:
            # Also after a failure: this fork will never need the parent's to be kept.
            self.accept(record.parent, record.fork)
            record.parent = None
        # `on_confirmed` waits for a decision of either kind, `on_failed` for a failure only. Both
        # are taken off first: a callback may add another one, or drop the record.
        if record.on_confirmed or record.on_failed:
            confirmed, failed = record.on_confirmed, record.on_failed
            record.on_confirmed = record.on_failed = ()
            for wake in (*confirmed, *failed) if error is not None else confirmed:
                wake()
        if record.dropped:
            self._release_if_unused(record)

    # ── sharing ─────────────────────────────────────────────────────────────────────────────

    def share(self, record: UserRecord, child: RefId) -> None:
        """Keep a fork until the child made from it is accepted."""
        self.children[child] = record
        record.children += 1

    def accept(self, parent: PeerInfo, child: RefId) -> None:
        """Notify the sharer of a fork that it need not keep its own for it any longer."""
        self._batch(parent).accepts.append(child)

    def accepted(self, forks: Iterable[RefId]) -> None:
        """Stop waiting for children: they were confirmed, or never will be."""
        for fork in forks:
            # An acceptance may be a copy, or of a fork that an audit has abandoned since.
            if (parent := self.children.pop(fork, None)) is not None:
                parent.children -= 1
                self._release_if_unused(parent)

    # ── release ─────────────────────────────────────────────────────────────────────────────

    def drop(self, record: UserRecord) -> None:
        """Take note that user code does not need this fork any more."""
        record.dropped = True
        self._release_if_unused(record)

    def force(self, record: UserRecord) -> None:
        """Release a fork without waiting for its creation: this worker shuts down."""
        record.dropped = True
        # The answer may take as long as the function runs. `never_created` stays set, so the owner
        # knows that the creation may arrive after its release.
        if record.use is Use.CREATING:
            record.use = Use.FAILED
        self._release_if_unused(record)

    def released(self, record: UserRecord) -> None:
        """End a fork: the owner has acknowledged its release, or is gone."""
        record.use = _RELEASED
        self.records.pop(record.fork, None)
        if record.on_released:
            waiting, record.on_released = record.on_released, ()
            for wake in waiting:
                wake()

    def _release_if_unused(self, record: UserRecord) -> None:
        # Before CONFIRMED the owner may not know the fork: a release that overtook the fork request
        # would be ignored, and the request would then register a fork that nobody releases.
        # With a child unconfirmed, this may be the only fork of the value that the owner knows.
        if record.dropped and not record.children and _CONFIRMED <= record.use < _RELEASING:
            if record.use is _FAILED and record.fork not in self.records:
                return self.released(record)  # `sever` removed it: its owner cannot be reached
            record.use = _RELEASING
            # All but the first release of a tick find their batch here, without a call.
            batch = self.outbox.get(record.owner.incarnation) or self._batch(record.owner)
            batch.releases.append(record)

    def sever(self, owner: bytes) -> None:
        """Fail all forks of an owner for ever: the session with it is lost."""
        for record in [one for one in self.records.values() if one.owner.incarnation == owner]:
            # A creation that was sent in the lost session has failed with it, so one that is still
            # CREATING was not sent in it. A fork that is being released ends with the outcome of
            # its release message.
            if record.use is Use.CREATING or record.use >= _RELEASING:
                continue
            del self.records[record.fork]
            error = OwnerLost(record.owner.name)
            self.answered(record, error)
            # Also where `answered` ignored the error, because the fork was confirmed.
            record.use, record.error = _FAILED, error
            self._release_if_unused(record)

    # ── outbox ──────────────────────────────────────────────────────────────────────────────

    def take(self) -> list[Batch]:
        """Return what has collected, one batch per worker, and begin anew."""
        batches = list(self.outbox.values())
        self.outbox.clear()
        return batches

    def number(self, owner: PeerInfo) -> tuple[int, int]:
        """Return the number of the next fork request to an owner: see `RequestNumbers.issue`."""
        numbers = self._numbers.get(owner.incarnation)
        if numbers is None:
            numbers = self._numbers[owner.incarnation] = RequestNumbers()
        return numbers.issue()

    def close(self, owner: PeerInfo, number: int) -> None:
        """Mark a fork request as answered, or as never to be answered."""
        self._numbers[owner.incarnation].close(number)

    def _batch(self, to: PeerInfo) -> Batch:
        batch = self.outbox.get(to.incarnation)
        if batch is None:
            batch = self.outbox[to.incarnation] = Batch(to)
        return batch
