"""Dials of many peers at once, and the limits that they meet: turns, backlog and descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from aiograd.errors import Overloaded
from aiograd.rpc.agent import Agent
from aiograd.rpc.link import links
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network
from tests.support.agents import SECRET
from tests.support.waiting import until


def add(x, y=0):
    return x + y


@contextmanager
def connecting(agent: Agent, trouble):
    """Let `trouble(address)` raise instead of the network when an agent connects."""
    network = agent.runtime.network
    connect = network.connect

    async def troubled(address, factory, *, tls=None):
        trouble(address)
        return await connect(address, factory, tls=tls)

    network.connect = troubled
    try:
        yield
    finally:
        network.connect = connect


async def greet_all(agents):
    """Let every agent call every other one at the same time."""
    calls = [a.call(b.name, add, (1, 2)) for a in agents for b in agents if a is not b]
    assert set(await asyncio.gather(*calls)) == {3}


@pytest.mark.parametrize("turns", [1, 2])
async def test_peers_are_dialled_in_turns_and_none_is_left_out(agents, monkeypatch, turns):
    monkeypatch.setattr(links, "DIALS", turns)
    async with agents(6) as several:
        most = 0

        def look(address):
            nonlocal most
            most = max(most, *(agent.links._dialling for agent in several))

        with connecting(several[0], look):
            await greet_all(several)
        assert most <= turns
        await until(lambda: all(not agent.links._dialling for agent in several))
        assert not any(agent.links._turns for agent in several)


async def test_a_link_that_waits_for_its_turn_takes_the_dial_of_its_peer(agents, monkeypatch):
    monkeypatch.setattr(links, "DIALS", 0)
    async with agents(2) as (a, b):
        waiting = a.call("worker1", add, (1, 2))
        await asyncio.sleep(0)
        assert list(a.links._turns) == [a.link("worker1")]
        monkeypatch.setattr(links, "DIALS", 1)
        assert await b.call("worker0", add, (2, 2)) == 4
        assert await waiting == 3
        assert a.links.dials == 0


async def test_a_dial_that_hangs_does_not_keep_others_waiting(agents, monkeypatch):
    monkeypatch.setattr(links, "DIALS", 1)
    monkeypatch.setattr(links, "_TURN", 0.05)
    async with agents(3) as (a, *_):
        connect, hang = a.runtime.network.connect, asyncio.Event()

        async def slow(address, factory, *, tls=None):
            if address == "memory:1":
                await hang.wait()
            return await connect(address, factory, tls=tls)

        monkeypatch.setattr(a.runtime.network, "connect", slow)
        stuck = a.call("worker1", add, (1, 2))
        assert await a.call("worker2", add, (1, 2)) == 3
        assert not stuck.done()
        hang.set()
        assert await stuck == 3
        await until(lambda: a.links._dialling == 0)


async def test_a_full_backlog_is_tried_again(agents):
    async with agents(2) as (a, _):
        troubles = [BlockingIOError(errno.EAGAIN, "try again")] * 8

        def full(address):
            if troubles:
                raise troubles.pop()

        with connecting(a, full):
            assert await a.call("worker1", add, (1, 2)) == 3
        assert not troubles


async def test_a_backlog_that_stays_full_is_an_error_that_says_so(agents):
    def full(address):
        raise BlockingIOError(errno.EAGAIN, "try again")

    async with agents(2, options=Options(handshake_timeout=0.3)) as (a, _):
        with connecting(a, full), pytest.raises(Overloaded, match="backlog") as caught:
            await a.call("worker1", add, (1, 2))
        assert caught.value.worker == "worker1"


async def test_no_descriptor_left_is_an_error_that_names_the_limit(agents):
    def none_left(address):
        raise OSError(errno.EMFILE, "Too many open files")

    async with agents(2) as (a, _):
        with connecting(a, none_left), pytest.raises(Overloaded, match="RLIMIT_NOFILE") as caught:
            await a.call("worker1", add, (1, 2))
        assert caught.value.worker == "worker0"
        assert "worker1" in str(caught.value)


class Kept(asyncio.BufferedProtocol):
    """A connection that reads nothing of interest."""

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return memoryview(bytearray(1))


async def test_a_unix_listener_that_accepts_nothing_is_noticed_at_once(tmp_path):
    """asyncio would go on with a socket that is not connected."""
    address = f"unix:{tmp_path}/full"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "full"))
        server.listen(0)  # Linux lets one wait
        first = await Network().connect(address, Kept)
        with pytest.raises(BlockingIOError):
            await Network().connect(address, Kept)
        first.transport.abort()


async def test_a_connection_closed_before_an_answer_is_no_refusal(agents):
    """A listener with too many unauthenticated connections closes it so; that passes."""
    closed = 0

    def close(reader, writer):
        nonlocal closed
        closed += 1
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    try:
        async with agents(1, options=Options(handshake_timeout=1.5)) as (a,):
            with pytest.raises(Exception, match="unauthenticated"):
                await a.connect(f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}")
            assert closed > 6
    finally:
        server.close()
        await server.wait_closed()


async def test_more_workers_than_a_listener_takes_at_once_all_get_through(agents, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.link.listener.MAX_UNAUTHENTICATED", 2)
    async with agents(1) as (hub,):
        several = [Agent(f"many{i}", i + 1, secret=SECRET, runtime=hub.runtime) for i in range(24)]
        try:
            for agent in several:
                await agent.start()
                agent.directory.add(hub.info)
                hub.directory.add(agent.info)
            assert await asyncio.gather(*[a.call("worker0", add, (1, 2)) for a in several])
        finally:
            for agent in several:
                await agent.close()


# A worker with room for a few connections calls more workers than that, over real sockets. What
# does not fit is an error that names the limit; what fits works, also afterwards.
_FEW_DESCRIPTORS = """
import asyncio, os, resource, sys, tempfile
import aiograd as ag
from aiograd.rpc.agent import Agent

def add(x, y):
    return x + y

async def main(folder):
    agents = []
    for rank in range(12):
        agent = Agent(f"worker{rank}", rank, secret=bytes(range(32)))
        await agent.start(f"unix:{folder}/{rank}")
        agents.append(agent)
    for agent in agents:
        for other in agents:
            agent.directory.add(other.info)
    free = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, free + 8))
    caller = agents[0]
    found = []
    for rank in range(1, 12):  # one after the other: each takes a descriptor at either end
        call = caller.call(f"worker{rank}", add, (rank, 1), timeout=20.0)
        found += await asyncio.gather(call, return_exceptions=True)
    for each in found:
        print(each if isinstance(each, int) else f"{type(each).__name__}: {each}")
    good = next(rank for rank, each in enumerate(found, start=1) if isinstance(each, int))
    assert await caller.call(f"worker{good}", add, (1, 1)) == 2
    print("still works", flush=True)
    os._exit(0)

sys.path.insert(0, os.getcwd())
with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
"""


def test_a_process_without_descriptors_says_so_and_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FEW_DESCRIPTORS], capture_output=True, text=True, timeout=100
    )
    *lines, last = done.stdout.splitlines()
    assert last == "still works", done.stderr
    numbers = [line for line in lines if line.isdigit()]
    errors = [line for line in lines if not line.isdigit()]
    assert numbers
    assert errors
    # The one that dials names its limit. One that cannot accept closes, or says nothing: for the
    # other side it is lost.
    assert any("RLIMIT_NOFILE" in line for line in errors), errors
    assert all(line.startswith(("Overloaded: ", "WorkerLost: ")) for line in errors), errors
