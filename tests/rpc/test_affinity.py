"""A worker used where it does not live: on a second loop, in a forked child. Never a hang."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import uvloop

import aiograd as ag
from aiograd.errors import RpcError, WrongLoopError, WrongThread
from tests.support.forks import in_forked_child

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
