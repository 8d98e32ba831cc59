"""Crash points of an election: a fault at every boundary between the loss and the new roster.

One cluster of five loses its coordinator while a newcomer joins. A boundary is the moment before a
callback of a member, or before a member writes to a connection. At one boundary the member whose
turn it is suffers one fault: its process is killed, its host loses power, or it is stopped for a
while. Three of five are left, so there is always a majority, and S1 to S7 have to hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from aiograd.testing.simulator.loop import Owner
from aiograd.testing.simulator.run import dispose, isolated
from aiograd.testing.simulator.schedule import Fault
from aiograd.testing.simulator.succession.plan import Round, SuccessionPlan
from aiograd.testing.simulator.succession.run import OPTIONS, Runner
from aiograd.testing.simulator.world import Node, World

FAULTS: Final = ("crash", "vanish", "pause")
STOPPED: Final = 4.0  # seconds
MEMBERS: Final = 5
# Seconds of an election whose boundaries count: from the loss until all follow, without a fault.
ELECTION: Final = 0.3


@dataclass(frozen=True)
class Point:
    """One fault at one boundary; `at` -1: none."""

    at: int = -1
    fault: str = ""
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.at}:{self.fault}"


@dataclass
class Result:
    """What became of one point."""

    point: Point
    violations: list[str]
    victims: list[str] = field(default_factory=list)  # whose turn it was, at each boundary
    trace: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations


class PointRunner(Runner):
    """One round, in which the coordinator is lost and one more fault happens."""

    late = 2 * ELECTION

    def __init__(self, world: World, point: Point) -> None:
        super().__init__(world, SuccessionPlan(point.seed, MEMBERS, 1))
        self.point = point
        self.victims: list[str] = []
        self._counting = False
        self._over = 0.0  # loop time from which on boundaries do not count
        self._members: frozenset[str] = frozenset()

    def draw(self, number: int, names: list[str], leader: str) -> Round:
        """Lose the coordinator, in the middle of an admission."""
        self.world.loop.boundary, self.world.wire.on_write = self._callback, self._reached
        self._members = frozenset(names)
        fault = Fault(1.0, "crash", leader, amount=1.0, on="cluster.change")
        return Round("crash point", (fault,), joins=(0.0,))

    def happened(self, fault: Fault) -> None:
        """Count from the loss of the coordinator on."""
        if fault.on:
            self._counting, self._over = True, self.world.loop.time() + ELECTION

    def _callback(self, owner: Owner | None) -> None:
        if isinstance(owner, Node):
            self._reached(owner)

    def _reached(self, node: Node) -> None:
        if not self._counting or self.world.loop.time() > self._over or not node.alive:
            return
        if node.name not in self._members:
            return  # a newcomer that has not joined is no part of the election
        self.victims.append(node.name)
        if len(self.victims) == self.point.at + 1:
            self._counting = False
            seconds = STOPPED if self.point.fault == "pause" else 0.0
            # What follows is drawn for this point alone.
            self.world.random = random.Random(str(self.point))
            self._player.happen(Fault(0.0, self.point.fault, node.name, seconds=seconds))


def run_point(point: Point, *, trace: bool = False) -> Result:
    """Run the election with a fault at one boundary, or without."""
    with isolated() as errors:
        world = World(point.seed, options=OPTIONS, trace=trace)
        runner = PointRunner(world, point)
        runner.run_in(world, errors)
        result = Result(point, list(runner.watch.violations), runner.victims, world.trace.lines())
        dispose(world)
        return result


def points(seed: int = 0, share: float = 1.0) -> Iterator[Point]:
    """Yield the points of an election, or a share of them that the seed decides."""
    rng = random.Random(f"{seed} succession points")
    count = len(run_point(Point(seed=seed)).victims)
    for at in range(count):
        for fault in FAULTS:
            if rng.random() < share:
                yield Point(at, fault, seed)
