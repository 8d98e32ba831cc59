"""The network inside one event loop: transports that hand bytes to each other's protocols.

    write ─▶ the other end's queue ─(next tick)▶ get_buffer, copy, buffer_updated
                                                  └─▶ count drained: the writer may go on

For tests, teaching and `LocalCluster(processes=False)`. It behaves like a socket where it matters:
bytes are copied, arrive in a later tick, and a slow reader makes the writer pause. Addresses are
`memory:name`; an `InprocNetwork` is their name space.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

Factory = Callable[[], asyncio.BufferedProtocol]


class InprocTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        # Without a socket: nothing to tune, no shared memory, no descriptor to close in children.
        super().__init__({"peername": name, "socket": None})
        self._loop = loop
        self._protocol: Any = None
        self._other: InprocTransport | None = None
        self._incoming: deque[memoryview] = deque()
        self._unread = 0  # bytes written here that the other end has not read yet
        # asyncio's own defaults, so that limits behave in tests as over sockets.
        self._high, self._low = 1 << 16, 1 << 14
        self._write_paused = self._read_paused = self._scheduled = False
        self._closing = self._ended = False

    @classmethod
    def pair(
        cls, loop: asyncio.AbstractEventLoop, name: str = "memory"
    ) -> tuple[InprocTransport, InprocTransport]:
        """Return the two ends of a new connection."""
        first, second = cls(loop, name), cls(loop, name)
        first.join(second)
        second.join(first)
        return first, second

    def join(self, other: InprocTransport) -> None:
        """Deliver what is written here to `other`."""
        self._other = other

    def attach(self, protocol: asyncio.BufferedProtocol) -> None:
        """Tell a protocol that the connection is made, and deliver what came before."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._schedule()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver to another protocol from now on."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that is delivered to."""
        return self._protocol  # type: ignore[no-any-return]

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue a copy of `data` at the other end; pause the protocol if it reads too slowly."""
        if self._closing or self._other is None or not len(data):
            return
        # Copied, as a socket does: the writer may change its memory at once.
        view = memoryview(bytes(data))
        self._unread += len(view)
        self._other.receive(view)
        if self._unread > self._high and not self._write_paused:
            self._write_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write several pieces as one."""
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the other end has not read yet."""
        return self._unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the bytes above which the protocol pauses, and down to which it stays paused."""
        self._high = high if high is not None else 1 << 16
        self._low = low if low is not None else self._high // 4

    def can_write_eof(self) -> bool:
        """Return False: a connection is closed as a whole."""
        return False

    def drained(self, count: int) -> None:
        """Take note that the other end has read `count` bytes; resume the protocol below `low`."""
        self._unread -= count
        if self._write_paused and self._unread <= self._low and not self._ended:
            self._write_paused = False
            # In a later tick: this is called from within the other end's `_deliver`, and a protocol
            # that resumes may write, and so reach that end again.
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._ended and not self._write_paused:
            self._protocol.resume_writing()

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def receive(self, view: memoryview) -> None:
        """Take bytes from the other end, and deliver them in the next tick."""
        self._incoming.append(view)
        self._schedule()

    def pause_reading(self) -> None:
        """Deliver nothing more; the other end notices by its unread bytes."""
        self._read_paused = True

    def resume_reading(self) -> None:
        """Deliver again from the next tick on."""
        self._read_paused = False
        self._schedule()

    def is_reading(self) -> bool:
        """Whether reading is not paused."""
        return not self._read_paused

    def _schedule(self) -> None:
        # Never delivered within `write`: protocols do not expect bytes while they send some.
        if not self._scheduled and self._protocol is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        # Asked for every piece: a protocol may pause, or close, while it handles one.
        while self._incoming and not self._read_paused and not self._ended:
            view = self._incoming[0]
            room = self._protocol.get_buffer(len(view))
            count = min(len(room), len(view))
            room[:count] = view[:count]
            if count == len(view):
                self._incoming.popleft()
            else:
                self._incoming[0] = view[count:]
            if self._other is not None:
                self._other.drained(count)
            self._protocol.buffer_updated(count)
        # Only after the last byte, as with a socket: a close does not overtake what was written.
        other = self._other
        if other is not None and other.is_closing() and not self._incoming and not self._ended:
            self._end(None)

    # ── closing ─────────────────────────────────────────────────────────────────────────────────

    def is_closing(self) -> bool:
        """Whether this end was closed."""
        return self._closing

    def close(self) -> None:
        """Close the connection; the other end still gets what was written, then the end."""
        if self._closing:
            return
        self._closing = True
        # `connection_lost` comes in a later tick, as asyncio promises: a protocol may close its
        # transport from within any of its own methods.
        self._loop.call_soon(self._end, None)
        if self._other is not None:
            self._other.other_closed()

    def abort(self) -> None:
        """Close the connection; what the other end has not read yet is lost."""
        if self._other is not None:
            self._other.drop_unread()
        self.close()

    def other_closed(self) -> None:
        """End this end, too, once everything that came is delivered."""
        self._schedule()

    def drop_unread(self) -> None:
        """Drop what came and was not delivered yet."""
        self._incoming.clear()

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = self._closing = True
            if self._protocol is not None:
                self._protocol.connection_lost(error)


class InprocListener:
    """A name in an `InprocNetwork` under which connections are accepted."""

    address: str

    def __init__(self, network: InprocNetwork, address: str) -> None:
        self._network, self.address = network, address

    def descriptors(self) -> list[int]:
        """Return none: nothing here belongs to the operating system."""
        return []

    def close(self) -> None:
        """Accept no more connections; those that exist go on."""
        self._network.listeners.pop(self.address, None)


class InprocNetwork:
    """The names that can be connected to; workers of one cluster share one."""

    def __init__(self) -> None:
        self.listeners: dict[str, Factory] = {}

    def listen(self, address: str, factory: Factory) -> InprocListener:
        """Accept connections at `address`. OSError if it is in use."""
        if address in self.listeners:
            raise OSError(f"{address} is in use")
        self.listeners[address] = factory
        return InprocListener(self, address)

    def connect(self, address: str, factory: Factory) -> asyncio.BufferedProtocol:
        """Connect, and return the protocol. ConnectionRefusedError if nothing listens there."""
        if address not in self.listeners:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        ours, theirs = InprocTransport.pair(asyncio.get_running_loop(), address)
        protocol = factory()
        theirs.attach(self.listeners[address]())
        ours.attach(protocol)
        return protocol
