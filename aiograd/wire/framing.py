"""Frames: a fixed header and a body, cut out of bytes that come in any pieces.

    magic u8 | kind u8 | flags u16 | length u32 | id u64 | budget f32 | target u32 | body …

Small bodies are collected in one reused buffer. A message past `SMALL` is announced by a frame with
the LARGE flag, whose body lists the lengths of its segments, and follows in CHUNK frames of at most
`CHUNK_SIZE`, so that pings and other calls find gaps. Segments are received straight into memory
made for them: writable, and handed to the receiver without another copy. Where there is no memory,
a message is *refused*: its bytes are read and dropped as they come, and the rest is unharmed.

No I/O here: the connection asks `get_buffer()` where to put bytes and says how many came. Headers
are packed by `pack_header` and nowhere else.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from aiograd.errors import ProtocolError
from aiograd.wire.buffers import BufferPool
from aiograd.wire.messages import CHUNK, KINDS, LARGE, LEGAL, SHARED, describe_flags

MAGIC: Final = 0xA9
HEADER: Final = struct.Struct("<BBHIQfI")
HEADER_SIZE: Final = HEADER.size
SMALL: Final = 64 * 1024  # a body up to this size travels in one frame
CHUNK_SIZE: Final = 1024 * 1024  # a ping waits for at most this many bytes of somebody else's array
MAX_SEGMENTS: Final = 8000  # so that an announcement fits into a small frame
TRANSFERS: Final = 16_384  # large messages under way at once; more are no honest peer's
_SEGMENT: Final = 160  # bytes that an array takes besides its memory
_BUFFER: Final = 4 * SMALL
_GLANCE: Final = 2048  # read at once while a large message is expected: what is more is copied
_LENGTH: Final = struct.Struct("<Q")
_EMPTY: Final = memoryview(b"")
# The legal combinations of kind and flags, as in `LEGAL`, whose body is the whole message.
_WHOLE: Final = frozenset(pair for pair in LEGAL if pair >> 16 != CHUNK and not pair & LARGE)


@dataclass(slots=True)
class Frame:
    """One message: its header, and its body.

    The body is a `memoryview` or a `Transfer` on the way in, and bytes or a `codec.Payload` on the
    way out.

    Not a named tuple: those are as quick to make, and ten times as slow to read.
    """

    kind: int
    flags: int
    id: int = 0
    budget: float = 0.0
    target: int = 0
    body: Any = b""


_unpack_header: Final = HEADER.unpack_from
# Pack the header of a frame: kind, flags, length of the body, id, budget, target. Not a function of
# Python's, because every message comes this way.
pack_header: Callable[[int, int, int, int, float, int], bytes] = functools.partial(
    HEADER.pack, MAGIC
)


def announce(transfer: int, target: int, lengths: list[int]) -> bytes:
    """Make the body of a LARGE frame: its number, its target, and the segment lengths."""
    return struct.pack(f"<{len(lengths) + 2}Q", transfer, target, *lengths)


def memory_of(lengths: list[int]) -> int:
    """Return what a large message takes here: many tiny segments take more than their bytes."""
    return sum(lengths) + _SEGMENT * (len(lengths) - 1)


class Transfer:
    """A large message on its way in: its header at once, its segments when `complete`."""

    __slots__ = (
        "_filled",
        "_index",
        "complete",
        "dropped",
        "kind",
        "refused",
        "reserved",
        "segments",
        "size",
    )

    kind: int
    size: int
    segments: list[np.ndarray]

    def __init__(self, kind: int, size: int, segments: list[np.ndarray], refused: str = "") -> None:
        self.kind, self.size, self.segments = kind, size, segments
        self.refused: str = refused  # the limit it ran into; then it has no segments
        self.reserved: bool = not refused  # until its receiver releases the memory
        self._index = self._filled = 0
        self.complete: bool = False
        self.dropped: bool = False  # refused after its announcement, and not handed out again

    @classmethod
    def whole(cls, kind: int, segments: list[np.ndarray]) -> Transfer:
        """A message that is here already, in memory of its sender."""
        transfer = cls(kind, sum(map(len, segments)), segments)
        transfer.reserved, transfer.complete = False, True
        return transfer

    def window(self) -> memoryview:
        """Where the next bytes belong: what is left of the current segment."""
        while self._filled == len(self.segments[self._index]):
            self._index, self._filled = self._index + 1, 0
        return self.segments[self._index].data[self._filled :]

    def filled(self, count: int) -> None:
        """Note that `count` bytes were written into the window."""
        self._filled += count


def _none_shared(kind: int, body: memoryview) -> Transfer:
    raise ProtocolError("a message in shared memory over a connection without any")


def _illegal(magic: int, kind: int, flags: int) -> ProtocolError:
    if magic != MAGIC or kind not in KINDS:
        return ProtocolError(f"expected a frame, got {magic:#x} {kind:#x}")
    return ProtocolError(f"a {KINDS[kind]} frame with {describe_flags(flags)} ({flags:#x})")


class FrameReader:
    """Collects bytes in any pieces and gives back whole frames.

    The body of a small frame is a view that stays valid until the next `get_buffer()` of any reader
    with the same `memory`: they read into one buffer, one after the other, so that a connection at
    rest holds none. What is there of a frame that is not complete is kept aside until the rest of
    it comes. A large
    message appears twice: when announced, and again when its last byte is there. One in shared
    memory is complete at once and appears once.
    """

    def __init__(
        self,
        max_message: int = 1 << 30,
        reserve: Callable[[int], bool] = lambda size: True,
        memory: BufferPool | None = None,
        shared: Callable[[int, memoryview], Transfer] | None = None,
        unavailable: Callable[[int], None] = lambda size: None,
        overhead: int = 0,
        transfers: int | None = None,
    ) -> None:
        self._most_transfers = TRANSFERS if transfers is None else transfers
        self._overhead = overhead  # bytes that count for a large message besides its own
        self._max_message = max_message
        self._shared = shared or _none_shared  # finds what lies in lent memory
        self._memory = memory if memory is not None else BufferPool()
        self._reserve = reserve  # asked before memory is made for an announced size
        self._unavailable = unavailable  # told of what was reserved and could not be allocated
        self._buffer = self._memory.shared(_BUFFER)
        self._view = memoryview(self._buffer)
        self._rest = b""  # the beginning of a frame that is not complete
        self._transfers: dict[int, tuple[Frame, list[int]]] = {}  # with the bytes still to come
        self._chunk: tuple[Frame, list[int]] | None = None  # being received directly
        self._chunk_number = 0
        self._chunk_left = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes should be written; never empty."""
        if self._chunk is not None:
            return self._chunk_window(self._chunk)
        rest, view = self._rest, self._view
        if rest:  # every time: another reader may have used the buffer since
            view[: len(rest)] = rest
        if self._transfers:  # take little more than the next header, the rest goes to its place
            return view[len(rest) : len(rest) + _GLANCE]
        return view[len(rest) :] if rest else view

    def advance(self, count: int) -> list[Frame]:
        """`count` bytes were written to the buffer last given; the frames that are complete now."""
        frames: list[Frame] = []
        if self._chunk is not None:
            self._fill(self._chunk, count, frames)
            return frames
        at, end = 0, len(self._rest) + count
        view, buffer = self._view, self._buffer
        while end - at >= HEADER_SIZE:
            magic, kind, flags, length, id, budget, target = _unpack_header(buffer, at)
            body = at + HEADER_SIZE
            if kind << 16 | flags in _WHOLE and 0 < length <= SMALL and magic == MAGIC:
                after = body + length  # nearly all frames
                if after > end:
                    break
                frames.append(Frame(kind, flags, id, budget, target, view[body:after]))
                at = after
                continue
            if magic != MAGIC or kind << 16 | flags not in LEGAL:
                raise _illegal(magic, kind, flags)
            if kind == CHUNK and not flags & SHARED:
                at = body + self._begin_chunk(target, length, view[body:end], frames)
                continue
            if length > SMALL:
                raise ProtocolError(f"a frame of {length} bytes; large messages come in chunks")
            if not length and kind != CHUNK:
                frames.append(Frame(kind, flags, id, budget, target, _EMPTY))
                at = body
                continue
            after = body + length
            if after > end:
                break
            if kind == CHUNK:
                self._copy_chunk(target, view[body:after], frames)
            elif flags & SHARED:
                whole = self._shared(kind, view[body:after])
                frames.append(Frame(kind, flags, id, budget, target, whole))
            else:
                announced = Frame(kind, flags, id, budget, 0, view[body:after])
                frames.append(self._announced(announced))
            at = after
        self._rest = b"" if at == end else bytes(view[at:end])
        return frames

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Take bytes from elsewhere; small bodies are copied, so that they stay valid."""
        source, frames = memoryview(data), []
        while source.nbytes:
            room = self.get_buffer()
            count = min(len(room), source.nbytes)
            room[:count] = source[:count]
            source = source[count:]
            for frame in self.advance(count):
                if isinstance(frame.body, memoryview):
                    frame.body = memoryview(bytes(frame.body))
                frames.append(frame)
        return frames

    def abandon(self, release: Callable[[int], None]) -> None:
        """Nothing more will come: give back what was reserved for messages."""
        for frame, _ in self._transfers.values():
            transfer = frame.body
            if isinstance(transfer, Transfer) and not transfer.refused:
                release(transfer.size)
        self._transfers.clear()
        self._chunk = None
        self._rest = b""

    def under_way(self) -> dict[int, int]:
        """Return the numbers of large messages under way, and the bytes still to come."""
        return {number: left[0] for number, (_, left) in self._transfers.items()}

    def drop(self, number: int, limit: str, release: Callable[[int], None]) -> Transfer | None:
        """Refuse a large message that is under way: its memory is given back, and what still comes
        of it is dropped. None if that was done before."""
        transfer = self._transfers[number][0].body
        assert isinstance(transfer, Transfer)
        if transfer.dropped:
            return None
        transfer.dropped = True
        if not transfer.refused:
            transfer.refused, transfer.segments, transfer.reserved = limit, [], False
            release(transfer.size)
        return transfer

    # ── large messages ──────────────────────────────────────────────────────────────────────────

    def _announced(self, frame: Frame) -> Frame:
        """Take in the announcement of a large message; the frame to hand out for it."""
        body = frame.body
        if len(body) % _LENGTH.size or not 3 <= len(body) // _LENGTH.size <= MAX_SEGMENTS + 2:
            raise ProtocolError(f"an announcement of {len(body)} bytes")
        number, target, *lengths = struct.unpack(f"<{len(body) // 8}Q", body)
        total = sum(lengths)
        if total > self._max_message:
            raise ProtocolError(f"a message of {total} bytes is over the limit")
        if number in self._transfers or not total:
            raise ProtocolError(f"transfer {number} announced wrongly")
        if len(self._transfers) >= self._most_transfers:
            raise ProtocolError(f"{len(self._transfers)} large messages are under way already")
        frame = replace(frame, target=target, body=self._make_room(frame.kind, lengths))
        self._transfers[number] = (frame, [total])
        return frame

    def _make_room(self, kind: int, lengths: list[int]) -> Transfer:
        """Reserve and allocate memory for an announced message; it is refused if there is none."""
        size = memory_of(lengths) + self._overhead
        if not self._reserve(size):
            return Transfer(kind, size, [], "inbound_budget")
        try:
            return Transfer(kind, size, [self._memory.take(length) for length in lengths])
        except MemoryError:
            self._unavailable(size)
            return Transfer(kind, size, [], "allocation")

    def _copy_chunk(self, number: int, body: memoryview, frames: list[Frame]) -> None:
        """A chunk that lies in shared memory: copied at once, so that its block can go back."""
        segments = self._shared(CHUNK, body).segments
        if len(segments) != 1:
            raise ProtocolError(f"a chunk of {len(segments)} segments")
        self._begin_chunk(number, len(segments[0]), segments[0].data, frames)

    def _begin_chunk(
        self, number: int, length: int, available: memoryview, frames: list[Frame]
    ) -> int:
        """Start a chunk with what is already here; returns how many bytes of it that was."""
        entry = self._transfers.get(number)
        if entry is None or not 0 < length <= min(CHUNK_SIZE, entry[1][0]):
            raise ProtocolError(f"a chunk of {length} bytes for transfer {number}")
        self._chunk, self._chunk_number, self._chunk_left = entry, number, length
        transfer = entry[0].body
        if isinstance(transfer, Transfer) and transfer.refused:
            taken = min(length, len(available))
            if taken:
                self._fill(entry, taken, frames)
            return taken
        taken = 0
        while taken < len(available) and self._chunk is not None:
            window = self._chunk_window(entry)
            count = min(len(window), len(available) - taken)
            window[:count] = available[taken : taken + count]
            taken += count
            self._fill(entry, count, frames)
        return taken

    def _chunk_window(self, entry: tuple[Frame, list[int]]) -> memoryview:
        transfer = entry[0].body
        assert isinstance(transfer, Transfer)
        # A refused message is read into the buffer of small frames, which is empty while a chunk is
        # received: refusing for want of memory must not allocate more.
        window = self._view if transfer.refused else transfer.window()
        return window[: self._chunk_left]

    def _fill(self, entry: tuple[Frame, list[int]], count: int, frames: list[Frame]) -> None:
        frame, left = entry
        transfer = frame.body
        assert isinstance(transfer, Transfer)
        transfer.filled(count)
        self._chunk_left -= count
        left[0] -= count
        if self._chunk_left == 0:
            self._chunk = None
        if left[0] == 0:
            del self._transfers[self._chunk_number]
            transfer.complete = True
            if not transfer.dropped:
                frames.append(frame)
