"""The listener: accept connections, let them authenticate, and hand them to their links.

    accept ──▶ too many unauthenticated? ──▶ handshake ──▶ admit ─┬─ ACCEPTED ──▶ link
                     │ yes                       │ no proof       ├─ DUPLICATE: another one is used
                     ▼                           ▼                └─ LOST: its session is over here
               closed without a word       closed without a word

Whether an authenticated client is admitted is its link's decision (`wire.session`). When two
workers dial each other at once, the connection dialled by the smaller incarnation is kept, and the
other worker is told so (DUPLICATE). Both know both incarnations, so they cannot disagree.

A refusal is a closed connection and nothing else, so that it tells an attacker nothing. Here it
leaves a line in the log `aiograd.security` and, with where it came from, in `refusals`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import os
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from aiograd.errors import AuthError, ProtocolError, SecurityError
from aiograd.rpc.affinity import descriptor
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.handshaking import (
    Authenticator,
    HandshakeProtocol,
    LinkTable,
    hand_over,
)
from aiograd.rpc.observe.log_rate import LogRate
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport import network
from aiograd.rpc.transport.tls import explain_failure
from aiograd.wire.handshake import Identity
from aiograd.wire.session import ACCEPTED, RESUME, Offer

_log = logging.getLogger("aiograd.link")
_security = logging.getLogger("aiograd.security")
# Connections that have proven nothing yet. A worker that is refused for that tries again: see
# `dialer`, which cannot tell it from a connection that the network has cut.
MAX_UNAUTHENTICATED: Final = 64
MAX_UNAUTHENTICATED_PER_HOST: Final = 16  # so that one host cannot keep all others out
# Seconds after which a connection that has proven nothing makes room for another one: a member
# needs two round trips, and an idle stranger must not keep members out.
_MAKES_ROOM: Final = 0.5
# Refusals. Anybody could fill this; the last few are enough for a person who looks for a missing
# worker.
_REMEMBERED: Final = 8
_DESCRIPTOR_WARNING_PAUSE: Final = 30.0  # seconds between two about file descriptors
_WARNING_PAUSE: Final = 10.0  # seconds between two warnings about refused connections


class Admissions(LinkTable, Protocol):
    """What of the links of this worker decides about clients."""

    @property
    def dials(self) -> int:
        """The number of our latest dial."""

    def answer(self, peer: PeerInfo, offer: Offer) -> tuple[int, int]:
        """Decide about an offer: status, and bytes of the session that are here."""


class Limits(Protocol):
    """Where it is counted how often a limit was reached."""

    def reached(self, name: str) -> None:
        """Count one more."""


class Listener:
    """Everything that listens for one worker, and the connections that are not authenticated yet.

    `accepted` is called with the incarnation of a peer whose connection was handed to its link.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        runtime: Runtime,
        options: Options,
        limits: Limits,
        links: Admissions,
        accepted: Callable[[bytes], None],
    ) -> None:
        self._authenticator, self._runtime, self._options = authenticator, runtime, options
        self._limits, self._links, self._accepted = limits, links, accepted
        self._listeners: list[network.Listener] = []
        # From where something listens to what others are told: `0.0.0.0` is no address to dial.
        self.tell: Callable[[str], tuple[str, ...]] = lambda address: (address,)
        # With the host they come from and the time they came, the oldest first.
        self._pending: dict[PendingHandshake, tuple[str, float]] = {}
        self._rate = LogRate(asyncio.get_running_loop().time)
        self._closed = False
        self._next_warning = -math.inf  # loop time from which on a refusal is a warning again
        self._next_descriptor_warning = -math.inf  # likewise, about file descriptors
        self._unshown = 0  # refusals since the last warning
        self.refusals: dict[str, str] = {}  # by place or name: why the latest few were refused

    @property
    def addresses(self) -> tuple[str, ...]:
        """What others are told to dial: where this worker listens, unless `tell` says other."""
        return tuple(told for each in self._listeners for told in self.tell(each.address))

    @property
    def unauthenticated(self) -> int:
        """Connections that came in and have proven nothing so far."""
        return len(self._pending)

    async def listen(self, address: str) -> None:
        """Accept connections at an address; OSError, InsecureTransport, ValueError."""
        credentials = self._authenticator.credentials_for(address)
        listener = await self._runtime.network.listen(
            address,
            functools.partial(self._accept, address),
            allow_plaintext=self._options.allow_plaintext,
            tls=credentials,
        )
        self._listeners.append(listener)
        _log.info(
            "%s listens at %s (%s, mode %s)",
            self._authenticator.name,
            listener.address,
            "secret and TLS" if credentials is not None else "secret",
            self._options.mode,
        )

    def check_descriptors(self) -> None:
        """Log it if no file descriptor is left: then no connection can be accepted.

        Loops do not tell: asyncio's own log has a traceback, uvloop resets what comes in. Callers
        see a handshake that does not end, and only this side can say which limit that is.
        """
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            self._limits.reached("descriptors")
            now = asyncio.get_running_loop().time()
            if self._listeners and now >= self._next_descriptor_warning:
                self._next_descriptor_warning = now + _DESCRIPTOR_WARNING_PAUSE
                _log.error(
                    "%s accepts no connections at %s: %s (%s); raise `ulimit -n`, or close what "
                    "this process holds open",
                    self._authenticator.name,
                    ", ".join(each.address for each in self._listeners),
                    "it has no file descriptors left" if error.errno == errno.EMFILE else error,
                    _descriptor_limit(),
                )

    def descriptors(self) -> Iterator[int]:
        """Give the descriptors that are open here: of listeners, and of pending handshakes."""
        for listener in self._listeners:
            yield from listener.descriptors()
        for pending in self._pending:
            yield descriptor(pending.transport)

    def close(self) -> None:
        """Accept nothing more, and drop whatever is not authenticated."""
        # Connections that the kernel has accepted already still come, in the next iterations.
        self._closed = True
        for listener in self._listeners:
            listener.close()
        for pending in list(self._pending):
            if pending.transport is not None:
                pending.transport.abort()

    def _accept(self, address: str) -> asyncio.BufferedProtocol:
        return PendingHandshake(self, self._authenticator, address)

    def reserve(self, pending: PendingHandshake, host: str) -> bool:
        """Count a new connection as unauthenticated; False if there are too many."""
        # Unix sockets and memory have no host to count by.
        near = [each for each, (other, _) in self._pending.items() if host and other == host]
        now = asyncio.get_running_loop().time()
        rivals: Iterable[PendingHandshake] | None = None
        if len(near) >= MAX_UNAUTHENTICATED_PER_HOST:
            rivals = near
        elif len(self._pending) >= MAX_UNAUTHENTICATED:
            rivals = self._pending
        if self._closed or rivals is not None:
            self._limits.reached("strangers")
            oldest = next(iter(rivals), None) if rivals is not None else None
            if self._closed or oldest is None or now - self._pending[oldest][1] < _MAKES_ROOM:
                return False
            oldest.fail(AuthError("it proved nothing for long, and others came"))
        self._pending[pending] = host, now
        return True

    def admit(self, identity: Identity, offer: Offer) -> tuple[int, int, int]:
        """Decide about a proven client; AuthError to refuse it.

        Gives the status, how much of its session is here, and the number of our latest dial."""
        peer = self._authenticator.peer_of(identity, self._links)
        if not self._authenticator.agrees_on_mode(peer, identity):
            raise AuthError("another mode than the one it joined with", identity.name)
        return (*self._links.answer(peer, offer), self._links.dials)

    def ended(self, pending: HandshakeProtocol) -> None:
        """Take over from a handshake that is done: open its link, or remember the refusal."""
        assert isinstance(pending, PendingHandshake)
        self._pending.pop(pending, None)
        identity = pending.peer
        if pending.error is not None or identity is None:
            self._refused(pending)
            return
        link = self._links.get(identity.incarnation)
        # Callbacks run inside `admit`, for the loss of an older session: one of them may have lost
        # the peer for good, or closed this worker.
        # For DUPLICATE and LOST, `close` lets our proof leave first: it carries the status.
        if pending.status != ACCEPTED or self._closed or link is None:
            pending.transport.close()
            return
        what = "resumes its session" if pending.offer.word == RESUME else "connected"
        if link.may_log():  # a partner may cut its connection, and resume, on and on
            _log.info(
                "%s: %s %s from %s", self._authenticator.name, identity.name, what, pending.remote
            )
        hand_over(link, pending)
        self._accepted(identity.incarnation)

    def _refused(self, pending: HandshakeProtocol) -> None:
        self._limits.reached("handshake")
        error = pending.error
        # Only this side knows the reason, so a person has to see it here. At a bounded rate:
        # strangers could fill the log. Connections that were cut, or never spoke, are no refusals.
        now, level, more = asyncio.get_running_loop().time(), logging.INFO, ""
        if pending.answered and not pending.gone:
            self._unshown += 1
            if now >= self._next_warning:
                more = f" ({self._unshown} since the last warning)" if self._unshown > 1 else ""
                level, self._unshown, self._next_warning = logging.WARNING, 0, now + _WARNING_PAUSE
        if level == logging.WARNING or self._rate.allows():
            _security.log(
                level,
                "%s refused a connection of %s from %s: %s%s",
                self._authenticator.name,
                pending.claimed or "an unknown peer",
                pending.remote,
                error,
                more,
            )
        # Remember those that spoke our protocol. A wrong secret or version proves nothing, so it
        # must not end the start of a cluster; but a coordinator that misses a worker can say why.
        if isinstance(error, ProtocolError | SecurityError) and pending.answered:
            who = error.worker or f"somebody at {pending.host}"
            self.refusals.pop(who, None)
            self.refusals[who] = str(error)
            if len(self.refusals) > _REMEMBERED:
                del self.refusals[next(iter(self.refusals))]


def _descriptor_limit() -> str:
    try:
        import resource  # not on Windows
    except ImportError:
        return "the limit of the system"
    return f"the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


class PendingHandshake(HandshakeProtocol):
    """The protocol of a connection that came in, until it is authenticated."""

    remote: str

    def __init__(self, listener: Listener, authenticator: Authenticator, address: str) -> None:
        super().__init__(
            authenticator.handshake(),
            authenticator.timeout,
            listener.ended,
            listener.admit,
            authenticator.credentials_for(address),
        )
        self._listener = listener
        # Among the unauthenticated, before TLS. Over plain sockets `connection_made` is the first
        # that is heard of a connection, so it is counted there.
        self._counted = False

    def tcp_connected(self, host: str) -> bool:
        """Count a TCP connection that has to speak TLS first; False to close it."""
        # The time runs from here: else TLS would be a way to hold a connection for longer.
        self.start_timer()
        self.remote = f"tcp:{host}"
        self._counted = self._listener.reserve(self, host)
        if not self._counted:
            self.fail(_crowded())
        return self._counted

    def tls_failed(self, error: Exception) -> None:
        """End the handshake of a client that did not speak TLS, or has no valid certificate."""
        # A peer that only opens a connection, as monitoring does, is not worth a warning.
        self.answered: bool = isinstance(error, ssl.SSLError)
        self.fail(AuthError(f"no TLS: {explain_failure(error)}"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, unless too many others have not ended theirs."""
        super().connection_made(transport)
        if self._counted:
            return
        name: Any = transport.get_extra_info("peername")
        if not self._listener.reserve(self, name[0] if isinstance(name, tuple) else ""):
            self.fail(_crowded())


def _crowded() -> AuthError:
    return AuthError("too many other connections are unauthenticated")
