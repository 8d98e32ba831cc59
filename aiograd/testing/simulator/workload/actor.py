"""Actors: tasks of user code on simulated nodes, which do random things with a known outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from aiograd.rpc.api import rpc_async
from aiograd.testing.simulator.ledger import CallId, Entry, Ledger
from aiograd.testing.simulator.world import Node

Act = Callable[["Actor"], Awaitable[None]]


class Actor:
    """One task of user code, on one node.

    It draws from a generator of its own, so that faults change what it meets, not what it does.
    """

    ledger: Ledger
    node: Node
    number: int
    names: list[str]

    def __init__(self, ledger: Ledger, node: Node, number: int, names: list[str]) -> None:
        self.ledger, self.node, self.number, self.names = ledger, node, number, names
        self.random: random.Random = random.Random(f"{ledger.world.seed} actor {number}")
        self._calls = 0

    async def run(self, acts: list[Act], count: int) -> None:
        """Do `count` random acts, with pauses that let faults fall between them, too."""
        for _ in range(count):
            await asyncio.sleep(self.random.choice((0.0, 0.001, 0.1, 0.5, 1.0)))
            await self.random.choice(acts)(self)

    # ── making calls ────────────────────────────────────────────────────────────────────────────

    def someone(self) -> str:
        """Draw a worker; it may be this one."""
        return self.random.choice(self.names)

    def others(self, count: int) -> list[str]:
        """Draw several workers, with repetitions."""
        return [self.someone() for _ in range(count)]

    def begin(self, what: str, to: str, timeout: float, quick: bool = True) -> Entry:
        """Make the ledger's entry of a call, with the id that travels with it.

        `quick`: its function needs far less time than it has, so that a timeout needs a reason.
        """
        # Counted per actor, so that faults of one actor's calls do not change the ids of another.
        self._calls += 1
        id: CallId = (self.number, self._calls)
        now = self.ledger.world.loop.time()
        # Nested calls that wait for each other's slot in a small window are late by design.
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
        """Call `func(id, *args)` on a worker, and let the ledger judge it.

        Return its value, or None after an error. `errors` are outcomes that need no reason.
        """
        to = to or self.someone()
        limit = timeout if timeout is not None else self.ledger.world.options.timeout
        entry = self.begin(func.__name__, to, limit, quick)
        return await self.ledger.watch(
            entry,
            lambda: rpc_async(to, func, (entry.id, *args), timeout=timeout),
            expected,
            errors=errors,
        )
