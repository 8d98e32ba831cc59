"""One connection of a link: what asyncio calls when bytes come, and when they can go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from aiograd.rpc.link.send import Outbox
from aiograd.wire.framing import Frame, FrameReader
from aiograd.wire.session import Session

LAST_WORDS: Final = 0.25  # seconds for what was written before closing to leave


class Connected(Protocol):
    """The link, as far as its connection concerns it."""

    @property
    def outbox(self) -> Outbox:
        """What is to be sent; paused while the socket takes no more."""

    @property
    def session(self) -> Session:
        """Counts the bytes of both directions over all connections."""

    def chunk_read(self) -> None:
        """Note that a piece of a large message was read, and no whole frame."""

    def acknowledge(self) -> None:
        """Tell the peer how much has come: it keeps everything until then."""

    def broken(self, error: Exception) -> None:
        """End the link: the peer broke the protocol."""

    def disconnected(self, connection: Connection, error: Exception | None) -> None:
        """Note that the connection has ended."""


class Connection(asyncio.BufferedProtocol):
    """The protocol of an established connection: bytes to frames."""

    def __init__(
        self,
        link: Connected,
        transport: Any,
        reader: FrameReader,
        receive: Callable[[list[Frame]], None],
    ) -> None:
        self._link, self._receive = link, receive
        self._outbox, session = link.outbox, link.session
        self._muted = False
        self.transport = transport
        self._reader, self._session = reader, session
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def mute(self) -> None:
        """Drop whatever still comes: it does not count any more."""
        self._muted = True
        self._reader, self._session = _Nowhere(), Session()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes go."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Read bytes that have come."""
        session = self._session
        session.received += nbytes
        try:
            frames = self._reader.advance(nbytes)
        except Exception as error:  # on another connection it would only come again
            self._link.broken(error)
            return
        if frames:
            self._receive(frames)
        else:
            self._link.chunk_read()
        if session.received >= session.overdue and session is self._session:
            self._link.acknowledge()

    def eof_received(self) -> bool:
        """Close the connection: half of one is of no use."""
        return False

    def pause_writing(self) -> None:
        """Stop writing: the socket takes no more."""
        if not self._muted:
            self._outbox.pause()

    def resume_writing(self) -> None:
        """Write again."""
        if not self._muted:
            self._outbox.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the link that the connection has ended."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._link.disconnected(self, exc)


class RestingConnection(asyncio.BufferedProtocol):
    """Stands in for a connection at rest: the first bytes that come end the rest.

    Instead of a check with every read, which would cost every message something."""

    def __init__(self, connection: Connection, stir: Callable[[], None]) -> None:
        self._connection, self._stir = connection, stir

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where the next bytes go."""
        return self._connection.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """End the rest, and read bytes that have come."""
        self._stir()
        self._connection.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        """Close the connection: half of one is of no use."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the link that the connection has ended."""
        self._connection.connection_lost(exc)


class _Nowhere(FrameReader):
    """Reads what nobody wants to know."""

    def __init__(self) -> None:
        self._bin = memoryview(bytearray(4096))

    def get_buffer(self) -> memoryview:
        """Give memory that nothing reads."""
        return self._bin

    def advance(self, count: int) -> list[Frame]:
        """Drop the bytes."""
        return []


async def hang_up(connections: Sequence[Connection]) -> None:
    """Close connections: the last messages may leave, but a peer that does not read them does not
    delay this."""
    ends = [connection.ended for connection in connections]
    if ends:
        await asyncio.wait(ends, timeout=LAST_WORDS)
    for connection in connections:
        if not connection.ended.done():
            connection.transport.abort()
    if ends:
        await asyncio.wait(ends, timeout=LAST_WORDS)
