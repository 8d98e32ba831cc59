"""Authenticated frames: a MAC and a counter on everything that crosses a plain connection.

    protocol  ◀── bytes ──  SealedStream  ◀── records ──  TCP transport

    record    length u32 · bytes · MAC of counter and bytes (16 bytes)

The handshake proves who is at the other end once. A relay between the two, such as another user
of this host who was first to bind the rendezvous port, could still change what follows, and run
code in both workers. So both sides derive keys from the proven secret (`Handshake.session_keys`),
one for each direction and each connection, and check every record before anything reads a byte of
it. A record that was changed, left out, repeated or moved has another counter than the receiver,
and ends the link. A connection that is cut is none of these: the session goes on over the next one,
whose handshake and keys are new.

Records are not encrypted: who is on the path can read them. TLS does that.

The unauthenticated path costs nothing: this class is between transport and link only where it is
needed, which is decided once per connection (`needs_seal`). BLAKE2b takes a third of the time of
HMAC-SHA256 for a small record, and HMAC-SHA256 two thirds of the time of BLAKE2b for a large one,
where the processor has instructions for it; so the size of a record decides which of them is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import stat
import struct
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final

from aiograd.errors import ProtocolError

_LENGTH: Final = struct.Struct("<I")
_MAC: Final = 16  # bytes; a forger has one attempt per connection
_RECORD: Final = 128 * 1024  # bytes at most: larger ones drop out of the cache between the steps
_SMALL: Final = 8 * 1024  # bytes up to which BLAKE2b is faster
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


def _keys(key: bytes) -> tuple[bytes, Any]:
    """Return the key of small records, and the HMAC of large ones, which is copied for each."""
    # Two keys, so that no text is ever signed with both algorithms under one.
    small = hashlib.blake2b(key, person=b"small").digest()[:32]
    large = hashlib.blake2b(key, person=b"large").digest()
    return small, hmac.new(large, digestmod="sha256")


def _large_mac(base: Any, count: bytes, data: Any) -> bytes:
    mac = base.copy()
    mac.update(count)
    mac.update(data)
    return bytes(mac.digest()[:_MAC])


class SealedStream(asyncio.BufferedProtocol):
    """A transport to the link above, and the protocol of the transport below."""

    def __init__(self, below: Any, ours: bytes, theirs: bytes) -> None:
        self._below = below
        self._our_key, self._our_mac = _keys(ours)
        self._their_key, self._their_mac = _keys(theirs)
        self._sent = self._received = 0  # records
        self._protocol: Any = None  # above
        self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # of what came and is not delivered
        self._reading = bool(below.is_reading())  # the protocol above has not paused reading
        self._ended = False
        below.set_protocol(self)

    # ── as a protocol of the transport below ────────────────────────────────────────────────────

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the room behind what has come."""
        if self._start and _BUFFER - self._end < _RECORD // 2:
            left = self._end - self._start
            self._view[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver the records that are whole, and as they were sent."""
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
        view = self._view
        # Small records written out here, and in `write`: most calls are one record each way.
        while self._reading and not self._ended:
            at, end = self._start, self._end
            if end - at < _LENGTH.size:
                break
            (length,) = _LENGTH.unpack_from(view, at)
            if not 0 < length <= _RECORD:
                return self._fail(f"a record of {length} bytes")
            middle = at + _LENGTH.size + length
            if middle + _MAC > end:
                break
            data = view[at + _LENGTH.size : middle]
            count = self._received.to_bytes(8, "little")
            self._received += 1
            if length <= _SMALL:
                mac = blake2b(data, key=self._their_key, salt=count, digest_size=_MAC).digest()
            else:
                mac = _large_mac(self._their_mac, count, data)
            # In constant time: else the time of a refusal would tell how many bytes were right.
            if not compare_digest(view[middle : middle + _MAC], mac):
                return self._fail("a record that was changed, left out, repeated or moved")
            # Before it is delivered: the protocol above may resume or end the stream.
            self._start = middle + _MAC
            protocol = self._protocol
            room = protocol.get_buffer(length)
            if length <= len(room):
                room[:length] = data
                protocol.buffer_updated(length)
            else:
                self._hand_over(data)
        if self._start == self._end:
            self._start = self._end = 0

    def _hand_over(self, data: memoryview) -> None:
        """Copy checked bytes to where the protocol above wants them, in several steps."""
        at, size = 0, len(data)
        while at < size and not self._ended:
            room = self._protocol.get_buffer(-1)
            count = min(len(room), size - at)
            room[:count] = data[at : at + count]
            at += count
            self._protocol.buffer_updated(count)

    def _fail(self, what: str) -> None:
        """End the connection: somebody between the two workers has written to it."""
        self._ended = True
        self._below.abort()
        self._protocol.connection_lost(ProtocolError(f"{what} (authenticated frames)"))

    # ── as a transport of the protocol above ────────────────────────────────────────────────────

    def write(self, data: Any) -> None:
        """Write data with its MAC; in several records if it is large."""
        if self._ended:
            return
        size, send = len(data), self._below.write
        if size <= _SMALL:
            if size:
                count = self._sent.to_bytes(8, "little")
                self._sent += 1
                mac = blake2b(data, key=self._our_key, salt=count, digest_size=_MAC).digest()
                send(b"".join((_LENGTH.pack(size), data, mac)))
            return
        view = memoryview(data)
        for start in range(0, size, _RECORD):
            piece = view[start : start + _RECORD]
            count = self._sent.to_bytes(8, "little")
            self._sent += 1
            length = len(piece)
            if length <= _SMALL:
                mac = blake2b(piece, key=self._our_key, salt=count, digest_size=_MAC).digest()
            else:
                mac = _large_mac(self._our_mac, count, piece)
            # One write for each record: with three, the first of them would wake up the peer.
            send(b"".join((_LENGTH.pack(length), piece, mac)))

    def set_protocol(self, protocol: Any) -> None:
        """Set the protocol above."""
        self._protocol = protocol

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
