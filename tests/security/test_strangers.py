"""Thousands of bad handshakes on a live worker.

No stranger gets in, nothing is unpickled, and members are served meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import pickle
import random
import ssl
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import trustme

from aiograd.cluster import TLS
from aiograd.errors import AuthError
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import split_tcp
from aiograd.wire.handshake import HELLO_SIZE, PROOF_SIZE, VERSION, Handshake, Identity
from tests.support.agents import SECRET, hello
from tests.support.certificates import issue
from tests.support.waiting import until, until_not

BAD = int(os.environ.get("AIOGRAD_HOSTILE", "2000"))
PATIENCE = max(120, BAD * 0.06)  # seconds
AT_ONCE = 12  # a host may have 16 unproven connections
FIRST = 100  # bad ones before anything is measured
SLOW = 20  # of the bad ones drip or say nothing, which takes them the whole handshake_timeout


def negate(x):
    return -x


class Gadget:
    def __reduce__(self):
        return os.system, ("echo > marker",)


def identity(name: str = "worker7", **other: Any) -> Identity:
    return Identity(name, 7, os.urandom(16), **other)


class Stranger:
    """One that knows the protocol and the address, not the secret."""

    def __init__(self, seed: int, recorded: list[bytes]) -> None:
        self.random = random.Random(seed)
        self.recorded = recorded  # what a member once sent: a hello and a proof
        self.handshake = Handshake(identity(), b"x" * 32, os.urandom(32), client=True)

    async def attack(self, host: str, port: int, kind: str) -> bytes:
        """Try one trick; everything the worker said."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            with contextlib.suppress(OSError, RuntimeError, asyncio.IncompleteReadError):
                await getattr(self, kind)(reader, writer)
                if kind not in SLOW_KINDS:
                    writer.write_eof()  # it waits for nothing, so the worker need not either
            heard = b""
            with contextlib.suppress(OSError):
                while data := await reader.read(4096):
                    heard += data
            return heard
        finally:
            writer.transport.abort()

    async def truncated(self, reader: Any, writer: Any) -> None:
        writer.write(self.handshake.start()[: self.random.randrange(HELLO_SIZE)])

    async def flipped(self, reader: Any, writer: Any) -> None:
        hello = bytearray(self.recorded[0])
        hello[self.random.randrange(len(hello))] ^= 1 << self.random.randrange(8)
        writer.write(hello + self.recorded[1])

    async def replayed(self, reader: Any, writer: Any) -> None:
        writer.write(self.recorded[0])
        await reader.readexactly(HELLO_SIZE)
        writer.write(self.recorded[1])

    async def reflected(self, reader: Any, writer: Any) -> None:
        writer.write(self.handshake.start())
        theirs = await reader.readexactly(HELLO_SIZE)
        writer.write(theirs[:PROOF_SIZE])

    async def echoed(self, reader: Any, writer: Any) -> None:
        """Sends back whatever it is sent, as its own hello."""
        writer.write(self.recorded[0])
        writer.write(await reader.readexactly(HELLO_SIZE))

    async def wrong_secret(self, reader: Any, writer: Any) -> None:
        writer.write(self.handshake.start())
        with contextlib.suppress(AuthError):  # it would not prove itself to such a server
            self.handshake.receive(await reader.readexactly(HELLO_SIZE))
        writer.write(bytes(PROOF_SIZE))

    async def proof_of_zeros(self, reader: Any, writer: Any) -> None:
        writer.write(self.handshake.start())
        await reader.readexactly(HELLO_SIZE)
        writer.write(bytes(PROOF_SIZE))

    async def old_version(self, reader: Any, writer: Any) -> None:
        version = self.random.choice([0, VERSION - 1, VERSION + 1, 65535])
        writer.write(hello(identity(version=version), b"x" * 32))

    async def http(self, reader: Any, writer: Any) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)

    async def tls_to_plain(self, reader: Any, writer: Any) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        hello = context.wrap_bio(incoming, outgoing, server_hostname="worker0")
        with contextlib.suppress(ssl.SSLWantReadError):
            hello.do_handshake()
        writer.write(outgoing.read())

    async def giant_lengths(self, reader: Any, writer: Any) -> None:
        huge = bytearray(self.recorded[0])
        huge[struct.calcsize("<8sH32s")] = 255
        huge[-28:-20] = b"\xff" * 8
        writer.write(huge)

    async def valid_pickle(self, reader: Any, writer: Any) -> None:
        writer.write(pickle.dumps(Gadget(), self.random.randrange(6)) * 20)

    async def frames_without_handshake(self, reader: Any, writer: Any) -> None:
        body = pickle.dumps((Gadget(), (), {}))
        writer.write(struct.pack("<BBHIQfI", 0xA9, 3, 0, len(body), 1, 60.0, 0) + body)

    async def noise(self, reader: Any, writer: Any) -> None:
        writer.write(self.random.randbytes(self.random.randrange(1, 2000)))

    async def goes_away(self, reader: Any, writer: Any) -> None:
        writer.transport.abort()

    async def drips(self, reader: Any, writer: Any) -> None:
        for byte in self.handshake.start():
            if reader.at_eof() or writer.is_closing():
                return
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)

    async def silent(self, reader: Any, writer: Any) -> None:
        pass


SLOW_KINDS = ("drips", "silent")
QUICK = sorted(
    name
    for name, what in vars(Stranger).items()
    if not name.startswith("_") and name not in ("attack", *SLOW_KINDS)
)


async def record(host: str, port: int) -> list[bytes]:
    """Listen to a member's handshake; then it goes away again."""
    member = Handshake(identity("worker6"), SECRET, os.urandom(32), client=True)
    reader, writer = await asyncio.open_connection(host, port)
    hello = member.start()
    writer.write(hello)
    proof = member.receive(await reader.readexactly(HELLO_SIZE))
    writer.transport.abort()
    return [hello, proof]


def memory() -> int:
    """Resident bytes, without those that are free and that only the allocator holds on to."""
    with contextlib.suppress(AttributeError):  # not with every C library
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("tls", ["", "certificates", "secret"], ids=["plain", "tls", "secret"])
@pytest.mark.deadline(PATIENCE)
async def test_bad_handshakes_get_nowhere_and_leave_nothing_behind(
    lookups, tmp_path, tmp_path_factory, monkeypatch, tls
):
    monkeypatch.chdir(tmp_path)
    settings: list[TLS | str | None] = ["secret" if tls else None] * 2
    if tls == "certificates":
        authority, folder = trustme.CA(), tmp_path_factory.mktemp("certificates")
        settings = [issue(authority, folder, f"worker{i}") for i in range(2)]
    worker, member = (
        Agent(f"worker{i}", i, secret=SECRET, options=Options(handshake_timeout=1.0, tls=each))
        for i, each in enumerate(settings)
    )
    await worker.start("tcp:127.0.0.1:0")
    await member.start("tcp:127.0.0.1:0")
    member.directory.add(worker.info)
    try:
        host, port = split_tcp(worker.info.addresses[0])
        assert await member.call("worker0", negate, (1,)) == -1
        recorded = [os.urandom(HELLO_SIZE), os.urandom(PROOF_SIZE)]
        if not tls:
            recorded = await record(host, port)
        accepted: list[bytes] = []

        async def attackers(numbers: Iterator[int]) -> None:
            for number in numbers:
                turn, rest = divmod(number, max(1, BAD // SLOW))
                kind = QUICK[number % len(QUICK)] if rest else SLOW_KINDS[turn % len(SLOW_KINDS)]
                heard = await Stranger(number, recorded).attack(host, port, kind)
                if len(heard) > HELLO_SIZE and not tls:  # more than a hello: it was let in
                    accepted.append(heard)

        first = iter(range(1, FIRST))  # what libraries load, and buffers that stay, are no growth
        await asyncio.gather(*[attackers(first) for _ in range(AT_ONCE)])
        await until_not(lambda: worker.listener.unauthenticated)
        gc.collect()
        files, tasks, links = (
            len(os.listdir("/proc/self/fd")),
            len(worker._tasks),
            worker.links.table,
        )
        known, before = set(links), memory()
        lookups.clear()
        served = 0

        async def good_client(over: asyncio.Event) -> None:
            nonlocal served
            while not over.is_set():
                assert await member.call("worker0", negate, (served,), timeout=5.0) == -served
                served += 1
                await asyncio.sleep(0.005)

        over = asyncio.Event()
        client = asyncio.create_task(good_client(over))
        numbers = iter(range(BAD))
        await asyncio.gather(*[attackers(numbers) for _ in range(AT_ONCE)])
        over.set()
        await client
        await until_not(lambda: worker.listener.unauthenticated)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= files)

        assert accepted == []
        assert [each for each in lookups if "negate" not in each and "loads" not in each] == []
        assert not any(b"marker" in each.encode() for each in lookups)
        assert list(tmp_path.iterdir()) == []
        assert set(worker.links.table) == known
        assert len(worker._tasks) == tasks
        assert worker.limits["handshake"] + worker.limits["strangers"] >= BAD * 0.9
        assert served > 20
        gc.collect()
        assert memory() - before < 5 << 20
        assert await member.call("worker0", negate, (5,)) == -5
    finally:
        await member.close()
        await worker.close()


async def test_too_many_strangers_are_turned_away_and_counted():
    worker = Agent("worker0", 0, secret=SECRET, options=Options(handshake_timeout=1.0))
    await worker.start("tcp:127.0.0.1:0")
    try:
        host, port = split_tcp(worker.info.addresses[0])
        silent = [await asyncio.open_connection(host, port) for _ in range(40)]
        await asyncio.gather(*[reader.read() for reader, _ in silent], return_exceptions=True)
        assert worker.limits["strangers"] == 40 - 16
        assert worker.limits["handshake"] == 16 + 24
        assert not worker.listener.unauthenticated
        for _, writer in silent:
            writer.transport.abort()
    finally:
        await worker.close()


async def test_strangers_that_hold_all_places_make_room_for_a_member():
    worker = Agent("worker0", 0, secret=SECRET)
    member = Agent("worker1", 1, secret=SECRET)
    await worker.start("tcp:127.0.0.1:0")
    await member.start()
    try:
        host, port = split_tcp(worker.info.addresses[0])
        idle = [await asyncio.open_connection(host, port) for _ in range(16)]
        await until(lambda: worker.listener.unauthenticated == 16)
        async with asyncio.timeout(5):  # less than `handshake_timeout`, which would end them
            while True:
                try:
                    await member.connect(worker.info.addresses[0])
                    break
                except AuthError:
                    continue
        assert worker.links.get(member.incarnation) is not None
        for _, writer in idle:
            writer.transport.abort()
    finally:
        await member.close()
        await worker.close()


async def test_refusals_are_logged_at_a_bounded_rate(caplog):
    caplog.set_level(logging.INFO, "aiograd.security")
    worker = Agent("worker0", 0, secret=SECRET)
    await worker.start("tcp:127.0.0.1:0")
    try:
        host, port = split_tcp(worker.info.addresses[0])
        for _ in range(60):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(bytes(1000))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        assert worker.limits["handshake"] == 60
        assert caplog.text.count("refused a connection") <= 30
    finally:
        await worker.close()
