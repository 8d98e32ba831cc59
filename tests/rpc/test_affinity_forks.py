"""A forked child keeps no descriptor of a worker, and the worker does not notice the fork."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from aiograd.rpc import affinity
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from tests.support.agents import SECRET


def double(x):
    return x * 2


def held(process: int | str) -> set[str]:
    """The sockets that a process has open, each with its number."""
    found = set()
    for each in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{process}/fd/{each}"))
    return {each for each in found if each.startswith("socket:")}


@contextlib.contextmanager
def forked() -> Iterator[int]:
    """A child that does nothing, forked as user code does it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks where threads are
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"!")
            while True:
                signal.pause()
    try:
        assert os.read(ready, 1) == b"!"  # its hooks have run
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
async def test_a_forked_child_keeps_no_descriptor_of_a_worker(kind, tmp_path, papers):
    before = held("self")
    agents = [
        Agent(
            name, rank, secret=SECRET, options=Options(tls=papers(name) if kind == "tls" else None)
        )
        for rank, name in enumerate(("a", "b"))
    ]
    try:
        for agent in agents:
            where = f"unix:{tmp_path}/{agent.name}" if kind == "unix" else "tcp:127.0.0.1:0"
            await agent.start(where)
        a, b = agents
        a.directory.add(b.info)
        large = np.ones(1 << 17)
        for _ in range(3):  # the first offers shared memory, later ones use it
            np.testing.assert_array_equal(await a.call("b", double, (large,)), large * 2)
        ours = held("self") - before
        assert len(ours) >= 4  # two listeners and both ends of a connection
        with forked() as child:
            assert held(child) & ours == set()
            assert await a.call("b", double, (1,)) == 2
            np.testing.assert_array_equal(await a.call("b", double, (large,)), large * 2)
        assert ours <= held("self")
    finally:
        for agent in agents:
            await agent.close()


async def test_a_connection_that_has_proven_nothing_is_closed_in_a_child_too(tmp_path):
    agent = Agent("a", 0, secret=SECRET)
    await agent.start(f"unix:{tmp_path}/a")
    before = held("self")
    _, writer = await asyncio.open_unix_connection(f"{tmp_path}/a")
    try:
        while not agent.listener.unauthenticated:
            await asyncio.sleep(0.001)
        theirs = held("self") - before - {_name(writer.get_extra_info("socket").fileno())}
        assert len(theirs) == 1
        with forked() as child:
            assert held(child) & theirs == set()
    finally:
        writer.close()
        await writer.wait_closed()
        await agent.close()


async def test_a_connection_under_way_is_closed_in_a_child_too(tmp_path):
    """A listener that never answers leaves the one who dials in the handshake."""
    loop = asyncio.get_running_loop()
    agent = Agent("a", 0, secret=SECRET)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/b")
        silent.listen()
        silent.setblocking(False)
        agent.directory.add(PeerInfo("b", 1, b"b" * 16, (f"unix:{tmp_path}/b",)))
        call = agent.call("b", double, (1,))
        came, _ = await loop.sock_accept(silent)
        with came:
            await loop.sock_recv(came, 1)  # its hello: the connection is made on that side, too
            with forked() as child:
                await agent.close()
                while await loop.sock_recv(came, 4096):  # ends only when nobody has it open
                    pass
                assert held(child) is not None  # it lives
        with pytest.raises(Exception, match="shut down"):
            await call


def _name(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


class Holder:
    """Something with descriptors, some of which are closed already."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors

    def descriptors(self) -> tuple[int, ...]:
        return self._descriptors


class Broken:
    def descriptors(self) -> tuple[int, ...]:
        raise RuntimeError("half closed")


def test_what_is_held_becomes_empty_in_the_child_and_stays_in_the_parent():
    ours, theirs = os.pipe()
    holders = [Broken(), Holder(-1, theirs)]
    for each in holders:
        affinity.close_in_children(each)
    with forked() as child:
        assert os.readlink(f"/proc/{child}/fd/{theirs}") == os.devnull  # the number stays taken
        assert os.readlink(f"/proc/self/fd/{theirs}").startswith("pipe:")
    os.close(theirs)
    os.close(ours)
