"""The records of references: `OwnerRecord` where the value is, `UserRecord` where it is used.

Plain state; `owner`, `user` and `protocol` move a record from state to state. An `RRef` that user
code sees wraps exactly one record.

Ids of references and of forks come from one counter per worker, so they tell the order in which
things were made. They carry the first 64 bits of the maker's incarnation: an id of a worker that
was restarted under its old name never equals one of its predecessor.

Formats (little-endian), all of them plain bytes:

    id        rank i32 · incarnation u64 · counter u64
    fork      id of the reference · id of the fork · mark u8     (the mark depends on the message)
    creation  id of the reference · call site "file:line", the rest of the bytes
"""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeVar

from aiograd.rpc.directory import PeerInfo

# Stamp and counter identify; the rank is there for `str(rref)`, which shows what torch shows.
RefId = tuple[int, int, int]
"""(rank of the maker, first 64 bits of its incarnation, counter); of a reference or of a fork."""

ForkData = tuple[str, int, bytes, RefId, RefId, int]
"""A reference in a message: owner's name, rank and incarnation, reference, fork, who shared it."""

Fork = tuple[RefId, RefId, int]
"""(reference, fork, mark) in a message about forks."""

CallSite = tuple[str, int]
"""File and line where user code made a reference."""

# Who shared a fork. An owner that does not know the reference's id concludes from it:
BY_OWNER: Final = 2  # the owner registered the fork itself when it sent it
BY_CONFIRMED: Final = 1  # the owner knew the sharer, so the unknown value was freed
BY_CREATOR: Final = 0  # the creation may still be under way, so the value may yet come

UNKNOWN_SITE: Final[CallSite] = ("", 0)

Callbacks = list[Callable[[], None]] | tuple[()]
"""Callbacks of one event of a record. Most records live without any: () costs no allocation."""


def with_callback(callbacks: Callbacks, callback: Callable[[], None]) -> Callbacks:
    """Add a callback: `record.on_… = with_callback(record.on_…, callback)`."""
    if not isinstance(callbacks, list):
        return [callback]
    callbacks.append(callback)
    return callbacks


# Cached: an owner compares it with the id of every creation that arrives.
@functools.lru_cache(1024)
def stamp_of(incarnation: bytes) -> int:
    """Return the part of an incarnation that ids carry."""
    return int.from_bytes(incarnation[:8], "big")


class Use(IntEnum):
    """The states of a `UserRecord`, in the order in which it passes them; see `user`."""

    CREATING = 0  # made by remote(), the owner has not answered
    CONFIRMING = 1  # received from another user, the owner has not acknowledged the fork
    CONFIRMED = 2
    FAILED = 3  # creation or confirmation failed; `error` says how
    RELEASING = 4  # the release is in the outbox, or sent and not acknowledged
    RELEASED = 5


# Every reference passes code that compares these, and a lookup of an enum's member takes more than
# ten times as long as that of a global (127 and 8 ns).
CREATING: Final = Use.CREATING
_CONFIRMING: Final = Use.CONFIRMING
_CONFIRMED: Final = Use.CONFIRMED


class OwnerRecord:
    """A value that stays on this worker, with the forks that keep it alive."""

    # Slots: 136 bytes per record instead of 352, and references are made by the thousand.
    __slots__ = (
        "abandoned",
        "call_site",
        "creator_error",
        "error",
        "forks",
        "hold",
        "id",
        "local_refs",
        "on_answered",
        "ready",
        "running",
        "traceback",
        "value",
        "waiters",
    )

    ready: bool
    hold: Any  # set only for a partner's value: gives back what it takes of the partner's share

    def __init__(self, ref_id: RefId, call_site: CallSite = UNKNOWN_SITE) -> None:
        self.id: tuple[int, int, int] = ref_id
        self.call_site: tuple[str, int] = (
            call_site  # where user code created it; for reports of leaks
        )
        self.value: Any = None
        self.error: Exception | None = None  # the outcome instead of a value
        self.traceback: TracebackType | None = None  # of the error, as it was raised
        self.ready = False  # value or error is there
        self.running: bool = False  # the creating function is here and has not ended
        self.abandoned: bool = False  # the creator released it before the creation arrived
        self.local_refs: int = 0  # RRefs here that were received before the value was ready
        self.on_answered: Callbacks = ()  # called once: a creation sent to ourselves has ended
        # Why a creator on this worker stopped waiting. Not `error`: the function may still run,
        # and other workers that were given the reference get its outcome.
        self.creator_error: Exception | None = None
        self.forks: dict[RefId, bytes] = {}  # fork → incarnation of its holder
        self.waiters: dict[object, Callable[[], None]] = {}  # by waiter; called when ready

    def settle(self, value: Any, error: Exception | None) -> None:
        """Set the outcome and wake all waiters. Later outcomes are ignored."""
        if self.ready:
            return
        self.value, self.error, self.ready = value, error, True
        if error is not None:
            # Kept apart: every use raises a copy, and each copy starts with this traceback
            # instead of the frames that earlier uses added.
            self.traceback = error.__traceback__
        if self.waiters:
            # A waiter may remove itself or add another one while it is woken.
            waiters, self.waiters = self.waiters, {}
            for wake in waiters.values():
                wake()

    @property
    def needs_release(self) -> bool:
        """Whether the table must know when user code drops an RRef of this record.

        Once the value is ready, forks alone decide how long the table keeps it.
        """
        return self.local_refs > 0 and not self.ready

    def result(self) -> Any:
        """Return the value, or raise what its function raised."""
        if self.error is not None:
            raise fresh_copy(self.error, self.traceback)
        return self.value


class UserRecord:
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

    def __init__(self, ref_id: RefId, fork: RefId, owner: PeerInfo, use: Use) -> None:
        self.id: tuple[int, int, int] = ref_id
        self.fork: tuple[int, int, int] = fork
        self.owner: PeerInfo = owner
        self.use: Use = use
        # The owner has not answered the creation. It outlives CREATING: a release tells the owner
        # whether the creation may still be under way.
        self.never_created: bool = use is CREATING
        self.parent: PeerInfo | None = None  # the sharer, which waits for our confirmation
        self.claim: int = BY_CREATOR  # BY_…: what the parent knew when it shared
        self.children: int = 0  # forks made from this one that the owner has not confirmed
        self.dropped: bool = False  # by user code
        self.error: Exception | None = None
        self.on_confirmed: Callbacks = ()  # called once, on CONFIRMED or FAILED
        self.on_failed: Callbacks = ()  # called once, on FAILED
        self.on_released: Callbacks = ()  # called once, on RELEASED

    @property
    def needs_release(self) -> bool:
        """Whether the owner must be told when user code drops the RRef."""
        return not self.dropped

    @property
    def unanswered(self) -> bool:
        """Whether the owner has neither confirmed nor refused this fork."""
        return self.use <= _CONFIRMING

    @property
    def known(self) -> int:
        """BY_CONFIRMED or BY_CREATOR: what a message about this fork may claim.

        BY_CONFIRMED only once the owner has answered. Before that the creation may arrive after
        the message, and an owner that believed the claim would take the value for freed.
        """
        return BY_CONFIRMED if self.use is _CONFIRMED else BY_CREATOR


Record = OwnerRecord | UserRecord


def fresh_copy(error: Exception, traceback: TracebackType | None = None) -> Exception:
    """Return a copy of an error that is raised at every use of a reference.

    The original would collect the frames of all uses, and keep alive what they hold: the reference
    itself among them.
    """
    try:
        twin = copy.copy(error)
    except Exception:
        return error  # a class whose __init__ or __reduce__ cannot rebuild it
    # __reduce__ of a user's class may give anything; an error of another type is worse than the
    # original with too many frames.
    if type(twin) is not type(error):
        return error
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = error.__suppress_context__
    return twin.with_traceback(traceback)


def format_id(ref_id: RefId) -> str:
    """Return an id as `str(rref)` shows it, in the form that torch uses."""
    return f"GloballyUniqueId(created_on={ref_id[0]}, local_id={ref_id[2]})"


# ── ids on the wire ─────────────────────────────────────────────────────────────────────────────

# Bytes instead of tuples of ints: one `bytes` argument takes the codec's fast path, a thousand
# releases are one join, and what a peer sends is numbers or struct.error, nothing in between.
_FORK: Final = struct.Struct("<iQQiQQB")


def pack_fork(ref_id: RefId, fork: RefId, mark: int) -> bytes:
    """Pack a reference, a fork of it, and a mark: BY_… or "never created"."""
    return _FORK.pack(*ref_id, *fork, mark)


def pack_releases(releases: Iterable[UserRecord]) -> bytes:
    """Pack forks that are released; the mark says that the creation was never answered."""
    pack = _FORK.pack
    return b"".join([pack(*one.id, *one.fork, one.never_created) for one in releases])


def unpack_forks(data: bytes) -> list[Fork]:
    """Unpack all forks of a message; struct.error unless the size is a multiple of one."""
    return [((a, b, c), (d, e, f), mark) for a, b, c, d, e, f, mark in _FORK.iter_unpack(data)]


def unpack_fork(data: bytes) -> Fork:
    """Unpack the only fork of a message; struct.error if it has another size."""
    a, b, c, d, e, f, mark = _FORK.unpack(data)
    return (a, b, c), (d, e, f), mark


FORK_SIZE: Final = _FORK.size
_ID: Final = struct.Struct("<iQQ")


def pack_creation(ref_id: RefId, call_site: bytes) -> bytes:
    """Pack the token of a call whose result stays with the callee."""
    return _ID.pack(*ref_id) + call_site


# The struct's own method: a function around it takes half as long again (89 → 133 ns).
unpack_id: Final[Callable[[bytes], RefId]] = _ID.unpack_from
ID_SIZE: Final = _ID.size


def pack_ids(ids: Iterable[RefId]) -> bytes:
    """Pack ids of forks, one after the other."""
    return b"".join([_ID.pack(*one) for one in ids])


def unpack_ids(data: bytes) -> list[RefId]:
    """Unpack what `pack_ids` packed; struct.error unless the size is a multiple of one id."""
    return list(_ID.iter_unpack(data))


# ── call sites ──────────────────────────────────────────────────────────────────────────────────

K = TypeVar("K")
V = TypeVar("V")

_MOST_SITES: Final = 1024  # remembered; a program has few, a hostile peer invents them
_LONGEST_SITE: Final = 1024  # bytes


class CallSites:
    """The lines of user code that create references, to bytes and back.

    An owner names the call site of a value that was never released, so every creation carries it.
    A program creates references on few lines, over and over: both sides cache what they have seen,
    the creator the bytes of a call site, the owner their meaning.
    """

    def __init__(self) -> None:
        # By instruction, and by the address of its code: hashing a code object takes a microsecond.
        # The entry keeps the code object, because an address may be reused after its end.
        self._encoded: dict[tuple[int, int], tuple[CodeType, bytes]] = {}
        self._decoded: dict[bytes, CallSite] = {}

    def encode(self, frame: FrameType) -> bytes:
        """Return the line that a frame is at, as "file:line"."""
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._encoded.get(key)
        if known is not None and known[0] is code:
            return known[1]
        # Cut in front: the end of a path and the line number identify a call site best.
        text = f"{code.co_filename}:{frame.f_lineno}".encode("utf-8", "replace")[-_LONGEST_SITE:]
        _remember(self._encoded, key, (code, text))
        return text

    def decode(self, encoded: bytes) -> CallSite:
        """Return the call site that a peer sent; UNKNOWN_SITE for anything malformed."""
        call_site = self._decoded.get(encoded)
        if call_site is None:
            file, _, line = encoded[:_LONGEST_SITE].decode("utf-8", "replace").rpartition(":")
            valid = line.isdecimal() and len(line) < 10
            call_site = (file, int(line)) if valid else UNKNOWN_SITE
            if len(encoded) <= _LONGEST_SITE:
                _remember(self._decoded, encoded, call_site)
        return call_site


def _remember(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= _MOST_SITES:
        known.clear()
    known[key] = value
