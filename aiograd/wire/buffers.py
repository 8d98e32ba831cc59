"""Memory for large messages: a pool of reusable buffers, and an allocator of blocks in a region.

    BufferPool   numpy arrays for incoming segments; a buffer returns when its last view is dropped
    Arena        offsets within one region of memory (see `rpc.link.shared_memory`); holds no memory

Memory fresh from the system costs a page fault every few kilobytes, which takes as long as reading
those bytes from a socket. So both use memory again while it is warm.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from typing import Final

import numpy as np

LARGE: Final = 1 << 20  # bytes; below that malloc is quick by itself
IDLE: Final = 512 << 20  # bytes of buffers that may be kept unused


class BufferPool:
    """Buffers of one worker, by their exact size.

    A buffer that no segment wanted between two calls of `trim` is freed; all unused ones are when
    the system has no memory left.
    """

    def __init__(self) -> None:
        # Filled by finalizers, which may run in any thread and inside any allocation: so they only
        # append, and the thread that takes buffers sorts them in (`_collect`).
        self._returned: deque[memoryview] = deque()
        self._free: dict[int, list[memoryview]] = {}  # by size
        self._older: dict[int, list[memoryview]] = {}  # not used since the last `trim`
        self.idle: int = 0  # bytes in both
        self._shared = bytearray()

    def shared(self, size: int) -> bytearray:
        """Return the buffer, of at least `size` bytes, into which all connections of a worker read.

        One after the other, and each uses up what it has read before the next one reads. A buffer
        of its own for each would be a quarter of a megabyte per connection.
        """
        if len(self._shared) < size:
            self._shared = bytearray(size)
        return self._shared

    def take(self, size: int) -> np.ndarray:
        """Return an uninitialised array of `size` bytes. MemoryError if the system has none."""
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
        weakref.finalize(array, self._returned.append, block).atexit = False
        return array

    def _allocate(self, size: int) -> memoryview:
        try:
            return np.empty(size, np.uint8).data
        except MemoryError:
            # Unused buffers go first: a message must not be refused for want of memory we hoard.
            if not self.idle:
                raise
            self._free, self._older, self.idle = {}, {}, 0
            return np.empty(size, np.uint8).data

    def trim(self) -> None:
        """Free buffers that were not used since the last call."""
        self._collect()
        for blocks in self._older.values():
            self.idle -= sum(block.nbytes for block in blocks)
        self._older, self._free = self._free, {}

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if self.idle + block.nbytes <= IDLE:
                self._free.setdefault(block.nbytes, []).append(block)
                self.idle += block.nbytes


ALIGN: Final = 64  # a cache line, and more than any dtype asks for
PAD: Final = ALIGN - 1  # `size + PAD & -ALIGN` is a size rounded up to whole lines


class Arena:
    """First-fit allocation of blocks within a region, from its front.

    First fit keeps the blocks in use together at the front: memory used last is warm, and is taken
    first.
    """

    def __init__(self, size: int, start: int = 0) -> None:
        self.free_blocks: list[tuple[int, int]] = [
            (start, size - start)
        ]  # (offset, size), sorted; neighbours are merged
        self.taken: dict[int, int] = {}  # offset of a block → its size

    def take(self, size: int) -> int | None:
        """Return the offset of a new block; None if there is no room for it."""
        size = max(size, 1) + PAD & -ALIGN
        for index, (offset, room) in enumerate(self.free_blocks):
            if room >= size:
                if room == size:
                    del self.free_blocks[index]
                else:
                    self.free_blocks[index] = (offset + size, room - size)
                self.taken[offset] = size
                return offset
        return None

    def free(self, offset: int) -> None:
        """Free the block at this offset; KeyError if there is none."""
        size, free = self.taken.pop(offset), self.free_blocks
        index = bisect_left(free, (offset, size))
        # Merge with both neighbours; else the region falls apart into blocks too small to use.
        if index < len(free) and free[index][0] == offset + size:
            size += free.pop(index)[1]
        if index and sum(free[index - 1]) == offset:
            index -= 1
            offset, before = free.pop(index)
            size += before
        free.insert(index, (offset, size))
