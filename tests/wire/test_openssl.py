"""AES-GCM of Python's own OpenSSL: as the standard says, and as another library does it."""

from __future__ import annotations

import builtins
import ctypes
import os
import random
from typing import Any

import pytest

from aiograd.wire import openssl
from aiograd.wire.openssl import TAG, Gcm, find_gcm


@pytest.fixture
def library() -> Any:
    found = find_gcm()
    if found is None:
        pytest.skip("this Python's OpenSSL cannot be reached")
    return found


def test_records_are_those_of_another_library(library):
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    rng = random.Random(1)
    for _ in range(2000):
        key, nonce = rng.randbytes(32), rng.randbytes(12)
        data = rng.randbytes(rng.choice([1, 15, 16, 17, 300, 5000]))
        record = bytearray(data + bytes(TAG))
        Gcm(library, key, encrypts=True).encrypt(nonce, memoryview(record))
        assert bytes(record) == aead.AESGCM(key).encrypt(nonce, data, None)
        room = bytearray(len(data))
        reader = Gcm(library, key, encrypts=False)
        assert reader.decrypt(nonce, memoryview(record), memoryview(room))
        assert room == data
        record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
        assert not reader.decrypt(nonce, memoryview(record), memoryview(room))


def test_one_object_serves_many_records_and_a_bad_one_does_not_disturb_it(library):
    writer, reader = (Gcm(library, b"k" * 32, encrypts=encrypts) for encrypts in (True, False))
    for number in range(50):
        nonce, data = number.to_bytes(12, "little"), os.urandom(1000)
        record = bytearray(data + bytes(TAG))
        writer.encrypt(nonce, memoryview(record))
        room = bytearray(1000)
        assert not reader.decrypt(bytes(11) + b"?", memoryview(record), memoryview(room))
        assert reader.decrypt(nonce, memoryview(record), memoryview(room))
        assert room == data


def test_nothing_is_written_beyond_the_record_or_its_room(library):
    whole = bytearray(b"<" * 8 + bytes(100 + TAG) + b">" * 8)
    Gcm(library, b"k" * 32, encrypts=True).encrypt(bytes(12), memoryview(whole)[8:-8])
    assert whole[:8] == b"<" * 8
    assert whole[-8:] == b">" * 8
    room = bytearray(b"<" * 8 + bytes(100) + b">" * 8)
    reader = Gcm(library, b"k" * 32, encrypts=False)
    assert reader.decrypt(bytes(12), memoryview(whole)[8:-8], memoryview(room)[8:-8])
    assert room == b"<" * 8 + bytes(100) + b">" * 8


@pytest.mark.parametrize("sizes", [(100, 99), (100, 101), (0, 0)])
def test_a_room_of_another_size_is_never_written_to(library, sizes):
    size, room = sizes
    with pytest.raises(ValueError, match="wrong size"):
        Gcm(library, b"k" * 32, encrypts=False).decrypt(
            bytes(12), memoryview(bytearray(size + TAG)), memoryview(bytearray(room))
        )


def test_memory_is_free_again_afterwards(library):
    record = bytearray(100 + TAG)
    Gcm(library, b"k" * 32, encrypts=True).encrypt(bytes(12), memoryview(record))
    record.append(0)  # BufferError while somebody holds the memory
    assert len(record) == 101 + TAG


def test_a_library_that_computes_something_else_is_not_used(library, monkeypatch):
    def without_encryption(self: Any, nonce: bytes, record: memoryview) -> None:
        record[-TAG:] = bytes(TAG)

    monkeypatch.setattr(Gcm, "encrypt", without_encryption)
    assert find_gcm.__wrapped__() is None


def test_a_python_without_openssl_has_no_gcm(monkeypatch):
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "_hashlib":
            raise ImportError(name)
        return real(name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", missing)
        assert find_gcm.__wrapped__() is None
    monkeypatch.setattr(openssl.ctypes, "PyDLL", lambda name: ctypes.CDLL(None).this_is_nowhere)
    assert find_gcm.__wrapped__() is None
