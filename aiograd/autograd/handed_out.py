"""Memory of tensors that users hold as plain arrays, and write to without the tensor's knowledge.

    t.numpy(), t.data ─▶ an array over the same memory; a `Watch` while it lives
    ag.from_numpy(a)  ─▶ a tensor over the memory of `a`; a `Watch` while others hold that memory
    an operation saves the tensor, a pass needs it ─▶ Watch.check: other bytes? ─▶ the version rises

A graph that saved the memory then refuses to play it back, as after a write through the tensor. The
bytes are compared by a checksum, taken only of memory that a user holds and a graph has seen:

- A tensor whose memory is handed out gets a `WatchedCell` for its version. Reading the version
  compares the bytes, so recording and playing back notice writes without code of their own, and a
  write before the recording does no harm.
- Nodes from before hold a plain cell. `WATCHES` knows it, and every pass begins with `check_all`.

Of large arrays only pieces are read, spread evenly (`SAMPLED`, `SOURCE_SAMPLED`): a write to all of
an array is noticed, one to a few elements of it may not be. Slices keep the array alive that they
were made from, so they are watched, too.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from typing import Any, Final

import numpy as np
from numpy.lib.array_utils import byte_bounds

from aiograd.autograd.array import Array

SAMPLED: Final = 4 * 2**20  # bytes that are read of an array
# And of the source of `from_numpy`. Less, because nobody asked for that array in order to write to
# it, and every batch of a training loop comes from one: reading 400 KB twice takes 0.5 ms.
SOURCE_SAMPLED: Final = 64 * 1024
# Bytes of one piece. Cache lines and not pages: the more pieces there are, the shorter is the
# shortest write that cannot fall between two of them.
_PIECE: Final = 64

WATCHES: Final[dict[int, Watch]] = {}  # by id of the plain cell, which the watch keeps alive


class Watch:
    """Compares the memory behind one version cell with what it was."""

    __slots__ = ("_data", "_limit", "_seen", "_source", "_sum", "_version", "_views", "counter")

    def __init__(
        self, counter: list[int], data: Array, *, seen: bool, source: bool = False
    ) -> None:
        self.counter: list[int] = counter  # [version]
        self._data = [data]  # arrays over the memory: more than one if parts were handed out first
        self._seen = seen  # maybe by a graph: until then nothing need be compared
        self._source = source  # the memory belongs to an array that others may hold
        self._limit = SOURCE_SAMPLED if source else SAMPLED
        # The arrays that were handed out and still live, by id of the reference: a reference has
        # the hash of its array, which has none.
        self._views: dict[int, weakref.ref[Array]] = {}
        self._sum: int | None = None
        self._version = 0

    def add(self, view: Array, data: Array) -> None:
        """Watch the memory of `data` while its view lives."""
        if self._seen:
            self.check()
        if not any(data is known or _covers(known, data) for known in self._data):
            self._data.append(data)
            self._sum = None
            if self._seen:
                self.check()
        reference = weakref.ref(view, self._gone)
        self._views[id(reference)] = reference

    def _gone(self, reference: weakref.ref[Array]) -> None:
        self._views.pop(id(reference), None)
        if self._seen:
            self.check()
        if not self._views:
            WATCHES.pop(id(self.counter), None)

    def version(self) -> int:
        """Return the version of the memory as it is now."""
        self._seen = True
        if self._source:
            self._source = _shared(self._data[0])
            # Also when nobody holds it any more: the last holder may have written.
            self.check()
        elif self._views:
            self.check()
        return self.counter[0]

    def check(self) -> None:
        """Count a write if the bytes have changed, unless a write was counted since."""
        now = 0
        for data in self._data:
            now = _checksum(data, self._limit, now)
        # After a counted write the bytes differ anyway, and graphs recorded since may be right.
        if self._sum is not None and now != self._sum and self.counter[0] == self._version:
            self.counter[0] += 1
        self._sum, self._version = now, self.counter[0]


class WatchedCell(list[int]):
    """A version cell, `[version]`, that compares the memory whenever it is read.

    A list with two methods of its own, so that all other cells stay plain lists: they are made and
    read for every operation.
    """

    __slots__ = ("watch",)

    def __init__(self, watch: Watch) -> None:
        super().__init__((0,))
        self.watch: Watch = watch

    def __getitem__(self, index: Any) -> Any:
        return self.watch.version()

    def __setitem__(self, index: Any, version: Any) -> None:
        self.watch.counter[0] = version


def hand_out(data: Array, cell: list[int] | None) -> tuple[Array, list[int]]:
    """Return an array over the memory of `data`, and the cell that counts its versions from now."""
    # Over a memoryview: the base of a slice then is this array, not `data`, so that a slice keeps
    # it alive and watched.
    view: Array = np.asarray(data.data)
    if cell is None:
        cell = WatchedCell(Watch([0], data, seen=False))
    elif not isinstance(cell, WatchedCell):
        # Nodes hold this cell, and so may other tensors over the same memory.
        watch = WATCHES.get(id(cell)) or Watch(cell, data, seen=True)
        WATCHES[id(cell)] = watch
        cell = WatchedCell(watch)
    cell.watch.add(view, data)
    return view, cell


def watched_source(data: Array) -> list[int]:
    """Return the version cell of a tensor over the memory of somebody else's array."""
    return WatchedCell(Watch([0], data, seen=False, source=True))


def counter_of(cell: list[int] | None) -> list[int] | None:
    """Return the list that counts, which is the same before and after memory was handed out."""
    return cell.watch.counter if isinstance(cell, WatchedCell) else cell


def check_all() -> None:
    """Count the writes to all memory that users hold; before a pass plays graphs back."""
    for watch in list(WATCHES.values()):
        watch.check()


def _shared(data: Array) -> bool:
    """Whether anybody but this view can write to the memory of its base."""
    if data.base.__class__ is not np.ndarray or not data.base.flags.owndata:
        return True  # a memory map or a buffer: its holders are not known
    # Two references are that of the view and the argument of this call.
    return sys.getrefcount(data.base) > 2


def _covers(whole: Array, part: Array) -> bool:
    """Whether one array lies between the first and the last byte of another."""
    (low, high), (first, last) = byte_bounds(whole), byte_bounds(part)
    return bool(low <= first and last <= high)


def _checksum(data: Array, limit: int, start: int) -> int:
    if data.nbytes > limit:
        if data.flags.f_contiguous:
            data = data.T
        if data.flags.c_contiguous:
            flat = data.reshape(-1).view(np.uint8)
            step = flat.size * _PIECE // limit
            data = flat[: flat.size // step * step].reshape(-1, step)[:, :_PIECE]
        else:
            longest = max(range(data.ndim), key=data.shape.__getitem__)
            step = -(-data.nbytes // limit)
            data = data[(slice(None),) * longest + (slice(None, None, step),)]
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, start)
