"""Who belongs to the cluster: the coordinator's book-keeping, without I/O.

One worker, the coordinator, keeps the `Membership`. Joins, leaves and losses go in; what to answer
and whom to tell comes out. Every change has a number, so that a member can see that it missed one.
`members.py` carries the decisions over the wire; `worker.py` says who the coordinator is.

    join(b) ─▶ [Announce(update 7: b joined, to a c), Admit(b)]
    join(b) ─▶ [Refuse(b, "there is already a worker named b …")]
    lost(c) ─▶ [Announce(update 8: c lost, to a b)]

A *static* cluster has a fixed size: nobody is admitted before everybody is there, and a mistake in
one worker's name, rank or world size ends the start for all, since that world can never be
complete. The verdict then stands: whoever comes later is told the same. An *open* cluster admits
whoever comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

__all__ = ["Admit", "Announce", "Membership", "Refuse", "Roster", "Update"]


class Peer(Protocol):
    """What membership needs to know of a worker; `rpc.PeerInfo` is one."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def incarnation(self) -> bytes: ...


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
    """Answer this joiner with the roster; it is a member now."""

    peer: P


@dataclass(frozen=True, slots=True)
class Refuse(Generic[P]):
    """Answer this joiner, or tell the coordinator itself, that it cannot take part."""

    peer: P
    why: str


@dataclass(frozen=True, slots=True)
class Announce(Generic[P]):
    """Tell these members about a change."""

    update: Update[P]
    to: tuple[P, ...] = field(default=())


Action = Admit[P] | Refuse[P] | Announce[P]


class Membership(Generic[P]):
    """The coordinator's view of the cluster, which is the one that counts."""

    def __init__(self, own: P, world_size: int | None) -> None:
        self.own = own
        self.world_size = world_size  # None: open
        self.version = 0
        self.members: dict[str, P] = {}  # those who are here
        self.waiting: dict[str, P] = {}  # static: those who came before the world was complete
        self._ranks_given = own.rank  # the highest rank ever seen: new ones come after it
        self.verdict: str | None = None  # static: why this start was refused
        self.refused: dict[bytes, P] = {}  # static: those to whom the verdict was told
        self._largest = world_size or 0  # world size that anybody of a refused start expects

    def roster(self) -> tuple[int, tuple[P, ...]]:
        """Give the current version and its members, in order of rank."""
        return self.version, tuple(sorted(self.members.values(), key=lambda peer: peer.rank))

    def missing(self) -> list[int]:
        """List the ranks that a static world still waits for."""
        there = {peer.rank for peer in (*self.waiting.values(), *self.members.values())}
        return [rank for rank in range(self.world_size or 0) if rank not in there]

    def next_rank(self) -> int:
        """Set a rank aside that nobody ever had."""
        self._ranks_given += 1
        return self._ranks_given

    def start(self) -> list[Action[P]]:
        """Begin with the coordinator itself."""
        return self.join(self.own, self.world_size)

    def join(self, peer: P, world_size: int | None) -> list[Action[P]]:
        """Take a worker in, now or when the world is complete, or say why not."""
        if self._known(peer):
            # A join that is sent again because its answer was lost changes nothing.
            return [Admit(peer)] if peer.name in self.members else []
        clash = self._other_kind(peer, world_size)
        if clash is None:
            self._ranks_given = max(self._ranks_given, peer.rank)
            clash = self._clash(peer)
        if self.world_size is not None and not self.members:
            self._largest = max(self._largest, world_size or 0)
            return self._assemble(peer, clash)
        if clash:
            return [Refuse(peer, clash)]
        if self.world_size is None:
            return self._admit(peer)
        if peer.rank >= self.world_size:
            return [Refuse(peer, f"rank {peer.rank} is not in a world of {self.world_size}")]
        return self._admit(peer)  # somebody is gone, and this is the restart

    def leave(self, incarnation: bytes) -> list[Action[P]]:
        """Let a worker go that said goodbye."""
        peer = self._remove(incarnation)
        return [self._announce(left=(peer,))] if peer else []

    def lost(self, incarnation: bytes, why: str) -> list[Action[P]]:
        """Strike out a worker that is gone without a word."""
        peer = self._remove(incarnation)
        return [self._announce(lost=((peer, why),))] if peer else []

    def give_up(self, why: str) -> list[Action[P]]:
        """End a start that takes too long; nobody else is expected any more."""
        self._largest = 0
        return self._refuse(list(self.waiting.values()), why)

    def to_come(self) -> int:
        """Count the workers of a refused start that have not come yet, if all are going to."""
        return max(self._largest - len(self.refused), 0)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    def _known(self, peer: P) -> bool:
        known = self.members.get(peer.name) or self.waiting.get(peer.name)
        return known is not None and known.incarnation == peer.incarnation

    def _other_kind(self, peer: P, world_size: int | None) -> str | None:
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
            if other.name.lower() == peer.name.lower():
                # One of them in a mode or a certificate is soon taken for the other.
                return (
                    f"worker names must differ in more than case: {other.name!r} is rank "
                    f"{other.rank}, and {peer.name!r} is rank {peer.rank}"
                )
            if other.rank == peer.rank:
                names = f"{other.name!r} and {peer.name!r}"
                return f"ranks must be unique: {names} both have rank {peer.rank}"
        return None

    def _assemble(self, peer: P, clash: str | None) -> list[Action[P]]:
        assert self.world_size is not None
        if not clash and peer.rank >= self.world_size:
            clash = f"rank {peer.rank} of {peer.name!r} is not in a world of {self.world_size}"
        everyone = [*self.waiting.values(), peer]
        if self.verdict is not None or clash:
            return self._refuse(everyone, self.verdict or clash or "")
        self.waiting[peer.name] = peer
        if len(everyone) < self.world_size:
            return []
        self.members, self.waiting = self.waiting, {}
        self.version += 1
        return [Admit(other) for other in everyone]

    def _refuse(self, peers: list[P], why: str) -> list[Action[P]]:
        self.verdict = why
        self.waiting.clear()
        self.refused.update({peer.incarnation: peer for peer in peers})
        return [Refuse(peer, why) for peer in peers]

    def _admit(self, peer: P) -> list[Action[P]]:
        announce = self._announce(joined=(peer,))
        self.members[peer.name] = peer
        return [announce, Admit(peer)]

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
                    return None if peers is self.waiting else peer
        return None


class Roster(Generic[P]):
    """A member's copy of the membership."""

    def __init__(self) -> None:
        self.version = 0  # 0: not a member yet
        self.members: dict[str, P] = {}

    def reset(self, version: int, members: Iterable[P]) -> Update[P] | None:
        """Take over a whole roster; gives what it changes, None if it is not newer."""
        if version <= self.version:
            return None
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
        """Follow one change; "gap" when one before it was missed, and the roster is needed."""
        if self.version == 0 or update.version <= self.version:
            return "known"  # the roster that comes, or came, has it already
        if update.version > self.version + 1:
            return "gap"
        self.version = update.version
        for peer in (*update.left, *(peer for peer, _ in update.lost)):
            known = self.members.get(peer.name)
            if known is not None and known.incarnation == peer.incarnation:
                del self.members[peer.name]
        for peer in update.joined:
            self.members[peer.name] = peer
        return "applied"
