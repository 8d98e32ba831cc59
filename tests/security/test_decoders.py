"""Decoders given arbitrary bytes raise ProtocolError and nothing else.

They do so quickly, and without taking more memory than what was sent can justify.
"""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiograd.autograd.coo import Coo
from aiograd.dist.access import CooTraveller
from aiograd.errors import ProtocolError
from aiograd.rpc.directory import PeerInfo, WorkerInfo
from aiograd.rpc.extension import Arrival, RecordTraveller
from aiograd.rpc.plain_exceptions import rebuild
from aiograd.wire.codec import Travellers
from aiograd.wire.framing import HEADER, MAGIC, FrameReader, announce, pack_header
from aiograd.wire.handshake import Identity
from aiograd.wire.messages import CALL, CHUNK, KINDS, LARGE
from aiograd.wire.safecodec import DataCodec

INPUTS = int(os.environ.get("AIOGRAD_HOSTILE", "20000"))
SLOWEST = 0.05  # seconds; a busy machine gets a second try
ARRIVAL = Arrival(PeerInfo("worker1", 1, b"1" * 16), "call", restricted=True)


def codec() -> DataCodec:
    travellers = Travellers()
    travellers.add(Coo, CooTraveller())
    travellers.add(PeerInfo, RecordTraveller("peer", PeerInfo))
    travellers.add(WorkerInfo, RecordTraveller("worker", WorkerInfo))
    return DataCodec(travellers)


CODEC = codec()
VALUES: list[Any] = [
    None,
    [1, -2.5, 3j, "text", b"bytes", True, 1 << 100],
    {"a": (1, [2, {"b": None}]), "c": np.arange(6.0).reshape(2, 3)},
    [np.ones((2, 0, 3), np.int8), np.float32(3), np.asfortranarray(np.ones((2, 3)))],
    Coo(np.array([[0, 2]]), np.ones((2, 2)), (4, 2)),
    PeerInfo("worker1", 3, b"x" * 16, ("tcp:127.0.0.1:1",)),
    WorkerInfo("worker1", 3),
    ("ValueError", "text", ("text",), None),
]
SEEDS = [CODEC.encode(value, None).data for value in VALUES]


def mutated(rng: random.Random, seed: bytes) -> bytes:
    """A seed with a few things done to it."""
    data = bytearray(seed)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice(b"0+-iIfcsbltdaTmMCF\x00\x01\x7f\x80\xff")
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                other = rng.choice(SEEDS)
                start = rng.randrange(len(other))
                data[at:at] = other[start : start + rng.randrange(1, 40)]
            case _:
                number = rng.choice([0, 1, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1])
                data[at : at + 4] = struct.pack("<I", number)
    return bytes(data)


def assault(count: int, attempt: Callable[[random.Random], int]) -> int:
    """Try many inputs; how many of them were refused. `attempt` gives the bytes it used."""
    refused = 0
    for number in range(count):
        for last in (False, True):
            rng = random.Random(number)
            began = time.perf_counter()
            try:
                attempt(rng)
            except ProtocolError:
                refused += not last
            if time.perf_counter() - began < SLOWEST:
                break
            assert not last, f"input {number} takes too long"
    return refused


def test_the_data_codec_raises_protocol_error_only():
    def attempt(rng: random.Random) -> int:
        data = mutated(rng, rng.choice(SEEDS)) if rng.random() < 0.9 else rng.randbytes(60)
        CODEC.decode(data, [bytearray(80)] * 3, True, ARRIVAL)
        return len(data)

    assert assault(INPUTS, attempt) > INPUTS // 2


def test_frames_raise_protocol_error_only():
    good = b"".join(
        [
            pack_header(CALL, 0, 5, 1, 60.0, 2) + b"hello",
            pack_header(CALL, LARGE, 32, 2, 60.0, 0) + announce(7, 2, [100, 50]),
            pack_header(CHUNK, 0, 150, 0, 0.0, 7) + bytes(150),
            pack_header(12, 0, 0, 0, 0.0, 0),
        ]
    )

    def attempt(rng: random.Random) -> int:
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            data = bytearray(
                HEADER.pack(
                    MAGIC,
                    rng.choice([*KINDS, 0, 255]),
                    rng.getrandbits(16),
                    rng.choice([0, 16, 24, 65536, 65537, (1 << 32) - 1]),
                    rng.getrandbits(64),
                    0.0,
                    rng.getrandbits(32),
                )
                + rng.randbytes(24)
            )
        reserved = [0]

        def reserve(size: int) -> bool:
            if reserved[0] + size > 1 << 20:
                return False
            reserved[0] += size
            return True

        reader = FrameReader(1 << 20, reserve)
        piece = rng.choice([1, 7, 64, len(data)])
        for start in range(0, len(data), piece):
            reader.feed(data[start : start + piece])
        return len(data)

    count = INPUTS // 10  # a reader has a buffer of its own
    assert assault(count, attempt) > count // 10


def test_array_metadata_raises_protocol_error_only():
    dims = [0, 1, 2, 3, 1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -1, -(1 << 63)]

    def attempt(rng: random.Random) -> int:
        count = rng.choice([0, 1, 2, 3, 32, 33, 255])
        data = b"a" + bytes([rng.choice(b"?bBhHiIlLqQefdFDOUSVMmgG\x00\xff"), count])
        data += rng.choice([b"C", b"F", b"A"])
        data += b"".join(struct.pack("<q", rng.choice(dims)) for _ in range(count))
        size = rng.choice([0, 8, 24, 80, (1 << 32) - 1])
        data += rng.choice(
            [b"m" + struct.pack("<I", size) + bytes(min(size, 80)), b"M" + struct.pack("<I", size)]
        )
        CODEC.decode(data, [bytearray(80)] * 3)
        return len(data)

    assert assault(INPUTS, attempt) > INPUTS // 2


def test_identities_raise_protocol_error_only():
    packed = Identity("worker1", 1, b"i" * 16).pack()

    def attempt(rng: random.Random) -> int:
        data = bytearray(packed)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        Identity.unpack(bytes(data))
        return len(data)

    assert assault(INPUTS, attempt) > 0


def test_faults_decode_to_errors_or_raise_protocol_error():
    def attempt(rng: random.Random) -> int:
        data = mutated(rng, SEEDS[-1])
        error = rebuild(CODEC.decode(data), "worker1")
        assert isinstance(error, Exception)
        return len(data)

    assert assault(INPUTS // 4, attempt) > INPUTS // 16


@pytest.mark.parametrize(
    "data",
    [
        b"l" + struct.pack("<I", 99_999),
        b"d" + struct.pack("<I", 99_999) + bytes(100),
        b"ad\x02C" + struct.pack("<qq", 1 << 30, 8) + b"M\x00\x00\x00\x00",
        b"ad\x01C" + struct.pack("<q", 1 << 28) + b"m" + struct.pack("<I", 1 << 31),
        b"s" + struct.pack("<I", (1 << 32) - 1),
        b"I" + struct.pack("<I", (1 << 32) - 1),
        b"l\x01\x00\x00\x00" * 5000,
        b"a?\x20C" + struct.pack("<q", 2) * 32 + b"m\x00\x00\x00\x00",
    ],
    ids=lambda data: repr(data[:8]),
)
def test_decoders_allocate_no_memory_for_sizes_that_are_only_announced(data):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            CODEC.decode(data, [bytearray(8)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(data) + (64 << 10)


def test_a_frame_reader_asks_before_it_takes_memory():
    asked: list[int] = []

    def reserve(size: int) -> bool:
        asked.append(size)
        return False

    reader = FrameReader(1 << 30, reserve)
    tracemalloc.start()
    try:
        body = announce(1, 2, [1 << 29, 1 << 28])
        reader.feed(pack_header(CALL, LARGE, len(body), 1, 60.0, 0) + body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked[0] >= (1 << 29) + (1 << 28)
    assert peak < 64 << 10


def test_a_message_over_the_limit_is_refused():
    reader = FrameReader(1 << 20)
    body = announce(1, 2, [(1 << 20) + 1])
    with pytest.raises(ProtocolError, match="over the limit"):
        reader.feed(pack_header(CALL, LARGE, len(body), 1, 60.0, 0) + body)


@pytest.mark.parametrize(
    "data",
    [
        ("worker1", 3, b"x" * 16, (np.ones(2),), False, ()),
        ("worker1", 3, b"x" * 16, (), False, (1,)),
        ("worker1", 3, b"x" * 16, (), 1, ()),
        ("worker1", 3, b"x" * 16),
    ],
    ids=["address", "exception", "mode", "short"],
)
def test_a_peer_is_described_by_text_and_numbers_only(data):
    traveller = RecordTraveller("peer", PeerInfo)
    with pytest.raises(ProtocolError):
        traveller.arrive(data, ARRIVAL)
