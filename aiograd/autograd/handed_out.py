"""Memory of tensors that users hold as plain arrays, and write to without the tensor's knowledge.

    t.numpy() ─▶ an array over the same memory, and a `Watch` while it lives
    start of a pass, end of the array ─▶ Watch.check: other bytes? ─▶ the version rises

A graph that saved the memory then refuses to play it back, as after a write through the tensor. The
bytes are compared by a checksum, taken where memory is handed out and nowhere else. Two limits
bound its cost. A large tensor that no graph has seen is not watched. Of more than `SAMPLED` bytes
only pages spread over the array are read: a write to all of it is noticed, one to a few elements
may not be. Slices keep the array alive that they were made from, so they are watched, too.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any, Final

import numpy as np

SMALL: Final = 64 * 1024  # bytes up to which a tensor is watched that no graph has seen
SAMPLED: Final = 4 * 2**20
_PAGE: Final = 4096

WATCHES: Final[dict[int, Watch]] = {}  # by id of the cell, which the watch keeps alive


class Watch:
    """Compares the memory behind one version cell with what it was."""

    __slots__ = ("_cell", "_data", "_sum", "_version", "_views")

    def __init__(self, cell: list[int], data: Any) -> None:
        self._cell, self._data = cell, data
        # The arrays that were handed out and still live, by id of the reference: a reference has
        # the hash of its array, which has none.
        self._views: dict[int, weakref.ref[Any]] = {}
        self._sum, self._version = _checksum(data), cell[0]

    def add(self, view: Any) -> None:
        """Watch while this array lives."""
        reference = weakref.ref(view, self._gone)
        self._views[id(reference)] = reference

    def _gone(self, reference: weakref.ref[Any]) -> None:
        self._views.pop(id(reference), None)
        self.check()
        if not self._views:
            WATCHES.pop(id(self._cell), None)

    def check(self) -> None:
        """Count a write if the bytes have changed, unless a write was counted since."""
        now = _checksum(self._data)
        # After a counted write the bytes differ anyway, and graphs recorded since may be right.
        if now != self._sum and self._cell[0] == self._version:
            self._cell[0] += 1
        self._sum, self._version = now, self._cell[0]


def hand_out(data: Any, cell: list[int]) -> Any:
    """Return an array over the memory of `data`, watched on behalf of its version cell."""
    # Over a memoryview: the base of a slice then is this array, not `data`, so that a slice keeps
    # it alive and watched.
    view = np.asarray(memoryview(data))
    watch = WATCHES.get(id(cell))
    if watch is None:
        watch = WATCHES[id(cell)] = Watch(cell, data)
    else:
        watch.check()
    watch.add(view)
    return view


def check_all() -> None:
    """Count the writes to all memory that users hold; before a pass plays graphs back."""
    for watch in list(WATCHES.values()):
        watch.check()


def _checksum(data: Any) -> int:
    if data.nbytes > SAMPLED and data.flags.c_contiguous:
        flat = data.reshape(-1).view(np.uint8)
        step = max(flat.size // (SAMPLED // _PAGE), _PAGE)
        pages = flat[: flat.size // step * step].reshape(-1, step)[:, :_PAGE]
        return zlib.crc32(np.ascontiguousarray(pages).data)
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
