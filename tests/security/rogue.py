"""A member that has the secret and sends arbitrary frames."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any

from aiograd.rpc.transport.inproc import InprocNetwork
from aiograd.wire.codec import Travellers
from aiograd.wire.framing import FrameReader, Transfer, announce, pack_header
from aiograd.wire.handshake import Handshake, Identity, make_incarnation
from aiograd.wire.messages import CHUNK, DEFINE, EXPOSED, FAULT, LARGE, REPLY, SERVICE
from aiograd.wire.safecodec import DataCodec
from aiograd.wire.session import ACCEPTED
from tests.security import partner_functions as offer

PLAIN = DataCodec(Travellers())


def frame(
    kind: int, body: bytes = b"", *, flags: int = 0, id: int = 0, budget: float = 30.0, to: int = 0
) -> bytes:
    return pack_header(kind, flags, len(body), id, budget, to) + body


def large(
    kind: int, number: int, segments: list[bytes], *, flags: int = 0, id: int = 0, to: int = 0
) -> list[bytes]:
    """The announcement of a large message, and its chunks."""
    body = announce(number, to, [len(segment) for segment in segments])
    chunks = [pack_header(CHUNK, 0, len(part), 0, 0.0, number) + part for part in segments if part]
    return [frame(kind, body, flags=flags | LARGE, id=id), *chunks]


def define(number: int, name: str, flags: int = EXPOSED) -> bytes:
    return frame(DEFINE, name.encode(), flags=flags, to=number)


def with_token(token: bytes, payload: bytes) -> bytes:
    """The body of a call with the flag KEEP."""
    return struct.pack("<H", len(token)) + token + payload


def with_label(context_id: int, edge: int, outputs: int, payload: bytes) -> bytes:
    """The body of a message with the flag BAGGAGE."""
    return struct.pack("<QQI", context_id, edge, outputs) + payload


def service(number: int, name: str) -> bytes:
    return define(number, name, SERVICE)


def exposed(function: Any) -> str:
    return f"{offer.__name__}:{function}"


class Rogue(asyncio.BufferedProtocol):
    """One connection over a memory network: a proper handshake, then raw frames."""

    def __init__(
        self,
        secret: bytes,
        name: str,
        rank: int,
        restricted: bool,
        incarnation: bytes | None = None,
    ) -> None:
        self.incarnation = incarnation or make_incarnation(name, os.urandom(16))
        self.rank = rank
        me = Identity(name, rank, self.incarnation)
        self._handshake = Handshake(
            me, secret, os.urandom(32), client=True, restricts=lambda name: restricted
        )
        self._buffer = bytearray(1024)
        self._filled = 0
        self._reader = FrameReader()
        self.transport: Any = None
        self.sent = 0  # numbers used so far
        self.accepted = asyncio.get_running_loop().create_future()
        self.ended = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Queue[tuple[int, int, int, bytes]] = asyncio.Queue()

    @classmethod
    async def connect(
        cls,
        hub: InprocNetwork,
        address: str,
        secret: bytes,
        *,
        name: str = "rogue",
        rank: int = 99,
        restricted: bool = True,
        incarnation: bytes | None = None,
    ) -> Rogue:
        found = hub.connect(address, lambda: cls(secret, name, rank, restricted, incarnation))
        assert isinstance(found, Rogue)
        await found.accepted
        return found

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._handshake.start())

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._handshake.needed:
            return memoryview(self._buffer)[self._filled : self._handshake.needed]
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._handshake.needed:
            self._filled += nbytes
            if self._filled == self._handshake.needed:
                message, self._filled = bytes(self._buffer[: self._filled]), 0
                self.transport.write(self._handshake.receive(message))
                if self._handshake.proven:
                    assert self._handshake.status == ACCEPTED
                    self.accepted.set_result(None)
            return
        for each in self._reader.advance(nbytes):
            if each.kind in (REPLY, FAULT):
                whole = b"" if isinstance(each.body, Transfer) else bytes(each.body)
                self.answers.put_nowait((each.kind, each.flags, each.id, whole))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(ConnectionError("refused"))
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def send(self, *frames: bytes) -> None:
        for each in frames:
            self.transport.write(each)

    async def close(self) -> None:
        self.transport.close()
        await self.ended
