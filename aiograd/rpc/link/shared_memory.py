"""Shared memory between two workers of one host: large messages bypass the socket.

    SHM_OFFER     "here is a region of mine"; sent with the first message that could use it
    SHM_ACCEPT    whether the peer could map it; until then messages take the socket
    SHM_RELEASE   offsets of blocks that nothing at the reader refers to any more

    writer                                              reader
    OwnRegion.write: copy into a free block
    frame (kind, SHARED): offset, lengths          ──▶  PeerRegion.segments: arrays over that block
    Arena.free(offset)                             ◀──  SHM_RELEASE, when the last array is dropped

Each side offers one region to the other, and writes only to free blocks of its own region. What
arrives lies in the block itself and is writable: there is one copy, made by the writer. A message
too large for a block goes through a few of them, chunk by chunk, and the reader copies each chunk
out at once. That is twice as fast as the socket, which copies as often, but page by page.

Shared memory is an optimisation that may always be refused. Without a free block (the peer keeps
what it got), without permission, or on another host, messages take the socket. So nothing ever
waits for memory, and no reference counts cross processes.

Only between processes of one user that trust each other, over a Unix socket, on Linux. `Link`
decides which messages come here; `framing` reads the frames that point into a region.
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

_log = logging.getLogger("aiograd.link")
# Bytes; what is smaller takes the socket. In practice that is the last chunk of a large message:
# whole messages below `framing.SMALL` never come here.
SHARED_FROM: Final = 32 * 1024
# Chunks of larger messages, a megabyte each: more would not stay in a cache. To put a large message
# into shared memory as a whole would save a copy, but the first touch of fresh pages takes ten
# times as long as a copy, and the same size may never come again.
CHUNKS_IN_FLIGHT: Final = 8
IDLE_HEARTBEATS: Final = 10  # without use, after which an unused region is unmapped on both sides
_OFFER: Final = struct.Struct(
    "<QQ16s"
)  # file descriptor, size, and the mark the region begins with
_LARGEST: Final = 1 << 32  # bytes of address space that a peer can make us map
_CREDENTIALS: Final = struct.Struct("3i")

Send = Callable[[int, int, bytes], None]  # kind, target, body
Copy = Callable[[np.ndarray, np.ndarray], None]  # to, from


class SharedMemory:
    """The two regions of one link: the one we write to, and the one we read from."""

    def __init__(self, pid: int, size: int, send: Send, copy: Copy) -> None:
        self._pid, self._size, self._send, self._copy = pid, size, send, copy
        # Half of the region, so that one block is warm while the next is filled.
        self._largest_block = size // 2
        self.own: OwnRegion | None = None
        self.peer: PeerRegion | None = None
        self._accepted: bool | None = None  # whether the peer maps ours; None: no answer yet
        self._idle = 0  # heartbeats since our region was used
        # Offsets of blocks to release. A deque, because finalizers in any thread append to it.
        self.unused: deque[int] = deque()
        self.urgent: bool = False  # the peer's next chunk waits for one of them

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def write(self, segments: Sequence[memoryview]) -> bytes | None:
        """Copy a message into a block; return the body of its frame, None to take the socket."""
        size = 0
        for segment in segments:
            size += len(segment) + PAD & -ALIGN
        if not SHARED_FROM <= size <= self._largest_block or self._accepted is False:
            return None
        self._idle = 0
        if self.own is None:
            self._offer()
        return self.own.write(segments, size) if self._accepted and self.own else None

    def write_chunk(self, piece: memoryview) -> bytes | None:
        """Copy a piece of a larger message into a block, as `write` does.

        Return b"" when the piece must wait until chunks in flight are released.
        """
        if self._accepted is False or len(piece) < SHARED_FROM:
            return None
        self._idle = 0
        if self.own is None:
            self._offer()
        if not self._accepted or self.own is None:
            return None
        return self.own.write_chunk(piece)

    def _offer(self) -> None:
        # The message that caused the offer takes the socket, and so do all others until SHM_ACCEPT
        # comes: no message waits for memory, also not for the first of it.
        self._accepted = None
        try:
            self.own = OwnRegion(self._size, self._copy)
        except (OSError, MemoryError):
            self._accepted = False
        else:
            self._send(SHM_OFFER, 0, self.own.offer)

    def accepted(self, readable: int) -> None:
        """Handle SHM_ACCEPT: the peer could map our region, or not."""
        self._accepted = bool(readable)
        if not readable:
            self.own = None

    def released(self, body: Any) -> None:
        """Handle SHM_RELEASE: the peer no longer refers to these blocks of ours."""
        if self.own is not None:
            self.own.released(body)

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def offered(self, body: Any) -> None:
        """Handle SHM_OFFER: map the peer's region, or unmap it if the offer is empty.

        Arrays over a previous region keep its mapping alive; no new frame can point into it.
        """
        self.peer = None
        if not len(body):
            return
        try:
            self.peer = PeerRegion(self._pid, body, self.unused)
        except (OSError, MemoryError):
            _log.debug("the memory of process %d cannot be shared", self._pid, exc_info=True)
        self._send(SHM_ACCEPT, int(self.peer is not None), b"")

    def read(self, kind: int, body: memoryview) -> Transfer:
        """Return the message, or chunk, whose frame had this body."""
        if self.peer is None:
            raise ProtocolError("a frame points into shared memory that was never offered")
        self.urgent = self.urgent or kind == CHUNK
        return Transfer.whole(kind, self.peer.segments(body))

    def release_blocks(self) -> None:
        """Send SHM_RELEASE for every block that nothing here refers to any more.

        It is an ordinary message if a chunk waits for it (`urgent`), else a low-priority one.
        """
        unused, offsets = self.unused, []
        while unused:
            offsets.append(unused.popleft())
        self._send(SHM_RELEASE, int(self.urgent), struct.pack(f"<{len(offsets)}Q", *offsets))
        self.urgent = False

    @property
    def at_rest(self) -> bool:
        """Whether neither side has mapped memory of the other one."""
        return self.own is None and self.peer is None

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def heartbeat(self) -> None:
        """Release blocks that no message took back, and unmap our region when it is idle."""
        if self.unused:
            self.release_blocks()
        self._idle += 1
        # Not before the answer to an offer: it would be taken for the answer to the next one.
        if self._idle > IDLE_HEARTBEATS and self._accepted and self.own and not self.own.used:
            self.own = self._accepted = None
            self._send(SHM_OFFER, 0, b"")

    def close(self) -> None:
        """Unmap both regions as soon as no array refers to them."""
        self.own = self.peer = None
        self._accepted = False


class OwnRegion:
    """Memory of ours that the peer reads, and the blocks of it that are taken."""

    def __init__(self, size: int, copy: Copy) -> None:
        self._copy = copy
        # Anonymous: nothing remains in a file system when both processes are killed.
        self._file = os.memfd_create("aiograd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        # Before it is offered: the reader checks the seal once, and relies on it from then on.
        _seal(self._file)
        memory = mmap.mmap(self._file, size)
        mark = memory[:16] = os.urandom(16)  # a peer that opened another file does not find it
        self._memory = np.frombuffer(memory, np.uint8)
        self.arena: Arena = Arena(size, start=ALIGN)
        self.chunks: set[int] = set()  # offsets of chunks in flight
        self.offer: bytes = _OFFER.pack(self._file, size, mark)

    def write(self, segments: Sequence[memoryview], size: int) -> bytes | None:
        """Copy segments into one block: offset and lengths as a frame's body; None without room."""
        start = self.arena.take(size)
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

    def write_chunk(self, piece: memoryview) -> bytes | None:
        """Copy a chunk; b"" if it must wait for others, None if it must take the socket."""
        if len(self.chunks) >= CHUNKS_IN_FLIGHT:
            return b""
        place = self.write([piece], len(piece) + PAD & -ALIGN)
        if place is None:
            # Waiting is right only if a release is certain to come. Whole messages may be kept by
            # the peer for ever; chunks are copied out and released at once.
            return b"" if self.chunks else None
        self.chunks.add(int.from_bytes(place[:8], "little"))
        return place

    def released(self, body: Any) -> None:
        """Free the blocks at these offsets."""
        arena = self.arena
        for (offset,) in struct.iter_unpack("<Q", body):
            self.chunks.discard(offset)
            if offset in arena.taken:  # else it was a block of a region that is unmapped by now
                arena.free(offset)

    @property
    def used(self) -> bool:
        """Whether the peer may still read some block."""
        return bool(self.arena.taken)


class _BlockRef(weakref.ref[np.ndarray]):
    """A weak reference to the array over a block, which knows the block's offset."""

    __slots__ = ("start",)
    start: int


class PeerRegion:
    """Memory of the peer that we read."""

    def __init__(self, pid: int, body: Any, unused: deque[int]) -> None:
        number, self._size, mark = _OFFER.unpack(body)
        if self._size > _LARGEST:
            raise ProtocolError(f"{self._size} bytes of shared memory are too many")
        # By process and number, because asyncio's transports cannot pass descriptors (SCM_RIGHTS).
        # The number may mean another file by now, or another process: hence seals and mark.
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            _check(file, self._size)
            self._memory = mmap.mmap(file, self._size)
        finally:
            os.close(file)
        if self._memory[:16] != mark:  # the socket leads to another process: a proxy, for example
            raise OSError(f"descriptor {number} of process {pid} is something else")
        self._unused = unused
        self._refs: dict[int, _BlockRef] = {}  # to the arrays over blocks; else they would not fire

    def segments(self, body: memoryview) -> list[np.ndarray]:
        """Return arrays over the block that a frame names; their end releases the block."""
        if len(body) < 16 or len(body) % 8:
            raise ProtocolError(f"a place in shared memory in {len(body)} bytes")
        start, *lengths = struct.unpack(f"<{len(body) // 8}Q", body)
        total = 0
        for length in lengths:
            total += length + PAD & -ALIGN
        if start + total > self._size:
            raise ProtocolError("a message beyond the end of shared memory")
        # Checked above against the size we mapped, because these numbers come from the peer.
        block = np.frombuffer(self._memory, np.uint8, total, start)
        # Every array made from this one keeps it alive (see `wire.buffers`): its end is the end of
        # all of them.
        ref = self._refs[start] = _BlockRef(block, self._dropped)
        ref.start = start
        found, at = [], 0
        for length in lengths:
            found.append(block[at : at + length])
            at += length + PAD & -ALIGN
        return found

    def _dropped(self, ref: _BlockRef) -> None:
        # Runs in any thread, inside any allocation: two atomic operations and nothing else.
        self._refs.pop(ref.start, None)
        self._unused.append(ref.start)


def open_shared_memory(transport: Any, size: int, send: Send, copy: Copy) -> SharedMemory | None:
    """Return what two workers may share over this transport; None where they cannot."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX or not sys.platform.startswith("linux"):
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    # Told by the kernel, not by the peer. Another user could not open our descriptor anyway; here
    # it is known before an offer is made.
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid() or size < 2 * SHARED_FROM or not hasattr(os, "memfd_create"):
        return None
    return SharedMemory(pid, size, send, copy)


def _seal(file: int) -> None:
    """Fix the size of a region: to read past the end of a mapped file kills the reader."""
    import fcntl  # not on every platform

    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _check(file: int, size: int) -> None:
    """OSError unless the file is as large as announced, and sealed so that it stays so."""
    import fcntl

    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("shared memory that could shrink")
    if os.fstat(file).st_size < size:
        raise OSError("shared memory smaller than it says")


# ── parallel copy ───────────────────────────────────────────────────────────────────────────────

PARALLEL_FROM: Final = 8 << 20  # bytes; less is copied before a thread has woken up
_PIECE: Final = 1 << 20  # bytes that the copying thread waits for at most, when the helper is slow


class ParallelCopier:
    """Copies large arrays with two cores: one alone cannot use the bandwidth of memory.

    Both threads take pieces from one iterator until none is left. So the calling thread waits for
    one piece at most, also where the other core is busy. The helper starts with the first copy of
    `PARALLEL_FROM` bytes and ends with `close`.
    """

    def __init__(self, cores: int | None = None) -> None:
        self._alone = (cores if cores is not None else os.cpu_count()) == 1
        self._helper: ThreadPoolExecutor | None = None

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy the bytes of `source` to an array of the same size."""
        if source.nbytes < PARALLEL_FROM or self._alone:
            to[:] = source
            return
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "aiograd-copy")
        # A range iterator's `next` is one C call, so both threads may share it without a lock.
        starts = iter(range(0, source.nbytes, _PIECE))
        helping = self._helper.submit(_copy_pieces, to, source, starts)
        _copy_pieces(to, source, starts)
        if not helping.cancel():
            helping.result()

    def close(self) -> None:
        """End the helper thread."""
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None


def _copy_pieces(to: np.ndarray, source: np.ndarray, starts: Iterator[int]) -> None:
    for start in starts:
        end = start + _PIECE
        to[start:end] = source[start:end]
