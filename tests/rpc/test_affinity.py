"""A worker used where it does not live: on a second loop, in a forked child. Never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import uvloop

import aiograd as ag
from aiograd.errors import RpcError, WrongLoopError, WrongThread
from aiograd.rpc import affinity
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from tests.support.agents import SECRET
from tests.support.forks import in_forked_child
from tests.support.waiting import until

LOOPS = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
OPTIONS = ag.Options(transport="memory", grace=1.0)


async def started() -> ag.LocalCluster:
    cluster = await ag.LocalCluster(1, processes=False)
    assert await ag.rpc_async("worker0", abs, (-1,)) == 1  # the route is known from here on
    return cluster


async def each_use(cluster: ag.LocalCluster) -> list[BaseException | None]:
    """How every kind of use ends."""
    x = ag.tensor([1.0], requires_grad=True)
    uses = [
        lambda: ag.rpc_async("worker0", abs, (-1,)),
        lambda: ag.rpc_async("worker0", abs, (x,)),
        lambda: ag.remote("worker0", abs, (-1,)),
        lambda: cluster["worker0"].call(abs, -1),
        lambda: ag.rpc_stream("worker0", range, (3,)),
        lambda: ag.Group(["worker0"]).call(abs, -1),
        lambda: ag.barrier(),
        lambda: ag.context().backward(x.sum()),
        lambda: cluster.close(),
        lambda: ag.shutdown(),
    ]
    found: list[BaseException | None] = []
    for use in uses:
        try:
            async with asyncio.timeout(5.0):
                made = use()
                if asyncio.iscoroutine(made) or asyncio.isfuture(made):
                    await made
        except Exception as error:
            found.append(error)
        else:
            found.append(None)
    return found


def assert_refused(found: list[BaseException | None], kind: type[RpcError]) -> None:
    assert [type(each) for each in found] == [kind] * len(found)
    for error in found:
        assert error.worker == "driver"  # type: ignore[union-attr]
        assert "driver" in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


@LOOPS
def test_a_second_loop_of_the_same_thread_is_told_so_at_once(new_loop):
    first, second = new_loop(), new_loop()
    try:
        cluster = first.run_until_complete(started())
        assert_refused(second.run_until_complete(each_use(cluster)), WrongLoopError)
        first.run_until_complete(still_works(cluster))
    finally:
        first.close()
        second.close()


async def still_works(cluster: ag.LocalCluster) -> None:
    assert await ag.rpc_async("worker0", abs, (-2,)) == 2
    found = ag.debug_info()
    assert all(count == 0 for name, count in found.items() if name != "workers"), found
    await cluster.close()


@LOOPS
def test_a_loop_of_another_thread_is_told_so_at_once(new_loop):
    async def main() -> None:
        cluster = await started()

        def elsewhere() -> list[BaseException | None]:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(each_use(cluster))

        assert_refused(await asyncio.to_thread(elsewhere), WrongLoopError)
        await still_works(cluster)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@LOOPS
def test_a_worker_left_open_on_a_loop_that_has_ended_says_so(new_loop):
    loop = new_loop()
    worker = loop.run_until_complete(ag.Worker("alone", options=OPTIONS).__aenter__())

    async def use() -> None:
        with pytest.raises(WrongLoopError, match="another event loop"):
            ag.rpc_async("alone", abs, (-1,))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(use())
    loop.run_until_complete(worker.close())
    loop.close()


@LOOPS
def test_blocking_in_the_thread_that_should_run_the_loop_is_refused(new_loop):
    loop = new_loop()
    cluster = loop.run_until_complete(started())
    with pytest.raises(WrongThread, match="driver"):
        ag.rpc_sync("worker0", abs, (-1,))
    with pytest.raises(WrongThread, match="driver"):
        ag.run_sync(ag.barrier())
    later = ag.rpc_async("worker0", abs, (-3,))  # but a call may be made, and awaited later
    assert loop.run_until_complete(later) == 3
    loop.run_until_complete(cluster.close())
    loop.close()


async def test_a_forked_child_is_told_so_at_once_and_the_parent_goes_on(cluster):
    async with cluster(1, processes=True) as c:
        reference = ag.remote("worker0", abs, (-5,))
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1
        blocking = [
            lambda: ag.rpc_sync("worker0", abs, (-1,)),
            lambda: ag.rpc_async("worker0", abs, (-1,)),
            lambda: ag.remote("worker0", abs, (-1,)),
            lambda: reference.to_here(),
            lambda: c["worker0"].call(abs, -1),
            lambda: ag.run_sync(ag.barrier()),
            lambda: asyncio.run(call_once()),
        ]
        for use in blocking:
            assert in_forked_child(use).startswith("ForkedProcessError: this process is a fork")
        assert await ag.rpc_async("worker0", abs, (-2,)) == 2
        assert await reference == 5


async def call_once() -> None:
    await ag.rpc_async("worker0", abs, (-1,))


def test_a_forked_child_may_start_workers_of_its_own():
    async def alone() -> None:
        async with ag.Worker("alone", options=OPTIONS):
            assert await ag.rpc_async("alone", abs, (-1,)) == 1

    assert in_forked_child(lambda: asyncio.run(alone())) == "nothing"


# ── descriptors in forked children ───────────────────────────────────────────────────────────────


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
        await until(lambda: agent.listener.unauthenticated)
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
