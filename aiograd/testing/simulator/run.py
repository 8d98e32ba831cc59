"""Run one plan: start the world, let actors and faults loose, wait for quiet, check everything."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiograd.rpc.extension import FaultAction
from aiograd.testing.simulator import invariants
from aiograd.testing.simulator.actors import CALLS, Act, Actor, overtaken_call
from aiograd.testing.simulator.gradients import DRAINS, GRADIENTS
from aiograd.testing.simulator.ledger import Ledger
from aiograd.testing.simulator.loop import SimulationError
from aiograd.testing.simulator.plan import Plan
from aiograd.testing.simulator.references import REFERENCES
from aiograd.testing.simulator.schedule import LATER, Player
from aiograd.testing.simulator.world import Node, World

ACTS: Final[dict[str, list[Act]]] = {
    "calls": CALLS,
    "references": REFERENCES,
    "gradients": GRADIENTS,
    "drains": DRAINS,
}
LIMIT: Final = 240.0  # simulated seconds after which a program that has not ended hangs


@dataclass
class Report:
    """What came of one run."""

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
    """What the library only logs although it should not happen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage()[:1500])


def run(plan: Plan, *, trace: bool = False) -> Report:
    """Simulate one plan."""
    with quiet() as errors:
        world = World(plan.seed, options=plan.options, wire=plan.wire, trace=trace)
        player = Player(world, plan.faults)
        book = Ledger(world, player.harm)
        world.parts[Ledger] = book
        loop = world.loop
        main = loop.create_task(_main(world, plan, player, book), context=world.context)
        try:
            loop.run_until_complete(main)
        except SimulationError as error:
            book.violated("I1", str(error))
        for message in errors.messages:
            book.violated("I7", f"logged as an error: {message}")
        for trouble in loop.troubles:
            book.violated("I7", f"asyncio complains: {trouble}")
        report = Report(
            plan,
            list(book.violations),
            world.trace.digest,
            world.trace.lines(),
            dict(sorted(book.outcomes.items())),
            dict(sorted(player.messages.items())),
            loop.time(),
            loop.steps,
        )
        bury(world)
        return report


async def _main(world: World, plan: Plan, player: Player, book: Ledger) -> None:
    def on_send(node: Node, kind: str, to: str) -> FaultAction:
        return player.message(node.name, kind)

    if any(fault.on for fault in plan.faults):
        world.on_send = on_send
    await world.start(plan.names)
    for at in plan.collections:
        world.loop.call_at(at, _collect, world, context=world.context)
    tasks: dict[asyncio.Task[Any], Node] = {}
    for number in range(plan.actors):
        node = world.nodes[plan.names[number % len(plan.names)]]
        actor = Actor(book, node, number, plan.names)
        acts = [act for theme in plan.themes for act in ACTS[theme]]
        tasks[node.spawn(actor.run(acts, plan.acts))] = node
    if plan.crowd:
        node = world.nodes[plan.names[0]]
        actor = Actor(book, node, plan.actors, plan.names)
        tasks[node.spawn(actor.run([overtaken_call], 1))] = node
    await player.play()
    await _all_ended(world, tasks, book)
    player.stop()
    book.finish()
    await asyncio.sleep(2 * LATER)  # for a fault that the last message has triggered
    await asyncio.sleep(max(0.0, player.harm.until - world.loop.time()))
    await invariants.check_alive(world, book, 9000)
    await invariants.check_quiet(world, book)
    await invariants.check_alive(world, book, 9001)
    await world.stop()
    await invariants.check_closed(world, book)


async def _all_ended(world: World, tasks: dict[asyncio.Task[Any], Node], book: Ledger) -> None:
    """Wait for the actors of living nodes."""
    while waiting := [task for task, node in tasks.items() if node.alive and not task.done()]:
        if world.loop.time() > LIMIT:
            book.violated("I1", f"{len(waiting)} programs have not ended after {LIMIT:g} s")
            break
        await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    for task, node in tasks.items():
        if node.alive and task.done() and (error := task.exception()) is not None:
            book.violated("I2", f"a program on {node.name} failed: {error!r}")


def _collect(world: World) -> None:
    world.trace("collect")
    gc.collect()


@contextmanager
def quiet() -> Iterator[Errors]:
    """No garbage collection but ours, and logs where we can see them."""
    errors = Errors()
    loggers = [logging.getLogger("aiograd"), logging.getLogger("asyncio")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
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
        if not frozen:  # else it is somebody's wish that it stays so, and quicker the next time
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def hushed() -> Iterator[None]:
    """What is let go of makes no sound: what crashed never ran its `finally` blocks."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


def bury(world: World) -> None:
    """Let go of everything."""
    with hushed():
        world.dispose()
        world.loop.close()
        for node in (*world.dead, *world.nodes.values()):
            node.discarded.clear()
            node.held.clear()
            node.shelf.clear()
        del node, world
        gc.collect()
