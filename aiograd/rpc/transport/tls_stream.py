"""TLS over a connection: a protocol to the transport below, a transport to the protocol above.

    protocol  ◀── plain bytes ──  Tunnel  ◀── records ──  TCP transport

asyncio's own TLS keeps what it writes and reads in buffers of its own, and goes through the loop
for every piece, which takes as long as the encryption. Here what is written is encrypted at once,
in pieces that stay in the processor's cache, and what waits for a slow peer waits below, where the
usual limits apply. What comes in is decrypted straight into the memory of the protocol above.

It ends with the connection: a close is told to the peer, and not waited for. Whoever must know that
nothing was cut off counts its messages, as links do.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

_PIECE: Final = 128 * 1024  # encrypted at a time: larger ones drop out of the cache between steps
_GREETING: Final = 16 * 1024  # read at a time until the protocol above takes whole messages
_BUFFER: Final = 256 * 1024  # read at a time afterwards


class Tunnel(asyncio.BufferedProtocol):
    """One side of a secured connection. `ready` ends when TLS is agreed on, or could not be."""

    def __init__(self, context: ssl.SSLContext, protocol: Any, *, server: bool) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._protocol = protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._below: Any = None
        self._buffer = memoryview(bytearray(_GREETING))
        self._open = False  # between the agreement and the end
        self._ended = False  # nothing is read or written any more
        self._reading = True  # the protocol above wants what comes

    # ── as a protocol ───────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        self._below = transport
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._ended:
            return
        self._incoming.write(self._buffer[:nbytes])
        if not self._open:
            self._shake_hands()
        if self._open:
            self._deliver()

    def eof_received(self) -> bool:
        if self._open:
            self._protocol.eof_received()
        return False

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if not self.ready.done():
            self._refuse(exc or ConnectionResetError("closed before TLS was agreed on"))
        elif self._open:
            self._open = False
            self._protocol.connection_lost(exc)

    def _shake_hands(self) -> None:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:  # the peer is told why, if TLS has a word for it
            self._flush()
            self._ended = True
            self._below.close()
            self._refuse(error)
            return
        self._flush()
        self._open = True
        if not self.ready.done():
            self.ready.set_result(None)
        self._protocol.connection_made(self)

    def _refuse(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def _deliver(self) -> None:
        """Give the protocol above what can be decrypted."""
        read: Any = self._ssl.read
        try:
            while self._reading and not self._ended:
                window = self._protocol.get_buffer(-1)
                filled, size = 0, len(window)
                try:
                    while filled < size:
                        count = read(size - filled, window[filled:])
                        if not count:  # they said that nothing follows
                            self._below.close()
                            return
                        filled += count
                finally:
                    if filled and not self._ended:
                        self._protocol.buffer_updated(filled)
        except ssl.SSLWantReadError:
            if self._outgoing.pending:  # such as new keys
                self._flush()
        except ssl.SSLError as error:
            self._fail(error)

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())

    def _fail(self, error: Exception) -> None:
        """What came was changed on the way, or was never TLS."""
        self._ended = True
        self._below.abort()
        if self._open:
            self._open = False
            self._protocol.connection_lost(error)

    # ── as a transport ──────────────────────────────────────────────────────────────────────────

    def write(self, data: Any) -> None:
        if self._ended:
            return
        view, encrypt, outgoing = memoryview(data), self._ssl.write, self._outgoing
        send = self._below.write
        for start in range(0, len(view), _PIECE):
            encrypt(view[start : start + _PIECE])
            send(outgoing.read())

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol
        self._buffer = memoryview(bytearray(_BUFFER))

    def get_protocol(self) -> Any:
        return self._protocol

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False
        if not self._below.is_closing():
            self._below.pause_reading()

    def resume_reading(self) -> None:
        self._reading = True
        if not self._below.is_closing():
            self._below.resume_reading()
            asyncio.get_running_loop().call_soon(self._deliver)  # what was decrypted only in part

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return int(self._below.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._ssl if name == "ssl_object" else self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._ended or self._below is None or bool(self._below.is_closing())

    def close(self) -> None:
        """Let what was written leave, and say that nothing follows."""
        if not self._ended:
            try:
                self._ssl.unwrap()
            except ssl.SSLError:  # it wants to hear the same of the peer; we do not wait for it
                self._flush()
            self._ended = True
        self._below.close()

    def abort(self) -> None:
        self._ended = True
        self._below.abort()

    def give_up(self) -> None:
        """Whoever waited for `ready` does so no more."""
        self._ended = True
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # seen
        self.ready.cancel()
        if self._below is not None:
            self._below.abort()
