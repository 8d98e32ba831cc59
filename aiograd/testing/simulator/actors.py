"""Programs: actors that live on nodes and do random things whose outcome is known beforehand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from aiograd.rpc.api import Group, rpc_async, rpc_stream
from aiograd.testing.simulator import functions
from aiograd.testing.simulator.ledger import CallId, Entry, Ledger
from aiograd.testing.simulator.world import Node

OVERTAKEN: Final = 6 << 20  # bytes: more chunks than leave before the first of the small calls
CROWD: Final = 5000  # small calls
Act = Callable[["Actor"], Awaitable[None]]


class Actor:
    """One task of user code, on one node."""

    def __init__(self, ledger: Ledger, node: Node, number: int, names: list[str]) -> None:
        self.ledger, self.node, self.number, self.names = ledger, node, number, names
        self.random = random.Random(f"{ledger.world.seed} actor {number}")
        self._calls = 0

    async def run(self, acts: list[Act], count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(self.random.choice((0.0, 0.001, 0.1, 0.5, 1.0)))
            await self.random.choice(acts)(self)

    # ── making calls ────────────────────────────────────────────────────────────────────────────

    def someone(self) -> str:
        return self.random.choice(self.names)

    def others(self, count: int) -> list[str]:
        return [self.someone() for _ in range(count)]

    def begin(self, what: str, to: str, timeout: float, quick: bool = True) -> Entry:
        self._calls += 1
        id: CallId = (self.number, self._calls)
        now = self.ledger.world.loop.time()
        # Nested calls that wait for each other's place in the queue are late by design.
        quick = quick and self.ledger.world.options.max_inflight > 64
        return Entry(id, self.node, to, what, timeout, now, quick)

    async def call(
        self,
        func: Callable[..., Any],
        *args: Any,
        expected: Any,
        to: str | None = None,
        timeout: float | None = None,
        quick: bool = True,
        errors: tuple[type[BaseException], ...] = (),
    ) -> Any:
        to = to or self.someone()
        limit = timeout if timeout is not None else self.ledger.world.options.timeout
        entry = self.begin(func.__name__, to, limit, quick)
        return await self.ledger.watch(
            entry,
            lambda: rpc_async(to, func, (entry.id, *args), timeout=timeout),
            expected,
            errors=errors,
        )


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


async def small_calls(actor: Actor) -> None:
    to = actor.someone()
    values = [actor.random.randrange(1000) for _ in range(actor.random.randint(1, 6))]
    async with asyncio.TaskGroup() as group:
        for value in values:
            seconds = actor.random.choice((0.0, 0.0, 0.01, 0.5))
            group.create_task(actor.call(functions.work, value, seconds, expected=value, to=to))


async def large_call(actor: Actor) -> None:
    size = actor.random.choice((100, 20_000, 300_000))
    array = np.arange(size, dtype=np.float64) + actor.random.randrange(100)
    await actor.call(functions.work, array, 0.0, expected=array)


async def overtaken_call(actor: Actor) -> None:
    """A large call, and thousands of small ones that overtake it on the same link."""
    to, timeout = actor.someone(), actor.ledger.world.options.timeout
    array = np.zeros(OVERTAKEN, np.uint8)
    large, crowd = actor.begin("measure", to, timeout), actor.begin("same", to, timeout)
    begun: list[Any] = []

    def begin() -> Any:
        future = rpc_async(to, functions.measure, (large.id, array))
        begun.append(Group([to]).map(functions.same, range(CROWD)))  # before any of it is sent
        return future

    await actor.ledger.watch(large, begin, OVERTAKEN)
    if begun:
        await actor.ledger.watch(crowd, begun.pop, list(range(CROWD)))


async def plain_call(actor: Actor) -> None:
    value = actor.random.randrange(1000)
    await actor.call(functions.plain, value, expected=value + 1)


async def failing_call(actor: Actor) -> None:
    await actor.call(functions.fail, "on purpose", expected=None, errors=(functions.Boom,))


async def nested_call(actor: Actor) -> None:
    path = actor.others(actor.random.randint(1, 4))
    func = actor.random.choice((functions.chain, functions.chain_in_threads))
    await actor.call(func, path, 5, expected=5 + len(path))


async def wide_call(actor: Actor) -> None:
    names = actor.others(actor.random.randint(1, 4))
    value = actor.random.randrange(100)
    # What fails inside comes as a group, whose members are judged one by one.
    to = actor.someone()
    entry = actor.begin("fan_out", to, actor.ledger.world.options.timeout)
    await actor.ledger.watch(
        entry,
        lambda: rpc_async(to, functions.fan_out, (entry.id, names, value)),
        value * len(names),
        errors=(ExceptionGroup,),
    )


async def late_call(actor: Actor) -> None:
    timeout = actor.random.choice((0.05, 0.3, 1.0))
    await actor.call(functions.work, 1, timeout * 20, expected=None, timeout=timeout, quick=False)


async def cancelled_call(actor: Actor) -> None:
    to, seconds, timeout = actor.someone(), 3.0, actor.ledger.world.options.timeout
    # Work that takes all the time it has may be done in time or not.
    entry = actor.begin("work", to, timeout, quick=2 * seconds <= timeout)
    task = asyncio.ensure_future(
        actor.ledger.watch(entry, lambda: rpc_async(to, functions.work, (entry.id, 1, seconds)), 1)
    )
    await asyncio.sleep(actor.random.choice((0.0, 0.001, 0.002, 0.5, 2.999, 3.001)))
    task.cancel()
    await asyncio.wait([task])


async def read_stream(actor: Actor) -> None:
    """All of a stream, or only its beginning."""
    to, numbers = actor.someone(), actor.random.choice((0, 1, 5, 30))
    until = actor.random.choice((0, 3, 100, 100))
    options = actor.ledger.world.options
    entry = actor.begin("count", to, options.timeout * (numbers + 2))
    entry.patient = True
    func: Any = functions.count
    args: tuple[Any, ...] = (entry.id, numbers, actor.random.choice((0.0, 0.0, 0.001, 0.05)))
    if actor.random.random() < 0.3:
        func, args = functions.count_in_thread, args[:2]

    async def read() -> list[int]:
        got: list[int] = []
        async with rpc_stream(to, func, args) as stream:
            async for number in stream:
                got.append(number)
                if len(got) > until:
                    break
        return got

    await actor.ledger.watch(entry, read, list(range(min(numbers, until + 1))))


CALLS: list[Act] = [
    small_calls,
    small_calls,
    large_call,
    plain_call,
    failing_call,
    nested_call,
    wide_call,
    late_call,
    cancelled_call,
    read_stream,
]
