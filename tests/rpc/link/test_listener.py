"""Listening: limits on unauthenticated connections, refusals, and two dials that cross."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging

import pytest

from aiograd.errors import WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.link import listener as listener_module
from aiograd.rpc.link.listener import MAX_UNAUTHENTICATED
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import split, split_tcp
from aiograd.wire.handshake import Identity
from tests.support.agents import SECRET, hello
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


async def test_two_workers_that_dial_each_other_at_once_keep_one_connection(agents, address):
    for _ in range(5):
        async with agents(2, address=address) as (a, b):
            results = await asyncio.gather(
                a.call("worker1", add, (1, 1)), b.call("worker0", add, (2, 2))
            )
            assert results == [2, 4]
            assert a.link("worker1").is_open
            assert b.link("worker0").is_open
            ours = a.link("worker1").connection.transport
            theirs = b.link("worker0").connection.transport
            assert not ours.is_closing()
            assert not theirs.is_closing()
            assert await a.call("worker1", add, (1, 1)) == 2
            assert await b.call("worker0", add, (2, 2)) == 4


async def test_too_many_unauthenticated_connections_are_closed_at_once(agents, tmp_path):
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


async def test_only_the_latest_refusals_are_remembered(agents):
    """By host: nobody who was refused has proven a name."""
    async with agents(1, address="tcp:127.0.0.1:0".format) as (a,):
        port = int(a.info.addresses[0].rpartition(":")[2])
        for i in range(1, 13):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(f"127.0.0.{i}", 0)
            )
            writer.write(hello(Identity("other", 1, bytes(16)), b"x" * 32))
            await read_all(reader)
            writer.close()
            await writer.wait_closed()
        places = [f"somebody at tcp:127.0.0.{i}" for i in range(5, 13)]
        assert list(a.listener.refusals) == places


async def test_a_closed_listener_accepts_nothing(agents):
    async with agents(2) as (a, b):
        a.listener.close()
        with pytest.raises(WorkerLost):
            await b.call("worker0", add, (1, 2))
        assert a.listener.unauthenticated == 0


@pytest.mark.parametrize(("plain", "said"), [(False, "secret and TLS"), (True, "(secret, mode")])
async def test_listening_for_other_hosts_is_tls_unless_plaintext_is_allowed(caplog, plain, said):
    caplog.set_level(logging.INFO, "aiograd.link")
    agent = Agent("a", 0, secret=SECRET, options=Options(allow_plaintext=plain))
    await agent.start("tcp:0.0.0.0:0")
    assert said in caplog.text
    await agent.close()


@pytest.mark.parametrize("wrong", ["", "unix:", "tcp:", "tcp:host", "http://x", "tcp:h:port"])
def test_malformed_addresses_are_refused(wrong):
    with pytest.raises(ValueError, match="address"):
        split_tcp(wrong) if wrong.startswith("tcp") else split(wrong)


async def test_closing_leaves_no_socket_file(agents, tmp_path):
    async with agents(1, address=f"unix:{tmp_path}/{{}}".format):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


async def test_a_worker_without_file_descriptors_says_so_and_counts_it(agents, monkeypatch, caplog):
    async with agents(1) as [worker]:
        listener = worker.listener
        listener.check_descriptors()
        assert worker.limits["descriptors"] == 0

        def none_left(*args):
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(listener_module.os, "open", none_left)
        with caplog.at_level(logging.ERROR, "aiograd.link"):
            listener.check_descriptors()
            listener.check_descriptors()
        assert worker.limits["descriptors"] == 2
        (line,) = caplog.messages  # at a bounded rate
        for word in (worker.name, "file descriptors", "the limit is", "ulimit -n"):
            assert word in line
