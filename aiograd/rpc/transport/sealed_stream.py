"""Authenticated frames: a tag and a counter on everything that crosses a plain connection.

    protocol  ◀── bytes ──  SealedStream  ◀── records ──  TCP transport

    record    length u32 · bytes · tag of counter and bytes (16 bytes)

The handshake proves who is at the other end once. A relay between the two, such as another user
of this host who was first to bind the rendezvous port, could still change what follows, and run
code in both workers. So both sides derive keys from the proven secret (`Handshake.session_keys`),
one for each direction and each connection, and check every record before anything reads a byte of
it. A record that was changed, left out, repeated or moved has another counter than the receiver,
and ends the link. A connection that is cut is none of these: the session goes on over the next one,
whose handshake and keys are new.

`wire.records` has the ways to protect a record. One of them encrypts all; but who learns the secret
later can read what was recorded. TLS has no such weakness.

The unauthenticated path costs nothing: this class is between transport and link only where it is
needed, which is decided once per connection (`needs_seal`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from typing import Any, Final

from aiograd.errors import ProtocolError
from aiograd.wire.records import LENGTH, TAG, Forged, Protection, protector, unprotector

_UNPACK: Final = struct.Struct("<I").unpack_from
_AROUND: Final = LENGTH + TAG
_FORGED: Final = "a record that was changed, left out, repeated or moved"
_RECORD: Final = 128 * 1024  # bytes at most: larger ones drop out of the cache between the steps
# Read at a time: several records, so that the part of the last one is seldom moved to the front.
# Pages that nothing is read into take no memory.
_BUFFER: Final = 6 * _RECORD


def needs_seal(transport: Any) -> bool:
    """Whether somebody else could be between the two ends of this connection.

    Not inside one process, and not over a Unix socket in a folder that only this user can enter.
    Connections with TLS are not asked about: their records are protected already.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False  # memory
    if sock.family != socket.AF_UNIX:
        return True
    # The end that listens has the path; the other one finds it at its peer.
    path = sock.getsockname() or sock.getpeername()
    if not isinstance(path, str) or not path or path.startswith("\0"):
        return True
    try:
        folder = os.stat(os.path.dirname(path) or ".")
    except OSError:
        return True
    return folder.st_uid != os.geteuid() or bool(stat.S_IMODE(folder.st_mode) & 0o077)


class SealedStream(asyncio.BufferedProtocol):
    """A transport to the link above, and the protocol of the transport below."""

    def __init__(
        self,
        below: Any,
        ours: bytes,
        theirs: bytes,
        protection: Protection = Protection.HASHES,
    ) -> None:
        self._below = below
        self._send = below.write
        self._protect = protector(ours, protection)
        self._unprotect = unprotector(theirs, protection)
        self._protocol: Any = None  # above
        self._room: Any = None  # its `get_buffer`
        self._updated: Any = None  # its `buffer_updated`
        self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # of what came and is not delivered
        self._reading = bool(below.is_reading())  # the protocol above has not paused reading
        self._ended = False
        below.set_protocol(self)

    # ── as a protocol of the transport below ────────────────────────────────────────────────────

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the room behind what has come."""
        if not self._end:
            return self._view
        if self._start and _BUFFER - self._end < _RECORD // 2:
            left = self._end - self._start
            self._view[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver the records that are whole, and as they were sent."""
        # Fast path for one whole record, which a call or a reply nearly always is: a lone call
        # takes 36 µs with it and 39 without. `_deliver` does the same for everything else.
        view = self._view
        if not self._end and _UNPACK(view)[0] == nbytes - _AROUND and self._reading:
            length = nbytes - _AROUND
            room = self._room(length)
            if 0 < length <= len(room) and not self._ended:
                try:
                    self._unprotect(view[LENGTH:nbytes], room[:length])
                except Forged:
                    return self._fail(_FORGED)
                self._updated(length)
                return
        self._end += nbytes
        self._deliver()

    def eof_received(self) -> bool:
        """Pass the end on; part of a record is dropped."""
        return bool(self._protocol.eof_received())

    def pause_writing(self) -> None:
        """Pass the back-pressure of the transport below on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass the end of the back-pressure on."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the end on, unless a bad record was the end before."""
        if not self._ended:
            self._ended = True
            self._protocol.connection_lost(exc)

    def _deliver(self) -> None:
        view, at = self._view, self._start
        while self._reading and not self._ended:
            end = self._end
            if end - at < LENGTH:
                break
            (length,) = _UNPACK(view, at)
            if not 0 < length <= _RECORD:
                return self._fail(f"a record of {length} bytes")
            first, after = at + LENGTH, at + LENGTH + length + TAG
            if after > end:
                break
            # Before it is delivered: the protocol above may resume or end the stream.
            self._start = at = after
            room = self._room(length)
            whole = length <= len(room)
            if not whole:
                room = memoryview(bytearray(length))
            try:
                self._unprotect(view[first:after], room[:length])
            except Forged:
                return self._fail(_FORGED)
            if whole:
                self._updated(length)
            else:
                self._hand_over(room)
            at = self._start
        if self._start == self._end:
            self._start = self._end = 0

    def _hand_over(self, data: memoryview) -> None:
        """Copy checked bytes to where the protocol above wants them, in several steps."""
        at, size = 0, len(data)
        while at < size and not self._ended:
            room = self._room(-1)
            count = min(len(room), size - at)
            room[:count] = data[at : at + count]
            at += count
            self._updated(count)

    def _fail(self, what: str) -> None:
        """End the connection: somebody between the two workers has written to it."""
        self._ended = True
        self._below.abort()
        self._protocol.connection_lost(ProtocolError(f"{what} (authenticated frames)"))

    # ── as a transport of the protocol above ────────────────────────────────────────────────────

    def write(self, data: Any) -> None:
        """Write data with its tag; in several records if it is large."""
        if self._ended:
            return
        size = len(data)
        if size <= _RECORD:
            if size:
                self._send(self._protect(data))
            return
        view = memoryview(data)
        for start in range(0, size, _RECORD):
            self._send(self._protect(view[start : start + _RECORD]))

    def set_protocol(self, protocol: Any) -> None:
        """Set the protocol above."""
        self._protocol = protocol
        self._room, self._updated = protocol.get_buffer, protocol.buffer_updated

    def get_protocol(self) -> Any:
        """Return the protocol above."""
        return self._protocol

    def is_reading(self) -> bool:
        """Whether the protocol above has not paused reading."""
        return self._reading

    def pause_reading(self) -> None:
        """Deliver nothing more; records that are here stay here."""
        self._reading = False
        if not self._below.is_closing():
            self._below.pause_reading()

    def resume_reading(self) -> None:
        """Deliver again, beginning with what is here already."""
        self._reading = True
        if not self._below.is_closing():
            self._below.resume_reading()
            if self._start != self._end:  # causes no event below
                asyncio.get_running_loop().call_soon(self._deliver)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the transport below, where all unsent bytes are."""
        self._below.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        """Return the unsent bytes of the transport below."""
        return int(self._below.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the transport below knows."""
        return self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self._ended or bool(self._below.is_closing())

    def close(self) -> None:
        """Close the connection when what was written has left."""
        self._below.close()

    def abort(self) -> None:
        """Close the connection and drop what is unsent."""
        self._below.abort()
