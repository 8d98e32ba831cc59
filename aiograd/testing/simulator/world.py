"""The world of a simulation: nodes that start, crash, pause and come back, on one wire.

A node is one start of one worker: an `Agent` with references and autograd attached, exactly as the
library builds it, but with a `Runtime` whose clock, randomness, threads and network are simulated.
The world also plays the part of the cluster layer: it tells the living who is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aiograd.autograd.op import OPS
from aiograd.dist import attach as attach_autograd
from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Verdict
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rref import attach as attach_references
from aiograd.testing.simulator.loop import OWNER, SimLoop
from aiograd.testing.simulator.network import HostNetwork, Manner, Wire
from aiograd.testing.simulator.threads import SimPool, Threads
from aiograd.testing.simulator.trace import Trace

SECRET: Final = b"a secret for simulated workers .."
OnSend = Callable[["Node", str, str], Verdict]


class SimRuntime(Runtime):
    """A worker's world outside, simulated."""

    def __init__(self, node: Node) -> None:
        super().__init__(HostNetwork(node.world.wire, node))
        self._node = node
        self.random = random.Random(f"{node.world.seed} {node.name} {node.start_number}")
        self.threads = Threads(node.world.loop, self.random)

    def time(self) -> float:
        return self._node.world.loop.time()

    def give_way(self) -> None:
        """The cores of a simulation are nobody's."""

    def token_bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)

    def pool(self, loop: asyncio.AbstractEventLoop, limit: int, name: str) -> SimPool:
        return SimPool(self.threads, loop, self, limit, name)

    def start_thread(self, target: Callable[[], None], name: str) -> None:
        raise RuntimeError(f"thread {name} cannot be simulated")


class Node:
    """One start of one worker."""

    def __init__(self, world: World, name: str, rank: int, start_number: int) -> None:
        self.world, self.name, self.rank, self.start_number = world, name, rank, start_number
        self.alive = True
        self.silent = False  # it vanished instead of crashing
        self.died = math.inf
        self.busy_until = 0.0
        self.cost = 0.0
        self.held: deque[asyncio.Handle] = deque()
        self.buried: list[Any] = []
        self.context = contextvars.Context()
        self.context.run(OWNER.set, self)
        self.runtime = SimRuntime(self)
        self.agent: Agent
        self.parts: list[Any] = []
        self.shelf: dict[Any, Any] = {}  # what programs leave on this node
        self.delays: list[tuple[float, float]] = []  # when it was paused or slow: (from, to)

    def __repr__(self) -> str:
        return f"<Node {self.name} start {self.start_number}{'' if self.alive else ' dead'}>"

    @property
    def address(self) -> str:
        return f"memory:{self.name}.{self.start_number}"

    async def start(self) -> None:
        world = self.world
        self.agent = agent = Agent(
            self.name,
            self.rank,
            secret=SECRET,
            options=world.options,
            runtime=self.runtime,
            ops=OPS,
        )
        agent.context.run(OWNER.set, self)
        if world.on_send is not None:
            agent.fault_injector = self
        self.parts = [attach_references(agent), attach_autograd(agent)]
        await agent.start(self.address)

    async def stop(self) -> None:
        for part in reversed(self.parts):
            await part.close()
        await self.agent.close()

    def on_send(self, kind: str, to: str) -> Verdict:
        """As the agent's faults: every message passes here."""
        assert self.world.on_send is not None
        self.world.trace("message", self.name, to, kind)
        return self.world.on_send(self, kind, to)

    def close_unbegun(self) -> None:
        """End the coroutines that calls gave here, and that nobody will await any more."""
        for link in list(self.agent.links.all()) if self.parts else ():  # else it has never started
            for invocation in link.callee.execution.running.values():
                for given in invocation.args:
                    if inspect.iscoroutine(given) and _unbegun(given):
                        given.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something on this node, as its user code."""
        return self.world.loop.create_task(work, context=self.agent.context.copy())

    def counters(self) -> dict[str, int]:
        found = dict(self.agent.links.counters())
        for part in self.parts:
            found.update(part.counters())
        return found

    def delayed(self, begin: float, end: float) -> float:
        """How long this node was held up between two moments."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.delays)


class World:
    """Everything that exists in one simulation."""

    def __init__(
        self,
        seed: int,
        *,
        options: Options | None = None,
        manner: Manner | None = None,
        trace: bool = False,
    ) -> None:
        self.seed = seed
        self.options = options if options is not None else Options()
        self.loop = SimLoop(random.Random(f"{seed} order"))
        self.trace = Trace(self.loop, all_of_it=trace)
        self.context = contextvars.Context()  # of what belongs to no node
        rng = random.Random(f"{seed} wire")
        self.wire = Wire(self.loop, rng, manner or Manner(), self.trace)
        self.nodes: dict[str, Node] = {}  # the latest start of each worker
        self.dead: list[Node] = []
        self._told: dict[tuple[Node, str], float] = {}  # who hears next of which restart, and when
        # Told of every message, which then takes the long road; without it, small ones are quick.
        self.on_send: OnSend | None = None
        self.random = random.Random(f"{seed} world")

    # ── living ──────────────────────────────────────────────────────────────────────────────────

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    async def start(self, names: list[str]) -> None:
        """Start workers of these names, ranked in this order, that all know each other."""
        for rank, name in enumerate(names):
            await self._start(name, rank, 0)
        for node in self.living:
            self._introduce(node)

    async def _start(self, name: str, rank: int, number: int) -> Node:
        node = self.nodes[name] = Node(self, name, rank, number)
        await self.loop.create_task(node.start(), context=node.context)
        scope.closed(node.agent)  # nobody is "the last one started" in a simulation
        self.trace("start", name, number, node.agent.incarnation.hex()[:8])
        return node

    def _introduce(self, node: Node) -> None:
        for other in self.nodes.values():
            node.agent.directory.add(other.agent.info)

    async def stop(self) -> None:
        """Close every living node, as its owner would."""
        tasks = [node.spawn(node.stop()) for node in self.living]
        for task in tasks:
            await task

    # ── faults of nodes ─────────────────────────────────────────────────────────────────────────

    def crash(self, name: str, *, silent: bool = False, told: float = 0.0) -> None:
        """End a process between two callbacks; silent: the whole host is without power.

        `told`: a child that it forked keeps its descriptors, so that no connection ends; its parent
        sees the end, and everybody is told of it so many seconds later.
        """
        node = self.nodes[name]
        if not node.alive:
            return
        self.trace("vanish" if silent else "crash", name)
        node.alive, node.silent = False, silent
        node.died = self.loop.time()
        self.dead.append(node)
        node.buried.extend(node.held)
        node.held.clear()
        node.buried.extend(self.loop.tasks_of(node))
        scope.closed(node.agent)
        if told:  # its listener accepts, too, for as long as the child lives
            self.loop.call_later(told, self._tell_end, node, context=self.context)
        else:
            self.wire.listeners.pop(node.address, None)
        for end in self.wire.of(node):
            end.crash(silent=silent, keep=self.random.randrange(2048), held=bool(told))
        if silent:
            self._darken(node, 1)

    def _tell_end(self, node: Node) -> None:
        """The parent of a process has seen its end: what the cluster layer tells all members."""
        self.trace("told of the end", node.name)
        for other in self.living:
            self.loop.call_soon(_tell_loss, other, node.agent.info, context=other.context)

    def _darken(self, node: Node, by: int) -> None:
        for other in self.nodes:
            if other != node.name:
                self.wire.change_cut(node.name, other, by)
                self.wire.change_cut(other, node.name, by)

    async def restart(self, name: str, told: float | None = None) -> None:
        """Start a dead worker again, under its old name and rank, as somebody else.

        The others are told `told` seconds later, each after a seeded while if that is None.
        """
        old = self.nodes[name]
        if old.alive:
            return
        if old.silent:
            for end in self.wire.of(old):
                end.silent = False
            self._darken(old, -1)
        node = await self._start(name, old.rank, old.start_number + 1)
        self._introduce(node)
        for other in self.living:
            if other is not node:
                later = self.random.choice((0.0, 0.01, 0.3)) if told is None else told
                facts = (other, old.agent.info, node.agent.info)
                # A coordinator tells everybody of changes in their order.
                when = max(self.loop.time() + later, self._told.get((other, name), 0.0))
                self._told[other, name] = when + 1e-5
                self.loop.call_at(when, _tell_restart, *facts, context=other.context)

    def pause(self, name: str, seconds: float) -> None:
        """Stop a process for a while; its kernel goes on."""
        node, now = self.nodes[name], self.loop.time()
        if node.alive:
            self.trace("pause", name, round(seconds, 3))
            node.busy_until = max(node.busy_until, now + seconds)
            node.delays.append((now, now + seconds))

    def slow(self, name: str, cost: float, seconds: float) -> None:
        """Let every callback of a node take time."""
        node, now = self.nodes[name], self.loop.time()
        if node.alive:
            self.trace("slow", name, round(cost, 6), round(seconds, 3))
            node.cost = cost
            node.delays.append((now, now + seconds + 1.0))
            self.loop.call_later(seconds, _hasten, node, context=self.context)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def bury(self) -> None:
        """The simulation is over: end threads, and let nothing that crashed do anything more."""
        self.loop.over = True
        for node in (*self.dead, *self.nodes.values()):
            node.runtime.threads.crash()
            node.close_unbegun()
        for task in list(self.loop.owners):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if not task.done():
                with contextlib.suppress(BaseException):
                    coroutine: Any = task.get_coro()
                    coroutine.close()


def _unbegun(coroutine: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


def _tell_restart(other: Node, old: PeerInfo, new: PeerInfo) -> None:
    if not other.agent.closed:
        other.agent.directory.add(new)
        other.agent.links.declare_lost(old, f"{old.name} was started anew")


def _tell_loss(other: Node, dead: PeerInfo) -> None:
    if not other.agent.closed:
        other.agent.links.declare_lost(dead, "its process ended")


def _hasten(node: Node) -> None:
    node.cost = 0.0
