"""Contexts, their ids, and how they are released on every worker."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiograd as ag
from aiograd.errors import NestedContext, NoContext, UnknownContext
from aiograd.testing.fault_injection import Faults
from tests.conformance.conftest import RELEASED
from tests.conformance.forms import (
    LAYOUTS,
    backward_passes,
    call,
    current_context_id,
    has_context,
    leaf,
    outside,
    plus,
    total,
)
from tests.support.waiting import until, until_not

OPENED = threading.Event()  # what the slow functions below wait for


@pytest.fixture(autouse=True)
def _everything_ends():
    OPENED.clear()
    yield
    OPENED.set()


async def open_many() -> tuple[int, list[int]]:
    """Open contexts one after the other; give back this worker's rank and their ids."""
    ids = []
    for _ in range(200):
        async with ag.context() as ctx:
            assert ag.get_context(ctx.id) is ctx
            assert ag.current_context() is ctx
            ids.append(ctx.id)
        with pytest.raises(UnknownContext) as caught:
            ag.get_context(ctx.id)
        assert caught.value.context_id == ctx.id
    return ag.get_worker_info().rank, ids


async def test_ctx_ids_carry_the_rank_and_are_never_given_twice(workers):
    async with workers(2) as cluster:
        for rank, ids in [await open_many(), await cluster["worker1"].call(open_many)]:
            assert {number >> 48 for number in ids} == {rank}
            assert max(ids) <= (2**48 - 1) + (rank << 48)
            assert len(set(ids)) == 200


async def test_ctx_nested_forbidden_in_one_task_but_not_in_another(workers):
    async def another() -> int:
        async with ag.context() as ctx:
            return ctx.id

    async with workers(1):
        async with ag.context() as outer:
            with pytest.raises(NestedContext, match="already"):
                async with ag.context():
                    pass
            with pytest.raises(NestedContext), ag.context():
                pass
            assert ag.current_context() is outer
            assert await outside(another) != outer.id
        async with ag.context() as again:
            assert again.id != outer.id
        with pytest.raises(NoContext):
            ag.current_context()


def arguments(kind: str, layout: str) -> tuple[object, object]:
    if kind == "no tensors":
        return 1, 2
    return leaf(layout, 1, kind == "grad"), leaf(layout, 2, kind == "grad")


async def visit_everyone(kind: str, layout: str) -> int:
    """Call every peer in a context; everything that could need a gradient takes it along."""
    me = ag.get_worker_info().name
    peers = [info.name for info in ag.workers() if info.name != me]
    async with ag.context() as ctx:
        for peer in peers:
            assert await ag.rpc_async(peer, current_context_id) == ctx.id
            await ag.rpc_async(peer, plus, args=arguments(kind, layout))
            if kind != "no tensors":
                await ag.rpc_async(peer, ag.add, args=arguments(kind, layout))
        assert ctx.known_workers == set(peers)
    assert not has_context(ctx.id)
    return ctx.id


async def gone_everywhere(cluster: ag.LocalCluster, ids: list[int]) -> None:
    async def left() -> bool:
        asked = [worker.call(has_context, number) for worker in cluster for number in ids]
        return any(await asyncio.gather(*asked)) or any(map(has_context, ids))

    await until_not(left, RELEASED)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, "dense") for kind in ("grad", "no grad", "no tensors")]
    + [(kind, "sparse") for kind in ("grad", "no grad")],
)
async def test_ctx_cleanup_all_peers(workers, kind, layout):
    async with workers(3) as cluster:
        visits = [worker.call(visit_everyone, kind, layout) for worker in cluster]
        ids = await asyncio.gather(*visits, visit_everyone(kind, layout))
        assert len(set(ids)) == 4
        await gone_everywhere(cluster, ids)


async def onwards(x: ag.Tensor, path: list[str]) -> ag.Tensor:
    if not path:
        return x * 2.0
    return await ag.rpc_async(path[0], onwards, args=(x, path[1:]))


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_ctx_cleanup_nested_reaches_workers_never_called_directly(workers, layout):
    async with workers(3) as cluster:
        async with ag.context() as ctx:
            await onwards(leaf(layout), ["worker0", "worker1", "worker2"])
            assert ctx.known_workers == {"worker0"}
            for worker in cluster:
                assert await outside(worker.call, has_context, ctx.id)
        await gone_everywhere(cluster, [ctx.id])


async def suffer() -> None:
    """Let this worker's first three control messages to every peer fail."""
    ag.current_worker().agent.fault_injector = Faults()


async def test_ctx_cleanup_under_message_loss(workers):
    async with workers(3) as cluster:
        await suffer()
        await asyncio.gather(*[worker.call(suffer) for worker in cluster])
        visits = [worker.call(visit_everyone, "grad", "dense") for worker in cluster]
        ids = await asyncio.gather(*visits, visit_everyone("grad", "dense"))
        await gone_everywhere(cluster, ids)
        hits = ag.current_worker().agent.fault_injector.hit
        assert hits["fail", "context.release"] == 3 * 3


async def test_ctx_known_workers_are_the_peers_with_and_without_gradients(workers):
    async with workers(3) as cluster:
        peers = {worker.name for worker in cluster}
        for grad in (False, True):
            async with ag.context() as ctx:
                assert ctx.known_workers == set()
                for peer in peers:
                    await ag.rpc_async(peer, ag.add, args=(leaf(grad=grad), leaf(grad=grad)))
                assert ctx.known_workers == (peers if grad else set())
                for peer in peers:
                    await ag.rpc_async(peer, current_context_id)
                assert ctx.known_workers == peers


async def test_ctx_clear_while_in_use_a_made_up_id_is_an_error(workers):
    async with workers(2), ag.context() as ctx:
        t1, result = leaf(seed=1), leaf(seed=2)
        for _ in range(100):
            result = await ag.rpc_async("worker1", ag.add, args=(t1, result))
        assert len(ctx.send_nodes) == 100
        with pytest.raises(UnknownContext, match="100") as caught:
            await ag.backward(100, [result.sum()])
        assert caught.value.context_id == 100


class Held(ag.Function):
    """Passes its input on; on the way back it waits until the test lets it go."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        OPENED.wait(20)
        return g * 1.0


def held(x: ag.Tensor) -> ag.Tensor:
    return Held.apply(x)


async def test_ctx_clear_while_in_use_ends_the_running_pass(workers):
    async with workers(2):
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", held, args=(leaf(),))
            running = asyncio.create_task(ctx.backward(y.sum()))
            await until(lambda: backward_passes("worker1"))
        with pytest.raises(UnknownContext, match="released while a backward pass ran"):
            await running
        OPENED.set()
        with pytest.raises(UnknownContext):
            await ctx.backward(y.sum())


def slow_leaf() -> ag.Tensor:
    """Computed outside any context, and requiring grad only when that is over."""
    OPENED.wait(20)
    return ag.ones(3, 3).requires_grad_()


def gradient_at_owner(context_id: int, rref: ag.RRef) -> object:
    gradients = ag.get_gradients(context_id)
    return [g.numpy() for t, g in gradients.items() if t is rref.local_value()]


async def test_ctx_thread_continuation_a_fetch_runs_under_the_context_of_the_fetcher(workers):
    async with workers(2):
        rref = ag.remote("worker1", slow_leaf)
        async with ag.context() as ctx:
            fetch = rref.to_here()
            OPENED.set()
            value = await fetch
            await ctx.backward(total(value))
            found = await call("async", "worker1", gradient_at_owner, ctx.id, rref)
            assert len(found) == 1
            assert found[0].tolist() == [[1.0] * 3] * 3
