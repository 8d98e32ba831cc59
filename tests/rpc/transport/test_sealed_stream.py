"""Authenticated frames: what arrives is what was sent, in order and once, or nothing more does."""

from __future__ import annotations

import os
import random
import socket
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from aiograd.errors import ProtocolError
from aiograd.rpc.transport.sealed_stream import SealedStream, needs_seal
from aiograd.wire.records import Protection, best_protection

KEYS = b"a" * 32, b"b" * 32
USED = [Protection.HASHES]  # by the test that runs


@pytest.fixture(autouse=True, params=list(Protection), ids=str)
def construction(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param > best_protection():
        pytest.skip("not on this machine")
    USED[0] = request.param
    yield
    USED[0] = Protection.HASHES


class Below:
    """The transport below: keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def is_reading(self) -> bool:
        return True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


class Above:
    """The protocol above: takes bytes in small pieces."""

    def __init__(self, size: int = 1000) -> None:
        self.got = bytearray()
        self.error: Any = "none"
        self._room = bytearray(size)

    def get_buffer(self, hint: int) -> memoryview:
        return memoryview(self._room)

    def buffer_updated(self, count: int) -> None:
        self.got += self._room[:count]

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error


def receiver() -> tuple[SealedStream, Above, Below]:
    below, above = Below(), Above()
    stream = SealedStream(below, KEYS[1], KEYS[0], USED[0])
    stream.set_protocol(above)
    return stream, above, below


def records(*messages: bytes) -> list[bytes]:
    below = Below()
    stream = SealedStream(below, *KEYS, USED[0])
    for message in messages:
        stream.write(memoryview(message))
    return below.written


def feed(stream: SealedStream, data: bytes) -> None:
    while data:
        room = stream.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        stream.buffer_updated(count)


SIZES = [0, 1, 8192, 8193, 131072, 131073, 1 << 20]


@pytest.mark.parametrize("step", [1, 77, 1 << 22])
def test_bytes_arrive_as_they_were_sent_in_whatever_pieces(step):
    messages = [os.urandom(size) for size in ([0, 1, 100] if step == 1 else SIZES)]
    wire, (stream, above, _) = b"".join(records(*messages)), receiver()
    for start in range(0, len(wire), step):
        feed(stream, wire[start : start + step])
    assert bytes(above.got) == b"".join(messages)
    assert above.error == "none"


FIRST, SECOND, THIRD = b"first" * 10, b"second" * 2000, b"third"


def attacks() -> dict[str, list[bytes]]:
    a, b, c = records(FIRST, SECOND, THIRD)
    other = SealedStream(Below(), b"c" * 32, b"d" * 32, USED[0])
    other.write(FIRST)
    return {
        "reordered": [a, c, b],
        "left out": [a, c],
        "repeated": [a, a, b],
        "injected": [a, b"\x05\0\0\0" + b"xxxxx" + bytes(16), b],
        "of another connection": [a, *other._below.written],
        "reflected": [a, records_of_receiver()],
        "too long": [a, b"\xff\xff\xff\xff" + b],
        "empty": [a, bytes(20)],
    }


def records_of_receiver() -> bytes:
    stream, _, below = receiver()
    stream.write(FIRST)
    return below.written[0]


@pytest.mark.parametrize("attack", attacks())
def test_what_an_attacker_sends_ends_the_stream_before_a_byte_is_read(attack):
    stream, above, below = receiver()
    feed(stream, b"".join(attacks()[attack]))
    assert bytes(above.got) == FIRST
    assert isinstance(above.error, ProtocolError)
    assert below.aborted
    feed(stream, records(FIRST)[0])
    stream.connection_lost(None)
    assert bytes(above.got) == FIRST
    assert isinstance(above.error, ProtocolError)


CHANGES = int(os.environ.get("AIOGRAD_HOSTILE", "300"))


@pytest.mark.deadline(30 + CHANGES / 100)
def test_no_change_of_a_bit_gets_through():
    rng = random.Random(1)
    wire = bytearray(b"".join(records(FIRST, SECOND)))
    for _ in range(CHANGES):
        stream, above, _ = receiver()
        at, bit = rng.randrange(len(wire)), rng.randrange(8)
        wire[at] ^= 1 << bit
        feed(stream, bytes(wire) + bytes(200_000))  # a larger length waits for what follows
        wire[at] ^= 1 << bit
        assert bytes(above.got) in (b"", FIRST)
        assert isinstance(above.error, ProtocolError)


def test_a_stream_that_is_cut_ends_without_part_of_a_record():
    stream, above, _ = receiver()
    feed(stream, b"".join(records(FIRST, SECOND))[:-1])
    stream.connection_lost(None)
    assert bytes(above.got) == FIRST
    assert above.error is None


class Found:
    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def get_extra_info(self, name: str) -> Any:
        return self._sock


@pytest.mark.parametrize(("mode", "sealed"), [(0o700, False), (0o750, True), (0o777, True)])
def test_a_unix_socket_needs_no_seal_in_a_folder_of_our_own(tmp_path, mode, sealed):
    tmp_path.chmod(mode)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        accepted, _ = server.accept()
        with accepted:
            assert needs_seal(Found(accepted)) is sealed
            assert needs_seal(Found(client)) is sealed
    tmp_path.chmod(0o700)


def test_tcp_needs_a_seal_and_memory_none():
    with socket.socket(socket.AF_INET) as tcp:
        assert needs_seal(Found(tcp))
    assert not needs_seal(Found(None))
