"""The network: addresses to listeners and connections, as asyncio protocols.

    unix:/path/to/socket      tcp:host:port      memory:name

    Network.listen  ─▶ Listener             `factory()` makes a protocol per accepted connection
    Network.connect ─▶ its protocol         after `connection_made`

Protocols are `BufferedProtocol`s: the receiver says where bytes go, so that a large array is read
into its own memory. Nothing else in the library opens a socket between workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from typing import Any, Protocol

from aiograd.errors import AuthError, InsecureTransport
from aiograd.rpc.transport.inproc import Factory, InprocNetwork
from aiograd.rpc.transport.interfaces import host_name, locality
from aiograd.rpc.transport.tls import (
    BACKLOG,
    Credentials,
    TLSListener,
    connect_tls,
    explain_failure,
)

# Bytes. With the kernel's default (200 KiB) a large array moves in many small steps, and each of
# them wakes up both sides.
_SOCKET_BUFFER = 4 << 20
# Milliseconds without an acknowledgement after which TCP fails; by default it retries for minutes,
# and `WorkerLost` is promised in seconds.
_USER_TIMEOUT = 5000


class Listener(Protocol):
    """Something that accepts connections until closed; `address` is where it really listens."""

    address: str

    def close(self) -> None:
        """Accept no more connections; those that were accepted go on."""

    def descriptors(self) -> list[int]:
        """Return the descriptors of its sockets."""


class _ServerListener:
    """A server of asyncio's; `path` is the file of a Unix socket."""

    def __init__(self, server: asyncio.Server, address: str, path: str | None) -> None:
        self._server, self.address, self._path = server, address, path

    def descriptors(self) -> list[int]:
        """Return the descriptors of the listening sockets."""
        return [each.fileno() for each in self._server.sockets]

    def close(self) -> None:
        """Stop listening, and remove the file of a Unix socket."""
        self._server.close()
        # asyncio leaves the file of a Unix socket behind, and the next start could not bind to it.
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


class Network:
    """Unix and TCP sockets, and the memory network of this object."""

    def __init__(self) -> None:
        self.memory: InprocNetwork = InprocNetwork()

    def whereabouts(self) -> tuple[str, str]:
        """Return the name of this host and what processes share that share its loopback."""
        return host_name(), locality()

    async def listen(
        self,
        address: str,
        factory: Factory,
        *,
        allow_plaintext: bool = False,
        tls: Credentials | None = None,
    ) -> Listener:
        """Accept connections at `address`; port 0 is resolved in the result's `address`.

        With `tls`, TCP connections speak TLS, and `factory` makes a `tls.PendingConnection`.
        InsecureTransport if plain TCP would be reachable from other hosts.
        """
        scheme, rest = split(address)
        loop = asyncio.get_running_loop()
        if scheme == "memory":
            return self.memory.listen(address, factory)
        if scheme == "unix":
            server: Any = await loop.create_unix_server(factory, rest, backlog=BACKLOG)
            return _ServerListener(server, address, rest)
        host, port = split_tcp(address)
        # Before anything is bound: not even for a moment may a plain listener be reachable.
        if tls is None and not allow_plaintext and not is_loopback(host):
            raise InsecureTransport(
                f"{address} can be reached from other hosts: give Options(tls=...), "
                "or allow_plaintext=True if the network is yours alone"
            )
        if tls is not None:
            return await TLSListener.open(host, port, factory, tls)
        server = await loop.create_server(factory, host, port, backlog=BACKLOG)
        real = server.sockets[0].getsockname()[1]
        return _ServerListener(server, f"tcp:{host}:{real}", None)

    async def connect(
        self, address: str, factory: Factory, *, tls: Credentials | None = None
    ) -> asyncio.BufferedProtocol:
        """Connect; `connection_made` of the returned protocol has been called.

        With `tls` a TCP connection speaks TLS; AuthError if the other side cannot. BlockingIOError
        if too many connections wait to be accepted at a Unix socket.
        """
        scheme, rest = split(address)
        loop = asyncio.get_running_loop()
        if scheme == "memory":
            return self.memory.connect(address, factory)
        if scheme == "unix":
            sock = _connect_unix(rest)
            _, protocol = await loop.create_unix_connection(factory, sock=sock)
        else:
            host, port = split_tcp(address)
            try:
                if tls is not None:
                    return await connect_tls(host, port, factory, tls)
            except ssl.SSLError as error:
                # SSLError is an OSError, and as such would be taken for a network that is down and
                # dialled again. A peer without a valid certificate stays without one.
                raise AuthError(f"no TLS with {address}: {explain_failure(error)}") from error
            _, protocol = await loop.create_connection(factory, host, port)
        return protocol


def _connect_unix(path: str) -> socket.socket:
    """Return a connected socket; it is connected at once or never."""
    # By ourselves: EAGAIN says here that the backlog of the listener is full. asyncio takes it for
    # a connection under way, and goes on with a socket that is not connected.
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def split(address: str) -> tuple[str, str]:
    """Return scheme and rest of an address; ValueError if it is none."""
    scheme, _, rest = address.partition(":")
    if scheme not in ("unix", "tcp", "memory") or not rest:
        raise ValueError(f"{address!r} is no address: unix:path, tcp:host:port or memory:name")
    return scheme, rest


def split_tcp(address: str) -> tuple[str, int]:
    """Return host (IPv6 without brackets) and port of an address; ValueError if it is none."""
    host, _, port = split(address)[1].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is no address: tcp:host:port")
    return host.strip("[]"), int(port)


def is_local(address: str) -> bool:
    """Whether an address leads nowhere from another host: a Unix socket, or loopback."""
    scheme, _ = split(address)
    return scheme == "unix" or (scheme == "tcp" and is_loopback(split_tcp(address)[0]))


def is_loopback(host: str) -> bool:
    """Whether a host is this one and cannot be reached from others, without asking DNS."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tune(transport: Any) -> None:
    """Set socket options: low latency, large buffers, and a quick end when the peer's host dies."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    # For Unix sockets only: a fixed size switches off TCP's own tuning of its windows.
    settings = [
        (socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER),
        (socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER),
    ]
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        # No delay: Nagle's algorithm would hold a small message until the last one is acknowledged.
        # Messages are coalesced before they are written, so nothing is left for it to gain.
        settings = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ]
        # A host that vanished sends no FIN. Keep-alive notices on a quiet connection, the user
        # timeout on one with unacknowledged bytes, which suppress keep-alive probes.
        for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, name):
                settings.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            settings.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT))
    for level, option, number in settings:
        with contextlib.suppress(OSError):  # a wish: the connection works without
            sock.setsockopt(level, option, number)
