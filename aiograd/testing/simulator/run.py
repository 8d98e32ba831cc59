"""Run one plan: start the world, let actors and faults work, then check every invariant."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiograd.rpc.extension import FaultAction
from aiograd.testing.simulator import invariants
from aiograd.testing.simulator.ledger import Ledger
from aiograd.testing.simulator.loop import SimulationError
from aiograd.testing.simulator.plan import Plan
from aiograd.testing.simulator.schedule import LATER, Fault, Player
from aiograd.testing.simulator.workload.actor import Act, Actor
from aiograd.testing.simulator.workload.calls import CALLS, overtaken_call
from aiograd.testing.simulator.workload.gradients import DRAINS, GRADIENTS
from aiograd.testing.simulator.workload.references import REFERENCES
from aiograd.testing.simulator.world import Node, World

T = TypeVar("T")
ACTS: Final[dict[str, list[Act]]] = {
    "calls": CALLS,
    "references": REFERENCES,
    "gradients": GRADIENTS,
    "drains": DRAINS,
}
LIMIT: Final = 240.0  # simulated seconds after which a program that has not ended hangs


@dataclass
class Report:
    """The result of one run; its text names what failed, and the faults of the plan."""

    plan: Plan
    violations: list[str]
    digest: str
    trace: list[str]
    outcomes: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # simulated
    steps: int = 0

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"seed {plan.seed}: {'ok' if self.ok else 'FAILED'}  ({plan.profile}, "
            f"{len(plan.names)} workers, {self.seconds:.0f} simulated s, {self.steps} callbacks)"
        ]
        if not self.ok:
            lines += [f"  {text}" for text in self.violations[:10]]
            lines += [f"  fault at {fault}" for fault in plan.faults]
        return "\n".join(lines)


class Errors(logging.Handler):
    """Collects errors that the library only logs, although they should not happen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler`."""
        self.messages.append(record.getMessage()[:1500])


def run(plan: Plan, *, trace: bool = False) -> Report:
    """Simulate one plan; `trace` keeps all events, instead of the last 50."""
    with isolated() as errors:
        world = World(plan.seed, options=plan.options, wire=plan.wire, trace=trace)
        player = Player(world, plan.faults)
        ledger = Ledger(world, player.harm)
        world.parts[Ledger] = ledger
        loop = world.loop
        main = loop.create_task(_main(world, plan, player, ledger), context=world.context)
        try:
            loop.run_until_complete(main)
        except SimulationError as error:
            # A deadlock or a livelock: some call will never end.
            ledger.violated("I1", str(error))
        for message in errors.messages:
            ledger.violated("I7", f"logged as an error: {message}")
        for trouble in loop.troubles:
            ledger.violated("I7", f"asyncio complains: {trouble}")
        report = Report(
            plan,
            list(ledger.violations),
            world.trace.digest,
            world.trace.lines(),
            dict(sorted(ledger.outcomes.items())),
            dict(sorted(player.messages.items())),
            loop.time(),
            loop.steps,
        )
        dispose(world)
        return report


async def _main(world: World, plan: Plan, player: Player, ledger: Ledger) -> None:
    def on_send(node: Node, kind: str, to: str) -> FaultAction:
        """Let the player decide about every message."""
        return player.message(node.name, kind)

    # Only if a message can trigger a fault: without an injector, small calls take the fast path.
    if any(fault.on for fault in plan.faults):
        world.on_send = on_send
    await world.start(plan.names)
    for at in plan.collections:
        world.loop.call_at(at, _collect, world, context=world.context)
    tasks: dict[asyncio.Task[Any], Node] = {}
    # More actors than workers share nodes, as tasks of one program do.
    for number in range(plan.actors):
        node = world.nodes[plan.names[number % len(plan.names)]]
        actor = Actor(ledger, node, number, plan.names)
        acts = [act for theme in plan.themes for act in ACTS[theme]]
        tasks[node.spawn(actor.run(acts, plan.acts))] = node
    if plan.crowd:
        node = world.nodes[plan.names[0]]
        actor = Actor(ledger, node, plan.actors, plan.names)
        tasks[node.spawn(actor.run([overtaken_call], 1))] = node
    await player.play()
    await _all_ended(world, tasks, ledger)
    player.stop()
    ledger.finish()
    # A fault that the last message has triggered comes a little later, and must not fall into the
    # check that all pairs can call again.
    await asyncio.sleep(2 * LATER)
    await asyncio.sleep(max(0.0, player.harm.until - world.loop.time()))
    # Before and after the rest: sessions have to come back, and to stay.
    await invariants.check_alive(world, ledger, 9000)
    await invariants.check_at_rest(world, ledger)
    await invariants.check_alive(world, ledger, 9001)
    await world.stop()
    await invariants.check_closed(world, ledger)


async def _all_ended(world: World, tasks: dict[asyncio.Task[Any], Node], ledger: Ledger) -> None:
    """Wait for the actors of living nodes; those of crashed nodes never end."""
    # Looked at every second: a node may crash while its actor is awaited.
    while waiting := [task for task, node in tasks.items() if node.alive and not task.done()]:
        if world.loop.time() > LIMIT:
            ledger.violated("I1", f"{len(waiting)} programs have not ended after {LIMIT:g} s")
            break
        await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    for task, node in tasks.items():
        if node.alive and task.done() and (error := task.exception()) is not None:
            ledger.violated("I2", f"a program on {node.name} failed: {error!r}")


def _collect(world: World) -> None:
    world.trace("collect")
    gc.collect()


@contextmanager
def isolated() -> Iterator[Errors]:
    """Keep a run apart from its process: garbage collection and logs are those of the run.

    The collector would free references at moments that depend on all that the process has ever
    allocated, so it is off, and called at seeded moments. Errors in logs are yielded.
    """
    errors = Errors()
    loggers = [logging.getLogger("aiograd"), logging.getLogger("asyncio")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    # What exists now is not looked at by the collections of the run, which makes them quick.
    gc.freeze()
    gc.disable()
    for logger in loggers:
        logger.addHandler(errors)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield errors
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(errors)
            logger.setLevel(level)
            logger.propagate = propagate
        # If something was frozen before, its owner wants it to stay so.
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def silenced() -> Iterator[None]:
    """Silence finalisers and warnings: crashed code is freed without having run to its end."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


def dispose(world: World) -> None:
    """Free everything that a simulation has made."""
    with silenced():
        world.dispose()
        world.loop.close()
        for node in (*world.dead, *world.nodes.values()):
            node.discarded.clear()
            node.held.clear()
            node.shelf.clear()
        del node, world
        gc.collect()


# ── making a failing run smaller ─────────────────────────────────────────────────────────────────


def minimize(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of `items` that fails, of which no single item can be left out.

    Delta debugging: leave out halves, then quarters, and so on.
    """
    current, pieces = list(items), 2
    while len(current) > 1:
        size = max(1, len(current) // pieces)
        for start in range(0, len(current), size):
            rest = current[:start] + current[start + size :]
            if rest and fails(rest):
                current, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(len(current), pieces * 2)
    return [] if current and fails([]) else current


def shrink(plan: Plan) -> Report:
    """Run `plan` with as few of its faults as still violate one of the same invariants."""
    broken = _broken(run(plan))

    # Another invariant would be another bug: a run that fails in another way does not count.
    def fails(faults: list[Fault]) -> bool:
        """Whether the run with these faults violates one of the same invariants."""
        return bool(broken & _broken(run(plan.with_faults(faults))))

    return run(plan.with_faults(minimize(plan.faults, fails)))


def _broken(report: Report) -> set[str]:
    return {text.partition(":")[0] for text in report.violations}
