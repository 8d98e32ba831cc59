"""Which parts of a piece of memory are taken. Knows offsets only, never the memory itself."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

ALIGN: Final = 64  # a cache line, and more than any dtype asks for
PAD: Final = ALIGN - 1  # `size + PAD & -ALIGN` is a size rounded up to whole lines


class Arena:
    """Blocks of any size, first fit from the front: what was used last is warm and used again."""

    def __init__(self, size: int, start: int = 0) -> None:
        self._free = [(start, size - start)]  # (offset, size), in order, never two that touch
        self.taken: dict[int, int] = {}  # size of the block at an offset

    def take(self, size: int) -> int | None:
        """The offset of a new block; None if there is no room for it."""
        size = max(size, 1) + PAD & -ALIGN
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, room - size)
                self.taken[offset] = size
                return offset
        return None

    def give(self, offset: int) -> None:
        """A block is free again. KeyError if there is none at this offset."""
        size = self.taken.pop(offset)
        index = bisect_left(self._free, (offset, size))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            size += before
        self._free.insert(index, (offset, size))
