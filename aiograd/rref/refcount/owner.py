"""The owner's side: which values stay here, and which forks keep them. No I/O.

A value is in the table while somebody else may ask for it: while it has forks, while its function
runs, or while a use has overtaken the creation (*awaited*). Then it leaves the table, and lives on
only if user code here holds it.

Forks are added by the owner itself when it shares, by the creation, and by fork requests; they are
removed by releases. Releases and requests come again after a loss, in any order, and may be copies:

* a release of a fork that is not there is ignored, except that a creator which gave up on its
  creation may be faster than the creation itself: such a fork is remembered, and refused when it
  comes;
* a copy of a fork request must not bring a released fork back, so requests are numbered, and
  every number counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from aiograd.errors import RRefError, RRefExpired, RRefReleased
from aiograd.rpc.directory import LOST_PEERS
from aiograd.rref.refcount.records import BY_CREATOR, Owned, Party, Place, RefId

GIVEN_UP_LIMIT: Final = 65_536
"""Creations that were given up and never came must not pile up; the oldest are forgotten."""


class Requests:
    """Which numbered requests of one sender were taken, in any order and any number of copies."""

    __slots__ = ("_low", "_taken")

    def __init__(self) -> None:
        self._low = 0  # everything below was answered, says the sender
        self._taken: set[int] = set()

    def take(self, number: int, low: int) -> bool:
        """Return whether this is the first copy."""
        if low > self._low:
            self._low = low
            self._taken = {taken for taken in self._taken if taken >= low}
        if number < self._low or number in self._taken:
            return False
        self._taken.add(number)
        return True


class Owning:
    """The values of one worker that others may use."""

    def __init__(self, me: Party) -> None:
        self.me = me
        self.owners: dict[RefId, Owned] = {}
        self._given_up: dict[RefId, None] = {}  # forks released before their creation came
        self._requests: dict[bytes, Requests] = {}  # per incarnation of the sender
        # Creators whose lease ran out: stamp → highest counter among what was taken from them.
        self._expired: dict[int, int] = {}

    # ── creation ────────────────────────────────────────────────────────────────────────────

    def begin_here(self, ref_id: RefId, line: Place) -> Owned:
        """Make room for a value that this worker creates for itself; it is its own first fork."""
        owned = self.owners[ref_id] = Owned(ref_id, line)
        owned.forks[ref_id] = self.me.incarnation
        return owned

    def expect(self, sender: bytes, ref_id: RefId, fork: RefId, line: Place) -> None:
        """The creation has come: its function is going to run here."""
        owned = self.owners.get(ref_id)
        if owned is None:
            owned = self.owners[ref_id] = Owned(ref_id, line)
        owned.line = owned.line if owned.line[0] else line
        owned.making = True
        if fork in self._given_up:
            del self._given_up[fork]
        else:
            owned.forks[fork] = sender

    def made(self, sender: bytes, ref_id: RefId, fork: RefId, line: Place, value: Any) -> None:
        """The creation has come, and its function has run right away: `expect` and `settle`."""
        if ref_id in self.owners or fork in self._given_up:
            self.expect(sender, ref_id, fork, line)
            self.settle(ref_id, value)
        else:
            owned = self.owners[ref_id] = Owned(ref_id, line)
            owned.value, owned.ready = value, True
            owned.forks[fork] = sender

    def settle(self, ref_id: RefId, value: Any, error: Exception | None = None) -> None:
        """The creating function has ended."""
        if (owned := self.owners.get(ref_id)) is None:
            return
        owned.making = False
        owned.settle(value, error)
        self._free(owned)

    # ── sharing ─────────────────────────────────────────────────────────────────────────────

    def share(self, owned: Owned, fork: RefId, holder: bytes) -> None:
        self.owners[owned.id] = owned
        owned.forks[fork] = holder

    def returned(self, ref_id: RefId, known: int, shared_by: str) -> Owned:
        """A user gave the reference to this worker, its owner."""
        owned = self.owners.get(ref_id)
        if owned is None and known == BY_CREATOR and not self._taken(ref_id):
            owned = self.owners[ref_id] = Owned(ref_id)
        if owned is None:
            owned = Owned(ref_id)  # not in the table: nobody can ask for it
            owned.settle(None, self._expiry(shared_by))
        if not owned.ready:
            owned.local += 1
        return owned

    def drop(self, owned: Owned) -> None:
        """User code here let go of a reference that `returned` gave it before it was ready."""
        owned.local -= 1
        self._free(owned)

    def request(
        self, sender: bytes, number: int, low: int, forks: Iterable[tuple[RefId, RefId, int]]
    ) -> list[bool]:
        """A user tells of forks it was given by other users. The answer says which ones count."""
        requests = self._requests.setdefault(sender, Requests())
        if not requests.take(number, low):
            return [self._holds(sender, ref_id, fork) for ref_id, fork, _ in forks]
        return [self._add(sender, ref_id, fork, known) for ref_id, fork, known in forks]

    def _add(self, sender: bytes, ref_id: RefId, fork: RefId, known: int) -> bool:
        owned = self.owners.get(ref_id)
        if owned is None:
            if known != BY_CREATOR or self._taken(ref_id):
                return False
            owned = self.owners[ref_id] = Owned(ref_id)
        owned.forks[fork] = sender
        return True

    def _holds(self, sender: bytes, ref_id: RefId, fork: RefId) -> bool:
        owned = self.owners.get(ref_id)
        return owned is not None and owned.forks.get(fork) == sender

    # ── use ─────────────────────────────────────────────────────────────────────────────────

    def look_up(self, sender: Party, ref_id: RefId, fork: RefId, known: int) -> Owned:
        """Return what `sender` may use by this fork, ready or not; else RRefExpired."""
        owned = self.owners.get(ref_id)
        if owned is not None:
            if owned.forks.get(fork) == sender.incarnation:
                return owned
            awaited = not owned.ready and not owned.making
            if awaited and known == BY_CREATOR and fork not in self._given_up:
                return owned
        elif fork in self._given_up:
            raise RRefReleased(f"{sender.name} has released this reference", sender.name)
        elif known == BY_CREATOR and not self._taken(ref_id):
            owned = self.owners[ref_id] = Owned(ref_id)
            return owned
        raise self._expiry(sender.name)

    def _taken(self, ref_id: RefId) -> bool:
        """Whether an unknown id was reclaimed, rather than not created yet."""
        return ref_id[2] <= self._expired.get(ref_id[1], -1)

    def _expiry(self, user: str) -> RRefExpired:
        return RRefExpired(
            f"{self.me.name} no longer keeps this value for {user}: the reference was given back, "
            f"or {user} was out of reach for longer than Options.lease; create the value again",
            self.me.name,
        )

    # ── letting go ──────────────────────────────────────────────────────────────────────────

    def release(self, releases: Iterable[tuple[RefId, RefId, int]]) -> None:
        """Take forks back. The flag says that the creation was never answered."""
        owners = self.owners
        for ref_id, fork, never_created in releases:
            owned = owners.get(ref_id)
            if owned is None:
                if never_created:
                    self._give_up(fork)
                continue
            forks = owned.forks
            forks.pop(fork, None)
            if not forks and owned.ready and not owned.making:
                del owners[ref_id]
                continue
            if never_created and not owned.making and not owned.ready:
                self._give_up(fork)  # its creation is still on its way, or lost
                owned.given_up = True
            if owned.given_up and not owned.forks and not owned.making:
                owned.settle(None, RRefError("RRef creation was given up", self.me.name))
            self._free(owned)

    def sever(self, incarnation: bytes, ghost: bytes) -> None:
        """A session is lost: what its holder held belongs to a ghost until the lease is over.

        The holder may come back, but not to these: on its side they are lost already."""
        for owned in self.owners.values():
            for fork, holder in owned.forks.items():
                if holder == incarnation:
                    owned.forks[fork] = ghost
        self._requests.pop(incarnation, None)  # no copy of one comes in another session

    def reclaim(self, ghost: bytes) -> None:
        """The lease of a lost holder is over: take back all it held."""
        for owned in list(self.owners.values()):
            forks = [fork for fork, who in owned.forks.items() if who == ghost]
            for fork in forks:
                del owned.forks[fork]
            if forks:
                self._free(owned)

    def expire(self, creator: Party, last: int | None = None) -> None:
        """Creations of this worker that are not here never come: all, or those up to an id."""
        stamp = creator.stamp
        for fork in [fork for fork in self._given_up if fork[1] == stamp]:
            if last is None or fork[2] <= last:
                del self._given_up[fork]
        theirs = [owned for owned in self.owners.values() if owned.id[1] == stamp]
        if last is not None:
            theirs = [owned for owned in theirs if owned.id[2] <= last]
        for owned in theirs:
            if not owned.ready and not owned.making:
                why = f"RRef creation never came: {creator.name}, which asked for it, is gone"
                owned.settle(None, RRefError(why, creator.name))
            self._free(owned)
        if last is None:
            last = max((owned.id[2] for owned in theirs), default=-1)
        self._expired[stamp] = max(last, self._expired.pop(stamp, -1))
        if len(self._expired) > 2 * LOST_PEERS:
            del self._expired[next(iter(self._expired))]

    def _give_up(self, fork: RefId) -> None:
        while len(self._given_up) >= GIVEN_UP_LIMIT:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[fork] = None

    def _free(self, owned: Owned) -> None:
        if owned.forks or owned.making:
            return
        if owned.ready or not (owned.local or owned.waiters):  # a late creation makes its own room
            self.owners.pop(owned.id, None)

    def leaks(self) -> Sequence[Owned]:
        """What somebody else still keeps alive here."""
        return [owned for owned in self.owners.values() if owned.forks]
