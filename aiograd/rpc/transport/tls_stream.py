"""TLS over a connection: a protocol to the transport below, a transport to the protocol above.

    protocol  ◀── plain bytes ──  TLSStream  ◀── records ──  TCP transport

asyncio's own TLS keeps what it writes and reads in buffers of its own, and goes through the loop
for every piece, which takes as long as the encryption. Here `write` encrypts at once, in pieces
that stay in the processor's cache, and records for a slow peer wait in the transport below, where
the usual limits apply. Incoming records are decrypted straight into the memory of the protocol
above.

The stream ends with the connection: `close` sends TLS's close notification and does not wait for
the peer's. A layer that must know that nothing was cut off counts bytes, as `wire.session` does.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Any, Final

_PIECE: Final = 128 * 1024  # encrypted at a time: larger ones drop out of the cache between steps
_HANDSHAKE_BUFFER: Final = 16 * 1024  # read at a time until the handshake hands over to a link
_BUFFER: Final = 256 * 1024  # read at a time afterwards
_local = threading.local()


def _shared_buffer() -> memoryview:
    """Return the buffer into which all authenticated connections of this thread's loop read.

    One after the other: what was read is given to OpenSSL before the loop reads anything else.
    """
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = memoryview(bytearray(_BUFFER))
    return buffer


class TLSStream(asyncio.BufferedProtocol):
    """One side of a secured connection. `ready` ends when TLS is agreed on, or could not be."""

    def __init__(self, context: ssl.SSLContext, protocol: Any, *, server: bool) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._protocol = protocol  # above
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._below: Any = None
        # While a peer has proven nothing, its connection holds 16 KiB here instead of 256.
        self._buffer = memoryview(bytearray(_HANDSHAKE_BUFFER))
        self._open = False  # between the agreement on TLS and the end
        self._ended = False  # nothing is read or written any more
        self._reading = True  # the protocol above has not paused reading

    # ── as a protocol of the transport below ────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        """Begin the TLS handshake; the protocol above hears of the connection when it is done."""
        self._below = transport
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for records."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt what came, and deliver it."""
        if self._ended:
            return
        self._incoming.write(self._buffer[:nbytes])
        if not self._open:
            self._shake_hands()
        if self._open:  # the last record of the handshake may have brought application data
            self._deliver()

    def eof_received(self) -> bool:
        """Pass the end of the stream on; the transport below closes itself."""
        # Without TLS's close notification it may be an attacker who cut the stream. Sessions count
        # bytes, so for them it is a broken connection like any other.
        if self._open:
            self._protocol.eof_received()
        return False

    def pause_writing(self) -> None:
        """Pass the back-pressure of the transport below on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass the end of the back-pressure on."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell `ready` or the protocol above, and each only once."""
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
        except ssl.SSLError as error:
            self._flush()  # the alert that tells the peer why, if TLS has one
            self._ended = True
            self._below.close()
            self._refuse(error)
            return
        self._flush()
        self._open = True
        if not self.ready.done():
            self.ready.set_result(None)
        # After `ready`: the protocol may close at once, and `connection_lost` looks at both.
        self._protocol.connection_made(self)

    def _refuse(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def _deliver(self) -> None:
        """Decrypt into the buffers of the protocol above until records run out or it pauses."""
        read: Any = self._ssl.read
        try:
            while self._reading and not self._ended:
                window = self._protocol.get_buffer(-1)
                filled, size = 0, len(window)
                try:
                    # A read gives one record, 16 KiB at most. The protocol above is told once per
                    # window instead of once per record.
                    while filled < size:
                        count = read(size - filled, window[filled:])
                        if not count:  # the peer's close notification
                            self._below.close()
                            return
                        filled += count
                finally:
                    # Also when records ran out (SSLWantReadError): what is there is delivered.
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
        """End the connection: a record was changed on the way, or was never TLS."""
        self._ended = True
        self._below.abort()
        # Told here, with the reason. `abort` causes a `connection_lost` from below as well, which
        # finds the stream closed and passes nothing on.
        if self._open:
            self._open = False
            self._protocol.connection_lost(error)

    # ── as a transport of the protocol above ────────────────────────────────────────────────────

    def write(self, data: Any) -> None:
        """Encrypt `data` at once, and write it to the transport below."""
        if self._ended:
            return
        view, encrypt, outgoing = memoryview(data), self._ssl.write, self._outgoing
        send = self._below.write
        # The BIO is emptied after every piece, so it never holds more than one, and back-pressure
        # is that of the transport below.
        for start in range(0, len(view), _PIECE):
            encrypt(view[start : start + _PIECE])
            send(outgoing.read())

    def set_protocol(self, protocol: Any) -> None:
        """Hand over to the protocol of whole messages, with a buffer of full size."""
        self._protocol = protocol
        self._buffer = _shared_buffer()

    def get_protocol(self) -> Any:
        """Return the protocol above."""
        return self._protocol

    def is_reading(self) -> bool:
        """Whether the protocol above has not paused reading."""
        return self._reading

    def pause_reading(self) -> None:
        """Deliver nothing more; records already decrypted in part stay here."""
        self._reading = False
        if not self._below.is_closing():
            self._below.pause_reading()

    def resume_reading(self) -> None:
        """Deliver again, beginning with what is here already."""
        self._reading = True
        if not self._below.is_closing():
            self._below.resume_reading()
            # Records that are here cause no event below. Not at once: the protocol above may be
            # in the middle of something when it resumes.
            asyncio.get_running_loop().call_soon(self._deliver)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the transport below, where all unsent bytes are."""
        self._below.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        """Return the unsent bytes of the transport below."""
        return int(self._below.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the TLS object for "ssl_object", else what the transport below knows."""
        return self._ssl if name == "ssl_object" else self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self._ended or self._below is None or bool(self._below.is_closing())

    def close(self) -> None:
        """Send what was written, then TLS's close notification; do not wait for the peer's."""
        if not self._ended:
            try:
                self._ssl.unwrap()
            except ssl.SSLError:  # it wants to read the peer's notification
                self._flush()
            self._ended = True
        self._below.close()

    def abort(self) -> None:
        """Close the connection and drop what is unsent."""
        self._ended = True
        self._below.abort()

    def discard(self) -> None:
        """Abort a connection whose `ready` is no longer awaited."""
        self._ended = True
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # marked as retrieved, else asyncio logs it
        self.ready.cancel()
        if self._below is not None:
            self._below.abort()
