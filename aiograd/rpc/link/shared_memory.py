"""Memory that two workers of one host share, so that arrays between them cross no socket.

    SHM_OFFER      here is memory of mine: sent with the first message that could use it
    SHM_ACCEPT    I can (or cannot) read it: the answer; until then messages take the socket
    SHM_RELEASE    nothing here looks at these blocks any more

Each side lends memory to the other, and only writes to blocks of its own that are free. A message
that fits is copied into a block, and the frame says where. What arrives lies in that very block, is
writable, and the block goes back when the last array over it is dropped. When there is no room, for
example because the peer keeps what it got, messages take the socket: nothing ever waits for memory.

A message too large for a block goes through a few of them, chunk by chunk, and what arrives is
copied out again. That is twice as fast as the socket, which copies as often, but page by page.

Only between processes of one user that trust each other, over a Unix socket, on Linux.

Copies of large arrays, made by two cores: one alone cannot use all that memory gives.

The other core takes pieces as long as there are any, so whoever copies waits for one piece at most,
also where that core is busy with something else.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from aiograd.errors import ProtocolError
from aiograd.wire.buffers import ALIGN, PAD, Arena
from aiograd.wire.framing import Transfer
from aiograd.wire.messages import CHUNK, SHM_ACCEPT, SHM_OFFER, SHM_RELEASE

_log = logging.getLogger("aiograd")
LEAST: Final = 32 * 1024  # bytes; what is smaller travels in its frame
_CHUNKS: Final = 8  # of larger messages under way at once: more would not stay in a cache
_IDLE: Final = 10  # heartbeats without use after which memory is given up
_OFFER: Final = struct.Struct("<QQ16s")  # descriptor, size, and the mark it begins with
_MOST: Final = 1 << 32  # bytes of the other side that we look at
_CREDENTIALS: Final = struct.Struct("3i")

Send = Callable[[int, int, bytes], None]  # kind, target, body
Copy = Callable[[np.ndarray, np.ndarray], None]  # to, from


class Shared:
    """What a link and its peer lend each other."""

    def __init__(self, pid: int, size: int, send: Send, copy: Copy) -> None:
        self._pid, self._size, self._send, self._copy = pid, size, send, copy
        self._most = size // 2  # so that one block is warm while the next is filled
        self._lent: _Lent | None = None
        self._borrowed: _Borrowed | None = None
        self._usable: bool | None = None  # whether the peer can read ours; None: not asked
        self._idle = 0
        self.back: deque[int] = deque()  # blocks to return, from finalizers in any thread
        self.awaited = False  # the peer waits for some of them

    # ── what we send ────────────────────────────────────────────────────────────────────────────

    def place(self, segments: Sequence[memoryview]) -> bytes | None:
        """Copy a message into a block: the body of its frame. None: it must take the socket."""
        size = 0
        for segment in segments:
            size += len(segment) + PAD & -ALIGN
        if not LEAST <= size <= self._most or self._usable is False:
            return None
        self._idle = 0
        if self._lent is None:
            self._lend()
        return self._lent.place(segments, size) if self._usable and self._lent else None

    def place_chunk(self, piece: memoryview) -> bytes | None:
        """The same for a piece of a larger message; b"": its turn comes when others are back."""
        if self._usable is False or len(piece) < LEAST:
            return None
        self._idle = 0
        if self._lent is None:
            self._lend()
        if not self._usable or self._lent is None:
            return None
        return self._lent.place_chunk(piece)

    def _lend(self) -> None:
        self._usable = None
        try:
            self._lent = _Lent(self._size, self._copy)
        except (OSError, MemoryError):
            self._usable = False
        else:
            self._send(SHM_OFFER, 0, self._lent.offer)

    def answered(self, readable: int) -> None:
        """The peer says whether it can read what we lend."""
        self._usable = bool(readable)
        if not readable:
            self._lent = None

    def returned(self, body: Any) -> None:
        if self._lent is not None:
            self._lent.returned(body)

    # ── what we get ─────────────────────────────────────────────────────────────────────────────

    def borrow(self, body: Any) -> None:
        """The peer lends us memory, or no longer does; what it lent before is not used again."""
        self._borrowed = None
        if not len(body):
            return
        try:
            self._borrowed = _Borrowed(self._pid, body, self.back)
        except (OSError, MemoryError):
            _log.debug("the memory of process %d cannot be shared", self._pid, exc_info=True)
        self._send(SHM_ACCEPT, int(self._borrowed is not None), b"")

    def arrived(self, kind: int, body: memoryview) -> Transfer:
        """The message whose frame had this body."""
        if self._borrowed is None:
            raise ProtocolError("a message in memory that was never lent")
        self.awaited = self.awaited or kind == CHUNK
        return Transfer.whole(kind, self._borrowed.segments(body))

    def give_back(self) -> None:
        """Tell the peer which blocks it may use again."""
        back, offsets = self.back, []
        while back:
            offsets.append(back.popleft())
        self._send(SHM_RELEASE, int(self.awaited), struct.pack(f"<{len(offsets)}Q", *offsets))
        self.awaited = False

    def beat(self) -> None:
        """Once per heartbeat: return what is left, and give up what nobody uses."""
        if self.back:
            self.give_back()
        self._idle += 1
        if self._idle > _IDLE and self._lent is not None and not self._lent.used and self._usable:
            self._lent = self._usable = None
            self._send(SHM_OFFER, 0, b"")

    def close(self) -> None:
        self._lent = self._borrowed = None
        self._usable = False


class _Lent:
    """Memory of ours that the peer reads."""

    def __init__(self, size: int, copy: Copy) -> None:
        self._copy = copy
        self._file = os.memfd_create("aiograd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        _seal(self._file)
        memory = mmap.mmap(self._file, size)
        mark = memory[:16] = os.urandom(16)  # who opened something else will not find it there
        self._memory = np.frombuffer(memory, np.uint8)
        self._arena = Arena(size, start=ALIGN)
        self._chunks: set[int] = set()  # offsets of those under way
        self.offer = _OFFER.pack(self._file, size, mark)

    def place(self, segments: Sequence[memoryview], size: int) -> bytes | None:
        start = self._arena.take(size)
        if start is None:
            return None
        at = start
        for segment in segments:
            end = at + len(segment)
            if size < PARALLEL_FROM:
                self._memory[at:end] = np.frombuffer(segment, np.uint8)
            else:
                self._copy(self._memory[at:end], np.frombuffer(segment, np.uint8))
            at = end + PAD & -ALIGN
        return struct.pack(f"<{len(segments) + 1}Q", start, *map(len, segments))

    def place_chunk(self, piece: memoryview) -> bytes | None:
        if len(self._chunks) >= _CHUNKS:
            return b""
        place = self.place([piece], len(piece) + PAD & -ALIGN)
        if place is None:
            return b"" if self._chunks else None
        self._chunks.add(int.from_bytes(place[:8], "little"))
        return place

    def returned(self, body: Any) -> None:
        arena = self._arena
        for (offset,) in struct.iter_unpack("<Q", body):
            self._chunks.discard(offset)
            if offset in arena.taken:  # else of memory that was given up meanwhile
                arena.give(offset)

    @property
    def used(self) -> bool:
        return bool(self._arena.taken)


class _Watch(weakref.ref[np.ndarray]):
    """Sees the end of the array over a block."""

    __slots__ = ("start",)
    start: int


class _Borrowed:
    """Memory of the peer's that we read."""

    def __init__(self, pid: int, body: Any, back: deque[int]) -> None:
        number, self._size, mark = _OFFER.unpack(body)
        if self._size > _MOST:
            raise ProtocolError(f"{self._size} bytes of shared memory are too many")
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            _check(file, self._size)
            self._memory = mmap.mmap(file, self._size)
        finally:
            os.close(file)
        if self._memory[:16] != mark:  # the socket leads to another process: a proxy, for example
            raise OSError(f"descriptor {number} of process {pid} is something else")
        self._back = back
        self._watches: dict[int, _Watch] = {}  # over the blocks that something looks at

    def segments(self, body: memoryview) -> list[np.ndarray]:
        if len(body) < 16 or len(body) % 8:
            raise ProtocolError(f"a place in shared memory in {len(body)} bytes")
        start, *lengths = struct.unpack(f"<{len(body) // 8}Q", body)
        total = 0
        for length in lengths:
            total += length + PAD & -ALIGN
        if start + total > self._size:
            raise ProtocolError("a message beyond the end of shared memory")
        block = np.frombuffer(self._memory, np.uint8, total, start)
        # Every array made from this one keeps it alive (see `wire.memory`): its end is the end of
        # all of them.
        watch = self._watches[start] = _Watch(block, self._dropped)
        watch.start = start
        found, at = [], 0
        for length in lengths:
            found.append(block[at : at + length])
            at += length + PAD & -ALIGN
        return found

    def _dropped(self, watch: _Watch) -> None:
        """Nothing looks at a block any more; in any thread, at any moment."""
        self._watches.pop(watch.start, None)
        self._back.append(watch.start)


def shared_memory(transport: Any, size: int, send: Send, copy: Copy) -> Shared | None:
    """What two workers may share over this transport; None where they cannot."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX or not sys.platform.startswith("linux"):
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid() or size < 2 * LEAST or not hasattr(os, "memfd_create"):
        return None
    return Shared(pid, size, send, copy)


def _seal(file: int) -> None:
    """Promise that the memory stays as large as it is: reading past its end is deadly."""
    import fcntl  # not on every platform

    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _check(file: int, size: int) -> None:
    import fcntl

    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("shared memory that could shrink")
    if os.fstat(file).st_size < size:
        raise OSError("shared memory smaller than it says")


PARALLEL_FROM: Final = 8 << 20  # bytes; less is copied before a thread has woken up
_PIECE: Final = 1 << 20


class Copier:
    """Copies for one worker; has a thread from the first large copy on."""

    def __init__(self, cores: int | None = None) -> None:
        self._alone = (cores if cores is not None else os.cpu_count()) == 1
        self._helper: ThreadPoolExecutor | None = None

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy bytes to as many others."""
        if source.nbytes < PARALLEL_FROM or self._alone:
            to[:] = source
            return
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "aiograd-copy")
        starts = iter(range(0, source.nbytes, _PIECE))
        helping = self._helper.submit(_copy, to, source, starts)
        _copy(to, source, starts)
        if not helping.cancel():
            helping.result()

    def close(self) -> None:
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None


def _copy(to: np.ndarray, source: np.ndarray, starts: Iterator[int]) -> None:
    for start in starts:
        end = start + _PIECE
        to[start:end] = source[start:end]
