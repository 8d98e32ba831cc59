"""The directory: names, ranks, incarnations and addresses of the members of a cluster.

    WorkerInfo   name and rank: what users see
    To           what means a worker in a call: a name, a rank, or an object with both
    PeerInfo     one start of a worker: with incarnation, addresses and restrictions
    Directory    PeerInfo by name and by rank; the cluster layer fills it

A name or a rank means its present holder. Everything that must survive a restart of that worker, or
notice it, keeps the incarnation: 16 bytes per start, half of them random, half a hash of those
and the name (`wire.handshake.make_incarnation`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from aiograd._html import BLUE, card, code, quiet, table
from aiograd.errors import MalformedName, UnknownWorker
from aiograd.wire.names import check_name, is_name

# Lost peers that each registry of them remembers; older ones count as unknown. A long life must not
# grow with every death in it.
LOST_PEERS: Final = 1000


K = TypeVar("K")


def forget_one(table: dict[K, Any], name_of: Callable[[K], str]) -> K:
    """Forget the oldest entry of the name that has the most, and return its key.

    A worker that comes and goes in a thousand incarnations pushes out entries of its own only.
    """
    counts = Counter(map(name_of, table))
    most = max(counts, key=counts.__getitem__)  # of several, the one with the oldest entry
    oldest = next(key for key in table if name_of(key) == most)
    del table[oldest]
    return oldest


@functools.total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A worker's name and rank, in the order of ranks.

    `suspect`: in `ag.workers()`, whether it is silent, its connection being made again, or lost:
    then the next call to it begins a new session, if it can be reached. `host` is the name of the
    machine that it runs on, and `labels` are what `ag.join` was given or an engine knows; both are
    empty where nobody has said.

        >>> info = ag.get_worker_info("worker1")
        >>> info == ag.WorkerInfo("worker1", 1)
        True
        >>> await ag.rpc_async(info, abs, args=(-3,))
        3
    """

    name: str
    rank: int
    # States and circumstances, not an identity: the same worker is equal, and hashes alike, in all.
    suspect: bool = field(default=False, compare=False)
    host: str = field(default="", compare=False)
    labels: dict[str, str] = field(default_factory=dict, compare=False)

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


class WorkerList(list[WorkerInfo]):
    """A list of workers that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = [
            (code(info.name), str(info.rank), "suspect" if info.suspect else "") for info in self
        ]
        title = f"<b>workers</b> {quiet(f'· {len(self)}')}"
        return card(BLUE, title, table(rows, ("name", "rank", "")) if rows else "")


class Addressee(Protocol):
    """What means a worker by its attributes: a WorkerInfo, or a handle of a cluster."""

    @property
    def name(self) -> str:
        """The name of the worker."""
        ...

    @property
    def rank(self) -> int:
        """The rank of the worker."""
        ...


To: TypeAlias = str | int | Addressee


class Whereabouts(NamedTuple):
    """Where a worker runs; fields of its `PeerInfo`."""

    host: str = ""
    locality: str = ""
    labels: tuple[str, ...] = ()


NOWHERE: Final = Whereabouts()


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A member as the library knows it: one start of one worker, and where it listens."""

    name: str
    rank: int
    incarnation: bytes
    addresses: tuple[str, ...] = ()
    restricted: bool = False  # speaks plain data only
    exceptions: tuple[str, ...] = ()  # names of workers for which `restricted` is the opposite
    host: str = ""  # the name of its machine, for people
    locality: str = ""  # equal where loopback and Unix sockets are shared; see `interfaces.py`
    labels: tuple[str, ...] = ()  # "key=value"

    @property
    def info(self) -> WorkerInfo:
        """The worker as users see it."""
        return self.info_as(suspect=False)

    def info_as(self, *, suspect: bool) -> WorkerInfo:
        """The worker as users see it, silent or not."""
        labels = dict(label.split("=", 1) for label in self.labels)
        return WorkerInfo(self.name, self.rank, suspect, self.host, labels)

    def shares_loopback(self, other: PeerInfo) -> bool:
        """Whether loopback and Unix sockets of the two lead to the same place; yes if unknown."""
        return not self.locality or not other.locality or self.locality == other.locality

    def __reduce__(self) -> Any:
        # Every newcomer gets the whole roster, so a start of n workers pickles n² of these. What
        # dataclasses do for slots takes three times as long, at both ends.
        values = (self.name, self.rank, self.incarnation, self.addresses)
        where = self.host, self.locality, self.labels
        return PeerInfo, (*values, self.restricted, self.exceptions, *where)

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
        self.changed: Callable[[], object] = lambda: None  # called after every change

    def add(self, peer: PeerInfo) -> None:
        """Add a member, or replace the one of that name (a restart has another incarnation)."""
        # Removed first: a restarted worker may have another rank, and its old one must not stay.
        self.remove(peer.name)
        self.members[peer.name] = self._by_rank[peer.rank] = peer
        self.changed()

    def remove(self, name: str) -> None:
        """Remove the member of that name, if there is one."""
        peer = self.members.pop(name, None)
        if peer is not None:
            # A replacement of another name may hold the rank already.
            if self._by_rank.get(peer.rank) is peer:
                del self._by_rank[peer.rank]
            self.changed()

    def get(self, name_or_rank: str | int) -> PeerInfo | None:
        """Return the member of that name or rank; None if there is none."""
        if isinstance(name_or_rank, str):
            return self.members.get(name_or_rank)
        return self._by_rank.get(name_or_rank)

    def name_of(self, incarnation: bytes) -> str | None:
        """Return the name of the member with this incarnation; None if there is none."""
        return next((p.name for p in self.members.values() if p.incarnation == incarnation), None)

    def find(self, to: Any) -> PeerInfo:
        """Return the member that `to` means: a name, a rank, or an object with a `.name`.

        UnknownWorker if there is none, ValueError or TypeError if `to` cannot mean one.
        """
        if isinstance(to, bool | float):  # they compare equal to ranks: `workers[True]` is a slip
            raise ValueError(f"{to!r} is no rank")
        if isinstance(to, str | int):
            peer = self.get(to)
        elif isinstance(name := getattr(to, "name", None), str):
            peer = self.members.get(name)
            rank = getattr(to, "rank", None)
            if peer is not None and isinstance(rank, int) and rank != peer.rank:
                peer = None  # a WorkerInfo of an earlier holder of the name
        else:
            raise TypeError(
                f"a worker is meant by its name, rank or WorkerInfo, not by {type(to).__name__}"
            )
        if peer is None:
            # Both errors are UnknownWorker; the second also says what a name looks like.
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
