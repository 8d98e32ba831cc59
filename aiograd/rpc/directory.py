"""Who is there: names, ranks, incarnations and addresses of the members of a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aiograd._html import BLUE, card, code, quiet
from aiograd.errors import MalformedName, UnknownWorker
from aiograd.wire.names import check_name, is_name

LOST_PEERS: Final = 1000  # remembered as such, by whoever has to; older ones are unknown


@functools.total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A worker's name and rank, in the order of ranks.

    `suspect`: in `ag.workers()`, whether it is silent, its connection being made again, or lost:
    then the next call to it begins a new session, if it can be reached."""

    name: str
    rank: int
    suspect: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)

    def __lt__(self, other: Any) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return (self.rank, self.name) < (other.rank, other.name)

    def __repr__(self) -> str:
        mark = ", suspect=True" if self.suspect else ""
        return f"WorkerInfo(name={self.name!r}, rank={self.rank!r}{mark})"

    def _repr_html_(self) -> str:
        mark = " · suspect" if self.suspect else ""
        rank = quiet(f"· rank {self.rank}{mark}")
        return card(BLUE, f"<b>worker</b> {code(self.name)} {rank}")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A member as the machinery knows it: one start of one worker, and where it listens."""

    name: str
    rank: int
    incarnation: bytes
    addresses: tuple[str, ...] = ()
    restricted: bool = False  # speaks plain data only
    exceptions: tuple[str, ...] = ()  # names of those for whom it is the other way round

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.rank)

    @property
    def identity(self) -> tuple[str, int, bytes]:
        """Name, rank and incarnation, which tell it from every other start of a worker."""
        return self.name, self.rank, self.incarnation

    def restricts(self, name: str) -> bool:
        """Whether it speaks plain data only with the worker of this name."""
        return self.restricted != (name in self.exceptions)


class Directory:
    """The members, by name and by rank. The cluster layer fills it."""

    def __init__(self) -> None:
        self.members: dict[str, PeerInfo] = {}  # by name
        self._by_rank: dict[int, PeerInfo] = {}
        self.changed: Callable[[], object] = lambda: None  # told of every change

    def add(self, peer: PeerInfo) -> None:
        """Add a member, or replace the one of that name (a restart has another incarnation)."""
        self.remove(peer.name)
        self.members[peer.name] = self._by_rank[peer.rank] = peer
        self.changed()

    def remove(self, name: str) -> None:
        peer = self.members.pop(name, None)
        if peer is not None:
            if self._by_rank.get(peer.rank) is peer:
                del self._by_rank[peer.rank]
            self.changed()

    def get(self, name_or_rank: str | int) -> PeerInfo | None:
        if isinstance(name_or_rank, str):
            return self.members.get(name_or_rank)
        return self._by_rank.get(name_or_rank)

    def name_of(self, incarnation: bytes) -> str | None:
        """Whose incarnation this is, if it is a member's."""
        return next((p.name for p in self.members.values() if p.incarnation == incarnation), None)

    def find(self, to: Any) -> PeerInfo:
        """The member that `to` means: a name, a rank, or anything with a `.name`."""
        if isinstance(to, bool | float):
            raise ValueError(f"{to!r} is no rank")
        if isinstance(to, str | int):
            peer = self.get(to)
        elif isinstance(name := getattr(to, "name", None), str):
            peer = self.members.get(name)
            rank = getattr(to, "rank", None)
            if peer is not None and isinstance(rank, int) and rank != peer.rank:
                peer = None  # the same name, but another worker is meant
        else:
            raise TypeError(
                f"a worker is meant by its name, rank or WorkerInfo, not by {type(to).__name__}"
            )
        if peer is None:
            malformed = isinstance(to, str) and not is_name(to)
            unknown = MalformedName if malformed else UnknownWorker
            raise unknown(str(getattr(to, "name", to)), tuple(self.members))
        return peer

    @property
    def has_partners(self) -> bool:
        """Whether some member speaks plain data only."""
        return any(peer.restricted or peer.exceptions for peer in self.members.values())

    def __iter__(self) -> Iterator[PeerInfo]:
        return iter(sorted(self.members.values(), key=lambda peer: peer.rank))

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, name: object) -> bool:
        return name in self.members
