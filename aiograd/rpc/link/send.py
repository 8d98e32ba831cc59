"""The outbox: what waits to be written to one peer, in three lanes.

    NOW      leaves at once: a call that is alone under way, gradients. Somebody waits for it, and
             this worker has other things to do meanwhile
    NORMAL   leaves at the end of the tick, with everything else of that tick in one write, so that
             the peer can begin with the first message while the last one is made
    LAZY     leaves in front of the next message of another lane, or after `LAZY_DELAY` seconds.
             Nobody waits for it, and waking up a peer takes longer than making a message

Calls of one function and replies that follow each other share a frame, a *batch*: nobody but the
outbox knows which messages will be one. A call whose result stays at the peer stays *open* until
the end of the tick, because its reply may still be asked to bring a copy.

Large messages are announced in order and then share the connection chunk by chunk, so that nothing
small waits behind a gigabyte. Nothing is written while the transport asks for a pause, so what
waits for a slow peer waits here, where it is counted. What is written is kept in the `Session`,
too, in case that it has to be written again over another connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from aiograd.wire.codec import Payload
from aiograd.wire.fastcodec import decode_batch, encode_batch
from aiograd.wire.framing import (
    CHUNK_SIZE,
    SMALL,
    Frame,
    FrameReader,
    Transfer,
    announce,
    pack_header,
)
from aiograd.wire.messages import BATCH, CHUNK, LARGE, OP, PIGGYBACK, POST, SHARED
from aiograd.wire.session import Piece, Session

NOW: Final = 0
NORMAL: Final = 1
LAZY: Final = 2

EARLY: Final = 64  # queued headers and bodies that do not wait for the end of the tick
_BATCH: Final = 32  # entries of a batch that do not, either
# Longer than a backward pass through many workers takes. In the middle of one, a lazy message on
# its own would wake up two workers that have nothing to do.
LAZY_DELAY: Final = 0.05
_TURNS: Final = 4  # chunks written before the loop gets a turn

Place = Callable[[memoryview], bytes | None]  # where a piece lies; b"": not yet; None: it cannot
Head = tuple[int, int, float, int]  # kind, flags, budget and target, which a batch has in common


class OpenCall:
    """A queued call that may still change: whether its reply brings a copy of the result."""

    __slots__ = ("body", "head", "id", "sealed")

    head: tuple[int, int, float, int]  # with PIGGYBACK, once a copy is asked for
    id: int

    def __init__(self, head: Head, id: int, body: Any) -> None:
        self.head, self.id = head, id
        self.body: Any = body  # an entry of a batch, or the bytes of a frame of its own
        self.sealed: bool = False  # no change is possible any more


class _Parcel:
    """A large message on its way out."""

    __slots__ = ("at", "id", "kind", "left", "number", "segments")

    def __init__(self, number: int, frame: Frame, segments: list[memoryview]) -> None:
        self.number, self.kind, self.id = number, frame.kind, frame.id
        self.segments = segments
        self.at = 0  # bytes of the first segment already gone
        self.left = sum(map(len, segments))

    def advance(self, size: int) -> None:
        """Leave behind `size` bytes of the first segment."""
        self.at += size
        if self.at == len(self.segments[0]):
            self.segments.pop(0)
            self.at = 0


class Outbox:
    """Messages for one peer, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, session: Session, sent: Callable[[], None]
    ) -> None:
        self._call_soon, self._call_later = loop.call_soon, loop.call_later
        self._session = session
        self._sent = sent  # called when something large has left, or the peer reads again
        self._queue: list[bytes] = []  # headers and bodies, in order
        self._batch: list[Any] = []  # entries of the batch that is being made, the latest of all
        self._head: Head = (0, 0, 0.0, 0)  # what its entries have in common
        self._next = 0  # the id that its next entry would have
        self._open: list[OpenCall] = []  # behind the queue; never together with a batch
        self._asked = 0  # calls among these that were asked for a copy since the last batch
        self._parcels: deque[_Parcel] = deque()
        self._numbers = 0
        self._transport: Any = None
        self.paused: bool = False  # the transport takes nothing more for now
        self.scheduled: bool = False  # a flush comes at the end of this tick
        self.corked: bool = False  # while a batch is read: everything it causes leaves in one write
        self._lazy = 0  # headers and bodies in the queue that are in no hurry
        self._counted = 0  # headers and bodies in the queue whose bytes were added up so far
        self._counted_bytes = 0
        self._delayed = False  # a timer will flush them
        self.waiting: int = 0  # bytes of large messages that have not left
        self.place: Place | None = None  # puts pieces of these into memory that the peer can see
        # While it has no transport, because the link rests or sleeps: gives it one, or begins to.
        self.wake: Callable[[], None] | None = None

    # ── filling ─────────────────────────────────────────────────────────────────────────────────

    def put(self, frame: Frame, lane: int = NORMAL) -> None:
        """Queue one small message; its body is bytes, or a `Payload` without buffers."""
        if self._batch or self._open:
            self._close_batch()
        kind, body = frame.kind, frame.body
        if body.__class__ is Payload:
            body = body.data
        queue = self._queue
        header = pack_header(kind, frame.flags, len(body), frame.id, frame.budget, frame.target)
        queue.append(header)
        queue.append(body)
        if lane == LAZY:
            self._lazy += 2
        if self.corked or self.scheduled:
            if len(queue) > EARLY:
                self._write_queue()
        elif lane == NOW:
            self._write_queue()
            if kind == POST:
                # Posts come in bursts: the others of this tick share a write at its end. A call
                # that was alone under way is followed by silence, so nothing is scheduled for it.
                self._schedule()
        elif lane == NORMAL:
            self._schedule()
        elif len(queue) > EARLY:
            self._write_queue()
        elif not self._delayed:
            self._delay()

    def put_batched(self, head: Head, id: int, entry: Any, lane: int = NORMAL) -> None:
        """Queue a call or reply that may share a frame with others of the same `head`."""
        if self._open:
            self._close_batch()
        batch = self._batch
        if batch and (head != self._head or id != self._next):
            self._close_batch()
            batch = self._batch
        self._head, self._next = head, id + 1
        batch.append(entry)
        if len(batch) >= _BATCH:
            self.flush_early()
        elif not self.scheduled and not self.corked:
            if lane == NOW:
                self.flush_early()
            else:
                self._schedule()

    def put_run(self, head: Head, first: int, entries: list[Any]) -> None:
        """Queue calls of consecutive ids and the same `head`, as `put_batched` one by one."""
        if self._batch or self._open:
            self._close_batch()
        while len(entries) >= _BATCH:
            self._put_batch(head, first, entries[:_BATCH])
            self._write_queue()
            entries, first = entries[_BATCH:], first + _BATCH
        if entries:
            self._batch, self._head, self._next = entries, head, first + len(entries)
            if not self.scheduled and not self.corked:
                self._schedule()

    def put_open(self, call: OpenCall) -> None:
        """Queue a call that stays open: until the end of the tick, or until another one follows.

        A copy that comes with the reply is as of the end of its call. So nothing that could change
        the value may be sent before the copy is asked for, except ops whose results stay as well.
        """
        if self._batch or (self._open and not call.head[1] & OP):
            self._close_batch()
        self._open.append(call)
        if not self.scheduled and not self.corked:
            self._schedule()

    def piggyback(self, call: OpenCall) -> bool:
        """Let the reply to an open call bring a copy; False if the call cannot be changed any more.

        Nothing is to be added to a call that was asked, so full batches of them leave at once: the
        peer works while the others are asked (`benchmarks/peers`, rref.batch1000)."""
        if call.sealed:
            return False
        kind, flags, budget, target = call.head
        call.head = (kind, flags | PIGGYBACK, budget, target)
        self._asked += 1
        if self._asked >= _BATCH and not self.corked:
            self._asked = 0
            first = self._open[:_BATCH]
            if all(each.head[1] & PIGGYBACK for each in first):
                del self._open[:_BATCH]
                self._seal(first)
                self._write_queue()
        return True

    def put_large(self, frame: Frame, segments: Sequence[Any]) -> None:
        """Queue a message of several segments, whose memory is borrowed until it is written."""
        views = [memoryview(segment) for segment in segments]
        self._numbers = number = (self._numbers + 1) & 0xFFFFFFFF
        body = announce(number, frame.target, [len(view) for view in views])
        self.put(replace(frame, flags=frame.flags | LARGE, target=0, body=body))
        parcel = _Parcel(number, frame, [view for view in views if len(view)])
        self._parcels.append(parcel)
        self.waiting += parcel.left
        if not self.scheduled and not self.corked:
            self._schedule()

    def acknowledge(self, ask: bool = False) -> None:
        """Queue a ping: it says how much has come, and with that that this worker lives.

        `ask`: the peer shall say so, too."""
        self._put_control(self._session.acknowledge(ask))

    def sleep(self) -> None:
        """Queue the message that this side needs no connection for now."""
        self._put_control(self._session.sleep())

    def _put_control(self, frame: bytes) -> None:
        if self._batch or self._open:
            self._close_batch()
        self._queue.append(frame)
        if not self.scheduled and not self.corked:
            self._schedule()

    def _close_batch(self) -> None:
        """Put the batch, or the open calls, into the queue: what comes next must not overtake."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._put_batch(self._head, self._next - len(batch), batch)
        elif self._open:
            calls, self._open, self._asked = self._open, [], 0
            self._seal(calls)

    def _put_batch(self, head: Head, first: int, entries: list[Any]) -> None:
        body = encode_batch(entries)
        if len(body) > SMALL:
            half = len(entries) // 2
            self._put_batch(head, first, entries[:half])
            self._put_batch(head, first + half, entries[half:])
            return
        kind, flags, budget, target = head
        self._queue.append(pack_header(kind, flags | BATCH, len(body), first, budget, target))
        self._queue.append(body)

    def _seal(self, calls: list[OpenCall]) -> None:
        """Queue open calls for good; those that are alike and follow each other as batches."""
        run: list[Any] = []
        head: Head = (0, 0, 0.0, 0)
        following = 0  # the id that would continue the run
        for call in calls:
            call.sealed = True
            alone = call.body.__class__ is bytes
            if run and (alone or call.head != head or call.id != following or len(run) >= _BATCH):
                self._put_batch(head, following - len(run), run)
                run = []
            if alone:
                kind, flags, budget, target = call.head
                body = call.body
                header = pack_header(kind, flags, len(body), call.id, budget, target)
                self._queue += (header, body)
            else:
                head, following = call.head, call.id + 1
                run.append(call.body)
        if run:
            self._put_batch(head, following - len(run), run)

    def _delay(self) -> None:
        self._delayed = True
        self._call_later(LAZY_DELAY, self._delay_over)

    def _delay_over(self) -> None:
        self._delayed = False
        if not self.scheduled and not self.corked:
            self.flush()

    def _schedule(self) -> None:
        self.scheduled = True
        self._call_soon(self.flush)

    def uncork(self) -> None:
        """Let leave what a batch of messages has caused, now that all of it has been read."""
        self.corked = False
        if self.scheduled:
            return
        if self._batch or self._open:
            self._close_batch()
        if len(self._queue) > self._lazy or self._parcels:
            self._write_queue()
        elif self._queue and not self._delayed:
            self._delay()

    # ── emptying ────────────────────────────────────────────────────────────────────────────────

    def open(self, transport: Any, again: Sequence[Piece] = ()) -> None:
        """Write to this transport from now on, beginning with what has to be written again."""
        # Everything is written at once, and what the socket does not take makes us pause.
        transport.set_write_buffer_limits(high=1, low=0)
        self._transport, self.paused, self.wake = transport, False, None
        for piece in again:
            transport.write(piece)
        self.flush()

    def detach(self, wake: Callable[[], None] | None = None) -> None:
        """Write to no connection for a while; `wake` is called when there is something to write."""
        self._transport, self.paused, self.wake = None, False, wake

    def attach(self, transport: Any) -> None:
        """Write to the transport again that was detached for a rest."""
        self._transport, self.wake = transport, None

    def close(self) -> None:
        """Drop everything that has not been written."""
        self._transport = self.wake = None
        self._queue.clear()
        self._batch.clear()
        self._open.clear()
        self._lazy = self._counted = self._counted_bytes = 0
        self._parcels.clear()
        self.waiting = 0

    def pause(self) -> None:
        """Write nothing more until `resume`: the transport has enough."""
        self.paused = True

    def resume(self) -> None:
        """Write again, and say that there is room."""
        self.paused = False
        if self._queue or self._batch or self._open or self._parcels:
            self.flush()
        self._sent()

    def flush(self) -> None:
        """Write everything, at the end of a tick."""
        self.scheduled = False
        if self._batch or self._open:
            self._close_batch()
        self._write_queue()

    def flush_early(self) -> None:
        """Write what there is, so that the peer can begin with it while more is made."""
        if self._batch or self._open:
            self._close_batch()
        self._write_queue()

    def _write_queue(self) -> None:
        if self._transport is None or self.paused:
            if self.wake is None or self.empty:
                return
            self.wake()
            if self._transport is None:
                return
        queue = self._queue
        if queue:
            session = self._session
            if session.received >= session.due:
                queue.insert(0, session.acknowledge())
            data = b"".join(queue)
            queue.clear()
            self._lazy = self._counted = self._counted_bytes = 0
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
                self._parcels.appendleft(parcel)  # it goes on when the peer has released something
                break
            if parcel.left:
                self._parcels.append(parcel)
            else:
                sent = True
        else:
            if self._parcels and not self.scheduled and not self.paused:
                self._schedule()
        if sent:  # not earlier: what it lets in must be announced before its chunks leave
            self._sent()

    def _send_chunk(self, parcel: _Parcel) -> bool:
        """Send the next piece of a large message; False if that has to wait."""
        place = self.place and self.place(parcel.segments[0][parcel.at : parcel.at + CHUNK_SIZE])
        if place is not None:
            return self._send_place(parcel, place)
        size = min(CHUNK_SIZE, parcel.left)
        if self.place is not None:  # what comes next may have a place
            size = min(size, len(parcel.segments[0]) - parcel.at)
        write, keep = self._transport.write, self._session.keep
        header = pack_header(CHUNK, 0, size, 0, 0.0, parcel.number)
        keep(header)
        write(header)
        parcel.left -= size
        self.waiting -= size
        while size:
            piece = parcel.segments[0][parcel.at : parcel.at + size]
            keep(piece)
            write(piece)
            size -= len(piece)
            parcel.advance(len(piece))
        return True

    def _send_place(self, parcel: _Parcel, place: bytes) -> bool:
        """Say where the next piece lies in memory that the peer can see."""
        if not place:
            return False
        data = pack_header(CHUNK, SHARED, len(place), 0, 0.0, parcel.number) + place
        self._session.keep(data)
        self._transport.write(data)
        size = min(CHUNK_SIZE, len(parcel.segments[0]) - parcel.at)
        parcel.left -= size
        self.waiting -= size
        parcel.advance(size)
        return True

    # ── what waits ──────────────────────────────────────────────────────────────────────────────

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be written."""
        return not (self._queue or self._batch or self._open or self._parcels)

    @property
    def length(self) -> int:
        """Headers and bodies in the queue."""
        return len(self._queue)

    @property
    def size(self) -> int:
        """Bytes not yet handed to the kernel, except messages that are only lazy."""
        waiting, queue = self.waiting, self._queue
        if len(queue) > self._lazy:
            # A queue grows until it is written. Only what is new is added up: while a peer does not
            # read, the sum is asked for with every call.
            if len(queue) > self._counted:
                self._counted_bytes += sum(map(len, queue[self._counted :]))
                self._counted = len(queue)
            waiting += self._counted_bytes
        return waiting + self._unwritten

    @property
    def _unwritten(self) -> int:
        """Bytes that the transport could not write so far."""
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    def over(self, limit: int) -> bool:
        """Whether more than `limit` bytes wait for a peer that does not read them."""
        if self.waiting > limit or not self.paused:
            return self.waiting > limit
        # Few messages cannot be too many bytes, and to add them up for every call takes long.
        most = len(self._queue) * SMALL + self.waiting + self._unwritten
        return most > limit and self.size > limit

    def unsent(self) -> set[tuple[int, int]]:
        """Return (kind, id) of messages that have not left completely."""
        if self._batch or self._open:
            self._close_batch()
        found = {(parcel.kind, parcel.id) for parcel in self._parcels}
        # Read back from the queue, because a link ends once and messages are queued all the time.
        reader = FrameReader(reserve=lambda _: False, shared=lambda kind, _: Transfer(kind, 0, []))
        for frame in reader.feed(b"".join(self._queue)):
            count = len(decode_batch(frame.body)) if frame.flags & BATCH else 1
            found.update((frame.kind, frame.id + index) for index in range(count))
        return found
