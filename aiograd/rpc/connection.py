"""One connection of a link: what asyncio calls when bytes come, and when they can go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from aiograd.wire.framing import Frame, FrameReader
from aiograd.wire.session import Session

if TYPE_CHECKING:
    from aiograd.rpc.link import Link

LAST_WORDS: Final = 0.25  # seconds for what was written before closing to leave


class Connection(asyncio.BufferedProtocol):
    """The protocol of an established connection: bytes to frames."""

    def __init__(self, link: Link, transport: Any, reader: FrameReader, session: Session) -> None:
        self._link, self._receive = link, link.receiving.receive
        self.transport = transport
        self._reader, self._session = reader, session
        self.ended = link.agent.loop.create_future()

    def mute(self) -> None:
        """Whatever still comes does not count any more: it goes nowhere."""
        self._reader, self._session = _Nowhere(), Session()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        session = self._session
        session.received += nbytes
        try:
            frames = self._reader.advance(nbytes)
        except Exception as error:  # on another connection it would only come again
            self._link.broken(error)
            return
        if frames:
            self._receive(frames)
        elif (shared := self._link.shared) is not None and shared.awaited and shared.back:
            shared.give_back()
        if session.received >= session.overdue and session is self._session:
            self._link.outbox.acknowledge()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._link.connection is self:
            self._link.outbox.pause()

    def resume_writing(self) -> None:
        if self._link.connection is self:
            self._link.outbox.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._link.disconnected(self, exc)


class _Nowhere(FrameReader):
    """Reads what nobody wants to know."""

    def __init__(self) -> None:
        self._bin = memoryview(bytearray(4096))

    def get_buffer(self) -> memoryview:
        return self._bin

    def advance(self, count: int) -> list[Frame]:
        return []


async def hang_up(connections: Sequence[Connection]) -> None:
    """Let the last words leave, but wait for nobody who does not read them."""
    ends = [connection.ended for connection in connections]
    if ends:
        await asyncio.wait(ends, timeout=LAST_WORDS)
    for connection in connections:
        if not connection.ended.done():
            connection.transport.abort()
    if ends:
        await asyncio.wait(ends, timeout=LAST_WORDS)
