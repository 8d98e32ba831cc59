"""A network inside one event loop: transports that hand bytes to each other's protocols.

For tests, teaching and `LocalCluster(processes=False)`. It behaves like a socket where it matters:
bytes are copied, arrive in a later tick, and a slow reader makes the writer pause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

Factory = Callable[[], asyncio.BufferedProtocol]


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        super().__init__({"peername": name, "socket": None})
        self._loop = loop
        self._protocol: Any = None
        self._other: MemoryTransport | None = None
        self._incoming: deque[memoryview] = deque()
        self._outgoing = 0  # bytes written here that the other end has not read yet
        self._high, self._low = 1 << 16, 1 << 14
        self._write_paused = self._read_paused = self._scheduled = False
        self._closing = self._ended = False

    @staticmethod
    def pair(
        loop: asyncio.AbstractEventLoop, name: str = "memory"
    ) -> tuple[MemoryTransport, MemoryTransport]:
        first, second = MemoryTransport(loop, name), MemoryTransport(loop, name)
        first._other, second._other = second, first
        return first, second

    def attach(self, protocol: asyncio.BufferedProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._schedule()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._other is None or not len(data):
            return
        view = memoryview(bytes(data))
        self._outgoing += len(view)
        self._other._incoming.append(view)
        self._other._schedule()
        if self._outgoing > self._high and not self._write_paused:
            self._write_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self._outgoing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else 1 << 16
        self._low = low if low is not None else self._high // 4

    def can_write_eof(self) -> bool:
        return False

    # ── reading ─────────────────────────────────────────────────────────────────────────────────

    def pause_reading(self) -> None:
        self._read_paused = True

    def resume_reading(self) -> None:
        self._read_paused = False
        self._schedule()

    def is_reading(self) -> bool:
        return not self._read_paused

    def _schedule(self) -> None:
        if not self._scheduled and self._protocol is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
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
                self._other._drained(count)
            self._protocol.buffer_updated(count)
        other = self._other
        if other is not None and other._closing and not self._incoming and not self._ended:
            self._end(None)

    def _drained(self, count: int) -> None:
        self._outgoing -= count
        if self._write_paused and self._outgoing <= self._low and not self._ended:
            self._write_paused = False
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._ended and not self._write_paused:
            self._protocol.resume_writing()

    # ── closing ─────────────────────────────────────────────────────────────────────────────────

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self._end, None)
        if self._other is not None:
            self._other._schedule()  # what was written is still delivered there, then the end

    def abort(self) -> None:
        if self._other is not None:
            self._other._incoming.clear()
        self.close()

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = self._closing = True
            if self._protocol is not None:
                self._protocol.connection_lost(error)


class MemoryListener:
    """A name in a `MemoryHub` under which connections are accepted."""

    def __init__(self, hub: MemoryHub, address: str) -> None:
        self._hub, self.address = hub, address

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        self._hub.listeners.pop(self.address, None)


class MemoryHub:
    """The names that can be connected to; one per simulated network."""

    def __init__(self) -> None:
        self.listeners: dict[str, Factory] = {}

    def listen(self, address: str, factory: Factory) -> MemoryListener:
        if address in self.listeners:
            raise OSError(f"{address} is in use")
        self.listeners[address] = factory
        return MemoryListener(self, address)

    def connect(self, address: str, factory: Factory) -> asyncio.BufferedProtocol:
        if address not in self.listeners:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        ours, theirs = MemoryTransport.pair(asyncio.get_running_loop(), address)
        protocol = factory()
        theirs.attach(self.listeners[address]())
        ours.attach(protocol)
        return protocol
