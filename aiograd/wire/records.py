"""Protection of the records of one connection: a key, a counter, and a tag on each record.

    protect(data) ─▶ body and tag          unprotect(body and tag, room) ─▶ data in `room`

Two constructions. With the package `cryptography` (extra `tls`) it is AES-256-GCM, whose nonce is
the counter: one pass that copies, encrypts and authenticates, several times as fast as the
connection. Without it, the standard library has only hashes: keyed BLAKE2b for small records, for
which it is quick to set up, and HMAC-SHA256 for large ones, for which processors have instructions.
Both sides say in the handshake whether they have the package, and use it if both do.

Each key protects one direction of one connection, and each counter is used once, so no nonce ever
repeats. A record that was changed, left out, repeated or moved fails under the receiver's counter.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final

__all__ = ["TAG", "Forged", "has_aead", "protector", "unprotector"]

TAG: Final = 16  # bytes behind each record; a forger has one attempt per connection
_SMALL: Final = 8 * 1024  # bytes up to which BLAKE2b is faster than HMAC-SHA256
_NONCE: Final = 12  # bytes


class Forged(ValueError):
    """A record that its sender did not write as the next one."""


def has_aead() -> bool:
    """Whether this process has AES-GCM, which the standard library does not offer."""
    return _aead() is not None


def protector(key: bytes, *, aead: bool) -> Callable[[Any], bytes]:
    """Return the function that protects one record after the other."""
    # Closures, not methods: a lone call takes four steps of this kind, and each counts.
    number = itertools.count().__next__
    if aead:
        cipher = _aead()
        assert cipher is not None
        encrypt: Callable[[bytes, Any, None], bytes] = cipher(key).encrypt
        return lambda data: encrypt(number().to_bytes(_NONCE, "little"), data, None)
    mac = _maker_of_macs(key)

    def protect(data: Any) -> bytes:
        copy = bytes(data)  # before the MAC: another thread may change an array meanwhile
        return copy + mac(number(), copy)

    return protect


def unprotector(key: bytes, *, aead: bool) -> Callable[[memoryview, memoryview], None]:
    """Return the function that checks one record after the other and copies its data to a room.

    The room has exactly the size of the data. Its content is undefined if the record is `Forged`.
    """
    number = itertools.count().__next__
    if aead:
        return _decryptor(key, number)
    mac = _maker_of_macs(key)

    def unprotect(record: memoryview, room: memoryview) -> None:
        data = record[:-TAG]
        # In constant time: else the time of a refusal would tell how many bytes were right.
        if not compare_digest(record[-TAG:], mac(number(), data)):
            raise Forged
        room[:] = data

    return unprotect


def _decryptor(key: bytes, number: Callable[[], int]) -> Callable[[memoryview, memoryview], None]:
    from cryptography.exceptions import InvalidTag

    kind = _aead()
    assert kind is not None
    cipher = kind(key)
    into = getattr(cipher, "decrypt_into", None)  # only recent versions have it

    def unprotect(record: memoryview, room: memoryview) -> None:
        try:
            if into is not None:
                into(number().to_bytes(_NONCE, "little"), record, None, room)
            else:
                room[:] = cipher.decrypt(number().to_bytes(_NONCE, "little"), record, None)
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


def _maker_of_macs(key: bytes) -> Callable[[int, Any], bytes]:
    # Two keys, so that no text is ever signed with both algorithms under one.
    small = hashlib.blake2b(key, person=b"small").digest()[:32]
    large = hmac.new(hashlib.blake2b(key, person=b"large").digest(), digestmod="sha256")

    def mac(number: int, data: Any) -> bytes:
        count = number.to_bytes(8, "little")
        if len(data) <= _SMALL:
            return blake2b(data, key=small, salt=count, digest_size=TAG).digest()
        found = large.copy()
        found.update(count)
        found.update(data)
        return found.digest()[:TAG]

    return mac
