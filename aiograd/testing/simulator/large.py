"""A large cluster in one simulation: hundreds of workers join, work together, die and rest.

    python -m aiograd.testing.simulator.large 1000

Unlike `run`, the cluster layer's own `Member` and `Coordinator` decide who is a member, so what is
counted here is what a real cluster of that size sends: all newcomers join at once, the first one
calls all others, a backward pass goes over some of them, some die at the same moment, another pass
runs, and then nobody does anything for a while. Whatever goes wrong raises AssertionError.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aiograd.autograd.creation import ones
from aiograd.autograd.ops.elementwise import multiply
from aiograd.cluster.membership.coordinator import Coordinator
from aiograd.cluster.membership.member import Member
from aiograd.dist.registry import context
from aiograd.errors import WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options
from aiograd.testing.simulator.run import dispose, isolated
from aiograd.testing.simulator.world import Node, World

IDLE: Final = 10.0  # seconds without use after which connections sleep, so that a run sees it
JOIN: Final = 120.0  # seconds that newcomers wait
NOTICE: Final = 1.5  # seconds within which all living members know of a death


@dataclass
class Figures:
    """What one run of a large cluster took."""

    workers: int
    join_seconds: float = 0.0  # simulated, until all know all
    loss_seconds: float = 0.0  # simulated, from the deaths until all living members know them
    joined_connections: int = 0  # in all, when all had joined
    working_connections: int = 0  # after a fan-out and a pass
    resting_connections: int = 0  # when nobody had done anything for long
    join_bytes: int = 0  # written by all workers
    resting_bytes: int = 0  # written by all workers within a minute of rest
    cpu: dict[str, float] = field(default_factory=dict)  # real seconds of this process, by phase


class LargeCluster:
    """The members of one simulated cluster. The first one is the coordinator."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.names: list[str] = [f"worker{rank}" for rank in range(count)]
        self.members: dict[str, Member] = {}
        self.figures: Figures = Figures(count)
        self._written = 0

    async def run(self, participants: int, deaths: int) -> None:
        """Let the cluster live its life, phase by phase."""
        draw = random.Random(f"{self.world.seed} large")
        figures = self.figures
        await self._phase("join", self._join)
        figures.join_seconds, figures.join_bytes = self.world.loop.time(), self._bytes()
        figures.joined_connections = len(self.world.wire.connections)
        others = self.names[1:]
        first = self.world.nodes[self.names[0]]
        await self._phase("fan-out", lambda: first.spawn(_fan_out(others)))
        chosen = draw.sample(others, participants)
        await self._phase("pass", lambda: first.spawn(_pass_over(chosen)))
        figures.working_connections = len(self.world.wire.connections)
        dead = draw.sample(others, deaths)
        await self._phase("deaths", lambda: self._deaths(dead))
        living = [name for name in others if name not in dead]
        await self._phase("calls to the dead", lambda: first.spawn(_all_lost(dead)))
        chosen = draw.sample(living, participants)
        # From an ordinary member, which has to connect to all of them first.
        member = self.world.nodes[living[0]]
        await self._phase("second pass", lambda: member.spawn(_pass_over(chosen)))
        await self._phase("rest", self._rest)

    async def _phase(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        began = time.process_time()
        await work()
        self.figures.cpu[name] = time.process_time() - began

    async def _join(self) -> None:
        first = await self.world.start_alone(self.names[0], 0)
        address = first.agent.info.addresses[0]
        member = self.members[first.name] = Member(first.agent, None)
        await first.spawn(Coordinator(member).start(JOIN))
        nodes = [
            await self.world.start_alone(name, rank)
            for rank, name in enumerate(self.names[1:], start=1)
        ]
        joins = [node.spawn(self._join_one(node, address)) for node in nodes]
        for join in joins:
            await join
        for name in self.names:
            known = len(self.members[name].roster.members)
            assert known == len(self.names), f"{name} knows {known} of {len(self.names)} members"

    async def _join_one(self, node: Node, address: str) -> None:
        coordinator = await node.agent.connect(address)
        node.agent.directory.add(coordinator)
        member = self.members[node.name] = Member(node.agent, None, coordinator)
        await member.join(JOIN)

    async def _deaths(self, dead: Sequence[str]) -> None:
        began = self.world.loop.time()
        for name in dead:
            self.world.crash(name)
        while any(
            name in self.members[node.name].roster.members
            for node in self.world.living
            for name in dead
        ):
            passed = self.world.loop.time() - began
            assert passed < NOTICE, f"a member does not know of the deaths after {passed:.2f} s"
            await asyncio.sleep(0.01)
        self.figures.loss_seconds = self.world.loop.time() - began

    async def _rest(self) -> None:
        figures = self.figures
        await asyncio.sleep(4 * IDLE)
        figures.resting_connections = len(self.world.wire.connections)
        before = self._bytes()
        await asyncio.sleep(60.0)
        figures.resting_bytes = self._bytes() - before
        # One for each living member, at which the coordinator sees its end; no other one.
        assert figures.resting_connections == len(self.world.living) - 1

    def _bytes(self) -> int:
        return sum(
            link.session.sent for node in self.world.living for link in node.agent.links.all()
        )


async def _fan_out(names: Sequence[str]) -> None:
    found = await asyncio.gather(
        *[rpc_async(name, _double, (rank,)) for rank, name in enumerate(names)]
    )
    assert found == [2 * rank for rank in range(len(names))]


async def _double(x: int) -> int:
    return 2 * x


async def _pass_over(names: Sequence[str]) -> None:
    """Run a backward pass over all of these; the gradient is exact."""
    async with context() as ctx:
        x = ones(3, requires_grad=True)
        calls = [rpc_async(name, multiply, (x, float(i))) for i, name in enumerate(names)]
        total: Any = x * 0.0
        for part in await asyncio.gather(*calls):
            total = total + part
        await ctx.backward(total.sum())
        expected = np.full(3, float(sum(range(len(names)))))
        assert np.array_equal(np.asarray(ctx.gradients[x]), expected)


async def _all_lost(names: Sequence[str]) -> None:
    found = await asyncio.gather(
        *[rpc_async(name, _double, (1,)) for name in names], return_exceptions=True
    )
    assert all(isinstance(each, WorkerLost) for each in found), found


def run_large(count: int, *, participants: int = 50, deaths: int = 20, seed: int = 0) -> Figures:
    """Simulate a cluster of `count` workers; AssertionError if anything goes wrong."""
    with isolated() as errors:
        world = World(seed, options=Options(secret=None, lease=2.0, idle=IDLE))
        cluster = LargeCluster(world, count)
        try:
            world.loop.run_until_complete(cluster.run(participants, deaths))
            assert not errors.messages, errors.messages[:3]
            return cluster.figures
        finally:
            dispose(world)


def main() -> None:
    """Run as a command: print the figures of one size."""
    parser = argparse.ArgumentParser(description="simulate a large cluster")
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--participants", type=int, default=50)
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    figures = run_large(
        given.count, participants=given.participants, deaths=given.deaths, seed=given.seed
    )
    for name, value in vars(figures).items():
        if name != "cpu":
            text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            sys.stdout.write(f"{name:24} {text:>14}\n")
    for phase, seconds in figures.cpu.items():
        sys.stdout.write(f"cpu of {phase:17} {seconds:12.2f} s\n")


if __name__ == "__main__":
    main()
