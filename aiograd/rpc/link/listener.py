"""Doors: where connections come in and go out, and which one of two is kept.

Listens, dials, lets both sides prove themselves, and hands proven connections to their links. A
link is found by its peer's incarnation, which others know, too: so it is given to nobody of another
name. When two workers dial each other at once, the connection dialled by the smaller incarnation is
kept, and the other one is told so.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiograd.errors import AuthError, ProtocolError, SecurityError, WorkerClosed, WorkerLost
from aiograd.rpc.affinity import descriptor
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.greeting import Greeting
from aiograd.rpc.transport.inproc import MemoryTransport
from aiograd.rpc.transport.network import Listener, tune
from aiograd.rpc.transport.tls import Credentials
from aiograd.wire.handshake import Handshake, Identity
from aiograd.wire.secrets import Keyring
from aiograd.wire.session import ACCEPTED, DIAL, DUPLICATE, LOOK, LOST, Offer

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.link.link import Link

_log = logging.getLogger("aiograd")
_STRANGERS = 64  # connections that have proven nothing yet
_STRANGERS_PER_HOST = 16
_TURNED_AWAY = 8  # of whom we remember why
_MOMENT = 0.5  # seconds; a peer that dies while it dials us must not be waited for much longer
_RETRIES = 5  # a busy door closes without a word, and a network may; knock again
_LONGEST_PAUSE = 0.3  # seconds between two of these attempts
_PATIENCE = 0.5  # seconds to connect to a lost peer at first: the network may return meanwhile


class Doors:
    """All listeners and unproven connections of one agent."""

    def __init__(self, agent: Agent, secret: bytes | Mapping[str, bytes], cluster: bytes) -> None:
        if len(cluster) != 16:
            raise ValueError("a cluster id has 16 bytes")
        self._agent = agent
        self._keyring = Keyring(secret)
        tls, patience = agent.options.tls, agent.options.handshake_timeout
        self._credentials = Credentials(tls, patience) if tls is not None else None
        self.cluster = cluster
        self._listeners: list[Listener] = []
        self._strangers: dict[Greeting, str] = {}  # with the host they come from
        self._dialled: weakref.WeakSet[Greeting] = weakref.WeakSet()  # handshakes that we began
        self.turned_away: dict[str, str] = {}  # claimed names of refused connections, and why
        self._waiters: dict[bytes, list[asyncio.Future[None]]] = {}  # for the peer's own dial

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(listener.address for listener in self._listeners)

    async def listen(self, address: str) -> None:
        options = self._agent.options
        secure = self._credentials is not None and address.startswith("tcp:")
        listener = await self._agent.runtime.network.listen(
            address,
            functools.partial(self._accept, secure),
            allow_plaintext=options.allow_plaintext,
            tls=self._credentials,
        )
        self._listeners.append(listener)
        how = "secret and TLS" if secure else "secret"
        where = listener.address
        _log.info("%s listens at %s (%s, mode %s)", self._agent.name, where, how, options.mode)

    def descriptors(self) -> Iterator[int]:
        """What is open here: listeners, and connections that have proven nothing yet."""
        for listener in self._listeners:
            yield from listener.descriptors()
        for greeting in (*self._strangers, *self._dialled):
            yield descriptor(greeting.transport)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for greeting in list(self._strangers):
            if greeting.transport is not None:
                greeting.transport.abort()
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(WorkerClosed("closed", self._agent.name))

    def open_self(self, link: Link) -> None:
        """Calls to oneself take the same road, over a transport that leads back here."""
        transport = MemoryTransport(self._agent.loop, "self")
        transport._other = transport
        link.session.role = "dials"
        link.opened(transport)
        transport._schedule()

    # ── coming in ───────────────────────────────────────────────────────────────────────────────

    def _handshake(self, offer: Callable[[Identity], Offer] | None = None) -> Handshake:
        agent = self._agent
        nonce = agent.runtime.token_bytes(32)
        return Handshake(
            agent.identity,
            self._keyring.chooser(agent.runtime.token_bytes),
            nonce,
            client=offer is not None,
            restricts=agent.info.restricts,
            offer=offer,
        )

    def _accept(self, secure: bool) -> asyncio.BufferedProtocol:
        credentials = self._credentials if secure else None
        return _Visitor(self, self._handshake(), credentials)

    def visited(self, visitor: _Visitor, host: str) -> bool:
        """A connection came in; refuse it if too many others have proven nothing yet."""
        hosts = collections.Counter(self._strangers.values())
        crowded = len(self._strangers) >= _STRANGERS
        if self._agent.closed or crowded or (host and hosts[host] >= _STRANGERS_PER_HOST):
            self._agent.limits.reached("strangers")
            return False
        self._strangers[visitor] = host
        return True

    def admit(self, identity: Identity, offer: Offer) -> tuple[int, int, int]:
        """What becomes of a proven client's connection, how much of its session is here, and the
        number of our latest dial."""
        agent = self._agent
        peer = self._known(identity)
        if peer.restricts(agent.name) != identity.restricted:
            raise AuthError("another mode than the one it joined with", identity.name)
        return (*agent.links.answer(peer, offer), agent.links.dials)

    def _known(self, identity: Identity) -> PeerInfo:
        agent = self._agent
        link = agent.links.get(identity.incarnation)
        names = {agent.directory.name_of(identity.incarnation), link and link.peer.name}
        if identity.incarnation == agent.incarnation or names - {identity.name, None}:
            raise AuthError(f"{identity.name} came as another worker", identity.name)
        peer = agent.directory.get(identity.name)
        if peer is not None and peer.incarnation == identity.incarnation:
            return peer
        return PeerInfo(identity.name, identity.rank, identity.incarnation, (), identity.restricted)

    def greeted(self, greeting: Greeting) -> None:
        """The handshake of a connection that came in is over."""
        self._strangers.pop(greeting, None)
        peer = greeting.peer
        if greeting.error is not None or peer is None:
            self._agent.limits.reached("handshake")
            if isinstance(greeting.error, ProtocolError | SecurityError):
                self._turn_away(greeting.error)
                _log.debug("%s refused a connection: %s", self._agent.name, greeting.error)
            return
        link = self._agent.links.get(peer.incarnation)
        if greeting.status != ACCEPTED or self._agent.closed or link is None:
            greeting.transport.close()
            return
        self._open(link, greeting)

    def _turn_away(self, error: ProtocolError | SecurityError) -> None:
        """Remember why somebody was refused who spoke our protocol; the latest few of them."""
        if error.worker:
            self.turned_away.pop(error.worker, None)
            self.turned_away[error.worker] = str(error)
            if len(self.turned_away) > _TURNED_AWAY:
                del self.turned_away[next(iter(self.turned_away))]

    def _open(self, link: Link, greeting: Greeting) -> None:
        tune(greeting.transport)
        name: Any = greeting.transport.get_extra_info("peername")
        link.host = name[0] if isinstance(name, tuple) else ""
        if greeting.peer is not None:  # nobody sends more than the other side takes
            link.max_message = min(link.max_message, greeting.peer.max_message)
            link.caller.agree(greeting.peer.max_inflight)
        link.opened(greeting.transport, greeting.received)
        for waiter in self._waiters.pop(link.peer.incarnation, ()):
            if not waiter.done():
                waiter.set_result(None)

    # ── going out ───────────────────────────────────────────────────────────────────────────────

    async def dial(self, link: Link) -> None:
        """Connect a link; it is open or lost afterwards."""
        peer = link.peer
        error: Exception = WorkerLost(peer.name, "no", "it has no address")
        addresses = list(peer.addresses)
        if not self._keyring.shares(peer.name):
            error = AuthError(f"{self._agent.name} and {peer.name} share no secret", peer.name)
            addresses.clear()
        limit = self._agent.loop.time() + self._agent.options.handshake_timeout
        patience = _PATIENCE if link.after is not None else math.inf
        while addresses:
            address = addresses.pop(0)
            try:
                greeting = await self._greet(address, lambda _: link.offer(), peer, patience)
            except (OSError, ProtocolError, SecurityError) as trouble:
                error = trouble
                continue
            if not link.is_dialing:  # the peer's own dial was quicker
                greeting.transport.abort()
                return
            terms = greeting.peer is not None and greeting.peer.restricted
            if greeting.peer is None or terms != peer.restricts(self._agent.name):
                greeting.transport.abort()
                error = AuthError("another mode than the one it joined with", peer.name)
                continue
            if greeting.status == LOST:
                greeting.transport.abort()
                error = WorkerLost(peer.name, "no", "it took this worker for lost")
                continue
            if greeting.status == DUPLICATE:
                greeting.transport.abort()
                if await self._their_dial_came(link):
                    return
                error = WorkerLost(peer.name, "no", "it never finished connecting")
                if self._agent.loop.time() < limit:
                    addresses.insert(0, address)  # is it still there?
                continue
            if self.take(link, greeting, address):
                return
            error = WorkerLost(peer.name, "no", "the connection broke at once")
            if self._agent.loop.time() < limit:
                addresses.insert(0, address)
        if link.is_dialing:
            if link.after is not None and link.after.met and isinstance(error, AuthError):
                # It knew the secret before: a handshake that was not finished was cut.
                error = WorkerLost(peer.name, "no", f"cannot connect: {error}")
            if isinstance(error, OSError) and not isinstance(error, WorkerLost | SecurityError):
                error = WorkerLost(peer.name, "no", f"cannot connect: {error}")
            elif isinstance(error, ProtocolError | SecurityError) and not error.worker:
                error = type(error)(str(error), peer.name)
            link.lose(error)

    def take(self, link: Link, greeting: Greeting, address: str) -> bool:
        """Go on over a connection that was dialled and accepted; False if it is gone already."""
        if greeting.gone:
            return False
        if link.session.accepted(greeting.offer, greeting.received, greeting.latest):
            link.address = address
            self._open(link, greeting)
        else:
            greeting.transport.abort()
            link.lose(WorkerLost(link.peer.name, why="too much got lost with its connection"))
        return True

    async def _their_dial_came(self, link: Link) -> bool:
        """Wait a moment for the connection that the peer is making."""
        if link.is_dialing:
            waiter = self._agent.loop.create_future()
            self._waiters.setdefault(link.peer.incarnation, []).append(waiter)
            try:
                async with asyncio.timeout(_MOMENT):
                    await waiter
            except TimeoutError:
                pass
        return not link.is_dialing

    async def meet(self, address: str) -> PeerInfo:
        """Dial somebody unknown, and keep the connection for the link to them."""
        greeting = await self._greet(address, self._introduction)
        identity = greeting.peer
        assert identity is not None
        peer = self._known(identity)
        if not peer.addresses:
            peer = replace(peer, addresses=(address,))
        if greeting.status == LOST:
            greeting.transport.abort()
            raise WorkerLost(peer.name, "no", "it took this worker for lost")
        link = self._agent.links.admit(peer)
        if link is None:
            greeting.transport.abort()
            raise WorkerLost(peer.name, "no", "it was declared lost")
        if greeting.status != ACCEPTED or not link.wants_connection:
            greeting.transport.abort()
        elif not self.take(link, greeting, address):
            raise WorkerLost(peer.name, "no", "the connection broke at once")
        return peer

    def _introduction(self, server: Identity) -> Offer:
        """What to say to somebody who may turn out to be known."""
        link = self._agent.links.get(server.incarnation)
        if link is not None and not link.wants_connection:
            return Offer(LOOK)
        number = self._agent.links.next_dial()
        # Another dial of the same link may be under way: both begin the same session.
        return Offer(DIAL, number, 0, number) if link is None else link.session.offer(number)

    async def _greet(
        self,
        address: str,
        offer: Callable[[Identity], Offer],
        expected: PeerInfo | None = None,
        patience: float = math.inf,
    ) -> Greeting:
        """Connect and prove ourselves; raises OSError, AuthError or ProtocolError.

        `patience`: seconds for the first attempt to connect, doubled for each one that follows."""
        runtime, loop = self._agent.runtime, self._agent.loop
        limit = loop.time() + self._agent.options.handshake_timeout
        attempt = 0
        while True:
            try:
                greeting = await self.knock(address, offer, expected, patience)
            except TimeoutError:
                if patience == math.inf or loop.time() + patience > limit:
                    raise
                patience *= 2  # a fresh SYN gets through sooner than a repeated one
                continue
            if greeting.error is None:
                return greeting
            # A connection that is cut looks like one that is refused: knock again to see.
            certain = isinstance(greeting.error, ProtocolError | WorkerLost)
            attempt += 1
            # A reset is nobody's refusal: only time ends the attempts. A peer that closes the
            # connection again and again does refuse it.
            reset = isinstance(greeting.error, ConnectionResetError)
            late = (patience != math.inf or reset) and loop.time() >= limit
            if certain or late or (attempt >= _RETRIES and not reset):
                raise greeting.error
            pause = min(0.01 * 2.0**attempt, _LONGEST_PAUSE)
            await asyncio.sleep(runtime.random.uniform(0.5, 1.5) * pause)

    async def knock(
        self,
        address: str,
        offer: Callable[[Identity], Offer],
        expected: PeerInfo | None = None,
        patience: float = math.inf,
    ) -> Greeting:
        """Connect once, and see how the handshake ends. OSError: nobody let us in."""
        credentials = self._credentials if address.startswith("tcp:") else None
        done: asyncio.Future[Greeting] = self._agent.loop.create_future()
        # A kernel tries for minutes to reach a host that is gone.
        async with asyncio.timeout(min(patience, self._agent.options.handshake_timeout)):
            protocol = await self._agent.runtime.network.connect(
                address,
                functools.partial(self._caller, done, offer, expected, credentials),
                tls=credentials,
            )
        assert isinstance(protocol, Greeting)
        try:
            return await done
        except BaseException:
            protocol.transport.abort()
            raise

    def _caller(
        self,
        done: asyncio.Future[Greeting],
        offer: Callable[[Identity], Offer],
        expected: PeerInfo | None,
        credentials: Credentials | None,
    ) -> Greeting:
        def over(greeting: Greeting) -> None:
            if not done.done():
                done.set_result(greeting)

        timeout = self._agent.options.handshake_timeout
        handshake = self._handshake(offer)
        greeting = Greeting(handshake, timeout, over, credentials=credentials)
        greeting.expected = expected
        self._dialled.add(greeting)
        return greeting


class _Visitor(Greeting):
    """A connection that came in."""

    def __init__(self, doors: Doors, handshake: Handshake, credentials: Credentials | None) -> None:
        timeout = doors._agent.options.handshake_timeout
        super().__init__(handshake, timeout, doors.greeted, doors.admit, credentials)
        self._doors = doors
        self._known = False  # counted among the strangers before it came in

    def knocked(self, host: str) -> bool:
        """Somebody is there who will have to speak TLS first."""
        self._hurry()
        self._known = self._doors.visited(self, host)
        return self._known

    def failed(self, error: Exception) -> None:
        """It did not speak TLS, or showed no certificate that counts."""
        self._fail(AuthError(f"no TLS: {error}"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._known:
            return
        name: Any = transport.get_extra_info("peername")
        if not self._doors.visited(self, name[0] if isinstance(name, tuple) else ""):
            self.transport.abort()
