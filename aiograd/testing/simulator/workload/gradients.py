"""What simulated programs do with gradients: differentiate random expressions over workers.

The oracle is the same expression on one worker, with local autograd. Numbers are small integers in
floats, so that sums in any order are exactly equal.

    ("x", i)               a tensor of the actor
    ("w", worker, j)       a parameter that lives on a worker
    ("at", worker, e)      e, computed on that worker
    ("add" | "mul", a, b)  ("double", a)
    ("heavy", seconds, a)  a, whose gradient is computed in a thread for some seconds
    ("shared", worker, e)  e, made and kept by that worker, fetched here through a reference
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.api import grad
from aiograd.dist.registry import context, get_gradients
from aiograd.errors import AiogradError, BackwardFailed, UnknownContext
from aiograd.rpc.api import rpc_async
from aiograd.rref import remote
from aiograd.testing.simulator.invariants import Outcome, disagreement, read
from aiograd.testing.simulator.ledger import ANY, CallId, enter, equal
from aiograd.testing.simulator.workload.actor import Act, Actor
from aiograd.testing.simulator.world import Node, here

Expression = tuple[Any, ...]
SHAPE = (2, 2)


def leaf(number: int) -> Tensor:
    """Make a leaf whose values depend on its number only: the oracle makes the same."""
    values = np.arange(4.0).reshape(SHAPE) % 3 + number % 3 + 1
    return Tensor(values, requires_grad=True)


def parameter(name: int) -> Tensor:
    """Return a parameter of this worker, made at its first use."""
    shelf = here().shelf
    key = ("parameter", name)
    if key not in shelf:
        shelf[key] = leaf(name)
    found: Tensor = shelf[key]
    return found


# Drawn with equal chances. Calls to other workers stand here more than once: edges between workers
# are what is tested.
KINDS = ("add", "mul", "double", "at", "at", "x", "w")
HEAVY = ("add", "mul", "heavy", "heavy", "at", "at", "at", "shared", "w")
SECONDS = (0.0, 0.01, 0.1, 0.4)  # that a heavy gradient takes


def draw(
    rng: random.Random,
    worker: str,
    names: list[str],
    depth: int,
    kinds: tuple[str, ...] = KINDS,
) -> Expression:
    """Draw a random expression to be computed on `worker`."""
    kind = rng.choice(kinds if depth else ("x", "w"))
    if kind == "x":
        return ("x", rng.randrange(2))
    if kind == "w":
        return ("w", worker, rng.randrange(2))
    if kind == "double":
        return ("double", draw(rng, worker, names, depth - 1, kinds))
    if kind == "heavy":
        return ("heavy", rng.choice(SECONDS), draw(rng, worker, names, depth - 1, kinds))
    if kind in ("at", "shared"):
        other = rng.choice(names)
        return (kind, other, draw(rng, other, names, depth - 1, kinds))
    first = draw(rng, worker, names, depth - 1, kinds)
    return (kind, first, draw(rng, worker, names, depth - 1, kinds))


async def evaluate(id: CallId, expression: Expression, xs: list[Tensor]) -> Tensor:
    """Compute an expression here, and its parts on their workers."""
    kind = expression[0]
    if kind == "x":
        return xs[expression[1]]
    if kind == "w":
        return parameter(expression[2])
    if kind == "at":
        result: Tensor = await rpc_async(expression[1], there, (id, expression[2], xs))
        return result
    if kind == "shared":
        made: Tensor = await remote(expression[1], there, (id, expression[2], xs))
        return made
    if kind == "double":
        return await evaluate((*id, 0), expression[1], xs) * 2.0
    if kind == "heavy":
        return heavy(await evaluate((*id, 0), expression[2], xs), expression[1])
    # Both operands at the same time, so that the calls of one forward pass overtake each other.
    async with asyncio.TaskGroup() as group:
        first = group.create_task(evaluate((*id, 1), expression[1], xs))
        second = group.create_task(evaluate((*id, 2), expression[2], xs))
    a, b = first.result(), second.result()
    return a + b if kind == "add" else a * b


def heavy(value: Tensor, seconds: float) -> Tensor:
    """Return the same value; its gradient takes some simulated seconds, in a thread.

    So a fault can fall into the middle of a drain, which takes no simulated time otherwise.
    """
    node = here()
    # A node of its own: a hook on `value` would also slow down its other uses.
    result = value * 1.0
    if result.requires_grad:
        result.register_hook(lambda gradient: node.runtime.threads.sleep(seconds, node.context))
    return result


async def there(id: CallId, expression: Expression, xs: list[Tensor]) -> Tensor:
    """Compute an expression on another worker."""
    enter(id)
    return await evaluate((*id, 0), expression, xs)


def oracle(expression: Expression, xs: list[Tensor], ws: dict[tuple[str, int], Tensor]) -> Tensor:
    """Compute an expression locally; put the parameters that it uses into `ws`."""
    kind = expression[0]
    if kind == "x":
        return xs[expression[1]]
    if kind == "w":
        return ws.setdefault((expression[1], expression[2]), leaf(expression[2]))
    if kind in ("at", "shared", "heavy"):
        return oracle(expression[2], xs, ws)
    if kind == "double":
        return oracle(expression[1], xs, ws) * 2.0
    a, b = oracle(expression[1], xs, ws), oracle(expression[2], xs, ws)
    return a + b if kind == "add" else a * b


async def gradient_of(id: CallId, context_id: int, name: int, start: int) -> Any:
    """Return the gradient of a parameter of this worker; None if there is none."""
    enter(id)
    # A worker that was restarted since knows the context only from this very call.
    if here().start_number != start:
        raise UnknownContext(context_id)
    found = get_gradients(context_id).get(parameter(name))
    return None if found is None else np.asarray(found)


# ── what actors do ──────────────────────────────────────────────────────────────────────────────


async def backward(actor: Actor) -> None:
    """Build an expression over several workers, run it backward, compare every gradient."""
    depth = actor.random.randint(2, 4)
    await _backward(actor, draw(actor.random, actor.node.name, actor.names, depth))


async def heavy_backward(actor: Actor) -> None:
    """Do the same with gradients that take time in threads, while workers are replaced."""
    depth = actor.random.randint(3, 5)
    await _backward(actor, draw(actor.random, actor.node.name, actor.names, depth, HEAVY))


async def _backward(actor: Actor, expression: Expression) -> None:
    passes = actor.random.choice((1, 1, 1, 2))
    xs = [leaf(0), leaf(1)]
    starts = {name: node.start_number for name, node in actor.ledger.world.nodes.items()}
    async with context() as ctx:
        loss = await _loss(actor, expression, xs)
        if actor.random.random() < 0.3:
            await _waste(actor, xs)
        # No graph: the expression was a leaf of the actor, or a fault came before its end.
        if loss is None or loss.grad_fn is None:
            return
        expected = Expected(actor, ctx, expression, xs, starts)
        for number in range(passes):
            if not await _pass(actor, ctx, loss, retain=passes > 1):
                await _look_after_failure(actor, expected, number)
                return
            # Right after the originator knows: a participant may be undecided, but not disagree.
            expected.agree(Outcome.GOOD, number + 1)
        for (worker, name), copy in sorted(expected.ws.items()):
            gradient = None if copy.grad is None else np.asarray(copy.grad) * passes
            await _read_by_call(actor, ctx, worker, (name, starts[worker]), gradient)
        expected.agree(Outcome.GOOD, passes)


class Expected:
    """What every worker should show after the passes of one context.

    `starts` are the starts of all workers before the forward pass: a later one has other leaves.
    """

    actor: Actor
    ctx: Any
    xs: list[Tensor]
    starts: dict[str, int]

    def __init__(
        self,
        actor: Actor,
        ctx: Any,
        expression: Expression,
        xs: list[Tensor],
        starts: dict[str, int],
    ) -> None:
        self.actor, self.ctx, self.xs, self.starts = actor, ctx, xs, starts
        self.copies: list[Tensor] = [leaf(0), leaf(1)]
        self.ws: dict[tuple[str, int], Tensor] = {}
        oracle(expression, self.copies, self.ws).sum().backward()

    def sums(self, node: Node, passes: int) -> dict[Tensor, Any]:
        """Return the gradients of a worker's leaves after some good passes."""
        if not passes:
            return {}
        pairs = [
            (node.shelf.get(("parameter", name)), copy)
            for (worker, name), copy in self.ws.items()
            if worker == node.name
        ]
        if node is self.actor.node:
            pairs += zip(self.xs, self.copies, strict=True)
        return {
            leaf: np.asarray(copy.grad) * passes
            for leaf, copy in pairs
            if leaf is not None and copy.grad is not None
        }

    def agree(self, outcome: Outcome, passes: int) -> None:
        """Check I11: read the gradients of every living worker, at this very moment.

        Without a call, which would piggyback the outcome and hide a worker that did not know it.
        """
        ledger = self.actor.ledger
        for name, node in sorted(ledger.world.nodes.items()):
            same_start = node.start_number == self.starts[name]
            # A worker that was restarted meanwhile has nothing to show of a pass that failed. In a
            # good pass the forward calls may have reached the new start, and what it computed is
            # not known here.
            if not node.alive or not node.parts or not (same_start or outcome is Outcome.FAILED):
                continue
            wrong = disagreement(
                read(node, self.ctx.id),
                outcome,
                self.sums(node, passes) if same_start else {},
                reached=False,  # not known here: sums of earlier passes may be shown
                forgotten=ledger.harm.lossy and node is not self.actor.node,
            )
            if wrong:
                ledger.violated("I11", f"{name} {wrong}")


async def _read_by_call(
    actor: Actor, ctx: Any, worker: str, args: tuple[int, int], expected: Any
) -> None:
    """Check that a call of the originator finds the gradients after a good pass."""
    entry = actor.begin("gradient_of", worker, actor.ledger.world.options.timeout)
    facts = (entry.id, ctx.id, *args)
    await actor.ledger.watch(entry, lambda: rpc_async(worker, gradient_of, facts), expected)
    if entry.outcome == "BackwardFailed":
        actor.ledger.violated("I11", f"{worker} raises BackwardFailed after a good pass")


async def _forward(id: CallId, expression: Expression, xs: list[Tensor]) -> Tensor:
    result: Tensor = (await evaluate(id, expression, xs)).sum()
    return result


async def _loss(actor: Actor, expression: Expression, xs: list[Tensor]) -> Any:
    """Run the forward pass of a program; return None if a fault prevented it."""
    entry = actor.begin("forward", actor.node.name, actor.ledger.world.options.timeout)
    return await actor.ledger.watch(
        entry, lambda: _forward(entry.id, expression, xs), ANY, errors=(ExceptionGroup,)
    )


async def _waste(actor: Actor, xs: list[Tensor]) -> None:
    """Make a result that no loss uses: a pass must not wait for its edges."""
    to = actor.someone()
    entry = actor.begin("there", to, actor.ledger.world.options.timeout)
    wasted = draw(actor.random, to, actor.names, 2)
    await actor.ledger.watch(
        entry,
        lambda: rpc_async(to, there, (entry.id, wasted, xs)),
        ANY,
        errors=(ExceptionGroup,),
    )


async def _pass(actor: Actor, ctx: Any, loss: Tensor, retain: bool) -> bool:
    limit = actor.ledger.world.options.timeout
    # A failed pass raises only when the survivors have been told, which has its own limit.
    entry = actor.begin("backward", actor.node.name, limit + 2.0)
    await actor.ledger.watch(entry, lambda: ctx.backward(loss, retain_graph=retain), None)
    return entry.outcome == "ok"


async def _look_after_failure(actor: Actor, expected: Expected, earlier: int) -> None:
    """Check that no worker shows a number of a failed pass: now, later, or to a call.

    A worker that the pass never reached may show the sum of earlier passes.
    """
    ctx, limit = expected.ctx, actor.ledger.world.options.timeout
    with contextlib.suppress(BackwardFailed, UnknownContext):
        numbers = ctx.gradients
        actor.ledger.violated("I3", f"{numbers!r:.100} after a failed pass")
    expected.agree(Outcome.FAILED, earlier)
    for (worker, name), copy in sorted(expected.ws.items()):
        before = None if copy.grad is None or not earlier else np.asarray(copy.grad) * earlier
        shown = None
        with contextlib.suppress(AiogradError):
            id = actor.begin("gradient_of", worker, limit).id
            args = (id, ctx.id, name, expected.starts[worker])
            shown = await rpc_async(worker, gradient_of, args)
        if shown is not None and not equal(shown, before):
            actor.ledger.violated("I11", f"{worker} shows a gradient after a failed pass")
    expected.agree(Outcome.FAILED, earlier)


async def leave_early(actor: Actor) -> None:
    """Leave a context while calls that were made in it are still under way."""
    expression = draw(actor.random, actor.node.name, actor.names, 3)
    entry = actor.begin("forward", actor.node.name, actor.ledger.world.options.timeout)
    async with context():
        task = asyncio.ensure_future(
            actor.ledger.watch(
                entry,
                lambda: _forward(entry.id, expression, [leaf(0), leaf(1)]),
                ANY,
                errors=(ExceptionGroup, UnknownContext),
            )
        )
        await asyncio.sleep(actor.random.choice((0.0, 0.001, 0.01)))
    await asyncio.wait([task])


async def cancel_backward(actor: Actor) -> None:
    """Cancel a pass at a random moment; the next one in the same context must be right."""
    expression = draw(actor.random, actor.node.name, actor.names, 3)
    xs = [leaf(0), leaf(1)]
    starts = {name: node.start_number for name, node in actor.ledger.world.nodes.items()}
    async with context() as ctx:
        loss = await _loss(actor, expression, xs)
        if loss is None or loss.grad_fn is None:
            return
        expected = Expected(actor, ctx, expression, xs, starts)
        first = asyncio.ensure_future(ctx.backward(loss, retain_graph=True))
        await asyncio.sleep(actor.random.choice((0.0, 0.0005, 0.001, 0.01)))
        first.cancel()
        await asyncio.wait([first])
        # The pass may have ended before it was cancelled; then its gradients count.
        done = not first.cancelled() and first.exception() is None
        expected.agree(Outcome.GOOD if done else Outcome.FAILED, int(done))
        good = await _pass(actor, ctx, loss, retain=True)
        expected.agree(Outcome.GOOD if good else Outcome.FAILED, done + good)


async def derivative(actor: Actor) -> None:
    """Check that `grad` returns the gradients, and leaves none in the context."""
    expression = draw(actor.random, actor.node.name, actor.names, 3)
    xs, copies = [leaf(0), leaf(1)], [leaf(0), leaf(1)]
    async with context() as ctx:
        loss = await _loss(actor, expression, xs)
        if loss is None or loss.grad_fn is None:
            return
        oracle(expression, copies, {}).sum().backward()
        limit = actor.ledger.world.options.timeout + 2.0
        entry = actor.begin("grad", actor.node.name, limit)
        # A random expression need not depend on each x.
        found = await actor.ledger.watch(entry, lambda: grad(loss, xs, allow_unused=True), ANY)
        if found is None:
            return
        for value, copy in zip(found, copies, strict=True):
            expected = None if copy.grad is None else np.asarray(copy.grad)
            got = None if value is None else np.asarray(value)
            if not equal(got, expected):
                actor.ledger.violated("I3", f"grad gave {got!r:.100}, not {expected!r:.100}")
        if ctx.gradients:
            actor.ledger.violated("I3", "grad left gradients in the context")


GRADIENTS: list[Act] = [backward, backward, backward, leave_early, cancel_backward, derivative]
DRAINS: list[Act] = [heavy_backward]
