"""The certificate for TLS by the secret alone: a right key, and nothing left behind."""

from __future__ import annotations

import os
import random
import ssl

import pytest

from aiograd.rpc.transport import ephemeral
from aiograd.rpc.transport.ephemeral import load_ephemeral_certificate


def server() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def test_openssl_finds_that_key_and_certificate_belong_together():
    seen = {load_ephemeral_certificate(server()) for _ in range(3)}
    assert len(seen) == 3


def test_a_key_that_does_not_belong_to_its_certificate_is_noticed(monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(ephemeral, "_multiply", lambda scalar: ephemeral._GENERATOR)
    with pytest.raises(ssl.SSLError):
        load_ephemeral_certificate(server())


N = ephemeral._N
EDGES = [1, 2, 3, 0x7F, 0x80, 0xFF, 0x100, N // 2, N // 2 + 1, N - 2, N - 1, 1 << 255]
RANDOM = int(os.environ.get("AIOGRAD_HOSTILE", "200"))


@pytest.mark.deadline(30 + RANDOM / 50)
def test_keys_and_certificates_are_those_of_another_library():
    """Its parser takes strict DER only (SEC 1, RFC 5480, RFC 5280)."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    rng = random.Random(1)
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    for scalar in [*EDGES, *(1 << bit for bit in range(0, 256, 5)), *[0] * RANDOM]:
        scalar = scalar or 1 + rng.randrange(N - 1)
        expected = ec.derive_private_key(scalar, ec.SECP256R1()).public_key()
        key, certificate = ephemeral._encode(scalar)
        private = serialization.load_der_private_key(key, None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.private_numbers().private_value == scalar
        assert private.public_key() == expected
        read = x509.load_der_x509_certificate(certificate)
        assert read.public_bytes(encoding) == certificate
        assert read.public_key() == expected
        assert expected.public_bytes(encoding, form) in certificate
        assert read.version is x509.Version.v3
        assert 0 < read.serial_number < 1 << 159
        assert read.subject == read.issuer
        assert read.not_valid_before_utc.year == 2000
        signature = private.sign(b"text", ec.ECDSA(hashes.SHA256()))
        public = read.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(signature, b"text", ec.ECDSA(hashes.SHA256()))


@pytest.mark.parametrize("broken", ["point", "scalar", "length", "trailing"])
def test_the_other_library_notices_a_wrong_encoding(broken, monkeypatch):
    """So the test above can fail."""
    x509 = pytest.importorskip("cryptography.x509")
    real, x, y = ephemeral._tlv, *ephemeral._multiply(5)
    if broken == "point":  # off the curve
        monkeypatch.setattr(ephemeral, "_multiply", lambda scalar: (x, y ^ 1))
    elif broken == "scalar":  # the point at infinity, as it is written without a check
        monkeypatch.setattr(ephemeral, "_multiply", lambda scalar: (0, 0))
    elif broken == "length":  # not the shortest form
        monkeypatch.setattr(
            ephemeral,
            "_tlv",
            lambda tag, *parts: (
                bytes([tag, 0x83]) + len(b"".join(parts)).to_bytes(3, "big") + b"".join(parts)
            ),
        )
    else:
        monkeypatch.setattr(ephemeral, "_tlv", lambda tag, *parts: real(tag, *parts) + b"\0")
    _, certificate = ephemeral._encode(5)
    with pytest.raises(ValueError):  # noqa: PT011  the texts are another project's
        x509.load_der_x509_certificate(certificate).public_key()


@pytest.mark.parametrize("scalar", [0, N])
def test_a_scalar_without_a_public_key_is_none(scalar):
    with pytest.raises((AssertionError, ValueError)):
        ephemeral._multiply(scalar)


@pytest.mark.parametrize("size", [0, 1, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000])
def test_lengths_have_their_shortest_form(size):
    encoded = ephemeral._tlv(4, bytes(size))
    if size < 0x80:
        assert encoded[:2] == bytes([4, size])
    else:
        digits = encoded[1] & 0x7F
        assert int.from_bytes(encoded[2 : 2 + digits], "big") == size
        assert encoded[2] != 0
    assert encoded.endswith(bytes(size))


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (127, "7f"), (128, "0080"), (255, "00ff"), (256, "0100")]
)
def test_integers_have_their_shortest_form_and_are_not_negative(value, encoded):
    assert ephemeral._integer(value)[2:].hex() == encoded


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_file_with_the_key_is_left(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = len(os.listdir("/proc/self/fd"))
    load_ephemeral_certificate(server())
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
