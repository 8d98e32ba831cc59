"""Connections that sleep, in virtual time: calls that cross the agreement, and faults meanwhile."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.errors import WorkerLost
from aiograd.rpc import scope
from aiograd.rpc.options import Options
from aiograd.testing.simulator import Fault, simulate

BEAT = 0.05
SLEEPY = Options(secret=None, heartbeat=BEAT, idle=4 * BEAT)
RUNS: dict[str, int] = {}


async def count(key: str) -> int:
    RUNS[key] = RUNS.get(key, 0) + 1
    return RUNS[key]


def link_to(name: str):
    return scope.current().link(name)


async def asleep(world, name: str) -> None:
    """Wait until the link between the driver and a worker sleeps at both ends."""
    here, there = link_to(name), world.nodes[name].agent.link("driver")
    while not (here.is_asleep and there.is_asleep):
        await asyncio.sleep(BEAT / 10)


@pytest.mark.parametrize("seed", range(25))
def test_a_call_at_any_moment_of_the_agreement_runs_once(seed: int) -> None:
    """The calls of both sides come closer and closer to the agreement, and behind it."""
    RUNS.clear()

    async def program(world) -> None:
        lost = []
        for node in world.nodes.values():
            node.agent.lost.append(lambda peer, error: lost.append(peer.name))
        worker = world.nodes["worker0"]
        assert await ag.rpc_async("worker0", count, ("first",)) == 1
        for step in range(40):
            link = link_to("worker0")
            while not (link.resting or link.is_asleep):
                await asyncio.sleep(BEAT / 10)
            # The proposal leaves some beats after the link rests; one trip takes 0.5 to 1 ms.
            await asyncio.sleep(world.random.uniform(0.0, 5 * BEAT))
            link.propose_sleep()
            await asyncio.sleep(step * 0.0001)
            there = ag.rpc_async("worker0", count, (f"there {step}",))
            back = worker.spawn(_call_back(f"back {step}"))
            assert await there == await back == 1
        assert lost == []

    simulate(program, seed=seed, workers=1, options=SLEEPY)
    assert set(RUNS.values()) == {1}


async def _call_back(key: str) -> int:
    return await ag.rpc_async("driver", count, (key,))


@pytest.mark.parametrize("kind", ["crash", "vanish"])
def test_a_worker_that_dies_asleep_is_lost_to_the_next_call(kind: str) -> None:
    async def program(world) -> float:
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1
        await asleep(world, "worker0")
        world.crash("worker0", silent=kind == "vanish")
        await asyncio.sleep(20.0)  # nobody needs it, nobody misses it
        assert link_to("worker0").is_asleep
        began = world.loop.time()
        with pytest.raises(WorkerLost) as caught:
            await ag.rpc_async("worker0", abs, (-1,))
        assert caught.value.executed == "no"
        return world.loop.time() - began

    took = simulate(program, workers=1, options=SLEEPY)
    assert took < (1.0 if kind == "crash" else 12.0)


def test_a_worker_that_dies_asleep_and_comes_back_is_called_in_a_new_session() -> None:
    async def program(world) -> None:
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1
        await asleep(world, "worker0")
        world.crash("worker0")
        await world.restart("worker0", told=0.0)
        await asyncio.sleep(0.01)
        assert await ag.rpc_async("worker0", abs, (-2,)) == 2

    simulate(program, workers=1, options=SLEEPY)


@pytest.mark.parametrize("seconds", [1.5, 30.0])
def test_a_partition_that_begins_and_ends_asleep_is_not_noticed(seconds: float) -> None:
    cut = Fault(5.0, "cut", "driver", "worker0", seconds=seconds)

    async def program(world) -> None:
        lost = []
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1
        await asleep(world, "worker0")
        for node in world.nodes.values():
            node.agent.lost.append(lambda peer, error: lost.append(peer.name))
        await asyncio.sleep(5.0 + seconds + 1.0)
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1
        assert lost == []

    simulate(program, workers=1, options=SLEEPY, faults=[cut])


def test_a_call_in_a_short_partition_of_sleeping_workers_waits_for_its_end() -> None:
    cut = Fault(5.0, "cut", "driver", "worker0", seconds=1.5)

    async def program(world) -> None:
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1
        await asleep(world, "worker0")
        await asyncio.sleep(5.2 - world.loop.time())
        assert await ag.rpc_async("worker0", abs, (-1,)) == 1

    simulate(program, workers=1, options=SLEEPY, faults=[cut])


def test_a_dead_holder_of_references_is_noticed_because_its_link_never_sleeps() -> None:
    """The owner frees what a dead user held when the lease is over, as without sleep."""

    async def program(world) -> None:
        ref = ag.remote("worker0", list)
        await ref.future()
        user = world.nodes["worker1"]
        held = user.spawn(_hold("worker0"))
        await held
        await asyncio.sleep(5.0)
        assert world.nodes["worker0"].agent.link("worker1").is_open
        owned = world.nodes["worker0"].counters
        assert owned()["owner_rrefs"] == 2
        world.crash("worker1")
        await asyncio.sleep(12.0)
        assert owned()["owner_rrefs"] == 1
        del ref

    simulate(program, workers=2, options=SLEEPY)


HELD: list[object] = []


async def _hold(owner: str) -> None:
    ref = ag.remote(owner, list)
    await ref.future()
    HELD.append(ref)
