"""What waits to be written to one peer: small messages at once, large ones in turns.

The small messages of a tick leave in one write, or in a few, so that the peer can begin with the
first while the last are made. A call leaves at once if no other is under way, so do gradients and
what tells of shared memory: somebody waits, and we have other things to do meanwhile.
Calls and replies that are alike share a frame (`rows`). Large messages are announced in order and
then share the connection chunk by chunk, so that nothing small waits behind a gigabyte. Nothing is
written while the transport asks for a pause, so what waits for a slow peer waits here, where it is
counted. What is written goes into the `Session`, too, in case that it has to be written again.

Messages at lazy, for which nobody waits, leave with the next one that somebody does wait for: to
wake up a peer takes longer than to make a message. Alone, they leave after `LAZY_DELAY` seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiograd.wire.fastcodec import decode_batch, encode_batch
from aiograd.wire.framing import (
    CHUNK_SIZE,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    SMALL,
    announce,
    header,
)
from aiograd.wire.messages import BATCH, CHUNK, LARGE, SHARED
from aiograd.wire.session import Piece, Session

EARLY = 64  # headers and bodies that do not wait for the end of the tick
_ROW = 32  # entries of a row that do not, either
# Seconds that a message waits for company: longer than a pass through many workers takes, in the
# middle of which it would wake up two that have nothing to do.
LAZY_DELAY = 0.05
Lend = Callable[[memoryview], bytes | None]  # where it lies; b"": not yet; None: it cannot
_TURNS = 4  # chunks written before the loop gets a turn


class _Parcel:
    """A large message on its way out."""

    __slots__ = ("at", "id", "kind", "left", "number", "segments")

    def __init__(self, number: int, kind: int, id: int, segments: list[memoryview]) -> None:
        self.number, self.kind, self.id = number, kind, id
        self.segments = segments
        self.at = 0  # bytes of the first segment already gone
        self.left = sum(map(len, segments))


class Outbox:
    """Messages for one peer, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, session: Session, sent: Callable[[], None]
    ) -> None:
        self._call_soon, self._call_later = loop.call_soon, loop.call_later
        self._session = session
        self._sent = sent  # told when something large has left, or the peer reads again
        self.small: list[bytes] = []
        self.row: list[Any] = []  # entries of the row that is being made, the latest of all
        self._head = (0, 0, 0.0, 0)  # its kind, flags, budget and target
        self._next = 0  # the id of the entry that would be the next
        self._parcels: deque[_Parcel] = deque()
        self._numbers = 0
        self._transport: Any = None
        self.paused = False
        self.scheduled = False
        self.ticks = 0  # so far; what is put in one of them leaves by its end
        self.corked = False  # while a batch is read: everything it causes leaves in one write
        self._lazy = 0  # headers and bodies among the small ones that are in no hurry
        self._lingering = False  # their time will come
        self.waiting = 0  # bytes of large messages that have not left
        self.lend: Lend | None = None  # puts pieces of these into memory that the peer can see

    # ── filling ─────────────────────────────────────────────────────────────────────────────────

    def put(self, kind: int, flags: int, id: int, budget: float, target: int, body: bytes) -> None:
        """Queue one small message."""
        small = self.small
        if self.row:
            self.end_batch()
        small.append(HEADER.pack(MAGIC, kind, flags, len(body), id, budget, target))
        if body:
            small.append(body)
        if len(small) > EARLY:
            self.flush_early()
        elif not self.scheduled and not self.corked:
            self.schedule()

    def put_now(
        self, kind: int, flags: int, id: int, budget: float, target: int, body: bytes
    ) -> None:
        """Queue one small message that tells of much, and let the peer begin with it at once."""
        if self.row:
            self.end_batch()
        self.small.append(HEADER.pack(MAGIC, kind, flags, len(body), id, budget, target))
        self.small.append(body)
        if not self.corked:
            self._write()

    def put_first(
        self, kind: int, flags: int, id: int, budget: float, target: int, body: bytes
    ) -> None:
        """Queue one small message that leaves at once; those that follow in this tick share one."""
        if self.scheduled or self.corked:
            self.put(kind, flags, id, budget, target, body)
        else:
            self.put_now(kind, flags, id, budget, target, body)
            self.schedule()

    def put_lazy(
        self, kind: int, flags: int, id: int, budget: float, target: int, body: bytes
    ) -> None:
        """Queue one small message that may wait for others."""
        if self.row:
            self.end_batch()
        before = len(self.small)
        self.small.append(HEADER.pack(MAGIC, kind, flags, len(body), id, budget, target))
        if body:
            self.small.append(body)
        self.linger(len(self.small) - before)

    def put_batched(
        self,
        kind: int,
        flags: int,
        id: int,
        budget: float,
        target: int,
        entry: Any,
        first: bool = False,
    ) -> None:
        """Queue a call or reply that may share a frame with others; the `first` waits for none."""
        row, head = self.row, (kind, flags, budget, target)
        if row and (head != self._head or id != self._next):
            self.end_batch()
            row = self.row
        self._head, self._next = head, id + 1
        row.append(entry)
        if len(row) >= _ROW:
            self.flush_early()
        elif not self.scheduled and not self.corked:
            if first:
                self.flush_early()
            else:
                self.schedule()

    def end_batch(self) -> None:
        """What comes next must not go before it."""
        row, self.row = self.row, []
        self._put_batch(row, self._next - len(row))

    def _put_batch(self, row: list[Any], first: int) -> None:
        body = encode_batch(row)
        if len(body) > SMALL:
            half = len(row) // 2
            self._put_batch(row[:half], first)
            self._put_batch(row[half:], first + half)
        else:
            kind, flags, budget, target = self._head
            frame = HEADER.pack(MAGIC, kind, flags | BATCH, len(body), first, budget, target)
            self.small += (frame, body)

    def linger(self, count: int) -> None:
        """The last so many headers and bodies are in no hurry."""
        self._lazy += count
        if len(self.small) > EARLY:
            self.flush_early()
        elif not self._lingering and not self.scheduled and not self.corked:
            self._wait_for_company()

    def _wait_for_company(self) -> None:
        self._lingering = True
        self._call_later(LAZY_DELAY, self._waited)

    def _waited(self) -> None:
        self._lingering = False
        if not self.scheduled and not self.corked:
            self.flush()

    def put_large(
        self, kind: int, flags: int, id: int, budget: float, target: int, segments: Sequence[Any]
    ) -> None:
        """Queue a message of several segments, whose memory is borrowed until it is written."""
        views = [memoryview(segment) for segment in segments]
        self._numbers = number = (self._numbers + 1) & 0xFFFFFFFF
        body = announce(number, target, [len(view) for view in views])
        self.put(kind, flags | LARGE, id, budget, 0, body)
        parcel = _Parcel(number, kind, id, [view for view in views if len(view)])
        self._parcels.append(parcel)
        self.waiting += parcel.left
        if not self.scheduled and not self.corked:
            self.schedule()

    def flush_early(self) -> None:
        """Let the peer begin with what there is while more is made."""
        self._write()

    def acknowledge(self) -> None:
        """Say how much has come, and with that that we live."""
        if self.row:
            self.end_batch()
        self.small.append(self._session.acknowledge())
        if not self.scheduled and not self.corked:
            self.schedule()

    def schedule(self) -> None:
        self.scheduled = True
        self._call_soon(self.flush)

    def uncork(self) -> None:
        """A batch has been read: let leave what it caused."""
        self.corked = False
        if self.scheduled:
            return
        if self.row or len(self.small) > self._lazy or self._parcels:
            self.flush()
        elif self.small and not self._lingering:
            self._wait_for_company()

    # ── emptying ────────────────────────────────────────────────────────────────────────────────

    def open(self, transport: Any, again: Sequence[Piece] = ()) -> None:
        """Write to this transport from now on, beginning with what has to be written again."""
        # Everything is written at once, and what the socket does not take makes us pause.
        transport.set_write_buffer_limits(high=1, low=0)
        self._transport, self.paused = transport, False
        for piece in again:
            transport.write(piece)
        self.flush()

    def detach(self) -> None:
        """There is no connection for a while."""
        self._transport, self.paused = None, False

    def close(self) -> None:
        self._transport = None
        self.small.clear()
        self.row.clear()
        self._lazy = 0
        self._parcels.clear()
        self.waiting = 0

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.flush()
        self._sent()

    def flush(self) -> None:
        self.scheduled = False
        self.ticks += 1
        self._write()

    def _write(self) -> None:
        if self.row:
            self.end_batch()
        if self._transport is None or self.paused:
            return
        small = self.small
        if small:
            session = self._session
            if session.received >= session.due:
                small.insert(0, session.acknowledge())
            data = b"".join(small)
            small.clear()
            self._lazy = 0
            session.keep(data)
            self._transport.write(data)
        if self._parcels:
            self._send_chunks()

    def _send_chunks(self) -> None:
        sent = False
        for _ in range(_TURNS):
            if self.paused or self._transport is None or not self._parcels:
                break
            parcel = self._parcels.popleft()
            if not self._send_chunk(parcel):
                self._parcels.appendleft(parcel)  # it goes on when the peer has returned something
                break
            if parcel.left:
                self._parcels.append(parcel)
            else:
                sent = True
        else:
            if self._parcels and not self.scheduled and not self.paused:
                self.schedule()
        if sent:  # not earlier: what it lets in must be announced before its chunks leave
            self._sent()

    def _send_chunk(self, parcel: _Parcel) -> bool:
        """Send the next piece of a large message; False if that has to wait."""
        place = self.lend and self.lend(parcel.segments[0][parcel.at : parcel.at + CHUNK_SIZE])
        if place is not None:
            return self._send_place(parcel, place)
        size = min(CHUNK_SIZE, parcel.left)
        if self.lend is not None:  # what comes next may have a place
            size = min(size, len(parcel.segments[0]) - parcel.at)
        write, keep = self._transport.write, self._session.keep
        head = header(CHUNK, 0, size, 0, 0.0, parcel.number)
        keep(head)
        write(head)
        parcel.left -= size
        self.waiting -= size
        while size:
            segment = parcel.segments[0]
            piece = segment[parcel.at : parcel.at + size]
            keep(piece)
            write(piece)
            size -= len(piece)
            parcel.at += len(piece)
            if parcel.at == len(segment):
                parcel.segments.pop(0)
                parcel.at = 0
        return True

    def _send_place(self, parcel: _Parcel, place: bytes) -> bool:
        """The next piece lies in memory that the peer can see: say where."""
        if not place:
            return False
        data = header(CHUNK, SHARED, len(place), 0, 0.0, parcel.number) + place
        self._session.keep(data)
        self._transport.write(data)
        segment = parcel.segments[0]
        size = min(CHUNK_SIZE, len(segment) - parcel.at)
        parcel.left -= size
        self.waiting -= size
        parcel.at += size
        if parcel.at == len(segment):
            parcel.segments.pop(0)
            parcel.at = 0
        return True

    # ── what waits ──────────────────────────────────────────────────────────────────────────────

    @property
    def empty(self) -> bool:
        return not self.small and not self.row and not self._parcels

    @property
    def size(self) -> int:
        """Bytes not yet handed to the kernel, but for those that only wait for company."""
        waiting = self.waiting
        if len(self.small) > self._lazy:
            waiting += sum(map(len, self.small))
        return waiting + self._unwritten

    @property
    def _unwritten(self) -> int:
        """Bytes that the transport could not write so far."""
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    def over(self, limit: int) -> bool:
        """Whether more than so many bytes wait for a peer that does not read them."""
        if self.waiting > limit or not self.paused:
            return self.waiting > limit
        # Few messages cannot be too many bytes, and to add them up for every call takes long.
        most = len(self.small) * SMALL + self.waiting + self._unwritten
        return most > limit and self.size > limit

    def unsent(self) -> set[tuple[int, int]]:
        """(kind, id) of messages that have not left completely."""
        if self.row:
            self.end_batch()
        found = {(parcel.kind, parcel.id) for parcel in self._parcels}
        data, at = b"".join(self.small), 0
        while at < len(data):
            _, kind, flags, length, id, _, _ = HEADER.unpack_from(data, at)
            at += HEADER_SIZE
            count = len(decode_batch(data[at : at + length])) if flags & BATCH else 1
            found.update((kind, id + index) for index in range(count))
            at += length
        return found
