"""What waits to be written to one peer: small messages at once, large ones in turns.

All small messages of a tick leave in one write. Large ones are announced in order and then share
the connection chunk by chunk, so that nothing small waits behind a gigabyte. Nothing is written
while the transport asks for a pause, so what waits for a slow peer waits here, where it is counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiograd.wire.frames import CHUNK_SIZE, SMALL, announce, header
from aiograd.wire.messages import CHUNK, LARGE

_HIGH = 2 * CHUNK_SIZE  # enough to keep the socket busy, little enough to let others in


class _Parcel:
    """A large message on its way out."""

    __slots__ = ("at", "id", "kind", "left", "number", "segments")

    def __init__(self, number: int, kind: int, id: int, segments: list[memoryview]) -> None:
        self.number, self.kind, self.id = number, kind, id
        self.segments = segments
        self.at = 0  # bytes of the first segment already gone
        self.left = sum(map(len, segments))


class Outbox:
    """Messages for one connection, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sent: Callable[[], None]) -> None:
        self._loop = loop
        self._sent = sent  # told when something large has left
        self._small: list[bytes] = []
        self._size = 0
        self._parcels: deque[_Parcel] = deque()
        self._numbers = 0
        self._transport: Any = None
        self._paused = False
        self.scheduled = False
        self.corked = False  # while a batch is read: everything it causes leaves in one write
        self.written = 0  # writes so far; a quiet connection does not change it

    # ── filling ─────────────────────────────────────────────────────────────────────────────────

    def put(self, kind: int, flags: int, id: int, budget: float, target: int, body: bytes) -> None:
        """Queue one small message."""
        self._small.append(header(kind, flags, len(body), id, budget, target))
        if body:
            self._small.append(body)
        if not self.scheduled and not self.corked:
            self.scheduled = True
            self._loop.call_soon(self.flush)

    def put_large(
        self,
        kind: int,
        flags: int,
        id: int,
        budget: float,
        target: int,
        segments: Sequence[Any],
    ) -> None:
        """Queue a message of several segments, whose memory is borrowed until it is written."""
        views = [memoryview(segment).cast("B") for segment in segments]
        self._numbers = number = (self._numbers + 1) & 0xFFFFFFFF
        self.put(
            kind, flags | LARGE, id, budget, 0, announce(number, target, [len(v) for v in views])
        )
        self._parcels.append(_Parcel(number, kind, id, [view for view in views if len(view)]))

    def drop(self, kind: int, id: int) -> bool:
        """Forget a large message none of which has left yet; False if it cannot be stopped."""
        return False

    # ── emptying ────────────────────────────────────────────────────────────────────────────────

    def open(self, transport: Any) -> None:
        transport.set_write_buffer_limits(high=_HIGH, low=_HIGH // 4)
        self._transport, self._paused = transport, False
        self.flush()

    def close(self) -> None:
        self._transport = None
        self._small.clear()
        self._parcels.clear()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.flush()

    def flush(self) -> None:
        self.scheduled = False
        if self._transport is None or self._paused:
            return
        if self._small:
            small, self._small = self._small, []
            self.written += 1
            self._transport.write(b"".join(small))
        if self._parcels:
            self._send_chunks()

    def _send_chunks(self) -> None:
        turns = 4  # then the loop gets a turn
        while self._parcels and not self._paused and self._transport is not None:
            if not turns:
                if not self.scheduled:
                    self.scheduled = True
                    self._loop.call_soon(self.flush)
                return
            turns -= 1
            parcel = self._parcels.popleft()
            self._send_chunk(parcel)
            if parcel.left:
                self._parcels.append(parcel)
            else:
                self._sent()

    def _send_chunk(self, parcel: _Parcel) -> None:
        size = min(CHUNK_SIZE, parcel.left)
        self.written += 1
        write = self._transport.write
        write(header(CHUNK, 0, size, 0, 0.0, parcel.number))
        parcel.left -= size
        while size:
            segment = parcel.segments[0]
            piece = segment[parcel.at : parcel.at + size]
            write(piece)
            size -= len(piece)
            parcel.at += len(piece)
            if parcel.at == len(segment):
                parcel.segments.pop(0)
                parcel.at = 0

    # ── what waits ──────────────────────────────────────────────────────────────────────────────

    @property
    def empty(self) -> bool:
        return not self._small and not self._parcels

    @property
    def size(self) -> int:
        """Bytes not yet handed to the kernel."""
        waiting = sum(map(len, self._small)) + sum(parcel.left for parcel in self._parcels)
        if self._transport is not None:
            waiting += self._transport.get_write_buffer_size()
        return waiting

    def unsent(self) -> set[tuple[int, int]]:
        """(kind, id) of large messages that have not left completely."""
        return {(parcel.kind, parcel.id) for parcel in self._parcels}


def is_small(data: bytes, buffers: Sequence[Any]) -> bool:
    return not buffers and len(data) <= SMALL
