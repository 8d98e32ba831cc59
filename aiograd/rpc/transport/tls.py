"""TLS for connections beyond this host: credentials, and listening and connecting with them.

TLS 1.3 or nothing, in one of two ways. Both end in a proof of the secret that covers the
certificates (`binding`): a man in the middle, who has another certificate, can relay no handshake.

    SecretCredentials        the default: the secret alone. The server has a certificate that nobody
                             trusts, made for this process (`ephemeral`); the proof is all there is
    CertificateCredentials   `Options(tls=TLS(…))`: certificates of an authority, which also prove
                             names, so that a member cannot pass for another one

A worker's certificate of an authority carries its name as a subject alternative name.

    TCP accept ─▶ PendingConnection.tcp_connected ─▶ TLS handshake ─▶ connection_made ─▶ HELLO …
                   counts it, may refuse it            └─ tls_failed

asyncio's own TLS server tells a protocol of a connection only when TLS is agreed on, so thousands
could hold connections that no limit counts. `TLSListener` announces them when TCP accepts.

`wire.handshake` proves the secret; `link.listener` decides which addresses use TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from aiograd.errors import AuthError, SecurityError
from aiograd.rpc.transport.ephemeral import load_ephemeral_certificate
from aiograd.rpc.transport.tls_stream import TLSStream

_OUT_OF_DATE = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
# Reasons of OpenSSL for bytes that are no TLS; which one depends on its version.
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
_ACCEPT_PAUSE = 0.05  # seconds, when no connection can be accepted: too many files are open


SECRET: Final = "secret"  # in place of a `TLS`: by the secret alone

# ── certificates ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TLS:
    """Certificates of a worker, as paths of PEM files.

    `Options(tls=TLS("worker0.pem", "worker0.key", "ca.pem"))`: the certificate names the worker
    ("worker0") among its DNS names. Without `mutual` only the worker that listens shows one.

        >>> tls = ag.TLS("worker0.pem", "worker0.key", "ca.pem")
        >>> ag.Options(tls=tls).tls.mutual
        True
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


class Credentials(Protocol):
    """How one worker secures connections."""

    timeout: float  # seconds for the TLS handshake
    proves_names: bool  # whether certificates name workers

    @property
    def server(self) -> ssl.SSLContext:
        """The context for connections that come in."""

    @property
    def client(self) -> ssl.SSLContext:
        """The context for connections that this worker makes."""

    def binding(self, transport: Any, *, client: bool) -> bytes:
        """Return what the proof of the secret covers: both certificates as this side sees them."""

    def check_name(self, transport: Any, name: str) -> None:
        """AuthError if the peer's certificate is not that of a worker of this name."""


class SecretCredentials:
    """TLS by the secret alone: the server's certificate is fresh, and covered by the proof."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.proves_names = False
        self._own = b""
        self._server: ssl.SSLContext | None = None

    @functools.cached_property
    def client(self) -> ssl.SSLContext:
        """The context for connections that this worker makes; it takes any certificate."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        # Nobody vouches for it: what proves the server is its proof of the secret, which covers
        # this certificate. TLS checks that the server has its key.
        context.verify_mode = ssl.CERT_NONE
        return context

    @property
    def server(self) -> ssl.SSLContext:
        """The context for connections that come in, with a certificate made for this process."""
        if self._server is None:
            self._server = _context(ssl.PROTOCOL_TLS_SERVER)
            self._own = load_ephemeral_certificate(self._server)
        return self._server

    def binding(self, transport: Any, *, client: bool) -> bytes:
        """Return what the proof of the secret covers: the server's certificate."""
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return _digests(b"", (shown or b"") if client else self._own)

    def check_name(self, transport: Any, name: str) -> None:
        """Leave names to the secret: the certificate has none."""


class CertificateCredentials:
    """The certificates of one worker, loaded. SecurityError if they cannot be."""

    def __init__(self, tls: TLS, timeout: float) -> None:
        self._mutual = tls.mutual
        self.proves_names = True
        self.timeout = timeout  # seconds for the TLS handshake
        try:
            self._own = ssl.PEM_cert_to_DER_cert(_first(Path(tls.cert).read_text()))
            self.server: ssl.SSLContext = self._load(tls, ssl.PROTOCOL_TLS_SERVER)
            self.client: ssl.SSLContext = self._load(tls, ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise SecurityError(f"cannot use the certificates of {tls}: {error}") from error

    def _load(self, tls: TLS, side: int) -> ssl.SSLContext:
        context = _context(side)
        serves = side == ssl.PROTOCOL_TLS_SERVER
        if serves or tls.mutual:
            context.load_cert_chain(tls.cert, tls.key)
        # A client always verifies the server; a server asks for a certificate only where all
        # workers have one. The proof of the secret follows in any case.
        context.verify_mode = ssl.CERT_REQUIRED if tls.mutual or not serves else ssl.CERT_NONE
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        else:
            context.load_default_certs()
        return context

    def binding(self, transport: Any, *, client: bool) -> bytes:
        """Return what the proof of the secret covers: both certificates as this side sees them."""
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        # A client that shows no certificate must leave it out here, too: the server never saw it.
        ours = self._own if self._mutual or not client else b""
        # Client first on both sides, else the two would compute different bytes.
        first, second = (ours, shown or b"") if client else (shown or b"", ours)
        return _digests(first, second)

    def check_name(self, transport: Any, name: str) -> None:
        """AuthError if the peer's certificate is not that of a worker of this name."""
        shown = transport.get_extra_info("ssl_object").getpeercert()
        if not shown:
            return  # not mutual, and this side listens
        names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
        # Exactly: host names ignore case, but modes and secrets are given by the exact name.
        if name not in names:
            raise AuthError(
                f"the certificate is for {', '.join(names) or 'nobody'}, not for {name}", name
            )


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Certificates name workers, not hosts: `check_name` compares, when the name is known.
    context.check_hostname = False
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no TLS session is ever resumed
    return context


def _digests(first: bytes, second: bytes) -> bytes:
    return hashlib.sha256(first).digest() + hashlib.sha256(second).digest()


def check_own_certificate(tls: TLS, name: str) -> None:
    """AuthError if the certificate of a worker is not for its name, or not valid today.

    Peers would refuse it, and a refusal says nothing, so that it tells an attacker nothing. Other
    mistakes are left to them: they may trust an authority that is not known here.
    """
    try:
        own = ssl.PEM_cert_to_DER_cert(_first(Path(tls.cert).read_text()))
        shown = _decoded(tls, own)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in _OUT_OF_DATE:
            return
        raise AuthError(f"{tls.cert}, the certificate of {name}: {error.verify_message}") from error
    except (OSError, ValueError):
        return  # `Credentials` says what is wrong with the files
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
    if name not in names:
        raise AuthError(
            f"{tls.cert} is a certificate for {', '.join(names) or 'nobody'}, and this worker is "
            f"{name}: its certificate must have {name} among its DNS names"
        )


def _decoded(tls: TLS, own: bytes) -> dict[str, Any]:
    """Return what is in a certificate; SSLError if it is not valid."""
    # `ssl` decodes only what a peer has shown, and only if it is trusted: so this is a handshake
    # with oneself, where the certificate is its own authority.
    server, client = (
        ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    server.load_cert_chain(tls.cert, tls.key)
    client.check_hostname = False
    client.load_verify_locations(cadata=own)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(back, there, server_side=False),
        server.wrap_bio(there, back, server_side=True),
    )
    for _ in range(4):  # messages of TLS 1.3: hello there and back, finished
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return dict(ends[0].getpeercert() or {})


def explain_failure(error: BaseException) -> str:
    """Say what the error of a TLS handshake means: which side refused, and why."""
    reason = str(getattr(error, "reason", None) or "")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused here: {error.verify_message}"
    if "_ALERT_" in reason:  # what the other side has found, in the words of OpenSSL
        found = reason.partition("_ALERT_")[2].replace("_", " ").lower()
        return f"it refuses this worker's certificate: {found}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate, and TLS(mutual=True) asks for one"
    if reason in _NO_TLS:
        return "it does not speak TLS"
    return str(error)


def _first(text: str) -> str:
    """Return the first certificate of a PEM file: the worker's own, before those of authorities."""
    start, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    begin = text.find(start)
    stop = text.find(end, begin)
    if begin < 0 or stop < 0:
        raise ValueError("no certificate is in it")
    return text[begin : stop + len(end)]


# ── connections ─────────────────────────────────────────────────────────────────────────────────


class PendingConnection(Protocol):
    """What the protocol of an incoming connection has to know before TLS is agreed on."""

    def tcp_connected(self, host: str) -> bool:
        """Count the connection; return whether the TLS handshake may begin."""

    def tls_failed(self, error: Exception) -> None:
        """End the connection: the TLS handshake failed or took too long."""


# Connections that the kernel keeps until a listener accepts them. When hundreds of workers start or
# meet, all of them dial at once. Linux limits this number to net.core.somaxconn, 4096 by default.
BACKLOG: Final = 4096


class TLSListener:
    """Accepts TCP connections that speak TLS, until closed."""

    def __init__(
        self, bound: socket.socket, address: str, factory: Callable[[], Any], tls: Credentials
    ) -> None:
        self.address = address
        self._socket, self._factory, self._tls = bound, factory, tls
        self._tasks: set[asyncio.Task[None]] = set()
        # By the callback of the task, because a task cancelled before its first step runs no
        # `finally`. And not in `close`, where `sock_accept` still watches the descriptor.
        self._spawn(self._accept()).add_done_callback(lambda _: bound.close())

    @classmethod
    async def open(
        cls, host: str, port: int, factory: Callable[[], Any], tls: Credentials
    ) -> TLSListener:
        """Bind and listen; port 0 is resolved in `address`."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, _, _, where = found[0]
        bound = socket.socket(family, kind)
        try:
            # As asyncio's servers do: else a restarted worker could not bind to its port while old
            # connections linger in TIME_WAIT.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            bound.listen(BACKLOG)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        return cls(bound, f"tcp:{shown}:{bound.getsockname()[1]}", factory, tls)

    def descriptors(self) -> list[int]:
        """Return the descriptor of the listening socket."""
        return [self._socket.fileno()]

    def close(self) -> None:
        """Stop accepting, and end connections whose TLS handshake is not done."""
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
                accepted, where = await loop.sock_accept(self._socket)
            except OSError:
                # The connection stays in the backlog, so an immediate retry would be a busy loop.
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            pending: PendingConnection = self._factory()
            if pending.tcp_connected(str(where[0])):
                self._spawn(self._secure(accepted, pending))
            else:
                accepted.close()

    async def _secure(self, accepted: socket.socket, pending: PendingConnection) -> None:
        stream = TLSStream(self._tls.server, pending, server=True)
        try:
            # Around both: an unauthenticated peer may hold neither a TCP connection nor a half-done
            # TLS handshake for longer.
            async with asyncio.timeout(self._tls.timeout):
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: stream, accepted)
                await stream.ready
        except OSError as error:  # TimeoutError and SSLError are such
            stream.discard()
            pending.tls_failed(error)
        except asyncio.CancelledError:
            stream.discard()
            pending.tls_failed(ConnectionAbortedError("closed"))
            raise


async def connect_tls(
    host: str, port: int, factory: Callable[[], Any], tls: Credentials
) -> asyncio.BufferedProtocol:
    """Connect and agree on TLS; SSLError if that cannot be. The caller limits the time."""
    # No server name: certificates are checked by worker name, after the hello (`check_name`).
    protocol: asyncio.BufferedProtocol = factory()
    stream = TLSStream(tls.client, protocol, server=False)
    try:
        await asyncio.get_running_loop().create_connection(lambda: stream, host, port)
        try:
            await stream.ready
        except ConnectionResetError as error:
            # Of the same type: the network may have cut it, and then it is worth another attempt.
            raise ConnectionResetError(
                "closed during the TLS handshake; does the other side speak TLS?"
            ) from error
    except BaseException:
        stream.discard()
        raise
    return protocol
