"""Records with a tag: what is read is what was written, in order and once."""

from __future__ import annotations

import builtins
import os
from typing import Any

import numpy as np
import pytest

from aiograd.wire.records import TAG, Forged, has_aead, protector, unprotector

KEY = b"k" * 32


@pytest.fixture(params=[False, True], ids=["hashes", "AES-GCM"])
def aead(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("cryptography")
    return bool(request.param)


def read(unprotect: Any, record: bytes) -> bytes:
    room = memoryview(bytearray(len(record) - TAG))
    unprotect(memoryview(record), room)
    return bytes(room)


@pytest.mark.parametrize("size", [1, 8192, 8193, 131072])
def test_a_record_is_read_as_it_was_written(aead, size):
    protect, unprotect = protector(KEY, aead=aead), unprotector(KEY, aead=aead)
    for _ in range(3):
        data = os.urandom(size)
        record = protect(memoryview(data))
        assert len(record) == size + TAG
        assert read(unprotect, record) == data


def test_equal_records_have_different_tags(aead):
    protect = protector(KEY, aead=aead)
    assert protect(b"same") != protect(b"same")


@pytest.mark.parametrize("size", [20, 20_000])
def test_a_record_of_another_place_key_or_content_is_forged(aead, size):
    protect, data = protector(KEY, aead=aead), os.urandom(size)
    first, second = protect(data), protect(data)
    changed = bytes([first[0] ^ 1]) + first[1:]
    longer = first[:-TAG] + b"\0" + first[-TAG:]
    for record in (second, changed, longer, first[:-1], protector(b"o" * 32, aead=aead)(data)):
        with pytest.raises(Forged):
            read(unprotector(KEY, aead=aead), record)
    unprotect = unprotector(KEY, aead=aead)
    assert read(unprotect, first) == data
    with pytest.raises(Forged):
        read(unprotect, first)


def test_an_array_that_changes_after_it_was_written_does_not_spoil_its_tag(aead):
    protect, unprotect = protector(KEY, aead=aead), unprotector(KEY, aead=aead)
    array = np.zeros(20_000, np.uint8)
    record = protect(array.data)
    array += 1
    assert read(unprotect, record) == bytes(20_000)


def test_the_two_constructions_do_not_read_each_other(aead):
    pytest.importorskip("cryptography")
    with pytest.raises(Forged):
        read(unprotector(KEY, aead=not aead), protector(KEY, aead=aead)(b"x" * 100))


def test_older_versions_of_the_package_will_do(monkeypatch):
    """They cannot decrypt into memory of ours."""
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")

    class Older:
        def __init__(self, key: bytes) -> None:
            self.encrypt, self.decrypt = aead.AESGCM(key).encrypt, aead.AESGCM(key).decrypt

    record = protector(KEY, aead=True)(b"abc")
    monkeypatch.setattr("aiograd.wire.records._aead", lambda: Older)
    assert read(unprotector(KEY, aead=True), record) == b"abc"
    with pytest.raises(Forged):
        read(unprotector(KEY, aead=True), record[:-1] + b"?")


def test_aes_gcm_hides_what_it_protects():
    pytest.importorskip("cryptography")
    assert b"secret text" not in protector(KEY, aead=True)(b"secret text")


def test_without_the_package_there_are_still_hashes(monkeypatch):
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert not has_aead()
    record = protector(KEY, aead=False)(b"abc")
    assert read(unprotector(KEY, aead=False), record) == b"abc"
