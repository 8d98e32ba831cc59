"""TLS for connections beyond this host: certificates, and what ties the handshake to them.

TLS 1.3 or nothing. A worker's certificate carries its name as a subject alternative name, so that a
member with the secret and a certificate of its own still cannot pass for another one. The proof of
the secret covers the SHA-256 of the certificates: somebody in between, with another certificate,
can relay no handshake.

The handshake itself is in `wire.handshake` and `link.handshaking`.

Listening and dialling with TLS, in which strangers count from their first packet.

A server of asyncio's own tells a protocol about a connection only when TLS is done, so that
thousands could hold connections without anybody knowing. Here a visitor knocks first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aiograd.errors import AuthError, SecurityError
from aiograd.rpc.transport.tls_stream import Tunnel


@dataclass(frozen=True)
class TLS:
    """Certificates of a worker, as paths of PEM files.

    `Options(tls=TLS("worker0.pem", "worker0.key", "ca.pem"))`: the certificate names the worker
    ("worker0") among its DNS names. Without `mutual` only the worker that listens shows one.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str] | None = None
    mutual: bool = True

    def __post_init__(self) -> None:
        for name in ("cert", "key", "ca"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike) and not (name == "ca" and value is None):
                raise TypeError(f"{name} is a path, not {type(value).__name__}")


class Credentials:
    """The certificates of one worker, read."""

    def __init__(self, tls: TLS, timeout: float) -> None:
        self._mutual = tls.mutual
        self.timeout = timeout  # seconds for TLS to be agreed on
        try:
            self._own = ssl.PEM_cert_to_DER_cert(_first(Path(tls.cert).read_text()))
            self.server = self._context(tls, ssl.PROTOCOL_TLS_SERVER)
            self.client = self._context(tls, ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise SecurityError(f"cannot use the certificates of {tls}: {error}") from error

    def _context(self, tls: TLS, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # workers are known by name, not by host: see `check_name`
        serves = side == ssl.PROTOCOL_TLS_SERVER
        if serves:
            context.num_tickets = 0  # nobody resumes a session
        if serves or tls.mutual:
            context.load_cert_chain(tls.cert, tls.key)
        context.verify_mode = ssl.CERT_REQUIRED if tls.mutual or not serves else ssl.CERT_NONE
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        else:
            context.load_default_certs()
        return context

    def binding(self, transport: Any, *, client: bool) -> bytes:
        """What the proof of the secret covers: both certificates as this side sees them."""
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        ours = self._own if self._mutual or not client else b""
        first, second = (ours, shown or b"") if client else (shown or b"", ours)
        return b"".join(hashlib.sha256(each).digest() for each in (first, second))

    def check_name(self, transport: Any, name: str) -> None:
        """AuthError if the other side's certificate is not that of a worker of this name."""
        shown = transport.get_extra_info("ssl_object").getpeercert()
        if not shown:
            return  # not mutual, and we are the one who listens
        names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
        # Exactly: host names ignore case, but modes and secrets are given by the exact name.
        if name not in names:
            raise AuthError(
                f"the certificate is for {', '.join(names) or 'nobody'}, not for {name}", name
            )


def _first(text: str) -> str:
    """The first certificate of a PEM file: the worker's own, before those of authorities."""
    start, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    begin = text.find(start)
    stop = text.find(end, begin)
    if begin < 0 or stop < 0:
        raise ValueError("no certificate is in it")
    return text[begin : stop + len(end)]


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
