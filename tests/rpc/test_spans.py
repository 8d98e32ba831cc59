"""Recordings of calls, and of what they did elsewhere."""

from __future__ import annotations

import asyncio
import json

import pytest

from aiograd.rpc.calls import inline, rpc_async, rpc_sync
from aiograd.rpc.spans import key, record, span


def add(x, y=0):
    return x + y


async def add_later(x, y=0):
    with span("thinking"):
        await asyncio.sleep(0.01)
    return x + y


@inline
def add_inline(x, y=0):
    return x + y


async def hop(x):
    return await rpc_async("worker2", add_later, (x, 1))


def hop_sync(x):
    return rpc_sync("worker2", add, (x, 1))


def boom():
    raise ValueError("boom")


def test_prof_key():
    name = key("call", "f", "a", "b")
    assert all(part in name for part in ("call", "f", "a", "b"))


async def test_prof_calls(agents):
    async with agents(2):
        with record() as spans:
            for func in (add, add_later, add_inline):
                assert await rpc_async("worker1", func, (1,), {"y": 2}) == 3
        for func in (add, add_later, add_inline):
            name = key("call", func.__name__, "worker0", "worker1")
            (call,) = [s for s in spans if s.name == name]
            assert call.worker == "worker0"
            remote = [s for s in spans if s.name == f"{name}/{func.__name__}"]
            assert [s.worker for s in remote] == ["worker1"]
            assert call.start <= remote[0].start
            assert remote[0].seconds <= call.seconds
        assert not any("add" in s.name for s in record_nothing())


def record_nothing():
    with record() as spans:
        pass
    return list(spans)


async def test_prof_remote_events(agents):
    async with agents(2):
        with record() as spans:
            await rpc_async("worker1", add_later, (1,))
        (thinking,) = [s for s in spans if s.name.endswith("/thinking")]
        assert thinking.worker == "worker1"
        assert thinking.seconds >= 0.009
        assert thinking.name.startswith(key("call", "add_later", "worker0", "worker1"))


async def test_prof_async_nested(agents):
    async with agents(3):
        with record() as spans:
            assert await rpc_async("worker1", hop, (1,)) == 2
            assert await rpc_async("worker1", hop_sync, (1,)) == 2
        first = key("call", "hop", "worker0", "worker1")
        second = key("call", "add_later", "worker1", "worker2")
        by_name = {s.name: s for s in spans}
        assert by_name[f"{first}/{second}"].worker == "worker1"
        assert by_name[f"{first}/{second}/add_later"].worker == "worker2"
        assert by_name[f"{first}/{second}/thinking"].worker == "worker2"
        sync = f"{key('call', 'hop_sync', 'worker0', 'worker1')}/"
        assert f"{sync}{key('call', 'add', 'worker1', 'worker2')}/add" in by_name


async def test_parallel_calls_do_not_mix(agents):
    async with agents(3):
        with record() as spans:
            await asyncio.gather(*(rpc_async(f"worker{1 + i % 2}", add, (i,)) for i in range(20)))
        assert len(spans) == 40


async def test_failures_are_noted_and_raised(agents):
    async with agents(2):
        with record() as spans:
            with pytest.raises(ValueError, match="boom"):
                await rpc_async("worker1", boom)
            future = rpc_async("worker1", asyncio.sleep, (60,))
            await asyncio.sleep(0)
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            await asyncio.sleep(0)
        assert [s.error for s in spans] == ["ValueError", "CancelledError"]


async def test_prof_export(agents, tmp_path):
    async with agents(2):
        with record() as spans:
            await rpc_async("worker1", add, (1,))
        spans.save(tmp_path / "trace.json")
        trace = json.loads((tmp_path / "trace.json").read_text())
        names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
        assert len(names) == 2
        assert all("rpc_call#add(worker0 -> worker1)" in name for name in names)
        rows = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
        assert rows == ["worker0", "worker1"]


async def test_nothing_is_recorded_outside(agents):
    async with agents(2):
        with record() as spans:
            pass
        await rpc_async("worker1", add, (1,))
        assert len(spans) == 0


async def test_ops_are_noted_at_the_caller(agents):
    def double(x):
        return 2 * x

    double.op_name = "double"
    async with agents(2, ops={"double": double}):
        with record() as spans:
            assert await rpc_async("worker1", double, (2,)) == 4
        assert [s.name for s in spans] == [key("op", "double", "worker0", "worker1")]
