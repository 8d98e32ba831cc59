"""Workers in this loop, for tests of how they come, meet and go."""

from __future__ import annotations

import asyncio
import contextvars
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.joining.rendezvous import Rendezvous
from aiograd.cluster.worker import Worker
from aiograd.rpc import scope
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network

T = TypeVar("T")


class World:
    """Makes workers that meet in memory."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._network = Network()
        self._stack = stack

    def worker(
        self,
        name: str,
        rank: int,
        world_size: int | None = None,
        options: Options | None = None,
        join_timeout: float = 10.0,
    ) -> Worker:
        plan = WorkerPlan(
            name=name,
            rank=rank,
            world_size=world_size,
            options=options or Options(grace=2.0, timeout=10.0),
            rendezvous=Rendezvous("memory", "meet"),
            secret=b"0123456789abcdef",
            network=self._network,
            join_timeout=join_timeout,
        )
        worker = Worker.from_plan(plan)
        self._stack.push_async_callback(worker.close, graceful=False)
        return worker

    async def static(self, *names: str, **settings: Any) -> list[Worker]:
        """Start a static world of these workers."""
        workers = [
            self.worker(name, rank, len(names), **settings) for rank, name in enumerate(names)
        ]
        await asyncio.gather(*(worker.start() for worker in workers))
        return workers

    async def open(self, *names: str, **settings: Any) -> list[Worker]:
        """Start workers of an open cluster, one after the other."""
        workers = [self.worker(name, rank, **settings) for rank, name in enumerate(names)]
        for worker in workers:
            await worker.start()
        return workers

    async def run_as(self, worker: Worker, work: Callable[[], Awaitable[T]]) -> T:
        """Run an async function with `worker` as the current one, as if in its own process."""
        context = contextvars.Context()
        context.run(scope.use, worker.agent)

        async def body() -> T:
            return await work()

        return await asyncio.get_running_loop().create_task(body(), context=context)

    async def everyone(self, workers: list[Worker], work: Callable[[], Awaitable[T]]) -> list[T]:
        """Run the same async function on all workers at once."""
        return await asyncio.gather(*(self.run_as(worker, work) for worker in workers))

    async def close(self, workers: list[Worker], **settings: Any) -> None:
        """Let all workers leave at once."""
        await asyncio.gather(*(worker.close(**settings) for worker in workers))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Make a folder with a short path: sockets are not put below the long ones of pytest."""
    with tempfile.TemporaryDirectory(prefix="ag-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)
