"""F7: connections are cut at any byte. F10: a user is cut off from an owner, and returns.

Two worker processes whose connections lead through proxies of the test.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import OwnerLost, RRefExpired
from aiograd.rpc.agent import current_agent
from aiograd.rref.registry import RRefs
from aiograd.testing.chaos_proxy import Proxy
from aiograd.testing.fault_injection import Faults
from tests.failures.conftest import PACE
from tests.failures.test_references_of_dead_workers import keep, owned, use_kept
from tests.failures.work import echo, now, outcome
from tests.support.waiting import until_not

CUTS = 30
ORDER: list[int] = []


@ag.inline
def detour(name: str, address: str) -> None:
    """Connect to a worker at this address only."""
    directory = current_agent().directory
    peer = directory.get(name)
    assert peer is not None
    directory.add(replace(peer, addresses=(address,)))


@asynccontextmanager
async def proxies(cluster: ag.LocalCluster, folder) -> AsyncIterator[list[Proxy]]:
    """Proxies between worker0 and worker1, one for each direction of dialling."""
    directory = cluster.driver.agent.directory
    places = [directory.get(f"worker{rank}").addresses[0] for rank in (0, 1)]
    async with (
        Proxy(f"unix:{folder}/0", places[1]) as there,
        Proxy(f"unix:{folder}/1", places[0]) as back,
    ):
        await ag.rpc_async("worker0", detour, ("worker1", there.address))
        await ag.rpc_async("worker1", detour, ("worker0", back.address))
        yield [there, back]


@ag.inline
def note(number: int) -> int:
    ORDER.append(number)
    return number


@ag.inline
def noted() -> list[int]:
    return list(ORDER)


@ag.inline
def send_twice() -> None:
    """Send each call twice from now on."""
    current_agent().fault_injector = Faults(fail={}, duplicate=["call"])


async def chat(to: str, numbers: range, sizes: list[int]) -> None:
    """Make small calls between large ones, and check every result."""

    async def ask(func, argument):
        answer = await ag.rpc_async(to, func, (argument,))
        assert np.array_equal(answer, argument)

    large = [ask(echo, np.arange(size, dtype=np.float64)) for size in sizes]
    await asyncio.gather(*large, *(ask(note, number) for number in numbers))


@pytest.mark.deadline(60)
async def test_f7_calls_run_once_and_in_order_however_connections_are_cut(
    cluster, figure, tmp_path
):
    source = random.Random(7)
    async with cluster(2) as c, proxies(c, tmp_path) as ways:
        await ag.rpc_async("worker0", chat, ("worker1", range(1), []))
        await ag.rpc_async("worker0", send_twice)
        for proxy in ways:
            proxy.budget = lambda: int(10 ** source.uniform(2.5, 6.0))
            proxy.cut()
        made = 1
        while sum(proxy.cuts for proxy in ways) < CUTS:
            sizes = [source.choice((10_000, 100_000)) for _ in range(3)]
            numbers = range(made, made + 50)
            await ag.rpc_async("worker0", chat, ("worker1", numbers, sizes))
            made = numbers.stop
        order = await ag.rpc_async("worker1", noted)
        assert order == list(range(made))
        runs = Counter(order)
        figure("F7", f"{CUTS} cuts at any byte: how often a call runs", 1, max(runs.values()), "×")


@pytest.mark.deadline(60)
async def test_f10_references_of_a_disconnected_user_are_freed_for_good(cluster, figure, tmp_path):
    async with cluster(2, resume=3.0 / PACE) as c, proxies(c, tmp_path) as ways:
        reference = ag.remote("worker0", float, (7,))
        await ag.rpc_async("worker1", keep, (reference,))
        assert await ag.rpc_async("worker1", use_kept) == 7.0
        await reference.release()
        assert await owned("worker0") == 1
        for proxy in ways:
            proxy.silent = True
            proxy.cut()
        cut = now()
        await until_not(lambda: owned("worker0"), 60.0)
        figure("F10", "a user is cut off: its references freed", 16.0 / PACE, now() - cut)
        for proxy in ways:
            proxy.silent = False
        other = ag.remote("worker0", float, (8,))
        assert await other == 8.0
        # The session of the two is lost for good: the use raises, and never gets another value.
        error, _ = await outcome(ag.rpc_async("worker1", use_kept))
        assert isinstance(error, OwnerLost)
        assert error.worker == "worker0"


@ag.inline
def take_for_gone(name: str) -> None:
    """Let the lease of a worker expire although it is still connected."""
    agent = current_agent()
    protocol = agent.parts[RRefs].protocol
    protocol.lease_over(protocol.lost(agent.directory.find(name)))


async def test_f10_a_user_that_returns_after_its_lease_gets_rref_expired(cluster, figure):
    async with cluster(2):
        reference = ag.remote("worker0", float, (7,))
        await ag.rpc_async("worker1", keep, (reference,))
        await reference.release()
        await ag.rpc_async("worker0", take_for_gone, ("worker1",))
        assert await owned("worker0") == 0
        other = ag.remote("worker0", float, (8,))
        assert await other == 8.0
        began = now()
        error, when = await outcome(ag.rpc_async("worker1", use_kept))
        assert isinstance(error, RRefExpired)
        assert error.worker == "worker0"
        figure("F10", "… a user that returns: `RRefExpired`", 0.5, when - began)
