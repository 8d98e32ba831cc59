"""Who gets in: handshakes over real sockets, strangers, and two that dial at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from dataclasses import replace

import pytest

from aiograd.errors import AuthError, InsecureTransport, ProtocolError, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.api import rpc_async
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.link.listener import MAX_UNAUTHENTICATED
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport.network import split, split_tcp
from aiograd.testing.chaos_proxy import Proxy
from aiograd.wire.handshake import HELLO_SIZE, VERSION, Handshake, Identity
from tests.support.agents import SECRET
from tests.support.waiting import until


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


async def test_another_secret_does_not_get_in(agents, address, caplog):
    async with agents(1, address=address) as (a,):
        stranger = Agent("worker1", 1, secret=b"x" * 32, runtime=a.runtime)
        await stranger.start()
        stranger.directory.add(a.info)
        with caplog.at_level(logging.DEBUG, "aiograd"), pytest.raises(AuthError):
            await stranger.call("worker0", add, (1, 2))
        await stranger.close()
        assert a.links.table == {}


async def test_a_rendezvous_is_dialled_by_address_alone(agents, address):
    async with agents(1, address=address) as (a,):
        newcomer = Agent("late", 7, secret=SECRET, runtime=a.runtime)
        await newcomer.start()
        a.services["hello"] = lambda sender: (sender.name, sender.rank)
        peer = await newcomer.connect(a.info.addresses[0])
        assert (peer.name, peer.incarnation) == ("worker0", a.incarnation)
        assert await newcomer.request(peer, "hello") == ("late", 7)
        newcomer.services["back"] = lambda sender: sender.name
        a.directory.add(PeerInfo("late", 7, newcomer.incarnation))
        assert await a.request("late", "back") == "worker0"  # over the connection that is there
        await newcomer.close()


async def test_another_incarnation_at_the_address_is_not_the_one_meant(agents):
    async with agents(2) as (a, b):
        a.directory.add(PeerInfo("worker1", 1, b"o" * 16, b.info.addresses))
        with pytest.raises(WorkerLost) as caught:
            await rpc_async("worker1", add, (1, 2))
        assert caught.value.executed == "no"
        a.directory.add(b.info)
        assert await rpc_async("worker1", add, (1, 2)) == 3


async def test_two_that_dial_at_once_keep_one_connection(agents, address):
    for _ in range(5):
        async with agents(2, address=address) as (a, b):
            results = await asyncio.gather(
                a.call("worker1", add, (1, 1)), b.call("worker0", add, (2, 2))
            )
            assert results == [2, 4]
            assert a.link("worker1").state == b.link("worker0").state == "open"
            ours = a.link("worker1").connection.transport
            theirs = b.link("worker0").connection.transport
            assert not ours.is_closing()
            assert not theirs.is_closing()
            assert await a.call("worker1", add, (1, 1)) == 2
            assert await b.call("worker0", add, (2, 2)) == 4


@pytest.mark.parametrize("version", [1, VERSION + 1])
async def test_versions_that_differ_are_told_apart(agents, tmp_path, version):
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
async def test_our_dial_to_another_version_is_a_protocol_error(agents, tmp_path, version):
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
        assert caught.value.worker == "other"
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("cuts", [1, 2, 4])
async def test_a_cut_in_the_first_handshake_is_no_refusal(agents, tmp_path, cuts):
    where = f"unix:{tmp_path}/{{}}".format
    async with agents(2, address=where) as (a, b), Proxy(where("proxy"), where(1)) as proxy:
        budgets = iter([2 * HELLO_SIZE + 3] * cuts)  # both hellos, and a little of a proof
        proxy.budget = lambda: next(budgets, None)
        a.directory.add(replace(b.info, addresses=(proxy.address,)))
        assert await a.call("worker1", add, (1, 2)) == 3
        assert proxy.cuts == cuts


BAD = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"\r\n" * 200,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    "zeros": bytes(1000),
    "pickle": pickle.dumps([print] * 100),
    "half": b"aiograd\0",
    "no proof": Identity("evil", 1, b"e" * 16).hello(b"n" * 32) + bytes(33),
}


@pytest.mark.parametrize("junk", BAD)
async def test_strangers_are_closed_and_nothing_is_unpickled(agents, tmp_path, junk, monkeypatch):
    options = Options(handshake_timeout=0.3)
    async with agents(1, options=options, address=f"unix:{tmp_path}/{{}}".format) as (a,):

        def refuse(*args, **kwargs):
            raise AssertionError("a stranger reached the deserializer")

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


async def test_silent_strangers_are_closed_in_time(agents, tmp_path):
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


async def test_too_many_strangers_are_turned_away_at_once(agents, tmp_path):
    async with agents(2, address=f"unix:{tmp_path}/{{}}".format) as (a, b):
        connections = [await asyncio.open_unix_connection(f"{tmp_path}/0") for _ in range(70)]
        await until(lambda: a.listener.unauthenticated == MAX_UNAUTHENTICATED)
        turned_away = [reader for reader, _ in connections[64:]]
        async with asyncio.timeout(1):
            await asyncio.gather(*(read_all(reader) for reader in turned_away))
        assert a.listener.unauthenticated == MAX_UNAUTHENTICATED
        for _, writer in connections[:10]:
            writer.close()
            await writer.wait_closed()
        assert await b.call("worker0", add, (1, 2)) == 3
        for _, writer in connections[10:]:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_other_hosts_need_tls_or_a_word(agents):
    runtime = Runtime()
    agent = Agent("a", 0, secret=SECRET, runtime=runtime)
    with pytest.raises(InsecureTransport):
        await agent.start("tcp:0.0.0.0:0")
    assert agent.closed
    open_one = Agent("a", 0, secret=SECRET, runtime=runtime, options=Options(allow_plaintext=True))
    await open_one.start("tcp:0.0.0.0:0")
    await open_one.close()


async def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        Agent("a", 0, secret=b"short")


@pytest.mark.parametrize("wrong", ["", "unix:", "tcp:", "tcp:host", "http://x", "tcp:h:port"])
def test_addresses_have_a_form(wrong):
    with pytest.raises(ValueError, match="address"):
        split_tcp(wrong) if wrong.startswith("tcp") else split(wrong)


async def test_closing_leaves_no_socket_file(agents, tmp_path):
    async with agents(1, address=f"unix:{tmp_path}/{{}}".format):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
