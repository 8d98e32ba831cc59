"""The current worker of a program: before there is one, several at once, and one after another."""

from __future__ import annotations

import asyncio

import pytest

from aiograd.cluster.api import current_worker, debug_info, get_worker_info, init_rpc, shutdown
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError, WorkerClosed
from aiograd.rpc.api import rpc_async
from aiograd.rpc.directory import WorkerInfo
from aiograd.rpc.options import Options

QUICK = Options(grace=2.0, timeout=10.0, secret=b"0123456789abcdef")


async def who() -> WorkerInfo:
    return get_worker_info()


def test_use_before_init():
    with pytest.raises(WorkerClosed):
        current_worker()
    with pytest.raises(WorkerClosed):
        rpc_async("a", who)
    with pytest.raises(WorkerClosed):
        debug_info()


async def test_init_twice_forbidden():
    await init_rpc("me")
    with pytest.raises(RpcError, match="already"):
        await init_rpc("me too")
    with pytest.raises(RpcError, match="already"):
        await init_rpc("again")
    await shutdown()


async def test_init_after_shutdown(tmp_path):
    for round_number in range(2):
        place = f"unix:{tmp_path}/{round_number}"

        async def run(rank: int, place: str = place) -> WorkerInfo:
            await init_rpc(f"w{rank}", rank=rank, world_size=2, rendezvous=place, options=QUICK)
            answer = await rpc_async(1 - rank, who)
            await shutdown()
            return answer

        assert await asyncio.gather(run(0), run(1)) == [WorkerInfo("w1", 1), WorkerInfo("w0", 0)]


async def test_the_current_worker_is_the_context_s_else_the_last_one_started():
    async with Worker("a") as a:
        assert current_worker() is a
        async with Worker("b") as b:
            assert current_worker() is b
            assert await asyncio.create_task(_name_of_current()) == "b"
        assert current_worker() is a
        assert await rpc_async("a", _name_of_current) == "a"
    with pytest.raises(WorkerClosed):
        current_worker()


async def _name_of_current() -> str:
    return current_worker().name
