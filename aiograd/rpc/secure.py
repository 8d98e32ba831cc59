"""Listening and dialling with TLS, in which strangers count from their first packet.

A server of asyncio's own tells a protocol about a connection only when TLS is done, so that
thousands could hold connections without anybody knowing. Here a visitor knocks first.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from aiograd.rpc.tls import Credentials
from aiograd.rpc.tunnel import Tunnel

_PAUSE = 0.05  # seconds, when no connection can be accepted: too many files are open


class Visitor(Protocol):
    """The protocol of a connection that comes in; told of it before TLS."""

    def knocked(self, host: str) -> bool: ...

    def failed(self, error: Exception) -> None: ...


class SecureListener:
    """Accepts TCP connections that speak TLS, until closed."""

    def __init__(
        self, bound: socket.socket, address: str, factory: Callable[[], Any], tls: Credentials
    ) -> None:
        self.address = address
        self._socket, self._factory, self._tls = bound, factory, tls
        self._tasks: set[asyncio.Task[None]] = set()
        # Closed when nothing is accepted any more, even if that never began.
        self._spawn(self._accept()).add_done_callback(lambda _: bound.close())

    @classmethod
    async def open(
        cls, host: str, port: int, factory: Callable[[], Any], tls: Credentials
    ) -> SecureListener:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, _, _, place = found[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
            bound.listen(100)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        return cls(bound, f"tcp:{shown}:{bound.getsockname()[1]}", factory, tls)

    def descriptors(self) -> list[int]:
        return [self._socket.fileno()]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                came, place = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(_PAUSE)
                continue
            visitor: Visitor = self._factory()
            if visitor.knocked(str(place[0])):
                self._spawn(self._let_in(came, visitor))
            else:
                came.close()

    async def _let_in(self, came: socket.socket, visitor: Any) -> None:
        tunnel = Tunnel(self._tls.server, visitor, server=True)
        try:
            async with asyncio.timeout(self._tls.timeout):
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: tunnel, came)
                await tunnel.ready
        except OSError as error:  # TimeoutError and SSLError are such
            tunnel.give_up()
            visitor.failed(error)
        except asyncio.CancelledError:
            tunnel.give_up()
            visitor.failed(ConnectionAbortedError("closed"))
            raise


async def connect_secure(
    host: str, port: int, factory: Callable[[], Any], tls: Credentials
) -> asyncio.BufferedProtocol:
    """Connect and agree on TLS; SSLError if that cannot be. The caller limits the time."""
    protocol: asyncio.BufferedProtocol = factory()
    tunnel = Tunnel(tls.client, protocol, server=False)
    try:
        await asyncio.get_running_loop().create_connection(lambda: tunnel, host, port)
        await tunnel.ready
    except BaseException:
        tunnel.give_up()
        raise
    return protocol
