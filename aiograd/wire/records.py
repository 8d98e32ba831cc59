"""Protection of the records of one connection: a key, a counter, and a tag on each record.

    protect(data) ─▶ record: length u32 · body · tag        unprotect(body and tag, room) ─▶ data

There are three ways, and the two sides of a connection take the best that both have:

    AEAD     AES-256-GCM for every record, by the package `cryptography` (extra `tls`)
    LARGE    AES-256-GCM for large records, by Python's own OpenSSL (`wire.openssl`), which takes
             too long to reach for small ones; those have keyed BLAKE2b and are not encrypted
    HASHES   keyed BLAKE2b for small records, for which it is quick to set up, and HMAC-SHA256 for
             large ones, for which processors have instructions

GCM copies, encrypts and authenticates in one pass, several times as fast as the connection; a hash
is slower than the connection. The nonce is the counter. Each key protects one direction of one
connection, and each counter is used once, so no nonce ever repeats. A record that was changed, left
out, repeated or moved fails under the receiver's counter.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from collections.abc import Callable
from enum import IntEnum
from hmac import compare_digest
from typing import Any, Final

from aiograd.wire.openssl import Gcm, find_gcm

__all__ = ["LENGTH", "TAG", "Forged", "Protection", "best_protection", "protector", "unprotector"]

LENGTH: Final = 4  # bytes in front of each record
TAG: Final = 16  # bytes behind each record; a forger has one attempt per connection
_SMALL: Final = 8 * 1024  # bytes up to which BLAKE2b is faster than HMAC-SHA256
_PACK: Final = struct.Struct("<I").pack
_COUNTER: Final = struct.Struct("<Q").pack
_NONCE: Final = struct.Struct("<QI").pack  # 12 bytes, of the counter and 0

Protect = Callable[[Any], Any]
Unprotect = Callable[[memoryview, memoryview], None]


class Forged(ValueError):
    """A record that its sender did not write as the next one."""


class Protection(IntEnum):
    """How the records of a connection are protected; a better one has a larger number."""

    HASHES = 0
    LARGE = 1
    AEAD = 2


def best_protection() -> Protection:
    """Return the best that this process has."""
    if _aead() is not None:
        return Protection.AEAD
    return Protection.LARGE if find_gcm() is not None else Protection.HASHES


def protector(key: bytes, protection: Protection) -> Protect:
    """Return the function that makes one record after the other, each in a buffer of its own."""
    # Closures, not methods: a lone call takes four steps of this kind, and each counts.
    number = itertools.count().__next__
    if protection == Protection.AEAD:
        return _encryptor(key, number)
    keyed = _small_mac(key).copy
    large = _protect_large(key, protection)

    def protect(data: Any) -> Any:
        size = len(data)
        if size > _SMALL:
            return large(number(), data)
        data = bytes(data)  # before the MAC: another thread may change an array meanwhile
        mac = keyed()
        mac.update(_COUNTER(number()))
        mac.update(data)
        return _PACK(size) + data + mac.digest()

    return protect


def unprotector(key: bytes, protection: Protection) -> Unprotect:
    """Return the function that checks one record after the other and copies its data to a room.

    It is given what follows the length, in memory that can be written to. The room has exactly the
    size of the data, at least one byte. Its content is undefined if the record is `Forged`.
    """
    number = itertools.count().__next__
    if protection == Protection.AEAD:
        return _decryptor(key, number)
    keyed = _small_mac(key).copy
    large = _unprotect_large(key, protection)

    def unprotect(record: memoryview, room: memoryview) -> None:
        if len(record) > _SMALL + TAG:
            large(number(), record, room)
            return
        mac, data = keyed(), record[:-TAG]
        mac.update(_COUNTER(number()))
        mac.update(data)
        # In constant time: else the time of a refusal would tell how many bytes were right.
        if not compare_digest(record[-TAG:], mac.digest()):
            raise Forged
        room[:] = data

    return unprotect


# ── with hashes ─────────────────────────────────────────────────────────────────────────────────
# A key for each algorithm, so that no text is ever protected by two of them under one.


def _small_mac(key: bytes) -> Any:
    return hashlib.blake2b(key=_key_for(key, b"small")[:32], digest_size=TAG)


def _large_mac(key: bytes) -> Callable[[int, Any], bytes]:
    keyed = hmac.new(_key_for(key, b"large"), digestmod="sha256")

    def mac(number: int, data: Any) -> bytes:
        found = keyed.copy()
        found.update(_COUNTER(number))
        found.update(data)
        return found.digest()[:TAG]

    return mac


def _key_for(key: bytes, what: bytes) -> bytes:
    return hashlib.blake2b(key, person=what).digest()


def _protect_large(key: bytes, protection: Protection) -> Callable[[int, Any], Any]:
    if protection == Protection.LARGE:
        gcm = Gcm(find_gcm(), _key_for(key, b"gcm")[:32], encrypts=True)

        def protect_large(number: int, data: Any) -> bytearray:
            size = len(data)
            record = bytearray(LENGTH + size + TAG)
            record[:LENGTH] = _PACK(size)
            record[LENGTH:-TAG] = data
            with memoryview(record) as view:
                gcm.encrypt(_NONCE(number, 0), view[LENGTH:])
            return record

        return protect_large
    mac = _large_mac(key)

    def hash_large(number: int, data: Any) -> bytes:
        copy = bytes(data)  # before the MAC, as above
        return b"".join((_PACK(len(copy)), copy, mac(number, copy)))

    return hash_large


def _unprotect_large(
    key: bytes, protection: Protection
) -> Callable[[int, memoryview, memoryview], None]:
    if protection == Protection.LARGE:
        gcm = Gcm(find_gcm(), _key_for(key, b"gcm")[:32], encrypts=False)

        def decrypt_large(number: int, record: memoryview, room: memoryview) -> None:
            if not gcm.decrypt(_NONCE(number, 0), record, room):
                raise Forged

        return decrypt_large
    mac = _large_mac(key)

    def check_large(number: int, record: memoryview, room: memoryview) -> None:
        data = record[:-TAG]
        if not compare_digest(record[-TAG:], mac(number, data)):
            raise Forged
        room[:] = data

    return check_large


# ── with the package ────────────────────────────────────────────────────────────────────────────


def _encryptor(key: bytes, number: Callable[[], int]) -> Protect:
    kind = _aead()
    assert kind is not None
    cipher = kind(key)
    encrypt, into = cipher.encrypt, getattr(cipher, "encrypt_into", None)

    def protect(data: Any) -> Any:
        size = len(data)
        if size <= _SMALL or into is None:  # only recent versions of the package have it
            return _PACK(size) + encrypt(_NONCE(number(), 0), data, None)
        record = bytearray(LENGTH + size + TAG)
        record[:LENGTH] = _PACK(size)
        with memoryview(record) as view:
            into(_NONCE(number(), 0), data, None, view[LENGTH:])
        return record

    return protect


def _decryptor(key: bytes, number: Callable[[], int]) -> Unprotect:
    from cryptography.exceptions import InvalidTag

    kind = _aead()
    assert kind is not None
    cipher = kind(key)
    into = getattr(cipher, "decrypt_into", None)  # only recent versions have it

    def unprotect(record: memoryview, room: memoryview) -> None:
        try:
            if into is not None:
                into(_NONCE(number(), 0), record, None, room)
            else:
                room[:] = cipher.decrypt(_NONCE(number(), 0), record, None)
        except InvalidTag:
            raise Forged from None

    return unprotect


def _aead() -> Any:
    """Return the class of AES-GCM; None if it is not installed."""
    # Imported when the first connection needs it: most workers use Unix sockets only.
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    return AESGCM
