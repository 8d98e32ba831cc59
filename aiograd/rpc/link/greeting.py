"""The first bytes of a connection: carries the handshake, then hands the transport over.

A `Greeting` is the protocol of a connection until both sides are proven. It reads exactly what the
handshake needs, so that nothing a stranger sends gets any further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiograd.errors import ProtocolError, WorkerLost
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.transport.tls import Credentials
from aiograd.wire.handshake import Handshake, Identity
from aiograd.wire.session import Offer

# Decides about a proven client: ACCEPTED, DUPLICATE or LOST, how much of the session is here, and
# the number of our latest dial; or raises to refuse.
Admit = Callable[[Identity, Offer], tuple[int, int, int]]


class Greeting(asyncio.BufferedProtocol):
    """One side of a new connection. `result` is the proven peer, or why there is none."""

    def __init__(
        self,
        handshake: Handshake,
        timeout: float,
        done: Callable[[Greeting], None],
        admit: Admit | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._handshake = handshake
        self._timeout = timeout
        self._done = done  # told exactly once, when it is over
        self._admit = admit
        self._credentials = credentials  # of this worker, if the connection is to be secured
        self._buffer = bytearray(512)
        self._filled = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self.transport: Any = None
        self.error: Exception | None = None
        self.heard = False  # anything at all came back
        self.gone = False  # the connection ended before anybody took it over
        self.expected: PeerInfo | None = None  # who should answer

    @property
    def peer(self) -> Identity | None:
        return self._handshake.peer if self._handshake.proven else None

    @property
    def status(self) -> int:
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
    def latest(self) -> int:
        """The number of the server's latest dial."""
        return self._handshake.latest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._over:  # too late: TLS took all the time there was
            self.transport.abort()
            return
        self._hurry()
        if self._credentials is not None:
            client = self._admit is None
            self._handshake.bind(self._credentials.binding(self.transport, client=client))
        if first := self._handshake.start():
            self.transport.write(first)

    def _hurry(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout, self._late)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._over:  # whatever still comes is thrown away
            return memoryview(self._buffer)
        return memoryview(self._buffer)[self._filled : self._handshake.needed]

    def buffer_updated(self, nbytes: int) -> None:
        if self._over:
            return
        self.heard = True
        self._filled += nbytes
        if self._filled < self._handshake.needed:
            return
        message = bytes(self._buffer[: self._filled])
        self._filled = 0
        try:
            answer = self._handshake.receive(message)
            self._check_expected()
            if answer:
                self.transport.write(answer)
            if self._handshake.mismatch is not None:
                raise self._handshake.mismatch
            if self._handshake.proven:
                self._finish()
        except Exception as error:
            self._fail(error)

    def _check_expected(self) -> None:
        """Turn back before proving anything to somebody else than was meant."""
        them = self._handshake.peer
        meant = self.expected
        if meant is None or them is None or self._handshake.mismatch is not None:
            return
        if them.name != meant.name:  # a member that proves its own name is still not that one
            raise WorkerLost(meant.name, "no", f"{them.name} is there now")
        if them.incarnation != meant.incarnation:
            raise WorkerLost(meant.name, "no", f"{them.name} was started anew there")

    def _finish(self) -> None:
        if self._credentials is not None:
            assert self._handshake.peer is not None
            self._credentials.check_name(self.transport, self._handshake.peer.name)
        if self._admit is not None:
            assert self._handshake.peer is not None
            verdict = self._admit(self._handshake.peer, self._handshake.offer)
            self.transport.write(self._handshake.admit(*verdict))
        self.transport.pause_reading()  # what follows is for the link, which takes over soon
        self._end()

    def _late(self) -> None:
        self._fail(self._handshake.refusal(f"no proof within {self._timeout:g} s"))

    def _fail(self, error: Exception) -> None:
        if not self._over:
            self.error = error
            if self.transport is None:
                pass  # it has not come so far
            elif isinstance(error, ProtocolError):
                self.transport.close()  # the answer still names our version
            else:
                self.transport.abort()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if not self._over:
            if self._handshake.mismatch is not None:
                self.error = self._handshake.mismatch
            elif isinstance(exc, ConnectionResetError):
                # A peer that refuses a proof has read it, so it closes the connection without a
                # reset. The network resets connections, and so does a listener that is full.
                self.error = ConnectionResetError(
                    "the connection was reset during the handshake: by the network, or because "
                    "too many others have proven nothing yet"
                )
            else:
                self.error = self._handshake.refusal(
                    "the other side closed the connection during the handshake: "
                    "another secret, or too many newcomers at once"
                )
            self._end()

    def eof_received(self) -> bool:
        return False

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._done(self)
