"""The membership of a cluster: the coordinator's decisions and a member's copy, without I/O.

One worker, the coordinator, keeps the `Membership`. Joins, leaves and losses go in; replies and
announcements come out. Every change has a version number, so that a member can see that it missed
one; its upper bits are the term of the coordinator (`succession.py`). Each member has a `Roster`.
`coordinator.py` and `member.py` carry both over the wire.

    join(b) ─▶ [Announce(update 7: b joined, to a c), Admit(b)]
    join(b) ─▶ [Refuse(b, "there is already a worker named b …")]
    join(b, hold=True), join(d, hold=True) ─▶ []
    admit_held() ─▶ [Announce(update 8: b and d joined, to a c), Admit(b), Admit(d)]
    lost(c) ─▶ [Announce(update 9: c lost, to a b d)]

A *static* cluster has a fixed size: no worker is admitted before all are there, and a mistake in
one worker's name, rank or world size ends the start for all, since that world can never be
complete. The refusal then stands: a worker that joins later is refused for the same reason. An
*open* cluster admits workers as they come; those that come while others are being announced are
held, and announced together. Else n workers that start at once would take n announcements to up to
n members each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, Protocol, TypeVar

from aiograd.wire.names import RANKS, look_alike

__all__ = [
    "RANKS",
    "Admit",
    "Announce",
    "Membership",
    "Refuse",
    "Roster",
    "Update",
    "first_version",
    "term_of",
]


_TERM: Final = 32  # bits of a version that count changes within a term
MARGIN = 16  # ranks that a successor leaves out: newcomers may have got them and not joined yet


def first_version(term: int) -> int:
    """Return the version of the first roster of a term; all of earlier terms are lower."""
    return (term << _TERM) + 1


def term_of(version: int) -> int:
    """Return the term of the coordinator that announced a version."""
    return version >> _TERM


class Peer(Protocol):
    """What membership needs to know of a worker; `rpc.PeerInfo` is one."""

    @property
    def name(self) -> str:
        """Unique in the cluster; no two names look alike."""

    @property
    def rank(self) -> int:
        """Unique in the cluster."""

    @property
    def incarnation(self) -> bytes:
        """Tells one start of a worker from the next one of the same name."""


P = TypeVar("P", bound=Peer)


@dataclass(frozen=True, slots=True)
class Update(Generic[P]):
    """One change of the membership; `version` counts them."""

    version: int
    joined: tuple[P, ...] = ()
    left: tuple[P, ...] = ()
    lost: tuple[tuple[P, str], ...] = ()  # with the reason


@dataclass(frozen=True, slots=True)
class Admit(Generic[P]):
    """Reply to this newcomer with the roster; it is a member now."""

    peer: P


@dataclass(frozen=True, slots=True)
class Refuse(Generic[P]):
    """Reply to this newcomer, or to the coordinator itself, that it cannot take part."""

    peer: P
    why: str


@dataclass(frozen=True, slots=True)
class Announce(Generic[P]):
    """Send a change to these members."""

    update: Update[P]
    to: tuple[P, ...] = field(default=())


Action = Admit[P] | Refuse[P] | Announce[P]


class Membership(Generic[P]):
    """The coordinator's view of the cluster, which is authoritative."""

    def __init__(self, own: P, world_size: int | None) -> None:
        self.own = own
        self.world_size = world_size  # None: open
        self.version: int = 0
        self.members: dict[str, P] = {}  # by name
        # Newcomers: static, until the world is complete; else those that are held.
        self.waiting: dict[str, P] = {}
        self._highest_rank = own.rank  # ever seen or given out: new ranks come after it
        self._reserved: dict[str, int] = {}  # ranks given out, by name
        # Ranks that partners chose themselves, the latest of each name. They do not count for
        # `_highest_rank`: one that comes with the last rank would leave none for others.
        self._chosen: dict[str, int] = {}
        self.refusal: str | None = None  # static: why this start was refused
        self.refused: dict[bytes, P] = {}  # static: workers that were refused, by incarnation
        # The largest world size that a worker of a refused start expects: so many may still come.
        self._largest = world_size or 0

    @classmethod
    def inherit(cls, own: P, version: int, members: Iterable[P], highest: int) -> Membership[P]:
        """Go on with the open cluster of a coordinator that was lost; see `succession.py`."""
        made = cls(own, None)
        made.version = version
        made.members = {peer.name: peer for peer in members}
        # A rank that was given out and has not joined yet may be lost; it is not used twice.
        made._highest_rank = min(max(highest, own.rank) + MARGIN, RANKS - 1)
        return made

    @property
    def highest_rank(self) -> int:
        """The highest rank ever seen or given out."""
        return self._highest_rank

    def skip_terms(self, count: int) -> list[Action[P]]:
        """Go on in a later term; see `succession.py`."""
        # Nothing has changed, but members see the gap in the versions and ask for the roster.
        self.version = first_version(term_of(self.version) + count)
        return [self._announce()]

    def roster(self) -> tuple[int, tuple[P, ...]]:
        """Give the current version and its members, in order of rank."""
        return self.version, tuple(sorted(self.members.values(), key=lambda peer: peer.rank))

    def missing(self) -> list[int]:
        """List the ranks that a static world still waits for."""
        there = {peer.rank for peer in (*self.waiting.values(), *self.members.values())}
        return [rank for rank in range(self.world_size or 0) if rank not in there]

    def next_rank(self, name: str) -> int | None:
        """Reserve a rank for a worker of this name; None if there is none left.

        A name has one rank, however often it asks: ranks are few, and a worker that comes again
        and again must not use them up.
        """
        rank = self._reserved.get(name)
        taken = rank is None or any(
            other.rank == rank and other.name != name
            for other in (*self.members.values(), *self.waiting.values())
        )
        if not taken:
            return rank
        rank = self._next_free()
        if rank is not None:
            self._reserved[name] = rank
        return rank

    def _next_free(self) -> int | None:
        taken = {peer.rank for peer in (*self.members.values(), *self.waiting.values())}
        taken.update(self._chosen.values())
        while self._highest_rank + 1 < RANKS:
            self._highest_rank += 1
            if self._highest_rank not in taken:
                return self._highest_rank
        return None

    def next_place(self) -> tuple[str, int] | None:
        """Reserve a name and a rank for a worker that has neither; None if no rank is left."""
        while (rank := self._next_free()) is not None:
            name = f"worker{rank}"
            taken = (*self.members, *self.waiting, *self._reserved)
            if not any(look_alike(name, other) for other in taken):
                self._reserved[name] = rank
                return name, rank
        return None

    def start(self) -> list[Action[P]]:
        """Let the coordinator itself join."""
        return self.join(self.own, self.world_size)

    def join(
        self, peer: P, world_size: int | None, *, hold: bool = False, partner: bool = False
    ) -> list[Action[P]]:
        """Admit a worker, now or when the world is complete, or refuse it.

        Gives no action while a static world is incomplete, nor if the worker could be admitted and
        is held: then `admit_held` does. `partner`: it is not trusted, and may choose any rank.
        """
        if self._known(peer):
            # A join that is sent again because its reply was lost changes nothing.
            return [Admit(peer)] if peer.name in self.members else []
        clash = self._other_kind(peer, world_size)
        if not 0 <= peer.rank < RANKS:
            return [Refuse(peer, f"ranks are 0 to {RANKS - 1}, not {peer.rank}")]
        if clash is None:
            clash = self._clash(peer)
            if partner:
                self._choose(peer)
            else:
                self._highest_rank = max(self._highest_rank, peer.rank)
        # A static world that has not started yet: one mistake ends the start for all. Not that of a
        # partner, which may make it on purpose.
        if self.world_size is not None and partner and not clash and peer.rank >= self.world_size:
            clash = f"rank {peer.rank} of {peer.name!r} is not in a world of {self.world_size}"
        if self.world_size is not None and not self.members and not (partner and clash):
            self._largest = max(self._largest, world_size or 0)
            return self._assemble(peer, clash)
        # A running cluster goes on: the mistake is that of the newcomer alone.
        if clash:
            return [Refuse(peer, clash)]
        # In a static world, name and rank are free, so their worker is gone: this is its restart.
        if self.world_size is not None and peer.rank >= self.world_size:
            return [Refuse(peer, f"rank {peer.rank} is not in a world of {self.world_size}")]
        self.waiting[peer.name] = peer
        return [] if hold else self.admit_held()

    @property
    def held(self) -> bool:
        """Whether workers wait for `admit_held`, not for a static world that is incomplete."""
        return bool(self.waiting) and (bool(self.members) or self.world_size is None)

    def admit_held(self) -> list[Action[P]]:
        """Admit the workers that were held, by one announcement."""
        if not self.held:
            return []
        newcomers, self.waiting = tuple(self.waiting.values()), {}
        announce = self._announce(joined=newcomers)  # before they are added: to the others only
        self.members.update({peer.name: peer for peer in newcomers})
        return [announce, *(Admit(peer) for peer in newcomers)]

    def leave(self, incarnation: bytes) -> list[Action[P]]:
        """Remove a worker that has said that it leaves."""
        peer = self._remove(incarnation)
        return [self._announce(left=(peer,))] if peer else []

    def lost(self, incarnation: bytes, why: str) -> list[Action[P]]:
        """Remove a worker whose connection or process is gone."""
        return self.lost_all([(incarnation, why)])

    def lost_all(self, losses: Iterable[tuple[bytes, str]]) -> list[Action[P]]:
        """Remove several of them by one announcement."""
        gone = [(self._remove(incarnation), why) for incarnation, why in losses]
        lost = tuple((peer, why) for peer, why in gone if peer is not None)
        return [self._announce(lost=lost)] if lost else []

    def give_up(self, why: str) -> list[Action[P]]:
        """Refuse a start that takes too long."""
        self._largest = 0  # the late ranks are what was waited for: do not stay for them as well
        return self._refuse(list(self.waiting.values()), why)

    def to_come(self) -> int:
        """Count the workers of a refused start that may still come, and need the reason."""
        return max(self._largest - len(self.refused), 0)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _known(self, peer: P) -> bool:
        known = self.members.get(peer.name) or self.waiting.get(peer.name)
        return known is not None and known.incarnation == peer.incarnation

    def _choose(self, peer: P) -> None:
        self._chosen.pop(peer.name, None)
        self._chosen[peer.name] = peer.rank
        if len(self._chosen) > RANKS // 2:
            del self._chosen[next(iter(self._chosen))]

    def _other_kind(self, peer: P, world_size: int | None) -> str | None:
        # Both values are named, because either worker may be the one that is wrong.
        if world_size == self.world_size:
            return None

        def expects(who: P, size: int | None) -> str:
            kind = (
                "an open cluster (no world size)" if size is None else f"a static world of {size}"
            )
            return f"{who.name!r} (rank {who.rank}) expects {kind}"

        return (
            f"world sizes must be equal: {expects(self.own, self.world_size)}, and "
            f"{expects(peer, world_size)}; give the same world_size to all workers, or none"
        )

    def _clash(self, peer: P) -> str | None:
        for other in (*self.members.values(), *self.waiting.values()):
            if other.name == peer.name:
                first, second = sorted((other.rank, peer.rank))
                ranks = f"ranks {first} and {second}"
                return f"worker names must be unique: {peer.name!r} is the name of {ranks}"
            if look_alike(other.name, peer.name):
                # A mode or a certificate for one of them would be read as one for the other.
                return (
                    f"worker names must differ in more than case and characters that look alike: "
                    f"{other.name!r} is rank {other.rank}, and {peer.name!r} is rank {peer.rank}"
                )
            if other.rank == peer.rank:
                names = f"{other.name!r} and {peer.name!r}"
                return f"ranks must be unique: {names} both have rank {peer.rank}"
        return None

    def _assemble(self, peer: P, clash: str | None) -> list[Action[P]]:
        """Let a worker wait for a static world; admit all when it is complete."""
        assert self.world_size is not None
        if not clash and peer.rank >= self.world_size:
            clash = f"rank {peer.rank} of {peer.name!r} is not in a world of {self.world_size}"
        # The first refusal stands, so that all ranks report the same reason.
        everyone = [*self.waiting.values(), peer]
        if self.refusal is not None or clash:
            return self._refuse(everyone, self.refusal or clash or "")
        self.waiting[peer.name] = peer
        if len(everyone) < self.world_size:
            return []
        self.members, self.waiting = self.waiting, {}
        self.version += 1
        return [Admit(other) for other in everyone]

    def _refuse(self, peers: list[P], why: str) -> list[Action[P]]:
        self.refusal = why
        self.waiting.clear()
        # By incarnation: duplicates share a name or a rank, and each of them counts.
        self.refused.update({peer.incarnation: peer for peer in peers})
        while len(self.refused) > RANKS:  # a partner may come in any number of incarnations
            del self.refused[next(iter(self.refused))]
        return [Refuse(peer, why) for peer in peers]

    def _announce(
        self,
        joined: tuple[P, ...] = (),
        left: tuple[P, ...] = (),
        lost: tuple[tuple[P, str], ...] = (),
    ) -> Announce[P]:
        self.version += 1
        return Announce(Update(self.version, joined, left, lost), tuple(self.members.values()))

    def _remove(self, incarnation: bytes) -> P | None:
        for peers in (self.waiting, self.members):
            for name, peer in peers.items():
                if peer.incarnation == incarnation:
                    del peers[name]
                    # One that only waited was never announced, so nobody needs the news.
                    return None if peers is self.waiting else peer
        return None


class Roster(Generic[P]):
    """A member's copy of the membership."""

    def __init__(self) -> None:
        self.version: int = 0  # 0: not a member yet
        self.members: dict[str, P] = {}

    def reset(self, version: int, members: Iterable[P]) -> Update[P] | None:
        """Replace the roster by another one; gives what that changes, None if it is not newer."""
        # An older roster may arrive after an update that it does not have.
        if version <= self.version:
            return None
        # By incarnation, not by name: a worker may have been restarted in between.
        known = {peer.incarnation for peer in self.members.values()}
        new = {peer.name: peer for peer in members}
        here = {peer.incarnation for peer in new.values()}
        change = Update(
            version,
            joined=tuple(peer for peer in new.values() if peer.incarnation not in known),
            left=tuple(peer for peer in self.members.values() if peer.incarnation not in here),
        )
        self.version, self.members = version, new
        return change

    def apply(self, update: Update[P]) -> Literal["applied", "known", "gap"]:
        """Apply one change; "gap" if one before it was missed, and the whole roster is needed."""
        # Before the first roster (version 0) too: the roster that is on its way includes it.
        if self.version == 0 or update.version <= self.version:
            return "known"
        if update.version > self.version + 1:
            return "gap"
        self.version = update.version
        for peer in (*update.left, *(peer for peer, _ in update.lost)):
            # A later start may have the name by now, and must stay.
            known = self.members.get(peer.name)
            if known is not None and known.incarnation == peer.incarnation:
                del self.members[peer.name]
        for peer in update.joined:
            self.members[peer.name] = peer
        return "applied"
