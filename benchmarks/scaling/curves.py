"""The curves: each measures one cost at one size, in a process of its own.

    python benchmarks/scaling/curves.py contexts 1000

prints the figures as JSON: cost per unit of work, so that a flat row is linear growth. Costs are
CPU time of the process, best of a few rounds where a round is cheap. Workers share its loop, unless
a curve is about processes, so that both ends of every message are counted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.cluster.processes.malloc import collect_less_often
from aiograd.errors import UnknownContext
from aiograd.rpc.agent import Agent

Figures = dict[str, float]


@dataclass(frozen=True)
class Curve:
    """One cost that must not grow faster than the work."""

    title: str
    measure: Callable[[int], Awaitable[Figures]]
    sizes: tuple[int, ...]
    goals: dict[str, float]  # figure → how many times its smallest value the largest may be
    most: dict[str, float]  # figure → its largest value at the largest size


CURVES: dict[str, Curve] = {}


def curve(title: str, *sizes: int, most: dict[str, float] | None = None, **goals: float) -> Any:
    """Register a curve under the name of its function."""

    def register(measure: Callable[[int], Awaitable[Figures]]) -> Any:
        CURVES[measure.__name__] = Curve(title, measure, sizes, goals, most or {})
        return measure

    return register


class Stopwatch:
    """CPU microseconds of this process since it was made, per unit of work."""

    def __init__(self) -> None:
        self._began = time.process_time()

    def per(self, count: int) -> float:
        return (time.process_time() - self._began) / count * 1e6


@curve("contexts open at once, each with a call: µs each", 500, 2000, 8000, pass_close=2.0)
async def contexts(count: int) -> Figures:
    """Open contexts, call in each; then run a pass in each, all at once, and leave it."""
    async with ag.LocalCluster(1, processes=False):
        x = ag.ones(3, requires_grad=True)
        opened = []
        watch = Stopwatch()
        for _ in range(count):
            ctx = ag.context()
            with ctx.active():
                opened.append((ctx, await ag.rpc_async("worker0", ag.mul, args=(x, 2.0))))
        forward, watch = watch.per(count), Stopwatch()
        await asyncio.gather(*[_finish(ctx, y) for ctx, y in opened])
        await _settled(opened[-1][0].id)
        return {"open_call": forward, "pass_close": watch.per(count)}


async def _finish(ctx: Any, y: Any) -> None:
    await ctx.backward(y.sum())
    await ctx.release()


async def _settled(context_id: int) -> None:
    """Wait until the worker has released the last context."""
    while True:
        if not await ag.rpc_async("worker0", _knows, args=(context_id,)):
            return


def _knows(context_id: int) -> bool:
    try:
        ag.get_context(context_id)
    except UnknownContext:
        return False
    return True


def _joined(join: Callable[[Any], Any], count: int) -> Figures:
    best = {"forward": float("inf"), "backward": float("inf")}
    for _ in range(3):
        xs = [ag.ones(3, requires_grad=True) for _ in range(count)]
        watch = Stopwatch()
        y = join(xs).sum()
        best["forward"] = min(best["forward"], watch.per(count))
        watch = Stopwatch()
        y.backward()
        best["backward"] = min(best["backward"], watch.per(count))
        assert np.array_equal(xs[-1].grad.data, np.ones(3))
    return best


@curve("stack of many tensors: µs each", 500, 2000, 8000, backward=2.0)
async def stack(count: int) -> Figures:
    """Backward through a stack."""
    return _joined(ag.stack, count)


@curve("concatenation of many tensors: µs each", 500, 2000, 8000, backward=2.0)
async def concatenate(count: int) -> Figures:
    """Backward through a concatenation."""
    return _joined(ag.concatenate, count)


@curve("calls in flight, the limit is 1,024: µs each", 256, 1000, 4000, 20_000, per_call=1.25)
async def inflight(count: int) -> Figures:
    """Start many calls at once, and wait for all."""
    async with ag.LocalCluster(1, processes=False):
        best = float("inf")
        for _ in range(max(3, 40_000 // count)):
            watch = Stopwatch()
            await asyncio.gather(
                *[ag.rpc_async("worker0", _plus, (1.0, 2.0)) for _ in range(count)]
            )
            best = min(best, watch.per(count))
        return {"per_call": best}


async def _plus(a: float, b: float) -> float:
    return a + b


@curve("memory of link ends at rest: KB each", 16, 32, 48, most={"per_end": 25.0})
async def links(count: int) -> Figures:
    """Connect workers of one process all to all, over Unix sockets."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        agents = await _mesh(stack, [f"unix:{folder}/{i}" for i in range(count)])
        gc.collect()
        before = _resident()
        for agent in agents:
            await asyncio.gather(*[_call(agent, each.name) for each in agents if each is not agent])
        gc.collect()
        return {"per_end": (_resident() - before) / (count * (count - 1))}


async def _mesh(stack: AsyncExitStack, addresses: list[str]) -> list[Agent]:
    """Start workers in this process that know each other, and have no connections so far."""
    agents = []
    for rank, address in enumerate(addresses):
        agent = Agent(f"worker{rank}", rank, secret=bytes(range(32)))
        stack.push_async_callback(agent.close)
        await agent.start(address)
        agents.append(agent)
    for agent in agents:
        for other in agents:
            agent.directory.add(other.info)
    return agents


async def _call(agent: Agent, name: str) -> None:
    await agent.call(name, _plus, (1.0, 2.0))


def _resident() -> float:
    """Return the kilobytes of memory that this process alone uses."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(float(line.split()[1]) for line in rollup.splitlines() if "Private_" in line)


@curve(
    "all call all at once: pairs lost, CPU ms each", 16, 32, 64, 110, most={"lost": 0.0}, cpu=3.0
)
async def mesh(count: int) -> Figures:
    """Start processes, and let each call all others at the same time."""
    async with ag.LocalCluster(count) as cluster:
        names = [f"worker{i}" for i in range(count)]
        group = ag.Group(cluster)
        before = sum(await group.call(time.process_time))
        began = time.perf_counter()
        lost = await group.call(_greet, names)
        seconds = time.perf_counter() - began
        spent = sum(await group.call(time.process_time)) - before
        return {
            "lost": float(sum(lost)),
            "seconds": seconds,
            "cpu": spent / (count * (count - 1)) * 1e3,
        }


async def _greet(names: list[str]) -> int:
    """Call all others at once; return how many could not be called."""
    me = ag.get_worker_info().name
    calls = [ag.rpc_async(name, _plus, (1.0, 2.0)) for name in names if name != me]
    found = await asyncio.gather(*calls, return_exceptions=True)
    return sum(isinstance(each, Exception) for each in found)


@curve("a chain of additions: µs each", 1000, 10_000, 100_000, 300_000, forward=1.6, backward=1.6)
async def tape(count: int) -> Figures:
    """Record and play back additions; with Python's own thresholds, beside it."""
    found = {}
    for name, thresholds in (("", gc.get_threshold()), ("_default", (700, 10, 10))):
        gc.set_threshold(*thresholds)
        forward = backward = float("inf")
        for _ in range(3):
            x = y = ag.ones(3, requires_grad=True)
            watch = Stopwatch()
            for _ in range(count):
                y = y + x
            forward, watch = min(forward, watch.per(count)), Stopwatch()
            y.sum().backward()
            backward = min(backward, watch.per(count))
        found |= {f"forward{name}": forward, f"backward{name}": backward}
    return found


@curve("joining: CPU ms of the protocol per worker, in one loop", 16, 32, 64, 128, cpu=2.2)
async def joins(count: int) -> Figures:
    """Start workers in one loop, all at once, until the first one can call all."""
    watch = Stopwatch()
    async with ag.LocalCluster(count, processes=False) as cluster:
        await ag.Group(cluster).call(ag.get_worker_info)
        return {"cpu": watch.per(count) / 1e3}


@curve("starting processes: ms per worker until all are called", 64, 128, wall=1.1)
async def start(count: int) -> Figures:
    """Start a cluster of processes."""
    began = time.perf_counter()
    async with ag.LocalCluster(count) as cluster:
        await ag.Group(cluster).call(ag.get_worker_info)
        wall = (time.perf_counter() - began) / count * 1e3
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": (spent.ru_utime + spent.ru_stime) / count * 1e3}


@curve("an idle cluster: % of a core, all processes", 16, 64, most={"star": 1.0, "met": 1.0})
async def idle(count: int) -> Figures:
    """Start processes and do nothing: called by the driver only, and after all have met all."""
    async with ag.LocalCluster(count, options=ag.Options(idle=10.0)) as cluster:
        group = ag.Group(cluster)
        processes = [*await group.call(os.getpid), os.getpid()]
        await asyncio.sleep(8.0)  # until links rest
        star = await _load(processes)
        await group.call(_greet, [f"worker{i}" for i in range(count)])
        await asyncio.sleep(25.0)  # until links to workers sleep
        return {"star": star, "met": await _load(processes)}


async def _load(processes: list[int], seconds: float = 30.0) -> float:
    """Return the CPU time of processes in per cent of a core, without disturbing them."""
    before = sum(map(_cpu_seconds, processes))
    await asyncio.sleep(seconds)
    return (sum(map(_cpu_seconds, processes)) - before) / seconds * 100


def _cpu_seconds(process: int) -> float:
    """Return the time that all threads of a process have run, by the kernel's own clock."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(float((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


if __name__ == "__main__":
    name, size = sys.argv[1], int(sys.argv[2])
    collect_less_often()  # as in every worker process; `tape` measures the difference
    print(json.dumps(asyncio.run(CURVES[name].measure(size))))  # type: ignore[arg-type]
