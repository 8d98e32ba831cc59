"""One run of a small program, with or without a fault at one of its boundaries.

`Trial` runs on the simulated workers and notes what the originator of each pass decided. `look`
reads the gradients of a worker at any moment, and checks that they agree with that decision
(`invariants`, I11). It knows more than the judge of random seeds: there is one program and one
fault, so it can say which worker has to be blamed, and by when.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.api import grad
from aiograd.dist.registry import ContextRegistry, context, current_context, get_gradients
from aiograd.errors import AiogradError, PassUndecided, UnknownContext
from aiograd.rpc.api import rpc_async
from aiograd.rref import remote
from aiograd.testing.simulator.crashpoints.programs import (
    NUMBERS,
    SECONDS,
    Program,
    contribution,
    derivative,
    loss_of,
)
from aiograd.testing.simulator.invariants import Outcome, disagreement, read, same
from aiograd.testing.simulator.ledger import ANY, CallId, Entry, Ledger, enter
from aiograd.testing.simulator.workload.gradients import leaf
from aiograd.testing.simulator.world import Node, World, here

NOTICED: Final = 1.0  # seconds after a loss can be known, by which a pass that needs it has failed
JOURNEYS: Final = 0.1  # seconds: more than all messages of an ending together
# What may be shown besides earlier sums while two passes run: nothing, one of them, or both.
_PAIR_SUMS: Final[tuple[tuple[str, ...], ...]] = ((), ("backward",), ("pair",))
RETAINED: Final = frozenset({"retain", "create", "pair"})  # kinds of passes that may be tried again


class Trial:
    """One run of one program: the state of its passes, and what is wrong."""

    program: Program
    world: World
    ledger: Ledger
    victim: str
    fault: str
    kind: str
    blamed: str
    why: str

    def __init__(self, program: Program, world: World, ledger: Ledger) -> None:
        self.program, self.world, self.ledger = program, world, ledger
        self.context_id: int | None = None
        self.xs: list[Tensor] = [leaf(4)]
        self.outcome: Outcome = Outcome.GOOD  # of the last pass that began
        self.good: list[str] = []  # kinds of passes that ended well
        self.kind = ""  # of the last pass that began
        self.blamed, self.why = "", ""  # the worker that the last failure named, and its text
        self.reached: dict[tuple[str, int], set[int]] = {}  # worker, start → passes that it joined
        self.before: set[int] = set()  # passes that had begun before the last one
        self.victim, self.fault = "", ""
        self.lost = b""  # the incarnation of the victim
        self.known_by: float = math.inf  # when all workers can know of the loss
        self.knew: bool = False  # the originator knew of the loss when the last pass began
        self._calls = 0
        self._wrong: set[tuple[str, str]] = set()

    # ── the program ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Run the program, on worker a."""
        program = self.program
        async with context() as ctx:
            self.context_id = ctx.id
            if program.waste:
                await self._watch("waste", program.waste, lambda id: self._waste(id), ANY)
            if program.leader == "a":
                await self.lead(self.xs)
            elif program.leader == "call":
                await self._watch("lead", program.root.worker, self._called, None)
            else:
                await self._by_reference(ctx)
        self.context_id = None  # it was left: no worker shows anything any more

    async def _waste(self, id: CallId) -> None:
        """Make a result that no loss uses: a pass must not wait for its edges."""
        await rpc_async(self.program.waste, wasted, (id, self.xs))

    async def _called(self, id: CallId) -> None:
        await rpc_async(self.program.root.worker, lead, (id, self.xs))

    async def _by_reference(self, ctx: Any) -> None:
        """Start the pass at the owner of a value, whose answer is all that is known here."""
        id, owner = (1, 0), self.program.root.worker
        rref = remote(owner, loss_of, (id, self.program.root, self.xs))
        await self._pass(ctx, "backward", lambda: rref.backward(ctx))

    async def lead(self, xs: list[Tensor]) -> None:
        """Run the forward pass and all passes backward, on the worker that starts them."""
        ctx, node = current_context(), here()
        part = self.program.root
        loss = await self._watch("forward", node.name, lambda id: loss_of(id, part, xs), ANY)
        if loss is None:
            return
        for kind in self.program.passes:
            if not await self._pass(ctx, kind, lambda kind=kind: self._backward(ctx, kind, loss)):
                break
        else:
            return
        # Once more after a failure: it fails again, or every gradient is right. A pass that left
        # something behind would give a wrong sum.
        if kind in RETAINED:
            await self._pass(ctx, "retain", lambda: self._backward(ctx, "retain", loss))

    async def _backward(self, ctx: Any, kind: str, loss: Tensor) -> None:
        if kind == "pair":
            both = [ctx.backward(loss, retain_graph=True) for _ in range(2)]
            outcomes = await asyncio.gather(*both, return_exceptions=True)
            failed = [each for each in outcomes if isinstance(each, BaseException)]
            if failed:
                if len(failed) == 1:
                    self.good.append("backward")  # the other one counts from now on
                raise failed[0]
        elif kind == "grad":
            (found,) = await grad(loss, [self._own()], retain_graph=True)
            if not np.array_equal(np.asarray(found), derivative(self.program)):
                self.ledger.violated("I3", f"grad gave {found!r:.100}")
        elif kind == "second":
            (first,) = await grad(loss, [self._own()], create_graph=True)
            assert first is not None
            await ctx.backward((first * first).sum())
        else:
            retain, create = kind == "retain", kind == "create"
            await ctx.backward(loss, retain_graph=retain, create_graph=create)

    def _own(self) -> Tensor:
        found: Tensor = here().shelf["parameter", NUMBERS[here().name]]
        return found

    # ── passes ──────────────────────────────────────────────────────────────────────────────────

    async def _pass(self, ctx: Any, kind: str, make: Any) -> bool:
        self.outcome, self.kind = Outcome.RUNNING, kind
        self.before = {number for found in self.reached.values() for number in found}
        gone = here().agent.parts[ContextRegistry].lost_peers
        # A worker that is cut off itself has lost all others, and not itself.
        self.knew = self.lost in gone or (self.victim == here().name and bool(gone))
        limit = self.world.options.timeout
        entry = self._entry("backward", here().name, limit + 2.0)
        try:
            await self.ledger.watch(entry, lambda: self._noting(make), None)
        except asyncio.CancelledError:
            # The caller of this worker is lost, and the pass with it.
            self.outcome = Outcome.FAILED
            raise
        if entry.outcome == "ok":
            self.outcome = Outcome.GOOD
            self.good.append(kind)
        else:
            self.outcome = Outcome.FAILED
            self._judge_failure(entry)
            if self.fault in ("kill", "replace") and self.program.leader != "rref":
                self._look_for_untold()
        # Before calls are made: a call piggybacks the outcome, and would hide a worker that was
        # not told of it.
        self.look_everywhere()
        for worker in self.program.workers:
            if worker != here().name:
                await self._read_by_call(ctx, worker)
        self.look_everywhere()
        return self.outcome is Outcome.GOOD

    async def _noting(self, make: Any) -> None:
        try:
            await make()
        except Exception as error:
            # Only texts are kept: the traceback of the error holds references.
            self.blamed, self.why = getattr(error, "worker", ""), f"{error!r:.150}"
            raise

    def _judge_failure(self, entry: Entry) -> None:
        """Check that a pass failed soon after the loss could be known, and names its worker."""
        late = entry.end - max(self.known_by, entry.begin) - JOURNEYS
        limit = NOTICED
        if self.knew:
            # Edges to the lost worker count as lost. The pass fails when it needs one of them,
            # and until then it computes.
            limit += SECONDS * sum(part.heavy for part in self.program.root.walk())
        if late > limit:
            self.ledger.violated("I1", f"the pass failed {late:.3f} s after the loss")
        if self.fault in ("kill", "replace") and self.blamed != self.victim:
            self.ledger.violated("I11", f"{self.victim} was lost, but {self.why}")

    def _look_for_untold(self) -> None:
        """Check that survivors that took part were told before the originator raised."""
        assert self.context_id is not None
        # The report that the other one of two passes ended well may still be under way.
        if self.kind == "pair":
            return
        for node in self.world.living:
            undecided = isinstance(read(node, self.context_id), PassUndecided)
            if undecided and self._took_part(node):
                self.ledger.violated("I11", f"{node.name} was not told that the pass failed")

    async def _read_by_call(self, ctx: Any, worker: str) -> None:
        """Check what a call of the originator finds after the outcome."""
        node = self.world.nodes[worker]
        start = self.starts[worker]
        expected = shown(self.sums(node)) if node.start_number == start else ANY
        # Here worker a reads, which did not start the pass: its call piggybacks no outcome.
        if self.program.leader == "rref":
            return
        entry = self._entry("numbers", worker, self.world.options.timeout)
        args = (entry.id, ctx.id, start)
        if self.outcome is Outcome.GOOD:
            await self.ledger.watch(entry, lambda: rpc_async(worker, numbers, args), expected)
            if entry.outcome in ("BackwardFailed", "PassUndecided"):
                self.ledger.violated("I11", f"{worker} raises {entry.outcome} after a good pass")
            return
        try:
            found = await rpc_async(worker, numbers, args)
        except AiogradError:
            return
        # One of two passes may have ended well after the other one had failed.
        if self.kind == "pair" and found in (shown(self.sums(node, more)) for more in _PAIR_SUMS):
            return
        if found and (found != expected or self._took_part(node)):
            self.ledger.violated("I11", f"{worker} answers {found!r:.100} after a failed pass")

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _entry(self, what: str, to: str, timeout: float) -> Entry:
        self._calls += 1
        now = self.world.loop.time()
        return Entry((self._calls,), here(), to, what, timeout, now, quick=True)

    async def _watch(self, what: str, to: str, make: Any, expected: Any) -> Any:
        entry = self._entry(what, to, self.world.options.timeout * 4)
        return await self.ledger.watch(entry, lambda: make(entry.id), expected)

    # ── readings ────────────────────────────────────────────────────────────────────────────────

    @property
    def starts(self) -> dict[str, int]:
        """The start of every worker when the program begins: the first one."""
        return dict.fromkeys(self.program.workers, 0)

    def sums(self, node: Node, more: tuple[str, ...] = ()) -> dict[Tensor, Any]:
        """Sum up what a worker should show after all good passes, and after `more` kinds."""
        found: dict[Tensor, Any] = {}
        # The forward calls have not reached this start: it has computed nothing.
        if node.start_number and ("parameter", NUMBERS[node.name]) not in node.shelf:
            return found
        for kind in (*self.good, *more):
            for (worker, which), gradient in contribution(self.program, kind).items():
                if worker == node.name:
                    key = ("parameter", NUMBERS[worker])
                    own = self.xs[0] if which == "x" else node.shelf.get(key)
                    if own is not None:
                        found[own] = found[own] + gradient if own in found else gradient
        return found

    def _took_part(self, node: Node) -> bool:
        """Tell whether the last pass that began has reached this worker."""
        return bool(self.reached.get((node.name, node.start_number), set()) - self.before)

    def look(self, node: Node) -> None:
        """Read the gradients of a worker now, and judge them."""
        if self.context_id is None or not node.alive or not node.parts:
            return
        found = node.agent.parts[ContextRegistry].find(self.context_id)
        if found is not None and found.passes:
            joined = self.reached.setdefault((node.name, node.start_number), set())
            joined.update(found.passes)
        answer = read(node, self.context_id)
        sums = self.sums(node)
        reached = self._took_part(node)
        opener_lost = self.victim == "a" and self.fault in ("kill", "replace")
        forgotten = node.start_number > 0 or self.fault == "cut" or opener_lost
        wrong = disagreement(answer, self.outcome, sums, reached=reached, forgotten=forgotten)
        once = (node.name, wrong)  # else the same would be noted after every callback
        if wrong and once not in self._wrong and not self._is_excused(node, answer):
            self._wrong.add(once)
            self.ledger.violated("I11", f"{node.name} {wrong}")

    def _is_excused(self, node: Node, answer: Any) -> bool:
        if node.start_number and not answer:
            return True  # a new start knows nothing of what the old one did
        if isinstance(answer, AiogradError):
            return False
        if self.outcome is Outcome.GOOD:
            return False
        leads = self.outcome is Outcome.RUNNING and node.name == self.leader
        if leads and same(answer, self.sums(node)):
            return True  # the originator itself knows that its pass is not over
        # One of two passes ended well; or both, and `gather` has not been told yet.
        if self.kind == "pair":
            return any(same(answer, self.sums(node, more)) for more in _PAIR_SUMS)
        # The owner of the value decides; its answer has not arrived at worker a yet.
        return self.program.leader == "rref" and same(answer, self.sums(node, (self.kind,)))

    @property
    def leader(self) -> str:
        """The worker that starts passes."""
        return "a" if self.program.leader == "a" else self.program.root.worker

    def look_everywhere(self) -> None:
        """Read and judge all workers."""
        for node in list(self.world.nodes.values()):
            self.look(node)


def shown(gradients: dict[Tensor, Any]) -> tuple[tuple[float, ...], ...]:
    """Turn gradients into plain numbers, to be sent and compared."""
    return tuple(sorted(tuple(np.asarray(each).ravel().tolist()) for each in gradients.values()))


async def numbers(id: CallId, context_id: int, start: int) -> Any:
    """Return the gradients of this worker in a context."""
    enter(id)
    # A worker that was restarted since knows the context only from this very call.
    if here().start_number != start:
        raise UnknownContext(context_id)
    return shown(get_gradients(context_id))


async def lead(id: CallId, xs: list[Tensor]) -> None:
    """Start passes on this worker, in the context of the caller."""
    enter(id)
    trial: Trial = here().world.parts[Trial]
    await trial.lead(xs)


async def wasted(id: CallId, xs: list[Tensor]) -> Tensor:
    """Compute something that depends on x, and that no loss uses."""
    enter(id)
    return xs[0] * 2.0
