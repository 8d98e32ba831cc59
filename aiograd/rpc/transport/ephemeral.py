"""A certificate that lives as long as its process, for TLS by the secret alone.

TLS 1.3 needs a key that the server signs its handshake with. Here it is a fresh key on the curve
P-256, in a certificate that nobody has to trust: the two workers prove the secret to each other
inside the connection, and that proof covers the certificate (`SecretCredentials.binding`). A man in
the middle has to show a certificate of its own, and then the proof fails.

The standard library can use such a key and not make one, so its public half is computed here: one
multiplication on the curve, 10 ms, once per process that listens. OpenSSL makes all signatures. The
signature *of* the certificate is left empty, because nobody checks it. This module only writes: no
point, key or certificate of another worker is ever read here.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Iterator
from typing import Final

__all__ = ["load_ephemeral_certificate"]

# The curve P-256 (SEC 2, 2.4.2): y² = x³ - 3x + b mod p, with a generator of order n.
_P: Final = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_GENERATOR: Final = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
# In Jacobian coordinates, (x/z², y/z³), which need no division; None: the point at infinity.
_Point = tuple[int, int, int] | None

# Object identifiers, encoded.
_EC_KEY: Final = bytes.fromhex("06072a8648ce3d0201")  # id-ecPublicKey
_P256: Final = bytes.fromhex("06082a8648ce3d030107")  # prime256v1
_ECDSA: Final = bytes.fromhex("06082a8648ce3d040302")  # ecdsa-with-SHA256
_COMMON_NAME: Final = bytes.fromhex("0603550403")


def load_ephemeral_certificate(context: ssl.SSLContext) -> bytes:
    """Make a key and its certificate, and let a server use them; the certificate (DER)."""
    scalar = 1 + secrets.randbelow(_N - 1)
    key, certificate = _encode(scalar)
    with _unlisted_file(_pem("EC PRIVATE KEY", key) + _pem("CERTIFICATE", certificate)) as path:
        context.load_cert_chain(path)  # it takes no key from memory
    return certificate


@contextlib.contextmanager
def _unlisted_file(text: bytes) -> Iterator[str]:
    """Write text where this process alone can read it: in memory, if the system has such files."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("aiograd", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, text)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    descriptor, path = tempfile.mkstemp(prefix="aiograd-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        yield path
    finally:
        os.unlink(path)


# ── the curve ───────────────────────────────────────────────────────────────────────────────────


def _double(point: _Point) -> _Point:
    if point is None:
        return None
    x, y, z = point
    delta, gamma = z * z % _P, y * y % _P
    beta, alpha = x * gamma % _P, 3 * (x - delta) * (x + delta) % _P
    doubled = (alpha * alpha - 8 * beta) % _P
    height = (alpha * (4 * beta - doubled) - 8 * gamma * gamma) % _P
    return doubled, height, ((y + z) ** 2 - gamma - delta) % _P


def _add(a: _Point, b: _Point) -> _Point:
    """Add two points that are different, and of which one is not the other's negative."""
    if a is None or b is None:
        return b if a is None else a
    (x1, y1, z1), (x2, y2, z2) = a, b
    first, second = x1 * z2 * z2 % _P, x2 * z1 * z1 % _P
    low, high = y1 * z2**3 % _P, y2 * z1**3 % _P
    h, r = second - first, high - low
    v = first * h * h % _P
    x = (r * r - h**3 - 2 * v) % _P
    return x, (r * (v - x) - low * h**3) % _P, h * z1 * z2 % _P


def _multiply(scalar: int) -> tuple[int, int]:
    """Return the public key of a private one."""
    # By the same steps for every scalar (Montgomery's ladder): `high` is always `low` and the
    # generator. The numbers of Python take times that differ, but nobody is connected yet. The two
    # differ by the generator, and their sum is at infinity only for `scalar` = n - 1 in the last
    # step, where it is not needed.
    low: _Point = None
    high: _Point = (*_GENERATOR, 1)
    for bit in f"{scalar:0256b}":
        if bit == "1":
            low, high = _add(low, high), _double(high)
        else:
            low, high = _double(low), _add(low, high)
    assert low is not None
    x, y, z = low
    inverse = pow(z, -1, _P)
    return x * inverse**2 % _P, y * inverse**3 % _P


# ── the certificate ─────────────────────────────────────────────────────────────────────────────


def _tlv(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body)
    if size < 0x80:
        return bytes([tag, size]) + body
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + body


def _sequence(*parts: bytes) -> bytes:
    return _tlv(0x30, *parts)


def _integer(value: int) -> bytes:
    return _tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(data: bytes) -> bytes:
    return _tlv(0x03, b"\0", data)


def _encode(scalar: int) -> tuple[bytes, bytes]:
    """Return the private key (SEC 1) and the certificate (X.509), both as DER."""
    x, y = _multiply(scalar)
    point = _bits(b"\x04" + x.to_bytes(32, "big") + y.to_bytes(32, "big"))
    # Without its public half: OpenSSL computes that, too, and compares it with the certificate's.
    key = _sequence(_integer(1), _tlv(0x04, scalar.to_bytes(32, "big")), _tlv(0xA0, _P256))
    name = _sequence(_tlv(0x31, _sequence(_COMMON_NAME, _tlv(0x0C, b"aiograd"))))
    always = _sequence(_tlv(0x18, b"20000101000000Z"), _tlv(0x18, b"99991231235959Z"))
    algorithm = _sequence(_ECDSA)
    content = _sequence(
        _tlv(0xA0, _integer(2)),  # version 3
        _integer(1 + secrets.randbits(127)),  # positive, at most 20 bytes (RFC 5280, 4.1.2.2)
        algorithm,
        name,
        always,
        name,
        _sequence(_sequence(_EC_KEY, _P256), point),
    )
    no_signature = _bits(_sequence(_integer(1), _integer(1)))
    return key, _sequence(content, algorithm, no_signature)


def _pem(label: str, data: bytes) -> bytes:
    text = base64.encodebytes(data).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n".encode()
