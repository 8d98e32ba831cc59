"""Records with a tag: what is read is what was written, in order and once."""

from __future__ import annotations

import builtins
import os
from typing import Any

import numpy as np
import pytest

from aiograd.wire import records
from aiograd.wire.records import (
    LENGTH,
    TAG,
    Forged,
    Protection,
    best_protection,
    protector,
    unprotector,
)

KEY = b"k" * 32


@pytest.fixture(params=list(Protection), ids=str)
def protection(request: pytest.FixtureRequest) -> Protection:
    if request.param > best_protection():
        pytest.skip("not on this machine")
    return Protection(request.param)


def read(unprotect: Any, record: bytes) -> bytes:
    room = memoryview(bytearray(len(record) - LENGTH - TAG))
    unprotect(memoryview(bytearray(record))[LENGTH:], room)
    return bytes(room)


@pytest.mark.parametrize("size", [1, 8192, 8193, 131072])
def test_a_record_is_read_as_it_was_written(protection, size):
    protect, unprotect = protector(KEY, protection), unprotector(KEY, protection)
    for _ in range(3):
        data = os.urandom(size)
        record = protect(memoryview(data))
        assert record[:LENGTH] == size.to_bytes(LENGTH, "little")
        assert len(record) == LENGTH + size + TAG
        assert read(unprotect, record) == data


@pytest.mark.parametrize("size", [4, 20_000])
def test_equal_records_have_different_tags(protection, size):
    protect = protector(KEY, protection)
    assert protect(bytes(size))[-TAG:] != protect(bytes(size))[-TAG:]


@pytest.mark.parametrize("size", [20, 20_000])
def test_a_record_of_another_place_key_or_content_is_forged(protection, size):
    protect, data = protector(KEY, protection), os.urandom(size)
    first, second = bytes(protect(data)), bytes(protect(data))
    changed = first[:LENGTH] + bytes([first[LENGTH] ^ 1]) + first[LENGTH + 1 :]
    longer = first[:-TAG] + b"\0" + first[-TAG:]
    for record in (second, changed, longer, first[:-1], protector(b"o" * 32, protection)(data)):
        with pytest.raises(Forged):
            read(unprotector(KEY, protection), record)
    unprotect = unprotector(KEY, protection)
    assert read(unprotect, first) == data
    with pytest.raises(Forged):
        read(unprotect, first)


def test_a_record_that_was_made_larger_or_smaller_is_forged_by_the_other_algorithm(protection):
    """Small and large records have tags of different algorithms, and different keys."""
    small, large = (protector(KEY, protection)(bytes(size)) for size in (8192, 8193))
    with pytest.raises(Forged):
        read(unprotector(KEY, protection), small[:-TAG] + b"\0" + small[-TAG:])
    with pytest.raises(Forged):
        read(unprotector(KEY, protection), large[: -TAG - 1] + large[-TAG:])


def test_an_array_that_changes_after_it_was_written_does_not_spoil_its_tag(protection):
    protect, unprotect = protector(KEY, protection), unprotector(KEY, protection)
    array = np.zeros(20_000, np.uint8)
    record = protect(array.data)
    array += 1
    assert read(unprotect, record) == bytes(20_000)


def test_no_way_of_protection_reads_what_another_one_wrote(protection):
    for other in Protection:
        if other != protection and other <= best_protection():
            with pytest.raises(Forged):
                read(unprotector(KEY, other), protector(KEY, protection)(b"x" * 20_000))


def test_older_versions_of_the_package_will_do(monkeypatch):
    """They neither encrypt nor decrypt into memory of ours."""
    aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")

    class Older:
        def __init__(self, key: bytes) -> None:
            self.encrypt, self.decrypt = aead.AESGCM(key).encrypt, aead.AESGCM(key).decrypt

    for data in (b"abc", bytes(20_000)):
        record = protector(KEY, Protection.AEAD)(data)
        with monkeypatch.context() as patch:
            patch.setattr("aiograd.wire.records._aead", lambda: Older)
            assert protector(KEY, Protection.AEAD)(data) == record
            assert read(unprotector(KEY, Protection.AEAD), record) == data
            changed = record[:-1] + bytes([record[-1] ^ 1])
            with pytest.raises(Forged):
                read(unprotector(KEY, Protection.AEAD), changed)


def test_aes_gcm_hides_what_it_protects():
    pytest.importorskip("cryptography")
    assert b"secret text" not in protector(KEY, Protection.AEAD)(b"secret text")


def test_without_the_package_there_is_what_python_has(monkeypatch):
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert best_protection() < Protection.AEAD
    monkeypatch.setattr(records, "find_gcm", lambda: None)
    assert best_protection() is Protection.HASHES
    record = protector(KEY, Protection.HASHES)(b"abc")
    assert read(unprotector(KEY, Protection.HASHES), record) == b"abc"
