"""Connections cut at random bytes under traffic: calls run exactly once, every value is right.

`make cuts N=1000` cuts more often; AIOGRAD_SEED gives other places to cut at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import trustme

from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.testing.chaos_proxy import Proxy
from tests.support.agents import SECRET
from tests.support.certificates import issue

CUTS = int(os.environ.get("AIOGRAD_CUTS", "50"))
SEED = int(os.environ.get("AIOGRAD_SEED", "0"))
RUNS: Counter[int] = Counter()


async def once(id, value, seconds):
    RUNS[id] += 1
    await asyncio.sleep(seconds)
    return value


def once_in_a_thread(id, value, seconds):
    RUNS[id] += 1
    return value


async def several(id, numbers):
    RUNS[id] += 1
    for number in range(numbers):
        yield number


class Traffic:
    """Calls of all kinds from one worker to another, until enough was cut."""

    def __init__(self, agent: Agent, to: str, rng: random.Random, ids: list[int]) -> None:
        self.agent, self.to, self.random, self.ids = agent, to, rng, ids

    async def run(self, proxy: Proxy) -> None:
        while proxy.cuts < CUTS:
            self.ids.append(id := len(self.ids))
            await self.random.choice((self.small, self.small, self.large, self.stream))(id)

    async def small(self, id: int) -> None:
        func = self.random.choice((once, once_in_a_thread))
        seconds = self.random.choice((0.0, 0.0, 0.001, 0.02))
        assert await self.agent.call(self.to, func, (id, id, seconds)) == id

    async def large(self, id: int) -> None:
        array = np.arange(self.random.choice((9_000, 40_000, 300_000)), dtype=np.float64) + id
        assert np.array_equal(await self.agent.call(self.to, once, (id, array, 0.0)), array)

    async def stream(self, id: int) -> None:
        got = [number async for number in self.agent.stream(self.to, several, (id, 30))]
        assert got == list(range(30))


def offset(rng: random.Random) -> int:
    """Bytes until the cut: now and then within the handshake, else anywhere."""
    return rng.randint(1, 700) if rng.random() < 0.2 else int(10 ** rng.uniform(2.9, 6.2))


@pytest.mark.deadline(60 + CUTS)
@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
async def test_calls_run_exactly_once_however_often_connections_are_cut(kind, tmp_path):
    RUNS.clear()
    rng = random.Random(f"{SEED} {kind}")
    authority = trustme.CA() if kind == "tls" else None
    agents = []
    for i in range(2):
        tls = issue(authority, tmp_path, f"worker{i}") if authority else None
        agents.append(Agent(f"worker{i}", i, secret=SECRET, options=Options(tls=tls)))
    a, b = agents
    lost: list[str] = []
    for i, agent in enumerate(agents):
        agent.lost.append(lambda peer, error: lost.append(f"{peer.name}: {error}"))
        await agent.start(f"unix:{tmp_path}/{i}" if kind == "unix" else "tcp:127.0.0.1:0")
    address = f"unix:{tmp_path}/proxy" if kind == "unix" else "tcp:127.0.0.1:0"
    async with contextlib.AsyncExitStack() as stack:
        for agent in agents:
            stack.push_async_callback(agent.close)
        proxy = await stack.enter_async_context(Proxy(address, b.info.addresses[0]))
        a.directory.add(replace(b.info, addresses=(proxy.address,)))
        b.directory.add(a.info)
        assert await a.call("worker1", once, (-1, 1, 0.0)) == 1
        proxy.budget = lambda: offset(rng)
        proxy.cut()
        ids: list[int] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(Traffic(a, "worker1", rng, ids).run(proxy))
                group.create_task(Traffic(b, "worker0", rng, ids).run(proxy))
        assert Counter(ids) + Counter([-1]) == RUNS
        assert lost == []
        assert proxy.cuts >= CUTS
        for agent in agents:
            assert not any(agent.links.counters().values())
            assert agent.budget.used == 0
