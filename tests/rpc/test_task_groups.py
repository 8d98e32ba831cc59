"""Calls where task groups want coroutines: the error says what to write."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag


async def test_create_task_of_a_call_says_what_to_write():
    async with ag.LocalCluster(1, processes=False):
        call = ag.rpc_async("worker0", abs, args=(-1,))
        async with asyncio.TaskGroup() as group:
            with pytest.raises(TypeError, match="async def call"):
                group.create_task(call)
            task = group.create_task(waiting(call))
        assert task.result() == 1
        assert "finished" in repr(call)


async def waiting(call):
    return await call


async def test_start_soon_of_a_call_says_what_to_write():
    anyio = pytest.importorskip("anyio")
    group = anyio.create_task_group()
    async with ag.LocalCluster(1, processes=False) as cluster, group:
        with pytest.raises(TypeError, match="async def call"):
            group.start_soon(cluster["worker0"].call, abs, -1)
