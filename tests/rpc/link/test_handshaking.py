"""Handshakes over real sockets: secrets, versions, silence, and bytes that are none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import time

import pytest

from aiograd.errors import AuthError, ProtocolError
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.wire.handshake import HELLO_SIZE, PROOF_SIZE, VERSION, Handshake, Identity
from tests.support.agents import SECRET, hello


def add(x, y=0):
    return x + y


@pytest.fixture(params=["memory", "unix", "tcp"])
def address(request, tmp_path):
    return {
        "memory": "memory:{}".format,
        "unix": f"unix:{tmp_path}/{{}}.sock".format,
        "tcp": "tcp:127.0.0.1:0".format,
    }[request.param]


async def read_all(reader):
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_a_worker_with_another_secret_is_refused_with_a_line_in_the_security_log(
    agents, address, caplog
):
    caplog.set_level(logging.INFO, "aiograd.security")
    async with agents(1, address=address) as (a,):
        other = Agent("worker1", 1, secret=b"x" * 32, runtime=a.runtime)
        await other.start()
        other.directory.add(a.info)
        with pytest.raises(AuthError):
            await other.call("worker0", add, (1, 2))
        await other.close()
        assert a.links.table == {}
        (where,) = a.listener.refusals
        assert where.startswith("somebody at ")
    (refused,) = [text for text in caplog.messages if text.startswith("worker0 refused")]
    # Not by name: it has proven none.
    assert "an unknown peer" in refused
    assert "does not know a secret of this worker" in refused
    scheme = a.info.addresses[0].partition(":")[0]
    if scheme == "tcp":
        assert "from tcp:127.0.0.1:" in refused
    elif scheme == "unix" and hasattr(socket, "SO_PEERCRED"):
        assert f"from a Unix socket (process {os.getpid()})" in refused
    assert any(f"at {a.info.addresses[0]}" in text for text in caplog.messages)


@pytest.mark.parametrize("version", [1, VERSION + 1])
async def test_a_client_of_another_version_hears_both_versions(agents, tmp_path, version):
    async with agents(1, address=f"unix:{tmp_path}/{{}}".format) as (a,):
        us = Identity("old", 1, b"o" * 16, version=version)
        hand = Handshake(us, SECRET, b"n" * 32, client=True)
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/0")
        writer.write(hand.start())
        hand.receive(await reader.readexactly(HELLO_SIZE))
        assert str(hand.mismatch) == f"peer speaks {VERSION}, we speak {version}"
        assert await read_all(reader) == b""
        writer.close()
        await writer.wait_closed()
        assert a.links.table == {}


@pytest.mark.parametrize("version", [1, VERSION + 1])
async def test_a_server_of_another_version_is_a_protocol_error(agents, tmp_path, version):
    them = Identity("other", 1, b"o" * 16, version=version)

    async def answer(reader, writer):
        hand = Handshake(them, SECRET, b"n" * 32, client=False)
        writer.write(hand.receive(await reader.readexactly(HELLO_SIZE)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, f"{tmp_path}/new")
    async with agents(1) as (a,):
        said = f"peer speaks {version}, we speak {VERSION}"
        with pytest.raises(ProtocolError, match=said) as caught:
            await a.connect(f"unix:{tmp_path}/new")
        assert caught.value.worker == ""  # it has proven no name
    server.close()
    await server.wait_closed()


BAD = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"\r\n" * 200,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    "zeros": bytes(1000),
    "pickle": pickle.dumps([print] * 100),
    "half": b"aiograd\0",
    "no proof": hello(Identity("evil", 1, b"e" * 16)) + bytes(PROOF_SIZE),
    "another secret": hello(Identity("evil", 1, b"e" * 16), b"x" * 32) + bytes(PROOF_SIZE),
}


@pytest.mark.parametrize("junk", BAD)
async def test_bytes_that_are_no_handshake_close_the_connection_and_are_not_unpickled(
    agents, tmp_path, junk, monkeypatch
):
    options = Options(handshake_timeout=0.3)
    async with agents(1, options=options, address=f"unix:{tmp_path}/{{}}".format) as (a,):

        def refuse(*args, **kwargs):
            raise AssertionError("an unauthenticated peer reached the deserializer")

        monkeypatch.setattr("aiograd.wire.codec.pickle.loads", refuse)
        start = time.monotonic()
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/0")
        writer.write(BAD[junk])
        await read_all(reader)
        assert time.monotonic() - start < 1.3
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert a.links.table == {}
        assert a.listener.unauthenticated == 0


async def test_connections_that_say_nothing_are_closed_after_the_handshake_timeout(
    agents, tmp_path
):
    options = Options(handshake_timeout=0.2)
    async with agents(2, options=options, address=f"unix:{tmp_path}/{{}}".format):
        start = time.monotonic()
        connections = [await asyncio.open_unix_connection(f"{tmp_path}/0") for _ in range(10)]
        await asyncio.gather(*(read_all(reader) for reader, _ in connections))
        assert time.monotonic() - start < 1.2
        for _, writer in connections:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        Agent("a", 0, secret=b"short")
