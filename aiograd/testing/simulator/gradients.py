"""What simulated programs do with gradients: random expressions spread over workers, differentiated
there and, as the oracle, all on one worker.

Numbers are small integers in floats, so that sums in any order are exactly equal.

    ("x", i)               a tensor of the actor
    ("w", worker, j)       a parameter that lives on a worker
    ("at", worker, e)      e, computed on that worker
    ("add" | "mul", a, b)  ("double", a)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.contexts import context, get_gradients
from aiograd.dist.derivatives import grad
from aiograd.errors import AiogradError, BackwardFailed, ContextError, UnknownContext
from aiograd.rpc.calls import rpc_async
from aiograd.testing.simulator.actors import Act, Actor
from aiograd.testing.simulator.functions import enter, here
from aiograd.testing.simulator.ledger import ANY, CallId, equal

Expression = tuple[Any, ...]
SHAPE = (2, 2)
HEARSAY = 15  # seconds in which those hear of a failure who do not know the originator


def _leaf(number: int) -> Tensor:
    values = np.arange(4.0).reshape(SHAPE) % 3 + number % 3 + 1
    return Tensor(values, requires_grad=True)


def _parameter(name: int) -> Tensor:
    """A parameter of this worker, made when first asked for."""
    shelf = here().shelf
    key = ("parameter", name)
    if key not in shelf:
        shelf[key] = _leaf(name)
    found: Tensor = shelf[key]
    return found


def draw(rng: random.Random, worker: str, names: list[str], depth: int) -> Expression:
    """A random expression to be computed on `worker`."""
    kind = rng.choice(("add", "mul", "double", "at", "at", "x", "w") if depth else ("x", "w"))
    if kind == "x":
        return ("x", rng.randrange(2))
    if kind == "w":
        return ("w", worker, rng.randrange(2))
    if kind == "double":
        return ("double", draw(rng, worker, names, depth - 1))
    if kind == "at":
        other = rng.choice(names)
        return ("at", other, draw(rng, other, names, depth - 1))
    return (kind, draw(rng, worker, names, depth - 1), draw(rng, worker, names, depth - 1))


async def evaluate(id: CallId, expression: Expression, xs: list[Tensor]) -> Tensor:
    """Compute an expression here, and its parts wherever they belong."""
    kind = expression[0]
    if kind == "x":
        return xs[expression[1]]
    if kind == "w":
        return _parameter(expression[2])
    if kind == "at":
        result: Tensor = await rpc_async(expression[1], there, (id, expression[2], xs))
        return result
    if kind == "double":
        return await evaluate((*id, 0), expression[1], xs) * 2.0
    async with asyncio.TaskGroup() as group:
        first = group.create_task(evaluate((*id, 1), expression[1], xs))
        second = group.create_task(evaluate((*id, 2), expression[2], xs))
    a, b = first.result(), second.result()
    return a + b if kind == "add" else a * b


async def there(id: CallId, expression: Expression, xs: list[Tensor]) -> Tensor:
    enter(id)
    return await evaluate((*id, 0), expression, xs)


def oracle(expression: Expression, xs: list[Tensor], ws: dict[tuple[str, int], Tensor]) -> Tensor:
    kind = expression[0]
    if kind == "x":
        return xs[expression[1]]
    if kind == "w":
        return ws.setdefault((expression[1], expression[2]), _leaf(expression[2]))
    if kind == "at":
        return oracle(expression[2], xs, ws)
    if kind == "double":
        return oracle(expression[1], xs, ws) * 2.0
    a, b = oracle(expression[1], xs, ws), oracle(expression[2], xs, ws)
    return a + b if kind == "add" else a * b


async def gradient_of(id: CallId, context_id: int, name: int, start: int) -> Any:
    """The gradient of a parameter of this worker; None if there is none."""
    enter(id)
    if here().start_number != start:  # the call itself has brought the context here
        raise UnknownContext(context_id)
    found = get_gradients(context_id).get(_parameter(name))
    return None if found is None else np.asarray(found)


# ── what actors do ──────────────────────────────────────────────────────────────────────────────


async def backward(actor: Actor) -> None:
    """Build an expression over several workers, play it backwards, compare every gradient."""
    expression = draw(actor.random, actor.node.name, actor.names, actor.random.randint(2, 4))
    passes = actor.random.choice((1, 1, 1, 2))
    xs, copies = [_leaf(0), _leaf(1)], [_leaf(0), _leaf(1)]
    ws: dict[tuple[str, int], Tensor] = {}
    starts = {name: node.start_number for name, node in actor.book.world.nodes.items()}
    async with context() as ctx:
        loss = await _loss(actor, expression, xs)
        if actor.random.random() < 0.3:
            await _waste(actor, xs)
        if loss is None or loss.grad_fn is None:
            return
        oracle(expression, copies, ws).sum().backward()
        for number in range(passes):
            if not await _pass(actor, ctx, loss, retain=passes > 1):
                await _look_after_failure(actor, ctx, ws, number, starts)
                return
        _compare(actor, ctx, xs, copies, passes)
        for (worker, name), copy in sorted(ws.items()):
            expected = None if copy.grad is None else np.asarray(copy.grad) * passes
            args = (ctx.id, name, starts[worker])
            await actor.call(gradient_of, *args, expected=expected, to=worker)


async def _forward(id: CallId, expression: Expression, xs: list[Tensor]) -> Tensor:
    result: Tensor = (await evaluate(id, expression, xs)).sum()
    return result


async def _loss(actor: Actor, expression: Expression, xs: list[Tensor]) -> Any:
    """What the forward pass of a program gives; None if a fault came in between."""
    entry = actor.begin("forward", actor.node.name, actor.book.world.options.timeout)
    return await actor.book.watch(
        entry, lambda: _forward(entry.id, expression, xs), ANY, errors=(ExceptionGroup,)
    )


async def _waste(actor: Actor, xs: list[Tensor]) -> None:
    """Results that nobody uses must not be waited for."""
    to = actor.someone()
    entry = actor.begin("there", to, actor.book.world.options.timeout)
    wasted = draw(actor.random, to, actor.names, 2)
    await actor.book.watch(
        entry,
        lambda: rpc_async(to, there, (entry.id, wasted, xs)),
        ANY,
        errors=(ExceptionGroup,),
    )


async def _pass(actor: Actor, ctx: Any, loss: Tensor, retain: bool) -> bool:
    limit = actor.book.world.options.timeout
    entry = actor.begin("backward", actor.node.name, limit + 2.0)  # the survivors are told
    await actor.book.watch(entry, lambda: ctx.backward(loss, retain_graph=retain), None)
    return entry.outcome == "ok"


async def _look_after_failure(
    actor: Actor,
    ctx: Any,
    ws: dict[tuple[str, int], Tensor],
    earlier: int,
    starts: dict[str, int],
) -> None:
    """Nobody shows a number of a failed pass.

    A worker that only the lost one could have told learns it when it loses that one too, or when
    that one wakes; until then it may show a number. The sum of earlier passes may always be shown.
    """
    limit = actor.book.world.options.timeout
    with contextlib.suppress(BackwardFailed, UnknownContext):
        numbers = ctx.gradients
        actor.book.violated("I3", f"{numbers!r:.100} after a failed pass")
    for (worker, name), copy in sorted(ws.items()):
        before = None if copy.grad is None or not earlier else np.asarray(copy.grad) * earlier
        for _ in range(1 if worker in ctx.known_workers else HEARSAY):
            shown = None
            with contextlib.suppress(AiogradError):
                id = actor.begin("gradient_of", worker, limit).id
                args = (id, ctx.id, name, starts[worker])
                shown = await rpc_async(worker, gradient_of, args)
            if shown is None or equal(shown, before):
                break
            await asyncio.sleep(1.0)
        else:
            actor.book.violated("I3", f"{worker} shows a gradient after a failed pass")


def _compare(actor: Actor, ctx: Any, xs: list[Tensor], copies: list[Tensor], passes: int) -> None:
    try:
        found = ctx.gradients
    except ContextError as error:
        actor.book.violated("I3", f"the pass ended well, but {error!r}")
        return
    for x, copy in zip(xs, copies, strict=True):
        if (x in found) != (copy.grad is not None):
            actor.book.violated("I3", f"a gradient too few or too many: {x in found}")
        elif copy.grad is not None:
            expected = np.asarray(copy.grad) * passes
            if not np.array_equal(np.asarray(found[x]), expected):
                actor.book.violated("I3", f"{found[x]!r:.100} instead of {expected!r:.100}")


async def leave_early(actor: Actor) -> None:
    """A context is left while calls made in it are still under way."""
    expression = draw(actor.random, actor.node.name, actor.names, 3)
    entry = actor.begin("forward", actor.node.name, actor.book.world.options.timeout)
    async with context():
        task = asyncio.ensure_future(
            actor.book.watch(
                entry,
                lambda: _forward(entry.id, expression, [_leaf(0), _leaf(1)]),
                ANY,
                errors=(ExceptionGroup, UnknownContext),
            )
        )
        await asyncio.sleep(actor.random.choice((0.0, 0.001, 0.01)))
    await asyncio.wait([task])


async def cancel_backward(actor: Actor) -> None:
    """A pass is cancelled at some moment; the next one in the same context is right."""
    expression = draw(actor.random, actor.node.name, actor.names, 3)
    xs, copies = [_leaf(0), _leaf(1)], [_leaf(0), _leaf(1)]
    async with context() as ctx:
        loss = await _loss(actor, expression, xs)
        if loss is None or loss.grad_fn is None:
            return
        first = asyncio.ensure_future(ctx.backward(loss, retain_graph=True))
        await asyncio.sleep(actor.random.choice((0.0, 0.0005, 0.001, 0.01)))
        first.cancel()
        await asyncio.wait([first])
        done = not first.cancelled() and first.exception() is None
        if await _pass(actor, ctx, loss, retain=True):
            oracle(expression, copies, {}).sum().backward()
            _compare(actor, ctx, xs, copies, 1 + done)


async def derivative(actor: Actor) -> None:
    """`grad` gives numbers and leaves nothing behind."""
    expression = draw(actor.random, actor.node.name, actor.names, 3)
    xs, copies = [_leaf(0), _leaf(1)], [_leaf(0), _leaf(1)]
    async with context() as ctx:
        loss = await _loss(actor, expression, xs)
        if loss is None or loss.grad_fn is None:
            return
        oracle(expression, copies, {}).sum().backward()
        limit = actor.book.world.options.timeout + 2.0
        entry = actor.begin("grad", actor.node.name, limit)
        found = await actor.book.watch(entry, lambda: grad(loss, xs, allow_unused=True), ANY)
        if found is None:
            return
        for value, copy in zip(found, copies, strict=True):
            expected = None if copy.grad is None else np.asarray(copy.grad)
            got = None if value is None else np.asarray(value)
            if not equal(got, expected):
                actor.book.violated("I3", f"grad gave {got!r:.100}, not {expected!r:.100}")
        if ctx.gradients:
            actor.book.violated("I3", "grad left gradients in the context")


GRADIENTS: list[Act] = [backward, backward, backward, leave_early, cancel_backward, derivative]
