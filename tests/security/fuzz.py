"""Fuzz the decoders with atheris, which looks for inputs that reach new code.

    python tests/security/fuzz.py data|frames|hello|fault -runs=1250000

Whatever comes, only ProtocolError may be raised, nothing may be unpickled, and no input may take
longer than 50 ms of processor time. `make fuzz` runs all four.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["aiograd.wire", "aiograd.rpc.plain_exceptions"]):
    from aiograd.rpc.plain_exceptions import rebuild
    from aiograd.wire.framing import FrameReader
    from aiograd.wire.handshake import HELLO_SIZE, IDENTITY_SIZE, Handshake, Identity
    from aiograd.wire.messages import CHUNK, LARGE
    from aiograd.wire.safecodec import DataCodec

from aiograd.autograd.coo import Coo
from aiograd.dist.access import CooTraveller
from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.callee.exposure import ClassTraveller
from aiograd.rpc.directory import PeerInfo, WorkerInfo
from aiograd.rpc.extension import Arrival, RecordTraveller
from aiograd.wire.codec import Travellers
from aiograd.wire.framing import announce, pack_header

SLOWEST = 0.05  # seconds
ARRIVAL = Arrival(PeerInfo("worker1", 1, b"1" * 16), "call", restricted=True)


def codec() -> DataCodec:
    travellers = Travellers()
    travellers.add(Coo, CooTraveller())
    travellers.add(PeerInfo, RecordTraveller("peer", PeerInfo))
    travellers.add(WorkerInfo, RecordTraveller("worker", WorkerInfo))
    travellers.add(type, ClassTraveller("worker0"))
    return DataCodec(travellers)


CODEC = codec()
BUFFERS = [bytearray(80), bytearray(8), bytearray(0)]


def data(given: bytes) -> None:
    """The codec for plain data: containers, numbers, arrays, travellers."""
    CODEC.decode(given, BUFFERS, True, ARRIVAL)


def fault(given: bytes) -> None:
    """What a partner says of an exception."""
    rebuild(CODEC.decode(given, BUFFERS, True, ARRIVAL), "worker1")


class Frames:
    """Headers, announcements and chunks, in pieces as the first byte says."""

    def __init__(self) -> None:
        self._reserved = 0

    def _reserve(self, size: int) -> bool:
        if self._reserved + size > 1 << 20:
            return False
        self._reserved += size
        return True

    def __call__(self, given: bytes) -> None:
        self._reserved = 0
        reader = FrameReader(1 << 20, self._reserve)
        piece = given[0] + 1 if given else 1
        for start in range(1, len(given), piece):
            reader.feed(given[start : start + piece])
            if piece & 1:  # all that is under way comes too slowly
                for number in reader.under_way():
                    reader.drop(number, "partner_rate", self._release)
        reader.abandon(self._release)

    def _release(self, size: int) -> None:
        self._reserved -= size
        assert self._reserved >= 0, "memory is given back twice"


def hello(given: bytes) -> None:
    """The first message of a stranger."""
    us = Identity("worker0", 0, b"0" * 16)
    server = Handshake(us, b"s" * 32, b"n" * 32, client=False)
    server.receive(given[:HELLO_SIZE].ljust(HELLO_SIZE, b"\0"))
    # What a member may have sealed: no tag protects us from that.
    Identity.unpack(given[:IDENTITY_SIZE].ljust(IDENTITY_SIZE, b"\0"))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "data": data,
    "fault": fault,
    "frames": Frames(),
    "hello": hello,
}
SEEDS: dict[str, list[bytes]] = {
    "frames": [
        b"\xff" + pack_header(3, 0, 5, 1, 60.0, 2) + b"hello",
        b"\x20"
        + pack_header(3, LARGE, 32, 2, 60.0, 0)
        + announce(7, 2, [100, 50])
        + pack_header(CHUNK, 0, 150, 0, 0.0, 7)
        + bytes(150),
    ],
    "hello": [
        Handshake(Identity("worker1", 1, b"1" * 16), b"s" * 32, b"n" * 32, client=True).start()
    ],
}


def limited(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def attempt(given: bytes) -> None:
        for last in (False, True):  # a busy machine gets a second try
            began = time.thread_time()
            with contextlib.suppress(ProtocolError, NotAllowed):
                target(given)
            if time.thread_time() - began < SLOWEST:
                return
            assert not last, "too slow"

    return attempt


def no_pickle(event: str, args: Any) -> None:
    """An audit hook: no byte of an input may reach pickle."""
    assert event != "pickle.find_class", "unpickled"


def main() -> None:
    sys.addaudithook(no_pickle)
    name, arguments = sys.argv[1], sys.argv[2:]
    target = limited(TARGETS[name])
    values: list[Any] = [
        None,
        [1, -2.5, 3j, "text", b"bytes", True, 1 << 100],
        {"a": (1, [2, {"b": None}])},
        PeerInfo("worker1", 3, b"x" * 16, ("tcp:127.0.0.1:1",)),
        dict,
        ("ValueError", "text", ("text",), ("KeyError", "", None, None)),
    ]
    corpus = tempfile.mkdtemp(prefix="aiograd-fuzz-")  # atheris ends the process itself
    seeds = SEEDS.get(name) or [CODEC.encode(value, None).data for value in values]
    for number, seed in enumerate(seeds):
        Path(corpus, str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], corpus, "-max_len=400", *arguments], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
