"""Agents in one loop over a memory network, all of them in each other's directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rref import RRefs, attach
from aiograd.wire.handshake import Handshake, Identity

SECRET = b"a secret for tests, 32 bytes lo."


def hello(identity: Identity, secret: bytes = SECRET) -> bytes:
    """Return the first message of a client."""
    return Handshake(identity, secret, os.urandom(32), client=True).start()


def make_agents(count: int, *, options: Options | None, ops: Any = None) -> list[Agent]:
    """Make agents worker0 … on one runtime, not started yet."""
    runtime = Runtime()
    return [
        Agent(f"worker{i}", i, secret=SECRET, options=options, runtime=runtime, ops=ops)
        for i in range(count)
    ]


def introduce(agents: Sequence[Agent]) -> None:
    """Put every agent into the directory of every other one."""
    for agent in agents:
        for other in agents:
            agent.directory.add(other.info)


@asynccontextmanager
async def started(agents: Sequence[Agent], address: Callable[[int], str]) -> AsyncIterator[None]:
    """Start and introduce agents, make the first one current; close them at the end."""
    try:
        for i, agent in enumerate(agents):
            await agent.start(address(i))
        introduce(agents)
        token = scope.use(agents[0])
        try:
            yield
        finally:
            scope.AGENT.reset(token)
    finally:
        for agent in agents:
            await agent.close()


@asynccontextmanager
async def running_agents(
    count: int,
    *,
    options: Options | None = None,
    address: Callable[[int], str] = "memory:{}".format,
    ops: dict[str, Any] | None = None,
) -> AsyncIterator[list[Agent]]:
    """Run `count` agents worker0 …; the first one is current."""
    agents = make_agents(count, options=options, ops=ops)
    async with started(agents, address):
        yield agents


def crash(agent: Agent) -> None:
    """End like a killed process: the listener closes, connections end without a last message."""
    agent.listener.close()
    for link in agent.links.table.values():
        if link.is_open and link.peer.incarnation != agent.incarnation:
            link._detach()  # without an event: the agent itself must not react to it
            link.disconnected = lambda *_: None


@dataclass
class Workers:
    """Agents with references attached; the first one is current."""

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
                    await part.messenger.rest()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until a condition holds; the test's deadline is the limit.

        Unlike `waiting.until`, no timer is involved: a test that counts turns of the loop sees the
        condition in the turn in which it becomes true.
        """
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
    """Run `count` agents with references attached to each."""
    agents = make_agents(count, options=options)
    workers = Workers(agents, [attach(agent) for agent in agents])
    address = addresses.__getitem__ if addresses else "memory:{}".format
    async with started(agents, address):
        try:
            yield workers
        finally:
            for part in workers.parts:
                await part.close()
