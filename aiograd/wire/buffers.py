"""Memory for large segments, used again once what was received in it is gone.

Memory fresh from the system costs a page fault every few kilobytes, which is as much as reading the
bytes from a socket. So a large block goes back here when the last array over it is dropped, and
serves the next segment of that size. Blocks that nobody wanted for a while are let go, and so are
all of them when the system has no memory left.

Which parts of a piece of memory are taken. Knows offsets only, never the memory itself.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from typing import Final

import numpy as np

LARGE: Final = 1 << 20  # bytes; below that malloc is quick by itself
IDLE: Final = 512 << 20  # bytes that may wait to be used again


class Memory:
    """Blocks of one worker."""

    def __init__(self) -> None:
        self._back: deque[memoryview] = deque()  # from finalizers, which may run in any thread
        self._free: dict[int, list[memoryview]] = {}
        self._older: dict[int, list[memoryview]] = {}  # not used since the last `trim`
        self.idle = 0  # bytes in both

    def take(self, size: int) -> np.ndarray:
        """An array of `size` bytes, whatever is in them."""
        if size < LARGE:
            return np.empty(size, np.uint8)
        self._collect()
        for blocks in (self._free, self._older):
            if blocks.get(size):
                block = blocks[size].pop()
                self.idle -= size
                break
        else:
            block = self._allocate(size)
        array = np.frombuffer(block, np.uint8)
        # Arrays made from this one keep it alive, and it keeps the block; numpy looks no further
        # back than to an array over foreign memory. So the end of this one is the end of all.
        weakref.finalize(array, self._back.append, block).atexit = False
        return array

    def _allocate(self, size: int) -> memoryview:
        try:
            return np.empty(size, np.uint8).data
        except MemoryError:
            if not self.idle:
                raise
            self._free, self._older, self.idle = {}, {}, 0
            return np.empty(size, np.uint8).data

    def trim(self) -> None:
        """Let go of blocks that were not used since the last time."""
        self._collect()
        for blocks in self._older.values():
            self.idle -= sum(block.nbytes for block in blocks)
        self._older, self._free = self._free, {}

    def _collect(self) -> None:
        while self._back:
            block = self._back.popleft()
            if self.idle + block.nbytes <= IDLE:
                self._free.setdefault(block.nbytes, []).append(block)
                self.idle += block.nbytes


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
