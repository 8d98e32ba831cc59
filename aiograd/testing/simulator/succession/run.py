"""Run one seed of a succession: its rounds of faults, and what must hold after each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aiograd.cluster.membership.election import ELECTION
from aiograd.rpc.extension import FaultAction
from aiograd.rpc.options import Options
from aiograd.testing.simulator.loop import SimulationError
from aiograd.testing.simulator.run import Errors, dispose, isolated
from aiograd.testing.simulator.schedule import LATER, SHORT, Fault, Player
from aiograd.testing.simulator.succession.cluster import Cluster, Seat
from aiograd.testing.simulator.succession.plan import Round, SuccessionPlan
from aiograd.testing.simulator.world import Node, World

AGREE: Final = 10.0  # seconds after the last fault, in which those that are left agree
STAY: Final = 3.0  # seconds for which they then go on to agree
TRIGGERED: Final = 9.0  # seconds in which messages may trigger the faults of a round
LOOK: Final = 0.1  # seconds between two looks
DEATHS: Final = frozenset({"crash", "vanish"})
# Few seconds of idleness: in some rounds connections sleep before the faults begin.
OPTIONS: Final = Options(secret=None, lease=2.0, idle=8.0, timeout=20.0)


@dataclass
class Report:
    """The result of one seed."""

    plan: SuccessionPlan
    violations: list[str]
    digest: str
    trace: list[str]
    rounds: list[str] = field(default_factory=list)  # kinds, with what became of the cluster
    terms: int = 0  # coordinators that there were, besides the first one
    seconds: float = 0.0  # simulated

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations

    def __str__(self) -> str:
        lines = [
            f"seed {self.plan.seed}: {'ok' if self.ok else 'FAILED'}  ({self.plan.members} members,"
            f" {self.terms} successors, {self.seconds:.0f} simulated s)"
        ]
        lines += [f"  {text}" for text in (*self.rounds, *self.violations[:10])]
        return "\n".join(lines)


def run(plan: SuccessionPlan, *, trace: bool = False) -> Report:
    """Simulate one plan; `trace` keeps all events, instead of the last 50."""
    with isolated() as errors:
        world = World(plan.seed, options=OPTIONS, trace=trace)
        runner = Runner(world, plan)
        runner.run_in(world, errors)
        report = Report(
            plan,
            list(runner.watch.violations),
            world.trace.digest,
            world.trace.lines(),
            runner.rounds,
            len(runner.watch.leaders) - 1,
            world.loop.time(),
        )
        dispose(world)
        return report


class Runner:
    """Plays the rounds of one plan."""

    # Seconds after which no fault comes any more: what a message triggers comes a little later.
    late: float = 2 * LATER

    def __init__(self, world: World, plan: SuccessionPlan) -> None:
        self.world, self.plan = world, plan
        self.cluster: Cluster = Cluster(world)
        self.watch = self.cluster.watch
        self.rounds: list[str] = []
        self._player = Player(world, [])
        self._happened: list[Fault] = []
        self._newcomers = 0
        # Set before the first worker starts: an injector is plugged in then.
        world.on_send = self._on_send

    def _on_send(self, node: Node, kind: str, to: str) -> FaultAction:
        return self._player.message(node.name, kind)

    def run_in(self, world: World, errors: Errors) -> None:
        """Run everything, and take what was logged as an error for a violation."""
        try:
            task = world.loop.create_task(self.run(), context=world.context)
            world.loop.run_until_complete(task)
        except SimulationError as error:
            self.watch.violated("S5", str(error))
        for text in (*errors.messages, *world.loop.troubles):
            self.watch.violated("S5", f"an error that nobody expects: {text}"[:600])

    def draw(self, number: int, names: list[str], leader: str) -> Round:
        """Draw the next round."""
        return self.plan.draw_round(number, names, leader)

    def happened(self, fault: Fault) -> None:
        """Note that a fault happens now."""

    async def run(self) -> None:
        """Let the cluster live through all rounds."""
        names = [f"m{i}" for i in range(self.plan.members)]
        await self.cluster.start(names)
        await self._agree(names, exactly=True)
        for number in range(self.plan.rounds):
            seats = sorted(self.cluster.members(), key=lambda seat: seat.node.rank)
            if len(seats) < 3 or self.watch.violations:
                break
            leader = seats[0].member.leader.name
            drawn = self.draw(number, [seat.name for seat in seats], leader)
            if number % 2:
                await asyncio.sleep(20.0)  # connections that nobody needs sleep by then
            await self._play(drawn, leader, [seat.name for seat in seats])
        await self.cluster.stop()

    # ── one round ───────────────────────────────────────────────────────────────────────────────

    async def _play(self, drawn: Round, leader: str, names: list[str]) -> None:
        began, loop = self.world.loop.time(), self.world.loop
        self.world.trace("round", drawn.kind, leader, *map(str, drawn.faults))
        faults = [
            fault if fault.on else replace(fault, at=fault.at + began) for fault in drawn.faults
        ]
        self._player = player = Player(self.world, faults)
        self._happened = happened = []
        happen = player.happen

        def note(fault: Fault) -> None:
            happened.append(replace(fault, at=loop.time()))
            happen(fault)
            self.happened(fault)

        player.happen = note  # type: ignore[method-assign]
        self.watch.on_lead = lambda name: self._check_side(name, drawn, leader, len(names))
        joins = [
            loop.create_task(self._come_later(at, names), context=self.world.context)
            for at in drawn.joins
        ]
        await player.play()
        await self._until(lambda: not player.waiting, TRIGGERED if player.waiting else 0.0)
        player.stop()
        await asyncio.sleep(self.late)
        must = self._must_stay(drawn, leader, names)
        last = max([fault.at for fault in happened], default=began)
        ended = max([fault.at + fault.seconds for fault in happened], default=began)
        if ended - last > AGREE:
            # The larger side does not wait for the smaller one.
            await self._agree(must, exactly=False, until=last + AGREE)
        await asyncio.sleep(max(0.0, ended - loop.time()))
        for join in joins:
            await join
        # Where no majority is left, members look for one before they leave.
        patience = AGREE if must else AGREE + ELECTION
        await self._agree(must, exactly=True, until=max(loop.time(), ended + patience))
        self.watch.on_lead = None
        left = len(self.cluster.members())
        self.rounds.append(
            f"{drawn.kind}: " + "; ".join(map(str, happened)) + f" -> {left} members"
        )
        if left and not self.watch.violations:
            await self._recover(names)

    def _check_side(self, name: str, drawn: Round, leader: str, count: int) -> None:
        """Check S4, when a worker begins to lead."""
        cut = next((fault for fault in self._happened if fault.kind == "cut"), None)
        now = self.world.loop.time()
        for side in drawn.sides:
            # Half of the members with the coordinator goes on: the other half elects nobody.
            larger = 2 * len(side) > count or (2 * len(side) == count and leader in side)
            if cut is None or name not in side or larger:
                continue
            if now < cut.at + cut.seconds:
                self.watch.violated("S4", f"{name} leads, on a side of {len(side)} of {count}")

    def _must_stay(self, drawn: Round, leader: str, names: list[str]) -> list[str]:
        """List the members that nothing justifies to lose."""
        dead = {fault.a for fault in self._happened if fault.kind in DEATHS}
        long = [fault for fault in self._happened if fault.seconds >= SHORT]
        stopped = {fault.a for fault in long if fault.kind == "pause"}
        # Of two that cannot reach each other, only one is lost: the one that does not lead.
        parted = {
            fault.a if fault.b == leader else fault.b
            for fault in long
            if fault.kind == "cut" and leader in (fault.a, fault.b) and not drawn.sides
        }
        well = [name for name in names if name not in dead | stopped | parted]
        # Newcomers may be a part of the electorate by now.
        count = len(names) + len(drawn.joins)
        sides = drawn.sides if any(fault.kind == "cut" for fault in long) else ()
        if sides:
            for side in sides:
                if 2 * len(side.intersection(well)) > count:
                    return [name for name in well if name in side]
            (own,) = [side for side in sides if leader in side]
            others = [name for name in names if name not in own]
            if leader in well and 2 * len(others) + len(drawn.joins) <= len(names):
                return [name for name in well if name in own]
            return []
        if leader in well and 2 * len(well) >= count:
            return well
        return well if 2 * len(well) > count else []

    async def _come_later(self, at: float, names: Sequence[str]) -> None:
        """Let a newcomer try to join in the middle of a round; it may fail."""
        await asyncio.sleep(at)
        self._newcomers += 1
        await self.cluster.join(f"n{self._newcomers}", self.world.random.choice(list(names)))

    # ── what has to hold ────────────────────────────────────────────────────────────────────────

    async def _agree(
        self, must: Sequence[str], *, exactly: bool, until: float | None = None
    ) -> None:
        """Check S5 and S6: wait until those that are left agree, and go on to."""
        deadline = self.world.loop.time() + AGREE if until is None else until

        def group() -> list[Seat]:
            members = self.cluster.members()
            return members if exactly else [seat for seat in members if seat.name in must]

        def wrong() -> str:
            seats = group()
            missing = set(must) - {seat.name for seat in seats}
            if missing:
                return f"S6: {sorted(missing)} is lost, without a reason"
            why = self.cluster.disagreement(seats, exactly) if seats else ""
            return f"S5: {why}" if why else ""

        for _ in range(2):
            await self._until(lambda: not wrong(), deadline - self.world.loop.time())
            if text := wrong():
                self.cluster.trace_views()
                invariant, _, why = text.partition(": ")
                self.watch.violated(invariant, why)
                return
            if exactly:
                await asyncio.sleep(STAY)
            deadline = self.world.loop.time()

    async def _recover(self, names: Sequence[str]) -> None:
        """Check S7: everything works again."""
        self._newcomers += 1
        gone = [name for name in names if name not in {s.name for s in self.cluster.members()}]
        for name in (*gone, f"n{self._newcomers}"):
            via = self.world.random.choice(self.cluster.members()).name
            if not await self.cluster.join(name, via):
                self.cluster.trace_views()
                self.watch.violated("S7", f"{name} cannot join at {via}")
                return
        await self._agree([], exactly=True)
        seats = self.cluster.members()
        if why := await self.cluster.meet(seats):
            self.watch.violated("S7", why)
        # Else the next loss of the coordinator would find no majority.
        await self._until(lambda: not self.cluster.without_vote(), AGREE)
        if voteless := self.cluster.without_vote():
            self.watch.violated("S7", f"{voteless} do not know all members as electors")

    async def _until(self, condition: Callable[[], Any], seconds: float) -> None:
        deadline = self.world.loop.time() + seconds
        while not condition() and self.world.loop.time() < deadline:
            await asyncio.sleep(LOOK)
