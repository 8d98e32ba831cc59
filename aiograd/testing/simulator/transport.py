"""The two ends of a simulated connection, and the bytes between them.

    write ─▶ unsent ─▶ in flight (cut into pieces, delayed) ─▶ arrived ─▶ the protocol reads
             transport's    the wire                            the kernel's
             buffer                                             buffer

Which paths are open, and how slow they are, is the `Wire`'s knowledge.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aiograd.testing.simulator.network import Wire
    from aiograd.testing.simulator.world import Node

USER_TIMEOUT: Final = 5.0  # seconds; what `rpc.transport.tune` asks of the kernel
_PROBE: Final = 1.0  # seconds after which the kernel asks whether a closed window has been opened
_READ: Final = 256 * 1024  # bytes that a loop reads at once

Factory = Callable[[], asyncio.BufferedProtocol]


class Stream:
    """One direction of a connection."""

    def __init__(self, wire: Wire, source: SimTransport, sink: SimTransport) -> None:
        self._wire, self.source, self.sink = wire, source, sink
        self.unsent = bytearray()
        self.ended = False  # after the unsent bytes comes the end of the stream
        self._end_sent = False
        self._flight: deque[bytes] = deque()  # b"" is the end of the stream
        self._stalled = False  # the first piece in flight waits for the path
        self.carried = 0  # bytes in flight or unread at the sink
        self._last = 0.0  # when the last piece arrives
        self._unacked: deque[float] = deque()  # when what is not acknowledged was sent
        self._timer: asyncio.TimerHandle | None = None
        self.left: int | None = None  # bytes until somebody cuts the connection
        self.total = 0
        self.dead = False

    def pump(self) -> None:
        """Send as much as the window allows."""
        wire = self._wire
        while self.unsent and not self.dead:
            room = wire.manner.window - self.carried
            if room <= 0:
                if self._timer is None:
                    self._timer = self._call_at(wire.loop.time() + _PROBE, self._late)
                return
            size = min(len(self.unsent), room)
            if wire.random.random() < wire.manner.crumbs:
                size = min(size, wire.random.randint(1, 64))
            elif size > 64 and wire.random.random() < 0.3:
                size = wire.random.randint(1, size)
            piece = bytes(self.unsent[:size])
            del self.unsent[:size]
            self.carried += size
            self._send(piece)
        if self.ended and not self.unsent and not self._end_sent and not self.dead:
            self._end_sent = True
            self._send(b"")

    def _send(self, piece: bytes) -> None:
        wire, loop = self._wire, self._wire.loop
        if piece:
            self.total += len(piece)
            wire.record("sent", self.name, len(piece), zlib.crc32(piece))
        self._flight.append(piece)
        delay = wire.delay(self.source.node.name, self.sink.node.name)
        self._last = max(self._last, loop.time() + delay)
        self._call_at(self._last, self._arrive)
        self._unacked.append(loop.time())
        if self._timer is None:
            self._timer = self._call_at(loop.time() + USER_TIMEOUT, self._late)
        if self.left is not None:
            self.left -= len(piece)
            if self.left <= 0:
                self.left = None
                self._call_at(self._last, self.source.broken, self.sink)

    @property
    def name(self) -> str:
        return f"{self.source.node.name}>{self.sink.node.name}#{self.source.number}"

    def _call_at(self, when: float, action: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self._wire.loop.call_at(when, action, *args, context=self.source.world_context)

    def _path(self) -> tuple[bool, bool]:
        here, there = self.source.node.name, self.sink.node.name
        return self._wire.open_path(here, there), self._wire.open_path(there, here)

    def _arrive(self) -> None:
        if self.dead or not self._flight or self._stalled:
            return
        there, back = self._path()
        if not there or self.sink.silent:
            self._stalled = True
            return
        piece = self._flight.popleft()
        if back:
            self._unacked.clear()
            self._unacked.extend([self._wire.loop.time()] * len(self._flight))
        if self.sink.gone:
            self.source.peer_reset()
        elif piece:
            self.sink.receive(piece)
        else:
            self.sink.receive_end()

    def retransmit(self) -> None:
        """A path was opened again: what waited comes after the next retry."""
        there, back = self._path()
        if self.dead or not there:
            return
        again = self._wire.loop.time() + self._wire.random.uniform(0.0, 0.5)
        if not self._stalled:
            if back:
                self._call_at(again, self._acknowledge)
            return
        self._stalled = False
        for _ in self._flight:
            again += self._wire.random.uniform(0.0, 0.001)
            self._call_at(again, self._arrive)
        self._last = max(self._last, again)

    def _acknowledge(self) -> None:
        if all(self._path()) and not self._flight:
            self._unacked.clear()

    def _late(self) -> None:
        """The kernel looks whether anything is unacknowledged for too long."""
        self._timer = None
        if self.dead or not (self._unacked or self.unsent):
            return
        now = self._wire.loop.time()
        if not self._unacked:  # the window is closed: is anybody there?
            if all(self._path()) and not self.sink.silent:
                self._timer = self._call_at(now + _PROBE, self._late)
                return
            self._unacked.append(now)
        if now - self._unacked[0] < USER_TIMEOUT - 1e-9:
            self._timer = self._call_at(self._unacked[0] + USER_TIMEOUT, self._late)
        elif all(self._path()) and not self.sink.silent:
            self._timer = self._call_at(now + 0.5, self._late)  # a retry is under way
        else:
            self._wire.record("unacknowledged", self.name)
            self.source.fail(TimeoutError(110, "Connection timed out"))

    def read(self, count: int) -> None:
        """The sink took bytes out of its kernel's buffer."""
        self.carried -= count
        self.pump()
        self.source.relax()

    def stop(self) -> None:
        self.dead = True
        self.unsent.clear()
        self._flight.clear()
        self._unacked.clear()
        if self._timer is not None:
            self._timer.cancel()


class SimTransport(asyncio.Transport):
    """One end of a connection. `gone`: its process does not have it any more."""

    outgoing: Stream

    def __init__(self, wire: Wire, node: Node, number: int, role: str) -> None:
        super().__init__({"peername": f"sim{number}", "socket": None})
        self._wire, self.node, self.number, self.role = wire, node, number, role
        self.world_context = node.world.context
        self._protocol: Any = None
        self._arrived = bytearray()
        self._end_arrived = False
        self._high, self._low = 1 << 16, 1 << 14
        self._writing_paused = self._reading_paused = self._scheduled = False
        self._closing = False
        self.gone = self.silent = False
        self.broken_off = False  # by somebody in between

    # ── being connected ─────────────────────────────────────────────────────────────────────────

    def accept(self, factory: Factory) -> None:
        if not self.gone:
            self.attach(factory())

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._schedule()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]

    def _call(self, action: Callable[..., None], *args: Any) -> None:
        self._wire.loop.call_soon(action, *args, context=self.node.context)

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._wire.on_write is not None and self.node.alive:
            self._wire.on_write(self.node)
        if self._closing or self.gone or not self.node.alive or not len(data):
            return
        self.outgoing.unsent += data
        self.outgoing.pump()
        if len(self.outgoing.unsent) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def relax(self) -> None:
        """There may be room again."""
        if self._writing_paused and len(self.outgoing.unsent) <= self._low:
            self._writing_paused = False
            self._call(self._resume)

    def _resume(self) -> None:
        if not self.gone and not self._writing_paused:
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.outgoing.unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else 1 << 16
        self._low = low if low is not None else self._high // 4

    def can_write_eof(self) -> bool:
        return False

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def receive(self, piece: bytes) -> None:
        self._arrived += piece
        self._schedule()

    def receive_end(self) -> None:
        self._end_arrived = True
        self._schedule()

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._schedule()

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def _schedule(self) -> None:
        if not self._scheduled and self._protocol is not None and not self.gone:
            self._scheduled = True
            self._call(self._read)

    def _read(self) -> None:
        self._scheduled = False
        if self.gone or self._reading_paused or self._closing:
            return
        if self._arrived:
            count = self._fill(min(len(self._arrived), _READ))
            incoming = self._incoming()
            if incoming is not None:
                incoming.read(count)
            if self._arrived or self._end_arrived:
                self._schedule()
        elif self._end_arrived:
            self._protocol.eof_received()
            self.close()

    def _fill(self, count: int) -> int:
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            room: Any = self._protocol.get_buffer(count)
            count = min(count, len(room))
            room[:count] = self._arrived[:count]
            del self._arrived[:count]
            self._wire.record("read", self.node.name, self.number, count)
            self._protocol.buffer_updated(count)
        else:
            data = bytes(self._arrived[:count])
            del self._arrived[:count]
            self._wire.record("read", self.node.name, self.number, count)
            self._protocol.data_received(data)
        return count

    def _incoming(self) -> Stream | None:
        for ours, theirs in self._wire.connections:
            if ours is self:
                return theirs.outgoing
            if theirs is self:
                return ours.outgoing
        return None

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing or self.gone:
            return
        self._closing = True
        self.outgoing.ended = True
        self.outgoing.pump()
        self._call(self._finish_close)

    def _finish_close(self) -> None:
        if self.gone:
            return
        if self.outgoing.unsent and not self.outgoing.dead:
            self._wire.loop.call_later(0.01, self._finish_close, context=self.node.context)
            return
        self._lost(None)

    def abort(self) -> None:
        if self.gone:
            return
        self._closing = True
        self.outgoing.stop()
        self._tell_peer()
        self._call(self._lost, None)

    def fail(self, error: Exception) -> None:
        """The kernel ends the connection here."""
        if self.gone:
            return
        self._closing = True
        self.outgoing.stop()
        self._arrived.clear()
        self._call(self._lost, error)

    def peer_reset(self) -> None:
        self.fail(ConnectionResetError(104, "Connection reset by peer"))

    def broken(self, other: SimTransport) -> None:
        """Somebody in between resets the connection for both."""
        self._wire.record("reset", self.node.name, other.node.name, self.number)
        for end in (self, other):
            end.broken_off = True
            end.peer_reset()

    def _tell_peer(self) -> None:
        """A reset travels to the other end, unless the path is cut."""
        incoming = self._incoming()
        if incoming is None:
            return
        other = incoming.source
        there = self._wire.open_path(self.node.name, other.node.name)
        if there:
            delay = self._wire.delay(self.node.name, other.node.name)
            self._wire.loop.call_later(delay, other.peer_reset, context=self.world_context)

    def _lost(self, error: Exception | None) -> None:
        if not self.gone:
            self.gone = True
            self._wire.record("lost", self.node.name, self.number, type(error).__name__)
            self._wire.forget(self)
            if self.broken_off:
                self._wire.note_break(self.node.name, self.outgoing.sink.node.name)
            if self._protocol is not None:
                self._protocol.connection_lost(error)

    def crash(self, *, silent: bool, keep: int, held: bool = False) -> None:
        """The process is gone. Its kernel still sends `keep` bytes and the end, unless silent.

        `held`: another process has this end open, too, and does nothing with it.
        """
        if self.gone:
            return
        if held:
            del self.outgoing.unsent[keep:]
            return
        self.gone, self.silent = True, silent
        self._arrived.clear()
        if silent:
            self.outgoing.stop()
            return
        del self.outgoing.unsent[keep:]
        self.outgoing.ended = True
        self.outgoing.pump()
