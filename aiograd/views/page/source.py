"""Where the snapshots of a page come from: a worker of this process, or a guest of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from aiograd.dist.registry import ContextRegistry
from aiograd.observe import Part
from aiograd.observe.snapshot import Data
from aiograd.rpc.agent import Agent

NODES: Final = 300  # in a picture: more can neither be read nor drawn in a second


class Source(Protocol):
    """What a page asks for."""

    async def snapshot(self) -> Data:
        """Take a snapshot of the cluster."""

    async def stacks(self, names: Sequence[str] | None = None) -> Mapping[str, Any]:
        """Return the stacks of workers, by name."""

    async def logs(self, after: Mapping[str, int]) -> Mapping[str, tuple[int, list[str]]]:
        """Return what workers have written since."""

    async def recording(self, seconds: float) -> Mapping[str, Any]:
        """Record what is called everywhere for some seconds."""


class WorkerSource:
    """A worker of this process and loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._part: Part = agent.parts[Part]

    async def snapshot(self) -> Data:
        """Take a snapshot of the cluster."""
        return await self._part.inspector.ask(None)

    async def stacks(self, names: Sequence[str] | None = None) -> Mapping[str, Any]:
        """Return the stacks of workers, by name."""
        return await self._part.inspector.stacks(names)

    async def logs(self, after: Mapping[str, int]) -> Mapping[str, tuple[int, list[str]]]:
        """Return what workers have written since; nothing where nobody collects it."""
        asked = self._agent.services.get("inspect.logs")
        if asked is None:
            return {}
        found: Mapping[str, tuple[int, list[str]]] = json.loads(asked(self._agent.info, after))
        return found

    async def recording(self, seconds: float) -> Mapping[str, Any]:
        """Record what is called everywhere for some seconds."""
        return await self._part.inspector.record(seconds)

    async def graph(self, context_id: int) -> str | None:
        """Draw a context that this worker has a part of; None if it has none.

        ValueError for one that is too large for a picture.
        """
        registry: ContextRegistry | None = self._agent.parts.get(ContextRegistry)
        context = None if registry is None else registry.find(context_id)
        if context is None:
            return None
        graph = await context.graph()
        if len(graph.nodes) > NODES:
            text = f"{len(graph.nodes)} operations on {len(graph.workers)} workers"
            raise ValueError(f"the graph is too large for a picture: {text}")
        # Off the loop: to place some hundred boxes takes a good part of a second.
        return await asyncio.to_thread(lambda: graph.svg)
