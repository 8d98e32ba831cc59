"""The certificate for TLS by the secret alone: a right key, and nothing left behind."""

from __future__ import annotations

import os
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


def test_public_keys_are_those_of_other_libraries():
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    for scalar in (1, 2, 3, ephemeral._N - 1, 0x1234567890ABCDEF << 150):
        numbers = ec.derive_private_key(scalar, ec.SECP256R1()).public_key().public_numbers()
        assert ephemeral._multiply(scalar) == (numbers.x, numbers.y)


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_file_with_the_key_is_left(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = len(os.listdir("/proc/self/fd"))
    load_ephemeral_certificate(server())
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
