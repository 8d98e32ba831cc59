"""A network of byte streams between simulated hosts, with every fault that TCP lets through.

    write ─▶ unsent ─▶ in flight (cut into pieces, delayed) ─▶ arrived ─▶ the protocol reads
             transport's    the wire                            the kernel's
             buffer                                             buffer

Inside a connection bytes neither vanish nor change order. What can happen: they arrive in other
pieces, late, or not at all; a connection is reset or half closed at any byte; a path is cut in one
direction or both, so that both ends keep a connection on which nothing arrives. As with a real
kernel, bytes that are not acknowledged for `USER_TIMEOUT` end the connection at the sender, and so
do probes of a quiet connection that are not answered for `KEEP_ALIVE`.

    Wire           all hosts, the paths between them, and the state of each path
    Stream         one direction of one connection
    SimTransport   one end of a connection: an `asyncio.Transport`, so the library's own protocol
                   classes run on it unchanged
    HostNetwork    the `Network` of one worker's `Runtime`

`schedule` decides which fault happens when; the network only carries them out.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiograd.rpc.transport.network import Network

SYN_TIMEOUT: Final = 127.0  # seconds after which a Linux kernel stops trying to connect
USER_TIMEOUT: Final = 5.0  # seconds; what `rpc.transport.network` asks of the kernel
KEEP_ALIVE: Final = 6.0  # seconds; likewise: a probe after one, and five more
_KEEP_IDLE: Final = 1.0  # seconds of quiet after which the kernel asks whether the peer is there
_PROBE: Final = 1.0  # seconds after which the kernel probes a closed window
_READ: Final = 256 * 1024  # bytes that a loop reads at once: asyncio's own limit

Factory = Callable[[], asyncio.BufferedProtocol]
Record = Callable[..., None]


class Host(Protocol):
    """What the network has to know of a node."""

    name: str
    alive: bool
    context: contextvars.Context  # its callbacks run in it


@dataclass
class WireSettings:
    """How the wire behaves when nothing is wrong; drawn from the seed."""

    latency: float = 0.0005
    jitter: float = 0.0005
    window: int = 1 << 18  # bytes that may be in flight or unread
    tiny: float = 0.3  # how often a piece has at most 64 bytes

    def delay(self, rng: random.Random) -> float:
        """Draw the delay of one piece."""
        return self.latency + rng.random() * self.jitter


class Wire:
    """All hosts, the paths between them, and what is wrong with each path.

    `context` is that of callbacks which belong to no node: a crash must not stop the network.
    """

    loop: asyncio.AbstractEventLoop
    settings: WireSettings
    record: Record
    context: contextvars.Context

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        settings: WireSettings,
        record: Record,
        context: contextvars.Context,
    ) -> None:
        self.loop, self.settings, self.record, self.context = loop, settings, record, context
        self.random: random.Random = rng
        self.listeners: dict[str, tuple[Host, Factory]] = {}
        self.connections: list[tuple[SimTransport, SimTransport]] = []
        # (from, to) → how many cuts are in effect. A count, because faults overlap: the end of one
        # cut must not heal another.
        self.cuts: dict[tuple[str, str], int] = {}
        self._cut_at: dict[tuple[str, str], float] = {}  # since when a path is cut
        self.clogs: dict[tuple[str, str], float] = {}  # (from, to) → extra seconds
        self.refusing: dict[str, int] = {}  # host → how many faults make it refuse connections
        self.on_write: Callable[[Any], None] | None = None  # called before each write of a node
        # When an end noticed that a fault had broken its connection, and between which hosts:
        # from this `schedule.Harm` concludes which losses are justified.
        self.breaks: list[tuple[float, frozenset[str]]] = []
        self.healed: asyncio.Event = asyncio.Event()
        self._numbers = 0

    def open_path(self, sender: str, to: str) -> bool:
        """Tell whether bytes get through in this direction."""
        return not self.cuts.get((sender, to))

    def change_cut(self, sender: str, to: str, by: int) -> None:
        """Add one cut to a path (`by` = 1), or remove one (-1)."""
        self.cuts[sender, to] = self.cuts.get((sender, to), 0) + by
        if by > 0 and self.cuts[sender, to] == by:
            now = self._cut_at[sender, to] = self.loop.time()
            context = self.context
            self.loop.call_later(KEEP_ALIVE, self._probe, sender, to, now, context=context)
        if by < 0:
            for pair in list(self.connections):
                for end in pair:
                    end.outgoing.retransmit()
            later = self.loop.call_later
            later(_KEEP_IDLE, self._probe_closed, sender, to, context=self.context)
            # A fresh event for the next cut: dials that wait see this one set exactly once.
            healed, self.healed = self.healed, asyncio.Event()
            healed.set()

    def _probe(self, sender: str, to: str, since: float) -> None:
        """As the kernels' keep-alive: end connections if their path has been cut all the time."""
        if self.open_path(sender, to) or self._cut_at[sender, to] != since:
            return
        for pair in self.between(sender, to):
            for end in pair:
                if end.node.alive and not end.gone:
                    self.record("unanswered", end.outgoing.name)
                    end.fail(TimeoutError(110, "Connection timed out"))

    def _probe_closed(self, sender: str, to: str) -> None:
        """As the kernels' keep-alive: a quiet end hears that the other one was closed meanwhile."""
        if not (self.open_path(sender, to) and self.open_path(to, sender)):
            return
        for pair in self.between(sender, to):
            for end, other in (pair, pair[::-1]):
                # The kernel of a process that ended answers, that of a host without power does not.
                if other.gone and not (end.gone or other.silent) and end.node.alive:
                    self.record("closed", end.outgoing.name)
                    end.peer_reset()

    def delay(self, sender: str, to: str) -> float:
        """Draw the delay of one piece on this path."""
        return self.settings.delay(self.random) + self.clogs.get((sender, to), 0.0)

    def between(self, a: str, b: str) -> list[tuple[SimTransport, SimTransport]]:
        """List the connections between two hosts, whichever of them dialed."""
        return [
            pair for pair in self.connections if {pair[0].node.name, pair[1].node.name} == {a, b}
        ]

    def of(self, node: Host) -> list[SimTransport]:
        """List the ends that one start of a worker has open."""
        return [end for pair in self.connections for end in pair if end.node is node]

    # ── connecting ──────────────────────────────────────────────────────────────────────────────

    async def connect(self, node: Host, address: str, factory: Factory) -> asyncio.BufferedProtocol:
        """Connect a node to an address, after a round trip.

        Raise ConnectionRefusedError when nothing listens there, TimeoutError when the path stays
        cut for `SYN_TIMEOUT`.
        """
        found = self.listeners.get(address)
        host = found[0].name if found is not None else address.rpartition(":")[2].partition(".")[0]
        await self._reach(node.name, host)
        # Looked up again: the listener may have closed, or started, during the round trip.
        found = self.listeners.get(address)
        if found is None or self.refusing.get(host):
            self.record("refused", node.name, host)
            raise ConnectionRefusedError(f"nobody listens at {address}")
        server, accept = found
        self._numbers += 1
        ours = SimTransport(self, node, self._numbers, "client")
        theirs = SimTransport(self, server, self._numbers, "server")
        ours.outgoing, theirs.outgoing = Stream(self, ours, theirs), Stream(self, theirs, ours)
        self.connections.append((ours, theirs))
        self.record("connect", node.name, host, self._numbers)
        # The server's kernel accepts at once, its process only when it runs its next callbacks:
        # a paused server has an accepted connection on which nothing happens.
        self.loop.call_soon(theirs.accept, accept, context=server.context)
        protocol = factory()
        ours.attach(protocol)
        return protocol

    async def _reach(self, name: str, host: str) -> None:
        """Wait for a round trip; raise TimeoutError when there is none for `SYN_TIMEOUT`."""
        await asyncio.sleep(self.delay(name, host) + self.delay(host, name))
        try:
            async with asyncio.timeout(SYN_TIMEOUT):
                while not (self.open_path(name, host) and self.open_path(host, name)):
                    await self.healed.wait()
                    await asyncio.sleep(self.random.uniform(0.0, 1.0))  # the next SYN
        except TimeoutError:
            raise TimeoutError(110, f"{host} does not answer") from None

    def note_break(self, here: str, there: str) -> None:
        """Note that an end sees now that its connection was broken by a fault."""
        self.breaks.append((self.loop.time(), frozenset({here, there})))

    def forget(self, end: SimTransport) -> None:
        """Drop a connection when both of its ends are gone."""
        for pair in self.connections:
            if end in pair and all(each.gone for each in pair):
                self.connections.remove(pair)
                return


class Stream:
    """One direction of a connection."""

    source: SimTransport
    sink: SimTransport

    def __init__(self, wire: Wire, source: SimTransport, sink: SimTransport) -> None:
        self._wire, self.source, self.sink = wire, source, sink
        self.unsent: bytearray = bytearray()
        self.ended = False  # after the unsent bytes comes the end of the stream
        self._end_sent = False
        self._flight: deque[bytes] = deque()  # b"" is the end of the stream
        self._stalled = False  # the first piece in flight waits for the path
        self.carried: int = 0  # bytes in flight or unread at the sink
        self._last = 0.0  # when the last piece arrives
        self._unacked: deque[float] = deque()  # when each unacknowledged piece was sent
        self._timer: asyncio.TimerHandle | None = None
        self.left: int | None = None  # bytes until a fault resets the connection
        self.total: int = 0
        self.dead: bool = False

    def pump(self) -> None:
        """Send as much as the window allows, in pieces of random sizes."""
        wire = self._wire
        while self.unsent and not self.dead:
            room = wire.settings.window - self.carried
            if room <= 0:
                if self._timer is None:
                    self._timer = self._call_at(wire.loop.time() + _PROBE, self._late)
                return
            size = min(len(self.unsent), room)
            # Tiny pieces end inside headers, the others inside bodies: a frame reader has to cope
            # with both.
            if wire.random.random() < wire.settings.tiny:
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
            # The checksum makes the trace hash depend on every byte, not only on sizes.
            wire.record("sent", self.name, len(piece), zlib.crc32(piece))
        self._flight.append(piece)
        delay = wire.delay(self.source.node.name, self.sink.node.name)
        # Never before the piece in front of it: TCP keeps the order, however delays were drawn.
        self._last = max(self._last, loop.time() + delay)
        self._call_at(self._last, self._arrive)
        self._unacked.append(loop.time())
        if self._timer is None:
            self._timer = self._call_at(loop.time() + USER_TIMEOUT, self._late)
        if self.left is not None:
            self.left -= len(piece)
            if self.left <= 0:
                # Once per fault, and when the piece arrives: its bytes are still received.
                self.left = None
                self._call_at(self._last, self.source.broken, self.sink)

    @property
    def name(self) -> str:
        """How traces call this stream."""
        return f"{self.source.node.name}>{self.sink.node.name}#{self.source.number}"

    def _call_at(self, when: float, action: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self._wire.loop.call_at(when, action, *args, context=self._wire.context)

    def _path(self) -> tuple[bool, bool]:
        here, there = self.source.node.name, self.sink.node.name
        return self._wire.open_path(here, there), self._wire.open_path(there, here)

    def _arrive(self) -> None:
        # Behind a stalled piece all others wait, too: `retransmit` schedules them again.
        if self.dead or not self._flight or self._stalled:
            return
        there, back = self._path()
        if not there or self.sink.silent:
            self._stalled = True
            return
        piece = self._flight.popleft()
        if back:
            # An acknowledgement takes no time of its own. Pieces still in flight count as sent
            # now: a kernel restarts its timer with every acknowledgement that makes progress.
            self._unacked.clear()
            self._unacked.extend([self._wire.loop.time()] * len(self._flight))
        # The kernel of the sink answers for a process that has closed, or has ended.
        if self.sink.gone:
            self.source.peer_reset()
        elif piece:
            self.sink.receive(piece)
        else:
            self.sink.receive_end()

    def retransmit(self) -> None:
        """Deliver what waited for a path that was opened again, after the kernel's next retry."""
        there, back = self._path()
        if self.dead or not there:
            return
        again = self._wire.loop.time() + self._wire.random.uniform(0.0, 0.5)
        if not self._stalled:
            # Everything had arrived, only the acknowledgements were lost on their way back.
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
        """As the kernel's timer: end the connection if a piece is unacknowledged for too long."""
        self._timer = None
        if self.dead or not (self._unacked or self.unsent):
            return
        now = self._wire.loop.time()
        if not self._unacked:
            # The window is closed, so nothing is under way that could be acknowledged. Without
            # this probe a host that lost power with a full buffer would never be missed.
            if all(self._path()) and not self.sink.silent:
                self._timer = self._call_at(now + _PROBE, self._late)
                return
            self._unacked.append(now)
        if now - self._unacked[0] < USER_TIMEOUT - 1e-9:
            self._timer = self._call_at(self._unacked[0] + USER_TIMEOUT, self._late)
        elif all(self._path()) and not self.sink.silent:
            self._timer = self._call_at(now + 0.5, self._late)  # a retransmission is under way
        else:
            self._wire.record("unacknowledged", self.name)
            self.source.fail(TimeoutError(110, "Connection timed out"))

    def read(self, count: int) -> None:
        """Open the window again by the bytes that the sink took out of its kernel's buffer."""
        self.carried -= count
        self.pump()
        self.source.relax()

    def stop(self) -> None:
        """Drop everything that has not arrived."""
        self.dead = True
        self.unsent.clear()
        self._flight.clear()
        self._unacked.clear()
        if self._timer is not None:
            self._timer.cancel()


class SimTransport(asyncio.Transport):
    """One end of a connection, as the protocols of the library see it.

    `gone`: its process does not have it any more. `silent`: its host has no power, so that it
    neither acknowledges nor resets.
    """

    node: Host
    number: int
    role: str
    gone: bool
    silent: bool

    outgoing: Stream

    def __init__(self, wire: Wire, node: Host, number: int, role: str) -> None:
        super().__init__({"peername": f"sim{number}", "socket": None})
        self._wire, self.node, self.number, self.role = wire, node, number, role
        self._protocol: Any = None
        self._arrived = bytearray()
        self._end_arrived = False
        self._high, self._low = 1 << 16, 1 << 14
        self._writing_paused = self._reading_paused = self._scheduled = False
        self._closing = False
        self.gone = self.silent = False
        self.broken_off = False  # by a fault in between

    # ── being connected ─────────────────────────────────────────────────────────────────────────

    def accept(self, factory: Factory) -> None:
        """Attach the listener's protocol, unless the connection ended before its process ran."""
        if not self.gone:
            self.attach(factory())

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the connection to a protocol, and read what has arrived before."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._schedule()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """As `asyncio.BaseTransport`: hand the connection over, after a handshake."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """As `asyncio.BaseTransport`."""
        return self._protocol  # type: ignore[no-any-return]

    def _call(self, action: Callable[..., None], *args: Any) -> None:
        self._wire.loop.call_soon(action, *args, context=self.node.context)

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """As `asyncio.WriteTransport`; never blocks, and pauses the protocol above `high`."""
        if self._wire.on_write is not None and self.node.alive:
            self._wire.on_write(self.node)
        # Asked again: `on_write` may have crashed the node right here.
        if self._closing or self.gone or not self.node.alive or not len(data):
            return
        self.outgoing.unsent += data
        self.outgoing.pump()
        if len(self.outgoing.unsent) > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """As `asyncio.WriteTransport`."""
        self.write(b"".join(list_of_data))

    def relax(self) -> None:
        """Resume the protocol if its buffer has drained."""
        if self._writing_paused and len(self.outgoing.unsent) <= self._low:
            self._writing_paused = False
            # On the node's own turn: a paused process does not run because its peer has read.
            self._call(self._resume)

    def _resume(self) -> None:
        if not self.gone and not self._writing_paused:
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        """As `asyncio.WriteTransport`: what the kernel has not taken yet."""
        return len(self.outgoing.unsent)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As `asyncio.WriteTransport`, with asyncio's defaults."""
        self._high = high if high is not None else 1 << 16
        self._low = low if low is not None else self._high // 4

    def can_write_eof(self) -> bool:
        """As `asyncio.WriteTransport`: the library never half-closes a connection."""
        return False

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def receive(self, piece: bytes) -> None:
        """Put a piece into the kernel's buffer; the process reads it when it runs."""
        self._arrived += piece
        self._schedule()

    def receive_end(self) -> None:
        """Note the end of the stream, to be read after all bytes."""
        self._end_arrived = True
        self._schedule()

    def pause_reading(self) -> None:
        """As `asyncio.ReadTransport`."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """As `asyncio.ReadTransport`."""
        self._reading_paused = False
        self._schedule()

    def is_reading(self) -> bool:
        """As `asyncio.ReadTransport`."""
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
            # As asyncio does when `eof_received` returns nothing.
            self._protocol.eof_received()
            self.close()

    def _fill(self, count: int) -> int:
        """Give the protocol bytes in the way it asks for them; return how many it took."""
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
        """As `asyncio.BaseTransport`."""
        return self._closing

    def close(self) -> None:
        """As `asyncio.BaseTransport`: send what was written, then the end of the stream."""
        if self._closing or self.gone:
            return
        self._closing = True
        self.outgoing.ended = True
        self.outgoing.pump()
        self._call(self._finish_close)

    def _finish_close(self) -> None:
        if self.gone:
            return
        # What was written is sent before the connection counts as closed, however slow the peer is:
        # a library that wants to be rid of it has to `abort`.
        if self.outgoing.unsent and not self.outgoing.dead:
            self._wire.loop.call_later(0.01, self._finish_close, context=self.node.context)
            return
        self._lost(None)

    def abort(self) -> None:
        """As `asyncio.WriteTransport`: drop what was written, and reset the other end."""
        if self.gone:
            return
        self._closing = True
        self.outgoing.stop()
        self._tell_peer()
        self._call(self._lost, None)

    def fail(self, error: Exception) -> None:
        """End the connection at this end only, as its kernel would."""
        if self.gone:
            return
        self._closing = True
        self.outgoing.stop()
        self._arrived.clear()
        self._call(self._lost, error)

    def peer_reset(self) -> None:
        """End the connection here because a reset has arrived."""
        self.fail(ConnectionResetError(104, "Connection reset by peer"))

    def broken(self, other: SimTransport) -> None:
        """Reset the connection at both ends, as a device between them would."""
        self._wire.record("reset", self.node.name, other.node.name, self.number)
        # Noted per end: each sees it at its own time, and its time to resume begins then.
        for end in (self, other):
            end.broken_off = True
            end.peer_reset()

    def _tell_peer(self) -> None:
        """Let a reset travel to the other end, unless the path is cut."""
        incoming = self._incoming()
        if incoming is None:
            return
        other = incoming.source
        there = self._wire.open_path(self.node.name, other.node.name)
        if there:
            delay = self._wire.delay(self.node.name, other.node.name)
            self._wire.loop.call_later(delay, other.peer_reset, context=self._wire.context)

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
        """End the process that has this end; its kernel sends `keep` more bytes and the end.

        Not if `silent`: the host has no power. `held`: a forked child has this end open, too, and
        does nothing with it, so that the connection does not end.
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


class HostNetwork(Network):
    """The network as one host sees it: the `network` of a simulated worker's `Runtime`."""

    def __init__(self, wire: Wire, node: Host) -> None:
        super().__init__()
        self._wire, self._node = wire, node

    def whereabouts(self) -> tuple[str, str]:
        """Each node is a host of its own."""
        return self._node.name, self._node.name

    async def listen(
        self, address: str, factory: Factory, *, allow_plaintext: bool = False, tls: Any = None
    ) -> HostListener:
        """As `Network.listen`; raise OSError when another start of a worker has the address."""
        if address in self._wire.listeners:
            raise OSError(98, f"{address} is in use")
        self._wire.listeners[address] = (self._node, factory)
        return HostListener(self._wire, address, self._node)

    async def connect(
        self, address: str, factory: Factory, *, tls: Any = None
    ) -> asyncio.BufferedProtocol:
        """As `Network.connect`."""
        return await self._wire.connect(self._node, address, factory)


class HostListener:
    """An address of a simulated host."""

    address: str

    def __init__(self, wire: Wire, address: str, node: Host) -> None:
        self._wire, self.address, self._node = wire, address, node

    def descriptors(self) -> list[int]:
        """There are none: nothing here is a file of the process."""
        return []

    def close(self) -> None:
        """Refuse connections from now on."""
        found = self._wire.listeners.get(self.address)
        # A crash may have taken the listener away already.
        if found is not None and found[0] is self._node:
            del self._wire.listeners[self.address]
