"""Workers in one loop that know each other, with references attached to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rref import RRefs, attach

SECRET = b"a secret for tests, 32 bytes lo."


@dataclass
class Workers:
    """`count` agents worker0 …; the first one is current."""

    agents: list[Agent]
    parts: list[RRefs]

    def __getitem__(self, number: int) -> RRefs:
        return self.parts[number]

    def counters(self) -> list[tuple[int, int]]:
        """(owner_rrefs, user_rrefs) of every worker that is open."""
        return [
            (part.counters()["owner_rrefs"], part.counters()["user_rrefs"])
            for part in self.parts
            if not part.agent.closed
        ]

    async def at_rest(self) -> None:
        """Wait until no worker owns or uses anything; the test's deadline is the limit."""
        while any(map(any, self.counters())):
            for part in self.parts:
                if not part.agent.closed:
                    await part.control.rest()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until something holds; the test's deadline is the limit."""
        while not condition():
            await asyncio.sleep(0)

    async def as_worker(self, number: int, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine function as the user code of another worker."""

        async def run() -> Any:
            scope.use(self.agents[number])
            return await work()

        return await asyncio.create_task(run())


@asynccontextmanager
async def running_workers(
    count: int, *, options: Options | None = None, addresses: list[str] | None = None
) -> AsyncIterator[Workers]:
    runtime = Runtime()
    agents = [
        Agent(f"worker{i}", i, secret=SECRET, options=options, runtime=runtime)
        for i in range(count)
    ]
    parts = [attach(agent) for agent in agents]
    workers = Workers(agents, parts)
    token = scope.use(agents[0])
    try:
        for i, agent in enumerate(agents):
            await agent.start(addresses[i] if addresses else f"memory:{i}")
        for agent in agents:
            for other in agents:
                agent.directory.add(other.info)
        yield workers
    finally:
        scope.AGENT.reset(token)
        for part in parts:
            await part.close()
        for agent in agents:
            await agent.close()


@pytest.fixture
def workers() -> Callable[..., Any]:
    return running_workers
