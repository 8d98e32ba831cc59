"""Agents in one loop, over a memory network, that all know each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime

SECRET = b"a secret for tests, 32 bytes lo."


@asynccontextmanager
async def running_agents(
    count: int,
    *,
    options: Options | None = None,
    address: Callable[[int], str] = "memory:{}".format,
    ops: dict[str, Any] | None = None,
) -> AsyncIterator[list[Agent]]:
    """`count` agents worker0 … that know each other, the first is current; closed at the end."""
    runtime = Runtime()
    agents = [
        Agent(f"worker{i}", i, secret=SECRET, options=options, runtime=runtime, ops=ops)
        for i in range(count)
    ]
    try:
        for i, agent in enumerate(agents):
            await agent.start(address(i))
        for agent in agents:
            for other in agents:
                agent.directory.add(other.info)
        token = scope.use(agents[0])
        try:
            yield agents
        finally:
            scope.AGENT.reset(token)
    finally:
        for agent in agents:
            await agent.close()


running_agents.secret = SECRET  # type: ignore[attr-defined]


def die(agent: Agent) -> None:
    """End as a killed process does: nobody listens any more, connections end without a word."""
    agent._doors.close()
    for link in agent.links.table.values():
        if link.state == "open" and link.peer.incarnation != agent.incarnation:
            link.state = "dead"  # it does nothing any more
            link._detach()


running_agents.die = die  # type: ignore[attr-defined]


@pytest.fixture
def agents() -> Callable[..., Any]:
    return running_agents
