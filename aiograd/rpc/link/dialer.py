"""The dialer: connect links, reconnect them when a connection breaks, and dial unknown addresses.

A link is dialled when it has something to send (`Dialer.dial`). When its connection breaks, the
side that dialled it dials again (`Reconnection`); the other side waits, and nudges it in case that
it has not noticed. A link that is asleep is connected in the same way. A worker that is gone is
told from a network that is down by its address: where a process ended, nothing listens any more,
and the connection is refused at once. A worker that is only slow to answer is given the time of a
handshake.

    connection ends ─┬─ goodbye, or nothing acknowledged for seconds ──────────────▶ lost
                     └─ dial ──┬─ accepted ──▶ the session goes on
                               ├─ refused, or another worker is there now ─────────▶ lost
                               └─ nothing within `Options.resume` ─────────────────▶ lost

Which of two crossing connections is kept is decided where they arrive: see `listener`. The side
whose dial was not kept hears DUPLICATE, and waits for the other connection.

Where in its streams a session goes on is decided by `wire.session`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Protocol

from aiograd.errors import (
    AuthError,
    Overloaded,
    ProtocolError,
    SecurityError,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.affinity import descriptor
from aiograd.rpc.directory import Directory, PeerInfo
from aiograd.rpc.link.handshaking import (
    Authenticator,
    HandshakeProtocol,
    LinkEnd,
    MakeOffer,
    hand_over,
)
from aiograd.rpc.options import Options
from aiograd.rpc.retry import Backoff, RetryPolicy
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport.inproc import InprocTransport
from aiograd.rpc.transport.network import is_local, is_loopback, split, split_tcp
from aiograd.rpc.transport.tls import BACKLOG
from aiograd.wire.handshake import Identity
from aiograd.wire.secrets import Secret
from aiograd.wire.session import ACCEPTED, DIAL, DUPLICATE, LOOK, LOST, RESUME, Offer, Session

_log = logging.getLogger("aiograd.link")
_security = logging.getLogger("aiograd.security")
# A listener with too many unauthenticated connections closes a new one without a word, and a
# network may cut one: both look like a refusal. So a connection that is closed is tried again.
_HANDSHAKE: Final = RetryPolicy(attempts=math.inf, first_pause=0.02, longest_pause=0.3)
_REFUSALS: Final = 5  # connections in a row that are closed after an answer: then it is a refusal
# A peer that answers, and says that it is connecting, is waited for this many times
# `Options.handshake_timeout`.
_PATIENCE: Final = 4
_RECONNECT: Final = RetryPolicy(attempts=math.inf, first_pause=0.03, longest_pause=0.3)
# Seconds to connect to a peer that was lost, doubled each time: the network may return meanwhile,
# and a fresh SYN gets through sooner than a repeated one, which the kernel sends after 1, 3, 7 s.
_CONNECT_TIMEOUT: Final = 0.5
# Seconds to wait for a connection that the peer is making: it may die while it dials us.
_CROSSING: Final = 0.5
_LEAST: Final = 0.5  # seconds to reconnect, also to a peer that was silent before
# Seconds for the report how a peer's process ended, once nothing listens at its address any more.
# It takes a few milliseconds; a fifth of the second within which a loss is promised.
_REPORT: Final = 0.2


class DialedLink(LinkEnd, Protocol):
    """What of a link is needed to dial it."""

    address: str  # where it was dialled; "" if the peer dialled us

    @property
    def session(self) -> Session:
        """The session that a connection begins or resumes."""

    @property
    def is_dialing(self) -> bool:
        """Whether it waits for its first connection."""

    @property
    def is_away(self) -> bool:
        """Whether its connection broke and the session may be resumed."""

    @property
    def wants_connection(self) -> bool:
        """Whether it has had no connection so far, and is not lost."""

    @property
    def follows_loss(self) -> bool:
        """Whether the peer was lost before this link was made."""

    @property
    def had_session(self) -> bool:
        """Whether there was a session with the peer before it was lost."""

    def offer(self) -> Offer:
        """What to say to the peer in a handshake that this side began."""

    def lose(self, error: Exception) -> None:
        """End the link: the peer is gone, or cannot be reached."""


class Registry(Protocol):
    """What of the links of this worker is needed to connect to an unknown address."""

    def get(self, incarnation: bytes) -> DialedLink | None:
        """Find the link to one start of a worker."""

    def admit(self, peer: PeerInfo) -> DialedLink | None:
        """Find or make the link for a session that begins; None if the peer is lost for good."""

    def next_dial(self) -> int:
        """Count one more dial, and give its number."""


class Dialer:
    """Makes all connections of one worker."""

    def __init__(
        self,
        authenticator: Authenticator,
        runtime: Runtime,
        options: Options,
        directory: Directory,
    ) -> None:
        self._authenticator, self._runtime = authenticator, runtime
        self._loop = asyncio.get_running_loop()
        self._directory = directory
        self.options = options
        # Whether somebody who watches the process of a peer says how it ended, by `declare_lost`.
        self.exit_is_reported: Callable[[PeerInfo], bool] = _never
        self.report_timeout: float = _REPORT  # seconds that a loss waits for that
        # Handshakes that we began, as long as somebody has them: a forked child must close them.
        self._handshakes: weakref.WeakSet[HandshakeProtocol] = weakref.WeakSet()
        # By incarnation: dials that wait for the connection which the peer is making.
        self._waiters: dict[bytes, list[asyncio.Future[None]]] = {}

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self._authenticator.name

    def descriptors(self) -> Iterator[int]:
        """Give the descriptors of connections whose handshake is not over."""
        for connection in list(self._handshakes):
            yield descriptor(connection.transport)

    def close(self) -> None:
        """End dials that wait; those under way end with their tasks."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(WorkerClosed("closed", self.name))

    # ── links ───────────────────────────────────────────────────────────────────────────────────

    def dial_self(self, link: DialedLink) -> None:
        """Connect a worker to itself, over a transport that leads back to its own end."""
        # Calls to oneself take the general path, so that they behave like all others.
        transport = InprocTransport(self._loop, "self")
        transport.join(transport)
        link.session.role = "dials"
        link.opened(transport)
        transport.resume_reading()

    async def dial(self, link: DialedLink) -> None:
        """Connect a link for the first time; it is open or lost afterwards."""
        peer = link.peer
        error: Exception = WorkerLost(peer.name, "no", "it has no address")
        addresses = self._reachable(peer)
        if peer.addresses and not addresses:
            where = f"{peer.host or 'its own host'} ({', '.join(peer.addresses)})"
            error = WorkerLost(peer.name, "no", f"it can be reached from {where} only")
        if not self._authenticator.shares_secret(peer.name):
            error = AuthError(f"{self.name} and {peer.name} share no secret", peer.name)
            addresses = ()
        # One limit for all addresses: until then, one that accepts and breaks is dialled again.
        limit = self._loop.time() + self.options.handshake_timeout
        for address in addresses:
            trouble = await self._dial_address(link, address, limit)
            if trouble is None:
                return
            error = trouble
        if link.is_dialing:
            link.lose(_as_loss(self.name, link, error))

    async def _dial_address(self, link: DialedLink, address: str, limit: float) -> Exception | None:
        """Connect a link at one address; None if it needs no other one, or why it does."""
        peer = link.peer
        timeout = _CONNECT_TIMEOUT if link.follows_loss else math.inf
        last = limit + (_PATIENCE - 1) * self.options.handshake_timeout
        while True:
            try:
                connection = await self._authenticate(
                    address, lambda _: link.offer(), peer, timeout
                )
            except (OSError, ProtocolError, SecurityError) as trouble:
                return trouble
            identity, status = connection.peer, connection.status
            # From here on nothing awaits until the link is decided about, so its state holds.
            if not link.is_dialing:  # the peer's own dial was quicker, or the link was lost
                connection.transport.abort()
                return None
            # The mode in the proof must be the one in the directory, by which other layers have
            # decided already how to encode for this peer.
            if identity is None or not self._authenticator.agrees_on_mode(peer, identity):
                connection.transport.abort()
                return AuthError("another mode than the one it joined with", peer.name)
            if status == LOST:
                connection.transport.abort()
                return WorkerLost(peer.name, "no", "it took this worker for lost")
            if status == DUPLICATE:
                connection.transport.abort()
                if await self._peer_connects(link):
                    return None
                # The peer said that it connects, and did not: dial again to see if it is there. It
                # was just now; on a busy machine its own dial may take its time.
                limit = min(self._loop.time() + self.options.handshake_timeout, last)
                error = WorkerLost(peer.name, "no", "it never finished connecting")
            elif self.adopt(link, connection, address):
                return None
            else:
                error = WorkerLost(peer.name, "no", "the connection broke at once")
            if self._loop.time() >= limit:
                return error
            _log.debug("%s dials %s at %s again: %s", self.name, peer.name, address, error)

    def adopt(self, link: DialedLink, connection: HandshakeProtocol, address: str) -> bool:
        """Let a link go on over a connection that the peer accepted; False if it broke already.

        The link is lost if the peer is missing bytes that are not kept any more."""
        if connection.gone:
            return False
        peer = link.peer
        # First, because it fences off a dial of the peer that crossed ours and may still arrive.
        accepted = link.session.accepted
        if accepted(connection.offer, connection.received, connection.latest_dial):
            link.address = address
            what = "resumes its session with" if connection.offer.word == RESUME else "connected to"
            _log.info("%s %s %s at %s", self.name, what, peer.name, address)
            hand_over(link, connection)
            self.peer_connected(peer.incarnation)
        else:
            connection.transport.abort()
            link.lose(WorkerLost(peer.name, why="too much got lost with its connection"))
        return True

    async def _peer_connects(self, link: DialedLink) -> bool:
        """Wait for the connection that the peer is making; False if it does not come soon."""
        if link.is_dialing:
            waiter = self._loop.create_future()
            self._waiters.setdefault(link.peer.incarnation, []).append(waiter)
            try:
                async with asyncio.timeout(_CROSSING):
                    await waiter
            except TimeoutError:
                pass
        return not link.is_dialing

    def peer_connected(self, incarnation: bytes) -> None:
        """End the wait for a connection: the link of this incarnation has one."""
        for waiter in self._waiters.pop(incarnation, ()):
            if not waiter.done():
                waiter.set_result(None)

    # ── unknown addresses ───────────────────────────────────────────────────────────────────────

    async def connect(self, address: str, links: Registry) -> PeerInfo:
        """Dial an address of unknown owner, and keep the connection for the link to its worker.

        Raises OSError, AuthError or ProtocolError; WorkerLost if the worker is there and one of the
        two takes the other one for lost."""
        offer = functools.partial(self._introduction, links)
        connection = await self._authenticate(address, offer)
        identity = connection.peer
        assert identity is not None
        peer = self._authenticator.peer_of(identity, links)
        # A worker that is not in the directory is known by this address alone, also for its link to
        # dial it later.
        if not peer.addresses:
            peer = replace(peer, addresses=(address,))
        if connection.status == LOST:
            connection.transport.abort()
            raise WorkerLost(peer.name, "no", "it took this worker for lost")
        link = links.admit(peer)
        if link is None:
            connection.transport.abort()
            raise WorkerLost(peer.name, "no", "it was declared lost")
        # Another connection may have come up while this one was proven: then that one is kept.
        if connection.status != ACCEPTED or not link.wants_connection:
            connection.transport.abort()
        elif not self.adopt(link, connection, address):
            raise WorkerLost(peer.name, "no", "the connection broke at once")
        return peer

    def _introduction(self, links: Registry, server: Identity) -> Offer:
        """Make the offer to a server that may turn out to be known."""
        link = links.get(server.incarnation)
        if link is not None and not link.wants_connection:
            return Offer(LOOK)
        number = links.next_dial()
        # Another dial of the same link may be under way: both begin the same session.
        return Offer(DIAL, number, 0, number) if link is None else link.session.offer(number)

    # ── connections ─────────────────────────────────────────────────────────────────────────────

    def backoff(self, policy: RetryPolicy, deadline: float = math.inf) -> Backoff:
        """Begin to use a retry policy."""
        return Backoff(policy, self._runtime.random, self._loop.time, deadline)

    async def _authenticate(
        self,
        address: str,
        offer: MakeOffer,
        expected: PeerInfo | None = None,
        timeout: float = math.inf,
    ) -> HandshakeProtocol:
        """Connect and authenticate; raises OSError, AuthError or ProtocolError.

        `timeout`: seconds for the first attempt to connect, doubled for each one that follows."""
        limit = self._loop.time() + self.options.handshake_timeout
        backoff = self.backoff(_HANDSHAKE)
        # Several only where secrets are given by name, and the name at this address is unknown.
        secrets = list(self._authenticator.candidates(expected.name if expected else ""))
        while True:
            try:
                connection = await self.connect_once(address, offer, expected, timeout, secrets[0])
            except BlockingIOError:
                # The backlog is full: many connect at once, and the listener has to accept them.
                backoff.deadline = limit
                if not await backoff.pause():
                    raise
                continue
            except TimeoutError:
                if timeout == math.inf or self._loop.time() + timeout > limit:
                    raise
                timeout *= 2
                continue
            error = connection.error
            if error is None:
                return connection
            # A connection that is cut looks like one that is refused: only another attempt can
            # tell. A version, or another worker at the address, stays what it is.
            certain = isinstance(error, ProtocolError | WorkerLost)
            # So does a hello that our secret does not open; but another secret may open it.
            if connection.distrusted:
                if len(secrets) > 1:
                    del secrets[0]
                    continue
                certain = True
            # A reset is nobody's refusal, nor is a connection that is closed before a byte comes
            # back: a listener with too many unauthenticated connections does that. Only time ends
            # the attempts then. A peer that answers, and closes the connection again and again,
            # does refuse it. One that says nothing is tried as often: where hundreds of workers
            # connect at once, a handshake may have to wait for a core.
            closed = not connection.answered and not connection.late
            cut = closed or isinstance(error, ConnectionResetError)
            refused = backoff.attempts >= _REFUSALS and not cut
            backoff.deadline = limit if cut or timeout != math.inf else math.inf
            if certain or refused or not await backoff.pause():
                raise error
            name = expected.name if expected is not None else "a worker"
            _log.debug("%s dials %s at %s again: %s", self.name, name, address, error)

    async def connect_once(
        self,
        address: str,
        offer: MakeOffer,
        expected: PeerInfo | None,
        timeout: float,
        secret: Secret | None = None,
    ) -> HandshakeProtocol:
        """Connect once, and wait for the end of the handshake; OSError if nothing answers.

        `secret`: what the other side has to know, if its name does not say that. How the handshake
        ended is in the result."""
        if expected is not None:
            secret = next(iter(self._authenticator.candidates(expected.name)), None)
        credentials = self._authenticator.credentials_for(address)
        done: asyncio.Future[HandshakeProtocol] = self._loop.create_future()

        def ended(connection: HandshakeProtocol) -> None:
            if not done.done():
                done.set_result(connection)

        def make_protocol() -> HandshakeProtocol:
            handshake = self._authenticator.handshake(offer, secret)
            connection = HandshakeProtocol(
                handshake,
                self.options.handshake_timeout,
                ended,
                credentials=credentials,
                expected=expected,
            )
            self._handshakes.add(connection)
            return connection

        # A kernel tries for minutes to reach a host that is gone.
        async with asyncio.timeout(min(timeout, self.options.handshake_timeout)):
            protocol = await self._runtime.network.connect(address, make_protocol, tls=credentials)
        assert isinstance(protocol, HandshakeProtocol)
        try:
            connection = await done
        except BaseException:
            # Cancelled, for example because the peer's own dial was quicker.
            protocol.transport.abort()
            raise
        if connection.peer is not None and connection.error is None:
            # A newcomer dials the coordinator first, and so joins its cluster.
            self._authenticator.join_cluster(connection.peer.cluster)
        if isinstance(connection.error, ProtocolError | SecurityError):
            name = connection.claimed or (expected.name if expected is not None else "a worker")
            _security.info(
                "%s: no handshake with %s at %s: %s", self.name, name, address, connection.error
            )
        return connection

    # ── reconnecting ────────────────────────────────────────────────────────────────────────────

    async def reconnect(self, link: DialedLink, silent: float, why: str) -> None:
        """Connect a link again; it is open or lost afterwards.

        `silent`: seconds for which nothing had come when the connection broke; `why` it did, ""
        if it was closed because nobody used it."""
        await Reconnection(self, link, silent, why).run()

    def _reachable(self, peer: PeerInfo) -> tuple[str, ...]:
        """Leave out the addresses of a peer that mean somebody else here."""
        own = self._directory.get(self.name)
        if own is None or own.shares_loopback(peer):
            return peer.addresses
        # A path, or 127.0.0.1, may be that of another worker on this host.
        return tuple(address for address in peer.addresses if not is_local(address))

    def addresses_of(self, link: DialedLink) -> list[str]:
        """List where a peer may be reached, the last good address first."""
        peer, dialled = link.peer, link.address
        # A peer that dialled us did not say where it listens; the directory may know by now.
        member = self._directory.get(peer.name)
        if member is not None and member.incarnation == peer.incarnation:
            peer = member
        known = self._reachable(peer)
        return [dialled, *(each for each in known if each != dialled)] if dialled else list(known)


class Reconnection:
    """One time that a link is away."""

    def __init__(self, dialer: Dialer, link: DialedLink, silent: float, why: str) -> None:
        self._dialer, self._link, self._why = dialer, link, why
        self._clock = asyncio.get_running_loop().time
        options = dialer.options
        # A peer that was silent before the connection broke has used up some of its time: it is
        # lost a second after `Options.silence`, as if the connection had lasted.
        left = max(min(options.resume, options.silence + 1 - silent), _LEAST)
        if not why:  # nothing broke: the peer may be as slow to answer as to a first dial
            left = max(left, options.handshake_timeout)
        self._backoff = dialer.backoff(_RECONNECT, self._clock() + left)
        # Even for a peer that answers, and never finishes a handshake.
        self._last = self._backoff.deadline + options.handshake_timeout
        self._trouble: OSError | None = None  # why the last dial came to nothing
        self._report = math.inf  # when to stop waiting for the report how its process ended

    async def run(self) -> None:
        """Dial until the link is open or lost."""
        link, timeout = self._link, _CONNECT_TIMEOUT
        where = link.address or link.host or "a local address"
        name, here = link.peer.name, self._dialer.name
        if self._why:
            if link.may_log():
                _log.info("%s: the connection to %s at %s broke: %s", here, name, where, self._why)
        else:
            _log.debug("%s wakes the connection to %s at %s", here, name, where)
        # The side that waits gives the other one a moment first: nearly always it dials. Of a link
        # that was asleep the other side does not know that it is needed.
        waits = link.session.role != "dials" and bool(self._why)
        while link.is_away:
            if not waits:
                for address in self._dialer.addresses_of(link):
                    await self._dial(address, timeout)
                timeout *= 2
            waits = False
            if link.is_away and not await self._backoff.pause():
                self._give_up("it did not come back")

    async def _dial(self, address: str, timeout: float) -> None:
        """Try one address; afterwards the link is open, lost, or still away."""
        link = self._link
        if not link.is_away:
            return
        dialer = self._dialer
        try:
            connection = await dialer.connect_once(
                address, lambda _: link.offer(), link.peer, timeout
            )
        except (ConnectionRefusedError, FileNotFoundError) as error:
            # The kernel answered, not the network: nothing listens there any more.
            if self._belongs_to_peer(address) and not self._awaits_report():
                self._give_up(f"it is gone: {error}")
            return
        except OSError as error:
            self._trouble = error
            name = link.peer.name
            _log.debug("%s cannot reach %s at %s: %s", dialer.name, name, address, error)
            return
        self._trouble = None
        # Any answer shows that the process lives, also one that a cut ended: it may need time only.
        if connection.answered:
            deadline = max(self._backoff.deadline, self._clock() + _LEAST)
            self._backoff.deadline = min(deadline, self._last)
        if connection.error is not None:
            # Any other error may be a cut, also one that looks like a refusal of the secret: the
            # two have proven it to each other before.
            if isinstance(connection.error, WorkerLost):
                self._give_up(connection.error.why)
        elif link.is_away and connection.status == ACCEPTED:
            dialer.adopt(link, connection, address)
        else:
            # DUPLICATE: the peer dials, because we nudged it or a dial of its own came first.
            connection.transport.abort()
            if link.is_away and connection.status == LOST:
                self._give_up("it took this worker for lost")

    def _awaits_report(self) -> bool:
        """Whether to go on dialling a process that has ended, until it is reported how it did."""
        if not self._dialer.exit_is_reported(self._link.peer):
            return False
        now = self._clock()
        self._report = min(self._report, now + self._dialer.report_timeout)
        return now < self._report

    def _belongs_to_peer(self, address: str) -> bool:
        """Whether nothing that listens at this address means that the peer's process has ended."""
        link = self._link
        if address == link.address or split(address)[0] != "tcp":
            return True
        # An address of another host than the peer speaks from may never have led to it.
        host = split_tcp(address)[0]
        return host == link.host or (is_loopback(host) and is_loopback(link.host))

    def _give_up(self, why: str) -> None:
        link, trouble = self._link, self._trouble
        if not self._why and trouble is not None:  # as if it had never been connected
            link.lose(_as_loss(self._dialer.name, link, trouble))
            return
        why = f"{self._why}; {why}" if self._why else why
        link.lose(WorkerLost(link.peer.name, why=why))


def _never(peer: PeerInfo) -> bool:
    return False


def _as_loss(here: str, link: DialedLink, error: Exception) -> Exception:
    """Say what the error of the last address means for a link that could not be connected."""
    name = link.peer.name
    if link.had_session and isinstance(error, AuthError):
        # It knew the secret before: a handshake that was not finished was cut.
        error = WorkerLost(name, "no", f"cannot connect: {error}")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        import resource  # not everywhere, but neither is this error

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        why = f"no file descriptor is left to connect to {name} (RLIMIT_NOFILE is {most})"
        return Overloaded(here, why)
    if isinstance(error, BlockingIOError):
        return Overloaded(
            name, f"its listener is full: {BACKLOG} connections wait for it (backlog)"
        )
    if isinstance(error, OSError) and not isinstance(error, WorkerLost | SecurityError):
        return WorkerLost(name, "no", f"cannot connect: {error}")
    if isinstance(error, ProtocolError | SecurityError) and not error.worker:
        return type(error)(str(error), name)
    return error
