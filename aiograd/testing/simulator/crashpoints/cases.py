"""Cases: one fault at one boundary of one program; how to run one, count them and run many.

A program is run once without a fault to count its boundaries. Then it is run again for each case.
Other workers see of a callback only what it writes. So a boundary before a write matters to the
writer's own death alone; all other faults there do the same as at the next callback. For the same
reason a fault of one worker is not tried again at boundaries of others as long as no time has
passed, it has done nothing itself and no worker has written anything: the run would be the same.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options
from aiograd.testing.simulator import invariants
from aiograd.testing.simulator.crashpoints.programs import PROGRAMS, Program
from aiograd.testing.simulator.crashpoints.trial import Trial
from aiograd.testing.simulator.ledger import Ledger
from aiograd.testing.simulator.loop import Owner, SimulationError
from aiograd.testing.simulator.network import WireSettings
from aiograd.testing.simulator.planted_bugs import planted
from aiograd.testing.simulator.run import Errors, isolated, silenced
from aiograd.testing.simulator.schedule import Fault, Harm
from aiograd.testing.simulator.world import Node, World

FAULTS: Final = ("kill", "replace", "resume", "cut")
DEADLY: Final = ("kill", "replace")
AWAY: Final = 0.5  # seconds for which connections are away until they resume
LATENCY: Final = 0.001
TIMEOUT: Final = 20.0  # of calls and passes: far longer than any loss takes to be noticed
AFTER: Final = (0.05, 0.5, 1.5, 6.0)  # seconds after which survivors are read again
SETTLE: Final = 1.5  # seconds after which nothing is left but garbage
SETTLE_CUT: Final = 15.0  # the same after a cut, which is noticed late
COLLECTED: Final = 0.5  # seconds, and two leases, in which what garbage held is released
LIMIT: Final = 120.0  # simulated seconds after which a program hangs
# Shapes with a third of all cases, and little that smaller ones do not have: left out unless cases
# are sampled, or all are asked for.
LARGE: Final = frozenset({"mixed", "diamondx", "chain3x", "sharedx"})
COLLECT: Final = 25  # runs between two collections of garbage
ABOUT: Final = 208_000  # cases of all programs, to turn a number of cases into a share


class Point(NamedTuple):
    """A boundary: before a callback of a worker, or before it writes."""

    kind: str  # "callback" or "write"
    worker: str
    time: float


class Case(NamedTuple):
    """One run: a fault at one boundary of one program. `at` < 0: no fault."""

    program: str
    at: int = -1
    victim: str = ""
    fault: str = ""
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.program}:{self.at}:{self.victim}:{self.fault}"

    @classmethod
    def parse(cls, text: str, seed: int) -> Case:
        """Read a case from its text, PROGRAM:POINT:WORKER:FAULT."""
        program, at, victim, fault = text.split(":")
        return cls(program, int(at), victim, fault, seed)


@dataclass
class Result:
    """The result of one case; `points` are the boundaries up to its fault."""

    case: Case
    points: list[Point]
    violations: list[str]
    outcomes: dict[str, int]
    digest: str
    trace: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations


def describe(result: Result) -> str:
    """Say what failed, and how to replay it."""
    case = result.case
    return (
        f"{case}: {result.violations[0]}\n  make crashpoints CASE={case} SEED={case.seed} TRACE=1"
    )


class Boundaries:
    """Counts the boundaries of a run, and lets its fault happen at one of them."""

    def __init__(self, world: World, trial: Trial, harm: Harm, case: Case) -> None:
        self._world, self._trial, self._harm, self._case = world, trial, harm, case
        self.points: list[Point] = []
        self.counting: bool = False
        self._last: Owner | None = None

    def callback(self, owner: Owner | None) -> None:
        """Before a callback: judge what the last one has changed, then reach a boundary."""
        last, self._last = self._last, owner
        # A callback changes its own node only, so it is enough to read that one. Readings after
        # every callback are what finds an outcome that is wrong for a moment.
        if isinstance(last, Node):
            self._trial.look(last)
        if isinstance(owner, Node):
            self._reached(Point("callback", owner.name, self._world.loop.time()))

    def write(self, node: Node) -> None:
        """Before a write: reach a boundary."""
        self._reached(Point("write", node.name, self._world.loop.time()))

    def _reached(self, point: Point) -> None:
        if self.counting:
            self.points.append(point)
            if len(self.points) == self._case.at + 1:
                self.counting = False
                self._happen()

    def _happen(self) -> None:
        world, trial, case = self._world, self._trial, self._case
        world.trace("fault", str(case))
        # What follows is drawn for this case alone: with the generator of the seed all cases of a
        # program would draw the same delays.
        world.random = random.Random(str(case))
        trial.victim, trial.fault = case.victim, case.fault
        now, victim = world.loop.time(), case.victim
        trial.lost = world.nodes[victim].agent.incarnation
        if case.fault in DEADLY:
            # The end of a stream takes one journey, plus at most as much jitter.
            trial.known_by = now + 2 * LATENCY
            self._harm.note(Fault(now, "crash", victim))
            world.crash(victim)
            if case.fault == "replace":
                told = world.random.choice((0.0, 0.0, 0.01, 0.1))
                world.loop.create_task(world.restart(victim, told), context=world.context)
            return
        if case.fault == "cut":
            # Nothing tells of a cut: a peer is missed after its silence, at a heartbeat.
            trial.known_by = now + world.options.silence + world.options.heartbeat
            for other in world.nodes:
                if other != victim:
                    self._harm.note(Fault(now, "cut", victim, other, LIMIT))
        else:
            self._harm.note(Fault(now, "reset", victim, seconds=AWAY))
            for other in world.nodes:
                for ours, theirs in world.wire.between(victim, other):
                    ours.broken(theirs)
            world.loop.call_later(AWAY, self._cut, -1, context=world.context)
        self._cut(1)

    def _cut(self, by: int) -> None:
        victim = self._case.victim
        for other in self._world.nodes:
            if other != victim:
                self._world.wire.change_cut(victim, other, by)
                self._world.wire.change_cut(other, victim, by)


# ── one case ────────────────────────────────────────────────────────────────────────────────────


def run_case(case: Case, errors: Errors, *, trace: bool = False) -> Result:
    """Run one case; inside `isolated()`, which yields `errors`."""
    program = PROGRAMS[case.program]
    if program.leader == "rref":
        # Services of a dead worker of the last case log errors when they are freed.
        gc.collect()
    options = Options(timeout=TIMEOUT, secret=None, lease=0.5, heartbeat=2.0)
    # With seed 0 all messages take equally long. Other seeds vary that, and the order.
    wire = WireSettings(LATENCY, LATENCY if case.seed else 0.0, 1 << 20, 0.0)
    world = World(case.seed, options=options, wire=wire, trace=trace)
    harm = Harm(world)
    ledger = Ledger(world, harm)
    trial = Trial(program, world, ledger)
    world.parts.update({Ledger: ledger, Trial: trial})
    boundaries = Boundaries(world, trial, harm, case)
    main = world.loop.create_task(_main(world, program, trial, boundaries), context=world.context)
    # Parts of the run before may log errors when they are freed, which is up to now.
    errors.messages.clear()
    try:
        world.loop.run_until_complete(main)
    except SimulationError as error:
        ledger.violated("I1", str(error))
    for message in errors.messages:
        ledger.violated("I7", f"logged as an error: {message}")
    for trouble in world.loop.troubles:
        ledger.violated("I7", f"asyncio complains: {trouble}")
    with silenced():
        world.dispose()
        world.loop.close()
    violations, lines = list(ledger.violations), world.trace.lines()
    return Result(case, boundaries.points, violations, ledger.outcomes, world.trace.digest, lines)


async def _main(world: World, program: Program, trial: Trial, boundaries: Boundaries) -> None:
    ledger = trial.ledger
    await world.start(program.workers)
    if not program.cold:
        await _connect(world, program)
    boundaries.counting = True
    world.loop.boundary, world.wire.on_write = boundaries.callback, boundaries.write
    driver = world.nodes["a"]
    task = driver.spawn(trial.run())
    while driver.alive and not task.done():
        if world.loop.time() > LIMIT:
            ledger.violated("I1", f"the program has not ended after {LIMIT:g} s")
            break
        await asyncio.wait([task], timeout=1.0)
    boundaries.counting = False
    if driver.alive and task.done() and (error := task.exception()) is not None:
        ledger.violated("I2", f"the program failed: {error!r}")
    for seconds in AFTER if not driver.alive else ():
        await asyncio.sleep(seconds)
        trial.look_everywhere()
    world.loop.boundary = world.wire.on_write = None
    await asyncio.sleep(SETTLE_CUT if trial.fault == "cut" else SETTLE)
    await invariants.check_at_rest(world, ledger, COLLECTED, (1.0,))
    # Only now: a worker that was cut off notices it late, and its calls end then.
    ledger.finish()
    await _check_alive(world, trial)
    await world.stop()
    await invariants.check_closed(world, ledger)


async def _connect(world: World, program: Program) -> None:
    """Open the connections that the program needs, so that handshakes are no part of it.

    Programs of the variant `cold` do without.
    """
    for here, there in program.pairs():
        await world.nodes[here].spawn(_hello(there))


async def _hello(to: str) -> Any:
    return await rpc_async(to, nothing)


async def nothing() -> None:
    """Do nothing, on another worker."""


async def _check_alive(world: World, trial: Trial) -> None:
    """Check I9: every worker that is not cut off can be called."""
    living = [n for n in world.living if not (trial.fault == "cut" and n.name == trial.victim)]
    for node in living[1:]:
        try:
            async with asyncio.timeout(invariants.RECOVER):
                await living[0].spawn(_hello(node.name))
        except Exception as error:
            trial.ledger.violated("I9", f"{living[0].name} to {node.name}: {error!r}")


# ── many cases ──────────────────────────────────────────────────────────────────────────────────


def cases(program: str, points: Iterable[Point], seed: int = 0) -> Iterator[Case]:
    """Yield every fault at every boundary of a program, without those that repeat a run."""
    workers = PROGRAMS[program].workers
    # worker → when its faults were tried last, if neither it nor any write has happened since
    tried: dict[str, float] = {}
    for at, point in enumerate(points):
        if point.kind == "write":
            yield from (Case(program, at, point.worker, fault, seed) for fault in DEADLY)
            tried.clear()
            continue
        for victim in workers:
            if victim == point.worker or tried.get(victim) != point.time:
                yield from (Case(program, at, victim, fault, seed) for fault in FAULTS)
                tried[victim] = point.time
        tried.pop(point.worker, None)


@dataclass
class Tally:
    """The sum of many cases."""

    programs: int = 0
    points: int = 0
    cases: int = 0  # that there are
    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[Result] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the sum of other cases."""
        self.programs += other.programs
        self.points += other.points
        self.cases += other.cases
        self.runs += other.runs
        self.outcomes.update(other.outcomes)
        self.failed += other.failed


class Portion(NamedTuple):
    """Some of the cases of one program, chosen by a seed: a share of 1.0 is all of them."""

    program: str
    share: float
    seed: int


def run_portion(portion: Portion) -> Tally:
    """Count the boundaries of a program, and run cases of it."""
    tally = Tally(programs=1)
    rng = random.Random(f"{portion.seed} {portion.program} cases")
    with isolated() as errors:
        calm = run_case(Case(portion.program, seed=portion.seed), errors)
        # Without a fault it should work; its boundaries would mean nothing otherwise.
        if not calm.ok:
            tally.failed.append(calm)
            return tally
        tally.points = len(calm.points)
        for case in cases(portion.program, calm.points, portion.seed):
            tally.cases += 1
            if rng.random() < portion.share:
                tally.runs += 1
                result = run_case(case, errors)
                tally.outcomes.update(result.outcomes)
                if not result.ok:
                    tally.failed.append(result)
                if tally.runs % COLLECT == 0:
                    gc.collect()
    return tally


def sample(count: int, seed: int, programs: Iterable[str] = PROGRAMS) -> list[Portion]:
    """Choose about `count` cases of all programs; all cases if `count` is 0."""
    share = min(1.0, count / ABOUT) if count else 1.0
    return [Portion(program, share, seed) for program in programs]


def hunt(bug: str, limit: int = 2000, seed: int = 0) -> tuple[int, Result] | None:
    """Look for a planted bug in random cases; return how many it took, and the first violation.

    Return None if `limit` cases have not found it.
    """
    rng = random.Random(f"{seed} hunt")
    with planted(bug), isolated() as errors:
        for tried in range(1, limit + 1):
            program = rng.choice(list(PROGRAMS))
            result = run_case(Case(program, seed=seed), errors)
            if result.ok:
                every = list(cases(program, result.points, seed))
                result = run_case(rng.choice(every), errors)
            if not result.ok:
                return tried, result
    return None
