"""A proxy between two workers that cuts connections, for tests over real sockets.

    async with Proxy("tcp:127.0.0.1:0", target=worker.info.addresses[0]) as proxy:
        agent.directory.add(replace(worker.info, addresses=(proxy.address,)))
        proxy.budget = lambda: random.randrange(100_000)    # bytes until a connection is cut

It forwards bytes as they arrive, in either direction, and ends both ends of a connection after the
last byte of its budget, wherever in a message that is. The simulator cuts connections in the same
way; this proxy does it to real kernels, and on uvloop, which cannot be simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiograd.rpc.transport.network import split, split_tcp

_HIGH = 1 << 20  # bytes of each direction that the proxy buffers before it stops reading


class Proxy:
    """Listens at one address, and forwards to another.

    `async with` starts it; `address` is then the one that it really listens at.

        >>> async with ag.testing.Proxy("tcp:127.0.0.1:0", target="tcp:127.0.0.1:9") as proxy:
        ...     proxy.budget = lambda: 1000  # bytes until a connection is cut
        ...     print(proxy.cuts)
        0
    """

    address: str
    target: str

    def __init__(self, address: str, target: str) -> None:
        self.address, self.target = address, target
        # Called for each new connection: bytes until it is cut, of both directions together.
        self.budget: Callable[[], int | None] = lambda: None
        self.silent = False  # accept new connections, and forward nothing
        self.cuts = 0
        self.connections: set[_Pair] = set()
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        loop = asyncio.get_running_loop()
        scheme, rest = split(self.address)
        if scheme == "unix":
            self._server = await loop.create_unix_server(self._accept, rest)
        else:
            host, port = split_tcp(self.address)
            server = self._server = await loop.create_server(self._accept, host, port)
            self.address = f"tcp:{host}:{server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The listener first: a worker would dial again at once after its connection is cut.
        self.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        # Aborted transports close their sockets in the next tick.
        await asyncio.sleep(0)

    def close(self) -> None:
        """Refuse new connections, as if the process behind the proxy had ended."""
        if self._server is not None:
            self._server.close()
            self._server = None
            # Before Python 3.13 asyncio leaves the file of a Unix socket behind.
            if self.address.startswith("unix:"):
                with contextlib.suppress(OSError):
                    os.unlink(split(self.address)[1])

    def cut(self) -> None:
        """End every connection."""
        # A copy: each pair removes itself.
        for pair in list(self.connections):
            pair.cut()

    def _accept(self) -> _End:
        pair = _Pair(self, None if self.silent else self.budget())
        self.connections.add(pair)
        return pair.near

    def join(self, pair: _Pair) -> None:
        """Connect the far end of a new pair, unless the proxy is silent."""
        if not self.silent:
            task = asyncio.get_running_loop().create_task(self._connect(pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, pair: _Pair) -> None:
        loop = asyncio.get_running_loop()
        scheme, rest = split(self.target)
        try:
            if scheme == "unix":
                await loop.create_unix_connection(lambda: pair.far, rest)
            else:
                await loop.create_connection(lambda: pair.far, *split_tcp(self.target))
        # As a real host would: the near end is accepted by the kernel, and then reset.
        except OSError:
            pair.cut()


class _Pair:
    """One connection through the proxy."""

    proxy: Proxy
    near: _End
    far: _End

    def __init__(self, proxy: Proxy, budget: int | None) -> None:
        self.proxy, self._budget = proxy, budget
        self.near, self.far = _End(self), _End(self)
        self.near.other, self.far.other = self.far, self.near
        self._early = bytearray()  # arrived before the far end was connected
        self._over = False

    def made(self, end: _End) -> None:
        """Take in an end that is connected now."""
        # The pair may have been cut while its far end was still being dialed.
        if self._over:
            end.transport.abort()
        elif end is self.near:
            self.proxy.join(self)
        else:
            self.forward(end, bytes(self._early))

    def forward(self, to: _End, data: bytes) -> None:
        """Write as much as the budget allows, and cut the connection at its last byte."""
        # Not counted yet: the budget is spent when bytes are really sent.
        if to.transport is None:
            self._early += data
            return
        if self._budget is not None:
            data = data[: self._budget]
            self._budget -= len(data)
        to.transport.write(data)
        if self._budget == 0:
            self.cut()

    def cut(self) -> None:
        """Abort both ends: what is still buffered is lost, as with a reset."""
        if not self._over:
            self._over = True
            self.proxy.cuts += 1
            self.proxy.connections.discard(self)
            for end in (self.near, self.far):
                if end.transport is not None:
                    end.transport.abort()


class _End(asyncio.Protocol):
    """One of the two sockets of a connection."""

    other: _End

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        self.transport = transport
        self.transport.set_write_buffer_limits(high=_HIGH)
        self._pair.made(self)

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`: forward to the other end."""
        self._pair.forward(self.other, data)

    # Back-pressure has to pass through, or tests of slow readers would fill this process.

    def pause_writing(self) -> None:
        """As `asyncio.Protocol`: stop reading at the other end."""
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """As `asyncio.Protocol`: read again at the other end."""
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`: end the other end, too."""
        self._pair.cut()
