"""The first bytes of a connection: run the handshake, then hand the transport to a link.

    listener ──accept──▶ ┌───────────────────┐ ──proven──▶ `hand_over` ──▶ link
    dialer ───connect──▶ │ HandshakeProtocol │
                         └───────────────────┘ ──refused, late, cut──▶ `error`, transport closed

A `HandshakeProtocol` is the asyncio protocol of a connection until both sides are proven. It reads
exactly what the handshake needs, so nothing an unauthenticated peer sends gets any further. The
messages are those of `wire.handshake`; an `Authenticator` holds the identity and the secrets that
they are made with. `listener` decides about connections that come in, `dialer` makes connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from aiograd.errors import AuthError, ProtocolError, WorkerLost
from aiograd.rpc.directory import Directory, PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import is_loopback, split_tcp, tune
from aiograd.rpc.transport.sealed_stream import SealedStream, needs_seal
from aiograd.rpc.transport.tls import (
    SECRET,
    TLS,
    CertificateCredentials,
    Credentials,
    SecretCredentials,
    explain_failure,
)
from aiograd.wire.handshake import (
    HELLO_SIZE,
    NO_CLUSTER,
    PROOF_SIZE,
    Handshake,
    Identity,
    is_incarnation_of,
)
from aiograd.wire.records import best_protection
from aiograd.wire.secrets import Keyring, Secret
from aiograd.wire.session import Offer

_CREDENTIALS = struct.Struct("3i")  # of a peer at a Unix socket: process, user, group
# Decides about a proven client: ACCEPTED, DUPLICATE or LOST, how much of the session is here, and
# the number of our latest dial; or raises to refuse.
Admit = Callable[[Identity, Offer], tuple[int, int, int]]
# Makes the offer to the server of this identity, which is not proven yet.
MakeOffer = Callable[[Identity], Offer]


class LinkEnd(Protocol):
    """What of a link is needed to give it a connection."""

    host: str  # where the peer connected from, or was found

    @property
    def peer(self) -> PeerInfo:
        """The worker at the other end."""

    def agree(self, max_message: int, max_inflight: int) -> None:
        """Keep to the limits of the peer, too."""

    def opened(self, transport: Any, received: int = 0) -> None:
        """Go on over a proven connection; the peer has the first `received` bytes."""

    def may_log(self) -> bool:
        """Whether a line about the peer may be written now."""


class LinkTable(Protocol):
    """What of the links of this worker is needed to tell peers apart."""

    def get(self, incarnation: bytes) -> LinkEnd | None:
        """Find the link to one start of a worker."""


class HandshakeProtocol(asyncio.BufferedProtocol):
    """One side of a new connection.

    `done` is called exactly once, when the handshake is over: then either `error` says why there is
    no connection, or `peer` is proven and the transport waits, paused, for `hand_over`.
    """

    def __init__(
        self,
        handshake: Handshake,
        timeout: float,
        done: Callable[[HandshakeProtocol], None],
        admit: Admit | None = None,
        credentials: Credentials | None = None,
        expected: PeerInfo | None = None,
    ) -> None:
        self._handshake = handshake
        self._timeout = timeout  # seconds for all of it, TLS included
        self._done = done
        self._admit = admit  # None: this side dialled
        self._credentials = credentials  # of this worker, if the connection speaks TLS
        # Of fixed size: an unauthenticated peer cannot make us allocate anything.
        self._buffer = bytearray(max(HELLO_SIZE, PROOF_SIZE))
        self._filled = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self.transport: Any = None
        self.remote: str = ""  # address of the other side, as far as the transport knows it
        self.error: Exception | None = None
        self.answered: bool = False  # any bytes at all came back
        self.late: bool = False  # there was no proof in time
        self.distrusted: bool = False  # what came back did not prove what this side wanted
        self.gone: bool = False  # the connection ended before a link took it over
        self.expected: PeerInfo | None = expected  # the worker that should answer; None: any
        if expected is not None:
            handshake.expected = expected.name

    @property
    def peer(self) -> Identity | None:
        """The proven identity of the other side."""
        return self._handshake.peer if self._handshake.proven else None

    @property
    def claimed(self) -> str:
        """The name that the other side claims, proven or not; "" if it gave none."""
        return self._handshake.peer.name if self._handshake.peer is not None else ""

    @property
    def host(self) -> str:
        """The host of the other side; its process, if that is on this host."""
        return self.remote.rpartition(":")[0] if self.remote.startswith("tcp:") else self.remote

    @property
    def status(self) -> int:
        """What the server decided about the offer."""
        return self._handshake.status

    @property
    def offer(self) -> Offer:
        """What the client wants."""
        return self._handshake.offer

    @property
    def received(self) -> int:
        """Bytes of the session that the other side has."""
        return self._handshake.received

    @property
    def latest_dial(self) -> int:
        """The number of the server's latest dial."""
        return self._handshake.latest

    def secured(self) -> Any:
        """Return the transport for a link: with a tag on every record, if one side wants that."""
        handshake = self._handshake
        if not handshake.sealed:
            return self.transport
        return SealedStream(self.transport, *handshake.session_keys(), handshake.protection)

    # ── asyncio's side ──────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake; the client speaks first."""
        self.transport = transport
        self.remote = remote_address(transport)
        # TLS took all the time there was: the timer began with the TCP connection.
        if self._over:
            self.transport.abort()
            return
        self.start_timer()
        # The proofs cover both certificates: a relay with certificates of its own proves nothing.
        if self._credentials is not None:
            client = self._admit is None
            self._handshake.bind(self._credentials.binding(self.transport, client=client))
        elif needs_seal(transport):
            self._handshake.seal(best_protection())
        if first := self._handshake.start():
            self.transport.write(first)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Take no byte beyond the message that is due: later ones are the link's."""
        # What still comes is thrown away; asyncio wants a buffer nevertheless.
        if self._over:
            return memoryview(self._buffer)
        return memoryview(self._buffer)[self._filled : self._handshake.needed]

    def buffer_updated(self, nbytes: int) -> None:
        """Take one step of the handshake when its message is complete."""
        if self._over:
            return
        self.answered = True
        self._filled += nbytes
        message = bytes(self._buffer[: self._filled])
        if self._filled < self._handshake.needed:
            if not self._handshake.is_foreign(message):
                return
            message = message.ljust(self._handshake.needed, b"\0")
        self._filled = 0
        try:
            answer = self._handshake.receive(message)
            # After the hello, before `answer`, which is our proof: it is made for one name only.
            self._check_expected()
            if answer:
                self.transport.write(answer)
            # After the write: the answer names our version, so that both sides can tell theirs.
            if self._handshake.mismatch is not None:
                raise self._handshake.mismatch
            if self._handshake.refused is not None:
                raise self._handshake.refused
            if self._handshake.proven:
                self._finish()
        except Exception as error:
            # Whatever it is: bytes of an unauthenticated peer must not end anything but their
            # connection.
            self.distrusted = isinstance(error, AuthError)
            self.fail(error)

    def eof_received(self) -> bool:
        """Let the transport close: half of a handshake is none."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Find out what the end of the connection means."""
        self.gone = True
        if self._over:
            return
        if self._handshake.mismatch is not None:
            self.error = self._handshake.mismatch
        elif isinstance(exc, ConnectionResetError):
            # A peer that refuses a proof has read it, so it closes the connection without a
            # reset. The network resets connections, and so does a listener that is full.
            self.error = ConnectionResetError(
                "the connection was reset during the handshake: by the network, or because too "
                "many connections are unauthenticated there, or no file descriptor is left"
            )
        elif isinstance(exc, ssl.SSLError):
            # With TLS 1.3 a client is told after its own part that its certificate was refused.
            self.error = self._handshake.refusal(f"no TLS: {explain_failure(exc)}")
        else:
            # A refusal says nothing, not even that it is one: an attacker learns no reason.
            also = ""
            if self._credentials is not None and self._credentials.proves_names:
                also = " a certificate that is not for this worker's name,"
            elif self.remote.startswith("tcp:") and self._admit is None:
                also = " TLS there and none here,"
            self.error = self._handshake.refusal(
                "the other side closed the connection during the handshake (its log says why): "
                f"another secret,{also} or too many unauthenticated connections"
            )
        self._end()

    # ── deciding ────────────────────────────────────────────────────────────────────────────────

    def start_timer(self) -> None:
        """Let the time for the handshake begin, if it has not."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout, self._late)

    def _check_expected(self) -> None:
        """Stop before proving anything to another worker than the expected one."""
        them, expected = self._handshake.peer, self.expected
        if expected is None or them is None or self._handshake.mismatch is not None:
            return
        if them.name != expected.name:  # a member that proves its own name is still another one
            raise WorkerLost(expected.name, "no", f"{them.name} is there now")
        if them.incarnation != expected.incarnation:
            raise WorkerLost(expected.name, "no", f"{them.name} was started anew there")

    def _finish(self) -> None:
        peer = self._handshake.peer
        assert peer is not None
        if self._credentials is not None:
            # Only now: before the proof, the name is a claim of somebody without the secret.
            self._credentials.check_name(self.transport, peer.name)
        if self._admit is not None:
            # The link is decided about before the proof is written: when the client reads it, this
            # side is ready for what follows.
            answer = self._admit(peer, self._handshake.offer)
            self.transport.write(self._handshake.admit(*answer))
        # What follows is for the link: `done` may be a future whose waiter runs in the next
        # iteration of the loop, and bytes must not arrive here until then.
        self.transport.pause_reading()
        self._end()

    def _late(self) -> None:
        self.late = True
        why = f"no proof within {self._timeout:g} s"
        if self._admit is None and not self.answered:  # its kernel has accepted, and nobody else
            why += ": the worker there is stopped or busy, or has no file descriptor left"
        self.fail(self._handshake.refusal(why))

    def fail(self, error: Exception) -> None:
        """End the handshake with an error, unless it has ended."""
        if self._over:
            return
        self.error = error
        if self.transport is None:
            pass  # TLS is still under way: `connection_made` aborts what comes of it
        elif isinstance(error, ProtocolError) or error is self._handshake.refused:
            # Flushes first: our hello, which names our version or refuses, is on its way.
            self.transport.close()
        else:
            self.transport.abort()
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._done(self)


class Authenticator:
    """How this worker proves itself, and checks the proofs of others; for listener and dialer."""

    def __init__(
        self,
        identity: Identity,
        secret: bytes | Mapping[str, bytes],
        options: Options,
        token_bytes: Callable[[int], bytes],
        directory: Directory,
    ) -> None:
        if len(identity.cluster) != 16:
            raise ValueError("a cluster id has 16 bytes")
        self.identity: Identity = identity
        self.timeout: float = options.handshake_timeout
        self._options = options
        self._certificates: Credentials | None = None
        if isinstance(options.tls, TLS):
            self._certificates = CertificateCredentials(options.tls, self.timeout)
        self._secret_tls = SecretCredentials(self.timeout)
        self._keyring = Keyring(secret)
        self._token_bytes, self._directory = token_bytes, directory
        # Where this worker listens is not known yet, and does not matter for its terms.
        self._terms = PeerInfo(
            identity.name, identity.rank, identity.incarnation, (), *options.restriction
        )

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self.identity.name

    def candidates(self, name: str = "") -> tuple[Secret, ...]:
        """Return the secrets to try with the worker of this name, or with an unknown one."""
        return self._keyring.candidates(name)

    def handshake(self, offer: MakeOffer | None = None, choice: Secret | None = None) -> Handshake:
        """Begin a handshake: as a client that makes an offer, or as a server.

        `choice`: the secret that a client lets the server prove.
        """
        # Fresh for each connection: with the nonce of the other side, it stops replay.
        nonce = self._token_bytes(32)
        return Handshake(
            self.identity,
            self._keyring,
            nonce,
            client=offer is not None,
            restricts=self._terms.restricts,
            offer=offer,
            choice=choice,
            token=self._token_bytes,
        )

    def join_cluster(self, cluster: bytes) -> None:
        """Belong to a cluster from now on, if this worker belongs to none."""
        if self.identity.cluster == NO_CLUSTER:
            self.identity = replace(self.identity, cluster=cluster)

    def credentials_for(self, address: str) -> Credentials | None:
        """Say how connections to and from an address are secured; None if TLS does not do it."""
        # TLS is for connections beyond this host; Unix sockets and memory never leave it.
        if not address.startswith("tcp:"):
            return None
        if self._certificates is not None:
            return self._certificates
        wanted = self._options.tls == SECRET
        leaves = not self._options.allow_plaintext and not is_loopback(split_tcp(address)[0])
        return self._secret_tls if wanted or leaves else None

    def shares_secret(self, name: str) -> bool:
        """Whether there is a secret for the worker of this name."""
        return self._keyring.shares(name)

    def agrees_on_mode(self, peer: PeerInfo, identity: Identity) -> bool:
        """Whether a peer proved the mode for this worker that it joined the cluster with."""
        return peer.restricts(self.name) == identity.restricted

    def peer_of(self, identity: Identity, links: LinkTable) -> PeerInfo:
        """Find the peer that a proven identity is; AuthError if it claims another's incarnation.

        Links are found by incarnation, which other workers know, too. So the incarnation must be
        one that follows from the name, which the secret proves, and the name the one that it is
        known by: a member cannot take over what another one holds, not even of a dead one.
        """
        if not is_incarnation_of(identity.incarnation, identity.name):
            raise AuthError(
                f"{identity.name} came with an incarnation that is not of its name", identity.name
            )
        link = links.get(identity.incarnation)
        names = {self._directory.name_of(identity.incarnation), link and link.peer.name}
        if identity.incarnation == self.identity.incarnation or names - {identity.name, None}:
            raise AuthError(f"{identity.name} came as another worker", identity.name)
        peer = self._directory.get(identity.name)
        if peer is not None and peer.incarnation == identity.incarnation:
            return peer
        return PeerInfo(identity.name, identity.rank, identity.incarnation, (), identity.restricted)


def hand_over(link: LinkEnd, connection: HandshakeProtocol) -> None:
    """Let a link go on over a connection that is proven and accepted."""
    transport, peer = connection.secured(), connection.peer
    tune(transport)
    name: Any = transport.get_extra_info("peername")
    link.host = name[0] if isinstance(name, tuple) else ""
    if peer is not None:
        link.agree(peer.max_message, peer.max_inflight)
    link.opened(transport, connection.received)


def remote_address(transport: asyncio.BaseTransport) -> str:
    """Describe where the other end of a connection is, for a log."""
    name: Any = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
    if name:
        return str(name)
    # The client's end of a Unix socket has no name, but the kernel knows its process.
    sock: Any = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "SO_PEERCRED"):
        with contextlib.suppress(OSError):
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return f"a Unix socket (process {_CREDENTIALS.unpack(found)[0]})"
    return "a Unix socket"
