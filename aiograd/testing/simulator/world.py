"""The world of a simulation: nodes that start, crash, pause and restart, on one wire.

A node is one start of one worker: an `Agent` with references and autograd attached, exactly as the
library builds it, but with a `Runtime` whose clock, randomness, threads and network are simulated.
The world also plays the part of the cluster layer: it tells living nodes of starts and losses.
Everything that happens is added to a `Trace`, whose hash identifies a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
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
from aiograd.rpc.extension import FaultAction
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rref import attach as attach_references
from aiograd.testing.simulator.loop import OWNER, SimLoop
from aiograd.testing.simulator.network import HostNetwork, Wire, WireSettings
from aiograd.testing.simulator.threads import SimPool, Threads

SECRET: Final = b"a secret for simulated workers .."
LAST: Final = 50  # events shown when something went wrong
HASHED_ONLY: Final = frozenset({"sent", "read"})  # too many to be read
OnSend = Callable[["Node", str, str], FaultAction]


class Trace:
    """What happened, in order: the last events to read, and a hash of all of them.

    Two runs with equal hashes did the same things at the same simulated times.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, all_of_it: bool = False) -> None:
        self._loop = loop
        self._hash = hashlib.blake2b(digest_size=16)
        self._all = all_of_it
        self._frozen = False
        self.events: deque[tuple[float, str, tuple[Any, ...]]] = deque(
            maxlen=None if all_of_it else LAST
        )

    def __call__(self, kind: str, *facts: Any) -> None:
        """Add one event. Facts need a `repr` that is the same in every process."""
        now = self._loop.time()
        self._hash.update(f"{now!r} {kind} {facts!r}\n".encode())
        if self._all or (kind not in HASHED_ONLY and not self._frozen):
            self.events.append((now, kind, facts))

    def freeze(self) -> None:
        """Keep the events so far, which led to the first violation, and drop later ones."""
        self._frozen = True

    @property
    def digest(self) -> str:
        """The hash of all events so far."""
        return self._hash.hexdigest()

    def lines(self) -> list[str]:
        """Format the events that were kept."""
        return [
            f"{now:12.6f}  {kind:<10} {' '.join(map(str, facts))}"
            for now, kind, facts in self.events
        ]


class SimRuntime(Runtime):
    """Clock, randomness, threads and network of one node."""

    def __init__(self, node: Node) -> None:
        super().__init__(HostNetwork(node.world.wire, node))
        self._node = node
        # One generator per start: what one node draws must not shift the draws of others.
        self.random: random.Random = random.Random(
            f"{node.world.seed} {node.name} {node.start_number}"
        )
        self.threads: Threads = Threads(node.world.loop, self.random)

    def time(self) -> float:
        """Virtual time, the same for all nodes."""
        return self._node.world.loop.time()

    def give_way(self) -> None:
        """Do nothing: no other process competes for the cores of a simulation."""

    def token_bytes(self, count: int) -> bytes:
        """Draw bytes from the seed, where a real worker asks the operating system."""
        return self.random.randbytes(count)

    def pool(self, loop: asyncio.AbstractEventLoop, limit: int, name: str) -> SimPool:
        """Make a pool whose threads take turns with the loop."""
        return SimPool(self.threads, loop, self, limit, name)

    def start_thread(self, target: Callable[[], None], name: str) -> None:
        """Refuse: a thread of its own would run at a moment that no seed decides."""
        raise RuntimeError(f"thread {name} cannot be simulated")


class Node:
    """One start of one worker."""

    world: World
    name: str
    rank: int
    start_number: int

    def __init__(self, world: World, name: str, rank: int, start_number: int) -> None:
        self.world, self.name, self.rank, self.start_number = world, name, rank, start_number
        self.alive = True
        self.silent = False  # its host lost power, instead of its process crashing
        self.unreachable: list[str] = []  # workers that its lost power keeps from it
        self.died: float = math.inf
        # The next four are what `loop.Owner` asks for.
        self.busy_until: float = 0.0
        self.cost: float = 0.0
        self.held: deque[asyncio.Handle] = deque()
        self.discarded: list[Any] = []
        self.context: contextvars.Context = contextvars.Context()
        self.context.run(OWNER.set, self)
        self.runtime: SimRuntime = SimRuntime(self)
        self.agent: Agent
        self.parts: list[Any] = []
        self.shelf: dict[Any, Any] = {}  # what programs leave on this node
        self.delays: list[tuple[float, float]] = []  # when it was paused or slow: (from, to)

    def __repr__(self) -> str:
        return f"<Node {self.name} start {self.start_number}{'' if self.alive else ' dead'}>"

    @property
    def address(self) -> str:
        """Where this start listens; another start of the same worker has another address."""
        return f"memory:{self.name}.{self.start_number}"

    async def start(self) -> None:
        """Build the worker as the cluster layer does, and listen."""
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
        # Only where faults depend on messages: an injector takes small calls off their fast path,
        # and a simulation should run that path, too.
        if world.on_send is not None:
            agent.fault_injector = self
        self.parts = [attach_references(agent), attach_autograd(agent)]
        await agent.start(self.address)

    async def stop(self) -> None:
        """Close the worker in an orderly way."""
        for part in reversed(self.parts):
            await part.close()
        await self.agent.close()

    def on_send(self, kind: str, to: str) -> FaultAction:
        """As the agent's `FaultInjector`: note a message, and decide what happens to it."""
        assert self.world.on_send is not None
        self.world.trace("message", self.name, to, kind)
        return self.world.on_send(self, kind, to)

    def close_unbegun(self) -> None:
        """Close coroutines that functions returned here and that no task has begun to await.

        They would warn that they were never awaited when they are freed.
        """
        for link in list(self.agent.links.all()) if self.parts else ():  # else it has never started
            for invocation in link.callee.execution.running.values():
                for given in invocation.args:
                    if inspect.iscoroutine(given) and _unbegun(given):
                        given.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine on this node, as its user code."""
        return self.world.loop.create_task(work, context=self.agent.context.copy())

    def counters(self) -> dict[str, int]:
        """What `debug_info` would show: everything that should be 0 at rest."""
        found = dict(self.agent.links.counters())
        for part in self.parts:
            found.update(part.counters())
        return found

    def delayed(self, begin: float, end: float) -> float:
        """Sum up the seconds between two moments in which this node was paused or slow."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.delays)


def here() -> Node:
    """Return the node whose code runs; for functions that are called in a simulation."""
    owner = OWNER.get()
    assert isinstance(owner, Node)
    return owner


class World:
    """Everything that exists in one simulation."""

    def __init__(
        self,
        seed: int,
        *,
        options: Options | None = None,
        wire: WireSettings | None = None,
        trace: bool = False,
    ) -> None:
        self.seed = seed
        self.options: Options = options if options is not None else Options()
        # One generator per purpose, each seeded by name: a new draw in one place leaves the
        # meaning of a seed everywhere else as it was.
        self.loop: SimLoop = SimLoop(random.Random(f"{seed} order"))
        self.trace: Trace = Trace(self.loop, all_of_it=trace)
        self.context: contextvars.Context = contextvars.Context()  # of what belongs to no node
        rng = random.Random(f"{seed} wire")
        self.wire: Wire = Wire(self.loop, rng, wire or WireSettings(), self.trace, self.context)
        self.nodes: dict[str, Node] = {}  # the latest start of each worker
        self.dead: list[Node] = []
        # (node, name of a worker) → from when on the node may be told of its next restart
        self._told: dict[tuple[Node, str], float] = {}
        self.on_send: OnSend | None = None  # decides about every message; set before `start`
        self.random: random.Random = random.Random(f"{seed} world")
        # What a run keeps beside the nodes, by its class: code that runs on a node finds it here.
        self.parts: dict[type[Any], Any] = {}

    # ── living ──────────────────────────────────────────────────────────────────────────────────

    @property
    def living(self) -> list[Node]:
        """The nodes that run, in the order of their names' first start."""
        return [node for node in self.nodes.values() if node.alive]

    async def start(self, names: list[str]) -> None:
        """Start workers of these names, ranked in this order, that all know each other."""
        # One after the other, and told of each other only then: as after a bootstrap, no call
        # can begin before its callee exists.
        for rank, name in enumerate(names):
            await self._start(name, rank, 0)
        for node in self.living:
            self._introduce(node)

    async def start_alone(self, name: str, rank: int) -> Node:
        """Start a worker that knows no other one; again, if it has been started before."""
        before = self.nodes.get(name)
        if before is not None and before.silent:
            self._power_up(before)
        return await self._start(name, rank, 0 if before is None else before.start_number + 1)

    async def _start(self, name: str, rank: int, number: int) -> Node:
        node = self.nodes[name] = Node(self, name, rank, number)
        await self.loop.create_task(node.start(), context=node.context)
        # The library lets code outside of any worker use the one that was started last. In a
        # simulation that would hide a lost context: code belongs to a node, or it is a bug.
        scope.closed(node.agent)
        self.trace("start", name, number, node.agent.incarnation.hex()[:8])
        return node

    def _introduce(self, node: Node) -> None:
        for other in self.nodes.values():
            node.agent.directory.add(other.agent.info)

    async def stop(self) -> None:
        """Close every living node in an orderly way, all at the same time."""
        tasks = [node.spawn(node.stop()) for node in self.living]
        for task in tasks:
            await task

    # ── faults of nodes ─────────────────────────────────────────────────────────────────────────

    def crash(self, name: str, *, silent: bool = False, told: float = 0.0) -> None:
        """End a process between two callbacks; silent: its whole host loses power.

        `told`: a forked child keeps the descriptors of the process, so that no connection ends.
        The parent of the process sees its end, and all nodes are told so many seconds later.
        """
        node = self.nodes[name]
        if not node.alive:
            return
        self.trace("vanish" if silent else "crash", name)
        node.alive, node.silent = False, silent
        node.died = self.loop.time()
        self.dead.append(node)
        # Kept alive until the end of the simulation: a killed process runs no `finally` block
        # and no finaliser.
        node.discarded.extend(node.held)
        node.held.clear()
        node.discarded.extend(self.loop.tasks_of(node))
        scope.closed(node.agent)
        if told:  # the forked child keeps the listener open, too
            self.loop.call_later(told, self._tell_end, node, context=self.context)
        else:
            self.wire.listeners.pop(node.address, None)
        for end in self.wire.of(node):
            # A random part of what was written has reached the kernel, and still arrives.
            end.crash(silent=silent, keep=self.random.randrange(2048), held=bool(told))
        if silent:
            node.unreachable = [other for other in self.nodes if other != name]
            self._darken(node, 1)

    def _tell_end(self, node: Node) -> None:
        """Tell all nodes that a process ended, as the cluster layer does."""
        self.trace("told of the end", node.name)
        for other in self.living:
            self.loop.call_soon(_tell_loss, other, node.agent.info, context=other.context)

    def _darken(self, node: Node, by: int) -> None:
        # Those that were there then: who came later found nobody there.
        for other in node.unreachable:
            self.wire.change_cut(node.name, other, by)
            self.wire.change_cut(other, node.name, by)

    async def restart(self, name: str, told: float | None = None) -> None:
        """Start a dead worker again, under its old name and rank, as another incarnation.

        The others are told `told` seconds later; if that is None, each after a random delay.
        """
        old = self.nodes[name]
        if old.alive:
            return
        if old.silent:
            self._power_up(old)
        node = await self._start(name, old.rank, old.start_number + 1)
        self._introduce(node)
        for other in self.living:
            if other is not node:
                later = self.random.choice((0.0, 0.01, 0.3)) if told is None else told
                facts = (other, old.agent.info, node.agent.info)
                # A coordinator sends changes to each member in their order.
                when = max(self.loop.time() + later, self._told.get((other, name), 0.0))
                self._told[other, name] = when + 1e-5
                self.loop.call_at(when, _tell_restart, *facts, context=other.context)

    def _power_up(self, node: Node) -> None:
        """Give power to a host again.

        Its kernel knows nothing of the old connections, and resets them when something arrives.
        """
        node.silent = False
        for end in self.wire.of(node):
            end.silent = False
        self._darken(node, -1)

    def pause(self, name: str, seconds: float) -> None:
        """Stop a process for some seconds, as SIGSTOP does; its kernel goes on."""
        node, now = self.nodes[name], self.loop.time()
        if node.alive:
            self.trace("pause", name, round(seconds, 3))
            # Pauses may overlap; the longer one counts.
            node.busy_until = max(node.busy_until, now + seconds)
            node.delays.append((now, now + seconds))

    def slow(self, name: str, cost: float, seconds: float) -> None:
        """Let every callback of a node take `cost` seconds, for some seconds."""
        node, now = self.nodes[name], self.loop.time()
        if node.alive:
            self.trace("slow", name, round(cost, 6), round(seconds, 3))
            node.cost = cost
            # A second more: the callbacks that piled up meanwhile are run after the end of it.
            node.delays.append((now, now + seconds + 1.0))
            self.loop.call_later(seconds, _end_slow, node, context=self.context)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def dispose(self) -> None:
        """End threads and coroutines after the simulation, without effect on anything."""
        self.loop.over = True
        for node in (*self.dead, *self.nodes.values()):
            node.runtime.threads.crash()
            node.close_unbegun()
        for task in list(self.loop.owners):
            # Tasks of crashed nodes are pending by intent; asyncio would log each of them.
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


def _end_slow(node: Node) -> None:
    node.cost = 0.0
