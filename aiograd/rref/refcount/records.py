"""What one worker remembers about a reference: `Owned` where the value is, `Held` where it is used.

Plain records without behaviour of their own; `owning`, `using` and `protocol` move them from state
to state. An `RRef` that user code sees wraps exactly one of them.

Ids of references and of forks come from one counter per worker, so they tell the order in which
things were made. They carry the first 64 bits of the maker's incarnation: an id of a worker that
was restarted under its old name never equals one of its predecessor.

Where user code made references: the same few lines again and again.

An owner names the line when a value was never given back. It is told with every creation, so both
sides remember what they have seen: the creator the bytes of a place, the owner what they mean.
"""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, NamedTuple, TypeVar

RefId = tuple[int, int, int]
"""(rank of the maker, first 64 bits of its incarnation, counter); of a reference or of a fork."""

ForkData = tuple[str, int, bytes, RefId, RefId, int]
"""A reference on its way: owner's name, rank and incarnation, reference, fork, who shared it."""

Place = tuple[str, int]
"""File and line where user code made a reference."""

# Who shared it: decides what an owner that does not know the id may conclude.
BY_OWNER: Final = 2  # the fork is already registered
BY_CONFIRMED: Final = 1  # the owner knew the sharer, so an unknown id was given up
BY_CREATOR: Final = 0  # the creation may still be on its way


NOWHERE: Final[Place] = ("", 0)

Wakes = list[Callable[[], None]] | tuple[()]
"""Who wants to be told of something. Most references live without any of them."""


def join(wakes: Wakes, wake: Callable[[], None]) -> Wakes:
    """`record.on_… = join(record.on_…, wake)`"""
    if not isinstance(wakes, list):
        return [wake]
    wakes.append(wake)
    return wakes


class Party(NamedTuple):
    """One start of one worker."""

    name: str
    rank: int
    incarnation: bytes

    @property
    def stamp(self) -> int:
        return stamp_of(self.incarnation)


@functools.lru_cache(1024)
def stamp_of(incarnation: bytes) -> int:
    """What ids carry of an incarnation."""
    return int.from_bytes(incarnation[:8], "big")


class Use(IntEnum):
    """The life of a `Held` reference."""

    CREATING = 0  # made by remote(), the owner has not answered
    CONFIRMING = 1  # came from another user, the owner has not been told
    CONFIRMED = 2
    FAILED = 3  # creation or confirmation went wrong; `error` says how
    RELEASING = 4  # the owner has been told, or will be in this tick
    RELEASED = 5


# On the way of every reference: an attribute of an enum is looked up slowly.
CREATING: Final = Use.CREATING
_CONFIRMING: Final = Use.CONFIRMING
_CONFIRMED: Final = Use.CONFIRMED


class Owned:
    """A value that stays here, with the forks that keep it."""

    __slots__ = (
        "doubt",
        "error",
        "forks",
        "given_up",
        "id",
        "line",
        "local",
        "making",
        "on_answered",
        "ready",
        "trace",
        "value",
        "waiters",
    )

    def __init__(self, ref_id: RefId, line: Place = NOWHERE) -> None:
        self.id = ref_id
        self.line = line  # where user code made it
        self.value: Any = None
        self.error: Exception | None = None  # the outcome instead of a value
        self.trace: TracebackType | None = None  # of the error, as it came
        self.ready = False  # value or error is there
        self.making = False  # its function is here and has not ended
        self.given_up = False  # its creator has given it back before the creation came
        self.local = 0  # references here that were given back before the creation came
        self.on_answered: Wakes = ()  # called once: our own creation ended
        self.doubt: Exception | None = None  # why the creator here gave up waiting
        self.forks: dict[RefId, bytes] = {}  # fork → incarnation of its holder
        self.waiters: dict[object, Callable[[], None]] = {}  # who waits → called when ready

    def settle(self, value: Any, error: Exception | None) -> None:
        """Give the outcome, once, and wake who waits for it."""
        if self.ready:
            return
        self.value, self.error, self.ready = value, error, True
        if error is not None:
            self.trace = error.__traceback__
        if self.waiters:
            waiters, self.waiters = self.waiters, {}
            for wake in waiters.values():
                wake()

    @property
    def must_be_dropped(self) -> bool:
        """Whether the table must know when user code lets go."""
        return self.local > 0 and not self.ready

    def result(self) -> Any:
        """Return the value, or raise what its function raised."""
        if self.error is not None:
            raise again(self.error, self.trace)
        return self.value


class Held:
    """One fork: the right of this worker to use a value that stays elsewhere."""

    __slots__ = (
        "children",
        "claim",
        "dropped",
        "error",
        "fork",
        "id",
        "never_created",
        "on_confirmed",
        "on_failed",
        "on_released",
        "owner",
        "parent",
        "use",
    )

    def __init__(self, ref_id: RefId, fork: RefId, owner: Party, use: Use) -> None:
        self.id = ref_id
        self.fork = fork
        self.owner = owner
        self.use = use
        self.never_created = use is CREATING  # no answer from the owner so far
        self.parent: Party | None = None  # who waits for our confirmation
        self.claim = BY_CREATOR  # what the parent knew when it shared
        self.children = 0  # forks made from this one whose holders have not been confirmed
        self.dropped = False  # user code let go
        self.error: Exception | None = None
        self.on_confirmed: Wakes = ()  # called once, on CONFIRMED or FAILED
        self.on_failed: Wakes = ()  # called once, on FAILED
        self.on_released: Wakes = ()  # called once, when the owner let go

    @property
    def must_be_dropped(self) -> bool:
        """Whether the owner must know when user code lets go."""
        return not self.dropped

    @property
    def unanswered(self) -> bool:
        return self.use <= _CONFIRMING

    @property
    def known(self) -> int:
        """What a message about this fork may claim: BY_CONFIRMED or BY_CREATOR."""
        return BY_CONFIRMED if self.use is _CONFIRMED else BY_CREATOR


def again(error: Exception, trace: TracebackType | None = None) -> Exception:
    """Return a copy of an error that is raised at every use.

    The original would collect the frames of all uses, and keep alive what they hold: the reference
    itself among them.
    """
    try:
        twin = copy.copy(error)
    except Exception:
        return error  # a class that cannot be rebuilt
    if type(twin) is not type(error):
        return error
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(trace)


def show(ref_id: RefId) -> str:
    return f"GloballyUniqueId(created_on={ref_id[0]}, local_id={ref_id[2]})"


# Ids on the wire: plain bytes, which take the codec's quick road, and are numbers or nothing.

_FORK: Final = struct.Struct("<iQQiQQB")


def pack_fork(ref_id: RefId, fork: RefId, mark: int) -> bytes:
    """A reference, a fork of it, and what is said about it."""
    return _FORK.pack(*ref_id, *fork, mark)


def pack_releases(releases: Iterable[Held]) -> bytes:
    """The same for many that are given back."""
    pack = _FORK.pack
    return b"".join([pack(*one.id, *one.fork, one.never_created) for one in releases])


def unpack_forks(data: bytes) -> list[tuple[RefId, RefId, int]]:
    """The forks of a message, one after the other."""
    return [((a, b, c), (d, e, f), mark) for a, b, c, d, e, f, mark in _FORK.iter_unpack(data)]


def unpack_fork(data: bytes) -> tuple[RefId, RefId, int]:
    a, b, c, d, e, f, mark = _FORK.unpack(data)
    return (a, b, c), (d, e, f), mark


_ID: Final = struct.Struct("<iQQ")


def pack_creation(ref_id: RefId, place: bytes) -> bytes:
    """The token of a result that stays: its id, and where from."""
    return _ID.pack(*ref_id) + place


unpack_id: Final[Callable[[bytes], RefId]] = _ID.unpack_from
ID_SIZE: Final = _ID.size


def pack_ids(ids: Iterable[RefId]) -> bytes:
    return b"".join([_ID.pack(*one) for one in ids])


def unpack_ids(data: bytes) -> list[RefId]:
    return list(_ID.iter_unpack(data))


K = TypeVar("K")
V = TypeVar("V")

_MOST: Final = 1024  # places remembered; a program has few, a rogue invents them
_LONGEST: Final = 1024  # bytes of one


class Places:
    """What one worker knows of places."""

    def __init__(self) -> None:
        # By instruction, and by the address of its code: the hash of code takes a microsecond.
        self._named: dict[tuple[int, int], tuple[CodeType, bytes]] = {}
        self._read: dict[bytes, Place] = {}

    def name(self, frame: FrameType) -> bytes:
        """The line a frame is at, as it travels."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._named.get(key)
        if known is not None and known[0] is code:
            return known[1]
        named = f"{code.co_filename}:{frame.f_lineno}".encode("utf-8", "replace")[-_LONGEST:]
        _remember(self._named, key, (code, named))
        return named

    def read(self, named: bytes) -> Place:
        """What a place that came from elsewhere means."""
        place = self._read.get(named)
        if place is None:
            file, _, line = named[:_LONGEST].decode("utf-8", "replace").rpartition(":")
            place = (file, int(line)) if line.isdecimal() and len(line) < 10 else NOWHERE
            if len(named) <= _LONGEST:
                _remember(self._read, named, place)
        return place


def _remember(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
