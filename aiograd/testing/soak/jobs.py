"""The jobs of a soak: each makes a few calls and checks every answer.

A job gets a `Site` and a source of randomness. It returns when everything was right, raises `Wrong`
when something was not, or lets the typed error of a call through. The functions that jobs call on
workers come first; they compute with whole numbers, so that sums are exact in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import Any, Protocol

import numpy as np

from aiograd.autograd.creation import tensor
from aiograd.autograd.tensor import Tensor
from aiograd.dist.registry import context
from aiograd.errors import BackwardFailed, ContextError, DeadlineExceeded
from aiograd.rpc.api import inline, rpc_async, rpc_stream, rpc_sync
from aiograd.rref import RRef, remote

# ── functions that workers run ──────────────────────────────────────────────────────────────────


def double(x: Any) -> Any:
    """Double a value, in a thread."""
    return x + x


@inline
def triple(x: Any) -> Any:
    """Triple a value on the loop, without a task."""
    return 3 * x


async def negative(x: Any) -> Any:
    """Negate a value in a task that awaits once."""
    await asyncio.sleep(0)
    return -x


async def pass_on(to: str, x: Any) -> Any:
    """Double x on a third worker."""
    return await rpc_async(to, double, (x,))


def pass_on_in_thread(to: str, x: Any) -> Any:
    """Double x on a third worker, blocking a thread here."""
    return rpc_sync(to, double, (x,))


def numbers(first: int, count: int) -> np.ndarray:
    """Make an array whose sum is known."""
    return np.arange(first, first + count, dtype=float)


async def total_of(reference: RRef[Any]) -> float:
    """Fetch what a third worker holds, and sum it up."""
    return float((await reference.to_here()).sum())


async def count_to(end: int) -> AsyncIterator[int]:
    """Stream numbers."""
    for number in range(end):
        yield number


async def linger() -> None:
    """Never end within a soak."""
    await asyncio.sleep(3600.0)


def product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply, recorded for a backward pass."""
    return x * w


async def squares_by(to: str, y: Tensor) -> Tensor:
    """The sum of squares, of which a third worker makes the squares."""
    squared: Tensor = await rpc_async(to, product, (y, y))
    total: Tensor = squared.sum()
    return total


# ── jobs ────────────────────────────────────────────────────────────────────────────────────────


class Wrong(Exception):
    """A value, a gradient or an ending that is not what it should be."""


class Site(Protocol):
    """What a job needs of the soak that runs it."""

    names: list[str]
    shelf: list[tuple[RRef[Any], float]]  # references kept for later, with the sum of their values

    async def within(self, seconds: float | None, work: Awaitable[Any]) -> Any:
        """Await something that has so many seconds; note it as late if it takes longer."""


def _check(found: Any, expected: Any, what: str) -> None:
    if not np.array_equal(np.asarray(found), np.asarray(expected)):
        raise Wrong(f"{what}: {found!r} instead of {expected!r}")


async def calls(site: Site, random: Random) -> None:
    """Many small calls of all kinds at once."""
    wanted = []
    for _ in range(40):
        x = random.randrange(1000)
        func, y = random.choice([(double, 2 * x), (triple, 3 * x), (negative, -x)])
        wanted.append((rpc_async(random.choice(site.names), func, (x,)), y))
    # If one fails, the others are still awaited below: their errors must not be lost.
    try:
        for future, y in wanted:
            _check(await site.within(None, future), y, "a small call")
    finally:
        await _all_seen([future for future, _ in wanted])


async def arrays(site: Site, random: Random) -> None:
    """Arrays below and above what travels in one piece, there and back."""
    x = np.arange(random.choice([10, 5_000, 300_000]), dtype=float)
    to = random.choice(site.names)
    _check(await site.within(None, rpc_async(to, double, (x,))), 2 * x, "an array")


async def nested(site: Site, random: Random) -> None:
    """A call that makes a call, on the loop or in a thread."""
    first, second = random.sample(site.names, 2)
    func = random.choice([pass_on, pass_on_in_thread])
    x = random.randrange(1000)
    _check(await site.within(None, rpc_async(first, func, (second, x))), 2 * x, "a nested call")


async def references(site: Site, random: Random) -> None:
    """A value that stays on one worker, is read by another one and by us, and is given back."""
    owner, user = random.sample(site.names, 2)
    first, count = random.randrange(100), random.choice([10, 20_000])
    total = float(numbers(first, count).sum())
    reference = remote(owner, numbers, (first, count))
    shared = rpc_async(user, total_of, (reference,))
    _check(await site.within(None, shared), total, "a shared reference")
    if random.random() < 0.5:
        site.shelf.append((reference, total))
    else:
        _check((await site.within(None, reference.to_here())).sum(), total, "a reference")
        if random.random() < 0.5:
            await site.within(None, reference.release())


async def old_references(site: Site, random: Random) -> None:
    """A reference that was kept for a while: still the same value, or its owner is gone."""
    if site.shelf:
        reference, total = site.shelf.pop(random.randrange(len(site.shelf)))
        _check((await site.within(None, reference.to_here())).sum(), total, "an old reference")


async def streams(site: Site, random: Random) -> None:
    """All items in order, or as many as we want."""
    end, wanted = random.randrange(1, 60), random.randrange(1, 60)
    seen: list[int] = []

    async def read() -> None:
        """Read as many items as are wanted, and leave the stream."""
        stream = rpc_stream(random.choice(site.names), count_to, (end,))
        async with contextlib.aclosing(stream):
            async for item in stream:
                seen.append(item)
                if len(seen) == wanted:
                    break

    await site.within(None, read())
    _check(seen, list(range(min(end, wanted))), "a stream")


async def gradients(site: Site, random: Random) -> None:
    """A backward pass over three workers: exact, or no number at all."""
    first, second, third = random.sample(site.names, 3)
    x = tensor([float(random.randrange(-9, 9)) for _ in range(8)], requires_grad=True)
    w = tensor([float(random.randrange(-9, 9)) for _ in range(8)], requires_grad=True)
    async with context() as ctx:
        y = await site.within(None, rpc_async(first, product, (x, w)))
        z = await site.within(None, rpc_async(second, squares_by, (third, y)))
        a, b = x.numpy(), w.numpy()
        _check(z.numpy(), (a * a * b * b).sum(), "a loss")
        try:
            await site.within(None, ctx.backward(z))
        except BackwardFailed:
            # A failed pass may show no number: `ContextError` is the right answer here.
            with contextlib.suppress(ContextError):
                raise Wrong(f"gradients of a failed pass: {ctx.gradients!r}") from None
            raise
        _check(ctx.gradients[x].numpy(), 2 * a * b * b, "a gradient")
        _check(ctx.gradients[w].numpy(), 2 * b * a * a, "a gradient")


async def deadlines(site: Site, random: Random) -> None:
    """A call that takes too long ends at its deadline."""
    call = rpc_async(random.choice(site.names), linger, timeout=0.3)
    try:
        await site.within(0.3, call)
    except DeadlineExceeded:
        return
    raise Wrong("a call that lingers for an hour returned")


async def cancellations(site: Site, random: Random) -> None:
    """A call that is cancelled early, at a random moment."""
    call = rpc_async(random.choice(site.names), linger)
    await asyncio.sleep(random.uniform(0.0, 0.02))
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def _all_seen(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what has not ended, and retrieve all errors: only the first of them was raised."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


Job = Callable[[Site, Random], Awaitable[None]]
# Jobs and their weights, as `random.choices` takes them.
JOBS: dict[Job, int] = {
    calls: 10,
    arrays: 2,
    nested: 4,
    references: 4,
    old_references: 3,
    streams: 2,
    gradients: 5,
    deadlines: 1,
    cancellations: 1,
}
